"""Tests of `chunked_cross_entropy`: accuracy, peak memory, offloaded weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.fake_accelerator import FakeAccelerator
from support.small import ON_DEVICE, SmallModel, batch, masters, small_engine
from support.trainer import LiveBytes
from torch import Tensor

from infinity.errors import TrainingError
from infinity.losses import chunked_cross_entropy

VOCABULARY, WIDTH, TOKENS = 97, 24, 41


def full_logits_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    softcap: float | None = None,
    **options: Any,
) -> Tensor:
    """Compute the cross entropy with all logits at once."""
    logits = F.linear(hidden, weight, bias).float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), **options)


def values(dtype: torch.dtype, *, bias: bool = False) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(0)
    tensors = [torch.randn(TOKENS, WIDTH), torch.randn(VOCABULARY, WIDTH) * 0.3]
    if bias:
        tensors.append(torch.randn(VOCABULARY))
    labels = torch.randint(0, VOCABULARY, (TOKENS,))
    labels[3] = labels[17] = labels[40] = -100
    return [t.to(dtype).requires_grad_() for t in tensors], labels


def sinh_transform(logits: Tensor) -> Tensor:
    return torch.sinh(logits / 4)


def result_pairs(
    dtype: torch.dtype, size: int, *, bias: bool = False, **options: Any
) -> list[tuple[Tensor, Tensor]]:
    """Return (chunked, torch fp64 reference) pairs of the loss and of every gradient."""
    tensors, labels = values(dtype, bias=bias)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    bias_argument = {"bias": tensors[2]} if bias else {}
    if "transform" in options:
        options["transform"] = sinh_transform
    actual = chunked_cross_entropy(
        tensors[0], tensors[1], labels, chunk_size=size, **bias_argument, **options
    )
    logits = options.pop("transform", lambda x: x)(F.linear(*exact))
    cap, z_loss = options.pop("softcap", None), options.pop("z_loss", 0.0)
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    squares = logits[labels != -100].logsumexp(1).square()
    expected = F.cross_entropy(logits, labels, **options) + z_loss * squares.mean()
    (actual * 3).backward()
    (expected * 3).backward()
    pairs = [(t.grad, e.grad) for t, e in zip(tensors, exact, strict=True)]
    return [(actual, expected), *((a, b) for a, b in pairs if a is not None and b is not None)]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"reduction": "sum"},
    {"label_smoothing": 0.1},
    {"softcap": 5.0},
    {"bias": True},
    {"z_loss": 0.05},
    {"transform": "bent", "z_loss": 0.05, "label_smoothing": 0.1, "bias": True},
    {"softcap": 3.0, "label_smoothing": 0.2, "bias": True, "ignore_index": 5},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("size", [1, 7, 41, 1000])
def test_fp32_matches_torch(size: int, options: dict[str, Any]) -> None:
    pairs = result_pairs_with_ignore_index(torch.float32, size, options)
    for actual, expected in pairs:
        allowed = 2e-6 * float(expected.detach().abs().max())
        assert float((actual.detach().double() - expected.detach()).abs().max()) <= allowed


def result_pairs_with_ignore_index(
    dtype: torch.dtype, size: int, options: dict[str, Any]
) -> list[tuple[Tensor, Tensor]]:
    """Like `result_pairs`, also for another `ignore_index`, where -100 marks no labels."""
    if "ignore_index" not in options:
        return result_pairs(dtype, size, **options)
    tensors, labels = values(dtype, bias=True)
    labels[labels < 0] = 5
    exact = [t.detach().double().requires_grad_() for t in tensors]
    loss_options = {k: v for k, v in options.items() if k not in ("bias", "softcap")}
    actual = chunked_cross_entropy(
        tensors[0], tensors[1], labels, bias=tensors[2], chunk_size=size,
        softcap=options["softcap"], **loss_options,
    )  # fmt: skip
    cap = options["softcap"]
    logits = cap * torch.tanh(F.linear(exact[0], exact[1], exact[2]) / cap)
    expected = F.cross_entropy(logits, labels, **loss_options)
    actual.backward()
    expected.backward()
    pairs = [(actual, expected)]
    for tensor, exact_tensor in zip(tensors, exact, strict=True):
        assert tensor.grad is not None
        assert exact_tensor.grad is not None
        pairs.append((tensor.grad, exact_tensor.grad))
    return pairs


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.bfloat16, 0.012), (torch.float16, 0.002)])
@pytest.mark.parametrize("size", [16, 64])
def test_half_precision_error_comparable_to_full_logits(
    size: int, dtype: torch.dtype, allowed: float
) -> None:
    """Errors against fp64 are at most twice those of plain torch in the same dtype."""
    tensors, labels = values(dtype)
    torch_tensors = [t.detach().clone().requires_grad_() for t in tensors]
    full_logits_loss(torch_tensors[0], torch_tensors[1], labels).mul(3).backward()
    pairs = result_pairs(dtype, size)
    assert abs(float(pairs[0][0]) - float(pairs[0][1])) < allowed
    for (actual, exact), torch_tensor in zip(pairs[1:], torch_tensors, strict=True):
        assert actual.dtype is dtype
        scale = float(exact.abs().max())
        error = float((actual.double() - exact).abs().max()) / scale
        assert torch_tensor.grad is not None
        assert error < allowed
        assert error < 2 * float((torch_tensor.grad.double() - exact).abs().max()) / scale + 1e-4


def test_fp16_small_gradients_do_not_underflow() -> None:
    """The division by the token count comes last, after the loss scale."""
    torch.manual_seed(0)
    hidden = torch.randn(4096, 8, dtype=torch.float16, requires_grad=True)
    weight = (torch.randn(4096, 8) * 0.01).half().requires_grad_()
    labels = torch.randint(0, 4096, (4096,))
    loss = chunked_cross_entropy(hidden, weight, labels, chunk_size=512)
    (loss * 65536).backward()
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    (full_logits_loss(exact[0], exact[1], labels) * 65536).backward()
    for actual, expected in zip((hidden, weight), exact, strict=True):
        assert actual.grad is not None
        assert expected.grad is not None
        error = (actual.grad.double() - expected.grad).norm() / expected.grad.norm()
        assert float(error) < 5e-3


def test_loss_without_labels_is_nan_with_zero_gradients() -> None:
    """As in torch, so that a micro-batch of a window without labels changes nothing."""
    (hidden, weight), labels = values(torch.float32)
    loss = chunked_cross_entropy(hidden, weight, torch.full_like(labels, -100), chunk_size=16)
    loss.backward()
    assert loss.isnan()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert not hidden.grad.any()
    assert not weight.grad.any()


@pytest.mark.parametrize("label", [-1, VOCABULARY])
def test_label_outside_vocabulary_raises(label: int) -> None:
    (hidden, weight), labels = values(torch.float32)
    labels[5] = label
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        chunked_cross_entropy(hidden, weight, labels, chunk_size=16)


def test_only_requested_gradients_computed() -> None:
    tensors, labels = values(torch.float32)
    hidden, weight = tensors
    loss = chunked_cross_entropy(hidden.detach(), weight, labels, chunk_size=8)
    (gradient,) = torch.autograd.grad(loss, weight)
    (expected,) = torch.autograd.grad(full_logits_loss(hidden.detach(), weight, labels), weight)
    assert torch.allclose(gradient, expected, atol=1e-6)
    loss = chunked_cross_entropy(hidden, weight.detach(), labels, chunk_size=8)
    loss.backward()
    assert hidden.grad is not None
    with torch.no_grad():
        assert not chunked_cross_entropy(hidden, weight, labels).requires_grad
    none = torch.full_like(labels, -100)
    assert torch.isnan(chunked_cross_entropy(hidden, weight, none))
    assert float(chunked_cross_entropy(hidden, weight, none, reduction="sum")) == 0.0


def test_batched_input_shape_and_autocast_dtype() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(2, 9, WIDTH, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, requires_grad=True)
    labels = torch.randint(0, VOCABULARY, (2, 9))
    loss = chunked_cross_entropy(hidden, weight, labels, chunk_size=4)
    loss.backward()
    assert hidden.grad is not None
    assert hidden.grad.shape == hidden.shape
    assert torch.allclose(loss, full_logits_loss(hidden, weight, labels))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = chunked_cross_entropy(hidden, weight, labels, chunk_size=4)
        expected = full_logits_loss(hidden, weight, labels)
    assert cast.dtype is torch.float32
    assert torch.allclose(cast, expected, rtol=1e-2)


def test_peak_memory_bounded_by_one_chunk_of_logits() -> None:
    tokens, vocabulary, width, size = 512, 2000, 16, 32
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    labels = torch.randint(0, vocabulary, (tokens,))
    peaks = {}
    for name in ("plain", "chunked"):
        with LiveBytes() as live:
            if name == "plain":
                loss = full_logits_loss(hidden, weight, labels)
            else:
                loss = chunked_cross_entropy(hidden, weight, labels, chunk_size=size)
            loss.backward()
        peaks[name] = live.peak
        hidden.grad = weight.grad = None
    logits, inputs = tokens * vocabulary * 4, (tokens + vocabulary) * width * 4
    chunk = size * vocabulary * 4
    assert peaks["plain"] > 2 * logits
    assert peaks["chunked"] < 4 * chunk + 4 * inputs
    assert peaks["chunked"] < peaks["plain"] / 5


class Chunked(SmallModel):
    """Model whose forward reads the weight of its tied head."""

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.features(tokens)[:, :-1]
        return chunked_cross_entropy(hidden, self.head.weight, tokens[:, 1:], chunk_size=5)


@pytest.mark.parametrize("kind", ["cpu", "fake"])
def test_engine_with_offloaded_head_weight(tmp_path: Path, kind: str) -> None:
    results: list[tuple[list[float], dict[str, Tensor]]] = []
    for model, placement in ((SmallModel, ON_DEVICE), (Chunked, ON_DEVICE), (Chunked, None)):
        torch.manual_seed(0)
        fake = placement is None and kind == "fake"
        arguments = {"device": FakeAccelerator(1)} if fake else {"device": "cpu"}
        with small_engine(tmp_path, placement, model(), arguments=arguments) as engine:
            losses = []
            for index in range(4):
                loss = engine(batch(index))
                engine.backward(loss)
                engine.step()
                losses.append(float(loss.detach()))
            results.append((losses, masters(engine)))
            if placement is None:
                assert engine.last_report is not None
                assert engine.last_report.moved == engine.forecast()
    plain_run, chunked, offloaded = results
    assert chunked[0] == offloaded[0]
    assert all(torch.equal(chunked[1][n], offloaded[1][n]) for n in chunked[1])
    assert chunked[0] == pytest.approx(plain_run[0], rel=1e-5)
    assert chunked[0][-1] < chunked[0][0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(5, 7)}, "does not fit weight"),
        ({"labels": torch.zeros(3, dtype=torch.long)}, "does not fit labels"),
        ({"labels": torch.zeros(4)}, "not indices"),
        ({"bias": torch.zeros(3)}, "bias"),
        ({"chunk_size": 0}, "chunk_size"),
        ({"reduction": "none"}, "reduction"),
        ({"weight": torch.zeros(5, 6).bfloat16()}, "cast"),
    ],
)
def test_invalid_arguments_rejected(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "hidden": torch.zeros(4, 6),
        "weight": torch.zeros(5, 6),
        "labels": torch.zeros(4, dtype=torch.long),
    }
    with pytest.raises(TrainingError, match=message):
        chunked_cross_entropy(**{**arguments, **change})

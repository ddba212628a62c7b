"""Tests of `activations.logits: chunked`: results close to full logits, without storing them.

Close, not equal, because chunks are other matrix products than all tokens at once. Bitwise equal
in every placement. Unsupported uses materialize the full logits, and then results equal theirs.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from support.families import DECODER, FAMILIES, VOCABULARY, Batch, Family, causal
from support.grids import diagonal
from support.models import CASES
from support.trainer import PAIRED, SIMPLEST, Run, make_config, make_device, train
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import infinity
from infinity.config.schema import load_config
from infinity.errors import EngineClosedError, InfinityWarning
from infinity.integrations.huggingface.models import choose_logits
from infinity.offload import sliced_logits
from infinity.offload.sliced_logits import Logits, find_heads
from infinity.train.settings import load_run_config

CHUNK = 5  # tokens
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ON_DISK = ("disk", "disk", "disk")


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sliced_logits, "CHUNK_TOKENS", CHUNK)  # or half of it


def family(name: str, config: str, **overrides: Any) -> Family:
    return Family("decoder", name, lambda: getattr(hf, config)(**{**DECODER, **overrides}), causal)


LLAMA = FAMILIES["llama"]
MODELS = {
    "llama": LLAMA,
    "gpt2, tied": FAMILIES["gpt2"],
    "gemma2, soft cap": family("Gemma2ForCausalLM", "Gemma2Config", query_pre_attn_scalar=8,
                               final_logit_softcapping=0.5),
    "granite, divided": family("GraniteForCausalLM", "GraniteConfig", logits_scaling=3.0),
    "cohere, multiplied": family("CohereForCausalLM", "CohereConfig", logit_scale=0.3),
    "phi, bias": family("PhiForCausalLM", "PhiConfig", tie_word_embeddings=False),
}  # fmt: skip


def run(
    model: nn.Module,
    logits: str,
    placement: tuple[str, str, str] = SIMPLEST,
    device: str = "cpu",
    **overrides: Any,
) -> Run:
    config = make_config(placement, activations={"logits": logits}, **overrides)
    return Run(model, config, device=make_device(device))


class LossAndGradients:
    """Loss and gradients of one batch, and the warnings about logits."""

    def __init__(self, engine: Any, loss_of: Callable[[Any, Batch], Tensor], batch: Batch) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss = loss_of(engine, batch)
            engine.backward(loss)
        self.messages = [str(w.message) for w in caught if w.category is InfinityWarning]
        self.loss = loss.detach()
        self.gradients = {n: engine.gradient(p) for n, p in engine.module.named_parameters()}

    def assert_near(self, other: LossAndGradients, tolerance: float) -> None:
        assert self.loss.dtype is other.loss.dtype
        torch.testing.assert_close(self.loss, other.loss, rtol=tolerance, atol=0)
        for name, value in self.gradients.items():
            expected = other.gradients[name].float()
            assert float((value.float() - expected).norm() / expected.norm()) < tolerance, name


def run_full_and_chunked(
    model_family: Family, loss_of: Callable[[Any, Batch], Tensor], precision: str = "fp32"
) -> tuple[LossAndGradients, LossAndGradients]:
    """Run with full logits and with chunked ones."""
    found = []
    overrides = {"loss_scale": {"value": 128.0}} if precision == "fp16" else {}
    for logits in ("whole", "sliced"):
        with run(
            model_family.build(DTYPES[precision]), logits, precision=precision, **overrides
        ) as one:
            found.append(LossAndGradients(one.engine, loss_of, model_family.batches(1)[0]))
    return found[0], found[1]


def transformers_loss(engine: Any, batch: Batch) -> Tensor:
    """Compute the loss as transformers does, with half of the labels ignored."""
    labels = batch["labels"].clone()
    labels[:, 1::2] = -100
    loss: Tensor = engine(**{**batch, "labels": labels}).loss
    return loss


def user_loss(engine: Any, batch: Batch) -> Tensor:
    """Compute the loss after the call, in the dtype of the logits, with label smoothing."""
    logits = engine(input_ids=batch["input_ids"]).logits
    labels = batch["labels"][:, 1:].reshape(-1)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels, label_smoothing=0.1)


TOLERANCES = {"fp32": 1e-5, "bf16": 4e-2, "fp16": 4e-3}


@pytest.mark.parametrize(
    ("name", "precision", "loss_of"),
    diagonal([*MODELS], [*TOLERANCES], [transformers_loss, user_loss]),
)
def test_chunked_loss_close_to_full_logits(
    name: str, precision: str, loss_of: Callable[[Any, Batch], Tensor]
) -> None:
    full, chunked = run_full_and_chunked(MODELS[name], loss_of, precision)
    chunked.assert_near(full, TOLERANCES[precision])
    assert chunked.messages == full.messages == []


@pytest.mark.parametrize(
    ("placement", "case", "device", "precision"),
    diagonal(PAIRED, ["gpt", "encoder_decoder"], ["fake", "cpu", "fake"], ["fp32", "bf16"]),
)
def test_chunked_logits_bitwise_equal_across_placements(
    placement: tuple[str, str, str], case: str, device: str, precision: str
) -> None:
    """With a tied and an untied head; the bytes moved equal the forecast."""
    found = []
    for current_placement, kind in ((SIMPLEST, "cpu"), (placement, device)):
        config = make_config(
            current_placement, precision=precision, activations={"logits": "chunked"}
        )
        model, batches = CASES[case].build(), CASES[case].batches(3)
        found.append(train(model, batches, config, device=make_device(kind)))
    assert found[1].differences(found[0]) == []
    assert found[1].report is not None
    assert found[1].report.moved == found[1].forecast


class LargestTensor(TorchDispatchMode):
    """Records the largest number of elements of a tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(
        self, call: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = call(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            real = isinstance(tensor, Tensor) and not isinstance(tensor, Logits)
            if real and tensor.is_floating_point() and not tensor.is_meta:  # slots have dtype uint8
                self.numel = max(self.numel, tensor.numel())
        return made


@pytest.mark.parametrize("name", ["llama", "gemma2, soft cap"])
def test_no_tensor_has_full_logits_size(name: str) -> None:
    tokens, vocabulary, largest = 64, 640, {}
    facts = MODELS[name].config()
    facts.vocab_size, facts.max_position_embeddings = vocabulary, tokens
    ids = torch.randint(3, vocabulary, (1, tokens))
    for logits in ("whole", "sliced"):
        model = getattr(hf, MODELS[name].model)._from_config(facts).train()
        with run(model, logits) as one, LargestTensor() as largest[logits]:
            output = one.engine(input_ids=ids, labels=ids)
            one.engine.backward(output.loss)
            assert output.logits.shape == (1, tokens, vocabulary)
            hidden = [weakref.ref(t.recipe.hidden) for t in [output.logits] if type(t) is Logits]
            del output
            assert [ref() for ref in hidden] in ([], [None]), "freed without the garbage collector"
    assert largest["whole"].numel == tokens * vocabulary
    assert largest["sliced"].numel == vocabulary * facts.hidden_size  # the gradient of the head


def with_z_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels) + 1e-2 * logits.logsumexp(-1).square().mean()


def label_smoother(logits: Tensor, labels: Tensor) -> Tensor:
    return -F.log_softmax(logits, -1).gather(1, labels[:, None]).mean()


def changed_in_place(logits: Tensor, labels: Tensor) -> Tensor:
    """Edit logits: a copy made before keeps the old values, a view shows the new ones."""
    copy, view = logits * 2, logits[:6]
    logits[:, 3] = -1e4
    late = F.cross_entropy(logits, labels.clamp(min=4)) + F.cross_entropy(view, labels[:6])
    return late + F.cross_entropy(copy, labels)


def weighted(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, weight=torch.linspace(0.1, 1, VOCABULARY))


def token_by_token(logits: Tensor, labels: Tensor) -> Tensor:
    return (F.cross_entropy(logits, labels, reduction="none") * labels).mean()


@pytest.mark.parametrize(
    "loss_of", [with_z_loss, label_smoother, changed_in_place, weighted, token_by_token]
)
@pytest.mark.parametrize("name", ["gemma2, soft cap", "phi, bias"])
def test_unsupported_use_materializes_logits_with_one_warning(
    name: str, loss_of: Callable[[Tensor, Tensor], Tensor]
) -> None:
    def compute(engine: Any, batch: Batch) -> Tensor:
        for _ in range(2):
            logits = engine(input_ids=batch["input_ids"]).logits.float()
            loss = loss_of(logits[:, :-1].reshape(-1, VOCABULARY), batch["labels"][:, 1:].flatten())
        return loss

    full, chunked = run_full_and_chunked(MODELS[name], compute)
    chunked.assert_near(full, 1e-5)
    assert full.messages == []
    (message,) = chunked.messages
    assert "'lm_head'" in message


def test_logits_values_and_gradients_are_readable() -> None:
    def compute(engine: Any, batch: Batch) -> Tensor:
        logits = engine(input_ids=batch["input_ids"]).logits
        flat, labels = logits.view(-1, VOCABULARY), batch["labels"].flatten()
        assert not F.cross_entropy(flat.detach(), labels).requires_grad
        leaf = flat.detach().requires_grad_()
        F.cross_entropy(leaf, labels).backward()
        seen.append([leaf.grad, logits.detach().numpy(), torch.tensor(logits.tolist())])
        seen[-1].append(logits.clone().argmax(-1))
        logits.register_hook(lambda gradient: seen[-1].append(gradient))
        return F.cross_entropy(flat, labels)

    seen: list[list[Any]] = []
    full, chunked = run_full_and_chunked(LLAMA, compute)
    chunked.assert_near(full, 1e-5)
    assert len(seen[0]) == 5
    for one, other in zip(*seen, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_loss_after_call_fetches_head_from_disk(device: str) -> None:
    found = []
    for logits in ("whole", "sliced"):
        with run(LLAMA.build(), logits, ON_DISK, device, prefetch_units=0) as one:
            losses = []
            for batch in LLAMA.batches(3):
                loss = user_loss(one.engine, batch)
                one.engine.backward(loss)
                one.engine.step()
                losses.append(float(loss.detach()))
            found.append(losses)
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_logits_after_update_or_close_raise() -> None:
    (batch,) = LLAMA.batches(1)
    with run(LLAMA.build(), "sliced", ON_DISK) as one:
        output = one.engine(**batch)
        one.engine.backward(output.loss)
        one.engine.step()
        with pytest.raises(RuntimeError, match="updated before its logits were computed"):
            output.logits.argmax()
        output = one.engine(**batch)
    with pytest.raises(EngineClosedError):
        output.logits.argmax()


def test_small_eval_or_autocast_logits_are_tensors() -> None:
    (batch,) = ({n: t[:1, :CHUNK] for n, t in g.items()} for g in LLAMA.batches(1))
    with run(LLAMA.build(), "sliced") as one:
        with torch.no_grad():
            assert type(one.engine(**batch).logits) is Tensor
        assert type(one.engine(**batch).logits) is Logits
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert type(one.engine(**batch).logits) is Tensor
        one.engine.eval()
        assert type(one.engine(**batch).logits) is Tensor


def test_eval_loss_is_chunked_and_reading_logits_does_not_warn() -> None:
    tokens, vocabulary = 64, 640
    facts = LLAMA.config()
    facts.vocab_size, facts.max_position_embeddings = vocabulary, tokens
    ids = torch.randint(3, vocabulary, (1, tokens))
    model = getattr(hf, LLAMA.model)._from_config(facts)
    with run(model, "sliced") as one, torch.no_grad():
        one.engine.eval()
        with LargestTensor() as largest:
            loss = one.engine(input_ids=ids, labels=ids).loss
        assert largest.numel < tokens * vocabulary
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            logits = one.engine(input_ids=ids).logits + 0.0
        expected = F.cross_entropy(logits[0, :-1], ids[0, 1:])
        assert torch.isclose(loss, expected, rtol=1e-5)


def test_heads_are_detected_and_restored() -> None:
    model: Any = MODELS["gpt2, tied"].build()
    assert find_heads(nn.Sequential(model)) == {"0.lm_head": model.lm_head}
    plain: Any = CASES["gpt"].build()
    assert find_heads(plain) == {"head": plain.head}
    assert find_heads(nn.Linear(3, 4)) == {}
    with run(plain, "sliced"):
        assert "forward" in vars(plain.head)
        assert find_heads(plain) == {}  # wrapped by another engine or by the user
    assert "forward" not in vars(plain.head)
    with run(CASES["gpt"].build(), "auto") as one:
        assert find_heads(one.model)


def test_causal_lm_entry_points_default_to_chunked_logits() -> None:
    causal_model, other = LLAMA.build(), FAMILIES["bert"].build()
    for built, overrides, expected in (
        (causal_model, {}, "chunked"),
        (nn.ModuleDict({"wrapped": causal_model}), {}, "chunked"),
        (causal_model, {"activations": {"logits": "full"}}, "full"),
        (other, {}, "auto"),
    ):
        assert choose_logits(built, load_config(overrides)).activations.logits == expected
    run_config = {
        "run_dir": "r",
        "model": {"config": {"model_type": "gpt2"}},
        "data": {"train": "t"},
    }
    assert load_run_config(run_config).engine_for("auto").activations.logits == "chunked"
    overrides = {**run_config, "engine": {"activations": {"logits": "full"}}}
    assert load_run_config(overrides).engine_for("auto").activations.logits == "full"
    settings = {"precision": "fp32", "placement": {"weights": "device"}}
    with infinity.from_config(LLAMA.config(), settings)[0] as engine:
        assert type(engine(**LLAMA.batches(1)[0]).logits) is Logits

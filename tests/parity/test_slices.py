"""Tests of `activations.slices`: results, bytes fetched, and blocks that cannot be sliced.

Bitwise equal to plain torch whose blocks run the same slices (`Sliced`, below), each with a copy
of the weights whose gradients are added in fp32, with and without recomputation and in every
placement; and, for blocks alone, to the same slices as micro-batches. Close, but not equal, to the
same batch at once, because of the head.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from support.grids import diagonal
from support.internals import components
from support.models import VOCAB, WIDTH, Batch, Case, Gpt, Stacked, StackedBlock
from support.slices import in_slices
from support.trainer import Result, Run, make_config, make_device, train, train_reference
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from infinity.errors import TrainingError

ON_DISK = ("disk", "disk", "disk")
ROWS, LENGTH = 6, 8


def ids(index: int, rows: int = ROWS) -> Tensor:
    generator = torch.Generator().manual_seed(index)
    return torch.randint(0, VOCAB, (rows, LENGTH), generator=generator)


def batches(count: int = 3) -> list[Batch]:
    return [Batch((ids(index),)) for index in range(count)]


class Sliced(nn.Module):
    """Plain-torch block that runs a batch slice by slice."""

    def __init__(self, block: Any, size: int, *, recompute: bool) -> None:
        super().__init__()
        self.block = block
        self.size = size
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)

    def run(self, x: Tensor) -> Tensor:
        slice_args = [(part,) for part in x.split(self.size)]
        checkpointed = partial(partial, checkpoint, use_reentrant=False)
        return torch.cat(
            in_slices(self.block, slice_args, checkpointed if self.recompute else partial)
        )


def build(slices: int = 0, *, recompute: bool = False) -> nn.Module:
    """Build the small GPT, with sliced blocks in plain torch if `slices` is set."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Gpt()
    if slices:
        size = -(-ROWS // slices)
        model.blocks = nn.ModuleList(Sliced(b, size, recompute=recompute) for b in model.blocks)
    return model


def expected_of(slices: int, *, recompute: bool, **changes: Any) -> Result:
    config = make_config(activations={"slices": slices}, **changes)
    found = train_reference(build(slices, recompute=recompute), batches(), config)
    found.masters = {name.replace(".block.", "."): v for name, v in found.masters.items()}
    return found


OFFLOAD = {"checkpoint": "units", "offload": "disk", "tokens": ROWS * LENGTH, "min_bytes": 1}


@pytest.mark.parametrize(
    ("slices", "activations", "device", "precision"),
    diagonal([2, 3, 4], [OFFLOAD, {}, {"checkpoint": "units"}], ["fake", "cpu"], ["fp32", "bf16"]),
)
def test_slices_match_torch_slices_bitwise(
    slices: int, activations: dict[str, Any], device: str, precision: str
) -> None:
    expected = expected_of(slices, recompute=bool(activations), precision=precision)
    config = make_config(
        ON_DISK, precision=precision, activations={**activations, "slices": slices}
    )
    found = train(build(), batches(), config, device=make_device(device))
    assert found.differences(expected) == []
    assert found.report is not None
    assert found.report.moved == found.forecast
    assert found.plan is not None
    if ROWS % slices == 0:
        assert found.forecast == found.plan.predicted_bytes


def test_slices_close_to_full_batch() -> None:
    """In fp32 within rounding, so no slice is lost or counted twice."""
    at_once = train(build(), batches(), make_config(), device="cpu")
    sliced = train(build(), batches(), make_config(activations={"slices": 3}), device="cpu")
    assert sliced.losses == pytest.approx(at_once.losses, rel=1e-5)
    assert sliced.norms == pytest.approx(at_once.norms, rel=1e-4)
    batch_slices = [Batch((part,)) for b in batches() for part in b.args[0].split(2)]
    config = make_config(gradient_accumulation_steps=3)
    micro = train(build(), batch_slices, config, device="cpu")
    assert sliced.norms == pytest.approx(micro.norms, rel=1e-4)


class Recurrent(nn.Module):
    """Block with an RNN, which computes with a list of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        nn.utils.parametrizations.weight_norm(self.rnn, "weight_hh_l0")

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.rnn(x)[0]
        return found

    def run(self, x: Tensor) -> Tensor:
        found: Tensor = self(x)
        return found


def test_rnn_slice_gradients_are_summed_in_fp32() -> None:
    def recurrent(slices: int = 0) -> nn.Module:
        model = build()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            model.blocks = nn.ModuleList(Recurrent() for _ in range(3))
        if slices:
            sliced_blocks = (Sliced(b, ROWS // slices, recompute=False) for b in model.blocks)
            model.blocks = nn.ModuleList(sliced_blocks)
        return model

    config = make_config(ON_DISK, precision="bf16", activations={"slices": 3}, prefetch_units=0)
    expected = train_reference(recurrent(3), batches(), config)
    expected.masters = {name.replace(".block.", "."): v for name, v in expected.masters.items()}
    found = train(recurrent(), batches(), config, device=make_device("fake"))
    assert found.differences(expected) == []


class Blocks(nn.Module):
    """Blocks alone: neither the model nor its loss computes anything over the full batch."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = build().blocks  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (x.float() ** 2).mean()


@pytest.mark.parametrize(
    ("recompute", "precision", "device"),
    [(False, "bf16", "cpu"), (True, "bf16", "fake"), (True, "fp32", "cpu")],
)
def test_slices_match_micro_batches_bitwise(recompute: bool, precision: str, device: str) -> None:
    """Sizes are powers of two, so a mean of means is exactly the mean of all."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    generator = torch.Generator().manual_seed(5)
    full_batches = [
        Batch((torch.randn(8, LENGTH, WIDTH, generator=generator).to(dtype),)) for _ in "abc"
    ]
    batch_slices = [Batch((part,)) for batch in full_batches for part in batch.args[0].split(2)]
    recomputing = {"checkpoint": "units"} if recompute else {}
    sliced = train(
        Blocks(), full_batches,
        make_config(precision=precision, activations={**recomputing, "slices": 4}),
        device=make_device(device),
    )  # fmt: skip
    micro = train(
        Blocks(), batch_slices,
        make_config(precision=precision, gradient_accumulation_steps=4, activations=recomputing),
        device=make_device(device),
    )  # fmt: skip
    assert sliced.norms == micro.norms
    assert all(torch.equal(value, micro.masters[name]) for name, value in sliced.masters.items())


def bytes_moved(activations: dict[str, Any], micro_batches: int, rows: int) -> dict[str, int]:
    batch_slices = [Batch((part,)) for b in batches(4) for part in b.args[0].split(rows)]
    config = make_config(
        ("disk", "host", "host"), activations=activations, prefetch_units=0,
        gradient_accumulation_steps=micro_batches,
    )  # fmt: skip
    found = train(build(), batch_slices, config, device=make_device("fake"))
    assert found.report is not None
    assert found.report.moved == found.forecast
    return found.report.moved


def test_weights_are_fetched_once_for_all_slices() -> None:
    once = bytes_moved({}, 1, ROWS)
    sliced = bytes_moved({"slices": 3}, 1, ROWS)
    micro = bytes_moved({}, 3, 2)
    assert sliced == once
    assert micro["disk_read"] > 2 * sliced["disk_read"]
    assert micro["to_device"] > 2 * sliced["to_device"]
    assert micro["from_device"] == 3 * sliced["from_device"]


def test_slices_are_recomputed_separately() -> None:
    config = make_config(ON_DISK, activations={"checkpoint": "units", "slices": 3})
    with Run(build(), config, device="cpu") as run:
        sizes: list[int] = []
        run.model.blocks[0].norm1.register_forward_hook(
            lambda module, args, output: sizes.append(len(args[0]))
        )
        loss = batches()[0].call(run.engine)
        assert sizes[-3:] == [2, 2, 2]
        del sizes[:]
        run.engine.backward(loss)
        assert sizes == [2, 2, 2]
        assert components(run.engine).forwards.recomputed == 4 * 3


@pytest.mark.parametrize("rows", [5, 7])
def test_shorter_last_slice_matches_torch(rows: int) -> None:
    batch = [Batch((ids(0, rows=rows),))]
    found = train(build(), batch, make_config(activations={"slices": 2}), device="cpu")
    plain = build(2)
    for block in plain.blocks:
        block.size = -(-rows // 2)
    expected = train_reference(plain, batch, make_config(activations={"slices": 2}))
    assert found.losses == expected.losses
    assert found.norms == expected.norms


def test_batch_smaller_than_slices_is_not_sliced() -> None:
    config = make_config(activations={"slices": 4})
    found = train(build(), [Batch((ids(0, rows=1),))], config, device="cpu")
    plain = train(build(), [Batch((ids(0, rows=1),))], make_config(), device="cpu")
    assert found.differences(plain) == []


class RichBlock(nn.Module):
    """Block with a mask, a shared table, a scalar and several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, x: Tensor, mask: Tensor, *, table: Tensor, scale: Tensor, name: str
    ) -> tuple[Tensor, dict[str, Any]]:
        y = self.b(torch.tanh(self.a(x) + table)) * mask.unsqueeze(-1) * scale
        return y, {"gate": y.sigmoid(), "name": name}


class RichModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(RichBlock() for _ in range(2))
        self.table = nn.Parameter(torch.randn(LENGTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        mask = (x[:, :, 0] > 0).float()
        for block in self.blocks:
            x, extras = block(x, mask, table=self.table[None], scale=torch.tensor(0.5), name="n")
            x = x + extras["gate"]
        return x.square().mean()


def test_masks_are_sliced_and_shared_tensors_are_not() -> None:
    torch.manual_seed(1)
    data = [Batch((torch.randn(ROWS, LENGTH, WIDTH),)) for _ in range(3)]
    case = Case("rich", lambda _: RichModel(), lambda index: data[index])
    plain = train(case.build(), data, make_config(), device="cpu")
    for activations in ({"slices": 3}, {"slices": 4, "checkpoint": "units"}):
        for device in ("cpu", "fake"):
            found = train(
                case.build(), data, make_config(ON_DISK, activations=activations),
                device=make_device(device),
            )  # fmt: skip
            assert found.losses == pytest.approx(plain.losses, rel=1e-5)
            assert found.norms == pytest.approx(plain.norms, rel=1e-4)


class Base(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(2))

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        for block in self.blocks:
            x = block(x, **kwargs)
            x = x[0] if isinstance(x, tuple) else x
        return x.square().mean()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(LENGTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


class Centred(nn.Module):
    """Block that mixes samples, without a submodule that shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.act = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.linear(x - x.mean(0)))


class WithLoss(Centred):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.act(self.linear(x))
        return y, y.square().mean()


class Masked(Centred):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        assert mask is not None
        return self.act(mask @ self.linear(x))


class Causal(Centred):
    """Block with time first: the first slice is right, as later rows do not affect earlier ones."""

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.linear(x.cumsum(0)))


class Dropping(Centred):
    """Block that mixes samples and draws random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 1e-6, self.training))


class StoresTensor(Centred):
    aux: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.linear(x))
        self.aux = y.square().mean()
        return y


class ReplacesTensor(StoresTensor):
    def __init__(self) -> None:
        super().__init__()
        self.aux = torch.zeros(())


class StoresInBuffer(Centred):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("aux", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.linear(x))
        self.aux = y.square().mean()
        return y


class StoresInList(Centred):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.linear(x))
        self.found[:] = [y.square().mean()]
        return y


class NormedInTraining(Centred):
    """Block that uses functional batch norm, with batch statistics in training only."""

    def forward(self, x: Tensor) -> Tensor:
        mean, spread = torch.zeros(LENGTH), torch.ones(LENGTH)
        y = nn.functional.batch_norm(x, mean, spread, training=self.training)
        return self.act(self.linear(y))


class ReturnsInfinite(Centred):
    """Block that returns infinite and NaN values, independently for each sample."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        infinite = x.detach().masked_fill(x > 0, -torch.inf).masked_fill(x > 1, torch.nan)
        return self.act(self.linear(x)), infinite


class Appending(Centred):
    def forward(self, x: Tensor, found: list[Tensor] | None = None) -> Tensor:
        y = self.act(self.linear(x))
        if found is not None:
            found.append(y.square().mean())
        return y


class ReturnsSize(Centred):
    def forward(self, x: Tensor) -> Any:
        return self.act(self.linear(x)), x.shape[0]


class ReturnsPositions(Centred):
    def forward(self, x: Tensor) -> Any:
        return self.act(self.linear(x)), torch.arange(len(x))


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


class ReturnsPair(Centred):
    def forward(self, x: Tensor) -> Any:
        return Pair(x, self.act(self.linear(x)))


class TakesPair(Centred):
    def forward(self, x: Tensor, pair: Pair | None = None) -> Tensor:
        assert pair is not None
        return self.act(self.linear(x + pair.y))


class TakesRowPerHead(Centred):
    """Block with an argument of (batch x heads) rows, as BLOOM's alibi."""

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        assert bias is not None
        return self.act(self.linear(x + bias.view(2, *x.shape).sum(0)))


class Raises(Centred):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ torch.ones(WIDTH + 1)


def sequence_first() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, dropout=0.0)


@pytest.mark.parametrize(
    ("kind", "kwargs", "message"),
    [
        (Normed, {}, "BatchNorm1d in training"),
        (Centred, {}, "other results in a larger batch"),
        (Causal, {}, "other results in a larger batch"),
        (Dropping, {}, "other results in a larger batch"),
        (StoresTensor, {}, "leaves a tensor in its attribute 'aux'"),
        (ReplacesTensor, {}, "leaves a tensor in its attribute 'aux'"),
        (StoresInBuffer, {}, "leaves a tensor in its attribute 'aux'"),
        (StoresInList, {}, r"leaves a tensor in its attribute 'found\[0\]'"),
        (NormedInTraining, {}, "other results in a larger batch"),
        (ReturnsSize, {}, "other results in a larger batch"),
        (ReturnsPositions, {}, "other results in a larger batch"),
        (Appending, {"found": []}, "changes a list or dict that it was given"),
        (ReturnsPair, {}, "returns an object that holds tensors"),
        (
            TakesPair,
            {"pair": Pair(torch.ones(1), torch.ones(1))},
            "given a Pair that holds tensors",
        ),
        (
            TakesRowPerHead,
            {"bias": torch.ones(2 * ROWS, LENGTH, WIDTH)},
            "it raises for 2 of the samples: shape",
        ),
        (WithLoss, {}, r"a tensor of shape \(\) for 2 samples"),
        (sequence_first, {}, "batch_first=False"),
        (Masked, {"mask": torch.eye(LENGTH)}, "each sample or for each position"),
    ],
)
def test_unsliceable_block_is_rejected_by_name(kind: Any, kwargs: Any, message: str) -> None:
    x = torch.randn(LENGTH if "mask" in kwargs else ROWS, LENGTH, WIDTH)
    with (
        pytest.raises(TrainingError, match=message) as caught,
        Run(Base(kind), make_config(activations={"slices": 3}), device="cpu") as run,
    ):
        run.engine(x, **kwargs)
    assert "'blocks.0'" in str(caught.value)


def test_error_of_a_block_is_raised_unchanged_with_slices() -> None:
    config = make_config(activations={"slices": 3})
    with (
        Run(Base(Raises), config, device="cpu") as run,
        pytest.raises(RuntimeError, match="size mismatch"),
    ):
        run.engine(torch.randn(ROWS, LENGTH, WIDTH))


class EverySecondMixes(Centred):
    """Block of one class of which only every second instance mixes samples."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).made += 1
        self.over_samples = type(self).made % 2 == 0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.over_samples else self.act(self.linear(x))


def test_every_block_is_probed() -> None:
    config = make_config(activations={"slices": 3})
    with (
        pytest.raises(TrainingError, match=r"'blocks.1'[\s\S]*other results in a larger batch"),
        Run(Base(EverySecondMixes), config, device="cpu") as run,
    ):
        run.engine(torch.randn(ROWS, LENGTH, WIDTH))


class ScalesHeads(Centred):
    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        assert scale is not None
        y = self.linear(x).view(*x.shape[:2], len(scale), -1) * scale
        return self.act(y.reshape(x.shape))


def test_changed_slicing_is_probed_again() -> None:
    """The scale is per head, and the last batch has as many samples as heads."""
    config = make_config(activations={"slices": 2})
    with Run(Base(ScalesHeads), config, device="cpu") as run:
        scale = torch.tensor([[1.0], [2.0]])
        run.engine(torch.randn(ROWS, LENGTH, WIDTH), scale=scale)
        with pytest.raises(TrainingError, match="other results in a larger batch"):
            run.engine(torch.randn(2, LENGTH, WIDTH), scale=scale)


def test_probe_treats_infinite_values_as_equal() -> None:
    with Run(Base(ReturnsInfinite), make_config(activations={"slices": 3}), device="cpu") as run:
        assert run.engine(torch.randn(ROWS, LENGTH, WIDTH)).isfinite()


def test_probe_is_invisible_to_hooks_and_inputs() -> None:
    seen: list[Tensor] = []
    model = Base(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Tanh()))
    for block in model.blocks:
        block[0].register_forward_hook(lambda *args: seen.append(args[2]))
    x = torch.randn(ROWS, LENGTH, WIDTH)
    with Run(model, make_config(activations={"slices": 3}), device="cpu") as run:
        losses = []
        for _ in range(2):
            losses.append(run.engine(x).item())
            assert len(seen) == 2 * 3  # blocks, slices
            assert all(one.grad_fn is not None for one in seen)
            seen.clear()
        assert losses[0] == losses[1]
        assert all(part.training for part in model.modules())


def test_list_appended_to_by_recomputed_block_is_rejected() -> None:
    """They receive a copy of the list: what they append would be lost silently."""
    model, config = Base(Appending), make_config(activations={"checkpoint": "units"})
    with Run(model, config, device="cpu") as run:
        with pytest.raises(TrainingError, match="changes a list or dict that it"):
            run.engine(torch.randn(ROWS, LENGTH, WIDTH), found=[])
        run.engine.backward(run.engine(torch.randn(ROWS, LENGTH, WIDTH)))


class ChangesInput(Centred):
    def forward(self, x: Tensor) -> Tensor:
        x += self.act(self.linear(x * 1))
        return x


@pytest.mark.parametrize("activations", [{"checkpoint": "units"}, {"slices": 3}])
def test_block_that_changes_its_input_is_rejected_by_name(activations: Any) -> None:
    config = make_config(activations=activations)
    with (
        pytest.raises(TrainingError, match=r"'blocks\.0' changes its input in place"),
        Run(Base(ChangesInput), config, device="cpu") as run,
    ):
        run.engine(torch.randn(ROWS, LENGTH, WIDTH) * 1)


def test_batch_norm_in_eval_mode_can_be_sliced() -> None:
    model = Base(Normed)
    model.blocks[0].norm.eval()
    model.blocks[1].norm.eval()
    with Run(model, make_config(activations={"slices": 3}), device="cpu") as run:
        run.engine.backward(run.engine(torch.randn(ROWS, LENGTH, WIDTH)))


class Experts(nn.Module):
    """Block whose experts all see all tokens; each expert is a unit within the block."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).softmax(-1)
        outputs = [shares[..., i : i + 1] * e(x) for i, e in enumerate(self.experts)]
        return x + torch.stack(outputs).sum(0)


def test_experts_in_sliced_block_match_torch() -> None:
    data = [Batch((torch.randn(ROWS, LENGTH, WIDTH),)) for _ in range(3)]
    case = Case("experts", lambda _: Base(Experts), lambda index: data[index])
    plain = case.build()
    plain.blocks = nn.ModuleList(Sliced(b, 2, recompute=True) for b in plain.blocks)
    expected = train_reference(plain, data, make_config())
    expected.masters = {n.replace(".block.", "."): v for n, v in expected.masters.items()}
    config = make_config(
        ON_DISK, activations={"checkpoint": "units", "slices": 3}, prefetch_units=0
    )
    with Run(case.build(), config, device=make_device("fake")) as run:
        assert len(run.engine.plan.units) == 2 * (1 + 3)
        losses = []
        for part in data:
            loss = part.call(run.engine)
            run.engine.backward(loss)
            run.engine.step()
            losses.append(loss.item())
        # every slice runs through all experts; with so few slots they are fetched again
        found = Result(losses, run.masters(), expected.norms)
    assert found.differences(expected) == []


class ModeSettingBlock(StackedBlock):
    """Mixture that sets the gradient mode around its call of experts."""

    def feed_forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.training and torch.is_grad_enabled()):
            return super().feed_forward(x)


class ReenteringBlock(StackedBlock):
    """Mixture that recomputes its experts by a reentrant checkpoint."""

    def feed_forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(super().feed_forward, x, use_reentrant=True)
        return result


@pytest.mark.parametrize("kind", [StackedBlock, ModeSettingBlock, ReenteringBlock])
def test_gradients_of_shared_ranges_in_any_gradient_mode(
    kind: type[StackedBlock], recwarn: pytest.WarningsRecorder
) -> None:
    """Slices share ranges if the block leaves the gradient mode as its experts set it."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        model = Stacked()
        for block in model.blocks:
            block.__class__ = kind
        return model

    model, plain = build(), build()
    plain(ids(0)).backward()
    config = make_config(ON_DISK, activations={"slices": 2}, experts_per_unit=1, prefetch_units=0)
    with Run(model, config, device="cpu") as run:
        assert run.engine.plan.shared_stacks
        run.engine.backward(run.engine(ids(0)))
        for name, parameter in plain.named_parameters():
            gradient = run.engine.gradient(run.engine.module.get_parameter(name))
            assert parameter.grad is not None
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-6)
    warned = any("it sets the gradient mode" in str(w.message) for w in recwarn)
    assert warned == (kind is not StackedBlock)

"""Tests of fp16 weights with fp32 masters: accuracy, edits, checkpoints and durable runs.

Bitwise equality with plain torch in every placement is tested in test_axes.py. The last section
tests `torch.autocast` around an fp32 engine, or inside its model, against plain torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fp16_reference import LossScaleSettings, train_half
from support.grids import diagonal
from support.models import CASES, CHECKPOINTINGS, Batch, Case
from support.trainer import (
    SIMPLEST,
    Result,
    Run,
    make_config,
    make_device,
    same_bits,
    train,
    train_reference,
)
from torch import Tensor, nn

import infinity
from infinity.errors import CheckpointError
from infinity.plan.layout import PRECISIONS
from infinity.types import Kind

STEPS = 6
# With this scale the first steps overflow.
SCALE_SETTINGS = LossScaleSettings(initial=2.0**16, window=2, hysteresis=2)
SECTION = {"initial_power": 16, "window": 2, "hysteresis": 2}


def fp16(placement: tuple[str, str, str] = SIMPLEST, **changes: Any) -> dict[str, Any]:
    return make_config(placement, precision="fp16", loss_scale=SECTION, **changes)


def run(case: Case, config: dict[str, Any], device: Any = "cpu") -> Result:
    count = STEPS * config.get("gradient_accumulation_steps", 1)
    return train(case.build(), case.batches(count), config, device=device, groups=case.groups)


@pytest.mark.parametrize("name", ["gpt", "frozen"])
def test_fp16_close_to_torch_loop_with_unscale_and_clip(name: str) -> None:
    """The reference unscales, runs `clip_grad_norm_` and steps AdamW on fp32 masters."""
    case = CASES[name]
    config = fp16(("disk",) * 3, optimizer={"eps": 1e-4})
    batches = case.batches(STEPS)
    reference = train_half(
        case.build(), batches, config, SCALE_SETTINGS, groups=case.groups, by_torch=True
    )
    result = run(case, config, make_device("fake"))
    finite_norms = [
        norm
        for norm, overflowed in zip(reference.norms, reference.overflows, strict=True)
        if not overflowed
    ]
    assert max(finite_norms) > 0.5  # clipping takes effect
    assert len(finite_norms) >= 2
    assert result.losses[0] == reference.losses[0]
    assert result.losses == pytest.approx(reference.losses, rel=2e-3)
    for value, expected in zip(result.norms, reference.norms, strict=True):
        assert value == pytest.approx(expected, rel=1e-2, nan_ok=True)  # NaN in steps that overflow
    for key, value in reference.masters.items():
        if value.is_floating_point():
            torch.testing.assert_close(
                result.masters[key].float(), value.float(), rtol=0, atol=5e-3
            )


def test_fp16_torch_optimizer_weights_are_rounded_masters() -> None:
    """The adapted optimizer steps on the masters; the weights are the rounded masters."""
    case = CASES["gpt"]

    def trained(placement: tuple[str, str, str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        config = fp16(placement)
        del config["optimizer"]
        with Run(
            case.build(), config, optimizer=lambda g: torch.optim.RMSprop(g, lr=1e-3, momentum=0.5)
        ) as made:
            for batch in case.batches(STEPS):
                made.engine.backward(batch.call(made.engine))
                made.engine.step()
            assert made.engine.global_steps >= 2
            return made.masters(), {n: v.clone() for n, v in made.engine.state_dict().items()}

    masters, weights = trained(SIMPLEST)
    for name, value in weights.items():
        assert same_bits(value, masters[name].to(value.dtype)), name
    others, _ = trained(("disk",) * 3)
    assert all(same_bits(masters[name], others[name]) for name in masters)


# --- state and checkpoints -----------------------------------------------------------------------


def test_fp16_plan_takes_14_bytes_per_parameter() -> None:
    precision = PRECISIONS["fp16"]
    assert precision.bytes_per_parameter == 14
    assert precision.kinds == (Kind.WEIGHT, Kind.MASTER, Kind.MOMENT1, Kind.MOMENT2)
    found = run(CASES["gpt"], fp16(("disk",) * 3))
    assert found.plan is not None
    text = found.plan.describe()
    assert "master fp16 weight + fp32, 1 micro-batch" in text
    assert "14 bytes of state per parameter" in text
    assert "moments and master" in text
    assert "note: fp16 is for GPUs" in text


@pytest.mark.parametrize("placement", [SIMPLEST, ("disk",) * 3])
def test_fp16_weights_and_masters_can_be_edited(placement: tuple[str, str, str]) -> None:
    case = CASES["gpt"]
    with Run(case.build(), fp16(placement)) as made:
        engine = made.engine
        for batch in case.batches(4):
            engine.backward(batch.call(engine))
            engine.step()
        before = made.masters()
        weights = {name: value.clone() for name, value in engine.state_dict().items()}
        engine.load_state_dict(weights)  # no change: masters keep what fp16 cannot represent
        assert all(same_bits(value, before[name]) for name, value in made.masters().items())
        name = next(n for n, v in weights.items() if v.dim() == 2)
        parameter = dict(engine.module.named_parameters())[name]
        with engine.materialized(parameter):
            assert parameter.dtype is torch.float16
            with torch.no_grad():
                parameter[0] = 0.1
        after = made.masters()[name]
        assert same_bits(after[0], torch.full_like(after[0], 0.1).half().float())
        assert same_bits(after[1:], before[name][1:])
        with engine.materialized(parameter, master=True), torch.no_grad():
            parameter[0] = 0.1
        assert same_bits(made.masters()[name][0], torch.full_like(after[0], 0.1))
        assert (engine.state_dict()[name][0] == torch.tensor(0.1).half()).all()


def train_steps(engine: Any, batches: Sequence[Batch]) -> None:
    for batch in batches:
        engine.backward(batch.call(engine))
        engine.step()


def test_fp16_checkpoint_round_trip_and_precision_change(tmp_path: Path) -> None:
    """Save on disk, resume in RAM; load weights separately, and into another precision."""
    case = CASES["frozen"]
    batches = case.batches(8)
    with Run(case.build(), fp16(("disk",) * 3)) as made:
        train_steps(made.engine, batches[:4])
        made.engine.save_checkpoint(tmp_path, "four", wait=True)
        made.engine.save_weights(tmp_path / "masters", "fp32")
        saved = made.masters()
        train_steps(made.engine, batches[4:])
        expected = made.masters()
    with Run(case.build(), fp16(("host", "device", "host"))) as made:
        made.engine.load_checkpoint(tmp_path, "four")
        train_steps(made.engine, batches[4:])
        assert all(same_bits(value, expected[name]) for name, value in made.masters().items())
    with Run(case.build(), make_config(precision="bf16")) as made:
        with pytest.raises(CheckpointError, match="precision 'fp16' there, 'bf16' here"):
            made.engine.load_checkpoint(tmp_path, "four")
        made.engine.load_checkpoint(tmp_path, "four", load_optimizer_states=False)
        found = made.masters()
        assert all(same_bits(found[n], v) for n, v in saved.items() if v.dtype is torch.float32)
    with Run(case.build(), fp16()) as made:
        infinity.load_weights(made.engine, tmp_path / "masters")
        found = made.masters()
        assert all(same_bits(found[n], v) for n, v in saved.items() if v.dtype is torch.float32)


def test_fp16_durable_run_resumes(tmp_path: Path) -> None:
    case, batches = CASES["gpt"], CASES["gpt"].batches(6)
    config = fp16(("disk",) * 3, durable=True, nvme_path=str(tmp_path))
    engine = infinity.initialize(case.build(), config)[0]
    with engine:
        train_steps(engine, batches[:4])
        engine.settle()
        expected_at_four = {n: v.clone() for n, v in engine.state_dict(master=True).items()}
    engine = infinity.initialize(case.build(), {**config, "resume": "auto"})[0]
    with engine:
        assert engine.resumed
        found = dict(engine.state_dict(master=True).items())
        assert all(same_bits(found[n], v) for n, v in expected_at_four.items())
        train_steps(engine, batches[4:])
        found = {n: v.clone() for n, v in engine.state_dict(master=True).items()}
    with Run(case.build(), fp16()) as made:
        train_steps(made.engine, batches)
        assert all(same_bits(found[n], v) for n, v in made.masters().items())


# --- autocast ------------------------------------------------------------------------------------


class UnderAutocast:
    """Wrapper that calls a model or an engine under autocast."""

    def __init__(self, inner: Callable[..., Any]) -> None:
        self.inner = inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(*args, **kwargs)


class AutocastModel(nn.Module):
    """Model that enables autocast itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(*args, **kwargs)


def under_autocast(batch: Batch) -> Batch:
    return AutocastBatch(batch.args, batch.kwargs)


class AutocastBatch(Batch):
    """Batch whose calls all run under autocast."""

    def call(self, model: Callable[..., Any]) -> Tensor:
        return super().call(UnderAutocast(model))


@contextmanager
def without_cache() -> Iterator[None]:
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@pytest.mark.parametrize(
    ("checkpointing", "name", "where"),
    diagonal(CHECKPOINTINGS, ["gpt", "reused"], ["around", "configured", "inside"]),
)
def test_autocast_equals_plain_torch(name: str, checkpointing: Any, where: str) -> None:
    """Weights in fp32, products in bf16: equal bits in several placements.

    The reference runs without autocast's cache, as the engine does: with it, a weight used twice is
    cast once, and the gradients of both uses are summed in bf16.
    """
    case = CASES[name]
    batches = case.batches(4)

    def model() -> nn.Module:
        made = case.build(checkpointing=checkpointing)
        return AutocastModel(made) if where == "inside" else made

    cast = batches if where == "inside" else [under_autocast(batch) for batch in batches]
    used = cast if where == "around" else batches
    with without_cache():
        expected = train_reference(model(), cast, make_config())
    plain = train_reference(case.build(checkpointing=checkpointing), batches, make_config())
    assert expected.losses != plain.losses  # autocast takes effect
    for number, (placement, device) in enumerate(
        [(SIMPLEST, "cpu"), (("disk", "host", "disk"), "fake")]
    ):
        config = make_config(placement) | {"autocast": where == "configured"}
        found = train(model(), used, config, device=make_device(device, number))
        assert found.differences(expected) == [], (placement, device)

"""Tests that activation checkpointing saves and recomputes exactly what it does in plain torch.

Equal results alone prove nothing: a wrapper that saves everything and never recomputes gives
equal results too.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from support.grids import diagonal
from support.internals import components
from support.models import CASES, CHECKPOINTINGS, Batch, Case, Checkpointing, block_calls
from support.trainer import LiveBytes, Run, SavedBytes, cast_frozen, make_config
from torch import Tensor, nn

DISK = ("disk", "disk", "disk")


@dataclass
class Measured:
    """Measurements of one forward and backward."""

    loss: float
    after_forward: int  # bytes alive after the forward
    peak: int
    forwards: tuple[int, int]  # of blocks, of the functions inside them
    recomputed: tuple[int, int]


def measure_plain(case: Case, checkpointing: Checkpointing) -> Measured:
    model = case.build(checkpointing)
    cast_frozen(model, torch.float32)

    def drop_grad(parameter: Tensor) -> None:
        parameter.grad = None  # as in the engine, which offloads gradients as they are produced

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(drop_grad)
    return _measure(model, case.batch(0), model, lambda loss: loss.backward())


def measure_engine(case: Case, checkpointing: Checkpointing) -> Measured:
    model = case.build(checkpointing)
    with Run(model, make_config(DISK, prefetch_units=1), device="cpu", groups=case.groups) as run:
        engine = run.engine
        for index in (1, 2):  # measure a steady step that follows an optimizer pass
            engine.backward(case.batch(index).call(engine))
            if index == 1:
                engine.step()
        components(engine).gradients.reset()
        return _measure(model, case.batch(0), engine, engine.backward)


def _measure(model: nn.Module, batch: Batch, forward: object, backward: object) -> Measured:
    assert callable(forward)
    assert callable(backward)
    start = block_calls(model)
    with LiveBytes() as live:
        loss = batch.call(forward)
        after_forward = live.now()
        middle = block_calls(model)
        backward(loss)
    end = block_calls(model)
    forwards = (middle[0] - start[0], middle[1] - start[1])
    recomputed = (end[0] - middle[0], end[1] - middle[1])
    return Measured(loss.item(), after_forward, live.peak, forwards, recomputed)


@pytest.mark.parametrize(("name", "checkpointing"), diagonal([*CASES], CHECKPOINTINGS), ids=str)
def test_recomputation_and_saved_bytes_match_torch(name: str, checkpointing: Checkpointing) -> None:
    case = CASES[name]
    plain, actual = measure_plain(case, checkpointing), measure_engine(case, checkpointing)
    blocks, inner = plain.forwards
    expected = {
        "none": (0, 0),
        "block": (blocks, inner),
        "inside": (0, inner),
    }[checkpointing.place if checkpointing.mode != "none" else "none"]
    assert plain.recomputed == expected
    assert actual.forwards == plain.forwards
    assert actual.recomputed == plain.recomputed
    assert actual.after_forward <= plain.after_forward
    assert actual.peak <= plain.peak


@pytest.mark.parametrize("place", ["block", "inside"])
@pytest.mark.parametrize("mode", ["reentrant", "non_reentrant"])
def test_checkpointing_reduces_live_bytes(mode: str, place: str) -> None:
    baseline = measure_engine(CASES["gpt"], CHECKPOINTINGS[0])
    checkpointed = measure_engine(CASES["gpt"], Checkpointing(mode, place))
    max_ratio = {"block": 0.45, "inside": 0.85}[place]
    assert checkpointed.after_forward < max_ratio * baseline.after_forward


@pytest.mark.parametrize(("name", "checkpointing"), diagonal([*CASES], CHECKPOINTINGS), ids=str)
def test_user_saved_tensor_hooks_match_torch(name: str, checkpointing: Checkpointing) -> None:
    """Hooks around the engine call pack exactly the tensors that they pack in plain torch."""
    case = CASES[name]
    model = case.build(checkpointing)
    cast_frozen(model, torch.float32)
    plain = SavedBytes(list(model.parameters()))
    with plain.hooks():
        loss = case.batch(0).call(model)
    loss.backward()
    engine_model = case.build(checkpointing)
    actual = SavedBytes()
    with Run(engine_model, make_config(DISK), device="cpu", groups=case.groups) as run:
        with actual.hooks():
            engine_loss = case.batch(0).call(run.engine)
        run.engine.backward(engine_loss)
    assert engine_loss.item() == loss.item()
    assert (actual.total, actual.num_packed) == (plain.total, plain.num_packed)
    assert actual.num_unpacked == plain.num_unpacked

"""Tests of freezing and unfreezing parameters during training, against plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.grids import diagonal
from support.models import CASES, Batch
from support.trainer import Run, make_config, make_device, same_bits, train_torch
from torch import nn

from infinity.errors import InfinityWarning, TrainingError

EPS = 1e-4
STEPS = 12
SETUPS = [
    ("cpu", ("device", "device", "device")),
    ("cpu", ("disk", "disk", "disk")),
    ("fake", ("disk", "disk", "disk")),
    ("fake", ("host", "disk", "device")),
]
Change = Callable[[int, nn.Module], None]


def one_block(model: nn.Module) -> nn.Module:
    block = model.get_submodule("blocks.1")
    assert isinstance(block, nn.Module)
    return block


def unfreeze_later(index: int, model: nn.Module) -> None:
    one_block(model).requires_grad_(index >= 5)


def freeze_later(index: int, model: nn.Module) -> None:
    one_block(model).requires_grad_(index < 5)


def toggle_part_of_unit(index: int, model: nn.Module) -> None:
    for name, parameter in one_block(model).named_parameters():
        if name.startswith(("qkv", "norm1")):
            parameter.requires_grad_(index // 2 % 2 == 1)


def unfreeze_first_unit_later(index: int, model: nn.Module) -> None:
    embed = model.get_submodule("embed")
    embed.requires_grad_(index >= 4)


def all_parameters(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": list(model.parameters())}]


CHANGES = [unfreeze_later, freeze_later, toggle_part_of_unit, unfreeze_first_unit_later]


@pytest.mark.parametrize(("change", "setup"), diagonal(CHANGES, SETUPS[::-1]))
def test_freezing_during_training_matches_torch(
    change: Change, setup: tuple[str, tuple[str, str, str]]
) -> None:
    device, placement = setup
    case = CASES["gpt"]
    config = make_config(placement, optimizer={"eps": EPS, "weight_decay": 0.1})
    batches = case.batches(STEPS)
    model = case.build()
    change(0, model)
    expected = train_torch(model, batches, config, groups=all_parameters, before_batch=change)
    model = case.build()
    change(0, model)
    losses = []
    with Run(model, config, device=make_device(device), groups=all_parameters) as run:
        for index, batch in enumerate(batches):
            change(index, model)
            loss = batch.call(run.engine)
            run.engine.backward(loss)
            run.engine.step()
            losses.append(loss.item())
        masters = run.masters()
    assert losses == pytest.approx(expected.losses, rel=2e-6)
    for name, value in expected.masters.items():
        torch.testing.assert_close(masters[name], value, rtol=0, atol=2e-5, msg=name)


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_frozen_parameters_keep_their_bits(setup: tuple[str, tuple[str, str, str]]) -> None:
    device, placement = setup
    case = CASES["gpt"]
    model = case.build()
    one_block(model).requires_grad_(False)
    initial = {n: p.detach().clone() for n, p in one_block(model).named_parameters()}
    config = make_config(placement, precision="bf16", optimizer={"weight_decay": 0.5})
    with Run(model, config, device=make_device(device), groups=all_parameters) as run:
        for batch in case.batches(6):
            run.engine.backward(batch.call(run.engine))
            run.engine.step()
        masters = run.masters()
    for name, value in initial.items():
        assert same_bits(masters[f"blocks.1.{name}"], value), name


def test_unfreezing_untracked_parameter_is_rejected() -> None:
    case = CASES["gpt"]
    model = case.build()
    one_block(model).requires_grad_(False)
    with Run(model, make_config(), device="cpu") as run:
        run.engine.backward(case.batch(0).call(run.engine))
        run.engine.step()
        one_block(model).requires_grad_(True)
        with pytest.raises(TrainingError, match=r"(?s)blocks\.1\.norm1\.weight.*frozen"):
            case.batch(1).call(run.engine)
        one_block(model).requires_grad_(False)
        batch: Batch = case.batch(1)
        run.engine.backward(batch.call(run.engine))
        run.engine.step()


def test_mostly_frozen_optimizer_state_warns() -> None:
    """As with adapters and an optimizer over all of model.parameters()."""
    model = CASES["gpt"].build().requires_grad_(False)
    next(model.parameters()).requires_grad_(True)
    with (
        pytest.warns(InfinityWarning, match="parameters are frozen; their optimizer state is res"),
        Run(model, make_config(), device="cpu", groups=all_parameters),
    ):
        pass

"""Tests of remedies: each change maps to options or settings that the command accepts."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from support.runs import LENGTH, settings

from infinity.cli.main import load
from infinity.cli.remedies import NAMES, plan_command_text, train_command_text
from infinity.config.schema import load_config
from infinity.plan.advice import Change
from infinity.train.settings import RunConfig, load_run_config

GIB = 1 << 30
VALUES: dict[str, tuple[Any, ...]] = {
    "placement": (["weights", "optimizer_state"],),
    "chunk_size": (1 << 17,),
    "budget.device": (GIB, None),
    "budget.host": (GIB + (1 << 20), None),
    "budget.disk": (GIB, None),
    "activations.tokens": (64,),
    "precision": ("fp32",),
    "moments": ("8bit",),
    "rest": ("nf4",),
    "slices": (2,),
    "recompute": ("all", 2, 0),
    "offload": ("disk", "none"),
    "batch": ((8 * LENGTH, 2, 2 * LENGTH),),  # for two ranks
    "finer_units": (None,),
    "adapter": ((16, None), (16, "nf4")),
    "gpus": (2,),
    "drives": ((2, 2 << 40),),
    "device": (GIB,),
    "host": (GIB,),
    "disk": (GIB,),
}
HARDWARE = {"gpus", "drives", "device", "host", "disk"}
CHANGES = [Change("", name, value) for name, values in VALUES.items() for value in values]


def test_every_change_has_test_values() -> None:
    assert VALUES.keys() == NAMES


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: f"{c.name}-{c.value}")
def test_plan_accepts_change(change: Change) -> None:
    plan = load("plan")
    options = {name for param in plan.params for name in (*param.opts, *param.secondary_opts)}
    for of_run in (False, True):
        typed = plan_command_text(of_run=of_run)((change,))
        assert typed
        if of_run and change.name == "adapter":
            assert typed in ("adapter.type=lora", "adapter.type=qlora")
            continue
        arguments = shlex.split(typed)
        keys = [argument.removeprefix("engine.") for argument in arguments if "=" in argument]
        assert all(
            of_run == argument.startswith("engine.") for argument in arguments if "=" in argument
        )
        load_config({"nvme_path": "/tmp"}, keys)
        assert {argument for argument in arguments if argument.startswith("--")} <= options


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: f"{c.name}-{c.value}")
def test_train_accepts_change_unless_hardware(change: Change, tmp_path: Path) -> None:
    raw = settings(tmp_path, engine__nvme_path=str(tmp_path))
    run = load_run_config(raw)
    typed = train_command_text(run, LENGTH)((change,))
    assert (typed is None) == (change.name in {*HARDWARE, "finer_units"})
    found = load_run_config(raw, shlex.split(typed or ""))
    assert typed is None or found != run or already_set(run, change)


def test_batch_change_is_global(tmp_path: Path) -> None:
    change = Change("", "batch", (8 * LENGTH, 2, 2 * LENGTH))
    raw = settings(tmp_path)
    for tokens in (None, 4 * LENGTH):
        steps = {"gradient_accumulation_steps": 3} if tokens is None else {}
        raw["training"]["tokens_per_step"] = tokens
        raw["engine"].pop("gradient_accumulation_steps", None)
        raw["engine"] |= steps
        typed = train_command_text(load_run_config(raw), LENGTH)((change,))
        assert typed is not None
        found = load_run_config(raw, shlex.split(typed))
        assert found.tokens_per_step_with(LENGTH) == 8 * LENGTH
        assert found.training.micro_batch == 2


def already_set(run: RunConfig, change: Change) -> bool:
    """Return True if the run already has the value of the change."""
    return change.value in (None, 0, "none", "fp32") or change.name in ("placement", "batch")

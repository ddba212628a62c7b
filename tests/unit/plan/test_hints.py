"""Tests of hints: they bound the memory of a plan if possible and never make it fail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small import SmallModel, batch, masters, same
from unit.plan.test_activations import one_unit

import infinity
from infinity.config.schema import load_config
from infinity.plan.budget import Limits
from infinity.plan.hints import live_parameters
from infinity.plan.plan import Plan
from infinity.plan.planner import make_plan
from infinity.types import Tier

UNITS = tuple(
    replace(one_unit(f"blocks.{i}", (2048, 64), first=i), index=i) for i in range(8)
)  # fmt: skip
EACH = 2048 * 64
ON_DISK = {"weights": "disk", "optimizer_state": "disk", "gradients": "disk"}
ZERO = "zero_optimization"


def plan_of(hints: dict[str, Any], host: int | None = None, **config: Any) -> Plan:
    settings = {"nvme_path": "/tmp", "placement": ON_DISK, "hints": hints, **config}
    limits = Limits(device=None, host=host, disk=None)
    return make_plan(UNITS, load_config(settings), limits, unified=False)


@pytest.mark.parametrize(
    ("most", "prefetch_units"), [(8 * EACH, 3), (5 * EACH, 3), (4 * EACH, 2), (3 * EACH, 1), (0, 1)]
)
def test_live_parameters_hint_lowers_prefetch(most: int, prefetch_units: int) -> None:
    plan = plan_of({"live_parameters": most}, prefetch_units=3)
    assert plan.prefetch_units == prefetch_units
    assert live_parameters(plan) == (prefetch_units + 2) * EACH
    lowered = "prefetch_units lowered from 3" in "\n".join(plan.notes)
    assert lowered == (prefetch_units < 3)
    missed = [note for note in plan.notes if "hints.live_parameters is" in note]
    assert bool(missed) == (live_parameters(plan) > most)
    if missed:
        assert "hints.live_parameters is 0, slots hold 393" in missed[0]


def test_live_parameters_hint_without_prefetch_has_no_effect() -> None:
    assert plan_of({"live_parameters": 0}, prefetch_units=0).prefetch_units == 0


@pytest.mark.parametrize(
    ("most", "num_in_host"), [(0, 0), (EACH - 1, 0), (3 * EACH, 3), (10**9, 8)]
)
def test_max_params_in_cpu_keeps_weights_in_host(most: int, num_in_host: int) -> None:
    plan = plan_of({"max_params_in_cpu": most})
    assert [h.weight for h in plan.placements] == [Tier.HOST] * num_in_host + [Tier.DISK] * (
        8 - num_in_host
    )
    assert {(h.state, h.gradient) for h in plan.placements} == {(Tier.DISK, Tier.DISK)}
    before = plan_of({})
    assert plan.memory["host"]["weights"] == 2 * num_in_host * EACH
    assert (plan.predicted_bytes["disk_read"] < before.predicted_bytes["disk_read"]) == (
        num_in_host > 0
    )


def test_max_params_in_cpu_limited_by_host_budget() -> None:
    needs = sum(plan_of({}).memory["host"].values())
    plan = plan_of({"max_params_in_cpu": 10**9}, host=needs + 5 * EACH)  # 2 bytes each: 2 units
    assert sum(h.weight is Tier.HOST for h in plan.placements) == 2
    assert any(f"{2 * EACH // 1000}" in note.replace(".", "") for note in plan.notes)


def test_deepspeed_hints_do_not_change_results(tmp_path: Path) -> None:
    """DeepSpeed options change placement and slots, but not the trained values."""
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    found = []
    for parameter_hints, stage_hints in (
        ({}, {}),
        ({"max_in_cpu": 3000}, {"stage3_max_live_parameters": 10}),
    ):
        config = {
            "train_batch_size": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            ZERO: {
                "stage": 3,
                "offload_param": nvme | parameter_hints,
                "offload_optimizer": nvme,
                **stage_hints,
            },
            "infinity": {"cpu": {"num_threads": 1}},
        }
        engine, *_ = infinity.initialize(model=_model(), config=config)
        with engine:
            in_ram = sum(h.weight is not Tier.DISK for h in engine.plan.placements)
            assert (in_ram > 0) == bool(parameter_hints)
            assert engine.plan.prefetch_units == (1 if stage_hints else 2)
            for index in range(3):
                engine.backward(engine(batch(index)))
                engine.step()
            found.append(masters(engine))
    assert same(*found)


def _model() -> SmallModel:
    torch.manual_seed(0)
    return SmallModel()

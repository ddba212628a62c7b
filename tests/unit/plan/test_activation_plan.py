"""Tests of the `activations` section in plans, forecasts and cost estimates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from unit.plan.test_activations import one_unit

from infinity.config.schema import load_config
from infinity.errors import DoesNotFitError
from infinity.plan.activations import block_widths
from infinity.plan.budget import Limits
from infinity.plan.cost import StepWork
from infinity.plan.inputs import PlanInput, price
from infinity.plan.plan import RuleFacts
from infinity.plan.plan_machine import PlanMachine
from infinity.plan.planner import make_plan
from infinity.plan.rates import nominal
from infinity.plan.saved_plan import off_device_bytes
from infinity.types import Tier

H, TOKENS, BLOCKS = 64, 1000, 6
SHAPES = [(3 * H, H), (H, H), (4 * H, H), (H, 4 * H), (H,)]
_UNITS = [
    one_unit("embed", (500, H)),
    *(
        replace(one_unit(f"blocks.{i}", *SHAPES, first=1 + 10 * i), is_block=True)
        for i in range(BLOCKS)
    ),
    one_unit("head", (500, H), first=100),
]
UNITS = tuple(replace(unit, index=i) for i, unit in enumerate(_UNITS))
INPUT = TOKENS * H * 2
PAGED = -(-INPUT // 4096) * 4096


def plan_of(activations: dict[str, Any], *, unified: bool = False, **limits: Any) -> Any:
    config = load_config({"nvme_path": "/tmp", "activations": activations})
    unlimited = Limits(device=None, host=None, disk=None)
    return make_plan(UNITS, config, replace(unlimited, **limits), unified=unified)


def test_block_widths_only_of_repeated_blocks() -> None:
    assert block_widths(UNITS) == [H] * BLOCKS
    experts = [one_unit(f"blocks.0.experts.{i}", (H, H), (H, H), first=200 + i) for i in range(3)]
    assert block_widths([*UNITS, *experts]) == [H] * BLOCKS


def test_activation_pools_sized_from_tokens() -> None:
    activations = {"checkpoint": "units", "tokens": TOKENS}
    assert plan_of(activations).saved.sizes == (INPUT,) * BLOCKS
    host = plan_of({**activations, "offload": "host", "min_bytes": 1})
    assert host.memory["host"]["activations"] == BLOCKS * PAGED
    assert host.memory["disk"]["activations"] == 0
    assert host.predicted_bytes["from_device"] > plan_of(activations).predicted_bytes["from_device"]
    assert "their inputs wait in" in host.describe()
    disk = plan_of({**activations, "offload": "disk", "min_bytes": 1})
    assert disk.memory["host"]["activations"] == 3 * PAGED
    assert disk.memory["disk"]["activations"] == BLOCKS * PAGED
    written = disk.predicted_bytes["disk_write"] - host.predicted_bytes["disk_write"]
    assert written == BLOCKS * PAGED
    cut = plan_of({**activations, "slices": 4})
    assert cut.saved.sizes == (INPUT // 4,) * 4 * BLOCKS
    small = plan_of(
        {**activations, "offload": "disk"}
    )  # inputs of less than 1 MiB are not offloaded
    assert small.predicted_bytes == plan_of(activations).predicted_bytes


def test_reserved_activations_count_against_budget() -> None:
    activations = {"checkpoint": "units", "offload": "host", "host": "1GiB"}
    plan = plan_of(activations)
    needed = sum(plan.memory["host"].values())
    with pytest.raises(DoesNotFitError, match=r"activations 1\.00 GiB"):
        plan_of(activations, host=needed - 4096)
    assert plan_of(activations, host=needed).saved.host_bytes == 1 << 30


def test_unified_host_offload_moves_nothing() -> None:
    activations = {"checkpoint": "units", "offload": "host", "tokens": TOKENS, "min_bytes": 1}
    plan = plan_of(activations, unified=True)
    assert plan.saved.offload is None
    assert any("moves nothing" in note for note in plan.notes)
    disk = plan_of({**activations, "offload": "disk"}, unified=True)
    assert disk.saved.offload is Tier.DISK
    assert not disk.predicted_bytes["from_device"]


def case_of(activations: dict[str, Any], device: int | None = 1 << 30, **config: Any) -> PlanInput:
    loaded = load_config({"nvme_path": "/tmp", "activations": activations, **config})
    machine = PlanMachine("m", 8 << 30, device, 64 << 30, 8, nominal(device is None))
    return PlanInput(UNITS, loaded, machine, StepWork(TOKENS), RuleFacts())


RECOMPUTE_UNITS = {"checkpoint": "units"}


def test_price_counts_recomputation_and_offloaded_inputs() -> None:
    plain, units = price(case_of({})), price(case_of(RECOMPUTE_UNITS))
    assert units.case.work.recompute
    assert units.activations.boundaries >= BLOCKS * INPUT
    assert units.activations.saved < plain.activations.saved / 2
    assert units.cost.seconds >= plain.cost.seconds
    # the case knows the tokens, so the configuration may leave them out
    away = price(case_of({**RECOMPUTE_UNITS, "offload": "host", "min_bytes": 1}))
    expected = (BLOCKS - 3) * INPUT  # three may be in flight
    assert off_device_bytes(away.plan.saved) == expected
    assert units.activations.boundaries - away.activations.boundaries == expected
    smaller = away.case.with_step(TOKENS // 2, 2).plan()
    assert smaller.saved.sizes == (INPUT // 2,) * BLOCKS


def test_forecast_counts_inputs_of_every_micro_batch() -> None:
    activations = {**RECOMPUTE_UNITS, "offload": "disk", "min_bytes": 1}
    for count in (1, 3):
        config = {"gradient_accumulation_steps": count}
        offloaded = case_of(activations, **config).plan().predicted_bytes
        without = case_of(RECOMPUTE_UNITS, **config).plan().predicted_bytes
        difference = {
            direction: offloaded[direction] - without[direction] for direction in offloaded
        }
        assert difference == {
            "disk_read": count * BLOCKS * PAGED,
            "disk_write": count * BLOCKS * PAGED,
            "to_device": count * BLOCKS * INPUT,
            "from_device": count * BLOCKS * INPUT,
            **dict.fromkeys(("all_gather", "all_to_all", "between_hosts"), 0),
        }

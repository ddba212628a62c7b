"""Tests of the cost model of a step against times computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from unit.plan.test_planner import plan_of

from infinity.config.schema import load_config
from infinity.plan import cost
from infinity.plan.budget import Limits
from infinity.plan.cost import (
    StepWork,
    computing,
    disk_days,
    flop_per_token,
    step_cost,
    stream_s,
    update_s,
)
from infinity.plan.forecast import forecast_bytes, forecast_phases
from infinity.plan.layout import BF16, ParameterFacts, lay_out
from infinity.plan.plan import DIRECTIONS, RuleFacts
from infinity.plan.planner import make_plan
from infinity.plan.rates import Rates
from infinity.types import MomentFormat, Tier

ON_DISK = dict.fromkeys(("weights", "optimizer_state", "gradients"), "disk")
GB = 1e9
CPU = Rates(disk_read=2 * GB, disk_write=GB, disk_mixed=3 * GB, update={"fp32": GB, "8bit": 2 * GB},
            compute={"bf16": 100 * GB})  # fmt: skip
SIZES = [102_400] * 8


def test_disk_s_combines_mixed_and_single_direction_rates() -> None:
    assert CPU.disk_s(0, 0) == 0
    assert CPU.disk_s(6 * 10**9, 0) == 3
    assert CPU.disk_s(0, 6 * 10**9) == 6
    assert CPU.disk_s(5 * 10**9, 3 * 10**9) == pytest.approx(2 * 3 / 3 + 2 / 2)


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 2, 8])
def test_phase_bytes_sum_to_step(micro_batches: int, count: int) -> None:
    plan = plan_of(SIZES[:count], placement=ON_DISK, gradient_accumulation_steps=micro_batches)
    phases = forecast_phases(plan)
    assert [(p.micro_batch, p.backward) for p in phases] == [
        (m, backward) for m in range(micro_batches) for backward in (False, True)
    ]
    assert [p.has_update for p in phases] == [True] + [False] * (2 * micro_batches - 1)
    total = {resource: sum(p.moved[resource] for p in phases) for resource in DIRECTIONS}
    assert total == forecast_bytes(plan) == plan.predicted_bytes


def test_bytes_assigned_to_phase_that_moves_them() -> None:
    """With gradients in host memory, only the update writes; backward rereads evicted weights."""
    plan = plan_of(SIZES, placement=ON_DISK | {"gradients": "host"}, prefetch_units=1)
    forward, backward = forecast_phases(plan)
    weights = 102_400 * 2
    assert forward.moved["disk_write"] == forward.moved["disk_read"] == 8 * 102_400 * 12
    assert backward.moved["disk_write"] == 0
    assert backward.moved["disk_read"] == (8 - 3) * weights  # three slots stay for backward


def test_slowest_resource_determines_phase_time() -> None:
    plan = plan_of(SIZES, placement=ON_DISK | {"gradients": "host"}, prefetch_units=1)
    cost = step_cost(plan, CPU, StepWork(tokens=1000))
    forward, backward = cost.phases
    numel = sum(SIZES)
    assert (forward.name, backward.name) == ("forward 1", "backward 1")
    memory = 26 * GB
    read = max(0.0, numel * 2 / memory)  # vectors: no products, one pass over the weights
    assert forward.resources["compute and update"] == pytest.approx(read + numel / GB)
    assert forward.resources["disk"] == pytest.approx(2 * numel * 12 / (3 * GB))
    last = SIZES[-1] * 2 / memory  # the last unit computes after all transfers
    assert forward.seconds == pytest.approx(forward.resources["disk"] + last)
    assert forward.binds == backward.binds == cost.binds == "disk"
    assert backward.resources["compute"] == pytest.approx(read + numel * (2 * 2 + 2 + 2) / memory)
    assert cost.seconds == forward.seconds + backward.seconds
    assert cost.resources["disk"] == forward.resources["disk"] + backward.resources["disk"]


def test_compute_starts_after_first_unit_updated() -> None:
    plan = plan_of(SIZES, placement=ON_DISK | {"gradients": "host"}, prefetch_units=1)
    slow = replace(CPU, update={"fp32": GB / 1000})  # memory is slow too, so compute binds
    forward = step_cost(plan, slow, StepWork(tokens=1000)).phases[0]
    assert forward.binds == "compute and update"
    first = forward.resources["disk"] / len(SIZES)
    assert forward.seconds == pytest.approx(forward.resources["compute and update"] + first)


@pytest.mark.parametrize("unified", [True, False])
def test_disk_traffic_costs_compute_only_if_unified(unified: bool) -> None:
    plan = plan_of(SIZES, placement=ON_DISK | {"gradients": "host"}, unified=unified)
    links = {} if unified else {"to_device": 4 * GB, "from_device": 2 * GB}
    free = replace(CPU, **links)
    costly = replace(free, disk_per_cpu_s=5 * GB)
    work = StepWork(tokens=1000)
    pairs = zip(
        step_cost(plan, free, work).phases, step_cost(plan, costly, work).phases, strict=True
    )
    lost = {}
    for before, after in pairs:
        named = computing(before.resources)
        lost[before.name] = after.resources[named] - before.resources[named]
        assert before.resources.keys() == after.resources.keys()
    moved = sum(plan.predicted_bytes[name] for name in ("disk_read", "disk_write"))
    assert sum(lost.values()) == pytest.approx(moved / (5 * GB) if unified else 0.0)
    assert lost["forward 1"] > lost["backward 1"] or not unified


def test_separate_device_overlaps_update() -> None:
    plan = plan_of(SIZES, placement=ON_DISK | {"gradients": "host"}, unified=False)
    links = {"to_device": 4 * GB, "from_device": 2 * GB}
    rates = Rates(CPU.disk_read, CPU.disk_write, CPU.disk_mixed, CPU.update, CPU.compute, **links)
    forward, backward = step_cost(plan, rates).phases
    assert forward.resources["update"] == pytest.approx(sum(SIZES) / GB)
    assert forward.resources["compute"] == backward.resources["compute"] == 0
    moved = plan.predicted_bytes
    assert forward.resources["to_device"] + backward.resources["to_device"] == pytest.approx(
        moved["to_device"] / (4 * GB)
    )
    assert backward.resources["from_device"] == pytest.approx(moved["from_device"] / (2 * GB))


def test_mixed_copies_priced_at_shared_link_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cost, "CALL_S", 0.0)  # chunks are small here
    links = {"to_device": 4 * GB, "from_device": 2 * GB}
    disk = {"disk_read": GB, "disk_write": GB, "disk_mixed": GB}
    alone = Rates(**links, **disk, update={"fp32": GB})
    shared = replace(alone, copies_mixed=3 * GB)
    assert alone.copies_s(8 * GB, 2 * GB) == (2.0, 1.0)
    assert shared.copies_s(8 * GB, 2 * GB) == pytest.approx((4 / 3 + 6 / 4, 4 / 3))
    assert shared.copies_s(2 * GB, 8 * GB) == pytest.approx((4 / 3, 4 / 3 + 6 / 2))
    assert shared.copies_s(8 * GB, 0) == (2.0, 0.0)
    plan = plan_of(SIZES, placement=dict.fromkeys(ON_DISK, "host"), unified=False)
    plan = replace(plan, device_kernels=True, streamed=frozenset(plan.placements))
    assert stream_s(plan, shared) > 1.2 * stream_s(plan, alone) > 0
    separate_resources, shared_resources = (
        step_cost(plan, rates).phases[0].resources for rates in (alone, shared)
    )
    slower_s = stream_s(plan, shared) - stream_s(plan, alone)
    assert shared_resources["update"] - separate_resources["update"] == pytest.approx(slower_s)
    assert shared_resources["to_device"] > separate_resources["to_device"]


def test_lossy_moments_use_their_update_rate() -> None:

    plan = plan_of(SIZES)
    rule = RuleFacts("AdamW", (MomentFormat.INT8, MomentFormat.INT8))

    lossy = make_plan(
        plan.units, load_config({}), Limits(None, None, None), unified=True, rule=rule
    )
    assert update_s(plan, CPU) == (pytest.approx(sum(SIZES) / GB), 0, 0)
    assert update_s(lossy, CPU) == (pytest.approx(sum(SIZES) / (2 * GB)), 0, 0)


def test_flops_count_only_multiplied_matrices() -> None:

    facts = [
        ParameterFacts("table", 0, (1000, 64), "bfloat16", 64_000, 2, True, 0),
        ParameterFacts("weight", 1, (64, 64), "bfloat16", 4096, 2, True, 0),
    ]
    config, limits = load_config({}), Limits(None, None, None)
    plan = make_plan((lay_out(0, "all", facts, BF16),), config, limits, unified=False)
    rates = Rates(GB, GB, GB, compute={"bf16": GB})
    work = StepWork(tokens=10, lookups=frozenset({0}))
    assert flop_per_token(plan.units, work) == 6 * 4096
    forward, backward = step_cost(plan, rates, work).phases
    assert forward.resources["compute"] == pytest.approx(2 * 4096 * 10 / GB)
    assert backward.resources["compute"] == pytest.approx(4 * 4096 * 10 / GB)
    again = step_cost(plan, rates, StepWork(tokens=10, recompute="all")).phases[1]
    assert again.resources["compute"] == pytest.approx(6 * (4096 + 64_000) * 10 / GB)
    frozen = [facts[0], replace(facts[1], trained=False, form="nf4")]
    plan = make_plan((lay_out(0, "all", frozen, BF16),), config, limits, unified=False)
    forward, backward = step_cost(plan, rates, work).phases  # gradients of inputs only
    assert backward.resources["compute"] == forward.resources["compute"]
    assert forward.resources["compute"] == pytest.approx(2 * 4096 * 10 / GB)
    assert flop_per_token(plan.units, work) == 4 * 4096


def test_elementwise_attention_and_logits_use_separate_rates() -> None:
    facts = [
        ParameterFacts(name, index, shape, "bfloat16", math.prod(shape), 2, True, 0)
        for index, (name, shape) in enumerate([("attn.weight", (64, 64)), ("head", (1000, 64))])
    ]
    config, limits = load_config({}), Limits(None, None, None)
    plan = make_plan((lay_out(0, "all", facts, BF16),), config, limits, unified=False)
    rates = Rates(GB, GB, GB)
    work = StepWork(tokens=10, context=4, heads=frozenset({1}))

    def seconds(work: StepWork = work, **known: Any) -> list[float]:
        phases = step_cost(plan, replace(rates, **known), work).phases
        return [phase.resources["compute"] for phase in phases]

    assert seconds() == [0, 0]
    sides = (64 + 64) + 64  # logits are not among them
    assert seconds(between={"bf16": GB}) == pytest.approx(
        [10 * 2 * sides * passes / GB for passes in (27 / 16, 63 / 16)]
    )
    attention = [2 * 4 * 64 * 10 / GB, 5 * 4 * 64 * 10 / GB]
    assert seconds(attention={"bf16": GB}) == pytest.approx(attention)
    again = seconds(replace(work, recompute="all"), attention={"bf16": GB})
    assert again == pytest.approx([attention[0], attention[0] + attention[1]])
    assert seconds(logits=GB) == pytest.approx([10 * 1000 / 2 / GB] * 2)


def test_tied_head_computed_after_last_update() -> None:
    table = ParameterFacts("table", 0, (1000, 64), "bfloat16", 64_000, 2, True, 0)
    block = ParameterFacts("up", 1, (64, 64), "bfloat16", 4096, 2, True, 0)
    units = tuple(lay_out(i, facts.name, [facts], BF16) for i, facts in enumerate([table, block]))
    config = load_config({"nvme_path": "/nvme", "placement": ON_DISK})
    plan = make_plan(units, config, Limits(None, None, None), unified=False)
    work = StepWork(tokens=10, heads=frozenset({0}))
    forward = step_cost(plan, Rates(GB, GB, GB, compute={"bf16": GB}, logits=GB), work).phases[0]
    tail = 2 * (4096 + 64_000) * 10 / GB + 10 * 1000 / 2 / GB
    assert forward.resources["compute"] == pytest.approx(tail)
    assert forward.seconds == pytest.approx(forward.resources["disk"] + tail)


def test_disk_days_to_rated_endurance() -> None:
    assert disk_days(10**12, 86400.0, 600e12) == 600
    assert disk_days(0, 1.0, 600e12) == float("inf")


def test_freed_slot_not_filled_twice() -> None:
    """The optimizer pass does not publish the first unit, but all the following ones."""
    facts = [ParameterFacts(f"p{i}", i, (9216,), "bfloat16", 9216, 2, True, 0) for i in range(12)]
    layouts = tuple(lay_out(i, f"u{i}", [facts[i]], BF16, ranks=3) for i in range(12))
    config = load_config(
        {
            "nvme_path": "/nvme",
            "placement": ON_DISK | {"reshard_after_forward": True},
            "prefetch_units": 1,
        }
    )
    plan = make_plan(layouts, config, Limits(None, None, None), unified=False)
    first = plan.placements[0]._replace(weight=Tier.DEVICE)
    mixed = replace(plan, placements=(first, *plan.placements[1:]))
    fetched = [phase.moved["all_gather"] / (2 * layouts[0].shard_bytes)
               for phase in forecast_phases(mixed)]  # fmt: skip
    assert fetched[0] >= 12, "each in its turn"
    assert fetched[1] >= 12 - 3, "what three slots do not hold any more"

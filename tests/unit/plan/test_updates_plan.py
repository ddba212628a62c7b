"""Tests of updates streamed through the device: their costs and when the plan chooses them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from unit.plan.test_planner import UNLIMITED, units

from infinity.config.schema import load_config
from infinity.errors import DoesNotFitError
from infinity.plan.budget import AUTO_SHARE, Limits, with_memory
from infinity.plan.cost import CALL_S, issue_calls_s, step_cost, stream_s, update_s
from infinity.plan.forecast import forecast_phases
from infinity.plan.plan import Plan, RuleFacts, UnitPlacement, UpdatePlace, update_place
from infinity.plan.planner import make_plan
from infinity.plan.rates import NOMINAL, Rates
from infinity.types import Tier

IN_RAM = dict.fromkeys(("weights", "optimizer_state", "gradients"), "host")
ON_DISK = dict.fromkeys(("weights", "optimizer_state", "gradients"), "disk")
ON_DEVICE = dict.fromkeys(("weights", "optimizer_state", "gradients"), "device")
NUMEL = 1 << 20
SIZES = [NUMEL] * 8
CHUNK = 1 << 16
# A hundredth of common rates, like the model; the overhead of device calls is negligible.
RATES = Rates(disk_read=1e10, disk_write=1e10, disk_mixed=1e10, update={"fp32": 1e7},
              to_device=28e7, from_device=24e7, device_update=1e9)  # fmt: skip


def plan_of(
    placement: dict[str, str] | None = None,
    update: str = "auto",
    limits: Limits = UNLIMITED,
    *,
    rates: Rates = RATES,
    kernels: bool = True,
    rule: RuleFacts | None = None,
    unified: bool = False,
    **overrides: Any,
) -> Plan:
    options = {
        "nvme_path": "/nvme",
        "placement": placement or {},
        "update": update,
        "chunk_size": CHUNK,
    }
    config = load_config(options | overrides)
    return make_plan(units(SIZES, config.precision), config, limits, unified=unified, rule=rule,
                     device_kernels=kernels, rates=rates)  # fmt: skip


def update_places(plan: Plan) -> set[UpdatePlace]:
    return {update_place(plan, unit.index) for unit in plan.units}


@pytest.mark.parametrize(("micro_batches", "gradient"), [(1, 2), (2, 4)])
def test_streamed_update_bytes_and_seconds(micro_batches: int, gradient: int) -> None:
    """Per element, 12 bytes and the gradient enter at 280 MB/s, 12 leave at 240 MB/s."""
    overrides = {"gradient_accumulation_steps": micro_batches}
    plan = plan_of(IN_RAM, "device", **overrides)
    updated, numel = forecast_phases(plan)[0].moved, sum(SIZES)
    assert (updated["to_device"], updated["from_device"]) == ((12 + gradient) * numel, 12 * numel)
    assert stream_s(plan, RATES) == pytest.approx(numel * max((12 + gradient) / 28e7, 12 / 24e7))
    assert update_s(plan, RATES) == (0.0, 0.0, pytest.approx(numel / 1e9))
    assert plan.memory["device"]["streaming"] == 3 * CHUNK * (12 + gradient)
    phase = step_cost(plan, RATES).phases[0]
    assert phase.seconds == pytest.approx(stream_s(plan, RATES))
    assert phase.resources["update"] == 0
    by_cpu = step_cost(plan_of(IN_RAM, "cpu", **overrides), RATES).phases[0]
    assert by_cpu.seconds == by_cpu.resources["update"] == pytest.approx(numel / 1e7)


def test_cpu_and_streamed_units_updated_sequentially() -> None:
    plan = plan_of(IN_RAM, "cpu")
    half = [UnitPlacement(Tier.HOST, Tier.HOST, Tier.DISK)] * 4
    mixed = replace(
        plan, placements=(*plan.placements[:4], *half), streamed=frozenset(plan.placements[:1])
    )
    mixed = with_memory(mixed, UNLIMITED)
    assert update_places(mixed) == {UpdatePlace.STREAMED, UpdatePlace.CPU}
    assert mixed.updates_line == "streamed through the device (4 units), by the CPU (4 units)"
    directions = step_cost(mixed, RATES).phases[0].resources
    assert directions["update"] == pytest.approx(4 * NUMEL / 1e7 + stream_s(mixed, RATES))


@pytest.mark.parametrize(
    ("cpu", "link", "place", "share"),
    [
        (1e5, 28e7, UpdatePlace.STREAMED, 0),
        (1e7, 28e7, UpdatePlace.STREAMED, 0.35),
        (3e7, 28e7, UpdatePlace.STREAMED, 0.65),
        (1e7, 4e7, UpdatePlace.STREAMED, 0.87),
        (3e7, 3e7, UpdatePlace.CPU, 0),
    ],
    ids=["slow_cpu", "both", "fast_cpu", "slow_links", "slower_links"],
)
def test_auto_chooses_fastest_update_place(
    cpu: float, link: float, place: UpdatePlace, share: float
) -> None:
    """With 14 bytes in, 280 MB/s are 2e7 parameters per second, in addition to the CPU's."""
    rates = replace(RATES, update={"fp32": cpu}, to_device=link, from_device=link)
    plan = plan_of(IN_RAM, rates=rates)
    assert (update_places(plan), plan.cpu_share) == ({place}, share)
    forced = {
        update: step_cost(plan_of(IN_RAM, update, rates=rates), rates).seconds
        for update in ("cpu", "device")
    }
    every = [
        step_cost(replace(plan_of(IN_RAM, "device"), cpu_share=n / 16), rates).seconds
        for n in range(16)
    ]
    assert step_cost(plan, rates).seconds <= 1.05 * min(*forced.values(), *every)


def test_cpu_share_is_spread_over_each_unit() -> None:
    plan = replace(plan_of(IN_RAM, "device"), cpu_share=0.25, chunks_at_once=2)
    passages = list(plan.chunk_batches(plan.units[0], plan.placements[0]))
    assert [chunk for chunks, _ in passages for chunk in chunks if chunk >= 12] == [12, 13, 14, 15]
    assert sorted(c for chunks, _ in passages for c in chunks) == list(range(NUMEL // CHUNK))
    assert [len(chunks) if by_device else 0 for chunks, by_device in passages] == [
        2, 0, 2, 2, 2, 0, 2, 2,
    ]  # fmt: skip
    assert (
        plan.updates_line == "streamed through the device, 25% of these by the CPU at the same time"
    )
    updated = forecast_phases(plan)[0].moved
    numel, by_cpu = sum(SIZES), sum(SIZES) // 4  # the CPU sends 2 bytes of new weight per element
    assert updated["to_device"] == 14 * (numel - by_cpu) + 2 * by_cpu
    assert updated["from_device"] == 12 * (numel - by_cpu)


def test_cpu_batches_chunks_if_all_kinds_in_host() -> None:
    """Batching saves Python calls, which take as long as the updates on a fast CPU."""
    for placement, lengths in (
        (IN_RAM, [5, 5, 5, 1]),
        ({**IN_RAM, "weights": "device"}, [1] * 16),
        ({**IN_RAM, "optimizer_state": "disk"}, [1] * 16),
    ):
        plan = replace(plan_of(placement, "cpu"), chunks_at_once=5)
        passages = plan.chunk_batches(plan.units[0], plan.placements[0])
        assert [(len(chunks), by_device) for chunks, by_device in passages] == [
            (length, False) for length in lengths
        ]


def test_call_overhead_binds_for_small_chunks() -> None:
    """Ten calls per passage: four kinds in and out, the gradient in, and a kernel."""
    fast = replace(RATES, to_device=11e9, from_device=10e9)
    plan = plan_of(IN_RAM, "device", rates=fast)
    passages = sum(SIZES) // CHUNK
    assert stream_s(plan, fast) == issue_calls_s(plan) == pytest.approx(passages * 10 * CALL_S)
    assert step_cost(plan, fast).phases[0].binds == "calls"
    wide = replace(plan, chunks_at_once=16)
    assert issue_calls_s(wide) == pytest.approx(issue_calls_s(plan) / 16)
    assert stream_s(wide, fast) > issue_calls_s(wide)


def test_chunks_at_once_limited_by_device_budget() -> None:
    """Buffers take a tenth of the device; an explicit chunk_size applies to them too."""
    for device_bytes, expected in ((1690 << 20, 4), (1670 << 20, 2), (800 << 20, 1)):
        config = load_config({"placement": IN_RAM, "update": "device"})
        many = units([8 << 20] * 2, "bf16")
        plan = make_plan(many, config, Limits(device_bytes, None, None), unified=False,
                         device_kernels=True, rates=RATES)  # fmt: skip
        assert plan.chunks_at_once == expected
    assert plan_of(IN_RAM, "device").chunks_at_once == 1


def test_gradient_sums_placed_on_device_if_host_binds() -> None:
    """Later micro-batches read 2 and 4 bytes and write 4; an update moves 26 in memory."""
    sums = {"gradient_accumulation_steps": 4, "update": "cpu"}
    rates = replace(RATES, to_device=1e12, from_device=1e12)
    plan = plan_of(IN_RAM, rates=rates, **sums)
    first, later = (step_cost(plan, rates).phases[n].resources["sums"] for n in (1, 3))
    assert first == pytest.approx(sum(SIZES) * 6 / (26 * 1e7))
    assert later == pytest.approx(sum(SIZES) * 10 / (26 * 1e7))
    assert step_cost(plan, rates).phases[3].binds == "sums"
    assert not any(phase.resources["sums"] for phase in step_cost(plan_of(IN_RAM), rates).phases)
    device_bytes = 4 * NUMEL * 2 + 3 * NUMEL * 4  # slots and three units of fp32 gradients
    limits = Limits(int(device_bytes / AUTO_SHARE) + 2, None, None)
    few = plan_of({"optimizer_state": "host"}, limits=limits, rates=rates, **sums)
    assert [placement.gradient for placement in few.placements].count(Tier.DEVICE) == 3


def test_disk_bound_updates_streamed_only_on_request() -> None:
    assert update_places(plan_of(ON_DISK, rates=NOMINAL)) == {UpdatePlace.CPU}
    assert update_places(plan_of(ON_DISK, "device", rates=NOMINAL)) == {UpdatePlace.STREAMED}


def test_device_resident_units_updated_on_device() -> None:
    for update in ("auto", "cpu", "device"):
        plan = plan_of(ON_DEVICE, update)
        assert update_places(plan) == {UpdatePlace.DEVICE}
        assert plan.memory["device"]["streaming"] == 0
        assert plan.updates_line == "on the device"


def test_streaming_buffers_count_against_device_budget() -> None:
    """If they do not fit, the CPU updates; an explicit request is rejected with numbers."""
    slots = 4 * NUMEL * 2
    need = 3 * CHUNK * 14
    assert update_places(plan_of(IN_RAM, limits=Limits(slots + need, None, None))) == {
        UpdatePlace.STREAMED
    }
    tight = Limits(slots + need - 1, None, None)
    assert update_places(plan_of(IN_RAM, limits=tight)) == {UpdatePlace.CPU}
    tighter = Limits(2 * NUMEL * 2 + need - 1, None, None)
    with pytest.raises(DoesNotFitError, match="streaming") as caught:
        plan_of(IN_RAM, "device", tighter)
    assert "leave update: device out" in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ({"kernels": False}, "the device has no kernels"),
        ({"rule": RuleFacts("NAdam", tile_elements=4096)}, "NAdam is not one of our kernels"),
        ({"unified": True, "kernels": False}, "the device is the CPU"),
    ],
    ids=["no_kernels", "adapted", "cpu"],
)
def test_unavailable_device_update_falls_back_with_note(
    overrides: dict[str, Any], why: str
) -> None:
    plan = plan_of(IN_RAM, "device", **overrides)
    assert update_places(plan) == {UpdatePlace.CPU}
    assert plan.notes[-1] == f"update: device is not used: {why}"
    text = plan.describe()
    assert plan.unified or f"updates               by the CPU: {why}" in text
    assert not any("update" in note for note in plan_of(IN_RAM, **overrides).notes)


def test_auto_placement_streams_updates() -> None:
    """On a device too small for the model, updates of units in RAM are streamed."""
    limits = Limits(28 << 20, 1 << 30, None)
    plan = plan_of(limits=limits)
    assert UpdatePlace.STREAMED in update_places(plan)
    assert plan.tier_bytes["device"] <= 28 << 20
    by_cpu = plan_of(update="cpu", limits=limits)
    assert step_cost(plan, RATES).seconds < 0.95 * step_cost(by_cpu, RATES).seconds


def test_streaming_stays_within_auto_share() -> None:
    """Automatic placement and streaming buffers leave a share of the device to activations."""
    for megabytes in (24, 28, 40, 64):
        limits = Limits(megabytes << 20, 1 << 30, None)
        plan = plan_of(limits=limits)
        assert plan.tier_bytes["device"] <= AUTO_SHARE * (megabytes << 20)
    assert UpdatePlace.STREAMED in update_places(plan)


def test_unused_disk_does_not_change_plan() -> None:
    """An unused `nvme_path` must not change placement, updates or chunks at once."""
    many, limits, found = units([64 << 20] * 40, "bf16"), Limits(8 << 30, 64 << 30, 1 << 40), []
    for options in ({}, {"nvme_path": "/nvme"}):
        config = load_config(options)
        plan = make_plan(many, config, limits, unified=False, device_kernels=True)
        assert not any(plan.memory[Tier.DISK].values())
        found.append((plan.placements, update_places(plan), plan.chunks_at_once))
    assert found[0] == found[1]
    assert UpdatePlace.STREAMED in found[0][1]

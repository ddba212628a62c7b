"""Tests of the planner: placement, budgets, slots, forecasts and error messages."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.config.schema import load_config
from infinity.errors import ConfigError, DoesNotFitError
from infinity.plan.budget import Limits
from infinity.plan.forecast import forecast_bytes
from infinity.plan.layout import PRECISIONS, ParameterFacts, UnitLayout, lay_out
from infinity.plan.plan import DIRECTIONS, Plan, RuleFacts
from infinity.plan.planner import make_plan
from infinity.types import Kind, MomentFormat, Tier

TIERS = ("device", "host", "disk")
MIB = 1 << 20
UNLIMITED = Limits(None, None, None)
sizes_of_units = st.lists(st.integers(1, 60_000), min_size=1, max_size=7)


def units(sizes: Sequence[int], precision: str = "bf16", frozen: int = 0) -> tuple[UnitLayout, ...]:
    """Return units of one trained parameter each; the first also has `frozen` int8 values."""
    dtype, itemsize = ("bfloat16", 2) if precision == "bf16" else ("float32", 4)
    found = []
    for index, size in enumerate(sizes):
        facts = [ParameterFacts(f"p{index}", index, (size,), dtype, size, itemsize, True, 0)]
        if frozen and not index:
            facts.append(ParameterFacts("f", len(sizes), (frozen,), "int8", frozen, 1, False, -1))
        found.append(lay_out(index, f"unit{index}", facts, PRECISIONS[precision]))
    return tuple(found)


def plan_of(
    sizes: Sequence[int],
    limits: Limits = UNLIMITED,
    *,
    unified: bool = True,
    placement: dict[str, str] | None = None,
    frozen: int = 0,
    **overrides: Any,
) -> Plan:
    options = {"nvme_path": "/nvme", "placement": placement or {}, **overrides}
    options = {k: v for k, v in options.items() if v is not None}
    config = load_config(options)
    return make_plan(units(sizes, config.precision, frozen), config, limits, unified=unified)


def refusal(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(DoesNotFitError) as caught:
        plan_of(*args, **kwargs)
    return str(caught.value)


def assert_sums(plan: Plan) -> None:
    """Assert that the memory table counts every byte of every unit exactly once."""
    per_state = plan.precision.master_state + 8  # two fp32 moments
    for tier in Tier:
        memory = plan.memory[tier.value]
        at = [h for h in zip(plan.units, plan.placements, strict=True)]  # noqa: C416
        assert memory["weights"] == sum(u.slot_bytes for u, h in at if h.weight is tier)
        assert memory["state"] == sum(u.numel * per_state for u, h in at if h.state is tier)
        assert memory["gradients"] == sum(
            u.numel * plan.gradient_itemsize for u, h in at if h.gradient is tier
        )
    slots = sum(c.slot_bytes * c.count for c in plan.slot_classes)
    assert plan.memory["device"]["slots"] == slots


def assert_slots_serve(plan: Plan) -> None:
    for unit in plan.units:
        index = plan.class_of(unit.index)
        if plan.placements[unit.index].weight is Tier.DEVICE:
            assert index is None
        elif unit.slot_bytes:
            assert index is not None
            slot_class = plan.slot_classes[index]
            assert unit.slot_bytes <= slot_class.slot_bytes < 2 * unit.slot_bytes
            assert 1 <= slot_class.count <= len(slot_class.members)


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize(
    ("weights", "moments", "gradients"), list(itertools.product(TIERS, repeat=3))
)
def test_explicit_placement_is_honoured(
    weights: str, moments: str, gradients: str, unified: bool
) -> None:
    requested = {"weights": weights, "optimizer_state": moments, "gradients": gradients}
    plan = plan_of([5000, 7000, 40000], placement=requested, unified=unified)
    for placement in plan.placements:
        expected = "device" if unified and weights == "host" else weights
        assert placement.weight.value == expected
        assert placement.state.value == moments
        assert placement.gradient.value == gradients
    assert_sums(plan)
    assert_slots_serve(plan)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("kind", ["weights", "optimizer_state", "gradients"])
def test_explicit_tier_that_does_not_fit_rejected(kind: str, tier: str) -> None:
    requested = dict.fromkeys(("weights", "optimizer_state", "gradients"), "auto") | {kind: tier}
    roomy = dict.fromkeys(TIERS, 2**40)
    tight = Limits(**{**roomy, tier: 64 << 10})
    text = refusal([100_000, 100_000], tight, placement=requested, unified=False)
    assert "64.00 KiB" in text
    assert f"budget.{tier}" in text


budgets = st.fixed_dictionaries(
    {
        "unified": st.booleans(),
        "device": st.integers(0, 400),
        "host": st.integers(0, 400),
        "micro_batches": st.sampled_from([1, 2]),
        "precision": st.sampled_from(["fp32", "fp16", "bf16"]),
        "frozen": st.sampled_from([0, 5000]),
    }
)


@given(sizes_of_units, budgets)
@settings(max_examples=15, deadline=None)
def test_plan_respects_budgets_or_is_rejected(sizes: list[int], drawn: dict[str, Any]) -> None:
    assert_budgets_kept(sizes, **drawn)


@pytest.mark.big
@given(sizes_of_units, budgets)
@settings(max_examples=300, deadline=None)
def test_many_plans_respect_budgets(sizes: list[int], drawn: dict[str, Any]) -> None:
    assert_budgets_kept(sizes, **drawn)


def assert_budgets_kept(
    sizes: list[int],
    unified: bool,
    device: int,
    host: int,
    micro_batches: int,
    precision: str,
    frozen: int,
) -> None:
    limits = Limits(device << 12 if device else None, host << 13, 1 << 40, base=4096)
    try:
        plan = plan_of(
            sizes,
            limits,
            unified=unified,
            frozen=frozen,
            precision=precision,
            gradient_accumulation_steps=micro_batches,
            chunk_size=4096,
        )
    except DoesNotFitError as error:
        assert "try:" in str(error)  # noqa: PT017
        return
    used = plan.tier_bytes
    assert used["device"] <= (limits.device if limits.device is not None else 2**60)
    assert used["host"] + (used["device"] if unified else 0) <= (limits.host or 0)
    assert_sums(plan)
    assert_slots_serve(plan)
    assert set(plan.predicted_bytes) == set(DIRECTIONS)
    assert plan.describe()


def test_no_limits_places_everything_on_device() -> None:
    plan = plan_of([5000, 7000])
    assert {h.weight for h in plan.placements} == {Tier.DEVICE}
    assert {h.state for h in plan.placements} == {Tier.DEVICE}
    assert plan.slot_classes == ()
    assert set(plan.predicted_bytes.values()) == {0}


def test_auto_fills_device_then_host_then_disk() -> None:
    sizes = [100_000] * 12
    seen = set()
    previous = 99
    for host in range(1, 40):
        limits = Limits(2 << 20, host << 19, 1 << 40)
        try:
            plan = plan_of(sizes, limits, unified=False, chunk_size=8192)
        except DoesNotFitError:
            continue
        on_disk = plan.memory["disk"]["state"] // (102_400 * 10)
        assert on_disk <= previous  # more budget never puts more on disk
        previous = on_disk
        seen.add(on_disk)
    assert previous == 0
    assert len(seen) > 4


def test_auto_uses_no_disk_if_host_suffices() -> None:
    plan = plan_of([100_000] * 4, Limits(MIB, 1 << 30, 1 << 40), unified=False)
    assert Tier.DISK not in {h.of(k) for h in plan.placements for k in Kind}
    assert plan.tier_bytes["device"] <= MIB


def test_auto_fills_host_with_weights_first() -> None:
    """A weight byte in RAM saves three bytes of disk traffic, one of gradients or state two."""
    sizes, on_disk = (
        [1_000_000] * 8,
        dict.fromkeys(("weights", "optimizer_state", "gradients"), "disk"),
    )
    lean = plan_of(sizes, placement=on_disk, chunk_size=65536)
    ram_bytes = (
        lean.tier_bytes["host"] + lean.tier_bytes["device"] + 9 * MIB
    )  # 8 units x 2 bytes: 15
    plan = plan_of(sizes, Limits(None, int(ram_bytes / 0.7), 1 << 40), chunk_size=65536)
    assert {h.weight for h in plan.placements} == {Tier.DEVICE}
    assert {h.state for h in plan.placements} == {Tier.DISK}


def test_auto_without_nvme_path_stays_in_host() -> None:
    config = load_config({})
    plan = make_plan(units([5000, 7000]), config, Limits(None, 1 << 30, None), unified=False)
    assert Tier.DISK not in {h.of(k) for h in plan.placements for k in Kind}
    with pytest.raises(DoesNotFitError, match="set nvme_path"):
        make_plan(units([500_000] * 4), config, Limits(8 << 20, 4 << 20, None), unified=False)


def test_disk_placement_without_nvme_path_rejected() -> None:
    with pytest.raises(ConfigError, match="nvme_path"):
        load_config({"placement": {"weights": "disk"}})


def test_two_slots_do_not_fit_error_names_largest_unit() -> None:
    requested = dict.fromkeys(("weights", "optimizer_state", "gradients"), "disk")
    text = refusal(
        [5000, 300_000], Limits(MIB, 1 << 30, 1 << 40), placement=requested, unified=False
    )
    assert "cannot hold two slots of the largest unit: 'unit1'" in text
    assert "1.00 MiB" in text
    assert "588.00 KiB" in text  # 300 000 bf16 weights, padded
    assert "initialize(units=" in text


def test_disk_budget_error_reports_missing_bytes() -> None:
    requested = dict.fromkeys(("weights", "optimizer_state", "gradients"), "disk")
    text = refusal([102_400] * 4, Limits(None, None, MIB), placement=requested)
    needed = 4 * 102_400 * (12 + 2)
    assert "5.47 MiB" in text  # needed
    assert "4.47 MiB too much" in text
    assert needed == 5_734_400
    assert "nvme_path" in text


def test_unified_device_budget_error_counts_device_bytes_only() -> None:
    """Only the 12 + 2 bytes per parameter count, not the other bytes in RAM."""
    requested = dict.fromkeys(("weights", "optimizer_state", "gradients"), "device")
    text = refusal([102_400] * 4, Limits(MIB, None, None, base=64 * MIB), placement=requested)
    assert "the device tier needs 5.47 MiB of a budget of 1.00 MiB: 4.47 MiB too much" in text
    assert "process" not in text


def test_prefetch_lowered_to_fit_with_note() -> None:
    requested = dict.fromkeys(("weights", "optimizer_state", "gradients"), "disk")
    slot = 102_400 * 2
    for device, expected in ((20 * slot, 4), (5 * slot, 3), (3 * slot, 1), (2 * slot, 0)):
        limits = Limits(device, 1 << 30, 1 << 40)
        plan = plan_of([102_400] * 8, limits, placement=requested, unified=False, prefetch_units=4)
        assert plan.prefetch_units == expected
        assert sum(c.count for c in plan.slot_classes) == expected + 2
        assert bool(plan.notes) == (expected != 4)
        assert all(f"from 4 to {expected}" in note for note in plan.notes)


def test_units_of_similar_size_share_slot_class() -> None:
    requested = dict.fromkeys(("weights", "optimizer_state", "gradients"), "disk")
    sizes = [2048 * n for n in (64, 63, 33, 32, 20, 1)]
    plan = plan_of(sizes, placement=requested)
    assert [c.members for c in plan.slot_classes] == [(0, 1, 2), (3, 4), (5,)]
    assert_slots_serve(plan)


def test_gradient_is_fp32_only_if_accumulated_or_fp32() -> None:
    assert plan_of([5000]).gradient_itemsize == 2
    assert plan_of([5000], gradient_accumulation_steps=2).gradient_itemsize == 4
    assert plan_of([5000], precision="fp32").gradient_itemsize == 4


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_bytes_per_step_match_documented_table(micro_batches: int) -> None:
    """Matches the table of docs/bytes.md with everything but gradients on disk."""
    count = 2048 * 16
    requested = {"weights": "disk", "optimizer_state": "disk", "gradients": "host"}
    plan = plan_of(
        [count] * 30, placement=requested, unified=True, gradient_accumulation_steps=micro_batches
    )
    moved = forecast_bytes(plan)
    trained = 30 * count
    assert moved["disk_write"] == 12 * trained
    assert moved["to_device"] == moved["from_device"] == 0
    table = 12 + 2 + 4 * (micro_batches - 1)
    # units still in slots between forward and backward are not read again
    retained = 2 * 2 * micro_batches * len(plan.slot_classes) * (plan.prefetch_units + 2) * count
    assert table * trained - retained <= moved["disk_read"] <= table * trained


def test_chunk_elements_limited_by_largest_unit() -> None:
    assert plan_of([5000]).chunk_elements == 3 * 2048
    assert plan_of([5000], chunk_size=2048).chunk_elements == 2048


def test_describe_lists_kinds_and_tiers() -> None:
    requested = {"weights": "device", "optimizer_state": "disk", "gradients": "host"}
    text = plan_of(
        [5000, 6000], Limits(None, 1 << 30, 1 << 40, base=77 << 20), placement=requested
    ).describe()
    for expected in (
        "weights",
        "moments and residual",
        "gradients",
        "disk",
        "process 77.00 MiB",
        "1.00 GiB",
    ):
        assert expected in text


rules = st.builds(
    RuleFacts,
    name=st.just("Rule"),
    moments=st.lists(st.sampled_from(MomentFormat), max_size=4).map(tuple),
    needs_full=st.booleans(),
    tile_elements=st.sampled_from([0, 5000]),
)


@given(sizes_of_units, rules, st.sampled_from(["bf16", "fp16", "fp32"]), st.sampled_from(TIERS))
@settings(max_examples=60, deadline=None)
def test_state_sizes_follow_rule_and_formats(
    sizes: list[int], rule: RuleFacts, precision: str, tier: str
) -> None:
    """Memory, staging, records and forecast are summed chunk by chunk from the formats."""
    placement = dict.fromkeys(("weights", "optimizer_state", "gradients"), tier)
    given = {"nvme_path": "/nvme", "precision": precision, "chunk_size": 4096}
    given["placement"] = placement
    layouts = units(sizes, precision)
    plan = make_plan(layouts, load_config(given), UNLIMITED, unified=False, rule=rule)
    largest = max(u.numel for u in layouts)
    chunk = largest if rule.needs_full else min(4096, largest)
    assert plan.chunk_elements == chunk
    assert (
        rule.needs_full and "chunk_size 4096 is not used" in plan.describe()
    ) or not rule.needs_full
    weight, residual = {"bf16": (2, 2), "fp16": (2, 4), "fp32": (4, 0)}[precision]

    def state(count: int) -> int:
        total = 0
        for kind in rule.moments:
            per = {"fp32": 4, "8bit": 1}.get(kind.value, 2)
            scales = count // 128 * 4 if kind.value == "8bit" else 0
            total += -(-(count * per + scales) // 4096) * 4096
        return total + residual * count

    chunk_sizes = [
        min(chunk, u.numel - first) for u in layouts for first in range(0, u.numel, chunk)
    ]
    everything = sum(map(state, chunk_sizes))
    assert plan.memory[tier]["state"] == everything
    assert plan.memory["host"]["optimizer tiles"] == (8 * 4 * 5000 if rule.tile_elements else 0)
    if tier == "disk":
        weights = sum(u.numel for u in layouts) * weight
        assert plan.predicted_bytes["disk_write"] == everything + weights + sum(
            u.numel * plan.gradient_itemsize for u in layouts
        )
        record = state(chunk) + (weight + plan.gradient_itemsize) * chunk
        assert plan.memory["host"]["staging"] == 4 * record
    text = plan.describe()
    assert ("lossy" in text) == any(not kind.is_exact for kind in rule.moments)


@pytest.mark.parametrize("requested", [{}, {"optimizer_state": "host"}, {"weights": "host"}])
def test_unified_without_disk_places_weights_on_device(requested: dict[str, str]) -> None:
    """Also above 70 % of RAM; weights need no slots and no second copies."""
    resident_bytes = 2 * 100_352 * 14  # two units, padded: 12 bytes of state, 2 of a gradient
    limits = Limits(None, int(resident_bytes / 0.8), None)
    plan = plan_of([100_000] * 2, limits, placement=requested, nvme_path=None, chunk_size=2048)
    assert plan.tier_bytes["host"] + plan.tier_bytes["device"] > 0.7 * resident_bytes / 0.8
    assert {placement.weight for placement in plan.placements} == {Tier.DEVICE}
    assert plan.slot_classes == ()
    separate = plan_of([100_000] * 2, Limits(None, 1 << 30, None), unified=False, nvme_path=None,
                    placement={"weights": "host"})  # fmt: skip
    assert separate.slot_classes  # a separate device has slots


def test_initial_write_memory_excludes_untouched_gradients() -> None:
    sizes, requested = (
        [100_000] * 2,
        {"weights": "device", "optimizer_state": "host", "gradients": "host"},
    )
    chunk = 100_352
    working = 2 * 12 * chunk + 4 * chunk + 5 * MIB  # two records, a master, a value of 5 MiB
    limits = Limits(None, None, None, made=5 * MIB)
    untouched = 2 * chunk * 2  # gradients come after the initial write
    assert (
        plan_of(sizes, limits, placement=requested).memory["host"]["initial_write"]
        == working - untouched
    )
    pinned = plan_of(sizes, limits, placement=requested, unified=False)
    assert pinned.memory["host"]["initial_write"] == working
    on_disk = dict.fromkeys(requested, "disk")
    roomy = plan_of([100_000] * 20, Limits(None, None, None), placement=on_disk, prefetch_units=8)
    assert roomy.memory["host"]["initial_write"] == 0


# Fields without effect on costs (texts, results, derived values), and fields with separate keys.
NO_COST = {"memory", "budget", "predicted_bytes", "notes", "rates_origin",
           "resumed", "slot_classes"}  # fmt: skip
OWN_KEY = {"units", "saved", "model_recomputes", "micro_batches"}


def test_plan_cost_key_covers_every_field() -> None:
    """A field missing in the key would reuse costs of another plan: add it to `_BASIS` or here."""
    plan = plan_of([1000] * 3)
    key = plan.searched
    assert {field.name for field in fields(Plan)} >= NO_COST | OWN_KEY
    for name in (field.name for field in fields(Plan) if field.name not in OWN_KEY):
        differs = plan.changed(**{name: object()}).searched != key
        assert differs == (name not in NO_COST), name


@pytest.mark.parametrize("ranks", [1, 2])
def test_save_buffers_reserved_only_for_kinds_outside_host(ranks: int) -> None:
    facts = ParameterFacts("p", 0, (9216,), "bfloat16", 9216, 2, True, 0)
    layouts = (lay_out(0, "unit", [facts], PRECISIONS["bf16"], ranks=ranks),)

    def saving(tier: str) -> int:
        placement = dict.fromkeys(("weights", "optimizer_state", "gradients"), tier)
        config = load_config({"nvme_path": "/nvme", "placement": placement})
        plan = make_plan(layouts, config, UNLIMITED, unified=False)
        return plan.memory[Tier.HOST]["saving"]

    assert saving("host") == 0
    assert saving("disk") > 0

"""Tests of automatic placement against exhaustive search with the same cost model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.plan.test_planner import units

from infinity.config.schema import load_config
from infinity.errors import DoesNotFitError
from infinity.plan.budget import Limits, excess, with_memory
from infinity.plan.cost import step_cost
from infinity.plan.placement import best_placement, score
from infinity.plan.plan import Plan, UnitPlacement
from infinity.plan.planner import make_plan
from infinity.plan.rates import nominal
from infinity.types import Tier

SIZES = st.sampled_from([5_000, 20_000, 40_000, 60_000, 100_000])
KIB = 1 << 10


def all_placements(plan: Plan, free: Sequence[str]) -> Iterator[tuple[UnitPlacement, ...]]:
    """Yield every placement of the kinds in `free`; unified devices have one tier of RAM."""
    if plan.unified:
        tiers = {"weight": (Tier.DISK, Tier.DEVICE)}
        other_tiers: tuple[Tier, ...] = (Tier.DISK, Tier.HOST)
    else:
        tiers, other_tiers = {}, tuple(Tier)
    choices = [
        tiers.get(f, other_tiers) if f in free else (Tier.DISK,) for f in UnitPlacement._fields
    ]
    return itertools.product(itertools.starmap(UnitPlacement, itertools.product(*choices)),
                             repeat=len(plan.units))  # fmt: skip


def best_of_all(plan: Plan, free: Sequence[str], limits: Limits) -> float:
    """Return the step seconds of the best placement by exhaustive search."""
    rates, found = nominal(plan.unified), float("inf")
    for placement in all_placements(plan, free):
        candidate = with_memory(replace(plan, placements=placement), limits)
        if not excess(candidate, limits, auto=True):
            found = min(found, step_cost(candidate, rates).seconds)
    return found


def all_on_disk(sizes: Sequence[int], limits: Limits, micro_batches: int, *, unified: bool) -> Plan:
    """Return the plan with everything on disk."""
    options = {
        "nvme_path": "/nvme",
        "gradient_accumulation_steps": micro_batches,
        "chunk_size": 4096,
    }
    plan = make_plan(
        units(sizes),
        load_config(
            options
            | {"placement": dict.fromkeys(("weights", "optimizer_state", "gradients"), "disk")}
        ),
        replace(limits, device=None, host=None),
        unified=unified,
    )
    return with_memory(plan, limits)


@given(
    st.lists(SIZES, min_size=1, max_size=3),
    st.integers(400, 3_000),
    st.sampled_from([1, 2]),
)
@settings(max_examples=25, deadline=None)
def test_best_placement_three_units_unified(
    sizes: list[int], host: int, micro_batches: int
) -> None:
    assert_matches_exhaustive_search(
        sizes, ("weight", "gradient", "state"), Limits(None, host * KIB, None), micro_batches
    )


@given(st.lists(SIZES, min_size=4, max_size=6), st.integers(400, 6_000), st.sampled_from([1, 2]))
@settings(max_examples=12, deadline=None)
def test_best_placement_six_units_one_kind(sizes: list[int], host: int, micro_batches: int) -> None:
    for free in ("weight", "gradient", "state"):
        assert_matches_exhaustive_search(
            sizes, (free,), Limits(None, host * KIB, None), micro_batches
        )


@given(
    st.lists(SIZES, min_size=1, max_size=2),
    st.integers(200, 2_000),
    st.integers(400, 3_000),
    st.sampled_from([1, 2]),
)
@settings(max_examples=20, deadline=None)
def test_best_placement_two_units_separate_device(
    sizes: list[int], device: int, host: int, micro_batches: int
) -> None:
    limits = Limits(device * KIB, host * KIB, None)
    assert_matches_exhaustive_search(
        sizes, ("weight", "gradient", "state"), limits, micro_batches, unified=False
    )


@pytest.mark.parametrize(
    ("sizes", "host"),
    [([5_000, 5_000, 20_000, 100_000], 3_069), ([20_000, 5_000, 100_000, 5_000, 5_000], 3_214)],
)
def test_best_placement_large_unit_replaces_three_small(sizes: list[int], host: int) -> None:
    """Evicting a single unit frees nothing, as the first unit on disk needs buffers."""
    assert_matches_exhaustive_search(sizes, ("state",), Limits(None, host * KIB, None), 1)


def assert_matches_exhaustive_search(
    sizes: list[int], free: Sequence[str], limits: Limits, micro_batches: int, *,
    unified: bool = True
) -> None:  # fmt: skip
    plan = all_on_disk(sizes, limits, micro_batches, unified=unified)
    rates = nominal(unified)
    found = best_placement(plan, free, limits, rates)
    over, before = excess(found, limits, auto=True), excess(plan, limits, auto=True)
    assert all(over[tier] <= before.get(tier, 0) for tier in over)
    best = best_of_all(plan, free, limits)
    if best < float("inf") and not before:
        # The search weights resources that do not bind by a thousandth.
        assert step_cost(found, rates).seconds <= best * 1.001


def test_equal_units_placed_from_front() -> None:
    """The last blocks are in slots between forward and backward, so the first ones stay."""
    sizes = [1_000_000] * 80
    limits = Limits(None, 220 << 20, None)
    plan = all_on_disk(sizes, limits, 1, unified=True)
    found = best_placement(plan, ("weight",), limits, nominal(True))
    placement = [h.weight for h in found.placements]
    num_on_device = placement.count(Tier.DEVICE)
    assert 0 < num_on_device < 80
    assert placement == [Tier.DEVICE] * num_on_device + [Tier.DISK] * (80 - num_on_device)
    assert score(found, nominal(True)) < score(plan, nominal(True))


def test_model_that_fits_device_with_kernels_stays_there() -> None:
    config = load_config({"nvme_path": "/nvme"})
    limits = Limits(1 << 30, 1 << 30, None)
    plan = make_plan(units([60_000] * 3), config, limits, unified=False, device_kernels=True)
    assert set(plan.placements) == {UnitPlacement(Tier.DEVICE, Tier.DEVICE, Tier.DEVICE)}


def test_model_that_cannot_fit_rejected() -> None:
    config = load_config({"nvme_path": "/nvme"})
    with pytest.raises(DoesNotFitError, match=r"64\.00 KiB"):
        make_plan(units([500_000] * 4), config, Limits(None, 64 * KIB, None), unified=True)

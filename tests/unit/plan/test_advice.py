"""Tests of suggestions: each is priced again, fits, and gains what the changed plan predicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from infinity.cli.remedies import NAMES, exact_size, plan_command_text
from infinity.config.schema import load_config
from infinity.errors import DoesNotFitError
from infinity.plan.advice import (
    MIN_CHANGE,
    MIN_GAIN,
    MOST_MICRO_BATCHES,
    Suggestion,
    faster,
    round_size,
    round_size_down,
    suggestions_to_fit,
)
from infinity.plan.cost import StepWork
from infinity.plan.inputs import PlanEstimate, PlanInput, price
from infinity.plan.layout import PRECISIONS, ParameterFacts, UnitLayout, lay_out
from infinity.plan.plan import RuleFacts
from infinity.plan.plan_machine import PlanMachine
from infinity.plan.rates import nominal
from infinity.types import MomentFormat

MIB, GIB = 1 << 20, 1 << 30
SIDE = 512


def units(count: int, precision: str = "bf16", side: int = SIDE) -> tuple[UnitLayout, ...]:
    """Return units of two square matrices each."""
    size = PRECISIONS[precision].weight
    found = []
    for index in range(count):
        facts = [
            ParameterFacts(f"b{index}.{i}", 2 * index + i, (side, side), "bfloat16", side * side,
                           size, True, 0)
            for i in range(2)
        ]  # fmt: skip
        found.append(lay_out(index, f"b{index}", facts, PRECISIONS[precision]))
    return tuple(found)


def machine(
    host: int, device: int | None = 1 * GIB, disk: int = 64 * GIB, **options: Any
) -> PlanMachine:
    unified = device is None
    return PlanMachine("m", host, device, disk, 8, nominal(unified), **options)


def case_of(
    host: int,
    device: int | None = GIB,
    disk: int = 64 * GIB,
    *,
    count: int = 16,
    tokens: int = 256,
    recompute: Any = 0,
    **config: Any,
) -> PlanInput:
    given = {"nvme_path": "/nvme", **config} if disk else config
    return PlanInput(
        units=units(count),
        config=load_config(given),
        machine=machine(host, device, disk),
        work=StepWork(tokens, recompute=recompute),
        rule=RuleFacts(),
    )


def cli_options(way: Suggestion) -> str:
    """Return the command-line options that `infinity plan` prints for a suggestion."""
    return plan_command_text(of_run=False)(way.changes) or ""


def assert_does_not_fit(case: PlanInput) -> None:
    with pytest.raises(DoesNotFitError):
        price(case).require_fit()


def ways_of(case: PlanInput, finer: Sequence[UnitLayout] = ()) -> list[Suggestion]:
    """Return the suggestions after checking that each fits when priced again."""
    assert_does_not_fit(case)
    ways = suggestions_to_fit(case, finer)
    for way in ways:
        again = price(way.priced.case)
        again.require_fit()
        assert again.cost.seconds == way.priced.cost.seconds
        assert way.what
        assert cli_options(way)
        assert {change.name for change in way.changes} <= NAMES
        for tier in ("host", "disk", "device"):
            now, then = (getattr(c.machine, f"{tier}_bytes") or 0 for c in (case, way.priced.case))
            assert then in (0, now) or then >= MIN_CHANGE * now
    return ways


def test_host_too_small_suggests_moments_or_hardware() -> None:
    ways = ways_of(case_of(100 * MIB, disk=0, device=16 * MIB, tokens=1))
    assert [cli_options(way).split()[0] for way in ways] == ["--moments", "--disk", "--host"]
    assert [way.lossy for way in ways] == [True, False, False]
    assert all(("lossy" in way.what) == way.lossy for way in ways)
    assert ways[1].priced.case.config.nvme_path, "a disk has a path"


@pytest.mark.parametrize("tier", ["host", "disk", "device"])
def test_suggested_tier_size_is_close_to_minimum(tier: str) -> None:
    if tier == "host":
        case = case_of(16 * MIB, disk=0, device=24 * MIB, count=24, tokens=1)
    elif tier == "disk":
        case = case_of(80 * MIB, disk=25 * MIB, device=8 * MIB, count=32, tokens=1)
    else:
        case = case_of(4 * GIB, device=3 * MIB, tokens=64, recompute="all")
    found = [w for w in ways_of(case) if cli_options(w).startswith(f"--{tier}")]
    assert len(found) == 1
    size = getattr(found[0].priced.case.machine, f"{tier}_bytes")
    assert size > getattr(case.machine, f"{tier}_bytes")
    assert exact_size(size) in cli_options(found[0])
    assert_does_not_fit(case.with_machine(**{f"{tier}_bytes": int(0.7 * size)}))


def test_activations_fit_by_schedule_before_hardware() -> None:
    case = case_of(4 * GIB, device=256 * MIB, tokens=1 << 16, count=4)
    priced = price(case)
    assert priced.missing == priced.activations.total - priced.activation_headroom > 0
    with pytest.raises(DoesNotFitError, match="65,536 tokens at once") as caught:
        priced.require_fit()
    assert "logits" in str(caught.value.because)
    schedule, hardware = ways_of(case)
    assert not any(way.lossy or way.changes_batch for way in (schedule, hardware))
    after = schedule.priced.case
    assert after.work.tokens * after.micro_batches == 1 << 16
    assert after.micro_batches <= MOST_MICRO_BATCHES
    assert after.machine == case.machine
    assert cli_options(hardware).startswith("--device")
    odd = ways_of(case_of(4 * GIB, device=256 * MIB, tokens=65_537, count=4))
    assert "the same batch" in odd[0].what, "rounded up"


def test_smaller_device_budget_suggested_for_activations() -> None:
    case = case_of(4 * GIB, device=40 * MIB, tokens=1024, recompute="all")
    found = [way for way in ways_of(case) if cli_options(way).startswith("budget.device")]
    assert len(found) == 1
    assert "more for activations" in found[0].what
    budget = found[0].priced.case.config.budget.device
    assert budget is not None
    assert budget < (case.limits.device or 0)
    assert found[0].priced.activation_headroom > price(case).activation_headroom


def test_budget_increase_suggested_before_hardware() -> None:
    case = case_of(8 * GIB, device=None, count=32, budget={"host": "8MiB"}, tokens=16)
    ways = ways_of(case)
    assert cli_options(ways[0]).startswith("budget.host")
    assert not any(cli_options(way).startswith("--host") for way in ways)
    two_budgets = case_of(
        8 * GIB, device=GIB, budget={"host": "8MiB", "device": "1MiB"}, count=8, tokens=16
    )
    [free, *_] = ways_of(two_budgets)
    assert "budget.host=null" in cli_options(free)
    assert "budget.device=null" in cli_options(free)


def test_auto_placement_suggested_instead_of_explicit() -> None:
    case = case_of(
        128 * MIB, device=16 * MIB, placement={"optimizer_state": "device"}, count=16, tokens=1
    )
    assert "placement.optimizer_state=auto" in cli_options(ways_of(case)[0])


def test_finer_units_suggested_if_available() -> None:
    case = case_of(4 * GIB, device=6 * MIB, tokens=1, count=2)
    case = replace(case, units=units(2, side=2 * SIDE))
    finer = units(8)
    ways = ways_of(case, finer)
    assert any("--finer-units" in cli_options(way) for way in ways)
    assert not any("--finer-units" in cli_options(way) for way in ways_of(case))


def test_combined_hardware_suggested_if_no_single_change_fits() -> None:
    case = case_of(16 * MIB, device=MIB, disk=2 * MIB, count=16, tokens=512)
    ways = ways_of(case)
    assert len(ways) == 1
    for flag in ("--disk", "--host", "--device"):
        assert flag in cli_options(ways[0])


def test_no_suggestion_if_nothing_fits() -> None:
    case = case_of(GIB, device=64 * MIB, tokens=1 << 40)
    assert_does_not_fit(case)
    assert suggestions_to_fit(case) == []


# --- suggestions for speed -----------------------------------------------------------------------


def slow_case(**overrides: Any) -> PlanInput:
    """Return a mostly disk-resident case: 64 MiB of weights, 384 MiB of other kinds."""
    options = {"host": 96 * MIB, "device": 20 * MIB, "count": 64, "tokens": 4}
    return case_of(**(options | overrides))


@cache
def slow_ways() -> tuple[PlanEstimate, tuple[Suggestion, ...]]:
    """Return the priced slow case and its suggestions."""
    priced = price(slow_case())
    return priced, tuple(faster(priced))


def speedup(way: Suggestion, now: PlanEstimate) -> float:
    """Return the predicted speedup."""
    return way.priced.tokens_per_s / now.tokens_per_s


def test_speedups_match_repriced_plans() -> None:
    priced, ways = slow_ways()
    priced.require_fit()
    assert len(ways) > 2
    speeds = [way.priced.tokens_per_s for way in ways]
    assert speeds == sorted(speeds, reverse=True)
    for way in ways:
        again = price(way.priced.case)
        assert not again.missing
        assert way.priced.tokens_per_s == pytest.approx(again.tokens_per_s)
        assert again.tokens_per_s >= MIN_GAIN * priced.tokens_per_s
    all_options = " | ".join(cli_options(way) for way in ways)
    for option in ("--moments 8bit", "--host", "--drives 2 --disk", "--tokens"):
        assert option in all_options, option
    for way in ways:
        assert way.lossy == ("--moments" in cli_options(way))
        assert way.changes_batch == ("--tokens" in cli_options(way))
        if way.changes_batch:
            assert "4 times the batch" in way.what


def test_larger_host_suggestions_move_kinds_off_disk() -> None:
    priced, ways = slow_ways()
    assert priced.plan.memory["disk"]["gradients"]
    larger = [way for way in ways if cli_options(way).startswith("--host")]
    left = [sum(way.priced.plan.memory["disk"].values()) for way in larger]
    assert left[0] == 0, "all of it"
    assert left == sorted(left), "more of it in RAM is faster"
    state = larger[1].priced.plan.memory["disk"]
    assert state["state"]
    assert state["weights"] + state["gradients"] < 0.1 * state["state"]


def test_fewer_micro_batches_suggested_for_same_batch() -> None:
    priced = price(slow_case(gradient_accumulation_steps=4))
    (way,) = [way for way in faster(priced) if "the same batch" in way.what]
    assert cli_options(way).startswith("--tokens 16 --micro-batches 1")
    assert not way.changes_batch


def test_no_recompute_suggested_if_memory_suffices() -> None:
    priced = price(case_of(4 * GIB, device=2 * GIB, count=4, tokens=1 << 15, recompute="all"))
    assert priced.cost.binds == "compute"
    way = next(way for way in faster(priced) if cli_options(way).endswith("--no-recompute"))
    assert speedup(way, priced) == pytest.approx(8 / 6, rel=0.05)


def test_fp32_suggested_if_faster() -> None:
    case = case_of(4 * GIB, device=None, count=4, tokens=4096)
    rates = replace(nominal(True), compute={"bf16": 1e9, "fp32": 1e11})
    slow = price(case.with_machine(rates=rates))
    way = faster(slow)[0]
    assert cli_options(way) == "--precision fp32"
    assert way.priced.plan.precision.weight == 4
    assert speedup(way, slow) == pytest.approx(100, rel=0.1)
    assert not way.lossy
    same = case.with_machine(rates=replace(nominal(True), compute={"bf16": 1e11, "fp32": 1e11}))
    assert not any("precision" in cli_options(way) for way in faster(price(same)))


def test_moment_formats_suggested_only_for_rules_with_moments() -> None:
    case = slow_case(optimizer={"type": "SGD"})
    case = replace(case, rule=RuleFacts(name="SGD", moments=()))
    assert not any(way.lossy for way in faster(price(case)))
    eight = replace(case, rule=RuleFacts(moments=(MomentFormat.INT8,) * 2))
    assert not any(way.lossy for way in faster(price(eight)))
    with_8bit = slow_case().with_moments("8bit")
    assert with_8bit.plan().precision.moments == (MomentFormat.INT8,) * 2
    assert with_8bit.config.optimizer.moments == "8bit"


@pytest.mark.parametrize("drives", [1, 4])
def test_extra_drive_scales_bandwidth_and_capacity(drives: int) -> None:
    case = slow_case(nvme_path=[f"/drive{number}" for number in range(drives)])
    (way,) = [way for way in faster(price(case)) if "--drives" in cli_options(way)]
    extended, current = way.priced.case.machine, case.machine
    assert extended.rates.disk_read == pytest.approx(
        current.rates.disk_read * (drives + 1) / drives
    )
    assert extended.disk_bytes == current.disk_bytes * (drives + 1) // drives


def test_no_hardware_suggested_if_nothing_moves() -> None:
    priced = price(case_of(64 * GIB, device=8 * GIB, count=2))
    assert not any(
        "--host" in cli_options(way) or "--drives" in cli_options(way) for way in faster(priced)
    )


def test_priced_case_is_consistent() -> None:
    priced, _ = slow_ways()
    case = priced.case
    assert priced.activation_headroom == case.compute_bytes - priced.plan.tier_bytes["device"]
    assert priced.tokens_per_s == pytest.approx(4 / priced.cost.seconds)
    assert case.compute_tier == "device"
    half = replace(case, device_share=0.5)
    assert half.compute_bytes == half.limits.device == 10 * MIB
    unified = case_of(GIB, device=None)
    assert unified.compute_tier == "host"
    assert unified.limits.device is None
    assert unified.compute_bytes == unified.limits.host == int(0.8 * GIB)
    assert unified.with_budget("host", 64 * MIB).limits.host == 64 * MIB
    assert unified.with_budget("disk", MIB).limits.disk == MIB


@pytest.mark.parametrize("nbytes", [1, MIB, 100 * MIB + 1, GIB + 1, 17 * GIB + 5, 10**13])
def test_round_size_brackets_value_and_parses_back(nbytes: int) -> None:
    assert round_size_down(nbytes) <= nbytes <= round_size(nbytes)
    assert round_size(nbytes) - round_size_down(nbytes) <= max(MIB, nbytes / 8)
    from infinity.common.sizes import parse_size

    assert parse_size(exact_size(nbytes)) == nbytes
    assert parse_size(exact_size(round_size(nbytes))) == round_size(nbytes)

"""Tests of batch schedules: close to the exhaustive optimum, and as requested."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from support.small import small_engine
from unit.plan.test_advice import MIB, machine, units

from infinity.config.schema import load_config
from infinity.errors import DoesNotFitError
from infinity.plan.advice import faster
from infinity.plan.batch_schedule import BatchSchedule, choose_schedule
from infinity.plan.budget import budgeted_bytes
from infinity.plan.cost import StepWork
from infinity.plan.inputs import MARGIN, PlanEstimate, PlanInput, price
from infinity.plan.plan import RuleFacts
from infinity.plan.rates import nominal
from infinity.types import Tier

GIB = 1 << 30
SEQUENCES, LENGTH, BLOCKS = 8, 256, 6
# Device bytes, host bytes, disk speed factor and FLOP/s; a different resource binds in each.
MACHINES = {
    "roomy": (64 * MIB, 8 * GIB, 1, 1e13),
    "small device": (12 * MIB, 8 * GIB, 1, 1e13),
    "small device, compute binds": (12 * MIB, 8 * GIB, 8, 1e11),
    "little RAM": (12 * MIB, 440 * MIB, 1, 1e13),
    "no device, little RAM": (None, 440 * MIB, 1, 1e13),
    "no device": (None, 480 * MIB, 1, 1e13),
    "no disk, little RAM": (12 * MIB, 460 * MIB, 1, 1e13),
    "no disk, less RAM than state": (24 * MIB, 445 * MIB, 1, 1e13),
}


def case_of(device: int | None, host: int, faster: float, flops: float, **config: Any) -> PlanInput:
    rates = nominal(device is None)
    names = ("disk_read", "disk_write", "disk_mixed")
    rates = replace(
        rates,
        compute={"bf16": flops, "fp32": flops},
        **{name: faster * getattr(rates, name) for name in names},
    )
    return PlanInput(
        units=tuple(replace(unit, is_block=True) for unit in units(BLOCKS)),
        config=load_config({"nvme_path": "/nvme", "chunk_size": 1 << 14, **config}),
        machine=replace(machine(host, device, 8 * GIB), rates=rates),
        work=StepWork(SEQUENCES * LENGTH),
        rule=RuleFacts(),
        base=320 * MIB,
    )


def all_schedules(case: PlanInput) -> list[PlanEstimate]:
    """Return every fitting schedule by exhaustive search."""
    found = []
    for count, slices in product((1, 2, 4, 8), (1, 2, 4, 8)):
        if count * slices > SEQUENCES:
            continue
        for blocks, offload in product((*range(BLOCKS), "all"), ("none", "host", "disk")):
            if offload != "none" and not blocks:
                continue
            tokens = SEQUENCES * LENGTH // count
            try:
                priced = price(case.with_schedule(count, tokens, slices, blocks, offload))
            except DoesNotFitError:
                continue
            margin = MARGIN if case.machine.unified else 1.0
            if margin * priced.activations.total <= priced.activation_headroom:
                found.append(priced)
    return found


QUICK = ("little RAM", "no device", "no disk, little RAM")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.big) for n in MACHINES]
)
def test_chosen_schedule_close_to_exhaustive_best(name: str) -> None:
    case = case_of(*MACHINES[name], **({"nvme_path": None} if "no disk" in name else {}))
    best = min(all_schedules(case), key=lambda p: p.cost.seconds)
    chosen = choose_schedule(case, BatchSchedule(), SEQUENCES)
    assert chosen.best is not None
    assert chosen.best.cost.seconds <= 1.03 * best.cost.seconds, BatchSchedule.of(best.case)
    assert chosen.best.missing == 0


def test_requested_schedule_is_respected() -> None:
    case = case_of(*MACHINES["roomy"])
    requested = BatchSchedule(micro_batches=2, slices=4, recompute=2, offload="host")
    chosen = choose_schedule(case, requested, SEQUENCES)
    assert chosen.best is not None
    found = BatchSchedule.of(chosen.best.case)
    assert replace(found, tokens=None) == requested
    assert found.line(BLOCKS) == (
        "2 micro-batches of 1,024 tokens in 4 slices, 2 of 6 blocks recomputed in backward, "
        "their inputs wait in RAM"
    )


def test_suggested_micro_batches_split_between_samples() -> None:
    case = replace(case_of(*MACHINES["roomy"]), work=StepWork(3 * LENGTH * 4))
    chosen = choose_schedule(case, BatchSchedule(micro_batches=1), 3)
    assert chosen.best is not None
    (way,) = [
        w
        for w in faster(chosen.best, chosen)
        if w.changes[0].name == "batch" and not w.changes_batch
    ]
    assert way.priced.case.micro_batches == 3


def test_unified_host_budget_includes_activations() -> None:
    budget = 480 * MIB
    case = case_of(None, 8 * GIB, 1, 1e13, budget={"host": budget})
    case = replace(case, work=StepWork(8 * SEQUENCES * LENGTH))
    best = choose_schedule(case, BatchSchedule(), SEQUENCES).best
    assert best is not None
    assert budgeted_bytes(best.plan)[Tier.HOST] + MARGIN * best.activations.total <= budget


def test_engine_host_budget_includes_activations(tmp_path: Path) -> None:
    for tokens, on_disk in ((64, False), (3 * 10**6, True)):
        config: dict[str, Any] = {"budget": {"host": "4GiB"}, "activations": {"tokens": tokens}}
        with small_engine(tmp_path, {"weights": "auto"}, **config) as engine:
            assert (engine.plan.tier_bytes[Tier.DISK] > 0) == on_disk


def test_no_fitting_schedule_reports_smallest() -> None:
    case = case_of(4 * MIB, 8 * GIB, 1, 1e13)
    chosen = choose_schedule(case, BatchSchedule(), SEQUENCES)
    assert chosen.best is None
    found = BatchSchedule.of(chosen.smallest)
    assert (found.micro_batches, found.recompute) == (SEQUENCES, "all"), "a sample at a time"
    with pytest.raises(DoesNotFitError):
        price(chosen.smallest).require_fit()


def test_with_schedule_discards_previous_schedule() -> None:
    """A case with recomputation can be priced without it again."""
    case = case_of(*MACHINES["roomy"])
    tokens = case.work.tokens
    again = case.with_schedule(1, tokens, 1, "all", "none").with_schedule(1, tokens, 1, 0, "none")
    assert again.work.recompute == again.config.activations.recompute == 0
    assert price(again).cost == price(case.with_schedule(1, tokens, 1, 0, "none")).cost

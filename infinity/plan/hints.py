"""Hints: numbers of parameters that a plan keeps to where it can, and never fails for.

They come from configurations of DeepSpeed's. A budget is a promise; a hint that cannot be met is
met as far as goes, and a note says how far.
"""

from __future__ import annotations

from dataclasses import replace

from infinity.common.sizes import format_count
from infinity.config.schema import HintsConfig
from infinity.plan.budget import Limits, excess, with_memory
from infinity.plan.layout import UnitLayout
from infinity.plan.plan import Plan
from infinity.types import Tier

LEAST_AHEAD = 1  # with less nothing is fetched while something computes


def live_parameters(plan: Plan) -> int:
    """The most parameters that slots hold at a time: of each class, its largest units."""
    return sum(
        sum(sorted((_elements(plan.units[u]) for u in c.members), reverse=True)[: c.count])
        for c in plan.slot_classes
    )


def _elements(unit: UnitLayout) -> int:
    return sum(segment.numel for segment in unit.segments)


def may_look_nearer(plan: Plan, hints: HintsConfig) -> bool:
    """Whether slots hold more than was hinted, and a shorter prefetch may hold less."""
    most = hints.live_parameters
    return most is not None and plan.prefetch_units > LEAST_AHEAD and live_parameters(plan) > most


def with_live_note(plan: Plan, hints: HintsConfig) -> Plan:
    """`plan` with a note if slots hold more than was hinted although nothing more can be done."""
    most, found = hints.live_parameters, live_parameters(plan)
    if most is None or found <= most:
        return plan
    why = (
        "the least with which something is fetched while something computes"
        if plan.prefetch_units >= LEAST_AHEAD
        else "one unit computes and one takes its place"
    )
    note = f"hints.live_parameters is {format_count(most)}, slots hold {format_count(found)}: {why}"
    return replace(plan, notes=(*plan.notes, note))


def with_weights_in_ram(plan: Plan, hints: HintsConfig, limits: Limits) -> Plan:
    """Keep weights from disk in RAM: the first units, up to the hinted number, if they fit.

    Where the device is the host, in its memory: see `UnitPlacement`.
    """
    most = hints.max_params_in_cpu
    if most is None:
        return plan
    tier = Tier.DEVICE if plan.unified else Tier.HOST
    kept, placements = 0, list(plan.placements)
    for unit in plan.units:
        size = _elements(unit)
        if placements[unit.index].weight is not Tier.DISK or kept + size > most:
            continue
        tried = list(placements)
        tried[unit.index] = placements[unit.index]._replace(weight=tier)
        if excess(with_memory(plan.changed(placements=tuple(tried)), limits), limits, auto=True):
            break
        kept, placements = kept + size, tried
    note = (
        f"hints.max_params_in_cpu is {format_count(most)}: weights of {format_count(kept)} "
        "parameters are kept in RAM" + ("" if kept else ", where none more find room")
    )
    plan = replace(plan, placements=tuple(placements), notes=(*plan.notes, note))
    return with_memory(plan, limits)

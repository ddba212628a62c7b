"""Hints: numbers of parameters that a plan keeps to where it can, and never fails for.

They come from configurations of DeepSpeed's. A budget is a promise; a hint that cannot be met is
met as far as goes, and a note says how far.
"""

from __future__ import annotations

from dataclasses import replace

from infinity.config import HintsConfig
from infinity.plan.layout import Tier, UnitLayout
from infinity.plan.plan import Plan
from infinity.plan.reserve import Limits, excess, with_memory
from infinity.sizes import format_count

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
    """Whether slots hold more than was hinted, and a shorter look-ahead may hold less."""
    most = hints.live_parameters
    return most is not None and plan.look_ahead > LEAST_AHEAD and live_parameters(plan) > most


def with_live_note(plan: Plan, hints: HintsConfig) -> Plan:
    """`plan` with a note if slots hold more than was hinted although nothing more can be done."""
    most, found = hints.live_parameters, live_parameters(plan)
    if most is None or found <= most:
        return plan
    why = (
        "the least with which something is fetched while something computes"
        if plan.look_ahead >= LEAST_AHEAD
        else "one unit computes and one takes its place"
    )
    note = f"hints.live_parameters is {format_count(most)}, slots hold {format_count(found)}: {why}"
    return replace(plan, notes=(*plan.notes, note))


def with_weights_in_ram(plan: Plan, hints: HintsConfig, limits: Limits) -> Plan:
    """Weights that rest on disk kept in RAM instead: first units, as many as hinted, if they fit.

    Where the device is the host, in its memory: see `UnitHomes`.
    """
    most = hints.weights_in_ram
    if most is None:
        return plan
    tier = Tier.DEVICE if plan.unified else Tier.HOST
    kept, homes = 0, list(plan.homes)
    for unit in plan.units:
        size = _elements(unit)
        if homes[unit.index].weight is not Tier.DISK or kept + size > most:
            continue
        tried = list(homes)
        tried[unit.index] = replace(homes[unit.index], weight=tier)
        if excess(with_memory(replace(plan, homes=tuple(tried)), limits), limits, auto=True):
            break
        kept, homes = kept + size, tried
    note = (
        f"hints.weights_in_ram is {format_count(most)}: {format_count(kept)} parameters' weights "
        "are kept in RAM" + ("" if kept else ", where none more find room")
    )
    plan = replace(plan, homes=tuple(homes), notes=(*plan.notes, note))
    return with_memory(plan, limits)

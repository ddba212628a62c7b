"""Hints: limits on numbers of parameters that a plan follows where possible.

They come from DeepSpeed configurations. A plan that exceeds a budget fails; a hint that cannot be
satisfied is followed as far as possible, and a note reports by how much it is exceeded.
"""

from __future__ import annotations

from dataclasses import replace

from infinity.common.sizes import format_count
from infinity.config.schema import HintsConfig
from infinity.plan.budget import Limits, excess, with_memory
from infinity.plan.layout import UnitLayout
from infinity.plan.plan import Plan
from infinity.types import Tier

MIN_PREFETCH_UNITS = 1  # smallest prefetch that overlaps fetches with compute


def live_parameters(plan: Plan) -> int:
    """Return the most parameters that slots hold at a time: the largest units of each class."""
    return sum(
        sum(sorted((_elements(plan.units[u]) for u in c.members), reverse=True)[: c.count])
        for c in plan.slot_classes
    )


def _elements(unit: UnitLayout) -> int:
    return sum(segment.numel for segment in unit.segments)


def may_shorten_prefetch(plan: Plan, hints: HintsConfig) -> bool:
    """Return True if slots hold more than hinted and a shorter prefetch may reduce that."""
    limit = hints.live_parameters
    return (
        limit is not None
        and plan.prefetch_units > MIN_PREFETCH_UNITS
        and live_parameters(plan) > limit
    )


def with_slots_note(plan: Plan, hints: HintsConfig) -> Plan:
    """Return the plan, with a note if slots hold more than hinted."""
    limit, count = hints.live_parameters, live_parameters(plan)
    if limit is None or count <= limit:
        return plan
    why = (
        "the least with which something is fetched while something computes"
        if plan.prefetch_units >= MIN_PREFETCH_UNITS
        else "one unit computes and one takes its place"
    )
    note = (
        f"hints.live_parameters is {format_count(limit)}, slots hold {format_count(count)}: {why}"
    )
    return replace(plan, notes=(*plan.notes, note))


def with_weights_in_ram(plan: Plan, hints: HintsConfig, limits: Limits) -> Plan:
    """Move weights of the first units from disk to RAM, up to the hinted number, if they fit.

    On a device that is the host, RAM is `Tier.DEVICE`: slots would be a second copy.
    """
    limit = hints.max_params_in_cpu
    if limit is None:
        return plan
    tier = Tier.DEVICE if plan.unified else Tier.HOST
    num_in_ram, placements = 0, list(plan.placements)
    for unit in plan.units:
        size = _elements(unit)
        if placements[unit.index].weight is not Tier.DISK or num_in_ram + size > limit:
            continue
        candidate = list(placements)
        candidate[unit.index] = placements[unit.index]._replace(weight=tier)
        changed = with_memory(plan.changed(placements=tuple(candidate)), limits)
        if excess(changed, limits, auto=True):
            break
        num_in_ram, placements = num_in_ram + size, candidate
    note = (
        f"hints.max_params_in_cpu is {format_count(limit)}: weights of {format_count(num_in_ram)} "
        "parameters are kept in RAM" + ("" if num_in_ram else ", where none more find room")
    )
    plan = replace(plan, placements=tuple(placements), notes=(*plan.notes, note))
    return with_memory(plan, limits)

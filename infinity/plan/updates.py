"""Which updates are streamed through the device, where that is left to the plan.

Units with equal homes are treated alike. Homes are chosen first, as if the CPU updated whatever
does not rest on the device; then every set of homes is streamed that makes the step shorter.
"""

from __future__ import annotations

from dataclasses import replace

from infinity.plan.cost import step_cost
from infinity.plan.homes import score
from infinity.plan.layout import Tier
from infinity.plan.plan import Plan, UnitHomes, UpdatePlace, update_place, why_only_cpu
from infinity.plan.rates import Rates
from infinity.plan.reserve import (
    AUTO_SHARE,
    NUM_STREAM_BUFFERS,
    Limits,
    excess,
    stream_bytes,
    with_memory,
)

# The share of a step that streaming must save. Each lane's rate was measured alone, and what
# streams takes the links from weights and gradients: a close call is not one.
WORTH = 0.05


# Of the device's budget; where the buffers would take more, homes are chosen without them.
MOST_ROOM = 0.1


def leaving_room(plan: Plan, wish: str, limits: Limits) -> Limits:
    """`limits` less the buffers that streaming would take, for a search of the best homes.

    `wish` is `Config.update`. The search fills a share of the device; what comes on top would take
    the place of activations.
    """
    if wish == "cpu" or why_only_cpu(plan) or limits.device is None:
        return limits
    room = NUM_STREAM_BUFFERS * stream_bytes(replace(plan, streamed=frozenset(plan.homes)))
    if wish == "auto" and room > MOST_ROOM * limits.device:
        return limits
    return replace(limits, device=max(0, limits.device - int(room / AUTO_SHARE)))


def with_updates(plan: Plan, wish: str, limits: Limits, rates: Rates, *, leave_share: bool) -> Plan:
    """`plan`, whose homes are chosen, with `streamed` filled in; `wish` is `Config.update`.

    With "device" everything is streamed that can be, whether it fits or not. "auto" takes nothing
    that does not fit; with `leave_share` nothing of the share of the device that a search of homes
    leaves to activations either.
    """
    homes = frozenset(
        homes
        for unit, homes in zip(plan.units, plan.homes, strict=True)
        if unit.numel and update_place(plan, unit.index) is UpdatePlace.CPU
    )
    why_not = why_only_cpu(plan)
    if wish == "device" and why_not:
        return replace(plan, notes=(*plan.notes, f"update: device is not used: {why_not}"))
    if wish == "cpu" or not homes or why_not:
        return plan
    if wish == "device":
        return _streaming(plan, homes, limits)
    starts: tuple[frozenset[UnitHomes], ...] = (frozenset(), homes)
    found = min(
        (_shortest(plan, start, homes, limits, rates, leave_share) for start in starts),
        key=lambda plan: score(plan, rates),
    )
    before, after = (step_cost(p, rates).seconds for p in (plan, found))
    return found if after <= (1 - WORTH) * before else plan


def _streaming(plan: Plan, streamed: frozenset[UnitHomes], limits: Limits) -> Plan:
    return with_memory(replace(plan, streamed=streamed), limits)


def _shortest(
    plan: Plan,
    start: frozenset[UnitHomes],
    homes: frozenset[UnitHomes],
    limits: Limits,
    rates: Rates,
    leave_share: bool,
) -> Plan:
    """From `start`, one set of homes more or fewer while that makes the step shorter and fits."""
    best = _streaming(plan, start, limits)
    if _too_much(best, plan, limits, leave_share):
        return plan
    improved = True
    while improved:
        improved = False
        for one in sorted(homes, key=_order):
            other = _streaming(best, best.streamed ^ {one}, limits)
            shorter = score(other, rates) < score(best, rates) * (1 - 1e-9)
            if shorter and not _too_much(other, plan, limits, leave_share):
                best, improved = other, True
    return best


def _too_much(changed: Plan, before: Plan, limits: Limits, leave_share: bool) -> bool:
    """Whether a budget is exceeded that was not exceeded as much."""
    had = excess(before, limits, auto=leave_share)
    over = excess(changed, limits, auto=leave_share)
    return any(nbytes > had.get(tier, 0) for tier, nbytes in over.items())


def _order(homes: UnitHomes) -> list[int]:
    tiers = list(Tier)
    return [tiers.index(tier) for tier in (homes.weight, homes.state, homes.gradient)]

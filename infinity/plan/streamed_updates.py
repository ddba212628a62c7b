"""Search for the updates that are streamed through the device, where the plan may choose.

Units of one placement are treated alike. Placement is chosen first, as if the CPU updated
whatever does not rest on the device; then every one is streamed that makes the step shorter, and
of these the CPU updates a share meanwhile.
"""

from __future__ import annotations

import math
from dataclasses import replace

from infinity.plan.budget import (
    AUTO_SHARE,
    NUM_STREAM_BUFFERS,
    Limits,
    fits_as,
    staging_bytes,
    stream_bytes,
    with_memory,
)
from infinity.plan.cost import share_beside, step_cost
from infinity.plan.placement import score
from infinity.plan.plan import Plan, UnitPlacement, UpdatePlace, update_place, why_only_cpu
from infinity.plan.rates import Rates
from infinity.types import Tier

# The share of a step that streaming must save. Each direction's rate was measured alone, and what
# streams takes the links from weights and gradients: a close call is not one.
WORTH = 0.05


# Of the device's budget; where the buffers would take more, fewer chunks pass at once, and in the
# end placement is chosen without them.
MOST_ROOM = 0.1


def leaving_room(plan: Plan, wish: str, limits: Limits) -> Limits:
    """`limits` less the buffers that streaming would take, for a search of the best placement.

    `wish` is `Config.update`. The search fills a share of the device; what comes on top would take
    the place of activations.
    """
    if wish == "cpu" or why_only_cpu(plan) or limits.device is None:
        return limits
    # As if all were to rest in RAM: of what is on disk fewer chunks pass at once.
    in_ram = UnitPlacement(weight=Tier.HOST, state=Tier.HOST, gradient=Tier.HOST)
    draft = plan.changed(placements=(in_ram,) * len(plan.units), streamed=frozenset([in_ram]))
    room = _stream_room(_narrowed(draft, limits))
    if wish == "auto" and room > MOST_ROOM * limits.device:
        return limits
    if limits.activations is None:
        room = int(room / AUTO_SHARE)
    return replace(limits, device=max(0, limits.device - room))


def with_updates(plan: Plan, wish: str, limits: Limits, rates: Rates, *, leave_share: bool) -> Plan:
    """`plan`, whose placement is chosen, with `streamed` filled in; `wish` is `Config.update`.

    With "device" everything is streamed that can be, whether it fits or not. "auto" takes nothing
    that does not fit; with `leave_share` nothing of the share of the device that a search of
    placement leaves to activations either.
    """
    movable = frozenset(
        placement
        for unit, placement in zip(plan.units, plan.placements, strict=True)
        if unit.numel and update_place(plan, unit.index) is UpdatePlace.CPU
    )
    why_not = why_only_cpu(plan)
    if wish == "device" and why_not:
        return replace(plan, notes=(*plan.notes, f"update: device is not used: {why_not}"))
    if wish == "cpu" or not movable or why_not:
        return plan
    if wish == "device":
        return _streaming(plan, movable, limits)
    starts: tuple[frozenset[UnitPlacement], ...] = (frozenset(), movable)
    found = min(
        (_shortest(plan, start, movable, limits, rates, leave_share) for start in starts),
        key=lambda plan: score(plan, rates),
    )
    before, after = (step_cost(p, rates).seconds for p in (plan, found))
    return found if after <= (1 - WORTH) * before else plan


def _streaming(plan: Plan, streamed: frozenset[UnitPlacement], limits: Limits) -> Plan:
    return with_memory(_narrowed(plan.changed(streamed=streamed), limits), limits)


def _narrowed(plan: Plan, limits: Limits) -> Plan:
    """`plan` with so few chunks at once that buffers take no more than `MOST_ROOM`, if one does."""
    device, host = (
        math.inf if budget is None else MOST_ROOM * budget
        for budget in (limits.device, limits.host)
    )
    while plan.chunks_at_once > 1 and (
        _stream_room(plan) > device or plan.num_staging_buffers * staging_bytes(plan) > host
    ):
        plan = plan.changed(chunks_at_once=plan.chunks_at_once // 2)
    return plan


def _stream_room(plan: Plan) -> int:
    return NUM_STREAM_BUFFERS * stream_bytes(plan)


def _shortest(
    plan: Plan,
    start: frozenset[UnitPlacement],
    movable: frozenset[UnitPlacement],
    limits: Limits,
    rates: Rates,
    leave_share: bool,
) -> Plan:
    """From `start`, one placement more or fewer while that makes the step shorter and fits."""
    best = _streaming(plan, start, limits)
    if not fits_as(best, plan, limits, auto=leave_share):
        return plan
    best = _with_cpu_beside(best, limits, rates, leave_share)
    improved = True
    while improved:
        improved = False
        # In an order that does not hang on hashes.
        for one in sorted(
            movable, key=lambda h: [list(Tier).index(h.of_field(f)) for f in h._fields]
        ):
            other = _streaming(best, best.streamed ^ {one}, limits)
            shorter = score(other, rates) < score(best, rates) * (1 - 1e-9)
            if shorter and fits_as(other, plan, limits, auto=leave_share):
                best, improved = other, True
    return best


def _with_cpu_beside(plan: Plan, limits: Limits, rates: Rates, leave_share: bool) -> Plan:
    """Return `plan` with the CPU's share of streamed chunks for which CPU and links end together.

    A rule that multiplies matrices needs whole units, and the device multiplies faster.
    """
    share = 0.0 if plan.rule.matrix_steps else share_beside(plan, rates)
    changed = with_memory(plan.changed(cpu_share=share), limits)
    better = share and score(changed, rates) < score(plan, rates)
    return changed if better and fits_as(changed, plan, limits, auto=leave_share) else plan

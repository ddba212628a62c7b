"""Search for the units whose updates are streamed through the device.

Units of equal placement are treated equally. Placement is chosen first, as if the CPU updated all
units that are not stored on the device. Then every placement is streamed that makes the step
shorter, and the CPU updates a share of these units' chunks concurrently.
"""

from __future__ import annotations

import math
from dataclasses import replace

from infinity.plan.budget import (
    AUTO_SHARE,
    NUM_STREAM_BUFFERS,
    Limits,
    fits_no_worse,
    staging_bytes,
    stream_bytes,
    with_memory,
)
from infinity.plan.cost import balanced_cpu_share, step_cost
from infinity.plan.placement import score
from infinity.plan.plan import Plan, UnitPlacement, UpdatePlace, update_place, why_only_cpu
from infinity.plan.rates import Rates
from infinity.types import Tier

# Share of a step's time that streaming must save. Each direction's rate was measured alone, and
# streams compete with weights and gradients for the links, so a smaller predicted gain is noise.
MIN_SAVED_SHARE = 0.05
# Largest share of the device's budget for stream buffers. If they need more, fewer chunks are
# streamed at once; if they still do, placement is chosen without reserving them.
MAX_BUFFER_SHARE = 0.1


def without_stream_buffers(plan: Plan, update: str, limits: Limits) -> Limits:
    """Return `limits` less the stream buffers that streaming would need, for a placement search.

    `update` is `Config.update`. The search fills a share of the device; buffers added after it
    would use memory that was left for activations.
    """
    if update == "cpu" or why_only_cpu(plan) or limits.device is None:
        return limits
    # The worst case is all state in RAM: units on disk are streamed one chunk at a time.
    in_ram = UnitPlacement(weight=Tier.HOST, state=Tier.HOST, gradient=Tier.HOST)
    draft = plan.changed(placements=(in_ram,) * len(plan.units), streamed=frozenset([in_ram]))
    buffer_bytes = _stream_buffer_bytes(_with_fewer_chunks(draft, limits))
    if update == "auto" and buffer_bytes > MAX_BUFFER_SHARE * limits.device:
        return limits
    if limits.activations is None:
        buffer_bytes = int(buffer_bytes / AUTO_SHARE)
    return replace(limits, device=max(0, limits.device - buffer_bytes))


def with_updates(
    plan: Plan, update: str, limits: Limits, rates: Rates, *, leave_share: bool
) -> Plan:
    """Return `plan`, whose placement is chosen, with `streamed` set; `update` is `Config.update`.

    With "device" every unit is streamed that can be, even if buffers do not fit. With "auto" they
    must fit; with `leave_share` also without the share of the device that a placement search
    leaves to activations.
    """
    streamable = frozenset(
        placement
        for unit, placement in zip(plan.units, plan.placements, strict=True)
        if unit.numel and update_place(plan, unit.index) is UpdatePlace.CPU
    )
    reason = why_only_cpu(plan)
    if update == "device" and reason:
        return replace(plan, notes=(*plan.notes, f"update: device is not used: {reason}"))
    if update == "cpu" or not streamable or reason:
        return plan
    if update == "device":
        return _with_streamed(plan, streamable, limits)
    starts: tuple[frozenset[UnitPlacement], ...] = (frozenset(), streamable)
    best = min(
        (_shortest(plan, start, streamable, limits, rates, leave_share) for start in starts),
        key=lambda plan: score(plan, rates),
    )
    seconds_before = step_cost(plan, rates).seconds
    seconds_after = step_cost(best, rates).seconds
    return best if seconds_after <= (1 - MIN_SAVED_SHARE) * seconds_before else plan


def _with_streamed(plan: Plan, streamed: frozenset[UnitPlacement], limits: Limits) -> Plan:
    return with_memory(_with_fewer_chunks(plan.changed(streamed=streamed), limits), limits)


def _with_fewer_chunks(plan: Plan, limits: Limits) -> Plan:
    """Return `plan` with `chunks_at_once` halved until buffers fit `MAX_BUFFER_SHARE`."""
    device, host = (
        math.inf if budget is None else MAX_BUFFER_SHARE * budget
        for budget in (limits.device, limits.host)
    )
    while plan.chunks_at_once > 1 and (
        _stream_buffer_bytes(plan) > device or plan.num_staging_buffers * staging_bytes(plan) > host
    ):
        plan = plan.changed(chunks_at_once=plan.chunks_at_once // 2)
    return plan


def _stream_buffer_bytes(plan: Plan) -> int:
    return NUM_STREAM_BUFFERS * stream_bytes(plan)


def _shortest(
    plan: Plan,
    start: frozenset[UnitPlacement],
    streamable: frozenset[UnitPlacement],
    limits: Limits,
    rates: Rates,
    leave_share: bool,
) -> Plan:
    """Return the plan of a local search from `start`; `plan` itself if `start` does not fit.

    Each move adds one placement to the streamed ones, or removes one.
    """
    best = _with_streamed(plan, start, limits)
    if not fits_no_worse(best, plan, limits, auto=leave_share):
        return plan
    if not plan.rule.matrix_steps:  # needs full units, and the device multiplies faster
        share = balanced_cpu_share(best, rates)
        divided = with_memory(best.changed(cpu_share=share), limits)
        pays = score(divided, rates) < score(best, rates)
        if pays and fits_no_worse(divided, best, limits, auto=leave_share):
            best = divided
    improved = True
    while improved:
        improved = False
        # Sorted, so that the result does not depend on hashes.
        for placement in sorted(
            streamable, key=lambda p: [list(Tier).index(p.of_field(f)) for f in p._fields]
        ):
            candidate = _with_streamed(best, best.streamed ^ {placement}, limits)
            shorter = score(candidate, rates) < score(best, rates) * (1 - 1e-9)
            if shorter and fits_no_worse(candidate, plan, limits, auto=leave_share):
                best, improved = candidate, True
    return best

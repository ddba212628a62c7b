"""Bytes that a plan reserves on each tier, by purpose: slots, state, buffers."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from infinity.plan.layout import UnitLayout
from infinity.plan.plan import Plan, SlotClass, UnitGroup, UpdatePlace, update_place
from infinity.types import OFF_DEVICE, PAGE, TIERS, FrozenFormat, Tier

NUM_WINDOWS = 3  # buffers in RAM for gradients that are stored on disk
NUM_GRADIENT_BUFFERS = 2  # device -> host gradient buffers
NUM_STREAM_BUFFERS = 3  # on a device: one copied in, one updated, one copied out
NUM_COMMIT_BUFFERS = 2  # chunks copied from a device with its own memory into a commit
NUM_COPY_BUFFERS = 2  # chunks copied into a checkpoint
FROZEN_COPY_BYTES = 1 << 20  # bytes of frozen parameters on a device copied into a commit at a time
TILE_BUFFERS = 8  # fp32 arrays of a tile: master, gradient, and temporaries of torch's step
# Bytes per element of a matrix that is orthogonalized: 10 for copies in fp32 and bf16, and the
# temporaries of products.
MATRIX_BYTES = 16
AUTO_SHARE = 0.7  # of compute memory that automatic placement fills; activations get the rest


@dataclass(frozen=True)
class Limits:
    """Budgets in bytes; None means unlimited (tests).

    `base` is the RAM that the process uses already. `made` is the size of the largest value that
    the initial write makes or reads, 0 if all are in RAM. `activations` are the bytes of compute
    memory that automatic placement leaves to activations; None if unknown, see `AUTO_SHARE`.
    """

    device: int | None
    host: int | None
    disk: int | None
    base: int = 0
    made: int = 0
    activations: int | None = None

    @property
    def budgets(self) -> dict[Tier, int | None]:
        """Budgets by tier."""
        return {Tier.DEVICE: self.device, Tier.HOST: self.host, Tier.DISK: self.disk}


def with_memory(plan: Plan, limits: Limits) -> Plan:
    """Return the plan with its slot classes, and bytes by tier and purpose."""
    key = (*plan.searched, limits.base, limits.made)
    cached: Plan | None = plan.facts.known.get(key)
    if cached is None:
        cached = plan.facts.known[key] = _with_memory(plan, limits)
    changed = plan.changed(slot_classes=cached.slot_classes, memory=cached.memory)
    changed.__dict__.update(unit_groups=cached.unit_groups, tier_bytes=cached.tier_bytes)
    return changed


def _with_memory(plan: Plan, limits: Limits) -> Plan:
    plan, facts = plan.changed(slot_classes=_slot_classes(plan)), plan.facts
    device, host, disk = _stored_bytes(plan).values()
    device = {
        "slots": sum(c.slot_bytes * c.count for c in plan.slot_classes),
        **device,
        "streaming": NUM_STREAM_BUFFERS * stream_bytes(plan),
        "optimizer matrices": matrix_bytes(plan, by_host=False),
    }
    if facts.largest_quantized:
        device["dequantizing"] = FrozenFormat.work_bytes(facts.largest_quantized)
    if plan.ranks > 1:
        device["exchange"] = 2 * num_exchanges(plan) * exchange_bytes(plan)
    num_fetches, unreachable = num_fetch_buffers(plan), _unreachable_tiers(plan)
    # A save copies a shard to RAM at once to write its frozen bytes.
    copied_shards = [
        group.layout.shard_bytes
        for group in plan.unit_groups
        if group.layout.frozen_bytes and group.placement.weight in unreachable
    ]
    host = {
        "process": limits.base,
        **host,
        "staging": plan.num_staging_buffers * staging_bytes(plan),
        "gradient windows": num_gradient_windows(plan) * gradient_window_bytes(plan),
        "fetch staging": num_fetches and num_fetches * fetch_bytes(plan),
        "gradient staging": 0 if plan.unified else NUM_GRADIENT_BUFFERS * facts.largest_trained,
        "saving": NUM_COPY_BUFFERS * copy_buffer_bytes(plan) + max(copied_shards, default=0),
        "optimizer tiles": TILE_BUFFERS * 4 * plan.rule.tile_elements,
        "optimizer matrices": matrix_bytes(plan, by_host=True),
    }
    if plan.durable:
        host["committing"] = NUM_COMMIT_BUFFERS * commit_buffer_bytes(plan)
        all_state = sum(
            len(g.units) * (plan.state_bytes(g.layout, g.placement, TIERS) + g.layout.frozen_bytes)
            for g in plan.unit_groups
        )
        # Two extents of all state, of which the state on the disk tier is counted already.
        disk["durable"] = 2 * all_state - disk["weights"] - disk["state"]
    if plan.saved.offload is not None:
        host["activations"] = plan.saved.host_bytes
        disk["activations"] = plan.saved.disk_bytes
    host["checksums"] = -(-sum(disk.values()) // PAGE) * 4 if plan.verify else 0  # 4 a page
    host["initial_write"] = _initial_write_bytes(plan, limits, device, host)
    return plan.changed(memory={Tier.DEVICE: device, Tier.HOST: host, Tier.DISK: disk})


def _initial_write_bytes(
    plan: Plan, limits: Limits, device: dict[str, int], host: dict[str, int]
) -> int:
    """Return bytes of the initial write beyond reserved memory that is not touched yet.

    Two chunks of all kinds, one fp32 master, and the largest value. (An initializer that compares,
    such as a truncated normal, briefly needs up to three times the value more.)
    """
    chunk, cache = min(plan.chunk_elements, plan.facts.largest_shard), plan.facts.known
    key = ("record", chunk, plan.basis)
    if key not in cache:
        kinds = plan.precision.kinds
        cache[key] = sum(plan.precision.nbytes(kind, chunk) for kind in kinds)
    record: int = cache[key]
    if not plan.unified:  # reserved memory is pinned, and pinned memory is resident at once
        return 2 * record + 4 * chunk + limits.made
    untouched = device["slots"] + device["gradients"] + host["gradients"]
    untouched += host["staging"] + host["gradient windows"]
    return max(2 * record + 4 * chunk + limits.made - untouched, 0)


def budgeted_bytes(plan: Plan) -> dict[Tier, int]:
    """Return bytes that count against each tier's budget; if unified, RAM includes the device's."""
    used = dict(plan.tier_bytes)
    if plan.unified:
        used[Tier.HOST] += used[Tier.DEVICE]
    return used


def excess(plan: Plan, limits: Limits, *, auto: bool = False) -> dict[Tier, int]:
    """Return the bytes over budget by tier; empty if the plan fits.

    With `auto` compute memory is limited to what automatic placement may fill.
    """
    over: dict[Tier, int] = {}
    compute_tier = Tier.HOST if plan.unified else Tier.DEVICE
    used = budgeted_bytes(plan)
    for tier, limit in limits.budgets.items():
        if limit is None:
            continue
        if auto and tier is compute_tier:
            if limits.activations is None:
                limit = int(AUTO_SHARE * limit)
            else:
                limit = max(limit - limits.activations, 0)
        if used[tier] > limit:
            over[tier] = used[tier] - limit
    return over


def fits_no_worse(changed: Plan, before: Plan, limits: Limits, *, auto: bool) -> bool:
    """Return True if no budget is exceeded, or none by more than in `before`."""
    over = excess(changed, limits, auto=auto)
    over_before = excess(before, limits, auto=auto) if over else {}
    return all(nbytes <= over_before.get(tier, 0) for tier, nbytes in over.items())


def _slot_classes(plan: Plan) -> tuple[SlotClass, ...]:
    """Group units whose sizes are within a factor of two; the largest defines the slot size.

    Ranges of experts have separate classes, since the unit of their layer is in use while they are.
    Units that compute with weights where they are stored need no slot. `unsharded` units have one
    slot each, of their size.
    """
    in_place = plan.units_on_device - plan.facts.dequantized if plan.ranks == 1 else frozenset()
    on_device = in_place | plan.unsharded
    key = (on_device, plan.unsharded, plan.prefetch_units)
    cached: tuple[SlotClass, ...] | None = plan.facts.known.get(key)
    if cached is not None:
        return cached
    moving = [unit for unit in plan.units if unit.index not in on_device]
    groups: list[list[UnitLayout]] = []
    for unit in sorted(moving, key=lambda u: (u.is_range, -u.slot_bytes, u.index)):
        same_kind = bool(groups) and unit.is_range == groups[-1][0].is_range
        if same_kind and unit.slot_bytes * 2 > groups[-1][0].slot_bytes:
            groups[-1].append(unit)
        else:
            groups.append([unit])
    count = plan.prefetch_units + 2
    classes = [
        SlotClass(g[0].slot_bytes, min(count, len(g)), tuple(u.index for u in g)) for g in groups
    ]
    sizes: dict[int, list[int]] = {}
    for index in sorted(plan.unsharded):
        sizes.setdefault(plan.units[index].slot_bytes, []).append(index)
    classes += [SlotClass(size, len(units), tuple(units)) for size, units in sizes.items()]
    classes = sorted((c for c in classes if c.slot_bytes), key=lambda c: -c.slot_bytes)
    plan.facts.known[key] = tuple(classes)
    return tuple(classes)


def _stored_bytes(plan: Plan) -> dict[Tier, dict[str, int]]:
    stored = {tier: {"weights": 0, "state": 0, "gradients": 0} for tier in TIERS}
    for group in plan.unit_groups:
        placement, count, sizes = group.placement, len(group.units), _unit_bytes(plan, group)
        copies = plan.nodes if plan.is_shared(group.units[0]) else 1
        stored[placement.weight]["weights"] += copies * count * sizes.weight
        stored[placement.state]["state"] += count * sizes.state
        stored[placement.gradient]["gradients"] += count * sizes.gradient
    return stored


class _UnitBytes(NamedTuple):
    """Bytes of a rank's shard of a unit, and of the buffers that its placement needs."""

    weight: int
    state: int
    gradient: int
    staged: int
    streamed: int
    copied: int


def _unit_bytes(plan: Plan, group: UnitGroup) -> _UnitBytes:
    layout, placement = group.layout, group.placement
    kind, is_streamed = plan.facts.kinds[layout.index], placement in plan.streamed
    key = (kind, placement, is_streamed, plan.chunks_at_once, plan.cpu_share, plan.basis)
    cached: _UnitBytes | None = plan.facts.known.get(key)
    if cached is not None:
        return cached
    unreachable, staged, streamed = _unreachable_tiers(plan), 0, 0
    if update_place(plan, group.units[0]) is not UpdatePlace.DEVICE:
        # Streamed chunks that are stored on the device are updated there.
        num_streamed = plan.streamed_chunks(layout, placement)
        all_streamed = num_streamed == layout.num_chunks(plan.chunk_elements)
        tiers = (Tier.DISK,) if all_streamed else unreachable
        chunks = plan.chunks_per_batch(placement, by_device=False)
        staged = _bytes_at_once(plan, group, tiers, chunks, gradient=True)
    if is_streamed:
        chunks = plan.chunks_per_batch(placement)
        streamed = _bytes_at_once(plan, group, OFF_DEVICE, chunks, gradient=True)
    unit_bytes = plan.facts.known[key] = _UnitBytes(
        weight=layout.shard_bytes,
        state=plan.weight_and_state(layout)[1],
        gradient=plan.gradient_bytes(layout),
        staged=staged,
        streamed=streamed,
        copied=_bytes_at_once(plan, group, unreachable),
    )
    return unit_bytes


def staging_bytes(plan: Plan) -> int:
    """Return bytes of one staging buffer: the chunks updated at once, in all kinds outside RAM.

    The maximum over all units.
    """
    return max((_unit_bytes(plan, group).staged for group in plan.unit_groups), default=0)


def stream_bytes(plan: Plan) -> int:
    """Return bytes of one device buffer of streamed updates: the chunks streamed at once.

    The maximum over all units, of the kinds that are not stored on the device.
    """
    return max((_unit_bytes(plan, group).streamed for group in plan.unit_groups), default=0)


def matrix_bytes(plan: Plan, *, by_host: bool) -> int:
    """Return bytes that torch needs to step the largest matrix updated by the host, or the device.

    0 if the rule multiplies no matrices.
    """
    if not plan.rule.matrix_steps:
        return 0
    updated = (
        group.layout for group in plan.unit_groups
        if (update_place(plan, group.units[0]) is UpdatePlace.CPU) is by_host
    )  # fmt: skip
    shapes = (s.shape for layout in updated for s in layout.trained_segments if s.needs_full)
    return MATRIX_BYTES * max((math.prod(shape[-2:]) for shape in shapes), default=0)


def copy_buffer_bytes(plan: Plan) -> int:
    """Return bytes of one buffer of a save: a chunk of all kinds outside RAM.

    The maximum over all units.
    """
    return max((_unit_bytes(plan, group).copied for group in plan.unit_groups), default=0)


def _unreachable_tiers(plan: Plan) -> tuple[Tier, ...]:
    """Return the tiers that the CPU cannot access."""
    return (Tier.DISK,) if plan.unified else (Tier.DEVICE, Tier.DISK)


def _bytes_at_once(
    plan: Plan,
    group: UnitGroup,
    tiers: Collection[Tier],
    chunks: int = 1,
    *,
    gradient: bool = False,
) -> int:
    """Return bytes of a unit's first chunks on these tiers: state, and the gradient if asked."""
    nbytes = plan.state_bytes(group.layout, group.placement, tiers, chunks=chunks)
    if gradient and group.placement.gradient in tiers:
        nbytes += plan.gradient_bytes(group.layout, chunks=chunks)
    return nbytes


def commit_buffer_bytes(plan: Plan) -> int:
    """Return bytes of one buffer of a commit: one kind of a chunk stored on the device."""
    if (
        plan.unified
        or not plan.durable
        or all(Tier.DEVICE not in (p.weight, p.state) for p in plan.placements)
    ):
        return 0
    nbytes = FROZEN_COPY_BYTES
    for group in plan.unit_groups:
        count = min(plan.chunk_elements, group.layout.shard_numel)
        device_kinds = [k for k in plan.precision.kinds if group.placement.of(k) is Tier.DEVICE]
        precision = plan.precision_of(group.layout)
        nbytes = max([nbytes, *(precision.nbytes(k, count) for k in device_kinds)])
    return nbytes


def num_gradient_windows(plan: Plan) -> int:
    """Return the number of gradient windows; 0 if no gradients are stored on disk."""
    return min(NUM_WINDOWS, sum(len(group.units) for group in _gradients_on_disk(plan)))


def gradient_window_bytes(plan: Plan) -> int:
    """Return bytes of one gradient window."""
    return max((plan.gradient_bytes(g.layout) for g in _gradients_on_disk(plan)), default=0)


def _gradients_on_disk(plan: Plan) -> list[UnitGroup]:
    return [g for g in plan.unit_groups if g.placement.gradient is Tier.DISK and g.layout.numel]


def num_fetch_buffers(plan: Plan) -> int:
    """Return the number of host buffers for disk reads to a device with its own memory."""
    on_disk = not plan.unified and any(g.placement.weight is Tier.DISK for g in plan.unit_groups)
    return plan.prefetch_units + 2 if on_disk else 0


def fetch_bytes(plan: Plan) -> int:
    """Return bytes of the largest fetch: a rank's shard of a unit's weights."""
    moving = chain.from_iterable(c.members for c in plan.slot_classes)
    return max(map(plan.facts.shard_bytes.__getitem__, moving), default=0)


def num_exchanges(plan: Plan) -> int:
    """Return the number of units whose gradients are exchanged at the same time.

    One is enough with slices: a block computes all tokens, which takes longer than the previous
    exchange, and sums are twice as wide.
    """
    return 1 if plan.saved.slices > 1 else 2


def exchange_bytes(plan: Plan) -> int:
    """Return bytes of one exchange buffer: the full gradients of the largest unit.

    Sums of slices are fp32.
    """
    itemsize = 4 if plan.saved.slices > 1 else plan.precision.weight
    return max((itemsize * group.layout.numel for group in plan.unit_groups), default=0)

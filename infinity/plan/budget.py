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

NUM_WINDOWS = 3  # gradient ranges in RAM when gradients rest on disk
NUM_GRADIENT_BUFFERS = 2  # device -> host gradient buffers
NUM_STREAM_BUFFERS = 3  # on a device: what comes, what is updated, what goes
NUM_COMMIT_BUFFERS = 2  # chunks on their way from a device's own memory into a commit
NUM_COPY_BUFFERS = 2  # chunks on their way into a checkpoint
FROZEN_PIECE = 1 << 20  # bytes of frozen parameters on a device that go into a commit at a time
TILE_BUFFERS = 8  # fp32 arrays of a tile: master, gradient, and what torch's step makes on the way
# An element of a matrix that is made orthogonal: copies in fp32 and bf16, which are 10, and what
# products take meanwhile.
MATRIX_BYTES = 16
AUTO_SHARE = 0.7  # of the memory compute uses; placement by the plan leaves the rest to activations


@dataclass(frozen=True)
class Limits:
    """Budgets in bytes; None means unlimited (tests). `base` is used by the process already.

    `made` is the largest value that is made, or read, at the initial write; 0 where all are in RAM.
    `activations` is what placement by the plan leaves of the memory that computes, for what
    autograd holds; None where that is not known: then a share of it, see `AUTO_SHARE`.
    """

    device: int | None
    host: int | None
    disk: int | None
    base: int = 0
    made: int = 0
    activations: int | None = None

    @property
    def budgets(self) -> dict[Tier, int | None]:
        """By tier."""
        return {Tier.DEVICE: self.device, Tier.HOST: self.host, Tier.DISK: self.disk}

    def for_placement(self, budget: int) -> int:
        """What of a budget of the memory that computes placement by the plan may fill."""
        if self.activations is None:
            return int(AUTO_SHARE * budget)
        return max(budget - self.activations, 0)


def with_memory(plan: Plan, limits: Limits) -> Plan:
    """The same plan with its slot classes and bytes per tier and purpose."""
    key = (*plan.searched, limits.base, limits.made)
    known: Plan | None = plan.facts.known.get(key)
    if known is None:
        known = plan.facts.known[key] = _with_memory(plan, limits)
    found = plan.changed(slot_classes=known.slot_classes, memory=known.memory)
    found.__dict__.update(unit_groups=known.unit_groups, tier_bytes=known.tier_bytes)
    return found


def _with_memory(plan: Plan, limits: Limits) -> Plan:
    plan = plan.changed(slot_classes=_slot_classes(plan))
    device, host, disk = _stored_bytes(plan).values()
    device = {
        "slots": sum(c.slot_bytes * c.count for c in plan.slot_classes),
        **device,
        "streaming": NUM_STREAM_BUFFERS * stream_bytes(plan),
        "optimizer matrices": matrix_bytes(plan, by_host=False),
    }
    if quantised := plan.facts.largest_quantised:
        device["dequantising"] = FrozenFormat.work_bytes(quantised)
    if plan.ranks > 1:
        device["exchange"] = 2 * num_exchanges(plan) * exchange_bytes(plan)
    fetching = num_fetch_buffers(plan)
    host = {
        "process": limits.base,
        **host,
        "staging": plan.num_staging_buffers * staging_bytes(plan),
        "gradient windows": num_windows(plan) * largest_window(plan),
        "fetch staging": fetching and fetching * fetch_bytes(plan),
        "gradient staging": 0 if plan.unified else NUM_GRADIENT_BUFFERS * largest_trained(plan),
        "saving": NUM_COPY_BUFFERS * copy_buffer_bytes(plan) + _frozen_copy_bytes(plan),
        "optimizer tiles": TILE_BUFFERS * 4 * plan.rule.tile_elements,
        "optimizer matrices": matrix_bytes(plan, by_host=True),
    }
    if plan.durable:
        host["committing"] = NUM_COMMIT_BUFFERS * commit_buffer_bytes(plan)
        disk = {**disk, "durable": _durable_bytes(plan, disk)}
    if plan.saved.offload is not None:
        host["activations"] = plan.saved.host_bytes
        disk = {**disk, "activations": plan.saved.disk_bytes}
    host["checksums"] = checksum_bytes(sum(disk.values())) if plan.verify else 0
    host["initial_write"] = _initial_write_bytes(plan, limits, device, host)
    return plan.changed(memory={Tier.DEVICE: device, Tier.HOST: host, Tier.DISK: disk})


def _initial_write_bytes(
    plan: Plan, limits: Limits, device: dict[str, int], host: dict[str, int]
) -> int:
    """Return bytes of the initial write beyond reserved but untouched memory.

    Two chunks of all kinds, one fp32 master, and one value as it is made. (An initialiser that
    compares, such as a truncated normal, needs up to three times the value more, for a moment.)
    """
    chunk, known = min(plan.chunk_elements, plan.facts.largest_shard), plan.facts.known
    key = ("record", chunk, plan.basis)
    if key not in known:
        kinds = plan.precision.kinds
        known[key] = sum(plan.precision.nbytes(kind, chunk) for kind in kinds)
    record: int = known[key]
    if not plan.unified:  # buffers are pinned, and pinned memory is there from the beginning
        return 2 * record + 4 * chunk + limits.made
    untouched = device["slots"] + device["gradients"] + host["gradients"]
    untouched += host["staging"] + host["gradient windows"]
    return max(2 * record + 4 * chunk + limits.made - untouched, 0)


def budgeted_bytes(plan: Plan) -> dict[Tier, int]:
    """Bytes that count against each tier's budget; on a unified device the host holds its too."""
    used = dict(plan.tier_bytes)
    if plan.unified:
        used[Tier.HOST] += used[Tier.DEVICE]
    return used


def excess(plan: Plan, limits: Limits, *, auto: bool = False) -> dict[Tier, int]:
    """Tier -> bytes over its budget; empty when the plan fits."""
    over: dict[Tier, int] = {}
    computes = Tier.HOST if plan.unified else Tier.DEVICE
    used = budgeted_bytes(plan)
    for tier, limit in limits.budgets.items():
        if limit is not None and auto and tier is computes:
            limit = limits.for_placement(limit)
        if limit is not None and used[tier] > limit:
            over[tier] = used[tier] - limit
    return over


def fits_as(changed: Plan, before: Plan, limits: Limits, *, auto: bool) -> bool:
    """Whether no budget is exceeded, or none more than before."""
    over = excess(changed, limits, auto=auto)
    had = excess(before, limits, auto=auto) if over else {}
    return all(nbytes <= had.get(tier, 0) for tier, nbytes in over.items())


def _slot_classes(plan: Plan) -> tuple[SlotClass, ...]:
    """Group units whose sizes lie within a factor of two; a class has slots of its largest.

    Ranges of experts have classes of their own: while they compute, so does the unit of their
    layer. A unit that computes with its weights where they rest has none. Those that stay
    `unsharded` have a slot each, of their own size.
    """
    there = plan.at_device - plan.facts.dequantised if plan.ranks == 1 else frozenset()
    key = (there | plan.unsharded, plan.unsharded, plan.prefetch_units)
    if key not in plan.facts.known:
        plan.facts.known[key] = _classes_without(plan, there | plan.unsharded)
    found: tuple[SlotClass, ...] = plan.facts.known[key]
    return found


def _classes_without(plan: Plan, on_device: frozenset[int]) -> tuple[SlotClass, ...]:
    """Return the slot classes of a plan of which these units do not move."""
    moving = [unit for unit in plan.units if unit.index not in on_device]
    groups: list[list[UnitLayout]] = []
    for unit in sorted(moving, key=lambda u: (u.is_range, -u.slot_bytes, u.index)):
        like = bool(groups) and unit.is_range == groups[-1][0].is_range
        if like and unit.slot_bytes * 2 > groups[-1][0].slot_bytes:
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
    return tuple(sorted((c for c in classes if c.slot_bytes), key=lambda c: -c.slot_bytes))


def checksum_bytes(nbytes: int) -> int:
    """Return bytes of checksums for bytes on disk: 4 for every page."""
    return -(-nbytes // PAGE) * 4


def _stored_bytes(plan: Plan) -> dict[Tier, dict[str, int]]:
    """What rests on each tier."""
    found = {tier: {"weights": 0, "state": 0, "gradients": 0} for tier in TIERS}
    for group in plan.unit_groups:
        placement, count, sizes = group.placement, len(group.units), _unit_bytes(plan, group)
        copies = plan.nodes if plan.is_shared(group.units[0]) else 1
        found[placement.weight]["weights"] += copies * count * sizes.weight
        found[placement.state]["state"] += count * sizes.state
        found[placement.gradient]["gradients"] += count * sizes.gradient
    return found


class _UnitBytes(NamedTuple):
    """Bytes at rest of a rank's share of a unit, and of the buffers that its placement needs."""

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
    known: _UnitBytes | None = plan.facts.known.get(key)
    if known is None:
        chunks = plan.chunks_per_batch(placement)
        known = plan.facts.known[key] = _UnitBytes(
            weight=layout.shard_bytes,
            state=plan.weight_and_state(layout)[1],
            gradient=plan.gradient_bytes(layout),
            staged=_staged_bytes(plan, group),
            streamed=_bytes_at_once(plan, group, OFF_DEVICE, chunks, gradient=True)
            if is_streamed
            else 0,
            copied=_bytes_at_once(plan, group, _out_of_reach(plan) if plan.ranks == 1 else TIERS),
        )
    return known


def staging_bytes(plan: Plan) -> int:
    """Return bytes of one staging buffer: the chunks that are updated at once, of every kind that
    some unit cannot update in place.
    """
    return max((_unit_bytes(plan, group).staged for group in plan.unit_groups), default=0)


def _staged_bytes(plan: Plan, group: UnitGroup) -> int:
    if update_place(plan, group.units[0]) is UpdatePlace.DEVICE:
        return 0
    # What rests on the device and is streamed is updated there.
    streamed = plan.streamed_chunks(group.layout, group.placement)
    all_streamed = streamed == group.layout.num_chunks(plan.chunk_elements)
    outside = (Tier.DISK,) if all_streamed else _out_of_reach(plan)
    chunks = plan.chunks_per_batch(group.placement, by_device=False)
    return _bytes_at_once(plan, group, outside, chunks, gradient=True)


def stream_bytes(plan: Plan) -> int:
    """Bytes of one device buffer of streamed updates: of all that does not rest there, the chunks
    that pass at once.
    """
    return max((_unit_bytes(plan, group).streamed for group in plan.unit_groups), default=0)


def matrix_bytes(plan: Plan, *, by_host: bool) -> int:
    """Bytes that torch takes to step the largest matrix of units that the host, or device, updates.

    None where the rule multiplies no matrices.
    """
    if not plan.rule.matrix_steps:
        return 0
    updated = (
        a.layout for a in plan.unit_groups
        if (update_place(plan, a.units[0]) is UpdatePlace.CPU) is by_host
    )  # fmt: skip
    shapes = (s.shape for layout in updated for s in layout.trained_segments if s.needs_full)
    return MATRIX_BYTES * max((math.prod(shape[-2:]) for shape in shapes), default=0)


def copy_buffer_bytes(plan: Plan) -> int:
    """Bytes of one buffer of a save: a chunk of every kind that some unit has not in RAM.

    Of several ranks, which send it to the first, of every kind.
    """
    return max((_unit_bytes(plan, group).copied for group in plan.unit_groups), default=0)


def _frozen_copy_bytes(plan: Plan) -> int:
    """Bytes that a save brings to RAM at once of a unit with frozen bytes: all that a rank has."""
    outside = _out_of_reach(plan)
    frozen = (
        a for a in plan.unit_groups if a.layout.frozen_bytes and a.placement.weight in outside
    )
    return max((group.layout.shard_bytes for group in frozen), default=0)


def _out_of_reach(plan: Plan) -> tuple[Tier, ...]:
    """The tiers that the CPU does not reach."""
    return (Tier.DISK,) if plan.unified else (Tier.DEVICE, Tier.DISK)


def _bytes_at_once(
    plan: Plan,
    group: UnitGroup,
    tiers: Collection[Tier],
    chunks: int = 1,
    *,
    gradient: bool = False,
) -> int:
    """Bytes of a unit's first chunks that rest on these tiers: state, and the gradient too."""
    nbytes = plan.state_bytes(group.layout, group.placement, tiers, chunks=chunks)
    if gradient and group.placement.gradient in tiers:
        nbytes += plan.gradient_bytes(group.layout, chunks=chunks)
    return nbytes


def commit_buffer_bytes(plan: Plan) -> int:
    """Bytes of one buffer of a commit: a chunk's part of one kind that rests on a device."""
    if (
        plan.unified
        or not plan.durable
        or all(Tier.DEVICE not in (h.weight, h.state) for h in plan.placements)
    ):
        return 0
    nbytes = FROZEN_PIECE
    for group in plan.unit_groups:
        count = min(plan.chunk_elements, group.layout.shard_numel)
        away = [k for k in plan.precision.kinds if group.placement.of(k) is Tier.DEVICE]
        precision = plan.precision_of(group.layout)
        nbytes = max([nbytes, *(precision.nbytes(k, count) for k in away)])
    return nbytes


def _durable_bytes(plan: Plan, disk: dict[str, int]) -> int:
    """Bytes on disk beyond what rests there: two extents of everything."""
    total = 0
    for group in plan.unit_groups:
        state = plan.state_bytes(group.layout, group.placement, TIERS)
        total += len(group.units) * (state + group.layout.frozen_bytes)
    return 2 * total - disk["weights"] - disk["state"]


def num_windows(plan: Plan) -> int:
    """Gradient windows: only where some gradients rest on disk."""
    return min(NUM_WINDOWS, sum(len(group.units) for group in _gradients_on_disk(plan)))


def largest_window(plan: Plan) -> int:
    """Bytes of one gradient window."""
    return max((plan.gradient_bytes(a.layout) for a in _gradients_on_disk(plan)), default=0)


def _gradients_on_disk(plan: Plan) -> list[UnitGroup]:
    return [a for a in plan.unit_groups if a.placement.gradient is Tier.DISK and a.layout.numel]


def num_fetch_buffers(plan: Plan) -> int:
    """Host buffers in which disk reads land on their way to a device of its own memory."""
    on_disk = not plan.unified and any(a.placement.weight is Tier.DISK for a in plan.unit_groups)
    return plan.prefetch_units + 2 if on_disk else 0


def largest_slot(plan: Plan) -> int:
    """Bytes of the largest unit that moves through slots."""
    return max((c.slot_bytes for c in plan.slot_classes), default=0)


def fetch_bytes(plan: Plan) -> int:
    """Return bytes of the largest fetch: a rank's shard of a unit's weights."""
    moving = chain.from_iterable(c.members for c in plan.slot_classes)
    return max(map(plan.facts.shard_bytes.__getitem__, moving), default=0)


def num_exchanges(plan: Plan) -> int:
    """How many units' gradients are on their way between ranks at the same time.

    A block that runs all tokens in slices computes for long: the one before it has been exchanged
    by then, and sums are twice as wide.
    """
    return 1 if plan.saved.slices > 1 else 2


def exchange_bytes(plan: Plan) -> int:
    """Bytes of the largest unit's gradients on their way to the ranks that keep them.

    Sums of slices are fp32.
    """
    itemsize = 4 if plan.saved.slices > 1 else plan.precision.weight
    return max((itemsize * group.layout.numel for group in plan.unit_groups), default=0)


def largest_trained(plan: Plan) -> int:
    """Bytes of the largest trained range in the compute dtype."""
    return plan.facts.largest_trained

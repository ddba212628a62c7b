"""What a plan reserves on each tier, by purpose: slots, homes, buffers. Sizes in bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from infinity.plan.layout import PAGE, Kind, Tier, UnitLayout
from infinity.plan.plan import Plan, SlotClass, UnitHomes, UpdatePlace, update_place

NUM_WINDOWS = 3  # gradient ranges in RAM when gradients rest on disk
NUM_BOUNCES = 2  # device -> host gradient buffers
NUM_STREAM_BUFFERS = 3  # chunks on a device: one comes, one is updated, one goes
NUM_COMMIT_BUFFERS = 2  # chunks on their way from a device's own memory into a commit
NUM_COPY_BUFFERS = 2  # chunks on their way into a checkpoint
FROZEN_PIECE = 1 << 20  # bytes of frozen parameters on a device that go into a commit at a time
TILE_BUFFERS = 8  # fp32 arrays of a tile: master, gradient, and what torch's step makes on the way
AUTO_SHARE = 0.7  # of the memory compute uses; auto homes leave the rest to activations


@dataclass(frozen=True)
class Limits:
    """Budgets in bytes; None means unlimited (tests). `base` is what the process already uses.

    `made` is the largest value that is made, or read, at birth; 0 where all are in RAM.
    """

    device: int | None
    host: int | None
    disk: int | None
    base: int = 0
    made: int = 0


def with_memory(plan: Plan, limits: Limits) -> Plan:
    """The same plan with its slot classes and bytes per tier and purpose."""
    plan = replace(plan, slot_classes=_slot_classes(plan))
    rest = _at_rest(plan)
    device, host, disk = (rest[tier] for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK))
    device = {
        "slots": sum(c.slot_bytes * c.count for c in plan.slot_classes),
        **device,
        "streaming": NUM_STREAM_BUFFERS * stream_bytes(plan),
    }
    host = {
        "process": limits.base,
        **host,
        "staging": plan.num_stages * stage_bytes(plan),
        "gradient windows": num_windows(plan) * largest_window(plan),
        "landing": num_landings(plan) * largest_slot(plan),
        "bounce": 0 if plan.unified else NUM_BOUNCES * largest_trained(plan),
        "saving": NUM_COPY_BUFFERS * copy_buffer_bytes(plan),
        "optimizer tiles": TILE_BUFFERS * 4 * plan.rule.tile_elements,
    }
    if plan.durable:
        host["committing"] = NUM_COMMIT_BUFFERS * commit_buffer_bytes(plan)
        disk = {**disk, "durable": _durable_bytes(plan, disk)}
    if plan.saved.offload is not None:
        host["activations"] = plan.saved.host_bytes
        disk = {**disk, "activations": plan.saved.disk_bytes}
    host["checksums"] = checksum_bytes(sum(disk.values())) if plan.verify else 0
    host["birth"] = _birth_bytes(plan, limits, device, host)
    return replace(plan, memory={"device": device, "host": host, "disk": disk})


def _birth_bytes(plan: Plan, limits: Limits, device: dict[str, int], host: dict[str, int]) -> int:
    """What the first write of every home takes, beyond what is reserved but not yet touched.

    Two chunks of all kinds, one fp32 master, and one value as it is made. (An initialiser that
    compares, such as a truncated normal, needs up to three times the value more, for a moment.)
    """
    chunk = min(plan.chunk_elements, max((u.numel for u in plan.units), default=0))
    record = sum(plan.precision.nbytes(kind, chunk) for kind in plan.precision.kinds)
    if not plan.unified:  # buffers are pinned, and pinned memory is there from the beginning
        return 2 * record + 4 * chunk + limits.made
    untouched = device["slots"] + device["gradients"] + host["gradients"]
    untouched += host["staging"] + host["gradient windows"]
    return max(2 * record + 4 * chunk + limits.made - untouched, 0)


def budgeted_bytes(plan: Plan) -> dict[str, int]:
    """Bytes that count against each tier's budget; on a unified device the host holds its too."""
    used = plan.tier_bytes
    if plan.unified:
        used["host"] += used["device"]
    return used


def excess(plan: Plan, limits: Limits, *, auto: bool = False) -> dict[str, int]:
    """Tier -> bytes over its budget; empty when the plan fits."""
    used = budgeted_bytes(plan)
    over: dict[str, int] = {}
    for tier, limit in (("device", limits.device), ("host", limits.host), ("disk", limits.disk)):
        if limit is None:
            continue
        computes = tier == ("host" if plan.unified else "device")
        share = AUTO_SHARE if auto and computes else 1.0
        if used[tier] > limit * share:
            over[tier] = used[tier] - int(limit * share)
    return over


def _slot_classes(plan: Plan) -> tuple[SlotClass, ...]:
    """Group units whose sizes lie within a factor of two; a class has slots of its largest."""
    moving = [u for u in plan.units if plan.homes[u.index].weight is not Tier.DEVICE]
    groups: list[list[UnitLayout]] = []
    for unit in sorted(moving, key=lambda u: (-u.slot_bytes, u.index)):
        if groups and unit.slot_bytes * 2 > groups[-1][0].slot_bytes:
            groups[-1].append(unit)
        else:
            groups.append([unit])
    count = plan.look_ahead + 2
    return tuple(
        SlotClass(g[0].slot_bytes, min(count, len(g)), tuple(u.index for u in g))
        for g in groups
        if g[0].slot_bytes
    )


def checksum_bytes(nbytes: int) -> int:
    """Bytes of checksums for so many bytes on disk: 4 for every page."""
    return -(-nbytes // PAGE) * 4


def _at_rest(plan: Plan) -> dict[Tier, dict[str, int]]:
    """What rests on each tier."""
    found = {tier: {"weights": 0, "state": 0, "gradients": 0} for tier in Tier}
    state_kinds = [k for k in plan.precision.kinds if k is not Kind.WEIGHT]
    state: dict[int, int] = {}  # blocks are equal: their bytes are added up once
    for unit, homes in zip(plan.units, plan.homes, strict=True):
        if unit.numel not in state:
            state[unit.numel] = sum(plan.range_bytes(unit, k) for k in state_kinds)
        found[homes.weight]["weights"] += unit.slot_bytes
        found[homes.state]["state"] += state[unit.numel]
        found[homes.gradient]["gradients"] += unit.numel * plan.gradient_itemsize
    return found


def stage_bytes(plan: Plan) -> int:
    """Bytes of one staging buffer: a chunk of every kind that some unit cannot update in place."""
    nbytes = 0
    seen: set[tuple[int, UnitHomes]] = set()
    for unit, homes in zip(plan.units, plan.homes, strict=True):
        if (unit.numel, homes) in seen or not unit.numel:
            continue
        seen.add((unit.numel, homes))
        place = update_place(plan, unit.index)
        if place is UpdatePlace.DEVICE:
            continue
        reached = _in_ram(plan)
        if place is UpdatePlace.STREAMED:  # what rests on the device is updated there
            reached = {Tier.HOST, Tier.DEVICE}
        need = _chunk_outside(plan, homes, unit.numel, reached)
        if homes.gradient not in reached:
            need += min(plan.chunk_elements, unit.numel) * plan.gradient_itemsize
        nbytes = max(nbytes, need)
    return nbytes


def stream_bytes(plan: Plan) -> int:
    """Bytes of one device buffer of streamed updates: a chunk of all that does not rest there."""
    nbytes = 0
    if plan.streamed:
        for homes, numel in {(h, u.numel) for u, h in zip(plan.units, plan.homes, strict=True)}:
            if homes in plan.streamed:
                need = _chunk_outside(plan, homes, numel, {Tier.DEVICE})
                if homes.gradient is not Tier.DEVICE:
                    need += min(plan.chunk_elements, numel) * plan.gradient_itemsize
                nbytes = max(nbytes, need)
    return nbytes


def copy_buffer_bytes(plan: Plan) -> int:
    """Bytes of one buffer of a save: a chunk of every kind that some unit has not in RAM."""
    cases = {(homes, u.numel) for u, homes in zip(plan.units, plan.homes, strict=True)}
    in_ram = _in_ram(plan)
    return max((_chunk_outside(plan, homes, numel, in_ram) for homes, numel in cases), default=0)


def _in_ram(plan: Plan) -> set[Tier]:
    """The tiers that the CPU reaches."""
    return {Tier.HOST, Tier.DEVICE} if plan.unified else {Tier.HOST}


def _chunk_outside(plan: Plan, homes: UnitHomes, numel: int, reached: set[Tier]) -> int:
    """Bytes of the state kinds of a unit's first chunk that rest on none of these tiers."""
    count = min(plan.chunk_elements, numel)
    away = (k for k in plan.precision.kinds if homes.of(k) not in reached)
    return sum(plan.precision.nbytes(k, count) for k in away)


def commit_buffer_bytes(plan: Plan) -> int:
    """Bytes of one buffer of a commit: a chunk's part of one kind that rests on a device."""
    if (
        plan.unified
        or not plan.durable
        or all(Tier.DEVICE not in (h.weight, h.state) for h in plan.homes)
    ):
        return 0
    nbytes = FROZEN_PIECE
    for homes, numel in {(h, u.numel) for u, h in zip(plan.units, plan.homes, strict=True)}:
        count = min(plan.chunk_elements, numel)
        away = [k for k in plan.precision.kinds if homes.of(k) is Tier.DEVICE]
        nbytes = max([nbytes, *(plan.precision.nbytes(k, count) for k in away)])
    return nbytes


def _durable_bytes(plan: Plan, disk: dict[str, int]) -> int:
    """Bytes on disk beyond what rests there: two extents of everything."""
    sizes: dict[int, int] = {}
    total = 0
    for unit in plan.units:
        if unit.numel not in sizes:
            sizes[unit.numel] = sum(plan.range_bytes(unit, k) for k in plan.precision.kinds)
        total += sizes[unit.numel] + unit.frozen_bytes
    return 2 * total - disk["weights"] - disk["state"]


def num_windows(plan: Plan) -> int:
    """Gradient windows: only where some gradients rest on disk."""
    disk = [u for u in plan.units if u.numel and plan.homes[u.index].gradient is Tier.DISK]
    return min(NUM_WINDOWS, len(disk))


def largest_window(plan: Plan) -> int:
    """Bytes of one gradient window."""
    units = [u for u in plan.units if plan.homes[u.index].gradient is Tier.DISK]
    return max((u.numel * plan.gradient_itemsize for u in units), default=0)


def num_landings(plan: Plan) -> int:
    """Host buffers in which disk reads land on their way to a device of its own memory."""
    disk = [h for h in plan.homes if h.weight is Tier.DISK]
    return 0 if plan.unified or not disk else plan.look_ahead + 2


def largest_slot(plan: Plan) -> int:
    """Bytes of the largest unit that moves through slots."""
    return max((c.slot_bytes for c in plan.slot_classes), default=0)


def largest_trained(plan: Plan) -> int:
    """Bytes of the largest trained range in the compute dtype."""
    return max((u.trained_bytes for u in plan.units), default=0)

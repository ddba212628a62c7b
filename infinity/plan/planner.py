"""From units, config and budgets to a `Plan`, or to an error that says what does not fit.

Homes left `auto` follow a simple rule: device first, then host, then disk. In RAM the order is
weights, gradients, then state, because a byte of a weight saves the most traffic, a byte of a
gradient the next most, and a byte of state 2 bytes per step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from infinity.config import Config
from infinity.errors import ConfigError, DoesNotFitError
from infinity.plan.forecast import forecast_bytes
from infinity.plan.layout import (
    ELEMENT_ALIGN,
    PAGE,
    PRECISIONS,
    Kind,
    Tier,
    UnitLayout,
    round_up,
)
from infinity.plan.plan import Plan, RuleFacts, SlotClass, UnitHomes, updated_on_device
from infinity.sizes import format_size

CHUNK_ELEMENTS = 1 << 20  # 12 MiB records: inside the 8-64 MiB that disks like
NUM_STAGES = 4  # one read, one updated, one written, one to spare
NUM_WINDOWS = 3  # gradient ranges in RAM when gradients rest on disk
NUM_BOUNCES = 2  # device -> host gradient buffers
TILE_BUFFERS = 8  # fp32 arrays of a tile: master, gradient, and what torch's step makes on the way
AUTO_SHARE = 0.7  # of the memory compute uses; auto homes leave the rest to activations


@dataclass(frozen=True)
class Limits:
    """Budgets in bytes; None means unlimited (tests). `base` is what the process already uses."""

    device: int | None
    host: int | None
    disk: int | None
    base: int = 0


def make_plan(
    units: tuple[UnitLayout, ...],
    config: Config,
    limits: Limits,
    *,
    unified: bool,
    rule: RuleFacts | None = None,
    device_kernels: bool = False,
) -> Plan:
    """Choose homes, slots and stages; raises `DoesNotFitError` or `ConfigError`.

    `rule` is what the update rule keeps; two fp32 moments if it is left out. `device_kernels`
    says that the device can run our optimizer kernels itself.
    """
    rule = rule or RuleFacts()
    precision = replace(PRECISIONS[config.precision], moments=rule.moments)
    micro_batches = config.gradient_accumulation_steps
    gradient_itemsize = 4 if micro_batches > 1 or precision.weight == 4 else 2
    largest = max((u.numel for u in units), default=0)
    chunk = config.chunk_size if isinstance(config.chunk_size, int) else CHUNK_ELEMENTS
    notes = rule.notes
    if rule.whole:
        if isinstance(config.chunk_size, int):
            notes += (f"chunk_size {chunk} is not used: {rule.name} needs whole parameters",)
        chunk = max(largest, 1)
    draft = Plan(
        precision=precision,
        units=units,
        homes=(),
        slot_classes=(),
        chunk_elements=min(chunk, round_up(max(largest, 1), ELEMENT_ALIGN)),
        num_stages=NUM_STAGES,
        look_ahead=config.look_ahead,
        micro_batches=micro_batches,
        gradient_itemsize=gradient_itemsize,
        unified=unified,
        verify=config.io.verify,
        memory={},
        budget={"device": limits.device, "host": limits.host, "disk": limits.disk},
        notes=notes,
        rule=rule,
        device_kernels=device_kernels,
    )
    failure: DoesNotFitError | None = None
    for distance in range(config.look_ahead, -1, -1):
        try:
            plan = _with_homes(replace(draft, look_ahead=distance), config, limits)
        except DoesNotFitError as error:
            failure = failure or error
            continue
        if distance < config.look_ahead:
            note = f"look-ahead lowered from {config.look_ahead} to {distance} to fit the budgets"
            plan = replace(plan, notes=(*plan.notes, note))
        return replace(plan, predicted_bytes=forecast_bytes(plan))
    assert failure is not None
    raise failure


def _with_homes(draft: Plan, config: Config, limits: Limits) -> Plan:
    """Fill in homes greedily, then memory; every explicit home is honoured or refused."""
    wishes = (config.homes.weights, config.homes.gradients, config.homes.moments)
    has_disk = bool(config.nvme_path)
    if "disk" in wishes and not has_disk:
        raise ConfigError(
            "homes ask for the disk, but no nvme_path is given",
            remedy="set nvme_path: /a/directory/on/a/fast/drive, or use homes 'auto' or 'host'",
        )
    explicit = [None if wish == "auto" else Tier(wish) for wish in wishes]
    if draft.unified and explicit[0] is Tier.HOST:
        explicit[0] = Tier.DEVICE  # one memory: a second copy of the weights would serve nobody
    fallback = Tier.DISK if has_disk else Tier.HOST
    homes = [
        UnitHomes(weight=explicit[0] or fallback, gradient=explicit[1] or fallback,
                  state=explicit[2] or fallback)
        for _ in draft.units
    ]  # fmt: skip
    plan = _with_memory(replace(draft, homes=tuple(homes)), limits)
    for field, wish in zip(("weight", "gradient", "state"), explicit, strict=True):
        if wish is None:
            plan = _raise_homes(plan, field, limits)
    _require_fit(plan, limits, config)
    return plan


def _raise_homes(plan: Plan, field: str, limits: Limits) -> Plan:
    """Move one kind of unit after unit from the fall-back to the fastest tier with room."""
    one_memory = plan.unified and field == "weight"
    for index in range(len(plan.units)):
        for tier in (Tier.DEVICE,) if one_memory else (Tier.DEVICE, Tier.HOST):
            changed: dict[str, Tier] = {field: tier}
            homes = list(plan.homes)
            if homes[index].of_field(field) is tier:
                break
            homes[index] = replace(homes[index], **changed)
            candidate = _with_memory(replace(plan, homes=tuple(homes)), limits)
            before, after = (_excess(p, limits, auto=True) for p in (plan, candidate))
            if all(after[t] <= before.get(t, 0) and t != tier.value for t in after):
                plan = candidate
                break
    return plan


def _slot_classes(plan: Plan) -> tuple[SlotClass, ...]:
    """Group units whose sizes lie within a factor of two; a class has slots of its largest."""
    moving = [u for u in plan.units if plan.homes[u.index].weight is not Tier.DEVICE]
    classes: list[SlotClass] = []
    for unit in sorted(moving, key=lambda u: (-u.slot_bytes, u.index)):
        if classes and unit.slot_bytes * 2 > classes[-1].slot_bytes:
            members = (*classes[-1].members, unit.index)
            classes[-1] = replace(classes[-1], members=members)
        else:
            classes.append(SlotClass(unit.slot_bytes, 0, (unit.index,)))
    count = plan.look_ahead + 2
    return tuple(replace(c, count=min(count, len(c.members))) for c in classes if c.slot_bytes)


def _with_memory(plan: Plan, limits: Limits) -> Plan:
    """The same plan with its slot classes and bytes per tier and purpose."""
    plan = replace(plan, slot_classes=_slot_classes(plan))
    device: dict[str, int] = {
        "slots": sum(c.slot_bytes * c.count for c in plan.slot_classes),
        "weights": _homed(plan, "weight", Tier.DEVICE),
        "state": _homed(plan, "state", Tier.DEVICE),
        "gradients": _homed(plan, "gradient", Tier.DEVICE),
    }
    host: dict[str, int] = {
        "process": limits.base,
        "weights": _homed(plan, "weight", Tier.HOST),
        "state": _homed(plan, "state", Tier.HOST),
        "gradients": _homed(plan, "gradient", Tier.HOST),
        "staging": plan.num_stages * stage_bytes(plan),
        "gradient windows": num_windows(plan) * largest_window(plan),
        "landing": num_landings(plan) * largest_slot(plan),
        "bounce": 0 if plan.unified else NUM_BOUNCES * largest_trained(plan),
        "optimizer tiles": TILE_BUFFERS * 4 * plan.rule.tile_elements,
    }
    disk = {
        "weights": _homed(plan, "weight", Tier.DISK),
        "state": _homed(plan, "state", Tier.DISK),
        "gradients": _homed(plan, "gradient", Tier.DISK),
    }
    host["checksums"] = checksum_bytes(sum(disk.values())) if plan.verify else 0
    return replace(plan, memory={"device": device, "host": host, "disk": disk})


def checksum_bytes(nbytes: int) -> int:
    """Bytes of checksums for so many bytes on disk: 4 for every page."""
    return -(-nbytes // PAGE) * 4


def _homed(plan: Plan, field: str, tier: Tier) -> int:
    units = [u for u in plan.units if plan.homes[u.index].of_field(field) is tier]
    if field == "weight":
        return sum(u.slot_bytes for u in units)
    if field == "gradient":
        return sum(u.numel * plan.gradient_itemsize for u in units)
    kinds = [k for k in plan.precision.kinds if k is not Kind.WEIGHT]
    return sum(plan.range_bytes(u, k) for u in units for k in kinds)


def stage_bytes(plan: Plan) -> int:
    """Bytes of one staging buffer: a chunk of every kind that some unit cannot update in place."""
    reachable = {Tier.HOST, Tier.DEVICE} if plan.unified else {Tier.HOST}
    trained = [u for u in plan.units if u.numel]
    nbytes = 0
    for unit in trained:
        if updated_on_device(plan, unit.index):
            continue
        homes = plan.homes[unit.index]
        count = min(plan.chunk_elements, unit.numel)
        staged = [k for k in plan.precision.kinds if homes.of(k) not in reachable]
        need = sum(plan.precision.nbytes(k, count) for k in staged)
        need += count * plan.gradient_itemsize if homes.gradient not in reachable else 0
        nbytes = max(nbytes, need)
    return nbytes


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


def _excess(plan: Plan, limits: Limits, *, auto: bool = False) -> dict[str, int]:
    """Tier -> bytes over its budget; empty when the plan fits."""
    used = plan.tier_bytes
    if plan.unified:  # one memory: the device's part counts against the host's budget too
        used["host"] += used["device"]
    over: dict[str, int] = {}
    for tier, limit in (("device", limits.device), ("host", limits.host), ("disk", limits.disk)):
        if limit is None:
            continue
        computes = tier == ("host" if plan.unified else "device")
        share = AUTO_SHARE if auto and computes else 1.0
        if used[tier] > limit * share:
            over[tier] = used[tier] - int(limit * share)
    return over


def _require_fit(plan: Plan, limits: Limits, config: Config) -> None:
    largest = largest_slot(plan)
    device = limits.device if limits.device is not None else limits.host
    if device is not None and 2 * largest > device:
        name = max(plan.units, key=lambda u: u.slot_bytes).name
        raise DoesNotFitError(
            f"the device budget of {format_size(device)} cannot hold two slots of the largest "
            f"unit: {name!r} needs {format_size(largest)}, two are {format_size(2 * largest)}",
            because="a unit computes in one slot while the next one is fetched into another",
            remedy=f"raise budget.device to at least {format_size(2 * largest)}, or cut the model "
            "into smaller units (initialize(units=[...]))",
        )
    over = _excess(plan, limits)
    if not over:
        return
    tier, excess = next(iter(over.items()))
    parts = dict(plan.memory[tier])
    if tier == "host" and plan.unified:
        parts = {**{f"device {k}": v for k, v in plan.memory["device"].items()}, **parts}
    needs = ", ".join(f"{k} {format_size(v)}" for k, v in parts.items() if v)
    limit = {"device": limits.device, "host": limits.host, "disk": limits.disk}[tier]
    raise DoesNotFitError(
        f"the {tier} tier needs {format_size(sum(parts.values()))} of a budget of "
        f"{format_size(limit or 0)}: {format_size(excess)} too much",
        because=needs,
        remedy=_remedy(tier, config, plan.rule),
    )


def _remedy(tier: str, config: Config, rule: RuleFacts) -> str:
    if tier == "disk":
        return "free space on nvme_path, add a path to the list, or raise budget.disk"
    if not config.nvme_path:
        return "set nvme_path so that state can rest on disk"
    homes = config.homes
    on_disk = [k for k in ("weights", "moments", "gradients") if getattr(homes, k) != "disk"]
    if on_disk:
        return f"raise budget.{tier}, or put more on disk: homes.{on_disk[-1]}=disk"
    if rule.whole:  # no chunk size helps: a chunk is a unit
        return (
            f"raise budget.{tier}, cut the model into smaller units (initialize(units=[...])), or "
            f"use an optimizer that does not need whole parameters as {rule.name} does"
        )
    return f"raise budget.{tier}, lower chunk_size, or cut the model into smaller units"

"""From units, config and budgets to a `Plan`, or to an error that says what does not fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from infinity.config import Config
from infinity.errors import ConfigError, DoesNotFitError
from infinity.plan.cost import step_cost
from infinity.plan.forecast import forecast_bytes
from infinity.plan.hints import may_look_nearer, with_live_note, with_weights_in_ram
from infinity.plan.homes import FIELDS, best_homes
from infinity.plan.layout import (
    ELEMENT_ALIGN,
    PRECISIONS,
    Tier,
    UnitLayout,
    round_up,
)
from infinity.plan.plan import Plan, RuleFacts, UnitHomes
from infinity.plan.rates import Rates, nominal
from infinity.plan.reserve import Limits, excess, largest_slot, with_memory
from infinity.plan.saved import plan_saved
from infinity.plan.updates import leaving_room, with_updates
from infinity.sizes import format_size

CHUNK_ELEMENTS = 1 << 20  # 12 MiB records: inside the 8-64 MiB that disks like
DURABLE_COST = 0.05  # of a step's time: what commits may cost where the plan chooses how often
_RARELY = 1 << 40
NUM_STAGES = 4  # one read, one updated, one written, one to spare


@dataclass(frozen=True)
class Stored:
    """What a run that continues a durable one takes over as it is."""

    directory: str
    step: int
    homes: tuple[UnitHomes, ...]
    chunk_elements: int


def gradient_itemsize(config: Config) -> int:
    """Bytes of a gradient at home: fp32 where micro-batches are summed."""
    summed = config.gradient_accumulation_steps > 1
    return 4 if summed or PRECISIONS[config.precision].weight == 4 else 2


def make_plan(
    units: tuple[UnitLayout, ...],
    config: Config,
    limits: Limits,
    *,
    unified: bool,
    rule: RuleFacts | None = None,
    device_kernels: bool = False,
    rates: Rates | None = None,
    stored: Stored | None = None,
) -> Plan:
    """Choose homes, slots and stages; raises `DoesNotFitError` or `ConfigError`.

    `rule` is what the update rule keeps; two fp32 moments if it is left out. `device_kernels`
    says that the device can run our optimizer kernels itself. `rates` weigh the lanes against
    one another where homes are left to the plan; those of a common machine if left out. `stored`
    gives the homes and chunks of a durable run that is continued.
    """
    rates = rates or nominal(unified)
    rule = rule or RuleFacts()
    precision = replace(PRECISIONS[config.precision], moments=rule.moments)
    micro_batches = config.gradient_accumulation_steps
    largest = max((u.numel for u in units), default=0)
    chunk = config.chunk_size if isinstance(config.chunk_size, int) else CHUNK_ELEMENTS
    saved, more = plan_saved(config.activations, units, unified=unified)
    notes = (*rule.notes, *more)
    if unified and precision.name == "fp16":
        notes += ("fp16 is for GPUs: most CPUs multiply it many times slower than fp32",)
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
        gradient_itemsize=gradient_itemsize(config),
        unified=unified,
        verify=config.durable if config.io.verify == "auto" else config.io.verify,
        memory={},
        budget={"device": limits.device, "host": limits.host, "disk": limits.disk},
        notes=notes,
        rule=rule,
        device_kernels=device_kernels,
        saved=saved,
        durable=config.durable,
        durable_every=config.durable_every if config.durable_every != "auto" else _RARELY,
    )
    if stored is not None:
        draft = replace(draft, resumed=stored.directory, chunk_elements=stored.chunk_elements)
    plan = _with_look_ahead(draft, stored, config, limits, rates)
    plan = with_live_note(plan, config.hints)
    if plan.durable and config.durable_every == "auto":
        plan = replace(plan, durable_every=_often(plan, rates))
    return replace(plan, predicted_bytes=forecast_bytes(plan))


def _with_look_ahead(
    draft: Plan, stored: Stored | None, config: Config, limits: Limits, rates: Rates
) -> Plan:
    """The longest look-ahead up to the configured one that fits, and that hints allow.

    Raises `DoesNotFitError`, of the longest one, if none fits.
    """
    failure: DoesNotFitError | None = None
    found: tuple[Plan, str] | None = None
    for distance in range(config.look_ahead, -1, -1):
        try:
            nearer = replace(draft, look_ahead=distance)
            if stored is not None:
                plan = _with_stored(nearer, stored, config, limits, rates)
            else:
                plan = _with_homes(nearer, config, limits, rates)
        except DoesNotFitError as error:
            failure = failure or error
            continue
        found = plan, "to fit the budgets" if failure else "because of hints.live_parameters"
        if not may_look_nearer(plan, config.hints):
            break
    if found is None:
        assert failure is not None
        raise failure
    plan, why = found
    if plan.look_ahead == config.look_ahead:
        return plan
    note = f"look-ahead lowered from {config.look_ahead} to {plan.look_ahead} {why}"
    return replace(plan, notes=(*plan.notes, note))


def _with_homes(draft: Plan, config: Config, limits: Limits, rates: Rates) -> Plan:
    """Fill in homes, then memory; every explicit home is honoured or refused."""
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
    # The same without a disk: beside weights in RAM, slots would be copies that serve nobody.
    resting = Tier.DEVICE if draft.unified and not has_disk else fallback
    homes = [
        UnitHomes(weight=explicit[0] or resting, gradient=explicit[1] or fallback,
                  state=explicit[2] or fallback)
        for _ in draft.units
    ]  # fmt: skip
    plan = with_memory(replace(draft, homes=tuple(homes)), limits)
    auto = [field for field, wish in zip(FIELDS, explicit, strict=True) if wish is None]
    if auto:
        plan = best_homes(plan, auto, leaving_room(plan, config.update, limits), rates)
    plan = with_weights_in_ram(plan, config.hints, limits)
    plan = with_updates(plan, config.update, limits, rates, leave_share=bool(auto))
    _require_fit(plan, limits, config)
    return plan


def _with_stored(draft: Plan, stored: Stored, config: Config, limits: Limits, rates: Rates) -> Plan:
    """The homes of a durable run as they are, or an error that says that they no longer fit."""
    homes: Sequence[UnitHomes] = stored.homes
    if draft.unified:  # one memory: see `_with_homes`
        homes = [replace(h, weight=Tier.DEVICE) if h.weight is Tier.HOST else h for h in homes]
    plan = with_memory(replace(draft, homes=tuple(homes)), limits)
    plan = with_updates(plan, config.update, limits, rates, leave_share=False)
    try:
        _require_fit(plan, limits, config)
    except DoesNotFitError as error:
        raise DoesNotFitError(
            f"the durable run in {stored.directory} does not fit the budgets as it was placed: "
            f"{error.what}",
            because="homes and chunks of a durable run stay as they were when it began"
            + (f"; {error.because}" if error.because else ""),
            remedy="raise the budget, or leave resume out to start a new run",
        ) from error
    note = f"continues {stored.directory} after update {stored.step}, homes and chunks as they were"
    return replace(plan, notes=(*plan.notes, note))


def _often(plan: Plan, rates: Rates) -> int:
    """Steps from one commit to the next, so that what they write costs little of a step's time."""
    seldom = step_cost(replace(plan, durable_every=_RARELY), rates).seconds
    always = step_cost(replace(plan, durable_every=1), rates).seconds
    if always - seldom <= DURABLE_COST * seldom:
        return 1
    return min(math.ceil((always - seldom) / (DURABLE_COST * seldom)), 1000) if seldom else 1


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
    over = excess(plan, limits)
    if not over:
        return
    tier, too_much = next(iter(over.items()))
    parts = dict(plan.memory[tier])
    if tier == "host" and plan.unified:
        parts = {**{f"device {k}": v for k, v in plan.memory["device"].items()}, **parts}
    needs = ", ".join(f"{k} {format_size(v)}" for k, v in parts.items() if v)
    limit = {"device": limits.device, "host": limits.host, "disk": limits.disk}[tier]
    raise DoesNotFitError(
        f"the {tier} tier needs {format_size(sum(parts.values()))} of a budget of "
        f"{format_size(limit or 0)}: {format_size(too_much)} too much",
        because=needs,
        remedy=_remedy(tier, config, plan.rule),
    )


def _remedy(tier: str, config: Config, rule: RuleFacts) -> str:
    if tier == "disk":
        return "free space on nvme_path, add a path to the list, or raise budget.disk"
    if tier == "device" and config.update == "device":
        return "raise budget.device, lower chunk_size, or leave update: device out"
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

"""Construction of a `Plan` from units, config and budgets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from infinity.common.sizes import format_size
from infinity.config.schema import Config
from infinity.errors import ConfigError, DoesNotFitError
from infinity.plan.budget import Limits, excess, with_memory
from infinity.plan.cost import step_cost
from infinity.plan.forecast import forecast_bytes
from infinity.plan.hints import may_shorten_prefetch, with_slots_note, with_weights_in_ram
from infinity.plan.layout import ELEMENT_ALIGN, PRECISIONS, UnitLayout, matrix_notes, padding_notes
from infinity.plan.placement import FIELDS, placed, score
from infinity.plan.plan import RAM, Plan, RuleFacts, UnitFacts, UnitPlacement, why_only_cpu
from infinity.plan.rates import Rates, nominal
from infinity.plan.saved_plan import plan_saved
from infinity.plan.streamed_updates import with_updates, without_stream_buffers
from infinity.types import Tier, round_up

CHUNK_ELEMENTS = 1 << 20  # 12 MiB records: disks are fastest with 8 to 64 MiB
# Elements that are streamed, or updated by the CPU, in one batch. On an H100 that is about 5 ms
# of a PCIe 5 link, or 4 ms of 16 cores; the calls take the optimizer pass's thread 1.7 or 0.7 ms.
STREAMED_ELEMENTS = 16 << 20
DURABLE_COST = 0.05  # largest share of a step's time for commits if the plan sets their interval
_RARE_INTERVAL = 1 << 40  # steps between commits with which these cost nothing
NUM_STAGING_BUFFERS = 4  # one read, one updated, one written, one to spare


@dataclass(frozen=True)
class Stored:
    """Settings that a run takes unchanged from the durable run that it resumes."""

    directory: str
    step: int
    placements: tuple[UnitPlacement, ...]
    chunk_elements: int


def gradient_itemsize(config: Config, ranks: int = 1) -> int:
    """Return the bytes of a stored gradient element.

    4 if gradients of micro-batches, slices or ranks are summed, else the weight's item size.
    """
    summed = ranks * config.gradient_accumulation_steps > 1 or config.activations.slices > 1
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
    rank: int = 0,
    nodes: int = 1,
    may_share: bool = False,
    facts: UnitFacts | None = None,
    model_recomputes: bool = False,
) -> Plan:
    """Return a plan: placement, slots and staging buffers.

    Args:
        units: Layouts of the model's units. If they are sharded, the plan is that of one rank.
        config: Configuration of the engine.
        limits: Budgets of the rank.
        unified: Whether the device computes in the host's memory.
        rule: Facts about the update rule; AdamW with two fp32 moments by default.
        device_kernels: Whether the device can run infinity's optimizer kernels.
        rates: Rates from which automatic placement is chosen; nominal ones by default.
        stored: Placement and chunks of a durable run that is resumed.
        rank: Rank that the plan is for.
        nodes: Number of nodes that the ranks run on.
        may_share: Whether the ranks of a node can map the same RAM.
        facts: Facts about `units`, if they exist already.
        model_recomputes: Whether the model recomputes its blocks itself in backward.

    Raises:
        DoesNotFitError: No plan fits the budgets.
        ConfigError: Settings contradict each other or the machine.
    """
    if units and units[0].shards > 1 and config.placement.shared and not may_share:
        raise ConfigError(
            "placement.shared: the ranks cannot share RAM",
            because="they may not open each other's memory, or nodes have other numbers of ranks",
            remedy="leave it out, and weights are gathered",
        )
    rates, rule = rates or nominal(unified), rule or RuleFacts()
    precision = replace(PRECISIONS[config.precision], moments=rule.moments)
    ranks = units[0].shards if units else 1
    chunk = config.chunk_size if isinstance(config.chunk_size, int) else CHUNK_ELEMENTS
    facts = facts or UnitFacts(units)
    saved, saved_notes = plan_saved(config.activations, units, unified=unified, widths=facts.widths)
    notes = (*rule.notes, *saved_notes, *matrix_notes(units, rule.name))
    if unified and precision.name == "fp16":
        notes += ("fp16 is for GPUs: most CPUs multiply it many times slower than fp32",)
    if full_units := [u for u in units if rule.needs_full or u.paired is not None]:
        notes += padding_notes(full_units, rule.name)
        full_chunk = max(*(u.shard_numel for u in full_units), 1)
        if isinstance(config.chunk_size, int) and (rule.needs_full or chunk < full_chunk):
            notes += (f"chunk_size {chunk} is not used: {rule.name} needs full parameters",)
        chunk = full_chunk if rule.needs_full else max(chunk, full_chunk)
    draft = Plan(
        precision=precision,
        units=units,
        placements=(),
        slot_classes=(),
        chunk_elements=min(chunk, round_up(max(facts.largest_shard, 1), ELEMENT_ALIGN)),
        num_staging_buffers=NUM_STAGING_BUFFERS,
        prefetch_units=config.prefetch_units,
        micro_batches=config.gradient_accumulation_steps,
        gradient_itemsize=gradient_itemsize(config, ranks),
        unified=unified,
        verify=config.durable if config.io.verify == "auto" else config.io.verify,
        memory={},
        budget=limits.budgets,
        notes=notes,
        rule=rule,
        device_kernels=device_kernels,
        saved=saved,
        model_recomputes=model_recomputes,
        ranks=ranks,
        durable=config.durable,
        durable_every=config.commit_every if config.commit_every != "auto" else _RARE_INTERVAL,
        nodes=nodes,
        may_share=may_share and config.placement.shared is not False,
        shared=may_share and config.placement.shared is True,
    )
    draft = draft.changed(facts=facts)
    if stored is not None:
        draft = draft.changed(resumed=stored.directory, chunk_elements=stored.chunk_elements)
    if config.chunk_size == "auto":
        chunks = max(STREAMED_ELEMENTS // draft.chunk_elements, 1)
        draft = draft.changed(chunks_at_once=chunks)
    plan = _with_prefetch(draft, stored, config, limits, rates)
    plan = with_slots_note(plan, config.hints)
    if plan.durable and config.commit_every == "auto":
        plan = replace(plan, durable_every=_commit_interval(plan, rates))
    plan = replace(plan, rank=rank)  # all ranks choose placement with rank 0's bytes: equal plans
    return replace(plan, predicted_bytes=forecast_bytes(plan))


def _with_prefetch(
    draft: Plan, stored: Stored | None, config: Config, limits: Limits, rates: Rates
) -> Plan:
    """Return the plan with the largest prefetch, up to the configured one, that fits.

    It is smaller if hints ask for fewer live parameters. If none fits, raises the
    `DoesNotFitError` of the largest.
    """
    failure: DoesNotFitError | None = None
    best: tuple[Plan, str] | None = None
    for distance in range(config.prefetch_units, -1, -1):
        try:
            shorter = draft.changed(prefetch_units=distance)
            if stored is not None:
                plan = _with_stored(shorter, stored, config, limits, rates)
            else:
                plan = _with_placement(shorter, config, limits, rates)
        except DoesNotFitError as error:
            failure = failure or error
            continue
        best = plan, "to fit the budgets" if failure else "because of hints.live_parameters"
        if not may_shorten_prefetch(plan, config.hints):
            break
    if best is None:
        assert failure is not None
        raise failure
    plan, reason = best
    if plan.prefetch_units == config.prefetch_units:
        return plan
    note = f"prefetch_units lowered from {config.prefetch_units} to {plan.prefetch_units} {reason}"
    return replace(plan, notes=(*plan.notes, note))


def _with_placement(draft: Plan, config: Config, limits: Limits, rates: Rates) -> Plan:
    """Return the plan with placement and memory set; an explicit tier is used, or the plan fails.

    For a rule that multiplies matrices, `update: device` is tried in addition to "auto", with
    placement that leaves memory for it: products on the host cost more than any movement of state.
    """
    updates: list[str] = [config.update]
    if config.update == "auto" and draft.rule.matrix_steps and not why_only_cpu(draft):
        updates = ["device", "auto"]
    plans: list[Plan] = []
    failure: DoesNotFitError | None = None
    for update in updates:
        try:
            plans.append(_with_update(update, draft, config, limits, rates))
        except DoesNotFitError as error:
            failure = error
    if not plans:
        assert failure is not None
        raise failure
    return min(plans, key=lambda plan: score(plan, rates)) if len(plans) > 1 else plans[0]


def _with_update(update: str, draft: Plan, config: Config, limits: Limits, rates: Rates) -> Plan:
    options = (
        config.placement.weights,
        config.placement.gradients,
        config.placement.optimizer_state,
    )
    has_disk = bool(config.nvme_path)
    if "disk" in options and not has_disk:
        raise ConfigError(
            "placement asks for the disk, but no nvme_path is given",
            remedy="set nvme_path: /a/directory/on/a/fast/drive, or use placement 'auto' or 'host'",
        )
    explicit = [None if option == "auto" else Tier(option) for option in options]
    if draft.unified and explicit[0] is Tier.HOST:
        explicit[0] = Tier.DEVICE  # one memory: a second copy of the weights is useless
    fallback = Tier.DISK if has_disk else Tier.HOST
    # Also without a disk: with weights in RAM, slots would be useless second copies.
    weights_tier = Tier.DEVICE if draft.unified and not has_disk else fallback
    placements = [
        UnitPlacement(weight=explicit[0] or weights_tier, gradient=explicit[1] or fallback,
                  state=explicit[2] or fallback)
        for _ in draft.units
    ]  # fmt: skip
    plan = with_memory(draft.changed(placements=tuple(placements)), limits)
    auto = [field for field, tier in zip(FIELDS, explicit, strict=True) if tier is None]
    search_limits = without_stream_buffers(plan, update, limits)
    plan = placed(plan, auto, _keeps_unsharded(config), search_limits, rates)
    plan = with_weights_in_ram(plan, config.hints, limits)
    plan = with_updates(plan, update, limits, rates, leave_share=bool(auto))
    _require_fit(plan, limits, config)
    return plan


def _keeps_unsharded(config: Config) -> bool | None:
    """Return whether weights stay unsharded in slots; None leaves it to the plan.

    A hint of live parameters implies False, unless `reshard_after_forward` is set.
    """
    hinted = config.hints.live_parameters is not None
    reshards = config.placement.reshard_after_forward
    if reshards is None:
        return False if hinted else None
    return not reshards


def _with_stored(draft: Plan, stored: Stored, config: Config, limits: Limits, rates: Rates) -> Plan:
    """Return the plan with the placement of a durable run; raises if it no longer fits."""
    placements: Sequence[UnitPlacement] = stored.placements
    if draft.unified:  # one memory: see `_with_update`
        placements = [
            p._replace(weight=Tier.DEVICE) if p.weight is Tier.HOST else p for p in placements
        ]
    plan = with_memory(draft.changed(placements=tuple(placements)), limits)
    plan = placed(plan, (), _keeps_unsharded(config), limits, rates)
    plan = with_updates(plan, config.update, limits, rates, leave_share=False)
    try:
        _require_fit(plan, limits, config)
    except DoesNotFitError as error:
        raise DoesNotFitError(
            f"the durable run in {stored.directory} does not fit the budgets as it was placed: "
            f"{error.what}",
            because="placement and chunks of a durable run stay as they were when it began"
            + (f"; {error.because}" if error.because else ""),
            remedy="raise the budget, or leave resume out to start a new run",
        ) from error
    note = (
        f"continues {stored.directory} after update {stored.step}, "
        "placement and chunks as they were"
    )
    return replace(plan, notes=(*plan.notes, note))


def _commit_interval(plan: Plan, rates: Rates) -> int:
    """Return the steps between commits with which they cost `DURABLE_COST` of a step's time."""
    rare_s = step_cost(replace(plan, durable_every=_RARE_INTERVAL), rates).seconds
    every_s = step_cost(replace(plan, durable_every=1), rates).seconds
    if every_s - rare_s <= DURABLE_COST * rare_s:
        return 1
    return min(math.ceil((every_s - rare_s) / (DURABLE_COST * rare_s)), 1000) if rare_s else 1


def _require_fit(plan: Plan, limits: Limits, config: Config) -> None:
    largest = max((c.slot_bytes for c in plan.slot_classes), default=0)
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
    tier, excess_bytes = next(iter(over.items()))
    name = RAM if plan.unified and tier is Tier.HOST else tier.value
    by_purpose = plan.memory_by_name()[RAM] if name == RAM else plan.memory[tier]
    needs = ", ".join(f"{k} {format_size(v)}" for k, v in by_purpose.items() if v)
    location = name if name == RAM else f"the {name} tier"
    raise DoesNotFitError(
        f"{location} needs {format_size(sum(by_purpose.values()))} of a budget of "
        f"{format_size(limits.budgets[tier] or 0)}: {format_size(excess_bytes)} too much",
        because=needs,
        remedy=_remedy(tier, config, plan),
    )


def _remedy(tier: Tier, config: Config, plan: Plan) -> str:
    if tier is Tier.DISK:
        return "free space on nvme_path, add a path to the list, or raise budget.disk"
    if tier is Tier.DEVICE and config.update == "device":
        return "raise budget.device, lower chunk_size, or leave update: device out"
    if tier is Tier.HOST and plan.shared and plan.nodes > 1:
        return f"raise budget.host, or placement.shared: false ({plan.nodes} nodes hold copies)"
    if not config.nvme_path:
        return "set nvme_path so that state can be placed on disk"
    placement = config.placement
    not_on_disk = [
        k for k in ("weights", "optimizer_state", "gradients") if getattr(placement, k) != "disk"
    ]
    if not_on_disk:
        return f"raise budget.{tier}, or put more on disk: placement.{not_on_disk[-1]}=disk"
    if plan.rule.needs_full:  # a chunk is a full unit, so `chunk_size` has no effect
        return (
            f"raise budget.{tier}, cut the model into smaller units (initialize(units=[...])), or "
            f"use an optimizer that does not need full parameters as {plan.rule.name} does"
        )
    return f"raise budget.{tier}, lower chunk_size, or cut the model into smaller units"

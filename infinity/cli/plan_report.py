"""Report of `infinity plan` as one JSON-able object. Sizes are bytes, times seconds.

`model`       name, family, parameters, active_parameters (with experts those of one token;
              embeddings are counted), flop_per_token (forward and backward), units, largest_unit
              {name, weight_bytes}, experts
`machine`     name, unified, num_cpus, host_bytes, device_bytes, disk_bytes, rates, nominal (names
              of rates that were not measured), rates_origin, gpus (ranks per node), nodes,
              assumed_disk (a path, if no drive was given); device_bytes is per rank, all else per
              node
`ranks`       count, zero_stage, whole_units (not evicted, gathered once a step), shared_units
              (copied unsharded from RAM shared by ranks, not gathered), node_bytes {tier: bytes} of
              all ranks of a node; of each rank num_threads (of CPU updates), pinned_bytes (RAM,
              except the process's base; 0 if unified); None for one rank. `activations`, `plan`,
              `moved` and `step` are of one rank, tokens_per_s of all
`work`        tokens (of a micro-batch), micro_batches (both of a rank), tokens_per_step,
              assumed_tokens (tokens_per_step is the default), context (tokens of a sample:
              --sequence, else about 2048), precision, slices, recompute (blocks, or "all"),
              offload, sliced_logits
`schedule`    line (`work` as text), blocks, settings (as in a configuration),
              runner_up {line, seconds, tokens_per_s} or None
`fits`        whether plan and activations fit; `problem` {what, because, remedy} if they do not
`activations` saved, again, boundaries, logits, flow, gradients, total (the peak), tier; with a
              plan: room (bytes left to activations), missing
`ways`        if it does not fit: changes that make it fit, as in `faster`
`plan`        None if there is none; else rule, moments, lossy, per_parameter {kind: bytes},
              placement {kind: {tier: {units, bytes}}}, updates, frozen (as text, "" for none),
              memory {tier: {purpose: bytes}}, budget, slots, chunk_elements, prefetch_units,
              notes, text (lines of `Plan.describe`)
`moved`       {direction: {bytes, per_parameter, rate}} of one steady step
`step`        seconds, tokens_per_s, binds, resources {resource: seconds}, bottlenecks {resource:
              share of the step's seconds in which it binds}, the largest first,
              phases [{name, first, count, seconds, binds, resources}], equal ones together
`wear`        written_per_step, rated_bytes, days (None: nothing is written)
`faster`      [{what, how (text to type, or None), seconds, tokens_per_s, speed_up, lossy,
              changes_batch}], best first, at most three
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any, TypeAlias

from infinity._version import __version__
from infinity.cli.remedies import CommandText
from infinity.errors import DoesNotFitError, InfinityError
from infinity.model.partition import (
    Partition,
    adapter_plan_input,
    finer_units,
    groups_of,
    partition_model,
)
from infinity.model.targets import Target
from infinity.plan.activations import num_blocks
from infinity.plan.advice import (
    TIERS,
    Change,
    Suggestion,
    faster,
    filter_gains,
    round_size,
    size_of,
    sized,
    suggestion_of,
    suggestions_to_fit,
)
from infinity.plan.batch_schedule import (
    BatchSchedule,
    ScheduleResult,
    choose_schedule,
)
from infinity.plan.budget import budgeted_bytes
from infinity.plan.cost import PhaseCost, active_parameters, disk_days, flop_per_token
from infinity.plan.inputs import PlanEstimate, PlanInput, price
from infinity.plan.layout import UnitLayout
from infinity.plan.machine import threads_for
from infinity.plan.plan import DIRECTIONS, Plan
from infinity.types import Kind, Tier

# Plan of the command with changes appended to it; None if it does not fit, or is refused.
Answer: TypeAlias = Callable[[Sequence[Change]], "PlanEstimate | None"]

_KINDS = {  # kind, and its purpose in `Plan.memory`
    "weights": (Kind.WEIGHT, "weights"),
    "moments and residual": (Kind.RESIDUAL, "state"),
    "gradients": (Kind.GRADIENT, "gradients"),
}


def report(
    case: PlanInput,
    target: Target,
    partition: Partition,
    rated_bytes: int,
    chosen: ScheduleResult | None = None,
    *,
    command_text: CommandText,
    assumed_tokens: bool = False,
    replan: Answer | None = None,
) -> dict[str, Any]:
    """Plan and price a case, and return the report.

    Args:
        case: The case, whose units are those of `partition`.
        target: Its model.
        partition: Its units.
        rated_bytes: Rated writes of the drives, for `wear`.
        chosen: Search result that the case comes from, if its batch schedule was searched.
        command_text: Returns the text to type for changes.
        assumed_tokens: Whether the tokens of a step are a default.
        replan: Plans the command again with changes appended. If given, suggestions have its
            numbers, and adapters are considered even if the case fits.
    """
    runner_up = None if chosen is None else chosen.runner_up
    best = None if chosen is None else chosen.best
    schedule, blocks = BatchSchedule.of(case), num_blocks(case.units)
    activations = case.activations()
    facts: dict[str, Any] = {
        "infinity": __version__,
        "model": _model(case, target),
        "machine": _machine(case),
        "ranks": None,
        "work": {
            "tokens": case.work.tokens,
            "micro_batches": case.micro_batches,
            "tokens_per_step": case.tokens_per_step,
            "assumed_tokens": assumed_tokens,
            "context": case.work.context,
            "precision": case.config.precision,
            "slices": schedule.slices,
            "recompute": schedule.recompute,
            "offload": schedule.offload,
            "sliced_logits": schedule.sliced_logits,
        },
        "schedule": {
            "line": schedule.line(blocks),
            "blocks": blocks,
            "settings": schedule.settings,
            "runner_up": None
            if runner_up is None
            else {
                "line": BatchSchedule.of(runner_up.case).line(blocks),
                "seconds": runner_up.cost.seconds,
                "tokens_per_s": runner_up.tokens_per_s,
            },
        },
        "fits": True,
        "problem": None,
        "activations": asdict(activations)
        | {"total": activations.total, "tier": case.compute_tier},
        "ways": [],
        "plan": None,
        "faster": [],
    }
    tokens_per_s = 0.0
    try:
        estimate = best if best is not None and best.case is case else price(case)
        facts |= _plan_sections(estimate, rated_bytes)
        facts["activations"] |= {"room": estimate.activation_headroom, "missing": estimate.missing}
        estimate.require_fit()
        tokens_per_s = estimate.tokens_per_s
        suggestions = _first_of_each_kind(faster(estimate, chosen))
        if replan is not None:  # takes long: no more than are printed
            with_adapters = filter_gains(_adapters(case, replan), tokens_per_s)
            suggestions = [
                *with_adapters,
                *_replanned(case, suggestions[: MAX_SUGGESTIONS - len(with_adapters)], replan),
            ]
        facts["faster"] = _suggestion_rows(
            filter_gains(suggestions, tokens_per_s), command_text, tokens_per_s
        )
    except DoesNotFitError as error:
        facts["fits"] = False
        facts["problem"] = {"what": error.what, "because": error.because, "remedy": error.remedy}
        # Smaller units are of use for large buffers, not for activations.
        finer_layouts = _finer_layouts(case, target, partition) if facts["plan"] is None else ()
        suggestions = suggestions_to_fit(case, finer_layouts, chosen=chosen)
        if replan is not None:
            suggestions = _replanned(case, suggestions, replan)
        suggestions += _adapters(case, replan or partial(_plan_with_adapters, case, target, chosen))
        facts["ways"] = _suggestion_rows(suggestions, command_text, tokens_per_s)
    return facts


def _replanned(
    case: PlanInput, suggestions: Sequence[Suggestion], replan: Answer
) -> list[Suggestion]:
    """Return suggestions with the numbers of the command for them, which searches again.

    If a suggestion does not fit in that search, its variants are tried; without a fit it is
    dropped.
    """
    replanned: list[Suggestion] = []
    for suggestion in suggestions:
        for variant in _variants(case, suggestion):
            estimate = replan(variant.changes)
            if estimate is not None:
                replanned.append(replace(variant, priced=estimate))
                break
    return replanned


def _variants(case: PlanInput, suggestion: Suggestion) -> Iterator[Suggestion]:
    """Yield it without its device or host change, unchanged, and with larger tiers."""
    for dropped in suggestion.changes if len(suggestion.changes) > 1 else ():
        if dropped.name in ("device", "host"):
            yield replace(
                suggestion, changes=tuple(c for c in suggestion.changes if c is not dropped)
            )
    yield suggestion
    names = {change.name for change in suggestion.changes}
    larger = suggestion.priced.case
    for _ in range(_MAX_ENLARGEMENTS if names & {*TIERS} else 0):
        for tier in (tier for tier in TIERS if tier.value in names):
            larger = sized(larger, tier, round_size(int(1.06 * (size_of(larger, tier) or 0))))
        yield suggestion_of(case, replace(suggestion.priced, case=larger))


def _first_of_each_kind(suggestions: Sequence[Suggestion]) -> list[Suggestion]:
    """Return the first suggestion of each kind, at most `MAX_SUGGESTIONS`: a search takes long."""
    first: dict[tuple[str, bool], Suggestion] = {}
    for suggestion in suggestions:
        first.setdefault((suggestion.changes[0].name, suggestion.changes_batch), suggestion)
    return list(first.values())[:MAX_SUGGESTIONS]


def _adapters(case: PlanInput, replan: Answer) -> list[Suggestion]:
    """Return the faster of LoRA and QLoRA for the same steps, if all parameters are trained.

    If some are frozen, return these in 4 bits instead. At most one suggestion.
    """
    changes = []
    if all(s.trained for unit in case.units for s in unit.segments):
        changes = [
            Change(text, "adapter", (LORA_RANK, frozen_format))
            for frozen_format, text in _ADAPTERS.items()
        ]
    elif case.config.frozen.format == "as_is":
        changes = [Change("the frozen model is stored in 4 bits", "rest", "nf4")]
    suggestions = [
        Suggestion((change,), estimate)
        for change in changes
        if (estimate := replan((change,))) is not None
    ]
    return sorted(suggestions, key=lambda suggestion: -suggestion.priced.tokens_per_s)[:1]


def _plan_with_adapters(
    case: PlanInput, target: Target, chosen: ScheduleResult | None, changes: Sequence[Change]
) -> PlanEstimate | None:
    """Return a plan with adapters, if there is no command to plan again; None for other changes."""
    (change,) = changes
    if change.name != "adapter":
        return None
    full_batch = case.with_step(case.work.tokens * case.micro_batches, 1)
    requested, samples = (
        (chosen.requested, chosen.samples) if chosen else (BatchSchedule.of(case), None)
    )
    with suppress(InfinityError):  # no linear layers, or an optimizer that is not for them
        adapted = adapter_plan_input(full_batch, target, LORA_RANK, change.value[1] or "as_is")
        return choose_schedule(adapted, requested, samples).best
    return None


_MAX_ENLARGEMENTS = 3
MAX_SUGGESTIONS = 3
LORA_RANK = 16  # peft's examples have 8 to 64; `AdapterSection.r`
_ADAPTERS = {
    None: f"LoRA: adapters of rank {LORA_RANK} are trained, the model itself is frozen",
    "nf4": f"QLoRA: adapters of rank {LORA_RANK} are trained, the frozen model is stored in 4 bits",
}


def _finer_layouts(case: PlanInput, target: Target, partition: Partition) -> tuple[UnitLayout, ...]:
    """Return layouts of smaller units; empty if blocks cannot be cut further."""
    names = finer_units(partition)
    if not names:
        return ()
    groups = groups_of(target.module, case.config)
    return partition_model(target.module, case.config, groups, names, case.machine.ranks).layouts


def _model(case: PlanInput, target: Target) -> dict[str, Any]:
    largest = max(case.units, key=lambda unit: unit.slot_bytes)
    return {
        "name": target.name,
        "family": target.family,
        "parameters": sum(s.numel for u in case.units for s in u.segments),
        "active_parameters": active_parameters(case.units, case.work),
        "flop_per_token": flop_per_token(case.units, case.work),
        "units": len(case.units),
        "largest_unit": {"name": largest.name, "weight_bytes": largest.stored_bytes},
        "experts": bool(target.shares),
    }


def _machine(case: PlanInput) -> dict[str, Any]:
    machine = case.machine
    names = ("name", "unified", "num_cpus", "host_bytes", "device_bytes", "disk_bytes", "gpus")
    return {name: getattr(machine, name) for name in (*names, "nodes")} | {
        "rates": machine.rates.numbers(),
        "nominal": list(machine.nominal),
        "rates_origin": machine.rates_origin,
        "assumed_disk": None,
    }


def _plan_sections(estimate: PlanEstimate, rated_bytes: int) -> dict[str, Any]:
    """Return the sections of the report that need a plan, whether or not activations fit."""
    plan, cost, machine = estimate.plan, estimate.cost, estimate.case.machine
    parameters, rates = max(plan.num_trained, 1), machine.rank_rates.numbers()
    written = plan.predicted_bytes["disk_write"] * machine.gpus
    days = disk_days(written, cost.seconds, rated_bytes)
    used, bound_s = budgeted_bytes(plan), cost.bound_s
    ranks = {
        "count": plan.ranks,
        "zero_stage": plan.zero_stage,
        "whole_units": len(plan.units) - plan.num_moving,
        "shared_units": sum(map(plan.is_shared, range(len(plan.units)))),
        "node_bytes": {tier.value: machine.gpus * used[tier] for tier in (Tier.HOST, Tier.DISK)},
        "num_threads": threads_for(
            estimate.case.config.cpu.num_threads,
            machine.num_cpus,
            machine.gpus,
            unified=plan.unified,
        ),
        "pinned_bytes": 0 if plan.unified else used[Tier.HOST] - plan.memory[Tier.HOST]["process"],
    }
    return {
        "ranks": ranks if plan.ranks > 1 else None,
        "plan": {
            "rule": plan.rule.name,
            "moments": [form.value for form in plan.precision.moments],
            "lossy": any(not form.is_exact for form in plan.precision.moments),
            "per_parameter": {  # padding not counted
                "weights": plan.precision.weight,
                "moments and residual": plan.bytes_per_parameter - plan.precision.weight,
                "gradients": plan.gradient_itemsize,
            },
            "placement": {name: _placed_bytes(plan, *kind) for name, kind in _KINDS.items()},
            "updates": plan.updates_line,
            "frozen": plan.frozen_line,
            "memory": plan.memory,
            "budget": plan.budget,
            "slots": [{"count": c.count, "bytes": c.slot_bytes} for c in plan.slot_classes],
            "chunk_elements": plan.chunk_elements,
            "prefetch_units": plan.prefetch_units,
            "notes": list(plan.notes),
            "text": plan.describe().splitlines(),
        },
        "moved": {
            direction: {
                "bytes": plan.predicted_bytes[direction],
                "per_parameter": plan.predicted_bytes[direction] / parameters,
                "rate": rates.get(direction),
            }
            for direction in DIRECTIONS
        },
        "step": {
            "seconds": cost.seconds,
            "tokens_per_s": estimate.tokens_per_s,
            "binds": cost.binds,
            "resources": cost.resources,
            "bottlenecks": {name: s / sum(bound_s.values()) for name, s in bound_s.items() if s},
            "phases": _phases(cost.phases),
        },
        "wear": {
            "written_per_step": written,
            "rated_bytes": rated_bytes,
            "days": None if math.isinf(days) else days,
        },
    }


def _placed_bytes(plan: Plan, kind: Kind, purpose: str) -> dict[str, dict[str, int]]:
    counts = Counter(placement.of(kind) for placement in plan.placements)
    return {
        tier.value: {"units": counts[tier], "bytes": plan.memory[tier][purpose]}
        for tier in Tier
        if counts[tier]
    }


def _phases(phases: Sequence[PhaseCost]) -> list[dict[str, Any]]:
    """Return phases in order; equal ones of consecutive micro-batches are merged."""
    merged: list[dict[str, Any]] = []
    latest: dict[str, dict[str, Any]] = {}  # by direction
    for index, phase in enumerate(phases):
        direction, micro_batch = phase.name.split()[0], index // 2 + 1
        last = latest.get(direction)
        if last is not None and last["first"] > 1 and last["resources"] == phase.resources:
            last["count"] += 1
            last["name"] = f"{direction} {last['first']}-{micro_batch}"
            continue
        latest[direction] = {
            "name": phase.name,
            "first": micro_batch,
            "count": 1,
            "seconds": phase.seconds,
            "binds": phase.binds,
            "resources": phase.resources,
        }
        merged.append(latest[direction])
    return merged


def _suggestion_rows(
    suggestions: Sequence[Suggestion], command_text: CommandText, tokens_per_s: float
) -> list[dict[str, Any]]:
    return [
        {
            "what": suggestion.what,
            "how": command_text(suggestion.changes),
            "seconds": suggestion.priced.cost.seconds,
            "tokens_per_s": suggestion.priced.tokens_per_s,
            "speed_up": suggestion.priced.tokens_per_s / tokens_per_s if tokens_per_s else 1.0,
            "lossy": suggestion.lossy,
            "changes_batch": suggestion.changes_batch,
        }
        for suggestion in suggestions
    ]

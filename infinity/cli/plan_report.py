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
from infinity.cli.remedies import Typed
from infinity.errors import DoesNotFitError, InfinityError
from infinity.model.partition import (
    Partition,
    adapter_case,
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
    round_size,
    size_of,
    sized,
    way_of,
    ways_to_fit,
    worth_it,
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
    typed: Typed,
    assumed_tokens: bool = False,
    answer: Answer | None = None,
) -> dict[str, Any]:
    """Plan and price a case, and return the report.

    Args:
        case: The case, whose units are those of `partition`.
        target: Its model.
        partition: Its units.
        rated_bytes: Rated writes of the drives, for `wear`.
        chosen: Search result that the case comes from, if its batch schedule was searched.
        typed: Returns the text to type for changes.
        assumed_tokens: Whether the tokens of a step are a default.
        answer: Plans the command again with changes appended. If given, suggestions have its
            numbers, and adapters are considered even if the case fits.
    """
    after = None if chosen is None else chosen.runner_up
    known = None if chosen is None else chosen.best
    schedule, blocks = BatchSchedule.of(case), num_blocks(case.units)
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
            if after is None
            else {
                "line": BatchSchedule.of(after.case).line(blocks),
                "seconds": after.cost.seconds,
                "tokens_per_s": after.tokens_per_s,
            },
        },
        "fits": True,
        "problem": None,
        "activations": _activations(case),
        "ways": [],
        "plan": None,
        "faster": [],
    }
    now = 0.0
    try:
        priced = known if known is not None and known.case is case else price(case)
        facts |= _planned(priced, rated_bytes)
        facts["activations"] |= {"room": priced.room, "missing": priced.missing}
        priced.require_room()
        now = priced.tokens_per_s
        found = _of_each_kind(faster(priced, chosen))
        if answer is not None:  # takes long: no more than are printed
            adapted = worth_it(_adapters(case, answer), now)
            found = [*adapted, *_answered(case, found[: MOST_PROPOSALS - len(adapted)], answer)]
        facts["faster"] = _ways(worth_it(found, now), typed, now)
    except DoesNotFitError as error:
        facts["fits"] = False
        facts["problem"] = {"what": error.what, "because": error.because, "remedy": error.remedy}
        # Smaller units are of use for large buffers, not for activations.
        smaller = _finer(case, target, partition) if facts["plan"] is None else ()
        found = ways_to_fit(case, smaller, chosen=chosen)
        if answer is not None:
            found = _answered(case, found, answer)
        found += _adapters(case, answer or partial(_adapted, case, target, chosen))
        facts["ways"] = _ways(found, typed, now)
    return facts


def _answered(case: PlanInput, ways: Sequence[Suggestion], answer: Answer) -> list[Suggestion]:
    """Return suggestions with the numbers of the command for them, which searches again.

    If a suggestion does not fit in that search, its variants are tried; without a fit it is
    dropped.
    """
    found: list[Suggestion] = []
    for way in ways:
        for other in _variants(case, way):
            priced = answer(other.changes)
            if priced is not None:
                found.append(replace(other, priced=priced))
                break
    return found


def _variants(case: PlanInput, way: Suggestion) -> Iterator[Suggestion]:
    """Yield `way` without its device or host change, `way`, and `way` with larger tiers."""
    for one in way.changes if len(way.changes) > 1 else ():
        if one.name in ("device", "host"):
            yield replace(way, changes=tuple(c for c in way.changes if c is not one))
    yield way
    names = {change.name for change in way.changes}
    after = way.priced.case
    for _ in range(_ATTEMPTS if names & {*TIERS} else 0):
        for tier in (tier for tier in TIERS if tier.value in names):
            after = sized(after, tier, round_size(int(1.06 * (size_of(after, tier) or 0))))
        yield way_of(case, replace(way.priced, case=after))


def _of_each_kind(ways: Sequence[Suggestion]) -> list[Suggestion]:
    """Return the first suggestion of each kind, at most `MOST_PROPOSALS`: a search takes long."""
    found: dict[tuple[str, bool], Suggestion] = {}
    for way in ways:
        found.setdefault((way.changes[0].name, way.changes_batch), way)
    return list(found.values())[:MOST_PROPOSALS]


def _adapters(case: PlanInput, answer: Answer) -> list[Suggestion]:
    """Return the faster of LoRA and QLoRA for the same steps, if all parameters are trained.

    If some are frozen, return these in 4 bits instead. At most one suggestion.
    """
    changes = []
    if all(s.trained for unit in case.units for s in unit.segments):
        changes = [Change(what, "adapter", (LORA_RANK, form)) for form, what in _ADAPTERS.items()]
    elif case.config.frozen.format == "as_is":
        changes = [Change("the frozen model rests in 4 bits", "rest", "nf4")]
    ways = [
        Suggestion((change,), priced)
        for change in changes
        if (priced := answer((change,))) is not None
    ]
    return sorted(ways, key=lambda way: -way.priced.tokens_per_s)[:1]


def _adapted(
    case: PlanInput, target: Target, chosen: ScheduleResult | None, changes: Sequence[Change]
) -> PlanEstimate | None:
    """Return a plan with adapters, if there is no command to plan again; None for other changes."""
    (change,) = changes
    if change.name != "adapter":
        return None
    full_batch = case.with_step(case.work.tokens * case.micro_batches, 1)
    wish, samples = (chosen.wish, chosen.samples) if chosen else (BatchSchedule.of(case), None)
    with suppress(InfinityError):  # no linear layers, or an optimizer that is not for them
        adapted = adapter_case(full_batch, target, LORA_RANK, change.value[1] or "as_is")
        return choose_schedule(adapted, wish, samples).best
    return None


_ATTEMPTS = 3
MOST_PROPOSALS = 3
LORA_RANK = 16  # peft's examples have 8 to 64; `AdapterSection.r`
_ADAPTERS = {
    None: f"LoRA: adapters of rank {LORA_RANK} are trained, the model itself is frozen",
    "nf4": f"QLoRA: adapters of rank {LORA_RANK} are trained, the frozen model rests in 4 bits",
}


def _finer(case: PlanInput, target: Target, partition: Partition) -> tuple[UnitLayout, ...]:
    """Return layouts of smaller units; empty if blocks cannot be cut further."""
    if not (names := finer_units(partition)):
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


def _activations(case: PlanInput) -> dict[str, Any]:
    found = case.activations()
    return {**asdict(found), "total": found.total, "tier": case.compute_tier}


def _planned(priced: PlanEstimate, rated_bytes: int) -> dict[str, Any]:
    """Return the sections of the report that need a plan, whether or not activations fit."""
    plan, cost, machine = priced.plan, priced.cost, priced.case.machine
    parameters, rates = max(plan.num_trained, 1), machine.rank_rates.numbers()
    written = plan.predicted_bytes["disk_write"] * machine.gpus
    days = disk_days(written, cost.seconds, rated_bytes)
    used = budgeted_bytes(plan)
    ranks = {
        "count": plan.ranks,
        "zero_stage": plan.zero_stage,
        "whole_units": len(plan.units) - plan.num_moving,
        "shared_units": sum(map(plan.is_shared, range(len(plan.units)))),
        "node_bytes": {tier.value: machine.gpus * used[tier] for tier in (Tier.HOST, Tier.DISK)},
        "num_threads": threads_for(
            priced.case.config.cpu.num_threads, machine.num_cpus, machine.gpus, unified=plan.unified
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
            "tokens_per_s": priced.tokens_per_s,
            "binds": cost.binds,
            "resources": cost.resources,
            "bottlenecks": _bottlenecks(cost.phases),
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


def _bottlenecks(phases: Sequence[PhaseCost]) -> dict[str, float]:
    """Return the share of all seconds in which each resource binds, the largest first."""
    seconds = {phase.binds: 0.0 for phase in phases}
    for phase in phases:
        seconds[phase.binds] += phase.seconds
    total = sum(seconds.values())
    longest = sorted(seconds.items(), key=lambda item: -item[1])
    return {name: s / total for name, s in longest if s > 0}


def _phases(phases: Sequence[PhaseCost]) -> list[dict[str, Any]]:
    """Return phases in order; equal ones of consecutive micro-batches are merged."""
    found: list[dict[str, Any]] = []
    latest: dict[str, dict[str, Any]] = {}  # by direction
    for index, phase in enumerate(phases):
        direction, micro_batch = phase.name.split()[0], index // 2 + 1
        like = latest.get(direction)
        if like is not None and like["first"] > 1 and like["resources"] == phase.resources:
            like["count"] += 1
            like["name"] = f"{direction} {like['first']}-{micro_batch}"
            continue
        latest[direction] = {
            "name": phase.name,
            "first": micro_batch,
            "count": 1,
            "seconds": phase.seconds,
            "binds": phase.binds,
            "resources": phase.resources,
        }
        found.append(latest[direction])
    return found


def _ways(ways: Sequence[Suggestion], typed: Typed, now: float) -> list[dict[str, Any]]:
    return [
        {
            "what": way.what,
            "how": typed(way.changes),
            "seconds": way.priced.cost.seconds,
            "tokens_per_s": way.priced.tokens_per_s,
            "speed_up": way.priced.tokens_per_s / now if now else 1.0,
            "lossy": way.lossy,
            "changes_batch": way.changes_batch,
        }
        for way in ways
    ]

"""The answer of `infinity plan` as one JSON-able object. Sizes are bytes, times seconds.

`model`       name, family, parameters, units, largest_unit {name, weight_bytes}, experts
`machine`     name, unified, num_cpus, host_bytes, device_bytes, disk_bytes, rates, nominal (names
              of rates that nobody measured), rates_origin
`work`        tokens (of a micro-batch), micro_batches, tokens_per_step, precision, recompute
`split`       whether micro-batches (and recompute) were chosen so that activations fit
`fits`        whether plan and activations fit; `problem` {what, because, remedy} where they do not
`activations` saved, boundaries, logits, flow, gradients, recompute, total (the most at once),
              tier; with a plan: room, missing
`ways`        where it does not fit: ways that make it fit, as in `faster`
`plan`        None where there is none; else rule, moments, lossy, per_parameter {kind: bytes},
              homes {kind: {tier: {units, bytes}}}, updates, memory {tier: {purpose: bytes}},
              budget, slots, chunk_elements, look_ahead, notes
`moved`       {lane: {bytes, per_parameter, rate}} of one steady step
`step`        seconds, tokens_per_s, binds, lanes {lane: seconds},
              phases [{name, first, count, seconds, binds, lanes}], equal ones together
`wear`        written_per_step, rated_bytes, days (None: nothing is written)
`faster`      [{what, how, seconds, tokens_per_s, speed_up, lossy, changes_batch}], best first
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from infinity import __version__
from infinity.errors import DoesNotFitError
from infinity.model.target import Target
from infinity.plan.advice import faster, ways_to_fit
from infinity.plan.case import Case, Priced, price
from infinity.plan.cost import PhaseCost, disk_days
from infinity.plan.layout import Kind, Tier, UnitLayout
from infinity.plan.plan import LANES, Plan
from infinity.plan.way import Way

_KINDS = {"weights": Kind.WEIGHT, "moments and residual": Kind.RESIDUAL, "gradients": Kind.GRADIENT}


def report(
    case: Case, target: Target, rated_bytes: int, finer: Callable[[], Sequence[UnitLayout]]
) -> dict[str, Any]:
    """Plan and price a case; `finer` cuts the model into smaller units, should they be needed."""
    facts: dict[str, Any] = {
        "infinity": __version__,
        "model": _model(case, target),
        "machine": _machine(case),
        "work": {
            "tokens": case.work.tokens,
            "micro_batches": case.micro_batches,
            "tokens_per_step": case.work.tokens * case.micro_batches,
            "precision": case.config.precision,
            "recompute": case.work.recompute,
        },
        "fits": True,
        "problem": None,
        "activations": _activations(case),
        "ways": [],
        "plan": None,
        "faster": [],
    }
    smaller: Sequence[UnitLayout] = ()
    try:
        try:
            priced = price(case)
        except DoesNotFitError:
            smaller = finer()  # of use where buffers are too large, not for activations
            raise
        facts |= _planned(priced, rated_bytes)
        facts["activations"] |= {"room": priced.room, "missing": priced.missing}
        priced.require_room()
        facts["faster"] = [_way(way) for way in faster(priced)]
    except DoesNotFitError as error:
        facts["fits"] = False
        facts["problem"] = {
            "what": error.what,
            "because": error.because,
            "remedy": error.remedy,
        }
        facts["ways"] = [_way(way) for way in ways_to_fit(case, smaller)]
    return facts


def _model(case: Case, target: Target) -> dict[str, Any]:
    largest = max(case.units, key=lambda unit: unit.slot_bytes)
    return {
        "name": target.name,
        "family": target.family,
        "parameters": sum(s.numel for u in case.units for s in u.segments),
        "units": len(case.units),
        "largest_unit": {"name": largest.name, "weight_bytes": largest.slot_bytes},
        "experts": bool(target.shares),
    }


def _machine(case: Case) -> dict[str, Any]:
    machine = case.machine
    return {
        "name": machine.name,
        "unified": machine.unified,
        "num_cpus": machine.num_cpus,
        "host_bytes": machine.host_bytes,
        "device_bytes": machine.device_bytes,
        "disk_bytes": machine.disk_bytes,
        "rates": machine.rates.numbers(),
        "nominal": list(machine.nominal),
        "rates_origin": machine.rates_origin,
    }


def _activations(case: Case) -> dict[str, Any]:
    found = case.activations()
    return {**asdict(found), "total": found.total, "tier": case.compute_tier}


def _planned(priced: Priced, rated_bytes: int) -> dict[str, Any]:
    """What there is to say of a plan, whether or not activations fit beside it."""
    plan, cost, rates = priced.plan, priced.cost, priced.case.machine.rates.numbers()
    parameters = max(plan.num_trained, 1)
    written = plan.predicted_bytes["disk_write"]
    days = disk_days(written, cost.seconds, rated_bytes)
    return {
        "plan": {
            "rule": plan.rule.name,
            "moments": [form.value for form in plan.precision.moments],
            "lossy": any(not form.is_exact for form in plan.precision.moments),
            "per_parameter": _at_rest(plan),
            "homes": {name: _homes(plan, kind) for name, kind in _KINDS.items()},
            "updates": plan.updates_line,
            "memory": plan.memory,
            "budget": plan.budget,
            "slots": [{"count": c.count, "bytes": c.slot_bytes} for c in plan.slot_classes],
            "chunk_elements": plan.chunk_elements,
            "look_ahead": plan.look_ahead,
            "notes": list(plan.notes),
        },
        "moved": {
            lane: {
                "bytes": plan.predicted_bytes[lane],
                "per_parameter": plan.predicted_bytes[lane] / parameters,
                "rate": rates.get(lane),
            }
            for lane in LANES
        },
        "step": {
            "seconds": cost.seconds,
            "tokens_per_s": priced.tokens_per_s,
            "binds": cost.binds,
            "lanes": cost.lanes,
            "phases": _phases(cost.phases),
        },
        "wear": {
            "written_per_step": written,
            "rated_bytes": rated_bytes,
            "days": None if math.isinf(days) else days,
        },
    }


def _at_rest(plan: Plan) -> dict[str, float]:
    """Bytes that one parameter takes, by kind, padding not counted."""
    whole = plan.precision.bytes_per_parameter
    weight = plan.precision.weight
    return {
        "weights": weight,
        "moments and residual": whole - weight,
        "gradients": plan.gradient_itemsize,
    }


def _homes(plan: Plan, kind: Kind) -> dict[str, dict[str, int]]:
    memory = {Kind.WEIGHT: "weights", Kind.RESIDUAL: "state", Kind.GRADIENT: "gradients"}[kind]
    found = {}
    for tier in Tier:
        count = sum(homes.of(kind) is tier for homes in plan.homes)
        if count:
            nbytes = plan.memory[tier.value][memory]
            found[tier.value] = {"units": count, "bytes": nbytes}
    return found


def _phases(phases: Sequence[PhaseCost]) -> list[dict[str, Any]]:
    """Phases in order; those of micro-batches between the ends that are alike stand once."""
    found: list[dict[str, Any]] = []
    latest: dict[str, dict[str, Any]] = {}  # by direction
    for index, phase in enumerate(phases):
        direction, micro_batch = phase.name.split()[0], index // 2 + 1
        like = latest.get(direction)
        if like is not None and like["first"] > 1 and like["lanes"] == phase.lanes:
            like["count"] += 1
            like["name"] = f"{direction} {like['first']}-{micro_batch}"
            continue
        latest[direction] = {
            "name": phase.name,
            "first": micro_batch,
            "count": 1,
            "seconds": phase.seconds,
            "binds": phase.binds,
            "lanes": phase.lanes,
        }
        found.append(latest[direction])
    return found


def _way(way: Way) -> dict[str, Any]:
    return {
        "what": way.what,
        "how": way.how,
        "seconds": way.priced.cost.seconds,
        "tokens_per_s": way.priced.tokens_per_s,
        "speed_up": way.speed_up,
        "lossy": way.lossy,
        "changes_batch": way.changes_batch,
    }

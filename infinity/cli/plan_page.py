"""The answer of `infinity plan` as one JSON-able object. Sizes are bytes, times seconds.

`model`       name, family, parameters, flop_per_token (forward and backward), units, largest_unit
              {name, weight_bytes}, experts
`machine`     name, unified, num_cpus, host_bytes, device_bytes, disk_bytes, rates, nominal (names
              of rates that nobody measured), rates_origin, gpus (ranks of a node), nodes,
              assumed_disk (a path, where no drive was named); a device is one rank's, all else a
              node's
`ranks`       count, zero_stage, whole_units (gathered once a step), shared_units (copied whole from
              RAM that ranks share, not gathered), node_bytes {tier: bytes}, all of a node's ranks
              together; of each rank num_threads (of CPU updates), pinned_bytes (of RAM, beside a
              GPU all but the process's own); None for one rank. `activations`, `plan`, `moved` and
              `step` are of one rank, tokens_per_s of all
`work`        tokens (of a micro-batch), micro_batches (both of a rank), tokens_per_step, context
              (tokens of a sample: what --sequence says, else about 2048), precision, slices,
              recompute (blocks, or "all"), offload, sliced_logits
`schedule`    line (`work` in words), blocks, settings (as a configuration says it),
              runner_up {line, seconds, tokens_per_s} or None
`fits`        whether plan and activations fit; `problem` {what, because, remedy} where they do not
`activations` saved, again, boundaries, logits, flow, gradients, total (the most at once),
              tier; with a plan: room, missing
`ways`        where it does not fit: ways that make it fit, as in `faster`
`plan`        None where there is none; else rule, moments, lossy, per_parameter {kind: bytes},
              placement {kind: {tier: {units, bytes}}}, updates, frozen (in words; "": nothing),
              memory {tier: {purpose: bytes}}, budget, slots, chunk_elements, prefetch_units, notes
`moved`       {direction: {bytes, per_parameter, rate}} of one steady step
`step`        seconds, tokens_per_s, binds, resources {resource: seconds},
              phases [{name, first, count, seconds, binds, resources}], equal ones together
`wear`        written_per_step, rated_bytes, days (None: nothing is written)
`faster`      [{what, how, seconds, tokens_per_s, speed_up, lossy, changes_batch}], best first
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from infinity._version import __version__
from infinity.cli.terminal import Page
from infinity.cutting import Cut, cut_model, groups_of
from infinity.deepspeed.config import rows_as_text
from infinity.errors import DoesNotFitError
from infinity.model.shapes import Target
from infinity.plan.activations import num_blocks
from infinity.plan.advice import Way, faster, ways_to_fit
from infinity.plan.batch_schedule import BatchSchedule, Chosen
from infinity.plan.budget import budgeted_bytes
from infinity.plan.case import Case, Priced, price
from infinity.plan.cost import BETWEEN_NODES, PhaseCost, disk_days, flop_per_token
from infinity.plan.layout import Kind, Tier, UnitLayout
from infinity.plan.machine import threads_for
from infinity.plan.plan import DIRECTIONS, LINKS, Plan
from infinity.sizes import format_count, format_duration, format_rate, format_size

# The answer of `infinity plan` as people read it.


_BAR = 50  # characters
# What a bar shows; every other purpose is a buffer.
_MARKS = {"weights": "W", "state": "S", "gradients": "G", "process": "p"}
_DIRECTION_NAMES = {
    "disk_read": "disk read",
    "disk_write": "disk write",
    "to_device": "to device",
    "from_device": "from device",
    "all_gather": "all-gather",
    "all_to_all": "all-to-all",
    "between_hosts": "between hosts",
}


def show_plan(report: dict[str, Any]) -> None:
    """Print placement, memory, bytes and times; or what does not fit, and what would."""
    page = Page()
    if "deepspeed" in report:
        page.say(rows_as_text(report["deepspeed"]) + "\n")
    _say_question(page, report)
    if report["plan"] is not None:
        page.say()
        _placement(page, report)
        _bars(page, report)
        page.say()
        _moved(page, report)
        page.say()
        _step(page, report)
    else:
        _say_activations(page, report)
    page.say()
    if report["fits"]:
        _say_faster(page, report)
    else:
        _say_problem(page, report)


def _say_question(page: Page, report: dict[str, Any]) -> None:
    model, machine, work = report["model"], report["machine"], report["work"]
    largest = model["largest_unit"]
    page.say(
        f"model    {model['name']} ({model['family']}): {format_count(model['parameters'])} "
        f"parameters in {model['units']} units; the largest, {largest['name']}, has "
        f"{format_size(largest['weight_bytes'])} of weights"
    )
    sizes = f"{format_size(machine['host_bytes'])} of RAM"
    if machine["device_bytes"] is not None:
        count, memory = machine["gpus"], format_size(machine["device_bytes"])
        gpus = f"a GPU with {memory}" if count == 1 else f"{count} GPUs with {memory} each"
        sizes = f"{gpus}, {sizes}"
    elif machine["gpus"] > 1:
        sizes = f"{machine['gpus']} processes, {sizes}"
    if machine["nodes"] > 1:
        sizes = f"{machine['nodes']} nodes, each {sizes}"
    disk = machine["disk_bytes"]
    sizes += f", {format_size(disk)} of disk" if disk else ", no disk (--path DIR or --disk SIZE)"
    page.say(f"machine  {machine['name']}: {sizes}")
    if machine["assumed_disk"] is not None:
        page.say(
            f"         the disk is what is free at {machine['assumed_disk']}; another: --path DIR, "
            "--disk SIZE"
        )
    page.say(f"rates    {machine['rates_origin']}")
    page.say(
        f"step     {work['tokens_per_step']:,} tokens, {work['context']:,} a sample, "
        f"{work['precision']}"
    )
    each = f"each of {report['ranks']['count']} ranks: " if report["ranks"] else ""
    page.say(f"         {each}{report['schedule']['line']}")
    after = report["schedule"]["runner_up"]
    if after is not None:
        page.say(f"         the fastest that fits; next, {_speed(after['tokens_per_s'])}:")
        page.say(f"         {after['line']}")


def _placement(page: Page, report: dict[str, Any]) -> None:
    plan = report["plan"]
    # One memory has one column.
    columns: dict[str, tuple[str, ...]] = {"device": ("device",), "host": ("host",)}
    if report["machine"]["unified"]:
        columns = {"RAM": ("device", "host")}
    columns["disk"] = ("disk",)
    rows = []
    for kind, placement in plan["placement"].items():
        whole = sum(at["bytes"] for at in placement.values()) or 1
        cells = []
        for tiers in columns.values():
            nbytes = sum(placement[tier]["bytes"] for tier in tiers if tier in placement)
            cells.append(f"{format_size(nbytes)} ({nbytes / whole:.0%})" if nbytes else "")
        rows.append([kind, f"{plan['per_parameter'][kind]:.4g}", *cells])
    names = " and ".join(dict.fromkeys(plan["moments"])) or "no format"
    lossy = ", which is lossy" if plan["lossy"] else ""
    rest = plan["per_parameter"]["weights"] + plan["per_parameter"]["moments and residual"]
    title = (
        f"where it rests: {plan['rule']}, {len(plan['moments'])} moment(s) in {names}{lossy}; "
        f"{rest:.4g} bytes a parameter, and its gradient"
    )
    page.table(title, ["kind", "bytes a parameter", *columns], rows)
    if not report["machine"]["unified"]:
        page.say(f"updates  {plan['updates']}")
    if plan["frozen"]:
        page.say(f"frozen   {plan['frozen']}; bytes a parameter are of trained ones")


def _bars(page: Page, report: dict[str, Any]) -> None:
    page.say(
        "memory   W weights, S moments and residual, G gradients, p process, b buffers, "
        "a activations (estimated), . free"
    )
    memory, found, computes = dict(report["plan"]["memory"]), report["activations"], "RAM"
    if report["machine"]["unified"]:  # device and host are one memory
        host, device = memory.pop("host"), memory.pop("device")
        both = {name: host.get(name, 0) + device.get(name, 0) for name in {**host, **device}}
        memory = {"RAM": both, **memory}
    else:
        computes = found["tier"]
    for tier, parts in memory.items():
        budget = report["plan"]["budget"]["host" if tier == "RAM" else tier]
        used = sum(parts.values())
        if not used and not budget:
            continue
        marks = {mark: parts.get(purpose, 0) for purpose, mark in _MARKS.items()}
        marks["b"] = used - sum(marks.values())
        marks["a"] = int(found["total"]) if tier == computes else 0
        page.say(
            f"  {tier:<7}[{_bar(marks, budget or used)}] {format_size(used)} of "
            f"{format_size(budget or used)}"
        )
        inside = ", ".join(f"{name} {format_size(v)}" for name, v in parts.items() if v)
        page.say(f"          {inside or 'nothing'}")
    if report["ranks"]:
        used = report["ranks"]["node_bytes"]
        whole, stay = report["machine"], report["ranks"]["whole_units"]
        parts = [f"RAM {format_size(used['host'])} of {format_size(whole['host_bytes'])}"]
        if used["disk"]:
            parts.append(f"disk {format_size(used['disk'])} of {format_size(whole['disk_bytes'])}")
        page.say(
            f"a node   {whole['gpus']} such ranks: {', '.join(parts)}; each rank keeps "
            f"1/{report['ranks']['count']} of every unit, as ZeRO-{report['ranks']['zero_stage']}"
            + (f"; weights of {stay} units stay whole in slots" if stay else "")
        )
        shared, units = report["ranks"]["shared_units"], report["model"]["units"]
        how = "copies from RAM that ranks share" if shared else "all-gather"
        rest = f", {units - shared} of {units} by all-gather" if 0 < shared < units else ""
        page.say(f"         units become whole by {how}{rest}")
        pinned, threads = report["ranks"]["pinned_bytes"], report["ranks"]["num_threads"]
        near = f", {format_size(pinned)} of RAM pinned, near its GPU" if pinned else ""
        page.say(f"         threads of a rank that update on the CPU: {threads}{near}")
    _say_activations(page, report)
    for note in report["plan"]["notes"]:
        page.say(f"note: {note}")


def _bar(marks: dict[str, int], whole: int) -> str:
    """At least one character for everything that is there; cut off at the end."""
    cells = "".join(
        mark * max(1, round(nbytes / max(whole, 1) * _BAR))
        for mark, nbytes in marks.items()
        if nbytes > 0
    )
    return cells[:_BAR].ljust(_BAR, ".") + (">" if len(cells) > _BAR + len(marks) else "")


def _say_activations(page: Page, report: dict[str, Any]) -> None:
    found = report["activations"]
    names = ("saved", "boundaries", "logits", "flow", "gradients")
    parts = ", ".join(f"{name} {format_size(found[name])}" for name in names if found[name])
    room = ""
    if "room" in found:
        room = f"; the plan leaves {format_size(max(found['room'], 0))} to them"
    page.say(
        f"activations, estimated, for {report['work']['tokens']:,} tokens at once: about "
        f"{format_size(found['total'])} of the {found['tier']}'s memory{room}"
    )
    page.say(f"          {parts}")


def _moved(page: Page, report: dict[str, Any]) -> None:
    directions = {
        direction: moved for direction, moved in report["moved"].items() if moved["bytes"]
    }
    if not directions:
        page.say("nothing moves between tiers")
        return
    guessed = set(report["machine"]["nominal"])
    guessed |= set(LINKS) if BETWEEN_NODES in guessed else set()
    stars = {direction: " *" for direction in directions if direction in guessed}
    rows = [
        [
            _DIRECTION_NAMES[direction],
            format_size(moved["bytes"]),
            f"{moved['per_parameter']:.1f}",
            "" if moved["rate"] is None else format_rate(moved["rate"]) + stars.get(direction, ""),
        ]
        for direction, moved in directions.items()
    ]
    title = "what a step moves" + (" of one rank" if report["ranks"] else "")
    title += " (* nominal, not measured)" if stars else ""
    page.table(title, ["direction", "a step", "bytes a parameter", "rate"], rows)
    wear = report["wear"]
    if wear["days"] is not None:
        where = " on a node" if report["ranks"] else ""
        page.say(
            f"wear     {wear['written_per_step'] / 1e9:,.1f} GB written a step{where}: "
            f"{wear['rated_bytes'] / 1e12:,.4g} TB of rated writes last for {wear['days']:,.1f} "
            "days of training without a pause"
        )


def _step(page: Page, report: dict[str, Any]) -> None:
    step = report["step"]
    resources = [name for name, seconds in step["resources"].items() if seconds]
    rows = [
        [
            f"{phase['name']} (each)" if phase["count"] > 1 else phase["name"],
            format_duration(phase["seconds"]),
            phase["binds"].replace("_", " "),
            *(
                format_duration(s) if (s := phase["resources"].get(resource)) else ""
                for resource in resources
            ),
        ]
        for phase in step["phases"]
    ]
    columns = ["phase", "takes", "binds", *(resource.replace("_", " ") for resource in resources)]
    page.table("predicted: resources work at the same time, the slowest binds", columns, rows)
    page.say(
        f"a step takes {format_duration(step['seconds'])}, {_speed(step['tokens_per_s'])}; "
        f"{step['binds'].replace('_', ' ')} binds"
    )


def _speed(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.1f} tokens/s" if tokens_per_s >= 1 else f"{tokens_per_s:.2g} tokens/s"


def _say_faster(page: Page, report: dict[str, Any]) -> None:
    if not report["faster"]:
        page.say("nothing that was tried would be much faster: see what binds")
        return
    page.say("to go faster (each planned again; tokens/s, predicted)")
    for way in report["faster"]:
        batch = "; another training" if way["changes_batch"] else ""
        slower = "; asked for, and no gain" if way["speed_up"] < 1 else ""
        said = f"{way['what']}{batch}{slower}"
        page.say(f"  {way['speed_up']:.2f}x  {_speed(way['tokens_per_s'])}: {said}")
        page.say(f"         {way['how']}")


def _say_problem(page: Page, report: dict[str, Any]) -> None:
    problem = report["problem"]
    page.say(f"DOES NOT FIT: {problem['what']}")
    if problem["because"]:
        page.say(f"  because: {problem['because']}")
    if not report["ways"]:
        page.say(f"  try: {problem['remedy']}")
        return
    page.say("to make it fit (each planned again):")
    for way in report["ways"]:
        page.say(f"  {way['how']}")
        page.say(
            f"      {way['what']}; a step would take {format_duration(way['seconds'])}, "
            f"{_speed(way['tokens_per_s'])}"
        )


_KINDS = {"weights": Kind.WEIGHT, "moments and residual": Kind.RESIDUAL, "gradients": Kind.GRADIENT}


def report(
    case: Case, target: Target, cut: Cut, rated_bytes: int, chosen: Chosen | None = None
) -> dict[str, Any]:
    """Plan and price the case of a target that was cut into units.

    `chosen` is what the case comes from, if its batch schedule was searched.
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
    smaller: Sequence[UnitLayout] = ()
    try:
        try:
            priced = known if known is not None and known.case is case else price(case)
        except DoesNotFitError:
            smaller = _finer(case, target, cut)  # of use for large buffers, not for activations
            raise
        facts |= _planned(priced, rated_bytes)
        facts["activations"] |= {"room": priced.room, "missing": priced.missing}
        priced.require_room()
        facts["faster"] = [_way(way) for way in faster(priced, chosen=chosen)]
    except DoesNotFitError as error:
        facts["fits"] = False
        facts["problem"] = {"what": error.what, "because": error.because, "remedy": error.remedy}
        facts["ways"] = [_way(way) for way in ways_to_fit(case, smaller, chosen=chosen)]
    return facts


def _finer(case: Case, target: Target, cut: Cut) -> tuple[UnitLayout, ...]:
    """Smaller units: the parts of every block; none where blocks have no parts."""
    names = []
    for unit in cut.units:
        for module in unit.modules[:1] if len(unit.modules) == 1 else []:
            children = [n for n, c in module.named_children() if any(True for _ in c.parameters())]
            if len(children) > 1:
                names += [f"{unit.name}.{child}" for child in children]
    if not names:
        return ()
    groups = groups_of(target.module, case.config)
    return cut_model(target.module, case.config, groups, names, case.machine.ranks).layouts


def _model(case: Case, target: Target) -> dict[str, Any]:
    largest = max(case.units, key=lambda unit: unit.slot_bytes)
    return {
        "name": target.name,
        "family": target.family,
        "parameters": sum(s.numel for u in case.units for s in u.segments),
        "flop_per_token": flop_per_token(case.units, case.work),
        "units": len(case.units),
        "largest_unit": {"name": largest.name, "weight_bytes": largest.rest_bytes},
        "experts": bool(target.shares),
    }


def _machine(case: Case) -> dict[str, Any]:
    machine = case.machine
    names = ("name", "unified", "num_cpus", "host_bytes", "device_bytes", "disk_bytes", "gpus")
    return {name: getattr(machine, name) for name in (*names, "nodes")} | {
        "rates": machine.rates.numbers(),
        "nominal": list(machine.nominal),
        "rates_origin": machine.rates_origin,
        "assumed_disk": None,
    }


def _activations(case: Case) -> dict[str, Any]:
    found = case.activations()
    return {**asdict(found), "total": found.total, "tier": case.compute_tier}


def _planned(priced: Priced, rated_bytes: int) -> dict[str, Any]:
    """What there is to say of a plan, whether or not activations fit beside it."""
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
            "per_parameter": _at_rest(plan),
            "placement": {name: _placed_bytes(plan, kind) for name, kind in _KINDS.items()},
            "updates": plan.updates_line,
            "frozen": plan.frozen_line,
            "memory": plan.memory,
            "budget": plan.budget,
            "slots": [{"count": c.count, "bytes": c.slot_bytes} for c in plan.slot_classes],
            "chunk_elements": plan.chunk_elements,
            "prefetch_units": plan.prefetch_units,
            "notes": list(plan.notes),
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
    whole = plan.bytes_per_parameter
    weight = plan.precision.weight
    return {
        "weights": weight,
        "moments and residual": whole - weight,
        "gradients": plan.gradient_itemsize,
    }


def _placed_bytes(plan: Plan, kind: Kind) -> dict[str, dict[str, int]]:
    memory = {Kind.WEIGHT: "weights", Kind.RESIDUAL: "state", Kind.GRADIENT: "gradients"}[kind]
    found = {}
    for tier in Tier:
        count = sum(placement.of(kind) is tier for placement in plan.placements)
        if count:
            nbytes = plan.memory[tier][memory]
            found[tier.value] = {"units": count, "bytes": nbytes}
    return found


def _phases(phases: Sequence[PhaseCost]) -> list[dict[str, Any]]:
    """Phases in order; those of micro-batches between the ends that are alike stand once."""
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

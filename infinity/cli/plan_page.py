"""Page of `infinity plan`: prints the report that `plan_report` makes and documents."""

from __future__ import annotations

from typing import Any

from infinity.cli.terminal import Page
from infinity.common.sizes import format_duration, format_parameters, format_rate, format_size
from infinity.integrations.deepspeed.keys import rows_as_text
from infinity.plan.plan import LINKS
from infinity.plan.rates import BETWEEN_NODES

_BAR = 40  # characters
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


def show_plan(report: dict[str, Any], *, verbose: bool = False) -> None:
    """Print the answer, its assumptions, and the changes that make the run faster or make it fit.

    `verbose` adds placement, memory, bytes and times of each phase.
    """
    page = Page()
    if "deepspeed" in report:
        page.say(rows_as_text(report["deepspeed"]))
        page.say()
    show_answer(page, report)
    if verbose:
        _say_details(page, report)
    page.say()
    if not report["fits"]:
        show_ways(page, report)
    else:
        _say_faster(page, report)
    if not verbose:
        page.say()
        page.say("placement, memory, bytes and times of each phase: -v; all numbers: --json")


def show_answer(
    page: Page, report: dict[str, Any], no_disk: str = "--path DIR or --disk SIZE"
) -> None:
    """Print a few lines: fit, speed, bottleneck, and the step they are for.

    `no_disk` is what to type for a disk where there is none.
    """
    model, work, problem = report["model"], report["work"], report["problem"]
    what = f"{model['name']} on {_hardware(report['machine'], no_disk)}"
    if report["fits"]:
        page.say(f"{what}: fits, {_speed(report['step']['tokens_per_s'])} predicted")
        slowest = [
            f"{name.replace('_', ' ')} ({share:.0%} of a step)"
            for name, share in report["step"]["bottlenecks"].items()
            if share >= 0.05
        ]
        page.entry("bottleneck", ", then ".join(slowest) or "none: nothing costs time")
    else:
        page.say(f"{what}: DOES NOT FIT: {problem['what']}")
        if problem["because"]:
            page.entry("because", problem["because"])
    if model["experts"]:
        page.entry("experts", _parameters(model))
    took = f": {format_duration(report['step']['seconds'])}" if report["fits"] else ""
    asked = " (the default; another: --tokens)" if work["assumed_tokens"] else ""
    each = f"each of {report['ranks']['count']} ranks: " if report["ranks"] else ""
    page.entry(
        "step",
        f"{work['tokens_per_step']:,} tokens{asked}, {work['context']:,} a sample, "
        f"{work['precision']}{took}",
    )
    page.entry("", f"{each}{report['schedule']['line']}")
    if report["plan"] is not None:
        page.entry("memory", _memory_line(report))
    page.entry("rates", report["machine"]["rates_origin"])
    if report["machine"]["assumed_disk"] is not None:
        page.entry(
            "disk",
            f"the free space at {report['machine']['assumed_disk']}; another: --path DIR, "
            "--disk SIZE",
        )


def _parameters(model: dict[str, Any]) -> str:
    return format_parameters(model["parameters"], model["active_parameters"])


def _hardware(machine: dict[str, Any], no_disk: str) -> str:
    """Return the sizes of a machine as text."""
    sizes = f"{_size(machine['host_bytes'])} of RAM"
    if machine["device_bytes"] is not None:
        count, memory = machine["gpus"], _size(machine["device_bytes"])
        gpus = f"a GPU with {memory}" if count == 1 else f"{count} GPUs with {memory} each"
        sizes = f"{gpus}, {sizes}"
    elif machine["gpus"] > 1:
        sizes = f"{machine['gpus']} processes, {sizes}"
    if machine["nodes"] > 1:
        sizes = f"{machine['nodes']} nodes, each {sizes}"
    disk = machine["disk_bytes"]
    return sizes + (f", {_size(disk)} of disk" if disk else f", no disk ({no_disk})")


def _size(nbytes: int) -> str:
    return format_size(nbytes).replace(".00", "")


def _memory_line(report: dict[str, Any]) -> str:
    """Return the bytes used of each tier as text."""
    parts = []
    for tier, (used, budget) in _tiers(report).items():
        if sum(used.values()):
            of = f" of {_size(budget)}" if budget else ""
            parts.append(f"{tier} {_size(sum(used.values()))}{of}")
    activations = report["activations"]
    parts.append(f"plus about {_size(activations['total'])} of activations")
    return ", ".join(parts)


def _tiers(report: dict[str, Any]) -> dict[str, tuple[dict[str, int], int]]:
    """Bytes by purpose, and the budget, of each tier; a device that is the host is not another."""
    memory, budget = dict(report["plan"]["memory"]), report["plan"]["budget"]
    found = {}
    if report["machine"]["unified"]:
        host, device = memory.pop("host"), memory.pop("device")
        both = {name: host.get(name, 0) + device.get(name, 0) for name in {**host, **device}}
        found["RAM"] = (both, budget["host"] or 0)
    for tier, parts in memory.items():
        found["RAM" if tier == "host" else tier] = (parts, budget[tier] or 0)
    return found


def _say_details(page: Page, report: dict[str, Any]) -> None:
    model, after = report["model"], report["schedule"]["runner_up"]
    largest = model["largest_unit"]
    page.entry(
        "model",
        f"{model['name']} ({model['family']}): {_parameters(model)} in "
        f"{model['units']} units; the largest, {largest['name']}, has "
        f"{format_size(largest['weight_bytes'])} of weights",
    )
    page.entry("machine", report["machine"]["name"])
    if after is not None:
        page.entry("next best", f"{_speed(after['tokens_per_s'])}: {after['line']}")
    if report["plan"] is None:
        _say_activations(page, report)
        return
    page.say()
    _placement(page, report)
    _bars(page, report)
    page.say()
    _moved(page, report)
    page.say()
    _step(page, report)


def _placement(page: Page, report: dict[str, Any]) -> None:
    plan = report["plan"]
    # One memory has one column.
    columns: dict[str, tuple[str, ...]] = {"device": ("device",), "host": ("host",)}
    if report["machine"]["unified"]:
        columns = {"RAM": ("device", "host")}
    columns["disk"] = ("disk",)
    rows = []
    for kind, placement in plan["placement"].items():
        total = sum(at["bytes"] for at in placement.values()) or 1
        cells = []
        for tiers in columns.values():
            nbytes = sum(placement[tier]["bytes"] for tier in tiers if tier in placement)
            cells.append(f"{format_size(nbytes)} ({nbytes / total:.0%})" if nbytes else "")
        rows.append([kind, f"{plan['per_parameter'][kind]:.4g}", *cells])
    names = " and ".join(dict.fromkeys(plan["moments"])) or "no format"
    lossy = ", which is lossy" if plan["lossy"] else ""
    stored = plan["per_parameter"]["weights"] + plan["per_parameter"]["moments and residual"]
    title = (
        f"where it rests: {plan['rule']}, {len(plan['moments'])} moment(s) in {names}{lossy}; "
        f"{stored:.4g} bytes a parameter, and its gradient"
    )
    page.table(title, ["kind", "bytes a parameter", *columns], rows)
    if not report["machine"]["unified"]:
        page.entry("updates", plan["updates"])
    if plan["frozen"]:
        page.entry("frozen", f"{plan['frozen']}; bytes a parameter are of trained ones")


def _bars(page: Page, report: dict[str, Any]) -> None:
    page.entry(
        "memory",
        "W weights, S moments and residual, G gradients, p process, b buffers, "
        "a activations (estimated), . free",
    )
    found = report["activations"]
    computes = "RAM" if report["machine"]["unified"] else found["tier"]
    for tier, (parts, budget) in _tiers(report).items():
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
        page.entry("", inside or "nothing")
    if report["ranks"]:
        used = report["ranks"]["node_bytes"]
        machine, stay = report["machine"], report["ranks"]["whole_units"]
        taken = [f"RAM {format_size(used['host'])} of {format_size(machine['host_bytes'])}"]
        if used["disk"]:
            taken.append(
                f"disk {format_size(used['disk'])} of {format_size(machine['disk_bytes'])}"
            )
        page.entry(
            "a node",
            f"{machine['gpus']} such ranks: {', '.join(taken)}; each rank keeps "
            f"1/{report['ranks']['count']} of every unit, as ZeRO-{report['ranks']['zero_stage']}"
            + (f"; weights of {stay} units stay whole in slots" if stay else ""),
        )
        shared, units = report["ranks"]["shared_units"], report["model"]["units"]
        how = "copies from RAM that ranks share" if shared else "all-gather"
        gathered = f", {units - shared} of {units} by all-gather" if 0 < shared < units else ""
        page.entry("", f"units become whole by {how}{gathered}")
        pinned, threads = report["ranks"]["pinned_bytes"], report["ranks"]["num_threads"]
        near = f", {format_size(pinned)} of RAM pinned, near its GPU" if pinned else ""
        page.entry("", f"threads of a rank that update on the CPU: {threads}{near}")
    _say_activations(page, report)
    for note in report["plan"]["notes"]:
        page.entry("note", note)


def _bar(marks: dict[str, int], total: int) -> str:
    """At least one character for everything that is there; cut off at the end."""
    cells = "".join(
        mark * max(1, round(nbytes / max(total, 1) * _BAR))
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
    page.entry(
        "activations",
        f"estimated, for {report['work']['tokens']:,} tokens at once: about "
        f"{format_size(found['total'])} of the {found['tier']}'s memory{room}",
    )
    page.entry("", parts)


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
    title = "bytes moved in a step" + (" of one rank" if report["ranks"] else "")
    title += " (* nominal, not measured)" if stars else ""
    page.table(title, ["direction", "a step", "bytes a parameter", "rate"], rows)
    wear = report["wear"]
    if wear["days"] is not None:
        where = " on a node" if report["ranks"] else ""
        page.entry(
            "wear",
            f"{wear['written_per_step'] / 1e9:,.1f} GB written a step{where}: "
            f"{wear['rated_bytes'] / 1e12:,.4g} TB of rated writes last for {wear['days']:,.1f} "
            "days of training without a pause",
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
    if tokens_per_s >= 1:
        return f"{tokens_per_s:,.{0 if tokens_per_s >= 100 else 1}f} tokens/s"
    return f"{tokens_per_s:.2g} tokens/s"


def _say_faster(page: Page, report: dict[str, Any]) -> None:
    if not report["faster"]:
        page.say("nothing that was tried would be much faster: see the bottleneck")
        return
    page.say("to go faster (each planned again; predicted)")
    for way in report["faster"]:
        batch = "; another training" if way["changes_batch"] else ""
        slower = "; asked for, and no gain" if way["speed_up"] < 1 else ""
        _say_way(page, way, f"{way['speed_up']:.2f}x", f"{batch}{slower}")


def show_ways(page: Page, report: dict[str, Any]) -> None:
    """Print what would make it fit, with what to type."""
    if not report["ways"]:
        page.entry("try", report["problem"]["remedy"])
        return
    page.say("to make it fit (each planned again; predicted)")
    for way in report["ways"]:
        _say_way(page, way, "", f"; a step takes {format_duration(way['seconds'])}")


def _say_way(page: Page, way: dict[str, Any], label: str, more: str) -> None:
    page.entry(f"  {label}", f"{_speed(way['tokens_per_s'])}: {way['what']}{more}")
    if way["how"]:
        page.entry("", way["how"])

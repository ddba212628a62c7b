"""Text output of `infinity plan`, from the report that `plan_report` documents."""

from __future__ import annotations

from typing import Any

from infinity.cli.terminal import Page
from infinity.common.sizes import format_duration, format_parameters, format_size
from infinity.integrations.deepspeed.keys import rows_as_text


def show_plan(report: dict[str, Any], *, verbose: bool) -> None:
    """Print the prediction, its assumptions, and changes that make the run faster or make it fit.

    `verbose` adds `Plan.describe`, the wear of drives and the times of each phase.
    """
    page = Page()
    if "deepspeed" in report:
        page.say(rows_as_text(report["deepspeed"]))
        page.say()
    show_answer(page, report)
    if verbose:
        _print_details(page, report)
    page.say()
    if not report["fits"]:
        show_suggestions(page, report)
    elif not report["faster"]:
        page.say("nothing that was tried would be much faster: see the bottleneck")
    else:
        page.say("to go faster (each planned again; predicted)")
        for suggestion in report["faster"]:
            batch = "; another training" if suggestion["changes_batch"] else ""
            _print_suggestion(page, suggestion, f"{suggestion['speed_up']:.2f}x", batch)
    if not verbose:
        page.say()
        page.say("placement, memory, bytes and times of each phase: -v; all numbers: --json")


def show_answer(
    page: Page, report: dict[str, Any], no_disk: str = "--path DIR or --disk SIZE"
) -> None:
    """Print the summary: fit, speed, bottleneck, and the step they are predicted for.

    `no_disk` is the remedy to print for a machine without a disk.
    """
    model, work, problem = report["model"], report["work"], report["problem"]
    subject = f"{model['name']} on {_hardware(report['machine'], no_disk)}"
    if report["fits"]:
        page.say(f"{subject}: fits, {_speed(report['step']['tokens_per_s'])} predicted")
        slowest = [
            f"{name.replace('_', ' ')} ({share:.0%} of a step)"
            for name, share in report["step"]["bottlenecks"].items()
            if share >= 0.05
        ]
        page.entry("bottleneck", ", then ".join(slowest) or "none: nothing costs time")
    else:
        page.say(f"{subject}: DOES NOT FIT: {problem['what']}")
        if problem["because"]:
            page.entry("because", problem["because"])
    if model["experts"]:
        page.entry("experts", _parameters(model))
    duration = f": {format_duration(report['step']['seconds'])}" if report["fits"] else ""
    default_hint = " (the default; another: --tokens)" if work["assumed_tokens"] else ""
    per_rank = f"each of {report['ranks']['count']} ranks: " if report["ranks"] else ""
    page.entry(
        "step",
        f"{work['tokens_per_step']:,} tokens{default_hint}, {work['context']:,} a sample, "
        f"{work['precision']}{duration}",
    )
    page.entry("", f"{per_rank}{report['schedule']['line']}")
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
    """Return the bytes used of each tier as text; a unified device is counted as RAM."""
    plan, unified = report["plan"], report["machine"]["unified"]
    used = {tier: sum(parts.values()) for tier, parts in plan["memory"].items()}
    if unified:
        used["host"] += used.pop("device")
    parts = []
    for tier, nbytes in used.items():
        if nbytes:
            budget = plan["budget"][tier]
            limit = f" of {_size(budget)}" if budget else ""
            parts.append(f"{'RAM' if tier == 'host' else tier} {_size(nbytes)}{limit}")
    parts.append(f"plus about {_size(report['activations']['total'])} of activations")
    return ", ".join(parts)


def _print_details(page: Page, report: dict[str, Any]) -> None:
    model, runner_up = report["model"], report["schedule"]["runner_up"]
    largest = model["largest_unit"]
    page.entry(
        "model",
        f"{model['name']} ({model['family']}): {_parameters(model)} in "
        f"{model['units']} units; the largest, {largest['name']}, has "
        f"{format_size(largest['weight_bytes'])} of weights",
    )
    page.entry("machine", report["machine"]["name"])
    if runner_up is not None:
        page.entry("next best", f"{_speed(runner_up['tokens_per_s'])}: {runner_up['line']}")
    _print_activations(page, report)
    if report["plan"] is None:
        return
    page.say()
    page.say("\n".join(report["plan"]["text"]))
    if report["ranks"]:
        used, machine = report["ranks"]["node_bytes"], report["machine"]
        used_text = (
            f"{'RAM' if tier == 'host' else tier} {format_size(used[tier])} of "
            f"{format_size(machine[f'{tier}_bytes'])}"
            for tier in used
            if used[tier]
        )
        page.entry("a node", f"{machine['gpus']} such ranks: {', '.join(used_text)}")
    wear = report["wear"]
    if wear["days"] is not None:
        where = " on a node" if report["ranks"] else ""
        page.entry(
            "wear",
            f"{wear['written_per_step'] / 1e9:,.1f} GB written a step{where}: "
            f"{wear['rated_bytes'] / 1e12:,.4g} TB of rated writes last for {wear['days']:,.1f} "
            "days of training without a pause",
        )
    page.say()
    _print_step(page, report)


def _print_activations(page: Page, report: dict[str, Any]) -> None:
    activations = report["activations"]
    names = ("saved", "boundaries", "logits", "flow", "gradients")
    parts = ", ".join(
        f"{name} {format_size(activations[name])}" for name in names if activations[name]
    )
    available = ""
    if "room" in activations:
        available = f"; the plan leaves {format_size(max(activations['room'], 0))} to them"
    page.entry(
        "activations",
        f"estimated, for {report['work']['tokens']:,} tokens at once: about "
        f"{format_size(activations['total'])} of the {activations['tier']}'s memory{available}",
    )
    page.entry("", parts)


def _print_step(page: Page, report: dict[str, Any]) -> None:
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


def show_suggestions(page: Page, report: dict[str, Any]) -> None:
    """Print the changes that make the run fit, with the text to type."""
    if not report["ways"]:
        page.entry("try", report["problem"]["remedy"])
        return
    page.say("to make it fit (each planned again; predicted)")
    for suggestion in report["ways"]:
        _print_suggestion(
            page, suggestion, "", f"; a step takes {format_duration(suggestion['seconds'])}"
        )


def _print_suggestion(page: Page, suggestion: dict[str, Any], label: str, suffix: str) -> None:
    page.entry(f"  {label}", f"{_speed(suggestion['tokens_per_s'])}: {suggestion['what']}{suffix}")
    if suggestion["how"]:
        page.entry("", suggestion["how"])

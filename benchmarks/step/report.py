"""Report of the step benchmark: medians, bounds, ratios and targets."""

from __future__ import annotations

import argparse
import os
import pickle
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import presets
import torch
from rich.console import Console
from rich.table import Table

from infinity.common.sizes import format_count, format_rate, format_size, parse_size
from step.bound import Bounds, Phases, bounds_of, rates_for
from step.child import Child
from step.model import shape_of
from step.targets import judge

# Name of a ratio of step times -> (numerator, denominator).
COMPARED = {
    "torch_ram": ("infinity_ram", "torch_ram"),
    "schedule": ("infinity_disk", "schedule"),
    "ideal": ("infinity_disk", "ideal"),
    "ram_to_schedule": ("infinity_ram", "ram_schedule"),
    "ram_to_ideal": ("infinity_ram", "ram_ideal"),
    "disk_to_torch_ram": ("infinity_disk", "torch_ram"),
    "deepspeed_nvme_to_disk": ("deepspeed_nvme", "infinity_disk"),
    "plan_to_torch_ram": ("infinity_plan", "torch_ram"),
    "plan_to_disk": ("infinity_plan", "infinity_disk"),
    "plan_to_schedule": ("infinity_plan", "plan_schedule"),
    "plan_to_predicted": ("infinity_plan", "plan_predicted"),
    "deepspeed_nvme_to_plan": ("deepspeed_nvme", "infinity_plan"),
    "deepspeed_cpu_to_ram": ("deepspeed_cpu", "infinity_ram"),
    "fsdp2_to_ram": ("fsdp2", "infinity_ram"),
    "fsdp2_to_disk": ("fsdp2", "infinity_disk"),
    "fsdp2_to_plan": ("fsdp2", "infinity_plan"),
    "deepspeed_cpu_to_disk": ("deepspeed_cpu", "infinity_disk"),
    "layers_to_disk": ("infinity_layers", "infinity_disk"),
    "layers_to_schedule": ("infinity_layers", "layers_schedule"),
}
# Contender -> prefix of its bounds.
_BOUNDED = {
    "infinity_disk": "",
    "infinity_layers": "layers_",
    "infinity_ram": "ram_",
    "infinity_plan": "plan_",
}
_PLANNED = ("predicted_s", "predicted_device_bytes", "schedule", "recomputed")  # of infinity_plan
Rates = dict[str, float]


def report_of(
    arguments: argparse.Namespace,
    job: dict[str, Any],
    children: Sequence[Child],
    rates: Sequence[Rates],
) -> dict[str, Any]:
    """Return the report as JSON-serializable data; children without turns are omitted."""
    children = [child for child in children if child.turns]
    times = {c.name: [statistics.median(t["step_s"]) for t in c.turns] for c in children}
    disk = {name: statistics.fmean(disk_rates[name] for disk_rates in rates) for name in rates[0]}
    # Phases of one contender apply to another only if both have the same micro-batches.
    shared = [] if arguments.schedule == "best" else children
    phases_by_child = (child.phases for child in shared if child.name != "infinity_plan")
    phases = next(filter(None, phases_by_child), [])
    bounds: dict[str, dict[str, Any]] = {}
    for child in children:
        child_phases = child.phases or ([] if child.name == "infinity_plan" else phases)
        child_bounds, source = _bounds(child, disk, child_phases, _on_gpu(job))
        if "predicted_s" in child.first:
            times["plan_predicted"] = [child.first["predicted_s"]] * len(child.turns)
        if child_bounds:
            prefix = _BOUNDED[child.name]
            times[f"{prefix}schedule"] = [bound.schedule_s for bound in child_bounds]
            times[f"{prefix}ideal"] = [bound.ideal_s for bound in child_bounds]
            bounds[child.name] = {
                "schedule": statistics.median(bound.schedule_s for bound in child_bounds),
                "ideal": statistics.median(bound.ideal_s for bound in child_bounds),
                "binds": child_bounds[0].binds,
                "resources_s": child_bounds[0].resources,
                "compute_from": source,
                "rates": (child.first.get("rates") or {}) | disk,
            }
    compared = {
        name: pair for name, pair in COMPARED.items() if pair[0] in times and pair[1] in times
    }
    medians = [statistics.median(values) for values in zip(*map(_values, phases), strict=True)]
    num_parameters = presets.count_parameters(shape_of(job))
    num_active = presets.count_active(shape_of(job))
    tokens = job["rows"] * job["context"] * arguments.micro_batches
    recompute = arguments.checkpointing
    report = {
        "model": arguments.model,
        "layers": arguments.layers,
        "num_parameters": num_parameters,
        "num_active": num_active,
        "precision": arguments.precision,
        "checkpointing": recompute,
        "flop_formula": _flop_formula(recompute),
        "slices": arguments.slices,
        "experts_per_unit": arguments.experts_per_unit,
        "compile": arguments.compile,
        "offload": arguments.offload,
        "state": arguments.state,
        "device": arguments.device,
        "budget": {"device": arguments.device_budget, "host": arguments.host_budget},
        "alone": arguments.alone,
        "tokens": tokens,
        "micro_batches": arguments.micro_batches,
        "schedules": arguments.schedule,
        "rounds": arguments.rounds,
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "load_average": os.getloadavg()[0],
        },
        "rates": {"before": rates[0], "after": rates[-1], "unit": "bytes per second"},
        "phases": vars(Phases(*medians)) if medians else {},
        "contenders": {
            child.name: child.summary()
            | {name: child.first[name] for name in _PLANNED if name in child.first}
            | _budget_of(child.name, job)
            | _speed(
                times[child.name], num_active, tokens, child.first.get("recomputed", recompute)
            )
            for child in children
        },
        "bound": bounds,
        "ratio": {
            name: statistics.median(a / b for a, b in zip(times[ours], times[other], strict=False))
            for name, (ours, other) in compared.items()
        },
        # Other load on the machine disturbs medians more than minima.
        "ratio_of_minima": {
            name: min(times[ours]) / min(times[other]) for name, (ours, other) in compared.items()
        },
    }
    return report | {"targets": judge(report)}


def _bounds(
    child: Child, disk: Rates, phases: Sequence[Phases], on_gpu: bool
) -> tuple[list[Bounds], str]:
    """Return the bounds of a contender's step by round, and the source of the compute time.

    On a GPU the source is plain torch, which copies nothing, or the trace if plain torch was not
    run. On a CPU it is the engine on RAM; `infinity_plan` has other micro-batches and is timed
    itself.
    """
    if child.name not in _BOUNDED or "plan" not in child.first:
        return [], ""
    plan = pickle.loads(Path(child.first["plan"]).read_bytes())
    traced = child.shares.get("traced_compute_s")
    compute_s = [(phase.forward_s, phase.backward_s) for phase in phases]
    timed_name = child.name if child.phases else "infinity_ram"
    source = "plain torch" if on_gpu else f"{timed_name}, phase by phase"
    if not compute_s and on_gpu and traced is not None:
        compute_s, source = [tuple(traced)] * len(child.turns), "the trace of these steps"
    bounds = []
    for index, seconds in enumerate(compute_s[: len(child.turns)]):
        measured = child.first.get("rates")
        rates = rates_for(disk, plan, measured, phases[index] if phases else None)
        if rates is not None:
            bounds.append(bounds_of(plan, rates, *seconds))
    return bounds, source


def _on_gpu(job: dict[str, Any]) -> bool:
    return bool(job["device"] == "cuda")


def _budget_of(name: str, job: dict[str, Any]) -> dict[str, int]:
    """Return the device budget of a contender, or an empty dict."""
    if not _on_gpu(job) or job["device_budget"] is None or name not in _BOUNDED:
        return {}
    return {"device_budget_bytes": parse_size(job["device_budget"])}


def _flop_formula(recompute: bool) -> str:
    """Return the formula of FLOP; N is the number of active parameters."""
    hardware = "8*N*tokens, blocks are computed twice" if recompute else "the same"
    return f"model: 6*N*tokens; hardware: {hardware}; attention's own products are not counted"


def _speed(
    step_s: list[float], num_active: int, tokens: int, recomputed: float
) -> dict[str, float]:
    """Return tokens and TFLOP per second of the median step; see `_flop_formula`.

    `recomputed` is the fraction of blocks that are computed twice.
    """
    per_s = tokens / statistics.median(step_s)
    tera_per_flop = num_active * per_s / 1e12
    return {
        "tokens_per_s": per_s,
        "model_tflops": 6 * tera_per_flop,
        "hardware_tflops": (6 + 2 * recomputed) * tera_per_flop,
    }


def _values(record: Any) -> list[float]:
    return list(vars(record).values())


def show(report: dict[str, Any]) -> None:
    """Print a human-readable report to stderr."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        console = Console(stderr=True, highlight=False, width=120)
    console.print(_table(report))
    for name, facts in report["contenders"].items():
        if "busy_share" in facts:
            busy = ", ".join(
                f"{k} {share:.0%}" for k, share in facts["busy_share"].items() if share
            )
            console.print(f"{name} was busy: {busy}; {facts['verdict']}")
        used = ", ".join(f"{k} {s:.2f}" for k, s in facts["cpu_s"].items() if s >= 0.005)
        console.print(f"{name}: processor seconds a step: {used}")
        predicted = f"; predicted {facts['predicted_s']:.3f} s" if "predicted_s" in facts else ""
        console.print(f"{name}: {facts['schedule']}{predicted}")
        if facts.get("rates_origin"):
            console.print(f"{name}: placement by {facts['rates_origin']}")
    phases, measured = report["phases"], report["rates"]
    if phases:
        console.print(
            f"forward {phases['forward_s']:.3f} s, backward {phases['backward_s']:.3f} s per"
            f" micro-batch, update {phases['update_s']:.3f} s"
        )
    for when in ("before", "after"):
        rates = ", ".join(f"{k} {format_rate(v)}" for k, v in measured[when].items())
        console.print(f"disk {when}: {rates}")
    for name, bound in report["bound"].items():
        busy = ", ".join(
            f"{direction} {s:.3f} s" for direction, s in bound["resources_s"].items() if s
        )
        console.print(
            f"bound of {name}: schedule {bound['schedule']:.3f} s, ideal {bound['ideal']:.3f} s;"
            f" {busy}; compute from {bound['compute_from']}"
        )
    for key, title in (("ratio", "ratio"), ("ratio_of_minima", "ratio of the fastest")):
        if report[key]:
            text = ", ".join(f"{name} {x:.3f}" for name, x in report[key].items())
            console.print(f"{title}: {text}")
    for target in report["targets"]:
        verdict = "met" if target["met"] else "MISSED"
        console.print(
            f"{verdict}: {target['name']} {target['found']:.4g} (target: {target['target']})"
        )
    for name, why in report.get("skipped", {}).items():
        console.print(f"{name}: {why}")
    machine = report["machine"]
    if machine["load_average"] > 1.5 * machine["threads"]:
        console.print(f"load average {machine['load_average']:.1f}: others compute here too")


def _table(report: dict[str, Any]) -> Table:
    table = Table(
        title=f"{report['model']}, {format_count(report['num_parameters'])} parameters,"
        f" {report['tokens']} tokens in {report['micro_batches']} micro-batch(es)",
        caption=report["flop_formula"],
    )
    for name in ("contender", "step", "tokens/s", "TFLOP/s model", "hardware", "idle", "peak RSS",
                 "peak device", "read / predicted", "written / predicted"):  # fmt: skip
        first = name == "contender"
        table.add_column(name, justify="left" if first else "right", no_wrap=first)
    for name, facts in report["contenders"].items():
        moved, predicted = facts.get("moved_bytes"), facts.get("predicted_bytes")
        directions = ["-", "-"]
        if moved is not None and predicted is not None:
            directions = [
                f"{format_size(moved[direction])} / {format_size(predicted[direction])}"
                for direction in ("disk_read", "disk_write")
            ]
        idle = facts.get("gpu_idle_share")
        table.add_row(
            name,
            f"{facts['median_step_s']:.3f} s",
            f"{facts['tokens_per_s']:.4g}",
            f"{facts['model_tflops']:.4g}",
            f"{facts['hardware_tflops']:.4g}",
            "-" if idle is None else f"{idle:.0%}",
            format_size(facts["peak_rss_bytes"] or 0),
            _device_peak(facts),
            *directions,
        )
    return table


def _device_peak(facts: dict[str, Any]) -> str:
    peak, budget = facts.get("peak_device_bytes"), facts.get("device_budget_bytes")
    if peak is None:
        return "-"
    return format_size(peak) + (f" of {format_size(budget)}" if budget else "")

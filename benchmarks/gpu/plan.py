"""Plans of the step benchmarks of `gpu_check.sh`; computed without a GPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from step import main as bench_step
from step.case import case_of, device_bytes, priced_of, schedule_line
from step.targets import SPEED, share_for

from gpu.stages import Check
from infinity.common.sizes import format_size
from infinity.plan.budget import budgeted_bytes
from infinity.plan.inputs import PlanInput, price
from infinity.plan.plan_machine import PlanMachine
from infinity.plan.rates import Rates

GIB = 1 << 30
DEVICE_BYTES, RAM_BYTES, DISK_BYTES = 139 * GIB, 126 * GIB, 50 * GIB
ENDLESS_BYTES = 1 << 50
PROCESS_BYTES = 2 * GIB  # RSS of torch with CUDA before planning
# Assumed rates of an H200 machine, until they are measured.
EXPECTED = Rates(3e9, 2e9, 3.5e9, update={"fp32": 3e9, "bf16": 4e9, "8bit": 4e9},
                 compute={"bf16": 600e12, "fp32": 50e12}, between={"bf16": 2.4e12, "fp32": 2.4e12},
                 attention={"bf16": 300e12, "fp32": 30e12}, logits=75e9,
                 to_device=50e9, from_device=50e9, device_update=140e9)  # fmt: skip


@dataclass(frozen=True)
class Benchmark:
    """One step benchmark: its name, its job and its contenders."""

    name: str
    job: dict[str, Any]
    contenders: Sequence[str]


def benchmarks(checks: Sequence[Check]) -> list[Benchmark]:
    """Return the step benchmarks among `checks`."""
    result = []
    for check in checks:
        if "tools/bench_step.py" in check.command:
            options = list(check.command)[check.command.index("tools/bench_step.py") + 1 :]
            arguments = bench_step._parser().parse_args(options)
            job = bench_step.job_of(arguments, Path("/disk"))
            job |= {"trace_steps": [1, 2], "traces": "/traces", "contender": "ours"}
            names = tuple(arguments.only or bench_step.OURS)
            result.append(Benchmark(check.name, job, names))
    return result


def machine_of(rates: Rates = EXPECTED, device_bytes: int = DEVICE_BYTES) -> PlanMachine:
    """Return a machine with one H200, or a GPU of `device_bytes`."""
    return PlanMachine("H200", RAM_BYTES, device_bytes, DISK_BYTES, 16, rates)


def without_offload(job: dict[str, Any]) -> PlanInput:
    """Return the case with recomputed blocks on a device of unlimited memory."""
    changes = {"device_budget": None, "host_budget": None, "state": "auto", "by_engine": False}
    return case_of(job | changes, "infinity_ram", machine_of(device_bytes=ENDLESS_BYTES))


def plan_lines(checks: Sequence[Check]) -> list[str]:
    """Return a line for each plan of infinity; raise `DoesNotFitError` if one does not fit."""
    return [
        _line(one.name, contender, json.dumps(one.job))
        for one in benchmarks(checks)
        for contender in one.contenders
        if contender.startswith("infinity")
    ]


@cache  # choosing a schedule takes seconds
def _line(name: str, contender: str, job_json: str) -> str:
    job = json.loads(job_json)
    estimate = priced_of(job, contender, machine_of(), PROCESS_BYTES)
    tier_bytes = budgeted_bytes(estimate.plan)
    memory = ", ".join(
        f"{tier} {format_size(tier_bytes[tier])}" for tier in tier_bytes if tier_bytes[tier]
    )
    parts = [
        f"{name}, {contender}: {estimate.cost.seconds:.3g} s a step, bound by "
        f"{estimate.cost.binds}",
        memory,
        schedule_line(estimate.case),
    ]
    if contender == "infinity_plan":  # others: the plan does not know if the model slices logits
        parts[1] += f" ({format_size(device_bytes(estimate))} of the device with activations)"
    target_share = share_for(estimate.case.tokens_per_step, on_gpu=True)
    if speed := SPEED.get(job["model"]):
        parts.append(f"{estimate.tokens_per_s:,.0f} tokens/s, wanted {speed:,.0f}")
    elif target_share is not None and contender != "infinity_disk":
        share = price(without_offload(job)).cost.seconds / estimate.cost.seconds
        parts.append(f"{share:.2f} of a step without offload, wanted {target_share:.2f}")
    return "; ".join(parts)

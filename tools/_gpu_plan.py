"""What the engine would plan for each step benchmark of `gpu_check.sh`; needs no GPU."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import bench_step
from _bench_config import engine_config
from _bench_model import outline
from _gpu_stages import Check

from infinity.config.schema import load_config
from infinity.cutting import case_for, cut_model, groups_of
from infinity.model.shapes import target_of
from infinity.plan.budget import budgeted_bytes
from infinity.plan.case import Case
from infinity.plan.cost import Rates, step_cost
from infinity.plan.machine import PlanMachine
from infinity.sizes import format_size

GIB = 1 << 30
DEVICE_BYTES, RAM_BYTES, DISK_BYTES = 139 * GIB, 126 * GIB, 50 * GIB
PROCESS_BYTES = 2 * GIB  # of torch with CUDA, before a plan is made
# What such a machine is thought to reach, until it is measured.
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
    """Those of a stage's checks that are one."""
    found = []
    for check in checks:
        if "tools/bench_step.py" in check.command:
            options = list(check.command)[check.command.index("tools/bench_step.py") + 1 :]
            arguments = bench_step._parser().parse_args(options)
            job = bench_step.job_of(arguments, Path("/disk"))
            job |= {"trace_steps": [1, 2], "traces": "/traces", "contender": "ours"}
            names = tuple(arguments.only or bench_step.OURS)
            found.append(Benchmark(check.name, job, names))
    return found


def case_of(
    job: dict[str, Any],
    contender: str,
    rates: Rates = EXPECTED,
    device_bytes: int = DEVICE_BYTES,
) -> Case:
    """The case that a run of a job is, on a machine with one H200, or another such GPU."""
    config = load_config(engine_config(job, contender))
    model = outline(job)
    groups = groups_of(model, config)
    machine = PlanMachine("H200", RAM_BYTES, device_bytes, DISK_BYTES, False, 16, rates)
    return case_for(
        target_of(job["model"], model, {}),
        cut_model(model, config, groups, None),
        groups,
        config,
        machine,
        job["rows"] * job["context"],
        recompute=job["checkpointing"],
        base=PROCESS_BYTES,
        made=max(parameter.nbytes for parameter in model.parameters()),
        length=job["context"],
    )


def plan_lines(checks: Sequence[Check]) -> list[str]:
    """A line for each plan of ours; raises `DoesNotFitError`."""
    lines = []
    for one in benchmarks(checks):
        for contender in one.contenders:
            if contender.startswith("infinity"):
                case = case_of(one.job, contender)
                plan = case.plan()
                taken = budgeted_bytes(plan)
                cost = step_cost(plan, EXPECTED, case.work)
                where = ", ".join(
                    f"{tier} {format_size(taken[tier])}" for tier in taken if taken[tier]
                )
                lines.append(
                    f"{one.name}, {contender}: {cost.seconds:.3g} s a step, bound by "
                    f"{cost.binds}; {where}"
                )
    return lines

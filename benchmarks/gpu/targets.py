"""Table of targets and results at the end of a GPU check.

`results` are the JSON reports of `bench_step.py` by the name of the check.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from step.targets import (
    BOUND,
    EXACT,
    EXACT_MEMORY,
    GPU_SHARES,
    LARGE_STEP,
    LINKS,
    MIDDLE_STEP,
    PEER,
    SMALL_STEP,
    SPEED,
    links_share,
    memory_share,
    name_of_ours,
)

from gpu.stages import DERIVED_FROM, NUM_8B_BLOCKS

Results = Mapping[str, dict[str, Any]]
CAP_BYTES = 24 << 30
# Runs whose placement and schedule the plan chooses.
PLANNED = {
    "8B, 8k": "step-8b-8k",
    "8B, 16k": "step-8b-16k",
    "8B, 32k": "step-8b-32k",
    "14B, 32k": "step-14b-32k",
}
GIVEN = {
    "1.5B, 8k": "step-1.5b-8k",
    "1.5B, 8k, all state in RAM": "step-1.5b-8k-state-in-ram",
    "1.5B, 32k": "step-1.5b-32k",
    "8B, 32k in 4 micro-batches": "step-8b-32k-m4",
}


@dataclass(frozen=True)
class Target:
    """A target, a lower bound unless `at_most`. `measured` returns the result, None if not run."""

    what: str
    wanted: float
    measured: Callable[[Results], float | None]
    at_most: bool = False
    why_not: str = ""

    def row(self, results: Results) -> str:
        sign = "<=" if self.at_most else ">="
        value = self.measured(results)
        if value is None:
            why = self.why_not or _why_skipped(results, self.what)
            return f"| {self.what} | {sign} {self.wanted:g} | - | not run{why} |"
        met = value <= self.wanted if self.at_most else value >= self.wanted
        return (
            f"| {self.what} | {sign} {self.wanted:g} | {value:.4g} | {'met' if met else 'MISSED'} |"
        )


def table(results: Results, *, found_only: bool = False) -> list[str]:
    """Return all targets, or those that were measured, as lines of a Markdown table."""
    shown = [t for t in TARGETS if not found_only or t.measured(results) is not None]
    rows = [target.row(results) for target in shown]
    return ["| target | wanted | found | |", "| --- | --- | --- | --- |", *rows] if rows else []


def _ratio(check: str, name: str, *, inverse: bool) -> Callable[[Results], float | None]:
    def measured(results: Results) -> float | None:
        ratio = results.get(check, {}).get("ratio", {}).get(name)
        return None if ratio is None else (1 / ratio if inverse else ratio)

    return measured


def _relative_to_plain(check: str) -> Callable[[Results], float | None]:
    name = "plan_to_torch_ram" if check in PLANNED.values() else "torch_ram"
    return _ratio(check, name, inverse=True)


def _from_1(share: Callable[[Results], float | None]) -> Callable[[Results], float | None]:

    def measured(results: Results) -> float | None:
        value = share(results)
        return None if value is None else abs(value - 1)

    return measured


def _relative_to_derived(check: str, plain: str) -> Callable[[Results], float | None]:
    """Return infinity's speed relative to plain torch, extrapolated from two depths.

    See `stages.py`, [Note: plain torch at 8B].
    """

    def measured(results: Results) -> float | None:
        few, more = DERIVED_FROM
        times = []
        for layers in DERIVED_FROM:
            report = results.get(f"{plain}-plain-{layers}", {})
            times.append(report.get("contenders", {}).get("torch_ram", {}).get("median_step_s"))
        step_s = _fact(results, check, "median_step_s")
        if None in times or step_s is None:
            return None
        block_s = (times[1] - times[0]) / (more - few)
        return float((times[1] + (NUM_8B_BLOCKS - more) * block_s) / step_s)

    return measured


def _fact(results: Results, check: str, name: str) -> float | None:
    value = _infinity_facts(results, check).get(name)
    return None if value is None else float(value)


def _infinity_facts(results: Results, check: str) -> Mapping[str, Any]:
    contenders: Mapping[str, Any] = results.get(check, {}).get("contenders", {})
    return contenders.get(name_of_ours(contenders), {})


def _memory(check: str) -> Callable[[Results], float | None]:
    return lambda results: memory_share(dict(_infinity_facts(results, check)))


def _links(check: str) -> Callable[[Results], float | None]:
    def measured(results: Results) -> float | None:
        report = results.get(check)
        return None if report is None else links_share(report, name_of_ours(report["contenders"]))

    return measured


def _most_memory(results: Results) -> float | None:
    """Return the largest number of GiB reserved by torch in a run with the cap."""
    contenders = [facts for one in results.values() for facts in one.get("contenders", {}).values()]
    peaks = [
        facts["peak_reserved_bytes"] / 2**30
        for facts in contenders
        if facts.get("device_budget_bytes") == CAP_BYTES
    ]
    return max(peaks, default=None)


def _why_skipped(results: Results, what: str) -> str:
    if "DeepSpeed" not in what:
        return ""
    skipped = (one.get("skipped", {}).get("deepspeed_cpu") for one in results.values())
    return next((f": {why}" for why in skipped if why), "")


TARGETS = (
    Target(
        "1.5B, 32k tokens a step: tokens/s relative to plain torch",
        GPU_SHARES[LARGE_STEP],
        _relative_to_plain("step-1.5b-32k"),
    ),
    Target(
        "1.5B, 8k: tokens/s relative to plain torch",
        GPU_SHARES[SMALL_STEP],
        _relative_to_plain("step-1.5b-8k"),
    ),
    Target(
        "1.5B, 8k, all state in RAM: tokens/s relative to plain torch",
        GPU_SHARES[SMALL_STEP],
        _relative_to_plain("step-1.5b-8k-state-in-ram"),
    ),
    Target(
        "8B, 32k: tokens/s relative to plain torch (derived from 4 and 8 of its blocks)",
        GPU_SHARES[LARGE_STEP],
        _relative_to_derived("step-8b-32k", "step-8b-32k"),
    ),
    Target(
        "8B, 32k in 4 micro-batches: the same",
        GPU_SHARES[LARGE_STEP],
        _relative_to_derived("step-8b-32k-m4", "step-8b-32k"),
    ),
    Target(
        "8B, 16k: tokens/s relative to plain torch (derived from 4 and 8 of its blocks)",
        GPU_SHARES[MIDDLE_STEP],
        _relative_to_derived("step-8b-16k", "step-8b-16k"),
    ),
    Target(
        "8B, 8k: tokens/s relative to plain torch",
        GPU_SHARES[SMALL_STEP],
        _relative_to_plain("step-8b-8k"),
    ),
    Target(
        "1.5B, 8k, moments in RAM: tokens/s relative to FSDP2 with CPU offload",
        PEER,
        _ratio("step-1.5b-8k-fsdp", "fsdp2_to_ram", inverse=False),
    ),
    Target(
        "1.5B, 8k, as planned: tokens/s relative to FSDP2 with CPU offload",
        PEER,
        _ratio("step-1.5b-8k-fsdp", "fsdp2_to_plan", inverse=False),
    ),
    Target(
        "1.5B, 8k: tokens/s relative to DeepSpeed ZeRO-3 offload",
        PEER,
        _ratio("step-1.5b-8k", "deepspeed_cpu_to_ram", inverse=False),
    ),
    Target(
        "8B, 8k: tokens/s relative to DeepSpeed ZeRO-3 offload",
        PEER,
        lambda results: None,
        why_not=": its 16 bytes a parameter and more do not fit the RAM",
    ),
    Target(
        "14B, 32k, whole card: tokens/s",
        SPEED["llama-14b"],
        lambda results: _fact(results, "step-14b-32k", "tokens_per_s"),
    ),
    Target(
        "1.5B, all on disk: step relative to the schedule bound",
        BOUND,
        _ratio("step-1.5b-disk", "schedule", inverse=False),
        at_most=True,
    ),
    *(
        Target(
            f"{what}: step relative to the schedule bound",
            BOUND,
            _ratio(check, name, inverse=False),
            at_most=True,
        )
        for stages, name in ((GIVEN, "ram_to_schedule"), (PLANNED, "plan_to_schedule"))
        for what, check in stages.items()
    ),
    *(
        Target(
            f"{what}: links in the optimizer pass relative to copies alone", LINKS, _links(check)
        )
        for what, check in {**GIVEN, **PLANNED}.items()
    ),
    *(
        Target(
            f"{what}: step relative to the plan's time, difference",
            EXACT,
            _from_1(_ratio(check, "plan_to_predicted", inverse=False)),
            at_most=True,
        )
        for what, check in PLANNED.items()
    ),
    *(
        Target(
            f"{what}: peak of device memory relative to the plan's, difference",
            EXACT_MEMORY,
            _from_1(_memory(check)),
            at_most=True,
        )
        for what, check in PLANNED.items()
    ),
    Target(
        "the cap: GiB of device memory that torch reserved",
        CAP_BYTES / 2**30,
        _most_memory,
        at_most=True,
    ),
)

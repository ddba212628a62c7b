"""Targets of the step benchmark, for GPUs and CPUs, and their evaluation."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

LARGE_STEP, MIDDLE_STEP, SMALL_STEP = 32768, 16384, 8192  # tokens
BOUND = 1.10  # at most this factor over the schedule bound
CPU_SHARE = 1 / 1.05  # of plain torch's tokens per second, in RAM
GPU_SHARES = {LARGE_STEP: 0.93, MIDDLE_STEP: 0.80, SMALL_STEP: 0.55}
PEER = 2.0  # factor over tokens per second of DeepSpeed and FSDP2
# For plans on a CPU with a RAM budget: upper bounds of ratios of step times.
PLANNED = {"plan_to_schedule": BOUND, "plan_to_torch_ram": 1.2}
PLANNED_PEER = 3.3
EXACT = 0.15  # relative error of predicted step times
EXACT_MEMORY = 0.05  # relative error of the predicted peak of device memory
LINKS = 0.9  # bandwidth in the optimizer pass, relative to copies alone in both directions
SPEED = {"llama-14b": 5500.0}  # tokens per second with large steps


@dataclass(frozen=True)
class Judgement:
    """Evaluation of a target: the target as text, the result, and if it was met."""

    name: str
    target: str
    found: float
    met: bool


def judge(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return evaluations of all targets that a report of `bench_step.py` covers, as dicts."""
    ratio, contenders, tokens = report["ratio"], report["contenders"], report["tokens"]
    on_gpu = report["device"] == "cuda"
    judgements = []
    share = share_for(tokens, on_gpu=on_gpu)
    plain_ratio = ratio.get("torch_ram", ratio.get("plan_to_torch_ram") if on_gpu else None)
    if share is not None and plain_ratio is not None:
        judgements.append(at_least("tokens/s relative to plain torch", 1 / plain_ratio, share))
    if "schedule" in ratio:
        judgements.append(
            at_most("all on disk: step relative to the schedule bound", ratio["schedule"])
        )
    if on_gpu and SMALL_STEP <= tokens < LARGE_STEP and "deepspeed_cpu_to_ram" in ratio:
        judgements.append(
            at_least("tokens/s relative to DeepSpeed", ratio["deepspeed_cpu_to_ram"], PEER)
        )
    if on_gpu and "plan_to_schedule" in ratio:
        name = "the plan's choice: step relative to the schedule bound"
        judgements.append(at_most(name, ratio["plan_to_schedule"]))
    if not on_gpu:
        judgements += [at_most(n, ratio[n], limit) for n, limit in PLANNED.items() if n in ratio]
        if "deepspeed_nvme_to_plan" in ratio:
            name = "the plan's choice relative to DeepSpeed"
            judgements.append(at_least(name, ratio["deepspeed_nvme_to_plan"], PLANNED_PEER))
    if "plan_to_predicted" in ratio:
        judgements.append(
            within("step relative to the plan's time", ratio["plan_to_predicted"], EXACT)
        )
    ours = contenders.get(name_of_ours(contenders), {})
    wanted = SPEED.get(report["model"])
    if on_gpu and ours and wanted is not None and tokens >= LARGE_STEP:
        judgements.append(at_least("tokens/s", ours["tokens_per_s"], wanted))
    for name, facts in contenders.items():
        peak, budget = facts.get("peak_reserved_bytes"), facts.get("device_budget_bytes")
        if peak is not None and budget:
            met = peak <= budget
            text = f"at most {budget / 2**30:g} GiB"
            judgements.append(Judgement(f"{name}: device memory, GiB", text, peak / 2**30, met))
        if (share := memory_share(facts)) is not None:
            judgements.append(
                within(f"{name}: device memory relative to the plan's", share, EXACT_MEMORY)
            )
        if (share := links_share(report, name)) is not None:
            what = f"{name}: links in the optimizer pass relative to copies alone"
            judgements.append(at_least(what, share, LINKS))
    return [asdict(judgement) for judgement in judgements]


def name_of_ours(contenders: Collection[str]) -> str:
    """Return the contender to evaluate: `infinity_plan` if present, else `infinity_ram`."""
    return "infinity_plan" if "infinity_plan" in contenders else "infinity_ram"


def memory_share(facts: dict[str, Any]) -> float | None:
    """Return the peak of device memory of a contender divided by the predicted one, or None."""
    peak, predicted = facts.get("peak_device_bytes"), facts.get("predicted_device_bytes")
    return peak / predicted if peak is not None and predicted else None


def links_share(report: dict[str, Any], name: str) -> float | None:
    """Return the bandwidth in the optimizer pass divided by that of copies alone, or None."""
    reached = report["contenders"].get(name, {}).get("links_bytes_per_s")
    alone = report.get("bound", {}).get(name, {}).get("rates", {}).get("copies_mixed")
    return reached / alone if reached is not None and alone else None


def share_for(tokens: int, *, on_gpu: bool) -> float | None:
    """Return the target fraction of plain torch's tokens per second, or None."""
    if not on_gpu:
        return CPU_SHARE
    return next((share for least, share in GPU_SHARES.items() if tokens >= least), None)


def at_least(name: str, found: float, wanted: float) -> Judgement:
    return Judgement(name, f"at least {wanted:.4g}", found, found >= wanted)


def within(name: str, share: float, most: float) -> Judgement:
    text = f"{1 - most:g} to {1 + most:g}"
    return Judgement(name, text, share, abs(share - 1) <= most)


def at_most(name: str, found: float, wanted: float = BOUND) -> Judgement:
    return Judgement(name, f"at most {wanted:.2f}", found, found <= wanted)

"""Planner inputs of runs of `bench_step.py`, and their plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from infinity.config.schema import load_config
from infinity.errors import DoesNotFitError
from infinity.model.partition import PROCESS_BASE_BYTES, case_for, groups_of, partition_model
from infinity.model.targets import target_of
from infinity.plan.activations import num_blocks
from infinity.plan.batch_schedule import BatchSchedule, choose_schedule
from infinity.plan.budget import budgeted_bytes
from infinity.plan.inputs import PlanEstimate, PlanInput, price
from infinity.plan.plan_machine import PlanMachine
from infinity.types import Tier
from step.config import engine_config
from step.model import outline


def unscheduled_job(job: dict[str, Any]) -> dict[str, Any]:
    """Return the job of `infinity_plan`: all tokens in one batch, without a batch schedule."""
    rows = job["rows"] * job["micro_batches"]
    changes = {"micro_batches": 1, "rows": rows, "checkpointing": False}
    # On a GPU the engine slices logits instead of the model, so that the plan knows their memory.
    changes |= {"slices": 1, "offload": "none", "logits_by_engine": job["device"] == "cuda"}
    return job | changes | {"by_engine": False}


def case_of(
    job: dict[str, Any], contender: str, machine: PlanMachine, base: int = PROCESS_BASE_BYTES
) -> PlanInput:
    """Return the planner input of a run; `base` is the memory of the process in bytes.

    The device budget of `infinity_plan` includes activations.
    """
    config = load_config(engine_config(job, contender))
    model = outline(job)
    groups = groups_of(model, config)
    case = case_for(
        target_of(job["model"], model, {}),
        partition_model(model, config, groups, None),
        groups,
        config,
        machine,
        job["rows"] * job["context"],
        recompute=job["checkpointing"],
        base=base,
        made=max(parameter.nbytes for parameter in model.parameters()),
        length=job["context"],
    )
    device_budget = config.budget.device
    if (
        contender == "infinity_plan"
        and device_budget is not None
        and machine.device_bytes is not None
    ):
        case = replace(case, device_share=1.0)
        case = case.with_machine(device_bytes=min(device_budget, machine.device_bytes))
    return case


def priced_of(
    job: dict[str, Any], contender: str, machine: PlanMachine, base: int = PROCESS_BASE_BYTES
) -> PlanEstimate:
    """Return the plan of a run, given or chosen by `infinity_plan`; raise `DoesNotFitError`."""
    if contender != "infinity_plan":
        return price(case_of(job, contender, machine, base))
    job = unscheduled_job(job)
    case = case_of(job, contender, machine, base)
    best = choose_schedule(case, BatchSchedule(), job["rows"]).best
    if best is None:
        raise DoesNotFitError(f"no schedule of {job['model']} fits the budget")
    return best


def schedule_line(case: PlanInput) -> str:
    """Return a description of the batch schedule."""
    return BatchSchedule.of(case).line(num_blocks(case.units))


def device_bytes(priced: PlanEstimate) -> int:
    """Return the predicted peak of device memory in bytes: budgeted bytes and activations."""
    return budgeted_bytes(priced.plan)[Tier.DEVICE] + priced.activations.total


def recomputed_share(case: PlanInput) -> float:
    """Return the fraction of blocks that are recomputed in backward."""
    recompute = case.work.recompute
    return 1.0 if recompute == "all" else recompute / max(num_blocks(case.units), 1)

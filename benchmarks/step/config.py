"""Configurations of the engines in `bench_step.py`: infinity's and DeepSpeed's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from infinity.common.sizes import parse_size
from step.targets import EXACT_MEMORY

HYPER_PARAMETERS = {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
PLACEMENTS = {
    "infinity_ram": {"weights": "host", "optimizer_state": "host", "gradients": "host"},
}
ON_DISK = ("infinity_disk", "infinity_layers")
PLACEMENTS |= {
    name: {"weights": "disk", "optimizer_state": "disk", "gradients": "host"} for name in ON_DISK
}
ALL_EXPERTS = 1 << 20


def recomputes_by_engine(job: dict[str, Any]) -> bool:
    """Return True if the engine recomputes blocks instead of the model.

    Slices, activation offload and compilation require this.
    """
    needs_engine = job["slices"] > 1 or job["offload"] != "none" or job["compile"]
    return bool(job["checkpointing"] and needs_engine)


def trace_of(job: dict[str, Any]) -> Path:
    return Path(job["traces"]) / f"trace-{job['contender']}.json"


def engine_config(job: dict[str, Any], contender: str) -> dict[str, Any]:
    """Return the engine's config for one contender."""
    config: dict[str, Any] = {
        "precision": job["precision"],
        "optimizer": {"type": "AdamW", **HYPER_PARAMETERS},
        "gradient_clipping": 1.0,
        "gradient_accumulation_steps": job["micro_batches"],
        "placement": PLACEMENTS.get(contender, {}),
        "trace": str(trace_of(job)),
        "trace_steps": job["trace_steps"],
        "compile": job["compile"],
        "activations": {
            "checkpoint": "units" if recomputes_by_engine(job) else "none",
            "slices": job["slices"],
            "offload": job["offload"],
            "logits": "chunked" if job.get("logits_by_engine") else "auto",
        },
        "budget": {},
    }
    if job["offload"] != "none":
        config["activations"]["tokens"] = job["rows"] * job["context"]
    is_planned = contender == "infinity_plan"
    on_disk = contender in ON_DISK or (is_planned and job["device"] == "cpu")
    if job.get("experts") is not None:
        all_experts = contender == "infinity_layers"  # all experts of a layer in one unit
        config["experts_per_unit"] = ALL_EXPERTS if all_experts else job["experts"]
    if on_disk or job["offload"] == "disk":
        config["nvme_path"] = job["path"]
    if job["device"] == "cuda":  # the plan places state on the device within the budget
        if job["device_budget"]:
            config["budget"]["device"] = job["device_budget"]
            if is_planned:  # below the cap of the allocator by the tolerance of plans
                budget = parse_size(job["device_budget"])
                config["budget"]["device"] = int((1 - EXACT_MEMORY) * budget)
        if contender == "infinity_ram":
            config["placement"] = {"optimizer_state": "host"} if job["state"] == "host" else {}
    if job["host_budget"] is not None and (contender, job["device"]) != ("infinity_ram", "cpu"):
        config["budget"]["host"] = job["host_budget"]
        if contender in ON_DISK:  # the plan places state in RAM within the budget
            del config["placement"]
    return config


def deepspeed_config(job: dict[str, Any], largest: int) -> dict[str, Any]:
    """Return DeepSpeed's config; `largest` is the number of elements of the largest parameter.

    On a GPU these are its defaults with the usual settings for offloading. On a CPU the defaults
    crash; the values here run, without look-ahead.
    """
    path = str(Path(job["path"]) / "deepspeed")
    if job["contender"] == "deepspeed_cpu":
        optimizer: dict[str, Any] = {"device": "cpu", "pin_memory": True}
        parameters: dict[str, Any] = {"device": "cpu", "pin_memory": True}
    else:
        optimizer = {"device": "nvme", "nvme_path": path, "pin_memory": True, "buffer_count": 4,
                     "pipeline_read": False, "pipeline_write": False}  # fmt: skip
        parameters = {"device": "nvme", "nvme_path": path, "pin_memory": True, "buffer_count": 12,
                      "buffer_size": max(int(3e7), largest), "max_in_cpu": 0}  # fmt: skip
    zero: dict[str, Any] = {
        "stage": 3,
        "contiguous_gradients": True,
        "offload_optimizer": optimizer,
        "offload_param": parameters,
    }
    if job["device"] == "cpu":
        zero |= {
            "overlap_comm": False,
            "sub_group_size": int(3e7),
            "stage3_prefetch_bucket_size": 0,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": int(1e5),
            "reduce_bucket_size": int(5e7),
        }
    return {
        "train_micro_batch_size_per_gpu": job["rows"],
        "gradient_accumulation_steps": job["micro_batches"],
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "bf16": {"enabled": job["precision"] == "bf16"},
        "optimizer": {"type": "AdamW", "params": HYPER_PARAMETERS},
        "zero_optimization": zero,
        "aio": {"block_size": 2**20, "queue_depth": 8, "intra_op_parallelism": 1,
                "single_submit": False, "overlap_events": True},
    }  # fmt: skip

"""Keys of `zero_optimization`, of offload, and of `aio`."""

from __future__ import annotations

import os
from typing import Any

from infinity.config import BLOCK_MULTIPLE, CHUNK_MULTIPLE, IoConfig
from infinity.integrations.deepspeed.draft import Draft
from infinity.integrations.deepspeed.keys import (
    accepted,
    all_accepted,
    done,
    refused,
    refused_if_true,
    refused_section,
    within,
)
from infinity.integrations.deepspeed.kinds import (
    COUNT,
    FLAG,
    NAMES,
    NUMBER,
    SIGNED,
    WHOLE,
    Kind,
    one_of,
)
from infinity.integrations.deepspeed.rules import prefetch
from infinity.plan.planner import CHUNK_ELEMENTS

_MAX_LIVE = 10**9  # DeepSpeed's default: who writes it, or more, has no wish
_STAGES = {
    0: "nothing leaves the GPU but what offload_* names, or what does not fit",
    1: "the number of a stage changes nothing on one GPU",
    2: "the number of a stage changes nothing on one GPU",
    3: "offload works at any stage here",
}


def _stage(draft: Draft, value: int) -> str:
    if value not in _STAGES:
        raise ValueError("should be 0, 1, 2 or 3")
    return f"stage {value}: {_STAGES[value]}"


def _sub_group(draft: Draft, value: int) -> str | None:
    if value >= CHUNK_ELEMENTS:
        return None
    chunk = max(value // CHUNK_MULTIPLE, 1) * CHUNK_MULTIPLE
    draft.set("chunk_size", chunk, "zero_optimization.sub_group_size")
    return f"chunk_size {chunk} elements"


def _max_live(draft: Draft, value: int) -> str | None:
    if value >= _MAX_LIVE:
        return None
    draft.set("hints.live_parameters", value, "zero_optimization.stage3_max_live_parameters")
    return f"hints.live_parameters {value:,}: a shorter look-ahead, 1 unit at least"


def _block_size(draft: Draft, value: int) -> None:
    if value % BLOCK_MULTIPLE:
        least = max(value // BLOCK_MULTIPLE, 1) * BLOCK_MULTIPLE
        raise ValueError(f"should be a multiple of {BLOCK_MULTIPLE} bytes; write {least}")
    draft.set("io.block_size", value, "aio.block_size")


def _paths(value: Any) -> Any:
    paths = (value,) if isinstance(value, str | os.PathLike) else value
    if isinstance(paths, list | tuple) and paths:
        texts = [os.fspath(p) if isinstance(p, os.PathLike) else p for p in paths]
        if all(isinstance(text, str) for text in texts):
            return texts
    raise ValueError("should be a path, or a list of paths")


PATHS = Kind("path or list of paths", _paths)


def _share(value: Any) -> float:
    number: float = NUMBER.read(value)
    if not 0 <= number <= 1:
        raise ValueError("should be between 0 and 1")
    return number


SHARE = Kind("number from 0 to 1", _share)


def _threads(draft: Draft, value: int) -> None:
    least = IoConfig().num_threads
    draft.set("io.num_threads", max(value, least), "aio.intra_op_parallelism")


_DEVICE = one_of("none", "cpu", "nvme")
_FAST = "kept within budget.device by the plan"
_COLLECTIVE = "there is one process: nothing is gathered or reduced"
_BUFFERS = "buffers are sized from the model, and counted in the plan"
_OVERLAPPED = "reads, updates and writes always overlap"
_SMALL = "small tensors travel with their unit"
_PLUS = "it is ZeRO++'s, for several GPUs"

ZERO = within(
    "zero_optimization",
    done("stage", WHOLE, "0", "0 to 3 (true: 1); offload works at any stage", _stage),
    done("sub_group_size", COUNT, "1e9", "upper bound of chunk_size; 1 Mi elements satisfy it",
         _sub_group),
    done("stage3_prefetch_bucket_size", WHOLE, "5e7",
         "the plan looks 2 units ahead: fewer would be slower, more take room; 0: look_ahead 0",
         prefetch),
    accepted("stage3_param_persistence_threshold", WHOLE, "1e5", _SMALL),
    accepted("stage3_model_persistence_threshold", WHOLE, "none", _SMALL),
    done("stage3_max_live_parameters", WHOLE, "1e9",
         "below 1e9: hints.live_parameters, a bound on slots, met as far as goes; else no bound",
         _max_live),
    accepted("stage3_max_reuse_distance", WHOLE, "1e9", _FAST),
    accepted("stage3_gather_16bit_weights_on_model_save", FLAG, "false",
             "engine.save_weights() always writes whole tensors"),
    accepted("stage3_module_granularity_threshold", WHOLE, "0",
             "the model is cut by blocks; initialize(units=...) cuts it otherwise"),
    *within(
        "leaf_module",
        *all_accepted("weights are fetched when they are used, in any order", {
            "classes": (NAMES, "Hugging Face's MoE blocks"),
            "names": (NAMES, "[]"),
            "name_suffixes": (NAMES, "[]"),
        }),
    ),
    *all_accepted(_COLLECTIVE, {
        "stage3_use_all_reduce_for_fetch_params": (FLAG, "false"),
        "stage3_allgather_sequential": (FLAG, "false"),
        "allgather_partitions": (FLAG, "true"),
        "allgather_bucket_size": (WHOLE, "5e8"),
        "reduce_scatter": (FLAG, "true"),
        "reduce_bucket_size": (WHOLE, "5e8"),
        "use_multi_rank_bucket_allreduce": (FLAG, "true"),
        "round_robin_gradients": (FLAG, "false"),
        "mics_hierarchical_params_gather": (FLAG, "false"),
    }),
    accepted("overlap_comm", FLAG, "stage 3: true", "copies always overlap with compute"),
    accepted("contiguous_gradients", FLAG, "true", "a unit's gradients are one flat range"),
    accepted("compute_grad_norm", FLAG, "true", "always computed, as gradients leave"),
    accepted("parameter_alignment", FLAG, "false", "tensors are always aligned"),
    accepted("load_from_fp32_weights", FLAG, "true", "masters come back as they were saved"),
    accepted("elastic_checkpoint", FLAG, "false", "checkpoints hold whole tensors by name"),
    accepted("legacy_stage1", FLAG, "false", "there is one path"),
    accepted("grad_hooks", FLAG, "true", "gradients leave by hooks"),
    done("cpu_offload", FLAG, "null", 'true means offload_optimizer: {"device": "cpu"}'),
    done("cpu_offload_param", FLAG, "null", 'true means offload_param: {"device": "cpu"}'),
    accepted("cpu_offload_use_pin_memory", FLAG, "null",
             "memory that a GPU copies from is page-locked where the system allows it"),
    refused("ignore_unused_parameters", FLAG, "true", "if false", lambda value: not value,
            "parameters without a gradient are left alone, not reported", "leave it out"),
    accepted("memory_efficient_linear", FLAG, "true", "torch's functions are never replaced"),
    accepted("override_module_apply", FLAG, "true", "torch's functions are never replaced"),
    accepted("pipeline_loading_checkpoint", FLAG, "false", "loading is a stream already"),
    accepted("enable_sanity_checks", FLAG, "false", "state is always checked"),
    accepted("log_trace_cache_warnings", FLAG, "false",
             "an order that surprises is counted: StepReport.surprises"),
    accepted("save_muon_momentum_buffer_in_memory", FLAG, "false", "there is no Muon here"),
    refused("zero_hpz_partition_size", WHOLE, "1", "if above 1", lambda value: value > 1,
            _PLUS, "leave it out: there is one process"),
    refused_if_true("zero_quantized_weights", "false", _PLUS, "leave it out"),
    refused_if_true("zero_quantized_nontrainable_weights", "false",
                    "frozen weights rest in the dtype they have",
                    "leave it out, or load frozen weights that are quantized"),
    refused_if_true("zero_quantized_gradients", "false", _PLUS, "leave it out"),
    refused_section("zeropp_loco_param", _PLUS, "leave it out"),
    refused("mics_shard_size", SIGNED, "-1", "if above 1", lambda value: value > 1,
            "MiCS shards over several GPUs", "leave it out: there is one process"),
    refused_section("zenflow", "it updates some weights late, which changes the numbers",
                    "leave it out: exact updates overlap with compute here"),
)  # fmt: skip

_PINNED = "memory that a GPU copies from is page-locked, exactly as much as is used"


def _pinned(draft: Draft, value: bool) -> str | None:
    return None if value else f"not kept apart: {_PINNED} where the system allows it"


OFFLOAD = [
    *within(
        "zero_optimization.offload_param",
        done("device", _DEVICE, "none", "homes.weights: none = device, cpu = host, "
             "nvme = disk; works at any stage. Without the section the plan decides"),
        done("nvme_path", PATHS, "-", "nvme_path; several are striped"),
        accepted("pin_memory", FLAG, "true", _PINNED, _pinned),
        accepted("buffer_count", WHOLE, "5", _BUFFERS),
        accepted("buffer_size", WHOLE, "1e8", _BUFFERS),
        done("max_in_cpu", WHOLE, "1e9",
             "with nvme: hints.weights_in_ram, so many weights stay in RAM if budget.host has "
             "room; not given: none. Without device the plan fills RAM first",
             "hints.weights_in_ram"),
    ),
    *within(
        "zero_optimization.offload_optimizer",
        done("device", _DEVICE, "none", "homes.moments: none = device, cpu = host, "
             "nvme = disk; works at any stage. Gradients rest where the plan puts them"),
        done("nvme_path", PATHS, "-", "nvme_path; several are striped"),
        accepted("pin_memory", FLAG, "true", _PINNED, _pinned),
        accepted("buffer_count", WHOLE, "4", _BUFFERS),
        accepted("buffer_size", WHOLE, "-", _BUFFERS),
        accepted("pipeline", FLAG, "false", _OVERLAPPED),
        accepted("pipeline_read", FLAG, "false", _OVERLAPPED),
        accepted("pipeline_write", FLAG, "false", _OVERLAPPED),
        accepted("fast_init", FLAG, "false", "state is written once, tensor by tensor"),
        done("ratio", SHARE, "1.0",
             "with cpu: 0 keeps moments on the GPU, a share leaves them to the plan"),
        accepted("super_offload", FLAG, "false", "exact updates overlap with compute on any GPU"),
        accepted("cpuadam_cores_perc", SHARE, "0.8",
                 'all CPUs of this process update; "infinity": {"cpu": {"num_threads": N}} limits'),
    ),
]  # fmt: skip

_QUEUE = "requests are queued and awaited in any order"
AIO = within(
    "aio",
    done("block_size", COUNT, "1048576", "io.block_size, a multiple of 4096", _block_size),
    done("queue_depth", COUNT, "8", "io.queue_depth", "io.queue_depth"),
    done("intra_op_parallelism", COUNT, "1",
         "io.num_threads, not below ours: a thread there queues requests, here it carries one",
         _threads),
    accepted("single_submit", FLAG, "false", _QUEUE),
    accepted("overlap_events", FLAG, "true", _QUEUE),
    refused_if_true("use_gds", "false", "GPUDirect storage is not built",
                    "leave it out: reads land in page-locked RAM"),
)  # fmt: skip

ZERO_AND_OFFLOAD = [*ZERO, *OFFLOAD, *AIO]

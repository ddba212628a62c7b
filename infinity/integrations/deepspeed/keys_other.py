"""Keys of checkpoints, logging, profiling, and of products that are not this one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from infinity.integrations.deepspeed.draft import Draft
from infinity.integrations.deepspeed.keys import (
    accepted,
    all_accepted,
    done,
    refused,
    refused_if_true,
    refused_section,
    switched_on,
    within,
)
from infinity.integrations.deepspeed.kinds import (
    ANYTHING,
    COUNT,
    FLAG,
    INTERVAL,
    NAMES,
    NUMBER,
    SECTION,
    SIGNED,
    TEXT,
    WHOLE,
    one_of,
)

_ON_CALL = "acts there only through deepspeed.checkpointing; "
ACTIVATIONS = within(
    "activation_checkpointing",
    accepted("cpu_checkpointing", FLAG, "false",
             _ON_CALL + "here: activations.offload: host"),
    *all_accepted(_ON_CALL + "use torch.utils.checkpoint", {
        "partition_activations": (FLAG, "false"),
        "contiguous_memory_optimization": (FLAG, "false"),
        "number_checkpoints": (WHOLE, "null"),
        "synchronize_checkpoint_boundary": (FLAG, "false"),
        "profile": (FLAG, "false"),
    }),
)  # fmt: skip

_WHOLE_TENSORS = "a checkpoint is streamed, whole tensors by name, and published at once"
CHECKPOINT = within(
    "checkpoint",
    accepted("tag_validation", one_of("warn", "ignore", "fail"), "Warn",
             "there is one process: tags cannot differ"),
    refused_if_true("load_universal", "false", "universal checkpoints are not read",
                    "leave it out; `infinity checkpoint import-deepspeed` reads ZeRO 1, 2 and 3"),
    accepted("use_node_local_storage", FLAG, "false", "there is one machine"),
    accepted("checkpoint_serialization", FLAG, "true", "nothing is pickled"),
    accepted("parallel_write.pipeline_stage", FLAG, "false", _WHOLE_TENSORS),
    *within(
        "writer",
        *all_accepted(_WHOLE_TENSORS, {
            "type": (one_of("fast", "python", "mock"), "fast"),
            "decoupled": (FLAG, "false"),
            "io_buffer_size": (WHOLE, "64 MiB"),
            "io_buffer_double": (FLAG, "true"),
            "io_multiplier": (COUNT, "1"),
            "show_statistics": (FLAG, "false"),
            "data_parallel": (one_of("replica", "socket", "machine"), "null"),
        }),
    ),
)  # fmt: skip


def _csv(draft: Draft, value: bool) -> str | None:
    if not value:
        return None
    given = draft.below("csv_monitor")
    folder = Path(given.get("output_path", "")) / given.get("job_name", "DeepSpeedJobName")
    path = folder / "journal.jsonl"
    draft.set("journal", str(path), "csv_monitor.enabled")
    return f"a line of JSON for each step in {path}"


_QUIET = "the library prints nothing; a journal has a line for each step"
_REPORT = "engine.last_report and the journal have times, bytes and stalls of each step"
_NOT_SENT = "not written; send engine.last_report yourself, or set journal"
LOGGING = [
    accepted("steps_per_print", INTERVAL, "null", _QUIET),
    accepted("wall_clock_breakdown", FLAG, "false", _REPORT),
    accepted("memory_breakdown", FLAG, "false", "the plan says what each tier holds"),
    accepted("dump_state", FLAG, "false", "a journal begins with the configuration and plan"),
    accepted("log_level", TEXT, "null", _QUIET),
    accepted("disable_python_gc", FLAG, "false", "the collector is left alone"),
    *within(
        "timers.throughput",
        *all_accepted(_REPORT, {"enabled": (FLAG, "true"), "synchronized": (FLAG, "true")}),
    ),
    *within(
        "csv_monitor",
        done("enabled", FLAG, "false", "the journal, JSON lines in output_path/job_name", _csv),
        done("output_path", TEXT, '""', "where the journal lies"),
        done("job_name", TEXT, "DeepSpeedJobName", "where the journal lies"),
    ),
    *within(
        "tensorboard",
        *all_accepted(_NOT_SENT, {
            "enabled": (FLAG, "false"), "output_path": (TEXT, '""'), "job_name": (TEXT, "-"),
        }),
    ),
    *within(
        "wandb",
        *all_accepted(_NOT_SENT, {
            "enabled": (FLAG, "false"), "group": (TEXT, "null"), "team": (TEXT, "null"),
            "project": (TEXT, "deepspeed"),
        }),
    ),
    *within(
        "comet",
        *all_accepted(_NOT_SENT, {
            "enabled": (FLAG, "false"), "samples_log_interval": (COUNT, "100"),
            "project": (TEXT, "null"), "workspace": (TEXT, "null"), "api_key": (TEXT, "null"),
            "experiment_name": (TEXT, "null"), "experiment_key": (TEXT, "null"),
            "online": (FLAG, "null"), "mode": (TEXT, "null"),
        }),
    ),
    *within(
        "comms_logger",
        *all_accepted("there is one process: no communication to log", {
            "enabled": (FLAG, "false"), "verbose": (FLAG, "false"), "prof_all": (FLAG, "true"),
            "debug": (FLAG, "false"), "prof_ops": (NAMES, "[]"),
        }),
    ),
    *within(
        "flops_profiler",
        *all_accepted("not measured; torch.utils.flop_counter counts a forward", {
            "enabled": (FLAG, "false"), "recompute_fwd_factor": (NUMBER, "0.0"),
            "profile_step": (WHOLE, "1"), "module_depth": (SIGNED, "-1"),
            "top_modules": (WHOLE, "1"), "detailed": (FLAG, "true"),
            "output_file": (TEXT, "null"),
        }),
    ),
]  # fmt: skip

_COMPILE_ONLY = "used with compile.deepcompile only"
COMPILE = within(
    "compile",
    refused_if_true("deepcompile", "false", "DeepSpeed's compiler passes are not built",
                    "leave it out; offload_* sections do not need it here"),
    refused_if_true("autoep_non_moe", "false", "there is no AutoEP", "leave it out"),
    *all_accepted(_COMPILE_ONLY, {
        "free_activation": (FLAG, "false"),
        "free_activation_threshold": (WHOLE, "10 MiB"),
        "offload_activation": (FLAG, "false"),
        "offload_activation_pin_memory": (FLAG, "true"),
        "offload_opt_states": (FLAG, "false"),
        "offload_parameters": (FLAG, "false"),
        "double_buffer": (FLAG, "true"),
        "symmetric_memory": (FLAG, "false"),
        "debug_log": (FLAG, "false"),
        "sync_before_reduce": (FLAG, "false"),
        "sync_after_reduce": (FLAG, "false"),
        "sync_before_allgather": (FLAG, "false"),
        "sync_after_allgather": (FLAG, "false"),
        "keep_int_input_tensors": (FLAG, "true"),
        "keep_all_input_tensors": (FLAG, "false"),
        "passes": (NAMES, "null"),
    }),
)  # fmt: skip


def _above_one(value: Any) -> bool:
    return bool(value > 1)


def _several_ways(value: Any) -> bool:
    """tensor_parallel: on where a size is above 1."""
    if not isinstance(value, dict):
        return bool(value)
    inner = value.get("tp") or value.get("tensor_parallel") or {}
    sizes = [value.get("autotp_size", 0), value.get("tp_size", 1), inner.get("tp_size", 1)]
    return any(isinstance(size, int | float) and size > 1 for size in sizes)


def _has_stages(value: Any) -> bool:
    """pipeline: acts only on a PipelineModule, which cannot be passed here."""
    stages = value.get("stages") if isinstance(value, dict) else value
    return isinstance(stages, int) and stages > 1


_ONE = "there is one process"
_ONE_GPU = "leave it out, and train on one GPU"
PRODUCTS = [
    refused("sequence_parallel_size", COUNT, "1", "if above 1", _above_one, _ONE, _ONE_GPU),
    refused("data_parallel_size", COUNT, "1", "if above 1", _above_one, _ONE, _ONE_GPU),
    refused("tensor_parallel", SECTION, "off", "if a size is above 1", _several_ways, _ONE,
            _ONE_GPU),
    refused("pipeline", SECTION, "off", "if stages is above 1", _has_stages, _ONE, _ONE_GPU),
    refused_section("expert_parallel", "experts are fetched when they are used, on one GPU",
                    "leave it out: any MoE model trains as it is"),
    refused_section("elasticity", _ONE, "leave it out, and give the batch sizes"),
    refused_section("autotuning", "nothing is launched to be timed",
                    "leave it out, and ask `infinity plan`"),
    refused_section("hybrid_engine", "there is no inference engine", "leave it out"),
    refused_section("nebula", "checkpoints are written by engine.save_checkpoint()",
                    "leave it out"),
    refused("datastates_ckpt", ANYTHING, "off", "if on", switched_on,
            "checkpoints are written by engine.save_checkpoint()", "leave it out"),
    refused_section("weight_quantization", "weights are not quantized", "leave it out"),
    refused_section("compression_training", "models are trained as they are", "leave it out"),
    refused_section("quantize_training", "models are trained as they are", "leave it out"),
    refused_section("eigenvalue", "it serves quantized training, which is not here",
                    "leave it out"),
    refused_section("progressive_layer_drop", "layers are not dropped", "leave it out"),
    refused_section("sparse_attention", "the model's own attention is used",
                    "leave it out, and use a model with sparse attention"),
    refused_section("random_ltd", "tokens are not dropped", "leave it out"),
    refused_section("curriculum_learning", "data come as they are passed",
                    "leave it out, and order the data yourself"),
    refused_section("data_efficiency", "data come as they are passed",
                    "leave it out, and sample the data yourself"),
    accepted("graph_harvesting", FLAG, "false", "CUDA graphs are left to torch.compile"),
]  # fmt: skip

OTHERS = [*ACTIVATIONS, *CHECKPOINT, *LOGGING, *COMPILE, *PRODUCTS]

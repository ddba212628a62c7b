"""Table of DeepSpeed configuration keys, and the treatment of each.

`make docs` generates the page "DeepSpeed keys" from this table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal, TypeAlias

# flag: true or false. whole: an integer of 0 or more, count: 1 or more, signed: any, interval:
# whole or infinite. share: 0 to 1. pair: two numbers. numbers: one, or one per parameter group.
Kind: TypeAlias = Literal[
    "flag", "number", "numbers", "pair", "share", "whole", "count", "signed", "interval",
    "text", "paths", "section", "anything",
]  # fmt: skip
# The condition that refuses a key.
When: TypeAlias = Literal[
    "", "true", "given", "false", "above 1", "on", "a size is above 1", "stages is above 1"
]


class KeyStatus(StrEnum):
    """Treatment of a key: applied, without effect, or refused."""

    DONE = "done"
    ACCEPTED = "accepted"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Key:
    """A key of a DeepSpeed configuration.

    Attributes:
        name: Full name, with dots between sections.
        kind: Kind of the value, or the accepted strings.
        default: DeepSpeed's default, in JSON if it is a value; "-" for none.
        verdict: Treatment of the key.
        note: Effect of the key, or the reason for its verdict.
        when: Condition under which a refused key is refused; it is accepted otherwise.
        remedy: Alternative to a refused key.
        native_key: infinity's key that gets the value unchanged; "" if the value needs translation.
        old: Earlier names of the key in the same section.
    """

    name: str
    kind: Kind | tuple[str, ...]
    default: str
    verdict: KeyStatus
    note: str
    when: When = ""
    remedy: str = ""
    native_key: str = ""
    old: tuple[str, ...] = ()


def _done(
    name: str,
    kind: Kind | tuple[str, ...],
    default: str,
    note: str,
    native_key: str = "",
    old: tuple[str, ...] = (),
) -> Key:
    return Key(name, kind, default, KeyStatus.DONE, note, native_key=native_key, old=old)


def _ignored(note: str, names: str, section: str = "") -> Iterator[Key]:
    """Return keys without effect, whose values are not read; `a=b` has the old name `b`."""
    for name, *old in (word.split("=") for word in names.split()):
        yield Key(section + name, "anything", "-", KeyStatus.ACCEPTED, note, old=tuple(old))


def _refused(
    name: str, kind: Kind, default: str, when: When, note: str, remedy: str = "leave it out"
) -> Key:
    return Key(name, kind, default, KeyStatus.REFUSED, note, when, remedy)


def _section(section: str, *keys: Key) -> Iterator[Key]:
    return (replace(key, name=f"{section}.{key.name}".lstrip(".")) for key in keys)


# Notes that several keys share.
_SCHEDULE = "DeepSpeed's values, step for step"
_SUMS = "gradients of ranks are added in fp32, in the order of ranks, each shard by its owner"
_WRITER = "a checkpoint is streamed, full tensors by name, and published at once"
_BUFFERS = "buffers are sized from the model, and counted in the plan"
_PARALLEL = "each rank has its own data, and the model is sharded over all ranks"
_ANY_ORDER = "weights are fetched when they are used, in any order"
_ZEROPP = "ZeRO++ is not built in"
_TIMES = "engine.last_report and the step log have times, bytes and stalls of each step"
_PINNED = "memory that a GPU copies from is page-locked"

RENAMED_SECTIONS = {"bfloat16": "bf16"}
# fmt: off
TABLE: tuple[Key, ...] = (
    _done("train_batch_size", "count", "derived",
        "checked: micro-batch x accumulation x processes"),
    _done("train_micro_batch_size_per_gpu", "count", "derived",
        "batch size of the loader of training_data"),
    _done("gradient_accumulation_steps", "count", "derived",
        "micro-batches per step; sums are fp32; with activations.tokens in the infinity "
        "section InfinityTrainer splits the samples of a step as planned"),
    _done("managed_gradient_accumulation", "flag", "true",
        "false: every step() updates, and a caller's window may have any number of backwards; they "
        "are summed in fp32 where gradient_accumulation_steps is 2 or more"),
    _done("gradient_clipping", "number", "1.0", "global norm, 0 = off",
          native_key="gradient_clipping"),
    _done("dataloader_drop_last", "flag", "false", "of the loader of training_data"),
    *_ignored("any torch optimizer may be passed", "zero_allow_untested_optimizer"),
    *_ignored("an optimizer that is passed runs tile by tile", "zero_force_ds_cpu_optimizer"),
    *_ignored("a hint for tensor cores; not used", "vocabulary_size"),
    *_ignored(_SUMS, "prescale_gradients gradient_predivide_factor"),
    Key("gradient_allreduce_op", ("mean", "sum"), "mean", KeyStatus.ACCEPTED,
        "the mean over ranks; sum is refused for several"),
    *_ignored(_SUMS,
        "communication_data_type seq_parallel_communication_data_type sparse_gradients "
        "disable_allgather allgather_size use_data_before_expert_parallelism"),
    *_section("fp16",
        _done("enabled", "flag", "false", "fp16 compute, fp32 masters; the loss is scaled"),
        _done("auto_cast", "flag", "false", "cast_inputs, where this section is enabled"),
        _done("loss_scale", "number", "0", "0 = dynamic, else a constant scale (loss_scale.value)",
            native_key="loss_scale.value"),
        _done("initial_scale_power", "whole", "16", "loss_scale.initial_power",
            native_key="loss_scale.initial_power"),
        _done("loss_scale_window", "count", "1000",
            "loss_scale.window; DeepSpeed's rule, step for step, of its ZeRO stages",
            native_key="loss_scale.window"),
        _done("hysteresis", "count", "2",
            "loss_scale.hysteresis; DeepSpeed's rule, step for step, of its ZeRO stages",
            native_key="loss_scale.hysteresis"),
        _done("consecutive_hysteresis", "flag", "false",
            "loss_scale.consecutive_hysteresis; DeepSpeed's rule, step for step, of its ZeRO "
            "stages", native_key="loss_scale.consecutive_hysteresis"),
        _done("min_loss_scale", "number", "1",
            "loss_scale.min; an overflow at this scale is an error, as in DeepSpeed",
            native_key="loss_scale.min"),
        *_ignored("masters stay fp32: 4 bytes in addition to the fp16 weight",
            "fp16_master_weights_and_grads"),
    ),
    *_section("bf16",
        _done("enabled", "flag", "false",
            "bf16 compute, fp32 masters; without this and fp16: fp32"),
        *_ignored("always: a step whose gradients are not finite is skipped and counted",
            "check_grad_overflow=check_overflow"),
        *_ignored("masters stay exact: 2 bytes in addition to the bf16 weight, never stored twice",
            "bf16_master_weights_and_grads"),
        _done("bf16_optimizer_states", "flag", "false",
            "true: moments are stored in bf16 (optimizer.moments), with the built-in rules: lossy"),
        *_ignored("gradients are moved to their tier during backward", "immediate_grad_update"),
        _done("auto_cast", "flag", "false", "cast_inputs, where this section is enabled"),
        *_ignored("there is no loss scaling in bf16",
            "loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis "
            "min_loss_scale"),
    ),
    *_section("torch_autocast",
        _done("enabled", "flag", "false",
            "autocast: calls of the engine run under torch.autocast, weights and gradients are "
            "fp32; not with bf16 or fp16"),
        _done("dtype", ("bfloat16", "bf16", "torch.bfloat16", "float16", "fp16", "torch.float16"),
            "bfloat16", "bfloat16; float16 is refused, as it needs loss scaling"),
        *_ignored("ranks exchange fp32 for all modules; torch chooses the operations that it casts",
            "lower_precision_safe_modules"),
    ),
    _refused("amp", "section", "off", "on", "apex is not used", 'write "bf16": {"enabled": true}'),
    *_section("data_types",
        *_ignored("sums over micro-batches are fp32; one micro-batch keeps its dtype",
            "grad_accum_dtype"),
        _done("param_dtype", ("fp32", "fp16", "bf16"), "null",
            "checked: the dtype of the section that is enabled"),
        _refused("buffer_dtype", "text", "null", "given", "buffers keep the dtype they have",
            "leave it out, and cast buffers before initialize()"),
        *_ignored("buffers keep the dtype they have", "keep_in_fp32_modules"),
    ),
    *_section("optimizer",
        _done("type", "text", "-",
            "the built-in rules (Adam means AdamW unless adam_w_mode is false); others are "
            "refused with an alternative"),
        *_ignored("there is one implementation", "legacy_fusion"),
    ),
    *_section("optimizer.params",
        _done("lr", "number", "1e-3 (Adagrad 1e-2)", "with torch's meaning"),
        _done("betas", "pair", "[0.9, 0.999]", "Adam, AdamW, Lion; Lion starts from DeepSpeed's"),
        _done("eps", "number", "1e-8 (Adagrad 1e-10)", "with torch's meaning"),
        _done("weight_decay", "number", "0 (torch_adam: 0.01)", "starts from DeepSpeed's 0"),
        _done("momentum", "number", "0", "SGD"),
        _done("dampening", "number", "0", "SGD"),
        _done("nesterov", "flag", "false", "SGD"),
        _done("ns_method", ("standard", "gram"), "gram",
            "Muon; standard: Newton-Schulz in bf16, as torch.optim.Muon; gram, on the smaller Gram "
            "matrix, rounds differently and is not built in: standard is used, with a note"),
        _done("lr_decay", "number", "0", "Adagrad"),
        _done("initial_accumulator_value", "number", "0", "Adagrad"),
        _done("maximize", "flag", "false", "with torch's meaning"),
        _done("adam_w_mode", "flag", "true", "false makes Adam's decay L2; AdamW stays AdamW"),
        _done("torch_adam", "flag", "false", "weight_decay then starts from torch's own default"),
        _done("fp32_optimizer_states", "flag", "true",
            "false: moments are stored in bf16 (optimizer.moments): lossy"),
        _done("max_grad_norm", "number", "-",
            "used as gradient_clipping, if that is not given (DeepSpeed refuses it)"),
        _refused("bias_correction", "flag", "true", "false",
            "Adam's moments are always bias-corrected"),
        _refused("per_head_muon", "flag", "false", "true",
            "Muon orthogonalizes each q, k and v projection as one matrix, as torch.optim.Muon, "
            "not head by head"),
        _refused("amsgrad", "flag", "false", "true",
            "the built-in kernels do not keep the largest second moment",
            "remove the section and write initialize(optimizer=lambda groups: "
            "torch.optim.AdamW(groups, lr=..., amsgrad=True))"),
        *_ignored("an implementation choice; infinity's kernels are always fused",
            "fused foreach capturable differentiable set_grad_none"),
    ),
    *_section("scheduler",
        _done("type", "text", "-",
            "LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR, with DeepSpeed's "
            "values, or a class of torch.optim.lr_scheduler"),
    ),
    *_section("scheduler.params",
        _done("warmup_min_lr", "numbers", "0", _SCHEDULE),
        _done("warmup_max_lr", "numbers", "optimizer's (WarmupDecayLR 1e-3)", _SCHEDULE),
        _done("warmup_num_steps", "count", "1000", _SCHEDULE),
        _done("warmup_type", ("log", "linear"), "log", "other values are errors"),
        _done("total_num_steps", "count", "-", "WarmupDecayLR, WarmupCosineLR"),
        _done("warmup_min_ratio", "number", "0", "WarmupCosineLR"),
        _done("cos_min_ratio", "number", "1e-4", "WarmupCosineLR"),
        _done("lr_range_test_min_lr", "numbers", "1e-3", _SCHEDULE),
        _done("lr_range_test_step_size", "count", "2000", _SCHEDULE),
        _done("lr_range_test_step_rate", "number", "1.0", _SCHEDULE),
        _done("lr_range_test_staircase", "flag", "false", _SCHEDULE),
        _done("cycle_min_lr", "numbers", "-", _SCHEDULE),
        _done("cycle_max_lr", "numbers", "-", _SCHEDULE),
        _done("cycle_first_step_size", "count", "2000", _SCHEDULE),
        _done("cycle_second_step_size", "whole", "as the first", _SCHEDULE),
        _done("cycle_first_stair_count", "whole", "0", _SCHEDULE),
        _done("cycle_second_stair_count", "whole", "as the first", _SCHEDULE),
        _done("decay_step_size", "whole", "0", _SCHEDULE),
        _done("decay_lr_rate", "number", "0", _SCHEDULE),
        _done("cycle_momentum", "flag", "true",
            "the first beta; the second becomes 0.99, as in DeepSpeed"),
        _done("cycle_min_mom", "numbers", "0.8", _SCHEDULE),
        _done("cycle_max_mom", "numbers", "0.9", _SCHEDULE),
        _done("decay_mom_rate", "number", "0", _SCHEDULE),
        _done("last_batch_iteration", "signed", "-1", _SCHEDULE),
    ),
    *_section("zero_optimization",
        _done("stage", "whole", "0", "0 to 3 (true: 1); offload works at any stage"),
        _done("sub_group_size", "count", "1e9",
            "upper bound of chunk_size; 1 Mi elements satisfy it"),
        _done("stage3_prefetch_bucket_size", "whole", "5e7",
            "the plan prefetches 2 units: fewer are slower, more take memory; 0: prefetch_units 0",
            old=("prefetch_bucket_size",)),
        *_ignored("small tensors are moved with their unit",
            "stage3_param_persistence_threshold=param_persistence_threshold "
            "stage3_model_persistence_threshold=model_persistence_threshold"),
        _done("stage3_max_live_parameters", "whole", "1e9",
            "below 1e9: hints.live_parameters, a bound on slots, met if possible; else no "
            "bound", old=("max_live_parameters",)),
        *_ignored("the plan stays within budget.device",
            "stage3_max_reuse_distance=max_reuse_distance"),
        *_ignored("engine.save_weights() always writes full tensors",
            "stage3_gather_16bit_weights_on_model_save=gather_16bit_weights_on_model_save="
            "stage3_gather_fp16_weights_on_model_save"),
        *_ignored("units are blocks of the model; initialize(units=...) sets others",
            "stage3_module_granularity_threshold=module_granularity_threshold"),
        *_ignored(_ANY_ORDER, "classes names name_suffixes", "leaf_module."),
        *_ignored("the plan decides what to gather and sum, and when",
            "stage3_use_all_reduce_for_fetch_params=use_all_reduce_for_fetch_params "
            "stage3_allgather_sequential=allgather_sequential allgather_partitions "
            "allgather_bucket_size reduce_scatter reduce_bucket_size "
            "use_multi_rank_bucket_allreduce round_robin_gradients "
            "mics_hierarchical_params_gather"),
        *_ignored("copies always overlap with compute", "overlap_comm"),
        *_ignored("the gradients of a unit are one flat range", "contiguous_gradients"),
        *_ignored("always computed, while gradients move", "compute_grad_norm"),
        *_ignored("tensors are always aligned", "parameter_alignment"),
        *_ignored("masters are loaded as saved", "load_from_fp32_weights"),
        *_ignored("checkpoints hold full tensors by name", "elastic_checkpoint"),
        *_ignored("there is one implementation", "legacy_stage1"),
        *_ignored("gradients are moved by hooks", "grad_hooks"),
        _done("cpu_offload", "flag", "null", 'true means offload_optimizer: {"device": "cpu"}'),
        _done("cpu_offload_param", "flag", "null", 'true means offload_param: {"device": "cpu"}',
            old=("cpu_offload_params",)),
        *_ignored("memory that a GPU copies from is page-locked where the system allows it",
            "cpu_offload_use_pin_memory"),
        _refused("ignore_unused_parameters", "flag", "true", "false",
            "parameters without a gradient are skipped, not reported"),
        *_ignored("torch's functions are never replaced",
            "memory_efficient_linear override_module_apply"),
        *_ignored("loading is always streamed", "pipeline_loading_checkpoint"),
        *_ignored("state is always checked", "enable_sanity_checks"),
        *_ignored("StepReport.mispredictions counts accesses in an unexpected order",
            "log_trace_cache_warnings"),
        *_ignored("`placement` decides where the momentum is stored",
            "save_muon_momentum_buffer_in_memory"),
        _refused("zero_hpz_partition_size", "whole", "1", "above 1",
            _ZEROPP),
        _refused("zero_quantized_weights", "flag", "false", "true", _ZEROPP),
        _done("zero_quantized_nontrainable_weights", "flag", "false",
            "frozen.format int8: matrices of frozen linear layers, one scale per row; lossy, as in "
            "DeepSpeed"),
        _refused("zero_quantized_gradients", "flag", "false", "true", _ZEROPP),
        _refused("zeropp_loco_param", "section", "off", "on", _ZEROPP),
        _refused("mics_shard_size", "signed", "-1", "above 1", "MiCS is not built in"),
        _refused("zenflow", "section", "off", "on",
            "it updates some weights late, which changes the numbers",
            "leave it out: exact updates overlap with compute here"),
    ),
    *_section("zero_optimization.offload_param",
        _done("device", ("none", "cpu", "nvme"), "none",
            "placement.weights: none = device, cpu = host, nvme = disk; works at any stage. "
            "Without the section the plan decides"),
        _done("nvme_path", "paths", "-", "nvme_path; several are striped"),
        *_ignored(_PINNED, "pin_memory"),
        *_ignored(_BUFFERS, "buffer_count buffer_size"),
        _done("max_in_cpu", "whole", "1e9",
            "with nvme: hints.max_params_in_cpu, the number of weights that stay in RAM if "
            "budget.host allows it; not given: none. Without device the plan fills RAM first",
            native_key="hints.max_params_in_cpu"),
    ),
    *_section("zero_optimization.offload_optimizer",
        _done("device", ("none", "cpu", "nvme"), "none",
            "placement.optimizer_state: none = device, cpu = host, nvme = disk; works at any "
            "stage. The plan places gradients"),
        _done("nvme_path", "paths", "-", "nvme_path; several are striped"),
        *_ignored(_PINNED, "pin_memory"),
        *_ignored(_BUFFERS, "buffer_count buffer_size"),
        *_ignored("reads, updates and writes always overlap",
            "pipeline pipeline_read pipeline_write"),
        *_ignored("state is written once, tensor by tensor", "fast_init"),
        _done("ratio", "share", "1.0",
            "with cpu: 0 keeps moments on the GPU, a share leaves them to the plan"),
        *_ignored("exact updates overlap with compute on any GPU", "super_offload"),
        *_ignored('all CPUs of this process update; "infinity": {"cpu": {"num_threads": N}} limits',
            "cpuadam_cores_perc"),
    ),
    *_section("aio",
        _done("block_size", "count", "1048576", "io.block_size, a multiple of 4096"),
        _done("queue_depth", "count", "8", "io.queue_depth", native_key="io.queue_depth"),
        _done("intra_op_parallelism", "count", "1",
            "io.num_threads, at least infinity's default: DeepSpeed's threads queue requests, "
            "infinity's run one each", old=("thread_count",)),
        *_ignored("requests are queued and awaited in any order", "single_submit overlap_events"),
        _refused("use_gds", "flag", "false", "true", "GPUDirect storage is not supported",
            "leave it out: reads land in page-locked RAM"),
    ),
    *_section("activation_checkpointing",
        _done("cpu_checkpointing", "flag", "false",
            "activations.offload: host, for all tensors saved for backward; in DeepSpeed for "
            "deepspeed.checkpointing only"),
        *_ignored("DeepSpeed uses it in deepspeed.checkpointing only; use torch.utils.checkpoint",
            "partition_activations contiguous_memory_optimization number_checkpoints "
            "synchronize_checkpoint_boundary profile"),
    ),
    *_section("checkpoint",
        *_ignored("different tags on different ranks are an error", "tag_validation"),
        *_ignored("checkpoints hold full tensors by name, and load on any number of ranks",
            "load_universal"),
        *_ignored("there is one machine", "use_node_local_storage"),
        *_ignored("nothing is pickled", "checkpoint_serialization"),
    ),
    *_ignored(_WRITER, "pipeline_stage", "checkpoint.parallel_write."),
    *_ignored(_WRITER,
        "type decoupled io_buffer_size io_buffer_double io_multiplier show_statistics "
        "data_parallel", "checkpoint.writer."),
    _done("steps_per_print", "interval", "null",
        "the first rank prints step, skipped steps, loss, learning rates and samples/s to stdout"),
    *_ignored(_TIMES, "wall_clock_breakdown"),
    *_ignored("the plan lists the content of each tier", "memory_breakdown"),
    *_ignored("a step log begins with the configuration and plan", "dump_state"),
    *_ignored("the library prints nothing; a step log has a line for each step", "log_level"),
    *_ignored("the garbage collector is not changed", "disable_python_gc"),
    *_ignored(_TIMES, "enabled synchronized", "timers.throughput."),
    *_ignored('"infinity": {"step_log": "FILE"} writes a line of JSON for each step',
        "enabled output_path job_name", "csv_monitor."),
    *_section("tensorboard",
        _done("enabled", "flag", "false",
            "loss, learning rate and loss scale of each step, as events in output_path/job_name"),
        _done("output_path", "text", '""', "directory of the events"),
        _done("job_name", "text", "-", "directory of the events"),
    ),
    *_section("wandb",
        _done("enabled", "flag", "false",
            "loss, learning rate and loss scale of each step, to a run of Weights & Biases"),
        _done("group", "text", "null", "of the run"),
        _done("team", "text", "null", "of the run"),
        _done("project", "text", "deepspeed", "of the run"),
    ),
    *_ignored("log engine.last_report from the loop, or use report_to of a Trainer",
        "enabled samples_log_interval project workspace api_key experiment_name experiment_key "
        "online mode", "comet."),
    *_ignored("engine.counters() and `infinity trace` report moved bytes",
        "enabled verbose prof_all debug prof_ops", "comms_logger."),
    *_ignored("torch.utils.flop_counter.FlopCounterMode counts operations",
        "enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file",
        "flops_profiler."),
    *_section("compile",
        _refused("deepcompile", "flag", "false", "true",
            "DeepSpeed's compiler passes are not built in",
            "leave it out; offload_* sections do not need it"),
        _refused("autoep_non_moe", "flag", "false", "true", "there is no AutoEP"),
        *_ignored("used with compile.deepcompile only",
            "free_activation free_activation_threshold offload_activation "
            "offload_activation_pin_memory offload_opt_states offload_parameters double_buffer "
            "symmetric_memory debug_log sync_before_reduce sync_after_reduce "
            "sync_before_allgather sync_after_allgather keep_int_input_tensors "
            "keep_all_input_tensors passes"),
    ),
    _refused("sequence_parallel_size", "count", "1", "above 1", _PARALLEL),
    _refused("data_parallel_size", "count", "1", "above 1", _PARALLEL),
    _refused("tensor_parallel", "section", "off", "a size is above 1", _PARALLEL),
    _refused("pipeline", "section", "off", "stages is above 1", _PARALLEL),
    _refused("expert_parallel", "section", "off", "on", "experts are fetched when they are used",
        "leave it out: MoE models train unchanged"),
    _refused("elasticity", "section", "off", "on",
        "the number of processes does not change during a run",
        "leave it out, and give the batch sizes"),
    _refused("autotuning", "section", "off", "on", "no trial runs are started",
        "leave it out, and use `infinity plan`"),
    _refused("hybrid_engine", "section", "off", "on", "there is no inference engine"),
    _refused("nebula", "section", "off", "on",
        "checkpoints are written by engine.save_checkpoint()"),
    _refused("datastates_ckpt", "anything", "off", "on",
        "checkpoints are written by engine.save_checkpoint()"),
    _refused("weight_quantization", "section", "off", "on", "weights are not quantized"),
    _refused("compression_training", "section", "off", "on", "the model is not changed"),
    _refused("quantize_training", "section", "off", "on", "the model is not changed"),
    _refused("eigenvalue", "section", "off", "on",
        "it is for quantized training, which is not supported"),
    _refused("progressive_layer_drop", "section", "off", "on", "layers are not dropped"),
    _refused("sparse_attention", "section", "off", "on", "the model's own attention is used",
        "leave it out, and use a model with sparse attention"),
    _refused("random_ltd", "section", "off", "on", "tokens are not dropped"),
    _refused("curriculum_learning", "section", "off", "on", "the data are used in the order given",
        "leave it out, and order the data yourself"),
    _refused("data_efficiency", "section", "off", "on", "the data are used in the order given",
        "leave it out, and sample the data yourself"),
    *_ignored("CUDA graphs are left to torch.compile", "graph_harvesting"),
)
# fmt: on

"""DeepSpeed's configuration as data: a line for each key, and how values of a kind are read.

JSON knows one kind of number, so `1e9` is a whole number here, and texts that are numbers too.
"""

from __future__ import annotations

import math
import numbers
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from infinity.rules import RULES

# DeepSpeed's names of the built-in rules, of which it ignores the case.
BUILT_IN = {name.lower(): name for name, rule in RULES.items() if rule.deepspeed is not None}

# [section=its old name], then its keys: name=old names, kind of value, default there; what becomes
# of it here. A key that changes nothing is accepted; one that would change numbers or memory is
# refused where it is on: "reason -> what to write".
_TABLE = r"""
[]
train_batch_size count derived  done: checked: micro-batch x accumulation x 1 process
train_micro_batch_size_per_gpu count derived  done: batch size of the loader that is made of
    training_data
gradient_accumulation_steps count derived  done: the same; sums are fp32
managed_gradient_accumulation flag true  refused if false: the engine counts micro-batches itself ->
    leave it out, and set gradient_accumulation_steps
gradient_clipping number 1.0  done: global norm, 0 = off
dataloader_drop_last flag false  done: of the loader that is made of training_data
zero_allow_untested_optimizer flag false  accepted: any torch optimizer may be passed
zero_force_ds_cpu_optimizer flag true  accepted: an optimizer that is passed runs as it is, tile by
    tile
vocabulary_size count null  accepted: a hint for tensor cores; not used
prescale_gradients flag false; gradient_predivide_factor number 1.0; gradient_allreduce_op mean|sum
    mean; communication_data_type fp32|fp16|bf16 null; seq_parallel_communication_data_type
    fp32|fp16|bf16 fp32; sparse_gradients flag false; disable_allgather flag false; allgather_size
    whole 5e8; use_data_before_expert_parallelism flag false  accepted: nothing is reduced over
    processes: there is one
[fp16]
enabled flag false  done: fp16 compute, fp32 masters; the loss is scaled
auto_cast flag false  refused if true: inputs are not cast for you -> cast them: engine(x.to(dtype))
loss_scale number 0  done: 0 = dynamic, else the one scale (loss_scale.value)
initial_scale_power whole 16  done: loss_scale.initial_power
loss_scale_window count 1000  done: loss_scale.window; DeepSpeed's rule, step for step, of its ZeRO
    stages
hysteresis count 2  done: loss_scale.hysteresis; DeepSpeed's rule, step for step, of its ZeRO stages
consecutive_hysteresis flag false  done: loss_scale.consecutive_hysteresis; DeepSpeed's rule, step
    for step, of its ZeRO stages
min_loss_scale number 1  done: loss_scale.min; an overflow there is an error, as there
fp16_master_weights_and_grads flag false  accepted: masters stay fp32: 4 bytes beside the fp16
    weight
[bf16=bfloat16]
enabled flag false  done: bf16 compute, fp32 masters; neither this nor fp16: fp32
check_grad_overflow=check_overflow flag true  accepted: always: a step whose gradients are not
    finite is skipped and counted
bf16_master_weights_and_grads flag false  accepted: masters stay exact: 2 bytes beside the bf16
    weight, never stored twice
bf16_optimizer_states flag false  done: true: moments are stored in bf16 (optimizer.moments), with
    the built-in rules: lossy
immediate_grad_update flag false  accepted: gradients leave as they are made
auto_cast flag false  refused if true: inputs are not cast for you -> cast them: engine(x.to(dtype))
loss_scale number -; initial_scale_power whole -; loss_scale_window whole -; hysteresis whole -;
    consecutive_hysteresis flag -; min_loss_scale number -  accepted: there is no loss scaling in
    bf16
[torch_autocast]
enabled flag false  refused if true: the engine does not open autocast for you -> remove the section
    and write `with torch.autocast(...):` around engine(...)
dtype text bfloat16; lower_precision_safe_modules names Linear and Conv  accepted: used with
    torch_autocast.enabled only
[]
amp section off  refused if on: apex is not used -> write "bf16": {"enabled": true}
[data_types]
grad_accum_dtype fp32|fp16|bf16 null  accepted: sums over micro-batches are fp32; one micro-batch
    keeps the dtype it was made in
param_dtype fp32|fp16|bf16 null  done: checked: the dtype of the section that is enabled
buffer_dtype text null  refused if given: buffers keep the dtype they have -> leave it out, and cast
    buffers before initialize()
keep_in_fp32_modules names auto  accepted: buffers keep the dtype they have
[optimizer]
type text -  done: the built-in rules (Adam means AdamW unless adam_w_mode is false); others are
    refused with what to write
legacy_fusion flag false  accepted: there is one path
[optimizer.params]
lr number 1e-3 (Adagrad 1e-2)  done: with torch's meaning
betas pair [0.9, 0.999]  done: Adam, AdamW, Lion; Lion starts from DeepSpeed's
eps number 1e-8 (Adagrad 1e-10)  done: with torch's meaning
weight_decay number 0 (torch_adam: 0.01)  done: starts from DeepSpeed's 0
momentum number 0; dampening number 0; nesterov flag false  done: SGD
lr_decay number 0; initial_accumulator_value number 0  done: Adagrad
maximize flag false  done: with torch's meaning
adam_w_mode flag true  done: false makes Adam's decay L2; AdamW stays AdamW
torch_adam flag false  done: weight_decay then starts from torch's own default
fp32_optimizer_states flag true  done: false: moments are stored in bf16 (optimizer.moments): lossy
max_grad_norm number -  done: taken as gradient_clipping, if that is not given otherwise (DeepSpeed
    refuses it)
bias_correction flag true  refused if false: Adam's moments are always corrected here -> leave it
    out
amsgrad flag false  refused if true: no kernel here keeps the largest second moment -> remove the
    section and write initialize(optimizer=lambda groups: torch.optim.AdamW(groups, lr=...,
    amsgrad=True))
fused flag -; foreach flag -; capturable flag -; differentiable flag -; set_grad_none flag -
    accepted: how a step is carried out; ours is always fused
[scheduler]
type text -  done: LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR, with DeepSpeed's
    values, or a class of torch.optim.lr_scheduler
[scheduler.params]
warmup_min_lr numbers 0; warmup_max_lr numbers optimizer's (WarmupDecayLR 1e-3); warmup_num_steps
    count 1000  done: DeepSpeed's values, step for step
warmup_type log|linear log  done: others are errors
total_num_steps count -  done: WarmupDecayLR, WarmupCosineLR
warmup_min_ratio number 0; cos_min_ratio number 1e-4  done: WarmupCosineLR
lr_range_test_min_lr numbers 1e-3; lr_range_test_step_size count 2000; lr_range_test_step_rate
    number 1.0; lr_range_test_staircase flag false; cycle_min_lr numbers -; cycle_max_lr numbers -;
    cycle_first_step_size count 2000; cycle_second_step_size whole as the first;
    cycle_first_stair_count whole 0; cycle_second_stair_count whole as the first; decay_step_size
    whole 0; decay_lr_rate number 0  done: DeepSpeed's values, step for step
cycle_momentum flag true  done: the first beta; the second becomes 0.99, as there
cycle_min_mom numbers 0.8; cycle_max_mom numbers 0.9; decay_mom_rate number 0; last_batch_iteration
    signed -1  done: DeepSpeed's values, step for step
[zero_optimization]
stage whole 0  done: 0 to 3 (true: 1); offload works at any stage
sub_group_size count 1e9  done: upper bound of chunk_size; 1 Mi elements satisfy it
stage3_prefetch_bucket_size=prefetch_bucket_size whole 5e7  done: the plan looks 2 units ahead:
    fewer would be slower, more take room; 0: look_ahead 0
stage3_param_persistence_threshold=param_persistence_threshold whole 1e5;
    stage3_model_persistence_threshold=model_persistence_threshold whole none  accepted: small
    tensors travel with their unit
stage3_max_live_parameters=max_live_parameters whole 1e9  done: below 1e9: hints.live_parameters, a
    bound on slots, met as far as goes; else no bound
stage3_max_reuse_distance=max_reuse_distance whole 1e9  accepted: kept within budget.device by the
    plan
stage3_gather_16bit_weights_on_model_save=gather_16bit_weights_on_model_save=
    stage3_gather_fp16_weights_on_model_save flag false  accepted: engine.save_weights() always
    writes whole tensors
stage3_module_granularity_threshold=module_granularity_threshold whole 0  accepted: the model is cut
    by blocks; initialize(units=...) cuts it otherwise
[zero_optimization.leaf_module]
classes names Hugging Face's MoE blocks; names names []; name_suffixes names []  accepted: weights
    are fetched when they are used, in any order
[zero_optimization]
stage3_use_all_reduce_for_fetch_params=use_all_reduce_for_fetch_params flag false;
    stage3_allgather_sequential=allgather_sequential flag false; allgather_partitions flag true;
    allgather_bucket_size whole 5e8; reduce_scatter flag true; reduce_bucket_size whole 5e8;
    use_multi_rank_bucket_allreduce flag true; round_robin_gradients flag false;
    mics_hierarchical_params_gather flag false  accepted: there is one process: nothing is gathered
    or reduced
overlap_comm flag stage 3: true  accepted: copies always overlap with compute
contiguous_gradients flag true  accepted: a unit's gradients are one flat range
compute_grad_norm flag true  accepted: always computed, as gradients leave
parameter_alignment flag false  accepted: tensors are always aligned
load_from_fp32_weights flag true  accepted: masters come back as they were saved
elastic_checkpoint flag false  accepted: checkpoints hold whole tensors by name
legacy_stage1 flag false  accepted: there is one path
grad_hooks flag true  accepted: gradients leave by hooks
cpu_offload flag null  done: true means offload_optimizer: {"device": "cpu"}
cpu_offload_param=cpu_offload_params flag null  done: true means offload_param: {"device": "cpu"}
cpu_offload_use_pin_memory flag null  accepted: memory that a GPU copies from is page-locked where
    the system allows it
ignore_unused_parameters flag true  refused if false: parameters without a gradient are left alone,
    not reported -> leave it out
memory_efficient_linear flag true; override_module_apply flag true  accepted: torch's functions are
    never replaced
pipeline_loading_checkpoint flag false  accepted: loading is a stream already
enable_sanity_checks flag false  accepted: state is always checked
log_trace_cache_warnings flag false  accepted: an order that surprises is counted:
    StepReport.surprises
save_muon_momentum_buffer_in_memory flag false  accepted: there is no Muon here
zero_hpz_partition_size whole 1  refused if above 1: it is ZeRO++'s, for several GPUs -> leave it
    out: there is one process
zero_quantized_weights flag false  refused if true: it is ZeRO++'s, for several GPUs -> leave it out
zero_quantized_nontrainable_weights flag false  refused if true: frozen weights rest in the dtype
    they have -> leave it out, or load frozen weights that are quantized
zero_quantized_gradients flag false  refused if true: it is ZeRO++'s, for several GPUs -> leave it
    out
zeropp_loco_param section off  refused if on: it is ZeRO++'s, for several GPUs -> leave it out
mics_shard_size signed -1  refused if above 1: MiCS shards over several GPUs -> leave it out: there
    is one process
zenflow section off  refused if on: it updates some weights late, which changes the numbers -> leave
    it out: exact updates overlap with compute here
[zero_optimization.offload_param]
device none|cpu|nvme none  done: homes.weights: none = device, cpu = host, nvme = disk; works at any
    stage. Without the section the plan decides
nvme_path paths -  done: nvme_path; several are striped
pin_memory flag true  accepted: memory that a GPU copies from is page-locked, exactly as much as is
    used
buffer_count whole 5; buffer_size whole 1e8  accepted: buffers are sized from the model, and counted
    in the plan
max_in_cpu whole 1e9  done: with nvme: hints.weights_in_ram, so many weights stay in RAM if
    budget.host has room; not given: none. Without device the plan fills RAM first
[zero_optimization.offload_optimizer]
device none|cpu|nvme none  done: homes.moments: none = device, cpu = host, nvme = disk; works at any
    stage. Gradients rest where the plan puts them
nvme_path paths -  done: nvme_path; several are striped
pin_memory flag true  accepted: memory that a GPU copies from is page-locked, exactly as much as is
    used
buffer_count whole 4; buffer_size whole -  accepted: buffers are sized from the model, and counted
    in the plan
pipeline flag false; pipeline_read flag false; pipeline_write flag false  accepted: reads, updates
    and writes always overlap
fast_init flag false  accepted: state is written once, tensor by tensor
ratio share 1.0  done: with cpu: 0 keeps moments on the GPU, a share leaves them to the plan
super_offload flag false  accepted: exact updates overlap with compute on any GPU
cpuadam_cores_perc share 0.8  accepted: all CPUs of this process update; "infinity": {"cpu":
    {"num_threads": N}} limits
[aio]
block_size count 1048576  done: io.block_size, a multiple of 4096
queue_depth count 8  done: io.queue_depth
intra_op_parallelism=thread_count count 1  done: io.num_threads, not below ours: a thread there
    queues requests, here it carries one
single_submit flag false; overlap_events flag true  accepted: requests are queued and awaited in any
    order
use_gds flag false  refused if true: GPUDirect storage is not built -> leave it out: reads land in
    page-locked RAM
[activation_checkpointing]
cpu_checkpointing flag false  accepted: acts there only through deepspeed.checkpointing; here:
    activations.offload: host
partition_activations flag false; contiguous_memory_optimization flag false; number_checkpoints
    whole null; synchronize_checkpoint_boundary flag false; profile flag false  accepted: acts there
    only through deepspeed.checkpointing; use torch.utils.checkpoint
[checkpoint]
tag_validation warn|ignore|fail Warn  accepted: there is one process: tags cannot differ
load_universal flag false  refused if true: universal checkpoints are not read -> leave it out;
    `infinity checkpoint import-deepspeed` reads ZeRO 1, 2 and 3
use_node_local_storage flag false  accepted: there is one machine
checkpoint_serialization flag true  accepted: nothing is pickled
[checkpoint.parallel_write]
pipeline_stage flag false  accepted: a checkpoint is streamed, whole tensors by name, and published
    at once
[checkpoint.writer]
type fast|python|mock fast; decoupled flag false; io_buffer_size whole 64 MiB; io_buffer_double flag
    true; io_multiplier count 1; show_statistics flag false; data_parallel replica|socket|machine
    null  accepted: a checkpoint is streamed, whole tensors by name, and published at once
[]
steps_per_print interval null  accepted: the library prints nothing; a journal has a line for each
    step
wall_clock_breakdown flag false  accepted: engine.last_report and the journal have times, bytes and
    stalls of each step
memory_breakdown flag false  accepted: the plan says what each tier holds
dump_state flag false  accepted: a journal begins with the configuration and plan
log_level text null  accepted: the library prints nothing; a journal has a line for each step
disable_python_gc flag false  accepted: the collector is left alone
[timers.throughput]
enabled flag true; synchronized flag true  accepted: engine.last_report and the journal have times,
    bytes and stalls of each step
[csv_monitor]
enabled flag false  done: the journal, JSON lines in output_path/job_name
output_path text ""; job_name text DeepSpeedJobName  done: where the journal lies
[tensorboard]
enabled flag false; output_path text ""; job_name text -  accepted: not written; send
    engine.last_report yourself, or set journal
[wandb]
enabled flag false; group text null; team text null; project text deepspeed  accepted: not written;
    send engine.last_report yourself, or set journal
[comet]
enabled flag false; samples_log_interval count 100; project text null; workspace text null; api_key
    text null; experiment_name text null; experiment_key text null; online flag null; mode text null
    accepted: not written; send engine.last_report yourself, or set journal
[comms_logger]
enabled flag false; verbose flag false; prof_all flag true; debug flag false; prof_ops names []
    accepted: there is one process: no communication to log
[flops_profiler]
enabled flag false; recompute_fwd_factor number 0.0; profile_step whole 1; module_depth signed -1;
    top_modules whole 1; detailed flag true; output_file text null  accepted: not measured;
    torch.utils.flop_counter counts a forward
[compile]
deepcompile flag false  refused if true: DeepSpeed's compiler passes are not built -> leave it out;
    offload_* sections do not need it here
autoep_non_moe flag false  refused if true: there is no AutoEP -> leave it out
free_activation flag false; free_activation_threshold whole 10 MiB; offload_activation flag false;
    offload_activation_pin_memory flag true; offload_opt_states flag false; offload_parameters flag
    false; double_buffer flag true; symmetric_memory flag false; debug_log flag false;
    sync_before_reduce flag false; sync_after_reduce flag false; sync_before_allgather flag false;
    sync_after_allgather flag false; keep_int_input_tensors flag true; keep_all_input_tensors flag
    false; passes names null  accepted: used with compile.deepcompile only
[]
sequence_parallel_size count 1; data_parallel_size count 1  refused if above 1: there is one process
    -> leave it out, and train on one GPU
tensor_parallel section off  refused if a size is above 1: there is one process -> leave it out, and
    train on one GPU
pipeline section off  refused if stages is above 1: there is one process -> leave it out, and train
    on one GPU
expert_parallel section off  refused if on: experts are fetched when they are used, on one GPU ->
    leave it out: any MoE model trains as it is
elasticity section off  refused if on: there is one process -> leave it out, and give the batch
    sizes
autotuning section off  refused if on: nothing is launched to be timed -> leave it out, and ask
    `infinity plan`
hybrid_engine section off  refused if on: there is no inference engine -> leave it out
nebula section off; datastates_ckpt anything off  refused if on: checkpoints are written by
    engine.save_checkpoint() -> leave it out
weight_quantization section off  refused if on: weights are not quantized -> leave it out
compression_training section off; quantize_training section off  refused if on: models are trained
    as they are -> leave it out
eigenvalue section off  refused if on: it serves quantized training, which is not here -> leave it
    out
progressive_layer_drop section off  refused if on: layers are not dropped -> leave it out
sparse_attention section off  refused if on: the model's own attention is used -> leave it out, and
    use a model with sparse attention
random_ltd section off  refused if on: tokens are not dropped -> leave it out
curriculum_learning section off  refused if on: data come as they are passed -> leave it out, and
    order the data yourself
data_efficiency section off  refused if on: data come as they are passed -> leave it out, and sample
    the data yourself
graph_harvesting flag false  accepted: CUDA graphs are left to torch.compile
"""


class Verdict(StrEnum):
    """What becomes of a key."""

    DONE = "done"
    ACCEPTED = "accepted"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Key:
    """A line of the table; a refused key is refused `when` ("if true"), and accepted otherwise."""

    name: str
    kind: str
    default: str
    verdict: Verdict
    note: str
    when: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one key that was given: shown by `infinity plan`, written to the journal."""

    key: str
    given: Any
    verdict: Verdict
    note: str

    def as_dict(self) -> dict[str, Any]:
        """JSON-able: what JSON has no word for is text."""
        return {
            "key": self.key,
            "given": _plain(self.given),
            "verdict": str(self.verdict),
            "note": self.note,
        }


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if not isinstance(value, bool) and isinstance(value, numbers.Integral):
        return int(value)  # NumPy's too
    return value if value is None or isinstance(value, bool | float | str) else str(value)


def _parse(text: str) -> tuple[dict[str, Key], dict[str, str]]:
    """The keys by name, and the present names of keys and sections by their old ones."""
    keys: dict[str, Key] = {}
    olds: dict[str, str] = {}
    section = ""
    for line in text.strip().replace("=\n    ", "=").replace("\n    ", " ").splitlines():
        if line.startswith("["):
            section, *others = line[1:-1].split("=")
            olds |= dict.fromkeys(others, section)
            continue
        names, verdict, when, told = _LINE.fullmatch(line).groups()  # type: ignore[union-attr]
        note, _, remedy = told.partition(" -> ")
        for entry in names.split("; "):
            synonyms, kind, default = entry.split(" ", 2)
            name, *others = (f"{section}.{name}".lstrip(".") for name in synonyms.split("="))
            assert name not in keys, f"{name} stands in the table twice"
            keys[name] = Key(name, kind, default, Verdict(verdict), note, when or "", remedy)
            olds |= dict.fromkeys(others, name)
    return keys, olds


_LINE = re.compile("(.*?) +(done|accepted|refused)(?: (if [^:]*))?: (.*)")
KEYS, OLD_NAMES = _parse(_TABLE)
# Sections whose keys depend on `type`: what is not in the table is judged there.
OPEN = ("optimizer.params", "scheduler.params")
SECTIONS = frozenset(
    ".".join(parts[:depth])
    for parts in (name.split(".") for name in KEYS)
    for depth in range(1, len(parts))
)


def names_in(section: str) -> list[str]:
    """The names that may stand in a section ("" is the top), old ones last."""
    prefix = f"{section}." if section else ""
    below = [n.removeprefix(prefix) for n in (*KEYS, *OLD_NAMES) if n.startswith(prefix)]
    return list(dict.fromkeys(name.split(".")[0] for name in below))


def as_markdown() -> str:
    """The table as it stands in docs/migrating-from-deepspeed.md."""
    lines = ["| key | there | here | note |", "| --- | --- | --- | --- |"]
    for key in KEYS.values():
        verdict = f"**refused** {key.when}" if key.when else str(key.verdict)
        note = f"{key.note}: {key.remedy}" if key.remedy else key.note
        olds = [f"`{old.rpartition('.')[2]}`" for old, new in OLD_NAMES.items() if new == key.name]
        note += f" (also: {', '.join(olds)})" if olds else ""
        cells = (f"`{key.name}`", key.default, verdict, note)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


# --- when a key is refused -----------------------------------------------------------------------


def _switched_on(value: Any) -> bool:
    """Whether a section is on: its `enabled`, else any `enabled` inside, else that it is there."""
    if not isinstance(value, Mapping):
        return bool(value)
    switches = [value["enabled"] is True] if "enabled" in value else list(_switches(value))
    return any(switches) if switches else bool(value)


def _switches(value: Mapping[str, Any]) -> Iterator[bool]:
    for name, part in value.items():
        if name == "enabled":
            yield part is True
        elif isinstance(part, Mapping):
            yield from _switches(part)


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


REFUSED_IF: dict[str, Callable[[Any], bool]] = {
    "if true": bool,
    "if given": bool,
    "if false": lambda value: not value,
    "if above 1": lambda value: bool(value > 1),
    "if on": _switched_on,
    "if a size is above 1": _several_ways,
    "if stages is above 1": _has_stages,
}

# --- kinds of values -----------------------------------------------------------------------------


def read_value(kind: str, value: Any) -> Any:
    """The value as Python wants it; raises `ValueError` for one of another kind."""
    if "|" not in kind:
        return _READ[kind](value)
    words = kind.split("|")  # in upper or lower case
    if isinstance(value, str) and value.lower() in words:
        return value.lower()
    raise ValueError(f"should be one of {', '.join(map(repr, words))}")


def _of(types: Any, words: str) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if isinstance(value, types):
            return value
        raise ValueError(f"should be {words}")

    return read


def _number(value: Any) -> float:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise ValueError("should be a number") from None
    real = not isinstance(value, bool) and isinstance(value, numbers.Real)  # NumPy's too
    if not real or not math.isfinite(value):
        raise ValueError("should be a number")
    return float(value)


def _whole(least: int | None) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        integral = not isinstance(value, bool) and isinstance(value, numbers.Integral)
        number = value if integral else _number(value)
        if int(number) != number:
            raise ValueError("should be a whole number")
        if least is not None and number < least:
            raise ValueError(f"should be {least} or more")
        return int(number)

    return read


def _interval(value: Any) -> float:
    return math.inf if value in (math.inf, "Infinity", "inf") else _whole(0)(value)


def _numbers(value: Any) -> Any:
    return [_number(v) for v in value] if isinstance(value, list | tuple) else _number(value)


def _pair(value: Any) -> Any:
    if isinstance(value, list | tuple) and len(value) == 2:
        return _numbers(value)
    raise ValueError("should be two numbers")


def _names(value: Any) -> tuple[str, ...]:
    parts = (value,) if isinstance(value, str) else value
    if isinstance(parts, list | tuple) and all(isinstance(part, str) for part in parts):
        return tuple(parts)
    raise ValueError("should be a list of texts")


def _paths(value: Any) -> list[str]:
    paths = value if isinstance(value, list | tuple) else [value]
    if paths and all(isinstance(path, str | os.PathLike) for path in paths):
        texts = [os.fspath(path) for path in paths]
        if all(isinstance(text, str) for text in texts):
            return texts
    raise ValueError("should be a path, or a list of paths")


def _share(value: Any) -> float:
    number = _number(value)
    if not 0 <= number <= 1:
        raise ValueError("should be between 0 and 1")
    return number


_READ: dict[str, Callable[[Any], Any]] = {
    "flag": _of(bool, "true or false"),
    "number": _number,
    "numbers": _numbers,  # or one per group
    "pair": _pair,
    "share": _share,
    "whole": _whole(0),
    "count": _whole(1),
    "signed": _whole(None),
    "interval": _interval,
    "text": _of(str, "text"),
    "names": _names,
    "paths": _paths,
    "section": _of(Mapping | bool, "a section of keys and values"),
    "anything": lambda value: value,
}

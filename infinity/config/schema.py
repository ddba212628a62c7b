"""Configuration schema: strict, with all defaults; all mistakes are reported together.

It depends neither on the machine nor on a model. The plan derives values for `None` and "auto", and
reports them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from infinity.config.explain import explain
from infinity.config.fields import (
    Integer,
    Number,
    Paths,
    Section,
    SinglePath,
    Size,
    Weight,
    as_path,
    as_tuple,
)
from infinity.config.optimizer import FrozenName, LossScaleConfig, OptimizerConfig, SchedulerConfig
from infinity.config.renamed import current, migrate_keys
from infinity.config.source import apply_overrides, read_source
from infinity.errors import ConfigError

Recompute: TypeAlias = int | Literal["all"]
Offload: TypeAlias = Literal["none", "host", "disk"]


def checkpoint_setting(recompute: Recompute) -> Literal["none", "units"] | int:
    """Return the `ActivationsConfig.checkpoint` that results in this `recompute`."""
    if recompute == "all":
        return "units"
    return recompute or "none"


class ActivationsConfig(Section):
    """Recomputation, offload and slicing of activations.

    Sizes are in bytes. `host` and `disk` are derived from `tokens` if they are not given.
    """

    checkpoint: Literal["none", "units"] | int = "none"
    """units: blocks save only their inputs and are recomputed in backward; N: the first N do."""
    offload: Offload = "none"
    """Tier of the inputs of recomputed blocks until backward; disk uses RAM first."""
    tokens: int | None = Field(default=None, ge=1)
    """Most tokens of a micro-batch that the loop or the Trainer passes (`infinity train` sets it):
    memory is reserved for its activations, and `host` and `disk` are derived from it. In
    `InfinityTrainer` the plan then splits the batches of a step into micro-batches.
    """
    host: Size | None = None
    """Pinned RAM reserved for these inputs."""
    disk: Size | None = None
    """Scratch space on disk reserved for these inputs."""
    min_bytes: Size = 1 << 20
    """Smaller tensors are not offloaded."""
    slices: int = Field(default=1, ge=1)
    """Slices of a batch in each block, whose weights are fetched once for all slices. `infinity
    plan` finds the fastest number.
    """
    logits: Literal["auto", "full", "chunked"] = "auto"
    """chunked: cross entropy computes the head's logits 1024 tokens at a time. auto: chunked for
    causal language models in `infinity train`, `InfinityTrainer` and `from_pretrained`, else full.
    """

    @property
    def recompute(self) -> Recompute:
        """Number of blocks, from the first, that are recomputed in backward."""
        if isinstance(self.checkpoint, int):
            return self.checkpoint
        return "all" if self.checkpoint == "units" else 0

    @field_validator("checkpoint")
    @classmethod
    def _check_checkpoint(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 0:
            raise ValueError(f"should be none, units, or a number of blocks, got {value}")
        return value

    @field_validator("host", "disk")
    @classmethod
    def _check_is_used(cls, value: int | None, info: ValidationInfo) -> int | None:
        offload = info.data.get("offload")
        if value is not None and offload == "none":
            raise ValueError("is for activations.offload: host or disk")
        if value is not None and info.field_name == "disk" and offload == "host":
            raise ValueError("is for activations.offload: disk")
        return value


TierChoice: TypeAlias = Literal["auto", "device", "host", "disk"]

# Elements; the optimizer processes a chunk in blocks of this size.
CHUNK_MULTIPLE = 2048
# Bytes; the largest block size that O_DIRECT requires on current drives.
BLOCK_MULTIPLE = 4096
_BOOLEAN_TEXTS = ("yes", "no", "on", "off", "true", "false", "always")  # probably not a path


def _parse_resume(value: Any) -> Any:
    if value in ("never", "auto"):
        return value
    if not isinstance(value, str | os.PathLike) or str(value).lower() in _BOOLEAN_TEXTS:
        raise ValueError(f'should be "auto", "never", or the directory of a run, got {value!r}')
    return as_path(value)


def _parse_trace_steps(value: Any) -> Any:
    pair = (1, value) if type(value) is int else as_tuple(value)
    is_int_pair = isinstance(pair, tuple) and len(pair) == 2 and all(type(n) is int for n in pair)
    if not is_int_pair or not 1 <= pair[0] <= pair[1]:
        raise ValueError(
            f"should be a number of steps or [first, last], counted from 1, got {value!r}"
        )
    return pair


class PlacementConfig(Section):
    """Tier of each kind of state; residuals are stored with the moments.

    A tier instead of the section applies to all three kinds.
    """

    weights: TierChoice = "auto"
    """Tier of the weights; "auto" fills the device, then RAM, then disk, by cost. `placement: disk`
    sets weights, optimizer_state and gradients.
    """
    optimizer_state: TierChoice = "auto"
    """Tier of moments and fp32 residuals of the masters."""
    gradients: TierChoice = "auto"
    """Tier of the gradients."""
    reshard_after_forward: bool | None = None
    """Several ranks. true: weights are gathered at each use (ZeRO-3). false: gathered weights stay
    on the device until they are updated (ZeRO-2). null: they stay if device memory permits.
    """
    shared: bool | None = None
    """Several ranks. true: weights in RAM are stored once per node, in memory that its ranks map,
    and nothing is gathered; several nodes exchange updated values once per step. false: each rank
    stores its shard. null: the faster one as predicted by the plan.
    """

    @model_validator(mode="before")
    @classmethod
    def _expand_tier(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if value not in get_args(TierChoice):
            known = ", ".join(get_args(TierChoice))
            raise ValueError(f"should be one of {known}, or a section with keys, got {value!r}")
        return dict.fromkeys(("weights", "optimizer_state", "gradients"), value)


class FrozenConfig(Section):
    """Storage of frozen weights: the base model of adapters (LoRA) may be quantized."""

    format: FrozenName = "as_is"
    """Format in which matrices of frozen `nn.Linear` layers and stacks of experts are stored and
    transferred; they are dequantized to compute. All but as_is are lossy. nf4, nf4_double and int8
    are those of bitsandbytes; mxfp4 (experts only) and fp8 keep the bytes of files that have them.
    """
    keep: Annotated[tuple[str, ...], BeforeValidator(as_tuple)] = (
        "lm_head", "embed_out", "head", "score", "classifier", "lora_A", "lora_B",
    )  # fmt: skip
    """Components of dotted names of modules and parameters that are not quantized."""


class BudgetConfig(Section):
    """Hard limits per tier in bytes; `None` is derived from the machine."""

    device: Size | None = None
    """Memory of one GPU, as "24GiB"; null: most of the free memory."""
    host: Size | None = None
    """RAM of the machine, for all ranks. null: 80 % of the free RAM, within the cgroup's
    limit. On a virtual machine that gets more RAM as it uses it, set `INFINITY_HOST_RAM=128GiB` in
    the environment.
    """
    disk: Size | None = None
    """Space on the drives of `nvme_path`; null: the free space."""

    @field_validator("*", mode="before")
    @classmethod
    def _check_has_unit(cls, value: Any) -> Any:
        text = str(value).strip()
        if text.isdigit() and 0 < int(text) < 1 << 16:
            raise ValueError(f"is {text} bytes; give a unit, as in {text}GiB")
        return value


class HintsConfig(Section):
    """Numbers of parameters that the plan respects if possible; it never fails because of one.

    DeepSpeed's `stage3_max_live_parameters` and `max_in_cpu`, see plan/hints.py.
    """

    live_parameters: Integer | None = Field(default=None, ge=0)
    """Largest number of parameters in slots on the device."""
    max_params_in_cpu: Integer | None = Field(default=None, ge=0)
    """Largest number of weights of the disk tier to store in RAM instead, within budget.host."""


class IoConfig(Section):
    """Reads and writes of the disk tier."""

    backend: Literal["auto", "io_uring", "threads"] = "auto"
    """Interface to the kernel; "auto" is io_uring where the kernel allows it."""
    block_size: Annotated[Size, Field(gt=0, le=2**30, multiple_of=BLOCK_MULTIPLE)] = 2**20
    """Bytes per request; 1 MiB at depth 4 to 16 was the fastest on all measured drives."""
    queue_depth: int = Field(default=8, ge=1, le=256)
    """Requests in flight on each path."""
    num_threads: int = Field(default=4, ge=1, le=64)
    """Threads of the threads backend; four reach the speed of a disk."""
    weights: Annotated[tuple[Weight, ...] | None, BeforeValidator(as_tuple)] = None
    """Relative speeds of the paths in nvme_path, in their order; null: measured at start."""
    verify: bool | Literal["auto"] = "auto"
    """Store a CRC32C of every page on disk in RAM (0.1 % of the size on disk), and check it on
    every read; "auto" is on for durable runs, so that a run resumes only from the bytes that were
    written.
    """
    timeout_s: Number = Field(default=120.0, ge=0)
    """Seconds after which waiting for a request in the kernel is an error that lists the
    outstanding requests. 0 = no limit.
    """


class CpuConfig(Section):
    """CPU use of the optimizer."""

    num_threads: int = Field(default=0, ge=0, le=1024)
    """Threads of the kernels. 0 = all CPUs of this process; with a GPU all but three, which launch
    its work.
    """
    isa: Literal["auto", "baseline", "avx2", "avx512", "neon"] = "auto"
    """Instruction set of the optimizer's kernels; "auto" is the widest of the processor."""


class Config(Section):
    """Configuration of an engine. `load_config` creates it and explains mistakes."""

    nvme_path: Paths = ()
    """Directory, or list of directories, on the drives that may store state; several are striped.
    The only required key of a run that uses the disk tier.
    """
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Dtype of the compute weights; masters are fp32. fp16 has a loss scale, dynamic by default."""
    cast_inputs: bool = False
    """bf16 and fp16: cast floating-point inputs to the precision, like DeepSpeed's auto_cast."""
    autocast: bool = False
    """fp32: run engine calls under `torch.autocast` in bf16, like DeepSpeed's torch_autocast."""
    loss_scale: LossScaleConfig = LossScaleConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: SchedulerConfig | None = None
    gradient_clipping: Number = Field(default=1.0, ge=0)
    """Maximum global norm of the gradients; 0 = off."""
    gradient_accumulation_steps: int = Field(default=1, ge=1)
    """Micro-batches per step; their gradients are summed in fp32."""
    placement: PlacementConfig = PlacementConfig()
    frozen: FrozenConfig = FrozenConfig()
    update: Literal["auto", "cpu", "device"] = "auto"
    """Processor that updates state stored off the device: the CPU, or the device, through which the
    state is streamed; "auto" is the one, or both, with the shorter predicted step. Results are
    bitwise equal.
    """
    budget: BudgetConfig = BudgetConfig()
    hints: HintsConfig = HintsConfig()
    io: IoConfig = IoConfig()
    chunk_size: int | Literal["auto"] = "auto"
    """Elements that are updated and transferred at once; fewer take less RAM. "auto" is 1 Mi, and
    four chunks at once for units without state on disk.
    """
    prefetch_units: int = Field(default=2, ge=0)
    """Units fetched before they are needed."""
    experts_per_unit: int | Literal["auto"] = "auto"
    """Experts per unit of a layer, where a module has them stacked; "auto" limits a unit to 512
    MiB, for models with very many experts to 1 GiB. `infinity plan`, `infinity train` and
    `InfinityTrainer` choose another number if it is faster. Results are bitwise equal.
    """
    seed: int | None = None
    """Seed of the torch generator on all ranks. For separate dropout a rank may seed again after
    `initialize`, unless ranks must draw the same numbers (the order of an IterableDataset, sampling
    in `generate`).
    """
    cpu: CpuConfig = CpuConfig()
    activations: ActivationsConfig = ActivationsConfig()
    compile: bool = False
    """Apply `torch.compile` to the forward of every block; weights stay offloaded."""
    step_log: SinglePath | None = None
    """File that gets one JSON line per step."""
    trace: SinglePath | None = None
    """File that gets a timeline of training in Chrome's format, for ui.perfetto.dev and
    `infinity trace`, which names the bottleneck.
    """
    trace_steps: Annotated[
        tuple[int, int],
        BeforeValidator(_parse_trace_steps, json_schema_input_type=int | tuple[int, int]),
    ] = (1, 100)
    """Steps of this run to trace, [first, last], counted from 1; a number is the last."""
    durable: bool = False
    """State on disk is the checkpoint: updates are out of place, and steps are committed."""
    commit_every: int | Literal["auto"] = "auto"
    """Steps from one commit to the next. "auto" is every step if all state is on disk; if some is
    in RAM, every k-th step, so that commits cost at most 5 %.
    """
    resume: Annotated[Literal["never", "auto"] | Path, BeforeValidator(_parse_resume)] = "never"
    """"auto" resumes from the last commit of the durable run under `nvme_path` that fits the model,
    and raises if there are signs of one that cannot be resumed; or the directory of a run.
    """

    @field_validator("loss_scale")
    @classmethod
    def _check_loss_scale(cls, value: LossScaleConfig, info: ValidationInfo) -> LossScaleConfig:
        precision = info.data.get("precision")
        if value.model_fields_set and precision not in (None, "fp16"):
            raise ValueError(f"is for precision: fp16; nothing is scaled in {precision}")
        return value

    @field_validator("autocast")
    @classmethod
    def _check_autocast(cls, value: bool, info: ValidationInfo) -> bool:
        precision = info.data.get("precision")
        if value and precision not in (None, "fp32"):
            raise ValueError(f"is for precision: fp32; it is {precision}, which needs no casts")
        return value

    @field_validator("durable")
    @classmethod
    def _check_durable(cls, value: bool, info: ValidationInfo) -> bool:
        activations = info.data.get("activations")
        if value and activations is not None and activations.offload == "disk":
            raise ValueError("true: activations.offload must be host or none, files are kept")
        return value

    @field_validator("commit_every", "experts_per_unit", mode="before")
    @classmethod
    def _check_positive(cls, value: Any, info: ValidationInfo) -> Any:
        if value != "auto" and not (type(value) is int and value > 0):
            unit = "steps" if info.field_name == "commit_every" else "experts"
            raise ValueError(f'should be "auto" or a number of {unit}, 1 or more, got {value!r}')
        return value

    @field_validator("commit_every", "resume")
    @classmethod
    def _check_needs_durable(cls, value: Any, info: ValidationInfo) -> Any:
        default = cls.model_fields[info.field_name or ""].default
        if value != default and info.data.get("durable") is False:
            raise ValueError(f"{value} needs durable: true")
        return value

    @field_validator("chunk_size", mode="before")
    @classmethod
    def _check_chunk_size(cls, value: Any) -> Any:
        is_int = isinstance(value, int) and not isinstance(value, bool)
        if value != "auto" and not (is_int and value > 0 and value % CHUNK_MULTIPLE == 0):
            problem = f'should be "auto" or a positive multiple of {CHUNK_MULTIPLE} elements'
            raise ValueError(f"{problem}, got {value!r}")
        return value

    @field_validator("io")
    @classmethod
    def _check_io_weights(cls, io: IoConfig, info: ValidationInfo) -> IoConfig:
        paths = info.data.get("nvme_path")
        if io.weights is not None and paths is not None and len(io.weights) != len(paths):
            given, needed = len(io.weights), len(paths)
            raise ValueError(f"weights needs one number per nvme_path: {given} for {needed}")
        return io

    @field_validator("placement", "activations", "durable")
    @classmethod
    def _check_nvme_path(cls, value: Any, info: ValidationInfo) -> Any:
        problem = ""
        if isinstance(value, PlacementConfig):
            on_disk = [name for name, tier in value if tier == "disk"]
            problem = f"{', '.join(on_disk)} on disk: nvme_path must be given" if on_disk else ""
        elif isinstance(value, ActivationsConfig):
            problem = "offload: disk: nvme_path must be given" if value.offload == "disk" else ""
        elif value:
            problem = "true: nvme_path must be given, state is kept there"
        if problem and info.data.get("nvme_path") == ():
            raise ValueError(problem)
        return value

    def with_chunked_logits(self) -> Config:
        """Return a copy with `activations.logits` chunked unless another value was chosen."""
        if self.activations.logits != "auto":
            return self
        chunked = self.activations.model_copy(update={"logits": "chunked"})
        return self.model_copy(update={"activations": chunked})

    def resolved(self) -> dict[str, dict[str, Any]]:
        """Return every value by dotted name, JSON-serializable, with its origin.

        For example `{"io.queue_depth": {"value": 16, "origin": "given"}, ...}`; the origin is
        "given" or "default". Sizes are in bytes.
        """
        return dict(entries(self, ""))


# Top-level names that only a DeepSpeed configuration has; tests compare them with its keys.
_DEEPSPEED_KEYS = """
    activation_checkpointing aio allgather_size amp autotuning bf16 bfloat16 checkpoint comet
    comms_logger communication_data_type compression_training csv_monitor curriculum_learning
    data_efficiency data_parallel_size data_types dataloader_drop_last datastates_ckpt
    disable_allgather disable_python_gc dump_state eigenvalue elasticity expert_parallel
    flops_profiler fp16 gradient_allreduce_op gradient_predivide_factor graph_harvesting
    hybrid_engine log_level managed_gradient_accumulation memory_breakdown nebula pipeline
    prescale_gradients progressive_layer_drop quantize_training random_ltd
    seq_parallel_communication_data_type sequence_parallel_size sparse_attention sparse_gradients
    steps_per_print tensor_parallel tensorboard timers torch_autocast train_batch_size
    train_micro_batch_size_per_gpu use_data_before_expert_parallelism vocabulary_size
    wall_clock_breakdown wandb weight_quantization zero_allow_untested_optimizer
    zero_force_ds_cpu_optimizer zero_optimization
    """
DEEPSPEED_KEYS = frozenset(_DEEPSPEED_KEYS.split())


def entries(section: BaseModel, prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the values of a section and its subsections by dotted name, as in `Config.resolved`."""
    dumped = section.model_dump(mode="json")
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(section, OptimizerConfig) and value is None:
            continue  # its rule lacks the key
        if isinstance(value, BaseModel):
            yield from entries(value, f"{prefix}{name}.")
        else:
            origin = "given" if name in section.model_fields_set else "default"
            yield f"{prefix}{name}", {"value": dumped[name], "origin": origin}


def load_config(
    source: Mapping[str, Any] | str | os.PathLike[str] | Config, overrides: Iterable[str] = ()
) -> Config:
    """Read the configuration of an engine.

    Args:
        source: A mapping, the path of a YAML or JSON file, or a `Config`.
        overrides: Texts ``"section.key=value"``, which win over the source.

    Returns:
        The validated configuration.

    Raises:
        ConfigError: Keys are unknown or values invalid; all are listed by their dotted names.
    """
    if isinstance(source, Config):
        source = source.model_dump(exclude_unset=True)
    where, raw = read_source(source)
    merged = apply_overrides(migrate_keys(raw), overrides, current)
    try:
        return Config.model_validate(merged)
    except ValidationError as error:
        foreign = [name for name in merged if name in DEEPSPEED_KEYS]
        raise ConfigError(explain(Config, where, error, foreign)) from None

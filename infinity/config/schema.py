"""The configuration: one strict schema with all defaults; all mistakes are reported together.

Nothing here looks at the machine or at a model. `None` and "auto" mean "derived later"; the plan
derives them and says so.
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
    _BARE_BYTES,
    Integer,
    Number,
    OnePath,
    Paths,
    Section,
    Size,
    Weight,
    as_pair,
    as_path,
)
from infinity.config.optimizer import FrozenName, LossScaleConfig, OptimizerConfig, SchedulerConfig
from infinity.config.renamed import current, with_current_names
from infinity.config.source import apply_overrides, read_source
from infinity.errors import ConfigError

Recompute: TypeAlias = int | Literal["all"]
Offload: TypeAlias = Literal["none", "host", "disk"]


def checkpoint_of(recompute: Recompute) -> Literal["none", "units"] | int:
    """`ActivationsConfig.checkpoint` for what its `recompute` is to be."""
    if recompute == "all":
        return "units"
    return recompute or "none"


class ActivationsConfig(Section):
    """Recomputation and slices belong to the computation; where kept tensors wait does not.

    Sizes are bytes. `host` and `disk` follow from `tokens` if they are left out.
    """

    checkpoint: Literal["none", "units"] | int = "none"
    """units: blocks keep only their inputs, and run again in backward; a number: the first ones."""
    offload: Offload = "none"
    """Where inputs of recomputed blocks wait for backward, beyond the device: disk is RAM first."""
    tokens: int | None = Field(default=None, ge=1)
    """The most tokens of one micro-batch, as the loop or the Trainer hands it over (`infinity
    train` knows them): memory is kept for its activations, and the sizes of this section follow.
    In `InfinityTrainer` the plan then chooses how the batches of a step pass the model.
    """
    host: Size | None = None
    """Pinned RAM that is reserved for these inputs."""
    disk: Size | None = None
    """Scratch space on disk that is reserved for these inputs."""
    min_bytes: Size = 1 << 20
    """Smaller tensors stay where they are."""
    slices: int = Field(default=1, ge=1)
    """Slices of a batch in a block, whose weights are fetched once for all slices. `infinity plan`
    finds the fastest number.
    """
    logits: Literal["auto", "full", "chunked"] = "auto"
    """chunked: cross entropy makes the head's logits 1024 tokens at a time. auto is chunked for
    causal language models in `infinity train`, `InfinityTrainer` and `from_pretrained`, else full.
    """

    @property
    def recompute(self) -> Recompute:
        """How many blocks, from the first, run again in backward."""
        if isinstance(self.checkpoint, int):
            return self.checkpoint
        return "all" if self.checkpoint == "units" else 0

    @field_validator("checkpoint")
    @classmethod
    def _counts(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 0:
            raise ValueError(f"should be none, units, or a number of blocks, got {value}")
        return value

    @field_validator("host", "disk")
    @classmethod
    def _is_used(cls, value: int | None, info: ValidationInfo) -> int | None:
        offload = info.data.get("offload")
        if value is not None and offload == "none":
            raise ValueError("is for activations.offload: host or disk")
        if value is not None and info.field_name == "disk" and offload == "host":
            raise ValueError("is for activations.offload: disk")
        return value


TierChoice: TypeAlias = Literal["auto", "device", "host", "disk"]

# Elements; the optimizer works through a chunk in blocks of this many.
CHUNK_MULTIPLE = 2048
# Bytes; the largest block size that O_DIRECT asks for on drives of today.
BLOCK_MULTIPLE = 4096
_SWITCHES = ("yes", "no", "on", "off", "true", "false", "always")  # which no run is called


def _resume(value: Any) -> Any:
    if value in ("never", "auto"):
        return value
    if not isinstance(value, str | os.PathLike) or str(value).lower() in _SWITCHES:
        raise ValueError(f'should be "auto", "never", or the directory of a run, got {value!r}')
    return as_path(value)


def _first_and_last(value: Any) -> Any:
    pair = (1, value) if type(value) is int else as_pair(value)
    is_int_pair = isinstance(pair, tuple) and len(pair) == 2 and all(type(n) is int for n in pair)
    if not is_int_pair or not 1 <= pair[0] <= pair[1]:
        raise ValueError(
            f"should be a number of steps or [first, last], counted from 1, got {value!r}"
        )
    return pair


class PlacementConfig(Section):
    """The tier where each kind of state rests; the residual travels with the moments.

    A tier in the place of the section is that of all three kinds.
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
    on the device until they are updated (ZeRO-2). null: they stay where there is room.
    """
    shared: bool | None = None
    """Several ranks. true: weights in RAM are stored once per node, in memory that its ranks map,
    and nothing is gathered; several nodes exchange updated values once per step. false: each rank
    keeps its shard. null: the faster one by the plan.
    """

    @model_validator(mode="before")
    @classmethod
    def _of_all(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if value not in get_args(TierChoice):
            known = ", ".join(get_args(TierChoice))
            raise ValueError(f"should be one of {known}, or a section with keys, got {value!r}")
        return dict.fromkeys(("weights", "optimizer_state", "gradients"), value)


class FrozenConfig(Section):
    """How weights that are not trained rest: a base under adapters (LoRA) may be quantised."""

    format: FrozenName = "as_is"
    """The format in which matrices of frozen `nn.Linear` layers and stacks of experts rest and
    travel; where they compute they are dequantised. All but as_is are lossy. nf4, nf4_double and
    int8 are bitsandbytes'; mxfp4 (experts alone) and fp8 keep the bytes of files that have them.
    """
    keep: Annotated[tuple[str, ...], BeforeValidator(as_pair)] = (
        "lm_head", "embed_out", "head", "score", "classifier", "lora_A", "lora_B",
    )  # fmt: skip
    """Parts of dotted names of modules and parameters that are not quantized."""


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
    def _has_a_unit(cls, value: Any) -> Any:
        text = str(value).strip()
        if text.isdigit() and 0 < int(text) < _BARE_BYTES:
            raise ValueError(f"is {text} bytes; give a unit, as in {text}GiB")
        return value


class HintsConfig(Section):
    """Numbers of parameters that the plan keeps to where it can; it never fails for one.

    DeepSpeed's `stage3_max_live_parameters` and `max_in_cpu`, see plan/hints.py.
    """

    live_parameters: Integer | None = Field(default=None, ge=0)
    """Most parameters in slots on the device."""
    max_params_in_cpu: Integer | None = Field(default=None, ge=0)
    """Most weights of the disk tier that are kept in RAM instead, within budget.host."""


class IoConfig(Section):
    """How the disk is read and written."""

    backend: Literal["auto", "io_uring", "threads"] = "auto"
    """How requests are made; "auto" is io_uring where the kernel allows it."""
    block_size: Annotated[Size, Field(gt=0, le=2**30, multiple_of=BLOCK_MULTIPLE)] = 2**20
    """Bytes of a request; 1 MiB at depth 4 to 16 was the fastest wherever it was measured."""
    queue_depth: int = Field(default=8, ge=1, le=256)
    """Requests under way on each path."""
    num_threads: int = Field(default=4, ge=1, le=64)
    """Four plain threads reach the disk; used by the threads back end only."""
    weights: Annotated[tuple[Weight, ...] | None, BeforeValidator(as_pair)] = None
    """Relative speeds of the paths in nvme_path, in their order; left out: measured at start."""
    verify: bool | Literal["auto"] = "auto"
    """Keep a CRC32C of every page on disk in RAM (0.1 % of it), and check it on every read; "auto"
    is on for durable runs, so that a run resumes only from the bytes that were written.
    """
    timeout_s: Number = Field(default=120.0, ge=0)
    """Seconds a request may be in the kernel before waiting for it is an error, which lists the
    outstanding requests. 0 = for ever.
    """


class CpuConfig(Section):
    """How the optimizer uses the CPU."""

    num_threads: int = Field(default=0, ge=0, le=1024)
    """0 = all that this process may use; with a GPU all but three, which launch its work."""
    isa: Literal["auto", "baseline", "avx2", "avx512", "neon"] = "auto"
    """Instructions of the optimizer's kernels; "auto" is the widest that the processor has."""


class Config(Section):
    """Configuration of an engine. `load_config` builds it and explains mistakes."""

    nvme_path: Paths = ()
    """A directory, or a list of them, on the drives that state may be stored on; several are
    striped. The only key that a run from disk needs.
    """
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Of the weights that compute; masters are fp32. fp16 has a loss scale, dynamic by default."""
    cast_inputs: bool = False
    """In bf16 and fp16: floating inputs are cast to these, as by DeepSpeed's auto_cast."""
    autocast: bool = False
    """In fp32: calls of the engine run under `torch.autocast` in bf16, as by DeepSpeed's
    torch_autocast.
    """
    loss_scale: LossScaleConfig = LossScaleConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: SchedulerConfig | None = None
    gradient_clipping: Number = Field(default=1.0, ge=0)
    """Largest global norm; 0 = off."""
    gradient_accumulation_steps: int = Field(default=1, ge=1)
    """Micro-batches of a step; their gradients are summed in fp32."""
    placement: PlacementConfig = PlacementConfig()
    frozen: FrozenConfig = FrozenConfig()
    update: Literal["auto", "cpu", "device"] = "auto"
    """Processor of updates of state off the device: the CPU, or the device, which the state is
    streamed through; "auto" is the one, or both, with the shorter predicted step. Same bits.
    """
    budget: BudgetConfig = BudgetConfig()
    hints: HintsConfig = HintsConfig()
    io: IoConfig = IoConfig()
    chunk_size: int | Literal["auto"] = "auto"
    """Parameters that are updated and moved at once: fewer take less RAM. "auto" is 1 Mi, of which
    four pass at once where nothing is on disk.
    """
    prefetch_units: int = Field(default=2, ge=0)
    """Units fetched before they are needed."""
    experts_per_unit: int | Literal["auto"] = "auto"
    """Experts of a layer that travel together, where a module has them stacked; "auto" keeps a
    unit below 512 MiB, of models with very many experts below 1 GiB. `infinity plan`, `infinity
    train` and `InfinityTrainer` choose another number where that is faster. The bits are the same.
    """
    seed: int | None = None
    """Seed of the torch generator on all ranks. For separate dropout a rank may seed again after
    `initialize`, unless ranks must draw the same numbers (the order of an IterableDataset, sampling
    in `generate`).
    """
    cpu: CpuConfig = CpuConfig()
    activations: ActivationsConfig = ActivationsConfig()
    compile: bool = False
    """`torch.compile` of every block's forward; weights stay where they are."""
    step_log: OnePath | None = None
    """A file that gets one JSON line for each step."""
    trace: OnePath | None = None
    """A file that gets a timeline of training in Chrome's format, for ui.perfetto.dev and
    `infinity trace`, which names the bottleneck.
    """
    trace_steps: Annotated[
        tuple[int, int],
        BeforeValidator(_first_and_last, json_schema_input_type=int | tuple[int, int]),
    ] = (1, 100)
    """Which steps of this run are traced, [first, last], counted from 1; a number is the last."""
    durable: bool = False
    """State on disk is the checkpoint: updates go out of place, and steps are committed."""
    commit_every: int | Literal["auto"] = "auto"
    """Steps from one commit to the next. "auto" is every step where all state is on disk; where
    some is in RAM every k-th, so that commits cost 5 % at most.
    """
    resume: Annotated[Literal["never", "auto"] | Path, BeforeValidator(_resume)] = "never"
    """"auto" goes on from the last commit of the durable run under `nvme_path` that fits the model,
    and refuses where there are signs of one that it cannot go on from; or the directory of a run.
    """

    @field_validator("loss_scale")
    @classmethod
    def _scales_fp16(cls, value: LossScaleConfig, info: ValidationInfo) -> LossScaleConfig:
        precision = info.data.get("precision")
        if value.model_fields_set and precision not in (None, "fp16"):
            raise ValueError(f"is for precision: fp16; nothing is scaled in {precision}")
        return value

    @field_validator("autocast")
    @classmethod
    def _casts_fp32(cls, value: bool, info: ValidationInfo) -> bool:
        precision = info.data.get("precision")
        if value and precision not in (None, "fp32"):
            raise ValueError(f"is for precision: fp32; it is {precision}, which needs no casts")
        return value

    @field_validator("durable")
    @classmethod
    def _keeps_only_state(cls, value: bool, info: ValidationInfo) -> bool:
        activations = info.data.get("activations")
        if value and activations is not None and activations.offload == "disk":
            raise ValueError("true: activations.offload must be host or none, files are kept")
        return value

    @field_validator("commit_every", mode="before")
    @classmethod
    def _positive_steps(cls, value: Any) -> Any:
        if value != "auto" and not (type(value) is int and value > 0):
            raise ValueError(f'should be "auto" or a number of steps, 1 or more, got {value!r}')
        return value

    @field_validator("commit_every", "resume")
    @classmethod
    def _is_durable(cls, value: Any, info: ValidationInfo) -> Any:
        default = cls.model_fields[info.field_name or ""].default
        if value != default and info.data.get("durable") is False:
            raise ValueError(f"{value} needs durable: true")
        return value

    @field_validator("experts_per_unit", mode="before")
    @classmethod
    def _some_experts(cls, value: Any) -> Any:
        if value != "auto" and not (type(value) is int and value > 0):
            raise ValueError(f'should be "auto" or a number of experts, 1 or more, got {value!r}')
        return value

    @field_validator("chunk_size", mode="before")
    @classmethod
    def _block_multiple(cls, value: Any) -> Any:
        is_int = isinstance(value, int) and not isinstance(value, bool)
        if value != "auto" and not (is_int and value > 0 and value % CHUNK_MULTIPLE == 0):
            problem = f'should be "auto" or a positive multiple of {CHUNK_MULTIPLE} elements'
            raise ValueError(f"{problem}, got {value!r}")
        return value

    @field_validator("io")
    @classmethod
    def _a_weight_per_path(cls, io: IoConfig, info: ValidationInfo) -> IoConfig:
        paths = info.data.get("nvme_path")
        if io.weights is not None and paths is not None and len(io.weights) != len(paths):
            given, needed = len(io.weights), len(paths)
            raise ValueError(f"weights needs one number per nvme_path: {given} for {needed}")
        return io

    @field_validator("placement", "activations", "durable")
    @classmethod
    def _disk_has_a_path(cls, value: Any, info: ValidationInfo) -> Any:
        needs = ""
        if isinstance(value, PlacementConfig):
            on_disk = [name for name, tier in value if tier == "disk"]
            needs = f"{', '.join(on_disk)} on disk: nvme_path must be given" if on_disk else ""
        elif isinstance(value, ActivationsConfig):
            needs = "offload: disk: nvme_path must be given" if value.offload == "disk" else ""
        elif value:
            needs = "true: nvme_path must be given, state is kept there"
        if needs and info.data.get("nvme_path") == ():
            raise ValueError(needs)
        return value

    def with_chunked_logits(self) -> Config:
        """Return a copy with `activations.logits` chunked unless another value was chosen."""
        if self.activations.logits != "auto":
            return self
        chunked = self.activations.model_copy(update={"logits": "chunked"})
        return self.model_copy(update={"activations": chunked})

    def resolved(self) -> dict[str, dict[str, Any]]:
        """Return every value by dotted name, JSON-able, with its origin.

        For example `{"io.queue_depth": {"value": 16, "origin": "given"}, ...}`; the origin is
        "given" or "default". Sizes are in bytes.
        """
        return dict(entries(self, ""))


# Top-level names that only a DeepSpeed configuration has; tests compare them with its keys.
_NAMES = """
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
DEEPSPEED_NAMES = frozenset(_NAMES.split())


def entries(section: BaseModel, prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The values of a section and of those in it by dotted name, as `Config.resolved` has them."""
    dumped = section.model_dump(mode="json")
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(section, OptimizerConfig) and value is None:
            continue  # its rule does not take it
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
    merged = apply_overrides(with_current_names(raw), overrides, current)
    try:
        return Config.model_validate(merged)
    except ValidationError as error:
        foreign = [name for name in merged if name in DEEPSPEED_NAMES]
        raise ConfigError(explain(Config, where, error, foreign)) from None

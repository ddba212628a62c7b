"""The configuration: one strict schema, every default in it, every mistake told at once.

Nothing here looks at the machine or at a model. `None` and "auto" mean "derived later"; the plan
derives them and says so.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from infinity.config_activations import ActivationsConfig
from infinity.config_optimizer import LossScaleConfig, OptimizerConfig, SchedulerConfig
from infinity.config_problems import explain
from infinity.config_source import apply_overrides, read_config_file
from infinity.config_values import (
    Number,
    OnePath,
    Section,
    Size,
    Weight,
    Whole,
    as_pair,
    as_path,
    as_paths,
)
from infinity.errors import ConfigError

Home: TypeAlias = Literal["auto", "device", "host", "disk"]

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
    whole = isinstance(pair, tuple) and len(pair) == 2 and all(type(n) is int for n in pair)
    if not whole or not 1 <= pair[0] <= pair[1]:
        raise ValueError(
            f"should be a number of steps or [first, last], counted from 1, got {value!r}"
        )
    return pair


class HomesConfig(Section):
    """The tier where each kind of state rests; the residual travels with the moments."""

    weights: Home = "auto"
    moments: Home = "auto"
    gradients: Home = "auto"


class BudgetConfig(Section):
    """Hard limits per tier in bytes; `None` is derived from the machine."""

    device: Size | None = None
    host: Size | None = None
    disk: Size | None = None


class HintsConfig(Section):
    """Numbers of parameters that the plan keeps to where it can; it never fails for one.

    DeepSpeed's `stage3_max_live_parameters` and `max_in_cpu`, see plan/hints.py.
    """

    live_parameters: Whole | None = Field(default=None, ge=0)  # at most in slots on the device
    # Of weights that rest on disk, at most so many are kept in RAM instead, within budget.host.
    weights_in_ram: Whole | None = Field(default=None, ge=0)


class IoConfig(Section):
    """How the disk is read and written."""

    backend: Literal["auto", "io_uring", "threads"] = "auto"
    # Bytes; 1 MiB at depth 4 to 16 was the fastest wherever it was measured.
    block_size: Annotated[Size, Field(gt=0, le=2**30, multiple_of=BLOCK_MULTIPLE)] = 2**20
    queue_depth: int = Field(default=8, ge=1, le=256)
    # Four plain threads reach the disk; used by the threads back end only.
    num_threads: int = Field(default=4, ge=1, le=64)
    # Relative speeds of the paths in nvme_path, in their order; left out: measured at start.
    weights: Annotated[tuple[Weight, ...] | None, BeforeValidator(as_pair)] = None
    # Keep a CRC32C of every page on disk in RAM (0.1 % of it), and check it on every read; "auto"
    # is where steps are durable, so that what a run goes on from is known to be what was written.
    verify: bool | Literal["auto"] = "auto"
    # Seconds a request may be in the kernel before waiting for it is an error. 0 = for ever.
    stuck_after_s: Number = Field(default=120.0, ge=0)


class CpuConfig(Section):
    """How the optimizer uses the CPU."""

    num_threads: int = Field(default=0, ge=0, le=1024)  # 0 = as many as this process may use
    isa: Literal["auto", "baseline", "avx2", "avx512", "neon"] = "auto"


class Config(Section):
    """Everything a run can be told. Build it with `load_config`, which explains mistakes."""

    nvme_path: Annotated[tuple[Path, ...], BeforeValidator(as_paths)] = ()
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    loss_scale: LossScaleConfig = LossScaleConfig()  # of fp16
    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: SchedulerConfig | None = None
    gradient_clipping: Number = Field(default=1.0, ge=0)  # largest global norm; 0 = off
    gradient_accumulation_steps: int = Field(default=1, ge=1)
    homes: HomesConfig = HomesConfig()
    # Who updates state that does not rest on the device: the CPU, or the device, through which it
    # is streamed chunk by chunk; "auto" is whatever makes the shorter step. The bits are the same.
    update: Literal["auto", "cpu", "device"] = "auto"
    budget: BudgetConfig = BudgetConfig()
    hints: HintsConfig = HintsConfig()
    io: IoConfig = IoConfig()
    chunk_size: int | Literal["auto"] = "auto"  # elements
    look_ahead: int = Field(default=2, ge=0)  # units fetched before they are needed
    seed: int | None = None
    cpu: CpuConfig = CpuConfig()
    activations: ActivationsConfig = ActivationsConfig()
    compile: bool = False  # torch.compile every block's forward; weights stay where they are
    journal: OnePath | None = None
    # A timeline of training in Chrome's format, for ui.perfetto.dev and `infinity trace`.
    trace: OnePath | None = None
    # The steps of this run that are traced, [first, last], counted from 1; a number is the last.
    trace_steps: Annotated[tuple[int, int], BeforeValidator(_first_and_last)] = (1, 100)
    # State on disk is the checkpoint: sweeps write out of place, and steps are committed.
    durable: bool = False
    # Steps from one commit to the next; "auto" is every step where all state rests on disk.
    durable_every: int | Literal["auto"] = "auto"
    # "auto": go on from the durable run under nvme_path that fits the model; or its directory.
    resume: Annotated[Literal["never", "auto"] | Path, BeforeValidator(_resume)] = "never"

    @field_validator("loss_scale")
    @classmethod
    def _scales_fp16(cls, value: LossScaleConfig, info: ValidationInfo) -> LossScaleConfig:
        precision = info.data.get("precision")
        if value.model_fields_set and precision not in (None, "fp16"):
            raise ValueError(f"is for precision: fp16; nothing is scaled in {precision}")
        return value

    @field_validator("durable")
    @classmethod
    def _durable_has_a_path(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("nvme_path") == ():
            raise ValueError("true: nvme_path must be given, state is kept there")
        return value

    @field_validator("durable")
    @classmethod
    def _keeps_only_state(cls, value: bool, info: ValidationInfo) -> bool:
        activations = info.data.get("activations")
        if value and activations is not None and activations.offload == "disk":
            raise ValueError("true: activations.offload must be host or none, files are kept")
        return value

    @field_validator("durable_every", mode="before")
    @classmethod
    def _whole_steps(cls, value: Any) -> Any:
        if value != "auto" and not (type(value) is int and value > 0):
            raise ValueError(f'should be "auto" or a number of steps, 1 or more, got {value!r}')
        return value

    @field_validator("durable_every", "resume")
    @classmethod
    def _is_durable(cls, value: Any, info: ValidationInfo) -> Any:
        default = cls.model_fields[info.field_name or ""].default
        if value != default and info.data.get("durable") is False:
            raise ValueError(f"{value} needs durable: true")
        return value

    @field_validator("chunk_size", mode="before")
    @classmethod
    def _whole_blocks(cls, value: Any) -> Any:
        whole = isinstance(value, int) and not isinstance(value, bool)
        if value != "auto" and not (whole and value > 0 and value % CHUNK_MULTIPLE == 0):
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

    @field_validator("activations")
    @classmethod
    def _waits_somewhere(cls, value: ActivationsConfig, info: ValidationInfo) -> ActivationsConfig:
        if value.offload == "disk" and info.data.get("nvme_path") == ():
            raise ValueError("offload: disk: nvme_path must be given")
        return value

    @field_validator("homes")
    @classmethod
    def _disk_has_a_path(cls, homes: HomesConfig, info: ValidationInfo) -> HomesConfig:
        on_disk = [name for name, home in homes if home == "disk"]
        if on_disk and info.data.get("nvme_path") == ():
            raise ValueError(f"{', '.join(on_disk)} on disk: nvme_path must be given")
        return homes

    def resolved(self) -> dict[str, dict[str, Any]]:
        """Return every value by dotted name, JSON-able, with its origin.

        For example `{"io.queue_depth": {"value": 16, "origin": "given"}, ...}`; the origin is
        "given" or "default". Sizes are in bytes.
        """
        return dict(entries(self, ""))


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
    """Return the configuration in `source`: a dict, a YAML or JSON file's path, or a `Config`.

    `overrides` are "section.key=value" texts and win over the source. Raises one `ConfigError`
    that lists everything that is wrong, each with its dotted name.
    """
    where = "the configuration"
    if isinstance(source, Config):
        raw: Mapping[str, Any] = source.model_dump(exclude_unset=True)
    elif isinstance(source, Mapping):
        raw = source
    else:
        try:
            path = Path(os.fsdecode(source)).expanduser()
        except TypeError as error:
            remedy = "give a dict, the path of a YAML or JSON file, or a Config"
            raise ConfigError(f"not a configuration: {source!r}", remedy=remedy) from error
        where, raw = str(path), read_config_file(path)
    merged = apply_overrides(raw, overrides)
    try:
        return Config.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(explain(Config, where, merged, error)) from None

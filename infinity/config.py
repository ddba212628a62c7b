"""The configuration: one strict schema, every default in it, every mistake told at once.

Nothing here looks at the machine or at a model. `None` and "auto" mean "derived later"; the plan
derives them and says so.
"""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from infinity.config_problems import explain
from infinity.config_source import apply_overrides, read_config_file
from infinity.errors import ConfigError
from infinity.sizes import parse_size

Home: TypeAlias = Literal["auto", "device", "host", "disk"]

# Elements; the optimizer works through a chunk in blocks of this many.
CHUNK_MULTIPLE = 2048
# Bytes; the largest block size that O_DIRECT asks for on drives of today.
BLOCK_MULTIPLE = 4096


def _size(value: Any) -> int:
    try:
        return parse_size(value)
    except ConfigError as error:
        details = [part for part in (error.because, error.remedy) if part]
        raise ValueError("; ".join([error.what, *details])) from None


def _number(value: Any) -> Any:
    # YAML 1.1 reads 1e-4 as text, and so does a dict that came from elsewhere.
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            raise ValueError(f"should be a number, got {value!r}") from None
    return value


def _path(value: Any) -> Path:
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value) or "\0" in str(value):
        raise ValueError(f"should be a path, got {value!r}")
    return Path(os.fsdecode(value)).expanduser()


def _paths(value: Any) -> tuple[Path, ...]:
    if value is None:
        return ()
    paths = tuple(_path(part) for part in (value if isinstance(value, (list, tuple)) else [value]))
    if not paths and not isinstance(value, tuple):
        raise ValueError("is an empty list; give a path, or leave it out")
    if len(set(paths)) < len(paths):
        raise ValueError("names the same path twice")
    return paths


def _resume(value: Any) -> Any:
    return value if value in ("never", "auto") else _path(value)


def _pair(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


Size: TypeAlias = Annotated[int, BeforeValidator(_size)]
Number: TypeAlias = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Weight: TypeAlias = Annotated[Number, Field(gt=0)]
Beta: TypeAlias = Annotated[Number, Field(ge=0, lt=1)]
OnePath: TypeAlias = Annotated[Path, BeforeValidator(_path)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=False)


# What each update rule takes and its defaults: torch's, and for Lion the paper's.
_RULES: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01},
    "Adam": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    "Lion": {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0},
    "SGD": {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False},
    "Adagrad": {"lr": 1e-2, "lr_decay": 0.0, "weight_decay": 0.0,
                "initial_accumulator_value": 0.0, "eps": 1e-10},
}  # fmt: skip
for _defaults in _RULES.values():
    _defaults["maximize"] = False
_RULE_OF = {name.lower(): name for name in _RULES}


def _of_the_rule(name: str, **limits: Any) -> Any:
    """A field whose default depends on `type`; None where the rule does not take it."""
    return Field(
        default_factory=lambda given: _RULES[given["type"]].get(name) if "type" in given else None,
        **limits,
    )


class OptimizerConfig(_Section):
    """The update rule; each takes some of the keys, with torch's names and defaults.

    "AdamW" decays weights directly, "Adam" adds the decay to the gradient. `moments` says how
    moments are stored: all but fp32 are lossy.
    """

    type: Literal["AdamW", "Adam", "Lion", "SGD", "Adagrad"] = "AdamW"
    lr: Number = _of_the_rule("lr", ge=0)
    betas: Annotated[tuple[Beta, Beta], BeforeValidator(_pair)] = _of_the_rule("betas")
    eps: Number = _of_the_rule("eps", ge=0)
    weight_decay: Number = _of_the_rule("weight_decay", ge=0)
    momentum: Number = _of_the_rule("momentum", ge=0)
    dampening: Number = _of_the_rule("dampening")
    nesterov: bool = _of_the_rule("nesterov")
    lr_decay: Number = _of_the_rule("lr_decay", ge=0)
    initial_accumulator_value: Number = _of_the_rule("initial_accumulator_value", ge=0)
    maximize: bool = _of_the_rule("maximize")
    moments: Literal["fp32", "bf16", "bf16_stochastic", "8bit"] = "fp32"

    @field_validator("type", mode="before")
    @classmethod
    def _any_case(cls, value: Any) -> Any:
        return _RULE_OF.get(value.lower(), value) if isinstance(value, str) else value

    @field_validator(*dict.fromkeys(key for rule in _RULES.values() for key in rule), mode="before")
    @classmethod
    def _the_rule_takes_it(cls, value: Any, info: ValidationInfo) -> Any:
        kind = info.data.get("type")
        if kind is not None and info.field_name not in _RULES[kind]:
            takes = ", ".join(_RULES[kind])
            raise ValueError(f"{kind} does not take it; it takes {takes}, moments")
        return value

    @field_validator("nesterov")
    @classmethod
    def _nesterov_needs_momentum(cls, value: bool, info: ValidationInfo) -> bool:
        momentum, dampening = info.data.get("momentum", 1.0), info.data.get("dampening", 0.0)
        if value and (momentum == 0 or dampening != 0):
            raise ValueError(
                f"needs momentum above 0 and no dampening, got momentum {momentum:g} and "
                f"dampening {dampening:g}"
            )
        return value

    def parameters(self) -> dict[str, Any]:
        """What the rule takes, by torch's names: the defaults of its parameter groups."""
        return {name: getattr(self, name) for name in _RULES[self.type]}


class SchedulerConfig(_Section):
    """A class of `torch.optim.lr_scheduler` or `infinity.schedules`, and its arguments."""

    type: str
    params: dict[str, Any] = Field(default_factory=dict)

    @field_validator("type")
    @classmethod
    def _is_known(cls, name: str) -> str:
        known = _schedulers()
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            where = "torch.optim.lr_scheduler or infinity.schedules"
            raise ValueError(f"is not in {where}; {hint}known: {', '.join(known)}")
        return name

    @field_validator("params")
    @classmethod
    def _fit_the_class(cls, params: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        scheduler = _schedulers().get(info.data.get("type", ""))
        if scheduler is None:
            return params
        takes = dict(inspect.signature(scheduler).parameters)
        takes.pop("optimizer", None)
        unknown = [name for name in params if name not in takes]
        needed = [name for name, parameter in takes.items() if parameter.default is parameter.empty]
        missing = [name for name in needed if name not in params]
        if unknown or missing:
            problem = f"does not take {', '.join(unknown)}" if unknown else ""
            problem += " and " if unknown and missing else ""
            problem += f"needs {', '.join(missing)}" if missing else ""
            raise ValueError(f"{scheduler.__name__} {problem}; it takes {', '.join(takes)}")
        return {name: _number_if_it_looks_like_one(value) for name, value in params.items()}


def _number_if_it_looks_like_one(value: Any) -> Any:
    if isinstance(value, str) and value[:1] in set("+-.0123456789"):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _schedulers() -> Mapping[str, type]:
    # Imported here so that reading a configuration does not cost the import of torch.
    from infinity.schedules import known_schedules

    return known_schedules()


class HomesConfig(_Section):
    """The tier where each kind of state rests; the residual travels with the moments."""

    weights: Home = "auto"
    moments: Home = "auto"
    gradients: Home = "auto"


class BudgetConfig(_Section):
    """Hard limits per tier in bytes; `None` is derived from the machine."""

    device: Size | None = None
    host: Size | None = None
    disk: Size | None = None


class IoConfig(_Section):
    """How the disk is read and written."""

    backend: Literal["auto", "io_uring", "threads"] = "auto"
    # Bytes; 1 MiB at depth 4 to 16 was the fastest wherever it was measured (DESIGN, section 7).
    block_size: Annotated[Size, Field(gt=0, le=2**30, multiple_of=BLOCK_MULTIPLE)] = 2**20
    queue_depth: int = Field(default=8, ge=1, le=256)
    # Four plain threads reach the disk; used by the threads back end only.
    num_threads: int = Field(default=4, ge=1, le=64)
    # Relative speeds of the paths in nvme_path, in their order; left out: measured at start.
    weights: Annotated[tuple[Weight, ...] | None, BeforeValidator(_pair)] = None
    # Keep a CRC32C of every page on disk in RAM (0.1 % of it), and check it on every read.
    verify: bool = False
    # Seconds a request may be in the kernel before waiting for it is an error. 0 = for ever.
    stuck_after_s: Number = Field(default=120.0, ge=0)
    # Bytes per second; slows the disk down in tests. 0 = as fast as it goes.
    slow_bytes_per_s: Size = 0
    # "seed=7,kinds=eio+flip,rate=0.01": a back end that fails on purpose, for tests and
    # bench_swap only. "" = none.
    faults: str = ""


class CpuConfig(_Section):
    """How the optimizer uses the CPU."""

    num_threads: int = Field(default=0, ge=0, le=1024)  # 0 = as many as this process may use
    isa: Literal["auto", "baseline", "avx2", "avx512", "neon"] = "auto"


class Config(_Section):
    """Everything a run can be told. Build it with `load_config`, which explains mistakes."""

    nvme_path: Annotated[tuple[Path, ...], BeforeValidator(_paths)] = ()
    precision: Literal["bf16", "fp32"] = "bf16"
    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: SchedulerConfig | None = None
    gradient_clipping: Number = Field(default=1.0, ge=0)  # largest global norm; 0 = off
    gradient_accumulation_steps: int = Field(default=1, ge=1)
    homes: HomesConfig = HomesConfig()
    budget: BudgetConfig = BudgetConfig()
    io: IoConfig = IoConfig()
    chunk_size: int | Literal["auto"] = "auto"  # elements
    look_ahead: int = Field(default=2, ge=0)  # units fetched before they are needed
    seed: int | None = None
    cpu: CpuConfig = CpuConfig()
    journal: OnePath | None = None
    # State on disk is the checkpoint: sweeps write out of place, and steps are committed.
    durable: bool = False
    # Steps from one commit to the next; "auto" is every step where all state rests on disk.
    durable_every: int | Literal["auto"] = "auto"
    # "auto": go on from the durable run under nvme_path that fits the model; or its directory.
    resume: Annotated[Literal["never", "auto"] | Path, BeforeValidator(_resume)] = "never"

    @field_validator("precision", mode="before")
    @classmethod
    def _no_fp16(cls, value: Any) -> Any:
        if isinstance(value, str) and value.lower() in ("fp16", "float16", "half"):
            raise ValueError(f"{value!r} is not supported yet; use bf16")
        return value

    @field_validator("durable")
    @classmethod
    def _durable_has_a_path(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("nvme_path") == ():
            raise ValueError("true: nvme_path must be given, state is kept there")
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
        return dict(_entries(self, ""))


def _entries(section: BaseModel, prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    dumped = section.model_dump(mode="json")
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(section, OptimizerConfig) and value is None:
            continue  # its rule does not take it
        if isinstance(value, BaseModel):
            yield from _entries(value, f"{prefix}{name}.")
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

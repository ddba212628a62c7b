"""The configuration: one strict schema with all defaults; all mistakes are reported together.

Nothing here looks at the machine or at a model. `None` and "auto" mean "derived later"; the plan
derives them and says so.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)

from infinity.common.sizes import parse_size
from infinity.config.source import apply_overrides, explain, read_source
from infinity.errors import ConfigError, did_you_mean
from infinity.optim.rules import RULES
from infinity.types import FrozenFormat, MomentFormat

# Values and sections that a configuration is made of, and what each may look like.


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


def _whole(value: Any) -> Any:
    # 1e9 is a float to YAML and JSON.
    number = _number(value)
    return int(number) if isinstance(number, float) and number.is_integer() else number


_BARE_BYTES = 1 << 16  # fewer are no budget: a unit was forgotten
_LONGEST_NAME = 255  # bytes, of a file on Linux


def as_path(value: Any) -> Path:
    """A path, `~` expanded."""
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value) or "\0" in str(value):
        raise ValueError(f"should be a path, got {value!r}")
    try:
        return Path(os.fsdecode(value)).expanduser()
    except RuntimeError:
        raise ValueError(f"there is no such user, got {value!r}") from None


def as_paths(value: Any) -> tuple[Path, ...]:
    """Return one path, or a list of them, as a tuple of directories; `None` is none of them."""
    if value is None:
        return ()
    parts = value if isinstance(value, (list, tuple)) else [value]
    paths = tuple(as_path(part) for part in parts)
    if not paths and not isinstance(value, tuple):
        raise ValueError("is an empty list; give a path, or leave it out")
    for path in paths:
        try:
            longest = max((len(name.encode()) for name in path.parts), default=0)
        except UnicodeEncodeError:
            raise ValueError(f"should be UTF-8, got {str(path)!r}") from None
        if longest > _LONGEST_NAME:
            raise ValueError(f"has a name of {longest} bytes, more than {_LONGEST_NAME}: {path}")
    seen: dict[Any, Path] = {}
    for path in paths:
        if (first := seen.setdefault(_identity(path), path)) is not path:
            also = "" if first == path else f": {first} and {path} are one directory"
            raise ValueError(f"names the same path twice{also}")
    return paths


def _identity(path: Path) -> Any:
    """Return what shows that two paths, one of them by a link, lead to one directory."""
    try:
        facts = os.stat(path)
    except OSError:  # it is not there, or of another machine
        return path
    return facts.st_dev, facts.st_ino


def as_pair(value: Any) -> Any:
    """A list as a tuple; YAML and JSON know lists only."""
    return tuple(value) if isinstance(value, list) else value


Size: TypeAlias = Annotated[int, BeforeValidator(_size, json_schema_input_type=int | str)]
Whole: TypeAlias = Annotated[int, BeforeValidator(_whole)]
Number: TypeAlias = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Paths: TypeAlias = Annotated[
    tuple[Path, ...],
    BeforeValidator(
        as_paths, json_schema_input_type=Path | Annotated[list[Path], Field(min_length=1)]
    ),
]
Weight: TypeAlias = Annotated[Number, Field(gt=0)]
Beta: TypeAlias = Annotated[Number, Field(ge=0, lt=1)]
OnePath: TypeAlias = Annotated[Path, BeforeValidator(as_path)]


class Section(BaseModel):
    """A part of the configuration: frozen, strict, and an unknown key is an error."""

    # The texts below fields are the descriptions in `model_json_schema()`.
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )


# The optimizer, scheduler and loss scale sections of a configuration.


_RULE_OF = {name.lower(): name for name in RULES}
_ENTRIES = {name: default for rule in RULES.values() for name, default in rule.defaults().items()}
if TYPE_CHECKING:
    RuleName: TypeAlias = str
    MomentName: TypeAlias = str
    FrozenName: TypeAlias = str
else:
    RuleName = Literal[tuple(RULES)]
    MomentName = Literal[tuple(form.value for form in MomentFormat)]
    FrozenName = Literal[("as_is", *(form.value for form in FrozenFormat))]


class _AnyOptimizer(Section):
    """What every rule takes; what else one takes, `OptimizerConfig` has from `RULES`."""

    type: RuleName = "AdamW"
    moments: MomentName = "fp32"

    @field_validator("type", mode="before")
    @classmethod
    def _any_case(cls, value: Any) -> Any:
        return _RULE_OF.get(value.lower(), value) if isinstance(value, str) else value

    @field_validator(*_ENTRIES, mode="before", check_fields=False)
    @classmethod
    def _the_rule_takes_it(cls, value: Any, info: ValidationInfo) -> Any:
        kind = info.data.get("type")
        if kind is not None and info.field_name not in RULES[kind].defaults():
            takes = ", ".join(RULES[kind].defaults())
            raise ValueError(f"{kind} does not take it; it takes {takes}, moments")
        return value

    @field_validator("moments")
    @classmethod
    def _has_kernels_for_it(cls, value: str, info: ValidationInfo) -> str:
        kind = info.data.get("type")
        if kind is not None and not RULES[kind].kernel and value != MomentFormat.FP32.value:
            raise ValueError(f"{kind} keeps moments in fp32; leave it out, got {value}")
        return value

    @field_validator(*_ENTRIES, check_fields=False)
    @classmethod
    def _fits_the_others(cls, value: Any, info: ValidationInfo) -> Any:
        kind = info.data.get("type")
        if kind is not None and (
            problem := RULES[kind].problem(info.field_name or "", value, info.data)
        ):
            raise ValueError(problem)
        return value

    def parameters(self) -> dict[str, Any]:
        """Return the parameters of the rule by torch's names, as defaults of its groups."""
        return {name: getattr(self, name) for name in RULES[self.type].defaults()}


def _field_of(name: str) -> tuple[Any, Any]:
    """The field of an entry of some rule: its default depends on `type`, None if it has none."""

    def default(given: dict[str, Any]) -> Any:
        return RULES[given["type"]].defaults().get(name) if "type" in given else None

    of, field = _ENTRIES[name], Field(default_factory=default)
    signed = any(rule.is_signed(name) for rule in RULES.values())
    if isinstance(of, bool):
        return bool, field
    if isinstance(of, str):
        choices = next(rule.choices(name) for rule in RULES.values() if name in rule.defaults())
        return Literal[choices], field
    if isinstance(of, tuple):
        each = (Number if signed else Beta,) * len(of)
        return Annotated[tuple.__class_getitem__(each), BeforeValidator(as_pair)], field
    least = None if signed else 0
    return Whole if isinstance(of, int) else Number, Field(default_factory=default, ge=least)


if TYPE_CHECKING:
    OptimizerConfig = _AnyOptimizer
else:
    OptimizerConfig = create_model(
        "OptimizerConfig",
        __base__=_AnyOptimizer,
        __module__=__name__,
        __doc__="""The update rule; each takes some of the keys, with torch's names and defaults.

    "AdamW" decays weights directly, "Adam" adds the decay to the gradient. `moments` is how
    moments are stored: all but fp32 are lossy.
    """,
        **{name: _field_of(name) for name in _ENTRIES},
    )


class LossScaleConfig(Section):
    """By how much the loss is multiplied in fp16; see `training/step.py` for the rules."""

    value: Number = Field(default=0.0, ge=0)
    """0 = dynamic: it halves when gradients overflow, doubles when they have not for a while."""
    initial_power: int = Field(default=16, ge=0, le=127)
    """It begins at 2 to the power of this."""
    window: int = Field(default=1000, ge=1)
    """Steps without an overflow until it doubles."""
    hysteresis: int = Field(default=2, ge=1)
    """Overflows until it halves."""
    consecutive_hysteresis: bool = False
    """Start counting overflows anew in every good step, not only when the scale doubles."""
    min: Number = Field(default=1.0, gt=0)
    """An overflow at this scale is an error."""

    @field_validator("initial_power", "window", "hysteresis", "consecutive_hysteresis", "min")
    @classmethod
    def _is_dynamic(cls, value: Any, info: ValidationInfo) -> Any:
        if info.data.get("value"):
            raise ValueError(f"a loss_scale.value of {info.data['value']:g} never changes")
        return value

    @field_validator("min")
    @classmethod
    def _begins_above(cls, value: float, info: ValidationInfo) -> float:
        power = info.data.get("initial_power")
        if power is not None and value > 2.0**power:
            raise ValueError(f"{value:g} is above the first scale, 2 ** {power} = {2**power}")
        return value


NEEDED = inspect.Parameter.empty
# What DeepSpeed's schedules take, and their defaults; `infinity.optim.lr_schedules` makes them.
SCHEDULES: dict[str, dict[str, Any]] = {
    "LRRangeTest": {
        "lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 2000,
        "lr_range_test_step_rate": 1.0, "lr_range_test_staircase": False,
    },
    "OneCycle": {
        "cycle_min_lr": NEEDED, "cycle_max_lr": NEEDED, "decay_lr_rate": 0.0,
        "cycle_first_step_size": 2000, "cycle_second_step_size": None,
        "cycle_first_stair_count": 0, "cycle_second_stair_count": None, "decay_step_size": 0,
        "cycle_momentum": True, "cycle_min_mom": 0.8, "cycle_max_mom": 0.9, "decay_mom_rate": 0.0,
    },
    "WarmupLR": {
        "warmup_min_lr": 0.0, "warmup_max_lr": None, "warmup_num_steps": 1000,
        "warmup_type": "log",
    },
    "WarmupDecayLR": {
        "total_num_steps": NEEDED, "warmup_min_lr": 0.0, "warmup_max_lr": 0.001,
        "warmup_num_steps": 1000, "warmup_type": "log",
    },
    "WarmupCosineLR": {
        "total_num_steps": NEEDED, "warmup_min_ratio": 0.0, "warmup_num_steps": 1000,
        "cos_min_ratio": 0.0001, "warmup_type": "log",
    },
}  # fmt: skip
for _defaults in SCHEDULES.values():
    _defaults["last_batch_iteration"] = -1


def torch_schedules() -> dict[str, Any]:
    """The classes of `torch.optim.lr_scheduler` by name; torch is imported when this is asked."""
    from torch.optim import lr_scheduler

    base = lr_scheduler.LRScheduler
    return {
        name: value
        for name, value in vars(lr_scheduler).items()
        if inspect.isclass(value)
        and issubclass(value, base)
        and value is not base
        and not name.startswith("_")
    }


def _parameters_of(name: str) -> dict[str, Any] | None:
    """Return the parameters of a schedule with defaults; None for an unknown one."""
    if name in SCHEDULES:
        return SCHEDULES[name]
    found = torch_schedules().get(name)
    if found is None:
        return None
    takes = inspect.signature(found).parameters.values()
    return {taken.name: taken.default for taken in takes if taken.name != "optimizer"}


class SchedulerConfig(Section):
    """A class of `torch.optim.lr_scheduler` or `infinity.optim.lr_schedules`, and its arguments."""

    type: str
    params: dict[str, Any] = Field(default_factory=dict)

    @field_validator("type")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if _parameters_of(name) is None:
            known = sorted({*torch_schedules(), *SCHEDULES})
            hint = did_you_mean(name, known)
            where = "torch.optim.lr_scheduler or infinity.optim.lr_schedules"
            raise ValueError(f"is not in {where}; {hint}known: {', '.join(known)}")
        return name

    @field_validator("params")
    @classmethod
    def _fit_the_class(cls, params: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        kind = info.data.get("type", "")
        takes = _parameters_of(kind)
        if takes is None:
            return params
        unknown = [name for name in params if name not in takes]
        needed = [name for name, default in takes.items() if default is NEEDED]
        missing = [name for name in needed if name not in params]
        if unknown or missing:
            problem = f"does not take {', '.join(unknown)}" if unknown else ""
            problem += " and " if unknown and missing else ""
            problem += f"needs {', '.join(missing)}" if missing else ""
            hint = did_you_mean(unknown[0], takes) if unknown else ""
            raise ValueError(f"{kind} {problem}; {hint}it takes {', '.join(takes)}")
        return {name: _number_if_it_looks_like_one(value) for name, value in params.items()}


def _number_if_it_looks_like_one(value: Any) -> Any:
    if isinstance(value, str) and value[:1] in set("+-.0123456789"):
        try:
            return float(value)
        except ValueError:
            return value
    return value


# The `activations` section: what happens to what autograd keeps between forward and backward.


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
    """The most tokens of one micro-batch; the sizes below are made for it if they are left out.

    In `InfinityTrainer`: of one batch; the plan then chooses how those of a step pass the model.
    """
    host: Size | None = None
    """Pinned RAM that is reserved for them."""
    disk: Size | None = None
    """Scratch space that is reserved for them."""
    min_bytes: Size = 1 << 20
    """Smaller tensors stay where they are."""
    slices: int = Field(default=1, ge=1)
    """Number of slices of a batch in a block, whose weights are fetched once for all slices."""
    logits: Literal["auto", "whole", "sliced"] = "auto"
    """sliced: cross entropy makes the head's logits a chunk of tokens at a time. auto is sliced for
    causal language models in `infinity train`, `InfinityTrainer` and `from_pretrained`, else whole.
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
    whole = isinstance(pair, tuple) and len(pair) == 2 and all(type(n) is int for n in pair)
    if not whole or not 1 <= pair[0] <= pair[1]:
        raise ValueError(
            f"should be a number of steps or [first, last], counted from 1, got {value!r}"
        )
    return pair


class PlacementConfig(Section):
    """The tier where each kind of state rests; the residual travels with the moments.

    A tier in the place of the section is that of all three kinds.
    """

    weights: TierChoice = "auto"
    moments: TierChoice = "auto"
    gradients: TierChoice = "auto"
    whole: bool | None = None
    """Several ranks: gathered weights stay on the device until they are updated (ZeRO-2), or leave
    it between uses and are gathered at each (ZeRO-3); `None`: they stay where there is room."""
    shared: bool | None = None
    """Several ranks: weights that rest in RAM do so once a node, where every rank copies whole
    units from, and nothing is gathered; `None`: where the plan finds that faster."""

    @model_validator(mode="before")
    @classmethod
    def _of_all(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if value not in get_args(TierChoice):
            known = ", ".join(get_args(TierChoice))
            raise ValueError(f"should be one of {known}, or a section with keys, got {value!r}")
        return dict.fromkeys(("weights", "moments", "gradients"), value)


class FrozenConfig(Section):
    """How weights that are not trained rest: a base under adapters (LoRA) may be quantised."""

    rest: FrozenName = "as_is"
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
    host: Size | None = None
    disk: Size | None = None

    @field_validator("*", mode="before")
    @classmethod
    def _has_a_unit(cls, value: Any) -> Any:
        text = str(value).strip()
        if text.isdigit() and 0 < int(text) < _BARE_BYTES:
            raise ValueError(f"is {text} bytes; give a unit, as in {text}GiB")
        return value


class HintsConfig(Section):
    """Numbers of parameters that the plan keeps to where it can; it never fails for one.

    DeepSpeed's `stage3_max_live_parameters` and `max_in_cpu`, see plan/planner.py.
    """

    live_parameters: Whole | None = Field(default=None, ge=0)
    """Most parameters in slots on the device."""
    weights_in_ram: Whole | None = Field(default=None, ge=0)
    """Most weights of the disk tier that are kept in RAM instead, within budget.host."""


class IoConfig(Section):
    """How the disk is read and written."""

    backend: Literal["auto", "io_uring", "threads"] = "auto"
    block_size: Annotated[Size, Field(gt=0, le=2**30, multiple_of=BLOCK_MULTIPLE)] = 2**20
    """Bytes; 1 MiB at depth 4 to 16 was the fastest wherever it was measured."""
    queue_depth: int = Field(default=8, ge=1, le=256)
    num_threads: int = Field(default=4, ge=1, le=64)
    """Four plain threads reach the disk; used by the threads back end only."""
    weights: Annotated[tuple[Weight, ...] | None, BeforeValidator(as_pair)] = None
    """Relative speeds of the paths in nvme_path, in their order; left out: measured at start."""
    verify: bool | Literal["auto"] = "auto"
    """Keep a CRC32C of every page on disk in RAM (0.1 % of it), and check it on every read; "auto"
    is on for durable runs, so that a run resumes only from the bytes that were written.
    """
    stuck_after_s: Number = Field(default=120.0, ge=0)
    """Seconds a request may be in the kernel before waiting for it is an error. 0 = for ever."""


class CpuConfig(Section):
    """How the optimizer uses the CPU."""

    num_threads: int = Field(default=0, ge=0, le=1024)
    """0 = all that this process may use; with a GPU all but three, which launch its work."""
    isa: Literal["auto", "baseline", "avx2", "avx512", "neon"] = "auto"


class Config(Section):
    """Configuration of an engine. `load_config` builds it and explains mistakes."""

    nvme_path: Paths = ()
    """Directories on the drives that state may rest on; several are striped."""
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    cast_inputs: bool = False
    """In bf16 and fp16: floating inputs are cast to these, as by DeepSpeed's auto_cast."""
    autocast: bool = False
    """In fp32: calls of the engine run under `torch.autocast` in bf16."""
    loss_scale: LossScaleConfig = LossScaleConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: SchedulerConfig | None = None
    gradient_clipping: Number = Field(default=1.0, ge=0)
    """Largest global norm; 0 = off."""
    gradient_accumulation_steps: int = Field(default=1, ge=1)
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
    """Elements of a chunk, in which the optimizer works and which travels as one; "auto" is 1 Mi,
    of which four pass at once where nothing rests on disk.
    """
    prefetch_units: int = Field(default=2, ge=0)
    """Units fetched before they are needed."""
    experts_per_unit: int | Literal["auto"] = "auto"
    """Experts of a layer that travel together, where a module has them stacked; "auto" keeps a
    unit below 512 MiB, of models with very many experts below 1 GiB. The bits are the same.
    """
    seed: int | None = None
    cpu: CpuConfig = CpuConfig()
    activations: ActivationsConfig = ActivationsConfig()
    compile: bool = False
    """`torch.compile` of every block's forward; weights stay where they are."""
    journal: OnePath | None = None
    trace: OnePath | None = None
    """A timeline of training in Chrome's format, for ui.perfetto.dev and `infinity trace`."""
    trace_steps: Annotated[
        tuple[int, int],
        BeforeValidator(_first_and_last, json_schema_input_type=int | tuple[int, int]),
    ] = (1, 100)
    """Which steps of this run are traced, [first, last], counted from 1; a number is the last."""
    durable: bool = False
    """State on disk is the checkpoint: updates go out of place, and steps are committed."""
    durable_every: int | Literal["auto"] = "auto"
    """Steps from one commit to the next; "auto" is every step where all state rests on disk."""
    resume: Annotated[Literal["never", "auto"] | Path, BeforeValidator(_resume)] = "never"
    """auto: go on from the durable run under nvme_path that fits the model; or its directory."""

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

    @field_validator("experts_per_unit", mode="before")
    @classmethod
    def _some_experts(cls, value: Any) -> Any:
        if value != "auto" and not (type(value) is int and value > 0):
            raise ValueError(f'should be "auto" or a number of experts, 1 or more, got {value!r}')
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

    def with_sliced_logits(self) -> Config:
        """Return a copy with `activations.logits` sliced unless another value was chosen."""
        if self.activations.logits != "auto":
            return self
        sliced = self.activations.model_copy(update={"logits": "sliced"})
        return self.model_copy(update={"activations": sliced})

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
    merged = apply_overrides(raw, overrides)
    try:
        return Config.model_validate(merged)
    except ValidationError as error:
        foreign = [name for name in merged if name in DEEPSPEED_NAMES]
        raise ConfigError(explain(Config, where, error, foreign)) from None

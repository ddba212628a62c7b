"""Optimizer, scheduler and loss scale sections of a configuration."""

from __future__ import annotations

import inspect
import json
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, ValidationInfo, create_model, field_validator

from infinity.config.fields import Beta, Integer, Number, Section, as_tuple
from infinity.errors import did_you_mean
from infinity.optim.rules import ENTRY_DESCRIPTIONS, RULES
from infinity.types import FrozenFormat, MomentFormat

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
    """Keys of every rule; `OptimizerConfig` adds the keys of each rule in `RULES`."""

    type: RuleName = "AdamW"
    """Update rule. "AdamW" decays weights directly, "Adam" adds the decay to the gradient; "Muon"
    updates matrices (each matrix of stacked experts separately), and AdamW all other parameters.
    Any other torch optimizer, slower: `initialize(optimizer=torch.optim.NAdam)`.
    """
    moments: MomentName = "fp32"
    """Storage format of the moments: 12 bytes of state per parameter with fp32, 6 with 8bit. All
    but fp32 are lossy; Muon's are fp32.
    """

    @field_validator("type", mode="before")
    @classmethod
    def _normalize_case(cls, value: Any) -> Any:
        return _RULE_OF.get(value.lower(), value) if isinstance(value, str) else value

    @field_validator(*_ENTRIES, mode="before", check_fields=False)
    @classmethod
    def _check_rule_has_key(cls, value: Any, info: ValidationInfo) -> Any:
        rule = info.data.get("type")
        if rule is not None and info.field_name not in RULES[rule].defaults():
            keys = ", ".join(RULES[rule].defaults())
            raise ValueError(f"{rule} does not take it; it takes {keys}, moments")
        return value

    @field_validator("moments")
    @classmethod
    def _check_moments(cls, value: str, info: ValidationInfo) -> str:
        rule = info.data.get("type")
        if rule is not None and not RULES[rule].kernel and value != MomentFormat.FP32.value:
            raise ValueError(f"{rule} keeps moments in fp32; leave it out, got {value}")
        return value

    @field_validator(*_ENTRIES, check_fields=False)
    @classmethod
    def _check_value(cls, value: Any, info: ValidationInfo) -> Any:
        rule = info.data.get("type")
        if rule is not None and (
            problem := RULES[rule].problem(info.field_name or "", value, info.data)
        ):
            raise ValueError(problem)
        return value

    def parameters(self) -> dict[str, Any]:
        """Return the rule's hyperparameters by torch's names, as defaults of parameter groups."""
        return {name: getattr(self, name) for name in RULES[self.type].defaults()}


def _field_of(name: str) -> tuple[Any, Any]:
    """Return type and field of a rule's key; its default depends on `type`, which may lack it."""

    def default(given: dict[str, Any]) -> Any:
        return RULES[given["type"]].defaults().get(name) if "type" in given else None

    by_default: dict[str, list[str]] = {}
    for rule_name, rule in RULES.items():
        if name in rule.defaults():
            by_default.setdefault(json.dumps(rule.defaults()[name]), []).append(rule_name)
    defaults_text = "; ".join(f"{', '.join(names)}: {value}" for value, names in by_default.items())
    description = f"{ENTRY_DESCRIPTIONS[name]} {defaults_text}."
    example = _ENTRIES[name]
    field = Field(default_factory=default, description=description)
    signed = any(rule.is_signed(name) for rule in RULES.values())
    if isinstance(example, bool):
        return bool, field
    if isinstance(example, str):
        choices = next(rule.choices(name) for rule in RULES.values() if name in rule.defaults())
        return Literal[choices], field
    if isinstance(example, tuple):
        each = (Number if signed else Beta,) * len(example)
        return Annotated[tuple.__class_getitem__(each), BeforeValidator(as_tuple)], field
    minimum = None if signed else 0
    number_type = Integer if isinstance(example, int) else Number
    return number_type, Field(default_factory=default, ge=minimum, description=description)


if TYPE_CHECKING:
    OptimizerConfig = _AnyOptimizer
else:
    OptimizerConfig = create_model(
        "OptimizerConfig",
        __base__=_AnyOptimizer,
        __module__=__name__,
        __doc__="The update rule; each takes some of the keys, with torch's names and defaults.",
        **{name: _field_of(name) for name in _ENTRIES},
    )


class LossScaleConfig(Section):
    """Factor of the loss in fp16; see `training/loss_scale.py` for the rules."""

    value: Number = Field(default=0.0, ge=0)
    """Constant scale; 0 = dynamic: halved at overflows, doubled after `window` steps without."""
    initial_power: int = Field(default=16, ge=0, le=127)
    """The initial scale is 2 to this power."""
    window: int = Field(default=1000, ge=1)
    """Steps without an overflow until the scale doubles."""
    hysteresis: int = Field(default=2, ge=1)
    """Overflows until the scale is halved."""
    consecutive_hysteresis: bool = False
    """Reset the count of overflows in every good step, not only when the scale doubles."""
    min: Number = Field(default=1.0, gt=0)
    """Smallest scale; an overflow at it is an error."""

    @field_validator("initial_power", "window", "hysteresis", "consecutive_hysteresis", "min")
    @classmethod
    def _check_is_dynamic(cls, value: Any, info: ValidationInfo) -> Any:
        if info.data.get("value"):
            raise ValueError(f"a loss_scale.value of {info.data['value']:g} never changes")
        return value

    @field_validator("min")
    @classmethod
    def _check_min(cls, value: float, info: ValidationInfo) -> float:
        power = info.data.get("initial_power")
        if power is not None and value > 2.0**power:
            raise ValueError(f"{value:g} is above the first scale, 2 ** {power} = {2**power}")
        return value


REQUIRED = inspect.Parameter.empty
# Arguments of DeepSpeed's schedules, with defaults; see `infinity.optim.lr_schedules`.
SCHEDULES: dict[str, dict[str, Any]] = {
    "LRRangeTest": {
        "lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 2000,
        "lr_range_test_step_rate": 1.0, "lr_range_test_staircase": False,
    },
    "OneCycle": {
        "cycle_min_lr": REQUIRED, "cycle_max_lr": REQUIRED, "decay_lr_rate": 0.0,
        "cycle_first_step_size": 2000, "cycle_second_step_size": None,
        "cycle_first_stair_count": 0, "cycle_second_stair_count": None, "decay_step_size": 0,
        "cycle_momentum": True, "cycle_min_mom": 0.8, "cycle_max_mom": 0.9, "decay_mom_rate": 0.0,
    },
    "WarmupLR": {
        "warmup_min_lr": 0.0, "warmup_max_lr": None, "warmup_num_steps": 1000,
        "warmup_type": "log",
    },
    "WarmupDecayLR": {
        "total_num_steps": REQUIRED, "warmup_min_lr": 0.0, "warmup_max_lr": 0.001,
        "warmup_num_steps": 1000, "warmup_type": "log",
    },
    "WarmupCosineLR": {
        "total_num_steps": REQUIRED, "warmup_min_ratio": 0.0, "warmup_num_steps": 1000,
        "cos_min_ratio": 0.0001, "warmup_type": "log",
    },
}  # fmt: skip
for _defaults in SCHEDULES.values():
    _defaults["last_batch_iteration"] = -1


def torch_schedules() -> dict[str, Any]:
    """Return the classes of `torch.optim.lr_scheduler` by name; imports torch when called."""
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
    schedule = torch_schedules().get(name)
    if schedule is None:
        return None
    parameters = inspect.signature(schedule).parameters.values()
    return {p.name: p.default for p in parameters if p.name != "optimizer"}


class SchedulerConfig(Section):
    """Class of `torch.optim.lr_scheduler` or `infinity.optim.lr_schedules`, and its arguments."""

    type: str
    """Class of `torch.optim.lr_scheduler`, or a schedule of DeepSpeed: LRRangeTest, OneCycle,
    WarmupLR, WarmupDecayLR, WarmupCosineLR.
    """
    params: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the class, without the optimizer."""

    @field_validator("type")
    @classmethod
    def _check_type(cls, name: str) -> str:
        if _parameters_of(name) is None:
            known = sorted({*torch_schedules(), *SCHEDULES})
            hint = did_you_mean(name, known)
            where = "torch.optim.lr_scheduler or infinity.optim.lr_schedules"
            raise ValueError(f"is not in {where}; {hint}known: {', '.join(known)}")
        return name

    @field_validator("params")
    @classmethod
    def _check_params(cls, params: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        schedule = info.data.get("type", "")
        defaults = _parameters_of(schedule)
        if defaults is None:
            return params
        unknown = [name for name in params if name not in defaults]
        required = [name for name, default in defaults.items() if default is REQUIRED]
        missing = [name for name in required if name not in params]
        if unknown or missing:
            problem = f"does not take {', '.join(unknown)}" if unknown else ""
            problem += " and " if unknown and missing else ""
            problem += f"needs {', '.join(missing)}" if missing else ""
            hint = did_you_mean(unknown[0], defaults) if unknown else ""
            raise ValueError(f"{schedule} {problem}; {hint}it takes {', '.join(defaults)}")
        converted = dict(params)
        for name, value in params.items():
            if isinstance(value, str) and value[:1] in set("+-.0123456789"):
                with suppress(ValueError):
                    converted[name] = float(value)
        return converted

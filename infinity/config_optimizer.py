"""The optimizer, scheduler and loss scale sections of a configuration."""

from __future__ import annotations

import difflib
import inspect
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from infinity.config_values import Beta, Number, Section, as_pair

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


class OptimizerConfig(Section):
    """The update rule; each takes some of the keys, with torch's names and defaults.

    "AdamW" decays weights directly, "Adam" adds the decay to the gradient. `moments` says how
    moments are stored: all but fp32 are lossy.
    """

    type: Literal["AdamW", "Adam", "Lion", "SGD", "Adagrad"] = "AdamW"
    lr: Number = _of_the_rule("lr", ge=0)
    betas: Annotated[tuple[Beta, Beta], BeforeValidator(as_pair)] = _of_the_rule("betas")
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


class LossScaleConfig(Section):
    """By how much the loss is multiplied in fp16; see `training/loss_scale.py` for the rules."""

    # 0 = dynamic: it halves when gradients overflow, and doubles when they have not for a while.
    value: Number = Field(default=0.0, ge=0)
    initial_power: int = Field(default=16, ge=0, le=127)  # it begins at 2 to the power of this
    window: int = Field(default=1000, ge=1)  # steps without an overflow until it doubles
    hysteresis: int = Field(default=2, ge=1)  # overflows until it halves
    # Start counting overflows anew in every good step, not only when the scale doubles.
    consecutive_hysteresis: bool = False
    min: Number = Field(default=1.0, gt=0)  # an overflow at this scale is an error

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
# What DeepSpeed's schedules take, and their defaults; `infinity.schedules` makes them.
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
    """What a schedule takes, with defaults; None for one that is not known."""
    if name in SCHEDULES:
        return SCHEDULES[name]
    found = torch_schedules().get(name)
    if found is None:
        return None
    takes = inspect.signature(found).parameters.values()
    return {taken.name: taken.default for taken in takes if taken.name != "optimizer"}


class SchedulerConfig(Section):
    """A class of `torch.optim.lr_scheduler` or `infinity.schedules`, and its arguments."""

    type: str
    params: dict[str, Any] = Field(default_factory=dict)

    @field_validator("type")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if _parameters_of(name) is None:
            known = sorted({*torch_schedules(), *SCHEDULES})
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            where = "torch.optim.lr_scheduler or infinity.schedules"
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
            raise ValueError(f"{kind} {problem}; it takes {', '.join(takes)}")
        return {name: _number_if_it_looks_like_one(value) for name, value in params.items()}


def _number_if_it_looks_like_one(value: Any) -> Any:
    if isinstance(value, str) and value[:1] in set("+-.0123456789"):
        try:
            return float(value)
        except ValueError:
            return value
    return value

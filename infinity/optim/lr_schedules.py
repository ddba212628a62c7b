"""Learning-rate schedules by name: torch's, and five DeepSpeed schedules that torch lacks.

Those five have DeepSpeed's names, parameters and values, quirks included, in closed form: a rate
depends on the number of steps only. Each is a function of its parameters, validated and complete
(names and defaults: `SCHEDULES` in `config/optimizer.py`), and of the iteration, which is -1 when
the schedule is made: torch's `last_epoch - 1`. State is plain numbers and lists.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch.optim import Optimizer, lr_scheduler

from infinity.config.optimizer import SCHEDULES, torch_schedules
from infinity.errors import ConfigError, InfinityError, InfinityWarning, first_lines

_SECOND_BETA = 0.99  # the second of `betas` that OneCycle sets
_WARMUP_TYPES = ("log", "linear")
# Parameters by type; all others are numbers. Rates and momenta may have a value for each group.
_RATES = {"warmup_min_lr", "warmup_max_lr", "lr_range_test_min_lr", "cycle_min_lr", "cycle_max_lr"}
_RATES |= {"cycle_min_mom", "cycle_max_mom"}
_GROUP_RATES = ("warmup_max_lr", "cycle_max_lr", "lr_range_test_min_lr")  # set groups' rates
_MIN_COUNTS = {"warmup_num_steps": 1, "total_num_steps": 1, "lr_range_test_step_size": 1}
_MIN_COUNTS |= {"cycle_first_step_size": 1, "cycle_second_step_size": 0, "decay_step_size": 0}
_MIN_COUNTS |= {"cycle_first_stair_count": 0, "cycle_second_stair_count": 0}
_FLAGS = {"lr_range_test_staircase", "cycle_momentum"}

Params = Mapping[str, Any]


# --- the five ------------------------------------------------------------------------------------


def _interpolate(low: Sequence[float], high: Sequence[float], fraction: float) -> list[float]:
    return [lower + (upper - lower) * fraction for lower, upper in zip(low, high, strict=True)]


def _warmup_fraction(p: Params, i: int) -> float:
    """Return the fraction of the warm-up that is done; only for iterations within it."""
    steps = p["warmup_num_steps"]
    if p["warmup_type"] == "log":
        return (1.0 / math.log(steps)) * math.log(i + 1)
    return float(i / steps)


def _warmup(p: Params, i: int) -> list[float]:
    fraction, steps, total = 0.0, p["warmup_num_steps"], p.get("total_num_steps")
    if 0 <= i < steps:
        fraction = _warmup_fraction(p, i)
    elif i >= steps:
        span = 1.0 if total is None else max(1.0, total - steps)
        fraction = 1.0 if total is None else max(0.0, float(total - i) / span)
    return _interpolate(p["warmup_min_lr"], p["warmup_max_lr"], fraction)


def _cosine(p: Params, i: int) -> list[float]:
    ratio, steps, floor = 0.0, p["warmup_num_steps"], p["cos_min_ratio"]
    if 0 <= i < steps:
        ratio = p["warmup_min_ratio"] + _warmup_fraction(p, i) * (1.0 - p["warmup_min_ratio"])
    elif i >= steps:
        done = min(1.0, (i - steps + 1) / max(1, p["total_num_steps"] - steps))
        ratio = max(0.0, floor + (1.0 - floor) * ((1 + math.cos(math.pi * done)) / 2))
    return [rate * ratio for rate in p["own_lrs"]]


def _range_test(p: Params, i: int) -> list[float]:
    steps: float = float(i + 1) / p["lr_range_test_step_size"]
    steps = math.floor(steps) if p["lr_range_test_staircase"] else steps
    increase = 1 + p["lr_range_test_step_rate"] * steps
    return [low * increase for low in p["lr_range_test_min_lr"]]


def _cycle(p: Params, i: int) -> list[float]:
    decay_step = i - sum(_halves(p)) + 1  # counts from 1
    if decay_step < 1:
        return _interpolate(p["cycle_min_lr"], p["cycle_max_lr"], _cycle_height(p, i))
    decays = p["decay_step_size"] and p["decay_lr_rate"]
    factor = 1 + p["decay_lr_rate"] * (decay_step / p["decay_step_size"]) if decays else 1.0
    return [low / factor for low in p["cycle_min_lr"]]


def _momenta(p: Params, i: int) -> list[float]:
    decay_step, low, high = i - sum(_halves(p)) + 1, p["cycle_min_mom"], p["cycle_max_mom"]
    if i < 0:
        return list(low)
    if decay_step < 1:
        height = _cycle_height(p, i)
        return [most - (most - least) * height for least, most in zip(low, high, strict=True)]
    decays = p["decay_step_size"] and p["decay_mom_rate"]
    factor = 1 + p["decay_mom_rate"] * (decay_step / p["decay_step_size"]) if decays else 1.0
    return [most * factor for most in high]


def _halves(p: Params) -> tuple[float, float]:
    first, second = p["cycle_first_step_size"], p["cycle_second_step_size"]
    return float(first), float(first if second is None else second)


def _cycle_height(p: Params, i: int) -> float:
    """Return the position in the cycle: 0 at its ends, 1 in the middle."""
    count, (first, second) = i + 1, _halves(p)
    total = first + second
    ratio = first / total
    x = 1.0 + count / total - math.floor(1 + count / total)
    rising = x <= ratio
    stairs, second_stairs = p["cycle_first_stair_count"], p["cycle_second_stair_count"]
    stairs = stairs if rising or second_stairs is None else second_stairs
    if stairs > 0:
        # Computed from integers: a rounded fraction may fall just below a stair.
        inside = count % total
        left, half = (inside, first) if inside <= first else (total - inside, second)
        return float(math.floor(left * stairs / half) / stairs)
    return float(x / ratio if rising else (x - 1) / (ratio - 1))


class _Schedule(lr_scheduler.LRScheduler):
    """Base of schedules whose rates are a function of parameters and number of steps."""

    _rates: Callable[[Params, int], list[float]]
    __signature__: inspect.Signature

    def __init_subclass__(cls) -> None:
        if cls.__name__ in SCHEDULES:  # subclasses of a schedule inherit its signature
            defaults = {"optimizer": inspect.Parameter.empty, **SCHEDULES[cls.__name__]}
            kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
            parameters = [inspect.Parameter(n, kind, default=v) for n, v in defaults.items()]
            cls.__signature__ = inspect.Signature(parameters)

    def __init__(self, *given: Any, **named: Any) -> None:
        """Take the parameters of `SCHEDULES`; raises `ConfigError` for invalid values."""
        bound = self.__signature__.bind(*given, **named)
        bound.apply_defaults()
        params = dict(bound.arguments)
        optimizer, begin = params.pop("optimizer"), params.pop("last_batch_iteration")
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        if params.get("warmup_max_lr", rates) is None:
            params["warmup_max_lr"] = rates
        scalar_rates = [n for n in _GROUP_RATES if isinstance(params.get(n), int | float)]
        if scalar_rates and len(set(rates)) > 1:
            text = (
                f"{scalar_rates[0]} {params[scalar_rates[0]]:g} is the rate of all "
                f"{len(rates)} parameter groups, instead of "
                f"{', '.join(f'{rate:g}' for rate in rates)}: pass a list for one rate per group"
            )
            warnings.warn(text, InfinityWarning, stacklevel=2)
        params = {name: _validated(optimizer, name, value) for name, value in params.items()}
        total, steps = params.get("total_num_steps"), params.get("warmup_num_steps")
        if params.get("cycle_momentum") and "betas" not in optimizer.defaults:
            params["cycle_momentum"] = False
            text = "OneCycle leaves the momentum alone: this optimizer has no betas"
            warnings.warn(text, InfinityWarning, stacklevel=2)
        vars(self).update(params, own_lrs=rates)  # attributes are part of `state_dict()`
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        super().__init__(optimizer, begin)
        if total is not None and total < steps:
            text = f"total_num_steps {total} is less than warmup_num_steps {steps}"
            warnings.warn(text, InfinityWarning, stacklevel=2)

    def get_lr(self) -> list[float]:  # type: ignore[override]
        """Return the current rate of each group."""
        return type(self)._rates(vars(self), self.last_epoch - 1)

    def step(self, epoch: int | None = None) -> None:
        """Set the rates, and OneCycle's momentum, of the next step."""
        super().step(epoch)
        if vars(self).get("cycle_momentum"):
            momenta = _momenta(vars(self), self.last_epoch - 1)
            for group, momentum in zip(self.optimizer.param_groups, momenta, strict=True):
                group["betas"] = (momentum, _SECOND_BETA)


class WarmupLR(_Schedule):
    """Warm-up from `warmup_min_lr` to `warmup_max_lr` in `warmup_num_steps` steps, then constant.

    Rates are numbers, or lists with one for each group; `warmup_max_lr` defaults to the rate of
    each group. `warmup_type` is "log" or "linear". The first two steps use the smallest rate.
    Raises `ConfigError` for invalid parameters.
    """

    _rates = staticmethod(_warmup)


class WarmupDecayLR(_Schedule):
    """`WarmupLR`, then linear decay to `warmup_min_lr` at `total_num_steps`."""

    _rates = staticmethod(_warmup)


class WarmupCosineLR(_Schedule):
    """Rate of each group times a ratio: warm-up from `warmup_min_ratio` to 1, then half a cosine.

    The cosine ends at `cos_min_ratio` after `total_num_steps` steps; the ratio is constant after
    that. The first step uses rate 0, independent of `warmup_min_ratio`.
    """

    _rates = staticmethod(_cosine)


class LRRangeTest(_Schedule):
    """Learning-rate range test: `min_lr * (1 + step_rate * steps)`.

    `steps` counts intervals of `lr_range_test_step_size` steps, fractions included unless
    `lr_range_test_staircase`.
    """

    _rates = staticmethod(_range_test)


class OneCycle(_Schedule):
    """One cycle of the rate, up and down, then decay; Adam's momentum cycles inversely.

    With a stair count, that half of the cycle moves in steps. `decay_step_size` 0 means no decay.
    The momentum is the first of `betas`; the second is set to 0.99, and before the first step the
    momentum is `cycle_min_mom`, as in DeepSpeed. The momentum of an optimizer without `betas` is
    not changed, with a warning.
    """

    _rates = staticmethod(_cycle)


DEEPSPEED_SCHEDULES = (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
VALID_LR_SCHEDULES = [kind.__name__ for kind in DEEPSPEED_SCHEDULES]  # DeepSpeed's name for it


# --- by name -------------------------------------------------------------------------------------


def known_schedules() -> dict[str, type[lr_scheduler.LRScheduler]]:
    """Return all schedules that a configuration may name: torch's and these, sorted by name."""
    schedules = torch_schedules() | {kind.__name__: kind for kind in DEEPSPEED_SCHEDULES}
    return dict(sorted(schedules.items()))


def make_schedule(name: str, params: Params, optimizer: Optimizer) -> lr_scheduler.LRScheduler:
    """Make the schedule of a known name; raises `ConfigError` if it rejects its parameters.

    torch checks some of them in `step()` only, so a copy of the schedule steps first.
    """
    schedule_class = known_schedules()[name]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the schedule itself warns again
            trial: Any = schedule_class(_stand_in(optimizer), **deepcopy(dict(params)))
            trial.step(*([0.0] if isinstance(trial, lr_scheduler.ReduceLROnPlateau) else []))
        return schedule_class(optimizer, **params)
    except ConfigError as error:
        raise ConfigError(
            f"scheduler.params.{error.what}", because=error.because, remedy=error.remedy
        ) from None
    except InfinityError:
        raise
    except Exception as error:  # torch may raise any type
        raise ConfigError(
            f"scheduler.params: {name} refuses {dict(params)}: {first_lines(error)}",
            remedy="its arguments: see torch.optim.lr_scheduler, or infinity.optim.lr_schedules",
        ) from error


def _stand_in(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer with the same groups, over parameters of one element."""
    groups = [
        {name: deepcopy(value) for name, value in group.items() if name != "params"}
        | {"params": [torch.nn.Parameter(torch.zeros(1))]}
        for group in optimizer.param_groups
    ]
    return Optimizer(groups, dict(optimizer.defaults))


def _validated(optimizer: Optimizer, name: str, value: Any) -> Any:
    """Return a validated parameter in normal form: rates as a list, one for each group."""
    if name in _RATES:
        count = len(optimizer.param_groups)
        values = value if isinstance(value, list | tuple) else [value] * count
        if len(values) != count:
            raise ConfigError(
                f"{name} has {len(values)} values for {count} parameter groups",
                remedy="give one for each group, or one number for all",
            )
        return [_number(name, rate) for rate in values]
    if name == "warmup_type":
        if value not in _WARMUP_TYPES:
            remedy = f"one of {', '.join(map(repr, _WARMUP_TYPES))}"
            raise ConfigError(f"warmup_type is {value!r}", remedy=remedy)
        return value
    if name in _FLAGS:
        return bool(value)
    if value is None and name.startswith("cycle_second"):
        return None
    number = _number(name, value)
    if name not in _MIN_COUNTS:
        return number
    if number != int(number) or number < _MIN_COUNTS[name]:
        remedy = f"an integer, {_MIN_COUNTS[name]} or more"
        raise ConfigError(f"{name} is {value!r}", remedy=remedy)
    return max(2, int(number)) if name == "warmup_num_steps" else int(number)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{name} is {value!r}", remedy=f"{name} is a finite number")
    return float(value)

"""Learning-rate schedules by name: torch's, and the five that DeepSpeed has and torch has not.

Those five have DeepSpeed's names, parameters and values, quirks included, in closed form: what a
group gets depends on the number of steps only. There the count starts at -1 when the schedule is
made, here (as in torch) `last_epoch` is 0 then; so `last_epoch - 1` is its `last_batch_iteration`.
State is plain numbers and lists.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer, lr_scheduler

from infinity.errors import ConfigError, InfinityError, InfinityWarning, first_lines

if TYPE_CHECKING:
    from infinity.config_optimizer import SchedulerConfig

_SECOND_BETA = 0.99  # what OneCycle sets beside the momentum it cycles
_WARMUP_TYPES = ("log", "linear")


class _Schedule(lr_scheduler.LRScheduler):
    """A rate for each group from the count alone.

    What a subclass needs must be set before `__init__` of this class, which sets the first rates.
    """

    def __init__(self, optimizer: Optimizer, last_batch_iteration: int) -> None:
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        super().__init__(optimizer, last_batch_iteration)

    def rates(self, iteration: int) -> list[float]:
        """The rate of each group after `iteration + 1` steps; -1 is before the first."""
        raise NotImplementedError

    def get_lr(self) -> list[float]:  # type: ignore[override]
        """The rate of each group now."""
        return self.rates(self.last_epoch - 1)


class _Warmup:
    """The first part of the three warm-up schedules: from 0 to 1 in `num_steps` steps."""

    def __init__(self, num_steps: int, kind: str) -> None:
        if kind not in _WARMUP_TYPES:
            raise ConfigError(
                f"warmup_type is {kind!r}", remedy=f"one of {', '.join(map(repr, _WARMUP_TYPES))}"
            )
        self.num_steps = max(2, _count("warmup_num_steps", num_steps))
        self.kind = kind

    def at(self, iteration: int) -> float:
        """The share of the way that is done; only for iterations below `num_steps`."""
        if self.kind == "log":
            return (1.0 / math.log(self.num_steps)) * math.log(iteration + 1)
        return iteration / self.num_steps


class WarmupLR(_Schedule):
    """From `warmup_min_lr` to `warmup_max_lr` in `warmup_num_steps` steps, and constant from then.

    Rates are numbers, or lists with one for each group; `warmup_max_lr` is each group's own rate
    where it is left out. `warmup_type` is "log" or "linear". The first two steps are made at the
    smallest rate. Raises `ConfigError` for anything else.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        warmup = _Warmup(warmup_num_steps, warmup_type)
        self.warmup_num_steps, self.warmup_type = warmup.num_steps, warmup.kind
        if warmup_max_lr is None:
            warmup_max_lr = [float(group["lr"]) for group in optimizer.param_groups]
        self.min_lrs = _per_group(optimizer, "warmup_min_lr", warmup_min_lr)
        self.max_lrs = _per_group(optimizer, "warmup_max_lr", warmup_max_lr)
        super().__init__(optimizer, last_batch_iteration)

    def rates(self, iteration: int) -> list[float]:
        """See the class."""
        if iteration < 0:
            return list(self.min_lrs)
        if iteration < self.warmup_num_steps:
            share = _Warmup(self.warmup_num_steps, self.warmup_type).at(iteration)
        else:
            share = self._after(iteration)
        ends = zip(self.min_lrs, self.max_lrs, strict=True)
        return [low + (high - low) * share for low, high in ends]

    def _after(self, iteration: int) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """As `WarmupLR`, and then in a straight line down to `warmup_min_lr` at `total_num_steps`."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = _count("total_num_steps", total_num_steps)
        super().__init__(
            optimizer,
            warmup_min_lr,
            warmup_max_lr,
            warmup_num_steps,
            warmup_type,
            last_batch_iteration,
        )
        _warn_if_short(self.total_num_steps, self.warmup_num_steps)

    def _after(self, iteration: int) -> float:
        span = max(1.0, self.total_num_steps - self.warmup_num_steps)
        return max(0.0, float(self.total_num_steps - iteration) / span)


class WarmupCosineLR(_Schedule):
    """Each group's own rate times a ratio: up from `warmup_min_ratio` to 1, then half a cosine.

    The cosine ends at `cos_min_ratio` after `total_num_steps` steps and stays there. The first
    step is made at rate 0, whatever `warmup_min_ratio`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        warmup = _Warmup(warmup_num_steps, warmup_type)
        self.total_num_steps = _count("total_num_steps", total_num_steps)
        self.warmup_num_steps, self.warmup_type = warmup.num_steps, warmup.kind
        self.warmup_min_ratio = _number("warmup_min_ratio", warmup_min_ratio)
        self.cos_min_ratio = _number("cos_min_ratio", cos_min_ratio)
        self.org_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        super().__init__(optimizer, last_batch_iteration)
        _warn_if_short(self.total_num_steps, self.warmup_num_steps)

    def rates(self, iteration: int) -> list[float]:
        """See the class."""
        ratio = self.ratio(iteration)
        return [rate * ratio for rate in self.org_lrs]

    def ratio(self, iteration: int) -> float:
        """What the groups' own rates are multiplied with."""
        if iteration < 0:
            return 0.0
        if iteration < self.warmup_num_steps:
            share = _Warmup(self.warmup_num_steps, self.warmup_type).at(iteration)
            return self.warmup_min_ratio + share * (1.0 - self.warmup_min_ratio)
        past = iteration - self.warmup_num_steps + 1
        done = min(1.0, past / max(1, self.total_num_steps - self.warmup_num_steps))
        wave = (1 + math.cos(math.pi * done)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * wave)


class LRRangeTest(_Schedule):
    """Ever larger rates, to find the largest that trains: `min_lr * (1 + step_rate * steps)`.

    `steps` counts intervals of `lr_range_test_step_size` steps, fractions included unless
    `lr_range_test_staircase`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: float | Sequence[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self.min_lrs = _per_group(optimizer, "lr_range_test_min_lr", lr_range_test_min_lr)
        self.step_size = _count("lr_range_test_step_size", lr_range_test_step_size)
        self.step_rate = _number("lr_range_test_step_rate", lr_range_test_step_rate)
        self.staircase = bool(lr_range_test_staircase)
        super().__init__(optimizer, last_batch_iteration)

    def rates(self, iteration: int) -> list[float]:
        """See the class."""
        steps: float = float(iteration + 1) / self.step_size
        increase = 1 + self.step_rate * (math.floor(steps) if self.staircase else steps)
        return [low * increase for low in self.min_lrs]


class OneCycle(_Schedule):
    """One cycle of the rate, up and down, then a decay; Adam's momentum cycles the other way.

    With a stair count a half moves in that many stairs. `decay_step_size` 0 means no decay. The
    momentum is the first of `betas`; the second is set to 0.99, and before the first step the
    momentum is `cycle_min_mom`, as in DeepSpeed. An optimizer without `betas` keeps its momentum,
    with a warning.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: float | Sequence[float],
        cycle_max_lr: float | Sequence[float],
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float | Sequence[float] = 0.8,
        cycle_max_mom: float | Sequence[float] = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        first = float(_count("cycle_first_step_size", cycle_first_step_size))
        second = first
        if cycle_second_step_size is not None:
            second = float(_count("cycle_second_step_size", cycle_second_step_size, least=0))
        stairs = _count("cycle_first_stair_count", cycle_first_stair_count, least=0)
        self.halves = [first, second]
        self.stairs = [stairs, stairs]
        if cycle_second_stair_count is not None:
            count = _count("cycle_second_stair_count", cycle_second_stair_count, least=0)
            self.stairs[1] = count
        self.decay_step_size = _count("decay_step_size", decay_step_size, least=0)
        self.min_lrs = _per_group(optimizer, "cycle_min_lr", cycle_min_lr)
        self.max_lrs = _per_group(optimizer, "cycle_max_lr", cycle_max_lr)
        self.decay_lr_rate = _number("decay_lr_rate", decay_lr_rate)
        self.cycle_momentum = bool(cycle_momentum)
        if self.cycle_momentum and "betas" not in optimizer.defaults:
            warnings.warn(
                "OneCycle leaves the momentum alone: this optimizer has no betas",
                InfinityWarning,
                stacklevel=2,
            )
            self.cycle_momentum = False
        self.min_moms = _per_group(optimizer, "cycle_min_mom", cycle_min_mom)
        self.max_moms = _per_group(optimizer, "cycle_max_mom", cycle_max_mom)
        self.decay_mom_rate = _number("decay_mom_rate", decay_mom_rate)
        super().__init__(optimizer, last_batch_iteration)

    def step(self, epoch: int | None = None) -> None:
        """Set the rates, and the momentum, of the next step."""
        super().step(epoch)
        if self.cycle_momentum:
            momenta = self.momenta(self.last_epoch - 1)
            for group, momentum in zip(self.optimizer.param_groups, momenta, strict=True):
                group["betas"] = (momentum, _SECOND_BETA)

    def rates(self, iteration: int) -> list[float]:
        """See the class."""
        past = self._past(iteration)
        if past < 1:
            scale = self._scale(iteration)
            ends = zip(self.min_lrs, self.max_lrs, strict=True)
            return [low + (high - low) * scale for low, high in ends]
        if not self.decay_step_size or not self.decay_lr_rate:
            return list(self.min_lrs)
        factor = 1 + self.decay_lr_rate * (past / self.decay_step_size)
        return [low / factor for low in self.min_lrs]

    def momenta(self, iteration: int) -> list[float]:
        """The momentum of each group after `iteration + 1` steps."""
        past = self._past(iteration)
        if iteration < 0:
            return list(self.min_moms)
        if past < 1:
            scale = self._scale(iteration)
            ends = zip(self.min_moms, self.max_moms, strict=True)
            return [high - (high - low) * scale for low, high in ends]
        if not self.decay_step_size or not self.decay_mom_rate:
            return list(self.max_moms)
        factor = 1 + self.decay_mom_rate * (past / self.decay_step_size)
        return [high * factor for high in self.max_moms]

    def _past(self, iteration: int) -> float:
        """Steps of the decay: 1 is the first."""
        return iteration - sum(self.halves) + 1

    def _scale(self, iteration: int) -> float:
        """Where in the cycle: 0 at its ends, 1 in the middle."""
        count, (first, second) = iteration + 1, self.halves
        total = first + second
        ratio = first / total
        x = 1.0 + count / total - math.floor(1 + count / total)
        rising = x <= ratio
        stairs = self.stairs[0 if rising else 1]
        if stairs > 0:
            # From whole counts: a share may lie a rounding below a stair, and lose all of it.
            inside = count % total
            if inside <= first:
                position = inside * stairs / first
            else:
                position = (total - inside) * stairs / second
            return math.floor(position) / stairs
        return x / ratio if rising else (x - 1) / (ratio - 1)


OURS = (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
VALID_LR_SCHEDULES = [schedule.__name__ for schedule in OURS]  # DeepSpeed's name for it


def known_schedules() -> dict[str, type[lr_scheduler.LRScheduler]]:
    """Every schedule a configuration may name: torch's and ours, sorted by name."""
    base = lr_scheduler.LRScheduler
    torchs = {
        name: value
        for name, value in vars(lr_scheduler).items()
        if inspect.isclass(value)
        and issubclass(value, base)
        and value is not base
        and not name.startswith("_")
    }
    found = torchs | {schedule.__name__: schedule for schedule in OURS}
    return dict(sorted(found.items()))


def make_schedule(section: SchedulerConfig, optimizer: Optimizer) -> lr_scheduler.LRScheduler:
    """The schedule that a configuration names; `ConfigError` where it refuses its params.

    torch looks at some of them in `step()` only, so a copy makes a step before.
    """
    kind = known_schedules()[section.type]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the schedule itself says the same
            tried: Any = kind(_stand_in(optimizer), **deepcopy(section.params))
            tried.step(*([0.0] if isinstance(tried, lr_scheduler.ReduceLROnPlateau) else []))
        return kind(optimizer, **section.params)
    except InfinityError:
        raise
    except Exception as error:  # of whatever kind torch's arithmetic comes to
        raise ConfigError(
            f"scheduler {section.type} refuses its params {section.params}: {first_lines(error)}",
            remedy="see torch.optim.lr_scheduler, or infinity.schedules, for what it takes",
        ) from error


def _stand_in(optimizer: Optimizer) -> Optimizer:
    """An optimizer with the same groups, over parameters of one element."""
    groups = [
        {name: deepcopy(value) for name, value in group.items() if name != "params"}
        | {"params": [torch.nn.Parameter(torch.zeros(1))]}
        for group in optimizer.param_groups
    ]
    return Optimizer(groups, dict(optimizer.defaults))


def _per_group(optimizer: Optimizer, name: str, value: Any) -> list[float]:
    count = len(optimizer.param_groups)
    if not isinstance(value, list | tuple):
        return [_number(name, value)] * count
    if len(value) != count:
        raise ConfigError(
            f"{name} has {len(value)} values for {count} parameter groups",
            remedy="give one for each group, or one number for all",
        )
    return [_number(name, part) for part in value]


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{name} is {value!r}", remedy=f"{name} is a finite number")
    return float(value)


def _count(name: str, value: Any, least: int = 1) -> int:
    number = _number(name, value)
    if number != int(number) or number < least:
        raise ConfigError(f"{name} is {value!r}", remedy=f"a whole number, {least} or more")
    return int(number)


def _warn_if_short(total: int, warmup: int) -> None:
    if total < warmup:
        warnings.warn(
            f"total_num_steps {total} is less than warmup_num_steps {warmup}",
            InfinityWarning,
            stacklevel=3,
        )

"""What the user chooses of an optimizer, and the scalars of one step that follow from it.

Every rule is a frozen dataclass with the same face: `rule`, `num_moments`, `unsigned`, `initial`,
`maximize` and `scalars(step, grad_scale)`. Scalars are computed in double and rounded to fp32 once;
their order is that of the rule's `make` in csrc/adam/update.inl. The order of operations is that of
torch's single-tensor (`foreach=False, fused=False`) path. Invariant: no state, no tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from infinity.errors import ConfigError
from infinity.formats import MomentFormat
from infinity.plan.plan import RuleFacts


class Rule(IntEnum):
    """The update rules of csrc/adam/update.inl; the numbers are the kernels' own."""

    ADAM = 0  # AdamW, and Adam with L2
    LION = 1
    MOMENTUM = 2  # SGD with momentum
    PLAIN = 3  # SGD without
    ADAGRAD = 4


@dataclass(frozen=True)
class AdamHyper:
    """AdamW (Loshchilov & Hutter 2019); with `decoupled=False` Adam with L2 (Kingma & Ba 2015)."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    decoupled: bool = True
    maximize: bool = False

    rule = Rule.ADAM
    num_moments = 2
    unsigned = (False, True)
    initial = (0.0, 0.0)

    def __post_init__(self) -> None:
        _require_not_negative(self, "lr", "eps", "weight_decay")
        _require_below_one(self, "beta1", "beta2")

    def scalars(self, step: int, grad_scale: float = 1.0) -> tuple[float, ...]:
        """Return the nine numbers of step `step`, which counts from 1.

        (grad_scale, decay, l2, 1 - beta1, beta2, 1 - beta2, step_size, sqrt(bias correction 2),
        eps); decay multiplies the weight, l2 adds `l2 * weight` to the gradient.
        """
        _require_step(step)
        bias_correction1 = 1 - self.beta1**step
        bias_correction2 = 1 - self.beta2**step
        return _rounded(
            _signed(grad_scale, self.maximize),
            1 - self.lr * self.weight_decay if self.decoupled else 1.0,
            0.0 if self.decoupled else self.weight_decay,
            1 - self.beta1,
            self.beta2,
            1 - self.beta2,
            self.lr / bias_correction1,
            bias_correction2**0.5,
            self.eps,
        )


@dataclass(frozen=True)
class LionHyper:
    """Lion (Chen et al. 2023): the sign of an interpolation; weight decay is decoupled."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0
    maximize: bool = False

    rule = Rule.LION
    num_moments = 1
    unsigned = (False,)
    initial = (0.0,)

    def __post_init__(self) -> None:
        _require_not_negative(self, "lr", "weight_decay")
        _require_below_one(self, "beta1", "beta2")

    def scalars(self, step: int, grad_scale: float = 1.0) -> tuple[float, ...]:
        """Return (grad_scale, decay, beta1, 1 - beta1, beta2, 1 - beta2, lr)."""
        _require_step(step)
        return _rounded(
            _signed(grad_scale, self.maximize),
            1 - self.lr * self.weight_decay,
            self.beta1,
            1 - self.beta1,
            self.beta2,
            1 - self.beta2,
            self.lr,
        )


@dataclass(frozen=True)
class SgdHyper:
    """SGD; with momentum 0 it has no moment. Weight decay is L2, as in torch.

    `begins` is the step in which the momentum buffer is made: later than 1 where momentum was 0
    until then. Whoever keeps the buffer knows it.
    """

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False
    begins: int = 1

    unsigned = (False,)
    initial = (0.0,)

    def __post_init__(self) -> None:
        _require_not_negative(self, "lr", "momentum", "weight_decay")
        if not math.isfinite(self.dampening):
            raise ConfigError(f"dampening is {self.dampening}", remedy="a finite dampening")
        if self.nesterov and (self.momentum == 0.0 or self.dampening != 0.0):
            raise ConfigError(
                f"nesterov with momentum {self.momentum} and dampening {self.dampening}",
                remedy="momentum > 0 and dampening 0",
            )

    @property
    def rule(self) -> Rule:
        """Without momentum there is nothing to keep, so that is a rule of its own."""
        return Rule.MOMENTUM if self.momentum != 0.0 else Rule.PLAIN

    @property
    def num_moments(self) -> int:
        """The momentum buffer, if there is momentum."""
        return 1 if self.momentum != 0.0 else 0

    def scalars(self, step: int, grad_scale: float = 1.0) -> tuple[float, ...]:
        """Return (grad_scale, l2, momentum, 1 - dampening, Nesterov's momentum or 0, lr).

        In its first step the buffer becomes the gradient itself: momentum is 0 and dampening too.
        """
        _require_step(step)
        fresh = step == self.begins
        return _rounded(
            _signed(grad_scale, self.maximize),
            self.weight_decay,
            0.0 if fresh else self.momentum,
            1.0 if fresh else 1 - self.dampening,
            self.momentum if self.nesterov else 0.0,
            self.lr,
        )


@dataclass(frozen=True)
class AdagradHyper:
    """Adagrad (Duchi et al. 2011); one moment, the sum of squares. Weight decay is L2."""

    lr: float
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    eps: float = 1e-10
    initial_accumulator_value: float = 0.0
    maximize: bool = False

    rule = Rule.ADAGRAD
    num_moments = 1
    unsigned = (True,)

    def __post_init__(self) -> None:
        names = ("lr", "lr_decay", "weight_decay", "eps", "initial_accumulator_value")
        _require_not_negative(self, *names)

    @property
    def initial(self) -> tuple[float, ...]:
        """What a fresh moment is filled with."""
        return (self.initial_accumulator_value,)

    def scalars(self, step: int, grad_scale: float = 1.0) -> tuple[float, ...]:
        """Return (grad_scale, l2, step size, eps)."""
        _require_step(step)
        return _rounded(
            _signed(grad_scale, self.maximize),
            self.weight_decay,
            self.lr / (1 + (step - 1) * self.lr_decay),
            self.eps,
        )


Hyper = AdamHyper | LionHyper | SgdHyper | AdagradHyper


def _signed(grad_scale: float, maximize: bool) -> float:
    """`maximize` turns the gradient round; a product with -s is the negated product with s."""
    return -grad_scale if maximize else grad_scale


def _rounded(*doubles: float) -> tuple[float, ...]:
    with np.errstate(over="ignore"):
        return tuple(float(np.float32(value)) for value in doubles)


def _require_step(step: int) -> None:
    if step < 1:
        raise ConfigError(
            f"step is {step}",
            because="steps count from 1; bias correction divides by 1 - beta ** step",
        )


def _require_not_negative(hyper: object, *names: str) -> None:
    for name in names:
        value = getattr(hyper, name)
        if not 0.0 <= value < math.inf:
            raise ConfigError(f"{name} is {value}", remedy=f"{name} >= 0, and finite")


def _require_below_one(hyper: object, *names: str) -> None:
    for name in names:
        value = getattr(hyper, name)
        if not 0.0 <= value < 1.0:
            raise ConfigError(f"{name} is {value}", remedy=f"0 <= {name} < 1")


# The built-in rules by their names in the config: hyper-parameters of groups, and what they keep.
#
# Without torch: `infinity plan` asks what a rule keeps, and runs none.


def hyper_of(rule: str, group: Mapping[str, Any]) -> Hyper:
    """The hyper-parameters a group holds now; raises `ConfigError` for what makes no sense."""
    maximize = bool(group["maximize"])
    lr, weight_decay = float(group["lr"]), float(group["weight_decay"])
    if rule in ("AdamW", "Adam"):
        beta1, beta2 = map(float, group["betas"])
        return AdamHyper(
            lr, beta1, beta2, float(group["eps"]), weight_decay, rule == "AdamW", maximize
        )
    if rule == "Lion":
        beta1, beta2 = map(float, group["betas"])
        return LionHyper(lr, beta1, beta2, weight_decay, maximize)
    if rule == "SGD":
        momentum, dampening = float(group["momentum"]), float(group["dampening"])
        return SgdHyper(lr, momentum, dampening, weight_decay, bool(group["nesterov"]), maximize)
    initial = float(group["initial_accumulator_value"])
    eps = float(group["eps"])
    return AdagradHyper(lr, float(group["lr_decay"]), weight_decay, eps, initial, maximize)


def reserved_moments(
    rule: str, groups: Sequence[Mapping[str, Any]], form: MomentFormat
) -> tuple[MomentFormat, ...]:
    """A format for each moment of the group that needs the most of them."""
    return (form,) * max((hyper_of(rule, group).num_moments for group in groups), default=0)


def lossy_notes(form: MomentFormat) -> tuple[str, ...]:
    """What a plan must say of moments in this format."""
    if form.is_exact:
        return ()
    return (f"moments are stored in {form.value}: lossy, not what fp32 gives",)


def rule_facts(rule: str, groups: Sequence[Mapping[str, Any]], form: MomentFormat) -> RuleFacts:
    """What the plan needs to know of a built-in rule over these groups."""
    moments = reserved_moments(rule, groups, form)
    return RuleFacts(name=rule, moments=moments, notes=lossy_notes(form))

"""Update rules, one dataclass each, and the table `RULES` of them by name.

An instance holds the current values of a parameter group; `scalars` computes the numbers of one
step from it. No state, no tensors, no torch: `infinity plan` needs the state of a rule, not its
kernels.

[Note: a rule in three places]
An elementwise rule is a dataclass here with its line in `RULES` (and in `ENTRY_DESCRIPTIONS` for an
entry of a new name), a struct named as its `kernel`, listed in `INFINITY_RULES`
(csrc/adam/update.inl), and a function in `tests/support/reference.py`. It has at most two moments,
and `scalars` returns at most nine numbers (csrc/adam/kernels.h). Everything else is derived from
these: names and defaults in configs, also of DeepSpeed and transformers, state entries, CPU and GPU
kernels, tests.

[Note: other rules]
A rule that is not elementwise (Muon: momentum, then an orthogonalized matrix) is a dataclass here
too, without `kernel`: `infinity/optim/muon.py` runs it in torch operations on any device. It steps
only full parameters of some groups: `RuleParams.groups` marks these (`use_muon`) and assigns the
others to a rule with a kernel. A rule defines the number of moments, and which are `nonnegative`;
it does not depend on their storage format (8-bit and others, see `infinity/types.py`).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, ClassVar, Self

from infinity.errors import ConfigError
from infinity.types import MomentFormat

_NOT_IN_GROUP = {"of_group": False}  # metadata of fields that are no entry of a parameter group


@dataclass(frozen=True)
class RuleParams:
    """Base of all rules: the entries of a parameter group that the rule uses.

    Fields have torch's names and defaults. They are non-negative numbers (any with `signed`), pairs
    of numbers below 1, booleans, and strings (one of `choices`).
    """

    kernel: ClassVar[str]  # struct in csrc/adam/update.inl, or "" if none; may be a property
    state_names: ClassVar[tuple[str, ...]]  # torch's names of the moments
    nonnegative: ClassVar[tuple[bool, ...]]  # for each moment, whether it is never negative
    counts: ClassVar[bool] = True  # whether torch's state has `step`
    # The entry that switches the moments on if it is above 0; empty if they always exist. torch
    # makes them in the first step with this entry above 0.
    switch: ClassVar[str] = ""
    # True for decoupled weight decay, False if added to the gradient; None unless both rules exist.
    decoupled: ClassVar[bool | None] = None
    in_torch: ClassVar[bool] = True  # whether `torch.optim` has a class of this name
    # Defaults of DeepSpeed's rule of this name that differ; None if DeepSpeed has no such rule.
    deepspeed: ClassVar[Mapping[str, Any] | None] = None
    # DeepSpeed keys with other names -> entries; of two keys for one entry, the later wins.
    deepspeed_keys: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def __post_init__(self) -> None:
        for entry in _entries(type(self)):
            value = getattr(self, entry.name)
            _check_range(entry, value)
            if problem := self.problem(entry.name, value, vars(self)):
                raise ConfigError(f"{entry.name} {problem}")

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return the entries of a parameter group, with their defaults."""
        return {entry.name: entry.default for entry in _entries(cls)}

    @classmethod
    def is_signed(cls, name: str) -> bool:
        """Return True if an entry may be negative."""
        return any(e.name == name and e.metadata.get("signed", False) for e in _entries(cls))

    @classmethod
    def choices(cls, name: str) -> tuple[str, ...]:
        """Return the allowed values of entries that are strings."""
        return next(e.metadata["choices"] for e in _entries(cls) if e.name == name)

    @classmethod
    def groups(
        cls,
        given: Sequence[dict[str, Any]],
        options: Mapping[str, Any],
        is_hidden: Callable[[Any], bool],
        is_stack: Callable[[Any], bool] = lambda _: False,
    ) -> list[dict[str, Any]]:
        """Return parameter groups with all entries; `options` are the defaults.

        `is_hidden` returns True for a matrix inside a model, `is_stack` for a stack of matrices.
        Groups are completed in place if the rule steps all parameters in the same way.
        """
        for group in given:
            for name, value in options.items():
                group.setdefault(name, value)
        return list(given)

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> RuleParams:
        """Return the current values of a group; raises `ConfigError` for invalid ones."""
        fixed = {"amsgrad": False, "bias_correction": True, "decoupled_weight_decay": cls.decoupled}
        for name, required in fixed.items():
            if required is not None and bool(group.get(name, required)) is not required:
                raise ConfigError(
                    f"a parameter group has {name}={group[name]}",
                    because=f"the built-in {cls.__name__} has {name}={required}",
                    remedy="leave it out, or pass a torch optimizer, which torch runs, slower",
                )
        return cls(**{e.name: _converted(e.name, e.default, group) for e in _entries(cls)})

    @classmethod
    def problem(cls, name: str, value: Any, others: Mapping[str, Any]) -> str:
        """Describe a problem of an entry given the `others`; empty if there is none."""
        return ""

    @property
    def num_moments(self) -> int:
        """The number of moments of a parameter."""
        return len(self.state_names)

    @property
    def initial(self) -> tuple[float, ...]:
        """The initial value of each moment."""
        return (0.0,) * len(self.state_names)

    def with_first_step(self, step: int) -> Self:
        """Return the values for a parameter whose moments were made in step `step`."""
        return self

    def with_shape(self, shape: tuple[int, ...]) -> Self:
        """Return the values for a parameter of this shape."""
        return self

    def scalars(self, step: int, grad_scale: float = 1.0) -> tuple[float, ...]:
        """Return the scalars of step `step` (from 1), in the order of the kernel's `make`.

        They are computed in fp64 and rounded to fp32 once. `maximize` negates `grad_scale`, which
        is exact: a product with -s is the negated product with s.
        """
        if step < 1:
            raise ConfigError(
                f"step is {step}",
                because="steps count from 1; bias correction divides by 1 - beta ** step",
            )
        scale = -grad_scale if getattr(self, "maximize", False) else grad_scale
        return tuple(ctypes.c_float(number).value for number in (scale, *self._step_scalars(step)))

    def _step_scalars(self, step: int) -> tuple[float, ...]:
        """Return the scalars after the gradient scale."""
        raise NotImplementedError


@dataclass(frozen=True)
class AdamW(RuleParams):
    """AdamW (Loshchilov & Hutter 2019): decay multiplies the weight."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    maximize: bool = False

    kernel = "Adam"
    state_names = ("exp_avg", "exp_avg_sq")
    nonnegative = (False, True)
    decoupled = True
    deepspeed = {"weight_decay": 0.0}  # noqa: RUF012

    def _step_scalars(self, step: int) -> tuple[float, ...]:
        """(decay, l2, 1 - beta1, beta2, 1 - beta2, step size, sqrt(bias correction 2), eps)."""
        beta1, beta2 = self.betas
        return (
            1 - self.lr * self.weight_decay if self.decoupled else 1.0,
            0.0 if self.decoupled else self.weight_decay,
            1 - beta1,
            beta2,
            1 - beta2,
            self.lr / (1 - beta1**step),
            (1 - beta2**step) ** 0.5,
            self.eps,
        )


@dataclass(frozen=True)
class Adam(AdamW):
    """Adam with L2 (Kingma & Ba 2015): `weight_decay * weight` is added to the gradient."""

    weight_decay: float = 0.0

    decoupled = False


@dataclass(frozen=True)
class Lion(RuleParams):
    """Lion (Chen et al. 2023): the sign of an interpolation; weight decay is decoupled."""

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    maximize: bool = False

    kernel = "Lion"
    state_names = ("exp_avg",)
    nonnegative = (False,)
    in_torch = False
    deepspeed = {"lr": 1e-3, "betas": [0.9, 0.999]}  # noqa: RUF012

    def _step_scalars(self, step: int) -> tuple[float, ...]:
        """(decay, beta1, 1 - beta1, beta2, 1 - beta2, lr)."""
        beta1, beta2 = self.betas
        return 1 - self.lr * self.weight_decay, beta1, 1 - beta1, beta2, 1 - beta2, self.lr


@dataclass(frozen=True)
class SGD(RuleParams):
    """SGD; with momentum 0 it has no moment. Weight decay is L2, as in torch.

    `begins` is the step in which the momentum buffer is made: later than 1 if momentum was 0 until
    then. `KernelUpdater` records it by parameter.
    """

    lr: float = 1e-3
    momentum: float = 0.0
    dampening: float = field(default=0.0, metadata={"signed": True})
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False
    begins: int = field(default=1, metadata=_NOT_IN_GROUP)

    state_names = ("momentum_buffer",)
    nonnegative = (False,)
    counts = False
    switch = "momentum"
    deepspeed = {}  # noqa: RUF012

    @property
    def kernel(self) -> str:  # type: ignore[override]
        """The kernel; SGD without momentum has no state and a separate kernel."""
        return "Momentum" if self.momentum != 0.0 else "Plain"

    @property
    def num_moments(self) -> int:
        """1 for the momentum buffer, 0 without momentum."""
        return 1 if self.momentum != 0.0 else 0

    @classmethod
    def problem(cls, name: str, value: Any, others: Mapping[str, Any]) -> str:
        """Describe a `nesterov` that lacks momentum or has dampening."""
        momentum, dampening = others.get("momentum", 1.0), others.get("dampening", 0.0)
        if name != "nesterov" or not value or (momentum != 0 and dampening == 0):
            return ""
        return (
            f"needs momentum above 0 and no dampening, got momentum {momentum:g} and "
            f"dampening {dampening:g}"
        )

    def with_first_step(self, step: int) -> Self:
        """Return the values for a parameter whose buffer was made in step `step`."""
        return self if step == self.begins else replace(self, begins=step)

    def _step_scalars(self, step: int) -> tuple[float, ...]:
        """(l2, momentum, 1 - dampening, Nesterov's momentum or 0, lr).

        In the step that makes the buffer it becomes the gradient: momentum and dampening are 0.
        """
        fresh = step == self.begins
        return (
            self.weight_decay,
            0.0 if fresh else self.momentum,
            1.0 if fresh else 1 - self.dampening,
            self.momentum if self.nesterov else 0.0,
            self.lr,
        )


@dataclass(frozen=True)
class Adagrad(RuleParams):
    """Adagrad (Duchi et al. 2011); one moment, the sum of squares. Weight decay is L2."""

    lr: float = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    maximize: bool = False

    kernel = "Adagrad"
    state_names = ("sum",)
    nonnegative = (True,)
    deepspeed = {}  # noqa: RUF012

    @property
    def initial(self) -> tuple[float, ...]:
        """The initial value of the sum of squares."""
        return (self.initial_accumulator_value,)

    def _step_scalars(self, step: int) -> tuple[float, ...]:
        """(l2, step size, eps)."""
        return self.weight_decay, self.lr / (1 + (step - 1) * self.lr_decay), self.eps


@dataclass(frozen=True)
class Muon(RuleParams):
    """Muon (Jordan et al. 2024) for matrices inside a model, AdamW for all else; as torch's.

    Each expert of a stacked parameter is a matrix. The momentum matrix is approximately
    orthogonalized by `ns_steps` of a quintic Newton-Schulz iteration in bf16. Entries that begin
    with `adam_` are AdamW's, for embeddings, the head and 1-D parameters. `use_muon` of a group
    selects Muon or AdamW; a group without it is split.
    """

    lr: float = 1e-3
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    ns_coefficients: tuple[float, float, float] = field(
        default=(3.4445, -4.7750, 2.0315), metadata={"signed": True}
    )
    eps: float = 1e-7
    ns_steps: int = 5
    adjust_lr_fn: str = field(
        default="original", metadata={"choices": ("original", "match_rms_adamw")}
    )
    adam_lr: float = 1e-3
    adam_betas: tuple[float, float] = (0.9, 0.999)
    adam_eps: float = 1e-8
    adam_weight_decay: float = 0.01
    shape: tuple[int, ...] = field(default=(), metadata=_NOT_IN_GROUP)

    kernel = ""
    state_names = ("momentum_buffer",)
    nonnegative = (False,)
    counts = False
    in_torch = False  # torch's class steps only matrices
    deepspeed = {  # noqa: RUF012
        "lr": 0.02, "weight_decay": 0.0, "adam_lr": 3e-4, "adam_betas": [0.9, 0.95],
        "adam_eps": 1e-10, "adam_weight_decay": 0.0,
    }  # fmt: skip
    deepspeed_keys = {  # noqa: RUF012
        "lr": ("lr", "adam_lr"), "momentum": ("momentum",), "betas": ("adam_betas",),
        "eps": ("adam_eps",), "weight_decay": ("weight_decay", "adam_weight_decay"),
        "muon_lr": ("lr",), "adam_lr": ("adam_lr",), "ns_method": (),
        "per_head_muon": (),
    }  # fmt: skip

    @classmethod
    def problem(cls, name: str, value: Any, others: Mapping[str, Any]) -> str:
        """Check the upper bounds of `ns_steps` and `momentum`."""
        if name == "ns_steps" and not 1 <= value < 100:
            return f"is {value}: at least 1, and below 100"
        if name == "momentum" and value > 1:
            return f"is {value:g}: at most 1"
        return ""

    @classmethod
    def groups(
        cls,
        given: Sequence[dict[str, Any]],
        options: Mapping[str, Any],
        is_hidden: Callable[[Any], bool],
        is_stack: Callable[[Any], bool] = lambda _: False,
    ) -> list[dict[str, Any]]:
        """Split each group into one for Muon and one for AdamW.

        A group with `use_muon=True` is completed in place. Entries that begin with `adam_` apply to
        the AdamW group, where they override entries common to both. Raises `ConfigError` for a
        parameter that is not a matrix in a group with `use_muon`.
        """
        groups = []
        for group in given:
            marked = group.get("use_muon")
            if marked:
                for name, value in cls._entries_of(options, by_muon=True).items():
                    group.setdefault(name, value)
                groups.append(group)
                continue
            for_muon = [is_hidden(p) if marked is None else bool(marked) for p in group["params"]]
            for by_muon in (True, False):
                pairs = zip(group["params"], for_muon, strict=True)
                members = [p for p, is_muon in pairs if is_muon is by_muon]
                entries = cls._entries_of(options, by_muon=by_muon)
                entries |= cls._entries_of(group, by_muon=True)
                entries |= {} if by_muon else cls._entries_of(group, by_muon=False)
                if members:
                    groups.append({**entries, "params": members, "use_muon": by_muon})
        for p in (p for group in groups if group["use_muon"] for p in group["params"]):
            if len(p.shape) != 2 + is_stack(p):
                raise ConfigError(
                    f"a parameter of shape {tuple(p.shape)} is in a group with use_muon",
                    because="Muon makes matrices orthogonal",
                    remedy="put it in a group with use_muon=False, which AdamW steps",
                )
        return groups

    @classmethod
    def _entries_of(cls, options: Mapping[str, Any], *, by_muon: bool) -> dict[str, Any]:
        """Return the options of Muon or of AdamW, without the prefix `adam_`."""
        entries = {k: v for k, v in options.items() if k.startswith("adam_") is not by_muon}
        return {k.removeprefix("adam_"): v for k, v in entries.items()}

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> RuleParams:
        """Return the current values of a group, an `AdamW` if `use_muon` is False."""
        if not group.get("use_muon", True):
            return AdamW.of({**AdamW.defaults(), **group})
        return super().of({**cls.defaults(), **group})

    def with_shape(self, shape: tuple[int, ...]) -> Self:
        """Return the values for a matrix of this shape."""
        return self if shape == self.shape else replace(self, shape=shape)

    @property
    def adjusted_lr(self) -> float:
        """The rate of an orthogonalized matrix of `shape`, by `adjust_lr_fn`."""
        rows, columns = self.shape[-2:]
        if self.adjust_lr_fn == "original":
            return self.lr * math.sqrt(max(1, rows / columns))
        return self.lr * 0.2 * math.sqrt(max(rows, columns))


# Descriptions of entries, for the documentation of a configuration.
ENTRY_DESCRIPTIONS = {
    "lr": "Learning rate.",
    "betas": "Decay rates of the moments.",
    "eps": "Added to the denominator.",
    "weight_decay": "Decay of the weights.",
    "maximize": "Ascend instead of descend.",
    "momentum": "Decay rate of the momentum.",
    "dampening": "Dampening of the momentum.",
    "nesterov": "Nesterov momentum.",
    "lr_decay": "Decay of the learning rate over the steps.",
    "initial_accumulator_value": "Initial value of the sums of squares.",
    "ns_coefficients": "Coefficients of the Newton-Schulz iteration.",
    "ns_steps": "Steps of the Newton-Schulz iteration.",
    "adjust_lr_fn": "How the learning rate depends on a matrix's shape.",
    "adam_lr": "AdamW's learning rate, for parameters that are not matrices.",
    "adam_betas": "AdamW's decay rates, for the same parameters.",
    "adam_eps": "AdamW's eps, for the same parameters.",
    "adam_weight_decay": "AdamW's decay, for the same parameters.",
}

RULES: dict[str, type[RuleParams]] = {
    rule.__name__: rule for rule in (AdamW, Adam, Lion, SGD, Adagrad, Muon)
}


def decay_variant(name: str, *, decoupled: bool) -> str:
    """Return the variant of a rule with or without decoupled decay; `name` if there is none."""
    rule = RULES[name]
    if rule.decoupled in (None, decoupled):
        return name
    return next(n for n, r in RULES.items() if r.kernel == rule.kernel and r is not rule)


def reserved_moments(
    rule: str, groups: Sequence[Mapping[str, Any]], form: MomentFormat
) -> tuple[MomentFormat, ...]:
    """Return the format of each moment of the group that needs the most."""
    return (form,) * max((RULES[rule].of(group).num_moments for group in groups), default=0)


def matrix_steps(rule: str, groups: Sequence[Mapping[str, Any]]) -> int:
    """Return the maximum of `ns_steps` over the groups; 0 for a rule with a kernel."""
    group_params = [RULES[rule].of(group) for group in groups]
    return max(
        (rule_params.ns_steps for rule_params in group_params if isinstance(rule_params, Muon)),
        default=0,
    )


def lossy_notes(form: MomentFormat) -> tuple[str, ...]:
    """Return the notes in a plan about moments of a lossy format."""
    if form.is_exact:
        return ()
    return (f"moments are stored in {form.value}: lossy, not what fp32 gives",)


def _entries(rule: type[RuleParams]) -> tuple[Field[Any], ...]:
    """Return the fields of a rule that are entries of its groups."""
    return tuple(entry for entry in fields(rule) if entry.metadata.get("of_group", True))


def _converted(name: str, default: Any, group: Mapping[str, Any]) -> Any:
    """Return an entry of a group, which may be a tensor, converted to the type of its default."""
    if name not in group:
        raise ConfigError(f"a parameter group has no {name}")
    try:
        if not isinstance(default, tuple):
            return type(default)(group[name])
        values = tuple(map(float, group[name]))
        if len(values) != len(default):
            raise ValueError(f"{len(values)} numbers, not {len(default)}")
        return values
    except (TypeError, ValueError, RuntimeError) as error:  # raised by `float`, also for tensors
        raise ConfigError(
            f"a parameter group has {name}={group[name]!r:.80}",
            because=str(error),
            remedy="a number, or a tensor of one element; two of them for betas",
        ) from error


def _check_range(entry: Field[Any], value: Any) -> None:
    """Raise `ConfigError` for a number out of range."""
    name = entry.name
    if isinstance(value, bool):
        return
    if isinstance(value, str):
        if value not in (choices := entry.metadata["choices"]):
            raise ConfigError(f"{name} is {value!r}", remedy=" or ".join(map(repr, choices)))
    elif isinstance(value, tuple) and not entry.metadata.get("signed", False):
        for number, beta in enumerate(value, 1):
            label = f"{name.removesuffix('s')}{number}"
            if not 0.0 <= beta < 1.0:
                raise ConfigError(f"{label} is {beta}", remedy=f"0 <= {label} < 1")
    elif entry.metadata.get("signed", False):
        if not all(map(math.isfinite, value if isinstance(value, tuple) else [value])):
            raise ConfigError(f"{name} is {value}", remedy=f"a finite {name}")
    elif not 0.0 <= value < math.inf:
        raise ConfigError(f"{name} is {value}", remedy=f"{name} >= 0, and finite")

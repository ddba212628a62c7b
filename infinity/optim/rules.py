"""Update rules, one dataclass each, and the table `RULES` of them by name.

An instance holds what a parameter group says of its rule now; `scalars` makes the numbers of one
step from it. No state, no tensors, no torch: `infinity plan` asks what a rule keeps, and runs none.

[Note: a rule in three places]
A rule that works element by element is a dataclass here with its line in `RULES` (and in
`ENTRY_TEXTS` for an entry of a new name), a struct of the same name as its `kernel` with its word
in `INFINITY_RULES` (csrc/adam/update.inl), and a function in `tests/support/reference.py`. It has
at most two moments, and `scalars` at most nine numbers (csrc/adam/kernels.h). Everything else reads
these: names and defaults in a config, of DeepSpeed and of transformers, entries of a state, the
kernels of CPU and GPU, the tests.

[Note: other rules]
A rule that is not elementwise (Muon: momentum, then a matrix made orthogonal) has a line here too,
but no `kernel`: `infinity/optim/muon.py` runs it in torch's operations on any device. It steps only
full parameters of some groups: `RuleParams.groups` marks these (`use_muon`) and gives the others to
a rule with a kernel. How moments are stored (8 bits and others) does not concern a rule: it defines
how many there are, and which are `nonnegative`; see `infinity/types.py`.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, ClassVar, Self

from infinity.errors import ConfigError
from infinity.types import MomentFormat

_NOT_IN_GROUP = {"of_group": False}  # of a field that is no entry of a parameter group


@dataclass(frozen=True)
class RuleParams:
    """Entries of a group for its rule; the base of all rules.

    Fields are the entries of its groups, by torch's names and with torch's defaults: numbers that
    are not negative (`signed`: any), pairs of numbers below 1, switches, and words (`choices`).
    """

    kernel: ClassVar[str]  # the struct in csrc/adam/update.inl; a property where it depends; or ""
    state_names: ClassVar[tuple[str, ...]]  # torch's names of its moments
    nonnegative: ClassVar[tuple[bool, ...]]  # of each moment, whether it is never negative
    counts: ClassVar[bool] = True  # whether torch's state has a `step`
    # The entry that is above 0 where there are moments, if they come and go. torch makes them in
    # the first step that has it.
    switch: ClassVar[str] = ""
    # Of a rule there are two of: is weight decay its own, or is it added to the gradient?
    decoupled: ClassVar[bool | None] = None
    in_torch: ClassVar[bool] = True  # whether `torch.optim` has it, by its name
    # What DeepSpeed's rule of this name starts from where it differs; None if it has none.
    deepspeed: ClassVar[Mapping[str, Any] | None] = None
    # Its keys there and the entries they mean, where names differ; of two of one entry the later.
    deepspeed_keys: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def __post_init__(self) -> None:
        for entry in _entries(type(self)):
            value = getattr(self, entry.name)
            _check(entry, value)
            if problem := self.problem(entry.name, value, vars(self)):
                raise ConfigError(f"{entry.name} {problem}")

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The entries of a parameter group, with their defaults."""
        return {entry.name: entry.default for entry in _entries(cls)}

    @classmethod
    def is_signed(cls, name: str) -> bool:
        """Whether an entry may be negative."""
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

        `is_hidden` tells a matrix inside a model from all other parameters, `is_stack` a stack of
        them. Groups are completed in place, where the rule steps all parameters alike.
        """
        for group in given:
            for name, value in options.items():
                group.setdefault(name, value)
        return list(given)

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> RuleParams:
        """Return the current values of a group; raises `ConfigError` for invalid ones."""
        fixed = {"amsgrad": False, "bias_correction": True, "decoupled_weight_decay": cls.decoupled}
        for name, done in fixed.items():
            if done is not None and bool(group.get(name, done)) is not done:
                raise ConfigError(
                    f"a parameter group has {name}={group[name]}",
                    because=f"{cls.__name__} here has {name}={done}",
                    remedy="leave it out, or pass a torch.optim, which torch runs, slower",
                )
        return cls(**{e.name: _taken(e.name, e.default, group) for e in _entries(cls)})

    @classmethod
    def problem(cls, name: str, value: Any, others: Mapping[str, Any]) -> str:
        """Describe a problem of an entry given the `others`; empty if there is none."""
        return ""

    @property
    def num_moments(self) -> int:
        """How many moments it keeps of a parameter."""
        return len(self.state_names)

    @property
    def initial(self) -> tuple[float, ...]:
        """What fresh moments are filled with: 0, but where they are never negative."""
        return (0.0,) * len(self.state_names)

    def begun_at(self, step: int) -> Self:
        """The same, of a parameter whose moments were made in step `step`."""
        return self

    def of_shape(self, shape: tuple[int, ...]) -> Self:
        """The same, of a parameter of this shape."""
        return self

    def scalars(self, step: int, grad_scale: float = 1.0) -> tuple[float, ...]:
        """The numbers of step `step`, which counts from 1, in the order of the kernel's `make`.

        Computed in double and rounded to fp32 once. `maximize` turns the gradient round: a product
        with -s is the negated product with s.
        """
        if step < 1:
            raise ConfigError(
                f"step is {step}",
                because="steps count from 1; bias correction divides by 1 - beta ** step",
            )
        scale = -grad_scale if getattr(self, "maximize", False) else grad_scale
        return tuple(ctypes.c_float(number).value for number in (scale, *self._numbers(step)))

    def _numbers(self, step: int) -> tuple[float, ...]:
        """The scalars behind the scale of gradients."""
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

    def _numbers(self, step: int) -> tuple[float, ...]:
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

    def _numbers(self, step: int) -> tuple[float, ...]:
        """(decay, beta1, 1 - beta1, beta2, 1 - beta2, lr)."""
        beta1, beta2 = self.betas
        return 1 - self.lr * self.weight_decay, beta1, 1 - beta1, beta2, 1 - beta2, self.lr


@dataclass(frozen=True)
class SGD(RuleParams):
    """SGD; with momentum 0 it has no moment. Weight decay is L2, as in torch.

    `begins` is the step in which the momentum buffer is made: later than 1 where momentum was 0
    until then. Whoever keeps the buffer knows it.
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
        """Without momentum there is nothing to keep, so that is a kernel of its own."""
        return "Momentum" if self.momentum != 0.0 else "Plain"

    @property
    def num_moments(self) -> int:
        """The momentum buffer, if there is momentum."""
        return 1 if self.momentum != 0.0 else 0

    @classmethod
    def problem(cls, name: str, value: Any, others: Mapping[str, Any]) -> str:
        """Nesterov's momentum needs momentum, undamped."""
        momentum, dampening = others.get("momentum", 1.0), others.get("dampening", 0.0)
        if name != "nesterov" or not value or (momentum != 0 and dampening == 0):
            return ""
        return (
            f"needs momentum above 0 and no dampening, got momentum {momentum:g} and "
            f"dampening {dampening:g}"
        )

    def begun_at(self, step: int) -> Self:
        """The same, of a parameter whose buffer was made in step `step`."""
        return self if step == self.begins else replace(self, begins=step)

    def _numbers(self, step: int) -> tuple[float, ...]:
        """(l2, momentum, 1 - dampening, Nesterov's momentum or 0, lr).

        In its first step the buffer becomes the gradient itself: momentum is 0 and dampening too.
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
        """What fresh moments are filled with."""
        return (self.initial_accumulator_value,)

    def _numbers(self, step: int) -> tuple[float, ...]:
        """(l2, step size, eps)."""
        return self.weight_decay, self.lr / (1 + (step - 1) * self.lr_decay), self.eps


@dataclass(frozen=True)
class Muon(RuleParams):
    """Muon (Jordan et al. 2024) for matrices inside a model, AdamW for all else; as torch's.

    Experts that are stacked in one parameter are matrices each. The momentum's matrix is made
    orthogonal, nearly, by `ns_steps` of a quintic Newton-Schulz iteration in bf16. Entries that
    begin with `adam_` are AdamW's, for embeddings, the head, and what has one dimension. A group
    says by `use_muon` who steps it; one that does not is split.
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
    in_torch = False  # its class there steps matrices alone
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
        """Steps of Newton-Schulz and the momentum have upper bounds."""
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
        """Each group as one for Muon and one for AdamW; completed in place if it is Muon's alone.

        What begins with `adam_` is for AdamW's half of a group, and before what both halves take.
        Raises `ConfigError` for a parameter that is no matrix in a group with `use_muon`.
        """
        found = []
        for group in given:
            marked = group.get("use_muon")
            if marked:
                for name, value in cls._entries_of(options, by_muon=True).items():
                    group.setdefault(name, value)
                found.append(group)
                continue
            chosen = [is_hidden(p) if marked is None else bool(marked) for p in group["params"]]
            for takes in (True, False):
                mine = [p for p, it in zip(group["params"], chosen, strict=True) if it is takes]
                entries = cls._entries_of(options, by_muon=takes)
                entries |= cls._entries_of(group, by_muon=True)
                entries |= {} if takes else cls._entries_of(group, by_muon=False)
                if mine:
                    found.append({**entries, "params": mine, "use_muon": takes})
        for p in (p for group in found if group["use_muon"] for p in group["params"]):
            if len(p.shape) != 2 + is_stack(p):
                raise ConfigError(
                    f"a parameter of shape {tuple(p.shape)} is in a group with use_muon",
                    because="Muon makes matrices orthogonal",
                    remedy="put it in a group with use_muon=False, which AdamW steps",
                )
        return found

    @classmethod
    def _entries_of(cls, options: Mapping[str, Any], *, by_muon: bool) -> dict[str, Any]:
        """Those of a group of one kind, by the names that they have there."""
        mine = {k: v for k, v in options.items() if k.startswith("adam_") is not by_muon}
        return {k.removeprefix("adam_"): v for k, v in mine.items()}

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> RuleParams:
        """Return the current values of a group: as `AdamW` for parameters that AdamW steps."""
        if not group.get("use_muon", True):
            return AdamW.of({**AdamW.defaults(), **group})
        return super().of({**cls.defaults(), **group})

    def of_shape(self, shape: tuple[int, ...]) -> Self:
        """The same, of a matrix of this shape."""
        return self if shape == self.shape else replace(self, shape=shape)

    @property
    def adjusted_lr(self) -> float:
        """The rate of an orthogonal matrix of this shape, by `adjust_lr_fn`."""
        rows, columns = self.shape[-2:]
        if self.adjust_lr_fn == "original":
            return self.lr * math.sqrt(max(1, rows / columns))
        return self.lr * 0.2 * math.sqrt(max(rows, columns))


# What entries mean, for the documentation of a configuration.
ENTRY_TEXTS = {
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


def twin_of(name: str, *, decoupled: bool) -> str:
    """The rule like `name` whose weight decay is decoupled, or is not; itself if there is none."""
    rule = RULES[name]
    if rule.decoupled in (None, decoupled):
        return name
    return next(n for n, r in RULES.items() if r.kernel == rule.kernel and r is not rule)


def reserved_moments(
    rule: str, groups: Sequence[Mapping[str, Any]], form: MomentFormat
) -> tuple[MomentFormat, ...]:
    """A format for each moment of the group that needs the most of them."""
    return (form,) * max((RULES[rule].of(group).num_moments for group in groups), default=0)


def matrix_steps(rule: str, groups: Sequence[Mapping[str, Any]]) -> int:
    """How many times a whole matrix is multiplied to make its update; 0 of a rule with a kernel."""
    params_by_index = [RULES[rule].of(group) for group in groups]
    return max(
        (rule_params.ns_steps for rule_params in params_by_index if isinstance(rule_params, Muon)),
        default=0,
    )


def lossy_notes(form: MomentFormat) -> tuple[str, ...]:
    """Return notes of a plan about moments in this format."""
    if form.is_exact:
        return ()
    return (f"moments are stored in {form.value}: lossy, not what fp32 gives",)


def _entries(rule: type[RuleParams]) -> tuple[Field[Any], ...]:
    """The fields of a rule that are entries of its groups."""
    return tuple(entry for entry in fields(rule) if entry.metadata.get("of_group", True))


def _taken(name: str, default: Any, group: Mapping[str, Any]) -> Any:
    """An entry of a group, which may be a tensor, as what its default is."""
    if name not in group:
        raise ConfigError(f"a parameter group has no {name}")
    try:
        if not isinstance(default, tuple):
            return type(default)(group[name])
        found = tuple(map(float, group[name]))
        if len(found) != len(default):
            raise ValueError(f"{len(found)} numbers, not {len(default)}")
        return found
    except (TypeError, ValueError, RuntimeError) as error:  # of `float`, also of a tensor
        raise ConfigError(
            f"a parameter group has {name}={group[name]!r:.80}",
            because=str(error),
            remedy="a number, or a tensor of one element; two of them for betas",
        ) from error


def _check(entry: Field[Any], value: Any) -> None:
    """Raise `ConfigError` for a number out of range."""
    name = entry.name
    if isinstance(value, bool):
        return
    if isinstance(value, str):
        if value not in (choices := entry.metadata["choices"]):
            raise ConfigError(f"{name} is {value!r}", remedy=" or ".join(map(repr, choices)))
    elif isinstance(value, tuple) and not entry.metadata.get("signed", False):
        for number, beta in enumerate(value, 1):
            one = f"{name.removesuffix('s')}{number}"
            if not 0.0 <= beta < 1.0:
                raise ConfigError(f"{one} is {beta}", remedy=f"0 <= {one} < 1")
    elif entry.metadata.get("signed", False):
        if not all(map(math.isfinite, value if isinstance(value, tuple) else [value])):
            raise ConfigError(f"{name} is {value}", remedy=f"a finite {name}")
    elif not 0.0 <= value < math.inf:
        raise ConfigError(f"{name} is {value}", remedy=f"{name} >= 0, and finite")

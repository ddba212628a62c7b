"""`CPUAdam` and `FusedAdam`: our kernels as ordinary torch optimizers, without the engine.

[Note: precision]
The arithmetic is fp32, whatever the parameters are. For bf16 and fp16 parameters an fp32 master
is kept (`master=True`): bf16 ones as a 16-bit residual beside the parameter, losslessly, so that
together they are the master bit for bit; fp16 ones as an fp32 copy. With `master=False` nothing
below the parameter's precision survives a step: updates smaller than half its last bit are lost.
Moments are fp32 unless `moments=` names a lossy format. What is kept is in `standalone_state.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from infinity.errors import ConfigError, EngineClosedError, PresenceError
from infinity.formats import MomentFormat
from infinity.optim.cpu import FLOATS, CpuKernels, Piece
from infinity.optim.cuda import CudaKernels
from infinity.optim.offloaded import optimizer_method
from infinity.optim.standalone_state import (
    FINGERPRINT,
    State,
    fresh_state,
    moments_of,
    needs_seal,
    rest_of,
    seal,
    settle,
    taken_state,
)
from infinity.optim.update import BuiltInRule, rounding_key
from infinity.plan.machine import read_machine
from infinity.rules import RULES, Hyper, twin_of

# The numbers of `CPUAdam` and `FusedAdam`: read from their groups, or refused by name.


_NUMBERS = ("lr", "betas", "eps", "weight_decay")
_FP32_MAX = torch.finfo(torch.float32).max


def group_hyper(group: Mapping[str, Any]) -> Hyper:
    """A group's hyper-parameters now; raises `ConfigError` for what makes no sense."""
    if group["amsgrad"]:
        raise ConfigError(
            "amsgrad is not supported", remedy="use torch.optim.AdamW(amsgrad=True), or leave it"
        )
    try:
        return RULES[twin_of("AdamW", decoupled=bool(group["adamw_mode"]))].of(group)
    except (TypeError, ValueError, RuntimeError) as error:  # of `float`, also of a tensor
        shown = ", ".join(f"{name}={group[name]!r}" for name in _NUMBERS)
        raise ConfigError(
            f"a parameter group has {shown}",
            because=str(error),
            remedy="numbers, or tensors of one element; two of them for betas",
        ) from error


def taken_groups(
    ours: Iterable[Mapping[str, Any]],
    theirs: Iterable[Mapping[str, Any]],
    defaults: Iterable[str],
) -> list[dict[str, Any]]:
    """Given groups, complete; raises `ConfigError` if they cannot go on where they were saved.

    What a given group does not say stays as it is in ours: torch's know fewer names.
    """
    taken = []
    for group, given in zip(ours, theirs, strict=True):
        decoupled = given.get("adamw_mode", given.get("decoupled_weight_decay"))
        if decoupled is not None and bool(decoupled) != bool(group["adamw_mode"]):
            rules = "Adam with L2", "AdamW"
            raise ConfigError(
                f"the state is of {rules[bool(decoupled)]}, this optimizer is "
                f"{rules[not decoupled]}",
                remedy=f"make it with adamw_mode={bool(decoupled)}",
            )
        merged = {**{name: group[name] for name in defaults if name in group}, **given}
        group_hyper(merged)
        taken.append(merged)
    return taken


def finite_scale(given: Any) -> float:
    """`given` as a number that is finite in fp32, in which the kernels compute."""
    try:
        scale = float(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"grad_scale is {given!r}", remedy="a number") from error
    if not abs(scale) <= _FP32_MAX:
        raise ConfigError(
            f"grad_scale is {scale}",
            because="a norm or a loss scale is not finite: the parameters would not be either",
            remedy="leave this step out",
        )
    return scale


# Flat views of one parameter and its state, kept from step to step while nothing replaced them.
#
# Making them anew takes several times as long as the update of a small parameter.


class Ready:
    """What the kernels take of a parameter; `rest` is None without a master.

    Between steps the parameter must not be edited: `is_marked` tells, as far as torch can.
    """

    __slots__ = (
        "_address",
        "_count",
        "_dtype",
        "_num_elements",
        "_parameter",
        "_values",
        "_version",
        "device",
        "moments",
        "rest",
        "weight",
    )

    def __init__(
        self, parameter: Tensor, state: State, kind: MomentFormat, *, master: bool
    ) -> None:
        self.weight = parameter.detach().view(-1)
        self.rest = rest_of(state, parameter) if master else None
        self.moments = moments_of(state, kind)
        self.device = parameter.device
        count = state["step"]
        if not isinstance(count, Tensor) or count.device.type != "cpu":
            count = state["step"] = torch.tensor(float(count))
        self._count = count.detach().numpy()  # the same memory
        self._parameter = parameter
        self._address = parameter.data_ptr()
        self._dtype = parameter.dtype
        self._num_elements = parameter.numel()
        self._values = tuple(state.values())
        self._version = parameter._version

    def is_marked(self) -> bool:
        """Whether the master is known to be the parameter's: another version means an edit."""
        parameter = self._parameter
        return parameter._version == self._version and parameter.dtype is self._dtype

    def fits(self, state: State) -> bool:
        """Whether the parameter has the memory it had, and the state the tensors it had."""
        parameter = self._parameter
        return (
            parameter.data_ptr() == self._address
            and parameter.numel() == self._num_elements
            and parameter.is_contiguous()
            and len(state) == len(self._values)
            and all(map(is_, state.values(), self._values))
            and self.is_marked()
        )

    @property
    def next_step(self) -> int:
        """Number of the step to come; from 1."""
        return int(self._count) + 1

    def advance(self) -> None:
        """A step was taken, of which the parameter's version knows."""
        self._count[...] = self.next_step
        self._version = self._parameter._version


def flat_gradient(gradient: Tensor) -> Tensor:
    """The gradient's values in one dimension; a copy where they are not in order."""
    if gradient.is_contiguous():
        return gradient.view(-1) if gradient.dim() != 1 else gradient
    return gradient.contiguous().view(-1)


_NO_CORRECTION = 1 << 62  # a step so late that beta ** step is 0


@dataclass(frozen=True)
class _Settings:
    moments: MomentFormat
    master: bool
    seed: int
    num_threads: int


class _Adam(torch.optim.Optimizer):
    """What both share; see `CPUAdam` for the arguments."""

    _takes: tuple[str, ...] = ("cpu",)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        *,
        adamw_mode: bool = True,
        bias_correction: bool = True,
        maximize: bool = False,
        moments: str | MomentFormat = "fp32",
        master: bool = True,
        seed: int = 0,
        num_threads: int = 0,
    ) -> None:
        try:
            chosen = MomentFormat(moments)
        except ValueError:
            known = ", ".join(repr(f.value) for f in MomentFormat)
            raise ConfigError(f"moments is {moments!r}", remedy=f"one of {known}") from None
        self._settings = _Settings(chosen, master, seed, num_threads)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "adamw_mode": adamw_mode,
            "bias_correction": bias_correction,
            "maximize": maximize,
        }
        self._begin()
        super().__init__(params, defaults)

    @property
    def moments(self) -> MomentFormat:
        """How moments are stored."""
        return self._settings.moments

    def _begin(self) -> None:
        """Everything that is neither copied nor pickled."""
        self._kernels: dict[torch.device, CpuKernels | CudaKernels] = {}
        self._pid = os.getpid()  # of the process that the kernels' threads live in
        self._ready: dict[Tensor, Ready] = {}  # of parameters whose master is settled
        self._closed = False

    # --- groups and state --------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; raises `ConfigError` or `PresenceError` for parameters it cannot step."""
        optimizer_method("add_param_group")(self, param_group)
        try:
            group_hyper(self.param_groups[-1])
            for parameter in self.param_groups[-1]["params"]:
                self._check(parameter)
        except BaseException:
            self.param_groups.pop()
            raise

    def _check(self, parameter: Tensor) -> None:
        name = f"a parameter of shape {tuple(parameter.shape)}"
        if parameter.device.type not in self._takes:
            raise PresenceError(
                f"{name} is on {parameter.device}, {type(self).__name__} takes "
                f"{' and '.join(self._takes)} parameters",
                remedy="use infinity.FusedAdam for CUDA parameters",
            )
        if parameter.dtype not in FLOATS:
            raise ConfigError(
                f"{name} has dtype {parameter.dtype}", remedy="float32, bfloat16 or float16"
            )
        if not parameter.is_contiguous():
            raise PresenceError(
                f"{name} has strides {parameter.stride()}",
                because="the kernels walk one contiguous range",
                remedy="make the model's parameters contiguous before the optimizer",
            )

    def _ready_of(self, parameter: Tensor) -> Ready:
        """What the kernels take; the state is made at the first step, with the master then."""
        state: State = self.state[parameter]
        ready = self._ready.get(parameter)
        if ready is not None and ready.fits(state):
            return ready
        self._check(parameter)
        if not state:
            state.update(fresh_state(parameter, self._settings.moments))
            self._ready.pop(parameter, None)
        if self._settings.master:
            self._settle(parameter, state)
        state.pop(FINGERPRINT, None)  # the step makes it wrong
        return self._made_ready(parameter, state)

    def _settle(self, parameter: Tensor, state: State) -> None:
        ready = self._ready.get(parameter)
        if ready is None or not ready.is_marked():
            settle(state, parameter)
            self._made_ready(parameter, state)

    def _made_ready(self, parameter: Tensor, state: State) -> Ready:
        kind, master = self._settings.moments, self._settings.master
        ready = self._ready[parameter] = Ready(parameter, state, kind, master=master)
        return ready

    def state_dict(self) -> dict[str, Any]:
        """As torch's; the tensors are those in use, not copies."""
        self._seal()
        taken: dict[str, Any] = optimizer_method("state_dict")(self)
        return taken

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's."""
        optimizer_method("zero_grad")(self, set_to_none)

    def _seal(self) -> None:
        """Say of every residual to which parameter it belongs: its reader cannot tell."""
        for parameter, state in self.state.items():
            if isinstance(parameter, Tensor) and needs_seal(state):
                self._settle(parameter, state)
                if needs_seal(state):
                    seal(state, parameter)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state of this class, or of `torch.optim.AdamW` or `Adam`, by the same keys.

        fp32 moments are stored in the chosen format; lossy ones must have been saved in it. The
        parameters may be loaded before or after: masters are judged at the next step. Raises
        `ConfigError` before anything is changed.
        """
        loaded: dict[Tensor, State] = {}

        def take(_: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            changed, states = self._taken(given)
            loaded.update(states)
            return changed

        def put(_: torch.optim.Optimizer) -> None:
            self.state.update(loaded)
            self._ready.clear()

        # Hooks of our own: behind the user's, who may rewrite what is given, and before the
        # user's, who look at what was loaded. torch's loading would narrow moments and masters.
        before = self.register_load_state_dict_pre_hook(take)
        after = self.register_load_state_dict_post_hook(put, prepend=True)
        try:
            optimizer_method("load_state_dict")(self, state_dict)
        finally:
            before.remove()
            after.remove()

    def _taken(self, given: dict[str, Any]) -> tuple[dict[str, Any], dict[Tensor, State]]:
        """What torch shall load of a given state dict, and the states that we load ourselves."""
        ours, theirs = self.param_groups, given["param_groups"]
        if [len(group["params"]) for group in ours] != [len(g["params"]) for g in theirs]:
            return given, {}  # torch says what is wrong
        groups = taken_groups(ours, theirs, self.defaults)
        order = [p for group in ours for p in group["params"]]
        numbers = [number for group in theirs for number in group["params"]]
        states = given["state"]
        settings = self._settings
        loaded = {
            parameter: taken_state(
                parameter, states[number], settings.moments, master=settings.master
            )
            for parameter, number in zip(order, numbers, strict=True)
            if states.get(number)
        }
        known = set(numbers)
        others = {key: value for key, value in states.items() if key not in known}
        return {**given, "param_groups": groups, "state": others}, loaded

    def __getstate__(self) -> dict[str, Any]:
        self._seal()
        return {**super().__getstate__(), "_settings": self._settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_kernels" not in vars(self):  # not only a loaded state dict, but a copy
            self._begin()
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    # --- the step ----------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, grad_scale: float = 1.0) -> Any:
        """One step of every parameter that has a gradient; returns what `closure` returned.

        Gradients are multiplied by `grad_scale` on the way: a clip factor, or one over a loss
        scale, without a pass of its own. Raises `ConfigError` if it is not finite.
        """
        scale = finite_scale(grad_scale)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        pieces: dict[torch.device, list[Piece]] = {}
        stepped: dict[Tensor, Ready] = {}
        number = -1
        for group in self.param_groups:
            hyper = group_hyper(group)
            for parameter in group["params"]:
                number += 1
                gradient = parameter.grad
                if gradient is not None and parameter.numel():
                    ready = stepped[parameter] = self._ready_of(parameter)
                    piece = self._piece(parameter, gradient, ready, group, hyper, number, scale)
                    pieces.setdefault(ready.device, []).append(piece)
        work = [(self._kernels_of(device), some) for device, some in pieces.items()]
        for kernels, some in work:
            kernels.update_all(some)
        torch.autograd.graph.increment_version(stepped)  # what autograd saved is stale now
        for ready in stepped.values():
            ready.advance()
        return loss

    def _piece(
        self,
        parameter: Tensor,
        gradient: Tensor,
        ready: Ready,
        group: dict[str, Any],
        hyper: Hyper,
        number: int,
        scale: float,
    ) -> Piece:
        if gradient.layout is not torch.strided:
            raise ConfigError(
                f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse",
                remedy="use sparse=False in nn.Embedding",
            )
        rest = ready.rest
        if not self._settings.master:
            holder: State = {}
            settle(holder, parameter)
            rest = rest_of(holder, parameter)
        step = ready.next_step
        exact = self._settings.moments.is_exact
        return Piece(
            ready.weight,
            rest,
            ready.moments,
            flat_gradient(gradient),
            hyper,
            step if group["bias_correction"] else _NO_CORRECTION,
            scale,
            0 if exact else rounding_key(self._settings.seed, str(number), step),
        )

    def _kernels_of(self, device: torch.device) -> CpuKernels | CudaKernels:
        if self._closed:
            raise EngineClosedError(f"this {type(self).__name__} is closed")
        if self._pid != os.getpid():  # a forked child has none of the threads
            self._kernels.clear()
            self._pid = os.getpid()
        kernels = self._kernels.get(device)
        if kernels is None:
            if device.type == "cpu":
                kernels = CpuKernels(self._settings.num_threads or read_machine().num_cpus)
            else:
                kernels = CudaKernels(device)
            self._kernels[device] = kernels
        return kernels

    def close(self) -> None:
        """Give the threads back; idempotent. Without it that happens when the object dies."""
        self._closed = True
        for kernels in self._kernels.values():
            if isinstance(kernels, CpuKernels):
                kernels.close()
        self._kernels.clear()


class CPUAdam(_Adam):
    """AdamW (or Adam) for CPU parameters, in one pass over memory; a drop-in for torch's.

    `params`, `lr`, `betas`, `eps`, `weight_decay`, `maximize`: as `torch.optim.AdamW`.
    `adamw_mode=False` is Adam with L2, `bias_correction=False` leaves the correction out;
    `amsgrad` is refused. Parameters are fp32, bf16 or fp16, of any shape, contiguous; gradients
    of any of these dtypes. `master` keeps an fp32 master of 16-bit parameters: see the note on
    precision above. Where a parameter was edited by torch operations since the last step, or its
    dtype was changed, it gets a fresh master; other edits through `.data` go unseen. `moments` is
    "fp32", or lossy: "bf16", "bf16_stochastic", "8bit". `seed` is for stochastic rounding.
    `num_threads` 0 is as many as this process may use. Results depend neither on it nor on the
    instruction set.

    State by parameter: `step`, `exp_avg`, `exp_avg_sq`, which `torch.optim.AdamW` understands.
    8-bit moments are `exp_avg_codes`, `exp_avg_scales`, `exp_avg_sq_codes`, `exp_avg_sq_scales`
    instead: torch has no use for them, and says so by a KeyError. Masters are `residual` (int16)
    for bf16 and `master` (fp32) for fp16 parameters. They are no use without the parameters they
    were saved with: load these too, before or after. What is not theirs is dropped at the next
    step: elements of `master` that do not round to the parameter, and all of `residual` if the
    parameter's bits do not have the `fingerprint` (int64) that state dicts and copies carry. A
    `residual` without one belongs to the parameter as it is when the state is loaded.

    Raises `ConfigError` or `PresenceError` for what it cannot step, before any byte is touched.
    In a forked child it makes threads of its own.
    """


class FusedAdam(_Adam):
    """`CPUAdam` for CUDA parameters, and CPU ones: same arguments, same state, same bits.

    All parameters of a device are stepped by one launch per combination of dtypes, on the current
    stream, without waiting. Raises `MachineError` at the first step if the kernels cannot be
    compiled for the device (NVRTC is missing, or the GPU is too old).
    """

    _takes = ("cpu", "cuda")


# `CPUAdam` and `FusedAdam` passed to the engine: the built-in rule with their settings.
#
# Their kernels are the engine's, but their state lies in the memory of a model; the engine keeps
# it
# in its tiers.


_PER_GROUP = ("lr", "betas", "eps", "weight_decay", "maximize")


@dataclass(frozen=True)
class SameRule:
    """A built-in rule, and the groups and defaults of the optimizer it stands for."""

    rule: BuiltInRule
    groups: list[dict[str, Any]]
    defaults: dict[str, Any]


def built_in_of(given: Any, groups: Sequence[dict[str, Any]]) -> SameRule | None:
    """What the engine runs for `given`: an instance, or the class itself; None if it is no such.

    The groups of an instance stay the same objects: schedulers over it keep working. Raises
    `ConfigError` for settings that the engine has not.
    """
    is_class = isinstance(given, type) and issubclass(given, CPUAdam | FusedAdam)
    if is_class:  # its defaults, from stand-ins of no size
        stand_in = nn.Parameter(torch.zeros(0))
        optimizer, groups = given([stand_in]), [dict(group) for group in groups]
    elif isinstance(given, CPUAdam | FusedAdam):
        optimizer, groups = given, given.param_groups
    else:
        return None
    name = type(optimizer).__name__
    if any(optimizer.state.values()):
        raise ConfigError(
            f"the {name} has state already",
            because="it has stepped, or loaded a state dict",
            remedy="pass one that is new, and load a checkpoint into the engine",
        )
    for group in groups:
        for key, value in optimizer.defaults.items():
            group.setdefault(key, value)
    modes = {bool(group["adamw_mode"]) for group in groups}
    if len(modes) > 1:
        raise ConfigError(
            f"groups of the {name} differ in adamw_mode: AdamW and Adam with L2 are two rules",
            remedy="one of them for all groups",
        )
    for key, wanted in (("bias_correction", True), ("amsgrad", False)):
        if any(bool(group[key]) is not wanted for group in groups):
            raise ConfigError(
                f"the {name} has {key}={not wanted}",
                because="no kernel of the engine does that",
                remedy=f"{key}={wanted}, or pass torch.optim.AdamW, which torch runs, slower",
            )
    rule = BuiltInRule(twin_of("AdamW", decoupled=modes == {True}), optimizer.moments)
    defaults = {key: optimizer.defaults[key] for key in _PER_GROUP}
    return SameRule(rule, list(groups), defaults)

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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from infinity.errors import ConfigError, EngineClosedError, PresenceError
from infinity.formats import MomentFormat
from infinity.optim.built_in import rounding_key
from infinity.optim.checks import FLOATS
from infinity.optim.cpu import CpuKernels, Piece
from infinity.optim.cuda import CudaKernels
from infinity.optim.rules import Hyper
from infinity.optim.standalone_groups import finite_scale, group_hyper, taken_groups
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
from infinity.plan.machine import read_machine

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

    def _begin(self) -> None:
        """Everything that is neither copied nor pickled."""
        self._kernels: dict[torch.device, CpuKernels | CudaKernels] = {}
        self._pid = os.getpid()  # of the process that the kernels' threads live in
        # Of parameters whose master is known to be theirs; another version means an edit.
        self._marks: dict[Tensor, tuple[int, torch.dtype]] = {}
        self._closed = False

    # --- groups and state --------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; raises `ConfigError` or `PresenceError` for parameters it cannot step."""
        super().add_param_group(param_group)
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

    def _state_of(self, parameter: Tensor) -> State:
        """The state, made at the first step, with the master of the parameter as it is now."""
        state: State = self.state[parameter]
        if not state:
            state.update(fresh_state(parameter, self._settings.moments))
            self._marks.pop(parameter, None)
        if self._settings.master:
            self._settle(parameter, state)
        state.pop(FINGERPRINT, None)  # the step makes it wrong
        return state

    def _settle(self, parameter: Tensor, state: State) -> None:
        if self._marks.get(parameter) != _mark(parameter):
            settle(state, parameter)
            self._marks[parameter] = _mark(parameter)

    def state_dict(self) -> dict[str, Any]:
        """As torch's; the tensors are those in use, not copies."""
        self._seal()
        return super().state_dict()

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
            self._marks.clear()

        # Hooks of our own: behind the user's, who may rewrite what is given, and before the
        # user's, who look at what was loaded. torch's loading would narrow moments and masters.
        before = self.register_load_state_dict_pre_hook(take)
        after = self.register_load_state_dict_post_hook(put, prepend=True)
        try:
            super().load_state_dict(state_dict)
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
        stepped: list[Tensor] = []
        number = -1
        for group in self.param_groups:
            hyper = group_hyper(group)
            for parameter in group["params"]:
                number += 1
                if parameter.grad is not None and parameter.numel():
                    self._check(parameter)
                    piece = self._piece(parameter, group, hyper, number, scale)
                    pieces.setdefault(parameter.device, []).append(piece)
                    stepped.append(parameter)
        work = [(self._kernels_of(device), some) for device, some in pieces.items()]
        for kernels, some in work:
            kernels.update_all(some)
        for parameter in stepped:
            self.state[parameter]["step"] += 1
        torch.autograd.graph.increment_version(stepped)  # what autograd saved is stale now
        self._marks.update((p, _mark(p)) for p in stepped)
        return loss

    def _piece(
        self, parameter: Tensor, group: dict[str, Any], hyper: Hyper, number: int, scale: float
    ) -> Piece:
        gradient = parameter.grad
        assert gradient is not None
        if gradient.layout is not torch.strided:
            raise ConfigError(
                f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse",
                remedy="use sparse=False in nn.Embedding",
            )
        state = self._state_of(parameter)
        step = int(state["step"]) + 1
        kind = self._settings.moments
        holder = state
        if not self._settings.master:
            settle(holder := {}, parameter)
        exact = kind.is_exact
        return Piece(
            parameter.detach().view(-1),
            rest_of(holder, parameter),
            moments_of(state, kind),
            gradient.detach().contiguous().view(-1),
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


def _mark(parameter: Tensor) -> tuple[int, torch.dtype]:
    return parameter._version, parameter.dtype

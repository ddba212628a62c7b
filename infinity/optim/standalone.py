"""`CPUAdam` and `FusedAdam`: our kernels as ordinary torch optimizers, without the engine.

[Note: precision]
The arithmetic is fp32, whatever the parameters are. For bf16 and fp16 parameters an fp32 master
is kept (`master=True`): bf16 ones as a 16-bit residual beside the parameter, losslessly, so that
together they are the master bit for bit; fp16 ones as an fp32 copy. With `master=False` nothing
below the parameter's precision survives a step: updates smaller than half its last bit are lost.
Moments are fp32 unless `moments=` names a lossy format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from infinity.errors import ConfigError, EngineClosedError, PresenceError
from infinity.formats import MomentFormat
from infinity.optim.built_in import rounding_key
from infinity.optim.cpu import CpuKernels, Piece
from infinity.optim.cuda import CudaKernels
from infinity.optim.moments import VALUE_DTYPES, Moment
from infinity.optim.rules import AdamHyper
from infinity.plan.machine import read_machine

_NAMES = ("exp_avg", "exp_avg_sq")
_REST = {torch.bfloat16: "residual", torch.float16: "master"}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
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
        self._versions: dict[Tensor, int] = {}  # of parameters as we left them
        self._closed = False

    # --- groups and state --------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; raises `ConfigError` or `PresenceError` for parameters it cannot step."""
        super().add_param_group(param_group)
        try:
            _hyper(self.param_groups[-1])
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
        if parameter.dtype not in _DTYPES:
            raise ConfigError(
                f"{name} has dtype {parameter.dtype}", remedy="float32, bfloat16 or float16"
            )
        if not parameter.is_contiguous():
            raise PresenceError(
                f"{name} has strides {parameter.stride()}",
                because="the kernels walk one contiguous range",
                remedy="make the model's parameters contiguous before the optimizer",
            )

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        """The state, made at the first step; with a fresh master if the parameter was edited."""
        state: dict[str, Any] = self.state[parameter]
        kind = self._settings.moments
        if not state:
            state["step"] = torch.tensor(0.0)
            for name in _NAMES:
                self._put(state, name, parameter, Moment.zeros(parameter.numel(), kind,
                                                               parameter.device))  # fmt: skip
        elif self._versions.get(parameter, parameter._version) == parameter._version:
            return state
        if self._settings.master:
            self._put_master(state, parameter)
        return state

    @staticmethod
    def _put(state: dict[str, Any], name: str, parameter: Tensor, moment: Moment) -> None:
        state[name] = moment.values.view(parameter.shape)
        if moment.scales is not None:
            state[f"{name}_scales"] = moment.scales

    @staticmethod
    def _put_master(state: dict[str, Any], parameter: Tensor) -> None:
        """The master of a 16-bit parameter is the parameter itself, widened."""
        if parameter.dtype is torch.bfloat16:
            state["residual"] = torch.zeros_like(parameter, dtype=torch.int16)
        elif parameter.dtype is torch.float16:
            state["master"] = parameter.detach().float()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take a state of this class, or of `torch.optim.AdamW` or `Adam`, by the same keys.

        fp32 moments are stored in the chosen format; lossy ones must have been saved in it.
        Raises `ConfigError` before anything is changed.
        """
        order = [p for group in self.param_groups for p in group["params"]]
        numbers = [i for group in state_dict["param_groups"] for i in group["params"]]
        states = state_dict["state"]
        loaded = {}
        if len(order) == len(numbers):  # else torch says what is wrong
            pairs = zip(order, numbers, strict=True)
            loaded = {p: self._taken(p, states[i]) for p, i in pairs if states.get(i)}
        super().load_state_dict({**state_dict, "state": {}})
        self.state.update(loaded)
        self._versions.clear()

    def _taken(self, parameter: Tensor, given: Mapping[str, Any]) -> dict[str, Any]:
        """A state for one parameter from a given one; everything is copied."""
        if "max_exp_avg_sq" in given:
            raise ConfigError("the state is of an optimizer with amsgrad, which is not supported")
        missing = [name for name in ("step", *_NAMES) if name not in given]
        if missing:
            raise ConfigError(
                f"the state of a parameter of shape {tuple(parameter.shape)} lacks "
                + ", ".join(missing),
                remedy="load a state of CPUAdam, FusedAdam, torch.optim.AdamW or Adam",
            )
        state: dict[str, Any] = {"step": torch.tensor(float(given["step"]))}
        for name in _NAMES:
            scales = given.get(f"{name}_scales")
            self._put(state, name, parameter, self._moment_from(name, parameter, given[name],
                                                                scales))  # fmt: skip
        rest = _REST.get(parameter.dtype)
        if self._settings.master and rest is not None:
            self._put_master(state, parameter)
            if rest in given:
                state[rest].copy_(given[rest])
        return state

    def _moment_from(
        self, name: str, parameter: Tensor, given: Tensor, scales: Tensor | None
    ) -> Moment:
        kind = self._settings.moments
        if given.numel() != parameter.numel():
            raise ConfigError(
                f"{name} has shape {tuple(given.shape)}, its parameter {tuple(parameter.shape)}"
            )
        raw = VALUE_DTYPES[kind]
        flat = given.detach().reshape(-1)
        if flat.dtype is raw and (scales is not None) == (kind is MomentFormat.INT8):
            values = flat.to(parameter.device, copy=True)
            copied = None if scales is None else scales.detach().to(parameter.device, copy=True)
            return Moment(values, copied, kind)
        if not flat.is_floating_point() or scales is not None:
            raise ConfigError(
                f"{name} was saved as {given.dtype}, moments are {kind.value!r} here",
                remedy="make the optimizer with the moments= of the run that was saved",
            )
        moment = Moment.zeros(parameter.numel(), kind)
        values = flat.float().cpu().contiguous()
        with CpuKernels(1) as kernels:
            kernels.encode(values, moment, signed=name == _NAMES[0])
        return Moment(
            moment.values.to(parameter.device),
            None if moment.scales is None else moment.scales.to(parameter.device),
            kind,
        )

    def __getstate__(self) -> dict[str, Any]:
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
        scale, without a pass of its own.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        pieces: dict[torch.device, list[Piece]] = {}
        stepped: list[Tensor] = []
        number = -1
        for group in self.param_groups:
            hyper = _hyper(group)
            for parameter in group["params"]:
                number += 1
                if parameter.grad is not None and parameter.numel():
                    self._check(parameter)
                    piece = self._piece(parameter, group, hyper, number, grad_scale)
                    pieces.setdefault(parameter.device, []).append(piece)
                    stepped.append(parameter)
        for device, some in pieces.items():
            self._kernels_of(device).update_all(some)
        for parameter in stepped:
            self.state[parameter]["step"] += 1
        torch.autograd.graph.increment_version(stepped)  # what autograd saved is stale now
        self._versions.update((p, p._version) for p in stepped)
        return loss

    def _piece(
        self, parameter: Tensor, group: dict[str, Any], hyper: AdamHyper, number: int, scale: float
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
        moments = tuple(
            Moment(state[name].view(-1), state.get(f"{name}_scales"), kind) for name in _NAMES
        )
        rest_name = _REST.get(parameter.dtype)
        rest = None
        if rest_name is not None:
            holder = state
            if not self._settings.master:
                self._put_master(holder := {}, parameter)
            rest = holder[rest_name].view(-1)
        exact = kind.is_exact
        return Piece(
            parameter.detach().view(-1),
            rest,
            moments,
            gradient.detach().contiguous().view(-1),
            hyper,
            step if group["bias_correction"] else _NO_CORRECTION,
            scale,
            0 if exact else rounding_key(self._settings.seed, str(number), step),
        )

    def _kernels_of(self, device: torch.device) -> CpuKernels | CudaKernels:
        if self._closed:
            raise EngineClosedError(f"this {type(self).__name__} is closed")
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
    precision above. A parameter that was edited by torch operations since the last step gets a
    fresh master; edits through `.data` go unseen. `moments` is "fp32", or lossy: "bf16",
    "bf16_stochastic", "8bit". `seed` is for stochastic rounding. `num_threads` 0 is as many as
    this process may use. Results depend neither on it nor on the instruction set.

    State by parameter: `step`, `exp_avg`, `exp_avg_sq`; with lossy formats these hold stored
    values (8bit: codes, and `exp_avg_scales`, `exp_avg_sq_scales`); `residual` (int16) for bf16
    and `master` (fp32) for fp16 parameters. Raises `ConfigError` or `PresenceError` for what it
    cannot step, before any byte is touched.
    """


class FusedAdam(_Adam):
    """`CPUAdam` for CUDA parameters, and CPU ones: same arguments, same state, same bits.

    All parameters of a device are stepped by one launch per combination of dtypes, on the current
    stream, without waiting. Raises `MachineError` at the first step if the kernels cannot be
    compiled for the device (NVRTC is missing, or the GPU is too old).
    """

    _takes = ("cpu", "cuda")


def _hyper(group: Mapping[str, Any]) -> AdamHyper:
    """A group's hyper-parameters now; raises `ConfigError` for what makes no sense."""
    if group["amsgrad"]:
        raise ConfigError(
            "amsgrad is not supported", remedy="use torch.optim.AdamW(amsgrad=True), or leave it"
        )
    beta1, beta2 = group["betas"]
    return AdamHyper(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        decoupled=bool(group["adamw_mode"]),
        maximize=bool(group["maximize"]),
    )

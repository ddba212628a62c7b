"""The state `CPUAdam` and `FusedAdam` keep for one parameter: made, taken, brought up to date.

[Note: whose master it is]
A master belongs to the bits its parameter had when both were written, and whoever loads or edits
the one may forget the other, or do both in either order. So a master is judged at the next step,
by what the parameter is then. fp16: each element of the master that still rounds to its parameter
is kept, the others are the parameter, widened. bf16: a residual fits any parameter, so a
fingerprint of the parameter goes with it into a state dict, a copy and a pickle; where it fits no
longer, the whole residual begins at zero, as it does where a parameter was edited without one.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from infinity.errors import ConfigError
from infinity.formats import MomentFormat
from infinity.optim.cpu import CpuKernels
from infinity.optim.moments import VALUE_DTYPES, Moment
from infinity.rules import AdamW

State = dict[str, Any]

FINGERPRINT = "fingerprint"
_NAMES = AdamW.state_names
_RESIDUAL, _MASTER = "residual", "master"
_REST = {torch.bfloat16: _RESIDUAL, torch.float16: _MASTER}
_REST_DTYPES = {_RESIDUAL: torch.int16, _MASTER: torch.float32}


def fresh_state(parameter: Tensor, kind: MomentFormat) -> State:
    """Before the first step; `settle` adds the master."""
    state: State = {"step": torch.tensor(0.0)}
    for name in _NAMES:
        _put(state, name, parameter, Moment.zeros(parameter.numel(), kind, parameter.device))
    return state


def moments_of(state: State, kind: MomentFormat) -> tuple[Moment, ...]:
    """What the kernels take, in their order."""
    return tuple(
        Moment(state[_key(name, kind)].view(-1), state.get(_scales(name)), kind) for name in _NAMES
    )


def rest_of(state: State, parameter: Tensor) -> Tensor | None:
    """What the kernels take beside the parameter, if anything."""
    name = _REST.get(parameter.dtype)
    return None if name is None else state[name].view(-1)


def settle(state: State, parameter: Tensor) -> None:
    """Make the master that of the parameter as it is now: see the note above."""
    name = _REST.get(parameter.dtype)
    fingerprint = state.pop(FINGERPRINT, None)
    for other in _REST_DTYPES:
        if other != name:  # the parameter had another dtype
            state.pop(other, None)
    if name is None:
        return
    kept: Tensor | None = state.get(name)
    if name == _MASTER:
        wide = parameter.detach().float()
        if kept is not None and kept.shape == wide.shape and kept.device == wide.device:
            # Bits, not values: so NaN is like NaN, and -0 is not 0.
            same = kept.half().view(torch.int16) == parameter.detach().view(torch.int16)
            wide = torch.where(same, kept, wide)
        state[name] = wide
    elif kept is None or fingerprint is None or fingerprint.item() != _fingerprint(parameter):
        state[name] = torch.zeros_like(parameter, dtype=torch.int16)


def needs_seal(state: State) -> bool:
    """Whether nothing says yet which bits of the parameter the residual belongs to."""
    return _RESIDUAL in state and FINGERPRINT not in state


def seal(state: State, parameter: Tensor) -> None:
    """Say that the residual belongs to the parameter as it is now."""
    state[FINGERPRINT] = torch.tensor(_fingerprint(parameter))


def taken_state(
    parameter: Tensor, given: Mapping[str, Any], kind: MomentFormat, *, master: bool
) -> State:
    """A state for one parameter from a given one; everything is copied. Raises `ConfigError`."""
    if "max_exp_avg_sq" in given:
        raise ConfigError("the state is of an optimizer with amsgrad, which is not supported")
    missing = [name for name in _NAMES if name not in given and f"{name}_codes" not in given]
    if missing or "step" not in given:
        raise ConfigError(
            f"the state of a parameter of shape {tuple(parameter.shape)} lacks "
            + ", ".join(["step"] * ("step" not in given) + missing),
            remedy="load a state of CPUAdam, FusedAdam, torch.optim.AdamW or Adam",
        )
    state: State = {"step": torch.tensor(_taken_step(given["step"]))}
    for name in _NAMES:
        _put(state, name, parameter, _taken_moment(name, parameter, given, kind))
    rest = _REST.get(parameter.dtype)
    if not master or rest is None or rest not in given:
        return state
    _require_like(rest, given[rest], parameter)
    if given[rest].dtype is not _REST_DTYPES[rest]:
        raise ConfigError(
            f"{rest} has dtype {given[rest].dtype}, not {_REST_DTYPES[rest]}",
            because="another optimizer that loaded the state has converted it",
            remedy=f"delete {rest!r} from the state: the master begins at the parameter",
        )
    state[rest] = _copied(given[rest], parameter).contiguous()
    if rest == _RESIDUAL:
        if FINGERPRINT in given:
            state[FINGERPRINT] = _taken_fingerprint(given[FINGERPRINT])
        else:  # nobody knows better than that the two were loaded together
            seal(state, parameter)
    return state


def _key(name: str, kind: MomentFormat) -> str:
    """Codes have a name of their own, so that no other optimizer takes them for values."""
    return f"{name}_codes" if kind is MomentFormat.INT8 else name


def _scales(name: str) -> str:
    return f"{name}_scales"


def _put(state: State, name: str, parameter: Tensor, moment: Moment) -> None:
    state[_key(name, moment.format)] = moment.values.view(parameter.shape)
    if moment.scales is not None:
        state[_scales(name)] = moment.scales


def _fingerprint(parameter: Tensor) -> int:
    """A checksum of the parameter's bits: by far the fastest there is, and a miss costs little."""
    return zlib.crc32(parameter.detach().cpu().contiguous().view(torch.int16).view(-1).numpy().data)


def _taken_fingerprint(given: Any) -> Tensor:
    if not isinstance(given, Tensor) or given.dtype is not torch.int64 or given.numel() != 1:
        raise ConfigError(
            f"{FINGERPRINT} is {given!r}, not an int64 tensor of one element",
            remedy="load the state as CPUAdam or FusedAdam saved it",
        )
    return given.detach().cpu().reshape(()).clone()


def _taken_step(given: Any) -> float:
    try:
        step = float(given)
    except (TypeError, ValueError, RuntimeError):
        step = math.nan
    if not (0 <= step < math.inf and step == int(step)):
        raise ConfigError(f"step is {given!r}", remedy="a whole number that is not negative")
    return step


def _taken_moment(
    name: str, parameter: Tensor, given: Mapping[str, Any], kind: MomentFormat
) -> Moment:
    codes = _key(name, MomentFormat.INT8)
    stored = codes if codes in given else name
    values = given[stored]
    _require_like(stored, values, parameter)
    if stored == _key(name, kind) and values.dtype is VALUE_DTYPES[kind]:
        scales = None
        if kind is MomentFormat.INT8:
            scales = _taken_scales(_scales(name), parameter, given)
        return Moment(_copied(values, parameter).reshape(-1), scales, kind)
    if stored == codes or not values.is_floating_point():
        raise ConfigError(
            f"{stored} was saved as {values.dtype}, moments are {kind.value!r} here",
            remedy="make the optimizer with the moments= of the run that was saved",
        )
    moment = Moment.zeros(parameter.numel(), kind)
    flat = values.detach().float().cpu().contiguous().view(-1)
    with CpuKernels(1) as kernels:
        kernels.encode(flat, moment, signed=name == _NAMES[0])
    device, scales = parameter.device, moment.scales
    return Moment(moment.values.to(device), None if scales is None else scales.to(device), kind)


def _taken_scales(name: str, parameter: Tensor, given: Mapping[str, Any]) -> Tensor:
    scales = given.get(name)
    shape = (MomentFormat.INT8.num_scales(parameter.numel()),)
    if not isinstance(scales, Tensor):
        raise ConfigError(f"{name} is missing", because="8-bit codes mean nothing without it")
    if scales.shape != shape or scales.dtype is not torch.float32:
        raise ConfigError(
            f"{name} is {scales.dtype} of shape {tuple(scales.shape)}, not float32 of {shape}"
        )
    return _copied(scales, parameter)


def _copied(given: Tensor, parameter: Tensor) -> Tensor:
    return given.detach().to(parameter.device, copy=True)


def _require_like(name: str, given: Any, parameter: Tensor) -> None:
    if not isinstance(given, Tensor):
        raise ConfigError(f"{name} is a {type(given).__name__}, not a tensor")
    if given.shape != parameter.shape:
        raise ConfigError(
            f"{name} has shape {tuple(given.shape)}, its parameter {tuple(parameter.shape)}",
            remedy="load the state into the parameters it was saved with, in their order",
        )

"""Full fp32 values, gradients and optimizer state of one parameter, wherever they rest.

Values come as new fp32 tensors of the parameter's shape, on the device that the engine computes
on; a value that is set is kept. What DeepSpeed calls local is the same: there is one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from infinity.engine import Engine
from infinity.errors import ConfigError, TrainingError
from infinity.model.ownership import engine_of


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor:
    """The fp32 master, bit for bit; of a frozen parameter its value."""
    engine = _engine(param)
    with engine.materialized(param, master=True):
        return param.detach().to(torch.float32, copy=True)


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Replace the fp32 master, and the weight with it."""
    engine = _engine(param)
    if value.shape != param.shape:
        raise ConfigError(f"the parameter has shape {tuple(param.shape)}, got {tuple(value.shape)}")
    with engine.materialized(param, master=True), torch.no_grad():
        param.copy_(value)


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """The gradient accumulated in this window; None where none has come, as after `step()`."""
    engine = _engine(param)
    try:
        return engine.gradient(param).to(engine.device, torch.float32)
    except TrainingError:
        return None


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Replace the accumulated gradient: the update, its norm and its clipping see the new one."""
    _engine(param).set_gradient(param, value)


def safe_update_full_grad_vectorized(
    param_list: Sequence[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Replace each gradient that is there by `update_func(gradient, parameter)`."""
    for param in param_list:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor:
    """A moment, by torch's name ("exp_avg", ...); raises `ConfigError` naming those there are."""
    engine = _engine(param)
    state = engine.optimizer.read_state(param)
    if optim_state_key not in state:
        raise ConfigError(
            f"there is no optimizer state {optim_state_key!r}",
            remedy=f"one of {', '.join(state) or '(none before the first step)'}",
        )
    return torch.as_tensor(state[optim_state_key]).to(engine.device)


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Replace a moment; raises `ConfigError` for what is no moment, or belongs to torch."""
    _engine(param).set_optimizer_state(param, optim_state_key, value)


safe_get_local_fp32_param = safe_get_full_fp32_param
safe_set_local_fp32_param = safe_set_full_fp32_param
safe_get_local_grad = safe_get_full_grad
safe_set_local_grad = safe_set_full_grad
safe_get_local_optimizer_state = safe_get_full_optimizer_state
safe_set_local_optimizer_state = safe_set_full_optimizer_state


def _engine(param: nn.Parameter) -> Engine:
    engine = engine_of(param)
    if not isinstance(engine, Engine):
        raise ConfigError(
            f"a tensor of shape {tuple(param.shape)} belongs to no engine",
            because="it is no parameter of a model that initialize() got, or the engine is closed",
            remedy="pass a parameter of engine.module, before engine.close()",
        )
    return engine

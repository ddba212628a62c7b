"""DeepSpeed's `utils`: full values of a parameter, leaf modules, logging, `OnDevice`.

Also functions of its `runtime.utils` and `checkpoint.utils`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from logging import INFO, getLogger  # not `logging`: DeepSpeed has a module `utils.logging`
from typing import Any, Self

import numpy
import torch
from torch import Tensor, nn

from infinity.common import accelerators
from infinity.common.sizes import format_size
from infinity.engine import Engine
from infinity.errors import ConfigError, TrainingError
from infinity.integrations.deepspeed.names import getter
from infinity.integrations.deepspeed.processes import get_rank
from infinity.model.offloaded_parameter import engine_of
from infinity.model.torch_private import tree_map
from infinity.plan.machine import read_machine

logger = getLogger("infinity")
Classes = Sequence[type[nn.Module] | str]

# --- full values of one parameter, on any tier ---------------------------------------------------
# Getters return new fp32 tensors of the parameter's shape, on the engine's device; values that are
# set persist. All ranks must call. The `local` functions are the same: they handle full values.


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor:
    """Return the exact fp32 master; for a frozen parameter its value."""
    engine = _engine(param)
    with engine.materialized(param, master=True):
        return param.detach().to(torch.float32, copy=True)


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Replace the fp32 master and the weight."""
    engine = _engine(param)
    if value.shape != param.shape:
        raise ConfigError(f"the parameter has shape {tuple(param.shape)}, got {tuple(value.shape)}")
    with engine.materialized(param, master=True), torch.no_grad():
        param.copy_(value)


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """Return the gradient accumulated in this window.

    None if there is none, as after `step()`, and for a frozen parameter.
    """
    if not param.requires_grad:
        return None
    engine = _engine(param)
    try:
        return engine.gradient(param).to(engine.device, torch.float32)
    except TrainingError:
        return None


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Replace the accumulated gradient, which the update, its norm and clipping use."""
    _engine(param).set_gradient(param, value)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor:
    """Return a moment by torch's name ("exp_avg", ...); raise `ConfigError` if unknown."""
    engine = _engine(param)
    state = engine.optimizer.read_state(param)
    if optim_state_key not in state:
        raise ConfigError(
            f"there is no optimizer state {optim_state_key!r}",
            remedy=f"one of {', '.join(state) or '(none before the first step)'}",
        )
    return torch.as_tensor(state[optim_state_key]).to(engine.device)


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Replace a moment; raise `ConfigError` for other state, and for torch's optimizers."""
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


# --- leaf modules --------------------------------------------------------------------------------
# Marks have no effect: an engine fetches units on use, in any order, and so does not hang if ranks
# use different experts.


def z3_leaf_module(model: nn.Module) -> bool:
    """Return whether the module is marked."""
    return bool(getattr(model, "_z3_leaf", False))


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark one module; `flag=False` removes the mark."""
    model._z3_leaf = flag  # type: ignore[assignment]


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the marked modules of a model."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_modules(
    model: nn.Module,
    leaf_module_classes: Classes,
    raise_if_not_found: bool = True,
    *,
    flag: bool = True,
) -> list[nn.Module]:
    """Mark modules by class or class name, and return them.

    Raises `ConfigError` if no module matches.
    """
    wanted = leaf_module_classes
    if isinstance(wanted, str | type) or not all(isinstance(item, str | type) for item in wanted):
        raise ConfigError(f"leaf_module_classes is {wanted!r}", remedy="a list of classes or names")
    names = {item for item in wanted if isinstance(item, str)}
    classes = tuple(item for item in wanted if isinstance(item, type))
    marked = []
    for module in model.modules():
        kind = type(module)
        class_names = {kind.__name__, f"{kind.__module__}.{kind.__qualname__}"}
        if isinstance(module, classes) or not names.isdisjoint(class_names):
            set_z3_leaf_module(module, flag)
            marked.append(module)
    if raise_if_not_found and not marked:
        kinds = sorted({type(module).__name__ for module in model.modules()})
        raise ConfigError(
            f"no module is one of {', '.join(map(str, wanted))}",
            remedy=f"this model has {', '.join(kinds)}; marks are not needed",
        )
    return marked


unset_z3_leaf_modules = partial(set_z3_leaf_modules, flag=False)


# --- logging, random numbers, devices ------------------------------------------------------------


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = INFO) -> None:
    """Log a message on the given ranks; on all ranks without any, or with -1."""
    if not ranks or get_rank() in ranks or -1 in ranks:
        logger.log(level, message)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log the RAM and torch's GPU memory of this process, if `force`."""
    if force:
        sizes = {"RAM": read_machine().process_rss_bytes}
        if kind := accelerators.accelerator_type():
            module = accelerators.module_of(kind)
            sizes |= {
                "GPU": module.memory_allocated(),
                "GPU at most": module.max_memory_allocated(),
            }
        text = ", ".join(f"{name} {format_size(n)}" for name, n in sizes.items())
        logger.info("%s: %s", message, text)


def set_random_seed(seed: int) -> None:
    """Seed the generators of Python, numpy and torch."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def move_to_device(item: Any, device: Any, criterion_func: Callable[[Tensor], bool]) -> Any:
    """Copy `item` with the tensors that satisfy `criterion_func` moved to `device`."""
    return tree_map(
        lambda t: t.to(device) if isinstance(t, Tensor) and criterion_func(t) else t, item
    )


def clone_tensors_for_torch_save(item: Any, device: Any = None) -> Any:
    """Copy `item` with clones of its tensors, on the CPU by default; a mapping becomes a dict."""
    target = torch.device("cpu" if device is None else device)
    plain = dict(item.items()) if isinstance(item, Mapping) else item
    return tree_map(
        lambda t: t.detach().to(target, copy=True) if isinstance(t, Tensor) else t, plain
    )


class OnDevice:
    """Context manager that builds a model on a device; on "meta" it takes no memory.

    `initialize` creates the values of a model on the meta device.

    Args:
        dtype: Default dtype of the block; None leaves it unchanged.
        device: Device of new tensors.
        enabled: If False, the block has no effect.
    """

    def __init__(
        self, dtype: torch.dtype | None = None, device: str | torch.device = "meta",
        enabled: bool = True,
    ) -> None:  # fmt: skip
        self._dtype, self._device, self._enabled = dtype, torch.device(device), enabled
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        if self._enabled:
            with ExitStack() as undo:
                undo.enter_context(self._device)
                if self._dtype is not None:
                    undo.callback(torch.set_default_dtype, torch.get_default_dtype())
                    torch.set_default_dtype(self._dtype)
                self._undo = undo.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()


__getattr__ = getter("utils")

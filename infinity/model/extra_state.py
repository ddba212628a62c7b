"""Extra state of modules, what `get_extra_state` returns, by its keys in the state dict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from infinity.errors import CheckpointError

_KEY = "_extra_state"  # after the name of the module


def modules_with_extra_state(module: nn.Module, prefix: str = "") -> dict[str, nn.Module]:
    """Return the modules that have extra state, by its keys in `module.state_dict()`."""
    return {
        f"{prefix}{name}.{_KEY}" if name else f"{prefix}{_KEY}": child
        for name, child in module.named_modules(remove_duplicate=False)
        if type(child).get_extra_state is not nn.Module.get_extra_state
    }


def capture_extra_state(module: nn.Module) -> dict[str, Any]:
    """Return all extra state of a module tree."""
    states = {n: child.get_extra_state() for n, child in modules_with_extra_state(module).items()}
    return {n: s.detach().cpu() if isinstance(s, Tensor) else s for n, s in states.items()}


def check_extra_state(module: nn.Module, saved: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` if the saved keys are not those of the module."""
    differing = sorted(saved.keys() ^ modules_with_extra_state(module).keys())
    if differing:
        raise CheckpointError(
            f"extra state of modules does not fit the model: {', '.join(map(repr, differing))}",
            because="it is only in the checkpoint or only in the model",
            remedy="load_module_strict=False ignores missing and unexpected names",
        )


def restore_extra_state(module: nn.Module, saved: Mapping[str, Any]) -> None:
    """Pass saved values to `set_extra_state` of the modules that have extra state."""
    for name, child in modules_with_extra_state(module).items():
        if name in saved:
            child.set_extra_state(saved[name])

"""Replacements for `_parameters`, `_modules` and `_apply` of a module that an engine owns.

[Note: fetch on access]
`module._parameters` is replaced by a mapping whose `__getitem__` calls back before it returns a
parameter. Attribute access, tied and borrowed weights, and functions that access parameters
in any order therefore find them resident; hooks on modules only add prefetch. Iterating
(`parameters()`, `items()`) does not fetch: it serves shapes and identities.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm

from infinity.errors import InfinityWarning, ResidencyError, listed
from infinity.model.offloaded_parameter import EDIT, released_error
from infinity.model.parameters import CHANGE_REMEDY, placeholder

Touch = Callable[[nn.Parameter], Tensor]  # returns the parameter, or a view to read instead


class ParameterMap(dict[str, nn.Parameter | None]):
    """`module._parameters` while an engine owns the module. See [Note: fetch on access]."""

    def __init__(self, plain: dict[str, nn.Parameter | None], touch: Touch) -> None:
        super().__init__(plain)
        self._touch = touch
        self._changes: dict[str, Callable[[], Tensor]] = {}

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        if name in self._changes:
            return self._changes[name]()
        return None if parameter is None else self._touch(parameter)

    @contextmanager
    def changed(self, name: str, changes: Sequence[Callable[[Tensor], Tensor]]) -> Iterator[None]:
        """Context in which access to a parameter returns `changes` applied to it, computed once."""

        @cache
        def value() -> Tensor:
            parameter = dict.__getitem__(self, name)
            assert parameter is not None
            tensor = self._touch(parameter)
            for change in changes:
                tensor = change(tensor)
            return tensor

        self._changes[name] = value
        try:
            yield
        finally:
            del self._changes[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Like `[]`, with a default for missing names."""
        return self[name] if name in self else default  # noqa: SIM401  (this is `get`)

    def __setitem__(self, name: str, value: nn.Parameter | None) -> None:
        if name in self and super().__getitem__(name) is value:
            return
        raise ResidencyError(
            f"parameter {name!r} cannot be replaced or added while an engine owns the module "
            "(torch.func transforms and functional_call do that too)",
            remedy=f"{EDIT}; or {CHANGE_REMEDY}",
        )

    def __delitem__(self, name: str) -> None:
        raise ResidencyError(
            f"parameter {name!r} cannot be removed while an engine owns the module",
            remedy=CHANGE_REMEDY,
        )

    def _refuse_change(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise for changes that bypass `__setitem__` and `__delitem__`."""
        raise ResidencyError(
            "parameters cannot be replaced, added or removed while an engine owns the module",
            remedy=CHANGE_REMEDY,
        )

    clear = pop = popitem = setdefault = update = __ior__ = _refuse_change

    def copy(self) -> NoReturn:
        """Raise `ResidencyError`: a copy would hold placeholders."""
        refuse_copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        refuse_copy()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy()


class LostParameters(dict[str, nn.Parameter | None]):
    """`module._parameters` after its engine was closed without `restore`, or dropped.

    Access raises: values are lost, and placeholders (NaN) would be trained or saved.
    """

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise released_error()

    __getitem__ = get = items = values = copy = __deepcopy__ = __reduce_ex__ = _refuse


def _after_loading(name: str) -> Callable[..., Any]:
    def method(self: StoredParameters, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.load(), name)(*args, **kwargs)

    return method


class StoredValues(Protocol):
    """Values that a collected engine left on their tiers."""

    def wake(self) -> None:
        """Load the values, and give modules plain dicts of parameters."""


class StoredParameters(dict[str, nn.Parameter | None]):
    """`module._parameters` while values are stored on the tiers of a collected engine.

    All values are loaded when a parameter is accessed or replaced. Iterating loads none: using a
    parameter does (see `offloaded_parameter.Access.wake`).
    """

    def __init__(self, module: nn.Module, stored: StoredValues) -> None:
        super().__init__(dict.items(module._parameters))
        self._module = weakref.ref(module)
        self.stored = stored

    def load(self) -> dict[str, nn.Parameter | None]:
        """Load all values; return the module's plain dict of parameters."""
        self.stored.wake()
        module = self._module()
        assert module is not None
        return module._parameters

    __getitem__ = _after_loading("__getitem__")
    __setitem__ = _after_loading("__setitem__")
    __delitem__ = _after_loading("__delitem__")
    __reduce_ex__ = _after_loading("__reduce_ex__")
    clear, copy, get, pop = map(_after_loading, ("clear", "copy", "get", "pop"))
    popitem, setdefault, update = map(_after_loading, ("popitem", "setdefault", "update"))


def refuse_copy() -> NoReturn:
    """Raise for copy, deepcopy and pickle of an offloaded module."""
    raise ResidencyError(
        "an offloaded module cannot be copied or pickled: its parameters are placeholders",
        remedy="use engine.state_dict() (or engine.module.state_dict()) for the values, "
        "or engine.close(restore=True) to get a plain module back",
    )


class ModuleMap(dict[str, nn.Module | None]):
    """`module._modules` while an engine owns the module; `admit` checks new modules."""

    def __init__(
        self, plain: Mapping[str, nn.Module | None], admit: Callable[[str, nn.Module], None]
    ) -> None:
        super().__init__(plain)
        self._admit = admit

    def __setitem__(self, name: str, module: nn.Module | None) -> None:
        if module is not None:
            self._admit(name, module)
        super().__setitem__(name, module)


class GuardedApply:
    """Replacement for `module._apply` (`.to()`, `.half()`, `.cpu()`, ...) of an owned module.

    A call without effect, such as a move to the current device, is allowed. With `stays`, for
    scripts written for DeepSpeed, a move to another device only warns, and has no effect.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.stays = False

    def __call__(self, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Return the module; raise `ResidencyError` if the change would affect its tensors."""
        module = self._module()
        assert module is not None
        tensors = (*module.parameters(recurse), *module.buffers(recurse))
        moved = ""
        for dtype, device, dims in {(t.dtype, t.device, t.dim()) for t in tensors}:
            sample = torch.zeros((2,) * dims, dtype=dtype, device=device)
            address = sample.data_ptr()
            changed = change(sample)
            if self.stays and changed.dtype is dtype and changed.device != device:
                moved = f"on {device}: it was not moved to {changed.device}"
            elif changed is not sample or sample.data_ptr() != address:
                raise ResidencyError(
                    f"an offloaded module cannot be moved or cast: this would change its {dtype} "
                    f"tensors on {device}, and the engine owns their memory",
                    because=".to(), .cuda(), .half(), .bfloat16() and .float() rewrite every "
                    "parameter",
                    remedy="set `precision` in the config and `device=` in initialize(); "
                    "engine.close(restore=True) gives a plain module back",
                )
        if moved:
            warnings.warn(
                f"an offloaded module stays where its engine computes, {moved}",
                InfinityWarning,
                stacklevel=3,
            )
        return module

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        refuse_copy()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy()


def recomputed_weights(module: nn.Module) -> list[str]:
    """Return the attributes that `nn.utils.spectral_norm` sets before every forward."""
    hooks = module._forward_pre_hooks.values()
    return [hook.name for hook in hooks if isinstance(hook, SpectralNorm)]


def _may_be_shared(module: nn.Module) -> bool:
    """Return True for a module without state, such as an activation.

    Models often share one: a global instance, or the default argument of a constructor.
    """
    containers = nn.ModuleList | nn.ModuleDict | nn.Sequential | nn.ParameterList | nn.ParameterDict
    return not (
        module._parameters or module._buffers or module._modules or isinstance(module, containers)
    )


class Installation:
    """Replacement of `_parameters`, `_modules` and `_apply` on a module tree, until `remove`."""

    def __init__(self, root: nn.Module, touch: Touch) -> None:
        self.values_lost = False  # whether values are lost at `remove`
        self.stored: StoredValues | None = None  # where values stay stored otherwise
        self.on_new_module: Callable[[nn.Module], None] = lambda module: None
        self._touch = touch
        self._parameter_ids = {id(parameter) for parameter in root.parameters()}
        self.modules: list[nn.Module] = []
        # Modules that other models may share, with their paths, by id.
        self._unguarded: dict[int, tuple[str, nn.Module]] = {}
        self._install("", root)

    def _install(self, path: str, root: nn.Module) -> None:
        """Replace the attributes of a tree whose parameters the engine holds."""
        for name, module in root.named_modules(prefix=path):
            if _may_be_shared(module):
                self._unguarded[id(module)] = name, module
            elif not isinstance(module._parameters, ParameterMap):
                admit = partial(self._admit, name)
                module.__dict__["_parameters"] = ParameterMap(module._parameters, self._touch)
                module.__dict__["_modules"] = ModuleMap(module._modules, admit)
                module.__dict__["_apply"] = GuardedApply(module)
                if isinstance(module, nn.RNNBase):  # this moves weights: see `torch_private.py`
                    module.__dict__["flatten_parameters"] = lambda: None
                for attribute in recomputed_weights(module):  # may share the parameter's old memory
                    old = getattr(module, attribute)
                    setattr(module, attribute, placeholder(old.shape, old.dtype, old.device))
                self.modules.append(module)
                self.on_new_module(module)

    def check_unguarded(self) -> None:
        """Raise `ResidencyError` if a module that had no state has got new parameters."""
        for key, (path, module) in [*self._unguarded.items()]:
            if module._parameters or module._modules:
                self._admit("", path, module)
                del self._unguarded[key]

    def _admit(self, path: str, name: str, module: nn.Module) -> None:
        """Raise `ResidencyError` for a module with new parameters: they would not be trained."""
        path = f"{path}.{name}" if path else name
        unknown = [n for n, p in module.named_parameters() if id(p) not in self._parameter_ids]
        if unknown:
            raise ResidencyError(
                f"{path!r} becomes a {type(module).__name__} with {len(unknown)} parameters that "
                f"the engine does not hold: {listed(unknown, 3)}",
                because="adapters, new or larger embeddings and other layers that come after "
                "initialize() have no optimizer state: they would never be trained",
                remedy=CHANGE_REMEDY,
            )
        self._install(path, module)

    def remove(self) -> None:
        """Restore methods and plain dicts; of parameters unless values are lost or stored."""
        dict_class: Callable[..., Any] = LostParameters if self.values_lost else dict
        without_values = {id(m) for m in self.modules if next(m.parameters(), None) is None}
        for module in self.modules:
            if isinstance(module._parameters, ParameterMap):
                if id(module) in without_values:
                    parameters: Any = dict(module._parameters)
                elif self.stored is not None:
                    parameters = StoredParameters(module, self.stored)
                else:
                    parameters = dict_class(module._parameters)
                module.__dict__["_parameters"] = parameters
                module.__dict__["_modules"] = dict(module._modules)
            module.__dict__.pop("_apply", None)
            module.__dict__.pop("flatten_parameters", None)
        self.modules, self.stored, self._unguarded = [], None, {}

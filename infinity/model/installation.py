"""What an owned module has in the place of its dicts of parameters, and of `_apply`.

[Note: fetch on access]
`module._parameters` is replaced by a mapping whose `__getitem__` calls back before it returns a
parameter. Attribute access, tied and borrowed weights, and functions that reach for a parameter
in any order therefore find it present; hooks on modules only add look-ahead. Iterating
(`parameters()`, `items()`) does not fetch: it serves shapes and identities.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn

from infinity.errors import EngineClosedError, PresenceError
from infinity.model.presence import EDIT

Touch = Callable[[nn.Parameter], None]


class ParameterMap(dict[str, nn.Parameter | None]):
    """`module._parameters` while an engine owns the module. See [Note: fetch on access]."""

    def __init__(self, plain: dict[str, nn.Parameter | None], touch: Touch) -> None:
        super().__init__(plain)
        self._touch = touch

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter = super().__getitem__(name)
        if parameter is not None:
            self._touch(parameter)
        return parameter

    def get(self, name: str, default: Any = None) -> Any:
        """Like `[]`, with a default for what is not there."""
        return self[name] if name in self else default  # noqa: SIM401  (this is `get`)

    def __setitem__(self, name: str, value: nn.Parameter | None) -> None:
        if name in self and super().__getitem__(name) is value:
            return
        raise PresenceError(
            f"parameter {name!r} cannot be replaced or added while an engine owns the module "
            "(torch.func transforms and functional_call do that too)",
            remedy=f"{EDIT}, or change the module before initialize() or after close()",
        )

    def __delitem__(self, name: str) -> None:
        raise PresenceError(
            f"parameter {name!r} cannot be removed while an engine owns the module",
            remedy="change the module before initialize() or after close()",
        )

    def _refuse_change(self, *args: Any, **kwargs: Any) -> NoReturn:
        """For the changes that a dict makes without `__setitem__` or `__delitem__`."""
        raise PresenceError(
            "parameters cannot be replaced, added or removed while an engine owns the module",
            remedy="change the module before initialize() or after close()",
        )

    clear = pop = popitem = setdefault = update = __ior__ = _refuse_change

    def copy(self) -> NoReturn:
        """Refused: a copy would hold placeholders."""
        refuse_copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        refuse_copy()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy()


class GoneParameters(dict[str, nn.Parameter | None]):
    """`module._parameters` after its engine was dropped: the values are gone, and whoever asks
    for them is told; NaN would be trained with.
    """

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        """For every way to the parameters."""
        raise EngineClosedError(
            "the engine of this module was dropped without close(restore=True), and the values "
            "of the parameters with it",
            because="nothing referred to the engine any more; weights rest in its memory and files",
            remedy="keep the engine as long as the module is used, and call "
            "engine.close(restore=True) for a plain module; or build the module anew",
        )

    __getitem__ = get = items = values = copy = __deepcopy__ = __reduce_ex__ = _refuse


def refuse_copy() -> NoReturn:
    """Raise for copy, deepcopy and pickle of an offloaded module."""
    raise PresenceError(
        "an offloaded module cannot be copied or pickled: its absent parameters are placeholders",
        remedy="use engine.state_dict() (or engine.module.state_dict()) for the values, "
        "or engine.close(restore=True) to get a plain module back",
    )


class RefusedApply:
    """Stands in for `module._apply` (`.to()`, `.half()`, `.float()`, ...) on owned modules."""

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused."""
        raise PresenceError(
            "an offloaded module cannot be moved or cast: the engine owns its memory",
            because=".to(), .cuda(), .half(), .bfloat16() and .float() rewrite every parameter",
            remedy="set `precision` in the config and `device=` in initialize(); "
            "engine.close(restore=True) gives a plain module back",
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        refuse_copy()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy()


class Installation:
    """Replaces and restores `_parameters` and `_apply` on a module tree."""

    def __init__(self, root: nn.Module, touch: Touch) -> None:
        self.gone = False  # whether the values will be, and nobody has said that they may
        self._modules = list(root.modules())
        for module in self._modules:
            module.__dict__["_parameters"] = ParameterMap(module._parameters, touch)
            module.__dict__["_apply"] = RefusedApply()

    def remove(self) -> None:
        """Plain dicts and methods again; see `gone`."""
        kind = GoneParameters if self.gone else dict
        for module in self._modules:
            if isinstance(module._parameters, ParameterMap):
                module.__dict__["_parameters"] = kind(module._parameters)
            module.__dict__.pop("_apply", None)
        self._modules = []

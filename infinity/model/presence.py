"""How a parameter is present or absent. The only file that assigns `param.data`.

[Note: presence]
Present, a parameter is a view into a slot. Absent, it is a zero-stride placeholder of its real
shape and dtype, filled with NaN (or the largest value of a type without NaN): shapes work
everywhere, no memory is used, and misuse is loud. Leaving bumps the parameter's version, so that
anything autograd saved behind our back raises instead of reading a stranger's bytes.

[Note: fetch on access]
`module._parameters` is replaced by a mapping whose `__getitem__` calls back before it returns a
parameter. Attribute access, tied and borrowed weights, and functions that reach for a parameter
in any order therefore find it present; hooks on modules only add look-ahead. Iterating
(`parameters()`, `items()`) does not fetch: it serves shapes and identities.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from infinity.errors import PresenceError
from infinity.plan.layout import UnitLayout

Touch = Callable[[nn.Parameter], None]

_EDIT = "edit inside `with engine.materialized(module_or_params):`"


def placeholder(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A loud stand-in of no size: NaN, or the type's largest value, expanded to `shape`."""
    if dtype.is_floating_point or dtype.is_complex:
        value: Any = float("nan")
    elif dtype is torch.bool:
        value = True
    else:
        value = torch.iinfo(dtype).max
    with torch.inference_mode(False):
        return torch.full((), value, dtype=dtype, device=device).expand(shape)


class Presence:
    """Binds and unbinds the parameters of units; owns placeholders and versions."""

    def __init__(
        self,
        layouts: Sequence[UnitLayout],
        parameters: Sequence[nn.Parameter],
        dtypes: Sequence[torch.dtype],
        device: torch.device,
    ) -> None:
        self._layouts = layouts
        self.parameters = parameters
        self.dtypes = dtypes
        self._placeholders = [
            placeholder(p.shape, dtype, device) for p, dtype in zip(parameters, dtypes, strict=True)
        ]
        self._versions: dict[int, int] = {}

    def bind(self, unit: int, slot: Tensor) -> None:
        """Make the unit's parameters views into `slot` (uint8, the unit's slot layout)."""
        layout = self._layouts[unit]
        for segment in layout.segments:
            if segment.trained:
                start = segment.offset * layout.weight_itemsize
            else:
                start = layout.trained_bytes + segment.offset
            parameter = self.parameters[segment.parameter]
            flat = slot[start : start + segment.nbytes].view(self.dtypes[segment.parameter])
            parameter.data = flat.view(segment.shape)
            self._versions[segment.parameter] = parameter._version

    def unbind(self, unit: int) -> None:
        """Make the unit's parameters placeholders.

        Raises `PresenceError`, after unbinding all of them, if one was edited in place.
        """
        edited: list[str] = []
        for segment in self._layouts[unit].segments:
            parameter = self.parameters[segment.parameter]
            expected = self._versions.pop(segment.parameter, parameter._version)
            if parameter._version != expected:
                edited.append(segment.name)
            parameter.data = self._placeholders[segment.parameter]
            torch.autograd.graph.increment_version(parameter)
        if edited:
            raise PresenceError(
                f"parameter {edited[0]!r} was edited in place while the engine lent it out; "
                "the edit is lost",
                because="offloaded parameters are views into reused slots",
                remedy=_EDIT,
            )

    def forget(self, unit: int) -> None:
        """Like `unbind`, from any state and without judging edits: for interrupted runs."""
        for segment in self._layouts[unit].segments:
            parameter = self.parameters[segment.parameter]
            self._versions.pop(segment.parameter, None)
            parameter.data = self._placeholders[segment.parameter]
            torch.autograd.graph.increment_version(parameter)

    def lend(self, index: int, value: Tensor) -> None:
        """Give one parameter a tensor of its own (any dtype), for reading and editing."""
        self.parameters[index].data = value

    def unlend(self, index: int) -> None:
        """Take the tensor back: the parameter is absent."""
        self.parameters[index].data = self._placeholders[index]
        torch.autograd.graph.increment_version(self.parameters[index])

    def restore(self, values: Sequence[Tensor]) -> None:
        """Give every parameter a real tensor back, for good."""
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.data = value

    def absent_in_child(self) -> None:
        """After a fork: the child has no slots; make every parameter absent."""
        for parameter, stand_in in zip(self.parameters, self._placeholders, strict=True):
            parameter.data = stand_in


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
            remedy=f"{_EDIT}, or change the module before initialize() or after close()",
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
        self._modules = list(root.modules())
        for module in self._modules:
            module.__dict__["_parameters"] = ParameterMap(module._parameters, touch)
            module.__dict__["_apply"] = RefusedApply()

    def remove(self) -> None:
        """Plain dicts and methods again."""
        for module in self._modules:
            if isinstance(module._parameters, ParameterMap):
                module.__dict__["_parameters"] = dict(module._parameters)
            module.__dict__.pop("_apply", None)
        self._modules = []


def move_buffers(root: nn.Module, device: torch.device) -> None:
    """Buffers keep their dtype and live on the device."""
    for module in root.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)

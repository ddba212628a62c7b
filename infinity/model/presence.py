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

from infinity.errors import ConfigError, PresenceError
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
        self._meta: dict[int, nn.Parameter] = {}  # by index, while values are made

    # --- birth ---------------------------------------------------------------------------------

    def leave_meta(self) -> None:
        """Make parameters that are on meta absent; `return_to_meta` undoes it.

        Each stays the same Python object, which groups and tied modules hold: torch refuses to set
        the data of a meta tensor, but swaps whole tensors. Raises `ConfigError` for a parameter
        that something else is tied to by more than a Python reference.
        """
        for index, parameter in enumerate(self.parameters):
            if parameter.is_meta:
                self._refuse_hooks(index, parameter)
                stand_in = nn.Parameter(self._placeholders[index], parameter.requires_grad)
                self._meta[index] = stand_in  # which holds the meta tensor in a moment
                self._swap(index, parameter, stand_in)

    def return_to_meta(self) -> None:
        """After a birth that failed: parameters that were on meta are as they were."""
        for index, meta in self._meta.items():
            if meta.is_meta:  # not yet swapped back, should we have been interrupted
                self._swap(index, self.parameters[index], meta)
        self._meta.clear()

    def settle(self) -> None:
        """After a birth that went well: nobody returns to meta."""
        self._meta.clear()

    def _swap(self, index: int, parameter: nn.Parameter, other: nn.Parameter) -> None:
        other.__class__ = parameter.__class__  # torch swaps these too; they shall stay
        other.__dict__.update(parameter.__dict__)
        try:
            torch.utils.swap_tensors(parameter, other)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise self._tied_down(index, str(error).partition(chr(10))[0]) from error

    def _refuse_hooks(self, index: int, parameter: nn.Parameter) -> None:
        # They would stay behind with the meta tensor, and never run.
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if getattr(parameter, name, None):
                raise self._tied_down(index, "it has a hook")

    def _tied_down(self, index: int, because: str) -> ConfigError:
        segments = (s for layout in self._layouts for s in layout.segments)
        name = next(s.name for s in segments if s.parameter == index)
        return ConfigError(
            f"parameter {name!r} is on the meta device and cannot get values",
            because=because,
            remedy="register hooks after initialize(), and keep no views of parameters or weak "
            "references to them",
        )

    # --- present or absent ---------------------------------------------------------------------

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


def move_buffers(
    root: nn.Module, device: torch.device, first_value: Callable[[Tensor], Tensor]
) -> None:
    """Buffers get their first values, keep their dtype, and live on the device.

    A buffer of several modules stays one.
    """
    moved: dict[int, tuple[Tensor, Tensor]] = {}
    for module in root.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                if id(buffer) not in moved:
                    value = first_value(buffer).to(device, buffer.dtype)
                    moved[id(buffer)] = (buffer, value)  # the old one too: its id stays taken
                module._buffers[name] = moved[id(buffer)][1]

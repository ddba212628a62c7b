"""Residency of parameters: binding to slots and offloading. Only this file assigns `param.data`.

[Note: residency]
A resident parameter is a view into a slot. An offloaded one is a zero-stride placeholder of its
real shape and dtype, with a class that supports reads and refuses edits (`offloaded_parameter.py`).
The placeholder is NaN (or the largest value of a dtype without NaN), for code that bypasses the
class. Offloading bumps the parameter's version, so that anything autograd saved raises instead of
reading another unit's bytes.

[Note: edits of bound parameters]
A parameter is resident only during a call, and after attribute access outside a call until a call
needs its slot or steps. An edit of an offloaded parameter raises at once. Edits of resident
parameters are detected when the parameter is next bound, released or compared:
- `p.data = t` by its address, `p.add_(...)` by its version;
- `p.data.fill_(...)` by a checksum of its unit (`offload/bound_units.py`), if it was accessed
  outside a call, and in the first forward of every unit. A module that edits `self.weight.data` in
  its forward does so in the first one; checksums in every forward would cost two passes over all
  weights each. Edits in forwards that begin later are not detected.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from infinity.errors import ConfigError, ResidencyError
from infinity.model.offloaded_parameter import EDIT, offload_class
from infinity.model.torch_private import without_torch_function
from infinity.plan.layout import Segment, UnitLayout


def make_zero_grad(module: nn.Module, drop: Callable[[], None]) -> Callable[..., None]:
    """Return a `module.zero_grad` that also calls `drop`; both objects are referenced weakly."""
    owned, dropped = weakref.ref(module), weakref.WeakMethod(drop)

    def zero_grad(set_to_none: bool = True) -> None:
        module, drop = owned(), dropped()
        if module is not None:
            type(module).zero_grad(module, set_to_none)
        if drop is not None:
            drop()

    return zero_grad


def freeze(parameters: Iterable[nn.Parameter]) -> Callable[[], None]:
    """Set `requires_grad` of these parameters to False; return a function that undoes it."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)

    def undo() -> None:
        for parameter in trained:
            parameter.requires_grad_(True)

    return undo


def swap_parameters(name: str, state: str, parameter: Tensor, other: Tensor) -> None:
    """Swap two parameters, keeping the Python objects; `state` is the reason for it in errors.

    Raises `ConfigError` for a parameter that a view, hook or weak reference is tied to.
    """
    try:
        torch.utils.swap_tensors(parameter, other)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise _cannot_swap(name, state, str(error).partition(chr(10))[0]) from error


def _cannot_swap(name: str, state: str, because: str) -> ConfigError:
    return ConfigError(
        f"parameter {name!r} {state} and cannot get values",
        because=because,
        remedy="register hooks after initialize(), and keep no views of parameters or weak "
        "references to them",
    )


_ON_META = "is on the meta device"
CHANGE_REMEDY = (
    "change the module before initialize(); or engine.close(restore=True), change it, and "
    "initialize() anew"
)
# Negative signaling NaNs: any operation on one returns another NaN.
_NAN_BITS = {
    torch.float64: (torch.int64, -(1 << 63) | 0x7FF4 << 48),
    torch.float32: (torch.int32, -(1 << 31) | 0x7FA0 << 16),
    torch.bfloat16: (torch.int16, -(1 << 15) | 0x7FA0),
    torch.float16: (torch.int16, -(1 << 15) | 0x7D00),
}


def placeholder(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return one element, NaN or the largest value of the dtype, expanded to `shape`."""
    if dtype.is_floating_point or dtype.is_complex:
        value: Any = float("nan")
    elif dtype is torch.bool:
        value = True
    else:
        value = torch.iinfo(dtype).max
    with torch.inference_mode(False):
        if dtype in _NAN_BITS:
            bits, value = _NAN_BITS[dtype]
            return torch.full((), value, dtype=bits, device=device).view(dtype).expand(shape)
        return torch.full((), value, dtype=dtype, device=device).expand(shape)


@dataclass(frozen=True, slots=True)
class Edit:
    """A detected edit of a parameter: the parameter's name and the kind of edit."""

    name: str
    in_place: bool
    shapes: tuple[Sequence[int], Sequence[int]] = ((), ())  # before and after the edit

    def error(self, result: str = "the edit is lost") -> ResidencyError:
        """Return the error to raise; `result` describes the state after the edit."""
        before, after = map(tuple, self.shapes)
        resized = before != after
        change = "edited in place" if self.in_place else "given other memory (`.data = ...`)"
        if resized:
            change = f"resized from {before} to {after}"
        return ResidencyError(
            f"parameter {self.name!r} was {change} while the engine owned it; {result}",
            because="offloaded parameters are views into reused slots, or placeholders",
            remedy=CHANGE_REMEDY if resized else EDIT,
        )


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
# dtype, shape, strides, offset in elements
_ViewSpec = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]


class ParameterBinding:
    """Binding of units' parameters to slots; owns placeholders and versions."""

    def __init__(
        self,
        layouts: Sequence[UnitLayout],
        parameters: Sequence[nn.Parameter],
        dtypes: Sequence[torch.dtype],
        device: torch.device,
        names: Sequence[str],
    ) -> None:
        self.parameters = parameters
        self.dtypes = dtypes
        self._names = names
        self._classes = [type(parameter) for parameter in parameters]
        self._offloaded_classes = [offload_class(kind) for kind in self._classes]
        self._placeholders = [
            placeholder(parameter.shape, dtype, device)
            for parameter, dtype in zip(parameters, dtypes, strict=True)
        ]
        self._indices = [[s.parameter for s in layout.segments] for layout in layouts]  # by unit
        specs = [tuple(self._view_spec(layout, s) for s in layout.segments) for layout in layouts]
        numbers = {unit_specs: number for number, unit_specs in enumerate(dict.fromkeys(specs))}
        # By unit; equal specs have equal numbers.
        self._specs = [(numbers[unit_specs], unit_specs) for unit_specs in specs]
        # Version and tensor as last set, by parameter index; no entry while it is materialized.
        self._last_set: dict[int, tuple[int, Tensor]] = {}
        self._meta: dict[int, nn.Parameter] = {}  # by index, during the initial write

    # --- initial write ---------------------------------------------------------------------------

    def swap_to_meta(self, indices: Iterable[int]) -> None:
        """Swap offloaded parameters for meta tensors; undone by `offload_from_meta`."""
        for index in indices:
            parameter = self.parameters[index]
            parameter.__class__ = self._classes[index]
            self._refuse_hooks(index, parameter)
            empty = torch.empty(parameter.shape, dtype=self.dtypes[index], device="meta")
            self._swap(index, parameter, nn.Parameter(empty, parameter.requires_grad))

    def offload_from_meta(self) -> None:
        """Offload the parameters that are on meta; `restore_meta` undoes it.

        Each stays the same Python object, which groups and tied modules hold: torch refuses to set
        the data of a meta tensor, but swaps tensors. Raises `ConfigError` for a parameter with
        hooks, and as `swap_parameters` does.
        """
        for index, parameter in enumerate(self.parameters):
            if parameter.is_meta:
                self._refuse_hooks(index, parameter)
                stand_in = nn.Parameter(self._placeholders[index], parameter.requires_grad)
                self._meta[index] = stand_in  # holds the meta tensor after the swap
                self._swap(index, parameter, stand_in)

    def restore_meta(self) -> None:
        """Swap parameters back to meta, after a failed initial write."""
        for index, meta in self._meta.items():
            if meta.is_meta:  # False for one that could not be swapped
                self._swap(index, self.parameters[index], meta)
        self._meta.clear()

    def settle(self) -> None:
        """Mark the initial write as done: no parameter returns to meta."""
        self._meta.clear()

    def _swap(self, index: int, parameter: nn.Parameter, other: nn.Parameter) -> None:
        # torch swaps classes and attributes, too: make them equal
        other.__class__ = parameter.__class__ = self._classes[index]
        other.__dict__.update(parameter.__dict__)
        swap_parameters(self._names[index], _ON_META, parameter, other)
        for name in _HOOKS:  # the new tensor would ignore hooks added to the old, empty dicts
            setattr(parameter, name, None)

    def _refuse_hooks(self, index: int, parameter: nn.Parameter) -> None:
        # Hooks would stay with the other tensor, and never run.
        for name in _HOOKS:
            if getattr(parameter, name, None):
                raise _cannot_swap(self._names[index], _ON_META, "it has a hook")

    # --- resident or offloaded -------------------------------------------------------------------

    def _view_spec(self, layout: UnitLayout, segment: Segment) -> _ViewSpec:
        start = segment.offset * layout.weight_itemsize
        if segment.form:
            start = layout.dequantized[segment.parameter]
        elif not segment.trained:
            start = layout.trained_bytes + segment.offset
        dtype, shape = self.dtypes[segment.parameter], segment.shape
        strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        return dtype, shape, strides, start // dtype.itemsize

    def views(
        self, unit: int, cached: dict[int, list[Tensor]], flat: Callable[[torch.dtype], Tensor]
    ) -> list[Tensor]:
        """Return the unit's parameters, in order, as views of a slot.

        `flat` returns the full slot as a tensor of a dtype. `cached` holds the slot's views by
        number of their specs, so that units with equal layouts share them.
        """
        number, specs = self._specs[unit]
        if number not in cached:
            cached[number] = [
                flat(dtype).as_strided(shape, strides, start)
                for dtype, shape, strides, start in specs
            ]
        return cached[number]

    def bind(self, unit: int, views: Sequence[Tensor]) -> None:
        """Set the unit's parameters to these views.

        Raises `ResidencyError`, and leaves all offloaded, if one was edited while offloaded.
        """
        edit = self.edited(unit)
        if edit is not None:
            self.free(unit)
            raise edit.error()
        for index, view in zip(self._indices[unit], views, strict=True):
            self._set(index, view)

    def free(self, unit: int) -> None:
        """Offload the unit's parameters, from any state and without checking for edits."""
        indices = self._indices[unit]
        torch.autograd.graph.increment_version([self.parameters[i] for i in indices])
        for index in indices:
            self._offload(index)

    def edited(self, unit: int) -> Edit | None:
        """Return an edit of one of the unit's parameters, by its memory or version, or None."""
        parameters, last_set = self.parameters, self._last_set
        with without_torch_function():
            for index in self._indices[unit]:
                if index not in last_set:
                    continue
                parameter = parameters[index]
                version, value = last_set[index]
                if not parameter.is_set_to(value):
                    shapes = (value.shape, parameter.shape)
                    return Edit(self._names[index], in_place=False, shapes=shapes)
                if parameter._version != version:
                    return Edit(self._names[index], in_place=True)
        return None

    def _set(self, index: int, value: Tensor) -> None:
        parameter = self.parameters[index]
        parameter.__class__ = self._classes[index]
        parameter.data = value
        self._last_set[index] = parameter._version, value

    def _offload(self, index: int) -> None:
        self._set(index, self._placeholders[index])
        self.parameters[index].__class__ = self._offloaded_classes[index]

    def bind_materialized(self, index: int, value: Tensor) -> None:
        """Set one parameter to a separate tensor (any dtype), for reading and editing."""
        self._set(index, value)
        del self._last_set[index]

    def unbind_materialized(self, index: int) -> None:
        """Offload one parameter."""
        torch.autograd.graph.increment_version(self.parameters[index])
        self._offload(index)

    def restore(self, values: Mapping[int, Tensor]) -> None:
        """Set parameters, by index, to real tensors permanently."""
        for index, value in values.items():
            self._set(index, value)

    def offload_in_child(self) -> None:
        """Offload every parameter in a forked child, which has no slots."""
        for index in range(len(self.parameters)):
            self._offload(index)


def move_buffers(
    root: nn.Module, device: torch.device, initial_value: Callable[[Tensor], Tensor]
) -> None:
    """Move buffers with their initial values to the device, keeping their dtype.

    A buffer that several modules share stays shared.
    """
    moved: dict[int, tuple[Tensor, Tensor]] = {}
    for module in root.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                if id(buffer) not in moved:
                    value = initial_value(buffer).to(device, buffer.dtype)
                    moved[id(buffer)] = (buffer, value)  # the old one, so that its id is not reused
                module._buffers[name] = moved[id(buffer)][1]

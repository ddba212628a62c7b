"""How a parameter is resident or offloaded. The only file that assigns `param.data`.

[Note: residency]
Resident, a parameter is a view into a slot. Offloaded, it is a zero-stride placeholder of its real
shape and dtype, of a class that answers reads and refuses edits (`offloaded_parameter.py`). The
placeholder is NaN (or the largest value of a type without NaN), for code that does not ask the
class. Offloading bumps the parameter's version, so that anything autograd saved raises instead of
reading another unit's bytes.

[Note: edits of bound parameters]
A parameter is resident only while a call runs, and after its module was asked for it outside of
one, until a call needs its slot or steps. An edit of an offloaded parameter raises at once. Edits
of resident ones are found when the parameter is next bound, released or compared:
- `p.data = t` by its address, `p.add_(...)` by its version;
- `p.data.fill_(...)` by a checksum of its unit (`offload/bound_units.py`), where it was accessed
  outside a call, and in the first forward of every unit. A module that edits `self.weight.data` in
  its forward does so in the first one; a checksum each time would be two passes over all weights a
  forward. One that begins later is not found.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm

from infinity.errors import ConfigError, InfinityWarning, ResidencyError, listed
from infinity.model.offloaded_parameter import EDIT, gone, offload_class
from infinity.model.torch_private import without_torch_function
from infinity.plan.layout import Segment, UnitLayout


def zero_grad_of(module: nn.Module, drop: Callable[[], None]) -> Callable[..., None]:
    """`module.zero_grad`, which calls `drop` too; keeps neither module nor `drop`'s object."""
    owned, dropped = weakref.ref(module), weakref.WeakMethod(drop)

    def zero_grad(set_to_none: bool = True) -> None:
        module, drop = owned(), dropped()
        if module is not None:
            type(module).zero_grad(module, set_to_none)
        if drop is not None:
            drop()

    return zero_grad


def freeze(parameters: Iterable[nn.Parameter]) -> Callable[[], None]:
    """Make these parameters require no gradient; returns what undoes that."""
    changed = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in changed:
        parameter.requires_grad_(False)

    def undo() -> None:
        for parameter in changed:
            parameter.requires_grad_(True)

    return undo


def swap_parameters(name: str, state: str, parameter: Tensor, other: Tensor) -> None:
    """Exchange two parameters, keeping the Python objects; `state` names the reason in errors.

    Raises `ConfigError` for one that something else is tied to by more than a Python reference.
    """
    try:
        torch.utils.swap_tensors(parameter, other)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise _tied_down(name, state, str(error).partition(chr(10))[0]) from error


def _tied_down(name: str, state: str, because: str) -> ConfigError:
    return ConfigError(
        f"parameter {name!r} {state} and cannot get values",
        because=because,
        remedy="register hooks after initialize(), and keep no views of parameters or weak "
        "references to them",
    )


_ON_META = "is on the meta device"
CHANGE_BEFORE = (
    "change the module before initialize(); or engine.close(restore=True), change it, and "
    "initialize() anew"
)
# Negative signaling NaNs: whatever computes with one makes another of it.
_NAN_BITS = {
    torch.float64: (torch.int64, -(1 << 63) | 0x7FF4 << 48),
    torch.float32: (torch.int32, -(1 << 31) | 0x7FA0 << 16),
    torch.bfloat16: (torch.int16, -(1 << 15) | 0x7FA0),
    torch.float16: (torch.int16, -(1 << 15) | 0x7D00),
}


def placeholder(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A loud stand-in of no size: NaN, or the type's largest value, expanded to `shape`."""
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
    """An edit of an offloaded parameter: its name and kind."""

    name: str
    in_place: bool
    shapes: tuple[Sequence[int], Sequence[int]] = ((), ())  # before and after it

    def error(self, result: str = "the edit is lost") -> ResidencyError:
        """Return the error to raise; `result` describes the state after the edit."""
        how = "edited in place" if self.in_place else "given other memory (`.data = ...`)"
        before, after = map(tuple, self.shapes)
        resized = before != after
        return ResidencyError(
            f"parameter {self.name!r} was {f'resized from {before} to {after}' if resized else how}"
            f" while the engine owned it; {result}",
            because="offloaded parameters are views into reused slots, or placeholders",
            remedy=CHANGE_BEFORE if resized else EDIT,
        )


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_Shape = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]  # strides; where it starts


class ParameterBinding:
    """Binds and unbinds the parameters of units; owns placeholders and versions."""

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
        self._offloaded = [offload_class(kind) for kind in self._classes]
        self._placeholders = [
            placeholder(parameter.shape, dtype, device)
            for parameter, dtype in zip(parameters, dtypes, strict=True)
        ]
        self._of = [[s.parameter for s in layout.segments] for layout in layouts]  # by unit
        shapes = [tuple(self._shape_of(layout, s) for s in layout.segments) for layout in layouts]
        numbers = {form: number for number, form in enumerate(dict.fromkeys(shapes))}
        self._forms = [(numbers[form], form) for form in shapes]  # by unit, alike ones have one
        # Version and memory that each parameter was left with; none while it is not ours.
        self._left: dict[int, tuple[int, Tensor]] = {}
        self._meta: dict[int, nn.Parameter] = {}  # by index, while values are made

    # --- initial write ---------------------------------------------------------------------------

    def to_meta(self, indices: Iterable[int]) -> None:
        """Put offloaded parameters on meta; `leave_meta` undoes it. Raises as that does."""
        for index in indices:
            parameter = self.parameters[index]
            parameter.__class__ = self._classes[index]
            self._refuse_hooks(index, parameter)
            empty = torch.empty(parameter.shape, dtype=self.dtypes[index], device="meta")
            self._swap(index, parameter, nn.Parameter(empty, parameter.requires_grad))

    def leave_meta(self) -> None:
        """Make parameters that are on meta offloaded; `return_to_meta` undoes it.

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
        """After an initial write that failed: parameters that were on meta are as they were."""
        for index, meta in self._meta.items():
            if meta.is_meta:  # not the one that could not be swapped
                self._swap(index, self.parameters[index], meta)
        self._meta.clear()

    def settle(self) -> None:
        """Mark the initial write as done: no parameter returns to meta."""
        self._meta.clear()

    def _swap(self, index: int, parameter: nn.Parameter, other: nn.Parameter) -> None:
        # torch swaps classes too; they shall stay
        other.__class__ = parameter.__class__ = self._classes[index]
        other.__dict__.update(parameter.__dict__)
        swap_parameters(self._names[index], _ON_META, parameter, other)
        for name in _HOOKS:  # dicts stay, but empty as they are the new tensor does not look there
            setattr(parameter, name, None)

    def _refuse_hooks(self, index: int, parameter: nn.Parameter) -> None:
        # They would stay behind with the other tensor, and never run.
        for name in _HOOKS:
            if getattr(parameter, name, None):
                raise _tied_down(self._names[index], _ON_META, "it has a hook")

    # --- resident or offloaded -------------------------------------------------------------------

    def _shape_of(self, layout: UnitLayout, segment: Segment) -> _Shape:
        start = segment.offset * layout.weight_itemsize
        if segment.form:
            start = layout.dequantised[segment.parameter]
        elif not segment.trained:
            start = layout.trained_bytes + segment.offset
        dtype, shape = self.dtypes[segment.parameter], segment.shape
        strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        return dtype, shape, strides, start // dtype.itemsize

    def views(
        self, unit: int, made: dict[int, list[Tensor]], flat: Callable[[torch.dtype], Tensor]
    ) -> list[Tensor]:
        """The unit's parameters, in order, as parts of its slot: `flat` has all of a type.

        `made` has those of the slot's earlier units, by their form: units that are alike share.
        """
        number, form = self._forms[unit]
        if number not in made:
            made[number] = [
                flat(dtype).as_strided(shape, strides, start)
                for dtype, shape, strides, start in form
            ]
        return made[number]

    def bind(self, unit: int, views: Sequence[Tensor]) -> None:
        """Make the unit's parameters these views.

        Raises `ResidencyError`, and leaves them offloaded, if one was edited since they are.
        """
        edit = self.edited(unit)
        if edit is not None:
            self.forget(unit)
            raise edit.error()
        for index, view in zip(self._of[unit], views, strict=True):
            self._set(index, view)

    def forget(self, unit: int) -> None:
        """Make the unit's parameters placeholders, from any state and without judging edits."""
        indices = self._of[unit]
        torch.autograd.graph.increment_version([self.parameters[i] for i in indices])
        for index in indices:
            self._offload(index)

    def edited(self, unit: int) -> Edit | None:
        """A parameter of the unit that is not as it was left, by its version or its memory."""
        parameters, left = self.parameters, self._left
        with without_torch_function():
            for index in self._of[unit]:
                if index not in left:
                    continue
                parameter = parameters[index]
                version, value = left[index]
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
        self._left[index] = parameter._version, value

    def _offload(self, index: int) -> None:
        self._set(index, self._placeholders[index])
        self.parameters[index].__class__ = self._offloaded[index]

    def bind_materialized(self, index: int, value: Tensor) -> None:
        """Give one parameter a tensor of its own (any dtype), for reading and editing."""
        self._set(index, value)
        del self._left[index]

    def unbind_materialized(self, index: int) -> None:
        """The parameter is offloaded."""
        torch.autograd.graph.increment_version(self.parameters[index])
        self._offload(index)

    def restore(self, values: Mapping[int, Tensor]) -> None:
        """Give parameters, by index, real tensors back, for good."""
        for index, value in values.items():
            self._set(index, value)

    def offload_in_child(self) -> None:
        """After a fork: the child has no slots; make every parameter offloaded."""
        for index in range(len(self.parameters)):
            self._offload(index)


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


# What an owned module has in the place of its dicts of parameters and modules, and of `_apply`.
#
# [Note: fetch on access]
# `module._parameters` is replaced by a mapping whose `__getitem__` calls back before it returns a
# parameter. Attribute access, tied and borrowed weights, and functions that reach for a parameter
# in any order therefore find it resident; hooks on modules only add prefetch. Iterating
# (`parameters()`, `items()`) does not fetch: it serves shapes and identities.


Touch = Callable[[nn.Parameter], Tensor]  # gives the parameter, or a view to read in its place


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
        """Give, in place of a parameter, the result of functions of it; they are called once."""

        @cache
        def value() -> Tensor:
            parameter = dict.__getitem__(self, name)
            assert parameter is not None
            found = self._touch(parameter)
            for change in changes:
                found = change(found)
            return found

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
            remedy=f"{EDIT}; or {CHANGE_BEFORE}",
        )

    def __delitem__(self, name: str) -> None:
        raise ResidencyError(
            f"parameter {name!r} cannot be removed while an engine owns the module",
            remedy=CHANGE_BEFORE,
        )

    def _refuse_change(self, *args: Any, **kwargs: Any) -> NoReturn:
        """For the changes that a dict makes without `__setitem__` or `__delitem__`."""
        raise ResidencyError(
            "parameters cannot be replaced, added or removed while an engine owns the module",
            remedy=CHANGE_BEFORE,
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
    """`module._parameters` after its engine was closed without `restore`, or dropped: access
    raises, since values are lost, and NaN would be trained with, or saved.
    """

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise gone()

    __getitem__ = get = items = values = copy = __deepcopy__ = __reduce_ex__ = _refuse


def _once_awake(name: str) -> Callable[..., Any]:
    def method(self: StoredParameters, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.awake(), name)(*args, **kwargs)

    return method


class Wakes(Protocol):
    """Values that rest."""

    def wake(self) -> None:
        """Give modules plain dicts of parameters that have their values."""


class StoredParameters(dict[str, nn.Parameter | None]):
    """`module._parameters` while values rest where a collected engine left them.

    They wake when a parameter is reached for or replaced. Iterating does not wake: a parameter does
    when it is used.
    """

    def __init__(self, module: nn.Module, stored: Wakes) -> None:
        super().__init__(dict.items(module._parameters))
        self._module = weakref.ref(module)
        self.stored = stored

    def awake(self) -> dict[str, nn.Parameter | None]:
        """Return the module's plain dict, its parameters with their values."""
        self.stored.wake()
        module = self._module()
        assert module is not None
        return module._parameters

    __getitem__ = _once_awake("__getitem__")
    __setitem__ = _once_awake("__setitem__")
    __delitem__ = _once_awake("__delitem__")
    __reduce_ex__ = _once_awake("__reduce_ex__")
    clear, copy, get, pop = map(_once_awake, ("clear", "copy", "get", "pop"))
    popitem, setdefault, update = map(_once_awake, ("popitem", "setdefault", "update"))


def refuse_copy() -> NoReturn:
    """Raise for copy, deepcopy and pickle of an offloaded module."""
    raise ResidencyError(
        "an offloaded module cannot be copied or pickled: its parameters are placeholders",
        remedy="use engine.state_dict() (or engine.module.state_dict()) for the values, "
        "or engine.close(restore=True) to get a plain module back",
    )


class ModuleMap(dict[str, nn.Module | None]):
    """`module._modules` while an engine owns the module: `admit` checks new modules."""

    def __init__(
        self, plain: Mapping[str, nn.Module | None], admit: Callable[[str, nn.Module], None]
    ) -> None:
        super().__init__(plain)
        self._admit = admit

    def __setitem__(self, name: str, module: nn.Module | None) -> None:
        if module is not None:
            self._admit(name, module)
        super().__setitem__(name, module)


class RefusedApply:
    """Stands in for `module._apply` (`.to()`, `.half()`, `.cpu()`, ...) on an owned module.

    What changes nothing is no error: a loop that moves the module to where it is goes on. With
    `stays`, as scripts written for DeepSpeed want it, a move elsewhere is warned of, and not made.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.stays = False

    def __call__(self, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Return the module, if the change leaves all its tensors unchanged."""
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


def _leave_as_is() -> None:
    """Stands in for `flatten_parameters` of an owned RNN."""


class Installation:
    """Replaces and restores `_parameters`, `_modules` and `_apply` on a module tree."""

    def __init__(self, root: nn.Module, touch: Touch) -> None:
        self.gone = False  # whether the values will be
        self.stored: Wakes | None = None  # or else rest here
        self.on_new: Callable[[nn.Module], None] = lambda module: None
        self._touch = touch
        self._held = {id(parameter) for parameter in root.parameters()}
        self.modules: list[nn.Module] = []
        self._take("", root)

    def _take(self, path: str, root: nn.Module) -> None:
        """Own a tree whose parameters are all held."""
        for name, module in root.named_modules(prefix=path):
            if not isinstance(module._parameters, ParameterMap):
                admit = partial(self._admit, name)
                module.__dict__["_parameters"] = ParameterMap(module._parameters, self._touch)
                module.__dict__["_modules"] = ModuleMap(module._modules, admit)
                module.__dict__["_apply"] = RefusedApply(module)
                if isinstance(module, nn.RNNBase):  # it would move weights: see `torch_private.py`
                    module.__dict__["flatten_parameters"] = _leave_as_is
                for attribute in recomputed_weights(module):  # it may be the parameter's old memory
                    old = getattr(module, attribute)
                    setattr(module, attribute, placeholder(old.shape, old.dtype, old.device))
                self.modules.append(module)
                self.on_new(module)

    def _admit(self, path: str, name: str, module: nn.Module) -> None:
        """Refuse a module with new parameters in the tree: they would not be trained."""
        path = f"{path}.{name}" if path else name
        strangers = [n for n, p in module.named_parameters() if id(p) not in self._held]
        if strangers:
            raise ResidencyError(
                f"{path!r} becomes a {type(module).__name__} with {len(strangers)} parameters that "
                f"the engine does not hold: {listed(strangers, 3)}",
                because="adapters, new or larger embeddings and other layers that come after "
                "initialize() have no optimizer state: they would never be trained",
                remedy=CHANGE_BEFORE,
            )
        self._take(path, module)

    def remove(self) -> None:
        """Restore plain dicts and methods; see `stored`."""
        kind: Callable[..., Any] = GoneParameters if self.gone else dict
        for module in self.modules:
            if isinstance(module._parameters, ParameterMap):
                plain = module._parameters
                found = kind(plain)
                if self.stored is not None:
                    found = StoredParameters(module, self.stored)
                module.__dict__["_parameters"] = found
                module.__dict__["_modules"] = dict(module._modules)
            module.__dict__.pop("_apply", None)
            module.__dict__.pop("flatten_parameters", None)
        self.modules, self.stored = [], None

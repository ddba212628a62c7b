"""How a parameter is present or absent. The only file that assigns `param.data`.

[Note: presence]
Present, a parameter is a view into a slot. Absent, it is a zero-stride placeholder of its real
shape and dtype, filled with NaN (or the largest value of a type without NaN): shapes work
everywhere, no memory is used, and misuse is loud. Leaving bumps the parameter's version, so that
anything autograd saved behind our back raises instead of reading a stranger's bytes.

[Note: edits behind our back]
A parameter is present only while a call runs, and after its module was asked for it outside of
one, until a call needs its slot or steps. So a reference that somebody keeps shows a placeholder,
on every tier, and torch refuses most edits of that: its elements are one. What else can be done
is seen when the parameter is next bound, released or looked at:
- `p.data = t` by its address, `p.add_(...)` by its version;
- `p.data.fill_(...)`, which no version shows, of a placeholder: by its bits. All of a dtype lie
  side by side, so one comparison looks at all. Those of one element torch does not protect: they
  are NaNs that arithmetic does not leave as they are (only what passes NaN on, as `clamp_` does,
  is not seen);
- of a present parameter: by a checksum of its unit (see `memory/slots.py`), where the parameter
  was reached for outside a call, and in the first forward of every unit. A module that edits
  `self.weight.data` in its forward does so in the first one; a checksum each time would be two
  passes over all weights a forward. One that begins later is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from infinity.errors import ConfigError, PresenceError
from infinity.plan.layout import UnitLayout

EDIT = "edit inside `with engine.materialized(module_or_params):`"
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
    """A parameter that is not as it was left: which, and what was done to it."""

    name: str
    in_place: bool

    def error(self, result: str = "the edit is lost") -> PresenceError:
        """What is raised; `result` says what has become of the edit."""
        how = "edited in place" if self.in_place else "given other memory (`.data = ...`)"
        return PresenceError(
            f"parameter {self.name!r} was {how} while the engine owned it; {result}",
            because="offloaded parameters are views into reused slots, or placeholders",
            remedy=EDIT,
        )


class _Pool:
    """The placeholders of one dtype: side by side, each with a storage of its own."""

    def __init__(self, dtype: torch.dtype, count: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            flat = placeholder(torch.Size([count]), dtype, device)
            self._as_made = flat.clone(memory_format=torch.contiguous_format).view(torch.uint8)
            self._bytes = self._as_made.clone()
            ends = range(dtype.itemsize, len(self._bytes) + 1, dtype.itemsize)
            parts = (self._bytes[end - dtype.itemsize : end] for end in ends)
            self.values = [from_dlpack(part).view(dtype)[0] for part in parts]

    def edited(self) -> list[int]:
        """Which ones have other bits; all are as they were after that."""
        if torch.equal(self._bytes, self._as_made):
            return []
        bytes_each = self.values[0].itemsize
        found = {
            i // bytes_each for i in (self._bytes != self._as_made).nonzero().view(-1).tolist()
        }
        self._bytes.copy_(self._as_made)
        return sorted(found)


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
        self._names = {s.parameter: s.name for layout in layouts for s in layout.segments}
        self._waits = device.type != "cpu"  # to look at placeholders is to wait for the device
        members: dict[torch.dtype, list[int]] = {}
        for index, dtype in enumerate(dtypes):
            members.setdefault(dtype, []).append(index)
        self._pools = [(_Pool(dtype, len(of), device), of) for dtype, of in members.items()]
        self._placeholders = [torch.empty(0)] * len(parameters)
        with torch.inference_mode(False):
            for pool, of in self._pools:
                for index, one in zip(of, pool.values, strict=True):
                    self._placeholders[index] = one.expand(parameters[index].shape)
        # Version and memory that each parameter was left with; none while it is not ours.
        self._left: dict[int, tuple[int, Tensor]] = {}
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
            if meta.is_meta:  # not the one that could not be swapped
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

    def views(self, unit: int, slot: Tensor) -> list[Tensor]:
        """The unit's parameters as parts of `slot` (uint8, the unit's slot layout), in order."""
        layout, views = self._layouts[unit], []
        for segment in layout.segments:
            if segment.trained:
                start = segment.offset * layout.weight_itemsize
            else:
                start = layout.trained_bytes + segment.offset
            flat = slot[start : start + segment.nbytes].view(self.dtypes[segment.parameter])
            views.append(flat.view(segment.shape).data)  # one reference, not those of its bases
        return views

    def bind(self, unit: int, views: Sequence[Tensor]) -> None:
        """Make the unit's parameters these views.

        Raises `PresenceError`, and leaves them absent, if one was edited since they are.
        """
        edit = self.edited(unit)
        if edit is not None:
            self.forget(unit)
            raise edit.error()
        for segment, view in zip(self._layouts[unit].segments, views, strict=True):
            self._set(segment.parameter, view)

    def forget(self, unit: int) -> None:
        """Make the unit's parameters placeholders, from any state and without judging edits."""
        indices = [segment.parameter for segment in self._layouts[unit].segments]
        torch.autograd.graph.increment_version([self.parameters[i] for i in indices])
        for index in indices:
            self._set(index, self._placeholders[index])

    def edited(self, unit: int) -> Edit | None:
        """A parameter of the unit that is not as it was left, by its version or its memory."""
        for segment in self._layouts[unit].segments:
            left = self._left.get(segment.parameter)
            if left is None:
                continue
            parameter = self.parameters[segment.parameter]
            version, value = left
            if not parameter.is_set_to(value):
                return Edit(segment.name, in_place=False)
            if parameter._version != version:
                return Edit(segment.name, in_place=True)
        return None

    def edited_placeholder(self, *, may_wait: bool) -> Edit | None:
        """A placeholder that was written to; all are as they were after that.

        Nothing is looked at where that waits for the device, unless it `may_wait`.
        """
        if self._waits and not may_wait:
            return None
        found = [of[place] for pool, of in self._pools for place in pool.edited()]
        for index in found:
            if self.parameters[index].is_set_to(self._placeholders[index]):
                self.unlend(index)  # with the version that it has now
        return Edit(self._names[found[0]], in_place=True) if found else None

    def _set(self, index: int, value: Tensor) -> None:
        parameter = self.parameters[index]
        parameter.data = value
        self._left[index] = parameter._version, value

    def lend(self, index: int, value: Tensor) -> None:
        """Give one parameter a tensor of its own (any dtype), for reading and editing."""
        self._left.pop(index, None)
        self.parameters[index].data = value

    def unlend(self, index: int) -> None:
        """The parameter is absent."""
        torch.autograd.graph.increment_version(self.parameters[index])
        self._set(index, self._placeholders[index])

    def restore(self, values: Sequence[Tensor]) -> None:
        """Give every parameter a real tensor back, for good."""
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.data = value

    def absent_in_child(self) -> None:
        """After a fork: the child has no slots; make every parameter absent."""
        for parameter, stand_in in zip(self.parameters, self._placeholders, strict=True):
            parameter.data = stand_in


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

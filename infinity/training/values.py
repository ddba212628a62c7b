"""Whole values of parameters: read, edited and written back, from and to any home.

One unit is cached at a time, so that walking through a model in the order of `Values.place` reads
and writes each unit once; what stands beside weights (residuals, or fp32 masters of fp16 weights)
is read only for masters and for edits. Nothing here is fast; all of it is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from infinity.errors import ConfigError, PresenceError, TransferError
from infinity.memory.mover import Mover
from infinity.memory.state import StateStore
from infinity.optim.cpu import CpuKernels
from infinity.plan.layout import REST_DTYPES, Kind, Segment, UnitLayout
from infinity.training.owner import Owner, exclusive

_BLOCK = 1 << 20  # elements converted at a time: temporaries stay small beside the tensor


@dataclass
class _CachedUnit:
    """Flat copies of one unit's weights and, once it was needed, of what stands beside them."""

    layout: UnitLayout
    weight: Tensor
    rest: Tensor | None = None
    dirty: bool = False

    def replace(self, part: Tensor, value: Tensor) -> None:
        """Overwrite a part of a range; the unit is dirty if any byte changes."""
        old, new = part.view(torch.uint8), value.view(torch.uint8)
        if not torch.equal(old, new):
            self.dirty = True
            old.copy_(new)


class Values:
    """Reads and writes parameters by index; `settle` must lift the pacing and wait for updates."""

    def __init__(
        self,
        store: StateStore,
        mover: Mover,
        kernels: CpuKernels,
        settle: Callable[[], None],
        owner: Owner,
    ) -> None:
        self.store = store
        self.mover = mover
        self.kernels = kernels
        self.settle = settle
        self.lent: dict[int, torch.dtype] = {}
        self.guard: Callable[[int], None] = lambda unit: None  # before a unit's homes change
        self._places = {s.parameter: (u, s) for u in store.plan.units for s in u.segments}
        self._cached: _CachedUnit | None = None
        self._owner = owner

    # --- single values -----------------------------------------------------------------------

    @exclusive
    def read(self, parameter: int, *, master: bool = False) -> Tensor:
        """A fresh CPU tensor: the compute-dtype value, or the fp32 master of a trained one."""
        layout, segment = self._places[parameter]
        weight, rest = self._parts(self._load(layout), segment, with_rest=master)
        if rest is None:
            return weight.view(segment.shape).clone()
        joined = torch.empty(segment.numel, dtype=torch.float32)
        self.kernels.join(weight, rest, joined)
        return joined.view(segment.shape)

    @exclusive
    def write(self, parameter: int, value: Tensor) -> None:
        """Replace a value. fp32 values of trained parameters become the master as they are;
        values in the compute dtype keep the master where their bits did not change.
        """
        layout, segment = self._places[parameter]
        if tuple(value.shape) != segment.shape:
            raise ConfigError(
                f"parameter {segment.name!r} has shape {segment.shape}, got {tuple(value.shape)}"
            )
        cached = self._load(layout)
        flat = value.detach().cpu().contiguous().view(-1)
        weight, rest = self._parts(cached, segment, with_rest=True)
        for start in range(0, segment.numel, _BLOCK):
            block = slice(start, start + _BLOCK)
            if rest is None:
                cached.replace(weight[block], flat[block].to(weight.dtype))
            else:
                self._write_split(cached, weight[block], rest[block], flat[block])

    def _write_split(
        self, cached: _CachedUnit, weight: Tensor, rest: Tensor, value: Tensor
    ) -> None:
        new_weight, new_rest = torch.empty_like(weight), torch.empty_like(rest)
        self.kernels.split(value.float(), new_weight, new_rest)
        if value.dtype is weight.dtype:
            keep = value.view(torch.int16) == weight.view(torch.int16)
            new_weight = torch.where(keep, weight, new_weight)
            new_rest = torch.where(keep, rest, new_rest)
        cached.replace(weight, new_weight)
        cached.replace(rest, new_rest)

    def shape(self, parameter: int) -> tuple[int, ...]:
        """The parameter's real shape."""
        return self._places[parameter][1].shape

    def dtype(self, parameter: int) -> torch.dtype:
        """The dtype the parameter computes in."""
        return self.mover.presence.dtypes[parameter]

    def place_of(self, parameter: int) -> tuple[UnitLayout, Segment]:
        """Its unit, and where it lies in that."""
        return self._places[parameter]

    def place(self, parameter: int) -> tuple[int, bool, int]:
        """Sorts parameters by unit, then by where they lie in it."""
        layout, segment = self._places[parameter]
        return layout.index, not segment.trained, segment.offset

    def flush(self) -> None:
        """Write the cached unit home if it was edited, and forget it."""
        cached, self._cached = self._cached, None
        if cached is not None and cached.dirty:
            unit = cached.layout.index
            self.guard(unit)
            try:
                self.mover.drop(unit)
            finally:  # an edit outside a loan raises, those inside one are kept
                try:
                    self.store.write(unit, Kind.WEIGHT, cached.weight)
                    kind = self.store.plan.precision.rest_kind
                    if cached.rest is not None and kind is not None:
                        self.store.write(unit, kind, cached.rest)
                except TransferError as error:  # neither the old value nor the new one is home
                    self.mover.fail(error)
                    raise
                self.mover.edited(unit)

    def flush_edits(self) -> None:
        """`flush`, if anything was edited."""
        if self._cached is not None and self._cached.dirty:
            self.flush()

    def _load(self, layout: UnitLayout) -> _CachedUnit:
        self._owner.check()
        self.mover.verify(layout.index)
        if self._cached is not None and self._cached.layout is layout:
            return self._cached
        self.flush()
        self.settle()
        self._cached = _CachedUnit(layout, self.store.read(layout.index, Kind.WEIGHT))
        return self._cached

    def _parts(
        self, cached: _CachedUnit, segment: Segment, *, with_rest: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Flat views of the parameter's weight and, if wanted, of what stands beside it, if any."""
        layout, dtype = cached.layout, self.dtype(segment.parameter)
        if not segment.trained:
            start = layout.trained_bytes + segment.offset
            return cached.weight[start : start + segment.nbytes].view(dtype), None
        part = slice(segment.offset, segment.offset + segment.numel)
        weight = cached.weight[: layout.trained_bytes].view(dtype)[part]
        kind = self.store.plan.precision.rest_kind
        if not with_rest or kind is None:
            return weight, None
        if cached.rest is None:
            self.settle()  # of the same update as the weight: a step forgets what is cached
            cached.rest = self.store.read(layout.index, kind)
        return weight, cached.rest.view(getattr(torch, REST_DTYPES[kind]))[part]

    # --- lending -----------------------------------------------------------------------------

    @contextmanager
    def materialized(self, parameters: Iterable[int], *, master: bool) -> Iterator[None]:
        """Full values bound to the parameters; edits are written home on leaving."""
        indices = sorted(set(parameters))
        taken = [i for i in indices if i in self.lent]
        if taken:
            name = self._places[taken[0]][1].name
            raise PresenceError(f"parameter {name!r} is materialized already")
        try:
            self._lend_all(indices, master=master)
            yield
        finally:
            self._take_back(indices)

    @exclusive
    def _lend_all(self, indices: Sequence[int], *, master: bool) -> None:
        for index in indices:
            self.lend(index, master=master)

    @exclusive
    def _take_back(self, indices: Iterable[int]) -> None:
        for index in indices:
            self.take_back(index)
        self.flush()

    def lend(self, index: int, *, master: bool) -> None:
        """Bind a parameter to a full value of its own."""
        layout, _ = self._places[index]
        value = self.read(index, master=master)
        self.mover.drop(layout.index)
        self.lent[index] = value.dtype
        self.mover.presence.lend(index, value.to(self.mover.lanes.device.torch_device))

    def take_back(self, index: int) -> None:
        """Write a lent value home and make the parameter absent."""
        if self.lent.pop(index, None) is not None:
            try:
                self.write(index, self.mover.presence.parameters[index].detach())
            finally:
                self.mover.presence.unlend(index)

    def take_back_all(self) -> None:
        """End every loan that a `load_state_dict` which failed may have left, and flush."""
        self._take_back(list(self.lent))


def targets(
    target: nn.Module | nn.Parameter | Iterable[nn.Module | nn.Parameter],
    index_of: Mapping[int, int],
) -> Sequence[int]:
    """Parameter indices meant by a module, a parameter, or several of them."""
    if isinstance(target, nn.Parameter):
        if id(target) not in index_of:
            raise ConfigError("this parameter does not belong to the engine's module")
        return [index_of[id(target)]]
    if isinstance(target, nn.Module):
        return [i for p in target.parameters() for i in targets(p, index_of)]
    return [i for item in target for i in targets(item, index_of)]

"""Full values of parameters: read, edited and written back, from and to any tier.

One unit is cached at a time, so that walking through a model in the order of
`ParameterValues.sort_key` reads and writes each unit once. Residuals (or the fp32 masters of fp16
weights) are read only for masters and for edits. Nothing here is fast; all of it is exact.

Of several ranks all must call, and get whole values; of what they write each keeps its own shard.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from infinity.errors import ConfigError, ResidencyError, TransferError
from infinity.model.parameters import ParameterBinding
from infinity.model.quantised import dequantise, quantise_exactly
from infinity.offload.call_guard import CallGuard, engine_call
from infinity.offload.prefetch import Prefetcher
from infinity.offload.state import StateStore
from infinity.optim.cpu import CpuKernels
from infinity.optim.moments import KIND_DTYPES
from infinity.plan.layout import Segment, UnitLayout
from infinity.types import FrozenFormat, Kind

_BLOCK = 1 << 20  # elements converted at a time: temporaries stay small beside the tensor


@dataclass
class _CachedUnit:
    """Flat copies of one unit's weights, and of their residuals or masters once needed."""

    layout: UnitLayout
    weight: Tensor
    master_state: Tensor | None = None
    given: bool = False  # values, the same ones or others
    dirty: bool = False

    def replace(self, part: Tensor, value: Tensor) -> None:
        """Overwrite a part of a range; the unit is dirty if any byte changes."""
        old, new = part.view(torch.uint8), value.view(torch.uint8)
        self.given = True
        if not torch.equal(old, new):
            self.dirty = True
            old.copy_(new)


class ParameterValues:
    """Reads and writes parameters by index; `settle` must lift the pacing and wait for updates.

    `pieces` has the parameters that are rows of a stack of experts, by the stack's index, which
    names it here as well.
    """

    def __init__(
        self,
        store: StateStore,
        prefetcher: Prefetcher,
        binding: ParameterBinding,
        kernels: CpuKernels,
        settle: Callable[[], None],
        guard: CallGuard,
        before_change: Callable[[int], None],
        pieces: Mapping[int, Sequence[int]],
    ) -> None:
        self.pieces = pieces
        self.store = store
        self._prefetcher = prefetcher
        self.ranks = store.ranks
        self._precision = store.plan.precision
        self._bound, self._failure = prefetcher.bound, prefetcher.failure
        self.ledger = prefetcher.ledger
        self.device = self.ledger.device.torch_device
        self._binding = binding
        self.kernels = kernels
        self.settle = settle
        self.materialized_now: dict[int, torch.dtype] = {}
        self.before_change = before_change  # told of a unit
        self._locations = {s.parameter: (u, s) for u in store.plan.units for s in u.segments}
        self._cached: _CachedUnit | None = None
        self._taken: dict[int, Tensor] = {}  # stacks of which some rows were taken
        self._read_only = False
        self._guard = guard

    # --- single values -----------------------------------------------------------------------

    @engine_call
    def read(self, parameter: int, *, master: bool = False) -> Tensor:
        """A fresh CPU tensor: the compute-dtype value, or the fp32 master of a trained one."""
        if parameter in self.pieces:
            return self._read_stack(parameter, master=master)
        layout, segment = self._locations[parameter]
        weight, residual = self._parts(self._load(layout), segment, with_master=master)
        if residual is None:
            return self._value(segment, weight)
        joined = torch.empty(segment.numel, dtype=torch.float32, device="cpu")
        self.kernels.join(weight, residual, joined)
        return joined.view(segment.shape)

    def _read_stack(self, parameter: int, *, master: bool) -> Tensor:
        full: Tensor | None = None
        for piece, rows in self.rows(parameter):
            value = self.read(piece, master=master)
            if full is None:
                full = torch.empty(self.shape(parameter), dtype=value.dtype, device="cpu")
            full[rows] = value
        assert full is not None
        return full

    def rows(self, parameter: int) -> Iterator[tuple[int, slice]]:
        """Yield the parameters that hold rows of one, and which; of any other one itself."""
        if parameter not in self.pieces:
            yield parameter, slice(None)
            return
        for piece in self.pieces[parameter]:
            segment = self._locations[piece][1]
            assert segment.stack is not None
            yield piece, slice(segment.stack.first, segment.stack.first + segment.shape[0])

    def _value(self, segment: Segment, weight: Tensor) -> Tensor:
        if segment.form:
            return self._dequantised(segment, weight)
        return weight.view(segment.shape).clone()

    def make_read_only(self) -> None:
        """Only read from now on: nothing is resident or edited, and no update is owed."""
        self._read_only = True

    def take(self, layout: UnitLayout) -> dict[int, Tensor]:
        """Return all values of a unit, by parameter, which rest nowhere else from then on; of a
        stack of experts with its first rows, all.

        Where the optimizer pass is over, nothing is resident any more, and units are taken from the
        last to the first.
        """
        unit = _CachedUnit(layout, self.store.take_weights(layout.index))
        found: dict[int, Tensor] = {}
        for segment in layout.segments:
            value = self._value(segment, self._parts(unit, segment, with_master=False)[0])
            if not segment.is_rows:
                found[segment.parameter] = value
                continue
            assert segment.stack is not None
            origin, first = segment.origin, segment.stack.first
            if origin not in self._taken:
                self._taken[origin] = torch.empty(
                    segment.full_shape, dtype=value.dtype, device="cpu"
                )
            self._taken[origin][first : first + segment.shape[0]] = value
            if first == 0:
                found[origin] = self._taken.pop(origin)
        return found

    @engine_call
    def write(self, parameter: int, value: Tensor) -> None:
        """Replace a value. fp32 values of trained parameters become the master exactly; values in
        the compute dtype keep the master where their bits did not change. Quantised weights are
        quantised again, unless the value equals theirs.
        """
        if tuple(value.shape) != self.shape(parameter):
            name, shape = self.name(parameter), self.shape(parameter)
            raise ConfigError(f"parameter {name!r} has shape {shape}, got {tuple(value.shape)}")
        if parameter in self.pieces:
            for piece, rows in self.rows(parameter):
                self.write(piece, value[rows])
            return
        layout, segment = self._locations[parameter]
        cached = self._load(layout)
        flat = value.detach().cpu().contiguous().view(-1)
        weight, residual = self._parts(cached, segment, with_master=True)
        if segment.form:
            flat, dtype = flat.view(segment.shape), self.dtype(parameter)
            if not torch.equal(flat.to(dtype), self._dequantised(segment, weight)):
                packed = torch.zeros_like(weight)
                quantise_exactly(flat, FrozenFormat(segment.form), dtype, packed)
                cached.replace(weight, packed)
            return
        for start in range(0, segment.numel, _BLOCK):
            block = slice(start, start + _BLOCK)
            if residual is None:
                cached.replace(weight[block], flat[block].to(weight.dtype))
            else:
                self._write_split(cached, weight[block], residual[block], flat[block])

    @engine_call
    def write_packed(self, parameter: int, packed: Tensor) -> None:
        """Replace quantised weights by bytes (uint8) of the same format."""
        layout, segment = self._locations[parameter]
        cached = self._load(layout)
        cached.replace(self._parts(cached, segment, with_master=False)[0], packed)

    def _write_split(
        self, cached: _CachedUnit, weight: Tensor, residual: Tensor, value: Tensor
    ) -> None:
        new_weight, new_residual = torch.empty_like(weight), torch.empty_like(residual)
        self.kernels.split(value.float(), new_weight, new_residual)
        if value.dtype is weight.dtype:
            keep = value.view(torch.int16) == weight.view(torch.int16)
            new_weight = torch.where(keep, weight, new_weight)
            new_residual = torch.where(keep, residual, new_residual)
        cached.replace(weight, new_weight)
        cached.replace(residual, new_residual)

    def _dequantised(self, segment: Segment, packed: Tensor) -> Tensor:
        value = torch.empty(segment.shape, dtype=self.dtype(segment.parameter), device="cpu")
        dequantise(packed, FrozenFormat(segment.form), value)
        return value

    def shape(self, parameter: int) -> tuple[int, ...]:
        """The parameter's real shape."""
        segment = self.location_of(parameter)[1]
        return segment.full_shape if parameter in self.pieces else segment.shape

    def name(self, parameter: int) -> str:
        """The parameter's name in the model."""
        return self.location_of(parameter)[1].name

    def dtype(self, parameter: int) -> torch.dtype:
        """The dtype the parameter computes in."""
        return self._binding.dtypes[parameter]

    def location_of(self, parameter: int) -> tuple[UnitLayout, Segment]:
        """Its unit, and where it lies in that; of a stack that is cut, of its first rows."""
        return self._locations[self.pieces.get(parameter, (parameter,))[0]]

    def units_of(self, parameter: int) -> list[int]:
        """The units that hold it: one, or those of its rows."""
        return [self._locations[piece][0].index for piece, _ in self.rows(parameter)]

    def sort_key(self, parameter: int) -> tuple[int, bool, int]:
        """Sorts parameters by unit, then by where they lie in it."""
        layout, segment = self.location_of(parameter)
        return layout.index, not segment.trained, segment.offset

    def flush(self) -> None:
        """Write the cached unit back if it was edited, and forget it."""
        cached, self._cached = self._cached, None
        if cached is not None and cached.given:
            parts = (cached.weight, cached.master_state) if cached.dirty else ()
            self.ranks.synchronize_write(f"unit {cached.layout.name!r}", *parts)
        if cached is not None and cached.dirty:
            unit = cached.layout.index
            self.before_change(unit)
            try:
                self._prefetcher.drop(unit)
            finally:  # an edit outside a loan raises, those inside one are kept
                try:
                    self.store.write(unit, Kind.WEIGHT, cached.weight)
                    kind = self._precision.master_kind
                    if cached.master_state is not None and kind is not None:
                        self.store.write(unit, kind, cached.master_state)
                except TransferError as error:  # neither the old value nor the new one is at rest
                    self._failure.fail(error)
                    raise
                self.ledger.note_edit(unit)

    def abandon(self) -> None:
        """`flush` after an error; of several ranks nothing is written, as others may do."""
        if self.ranks.count > 1:
            self._cached = None
        self.flush()

    def flush_edits(self) -> None:
        """`flush`, if values were given."""
        if self._cached is not None and self._cached.given:
            self.flush()

    def _load(self, layout: UnitLayout) -> _CachedUnit:
        self._guard.check()
        if not self._read_only:
            self._bound.verify(layout.index)
        if self._cached is not None and self._cached.layout is layout:
            return self._cached
        if not self._read_only:
            self.flush()
            self.settle()
        self._cached = _CachedUnit(layout, self.store.read(layout.index, Kind.WEIGHT))
        return self._cached

    def _parts(
        self, cached: _CachedUnit, segment: Segment, *, with_master: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return flat views of the parameter's weight and, if asked for, its residual or master.

        Of one that rests quantised: of its bytes.
        """
        layout, dtype = cached.layout, self.dtype(segment.parameter)
        if not segment.trained:
            start = layout.trained_bytes + segment.offset
            part = cached.weight[start : start + segment.nbytes]
            return part if segment.form else part.view(dtype), None
        elements = slice(segment.offset, segment.offset + segment.numel)
        weight = cached.weight[: layout.trained_bytes].view(dtype)[elements]
        kind = self._precision.master_kind
        if not with_master or kind is None:
            return weight, None
        if cached.master_state is None:
            self.settle()  # of the same update as the weight: a step forgets what is cached
            cached.master_state = self.store.read(layout.index, kind)
        return weight, cached.master_state.view(KIND_DTYPES[kind])[elements]

    # --- lending -----------------------------------------------------------------------------

    def refuse_loans(self, what: str) -> None:
        """Raise `ResidencyError` if a parameter is materialized; `what` cannot be done then."""
        if self.materialized_now:
            raise ResidencyError(
                f"{what} while weights are lent out",
                because="a block of engine.materialized is open, or load_state_dict of the module "
                "ended in an error",
                remedy="leave the block first; after an error run a forward, which ends the block",
            )

    @contextmanager
    def materialized(self, parameters: Iterable[int], *, master: bool) -> Iterator[None]:
        """Full values bound to the parameters; edits are written back on leaving."""
        indices = sorted(set(parameters))
        taken = [i for i in indices if i in self.materialized_now]
        if taken:
            name = self.name(taken[0])
            raise ResidencyError(f"parameter {name!r} is materialized already")
        try:
            self._lend_all(indices, master=master)
            yield
        except BaseException as error:
            if self.ranks.count == 1:
                self._release_materialized(indices)
            else:  # the others, who write at the end, write nothing either
                if isinstance(error, Exception):
                    self.ranks.broadcast_error("edits values", error)
                self._drop(indices)
            raise
        self._release_materialized(indices)

    @engine_call
    def _lend_all(self, indices: Sequence[int], *, master: bool) -> None:
        for index in indices:
            self.materialize(index, master=master)

    @engine_call
    def _release_materialized(self, indices: Collection[int]) -> None:
        try:
            for index in indices:
                self.release_materialized(index)
            self.flush()
        except BaseException:
            if self.ranks.count > 1:
                self._drop(indices)
            raise

    @engine_call
    def _drop(self, indices: Collection[int]) -> None:
        """End loans, and write nothing."""
        self._cached = None
        for index in indices:
            if self.materialized_now.pop(index, None) is not None:
                self._binding.unbind_materialized(index)

    def materialize(self, index: int, *, master: bool) -> None:
        """Bind a parameter to a full value of its own."""
        value = self.read(index, master=master)
        for unit in self.units_of(index):
            self._prefetcher.drop(unit)
        self.materialized_now[index] = value.dtype
        self._binding.bind_materialized(index, value.to(self.device))

    def release_materialized(self, index: int) -> None:
        """Write a lent value back and make the parameter offloaded."""
        if self.materialized_now.pop(index, None) is not None:
            try:
                self.write(index, self._binding.parameters[index].detach())
            finally:
                self._binding.unbind_materialized(index)

    def release_all_materialized(self) -> None:
        """End every loan that a `load_state_dict` which failed may have left, and flush."""
        self._release_materialized(list(self.materialized_now))

"""Full values of parameters: reads and edits on any tier.

One unit is cached at a time, so that walking through a model in the order of
`ParameterValues.sort_key` reads and writes each unit once. Residuals (or the fp32 masters of fp16
weights) are read only for masters and for edits. Nothing here is fast; all of it is exact.

With several ranks, all must make the same calls, with full values; each stores its local shard.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from infinity.errors import ConfigError, ResidencyError, TransferError
from infinity.model.parameters import ParameterBinding
from infinity.model.quantized import dequantize, quantize_exactly
from infinity.offload.call_guard import CallGuard, engine_call
from infinity.offload.prefetch import Prefetcher
from infinity.offload.state import StateStore
from infinity.optim.cpu import CpuKernels
from infinity.optim.moments import KIND_DTYPES
from infinity.plan.layout import Segment, UnitLayout
from infinity.types import FrozenFormat, Kind

_BLOCK = 1 << 20  # elements converted at a time, to keep temporaries small


@dataclass
class _CachedUnit:
    """Flat copies of a unit's weights and, once needed, of its residuals or masters."""

    layout: UnitLayout
    weight: Tensor
    master_state: Tensor | None = None
    written: bool = False  # a value was written, even an equal one
    dirty: bool = False  # a byte was changed

    def replace(self, view: Tensor, value: Tensor) -> None:
        """Overwrite a view of the unit, and mark the unit dirty if a byte changes."""
        old_bytes, new_bytes = view.view(torch.uint8), value.view(torch.uint8)
        self.written = True
        if not torch.equal(old_bytes, new_bytes):
            self.dirty = True
            old_bytes.copy_(new_bytes)


class ParameterValues:
    """Reads and writes parameters by index.

    `finish_updates` must lift the pacing and wait for updates. `pieces` maps the index of a stack
    of experts that is cut into ranges to the indices of its ranges; methods accept either index.
    """

    def __init__(
        self,
        store: StateStore,
        prefetcher: Prefetcher,
        binding: ParameterBinding,
        kernels: CpuKernels,
        finish_updates: Callable[[], None],
        guard: CallGuard,
        before_change: Callable[[int], None],
        pieces: Mapping[int, Sequence[int]],
    ) -> None:
        self.pieces = pieces
        self.store = store
        self._prefetcher = prefetcher
        self.ranks = store.ranks
        self._precision = store.plan.precision
        self._bound = prefetcher.bound
        self._failure = prefetcher.failure
        self.ledger = prefetcher.ledger
        self.device = self.ledger.device.torch_device
        self._binding = binding
        self.kernels = kernels
        self.finish_updates = finish_updates
        self.materialized_dtypes: dict[int, torch.dtype] = {}
        self.before_change = before_change  # called with a unit before its stored bytes change
        self._locations = {s.parameter: (u, s) for u in store.plan.units for s in u.segments}
        self._cached: _CachedUnit | None = None
        self._partial_stacks: dict[int, Tensor] = {}  # stacks that `take` has started to assemble
        self._read_only = False
        self._guard = guard

    # --- single values -----------------------------------------------------------------------

    @engine_call
    def read(self, parameter: int, *, master: bool = False) -> Tensor:
        """Return the full value as a new CPU tensor, in the compute dtype.

        With `master` a trained parameter's fp32 master.
        """
        if parameter in self.pieces:
            full: Tensor | None = None
            for piece, rows in self.rows(parameter):
                value = self.read(piece, master=master)
                if full is None:
                    full = torch.empty(self.shape(parameter), dtype=value.dtype, device="cpu")
                full[rows] = value
            assert full is not None
            return full
        layout, segment = self._locations[parameter]
        weight, residual = self._views(self._load(layout), segment, with_master=master)
        if residual is None:
            return self._value(segment, weight)
        joined = torch.empty(segment.numel, dtype=torch.float32, device="cpu")
        self.kernels.join(weight, residual, joined)
        return joined.view(segment.shape)

    def rows(self, parameter: int) -> Iterator[tuple[int, slice]]:
        """Yield the index of each range of a cut stack, and its rows in the stack.

        For any other parameter, yield the parameter itself with all rows.
        """
        if parameter not in self.pieces:
            yield parameter, slice(None)
            return
        for piece in self.pieces[parameter]:
            segment = self._locations[piece][1]
            assert segment.stack is not None
            yield piece, slice(segment.stack.first, segment.stack.first + segment.shape[0])

    def _value(self, segment: Segment, weight: Tensor) -> Tensor:
        if segment.form:
            return self._dequantized(segment, weight)
        return weight.view(segment.shape).clone()

    def make_read_only(self) -> None:
        """Read without edit checks, flushes and waits from now on.

        No unit may be resident or edited, and no update pending.
        """
        self._read_only = True

    def take(self, layout: UnitLayout) -> dict[int, Tensor]:
        """Return all values of a unit by parameter index, and free the RAM they were stored in.

        A stack of experts that is cut is returned complete, with the unit of its first rows. The
        optimizer pass must be over and no unit resident; take units from the last to the first.
        """
        cached = _CachedUnit(layout, self.store.read_and_free_weights(layout.index))
        values: dict[int, Tensor] = {}
        for segment in layout.segments:
            value = self._value(segment, self._views(cached, segment, with_master=False)[0])
            if not segment.is_rows:
                values[segment.parameter] = value
                continue
            assert segment.stack is not None
            origin, first = segment.origin, segment.stack.first
            if origin not in self._partial_stacks:
                self._partial_stacks[origin] = torch.empty(
                    segment.full_shape, dtype=value.dtype, device="cpu"
                )
            self._partial_stacks[origin][first : first + segment.shape[0]] = value
            if first == 0:
                values[origin] = self._partial_stacks.pop(origin)
        return values

    @engine_call
    def write(self, parameter: int, value: Tensor) -> None:
        """Replace a value in the cached unit, which is written to its tier by the next flush.

        fp32 values of trained parameters become the master exactly; values in the compute dtype
        leave the master unchanged where their bits are unchanged. Quantized weights are quantized
        again, unless the value equals the stored one.
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
        weight, residual = self._views(cached, segment, with_master=True)
        if segment.form:
            flat, dtype = flat.view(segment.shape), self.dtype(parameter)
            if not torch.equal(flat.to(dtype), self._dequantized(segment, weight)):
                packed = torch.zeros_like(weight)
                quantize_exactly(flat, FrozenFormat(segment.form), dtype, packed)
                cached.replace(weight, packed)
            return
        for start in range(0, segment.numel, _BLOCK):
            block = slice(start, start + _BLOCK)
            old, new = weight[block], flat[block]
            if residual is None:
                cached.replace(old, new.to(old.dtype))
                continue
            old_residual = residual[block]
            new_weight, new_residual = torch.empty_like(old), torch.empty_like(old_residual)
            self.kernels.split(new.float(), new_weight, new_residual)
            if new.dtype is old.dtype:
                unchanged = new.view(torch.int16) == old.view(torch.int16)
                new_weight = torch.where(unchanged, old, new_weight)
                new_residual = torch.where(unchanged, old_residual, new_residual)
            cached.replace(old, new_weight)
            cached.replace(old_residual, new_residual)

    @engine_call
    def write_packed(self, parameter: int, packed: Tensor) -> None:
        """Replace quantized weights by packed bytes (uint8) of the same format."""
        layout, segment = self._locations[parameter]
        cached = self._load(layout)
        cached.replace(self._views(cached, segment, with_master=False)[0], packed)

    def _dequantized(self, segment: Segment, packed: Tensor) -> Tensor:
        value = torch.empty(segment.shape, dtype=self.dtype(segment.parameter), device="cpu")
        dequantize(packed, FrozenFormat(segment.form), value)
        return value

    def shape(self, parameter: int) -> tuple[int, ...]:
        """Return the shape in the model; that of a cut stack has all rows."""
        segment = self.location_of(parameter)[1]
        return segment.full_shape if parameter in self.pieces else segment.shape

    def name(self, parameter: int) -> str:
        return self.location_of(parameter)[1].name

    def dtype(self, parameter: int) -> torch.dtype:
        """Return the compute dtype."""
        return self._binding.dtypes[parameter]

    def location_of(self, parameter: int) -> tuple[UnitLayout, Segment]:
        """Return the unit and segment of a parameter, or of the first rows of a cut stack."""
        return self._locations[self.pieces.get(parameter, (parameter,))[0]]

    def units_of(self, parameter: int) -> list[int]:
        """Return the unit of a parameter, or the units of all ranges of a cut stack."""
        return [self._locations[piece][0].index for piece, _ in self.rows(parameter)]

    def sort_key(self, parameter: int) -> tuple[int, bool, int]:
        """Return a key that sorts parameters by unit, then by offset within it."""
        layout, segment = self.location_of(parameter)
        return layout.index, not segment.trained, segment.offset

    def flush(self) -> None:
        """Write the cached unit to its tier if it was edited, and free it."""
        cached, self._cached = self._cached, None
        if cached is not None and cached.written:
            tensors = (cached.weight, cached.master_state) if cached.dirty else ()
            self.ranks.synchronize_write(f"unit {cached.layout.name!r}", *tensors)
        if cached is not None and cached.dirty:
            unit = cached.layout.index
            self.before_change(unit)
            try:
                self._prefetcher.drop(unit)
            finally:  # `drop` raises for an edit of a bound parameter; still write this one
                try:
                    self.store.write(unit, Kind.WEIGHT, cached.weight)
                    kind = self._precision.master_kind
                    if cached.master_state is not None and kind is not None:
                        self.store.write(unit, kind, cached.master_state)
                except TransferError as error:  # the stored value may be neither old nor new
                    self._failure.fail(error)
                    raise
                self.ledger.record_edit(unit)

    def abandon(self) -> None:
        """Flush after an error; with several ranks, discard the cached unit.

        Other ranks may not write their shards of it.
        """
        if self.ranks.count > 1:
            self._cached = None
        self.flush()

    def flush_if_written(self) -> None:
        """Flush if a value of the cached unit was written."""
        if self._cached is not None and self._cached.written:
            self.flush()

    def _load(self, layout: UnitLayout) -> _CachedUnit:
        self._guard.check()
        if not self._read_only:
            self._bound.verify(layout.index)
        if self._cached is not None and self._cached.layout is layout:
            return self._cached
        if not self._read_only:
            self.flush()
            self.finish_updates()
        self._cached = _CachedUnit(layout, self.store.read(layout.index, Kind.WEIGHT))
        return self._cached

    def _views(
        self, cached: _CachedUnit, segment: Segment, *, with_master: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return flat views of a parameter's weight and, `with_master`, its residual or master.

        The view of a quantized weight is of its packed bytes (uint8).
        """
        layout, dtype = cached.layout, self.dtype(segment.parameter)
        if not segment.trained:
            start = layout.trained_bytes + segment.offset
            stored = cached.weight[start : start + segment.nbytes]
            return stored if segment.form else stored.view(dtype), None
        elements = slice(segment.offset, segment.offset + segment.numel)
        weight = cached.weight[: layout.trained_bytes].view(dtype)[elements]
        kind = self._precision.master_kind
        if not with_master or kind is None:
            return weight, None
        if cached.master_state is None:
            self.finish_updates()  # a step frees the cache: both are of the same update
            cached.master_state = self.store.read(layout.index, kind)
        return weight, cached.master_state.view(KIND_DTYPES[kind])[elements]

    # --- materialized values -----------------------------------------------------------------

    def check_none_materialized(self, what: str) -> None:
        """Raise `ResidencyError` if a parameter is materialized; `what` names the refused call."""
        if self.materialized_dtypes:
            raise ResidencyError(
                f"{what} while weights are lent out",
                because="a block of engine.materialized is open, or load_state_dict of the module "
                "ended in an error",
                remedy="leave the block first; after an error run a forward, which ends the block",
            )

    @contextmanager
    def materialized(self, parameters: Iterable[int], *, master: bool) -> Iterator[None]:
        """Bind full values to the parameters in the block; write edits back at its end."""
        indices = sorted(set(parameters))
        already_materialized = [i for i in indices if i in self.materialized_dtypes]
        if already_materialized:
            name = self.name(already_materialized[0])
            raise ResidencyError(f"parameter {name!r} is materialized already")
        try:
            self._materialize_all(indices, master=master)
            yield
        except BaseException as error:
            if self.ranks.count == 1:
                self._release_materialized(indices)
            else:  # the other ranks must discard their edits, too
                if isinstance(error, Exception):
                    self.ranks.broadcast_error("edits values", error)
                self._discard_materialized(indices)
            raise
        self._release_materialized(indices)

    @engine_call
    def _materialize_all(self, indices: Sequence[int], *, master: bool) -> None:
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
                self._discard_materialized(indices)
            raise

    @engine_call
    def _discard_materialized(self, indices: Collection[int]) -> None:
        """Make parameters offloaded again without writing their values."""
        self._cached = None
        for index in indices:
            if self.materialized_dtypes.pop(index, None) is not None:
                self._binding.unbind_materialized(index)

    def materialize(self, index: int, *, master: bool) -> None:
        """Bind a parameter to a copy of its full value on the compute device."""
        value = self.read(index, master=master)
        for unit in self.units_of(index):
            self._prefetcher.drop(unit)
        self.materialized_dtypes[index] = value.dtype
        self._binding.bind_materialized(index, value.to(self.device))

    def release_materialized(self, index: int) -> None:
        """Write a materialized value back and make the parameter offloaded."""
        if self.materialized_dtypes.pop(index, None) is not None:
            try:
                self.write(index, self._binding.parameters[index].detach())
            finally:
                self._binding.unbind_materialized(index)

    def release_all_materialized(self) -> None:
        """Release all parameters that a failed `load_state_dict` left materialized, and flush."""
        self._release_materialized(list(self.materialized_dtypes))

"""Initial write of all state: initial weights, zero moments, frozen bytes.

Units are written one after the other, chunk by chunk, and the memory of a parameter is freed as
soon as its unit is written. Values that are computed (`model/initializers.py`) are requested once,
one full parameter at a time. Of values in files (fused ones lie in several) only the local shard is
read; for quantized weights full matrices, one at a time. The first write also prepares files for
O_DIRECT, for which file systems require that every extent has been written once.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from infinity.errors import ConfigError
from infinity.model.lazy_tensor import PackedRead, Read
from infinity.model.meta_init import InitialValues
from infinity.model.parameters import ParameterBinding
from infinity.model.quantized import join_rows, quantize_exactly
from infinity.model.targets import PIECE_ELEMENTS
from infinity.offload.state import StateStore
from infinity.offload.transfers import Transfers
from infinity.optim.cpu import CpuKernels
from infinity.optim.moments import master_views, moment_view
from infinity.plan.layout import Record, Segment, UnitLayout
from infinity.plan.plan import Plan
from infinity.storage.staging import BufferPool, host_buffer
from infinity.storage.store import Range
from infinity.types import FP8_BLOCK, NATIVE, FrozenFormat, Kind

Progress = Callable[[int, int, str], None]


class InitialWrite:
    """Writer of the initial state, with two buffers so that writes overlap.

    `initial` has the initial values of the moments by parameter index, where they are not 0.
    `folder`, on a drive of the run, is for temporary files with the values of split stacks.
    """

    def __init__(
        self,
        plan: Plan,
        transfers: Transfers,
        store: StateStore,
        kernels: CpuKernels,
        initial: Mapping[int, tuple[float, ...]],
        initial_values: InitialValues,
        folder: Path | None,
    ) -> None:
        self.plan = plan
        self.transfers = transfers
        self.store = store
        self.kernels = kernels
        self.initial = initial
        self._initial_values = initial_values
        self._values = _ValueSource(initial_values, folder)
        self._chunk = min(plan.chunk_elements, max((u.numel for u in plan.local_units), default=0))
        record = Record(plan.precision.kinds, plan.precision)
        self._buffers = BufferPool(2, record.nbytes(self._chunk))
        self._master = host_buffer(self._chunk * 4).view(torch.float32)

    def write(
        self,
        parameters: Sequence[nn.Parameter],
        binding: ParameterBinding,
        progress: Progress | None,
    ) -> None:
        """Write all units to their tiers, and free the memory of the parameters."""
        sizes = [_initial_write_bytes(self.plan, layout) for layout in self.plan.units]
        written_bytes = 0
        row_segments = [s for unit in self.plan.units for s in unit.segments if s.is_rows]
        self._values.stacks_to_store = {
            id(parameters[s.origin]) for s in row_segments if not s.ends_stack
        }
        for layout, shard in zip(self.plan.units, self.plan.local_units, strict=True):
            zero = self._zero_kinds(shard)
            for index in range(shard.num_chunks(self.plan.chunk_elements)):
                self._write_chunk(shard, index, parameters, zero)
            self._write_frozen(layout, parameters)
            self._values.free()
            binding.free(layout.index)
            for segment in layout.segments:
                if segment.is_rows and segment.ends_stack:
                    self._values.free_stack(parameters[segment.origin])
                    binding.unbind_materialized(segment.origin)
            written_bytes += sizes[layout.index]
            if progress is not None:
                progress(written_bytes, sum(sizes), f"writing the initial state: {layout.name}")
        self._buffers.settle()

    def _write_chunk(
        self,
        layout: UnitLayout,
        index: int,
        parameters: Sequence[nn.Parameter],
        zero: Collection[Kind],
    ) -> None:
        """Write all kinds of a chunk to their tiers, except those in `zero`."""
        state = self.store.units[layout.index]
        start, count = layout.chunk(index, self.plan.chunk_elements)
        buffer, used = self._buffers.take(), 0
        master = self._master[:count].zero_()  # zeros in gaps between parameters
        for segment in layout.trained_segments:
            first, last = segment.within(start, count)
            if first < last:
                skipped = start - segment.offset + segment.first_element
                parameter = parameters[segment.origin]
                self._values.fill(master[first:last], parameter, first + skipped)
        views: dict[Kind, Tensor] = {}
        on_disk = state.record.kinds  # in a durable run all, for the first commit
        kinds = [kind for kind in self.plan.precision.kinds if kind not in zero]
        for kind in sorted(kinds, key=lambda kind: kind not in on_disk):
            nbytes = state.record.precision.nbytes(kind, count)
            views[kind] = buffer[used : used + nbytes]
            used += nbytes
        weight, residual = master_views(views, self.plan.precision)
        if residual is None:
            weight.copy_(master)
        else:
            self.kernels.split(master, weight, residual)
        self._fill_moments(layout, start, count, views)
        unit, store = layout.index, self.store
        pieces: list[tuple[Range, Tensor]] = [
            (store.on_disk(unit, kind, index, 0), views[kind]) for kind in on_disk
        ]
        in_memory = (kind for kind in state.memory if kind in views)
        pieces += [(store.chunk(unit, kind, index), views[kind]) for kind in in_memory]
        self._buffers.give_back(buffer, self.transfers.write(pieces))

    def _zero_kinds(self, layout: UnitLayout) -> set[Kind]:
        """Return the moments that need no write: they start at zero in a fresh mapping of RAM.

        With unified memory they are written, so that a run allocates all its memory before it
        trains; otherwise pinning has allocated the pages.
        """
        state = self.store.units[layout.index]
        initial_values = (self.initial.get(s.parameter, ()) for s in layout.trained_segments)
        if self.plan.unified or any(any(initial) for initial in initial_values):
            return set()
        kinds = set(self.plan.precision_of(layout).moment_kinds) - set(state.record.kinds)
        return {kind for kind in kinds & set(state.memory) if state.in_ram(kind) is not None}

    def _fill_moments(
        self, layout: UnitLayout, start: int, count: int, views: dict[Kind, Tensor]
    ) -> None:
        """Fill the moments in `views` with zero bytes (0 in every format) or initial values."""
        precision = self.plan.precision_of(layout)
        for index, kind in enumerate(precision.moment_kinds):
            if kind not in views:
                continue
            views[kind].zero_()
            num_elements = precision.num_with_moment(kind, count)
            moment = moment_view(views[kind], num_elements, precision.format_of(kind))
            for segment in (s for s in layout.trained_segments if s.keeps(kind)):
                initial = self.initial.get(segment.parameter, ())
                first, last = segment.within(start, count)
                if first < last and any(initial):
                    values = torch.full(
                        (last - first,), initial[index], dtype=torch.float32, device="cpu"
                    )
                    moment_slice = moment.part(first, last)
                    # See `RuleParams.initial`.
                    self.kernels.encode(values, moment_slice, signed=False)

    def _write_frozen(self, layout: UnitLayout, parameters: Sequence[nn.Parameter]) -> None:
        if not layout.frozen_bytes:
            return
        shard_bytes = layout.frozen_bytes // layout.shards
        start = shard_bytes * self.plan.rank
        local = host_buffer(shard_bytes)
        for segment in (s for s in layout.segments if not s.trained):
            first = max(start - segment.offset, 0)
            end = min(start + shard_bytes - segment.offset, segment.nbytes)
            if first < end:
                target = local[segment.offset + first - start : segment.offset + end - start]
                self._fill_frozen(segment, first, target, parameters[segment.origin])
        state = self.store.units[layout.index]
        pieces: list[tuple[Range, Tensor]] = [(extent, local) for extent in state.frozen_copies[:1]]
        if Kind.WEIGHT in state.memory:
            weights = state.memory[Kind.WEIGHT]
            pieces.append((weights.part(state.layout.trained_bytes, local.numel()), local))
        self.transfers.write(pieces).wait()

    def _fill_frozen(
        self, segment: Segment, first: int, target: Tensor, parameter: nn.Parameter
    ) -> None:
        """Fill `target` with bytes of a frozen segment, from byte `first` on."""
        dtype = getattr(torch, segment.dtype)
        if not segment.form:
            start = segment.first_element + first // dtype.itemsize
            self._values.fill(target.view(dtype), parameter, start)
            return
        form, shape = FrozenFormat(segment.form), segment.shape[-2:]
        size = form.nbytes(shape)
        for index in range(first // size, -(-(first + target.numel()) // size)):
            packed = self._pack(segment, index, form, parameter)
            start = index * size - first
            matrix_bytes = target[max(start, 0) : start + size]
            matrix_bytes.copy_(packed[max(-start, 0) :][: matrix_bytes.numel()])

    def _pack(
        self, segment: Segment, index: int, form: FrozenFormat, parameter: nn.Parameter
    ) -> Tensor:
        """Return a matrix quantized to `form`; a file in that format is copied unchanged."""
        shape = segment.shape[-2:]
        numel = math.prod(shape)
        index += segment.first_element // numel
        reads = self._initial_values.pieces(parameter, index * numel, numel)
        packed_rows = _packed_rows(reads or (), form)
        if packed_rows:
            try:
                return join_rows(form, shape[1], packed_rows)
            except ValueError as error:
                raise ConfigError(
                    f"{segment.name!r} cannot be stored in {form} as in the file: {error}",
                    because=f"its scales are for {FP8_BLOCK} rows each",
                    remedy="frozen.format: nf4 or int8, or as_is",
                ) from error
        if reads is None:
            value = self._values.read(parameter, index * numel, numel)
        else:
            rows = [read().view(-1) for read in reads]
            value = rows[0] if len(rows) == 1 else torch.cat(rows)
        packed = torch.zeros(form.nbytes(shape), dtype=torch.uint8, device="cpu")
        dtype = getattr(torch, segment.dtype)
        quantize_exactly(value.cpu().view(shape), form, dtype, packed)
        return packed


def _packed_rows(reads: Sequence[Read], form: FrozenFormat) -> list[tuple[int, Tensor]]:
    """Return (number of rows, bytes) of each read; empty unless files store all in `form`."""
    rows: list[tuple[int, Tensor]] = []
    for read in reads if form in NATIVE else ():
        if not isinstance(read, PackedRead):
            return []
        packed = read.packed(form)
        if packed is None:
            return []
        rows.append((read.shape[0], packed))
    return rows


def _initial_write_bytes(plan: Plan, layout: UnitLayout) -> int:
    kinds, frozen = plan.precision.kinds, layout.frozen_bytes // layout.shards
    return sum(plan.range_bytes(layout, kind) for kind in kinds) + frozen


class _ValueSource:
    """Values of the parameter that is being written; those of the previous one are freed first.

    A split stack of experts would be computed again for each of its ranges, since the ranges of all
    stacks of a layer alternate. Its values are therefore computed once and stored in an unnamed
    file; again for each range without a drive, without space on it, or after an I/O error.
    """

    def __init__(self, initial_values: InitialValues, folder: Path | None) -> None:
        self._initial_values = initial_values
        self._folder = folder
        # Ids of stacks whose values are stored from their first use until `free_stack`.
        self.stacks_to_store: Collection[int] = ()
        self._files: dict[int, _ValuesFile] = {}
        self._parameter: nn.Parameter | None = None
        self._flat = torch.empty(0)

    def free_stack(self, stack: nn.Parameter) -> None:
        """Free the stored values of a stack."""
        file = self._files.pop(id(stack), None)
        if file is not None:
            file.close()

    def read(self, parameter: nn.Parameter, first: int, count: int) -> Tensor:
        """Return `count` values from `first` on, as a 1-D tensor of any dtype."""
        if (file := self._files.get(id(parameter))) is not None:
            with contextlib.suppress(OSError):
                return file.read(first, count)
            self.free_stack(parameter)
        if parameter is not self._parameter:
            self.free()
            self._flat = self._initial_values.value(parameter).detach().reshape(-1)
            self._parameter = parameter
            is_computed = self._initial_values.makes(parameter)
            if self._folder is not None and is_computed and id(parameter) in self.stacks_to_store:
                with contextlib.suppress(OSError):
                    self._files[id(parameter)] = _ValuesFile(self._folder, self._flat)
        return self._flat[first : first + count]

    def fill(self, target: Tensor, parameter: nn.Parameter, first: int) -> None:
        """Fill `target` with values from `first` on, reading only these if possible."""
        for target_slice in torch.split(target, PIECE_ELEMENTS):
            pieces = self._initial_values.pieces(parameter, first, target_slice.numel())
            if pieces is None:
                target_slice.copy_(self.read(parameter, first, target_slice.numel()))
            done = 0
            for read in pieces or ():
                values = read()
                target_slice[done : done + values.numel()].copy_(values)
                done += values.numel()
            first += target_slice.numel()

    def free(self) -> None:
        """Free the values of the current parameter."""
        self._parameter, self._flat = None, torch.empty(0)


class _ValuesFile:
    """Values in an unnamed temporary file."""

    def __init__(self, folder: Path, values: Tensor) -> None:
        self._dtype = values.dtype
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        try:
            self._file.write(values.cpu().contiguous().view(torch.uint8).numpy().data)
            self._file.flush()
        except BaseException:
            self._file.close()
            raise

    def read(self, first: int, count: int) -> Tensor:
        """Return `count` values from `first` on. Raises `OSError`."""
        values = torch.empty(count, dtype=self._dtype, device="cpu")
        self._file.seek(first * self._dtype.itemsize)
        if self._file.readinto(values.view(torch.uint8).numpy().data) != values.nbytes:
            raise OSError("the file of values is shorter than it was written")
        return values

    def close(self) -> None:
        """Close the file, which frees its space."""
        self._file.close()

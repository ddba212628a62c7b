"""The first write of every home: initial weights, zero moments, frozen bytes.

Units are written one after the other, chunk by chunk, and each parameter's own memory is let go
as soon as its unit is home. Values that are made or read (see `model/meta_init.py`) are asked
for once, one whole parameter at a time. The first write doubles as what file systems want before
O_DIRECT: every extent written once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from infinity.model.parameters import Presence
from infinity.offload.state import StateStore, UnitState
from infinity.offload.transfers import Lanes
from infinity.optim.cpu import CpuKernels
from infinity.optim.update import master_in, moment_in
from infinity.plan.layout import Kind, Record, UnitLayout
from infinity.plan.plan import Plan
from infinity.storage.device import HostArena, arena_for
from infinity.storage.disk import Ticket

Progress = Callable[[int, int, str], None]
FirstValue = Callable[[Tensor], Tensor]


class Birth:
    """Writes the initial state; two buffers, so that writes overlap.

    `initial` holds what the moments of a parameter (by index) begin with, where that is not 0.
    `first_value` gives the values of a parameter in its shape, in any dtype.
    """

    def __init__(
        self,
        plan: Plan,
        lanes: Lanes,
        store: StateStore,
        kernels: CpuKernels,
        initial: Mapping[int, tuple[float, ...]],
        first_value: FirstValue,
    ) -> None:
        self.plan = plan
        self.lanes = lanes
        self.store = store
        self.kernels = kernels
        self.initial = initial
        self._values = _Current(first_value)
        self._chunk = min(plan.chunk_elements, max((u.numel for u in plan.units), default=0))
        nbytes = Record(plan.precision.kinds, plan.precision).nbytes(self._chunk)
        arena = arena_for([nbytes, nbytes, self._chunk * 4])
        self._buffers = [arena.carve(nbytes), arena.carve(nbytes)]
        self._master = arena.carve(self._chunk * 4).view(torch.float32)
        self._tickets: list[Ticket | None] = [None, None]
        self._turn = 0

    def write(
        self, parameters: Sequence[nn.Parameter], presence: Presence, progress: Progress | None
    ) -> None:
        """Write all units home; parameters are absent afterwards."""
        sizes = [_birth_bytes(self.plan, layout) for layout in self.plan.units]
        done = 0
        for layout in self.plan.units:
            for index in range(layout.num_chunks(self.plan.chunk_elements)):
                self._write_chunk(layout, index, parameters)
            self._write_frozen(layout, parameters)
            self._values.forget()
            presence.forget(layout.index)
            done += sizes[layout.index]
            if progress is not None:
                progress(done, sum(sizes), f"writing the initial state: {layout.name}")
        for ticket in self._tickets:
            if ticket is not None:
                ticket.wait()

    def _write_chunk(
        self, layout: UnitLayout, index: int, parameters: Sequence[nn.Parameter]
    ) -> None:
        state = self.store.units[layout.index]
        start, count = layout.chunk(index, self.plan.chunk_elements)
        turn = self._turn = 1 - self._turn
        ticket = self._tickets[turn]
        if ticket is not None:
            ticket.wait()
            self._tickets[turn] = None
        master = self._master[:count]
        self._fill_master(layout, start, master, parameters)
        buffer = self._buffers[turn]
        views: dict[Kind, Tensor] = {}
        used = 0
        record, home = state.record, state.extents[index : index + 1]
        if self.plan.durable:  # the first commit holds all kinds
            record, home = self.plan.whole_record, state.whole[0][index : index + 1]
        for kind in self.plan.precision.kinds:  # record kinds first keep their record order
            nbytes = self.plan.precision.nbytes(kind, count)
            if kind in record.kinds:
                offset = record.offset(kind, count)
                views[kind] = buffer[offset : offset + nbytes]
        used = record.nbytes(count)
        for kind in self.plan.precision.kinds:
            nbytes = self.plan.precision.nbytes(kind, count)
            if kind not in views:
                views[kind] = buffer[used : used + nbytes]
                used += nbytes
        self._fill_views(views, master)
        self._fill_moments(layout, start, count, views)
        if home:
            self._tickets[turn] = self.lanes.write([(home[0], buffer[: record.nbytes(count)])])
        self._copy_to_memory(state, views, index)

    def _fill_master(
        self, layout: UnitLayout, start: int, master: Tensor, parameters: Sequence[nn.Parameter]
    ) -> None:
        """fp32 values of one chunk of the trained range; gaps between segments are zero."""
        master.zero_()
        count = master.numel()
        for segment in layout.trained_segments:
            first, last = segment.within(start, count)
            if first < last:
                flat = self._values.flat(parameters[segment.parameter])
                skipped = start - segment.offset
                master[first:last].copy_(flat[first + skipped : last + skipped])

    def _fill_views(self, views: dict[Kind, Tensor], master: Tensor) -> None:
        weight, rest = master_in(views, self.plan.precision)
        if rest is None:
            weight.copy_(master)
        else:
            self.kernels.split(master, weight, rest)

    def _fill_moments(
        self, layout: UnitLayout, start: int, count: int, views: dict[Kind, Tensor]
    ) -> None:
        """Zeroed bytes, which mean 0 in every format, or what the rule begins with."""
        precision = self.plan.precision
        for index, kind in enumerate(precision.moment_kinds):
            views[kind].zero_()
            moment = moment_in(views[kind], count, precision.format_of(kind))
            for segment in layout.trained_segments:
                initial = self.initial.get(segment.parameter, ())
                first, last = segment.within(start, count)
                if first < last and any(initial):
                    values = torch.full((last - first,), initial[index], dtype=torch.float32)
                    part = moment.part(first, last)
                    self.kernels.encode(values, part, signed=False)  # only Adagrad's sum

    def _copy_to_memory(self, state: UnitState, views: dict[Kind, Tensor], chunk: int) -> None:
        for kind, view in views.items():
            part = self.plan.part(state.layout, kind, chunk)
            if kind in state.ram:
                state.ram[kind][part].copy_(view)
            elif kind in state.on_device:
                self.lanes.copy_in(state.on_device[kind][part], view).wait()

    def _write_frozen(self, layout: UnitLayout, parameters: Sequence[nn.Parameter]) -> None:
        if not layout.frozen_bytes:
            return
        frozen = HostArena(layout.frozen_bytes).view(0, layout.frozen_bytes)
        for segment in (s for s in layout.segments if not s.trained):
            dtype = getattr(torch, segment.dtype)
            part = frozen[segment.offset : segment.offset + segment.nbytes]
            part.view(dtype).copy_(self._values.flat(parameters[segment.parameter]))
        state = self.store.units[layout.index]
        place = slice(layout.trained_bytes, layout.slot_bytes)
        if Kind.WEIGHT in state.ram:
            state.ram[Kind.WEIGHT][place].copy_(frozen)
        elif Kind.WEIGHT in state.on_device:
            self.lanes.copy_in(state.on_device[Kind.WEIGHT][place], frozen).wait()
        if state.frozen_sides:
            self.lanes.write([(state.frozen_sides[0], frozen)]).wait()


def _birth_bytes(plan: Plan, layout: UnitLayout) -> int:
    """Bytes that are written for one unit, on all tiers."""
    kinds = plan.precision.kinds
    return sum(plan.range_bytes(layout, kind) for kind in kinds) + layout.frozen_bytes


class _Current:
    """The values of the parameter that is being written; those of the last are let go first."""

    def __init__(self, first_value: FirstValue) -> None:
        self._first_value = first_value
        self._parameter: nn.Parameter | None = None
        self._flat = torch.empty(0)

    def flat(self, parameter: nn.Parameter) -> Tensor:
        """All values in one dimension."""
        if parameter is not self._parameter:
            self.forget()
            self._flat = self._first_value(parameter).detach().reshape(-1)
            self._parameter = parameter
        return self._flat

    def forget(self) -> None:
        """Keep no memory."""
        self._parameter, self._flat = None, torch.empty(0)

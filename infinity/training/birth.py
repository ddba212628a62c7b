"""The first write of every home: initial weights, zero moments, frozen bytes.

Units are written one after the other, chunk by chunk, and each parameter's own memory is let go
as soon as its unit is home. The first write doubles as what file systems want before O_DIRECT:
every extent written once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from infinity.memory.disk import Ticket
from infinity.memory.host import HostArena, arena_for
from infinity.memory.lanes import Lanes
from infinity.memory.state import StateStore, UnitState
from infinity.model.presence import Presence
from infinity.optim.cpu import CpuKernels
from infinity.plan.layout import PAGE, Kind, UnitLayout, round_up
from infinity.plan.plan import Plan

Progress = Callable[[int, int, str], None]


class Birth:
    """Writes the initial state from live parameters; two buffers, so that writes overlap."""

    def __init__(self, plan: Plan, lanes: Lanes, store: StateStore, kernels: CpuKernels) -> None:
        self.plan = plan
        self.lanes = lanes
        self.store = store
        self.kernels = kernels
        per_element = sum(plan.precision.itemsize(k) for k in plan.precision.kinds)
        self._chunk = min(plan.chunk_elements, max((u.numel for u in plan.units), default=0))
        nbytes = round_up(self._chunk * per_element, PAGE)
        arena = arena_for([nbytes, nbytes, self._chunk * 4])
        self._buffers = [arena.carve(nbytes), arena.carve(nbytes)]
        self._master = arena.carve(self._chunk * 4).view(torch.float32)
        self._tickets: list[Ticket | None] = [None, None]
        self._turn = 0

    def write(
        self, parameters: Sequence[nn.Parameter], presence: Presence, progress: Progress | None
    ) -> None:
        """Write all units home; parameters are absent afterwards."""
        total = sum(u.numel * 12 + u.frozen_bytes for u in self.plan.units)
        done = 0
        for layout in self.plan.units:
            for index in range(layout.num_chunks(self.plan.chunk_elements)):
                self._write_chunk(layout, index, parameters)
            self._write_frozen(layout, parameters)
            presence.forget(layout.index)
            done += layout.numel * 12 + layout.frozen_bytes
            if progress is not None:
                progress(done, total, f"writing the initial state: {layout.name}")
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
        _fill_master(layout, start, master, parameters)
        buffer = self._buffers[turn]
        views: dict[Kind, Tensor] = {}
        used = 0
        for kind in self.plan.precision.kinds:  # record kinds first keep their record order
            nbytes = count * self.plan.precision.itemsize(kind)
            if kind in state.record.kinds:
                offset = state.record.offset(kind, count)
                views[kind] = buffer[offset : offset + nbytes]
        used = state.record.nbytes(count)
        for kind in self.plan.precision.kinds:
            nbytes = count * self.plan.precision.itemsize(kind)
            if kind not in views:
                views[kind] = buffer[used : used + nbytes]
                used += nbytes
        self._fill_views(views, master)
        if state.record.kinds:
            record = buffer[: state.record.nbytes(count)]
            self._tickets[turn] = self.lanes.write([(state.extents[index], record)])
        self._copy_to_memory(state, views, start, count)

    def _fill_views(self, views: dict[Kind, Tensor], master: Tensor) -> None:
        if Kind.RESIDUAL in views:
            self.kernels.split(
                master,
                views[Kind.WEIGHT].view(torch.bfloat16),
                views[Kind.RESIDUAL].view(torch.int16),
            )
        else:
            views[Kind.WEIGHT].view(torch.float32).copy_(master)
        views[Kind.MOMENT1].zero_()
        views[Kind.MOMENT2].zero_()

    def _copy_to_memory(
        self, state: UnitState, views: dict[Kind, Tensor], start: int, count: int
    ) -> None:
        for kind, view in views.items():
            itemsize = self.plan.precision.itemsize(kind)
            part = slice(start * itemsize, (start + count) * itemsize)
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
            value = parameters[segment.parameter].detach().cpu().to(dtype).contiguous()
            part = frozen[segment.offset : segment.offset + segment.nbytes]
            part.copy_(value.view(-1).view(torch.uint8))
        state = self.store.units[layout.index]
        place = slice(layout.trained_bytes, layout.slot_bytes)
        if Kind.WEIGHT in state.ram:
            state.ram[Kind.WEIGHT][place].copy_(frozen)
        elif Kind.WEIGHT in state.on_device:
            self.lanes.copy_in(state.on_device[Kind.WEIGHT][place], frozen).wait()
        else:
            assert state.frozen is not None
            self.lanes.write([(state.frozen, frozen)]).wait()


def _fill_master(
    layout: UnitLayout, start: int, master: Tensor, parameters: Sequence[nn.Parameter]
) -> None:
    """fp32 values of one chunk of the trained range; gaps between segments are zero."""
    master.zero_()
    count = master.numel()
    for segment in layout.trained_segments:
        first = max(segment.offset, start)
        last = min(segment.offset + segment.numel, start + count)
        if first < last:
            flat = parameters[segment.parameter].detach().reshape(-1)
            part = flat[first - segment.offset : last - segment.offset]
            master[first - start : last - start].copy_(part)

"""What a sweep does to units: on the device where they rest, streamed through it, or by the CPU.

[Note: one order]
Chunks of units that do not rest on the device go through in one order, whoever updates them: read
what is on disk, update, publish, write. Before a unit asks for a slot every unit before it is done:
the training thread may be waiting for one of those, and only it can free a slot.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from infinity.memory.device import HAPPENED, Event, after_all
from infinity.memory.gradients import GradientStore
from infinity.memory.host import arena_for
from infinity.memory.lanes import Lanes
from infinity.memory.mover import Mover
from infinity.memory.residency import Slot
from infinity.memory.state import StateStore
from infinity.memory.traced import record
from infinity.optim.built_in import KernelUpdater
from infinity.optim.tiles import Tile, Updater
from infinity.plan.layout import Kind
from infinity.plan.plan import Plan, UpdatePlace, update_place
from infinity.plan.reserve import stage_bytes
from infinity.training.jobs import SweepJob, tiles_of
from infinity.training.stages import Stage, Work
from infinity.training.streams import Streams


class AbortedError(Exception):
    """The engine is closing."""


class Updates:
    """Brings units through one update after the other; used by the sweep's thread alone."""

    def __init__(
        self,
        plan: Plan,
        lanes: Lanes,
        store: StateStore,
        gradients: GradientStore,
        mover: Mover,
        updater: Updater,
    ) -> None:
        self.plan = plan
        self.lanes = lanes
        self.store = store
        self.gradients = gradients
        self.mover = mover
        self.updater = updater
        # Called with a unit's index before the first byte of its state changes in a job; it may
        # block. A saver copies the old bytes there.
        self.guard: Callable[[int], None] = lambda unit: None
        self._places = [update_place(plan, unit.index) for unit in plan.units]
        nbytes = stage_bytes(plan)
        arena = arena_for([nbytes] * plan.num_stages)
        if nbytes:
            lanes.device.pin(arena)
        self._stages = [Stage(arena.carve(nbytes)) for _ in range(plan.num_stages)]
        self._streams = Streams(plan, lanes)
        self._target: tuple[Slot, Tensor] | None = None
        self._published: list[Event] = []

    def forget(self) -> None:
        """Drop the reserved ranges."""
        self._stages.clear()
        self._streams.forget()
        self._target = None

    def run(self, job: SweepJob, stopped: Callable[[], bool]) -> None:
        """Update every unit of a job; raises `AbortedError` when `stopped`, and what reads raise.

        When it returns everything is home, or on its way to the disk.
        """
        try:
            for unit in job.units:
                if self._places[unit] is UpdatePlace.DEVICE:
                    self.mover.updated(unit, self._update_on_device(job, unit))
            self._run_chunks(job, stopped)
        finally:
            self._streams.abandon()  # nothing, unless it failed

    def _run_chunks(self, job: SweepJob, stopped: Callable[[], bool]) -> None:
        queue: deque[Work] = deque()
        order = self._chunks(job)
        turn = 0
        pending = next(order, None)
        while pending is not None or queue:
            # Of the stages one is being updated, one is on its way home; the others read ahead.
            while pending is not None and len(queue) < self.plan.num_stages - 2:
                stage = self._stages[turn % len(self._stages)]
                turn += 1
                trace = self.lanes.trace
                laps = None if trace is None else trace.laps(pending[0])
                while self._streams.hold(stage):
                    self._land()
                stage.reuse()
                queue.append(self._issue(job, *pending, stage))
                if laps is not None:
                    laps.lap("sweep", "wait for a stage, request")
                pending = next(order, None)
            if stopped():
                for work in queue:
                    for item in work.waits:
                        item.wait()
                raise AbortedError
            self._process(job, queue.popleft())
        self._land_all()

    def _chunks(self, job: SweepJob) -> Iterator[tuple[int, int]]:
        """(unit, chunk) in order; a unit somebody waits for comes next."""
        remaining = [u for u in job.units if self._places[u] is not UpdatePlace.DEVICE]
        while remaining:
            demand = self.mover.demand
            unit = demand if demand in remaining else remaining[0]
            remaining.remove(unit)
            for chunk in range(self.plan.units[unit].num_chunks(self.plan.chunk_elements)):
                yield unit, chunk

    # --- on the device -----------------------------------------------------------------------

    def _update_on_device(self, job: SweepJob, unit: int) -> Event:
        """Queue the update of a unit that rests on the device, all its chunks in one."""
        assert isinstance(self.updater, KernelUpdater)
        state, plan = self.store.units[unit], self.plan
        self.store.settle_writes(unit)
        tiles: list[Tile] = []
        for chunk in range(state.layout.num_chunks(plan.chunk_elements)):
            start, count = state.layout.chunk(chunk, plan.chunk_elements)
            views = {
                kind: state.on_device[kind][plan.part(state.layout, kind, chunk)]
                for kind in plan.precision.kinds
            }
            gradient = self.gradients.on_device[unit][start : start + count]
            views[Kind.GRADIENT] = gradient.view(torch.uint8)
            tiles += tiles_of(job, plan, state.layout, chunk, views, self.gradients.dtype)
        pieces = self.updater.pieces(tiles, job.grad_scale)
        self.guard(unit)
        submitted = time.perf_counter_ns()
        event = self.lanes.device.update(pieces, job.computed)
        if self.lanes.trace is not None:
            record(self.lanes.trace, "update", "update", unit, event, 0, submitted)
        state.writes.append(event)
        state.turn.advance()
        return event

    # --- a chunk of a unit that does not rest there --------------------------------------------

    def _issue(self, job: SweepJob, unit: int, chunk: int, stage: Stage) -> Work:
        """Start bringing a chunk's kinds and gradient where they can be updated from."""
        streamed = self._places[unit] is UpdatePlace.STREAMED
        if chunk == 0:
            self.store.settle_writes(unit)
        staged = self.store.stage(unit, chunk, stage.buffer, leave_on_device=streamed)
        work = Work(unit, chunk, stage, staged.views, staged.waits)
        work.waits += job.landing.pop(unit, ())
        self._issue_gradient(work, stage.buffer[staged.used :], streamed=streamed)
        return work

    def _issue_gradient(self, work: Work, room: Tensor, *, streamed: bool) -> None:
        gradients, itemsize = self.gradients, self.plan.gradient_itemsize
        start, count = self.plan.units[work.unit].chunk(work.chunk, self.plan.chunk_elements)
        home = gradients.ram.get(work.unit, gradients.on_device.get(work.unit))
        source = None if home is None else home[start : start + count].view(torch.uint8)
        if source is not None and (streamed or work.unit in gradients.ram):
            work.views[Kind.GRADIENT] = source
            return
        view = work.views[Kind.GRADIENT] = room[: count * itemsize]
        if source is not None:
            work.waits.append(self.lanes.copy_out(view, source, label=(work.unit, "gradient")))
            return
        extent = gradients.extents[work.unit].part(start * itemsize, count * itemsize)
        work.waits.append(self.lanes.read([(extent, view)], label=(work.unit, "gradient")))

    def _process(self, job: SweepJob, work: Work) -> None:
        """Update a chunk, or send it through the device, which ends in `_land`."""
        streamed = self._places[work.unit] is UpdatePlace.STREAMED
        if not (streamed and all(item.done() for item in work.waits)):
            self._land_all()  # rather than wait with chunks that may be home
        trace = self.lanes.trace
        laps = None if trace is None else trace.laps(work.unit)
        for item in work.waits:
            item.wait()
        if streamed:
            self._stream(job, work)
            if laps is not None:
                laps.lap("sweep", "stream")
            return
        if work.chunk == 0:
            # A copy of the old weights to the device may still read the range about to change.
            self.mover.entries[work.unit].ready.wait()
            self.guard(work.unit)
        tiles = self._tiles(job, work)
        if laps is not None:
            laps.lap("sweep", "wait for state")
        if tiles:
            self.updater.update(tiles, job.grad_scale)
        if laps is not None:
            laps.lap("update", "update", sum(view.numel() for view in work.views.values()))
        if work.chunk == 0:
            self._published = []
        self._write_back(work)
        if work.chunk == 0:
            self._target = self.mover.publish_slot(work.unit)
        if self._target is not None and Kind.WEIGHT not in self.store.units[work.unit].on_device:
            self._publish(work, self._part_of_slot(work, self._target[1]))
        if laps is not None:
            laps.lap("sweep", "publish, write back")
        self._finish(work, after_all(*self._published))

    def _finish(self, work: Work, ready: Event) -> None:
        """A chunk is updated; with the last one the unit is."""
        state = self.store.units[work.unit]
        if work.chunk + 1 == state.layout.num_chunks(self.plan.chunk_elements):
            state.turn.advance()  # whoever reads the unit from now on reads what was written
            self.mover.updated(work.unit, ready)

    def _tiles(self, job: SweepJob, work: Work) -> list[Tile]:
        layout, dtype = self.plan.units[work.unit], self.gradients.dtype
        return tiles_of(job, self.plan, layout, work.chunk, work.views, dtype)

    def _write_record(self, work: Work) -> None:
        """Send what rests on disk there, from the stage."""
        state = self.store.units[work.unit]
        if state.record.kinds:
            _, count = state.layout.chunk(work.chunk, self.plan.chunk_elements)
            piece = state.next_extents[work.chunk], work.stage.buffer[: state.record.nbytes(count)]
            ticket = self.lanes.write([piece], label=(work.unit, "state"))
            work.stage.busy.append(ticket)
            state.writes.append(ticket)

    # --- by the CPU ----------------------------------------------------------------------------

    def _write_back(self, work: Work) -> None:
        """Send what was updated in the stage to its home."""
        self._write_record(work)
        state = self.store.units[work.unit]
        for kind, home in state.on_device.items():
            target = home[self.plan.part(state.layout, kind, work.chunk)]
            label = work.unit, kind.value
            event = self.lanes.copy_in(target, work.views[kind], label=label)
            work.stage.busy.append(event)
            state.writes.append(event)
            if kind is Kind.WEIGHT:
                self._published.append(event)

    def _publish(self, work: Work, target: Tensor) -> None:
        """Copy the chunk's new weights into the unit's slot (nothing to do where they rest)."""
        assert self._target is not None
        weights = work.views[Kind.WEIGHT]
        if target.data_ptr() == weights.data_ptr():
            return
        label, free_after = (work.unit, "weight"), self._target[0].free_after
        event = self.lanes.copy_in(target, weights, free_after, label)
        work.stage.busy.append(event)
        self._published.append(event)

    def _part_of_slot(self, work: Work, residency: Tensor) -> Tensor:
        """Where a chunk's weights lie in what its unit's slot holds."""
        return residency[self.plan.part(self.plan.units[work.unit], Kind.WEIGHT, work.chunk)]

    # --- streamed through the device -----------------------------------------------------------

    def _stream(self, job: SweepJob, work: Work) -> None:
        """Queue a chunk's way through the device: in, kernel, out.

        Weights are updated in the slot that they are published to, if there is one.
        """
        assert isinstance(self.updater, KernelUpdater)
        state, streams = self.store.units[work.unit], self._streams
        while streams.full:
            self._land()
        passage = streams.begin(work)
        resting = set(state.on_device)
        if work.unit in self.gradients.on_device:
            resting.add(Kind.GRADIENT)
        passage.views.update({kind: work.views[kind] for kind in resting})
        for kind in work.views:
            if kind not in resting and kind is not Kind.WEIGHT:
                streams.bring(passage, kind)
        if work.chunk == 0:
            self._land_all(but=1)
            self.guard(work.unit)
            self._target = self.mover.publish_slot(work.unit)
        if Kind.WEIGHT not in resting:
            if self._target is None:
                streams.bring(passage, Kind.WEIGHT)
            else:
                slot, residency = self._target
                place = self._part_of_slot(work, residency)
                streams.bring(passage, Kind.WEIGHT, place, slot.free_after)
        layout, dtype = state.layout, self.gradients.dtype
        tiles = tiles_of(job, self.plan, layout, work.chunk, passage.views, dtype)
        pieces = self.updater.pieces(tiles, job.grad_scale)
        # A copy of the old weights to the device may still read the range about to change.
        after = after_all(job.computed, self.mover.entries[work.unit].ready)
        streams.update(passage, pieces, after)

    def _land(self) -> None:
        """Wait until the oldest chunk under way is home; what rests on disk goes on from there."""
        work = self._streams.land()
        self._write_record(work)
        self._finish(work, HAPPENED)

    def _land_all(self, but: int = 0) -> None:
        while len(self._streams) > but:
            self._land()

"""What a sweep does to units: on the device where they rest, streamed through it, or by the CPU.

[Note: one order]
Chunks of units that do not rest on the device go through in one order, whoever updates them: read
what is on disk, update, publish, write. Before a unit asks for a slot every unit before it is done:
the training thread may be waiting for one of those, and only it can free a slot.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from infinity.checkpoint.durability import Durability
from infinity.errors import EngineClosedError
from infinity.offload.gradients import Copy, GradientStore
from infinity.offload.prefetch import Mover
from infinity.offload.slots import Slot
from infinity.offload.state import StateStore
from infinity.offload.transfers import Lanes, record
from infinity.optim.cpu import Piece
from infinity.optim.update import KernelUpdater, Tile, Updater, master_in, moment_in
from infinity.plan.budget import NUM_STREAM_BUFFERS, stage_bytes, stream_bytes
from infinity.plan.layout import Kind, UnitLayout
from infinity.plan.plan import Plan, UpdatePlace, update_place
from infinity.storage.device import HAPPENED, DeviceArena, Event, after_all, arena_for
from infinity.storage.disk import Ticket

# What one sweep is to do, and its parts as the optimizer sees them.


@dataclass(frozen=True)
class SweepJob:
    """Everything one sweep depends on; captured at `step()`.

    `hypers` and `steps` are by parameter index and name exactly the parameters to update;
    `steps` counts this update, from 1. `computed` is the end of the compute that made the
    gradients, and read the weights that are about to change. `landing` has the gradients' copies
    that are still on their way to RAM, by unit; the sweep takes them out as it waits for them.
    """

    units: tuple[int, ...]
    hypers: Mapping[int, Any]
    steps: Mapping[int, int]
    grad_scale: float
    computed: Event
    landing: dict[int, list[Copy]] = field(default_factory=dict)
    document: bytes | None = None  # of a durable run: what a commit of this step holds besides


def tiles_of(
    job: SweepJob,
    plan: Plan,
    layout: UnitLayout,
    chunk: int,
    views: Mapping[Kind, Tensor],
    gradient_dtype: torch.dtype,
) -> list[Tile]:
    """The parts of parameters that lie in a chunk and have an update.

    `views` (uint8) hold every state kind of exactly this chunk, and its gradient.
    """
    precision = plan.precision
    start, count = layout.chunk(chunk, plan.chunk_elements)
    weights, rests = master_in(views, precision)
    gradients = views[Kind.GRADIENT].view(gradient_dtype)
    moments = [
        moment_in(views[kind], count, precision.format_of(kind)) for kind in precision.moment_kinds
    ]
    tiles = []
    for segment in layout.trained_segments:
        first, last = segment.within(start, count)
        if first >= last or segment.parameter not in job.hypers:
            continue
        tiles.append(
            Tile(
                parameter=segment.parameter,
                shape=segment.shape,
                first=start + first - segment.offset,
                weight=weights[first:last],
                rest=None if rests is None else rests[first:last],
                moments=tuple(moment.part(first, last) for moment in moments),
                gradient=gradients[first:last],
                hyper=job.hypers[segment.parameter],
                step=job.steps[segment.parameter],
            )
        )
    return tiles


# The RAM buffers of a sweep, and what is under way in them.
#
# A stage holds one chunk of those kinds that cannot be updated where they rest.


@dataclass(eq=False)
class Stage:
    """A RAM buffer for one chunk of what cannot be updated in place."""

    buffer: Tensor
    busy: list[Ticket | Event] = field(default_factory=list)

    def reuse(self) -> None:
        """Wait until nothing reads the buffer any more."""
        for item in self.busy:
            item.wait()
        self.busy.clear()


@dataclass(eq=False)
class Work:
    """One chunk between its read and its write."""

    unit: int
    chunk: int
    stage: Stage
    # uint8, of exactly this chunk; host-reachable, but for what stays on the device in a stream.
    views: dict[Kind, Tensor]
    waits: list[Ticket | Event]


# Chunks on their way through a device: state in, the device's kernel, state out.
#
# [Note: three chunks under way]
# A buffer on the device holds one chunk of what does not rest there. Copies in, kernels and copies
# out of different chunks overlap, and only events order them; the sweep's thread waits for nothing
# but the oldest chunk, which must be home before its buffer is filled again. No copy waits for
# compute: a unit is lent out when its last chunk is home, and until then nobody else can reach it.


@dataclass(eq=False)
class Passage:
    """One chunk between its first copy in and its last copy out."""

    work: Work
    room: Tensor  # what is left of its buffer
    views: dict[Kind, Tensor] = field(default_factory=dict)  # uint8, on the device
    brought: list[Kind] = field(default_factory=list)  # what does not rest there
    events: list[Event] = field(default_factory=list)  # of all that was asked for


class Streams:
    """The device buffers of streamed updates, used in turn by the sweep's thread alone."""

    def __init__(self, plan: Plan, lanes: Lanes) -> None:
        self._lanes = lanes
        nbytes = stream_bytes(plan)
        self._arena: DeviceArena | None = None
        self._buffers: list[Tensor] = []
        if nbytes:
            self._arena = lanes.device.reserve(NUM_STREAM_BUFFERS * nbytes)
            offsets = range(0, NUM_STREAM_BUFFERS * nbytes, nbytes)
            self._buffers = [self._arena.view(offset, nbytes) for offset in offsets]
        self._turn = 0
        self._under_way: deque[Passage] = deque()

    def __len__(self) -> int:
        """How many chunks are under way."""
        return len(self._under_way)

    @property
    def full(self) -> bool:
        """Whether the oldest chunk must be home before another one begins."""
        return len(self._under_way) == len(self._buffers)

    def hold(self, stage: Stage) -> bool:
        """Whether a chunk under way comes from, and goes back to, this RAM buffer."""
        return any(passage.work.stage is stage for passage in self._under_way)

    def begin(self, work: Work) -> Passage:
        """Take the next buffer; not while `full`."""
        assert not self.full
        passage = Passage(work, self._buffers[self._turn % len(self._buffers)])
        self._turn += 1
        self._under_way.append(passage)
        return passage

    def bring(
        self, passage: Passage, kind: Kind, place: Tensor | None = None, after: Event = HAPPENED
    ) -> None:
        """Copy a kind in: to `place`, which is free after `after`, else into the buffer."""
        source = passage.work.views[kind]
        if place is None:
            place, passage.room = passage.room[: source.numel()], passage.room[source.numel() :]
        label = passage.work.unit, kind.value
        passage.views[kind] = place
        passage.brought.append(kind)
        passage.events.append(self._lanes.bring(place, source, after, label))

    def update(self, passage: Passage, pieces: Sequence[Piece], after: Event) -> None:
        """Queue the kernel behind the copies in and `after`, and the copies back behind it."""
        lanes, work = self._lanes, passage.work
        ready = after_all(after, *passage.events)
        if pieces:
            submitted = time.perf_counter_ns()
            ready = lanes.device.update(pieces, ready)
            if lanes.trace is not None:
                record(lanes.trace, "update", "update", work.unit, ready, 0, submitted)
            passage.events.append(ready)
        for kind in passage.brought:
            if kind is not Kind.GRADIENT:
                source, label = passage.views[kind], (work.unit, kind.value)
                passage.events.append(lanes.copy_back(work.views[kind], source, ready, label))
        passage.views.clear()  # a view of a slot would keep it from being given to another unit

    def land(self) -> Work:
        """Wait until the oldest chunk is home."""
        passage = self._under_way[0]
        for event in passage.events:
            event.wait()
        return self._under_way.popleft().work

    def abandon(self) -> None:
        """Wait until nothing moves; what was under way is lost."""
        while self._under_way:
            self.land()

    def forget(self) -> None:
        """Drop the buffers."""
        self._buffers.clear()
        self._arena = None


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


# The optimizer pass: read, update, publish, write, pipelined by chunk, behind the next forward.
#
# [Note: deferred and exact]
# A sweep starts when the norm and the clip factor are known, and updates units in the order in
# which the forward will need them. `step()` does not wait for it; a fetch of a unit waits for that
# unit's update. Nothing is stale and nothing is speculative.
#
# [Note: pacing]
# The sweep publishes a unit's new weights into a free slot, and waits for one when there is none:
# it stays at most the slot count ahead of the forward, so that weights are not written, dropped
# and read again. A demand for anything else lifts the pacing (see the mover).


class Sweep:
    """One worker thread that runs one job at a time."""

    def __init__(
        self,
        plan: Plan,
        lanes: Lanes,
        store: StateStore,
        gradients: GradientStore,
        mover: Mover,
        updater: Updater,
        durability: Durability | None = None,
    ) -> None:
        self.durability = durability
        self.lanes = lanes
        self.mover = mover
        self.updates = Updates(plan, lanes, store, gradients, mover, updater)
        self._job: SweepJob | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._loop, name="infinity-sweep", daemon=True)

    # --- the training thread ---------------------------------------------------------------

    def open(self) -> None:
        """Start the thread; before training, where an exception ends in `close`."""
        self._thread.start()

    def submit(self, job: SweepJob) -> None:
        """Run a job behind the caller; the previous one must be finished."""
        with self.mover.changed:
            assert self._job is None
            self._job = job
            self.mover.changed.notify_all()

    def finish(self) -> None:
        """Lift the pacing and wait until no update is owed; raises what makes that impossible."""
        with self.lanes.stall("update"), self.mover.changed:
            self.mover.paced = False
            self.mover.changed.notify_all()
            while not self._closing and self._job is not None and self.mover.failure is None:
                self.mover.changed.wait()
        if self._closing:
            raise EngineClosedError(
                "the engine is closed", remedy="read values before close(), or make a new engine"
            )
        self.mover.check()

    def close(self) -> None:
        """Abandon what is left and end the thread."""
        with self.mover.changed:
            self._closing = True
            self.mover.paced = False
            self.mover.changed.notify_all()
        with suppress(RuntimeError):  # a second Ctrl-C may have come between the lock and its block
            while True:
                self.mover.changed.release()
        # The garbage collector may close a dropped engine on any thread, this one's too.
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join()

    @property
    def can_finish(self) -> bool:
        """Whether there is a thread to wait for: not in a forked child, nor on that thread."""
        return self._thread.is_alive() and threading.current_thread() is not self._thread

    def forget(self) -> None:
        """Drop the reserved ranges."""
        self.updates.forget()

    # --- the sweep thread --------------------------------------------------------------------

    def _loop(self) -> None:
        self.lanes.device.follow_compute()
        while True:
            with self.mover.changed:
                while self._job is None and not self._closing:
                    self.mover.changed.wait()
                if self._closing:
                    return
                job = self._job
            assert job is not None
            try:
                self._run(job)
            except AbortedError:
                return
            except BaseException as error:
                self.mover.fail(error)
                return
            del job
            with self.mover.changed:
                self._job = None
                self.mover.changed.notify_all()

    def _run(self, job: SweepJob) -> None:
        self.updates.run(job, lambda: self._closing)
        if self.durability is not None:
            self.durability.finish_step(job.document, lambda: self._closing)

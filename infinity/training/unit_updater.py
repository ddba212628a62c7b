"""Updates of units on the device, streamed through it, or on the CPU; chunk by chunk.

[Note: one order]
Chunks of units that are not stored on the device are updated in one order, on any processor: read
from disk, update, publish, write. Before the optimizer thread waits for a slot for a unit, it has
completed all units before: the training thread may be waiting for one of those, and only the
training thread can free a slot.

[Note: three under way]
A staging buffer in RAM holds one chunk of the kinds that cannot be updated in place. For streamed
updates, a buffer on the device holds the kinds that are not stored there. Copies in, kernels and
copies out of different chunks overlap, ordered by events only; the optimizer thread waits for
nothing but the oldest chunk, which must be back before its buffers are filled again. No copy waits
for compute: a unit becomes available when all its chunks are back. From RAM to RAM several chunks
are streamed at once (`Plan.chunks_per_batch`), since the calls of a copy take about 100 us on the
host, at any size; for the same reason the CPU updates several at once if it can address all kinds.
Units follow each other without a gap, unless one must wait. During a streamed update the CPU may
update a share of each unit's chunks (`Plan.chunk_batches`) on a separate thread: while one is
updated the next is queued, and the optimizer thread streams others. All are written in one order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from infinity.offload.gradients import GradientStore
from infinity.offload.handover import UpdateHandover, UpdateJob
from infinity.offload.slots import Slot
from infinity.offload.state import StateStore
from infinity.offload.transfers import Transfers
from infinity.optim.cpu import Piece
from infinity.optim.moments import master_views, moment_view
from infinity.optim.update import KernelUpdater, Tile, Updater
from infinity.plan.budget import NUM_STREAM_BUFFERS, staging_bytes, stream_bytes
from infinity.plan.layout import UnitLayout
from infinity.plan.plan import Plan, UpdatePlace, update_place
from infinity.profiling.trace_recorder import Laps
from infinity.storage.device import HAPPENED, Event, after_all
from infinity.storage.staging import BufferPool
from infinity.types import Kind


@dataclass(eq=False)
class ChunkUpdate:
    """Chunks of a unit, usually one, between their read and their write.

    `views` (uint8) span exactly these chunks. The host can address them, except those of kinds in
    `on_device`, which are stored on the device.
    """

    unit: int
    chunks: range
    streamed: bool
    buffer: Tensor
    views: dict[Kind, Tensor]
    waits: list[Event]
    on_device: set[Kind]
    device_buffer: Tensor  # of a streamed update
    device_buffer_left: Tensor  # its free bytes
    target: Slot | None = None  # gets the new weights
    cpu_update: Future[None] | None = None  # update on the CPU thread
    device_views: dict[Kind, Tensor] = field(default_factory=dict)
    copied_kinds: list[Kind] = field(default_factory=list)  # to the device
    events: list[Event] = field(default_factory=list)  # ends of the copies and the kernel

    @property
    def is_first(self) -> bool:
        """Return True if the unit begins with these chunks."""
        return self.chunks.start == 0


NUM_CPU_UPDATES = 2  # in flight on the CPU thread: one runs, one is queued
_NO_BUFFER = torch.empty(0, dtype=torch.uint8)


BeforeChange = Callable[..., object]  # (unit), or (unit, function to call before a wait)


class AbortedError(Exception):
    """The engine is closing."""


class UnitUpdater:
    """Updates units one after the other; used by the optimizer thread only."""

    def __init__(
        self,
        plan: Plan,
        transfers: Transfers,
        store: StateStore,
        gradients: GradientStore,
        handover: UpdateHandover,
        updater: Updater,
        before_change: BeforeChange,
    ) -> None:
        self.plan = plan
        self.transfers = transfers
        self.store = store
        self.gradients = gradients
        self._handover = handover
        self.updater = updater
        # Called with a unit's index before the first byte of its state changes in a job. It may
        # block until a save in progress has copied the unit; it calls its second argument before.
        self.before_change = before_change
        self._update_modes = [update_place(plan, unit.index) for unit in plan.units]
        self._staging = BufferPool(plan.num_staging_buffers, staging_bytes(plan), transfers.device)
        nbytes = stream_bytes(plan)
        num_streams = NUM_STREAM_BUFFERS if nbytes else 0
        self._streams = BufferPool(num_streams, nbytes, transfers.device, on_device=True)
        self._in_flight: deque[ChunkUpdate] = deque()  # oldest first
        self._cpu_thread: ThreadPoolExecutor | None = None  # updates during streaming
        if plan.cpu_share:
            begin = transfers.device.attach_worker_thread
            self._cpu_thread = ThreadPoolExecutor(1, "infinity-cpu-update", begin)
        self._target: Slot | None = None  # gets the weights of the current unit
        self._published: dict[int, list[Event]] = {}  # copies of new weights to slots, by unit
        self._remaining: dict[int, int] = {}  # chunks not yet updated, by unit in progress

    def free(self) -> None:
        """Free the reserved buffers, and end the CPU thread."""
        if self._cpu_thread is not None:
            self._cpu_thread.shutdown()
        self._staging.free()
        self._streams.free()
        self._target = None

    def run(self, job: UpdateJob, stopped: Callable[[], bool]) -> None:
        """Update every unit of a job; on return its state is stored, or in flight to the disk.

        Raises:
            AbortedError: `stopped` returned True.
        """
        try:
            for unit in job.units:
                if self._update_modes[unit] is UpdatePlace.DEVICE:
                    self._handover.updated(unit, self._update_on_device(job, unit))
            self._run_chunks(job, stopped)
        finally:
            for update in self._in_flight:  # empty unless a chunk failed
                if update.cpu_update is not None:
                    wait([update.cpu_update])
                for event in update.events:
                    event.wait()
            self._in_flight.clear()

    def _run_chunks(self, job: UpdateJob, stopped: Callable[[], bool]) -> None:
        queue: deque[ChunkUpdate] = deque()
        order = self._chunks(job)
        pending = next(order, None)
        while pending is not None or queue:
            # One buffer is being updated, one is being written back; the others read ahead.
            while pending is not None and len(queue) < self.plan.num_staging_buffers - 2:
                unit, chunks, streamed = pending
                laps = Laps(self.transfers.trace, unit)
                in_place = self.plan.is_addressable(self.plan.placements[unit], by_device=streamed)
                buffer = _NO_BUFFER if in_place else self._staging.take(self._complete_oldest)
                queue.append(self._issue(job, unit, chunks, streamed, buffer))
                laps.lap("optimizer_pass", "wait for a buffer, request")
                pending = next(order, None)
            if stopped():
                for update in queue:
                    for item in update.waits:
                        item.wait()
                raise AbortedError
            self._process(job, queue.popleft())
        self._complete_all()

    def _chunks(self, job: UpdateJob) -> Iterator[tuple[int, range, bool]]:
        """Yield (unit, chunks, is streamed) in order; a unit in demand comes next."""
        remaining = [u for u in job.units if self._update_modes[u] is not UpdatePlace.DEVICE]
        while remaining:
            demand = self._handover.demand
            unit = demand if demand in remaining else remaining[0]
            remaining.remove(unit)
            for batch in self.plan.chunk_batches(
                self.plan.local_units[unit], self.plan.placements[unit]
            ):
                yield unit, *batch

    # --- on the device -----------------------------------------------------------------------

    def _update_on_device(self, job: UpdateJob, unit: int) -> Event:
        """Queue one update of all chunks of a unit that is stored on the device."""
        assert isinstance(self.updater, KernelUpdater)
        state = self.store.units[unit]
        self.store.wait_writes(unit)
        count = state.layout.num_chunks(self.plan.chunk_elements)
        views = self.store.stage(unit, 0, _NO_BUFFER, chunks=count, by_device=True).views
        views[Kind.GRADIENT] = self.gradients.on_device[unit].view(torch.uint8)
        tiles = self._tiles(job, unit, range(count), views)
        pieces = self.updater.pieces(tiles, job.grad_scale)
        self.before_change(unit)
        event = self.transfers.update(pieces, job.computed, unit)
        state.writes.append(event)
        state.copy.advance()
        return event

    # --- chunks of units that are not stored on the device -------------------------------------

    def _issue(
        self, job: UpdateJob, unit: int, chunks: range, streamed: bool, buffer: Tensor
    ) -> ChunkUpdate:
        """Start to read the state and gradients of chunks into memory that the updater reaches."""
        if chunks.start == 0:
            self.store.wait_writes(unit)
        views, waits, used, on_device = self.store.stage(
            unit,
            chunks.start,
            buffer,
            chunks=len(chunks),
            by_device=streamed,
            after=job.computed,
        )
        update = ChunkUpdate(
            unit, chunks, streamed, buffer, views, waits, set(on_device), _NO_BUFFER, _NO_BUFFER
        )
        update.waits += job.copies.pop(unit, ())
        span = self.plan.part(self.plan.local_units[unit], Kind.GRADIENT, chunks.start, len(chunks))
        source = self.gradients.ranges[unit].part(span.start, span.stop - span.start)
        view = source.addressable_view(by_device=streamed)
        if view is None:
            view, label = buffer[used : used + source.nbytes], (unit, "gradient")
            device_view = source.addressable_view(by_device=True)
            if device_view is None:
                update.waits.append(self.transfers.read([(source, view)], label=label))
            else:
                update.waits.append(
                    self.transfers.copy_d2h_unordered(view, device_view, job.computed, label)
                )
        elif unit in self.gradients.on_device:
            update.on_device.add(Kind.GRADIENT)
        views[Kind.GRADIENT] = view
        return update

    def _process(self, job: UpdateJob, update: ChunkUpdate) -> None:
        """Update chunks on the CPU, or queue their update, which `_complete_oldest` completes."""
        if not update.streamed:  # a copy to the device may still read the old weights
            update.waits.append(self._handover.weights_read_event(update.unit))
        laps = Laps(self.transfers.trace, update.unit)
        if update.streamed:
            if not all(item.done() for item in update.waits):
                self._complete_all()  # complete chunks that are back before a wait
            for item in update.waits:
                item.wait()
            self._stream(job, update)
            laps.lap("optimizer_pass", "stream")
            return
        if self._update_modes[update.unit] is UpdatePlace.STREAMED:
            self._submit_cpu_update(job, update)
            laps.lap("optimizer_pass", "hand to the CPU")
            return
        self._complete_all()
        if update.is_first:
            self.before_change(update.unit)
        self._update_on_cpu(job, update)
        laps = Laps(self.transfers.trace, update.unit)
        written = self._write_back(update)
        if update.is_first:
            self._target = self._handover.publish_slot(update.unit)
        update.target = self._target
        self._return_buffer(update, written + self._publish(update))
        laps.lap("optimizer_pass", "publish, write back")
        self._finish(update)

    def _submit_cpu_update(self, job: UpdateJob, update: ChunkUpdate) -> None:
        """Submit chunks of a streamed unit, whose first chunks are streamed, to the CPU thread."""
        assert self._cpu_thread is not None
        update.target = self._target
        update.cpu_update = self._cpu_thread.submit(self._update_on_cpu, job, update)
        self._in_flight.append(update)
        while sum(other.cpu_update is not None for other in self._in_flight) > NUM_CPU_UPDATES:
            self._complete_oldest()

    def _update_on_cpu(self, job: UpdateJob, update: ChunkUpdate) -> None:
        """Wait for the copies of chunks, then update them. Runs on either thread."""
        laps = Laps(self.transfers.trace, update.unit)
        for item in update.waits:
            item.wait()
        laps.lap("optimizer_pass", "wait for state")
        if tiles := self._tiles(job, update.unit, update.chunks, update.views):
            self.updater.update(tiles, job.grad_scale)
        laps.lap("update", "update", sum(view.numel() for view in update.views.values()))

    def _return_buffer(self, update: ChunkUpdate, written: Sequence[Event]) -> None:
        """Return the staging buffer, if there is one, to its pool; it is free after `written`."""
        if update.buffer is not _NO_BUFFER:
            self._staging.give_back(update.buffer, *written)

    def _finish(self, update: ChunkUpdate) -> None:
        """Count chunks as updated; with the last ones, complete the update of the unit."""
        unit = update.unit
        state = self.store.units[unit]
        count = state.layout.num_chunks(self.plan.chunk_elements)
        self._remaining[unit] = self._remaining.get(unit, count) - len(update.chunks)
        if not self._remaining[unit]:
            del self._remaining[unit]
            state.copy.advance()  # reads of the unit from now on get the new state
            self._handover.updated(unit, after_all(*self._published.pop(unit, ())))

    def _tiles(
        self, job: UpdateJob, unit: int, chunks: range, views: Mapping[Kind, Tensor]
    ) -> list[Tile]:
        """Return the tiles of these chunks, chunk by chunk if that changes results."""
        plan = self.plan
        layout = plan.local_units[unit]
        tiles = list[Tile]()
        is_flat = isinstance(self.updater, KernelUpdater) and plan.precision_of(layout).is_flat
        step = plan.chunks_at_once if is_flat else 1
        starts = {kind: plan.part(layout, kind, chunks.start).start for kind in views}
        for first in range(chunks.start, chunks.stop, step):
            span = range(first, min(first + step, chunks.stop))
            chunk_views = {}
            for kind, view in views.items():
                part, start = plan.part(layout, kind, first, len(span)), starts[kind]
                chunk_views[kind] = view[part.start - start : part.stop - start]
            tiles += self._tiles_of_span(job, layout, span, chunk_views)
        return tiles

    def _tiles_of_span(
        self, job: UpdateJob, layout: UnitLayout, chunks: range, views: Mapping[Kind, Tensor]
    ) -> Iterator[Tile]:
        """Yield the tiles of chunks: ranges of the parameters that the job updates.

        `views` (uint8) have every state kind, and the gradient, of exactly these `chunks`: one, or
        several if they hold nothing but values (`Precision.is_flat`).
        """
        precision = self.plan.precision_of(layout)
        start, _ = layout.chunk(chunks.start, self.plan.chunk_elements)
        count = sum(layout.chunk(chunks.stop - 1, self.plan.chunk_elements)) - start
        weights, residuals = master_views(views, precision)
        gradients = views[Kind.GRADIENT].view(self.gradients.dtype)
        moments = {
            kind: moment_view(
                views[kind], precision.num_with_moment(kind, count), precision.format_of(kind)
            )
            for kind in precision.moment_kinds
        }
        for segment in layout.trained_segments:
            first, last = segment.within(start, count)
            if first >= last or segment.parameter not in job.params_by_index:
                continue
            yield Tile(
                parameter=segment.parameter,
                shape=segment.shape,
                first=start + first - segment.offset + segment.first_element,
                weight=weights[first:last],
                master_state=None if residuals is None else residuals[first:last],
                moments=tuple(m.part(first, last) for k, m in moments.items() if segment.keeps(k)),
                gradient=gradients[first:last],
                rule_params=job.params_by_index[segment.parameter],
                step=job.steps[segment.parameter],
            )

    # --- on the CPU ----------------------------------------------------------------------------

    def _write_back(self, update: ChunkUpdate) -> list[Event]:
        """Start to write updated kinds from the buffer to their tiers; return the ends."""
        state = self.store.units[update.unit]
        staged = {k: update.views[k] for k in state.kinds if state.in_ram(k) is None}
        events = []
        if state.on_device(Kind.WEIGHT):  # separately: forwards wait for it
            weight = {Kind.WEIGHT: staged.pop(Kind.WEIGHT)}
            events.append(self._write(update, weight))
            self._published.setdefault(update.unit, []).extend(events)
        if staged:
            events.append(self._write(update, staged))
        return events

    def _write(self, update: ChunkUpdate, views: Mapping[Kind, Tensor]) -> Event:
        return self.store.send(update.unit, update.chunks.start, views, chunks=len(update.chunks))

    def _publish(self, update: ChunkUpdate) -> list[Event]:
        """Start to copy new weights into the unit's slot, unless they are there already."""
        if update.target is None or self.store.units[update.unit].on_device(Kind.WEIGHT):
            return []
        slot = update.target
        weights = update.views[Kind.WEIGHT]
        target = self._slot_range(update, slot)
        if target.data_ptr() == weights.data_ptr():
            return []
        # Units with streamed chunks use the stream of these: a copy engine that always finds work
        # on one stream can delay a copy on another, on an H100 by 50 ms.
        is_streamed = self._update_modes[update.unit] is UpdatePlace.STREAMED
        copy = self.transfers.copy_h2d_unordered if is_streamed else self.transfers.copy_h2d
        event = copy(target, weights, slot.free_after, (update.unit, "weight"))
        self._published.setdefault(update.unit, []).append(event)
        return [event]

    def _slot_range(self, update: ChunkUpdate, slot: Slot) -> Tensor:
        """Return the range of the slot for the weights of these chunks."""
        shard, *_ = self.store.shard_views(update.unit, slot.memory)
        layout, chunks = self.plan.local_units[update.unit], update.chunks
        return shard[self.plan.part(layout, Kind.WEIGHT, chunks.start, len(chunks))]

    # --- streamed through the device -----------------------------------------------------------

    def _stream(self, job: UpdateJob, update: ChunkUpdate) -> None:
        """Queue the copies in, the kernel and the copies out of streamed chunks.

        Weights are updated in the slot that they are published to, if there is one.
        """
        assert isinstance(self.updater, KernelUpdater)
        while self._streams.count == sum(other.streamed for other in self._in_flight):
            self._complete_oldest()
        update.device_buffer_left = update.device_buffer = self._streams.take()
        self._in_flight.append(update)
        update.device_views.update({kind: update.views[kind] for kind in update.on_device})
        for kind in update.views:
            if kind not in update.on_device and kind is not Kind.WEIGHT:
                self._copy_in(update, kind)
        if update.is_first:
            complete_earlier = partial(self._complete_all, leave=1)
            self.before_change(update.unit, complete_earlier)
            self._target = self._handover.publish_slot(update.unit, complete_earlier)
        if Kind.WEIGHT not in update.on_device:
            if self._target is None:
                self._copy_in(update, Kind.WEIGHT)
            else:
                slot_range = self._slot_range(update, self._target)
                self._copy_in(update, Kind.WEIGHT, slot_range, self._target.free_after)
        tiles = self._tiles(job, update.unit, update.chunks, update.device_views)
        pieces = self.updater.pieces(tiles, job.grad_scale)
        # A copy of the old weights to the device may still read the range about to change.
        after = after_all(job.computed, self._handover.weights_read_event(update.unit))
        self._launch(update, pieces, after)

    def _copy_in(
        self, update: ChunkUpdate, kind: Kind, target: Tensor | None = None, after: Event = HAPPENED
    ) -> None:
        """Start to copy a kind to `target`, free after `after`, or to the device buffer."""
        source = update.views[kind]
        if target is None:
            target = update.device_buffer_left[: source.numel()]
            update.device_buffer_left = update.device_buffer_left[source.numel() :]
        update.device_views[kind] = target
        update.copied_kinds.append(kind)
        update.events.append(
            self.transfers.copy_h2d_unordered(target, source, after, (update.unit, kind.value))
        )

    def _launch(self, update: ChunkUpdate, pieces: Sequence[Piece], after: Event) -> None:
        """Queue the kernel after the copies in and `after`, and the copies out after the kernel."""
        transfers = self.transfers
        ready = after_all(after, *update.events)
        if pieces:
            ready = transfers.update(pieces, ready, update.unit)
            update.events.append(ready)
        for kind in update.copied_kinds:
            if kind is not Kind.GRADIENT:
                source, label = update.device_views[kind], (update.unit, kind.value)
                update.events.append(
                    transfers.copy_d2h_unordered(update.views[kind], source, ready, label)
                )
        update.device_views.clear()  # a view of a slot would prevent its reuse by another unit

    def _complete_oldest(self) -> None:
        """Wait for the oldest chunks in flight, and start to write their state back."""
        update = self._in_flight[0]
        if update.cpu_update is not None:
            update.cpu_update.result()
            self._in_flight.popleft()
            self._return_buffer(update, self._write_back(update) + self._publish(update))
        else:
            for event in update.events:
                event.wait()
            self._in_flight.popleft()
            self._streams.give_back(update.device_buffer)
            state = self.store.units[update.unit]
            staged = {kind: update.views[kind] for kind in state.kinds if kind not in state.memory}
            written = [self._write(update, staged)] if staged else []
            self._return_buffer(update, written)
        self._finish(update)

    def _complete_all(self, leave: int = 0) -> None:
        while len(self._in_flight) > leave:
            self._complete_oldest()

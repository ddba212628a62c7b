"""The optimizer pass: read, update, publish, write, pipelined by chunk, behind the next forward.

[Note: deferred and exact]
A sweep starts when the norm and the clip factor are known, and updates units in the order in
which the forward will need them. `step()` does not wait for it; a fetch of a unit waits for that
unit's update. Nothing is stale and nothing is speculative.

[Note: pacing]
The sweep publishes a unit's new weights into a free slot, and waits for one when there is none:
it stays at most the slot count ahead of the forward, so that weights are not written, dropped
and read again. A demand for anything else lifts the pacing (see the mover).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from infinity.errors import EngineClosedError
from infinity.memory.device import Event
from infinity.memory.durability import Durability
from infinity.memory.gradients import GradientStore
from infinity.memory.host import arena_for
from infinity.memory.lanes import Lanes, after_all
from infinity.memory.mover import WAKE_S, Mover
from infinity.memory.residency import Slot
from infinity.memory.state import StateStore
from infinity.optim.built_in import KernelUpdater
from infinity.optim.tiles import Tile, Updater, moment_in
from infinity.plan.layout import Kind
from infinity.plan.plan import Plan, updated_on_device
from infinity.plan.reserve import stage_bytes
from infinity.training.stages import Stage, Work


@dataclass(frozen=True)
class SweepJob:
    """Everything one sweep depends on; captured at `step()`.

    `hypers` and `steps` are by parameter index and name exactly the parameters to update;
    `steps` counts this update, from 1. `computed` is the end of the compute that made the
    gradients, and read the weights that are about to change.
    """

    units: tuple[int, ...]
    hypers: Mapping[int, Any]
    steps: Mapping[int, int]
    grad_scale: float
    computed: Event
    document: bytes | None = None  # of a durable run: what a commit of this step holds besides


@dataclass(eq=False)
class _Commit:
    """What the sweep thread is asked to do next, and how that went."""

    run: Callable[[], SweepJob | None]
    committed: bool = False
    error: BaseException | None = None


class _AbortedError(Exception):
    """The engine is closing."""


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
        self.plan = plan
        self.durability = durability
        self.lanes = lanes
        self.store = store
        self.gradients = gradients
        self.mover = mover
        self.updater = updater
        nbytes = stage_bytes(plan)
        arena = arena_for([nbytes] * plan.num_stages)
        if nbytes:
            lanes.device.pin(arena)
        self._stages = [Stage(arena.carve(nbytes)) for _ in range(plan.num_stages)]
        # Called on the sweep thread with a unit's index before the first byte of its state
        # changes in a job; it may block. A saver copies the old bytes there.
        self.guard: Callable[[int], None] | None = None
        self._order: _Commit | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._loop, name="infinity-sweep", daemon=True)
        self._target: tuple[Slot, Tensor] | None = None
        self._published: list[Event] = []

    # --- the training thread ---------------------------------------------------------------

    def open(self) -> None:
        """Start the thread; before training, where an interruption ends in `close`."""
        self._thread.start()

    def submit(self, commit: Callable[[], SweepJob | None]) -> None:
        """Run `commit` on the sweep thread, and then, behind the caller, the job it returns.

        Signals strike the main thread only, so a commit happens whole or not at all, even if
        this call is interrupted. Returns, or raises what `commit` raised, when it is over. The
        previous job must be finished.
        """
        order = _Commit(commit)
        with self.mover.changed:
            assert self._order is None
            self._order = order
            self.mover.changed.notify_all()
        self.await_commit()
        if order.error is not None:
            raise order.error

    def await_commit(self) -> None:
        """Wait until no commit is under way; an interruption is raised only after that."""
        interrupt: BaseException | None = None
        while self._order is not None and not self._order.committed:
            try:
                with self.mover.changed:
                    self.mover.changed.wait(WAKE_S)
            except BaseException as error:
                interrupt = interrupt or error
        if interrupt is not None:
            raise interrupt

    def finish(self) -> None:
        """Lift the pacing and wait until no update is owed; raises what makes that impossible."""
        with self.lanes.stall("update"), self.mover.changed:
            self.mover.paced = False
            self.mover.changed.notify_all()
            while not self._closing and self._order is not None and self.mover.failure is None:
                self.mover.changed.wait(WAKE_S)
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
        self.mover.unlock()
        # The garbage collector may close a dropped engine on any thread, this one's too.
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join()

    @property
    def can_finish(self) -> bool:
        """Whether there is a thread to wait for: not in a forked child, nor on that thread."""
        return self._thread.is_alive() and threading.current_thread() is not self._thread

    def forget(self) -> None:
        """Drop the reserved ranges."""
        self._stages.clear()
        self._target = None

    # --- the sweep thread --------------------------------------------------------------------

    def _loop(self) -> None:
        while True:
            with self.mover.changed:
                while self._order is None and not self._closing:
                    self.mover.changed.wait(WAKE_S)  # an interruption may swallow the wake-up
                if self._closing:
                    return
                order = self._order
            assert order is not None
            job = self._commit(order)
            try:
                if job is not None:
                    self._run(job)
            except _AbortedError:
                return
            except BaseException as error:
                self.mover.fail(error)
                return
            del order, job  # they refer to the engine, which must be free to go
            with self.mover.changed:
                self._order = None
                self.mover.changed.notify_all()

    def _commit(self, order: _Commit) -> SweepJob | None:
        job = None
        try:
            job = order.run()
        except BaseException as error:
            order.error = error
        with self.mover.changed:
            order.committed = True
            self.mover.changed.notify_all()
        return job

    def _run(self, job: SweepJob) -> None:
        for unit in job.units:
            if updated_on_device(self.plan, unit):
                self.mover.updated(unit, self._update_on_device(job, unit))
        queue: deque[Work] = deque()
        order = self._chunks(job)
        turn = 0
        pending = next(order, None)
        while pending is not None or queue:
            while pending is not None and len(queue) < self.plan.num_stages - 2:
                stage = self._stages[turn % len(self._stages)]
                turn += 1
                stage.reuse()
                queue.append(self._issue(*pending, stage))
                pending = next(order, None)
            if self._closing:
                for work in queue:
                    for item in work.waits:
                        item.wait()
                raise _AbortedError
            self._process(job, queue.popleft())
        if self.durability is not None:
            self.durability.finish_step(job.document, lambda: self._closing)

    def _chunks(self, job: SweepJob) -> Iterator[tuple[int, int]]:
        """(unit, chunk) in order; a unit somebody waits for comes next."""
        remaining = [u for u in job.units if not updated_on_device(self.plan, u)]
        while remaining:
            demand = self.mover.demand
            unit = demand if demand in remaining else remaining[0]
            remaining.remove(unit)
            for chunk in range(self.plan.units[unit].num_chunks(self.plan.chunk_elements)):
                yield unit, chunk

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
            tiles += self._tiles(job, unit, views, start, count)
        pieces = self.updater.pieces(tiles, job.grad_scale)
        if self.guard is not None:
            self.guard(unit)
        event = self.lanes.device.update(pieces, job.computed)
        state.writes.append(event)
        state.turn.advance()
        return event

    def _issue(self, unit: int, chunk: int, stage: Stage) -> Work:
        """Start bringing a chunk's kinds and gradient where the CPU can update them."""
        start, count = self.plan.units[unit].chunk(chunk, self.plan.chunk_elements)
        if chunk == 0:
            self.store.settle_writes(unit)
        staged = self.store.stage(unit, chunk, stage.buffer)
        work = Work(unit, chunk, stage, staged.views, staged.waits)
        self._issue_gradient(work, start, count, stage.buffer[staged.used :])
        return work

    def _issue_gradient(self, work: Work, start: int, count: int, room: Tensor) -> None:
        gradients, itemsize = self.gradients, self.plan.gradient_itemsize
        if work.unit in gradients.ram:
            view = gradients.ram[work.unit][start : start + count].view(torch.uint8)
            work.views[Kind.GRADIENT] = view
            return
        view = room[: count * itemsize]
        work.views[Kind.GRADIENT] = view
        if work.unit in gradients.on_device:
            source = gradients.on_device[work.unit][start : start + count].view(torch.uint8)
            work.waits.append(self.lanes.copy_out(view, source))
            return
        extent = gradients.extents[work.unit].part(start * itemsize, count * itemsize)
        work.waits.append(self.lanes.read([(extent, view)]))

    def _process(self, job: SweepJob, work: Work) -> None:
        state = self.store.units[work.unit]
        start, count = state.layout.chunk(work.chunk, self.plan.chunk_elements)
        for item in work.waits:
            item.wait()
        if work.chunk == 0:
            # A copy of the old weights to the device may still read the range about to change.
            self.mover.entries[work.unit].ready.wait()
            if self.guard is not None:
                self.guard(work.unit)
        tiles = self._tiles(job, work.unit, work.views, start, count)
        if tiles:
            self.updater.update(tiles, job.grad_scale)
        if work.chunk == 0:
            self._published = []
        self._write_back(work, start, count)
        if work.chunk == 0:
            self._target = self.mover.publish_slot(work.unit)
        if self._target is not None and Kind.WEIGHT not in state.on_device:
            self._publish(work, start)
        if work.chunk + 1 == state.layout.num_chunks(self.plan.chunk_elements):
            state.turn.advance()  # whoever reads the unit from now on reads what was written
            self.mover.updated(work.unit, after_all(*self._published))

    def _tiles(
        self, job: SweepJob, unit: int, views: Mapping[Kind, Tensor], start: int, count: int
    ) -> list[Tile]:
        """The parts of parameters that lie in this chunk and have an update."""
        split = Kind.RESIDUAL in views
        weights = views[Kind.WEIGHT].view(torch.bfloat16 if split else torch.float32)
        rests = views[Kind.RESIDUAL].view(torch.int16) if split else None
        gradients = views[Kind.GRADIENT].view(self.gradients.dtype)
        precision = self.plan.precision
        moments = [
            moment_in(views[kind], count, precision.format_of(kind))
            for kind in precision.moment_kinds
        ]
        tiles = []
        for segment in self.plan.units[unit].trained_segments:
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

    def _write_back(self, work: Work, start: int, count: int) -> None:
        """Send what was updated in the stage to its home."""
        state = self.store.units[work.unit]
        if state.record.kinds:
            nbytes = state.record.nbytes(count)
            place = state.next_extents[work.chunk]
            ticket = self.lanes.write([(place, work.stage.buffer[:nbytes])])
            work.stage.busy.append(ticket)
            state.writes.append(ticket)
        for kind, home in state.on_device.items():
            target = home[self.plan.part(state.layout, kind, work.chunk)]
            event = self.lanes.copy_in(target, work.views[kind])
            work.stage.busy.append(event)
            state.writes.append(event)
            if kind is Kind.WEIGHT:
                self._published.append(event)

    def _publish(self, work: Work, start: int) -> None:
        """Copy the chunk's new weights into the unit's slot (nothing to do where they rest)."""
        assert self._target is not None
        slot, residency = self._target
        weights = work.views[Kind.WEIGHT]
        offset = start * self.plan.precision.weight
        target = residency[offset : offset + weights.numel()]
        if target.data_ptr() == weights.data_ptr():
            return
        event = self.lanes.copy_in(target, weights, slot.free_after)
        work.stage.busy.append(event)
        self._published.append(event)

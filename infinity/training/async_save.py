"""Copies of all state at rest into the streams of a checkpoint, while training goes on.

A copier thread goes through the units chunk by chunk. Before an optimizer pass, or an edit, changes
the first byte of a unit that is not copied yet, it waits for the copier (`await_copied`): nothing
is ever copied twice or kept twice, and memory is two chunks whatever the model's size, and the
weights of one unit with frozen parameters, if there are such and they are not in RAM.

Of several ranks each copies what it keeps, to its place in files that the first has made. That
needs no meeting; that all have done so is found out where the training thread meets anyway, in a
step or where somebody waits for the save, and there the first publishes the checkpoint.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from infinity.checkpoint.manifest import FROZEN
from infinity.checkpoint.ranges import RangeWriter, records_of
from infinity.checkpoint.streams import frozen_pieces, pieces
from infinity.checkpoint.writer import CheckpointWriter
from infinity.errors import InfinityWarning
from infinity.offload.state import Staged, StateStore
from infinity.plan.budget import NUM_COPY_BUFFERS, copy_buffer_bytes
from infinity.plan.layout import UnitLayout
from infinity.plan.plan import Plan
from infinity.profiling.trace_recorder import Laps
from infinity.storage.staging import BufferPool
from infinity.training.frozen_bytes import FrozenBytes, Put


@dataclass
class _Read:
    """One chunk on its way to where the host can read it."""

    chunk: int | None  # None: the unit's frozen bytes
    staged: Staged
    buffer: Tensor | None = None


@dataclass
class _Together:
    """A save of several ranks: the first one's writer, this one's part, and what publishes all."""

    writer: CheckpointWriter | None
    ranges: RangeWriter
    publish: Callable[[], object]


class Saver:
    """At most one save at a time.

    `await_copied` is for whoever changes what rests, on any thread. What went wrong behind the
    caller's back is raised by the next `finish`, and warned of by `warn`.
    """

    def __init__(self, plan: Plan, store: StateStore) -> None:
        self.frozen = FrozenBytes(plan, store)
        self._plan = plan
        self._store = store
        self._ranks = store.ranks
        self._transfers = store.transfers
        self._device = store.transfers.device
        self._pinned: BufferPool | None = None  # kept where pinning is worth it
        self._changed = threading.Condition()
        self._left: set[int] = set()  # units that are not copied yet
        self._thread: threading.Thread | None = None
        self._stop = False
        self._error: BaseException | None = None
        self._warned = False
        self._together: _Together | None = None  # of several ranks, a save that is not ended

    def start(
        self,
        writer: CheckpointWriter | None,
        ranges: RangeWriter | None,
        publish: Callable[[], object],
    ) -> None:
        """Copy all state at rest, then `publish`, on a thread; no update may be owed.

        Of several ranks, of which the first has the `writer`, each copies what it keeps to its
        `ranges`; what all have written is published by `poll`.
        """
        assert self._thread is None
        self._left = {layout.index for layout in self._plan.units}
        self._error, self._warned, self._stop = None, False, False
        if ranges is None:
            assert writer is not None
            work = partial(self._run, writer, partial(self._write, writer, publish))
        else:
            write = partial(self._write_ranges, ranges, headers=writer is not None)
            work = partial(self._run, ranges, write)
            self._together = _Together(writer, ranges, publish)
        thread = threading.Thread(target=work, name="infinity-save", daemon=True)
        self._thread = thread
        try:
            thread.start()
        except BaseException:
            if not thread.is_alive():
                self._thread, self._left, self._together = None, set(), None
            raise

    def await_copied(self, unit: int, first: Callable[[], object] = bool) -> None:
        """Wait until the unit's bytes are copied, or will not be; `first` is called before."""
        if unit in self._left:
            first()
        with self._changed:
            while unit in self._left:
                self._changed.wait()

    @property
    def busy(self) -> bool:
        """Whether a save is under way; of several ranks until `poll` has ended it."""
        if self._together is not None or self._ranks.count > 1:
            return self._together is not None
        return self._thread is not None and self._thread.is_alive()

    def finish(self) -> None:
        """Wait for the save that is under way; raises what made it fail, once."""
        if self._thread is not None:
            self._thread.join()
        self.poll("waits for a checkpoint")
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def poll(self, doing: str = "looks after a checkpoint") -> None:
        """End a save of several ranks, which all call this, if each has ended its part of it."""
        together, ranks = self._together, self._ranks
        if together is None or self._thread is None:
            return
        over = 0 if self._thread.is_alive() else 1 if self._error is None else 2
        states = [state for state, *_ in ranks.synchronize(doing, over)]
        if 2 not in states and 0 in states:
            return
        self._together = None
        self._stop = True
        self._thread.join()
        try:
            with ranks.collective_section("saves a checkpoint"):
                if self._error is not None:
                    raise self._error
            rows = together.ranges.rows
            ranges = torch.cat(ranks.gather_ragged(rows.view(-1))).view(-1, rows.shape[1])
            with ranks.collective_section("saves a checkpoint"):
                if together.writer is not None:
                    together.writer.adopt(records_of(ranges, together.ranges.streams))
                    together.publish()
            writer = together.writer
            self.frozen.published(None if writer is None else writer.written)
        except Exception as error:
            self._error = error.with_traceback(None)
        finally:
            if together.writer is not None:
                together.writer.abort()  # which does nothing where it is published

    def warn(self) -> None:
        """Warn, once, of a save that failed."""
        self.poll()
        if self._error is not None and not self._warned:
            self._warned = True
            warnings.warn(
                f"the last checkpoint was not saved: {self._error}", InfinityWarning, stacklevel=3
            )

    def abort(self) -> None:
        """Abort the save in progress; its files are removed."""
        self._stop = True
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        together, self._together = self._together, None
        if together is not None and together.writer is not None:
            together.writer.abort()

    # --- the copier thread -------------------------------------------------------------------

    def _run(self, part: CheckpointWriter | RangeWriter, write: Callable[[], None]) -> None:
        """Write a part, or nothing of it where that fails."""
        try:
            self._device.attach_worker_thread()
            write()
        except BaseException as error:
            part.abort()
            if not isinstance(error, _StoppedError):
                # Frames would keep what they refer to alive.
                self._error = error.with_traceback(None)
        finally:
            with self._changed:
                self._left.clear()
                self._changed.notify_all()

    def _write(self, writer: CheckpointWriter, publish: Callable[[], object]) -> None:
        self.frozen.check(writer)
        frozen = not writer.shares(FROZEN)
        self._copy(lambda piece, data: writer.write(piece.stream, data), frozen=frozen)
        laps = Laps(self._transfers.trace)
        publish()
        self.frozen.published(writer.written)
        laps.lap("saving", "publish the checkpoint")

    def _write_ranges(self, ranges: RangeWriter, *, headers: bool) -> None:
        if headers:
            ranges.write_headers()
        frozen = FROZEN in ranges.streams
        self._copy(lambda p, data: ranges.write(p.stream, p.name, p.first, data), frozen=frozen)
        ranges.finish()

    def _copy(self, put: Put, *, frozen: bool) -> None:
        buffers = self._buffers()
        order = [
            (layout, chunk)
            for layout in self._plan.local_units
            for chunk in (*range(layout.num_chunks(self._plan.chunk_elements)), None)
        ]
        read, ahead = None, self._issue(*order[0], buffers) if order else None
        try:
            for number, (layout, _) in enumerate(order):
                if self._stop:
                    raise _StoppedError
                read, ahead = ahead, None
                if number + 1 < len(order):  # one chunk is read while the one before is written
                    ahead = self._issue(*order[number + 1], buffers)
                assert read is not None
                self._copy_one(put, layout, read, frozen=frozen)
                if read.buffer is not None:
                    buffers.give_back(read.buffer)
                read = None
        finally:  # after an error two may be under way
            for left in (read, ahead):
                if left is not None and left.buffer is not None:
                    buffers.give_back(left.buffer, *left.staged.waits)
            buffers.settle()

    def _copy_one(self, put: Put, layout: UnitLayout, read: _Read, *, frozen: bool) -> None:
        laps = Laps(self._transfers.trace, layout.index)
        for item in read.staged.waits:
            item.wait()
        laps.lap("saving", "save: wait for state")
        if read.chunk is not None:
            for kind, view in read.staged.views.items():
                for piece in pieces(self._plan, layout, read.chunk, kind):
                    put(piece, view[piece.byte_range])
        elif frozen and layout.frozen_bytes:
            self._write_frozen(put, layout)
        views = read.staged.views.values()
        laps.lap("saving", "save: write", sum(view.numel() for view in views))
        if read.chunk is None:
            with self._changed:
                self._left.discard(layout.index)
                self._changed.notify_all()

    def forget(self) -> None:
        """Drop the buffers that are kept."""
        self._pinned = None

    def _buffers(self) -> BufferPool:
        if self._pinned is not None:
            return self._pinned
        nbytes, device = copy_buffer_bytes(self._plan), self._device
        if device.unified:
            return BufferPool(NUM_COPY_BUFFERS, nbytes)
        # Not pinned, a copy from the device would hold up the stream that gradients leave by.
        self._pinned = BufferPool(NUM_COPY_BUFFERS, nbytes, device)
        return self._pinned

    def _issue(self, layout: UnitLayout, chunk: int | None, buffers: BufferPool) -> _Read:
        """Start bringing a chunk's kinds where the host can read them."""
        if chunk is None:
            return _Read(None, Staged({}, []))
        buffer = buffers.take()
        return _Read(chunk, self._store.stage(layout.index, chunk, buffer), buffer)

    def _write_frozen(self, put: Put, layout: UnitLayout) -> None:
        plan, frozen = self._plan, self.frozen.read(layout)
        self.frozen.note(layout, frozen)
        rank = plan.rank if plan.ranks > 1 else None
        for piece in frozen_pieces(plan.units[layout.index], rank):
            put(piece, frozen[piece.byte_range])


class _StoppedError(Exception):
    """The engine is closing."""

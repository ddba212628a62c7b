"""Asynchronous saves: a thread copies all stored state to a checkpoint while training goes on.

The copier thread goes through the units chunk by chunk. Before an optimizer pass or an edit changes
the first byte of a unit that is not copied yet, it waits for the copier (`wait_until_copied`). So
no state is copied or stored twice, and memory is two chunks at any model size, plus the weights of
one unit if it has frozen parameters that are not in RAM.

With several ranks, each copies its local shards to their offsets in files that rank 0 has created,
without synchronization. Completion on all ranks is detected at the next synchronization of the
training thread, in a step or when a caller waits for the save; rank 0 then publishes the
checkpoint.
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
from infinity.checkpoint.ranges import RangeWriter, combine_file_records
from infinity.checkpoint.streams import frozen_ranges, pieces
from infinity.checkpoint.writer import CheckpointWriter
from infinity.errors import InfinityWarning
from infinity.offload.state import Staged, StateStore
from infinity.plan.budget import NUM_COPY_BUFFERS, copy_buffer_bytes
from infinity.plan.layout import UnitLayout
from infinity.plan.plan import Plan
from infinity.profiling.trace_recorder import Laps
from infinity.storage.staging import BufferPool
from infinity.training.frozen_bytes import FrozenBytes, WriteRange

Publish = Callable[[CheckpointWriter], object]


@dataclass
class _ChunkRead:
    """A chunk that is being read into memory that the host can access."""

    chunk: int | None  # None for the frozen bytes of the unit
    staged: Staged
    buffer: Tensor | None = None


@dataclass
class _RangeSave:
    """State of a save of ranges; only rank 0 has a `writer`, and calls `publish` at the end."""

    writer: CheckpointWriter | None
    ranges: RangeWriter
    publish: Publish


class Saver:
    """Background saver of checkpoints, with at most one save at a time.

    Any thread calls `wait_until_copied` before it changes stored state. An error of the background
    thread is raised by the next `finish`, and reported as a warning by `warn`.
    """

    def __init__(self, plan: Plan, store: StateStore) -> None:
        self.frozen = FrozenBytes(plan, store)
        self._plan = plan
        self._store = store
        self._ranks = store.ranks
        self._transfers = store.transfers
        self._device = store.transfers.device
        self._pinned: BufferPool | None = None  # retained between saves
        self._changed = threading.Condition()
        self._uncopied: set[int] = set()  # units not copied yet
        self._thread: threading.Thread | None = None
        self._stop = False
        self._error: BaseException | None = None
        self._warned = False
        self._range_save: _RangeSave | None = None  # a save of ranges that has not ended

    def start(
        self,
        writer: CheckpointWriter | None,
        ranges: RangeWriter | None,
        publish: Publish,
    ) -> None:
        """Start a thread that copies all stored state and then calls `publish` with the writer.

        No update may be pending. With `ranges`, each rank writes its local state to them, only
        rank 0 has the `writer`, and `poll` publishes when all ranks have finished writing.
        """
        assert self._thread is None
        self._uncopied = {layout.index for layout in self._plan.units}
        self._error, self._warned, self._stop = None, False, False
        if ranges is None:
            assert writer is not None
            target = partial(self._run, writer, partial(self._write, writer, publish))
        else:
            write = partial(self._write_ranges, ranges, headers=writer is not None)
            target = partial(self._run, ranges, write)
            self._range_save = _RangeSave(writer, ranges, publish)
        thread = threading.Thread(target=target, name="infinity-save", daemon=True)
        self._thread = thread
        try:
            thread.start()
        except BaseException:
            if not thread.is_alive():
                self._thread, self._uncopied, self._range_save = None, set(), None
            raise

    def wait_until_copied(self, unit: int, first: Callable[[], object] = bool) -> None:
        """Block until the unit is copied or the save has ended; call `first` before blocking."""
        if unit in self._uncopied:
            first()
        with self._changed:
            while unit in self._uncopied:
                self._changed.wait()

    @property
    def busy(self) -> bool:
        """Whether a save is in progress; a save of ranges is until `poll` has ended it."""
        if self._range_save is not None or self._ranks.count > 1:
            return self._range_save is not None
        return self._thread is not None and self._thread.is_alive()

    def finish(self) -> None:
        """Block until the save in progress has ended; raise its error, once."""
        if self._thread is not None:
            self._thread.join()
        self.poll("waits for a checkpoint")
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def poll(self, doing: str = "looks after a checkpoint") -> None:
        """End a save of ranges if all ranks have written theirs, or one failed. Collective."""
        save, ranks = self._range_save, self._ranks
        if save is None or self._thread is None:
            return
        status = 0 if self._thread.is_alive() else 1 if self._error is None else 2
        statuses = [rank_status for rank_status, *_ in ranks.synchronize(doing, status)]
        if 2 not in statuses and 0 in statuses:
            return
        self._range_save = None
        self._stop = True
        self._thread.join()
        try:
            with ranks.collective_section("saves a checkpoint"):
                if self._error is not None:
                    raise self._error
            rows = save.ranges.rows
            ranges = torch.cat(ranks.gather_ragged(rows.view(-1))).view(-1, rows.shape[1])
            with ranks.collective_section("saves a checkpoint"):
                if save.writer is not None:
                    save.writer.adopt(combine_file_records(ranges, save.ranges.streams))
                    save.publish(save.writer)
            writer = save.writer
            self.frozen.published(None if writer is None else writer.written)
        except Exception as error:
            self._error = error.with_traceback(None)
        finally:
            if save.writer is not None:
                save.writer.abort()  # no effect once published

    def warn(self) -> None:
        """Emit a warning, once, if the last save failed."""
        self.poll()
        if self._error is not None and not self._warned:
            self._warned = True
            _warn_not_saved(self._error, stacklevel=4)

    def end(self) -> None:
        """Complete the save in progress for an engine that was not closed; warn if it is lost.

        With several ranks it is lost: completion is collective, and others may be gone already.
        """
        if self._thread is None or self._thread is threading.current_thread():
            return
        save = self._range_save
        if save is not None and self._ranks.count > 1:
            if save.writer is not None:  # one rank warns
                _warn_not_saved(
                    "ranks complete it together, in engine.finish_saving() or engine.close()"
                )
            return
        try:
            self.finish()
        except Exception as error:
            if not self._warned:
                _warn_not_saved(error)

    def abort(self) -> None:
        """Cancel the save in progress and remove its files."""
        self._stop = True
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        save, self._range_save = self._range_save, None
        if save is not None and save.writer is not None:
            save.writer.abort()

    # --- the copier thread -------------------------------------------------------------------

    def _run(self, writer: CheckpointWriter | RangeWriter, write: Callable[[], None]) -> None:
        """Call `write`; on an error abort `writer` and store the error for `finish`."""
        try:
            self._device.attach_worker_thread()
            write()
        except BaseException as error:
            writer.abort()
            if not isinstance(error, _StoppedError):
                # The traceback's frames would keep their locals alive.
                self._error = error.with_traceback(None)
        finally:
            with self._changed:
                self._uncopied.clear()
                self._changed.notify_all()

    def _write(self, writer: CheckpointWriter, publish: Publish) -> None:
        self.frozen.check(writer)
        frozen = not writer.shares(FROZEN)
        self._copy(lambda piece, data: writer.write(piece.stream, data), frozen=frozen)
        laps = Laps(self._transfers.trace)
        publish(writer)
        self.frozen.published(writer.written)
        laps.lap("saving", "publish the checkpoint")

    def _write_ranges(self, ranges: RangeWriter, *, headers: bool) -> None:
        if headers:
            ranges.write_headers()
        frozen = FROZEN in ranges.streams
        self._copy(lambda p, data: ranges.write(p.stream, p.name, p.first, data), frozen=frozen)
        ranges.finish()

    def _copy(self, write_range: WriteRange, *, frozen: bool) -> None:
        buffers = self._pinned
        if buffers is None:
            # A copy from the device to pageable memory would block the stream of gradient copies.
            pinned_for = None if self._device.unified else self._device
            buffers = BufferPool(NUM_COPY_BUFFERS, copy_buffer_bytes(self._plan), pinned_for)
            self._pinned = None if self._device.unified else buffers
        order = [
            (layout, chunk)
            for layout in self._plan.local_units
            for chunk in (*range(layout.num_chunks(self._plan.chunk_elements)), None)
        ]
        read, next_read = None, self._start_read(*order[0], buffers) if order else None
        try:
            for index, (layout, _) in enumerate(order):
                if self._stop:
                    raise _StoppedError
                read, next_read = next_read, None
                if index + 1 < len(order):  # read a chunk while the previous one is written
                    next_read = self._start_read(*order[index + 1], buffers)
                assert read is not None
                self._copy_one(write_range, layout, read, frozen=frozen)
                if read.buffer is not None:
                    buffers.give_back(read.buffer)
                read = None
        finally:  # after an error up to two reads are in flight
            for pending in (read, next_read):
                if pending is not None and pending.buffer is not None:
                    buffers.give_back(pending.buffer, *pending.staged.waits)
            buffers.settle()

    def _copy_one(
        self, write_range: WriteRange, layout: UnitLayout, read: _ChunkRead, *, frozen: bool
    ) -> None:
        laps = Laps(self._transfers.trace, layout.index)
        for event in read.staged.waits:
            event.wait()
        laps.lap("saving", "save: wait for state")
        if read.chunk is not None:
            for kind, view in read.staged.views.items():
                for piece in pieces(self._plan, layout, read.chunk, kind):
                    write_range(piece, view[piece.byte_range])
        elif frozen and layout.frozen_bytes:
            frozen_bytes = self.frozen.read(layout)
            self.frozen.note(layout, frozen_bytes)
            rank = self._plan.rank if self._plan.ranks > 1 else None
            for piece in frozen_ranges(self._plan.units[layout.index], rank):
                write_range(piece, frozen_bytes[piece.byte_range])
        views = read.staged.views.values()
        laps.lap("saving", "save: write", sum(view.numel() for view in views))
        if read.chunk is None:
            with self._changed:
                self._uncopied.discard(layout.index)
                self._changed.notify_all()

    def free(self) -> None:
        """Free the retained buffers."""
        self._pinned = None

    def _start_read(self, layout: UnitLayout, chunk: int | None, buffers: BufferPool) -> _ChunkRead:
        """Start reading the kinds of a chunk into memory that the host can access."""
        if chunk is None:
            return _ChunkRead(None, Staged({}, []))
        buffer = buffers.take()
        return _ChunkRead(chunk, self._store.stage(layout.index, chunk, buffer), buffer)


def _warn_not_saved(problem: object, stacklevel: int = 3) -> None:
    warnings.warn(
        f"the last checkpoint was not saved: {problem}", InfinityWarning, stacklevel=stacklevel
    )


class _StoppedError(Exception):
    """Raised on the copier thread when the save is canceled."""

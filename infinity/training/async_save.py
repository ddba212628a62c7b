"""Copies of all state at rest into the streams of a checkpoint, while training goes on.

A copier thread goes through the units chunk by chunk. Before an optimizer pass, or an edit, changes
the first byte of a unit that is not copied yet, it waits for the copier (`await_copied`): nothing
is ever copied twice or kept twice, and memory is two chunks whatever the model's size, and the
weights of one unit with frozen parameters, if there are such and they are not in RAM.

Of several ranks the first writes what all read. That goes on at once, on the training thread: bytes
between ranks are its business alone.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from infinity.checkpoint.manifest import FROZEN
from infinity.checkpoint.streams import frozen_pieces, pieces
from infinity.checkpoint.writer import CheckpointWriter, Written, checksums
from infinity.errors import InfinityWarning
from infinity.offload.state import Staged, StateStore
from infinity.plan.budget import NUM_COPY_BUFFERS, copy_buffer_bytes
from infinity.plan.layout import Kind, Tier, UnitLayout
from infinity.plan.plan import Plan
from infinity.storage.staging import BufferPool

# Whether the frozen parameters of the next checkpoint are, byte for byte, those of the last one.
#
# Most of them change only through `StateStore.write`, which counts. Where weights rest on the
# device modules compute with the very bytes at rest, and `p.data.add_(1)` changes them unseen:
# of those units checksums are kept, and compared before anything is shared.


Sums = dict[int, tuple[int, ...]]


@dataclass(frozen=True)
class _Last:
    """The last checkpoint: its files, and what frozen bytes were then."""

    written: Written
    edition: int
    sums: Sums


class FrozenBytes:
    """Follows the frozen bytes of one engine from save to save."""

    def __init__(self, plan: Plan, store: StateStore) -> None:
        self._plan = plan
        self._store = store
        self._last: _Last | None = None
        self._edition = 0  # of the save that is under way
        self._sums: Sums = {}

    def begin(self) -> Written | None:
        """A snapshot is taken now; the checkpoint whose frozen files it may share, if any."""
        self._edition, self._sums = self._store.frozen_edition, {}
        last = self._last
        return last.written if last is not None and last.edition == self._edition else None

    def check(self, writer: CheckpointWriter) -> None:
        """Before anything is copied: if frozen bytes changed unseen, they are written after all."""
        if not writer.shares(FROZEN):
            return
        assert self._last is not None
        for layout in self._plan.units:
            if self._is_bare(layout):
                self.note(layout, self.read(layout))
        if self._sums != self._last.sums:
            writer.unshare(FROZEN)
            self._sums = {}

    def read(self, layout: UnitLayout) -> Tensor:
        """The frozen bytes of a unit (uint8), where they rest or a copy."""
        weights = self._store.units[layout.index].in_ram(Kind.WEIGHT)
        if weights is None:
            weights = self._store.read(layout.index, Kind.WEIGHT)
        return weights[layout.trained_bytes : layout.trained_bytes + layout.frozen_bytes]

    def note(self, layout: UnitLayout, frozen: Tensor) -> None:
        """A unit's frozen bytes, as they are in the checkpoint."""
        if self._is_bare(layout):
            self._sums[layout.index] = checksums(frozen)

    def published(self, written: Written | None) -> None:
        """The checkpoint is there."""
        self._last = _Last(written, self._edition, self._sums) if written is not None else None

    def _is_bare(self, layout: UnitLayout) -> bool:
        """Whether modules compute with the bytes at rest themselves."""
        at = self._plan.placements[layout.index].weight
        return bool(layout.frozen_bytes) and at is Tier.DEVICE


@dataclass
class _Read:
    """One chunk on its way to where the host can read it."""

    chunk: int | None  # None: the unit's frozen bytes
    staged: Staged
    buffer: Tensor | None = None


class Saver:
    """At most one save at a time.

    `await_copied` is for whoever changes what rests, on any thread. What went wrong behind the
    caller's back is raised by the next `finish`, and warned of by `warn`.
    """

    def __init__(self, plan: Plan, store: StateStore) -> None:
        self.frozen = FrozenBytes(plan, store)
        self._plan = plan
        self._store = store
        self._pinned: BufferPool | None = None  # kept where pinning is worth it
        self._changed = threading.Condition()
        self._left: set[int] = set()  # units that are not copied yet
        self._thread: threading.Thread | None = None
        self._stop = False
        self._error: BaseException | None = None
        self._warned = False

    def start(self, writer: CheckpointWriter | None, publish: Callable[[], object]) -> None:
        """Copy all state at rest, then `publish`, on a thread; no update may be owed.

        Of several ranks, of which the first has the `writer`, at once; then it raises.
        """
        assert self._thread is None
        if writer is None or self._store.ranks.count > 1:
            self._copy_together(writer)
            publish()
            return
        self._left = {layout.index for layout in self._plan.units}
        self._error, self._warned, self._stop = None, False, False
        thread = threading.Thread(
            target=self._run, args=(writer, publish), name="infinity-save", daemon=True
        )
        self._thread = thread
        try:
            thread.start()
        except BaseException:
            if not thread.is_alive():
                self._thread, self._left = None, set()
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
        """Whether a save is under way."""
        return self._thread is not None and self._thread.is_alive()

    def finish(self) -> None:
        """Wait for the save that is under way; raises what made it fail, once."""
        if self._thread is not None:
            self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def warn(self) -> None:
        """Warn, once, of a save that failed."""
        if self._error is not None and not self._warned:
            self._warned = True
            warnings.warn(
                f"the last checkpoint was not saved: {self._error}", InfinityWarning, stacklevel=3
            )

    def abort(self) -> None:
        """Give up the save that is under way; nothing of it stays."""
        self._stop = True
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    # --- the copier thread -------------------------------------------------------------------

    def _run(self, writer: CheckpointWriter, publish: Callable[[], object]) -> None:
        try:
            self._store.transfers.device.follow_compute()
            self.frozen.check(writer)
            self._copy(writer)
            trace = self._store.transfers.trace
            laps = None if trace is None else trace.laps()
            publish()
            self.frozen.published(writer.written)
            if laps is not None:
                laps.lap("saving", "publish the checkpoint")
        except _StoppedError:
            writer.abort()
        except BaseException as error:
            writer.abort()
            # Frames would keep what they refer to alive.
            self._error = error.with_traceback(None)
        finally:
            with self._changed:
                self._left.clear()
                self._changed.notify_all()

    def _copy(self, writer: CheckpointWriter) -> None:
        buffers = self._buffers()
        order = [
            (layout, chunk)
            for layout in self._plan.units
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
                self._copy_one(writer, layout, read)
                if read.buffer is not None:
                    buffers.give_back(read.buffer)
                read = None
        finally:  # after an error two may be under way
            for left in (read, ahead):
                if left is not None and left.buffer is not None:
                    buffers.give_back(left.buffer, *left.staged.waits)
            buffers.settle()

    def _copy_together(self, writer: CheckpointWriter | None) -> None:
        """Every rank's chunks, in the order of their bytes in the checkpoint."""
        buffers = self._buffers()
        buffer, sent = buffers.take(), buffers.take()
        try:
            for layout in self._plan.units:
                for rank in range(layout.shards):
                    self._copy_shard(writer, layout, rank, buffer, sent)
                if layout.frozen_bytes:
                    whole = self._store.read(layout.index, Kind.WEIGHT)
                    if writer is not None:
                        frozen = whole[layout.trained_bytes :]
                        for piece in frozen_pieces(layout):
                            writer.write(piece.stream, frozen[piece.place])
        finally:
            buffers.give_back(buffer)
            buffers.give_back(sent)

    def _copy_shard(
        self,
        writer: CheckpointWriter | None,
        layout: UnitLayout,
        rank: int,
        buffer: Tensor,
        sent: Tensor,
    ) -> None:
        """What one rank keeps of a unit, which it sends to all; two buffers for a chunk each."""
        plan, ranks, record = self._plan, self._store.ranks, self._plan.whole_record
        shard = layout.of_shard(rank)
        for chunk, (_, count) in enumerate(shard.chunks(plan.chunk_elements)):
            data = sent[: record.nbytes(count)]
            if rank == ranks.rank:
                staged = self._store.stage(layout.index, chunk, buffer)
                for item in staged.waits:
                    item.wait()
                torch.cat([staged.views[kind] for kind in record.kinds], out=data)
            ranks.meet(f"saves unit {layout.name!r}")
            ranks.broadcast(data, rank)
            if writer is None:
                continue
            for kind in record.kinds:
                part = data[record.offset(kind, count) :]
                for piece in pieces(plan, shard, chunk, kind):
                    writer.write(piece.stream, part[piece.place])

    def _copy_one(self, writer: CheckpointWriter, layout: UnitLayout, read: _Read) -> None:
        trace = self._store.transfers.trace
        laps = None if trace is None else trace.laps(layout.index)
        for item in read.staged.waits:
            item.wait()
        if laps is not None:
            laps.lap("saving", "save: wait for state")
        self._write(writer, layout, read)
        if laps is not None:
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
        nbytes, device = copy_buffer_bytes(self._plan), self._store.transfers.device
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

    def _write(self, writer: CheckpointWriter, layout: UnitLayout, read: _Read) -> None:
        if read.chunk is None:
            self._write_frozen(writer, layout)
            return
        for kind, view in read.staged.views.items():
            for piece in pieces(self._plan, layout, read.chunk, kind):
                writer.write(piece.stream, view[piece.place])

    def _write_frozen(self, writer: CheckpointWriter, layout: UnitLayout) -> None:
        if not layout.frozen_bytes or writer.shares(FROZEN):
            return
        frozen = self.frozen.read(layout)
        self.frozen.note(layout, frozen)
        for piece in frozen_pieces(layout):
            writer.write(piece.stream, frozen[piece.place])


class _StoppedError(Exception):
    """The engine is closing."""

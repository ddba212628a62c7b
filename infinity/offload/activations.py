"""Saved tensors that wait for backward away from the device: in a pinned pool, or on disk.

[Note: memory of a graph]
Autograd is handed an `Away`, which is no more than a number: it keeps nothing of the engine's
memory alive. A graph may be dropped anywhere, by any thread; that its numbers are dead is seen,
and their places are taken back, when the next tensor is saved or restored.
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from infinity.errors import EngineClosedError, TransferError
from infinity.model.torch_private import TensorIdentity
from infinity.offload.transfers import Transfers
from infinity.plan.saved_plan import TRANSIT, Ranges, SavedPlan, tiers_of
from infinity.profiling.trace_recorder import NO_UNIT
from infinity.storage.device import HAPPENED, Event, after_all
from infinity.storage.disk import Extent
from infinity.storage.host_arena import HostArena
from infinity.storage.staging import host_buffer
from infinity.storage.store import Priority
from infinity.types import PAGE, Tier, round_up

LABEL = (NO_UNIT, "activation")


class Away:
    """What autograd holds in the place of a saved tensor; `tensor` only where it stayed."""

    __slots__ = ("__weakref__", "number", "tensor")

    def __init__(self, number: int) -> None:
        self.number = number
        self.tensor: Tensor | None = None


@dataclass(eq=False, slots=True)
class SavedTensor:
    """One saved tensor: its shape, its place, and its requests."""

    away: weakref.ref[Away]
    order: int  # of saving; backward comes the other way round
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size
    version: int
    identity: TensorIdentity
    uses: int = 1
    tier: Tier = Tier.DEVICE
    span: int | None = None  # in the pool
    extent: int | None = None  # on disk
    buffer: Tensor | None = None  # where the pool has no room for what comes back
    source: Tensor | None = None  # the tensor itself, until it has been copied out
    left: Event | None = None  # the end of that copy; None: it has not begun
    writing: Event | None = None
    written: bool = False
    reading: Event | None = None
    fetched: Tensor | None = None
    ready: Event = HAPPENED
    modified: bool = False  # while it was copied out
    given: bool = False  # back to backward, once at least

    def end_requests(self) -> None:
        """Wait for disk requests, ignoring their results."""
        for ticket in (self.writing, self.reading):
            if ticket is not None:
                with suppress(TransferError):
                    ticket.wait()
                if not ticket.done():  # stuck: the span is the kernel's for good
                    self.span = None


class ActivationStore:
    """Takes saved tensors and gives them back; used by one thread at a time.

    `sizes` are those of the last micro-batch whose graph is gone, in the order of saving.
    """

    def __init__(self, plan: SavedPlan, transfers: Transfers) -> None:
        assert plan.offload is not None
        self.plan = plan
        self.transfers = transfers
        self._device = transfers.device
        self.sizes = plan.sizes
        self._arena: HostArena | None = HostArena(plan.host_bytes)
        transfers.device.pin(self._arena)
        self._extent = None
        if plan.disk_bytes:
            assert transfers.disk is not None
            self._extent = transfers.disk.extent(plan.disk_bytes, "activations")
        self._pool = Ranges(plan.host_bytes)
        self._disk = Ranges(plan.disk_bytes)
        self._records: dict[int, SavedTensor] = {}
        self._known: dict[TensorIdentity, weakref.ref[Away]] = {}
        self._retired: list[tuple[Event, int | None, int, object]] = []  # see `_bury`
        self._going: list[SavedTensor] = []
        self._coming: list[SavedTensor] = []
        self._seen: list[int] = []
        self._next = 0
        self.num_saved = 0  # since the start

    # --- forward: a tensor is saved --------------------------------------------------------------

    def save(self, tensor: Tensor) -> Away | None:
        """Take a tensor that autograd saves; None where that is not for us.

        Small ones, scattered ones, and what needs no gradient (masks, tables of positions) stay:
        the latter are given to every block.
        """
        nbytes = tensor.numel() * tensor.element_size()
        dense = tensor.is_contiguous() and tensor.device == self._device.torch_device
        dense = dense and tensor.requires_grad and not (tensor.is_conj() or tensor.is_neg())
        if self._arena is None or not dense or nbytes < max(self.plan.min_bytes, 1):
            return None
        self.poll()
        self._drain()
        identity = TensorIdentity(tensor)
        number, self._next = self._next, self._next + 1
        known = self._known.get(identity)
        away = known() if known is not None else None
        if away is not None:  # several blocks were given it: needed first by the last of them
            record = self._records[away.number]
            record.uses, record.order = record.uses + 1, number
            return away
        away = Away(number)
        record = SavedTensor(
            weakref.ref(away), number, nbytes, tensor.dtype, tensor.shape, tensor._version, identity
        )
        self._records[number] = record
        tier = self._tier_of(nbytes)
        self._seen.append(nbytes)
        if not self._send(record, tensor.detach(), tier):
            away.tensor = tensor.detach()
        self._known[identity] = weakref.ref(away)
        self.num_saved += 1
        return away

    def _tier_of(self, nbytes: int) -> Tier:
        """Where the next tensor waits: as expected, else wherever there is room."""
        index, plan = len(self._seen), self.plan
        if index < len(self.sizes) and self.sizes[index] == nbytes:
            return tiers_of(self.sizes, plan)[index]
        rounded = round_up(nbytes, PAGE)
        if rounded > plan.host_bytes:
            return Tier.DEVICE
        if plan.offload is Tier.HOST:
            return Tier.HOST
        free = self._pool.free_bytes
        return Tier.HOST if free >= (1 + TRANSIT) * rounded else Tier.DISK

    def _send(self, record: SavedTensor, source: Tensor, tier: Tier) -> bool:
        """Start the way out; False where there is no room."""
        if tier is Tier.DEVICE:
            return False
        if tier is Tier.DISK:
            record.extent = self._disk.take(record.nbytes)
            if record.extent is None:
                return False
        record.span = self._take(record.nbytes)
        if record.span is None:
            if record.extent is not None:
                self._disk.give(record.extent, record.nbytes)
                record.extent = None
            return False
        record.source, record.tier = source, tier
        target = self._buffer(record)[: record.nbytes]
        record.left = self.transfers.copy_d2h(target, _bytes(source), label=LABEL)
        self._going.append(record)
        self._advance(record)
        self._keep_few()
        return True

    def _keep_few(self) -> None:
        """Wait for the oldest copies, so that no more tensors are kept for them than is planned.

        Compute is asked for long before it happens: without this they would all be kept.
        """
        leaving = [record for record in self._going if record.source is not None]
        for record in leaving[:-TRANSIT]:
            assert record.left is not None
            with self.transfers.stall("copy"):
                record.left.wait()
            self._advance(record)

    def _advance(self, record: SavedTensor, *, wait: bool = False) -> bool:
        """Push on with the way out; whether it is over."""
        if record.source is not None:
            assert record.left is not None
            if not record.left.done():
                if not wait:
                    return False
                with self.transfers.stall("copy"):
                    record.left.wait()
            record.modified = record.source._version != record.version
            record.source = None
        if record.tier is Tier.DISK and not record.written:
            if record.writing is None:
                piece = self._part(record), self._buffer(record)
                record.writing = self.transfers.write([piece], label=LABEL)
            if not record.writing.done() and not wait:
                return False
            try:
                with self.transfers.stall("disk_write"):
                    record.writing.wait()
            except TransferError:
                record.tier, record.writing = Tier.HOST, None  # there it still is
                raise
            record.written, record.writing = True, None
            self._retire(record)
        if record in self._going:
            self._going.remove(record)
        return True

    # --- backward: it is wanted ------------------------------------------------------------------

    def restore(self, away: Away) -> Tensor:
        """The saved tensor: the one that stayed, or a new one with its values.

        Raises `EngineClosedError` or `TransferError`.
        """
        self.poll()
        self._drain()
        record = self._records.get(away.number)
        if self._arena is None or record is None:
            raise graph_of_closed_engine()
        if away.tensor is not None:
            _check_version(away.tensor._version != record.version, record.shape)
            return away.tensor
        if record.source is not None:  # its way out is not over: it may have taken new values
            _check_version(record.source._version != record.version, record.shape)
        self._start(record, wait=True)
        self._prefetch(record)
        self._land(record)
        _check_version(record.modified, record.shape)
        if not record.ready.done():
            with self.transfers.stall("copy"):
                self._device.compute_wait(record.ready)
        tensor = record.fetched
        assert tensor is not None
        record.given = True
        if record.uses == 1:
            record.fetched = None
        return tensor

    def _prefetch(self, record: SavedTensor) -> None:
        """Start to read the record saved before this one."""
        records = self._records.values()
        before = [r for r in records if r.order < record.order and r.left and not r.given]
        for other in sorted(before, key=lambda r: r.order)[-AHEAD:]:
            self._start(other, wait=False)

    def _start(self, record: SavedTensor, *, wait: bool) -> None:
        """Start the way back, unless it is under way; without `wait` only where nothing waits."""
        if record.fetched is not None or record.reading is not None:
            return
        if record.tier is Tier.HOST:
            self._copy_in(record)
            return
        if not self._advance(record, wait=wait):
            return
        record.span = self._take(record.nbytes, wait=wait)
        if record.span is None:
            if not wait:
                return
            record.buffer = host_buffer(round_up(record.nbytes, PAGE))
        piece = self._part(record), self._buffer(record)
        priority = Priority.URGENT if wait else Priority.NORMAL
        record.reading = self.transfers.read([piece], priority, LABEL)
        self._coming.append(record)

    def _land(self, record: SavedTensor) -> None:
        """Second half of disk -> device."""
        if record.reading is None:
            return
        with self.transfers.stall("disk_read"):
            record.reading.wait()
        self._copy_in(record)
        record.reading = None
        self._retire(record)
        if record in self._coming:
            self._coming.remove(record)

    def _copy_in(self, record: SavedTensor) -> None:
        device = self._device
        target = torch.empty(record.shape, dtype=record.dtype, device=device.torch_device)
        # What was in the target's memory may still be computed with, and the way out under way.
        after = after_all(device.compute_event(), record.left or HAPPENED)
        source = self._buffer(record)[: record.nbytes]
        record.ready = self.transfers.copy_h2d(_bytes(target), source, after, LABEL)
        record.fetched = target

    def poll(self) -> None:
        """Push on what can be pushed on without waiting; called often from hooks."""
        for record in list(self._going):
            self._advance(record)
        for record in list(self._coming):
            if record.reading is not None and record.reading.done():
                self._land(record)

    def _take(self, nbytes: int, *, wait: bool = True) -> int | None:
        """A span of the pool; with `wait` after whatever will make room for it."""
        while True:
            self._drain()
            self._reap()
            span = self._pool.take(nbytes)
            if span is not None or not wait:
                return span
            to_disk = next((r for r in self._going if r.tier is Tier.DISK), None)
            if self._retired:
                with self.transfers.stall("copy"):
                    self._retired[0][0].wait()
            elif to_disk is not None:
                self._advance(to_disk, wait=True)
            elif self._coming:
                self._land(self._coming[0])
            else:
                return None

    def recover(self) -> None:
        """After an exception in a call: what failed on its way is asked for again."""
        for record in list(self._coming):
            record.end_requests()
            record.reading = None
            self._coming.remove(record)
            self._retire(record)
        for record in list(self._going):
            with suppress(TransferError):  # then it stays in the pool
                self._advance(record, wait=True)
        self._seen = []

    # --- records, and the room they hold ---------------------------------------------------------

    def write_once(self) -> None:
        """Write the extent, before training: a first write of reserved space is a slow one."""
        if self._extent is None or self._arena is None:
            return
        for start in range(0, self._extent.nbytes, self._arena.nbytes):
            nbytes = min(self._arena.nbytes, self._extent.nbytes - start)
            piece = self._extent.part(start, nbytes), self._arena.view(0, nbytes)
            self.transfers.write([piece], label=LABEL).wait()

    @property
    def learnt(self) -> tuple[int, ...]:
        """`sizes`, now."""
        self._drain()
        return self.sizes

    @property
    def held(self) -> dict[Tier, int]:
        """Bytes of the saved tensors that graphs hold now, by where they wait."""
        self._drain()
        held = dict.fromkeys(Tier, 0)
        for record in self._records.values():
            held[record.tier] += record.nbytes
        return held

    def _drain(self) -> None:
        """Take back the places of tensors that no graph holds any more."""
        for number in [n for n, r in self._records.items() if r.away() is None]:
            self._bury(self._records[number])
            del self._records[number]
        if self._seen and not self._records:
            self.sizes, self._seen = tuple(self._seen), []

    def _bury(self, record: SavedTensor) -> None:
        record.end_requests()
        for records in (self._going, self._coming):
            if record in records:
                records.remove(record)
        self._retire(record)
        if record.extent is not None:
            self._disk.give(record.extent, record.nbytes)
            record.extent = None
        self._known.pop(record.identity, None)

    def _retire(self, record: SavedTensor) -> None:
        """The record's span is free, and its tensors may go, once nothing copies them."""
        event = after_all(record.left or HAPPENED, record.ready)
        held = (record.buffer, record.source, record.fetched)
        self._retired.append((event, record.span, record.nbytes, held))
        record.span = record.buffer = None
        self._reap()

    def _reap(self) -> None:
        for entry in list(self._retired):
            event, span, nbytes, _ = entry
            if event.done():
                self._retired.remove(entry)
                if span is not None:
                    self._pool.give(span, nbytes)

    def _buffer(self, record: SavedTensor) -> Tensor:
        """Return full pages for a record from the pool, or a new buffer."""
        if record.buffer is not None:
            return record.buffer
        assert self._arena is not None
        assert record.span is not None
        return self._arena.view(record.span, round_up(record.nbytes, PAGE))

    def _part(self, record: SavedTensor) -> Extent:
        assert self._extent is not None
        assert record.extent is not None
        return self._extent.part(record.extent, round_up(record.nbytes, PAGE))

    def close(self) -> None:
        """Wait for transfers and drop everything; remaining graphs become unusable."""
        for record in self._records.values():
            record.end_requests()
        if not self._device.unified:
            self._device.synchronize()
        self._records.clear()
        self._known.clear()
        self._retired.clear()
        self._going.clear()
        self._coming.clear()

    def forget(self) -> None:
        """Drop the pool; nothing pins it any more."""
        self._arena = None


AHEAD = 2  # tensors that are on their way back before backward asks for them


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _check_version(modified: bool, shape: torch.Size) -> None:
    if modified:
        raise modified_in_place(f"a saved tensor of shape {tuple(shape)}")


def modified_in_place(what: str) -> RuntimeError:
    """Return torch's error of a backward whose saved tensor was modified in place."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: {what}"
    )


def graph_of_closed_engine() -> EngineClosedError:
    """The error of a backward that comes too late."""
    return EngineClosedError(
        "backward through a graph of an engine that is closed",
        remedy="call engine.backward(loss) before engine.close()",
    )

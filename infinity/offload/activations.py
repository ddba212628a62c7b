"""Saved tensors offloaded to a pinned pool in RAM, or to disk, until backward needs them.

[Note: memory of a graph]
Autograd is handed a `SavedHandle`, which holds a number and none of the engine's memory. A graph
may be dropped anywhere, by any thread. The store notices that its handles are dead, and frees their
memory, when the next tensor is saved or restored.
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


class SavedHandle:
    """Handle that autograd holds for a saved tensor; `tensor` is set if it stayed on the device."""

    __slots__ = ("__weakref__", "number", "tensor")

    def __init__(self, number: int) -> None:
        self.number = number
        self.tensor: Tensor | None = None


@dataclass(eq=False, slots=True)
class SavedTensor:
    """Record of one saved tensor: its shape, location and requests."""

    saved_handle: weakref.ref[SavedHandle]
    order: int  # number of its last save; backward runs in reverse order
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size
    version: int
    identity: TensorIdentity
    uses: int = 1
    tier: Tier = Tier.DEVICE
    pool_offset: int | None = None
    disk_offset: int | None = None
    buffer: Tensor | None = None  # for a read from disk, if the pool is full
    source: Tensor | None = None  # the tensor, until it has been copied out
    copied_out: Event | None = None  # end of the copy out; None: not started
    writing: Event | None = None
    written: bool = False
    reading: Event | None = None
    fetched: Tensor | None = None
    ready: Event = HAPPENED
    modified: bool = False  # in place, during the copy out
    returned: bool = False  # returned to backward at least once

    def wait_requests(self) -> None:
        """Wait for disk requests, ignoring their results."""
        for ticket in (self.writing, self.reading):
            if ticket is not None:
                with suppress(TransferError):
                    ticket.wait()
                if not ticket.done():  # stuck: the kernel may still use the range, never reuse it
                    self.pool_offset = None


class ActivationStore:
    """Store of offloaded saved tensors; used by one thread at a time.

    `sizes` are the bytes of the tensors saved in the last micro-batch whose graph was freed, in the
    order of saving.
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
        self._handles: dict[TensorIdentity, weakref.ref[SavedHandle]] = {}
        self._retired: list[tuple[Event, int | None, int, object]] = []  # see `_retire`
        self._outgoing: list[SavedTensor] = []
        self._incoming: list[SavedTensor] = []
        self._new_sizes: list[int] = []
        self._next_number = 0
        self.num_saved = 0  # since the start

    # --- saving (forward) ------------------------------------------------------------------------

    def save(self, tensor: Tensor) -> SavedHandle | None:
        """Return a handle to a tensor that autograd saves, or None if it is not offloaded.

        Not offloaded are small tensors, non-contiguous ones, and those that need no gradient: the
        same masks and position tables are passed to every block.
        """
        nbytes = tensor.numel() * tensor.element_size()
        supported = tensor.is_contiguous() and tensor.device == self._device.torch_device
        supported = supported and tensor.requires_grad and not (tensor.is_conj() or tensor.is_neg())
        if self._arena is None or not supported or nbytes < max(self.plan.min_bytes, 1):
            return None
        self.poll()
        self._free_dropped()
        identity = TensorIdentity(tensor)
        number, self._next_number = self._next_number, self._next_number + 1
        handle = self._handles.get(identity)
        saved_handle = handle() if handle is not None else None
        if (
            saved_handle is not None
        ):  # an input of several blocks: backward needs it first for the last
            record = self._records[saved_handle.number]
            record.uses, record.order = record.uses + 1, number
            return saved_handle
        saved_handle = SavedHandle(number)
        record = SavedTensor(
            weakref.ref(saved_handle),
            number,
            nbytes,
            tensor.dtype,
            tensor.shape,
            tensor._version,
            identity,
        )
        self._records[number] = record
        tier = self._tier_of(nbytes)
        self._new_sizes.append(nbytes)
        if not self._offload(record, tensor.detach(), tier):
            saved_handle.tensor = tensor.detach()
        self._handles[identity] = weakref.ref(saved_handle)
        self.num_saved += 1
        return saved_handle

    def _tier_of(self, nbytes: int) -> Tier:
        """Return the tier for the next tensor: as planned for a known size, else by free bytes."""
        index, plan = len(self._new_sizes), self.plan
        if index < len(self.sizes) and self.sizes[index] == nbytes:
            return tiers_of(self.sizes, plan)[index]
        rounded = round_up(nbytes, PAGE)
        if rounded > plan.host_bytes:
            return Tier.DEVICE
        if plan.offload is Tier.HOST:
            return Tier.HOST
        free = self._pool.free_bytes
        return Tier.HOST if free >= (1 + TRANSIT) * rounded else Tier.DISK

    def _offload(self, record: SavedTensor, source: Tensor, tier: Tier) -> bool:
        """Start the copy out; return False if the tensor stays on the device."""
        if tier is Tier.DEVICE:
            return False
        if tier is Tier.DISK:
            record.disk_offset = self._disk.take(record.nbytes)
            if record.disk_offset is None:
                return False
        record.pool_offset = self._allocate(record.nbytes)
        if record.pool_offset is None:
            if record.disk_offset is not None:
                self._disk.give(record.disk_offset, record.nbytes)
                record.disk_offset = None
            return False
        record.source, record.tier = source, tier
        target = self._buffer(record)[: record.nbytes]
        record.copied_out = self.transfers.copy_d2h(target, _bytes(source), label=LABEL)
        self._outgoing.append(record)
        self._advance(record)
        # Wait until at most `TRANSIT` sources are alive: compute is queued long before it runs, so
        # without this limit all would stay alive.
        with_source = [earlier for earlier in self._outgoing if earlier.source is not None]
        for earlier in with_source[:-TRANSIT]:
            assert earlier.copied_out is not None
            with self.transfers.stall("copy"):
                earlier.copied_out.wait()
            self._advance(earlier)
        return True

    def _advance(self, record: SavedTensor, *, wait: bool = False) -> bool:
        """Continue to offload the record; return True once complete. Blocks only with `wait`."""
        if record.source is not None:
            assert record.copied_out is not None
            if not record.copied_out.done():
                if not wait:
                    return False
                with self.transfers.stall("copy"):
                    record.copied_out.wait()
            record.modified = record.source._version != record.version
            record.source = None
        if record.tier is Tier.DISK and not record.written:
            if record.writing is None:
                piece = self._disk_range(record), self._buffer(record)
                record.writing = self.transfers.write([piece], label=LABEL)
            if not record.writing.done() and not wait:
                return False
            try:
                with self.transfers.stall("disk_write"):
                    record.writing.wait()
            except TransferError:
                record.tier, record.writing = Tier.HOST, None  # the pool still holds it
                raise
            record.written, record.writing = True, None
            self._retire(record)
        if record in self._outgoing:
            self._outgoing.remove(record)
        return True

    # --- restoring (backward) --------------------------------------------------------------------

    def restore(self, saved_handle: SavedHandle) -> Tensor:
        """Return the saved tensor: the original if it stayed on the device, else a restored one.

        Raises `EngineClosedError`, `TransferError`, or torch's error for a tensor that was modified
        in place.
        """
        self.poll()
        self._free_dropped()
        record = self._records.get(saved_handle.number)
        if self._arena is None or record is None:
            raise graph_of_closed_engine()
        if saved_handle.tensor is not None:
            _check_version(saved_handle.tensor._version != record.version, record.shape)
            return saved_handle.tensor
        if record.source is not None:  # not copied out yet: it may have been modified
            _check_version(record.source._version != record.version, record.shape)
        self._start_restore(record, wait=True)
        # Start to restore the `AHEAD` records saved before this one, which backward needs next.
        records = self._records.values()
        earlier = [r for r in records if r.order < record.order and r.copied_out and not r.returned]
        for candidate in sorted(earlier, key=lambda r: r.order)[-AHEAD:]:
            self._start_restore(candidate, wait=False)
        self._finish_read(record)
        _check_version(record.modified, record.shape)
        if not record.ready.done():
            with self.transfers.stall("copy"):
                self._device.compute_wait(record.ready)
        tensor = record.fetched
        assert tensor is not None
        record.returned = True
        if record.uses == 1:
            record.fetched = None
        return tensor

    def _start_restore(self, record: SavedTensor, *, wait: bool) -> None:
        """Start to restore the record, unless that is in flight. Blocks only with `wait`."""
        if record.fetched is not None or record.reading is not None:
            return
        if record.tier is Tier.HOST:
            self._copy_in(record)
            return
        if not self._advance(record, wait=wait):
            return
        record.pool_offset = self._allocate(record.nbytes, wait=wait)
        if record.pool_offset is None:
            if not wait:
                return
            record.buffer = host_buffer(round_up(record.nbytes, PAGE))
        piece = self._disk_range(record), self._buffer(record)
        priority = Priority.URGENT if wait else Priority.NORMAL
        record.reading = self.transfers.read([piece], priority, LABEL)
        self._incoming.append(record)

    def _finish_read(self, record: SavedTensor) -> None:
        """Wait for the read from disk, if there is one, and start the copy to the device."""
        if record.reading is None:
            return
        with self.transfers.stall("disk_read"):
            record.reading.wait()
        self._copy_in(record)
        record.reading = None
        self._retire(record)
        if record in self._incoming:
            self._incoming.remove(record)

    def _copy_in(self, record: SavedTensor) -> None:
        device = self._device
        target = torch.empty(record.shape, dtype=record.dtype, device=device.torch_device)
        # Queued compute may still use the target's memory, and the copy out may be in flight.
        after = after_all(device.compute_event(), record.copied_out or HAPPENED)
        source = self._buffer(record)[: record.nbytes]
        record.ready = self.transfers.copy_h2d(_bytes(target), source, after, LABEL)
        record.fetched = target

    def poll(self) -> None:
        """Poll copies and requests in flight, and continue them. Never blocks."""
        for record in list(self._outgoing):
            self._advance(record)
        for record in list(self._incoming):
            if record.reading is not None and record.reading.done():
                self._finish_read(record)

    def _allocate(self, nbytes: int, *, wait: bool = True) -> int | None:
        """Return an offset of free pool bytes, or None; with `wait`, block until some are freed."""
        while True:
            self._free_dropped()
            self._free_retired()
            pool_offset = self._pool.take(nbytes)
            if pool_offset is not None or not wait:
                return pool_offset
            to_disk = next((r for r in self._outgoing if r.tier is Tier.DISK), None)
            if self._retired:
                with self.transfers.stall("copy"):
                    self._retired[0][0].wait()
            elif to_disk is not None:
                self._advance(to_disk, wait=True)
            elif self._incoming:
                self._finish_read(self._incoming[0])
            else:
                return None

    def recover(self) -> None:
        """Wait for requests in flight, after an exception in a call; later restores start anew."""
        for record in list(self._incoming):
            record.wait_requests()
            record.reading = None
            self._incoming.remove(record)
            self._retire(record)
        for record in list(self._outgoing):
            with suppress(TransferError):  # the pool still holds it
                self._advance(record, wait=True)
        self._new_sizes = []

    # --- records and their memory ----------------------------------------------------------------

    def prewrite(self) -> None:
        """Write the full extent before training: the first write of reserved space is slow."""
        if self._extent is None or self._arena is None:
            return
        for start in range(0, self._extent.nbytes, self._arena.nbytes):
            nbytes = min(self._arena.nbytes, self._extent.nbytes - start)
            piece = self._extent.part(start, nbytes), self._arena.view(0, nbytes)
            self.transfers.write([piece], label=LABEL).wait()

    @property
    def learnt(self) -> tuple[int, ...]:
        """Return `sizes`, updated by graphs that have been freed."""
        self._free_dropped()
        return self.sizes

    @property
    def held(self) -> dict[Tier, int]:
        """Bytes of the saved tensors that graphs hold, by tier."""
        self._free_dropped()
        held = dict.fromkeys(Tier, 0)
        for record in self._records.values():
            held[record.tier] += record.nbytes
        return held

    def _free_dropped(self) -> None:
        """Free the memory of tensors that no graph holds any more."""
        for number in [n for n, r in self._records.items() if r.saved_handle() is None]:
            record = self._records[number]
            record.wait_requests()
            for records in (self._outgoing, self._incoming):
                if record in records:
                    records.remove(record)
            self._retire(record)
            if record.disk_offset is not None:
                self._disk.give(record.disk_offset, record.nbytes)
                record.disk_offset = None
            self._handles.pop(record.identity, None)
            del self._records[number]
        if self._new_sizes and not self._records:
            self.sizes, self._new_sizes = tuple(self._new_sizes), []

    def _retire(self, record: SavedTensor) -> None:
        """Free the record's bytes in the pool and its tensors once no copy uses them."""
        event = after_all(record.copied_out or HAPPENED, record.ready)
        tensors = (record.buffer, record.source, record.fetched)
        self._retired.append((event, record.pool_offset, record.nbytes, tensors))
        record.pool_offset = record.buffer = None
        self._free_retired()

    def _free_retired(self) -> None:
        for entry in list(self._retired):
            event, pool_offset, nbytes, _ = entry
            if event.done():
                self._retired.remove(entry)
                if pool_offset is not None:
                    self._pool.give(pool_offset, nbytes)

    def _buffer(self, record: SavedTensor) -> Tensor:
        """Return the record's read buffer, or its bytes in the pool, in full pages."""
        if record.buffer is not None:
            return record.buffer
        assert self._arena is not None
        assert record.pool_offset is not None
        return self._arena.view(record.pool_offset, round_up(record.nbytes, PAGE))

    def _disk_range(self, record: SavedTensor) -> Extent:
        assert self._extent is not None
        assert record.disk_offset is not None
        return self._extent.part(record.disk_offset, round_up(record.nbytes, PAGE))

    def close(self) -> None:
        """Wait for transfers and drop everything; remaining graphs become unusable."""
        for record in self._records.values():
            record.wait_requests()
        if not self._device.unified:
            self._device.synchronize()
        self._records.clear()
        self._handles.clear()
        self._retired.clear()
        self._outgoing.clear()
        self._incoming.clear()

    def free(self) -> None:
        """Free the pool, which must not be pinned any more."""
        self._arena = None


AHEAD = 2  # tensors restored ahead of backward


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
    """Return the error for a backward after the engine was closed."""
    return EngineClosedError(
        "backward through a graph of an engine that is closed",
        remedy="call engine.backward(loss) before engine.close()",
    )

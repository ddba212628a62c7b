"""Fetches of units' weights from their tier into slots."""

from __future__ import annotations

import contextlib
from functools import partial

from torch import Tensor

from infinity.errors import TransferError
from infinity.offload.failure import FailureLatch
from infinity.offload.slots import Residency, SlotLedger
from infinity.offload.state import StateStore
from infinity.offload.transfers import Transfers
from infinity.plan.budget import fetch_bytes, num_fetch_buffers
from infinity.plan.plan import Plan
from infinity.storage.device import HAPPENED, merge_events
from infinity.storage.staging import BufferPool
from infinity.storage.store import Priority
from infinity.types import Kind


class Fetcher:
    """Reads and copies in flight to slots; used by the training thread only."""

    def __init__(
        self,
        plan: Plan,
        transfers: Transfers,
        store: StateStore,
        ledger: SlotLedger,
        failure: FailureLatch,
    ) -> None:
        self._unified = plan.unified
        self._transfers = transfers
        self._store = store
        self._ledger = ledger
        self._entries = ledger.entries
        self._failure = failure
        # Host buffers between disk reads and copies to the device; none on a unified device.
        self._staging = BufferPool(num_fetch_buffers(plan), fetch_bytes(plan), transfers.device)

    def free(self) -> None:
        """Free the staging buffers."""
        self._staging.free()

    def start(self, unit: int, priority: Priority = Priority.NORMAL) -> None:
        """Start to fetch the unit's weights into a free slot."""
        with self._ledger.changed:
            slot = self._ledger.free_slot(unit)
            assert slot is not None
            self._ledger.assign(unit, slot)
            entry = self._ledger.move(unit, Residency.FETCHING)
        entry.ready, label = HAPPENED, (unit, "weight")
        state = self._store.units[unit]
        source = state.in_ram(Kind.WEIGHT)
        if source is not None:
            self._copy_in(unit, source)
            return
        if state.writes:
            with self._transfers.stall("disk_write", unit):
                try:
                    self._store.wait_writes(unit)
                except TransferError as error:  # the updated weights exist nowhere else
                    self._failure.fail(error)
                    raise
        if (stored := state.memory.get(Kind.WEIGHT)) is not None:
            source = stored.addressable_view(by_device=True)
            assert source is not None
            self._copy_in(unit, source)
            return
        targets = self._store.shard_views(unit, slot.memory)
        if not self._unified:
            stall = partial(self._transfers.stall, "copy")
            entry.staging = self._staging.take(self._free_staging, stall)
            targets = (entry.staging[: state.layout.stored_bytes],)
        pieces = self._store.ranges(unit, Kind.WEIGHT, *targets)
        entry.ticket = self._transfers.read(pieces, priority, label)

    def finish(self, unit: int) -> None:
        """Wait for the unit's read, and mark it resident; `entry.ready` is the end of its copy."""
        entry = self._entries[unit]
        if entry.ticket is not None:
            with self._transfers.stall("disk_read", unit):
                entry.ticket.wait()
            if entry.staging is not None:
                self._copy_landed(unit)
            entry.ticket = None
        with self._ledger.changed:
            self._ledger.move(unit, Residency.RESIDENT)

    def abandon(self, unit: int) -> None:
        """Release the slot of a fetch that failed or is no longer needed."""
        entry = self._entries[unit]
        if entry.ticket is not None:
            with contextlib.suppress(TransferError):
                entry.ticket.wait()
            if not entry.ticket.done():  # stuck: the kernel may write to the slot, never free it
                return
        if entry.staging is not None:
            self._staging.give_back(entry.staging)
        entry.ticket = entry.staging = None
        with self._ledger.changed:
            self._ledger.evict(unit)

    def poll(self) -> None:
        """Start to copy units whose reads into staging buffers have completed. Never blocks."""
        if self._staging.count:
            for unit, entry in enumerate(self._entries):
                if entry.ticket is not None and entry.staging is not None and entry.ticket.done():
                    self._copy_landed(unit)

    def _copy_landed(self, unit: int) -> None:
        """Wait for a unit's read into its staging buffer, and start the copy to the device."""
        entry = self._entries[unit]
        assert entry.ticket is not None
        assert entry.staging is not None
        entry.ticket.wait()
        self._copy_in(unit, entry.staging)
        self._staging.give_back(entry.staging, entry.ready)
        entry.ticket = entry.staging = None

    def _copy_in(self, unit: int, shard: Tensor) -> None:
        """Start to copy this rank's shard of the weights into the unit's slot."""
        entry, device, label = self._entries[unit], self._transfers.device, (unit, "weight")
        assert entry.slot is not None
        targets = self._store.shard_views(unit, entry.slot.memory)
        shard = shard[: sum(target.numel() for target in targets)]
        slices = zip(targets, self._store.cut(unit, shard), strict=True)
        pairs = [(target, source) for target, source in slices if target.numel()]
        after = entry.slot.free_after
        if not self._store.units[unit].on_device(Kind.WEIGHT):
            copies = [
                self._transfers.copy_h2d(target, source, after, label) for target, source in pairs
            ]
            entry.ready = merge_events(copies)
            return
        device.compute_wait(after)  # a shard stored on the device is copied by compute
        for target, source in pairs:
            target.copy_(source)
        entry.ready = device.compute_event()

    def _free_staging(self) -> None:
        unit = next(u for u, e in enumerate(self._entries) if e.staging is not None)
        self._copy_landed(unit)

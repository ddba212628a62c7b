"""Units between the training thread and the optimizer pass: stale, then updated.

[Note: no deadlock on slots]
The optimizer pass waits for a slot only while the training thread computes. When the training
thread waits for a unit it first frees a slot for it, and its demand lifts the pacing: the optimizer
pass updates that unit next, and units it cannot publish are written back instead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from infinity.offload.failure import FailureLatch
from infinity.offload.slots import Residency, Slot, SlotLedger
from infinity.offload.transfers import Transfers
from infinity.plan.plan import Plan, UpdatePlace, publishes, update_place
from infinity.storage.device import Event

LOOK_AGAIN_S = 0.1  # nothing notifies when the last reference to a free slot is gone


class UpdateHandover:
    """Hands stale units to the optimizer pass, and takes them back updated."""

    def __init__(
        self, plan: Plan, transfers: Transfers, ledger: SlotLedger, failure: FailureLatch
    ) -> None:
        self._plan = plan
        self._transfers = transfers
        self._device = transfers.device
        self._ledger = ledger
        self._entries = ledger.entries
        self._failure = failure
        units = range(len(plan.units))
        self._updated_there = {u for u in units if update_place(plan, u) is UpdatePlace.DEVICE}
        self._paced = True
        self.lock, self.changed = ledger.lock, ledger.changed
        self.demand: int | None = None  # the unit the training thread waits for
        self.mispredictions = 0  # updates that could not be published

    # --- the training thread ---------------------------------------------------------------------

    def begin(self, units: Collection[int]) -> None:
        """Hand over these units, whose slots are free; the caller holds `changed`."""
        for unit in units:
            self._ledger.move(unit, Residency.PENDING)
        self._paced = True

    def lift_pacing(self) -> None:
        """Let no update wait for a slot from now on; the caller holds `changed`."""
        self._paced = False
        self.changed.notify_all()

    def await_update(self, unit: int, require_slot: Callable[[int], None]) -> None:
        """Wait until the optimizer pass has updated the unit, which gets a slot first."""
        entry = self._entries[unit]
        with self._transfers.stall("update", unit), self.changed:
            self.demand = unit
            self.changed.notify_all()
            try:
                while entry.residency is Residency.PENDING and self._failure.error is None:
                    if entry.slot is None:
                        require_slot(unit)
                    if entry.residency is Residency.PENDING:  # it may have waited there
                        self.changed.wait()
            finally:
                self.demand = None

    def await_consumed(self, unit: int) -> None:
        """Wait until no optimizer pass reads the unit's gradients, before they are written again.

        A forward through the unit has waited already; this is for graphs older than the last step,
        parts of which need no weights.
        """
        entry = self._entries[unit]
        if entry.residency is Residency.PENDING:
            with self._transfers.stall("update", unit), self.changed:
                self.lift_pacing()
                while entry.residency is Residency.PENDING and self._failure.error is None:
                    self.changed.wait()
            self._failure.check()
        if unit in self._updated_there and not entry.ready.done():
            self._device.compute_wait(entry.ready)  # queued there, not yet over

    # --- the optimizer thread --------------------------------------------------------------------

    def weights_read(self, unit: int) -> Event:
        """Return the event after which no copy to the device reads the unit's stored weights."""
        return self._entries[unit].ready

    def publish_slot(self, unit: int, first: Callable[[], object] | None = None) -> Slot | None:
        """Return the slot for an updated unit's weights, or None if they are only written back.

        Calls `first` before it waits or decides, if no slot is free.
        """
        if not publishes(self._plan, unit):
            return None
        ledger, entry = self._ledger, self._entries[unit]
        while True:
            with self.changed:
                if entry.slot is not None:
                    return entry.slot
                slot_class = ledger.class_of[unit]
                assert slot_class is not None
                free = ledger.free_slots(slot_class)
                if not free and self.demand == unit:
                    wide = ledger.free_slot(unit)
                    free = [wide] if wide is not None else []
                if free:
                    ledger.assign(unit, free[0])
                    return free[0]
                if first is None:
                    other = self.demand if self.demand != unit else None
                    waits_for_later = other is not None and ledger.is_pending(other)
                    if waits_for_later or not self._paced or self._failure.error is not None:
                        self.mispredictions += 1
                        return None
                    self.changed.wait(LOOK_AGAIN_S)
                    continue
            first()
            first = None

    def updated(self, unit: int, ready: Event) -> None:
        """Mark the unit's update as complete; it is resident if it was published to a slot."""
        with self.changed:
            entry = self._entries[unit]
            entry.ready = ready
            entry.updates += 1
            self._ledger.move(
                unit, Residency.RESIDENT if entry.slot is not None else Residency.OFFLOADED
            )

"""Handover of units between the training thread and the optimizer pass.

[Note: no deadlock on slots]
The optimizer pass waits for a slot only while the training thread computes. When the training
thread waits for a unit, it first frees a slot for it, and its demand lifts the pacing: the
optimizer pass updates that unit next, and only writes back units that it cannot publish.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from infinity.offload.failure import FailureLatch
from infinity.offload.gradient_copies import Copy
from infinity.offload.slots import Residency, Slot, SlotLedger
from infinity.offload.transfers import Transfers
from infinity.plan.plan import Plan, UpdatePlace, publishes, update_place
from infinity.storage.device import Event

LOOK_AGAIN_S = 0.1  # dropping the last reference to a slot notifies nothing


@dataclass(frozen=True)
class UpdateJob:
    """Everything that an optimizer pass depends on; captured at `step()`.

    `params_by_index` and `steps` have exactly the parameters to update, by index; `steps` counts
    this update, from 1. `computed` is the end of the compute that produced the gradients and read
    the weights that will change. `copies` has the copies of gradients to RAM in flight, by unit;
    the optimizer pass removes them as it waits for them.
    """

    units: tuple[int, ...]
    params_by_index: Mapping[int, Any]
    steps: Mapping[int, int]
    grad_scale: float
    computed: Event
    copies: dict[int, list[Copy]] = field(default_factory=dict)
    document: Mapping[str, Any] | None = None  # in the commit of a durable run


class UpdateHandover:
    """Transitions of units to the optimizer pass (stale), and back (updated)."""

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
        self._updated_on_device = {u for u in units if update_place(plan, u) is UpdatePlace.DEVICE}
        self._paced = True
        self.lock, self.changed = ledger.lock, ledger.changed
        self.demand: int | None = None  # the unit the training thread waits for
        self.mispredictions = 0  # updates that could not be published

    # --- called by the training thread -----------------------------------------------------------

    def begin(self, units: Collection[int]) -> None:
        """Hand over these units, which have been evicted; the caller holds `changed`."""
        for unit in units:
            self._ledger.move(unit, Residency.PENDING)
        self._paced = True

    def lift_pacing(self) -> None:
        """Let no update wait for a slot until the next `begin`; the caller holds `changed`."""
        self._paced = False
        self.changed.notify_all()

    def await_update(self, unit: int, require_slot: Callable[[int], None]) -> None:
        """Block until the optimizer pass has updated the unit; first free a slot for it."""
        entry = self._entries[unit]
        with self._transfers.stall("update", unit), self.changed:
            self.demand = unit
            self.changed.notify_all()
            try:
                while entry.residency is Residency.PENDING and self._failure.error is None:
                    if entry.slot is None:
                        require_slot(unit)
                    if entry.residency is Residency.PENDING:  # `require_slot` may have waited
                        self.changed.wait()
            finally:
                self.demand = None

    def wait_gradients_read(self, unit: int) -> None:
        """Block until no optimizer pass reads the unit's gradients, before they are overwritten.

        A forward through the unit has waited already. Backward through a graph older than the last
        step may not have: parts of it need no weights.
        """
        entry = self._entries[unit]
        if entry.residency is Residency.PENDING:
            with self._transfers.stall("update", unit), self.changed:
                self.lift_pacing()
                while entry.residency is Residency.PENDING and self._failure.error is None:
                    self.changed.wait()
            self._failure.check()
        if unit in self._updated_on_device and not entry.ready.done():
            self._device.compute_wait(entry.ready)  # the update is queued on the device

    # --- called by the optimizer thread ----------------------------------------------------------

    def weights_read_event(self, unit: int) -> Event:
        """Return the event after which no copy to the device reads the unit's stored weights."""
        return self._entries[unit].ready

    def publish_slot(
        self, unit: int, before_wait: Callable[[], object] | None = None
    ) -> Slot | None:
        """Return the slot for an updated unit's weights, or None if they are only written back.

        If no slot is free, calls `before_wait` before it waits or returns None.
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
                    larger = ledger.free_slot(unit)
                    free = [larger] if larger is not None else []
                if free:
                    ledger.assign(unit, free[0])
                    return free[0]
                if before_wait is None:
                    demanded = self.demand if self.demand != unit else None
                    waits_for_later = demanded is not None and ledger.is_pending(demanded)
                    if waits_for_later or not self._paced or self._failure.error is not None:
                        self.mispredictions += 1
                        return None
                    self.changed.wait(LOOK_AGAIN_S)
                    continue
            before_wait()
            before_wait = None

    def updated(self, unit: int, ready: Event) -> None:
        """Mark the unit as updated: resident if it was published to a slot, else offloaded."""
        with self.changed:
            entry = self._entries[unit]
            entry.ready = ready
            entry.updates += 1
            self._ledger.move(
                unit, Residency.RESIDENT if entry.slot is not None else Residency.OFFLOADED
            )

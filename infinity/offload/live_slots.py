"""View of the slots of a run for the eviction rule of `plan/access_order.py`."""

from __future__ import annotations

from collections.abc import Collection

from infinity.offload.bound_units import BoundUnits
from infinity.offload.fetcher import Fetcher
from infinity.offload.slots import Residency, SlotLedger
from infinity.plan.plan import Plan, publishes


class LiveSlots:
    """`SlotView` over the slot ledger; callers hold `changed`."""

    def __init__(self, plan: Plan, ledger: SlotLedger, bound: BoundUnits, fetcher: Fetcher) -> None:
        self._plan = plan
        self._ledger = ledger
        self._entries = ledger.entries
        self._bound = bound
        self._fetcher = fetcher

    def class_of(self, unit: int) -> int | None:
        """Return the unit's slot class, or None if its weights are stored on the device."""
        return self._ledger.class_of[unit]

    def holds_slot(self, unit: int) -> bool:
        """Return True if a slot holds, or will hold, the unit's current weights."""
        return self._entries[unit].slot is not None

    def is_pending(self, unit: int) -> bool:
        """Return True if the unit waits for its update by the optimizer pass."""
        return self._ledger.is_pending(unit)

    def publishes(self, unit: int) -> bool:
        """Return True if the optimizer pass writes the unit's new weights into a slot."""
        return publishes(self._plan, unit)

    def num_free(self, slot_class: int) -> int:
        return len(self._ledger.free_slots(slot_class))

    def evictable(self, slot_class: int) -> Collection[int]:
        """Return the units in slots of the class, without the one in use and those in a forward."""
        units = []
        for slot in self._ledger.slots:
            unit = slot.owner
            if slot.slot_class == slot_class and unit is not None and unit != self._ledger.current:
                entry = self._entries[unit]
                if entry.residency is Residency.RESIDENT and not entry.forward_depth:
                    units.append(unit)
        return units

    def try_evict(self, unit: int) -> bool:
        """Evict the unit unless its weights are referenced; return True if that freed its slot."""
        slot = self._entries[unit].slot
        assert slot is not None
        if self._entries[unit].num_aliases > 0:
            return False
        self._bound.evict(unit)
        # A thread that inspects the frames of this one may hold their views a moment longer.
        return slot.is_free()

    def fetch(self, unit: int) -> None:
        """Start to fetch the unit into a free slot."""
        self._fetcher.start(unit)

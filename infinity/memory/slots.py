"""The policy's view of the ledger: who holds slots, who could leave, and leaving."""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import Tensor

from infinity.errors import PresenceError
from infinity.memory.device import after_all
from infinity.memory.lanes import Lanes
from infinity.memory.residency import Residency, Slot, Where
from infinity.model.presence import Presence
from infinity.plan.plan import Plan, publishes


class Slots:
    """Questions about slots and entries, and eviction; the mover adds movement.

    Callers that change anything hold `changed`.
    """

    def __init__(
        self,
        plan: Plan,
        lanes: Lanes,
        presence: Presence,
        poison: Callable[[Tensor], None] | None,
    ) -> None:
        self.plan = plan
        self.lanes = lanes
        self.presence = presence
        self.ledger = Residency(plan, lanes.device, poison)
        self.changed = self.ledger.changed
        self.entries = self.ledger.entries
        self.current = -1  # the unit in use

    def class_of(self, unit: int) -> int | None:
        """The unit's slot class; None where its weights rest on the device."""
        return self.ledger.class_of[unit]

    def holds_slot(self, unit: int) -> bool:
        """Whether a slot holds, or is about to hold, the unit's current weights."""
        return self.entries[unit].slot is not None

    def is_pending(self, unit: int) -> bool:
        """Whether the sweep owes the unit an update."""
        return self.entries[unit].where is Where.PENDING

    def publishes(self, unit: int) -> bool:
        """Whether the sweep brings the unit's new weights into a slot."""
        return publishes(self.plan, unit)

    def num_free(self, slot_class: int) -> int:
        """Free slots of the class."""
        return len(self.ledger.free_slots(slot_class))

    def evictable(self, slot_class: int) -> Collection[int]:
        """Units present in slots of the class that no forward is inside of."""
        found = []
        for slot in self.ledger.slots:
            unit = slot.owner
            if slot.slot_class == slot_class and unit is not None and unit != self.current:
                entry = self.entries[unit]
                if entry.where is Where.PRESENT and not entry.entered:
                    found.append(unit)
        return found

    def evict(self, unit: int) -> bool:
        """Give up the unit's slot; False if something still refers to its weights."""
        entry = self.entries[unit]
        slot = entry.slot
        assert slot is not None
        num_bound = len(self.plan.units[unit].segments) if entry.bound else 0
        if slot.num_aliases(num_bound) > 0:
            return False
        try:
            self.give_up(unit)
        except PresenceError:  # an edited parameter is gone all the same
            self.ledger.move(unit, Where.ABSENT)
            raise
        self.ledger.move(unit, Where.ABSENT)
        return True

    def free_slot(self, unit: int) -> Slot | None:
        """A free slot of the unit's class, else of a wider one."""
        slot_class = self.class_of(unit)
        assert slot_class is not None
        for wider in range(slot_class, -1, -1):
            free = self.ledger.free_slots(wider)
            if free:
                return free[0]
        return None

    def no_slot(self, unit: int, slot_class: int) -> PresenceError:
        """The error that says who holds all slots the unit could use."""
        name = self.plan.units[unit].name
        return PresenceError(
            f"no slot is free for unit {name!r}: {self.ledger.holders(slot_class)}",
            because="tensors that share memory with lent-out weights are still alive",
            remedy="drop graphs and aliases you do not need, or raise look_ahead (more slots)",
        )

    def sweep_fills(self, slot_class: int) -> bool:
        """Whether new weights are on their way into a slot that would do."""
        return any(
            slot.slot_class is not None
            and slot.slot_class <= slot_class
            and slot.owner is not None
            and self.is_pending(slot.owner)
            for slot in self.ledger.slots
        )

    def give_up(self, unit: int) -> None:
        """Unbind, and end the residency; raises `PresenceError` after it if there was an edit."""
        entry = self.entries[unit]
        slot = entry.slot
        assert slot is not None
        edited: PresenceError | None = None
        if entry.bound:
            entry.bound = False
            try:
                self.presence.unbind(unit)
            except PresenceError as error:
                edited = error
        slot.free_after = after_all(entry.ready, self.lanes.device.compute_event())
        self.ledger.give_up(unit)
        if edited is not None:  # the edit is lost, the slot is not
            raise edited

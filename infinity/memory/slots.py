"""The policy's view of the ledger: who holds slots, who could leave, and leaving.

[Note: released]
Parameters are bound while a call runs. When it ends they are released: their unit keeps its slot,
and is bound again when it is next used, for a microsecond a parameter. A unit that was reached for
outside a call (`engine.module.norm.weight`) stays bound, for whoever asked will read, and its
bytes are looked at when the next call begins: CRC32C, some 5 GB/s, of that unit alone.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from infinity.errors import PresenceError, TransferError
from infinity.memory.checksums import checksum
from infinity.memory.device import after_all
from infinity.memory.lanes import Lanes
from infinity.memory.residency import Residency, Slot, Where
from infinity.model.presence import Edit, Presence
from infinity.plan.plan import Plan, publishes


class Slots:
    """Questions about slots and entries, and eviction; the mover adds movement.

    Callers that change anything hold `changed`.
    """

    def __init__(self, plan: Plan, lanes: Lanes, presence: Presence) -> None:
        self.plan = plan
        self.lanes = lanes
        self.presence = presence
        self.ledger = Residency(plan, lanes.device)
        self.changed = self.ledger.changed
        self.entries = self.ledger.entries
        self.current = -1  # the unit in use
        self.reached: set[int] = set()  # bound, and reached for outside a call
        self.failure: BaseException | None = None
        self._proved: set[tuple[int, bool]] = set()  # units whose first forward was looked at

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
        if self.entries[unit].num_aliases > 0:
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

    def bind(self, unit: int) -> None:
        """Make the parameters of a unit that is present views of its slot.

        Raises `PresenceError` if one was edited since it is absent.
        """
        entry = self.entries[unit]
        assert entry.slot is not None
        assert entry.slot.residency is not None
        if not entry.views:
            entry.views = self.presence.views(unit, entry.slot.residency)
        self.presence.bind(unit, entry.views)
        entry.bound = True

    def bind_if_present(self, unit: int) -> None:
        """`bind` where a slot holds the weights."""
        entry = self.entries[unit] if unit >= 0 else None
        if entry is not None and entry.where is Where.PRESENT and not entry.bound:
            self.lanes.device.compute_wait(entry.ready)
            self.bind(unit)

    # --- what is bound, and edits of it --------------------------------------------------------

    def look_for_edits(self, unit: int, *, reached: bool) -> None:
        """The unit was bound for somebody who may edit it: outside a call if `reached`.

        Inside one only the first forward with gradients, and the first without, is looked at; see
        [Note: edits behind our back] in `model/presence.py`.
        """
        entry = self.entries[unit]
        if reached:
            self.reached.add(unit)
        else:
            kind = unit, torch.is_grad_enabled()
            if kind in self._proved:
                return
            self._proved.add(kind)
        if entry.checksums is None:
            entry.checksums = [checksum(view) for view in entry.views]

    def verify(self, unit: int | None = None, *, may_wait: bool = False) -> None:
        """Raise what `find_edit` finds, before anything is made of it."""
        error = self.find_edit(unit, may_wait=may_wait)
        if error is not None:
            raise error

    def find_edit(self, unit: int | None = None, *, may_wait: bool = False) -> PresenceError | None:
        """What was edited behind our back; it is taken back.

        Looks at units that were reached for and at placeholders (of another device only if it
        `may_wait`); and at the parameters of `unit`, or of all units if it `may_wait`.
        """
        edit = self.presence.edited_placeholder(may_wait=may_wait)
        error = edit.error() if edit is not None else None
        also = range(len(self.entries)) if may_wait else [] if unit is None else [unit]
        for other in self.reached.union(also):
            if self.entries[other].bound:
                found = self._edit_of(other)
                if found is not None:
                    self.release(other)
                error = error or found
            elif (absent := self.presence.edited(other)) is not None:
                self.presence.forget(other)
                error = error or absent.error()
        return error

    def release_all(self, *, reached: bool = False) -> None:
        """A call is over: what it bound is absent, and stays in its slot; see [Note: released].

        What was reached for outside stays bound, unless it shall go too (`reached`). Raises the
        first `PresenceError` of an edited parameter, after all are absent.
        """
        error = None
        for unit, entry in enumerate(self.entries):
            if entry.bound and (reached or unit not in self.reached):
                error = self.release(unit) or error
        if error is not None:
            raise error

    def release(self, unit: int) -> PresenceError | None:
        """Make the unit's parameters absent; the error if one was edited.

        Edited bytes are not computed with: the slot is given up, or where they are the only ones
        the engine has failed.
        """
        entry = self.entries[unit]
        error = self._edit_of(unit)
        self.forget_bound(unit)
        if error is not None and entry.slot is not None and entry.slot.slot_class is not None:
            with self.changed:
                self.give_up(unit)
                self.ledger.move(unit, Where.ABSENT)
        return error

    def forget_bound(self, unit: int) -> None:
        """Make the unit's parameters absent, without judging edits."""
        entry = self.entries[unit]
        entry.bound, entry.checksums = False, None
        self.reached.discard(unit)
        self.presence.forget(unit)

    def _edit_of(self, unit: int) -> PresenceError | None:
        """What was done to the bound parameters of a unit, behind our back."""
        entry, edit = self.entries[unit], self.presence.edited(unit)
        assert entry.slot is not None
        rests = entry.slot.slot_class is None  # here: these bytes are the only ones
        name = None
        if entry.checksums is not None:
            each = zip(self.plan.units[unit].segments, entry.views, entry.checksums, strict=True)
            name = next((s.name for s, view, before in each if checksum(view) != before), None)
        if edit is None and name is None:
            return None
        edit = edit or Edit(name or "", in_place=True)
        if not rests or not (name or (edit.in_place and entry.checksums is None)):
            return edit.error()
        result = "its only copy rests where it computes: it has changed, and training cannot go on"
        self.fail(edit.error(result))  # another one: what is raised would keep frames alive
        return edit.error(result)

    def fail(self, error: BaseException) -> None:
        """Remember the first failure, which is for good, and wake everyone."""
        if isinstance(error, TransferError):
            error = error.untraced()
        with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()

    def give_up(self, unit: int) -> None:
        """Unbind, and end the residency; raises `PresenceError` after it if there was an edit."""
        entry = self.entries[unit]
        slot = entry.slot
        assert slot is not None
        edited = None
        if entry.bound:
            edited = self._edit_of(unit)
            self.forget_bound(unit)
        slot.free_after = after_all(entry.ready, self.lanes.device.compute_event())
        self.ledger.give_up(unit)
        if edited is not None:  # the edit is lost, the slot is not
            raise edited

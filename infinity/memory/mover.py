"""Brings units to the device before they are used, and takes them away after.

[Note: who may do what]
The training thread fetches, binds, unbinds and evicts, and only at uses (so that nothing is
pulled from under a running operation). The sweep thread takes free slots for units it owes an
update, and fills them. Both hold `Residency.changed` for every transition.

[Note: nothing waits for a slot that only its own progress could free]
The sweep waits for a slot only while the training thread computes. When the training thread
waits for a unit it first frees a slot for it, and its demand lifts the pacing: the sweep updates
that unit next, and units it cannot publish go home instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection

import torch
from torch import Tensor

from infinity.errors import EngineFailedError, PresenceError, TransferError
from infinity.memory.device import HAPPENED, Event
from infinity.memory.disk import Priority
from infinity.memory.landing import Landings
from infinity.memory.lanes import Lanes
from infinity.memory.residency import Slot, Where
from infinity.memory.slots import Slots
from infinity.memory.state import StateStore
from infinity.model.presence import Presence
from infinity.plan import policy
from infinity.plan.layout import Kind, Tier
from infinity.plan.plan import Plan, updated_on_device
from infinity.plan.tape import NEVER, Tape

_LOOK_AGAIN_S = 0.1  # a slot is free when nothing refers to it any more, which nobody tells


class Mover(Slots):
    """Fetch, look ahead, evict; the only writer of residency on the training thread."""

    def __init__(self, plan: Plan, lanes: Lanes, store: StateStore, presence: Presence) -> None:
        super().__init__(plan, lanes, presence)
        self.store = store
        self.tape: Tape | None = None
        self.wraps = True
        self.demand: int | None = None  # the unit the training thread waits for
        self.paced = True
        self.surprises = 0
        self._retry = False
        self._landings = Landings(plan, lanes)
        for unit, homes in enumerate(plan.homes):
            if not plan.units[unit].slot_bytes:  # only parameters without elements
                self.ledger.add_permanent(unit, torch.empty(0, dtype=torch.uint8))
            elif homes.weight is Tier.DEVICE:
                state = store.units[unit]
                home = state.ram if plan.unified else state.on_device
                self.ledger.add_permanent(unit, home[Kind.WEIGHT])

    def forget(self) -> None:
        """Drop the slots and landings."""
        self.ledger.forget()
        self._landings.forget()

    # --- uses: the training thread -----------------------------------------------------------

    def use(self, unit: int, *, bind: bool = True) -> None:
        """Make the unit present, and bound unless not to `bind`; look ahead along the tape."""
        entry = self.entries[unit]
        if unit == self.current and entry.where is Where.PRESENT:
            if bind and not entry.bound:  # since a call ended
                self.bring(unit)
            if self._retry:
                self._look_ahead()
            return
        self.current = unit
        if self.tape is not None:
            self.tape.advance(unit)
        self.bring(unit, bind=bind)
        self._look_ahead()

    def bring(self, unit: int, *, bind: bool = True) -> None:
        """Make the unit present, and bound unless not to `bind`, whatever it takes."""
        entry = self.entries[unit]
        while True:
            self.check()
            if entry.where is Where.PRESENT:
                break
            if entry.where is Where.FETCHING:
                self._finish_fetch(unit)
            elif entry.where is Where.ABSENT:
                with self.changed:  # held over both: the sweep must not take the freed slot
                    self._require_slot(unit)
                    self.fetch(unit, Priority.URGENT)
            else:
                self._await_update(unit)
        if not entry.bound:
            if not entry.ready.done():
                with self.lanes.stall("copy", unit):
                    self.lanes.device.compute_wait(entry.ready)
            if bind:
                self.bind(unit)

    def tend(self) -> None:
        """Push on what can be pushed on without waiting; called often from hooks."""
        if len(self._landings):
            for unit, entry in enumerate(self.entries):
                if entry.ticket is not None and entry.landing is not None and entry.ticket.done():
                    self._copy_landed(unit)
        if self._retry:
            self._look_ahead()

    def check(self) -> None:
        """Raise what made an earlier update fail, or what the drive does not let go of."""
        if self.lanes.stuck is not None:
            self.fail(self.lanes.stuck)
        if self.failure is not None:
            raise EngineFailedError(
                f"an earlier failure left the state incomplete: {self.failure}",
                remedy="close the engine, and resume from the last commit (`resume: auto`) or "
                "checkpoint",
            ) from self.failure

    def _await_update(self, unit: int) -> None:
        """Wait until the sweep has updated the unit."""
        entry = self.entries[unit]
        with self.lanes.stall("update", unit), self.changed:
            self.demand = unit
            self.changed.notify_all()
            try:
                while entry.where is Where.PENDING and self.failure is None:
                    if entry.slot is None:
                        self._require_slot(unit)
                    if entry.where is Where.PENDING:  # it may have waited there
                        self.changed.wait()
            finally:
                self.demand = None

    def await_consumed(self, unit: int) -> None:
        """Wait until no sweep reads the unit's gradients: before they are written again.

        A forward through the unit has waited already; this is for graphs older than the last
        step, of which parts need no weights.
        """
        entry = self.entries[unit]
        if entry.where is Where.PENDING:
            with self.lanes.stall("update", unit), self.changed:
                self.paced = False
                self.changed.notify_all()
                while entry.where is Where.PENDING and self.failure is None:
                    self.changed.wait()
            self.check()
        if updated_on_device(self.plan, unit) and not entry.ready.done():
            self.lanes.device.compute_wait(entry.ready)  # queued there, not yet over

    def _require_slot(self, unit: int) -> None:
        """Free a slot for the unit, or say who holds them all; the caller holds `changed`."""
        slot_class = self.class_of(unit)
        if slot_class is None:
            return
        entry = self.entries[unit]
        while entry.slot is None and self.free_slot(unit) is None:
            if any(
                policy.make_slot_free(self, wider, self._distance) or self._call_off(wider)
                for wider in range(slot_class, -1, -1)
            ):
                return
            if not self.sweep_fills(slot_class):
                raise self.no_slot(unit, slot_class)
            with self.lanes.stall("slot", unit):  # the sweep fills it without us
                self.changed.wait()
            self.check()

    def _call_off(self, slot_class: int) -> bool:
        """Free a slot that is being filled: the look-ahead was wrong, every slot is under way."""
        under_way = [
            slot.owner
            for slot in self.ledger.slots
            if slot.slot_class == slot_class
            and slot.owner is not None
            and self.entries[slot.owner].where is Where.FETCHING
        ]
        for unit in sorted(under_way, key=lambda u: (-self._distance(u), u)):
            self._finish_fetch(unit)
            if self.evict(unit):
                return True
        return False

    def _distance(self, unit: int) -> int:
        return self.tape.distance(unit, wraps=self.wraps) if self.tape is not None else NEVER

    def _look_ahead(self) -> None:
        if self.tape is None or not self.plan.slot_classes:
            return
        with self.changed:
            self._retry = not policy.look_ahead(
                self, self.tape, self.plan.look_ahead, wraps=self.wraps
            )

    # --- fetches -------------------------------------------------------------------------------

    def _finish_fetch(self, unit: int) -> None:
        entry = self.entries[unit]
        if entry.ticket is not None:
            with self.lanes.stall("disk_read", unit):
                entry.ticket.wait()
            if entry.landing is not None:
                self._copy_landed(unit)
            entry.ticket = None
        with self.changed:
            self.ledger.move(unit, Where.PRESENT)

    def _abandon_fetch(self, unit: int) -> None:
        """A fetch that failed, or of weights that are not wanted any more."""
        entry = self.entries[unit]
        if entry.ticket is not None:
            with contextlib.suppress(TransferError):
                entry.ticket.wait()
            if not entry.ticket.done():  # stuck: the slot is the kernel's for good
                return
        if entry.landing is not None:
            self._landings.copied_by(entry.landing, HAPPENED)
        entry.ticket = entry.landing = None
        with self.changed:
            self.ledger.give_up(unit)
            self.ledger.move(unit, Where.ABSENT)

    def _copy_landed(self, unit: int) -> None:
        """Second half of disk -> device: the read has landed in RAM, copy it in."""
        entry = self.entries[unit]
        assert entry.ticket is not None
        assert entry.landing is not None
        assert entry.slot is not None
        assert entry.slot.residency is not None
        entry.ticket.wait()
        source = self._landings.buffer(entry.landing, self.plan.units[unit].slot_bytes)
        target, label = entry.slot.residency, (unit, "weight")
        entry.ready = self.lanes.copy_in(target, source, entry.slot.free_after, label)
        self._landings.copied_by(entry.landing, entry.ready)
        entry.ticket = entry.landing = None

    def _land_oldest(self) -> None:
        landed = next(u for u, e in enumerate(self.entries) if e.landing is not None)
        self._copy_landed(landed)

    def fetch(self, unit: int, priority: Priority = Priority.NORMAL) -> None:
        """Start bringing the unit's weights from home into a free slot."""
        with self.changed:
            slot = self.free_slot(unit)
            assert slot is not None
            residency = self.ledger.assign(unit, slot)
            entry = self.ledger.move(unit, Where.FETCHING)
        entry.ready, label = HAPPENED, (unit, "weight")
        state = self.store.units[unit]
        if Kind.WEIGHT in state.ram:
            source = state.ram[Kind.WEIGHT]
            entry.ready = self.lanes.copy_in(residency, source, slot.free_after, label)
            return
        if state.writes:
            with self.lanes.stall("disk_write", unit):
                try:
                    self.store.settle_writes(unit)
                except TransferError as error:  # of an update, of which there is no second copy
                    self.fail(error)
                    raise
        if not self.plan.unified:
            entry.landing = self._landings.take(self._land_oldest)
            residency = self._landings.buffer(entry.landing, residency.numel())
        entry.ticket = self.lanes.read(self.store.weight_parts(unit, residency), priority, label)

    # --- updates -------------------------------------------------------------------------------

    def make_pending(self, units: Collection[int]) -> None:
        """The weights of these units are stale from now on; a sweep will replace them.

        Raises the first `PresenceError` of an edited parameter, after all units are pending.
        """
        edited: PresenceError | None = None
        for unit in units:
            if self.entries[unit].where is Where.FETCHING:
                try:
                    self._finish_fetch(unit)
                except TransferError:  # nobody needs the stale weights it was to bring
                    self.check()
                    self._abandon_fetch(unit)
        with self.changed:
            for unit in units:
                entry = self.entries[unit]
                if entry.where is Where.PRESENT:
                    try:
                        self.give_up(unit)
                    except PresenceError as error:
                        edited = edited or error
                self.ledger.move(unit, Where.PENDING)
            self.paced = True
        self.current = -1
        if edited is not None:
            raise edited

    def drop(self, unit: int) -> None:
        """Forget the unit's copy on the device: its home was, or will be, edited."""
        if self.entries[unit].where is Where.FETCHING:
            self._finish_fetch(unit)
        with self.changed:
            entry = self.entries[unit]
            if entry.where is not Where.PRESENT:
                return
            try:
                self.give_up(unit)
            finally:  # an edited parameter is gone all the same
                if entry.slot is None:
                    self.ledger.move(unit, Where.ABSENT)

    def edited(self, unit: int) -> None:
        """The unit's weights were edited at home: graphs made before are stale."""
        self.entries[unit].updates += 1

    def publish_slot(self, unit: int) -> tuple[Slot, Tensor] | None:
        """For the sweep: the slot the unit's new weights go to, or None if they only go home."""
        if not self.publishes(unit):
            return None
        with self.changed:
            entry = self.entries[unit]
            while True:
                if entry.slot is not None:
                    assert entry.slot.residency is not None
                    return entry.slot, entry.slot.residency
                slot_class = self.class_of(unit)
                assert slot_class is not None
                free = self.ledger.free_slots(slot_class)
                if not free and self.demand == unit:
                    wide = self.free_slot(unit)
                    free = [wide] if wide is not None else []
                if free:
                    return free[0], self.ledger.assign(unit, free[0])
                waits_for_later = (
                    self.demand is not None and self.demand != unit and self.is_pending(self.demand)
                )
                if waits_for_later or not self.paced or self.failure is not None:
                    self.surprises += 1
                    return None
                self.changed.wait(_LOOK_AGAIN_S)

    def updated(self, unit: int, ready: Event) -> None:
        """For the sweep: the unit's update is complete, and published if it has a slot."""
        with self.changed:
            entry = self.entries[unit]
            entry.ready = ready
            entry.updates += 1
            self.ledger.move(unit, Where.PRESENT if entry.slot is not None else Where.ABSENT)

    def recover(self) -> None:
        """After an exception in a call: nothing is bound, in a slot or being fetched.

        Slots are given up because a traceback may hold views of them, which look like our own.
        """
        self.lanes.device.synchronize()
        self.current, self._retry = -1, False
        for unit, entry in enumerate(self.entries):
            entry.entered = 0
            if entry.bound:
                self.release(unit)
            if entry.where is Where.FETCHING:
                self._abandon_fetch(unit)
            elif entry.where is Where.PRESENT and self.class_of(unit) is not None:
                with self.changed:
                    self.give_up(unit)
                    self.ledger.move(unit, Where.ABSENT)

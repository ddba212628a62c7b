"""Prefetching of units to the device before they are used, and eviction afterwards.

[Note: threads and slots]
The training thread fetches, binds, unbinds and evicts units. It does so only when a unit is used or
a gradient arrives, so no memory is freed under a running operation. The optimizer thread assigns
free slots to pending units and fills them. Both hold `SlotLedger.changed` for every transition.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection

import torch

from infinity.errors import ResidencyError, TransferError
from infinity.model.parameters import ParameterBinding
from infinity.offload.bound_units import BoundUnits
from infinity.offload.exchange import GradientExchange
from infinity.offload.failure import FailureLatch
from infinity.offload.fetcher import Fetcher
from infinity.offload.handover import LOOK_AGAIN_S, UpdateHandover
from infinity.offload.slots import Residency, SlotLedger
from infinity.offload.state import StateStore
from infinity.offload.transfers import Transfers
from infinity.offload.unit_gather import MAX_AHEAD, UnitGather
from infinity.plan import access_order
from infinity.plan.access_order import NEVER, AccessOrder
from infinity.plan.plan import Plan, publishes
from infinity.storage.store import Priority
from infinity.types import Kind


class Prefetcher:
    """Makes units resident in access order; used by the training thread alone.

    Other components share its `ledger` of slots, its `bound` units, the `handover` to the optimizer
    pass, and the `failure` latch of the engine.
    """

    def __init__(
        self,
        plan: Plan,
        transfers: Transfers,
        store: StateStore,
        binding: ParameterBinding,
        exchange: GradientExchange | None = None,
    ) -> None:
        self._plan = plan
        self._transfers = transfers
        self._device = transfers.device
        self._store = store
        self.ledger = ledger = SlotLedger(plan, transfers.device)
        self._entries = ledger.entries
        self.failure = FailureLatch(transfers, store.ranks, ledger.changed)
        self.bound = BoundUnits(plan, ledger, binding, self.failure)
        self.handover = UpdateHandover(plan, transfers, ledger, self.failure)
        self._fetcher = Fetcher(plan, transfers, store, ledger, self.failure)
        self._slots = _LiveSlots(plan, ledger, self.bound, self._fetcher)
        self._gather: UnitGather | None = None  # None on a single rank
        if exchange is not None:
            self._gather = UnitGather(plan, transfers, store, ledger, exchange)
        self.order: AccessOrder | None = None
        self.wraps = True
        self.must_retry = False  # a prefetch found no free slot yet
        for unit in range(len(plan.units)):
            if not plan.units[unit].slot_bytes:  # only parameters without elements
                ledger.add_permanent(unit, torch.empty(0, dtype=torch.uint8))
            elif plan.computes_where_stored(unit):
                weight = store.units[unit].memory[Kind.WEIGHT].addressable_view(by_device=True)
                assert weight is not None
                ledger.add_permanent(unit, weight)

    def free(self) -> None:
        """Free the slots and staging buffers."""
        self.ledger.free()
        self._fetcher.free()

    # --- use of units ----------------------------------------------------------------------------

    def use(self, unit: int, *, bind: bool = True) -> None:
        """Make the unit resident and bind it (unless `bind` is False); prefetch the next."""
        self._device.sync_compute_stream()
        entry = self._entries[unit]
        if unit == self.ledger.current and entry.residency is Residency.RESIDENT and entry.gathered:
            if bind and not entry.bound:  # an earlier call released it
                self.ensure_resident(unit)
            if self.must_retry:
                self._prefetch()
            return
        self.ledger.current = unit
        if self.order is not None:
            self.order.advance(unit)
        if self._gather is None:
            self.ensure_resident(unit, bind=bind)
            self._prefetch()
            return
        with self._gather.around_use(unit):
            self.ensure_resident(unit, bind=False)
            self._prefetch()
            with self._transfers.stall("gather", unit):
                self._gather.synchronize(unit, self._next_in_slots())
            if bind and not entry.bound:
                self.bound.bind(unit)

    def ensure_resident(self, unit: int, *, bind: bool = True) -> None:
        """Block until the unit is resident, evicting others if needed; bind it if `bind`."""
        entry = self._entries[unit]
        while True:
            self.failure.check()
            if entry.residency is Residency.RESIDENT:
                break
            if entry.residency is Residency.FETCHING:
                self._fetcher.finish(unit)
            elif entry.residency is Residency.OFFLOADED:
                with self.ledger.changed:  # held for both, so that no update takes the freed slot
                    self._require_slot(unit)
                    self._fetcher.start(unit, Priority.URGENT)
            else:
                self.handover.await_update(unit, self._require_slot)
        if not entry.bound and not entry.ready.done():
            with self._transfers.stall("copy", unit):
                self._device.compute_wait(entry.ready)
        if entry.gathered:
            self.ledger.dequantize(unit)
        if bind and not entry.bound:
            self.bound.bind(unit)

    def follow(self, order: AccessOrder | None, *, wraps: bool = True) -> None:
        """Set the access order to prefetch along; `wraps` is False if a step follows its end."""
        self.order, self.wraps = order, wraps

    def poll(self) -> None:
        """Poll in-flight reads and retry deferred prefetches. Never blocks."""
        self._fetcher.poll()
        if self.must_retry:
            self._prefetch()

    def _next_in_slots(self) -> list[int]:
        """Return the next units of the access order whose local shard is in a slot."""
        units: list[int] = []
        if self.order is None:
            return units
        device = self._device
        count = min(self._plan.prefetch_units, MAX_AHEAD)
        for unit in self.order.upcoming(count, wraps=self.wraps):
            entry = self._entries[unit]
            landed = entry.ticket is None or entry.ticket.done()
            if entry.residency is Residency.FETCHING and landed:
                with contextlib.suppress(TransferError):  # raised again when the unit is used
                    self._fetcher.finish(unit)
            # An asynchronous device orders the gather after the copy; a host would block on it.
            if entry.residency is Residency.RESIDENT and (
                entry.ready.done() or not device.host_clock
            ):
                units.append(unit)
        return units

    def _prefetch(self) -> None:
        if self.order is None or not self._plan.slot_classes:
            return
        with self.ledger.changed:
            self.must_retry = not access_order.prefetch(
                self._slots, self.order, self._plan.prefetch_units, wraps=self.wraps
            )

    def _distance(self, unit: int) -> int:
        return self.order.distance(unit, wraps=self.wraps) if self.order is not None else NEVER

    def _require_slot(self, unit: int) -> None:
        """Free a slot for the unit, or raise `ResidencyError`; callers hold `changed`."""
        ledger, slots = self.ledger, self._slots
        slot_class = slots.class_of(unit)
        if slot_class is None:
            return
        entry = self._entries[unit]
        has_waited = False
        while entry.slot is None and not slots.num_free(slot_class):
            # First a slot of the unit's class, as the forecast assumes; then any larger slot.
            if access_order.make_slot_free(slots, slot_class, self._distance):
                return
            if ledger.free_slot(unit) is not None:
                return
            if any(
                access_order.make_slot_free(slots, wider, self._distance)
                or self._evict_fetching(wider)
                for wider in range(slot_class, -1, -1)
            ):
                return
            if not ledger.is_filled_by_optimizer(slot_class):
                if has_waited:
                    raise ledger.no_slot_error(unit, slot_class)
                has_waited = True
                ledger.changed.wait(LOOK_AGAIN_S)
                continue
            with self._transfers.stall("slot", unit):  # the optimizer pass is filling one
                ledger.changed.wait()
            self.failure.check()

    def _evict_fetching(self, slot_class: int) -> bool:
        """Finish a fetch into the class and evict its unit; return False if no slot became free."""
        fetching = [
            slot.owner
            for slot in self.ledger.slots
            if slot.slot_class == slot_class
            and slot.owner is not None
            and self._entries[slot.owner].residency is Residency.FETCHING
        ]
        for unit in sorted(fetching, key=lambda u: (-self._distance(u), u)):
            self._fetcher.finish(unit)
            if self._slots.try_evict(unit):
                return True
        return False

    # --- stale weights ---------------------------------------------------------------------------

    def make_pending(self, units: Collection[int]) -> None:
        """Mark the weights of these units as stale: an optimizer pass will replace them.

        Raises the first `ResidencyError` of an edited parameter, after all units are pending.
        """
        edit_error: ResidencyError | None = None
        for unit in units:
            if self._entries[unit].residency is Residency.FETCHING:
                try:
                    self._fetcher.finish(unit)
                except TransferError:  # the weights that it fetched are stale
                    self.failure.check()
                    self._fetcher.abandon(unit)
        with self.ledger.changed:
            for unit in units:
                if self._entries[unit].residency is Residency.RESIDENT:
                    try:
                        self.bound.evict(unit)
                    except ResidencyError as error:
                        edit_error = edit_error or error
                self._store.stale(unit)
            self.handover.begin(units)
        self.ledger.current = -1
        if edit_error is not None:
            raise edit_error

    def drop(self, unit: int) -> None:
        """Discard the unit's copy on the device: the stored weights were or will be edited."""
        if self._entries[unit].residency is Residency.FETCHING:
            self._fetcher.finish(unit)
        with self.ledger.changed:
            entry = self._entries[unit]
            if entry.residency is not Residency.RESIDENT:
                return
            self.bound.evict(unit)

    def recover(self) -> None:
        """Unbind and evict everything, and cancel fetches, after an exception in a call.

        Slots are evicted because a traceback may hold views of them, which reference counts do not
        distinguish from those of the ledger.
        """
        self._device.synchronize()
        self.ledger.current, self.must_retry = -1, False
        for unit, entry in enumerate(self._entries):
            entry.forward_depth = 0
            if entry.bound:
                self.bound.release(unit)
            if entry.residency is Residency.FETCHING:
                self._fetcher.abandon(unit)
            elif entry.residency is Residency.RESIDENT and self._slots.class_of(unit) is not None:
                with self.ledger.changed:
                    self.bound.evict(unit)


class _LiveSlots:
    """`SlotView` of the rule in `plan/access_order.py`, over the ledger; callers hold `changed`."""

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

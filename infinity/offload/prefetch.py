"""Prefetches units to the device before they are used, and evicts them afterwards.

[Note: threads and slots]
The training thread fetches, binds, unbinds and evicts, only at uses and as gradients arrive, so
that no memory is freed under a running operation. The optimizer thread takes free slots for pending
units, and fills them. Both hold `SlotLedger.changed` for every transition.

[Note: no deadlock on slots]
The optimizer pass waits for a slot only while the training thread computes. When the training
thread waits for a unit it first frees a slot for it, and its demand lifts the pacing: the optimizer
pass updates that unit next, and units it cannot publish are written back instead.

[Note: released]
Parameters are bound while a call runs, and released when it returns: their unit keeps its slot, and
is bound again at its next use, which costs a microsecond a parameter. A unit accessed outside a
call (`engine.module.norm.weight`) stays bound, since the caller will read it, and its checksum is
compared when the next call begins (CRC32C, some 5 GB/s, of that unit alone).

[Note: several ranks]
Which units are fetched, published and in slots depends on timing, and so differs between ranks. So
ranks synchronize at every use of another unit (`_synchronize`), whatever their slots hold, and
all-gather its weights if any rank has only its shard. Each rank also reports which of the next
units have their shard in a slot: those that all ranks reported are gathered while compute runs, and
are there, or nearly, when they are used. Only reports decide, never the state of a transfer.
Gradients that are complete on all ranks start to be exchanged there too. A slot is not evicted
during a gather.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from functools import partial

import torch
from torch import Tensor

from infinity.distributed.context import NOTES
from infinity.errors import EngineFailedError, MachineError, ResidencyError, TransferError
from infinity.model.parameters import Edit, ParameterBinding
from infinity.offload.exchange import GradientExchange
from infinity.offload.slots import Residency, Slot, SlotLedger, UnitEntry
from infinity.offload.state import StateStore
from infinity.offload.transfers import Transfers
from infinity.plan import access_order
from infinity.plan.access_order import NEVER, AccessOrder
from infinity.plan.budget import fetch_bytes, num_fetch_buffers
from infinity.plan.plan import Plan, UpdatePlace, publishes, update_place
from infinity.storage.device import HAPPENED, Event, after_all
from infinity.storage.disk import checksum
from infinity.storage.staging import BufferPool
from infinity.storage.store import Priority, together
from infinity.types import Kind


class Prefetcher:
    """Fetches, prefetches and evicts units; the only writer of residency on the training thread."""

    def __init__(
        self, plan: Plan, transfers: Transfers, store: StateStore, binding: ParameterBinding
    ) -> None:
        self.plan = plan
        self.transfers = transfers
        self.binding = binding
        self.ledger = SlotLedger(plan, transfers.device)
        self.changed = self.ledger.changed
        self.entries = self.ledger.entries
        self.current = -1  # the unit in use
        self.reached: set[int] = set()  # bound, and reached for outside a call
        self.failure: BaseException | None = None
        self._proved: set[tuple[int, bool]] = set()  # units whose first forward was looked at
        units = range(len(plan.units))
        self._updated_there = {u for u in units if update_place(plan, u) is UpdatePlace.DEVICE}
        self.store = store
        self.ranks = store.ranks
        self.exchange: GradientExchange | None = None  # of several ranks
        self.order: AccessOrder | None = None
        self.wraps = True
        self.demand: int | None = None  # the unit the training thread waits for
        self.paced = True
        self.mispredictions = 0
        self.retries = False  # a slot could not be had yet: prefetch is asked for again
        # In which reads land on their way to a device with memory of its own.
        self._staging = BufferPool(num_fetch_buffers(plan), fetch_bytes(plan), transfers.device)
        for unit in units:
            if not plan.units[unit].slot_bytes:  # only parameters without elements
                self.ledger.add_permanent(unit, torch.empty(0, dtype=torch.uint8))
            elif plan.computes_at_rest(unit):
                at_rest = store.units[unit].memory[Kind.WEIGHT].reached(by_device=True)
                assert at_rest is not None
                self.ledger.add_permanent(unit, at_rest)

    def forget(self) -> None:
        """Free the slots and staging buffers, once no gather fills them."""
        for entry in self.entries:
            self._end_gather(entry)
        self.ledger.forget()
        self._staging.forget()

    # --- uses: the training thread -----------------------------------------------------------

    def use(self, unit: int, *, bind: bool = True) -> None:
        """Make the unit resident and bind it (unless `bind` is False); prefetch the next ones."""
        self.transfers.device.sync_compute_stream()
        entry = self.entries[unit]
        if unit == self.current and entry.residency is Residency.RESIDENT and entry.gathered:
            if bind and not entry.bound:  # since a call ended
                self.ensure_resident(unit)
            if self.retries:
                self._prefetch()
            return
        self.current = unit
        if self.order is not None:
            self.order.advance(unit)
        if self.exchange is None:
            self.ensure_resident(unit, bind=bind)
            self._prefetch()
            return
        with self.ranks.propagate_errors(self._using(unit)):
            self.ensure_resident(unit, bind=False)
            self._prefetch()
            with self.transfers.stall("gather", unit):
                self._synchronize(unit, self.exchange)
            if bind and not entry.bound:
                self.bind(unit)

    def ensure_resident(self, unit: int, *, bind: bool = True) -> None:
        """Block until the unit is resident, evicting others if needed; `bind` its parameters."""
        entry = self.entries[unit]
        while True:
            self.check()
            if entry.residency is Residency.RESIDENT:
                break
            if entry.residency is Residency.FETCHING:
                self._finish_fetch(unit)
            elif entry.residency is Residency.OFFLOADED:
                with self.changed:  # held over both: no update may take the freed slot
                    self._require_slot(unit)
                    self.fetch(unit, Priority.URGENT)
            else:
                self._await_update(unit)
        if not entry.bound and not entry.ready.done():
            with self.transfers.stall("copy", unit):
                self.transfers.device.compute_wait(entry.ready)
        if entry.gathered:
            self.ledger.dequantise(unit)
        if bind and not entry.bound:
            self.bind(unit)

    def _using(self, unit: int) -> str:
        return f"uses unit {self.plan.units[unit].name!r}"

    def _synchronize(self, unit: int, exchange: GradientExchange) -> None:
        """Synchronize on the use of a unit whose local shard is in a slot; gather it if needed.

        Raises `TrainingError` if another rank uses another unit, or failed.
        """
        entry, ready, next_units = self.entries[unit], exchange.ready(), self._next_in_slots()
        coming = [_HAVE * other + self._has(other) for other in next_units]
        coming += [_NOTHING] * (_MAX_AHEAD - len(coming))
        reports = self.ranks.synchronize(self._using(unit), self._has(unit), ready, *coming)
        # Until all is started that they agreed on, nothing may fail on one rank alone.
        arrived = self._gather(unit, [has for has, *_ in reports])
        ahead = [{w // _HAVE: w % _HAVE for w in coming if w >= 0} for _, _, *coming in reports]
        for other in ahead[0]:
            if all(other in theirs for theirs in ahead):
                self._gather(other, [theirs[other] for theirs in ahead])
        exchange.send_ready([theirs for _, theirs, *_ in reports])
        if not arrived:
            self.store.settle_brought(unit)
            self.ranks.synchronize(f"shares unit {self.plan.units[unit].name!r}")
            self._gather(unit, [_HERE])
        if entry.gathering is not None:
            self.transfers.device.compute_wait(entry.gathering)
        entry.gathered, entry.gathering = True, None
        self.ledger.dequantise(unit)

    def _has(self, unit: int) -> int:
        """Return whether the slot holds all shards, or will; or they can be gathered; or those of
        other nodes must be fetched first.
        """
        entry = self.entries[unit]
        if entry.gathered or entry.gathering is not None:
            return _WHOLE
        return _HERE if self.store.is_here(unit) else _OWN

    def _next_in_slots(self) -> list[int]:
        """Return the next units in the order whose shard, at least, is in a slot."""
        found: list[int] = []
        if self.order is None:
            return found
        device, count = self.transfers.device, min(self.plan.prefetch_units, _MAX_AHEAD)
        for unit in self.order.upcoming(count, wraps=self.wraps):
            entry = self.entries[unit]
            landed = entry.ticket is None or entry.ticket.done()
            if entry.residency is Residency.FETCHING and landed:
                with contextlib.suppress(TransferError):  # its use raises that
                    self._finish_fetch(unit)
            # A device with an order of its own waits for the copy; a host would be held up.
            if entry.residency is Residency.RESIDENT and (
                entry.ready.done() or not device.host_clock
            ):
                found.append(unit)
        return found

    def _gather(self, unit: int, availability: Collection[int]) -> bool:
        """Start to all-gather the unit if a rank lacks it; all ranks start it now.

        Returns False, and requests the shards of other nodes, where these must be fetched first.
        """
        if min(availability) == _WHOLE:
            return True
        if min(availability) == _OWN:
            self.store.bring(unit)
            return False
        entry = self.entries[unit]
        assert entry.slot is not None
        whole = entry.slot.alias()  # torch's threads may refer to it after the end
        gathering = self.store.gather(unit, whole, entry.ready)
        entry.gathering = together([e for e in (entry.gathering, gathering) if e is not None])
        return True

    def _end_gather(self, entry: UnitEntry) -> None:
        """Wait for a gather whose result is no longer needed."""
        gathering, entry.gathering = entry.gathering, None
        if gathering is not None:
            with contextlib.suppress(MachineError):  # lost others show where ranks meet
                gathering.wait()

    def follow(self, order: AccessOrder | None, *, wraps: bool = True) -> None:
        """Set the order to prefetch along; it `wraps` unless a step follows its end."""
        self.order, self.wraps = order, wraps

    def poll(self) -> None:
        """Poll in-flight reads and retry deferred prefetches. Never blocks."""
        if self._staging.count:
            for unit, entry in enumerate(self.entries):
                if entry.ticket is not None and entry.staging is not None and entry.ticket.done():
                    self._copy_landed(unit)
        if self.retries:
            self._prefetch()

    def check(self) -> None:
        """Raise the error of a failed update, or of a drive that does not complete requests."""
        if self.transfers.stuck is not None:
            self.fail(self.transfers.stuck)
        if self.failure is not None:
            raise EngineFailedError(
                f"an earlier failure left the state incomplete: {self.failure}",
                remedy="close the engine, and resume from the last commit (`resume: auto`) or "
                "checkpoint",
            ) from self.failure

    def _await_update(self, unit: int) -> None:
        """Wait until the optimizer pass has updated the unit."""
        entry = self.entries[unit]
        with self.transfers.stall("update", unit), self.changed:
            self.demand = unit
            self.changed.notify_all()
            try:
                while entry.residency is Residency.PENDING and self.failure is None:
                    if entry.slot is None:
                        self._require_slot(unit)
                    if entry.residency is Residency.PENDING:  # it may have waited there
                        self.changed.wait()
            finally:
                self.demand = None

    def lift_pacing(self) -> None:
        """Let no update wait for a slot from now on; the caller holds `changed`."""
        self.paced = False
        self.changed.notify_all()

    def await_consumed(self, unit: int) -> None:
        """Wait until no optimizer pass reads the unit's gradients, before they are written again.

        A forward through the unit has waited already; this is for graphs older than the last step,
        parts of which need no weights.
        """
        entry = self.entries[unit]
        if entry.residency is Residency.PENDING:
            with self.transfers.stall("update", unit), self.changed:
                self.lift_pacing()
                while entry.residency is Residency.PENDING and self.failure is None:
                    self.changed.wait()
            self.check()
        if unit in self._updated_there and not entry.ready.done():
            self.transfers.device.compute_wait(entry.ready)  # queued there, not yet over

    def _require_slot(self, unit: int) -> None:
        """Free a slot for the unit, or raise naming the units in all; callers hold `changed`."""
        slot_class = self.class_of(unit)
        if slot_class is None:
            return
        entry, looked_again = self.entries[unit], False
        while entry.slot is None and not self.num_free(slot_class):
            # One of its own class first, as the forecast has it; then whatever is large enough.
            if access_order.make_slot_free(self, slot_class, self._distance):
                return
            if self.ledger.free_slot(unit) is not None:
                return
            if any(
                access_order.make_slot_free(self, wider, self._distance) or self._call_off(wider)
                for wider in range(slot_class, -1, -1)
            ):
                return
            if not self.ledger.pass_fills(slot_class):
                if looked_again:
                    raise self.ledger.no_slot(unit, slot_class)
                looked_again = True
                self.changed.wait(_LOOK_AGAIN_S)
                continue
            with self.transfers.stall("slot", unit):  # the optimizer pass fills it without us
                self.changed.wait()
            self.check()

    def _call_off(self, slot_class: int) -> bool:
        """Cancel a wrong prefetch to free its slot, when every slot is being filled."""
        under_way = [
            slot.owner
            for slot in self.ledger.slots
            if slot.slot_class == slot_class
            and slot.owner is not None
            and self.entries[slot.owner].residency is Residency.FETCHING
        ]
        for unit in sorted(under_way, key=lambda u: (-self._distance(u), u)):
            self._finish_fetch(unit)
            if self.try_evict(unit):
                return True
        return False

    def _distance(self, unit: int) -> int:
        return self.order.distance(unit, wraps=self.wraps) if self.order is not None else NEVER

    def _prefetch(self) -> None:
        if self.order is None or not self.plan.slot_classes:
            return
        with self.changed:
            self.retries = not access_order.prefetch(
                self, self.order, self.plan.prefetch_units, wraps=self.wraps
            )

    # --- fetches -------------------------------------------------------------------------------

    def _finish_fetch(self, unit: int) -> None:
        entry = self.entries[unit]
        if entry.ticket is not None:
            with self.transfers.stall("disk_read", unit):
                entry.ticket.wait()
            if entry.staging is not None:
                self._copy_landed(unit)
            entry.ticket = None
        with self.changed:
            self.ledger.move(unit, Residency.RESIDENT)

    def _abandon_fetch(self, unit: int) -> None:
        """Release the slot of a fetch that failed or is no longer needed."""
        entry = self.entries[unit]
        if entry.ticket is not None:
            with contextlib.suppress(TransferError):
                entry.ticket.wait()
            if not entry.ticket.done():  # stuck: the slot is the kernel's for good
                return
        if entry.staging is not None:
            self._staging.give_back(entry.staging)
        entry.ticket = entry.staging = None
        with self.changed:
            self.ledger.evict(unit)
            self.ledger.move(unit, Residency.OFFLOADED)

    def _copy_landed(self, unit: int) -> None:
        """Copy a unit to the device once its read from disk has landed in RAM."""
        entry = self.entries[unit]
        assert entry.ticket is not None
        assert entry.staging is not None
        entry.ticket.wait()
        self._copy_in(unit, entry.staging)
        self._staging.give_back(entry.staging, entry.ready)
        entry.ticket = entry.staging = None

    def _copy_in(self, unit: int, own: Tensor) -> None:
        """Start to copy this rank's shard of the weights into the unit's slot."""
        entry, device, label = self.entries[unit], self.transfers.device, (unit, "weight")
        assert entry.slot is not None
        parts = self.store.shard_in(unit, entry.slot.memory)
        own = own[: sum(part.numel() for part in parts)]
        cut = zip(parts, self.store.cut(unit, own), strict=True)
        pairs = [(part, source) for part, source in cut if part.numel()]
        after = entry.slot.free_after
        if not self.store.units[unit].on_device(Kind.WEIGHT):
            copies = [self.transfers.copy_h2d(part, source, after, label) for part, source in pairs]
            entry.ready = together(copies)
            return
        device.compute_wait(after)  # a shard that rests there
        for part, source in pairs:
            part.copy_(source)
        entry.ready = device.compute_event()

    def _land_oldest(self) -> None:
        landed = next(u for u, e in enumerate(self.entries) if e.staging is not None)
        self._copy_landed(landed)

    def fetch(self, unit: int, priority: Priority = Priority.NORMAL) -> None:
        """Start to fetch the unit's weights from their tier into a free slot."""
        with self.changed:
            slot = self.ledger.free_slot(unit)
            assert slot is not None
            self.ledger.assign(unit, slot)
            entry = self.ledger.move(unit, Residency.FETCHING)
        entry.ready, label = HAPPENED, (unit, "weight")
        state = self.store.units[unit]
        source = state.in_ram(Kind.WEIGHT)
        if source is not None:
            self._copy_in(unit, source)
            return
        if state.writes:
            with self.transfers.stall("disk_write", unit):
                try:
                    self.store.settle_writes(unit)
                except TransferError as error:  # of an update, of which there is no second copy
                    self.fail(error)
                    raise
        if (rests := state.memory.get(Kind.WEIGHT)) is not None:
            source = rests.reached(by_device=True)
            assert source is not None
            self._copy_in(unit, source)
            return
        parts = self.store.shard_in(unit, slot.memory)
        if not self.plan.unified:
            stall = partial(self.transfers.stall, "copy")
            entry.staging = self._staging.take(self._land_oldest, stall)
            parts = (entry.staging[: state.layout.rest_bytes],)
        places = self.store.places(unit, Kind.WEIGHT, *parts)
        entry.ticket = self.transfers.read(places, priority, label)

    # --- updates -------------------------------------------------------------------------------

    def make_pending(self, units: Collection[int]) -> None:
        """Mark the weights of these units stale: an optimizer pass will replace them.

        Raises the first `ResidencyError` of an edited parameter, after all units are pending.
        """
        edited: ResidencyError | None = None
        for unit in units:
            if self.entries[unit].residency is Residency.FETCHING:
                try:
                    self._finish_fetch(unit)
                except TransferError:  # nobody needs the stale weights it was to bring
                    self.check()
                    self._abandon_fetch(unit)
        with self.changed:
            for unit in units:
                entry = self.entries[unit]
                if entry.residency is Residency.RESIDENT:
                    try:
                        self.evict(unit)
                    except ResidencyError as error:
                        edited = edited or error
                self.ledger.move(unit, Residency.PENDING)
                self.store.stale(unit)
            self.paced = True
        self.current = -1
        if edited is not None:
            raise edited

    def drop(self, unit: int) -> None:
        """Discard the unit's copy on the device: the stored weights were or will be edited."""
        if self.entries[unit].residency is Residency.FETCHING:
            self._finish_fetch(unit)
        with self.changed:
            entry = self.entries[unit]
            if entry.residency is not Residency.RESIDENT:
                return
            try:
                self.evict(unit)
            finally:  # an edited parameter is gone all the same
                if entry.slot is None:
                    self.ledger.move(unit, Residency.OFFLOADED)

    def edited(self, unit: int) -> None:
        """Note an edit of the unit's stored weights: graphs made before are stale."""
        self.entries[unit].updates += 1
        self.entries[unit].edits += 1

    def publish_slot(self, unit: int, first: Callable[[], object] | None = None) -> Slot | None:
        """Return the slot for an updated unit's weights, or None if they are only written back.

        Calls `first` before it waits or decides, if no slot is free.
        """
        if not self.publishes(unit):
            return None
        entry = self.entries[unit]
        while True:
            with self.changed:
                if entry.slot is not None:
                    return entry.slot
                slot_class = self.class_of(unit)
                assert slot_class is not None
                free = self.ledger.free_slots(slot_class)
                if not free and self.demand == unit:
                    wide = self.ledger.free_slot(unit)
                    free = [wide] if wide is not None else []
                if free:
                    self.ledger.assign(unit, free[0])
                    return free[0]
                if first is None:
                    other = self.demand if self.demand != unit else None
                    waits_for_later = other is not None and self.is_pending(other)
                    if waits_for_later or not self.paced or self.failure is not None:
                        self.mispredictions += 1
                        return None
                    self.changed.wait(_LOOK_AGAIN_S)
                    continue
            first()
            first = None

    def updated(self, unit: int, ready: Event) -> None:
        """Mark the unit's update as complete; it is resident if it was published to a slot."""
        with self.changed:
            entry = self.entries[unit]
            entry.ready = ready
            entry.updates += 1
            self.ledger.move(
                unit, Residency.RESIDENT if entry.slot is not None else Residency.OFFLOADED
            )

    def recover(self) -> None:
        """Unbind and evict everything, and cancel fetches, after an exception in a call.

        Slots are evicted because a traceback may hold views of them, which look like our own.
        """
        self.transfers.device.synchronize()
        self.current, self.retries = -1, False
        for unit, entry in enumerate(self.entries):
            entry.forward_depth = 0
            if entry.bound:
                self.release(unit)
            if entry.residency is Residency.FETCHING:
                self._abandon_fetch(unit)
            elif entry.residency is Residency.RESIDENT and self.class_of(unit) is not None:
                with self.changed:
                    self.evict(unit)
                    self.ledger.move(unit, Residency.OFFLOADED)

    # --- who holds slots, who could leave, and leaving: callers hold `changed` -------------------

    def class_of(self, unit: int) -> int | None:
        """Return the unit's slot class, or None if its weights are stored on the device."""
        return self.ledger.class_of[unit]

    def holds_slot(self, unit: int) -> bool:
        """Return True if a slot holds, or is about to hold, the unit's current weights."""
        return self.entries[unit].slot is not None

    def is_pending(self, unit: int) -> bool:
        """Return True if the optimizer pass owes the unit an update."""
        return self.entries[unit].residency is Residency.PENDING

    def publishes(self, unit: int) -> bool:
        """Return True if the optimizer pass writes the unit's new weights into a slot."""
        return publishes(self.plan, unit)

    def num_free(self, slot_class: int) -> int:
        """Return the number of free slots of the class."""
        return len(self.ledger.free_slots(slot_class))

    def evictable(self, slot_class: int) -> Collection[int]:
        """Return the units resident in slots of the class, except those inside a forward."""
        found = []
        for slot in self.ledger.slots:
            unit = slot.owner
            if slot.slot_class == slot_class and unit is not None and unit != self.current:
                entry = self.entries[unit]
                if entry.residency is Residency.RESIDENT and not entry.forward_depth:
                    found.append(unit)
        return found

    def try_evict(self, unit: int) -> bool:
        """Evict the unit; return False if its weights are still referenced."""
        slot = self.entries[unit].slot
        assert slot is not None
        if self.entries[unit].num_aliases > 0:
            return False
        try:
            self.evict(unit)
        finally:  # an edited parameter is gone all the same
            self.ledger.move(unit, Residency.OFFLOADED)
        # Another thread that looks at our frames keeps their views for a moment longer.
        return slot.is_free()

    def bind(self, unit: int) -> None:
        """Make the parameters of a resident unit views of its slot.

        Raises `ResidencyError` if one was edited while it was offloaded.
        """
        entry = self.entries[unit]
        assert entry.slot is not None
        if not entry.views:
            entry.views = self.binding.views(unit, entry.slot.views, entry.slot.flat)
        self.binding.bind(unit, entry.views)
        entry.bound = True

    def bind_if_resident(self, unit: int) -> None:
        """`bind` if a slot holds the weights."""
        entry = self.entries[unit] if unit >= 0 else None
        if entry is None or entry.residency is not Residency.RESIDENT or not entry.gathered:
            return
        self.transfers.device.sync_compute_stream()
        if not entry.bound:
            self.transfers.device.compute_wait(entry.ready)
            self.ledger.dequantise(unit)
            self.bind(unit)

    # --- what is bound, and edits of it --------------------------------------------------------

    def look_for_edits(self, unit: int, *, reached: bool) -> None:
        """Take checksums of a unit that user code may edit; `reached` if accessed outside a call.

        Inside a call this applies to the first forward with gradients, and the first without; see
        [Note: edits of bound parameters] in `model/parameters.py`.
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

    def verify(self, unit: int | None = None, *, every: bool = False) -> None:
        """Raise the error that `find_edit` returns."""
        error = self.find_edit(unit, every=every)
        if error is not None:
            raise error

    def find_edit(self, unit: int | None = None, *, every: bool = False) -> ResidencyError | None:
        """Return the error for an edited parameter, and offload it.

        Compares units that were accessed outside calls, and `unit`, or `every` one.
        """
        error = None
        also = range(len(self.entries)) if every else [] if unit is None else [unit]
        for other in self.reached.union(also):
            if self.entries[other].bound:
                found = self._edit_of(other)
                if found is not None:
                    self.release(other)
                error = error or found
            elif (placeholder := self.binding.edited(other)) is not None:
                self.binding.forget(other)
                error = error or placeholder.error()
        return error

    def release_all(self, *, reached: bool = False) -> None:
        """Unbind what a call bound; units stay in their slots; see [Note: released].

        Units accessed outside calls stay bound unless `reached`. Raises the first `ResidencyError`
        of an edited parameter, after all are unbound.
        """
        error = None
        for unit, entry in enumerate(self.entries):
            if entry.bound and (reached or unit not in self.reached):
                error = self.release(unit) or error
        if error is not None:
            raise error

    def release(self, unit: int) -> ResidencyError | None:
        """Unbind the unit's parameters; return the error if one was edited.

        Edited bytes are not used: the slot is evicted, or if it is the only copy the engine has
        failed.
        """
        entry = self.entries[unit]
        error = self._edit_of(unit)
        self.forget_bound(unit)
        if error is not None and entry.slot is not None and entry.slot.slot_class is not None:
            with self.changed:
                self.evict(unit)
                self.ledger.move(unit, Residency.OFFLOADED)
        return error

    def forget_bound(self, unit: int) -> None:
        """Unbind the unit's parameters without checking for edits."""
        entry = self.entries[unit]
        entry.bound, entry.checksums = False, None
        self.reached.discard(unit)
        self.binding.forget(unit)

    def _edit_of(self, unit: int) -> ResidencyError | None:
        """Return a description of an edit of the bound parameters of a unit, if there was one."""
        entry, edit = self.entries[unit], self.binding.edited(unit)
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
        """Store the first failure, which is permanent, and wake all waiting threads."""
        if isinstance(error, TransferError):
            error = error.untraced()
        self.ranks.mark_failed()
        with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()

    def evict(self, unit: int) -> None:
        """Unbind and end the residency; raise `ResidencyError` afterwards if there was an edit."""
        entry = self.entries[unit]
        slot = entry.slot
        assert slot is not None
        edited = None
        if entry.bound:
            edited = self._edit_of(unit)
            self.forget_bound(unit)
        self._end_gather(entry)
        slot.free_after = after_all(entry.ready, self.transfers.device.compute_event())
        self.ledger.evict(unit)
        if edited is not None:  # the edit is lost, the slot is not
            raise edited


_MAX_AHEAD = NOTES - 2  # units that a meeting tells of beside the one in use
_NOTHING = -1  # instead of one
_OWN, _HERE, _WHOLE, _HAVE = range(4)  # see `_has`
_LOOK_AGAIN_S = 0.1  # a slot is free when nothing refers to it any more, which nobody tells

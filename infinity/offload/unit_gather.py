"""All-gather of units' weights between ranks, into the slots that hold their shards.

[Note: several ranks]
Timing decides which units are fetched, published and in slots, so this differs between ranks.
Therefore ranks synchronize whenever another unit is used (`synchronize`), whatever their slots
hold, and all-gather its weights if any rank has only its shard. Each rank also reports which of the
next units have their shard in a slot: units that all ranks reported are gathered while compute
runs, and are complete, or nearly, when they are used. Only reports decide, never the state of a
transfer. The exchange of gradients that are complete on all ranks starts at the same points. A slot
is not evicted during a gather.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager

from infinity.distributed.context import NOTES
from infinity.offload.exchange import GradientExchange
from infinity.offload.slots import SlotLedger
from infinity.offload.state import StateStore
from infinity.offload.transfers import Transfers
from infinity.plan.plan import Plan
from infinity.storage.device import merge_events

MAX_AHEAD = NOTES - 2  # units that a rank reports in addition to the one in use
_NO_UNIT = -1  # padding of a report
# States of `_state_of`, and their number.
_INCOMPLETE, _GATHERABLE, _COMPLETE, _NUM_STATES = range(4)


class UnitGather:
    """All-gathers of units, which all ranks start together; used by the training thread alone."""

    def __init__(
        self,
        plan: Plan,
        transfers: Transfers,
        store: StateStore,
        ledger: SlotLedger,
        exchange: GradientExchange,
    ) -> None:
        self._plan = plan
        self._device = transfers.device
        self._store = store
        self._ranks = store.ranks
        self._entries = ledger.entries
        self._ledger = ledger
        self._exchange = exchange

    def around_use(self, unit: int) -> AbstractContextManager[None]:
        """Return a context that propagates exceptions of a use to all ranks."""
        return self._ranks.propagate_errors(self._operation(unit))

    def synchronize(self, unit: int, next_units: Sequence[int]) -> None:
        """Synchronize on the use of a unit whose local shard is in a slot; gather it if needed.

        `next_units` are the next units of the access order whose shard is in a slot, at most
        `MAX_AHEAD`.
        Raises `TrainingError` if another rank uses another unit, or failed.
        """
        entry = self._entries[unit]
        ready = self._exchange.ready()
        ahead = [_NUM_STATES * other + self._state_of(other) for other in next_units]
        ahead += [_NO_UNIT] * (MAX_AHEAD - len(ahead))
        state = self._state_of(unit)
        reports = self._ranks.synchronize(self._operation(unit), state, ready, *ahead)
        # No rank may fail alone before everything that the reports decide has started.
        started = self._gather(unit, [state for state, *_ in reports])
        states_by_rank = [
            {note // _NUM_STATES: note % _NUM_STATES for note in notes if note != _NO_UNIT}
            for _, _, *notes in reports
        ]
        for other in states_by_rank[0]:
            if all(other in states for states in states_by_rank):
                self._gather(other, [states[other] for states in states_by_rank])
        self._exchange.start_ready([ready for _, ready, *_ in reports])
        if not started:
            self._store.wait_remote_shards(unit)
            self._ranks.synchronize(f"shares unit {self._plan.units[unit].name!r}")
            self._gather(unit, [_GATHERABLE])
        if entry.gathering is not None:
            self._device.compute_wait(entry.gathering)
        entry.gathered, entry.gathering = True, None
        self._ledger.dequantize(unit)

    def _operation(self, unit: int) -> str:
        return f"uses unit {self._plan.units[unit].name!r}"

    def _state_of(self, unit: int) -> int:
        """Return the state of the unit's shards on this rank.

        `_COMPLETE`: the slot holds all shards, or a gather is in flight. `_GATHERABLE`: they can be
        gathered. `_INCOMPLETE`: those of other nodes must be fetched first.
        """
        entry = self._entries[unit]
        if entry.gathered or entry.gathering is not None:
            return _COMPLETE
        return _GATHERABLE if self._store.is_up_to_date(unit) else _INCOMPLETE

    def _gather(self, unit: int, availability: Collection[int]) -> bool:
        """Start to all-gather the unit if a rank needs it; all ranks start it now.

        If shards of other nodes must be fetched first, starts that instead and returns False.
        """
        if min(availability) == _COMPLETE:
            return True
        if min(availability) == _INCOMPLETE:
            self._store.fetch_stale(unit)
            return False
        entry = self._entries[unit]
        assert entry.slot is not None
        full = entry.slot.alias()  # torch's threads may hold a reference after the gather
        gathering = self._store.gather(unit, full, entry.ready)
        entry.gathering = merge_events([e for e in (entry.gathering, gathering) if e is not None])
        return True

"""The order in which a training cycle uses its units: learnt, and tolerant of mispredictions.

A cycle is what lies between the first forward after a backward and the end of the next backward
(one micro-batch); without gradients it is one call of the engine. The order starts from a guess
(`plan/usual_cycle.py`) and is replaced by what the last whole cycle really did.

[Note: one rule, two runs]
The functions below decide which unit leaves a slot (the one used farthest in the future) and which
is prefetched. The prefetcher calls them with real slots, `plan/forecast.py` with counted ones, so
predicted bytes are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

NEVER = 1 << 60


class AccessOrder:
    """One cycle's sequence of unit indices, and where in it the run is now.

    Consecutive uses of the same unit count as one. `position` is the index of the current use,
    -1 before the first.
    """

    def __init__(self, guess: Sequence[int]) -> None:
        self.sequence: list[int] = _collapse(guess)
        self.position = -1
        self.mispredictions = 0
        self._recorded: list[int] = []
        self._uses = _index(self.sequence)

    def begin(self) -> None:
        """Start a cycle."""
        self.position = -1
        self._recorded = []

    def end(self) -> None:
        """Finish a cycle: the recorded sequence is expected in the next one."""
        self.position = -1
        if self._recorded and self._recorded != self.sequence:
            self.sequence, self._uses = self._recorded, _index(self._recorded)
        self._recorded = []

    def advance(self, unit: int) -> None:
        """Note that `unit` is used now; an unexpected use is counted, never an error."""
        if not self._recorded or self._recorded[-1] != unit:
            self._recorded.append(unit)
        if 0 <= self.position < len(self.sequence) and self.sequence[self.position] == unit:
            return
        found = self._next_index(unit, self.position + 1)
        if found is None:
            self.mispredictions += 1
            return
        if found != self.position + 1:
            self.mispredictions += 1
        self.position = found

    def upcoming(self, count: int, *, wraps: bool) -> list[int]:
        """The next `count` distinct units after the current use, nearest first.

        With `wraps` the next cycle follows; without it (an update will make every weight stale)
        nothing lies behind the end.
        """
        found: list[int] = []
        length = len(self.sequence)
        current = self.sequence[self.position] if self.position >= 0 else None
        limit = length - 1 - self.position + (length if wraps else 0)
        for step in range(1, limit + 1):
            if len(found) == count:
                break
            unit = self.sequence[(self.position + step) % length]
            if unit not in found and unit != current:
                found.append(unit)
        return found

    def distance(self, unit: int, *, wraps: bool) -> int:
        """How many uses lie between now and the next use of `unit`; `NEVER` if there is none."""
        found = self._next_index(unit, self.position + 1)
        if found is not None:
            return found - self.position
        uses = self._uses.get(unit)
        if uses is None or not wraps:
            return NEVER
        return len(self.sequence) - self.position + uses[0]

    def first_uses(self) -> list[int]:
        """Every unit once, in the order of its first use: the order of an optimizer pass."""
        return list(dict.fromkeys(self.sequence))

    def _next_index(self, unit: int, start: int) -> int | None:
        for index in self._uses.get(unit, ()):
            if index >= start:
                return index
        return None


def _collapse(sequence: Sequence[int]) -> list[int]:
    return [u for i, u in enumerate(sequence) if i == 0 or sequence[i - 1] != u]


def _index(sequence: Sequence[int]) -> dict[int, list[int]]:
    uses: dict[int, list[int]] = {}
    for position, unit in enumerate(sequence):
        uses.setdefault(unit, []).append(position)
    return uses


# Which unit leaves a slot and which is fetched next: one rule, for the run and for its forecast.
#
# Access is cyclic, so recency says nothing; the unit whose next use is farthest away leaves. The
# prefetcher asks this rule with the real slots behind it, `forecast` with counted ones, so that
# predicted bytes equal moved bytes.


class SlotView(Protocol):
    """State and actions of slots for the rule. Units and slot classes are indices."""

    def class_of(self, unit: int) -> int | None:
        """The unit's slot class; None where its weights rest on the device."""

    def holds_slot(self, unit: int) -> bool:
        """Whether the unit's current weights are, or are on their way to be, in a slot."""

    def is_pending(self, unit: int) -> bool:
        """Whether the unit is still owed an update (which will bring it into a free slot)."""

    def publishes(self, unit: int) -> bool:
        """Whether the optimizer pass brings the unit's new weights into a slot itself."""

    def num_free(self, slot_class: int) -> int:
        """Free slots of a class."""

    def evictable(self, slot_class: int) -> Collection[int]:
        """Return the units of slots of this class that may be evicted now."""

    def try_evict(self, unit: int) -> bool:
        """Evict the unit; return False if its slot is still read."""

    def fetch(self, unit: int) -> None:
        """Start bringing the unit into a free slot."""


def make_slot_free(
    view: SlotView, slot_class: int, distance: Callable[[int], int], beyond: int = -1
) -> bool:
    """Free one slot by evicting the unit used farthest in the future, if that is `beyond`."""
    for unit in sorted(view.evictable(slot_class), key=lambda unit: (-distance(unit), unit)):
        if distance(unit) <= beyond:
            return False
        if view.try_evict(unit):
            return True
    return False


def prefetch(view: SlotView, order: AccessOrder, count: int, *, wraps: bool) -> bool:
    """Make room for and fetch the next `count` units; False if a slot could not be had yet."""
    promised: dict[int, int] = {}
    complete = True
    for unit in order.upcoming(count, wraps=wraps):
        slot_class = view.class_of(unit)
        if slot_class is None or view.holds_slot(unit):
            continue
        taken = promised.get(slot_class, 0)
        if view.num_free(slot_class) <= taken and not make_slot_free(
            view,
            slot_class,
            lambda u: order.distance(u, wraps=wraps),
            beyond=order.distance(unit, wraps=wraps),
        ):
            return False
        if view.is_pending(unit):
            promised[slot_class] = taken + 1
            complete = complete and view.publishes(unit)
        else:
            view.fetch(unit)
    return complete

"""Which unit leaves a slot and which is fetched next: one rule, for the run and for its forecast.

Access is cyclic, so recency says nothing; the unit whose next use is farthest away leaves. The
mover asks this rule with the real slots behind it, `forecast` with counted ones, so that
predicted bytes equal moved bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from infinity.plan.tape import Tape


class SlotView(Protocol):
    """What the rule may know and do. Units and slot classes are indices."""

    def class_of(self, unit: int) -> int | None:
        """The unit's slot class; None where its weights rest on the device."""

    def holds_slot(self, unit: int) -> bool:
        """Whether the unit's current weights are, or are on their way to be, in a slot."""

    def is_pending(self, unit: int) -> bool:
        """Whether the sweep still owes the unit an update (it will bring it into a free slot)."""

    def publishes(self, unit: int) -> bool:
        """Whether the sweep brings the unit's new weights into a slot itself."""

    def num_free(self, slot_class: int) -> int:
        """Free slots of a class."""

    def evictable(self, slot_class: int) -> Collection[int]:
        """Units whose slots of this class could be given up now."""

    def evict(self, unit: int) -> bool:
        """Give up the unit's slot; False if something still reads it."""

    def fetch(self, unit: int) -> None:
        """Start bringing the unit into a free slot."""


def make_slot_free(
    view: SlotView, slot_class: int, distance: Callable[[int], int], nearer_than: int = -1
) -> bool:
    """Free one slot by evicting the unit used farthest in the future, beyond `nearer_than`."""
    candidates = sorted(view.evictable(slot_class), key=lambda u: (-distance(u), u))
    for unit in candidates:
        if distance(unit) <= nearer_than:
            return False
        if view.evict(unit):
            return True
    return False


def look_ahead(view: SlotView, tape: Tape, count: int, *, wraps: bool) -> bool:
    """Make room for and fetch the next `count` units; False if a slot could not be had yet."""
    promised: dict[int, int] = {}
    complete = True
    for unit in tape.upcoming(count, wraps=wraps):
        slot_class = view.class_of(unit)
        if slot_class is None or view.holds_slot(unit):
            continue
        taken = promised.get(slot_class, 0)
        if view.num_free(slot_class) <= taken and not make_slot_free(
            view,
            slot_class,
            lambda u: tape.distance(u, wraps=wraps),
            nearer_than=tape.distance(unit, wraps=wraps),
        ):
            return False
        if view.is_pending(unit):
            promised[slot_class] = taken + 1
            complete = complete and view.publishes(unit)
        else:
            view.fetch(unit)
    return complete

"""Learned access order of a training cycle, and the rule for eviction and prefetching.

A cycle lasts from the first forward after a backward to the end of the next backward (one
micro-batch); without gradients it is one call of the engine. The order starts as a guess
(`usual_cycle`) and is replaced by the order recorded in the last complete cycle.
Mispredictions are counted and are never an error.

[Note: one rule, two runs]
The functions below choose the unit to evict from a slot (the one used farthest in the future, since
recency predicts nothing in cyclic access) and the units to prefetch. The prefetcher calls them with
real slots, `plan/forecast.py` with simulated ones, so predicted bytes equal the bytes moved.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import groupby
from typing import Protocol

from infinity.config.schema import Recompute
from infinity.plan.activations import blocks_of
from infinity.plan.layout import UnitLayout
from infinity.plan.plan import Plan

NEVER = 1 << 60


class AccessOrder:
    """Sequence of unit indices of one cycle, and the current position of the run.

    Consecutive uses of the same unit count as one. `position` is the index of the current use,
    -1 before the first.
    """

    def __init__(self, guess: Sequence[int]) -> None:
        self.sequence = [unit for unit, _ in groupby(guess)]
        self.position = -1
        self.mispredictions = 0
        self._recorded: list[int] = []
        self._uses = _index(self.sequence)

    def begin(self) -> None:
        """Start a cycle."""
        self.position = -1
        self._recorded = []

    def end(self) -> None:
        """Finish a cycle and expect the recorded sequence in the next one."""
        self.position = -1
        if self._recorded and self._recorded != self.sequence:
            self.sequence, self._uses = self._recorded, _index(self._recorded)
        self._recorded = []

    def advance(self, unit: int) -> None:
        """Record a use of `unit`; an unexpected one is counted as a misprediction."""
        if not self._recorded or self._recorded[-1] != unit:
            self._recorded.append(unit)
        if 0 <= self.position < len(self.sequence) and self.sequence[self.position] == unit:
            return
        index = self._next_index(unit, self.position + 1)
        if index is None:
            self.mispredictions += 1
            return
        if index != self.position + 1:
            self.mispredictions += 1
        self.position = index

    def upcoming(self, count: int, *, wraps: bool) -> list[int]:
        """Return up to `count` distinct units used after the current one, nearest first.

        With `wraps` the search continues in the next cycle; without it (an update will make every
        weight stale) it stops at the end of this one.
        """
        units: list[int] = []
        length = len(self.sequence)
        current = self.sequence[self.position] if self.position >= 0 else None
        limit = length - 1 - self.position + (length if wraps else 0)
        for step in range(1, limit + 1):
            if len(units) == count:
                break
            unit = self.sequence[(self.position + step) % length]
            if unit not in units and unit != current:
                units.append(unit)
        return units

    def distance(self, unit: int, *, wraps: bool) -> int:
        """Return the number of uses until the next use of `unit`, or `NEVER` if there is none."""
        index = self._next_index(unit, self.position + 1)
        if index is not None:
            return index - self.position
        uses = self._uses.get(unit)
        if uses is None or not wraps:
            return NEVER
        return len(self.sequence) - self.position + uses[0]

    def first_uses(self) -> list[int]:
        """Return every unit once, by first use: the order of an optimizer pass."""
        return list(dict.fromkeys(self.sequence))

    def _next_index(self, unit: int, start: int) -> int | None:
        for index in self._uses.get(unit, ()):
            if index >= start:
                return index
        return None


def _index(sequence: Sequence[int]) -> dict[int, list[int]]:
    uses: dict[int, list[int]] = {}
    for position, unit in enumerate(sequence):
        uses.setdefault(unit, []).append(position)
    return uses


class SlotView(Protocol):
    """Interface of slots for the rule; units and slot classes are indices."""

    def class_of(self, unit: int) -> int | None:
        """Return the unit's slot class, or None if its weights are stored on the device."""

    def holds_slot(self, unit: int) -> bool:
        """Return True if a slot holds, or is about to hold, the unit's current weights."""

    def is_pending(self, unit: int) -> bool:
        """Return True if the optimizer pass has not updated the unit yet."""

    def publishes(self, unit: int) -> bool:
        """Return True if the optimizer pass writes the unit's new weights into a slot."""

    def num_free(self, slot_class: int) -> int:
        """Return the number of free slots of a class."""

    def evictable(self, slot_class: int) -> Collection[int]:
        """Return the units in slots of this class that may be evicted now."""

    def try_evict(self, unit: int) -> bool:
        """Evict the unit; return False if its slot is still in use."""

    def fetch(self, unit: int) -> None:
        """Start to fetch the unit into a free slot."""


def make_slot_free(
    view: SlotView, slot_class: int, distance: Callable[[int], int], beyond: int = -1
) -> bool:
    """Evict the unit used farthest in the future, if that is more than `beyond` uses away.

    Return False if no slot was freed.
    """
    for unit in sorted(view.evictable(slot_class), key=lambda unit: (-distance(unit), unit)):
        if distance(unit) <= beyond:
            return False
        if view.try_evict(unit):
            return True
    return False


def prefetch(view: SlotView, order: AccessOrder, count: int, *, wraps: bool) -> bool:
    """Fetch the next `count` units of the order, evicting others to free slots.

    Return False if it must be called again: no slot could be freed yet, or a pending unit can be
    fetched only after its update.
    """
    reserved: dict[int, int] = {}
    complete = True
    for unit in order.upcoming(count, wraps=wraps):
        slot_class = view.class_of(unit)
        if slot_class is None or view.holds_slot(unit):
            continue
        num_reserved = reserved.get(slot_class, 0)
        if view.num_free(slot_class) <= num_reserved and not make_slot_free(
            view,
            slot_class,
            lambda u: order.distance(u, wraps=wraps),
            beyond=order.distance(unit, wraps=wraps),
        ):
            return False
        if view.is_pending(unit):
            reserved[slot_class] = num_reserved + 1
            complete = complete and view.publishes(unit)
        else:
            view.fetch(unit)
    return complete


def usual_cycle(plan: Plan, *, backward: bool = True) -> tuple[int, ...]:
    """Return the unit indices in the order in which a micro-batch is expected to use them.

    Module order in forward, and the reverse in backward, with these exceptions:

    - A unit outside the blocks that holds a norm or a head after them (`UnitLayout.at_end`) is used
      again after the blocks. Backward does not use embeddings (`UnitLayout.looked_up`).
    - A block that is recomputed, by the engine or by the model, uses its units in forward order at
      the beginning of its backward.
    - A block whose slices share ranges of experts runs up to its experts, and then again: in
      forward, in the recomputation, and between the two passes over its ranges in backward. See
      `offload/shared_ranges.py`.

    With `backward` False only those of the forward.
    """
    recompute: Recompute = "all" if plan.model_recomputes else plan.saved.recompute
    cache = plan.facts.known
    key = ("cycle", recompute, plan.shared_stacks, backward)
    if key not in cache:
        accesses, backward_accesses = _cycle(plan.units, recompute, plan.shared_stacks)
        if backward:
            accesses += backward_accesses
        cache[key] = tuple(AccessOrder(accesses).sequence)
    cycle: tuple[int, ...] = cache[key]
    return cycle


def _cycle(
    units: Sequence[UnitLayout], recompute: Recompute, shared: Collection[str]
) -> tuple[list[int], list[int]]:
    """Return the access orders of a forward, and of its backward."""
    forward: list[int] = []
    backward: list[list[int]] = []  # accesses of each block, blocks in forward order
    num_recomputed = len(units) if recompute == "all" else recompute
    for block in sorted(blocks_of(units), key=lambda block: min(unit.index for unit in block)):
        path = [unit.index for unit in block]  # the block's unit, then units inside it
        is_shared = any(unit.is_range and unit.stacks_path in shared for unit in block)
        forward_path = [*path, path[0]] if is_shared else path
        is_recomputed = block[0].is_block and num_recomputed > 0
        num_recomputed -= block[0].is_block
        forward += forward_path
        reversed_path = [] if block[0].looked_up else path[::-1]
        runs_again = is_shared or is_recomputed
        backward.append([*forward_path, *reversed_path] if runs_again else reversed_path)
    at_end = [unit.index for unit in reversed(units) if unit.at_end]
    order = [*at_end[::-1], *(unit for block in reversed(backward) for unit in block)]
    return [*forward, *at_end], order

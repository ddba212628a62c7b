"""Host buffers in which disk reads land on their way to a device with memory of its own."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from infinity.memory.device import HAPPENED, Event
from infinity.memory.host import arena_for
from infinity.memory.lanes import Lanes
from infinity.plan.plan import Plan
from infinity.plan.reserve import largest_slot, num_landings


class Landings:
    """A landing is free, being read into, or being copied from (its event has not happened)."""

    def __init__(self, plan: Plan, lanes: Lanes) -> None:
        self._lanes = lanes
        nbytes, count = largest_slot(plan), num_landings(plan)
        arena = arena_for([nbytes] * count)
        if count:
            lanes.device.pin(arena)
        self._buffers = [arena.carve(nbytes) for _ in range(count)]
        self._events: list[Event | None] = [HAPPENED] * count  # None: being read into

    def __len__(self) -> int:
        return len(self._buffers)

    def take(self, land_one: Callable[[], None]) -> int:
        """A landing to read into. `land_one` must turn one that is read into a copy."""
        while True:
            for index, event in enumerate(self._events):
                if event is not None and event.done():
                    self._events[index] = None
                    return index
            copying = [event for event in self._events if event is not None]
            if not copying:
                land_one()
                continue
            with self._lanes.stall("copy"):
                copying[0].wait()

    def buffer(self, index: int, nbytes: int) -> Tensor:
        """The first bytes of a landing."""
        return self._buffers[index][:nbytes]

    def copied_by(self, index: int, event: Event) -> None:
        """The landing is free once `event` has happened."""
        self._events[index] = event

    def forget(self) -> None:
        """Drop the buffers."""
        self._buffers.clear()

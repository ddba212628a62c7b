"""The RAM buffers of a sweep, and what is under way in them.

A stage holds one chunk of those kinds that cannot be updated where they rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from infinity.memory.device import Event
from infinity.memory.disk import Ticket
from infinity.plan.layout import Kind


@dataclass(eq=False)
class Stage:
    """A RAM buffer for one chunk of what cannot be updated in place."""

    buffer: Tensor
    busy: list[Ticket | Event] = field(default_factory=list)

    def reuse(self) -> None:
        """Wait until nothing reads the buffer any more."""
        for item in self.busy:
            item.wait()
        self.busy.clear()


@dataclass(eq=False)
class Work:
    """One chunk between its read and its write."""

    unit: int
    chunk: int
    stage: Stage
    # uint8, of exactly this chunk; host-reachable, but for what stays on the device in a stream.
    views: dict[Kind, Tensor]
    waits: list[Ticket | Event]

"""Chunks on their way through a device: state in, the device's kernel, state out.

[Note: three chunks under way]
A buffer on the device holds one chunk of what does not rest there. Copies in, kernels and copies
out of different chunks overlap, and only events order them; the sweep's thread waits for nothing
but the oldest chunk, which must be home before its buffer is filled again. No copy waits for
compute: a unit is lent out when its last chunk is home, and until then nobody else can reach it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from infinity.memory.device import HAPPENED, DeviceArena, Event, after_all
from infinity.memory.lanes import Lanes
from infinity.memory.traced import record
from infinity.optim.cpu import Piece
from infinity.plan.layout import Kind
from infinity.plan.plan import Plan
from infinity.plan.reserve import NUM_STREAM_BUFFERS, stream_bytes
from infinity.training.stages import Stage, Work


@dataclass(eq=False)
class Passage:
    """One chunk between its first copy in and its last copy out."""

    work: Work
    room: Tensor  # what is left of its buffer
    views: dict[Kind, Tensor] = field(default_factory=dict)  # uint8, on the device
    brought: list[Kind] = field(default_factory=list)  # what does not rest there
    events: list[Event] = field(default_factory=list)  # of all that was asked for


class Streams:
    """The device buffers of streamed updates, used in turn by the sweep's thread alone."""

    def __init__(self, plan: Plan, lanes: Lanes) -> None:
        self._lanes = lanes
        nbytes = stream_bytes(plan)
        self._arena: DeviceArena | None = None
        self._buffers: list[Tensor] = []
        if nbytes:
            self._arena = lanes.device.reserve(NUM_STREAM_BUFFERS * nbytes)
            offsets = range(0, NUM_STREAM_BUFFERS * nbytes, nbytes)
            self._buffers = [self._arena.view(offset, nbytes) for offset in offsets]
        self._turn = 0
        self._under_way: deque[Passage] = deque()

    def __len__(self) -> int:
        """How many chunks are under way."""
        return len(self._under_way)

    @property
    def full(self) -> bool:
        """Whether the oldest chunk must be home before another one begins."""
        return len(self._under_way) == len(self._buffers)

    def hold(self, stage: Stage) -> bool:
        """Whether a chunk under way comes from, and goes back to, this RAM buffer."""
        return any(passage.work.stage is stage for passage in self._under_way)

    def begin(self, work: Work) -> Passage:
        """Take the next buffer; not while `full`."""
        assert not self.full
        passage = Passage(work, self._buffers[self._turn % len(self._buffers)])
        self._turn += 1
        self._under_way.append(passage)
        return passage

    def bring(
        self, passage: Passage, kind: Kind, place: Tensor | None = None, after: Event = HAPPENED
    ) -> None:
        """Copy a kind in: to `place`, which is free after `after`, else into the buffer."""
        source = passage.work.views[kind]
        if place is None:
            place, passage.room = passage.room[: source.numel()], passage.room[source.numel() :]
        label = passage.work.unit, kind.value
        passage.views[kind] = place
        passage.brought.append(kind)
        passage.events.append(self._lanes.bring(place, source, after, label))

    def update(self, passage: Passage, pieces: Sequence[Piece], after: Event) -> None:
        """Queue the kernel behind the copies in and `after`, and the copies back behind it."""
        lanes, work = self._lanes, passage.work
        ready = after_all(after, *passage.events)
        if pieces:
            submitted = time.perf_counter_ns()
            ready = lanes.device.update(pieces, ready)
            if lanes.trace is not None:
                record(lanes.trace, "update", "update", work.unit, ready, 0, submitted)
            passage.events.append(ready)
        for kind in passage.brought:
            if kind is not Kind.GRADIENT:
                source, label = passage.views[kind], (work.unit, kind.value)
                passage.events.append(lanes.copy_back(work.views[kind], source, ready, label))
        passage.views.clear()  # a view of a slot would keep it from being given to another unit

    def land(self) -> Work:
        """Wait until the oldest chunk is home."""
        passage = self._under_way[0]
        for event in passage.events:
            event.wait()
        return self._under_way.popleft().work

    def abandon(self) -> None:
        """Wait until nothing moves; what was under way is lost."""
        while self._under_way:
            self.land()

    def forget(self) -> None:
        """Drop the buffers."""
        self._buffers.clear()
        self._arena = None

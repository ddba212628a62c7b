"""Movement that is recorded in a trace: tickets and copies that tell when they were over."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from infinity.memory.device import Event
from infinity.memory.disk import DiskTicket
from infinity.trace.recorder import NO_UNIT, Trace

# What is moved: the unit's index, and a word for the kind.
Label = tuple[int, str]
NO_LABEL: Label = (NO_UNIT, "other")


class TracedTicket:
    """A ticket that is recorded, once, when somebody finds that it is over."""

    def __init__(self, ticket: DiskTicket, trace: Trace, lane: str, label: Label) -> None:
        self._ticket = ticket
        self._trace = trace
        self._lane = lane
        self._label = label
        # In a list, because taking it out is one operation: threads may find it over together.
        self._open = [ticket.request]
        trace.watch(self)

    def done(self) -> bool:
        """Whether the request is over."""
        return self._ticket.done()

    def wait(self) -> None:
        """Block until it is over; raises `TransferError`, every time."""
        try:
            self._ticket.wait()
        finally:
            self.note()

    def note(self) -> None:
        """Record the request if it is over, and was not recorded."""
        request = self._open[0] if self._open else None
        times = request.times_ns if request is not None else None
        if request is None or times is None:
            return
        with contextlib.suppress(IndexError):
            self._open.pop()
            failed = {"failed": request.error} if request.error else None
            submitted, begin, end = times
            unit, kind = self._label
            nbytes = request.nbytes
            self._trace.add(
                self._lane, kind, unit, begin, end, nbytes, submitted=submitted, args=failed
            )

    def __del__(self) -> None:
        self.note()


def traced_copy(
    trace: Trace,
    lane: str,
    copy: Callable[[Tensor, Tensor, Event], Event],
    target: Tensor,
    source: Tensor,
    after: Event,
    label: Label,
) -> Event:
    """A copy whose event knows its times, or that is over when the call is."""
    submitted = time.perf_counter_ns()
    event = copy(target, source, after)
    unit, kind = label
    record(trace, lane, kind, unit, event, target.numel(), submitted)
    return event


def record(
    trace: Trace, lane: str, name: str, unit: int, event: Event, nbytes: int, submitted: int
) -> None:
    """Record what was handed to a device and ends with `event`."""
    interval: Any = event
    if hasattr(interval, "elapsed_ns"):
        trace.add_later(lane, name, unit, interval, nbytes, submitted)
        return
    now = time.perf_counter_ns()
    trace.add(lane, name, unit, submitted, now, nbytes, submitted=submitted)

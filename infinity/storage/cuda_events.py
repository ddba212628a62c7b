"""CUDA's events, and their times on the host's clock without waiting for any.

[Note: one clock]
A GPU tells the time between two of its events, as a 32-bit float of milliseconds, and nothing
else. One event is waited for when tracing begins: that is the moment both clocks are known.
Others are measured from it; one that lies `FAR_MS` after it takes its place, because a float's
last digit grows with the distance.
"""

from __future__ import annotations

import time
from typing import Any

import torch

FAR_MS = 10_000.0


class CudaEvent:
    """A CUDA event, seen through the `Event` protocol."""

    def __init__(self, stream: torch.cuda.Stream, *, timing: bool = False) -> None:
        # Blocking: a thread that waits would else spin on a core that the kernels of the host need.
        self.raw: Any = torch.cuda.Event(  # type: ignore[no-untyped-call]
            enable_timing=timing, blocking=True
        )
        self.raw.record(stream)

    def done(self) -> bool:
        """Whether it has happened; never blocks."""
        return bool(self.raw.query())

    def wait(self) -> None:
        """Block the host until it has happened."""
        self.raw.synchronize()


class CudaClock:
    """Reads times of timing events of one device; used by one thread.

    Waits for the compute that `stream` holds when it is made.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._anchor = CudaEvent(stream, timing=True)
        self._anchor.wait()
        self._anchor_ns = time.perf_counter_ns()

    def time_ns(self, event: CudaEvent) -> int | None:
        """When that was, by `time.perf_counter_ns`; None if it has not happened."""
        if not event.done():
            return None
        after_ms = float(self._anchor.raw.elapsed_time(event.raw))
        time_ns = self._anchor_ns + round(after_ms * 1e6)
        if after_ms > FAR_MS:
            self._anchor, self._anchor_ns = event, time_ns
        return time_ns


class CudaStamp(CudaEvent):
    """A point in the order of a stream whose time is known later."""

    def __init__(self, clock: CudaClock, stream: torch.cuda.Stream) -> None:
        super().__init__(stream, timing=True)
        self._clock = clock

    def time_ns(self) -> int | None:
        """See `CudaClock.time_ns`."""
        return self._clock.time_ns(self)


class CudaSpan(CudaStamp):
    """The end of work on a stream, that knows where it began."""

    def __init__(self, began: CudaStamp, clock: CudaClock, stream: torch.cuda.Stream) -> None:
        super().__init__(clock, stream)
        self.began = began

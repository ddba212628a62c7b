"""CUDA events, and their times on the host clock without synchronization.

[Note: one clock]
CUDA reports only the time between two events, as a 32-bit float of milliseconds. When tracing
begins, the host waits for one event, the anchor, and reads its own clock. Times of other events
are measured from the anchor. An event more than `FAR_MS` after the anchor becomes the new anchor,
because the resolution of the float decreases with the distance.
"""

from __future__ import annotations

import time
from typing import Any

import torch

FAR_MS = 10_000.0


class CudaEvent:
    """A CUDA event with the `Event` protocol."""

    def __init__(self, stream: torch.cuda.Stream, *, timing: bool = False) -> None:
        # Blocking: waiting threads would otherwise spin on cores that CPU kernels need.
        self.raw: Any = torch.cuda.Event(  # type: ignore[no-untyped-call]
            enable_timing=timing, blocking=True
        )
        self.raw.record(stream)

    def done(self) -> bool:
        return bool(self.raw.query())

    def wait(self) -> None:
        self.raw.synchronize()


class CudaClock:
    """Clock that converts timing events of one device to host time; used by one thread.

    The constructor waits for the work queued on `stream`.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._anchor = CudaEvent(stream, timing=True)
        self._anchor.wait()
        self._anchor_ns = time.perf_counter_ns()

    def time_ns(self, event: CudaEvent) -> int | None:
        """Return the time of `event` on `time.perf_counter_ns`; None if it has not happened."""
        if not event.done():
            return None
        elapsed_ms = float(self._anchor.raw.elapsed_time(event.raw))
        time_ns = self._anchor_ns + round(elapsed_ms * 1e6)
        if elapsed_ms > FAR_MS:
            self._anchor, self._anchor_ns = event, time_ns
        return time_ns


class CudaStamp(CudaEvent):
    """A timing event; its time is known once it has happened."""

    def __init__(self, clock: CudaClock, stream: torch.cuda.Stream) -> None:
        super().__init__(stream, timing=True)
        self._clock = clock

    def time_ns(self) -> int | None:
        return self._clock.time_ns(self)


class CudaSpan(CudaStamp):
    """Timing event at the end of work on a stream, with the event at its beginning."""

    def __init__(self, began: CudaStamp, clock: CudaClock, stream: torch.cuda.Stream) -> None:
        super().__init__(clock, stream)
        self.began = began

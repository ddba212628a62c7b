"""Trace of the training thread: compute per unit, micro-batches and steps.

[Note: backward by unit]
Autograd reports when weights of a unit are requested and when its gradients arrive, not when its
backward begins. A slice of backward belongs to the unit of the last such event; the first slice
begins with the call. A forward inside a backward is a recomputation, and is inside the slice of its
unit.
"""

from __future__ import annotations

import math
import time
from typing import Protocol

from infinity.offload.transfers import Transfers
from infinity.profiling.step_report import StepReport
from infinity.profiling.trace_recorder import NO_UNIT, Trace, When


class Listener(Protocol):
    """Holder of the tracer, used by code that reports modules and gradients."""

    timeline: StepTracer | None


class StepTracer:
    """Tracer of steps `first` to `last` of this run, counted from 1, including skipped steps.

    The trace is closed one step later, when the last traced update has ended; the listener then has
    no reference to the tracer.
    """

    def __init__(
        self, trace: Trace, transfers: Transfers, listener: Listener, first: int, last: int
    ) -> None:
        self.trace = trace
        self._transfers = transfers
        self._listener = listener
        self._first, self._last = first, last
        self._num_steps = 0  # completed
        self._step_ns = self._batch_ns = 0  # end of the last step and micro-batch
        self._call_begin: When | None = None  # of an engine call before its first unit
        self._open_forwards: list[tuple[int, When]] = []  # entered forwards: unit, begin
        self._backward: tuple[int, When] | None = None
        self._paused: int | None = None  # unit whose backward may wait for bytes
        self._before_units: tuple[When, When] | None = None  # start of backward
        self._last_event: When = 0  # of a unit

    def start(self) -> None:
        """Start recording if the first step is traced."""
        if self._first == 1:
            self._record(wanted=True)

    def _record(self, *, wanted: bool) -> None:
        self._step_ns = self._batch_ns = time.perf_counter_ns()
        self.free()
        self._transfers.follow(self.trace if wanted else None)
        self._listener.timeline = self if wanted else None

    # --- units -------------------------------------------------------------------------------

    def call(self) -> None:
        """Record the begin of a forward or backward of the engine."""
        self._call_begin = self._stamp()

    def enter(self, unit: int) -> None:
        """Record the begin of the unit's forward, with resident weights."""
        if self._backward is not None or self._paused is not None:
            self.backward(unit)
        self._call_begin = None
        self._open_forwards.append((unit, self._stamp()))

    def leave(self) -> None:
        """Record the end of the innermost forward."""
        if self._open_forwards:  # empty if the forward began before the trace
            unit, begin = self._open_forwards.pop()
            self._last_event = self._stamp()
            self.trace.add("compute", "forward", unit, begin, self._last_event)

    def backward(self, unit: int, *, arrived: bool = False) -> None:
        """Record that backward requests the unit's weights, or that a gradient `arrived`."""
        if self._open_forwards:
            return
        previous, self._last_event = self._last_event, self._stamp()
        if self._backward is not None and self._backward[0] == unit:
            return
        # Time before a gradient belongs to its unit; time before a request of weights does not.
        boundary = previous if arrived and self._backward is not None else self._last_event
        begin = boundary if self._call_begin is None else self._call_begin
        if self._before_units is not None:
            self.trace.add("compute", "backward", unit, *self._before_units)
        self._call_begin = self._paused = self._before_units = None
        self._end_backward(boundary)
        self._backward = unit, begin

    def pause(self) -> None:
        """End the slice of backward at a request of bytes that compute may have to wait for.

        `resume` or `backward` follows. On a GPU the wait is part of the order of compute, so a
        slice across it would count the wait as compute.
        """
        if self._open_forwards:
            return
        if self._backward is not None:
            self._paused = self._backward[0]
            self._end_backward(self._stamp())
        elif self._call_begin is not None:
            self._before_units, self._call_begin = (self._call_begin, self._stamp()), None

    def recompute(self) -> None:
        """Pause before a forward requests its weights, if it is a recomputation in backward."""
        if self._backward is not None:
            self.pause()

    def resume(self) -> None:
        """Continue the slice ended by `pause`, when the bytes have arrived."""
        if self._paused is not None:
            self._backward, self._paused = (self._paused, self._stamp()), None
        elif self._before_units is not None:
            self._call_begin, self._before_units = self._before_units[0], None

    def _end_backward(self, end: When) -> None:
        if self._backward is not None:
            (unit, begin), self._backward = self._backward, None
            self.trace.add("compute", "backward", unit, begin, end)

    def unwind(self, num_open: int) -> None:
        """End a call, possibly by an exception: only `num_open` forwards remain entered."""
        del self._open_forwards[num_open:]

    def free(self) -> None:
        """Discard all open slices, after an exception."""
        self._open_forwards.clear()
        self._backward = self._call_begin = self._paused = self._before_units = None

    def _stamp(self) -> When:
        return self._transfers.device.stamp()

    # --- marks -------------------------------------------------------------------------------

    def micro_batch(self, index: int) -> None:
        """Record the end of the backward of a micro-batch."""
        if self._listener.timeline is None:
            return
        self._end_backward(self._last_event)  # a backward called by the user is noticed late
        self._call_begin = None
        now = time.perf_counter_ns()
        self.trace.add("micro_batch", f"micro-batch {index}", NO_UNIT, self._batch_ns, now)
        self._batch_ns = now

    def step(self, report: StepReport) -> bool:
        """Record a committed step; return False if the trace is closed."""
        self._num_steps += 1
        if self._first <= self._num_steps <= self._last:
            self._add_step(report)
        if self._num_steps + 1 == self._first:
            self._record(wanted=True)
        elif self._num_steps == self._last:
            self._record(wanted=False)
        elif self._num_steps > self._last:
            self.trace.close()
            return False
        return True

    def _add_step(self, report: StepReport) -> None:
        now = time.perf_counter_ns()
        skipped = {"skipped": True} if report.skipped else {}
        norm = report.grad_norm
        args = {
            "step": report.step,
            "moved": report.moved,
            "stall_s": {cause: round(s, 6) for cause, s in report.stall_s.items() if s},
            "mispredictions": report.mispredictions,
            "grad_norm": norm if math.isfinite(norm) else str(norm),
            "dropped": self.trace.num_dropped,
            **skipped,
        }
        self.trace.add("step", f"step {report.step}", NO_UNIT, self._step_ns, now, args=args)
        self._step_ns = self._batch_ns = now

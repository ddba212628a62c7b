"""Trace of the training thread: compute per unit, micro-batches and steps.

[Note: backward by unit]
Autograd says when a unit's weights are asked for and when its gradients arrive, not when its
backward begins. A stretch of backward belongs to the unit that was last heard of; the first one
begins with the call. A forward inside a backward is a recomputation, and lies inside its unit's
stretch.
"""

from __future__ import annotations

import math
import time
from typing import Protocol

from infinity.offload.transfers import Transfers
from infinity.profiling.step_report import StepReport
from infinity.profiling.trace_recorder import NO_UNIT, Trace, When


class Listener(Protocol):
    """Where code that reports modules and gradients finds the timeline, if there is one."""

    timeline: StepTracer | None


class StepTracer:
    """Records steps `first` to `last` of this run, counted from 1; skipped ones count.

    The trace is closed one step later, when the last update that is traced has long been over;
    from then on nothing is recorded, and nobody holds the timeline.
    """

    def __init__(
        self, trace: Trace, transfers: Transfers, listener: Listener, first: int, last: int
    ) -> None:
        self.trace = trace
        self._transfers = transfers
        self._listener = listener
        self._first, self._last = first, last
        self._steps = 0  # that are over
        self._step_ns = self._batch_ns = 0  # when the last one ended
        self._call: When | None = None  # an engine call began, and no unit computed since
        self._open: list[tuple[int, When]] = []  # forwards that are entered
        self._backward: tuple[int, When] | None = None
        self._paused: int | None = None  # whose backward may be waiting for bytes
        self._before_units: tuple[When, When] | None = None  # what a backward began with
        self._heard: When = 0  # when backward was last heard of

    def start(self) -> None:
        """Training is about to begin."""
        if self._first == 1:
            self._follow(wanted=True)

    def _follow(self, *, wanted: bool) -> None:
        self._step_ns = self._batch_ns = time.perf_counter_ns()
        self.forget()
        self._transfers.follow(self.trace if wanted else None)
        self._listener.timeline = self if wanted else None

    # --- units -------------------------------------------------------------------------------

    def call(self) -> None:
        """A forward or a backward of the engine begins."""
        self._call = self._stamp()

    def enter(self, unit: int) -> None:
        """The unit's forward begins; its weights are there."""
        if self._backward is not None or self._paused is not None:
            self.backward(unit)
        self._call = None
        self._open.append((unit, self._stamp()))

    def leave(self) -> None:
        """The innermost forward ends."""
        if self._open:  # else it began before the trace
            unit, begin = self._open.pop()
            self._heard = self._stamp()
            self.trace.add("compute", "forward", unit, begin, self._heard)

    def backward(self, unit: int, *, arrived: bool = False) -> None:
        """Backward asks for the unit's weights; or one of its gradients has arrived."""
        if self._open:
            return
        before, self._heard = self._heard, self._stamp()
        if self._backward is not None and self._backward[0] == unit:
            return
        # What led to a gradient is its unit's, what came before weights were asked for is not.
        turn = before if arrived and self._backward is not None else self._heard
        begin = turn if self._call is None else self._call
        if self._before_units is not None:
            self.trace.add("compute", "backward", unit, *self._before_units)
        self._call = self._paused = self._before_units = None
        self._end_backward(turn)
        self._backward = unit, begin

    def pause(self) -> None:
        """Backward asks for bytes that compute may have to wait for.

        `resume` or `backward` follows. On a device of its own the wait stands in the order of
        compute, so a slice that went on through it would call it compute.
        """
        if self._open:
            return
        if self._backward is not None:
            self._paused = self._backward[0]
            self._end_backward(self._stamp())
        elif self._call is not None:
            self._before_units, self._call = (self._call, self._stamp()), None

    def recompute(self) -> None:
        """A forward is about to ask for its weights: within a backward that is recomputation."""
        if self._backward is not None:
            self.pause()

    def resume(self) -> None:
        """The bytes are there, and compute goes on where it was."""
        if self._paused is not None:
            self._backward, self._paused = (self._paused, self._stamp()), None
        elif self._before_units is not None:
            self._call, self._before_units = self._before_units[0], None

    def _end_backward(self, end: When) -> None:
        if self._backward is not None:
            (unit, begin), self._backward = self._backward, None
            self.trace.add("compute", "backward", unit, begin, end)

    def unwind(self, num_open: int) -> None:
        """End a call, possibly by an exception: only `depth` forwards remain entered."""
        del self._open[num_open:]

    def forget(self) -> None:
        """After an exception: nothing computes."""
        self._open.clear()
        self._backward = self._call = self._paused = self._before_units = None

    def _stamp(self) -> When:
        return self._transfers.device.stamp()

    # --- marks -------------------------------------------------------------------------------

    def micro_batch(self, index: int) -> None:
        """The backward of a micro-batch is over."""
        if self._listener.timeline is None:
            return
        self._end_backward(self._heard)  # a user's own backward is noticed late
        self._call = None
        now = time.perf_counter_ns()
        self.trace.add("micro_batch", f"micro-batch {index}", NO_UNIT, self._batch_ns, now)
        self._batch_ns = now

    def step(self, report: StepReport) -> bool:
        """A step is committed, and its report made; False where the timeline is over."""
        self._steps += 1
        if self._first <= self._steps <= self._last:
            self._add_step(report)
        if self._steps + 1 == self._first:
            self._follow(wanted=True)
        elif self._steps == self._last:
            self._follow(wanted=False)
        elif self._steps > self._last:
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

"""What one step did, measured between two readings of the transfers."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from infinity.offload.transfers import Transfers
from infinity.profiling.memory_watch import MemoryWatch
from infinity.profiling.trace_recorder import NO_UNIT, Trace, When


@dataclass(frozen=True)
class StepReport:
    """Facts about one step. Times are seconds of the training thread since the previous step ended.

    Attributes:
        step: Number of the step, from 1.
        wall_s: Duration.
        grad_norm: Global gradient norm before clipping, without loss scale.
        clip_factor: Factor of the gradients; 1.0 if they were not clipped.
        skipped: Gradients were not finite, and weights did not change.
        stall_s: Seconds of waiting by cause; see `STALLS` in `offload/transfers.py`.
        moved: Bytes by direction: the optimizer pass of the previous step, and the fetches and
            gradients of this one.
        mispredictions: Accesses that the expected order did not have.
        disk_s: Seconds by disk direction that blocks waited in "queue" and were with the "device",
            summed over blocks.
        memory: Bytes of the tier that computes: "peak", and in the first two steps "rests",
            "activations" and "estimated".
        loss_scale: Scale of this step's gradients; 1.0 except in fp16.
        non_finite: First parameter whose gradient is not finite, of a skipped step; else "".
        expert_tokens: Tokens of this rank that each expert of a module of stacked experts was sent,
            in forward passes of modules in training mode, recomputations not counted.
        router_loss: Sum of the auxiliary losses of routers (`aux_loss` of a model's output) over
            this rank's micro-batches, without their coefficient; None if there is none.
    """

    step: int
    wall_s: float
    grad_norm: float
    clip_factor: float
    skipped: bool
    stall_s: dict[str, float] = field(default_factory=dict)
    moved: dict[str, int] = field(default_factory=dict)
    mispredictions: int = 0
    disk_s: dict[str, dict[str, float]] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    loss_scale: float = 1.0
    non_finite: str = ""
    expert_tokens: dict[str, list[int]] = field(default_factory=dict)
    router_loss: float | None = None

    @property
    def expert_load(self) -> dict[str, float]:
        """Tokens of experts in two numbers; empty without stacked experts.

        "max" is the largest number of tokens of an expert relative to the mean of its layer, over
        all layers; "unused" the number of experts without a token.
        """
        layers = [counts for counts in self.expert_tokens.values() if any(counts)]
        if not layers:
            return {}
        largest = max(max(counts) * len(counts) / sum(counts) for counts in layers)
        return {"max": largest, "unused": sum(counts.count(0) for counts in layers)}

    def record(self) -> dict[str, Any]:
        """Return the facts as a step log has them: tokens of experts in two numbers."""
        facts = {name: value for name, value in vars(self).items() if name != "expert_tokens"}
        return facts | {"expert_load": self.expert_load}


class Meter:
    """Differences of the transfers' counters and stalls from step to step."""

    def __init__(self, transfers: Transfers, watch: MemoryWatch) -> None:
        self._transfers = transfers
        self._watch = watch
        self._time_s = time.perf_counter()
        self._stalled_s = transfers.stalled_s()
        self._moved = transfers.moved()
        self._disk_s = transfers.disk_times_s()
        self._mispredictions = 0

    def report(self, mispredictions: int, **facts: Any) -> StepReport:
        """Since the last report, with `facts` of the step; `mispredictions` are since the start."""
        now_s, stalled_s = time.perf_counter(), self._transfers.stalled_s()
        moved, disk_s = self._transfers.moved(), self._transfers.disk_times_s()
        report = StepReport(
            wall_s=now_s - self._time_s,
            stall_s={cause: s - self._stalled_s[cause] for cause, s in stalled_s.items()},
            moved={direction: n - self._moved[direction] for direction, n in moved.items()},
            mispredictions=mispredictions - self._mispredictions,
            disk_s={
                direction: {where: s - self._disk_s[direction][where] for where, s in times.items()}
                for direction, times in disk_s.items()
            },
            memory=self._watch.step(),
            **facts,
        )
        self._time_s, self._stalled_s, self._moved = now_s, stalled_s, moved
        self._mispredictions, self._disk_s = mispredictions, disk_s
        return report


# What the training thread adds to a trace: compute per unit, micro-batches, steps, and when.
#
# [Note: backward by unit]
# Autograd says when a unit's weights are asked for and when its gradients arrive, not when its
# backward begins. A stretch of backward belongs to the unit that was last heard of; the first one
# begins with the call. A forward inside a backward is a recomputation, and lies inside its unit's
# stretch.


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

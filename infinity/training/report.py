"""What one step did, measured between two readings of the lanes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from infinity.memory.lanes import Lanes
from infinity.training.watch import MemoryWatch


@dataclass(frozen=True)
class StepReport:
    """What one step did. Times are seconds of the training thread since the previous step ended.

    `moved` is bytes per lane in that time: the sweep of the previous step, and the fetches and
    gradients of this one. `disk_s` is seconds per disk lane that its blocks waited in "queue" and
    were with the "device", summed over blocks. `memory` is bytes of the tier that computes: "peak",
    and in the first two steps "rests", "activations" and "estimated" (see `MemoryWatch.step`).
    `loss_scale` is the scale of this step's gradients; norm and factor are without it. Of a step
    that was skipped, `non_finite` names the first parameter whose gradient is not finite.
    """

    step: int
    wall_s: float
    grad_norm: float
    clip_factor: float
    skipped: bool
    stall_s: dict[str, float] = field(default_factory=dict)
    moved: dict[str, int] = field(default_factory=dict)
    surprises: int = 0
    disk_s: dict[str, dict[str, float]] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    loss_scale: float = 1.0
    non_finite: str = ""


class Meter:
    """Differences of the lanes' counters and stalls from step to step."""

    def __init__(self, lanes: Lanes, watch: MemoryWatch) -> None:
        self._lanes = lanes
        self._watch = watch
        self._time_s = time.perf_counter()
        self._stalled_s = lanes.stalled_s()
        self._moved = lanes.moved()
        self._disk_s = lanes.disk_times_s()
        self._surprises = 0

    def read(
        self,
        *,
        step: int,
        grad_norm: float,
        clip_factor: float,
        skipped: bool,
        surprises: int,
        loss_scale: float = 1.0,
        non_finite: str = "",
    ) -> StepReport:
        """The report since the previous reading; `surprises` counts from the start."""
        now_s, stalled_s, moved = time.perf_counter(), self._lanes.stalled_s(), self._lanes.moved()
        disk_s = self._lanes.disk_times_s()
        report = StepReport(
            step=step,
            wall_s=now_s - self._time_s,
            grad_norm=grad_norm,
            clip_factor=clip_factor,
            skipped=skipped,
            stall_s={cause: s - self._stalled_s[cause] for cause, s in stalled_s.items()},
            moved={lane: n - self._moved[lane] for lane, n in moved.items()},
            surprises=surprises - self._surprises,
            disk_s={
                lane: {where: s - self._disk_s[lane][where] for where, s in times.items()}
                for lane, times in disk_s.items()
            },
            memory=self._watch.step(),
            loss_scale=loss_scale,
            non_finite=non_finite,
        )
        self._time_s, self._stalled_s, self._moved = now_s, stalled_s, moved
        self._surprises, self._disk_s = surprises, disk_s
        return report

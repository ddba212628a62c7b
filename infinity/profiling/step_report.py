"""What one step did, measured between two readings of the transfers."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from infinity.offload.transfers import Transfers
from infinity.profiling.memory_watch import MemoryWatch


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

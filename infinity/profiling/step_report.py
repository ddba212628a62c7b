"""Report of one step, from differences of the counters of the transfers."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from infinity.offload.transfers import Transfers
from infinity.profiling.memory_watch import MemoryWatch


@dataclass(frozen=True)
class StepReport:
    """Statistics of one step. Times are seconds of the training thread since the last step ended.

    Attributes:
        step: Number of the step, from 1.
        wall_s: Duration.
        grad_norm: Global gradient norm before clipping, without loss scale.
        clip_factor: Factor that the gradients were multiplied by; 1.0 without clipping.
        skipped: Gradients were not finite, and weights did not change.
        stall_s: Seconds of waiting by cause; see `STALLS` in `offload/transfers.py`.
        moved: Bytes by direction: the optimizer pass of the previous step, and the fetches and
            gradients of this one.
        mispredictions: Accesses that were not in the expected order.
        disk_s: Seconds by disk direction that blocks spent in "queue" and "device", summed over
            blocks.
        memory: Bytes of the tier that computes; see `MemoryWatch.step`.
        loss_scale: Scale of this step's gradients; 1.0 except in fp16.
        non_finite: Name of the first parameter with a non-finite gradient if skipped; else "".
        expert_tokens: Tokens of this rank routed to each expert, by module of stacked experts, in
            forward passes in training mode without recomputations.
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
        """Load of experts as two numbers; empty without stacked experts.

        "max" is the maximum over all layers of an expert's tokens relative to the mean of its
        layer; "unused" is the number of experts without a token.
        """
        layers = [counts for counts in self.expert_tokens.values() if any(counts)]
        if not layers:
            return {}
        largest = max(max(counts) * len(counts) / sum(counts) for counts in layers)
        return {"max": largest, "unused": sum(counts.count(0) for counts in layers)}

    def record(self) -> dict[str, Any]:
        """Return the record for a step log, with `expert_load` in place of `expert_tokens`."""
        facts = {name: value for name, value in vars(self).items() if name != "expert_tokens"}
        return facts | {"expert_load": self.expert_load}


class Meter:
    """Differences of the counters and stalls of the transfers between steps."""

    def __init__(self, transfers: Transfers, watch: MemoryWatch) -> None:
        self._transfers = transfers
        self._watch = watch
        self._time_s = time.perf_counter()
        self._stalled_s = transfers.stalled_s()
        self._moved = transfers.moved()
        self._disk_s = transfers.disk_times_s()
        self._mispredictions = 0

    def report(self, mispredictions: int, **facts: Any) -> StepReport:
        """Return the report since the last one; `mispredictions` is cumulative."""
        now_s, stalled_s = time.perf_counter(), self._transfers.stalled_s()
        moved, disk_s = self._transfers.moved(), self._transfers.disk_times_s()
        report = StepReport(
            wall_s=now_s - self._time_s,
            stall_s={cause: s - self._stalled_s[cause] for cause, s in stalled_s.items()},
            moved={direction: n - self._moved[direction] for direction, n in moved.items()},
            mispredictions=mispredictions - self._mispredictions,
            disk_s={
                direction: {stage: s - self._disk_s[direction][stage] for stage, s in times.items()}
                for direction, times in disk_s.items()
            },
            memory=self._watch.step(),
            **facts,
        )
        self._time_s, self._stalled_s, self._moved = now_s, stalled_s, moved
        self._mispredictions, self._disk_s = mispredictions, disk_s
        return report

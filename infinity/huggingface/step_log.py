"""What a Trainer logs of the engine beside its losses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from infinity.offload.report import StepReport

_GIB = 2**30
_MOVED = {"disk_read": "disk_read_gib", "disk_write": "disk_write_gib",
          "to_device": "to_device_gib", "from_device": "from_device_gib"}  # fmt: skip


class StepLog:
    """Sums up reports of steps, and tokens, from one log to the next."""

    def __init__(self) -> None:
        self._last: StepReport | None = None
        self._reports: list[StepReport] = []
        self._tokens = 0

    def batch(self, inputs: Any, name: str) -> None:
        """A batch is trained on; `name` is the model's main input, whose integers are tokens."""
        found = inputs.get(name) if isinstance(inputs, Mapping) else None
        if isinstance(found, torch.Tensor) and not found.is_floating_point():
            self._tokens += found.numel()

    def see(self, report: StepReport | None) -> None:
        """The engine's last report; one that was seen already is not counted again."""
        if report is not None and report is not self._last:
            self._last = report
            self._reports.append(report)

    def take(self, ranks: int) -> dict[str, float]:
        """What the steps since the last call came to; empty where there was none.

        `step_s` and `stall_s` are mean seconds of a step, and of its waits; bytes are GiB a step of
        this rank, directions in which nothing moved left out; `memory_peak_gib` is the largest peak
        of the tier that computes; `tokens_per_s` are of all `ranks`, each with as many as this.
        """
        steps, self._reports = self._reports, []
        tokens, self._tokens = self._tokens, 0
        if not steps:
            return {}
        whole, count = math.fsum(step.wall_s for step in steps), len(steps)
        waits = math.fsum(s for step in steps for s in step.stall_s.values())
        found = {"step_s": whole / count, "stall_s": waits / count}
        if tokens and whole:
            found["tokens_per_s"] = tokens * ranks / whole
        for direction, name in _MOVED.items():
            moved = sum(step.moved.get(direction, 0) for step in steps)
            if moved:
                found[name] = moved / count / _GIB
        peak = max(step.memory.get("peak", 0) for step in steps)
        return found | ({"memory_peak_gib": peak / _GIB} if peak else {})

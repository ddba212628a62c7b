"""Values of the engine in a Trainer's log."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from infinity.profiling.step_report import StepReport

_GIB = 2**30
_MOVED = {"disk_read": "disk_read_gib", "disk_write": "disk_write_gib",
          "to_device": "to_device_gib", "from_device": "from_device_gib"}  # fmt: skip


class StepLog:
    """Sums up reports of steps, and tokens, from one log to the next."""

    def __init__(self) -> None:
        self._last: StepReport | None = None
        self._begin()

    def _begin(self) -> None:
        self._steps = self._tokens = self._peak = 0
        self._total_s = self._waits_s = 0.0
        self._moved = dict.fromkeys(_MOVED, 0)

    def batch(self, inputs: Any, name: str) -> None:
        """A batch is trained on; `name` is the model's main input, whose integers are tokens."""
        found = inputs.get(name) if isinstance(inputs, Mapping) else None
        if isinstance(found, torch.Tensor) and not found.is_floating_point():
            self._tokens += found.numel()

    def see(self, report: StepReport | None) -> None:
        """The engine's last report; one that was seen already is not counted again."""
        if report is not None and report is not self._last:
            self._last = report
            self._steps += 1
            self._total_s += report.wall_s
            self._waits_s += math.fsum(report.stall_s.values())
            self._peak = max(self._peak, report.memory.get("peak", 0))
            for direction in _MOVED:
                self._moved[direction] += report.moved.get(direction, 0)

    def take(self, ranks: int) -> dict[str, float]:
        """Return values of the steps since the last call; empty without steps.

        `step_s` and `stall_s` are mean seconds of a step, and of its waits; bytes are GiB a step of
        this rank, directions in which nothing moved left out; `memory_peak_gib` is the largest peak
        of the tier that computes; `tokens_per_s` are of all `ranks`, each with as many as this.
        """
        found: dict[str, float] = {}
        if count := self._steps:
            found = {"step_s": self._total_s / count, "stall_s": self._waits_s / count}
            if self._tokens and self._total_s:
                found["tokens_per_s"] = self._tokens * ranks / self._total_s
            for direction, name in _MOVED.items():
                if moved := self._moved[direction]:
                    found[name] = moved / count / _GIB
            if self._peak:
                found["memory_peak_gib"] = self._peak / _GIB
        self._begin()
        return found

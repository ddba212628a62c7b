"""Metrics of the engine for the log of a Trainer."""

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
    """Accumulator of step reports and token counts between two logs."""

    def __init__(self) -> None:
        self._last: StepReport | None = None
        self._reset()

    def _reset(self) -> None:
        self._steps = self._tokens = self._peak = 0
        self._total_s = self._stall_s = 0.0
        self._moved_bytes = dict.fromkeys(_MOVED, 0)

    def batch(self, inputs: Any, name: str) -> None:
        """Count the tokens of a batch: elements of the input `name`, if it is an integer tensor."""
        tokens = inputs.get(name) if isinstance(inputs, Mapping) else None
        if isinstance(tokens, torch.Tensor) and not tokens.is_floating_point():
            self._tokens += tokens.numel()

    def see(self, report: StepReport | None) -> None:
        """Add the last report of the engine, unless it was added already."""
        if report is not None and report is not self._last:
            self._last = report
            self._steps += 1
            self._total_s += report.wall_s
            self._stall_s += math.fsum(report.stall_s.values())
            self._peak = max(self._peak, report.memory.get("peak", 0))
            for direction in _MOVED:
                self._moved_bytes[direction] += report.moved.get(direction, 0)

    def take(self, ranks: int) -> dict[str, float]:
        """Return the metrics of the steps since the last call and reset; empty without steps.

        `step_s` and `stall_s` are the mean seconds per step and of stalls per step. Transfers are
        GiB per step of this rank; directions without transfers are omitted. `memory_peak_gib` is
        the largest peak of the compute device. `tokens_per_s` is the local rate times `ranks`.
        """
        metrics: dict[str, float] = {}
        if count := self._steps:
            metrics = {"step_s": self._total_s / count, "stall_s": self._stall_s / count}
            if self._tokens and self._total_s:
                metrics["tokens_per_s"] = self._tokens * ranks / self._total_s
            for direction, name in _MOVED.items():
                if moved := self._moved_bytes[direction]:
                    metrics[name] = moved / count / _GIB
            if self._peak:
                metrics["memory_peak_gib"] = self._peak / _GIB
        self._reset()
        return metrics

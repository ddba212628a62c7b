"""What an engine says of itself: counters, the last step, bytes moved."""

from __future__ import annotations

from typing import Any

import torch

from infinity.engine_state import EngineState
from infinity.plan.forecast import forecast_bytes
from infinity.training.cycles import Cycles
from infinity.training.report import StepReport


class EngineFacts(EngineState):
    """The part of `Engine` that is only read."""

    _cycles: Cycles

    @property
    def device(self) -> torch.device:
        """Where inputs must be."""
        return self._parts.device.torch_device

    @property
    def lr_scheduler(self) -> Any:
        """The scheduler the engine steps, or None."""
        return self._stepper.lr_scheduler

    @property
    def last_report(self) -> StepReport | None:
        """What the last step did; None before the first."""
        return self._stepper.last_report

    @property
    def global_steps(self) -> int:
        """Steps so far, `skipped_steps` among them, as in DeepSpeed."""
        return self._stepper.progress.steps

    @property
    def micro_step(self) -> int:
        """Micro-batches of the current accumulation window that are behind us."""
        return self._stepper.progress.micro_step

    @property
    def skipped_steps(self) -> int:
        """Steps skipped because gradients were not finite."""
        return self._stepper.progress.skipped_steps

    @property
    def grad_norm(self) -> float | None:
        """Global gradient norm of the last step, before clipping and without the loss scale."""
        return self.last_report.grad_norm if self.last_report else None

    @property
    def loss_scale(self) -> float:
        """What the next loss is multiplied by in backward; 1.0 unless in fp16."""
        return self._stepper.loss_scale

    cur_scale = loss_scale

    def forecast(self) -> dict[str, int]:
        """Predicted bytes per lane and step, for the order of units learnt so far."""
        saved = self._parts.activations
        sizes = saved.learnt if saved is not None else None
        return forecast_bytes(self.plan, self._cycles.training.sequence, sizes)

    def saved_activations(self) -> dict[str, int]:
        """What became of inputs of recomputed blocks since the engine was made.

        "recomputed": runs of blocks in backward that `activations.checkpoint` caused; "saved":
        inputs that were taken; and bytes of them that waited on "device", "host" and "disk".
        """
        found = {"recomputed": self._parts.forwards.recomputed}
        store = self._parts.activations
        if store is not None:
            found["saved"] = store.counts.num_saved
            found |= {tier.value: nbytes for tier, nbytes in store.counts.bytes_in.items()}
        return found

    def counters(self) -> dict[str, int]:
        """Bytes per lane since the engine was made, the initial state included."""
        return self._parts.lanes.moved()

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is slow or risky about the device and paths of this run; `initialize` tells too."""
        disk = self._parts.disk
        return (*self._parts.device.warnings, *(disk.warnings if disk is not None else ()))

    def drives(self) -> dict[str, dict[str, Any]]:
        """Per path in use: device, file system, share of the state, speed, bytes and times."""
        return self._parts.disk.drives() if self._parts.disk is not None else {}

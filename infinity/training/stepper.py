"""One step: norm, clip factor, and the commit that makes it happen whole or not at all.

[Note: commit]
A commit runs on the sweep thread: signals strike the main thread only, so an interrupted `step()`
has happened or has not. `Progress` is one frozen object, replaced as a whole, for the same reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import nn

from infinity.errors import ConfigError, PresenceError, TrainingError
from infinity.journal import Journal
from infinity.memory.device import Event
from infinity.memory.gradients import GradientStore
from infinity.memory.mover import Mover
from infinity.memory.state import StateStore
from infinity.optim.offloaded import OffloadedOptimizer
from infinity.optim.tiles import Updater
from infinity.plan.plan import Plan
from infinity.training.cycles import Cycles
from infinity.training.hooks import Hooks
from infinity.training.optimizer_state import read_state
from infinity.training.report import Meter, StepReport
from infinity.training.sweep import Sweep, SweepJob

MAX_SKIPPED_IN_A_ROW = 20


@dataclass(frozen=True)
class Progress:
    """Where training is; replaced as a whole, so that an interruption finds it old or new."""

    micro_step: int = 0
    backwards: int = 0  # since the last step()
    global_steps: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0


class Rooms(Protocol):
    """The part of `Parts` that a step needs."""

    plan: Plan
    mover: Mover
    store: StateStore
    updater: Updater
    gradients: GradientStore
    sweep: Sweep
    hooks: Hooks


class Stepper:
    """Turns accumulated gradients into a sweep; counts steps, per parameter too."""

    def __init__(
        self,
        rooms: Rooms,
        cycles: Cycles,
        optimizer: OffloadedOptimizer,
        index_of: Mapping[int, int],
        lr_scheduler: Any,
        journal: Journal | None,
    ) -> None:
        self.progress = Progress()
        self.lr_scheduler = lr_scheduler
        self.last_report: StepReport | None = None
        # Where steps are durable: what a committed step holds beside the homes.
        self.document: Callable[[], bytes] | None = None
        self._units = rooms.plan.units
        self._mover = rooms.mover
        self._gradients = rooms.gradients
        self._sweep = rooms.sweep
        self._cycles = cycles
        self._optimizer = optimizer
        self._index_of = dict(index_of)
        self._journal = journal
        self._meter = Meter(rooms.mover.lanes, rooms.hooks.watch)
        self.steps = [0] * len(index_of)  # updates so far, by parameter index
        self._rooms = rooms
        optimizer.connect_state(self._read_state)
        self._after_commit: Exception | None = None  # of a step that happened all the same

    def count_backward(self) -> None:
        """A backward of the current micro-batch is complete."""
        self.progress = replace(self.progress, backwards=self.progress.backwards + 1)

    def end_micro_batch(self) -> None:
        """The next micro-batch of the same window begins."""
        progress = self.progress
        self.progress = replace(progress, micro_step=progress.micro_step + 1, backwards=0)

    def start_over(self) -> None:
        """The accumulation window is empty again."""
        self.progress = replace(self.progress, micro_step=0, backwards=0)

    def update(self, clipping: float) -> None:
        """Commit a step from the gradients as they are; the sweep then runs behind the caller.

        Raises `TrainingError` after too many skipped steps in a row, and what the commit raised
        (an edited parameter, a scheduler) after the step has happened.
        """
        self._gradients.finish()  # a backward the engine did not see may have left some open
        with self._mover.lanes.stall("norm"):
            norm = math.sqrt(self._gradients.square_sum())
        skipped = not math.isfinite(norm)
        culprit = self._gradients.first_non_finite() if skipped else None
        factor = 0.0 if skipped else 1.0
        if clipping and not skipped:
            factor = min(1.0, clipping / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
        self._gradients.settle()
        computed = self._mover.lanes.device.compute_event()  # here: streams belong to threads
        self._sweep.submit(lambda: self._commit(norm, factor, skipped, computed))
        error, self._after_commit = self._after_commit, None
        if error is not None:
            raise error
        if self.progress.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise TrainingError(
                f"the gradients of {self.progress.skipped_in_a_row} steps in a row were not "
                f"finite; first in {culprit!r}",
                because="the loss is NaN or infinite, or the learning rate diverged",
                remedy="lower the learning rate, or look at the loss and the data",
            )

    def _commit(
        self, norm: float, factor: float, skipped: bool, computed: Event
    ) -> SweepJob | None:
        """The step happens, on the sweep thread: units become pending, counters advance."""
        job = None if skipped else self._make_job(factor, computed)
        progress = self.progress
        self.progress = replace(
            progress,
            micro_step=0,
            backwards=0,
            global_steps=progress.global_steps + (not skipped),
            skipped_steps=progress.skipped_steps + skipped,
            skipped_in_a_row=progress.skipped_in_a_row + 1 if skipped else 0,
        )
        # From here the step has happened: whatever fails, the units that are pending get their
        # update, and `update` raises the error after it.
        try:
            if job is not None:
                for index in job.steps:
                    self.steps[index] += 1
                self._rooms.updater.begin(job.hypers, job.steps)
                self._mover.make_pending(job.units)
        except PresenceError as error:
            self._after_commit = error
        self._gradients.reset()
        try:
            self._report(norm, factor, skipped)
            self._optimizer.mark_stepped()
            if not skipped and self.lr_scheduler is not None:
                self.lr_scheduler.step()
            if job is not None and self.document is not None:
                job = replace(job, document=self.document())
        except Exception as error:
            self._after_commit = self._after_commit or error
        return job

    def _make_job(self, factor: float, computed: Event) -> SweepJob:
        """Everything the sweep depends on, as it is now."""
        arrived = self._gradients.arrived()
        hypers = self._optimizer.hypers(self._index_of)
        units = self._units
        order = dict.fromkeys([*self._cycles.training.first_uses(), *range(len(units))])
        return SweepJob(
            units=tuple(
                u for u in order if any(s.parameter in arrived for s in units[u].trained_segments)
            ),
            hypers={i: hypers[i] for i in arrived},
            steps={i: self.steps[i] + 1 for i in arrived},
            grad_scale=factor,
            computed=computed,
        )

    def _read_state(self, parameter: nn.Parameter) -> dict[str, Any]:
        """`OffloadedOptimizer.read_state`."""
        index = self._index_of.get(id(parameter))
        if index is None:
            raise ConfigError("this parameter does not belong to the engine's module")
        self._sweep.finish()
        rooms, hyper = self._rooms, self._optimizer.hypers(self._index_of).get(index)
        return read_state(rooms.store, rooms.updater, index, hyper, self.steps)

    def _report(self, norm: float, factor: float, skipped: bool) -> None:
        self.last_report = self._meter.read(
            step=self.progress.global_steps,
            grad_norm=norm,
            clip_factor=factor,
            skipped=skipped,
            surprises=self._cycles.surprises(),
        )
        if self._journal is not None:
            self._journal.write({"event": "step", **vars(self.last_report)})

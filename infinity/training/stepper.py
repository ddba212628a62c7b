"""One step: norm, clip factor, and the commit, after which the step has happened.

[Note: commit]
Units become pending, counters advance, and a job for the sweep holds all that the update depends
on. `Progress` is one frozen object, replaced as a whole: another one in its place means that the
step has happened, whatever failed after it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import nn

from infinity.errors import ConfigError, InfinityWarning, PresenceError, TrainingError
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
from infinity.training.jobs import SweepJob
from infinity.training.loss_scale import ScaleRules, ScaleState, scale_exhausted
from infinity.training.optimizer_state import read_state
from infinity.training.report import Meter, StepReport
from infinity.training.sweep import Sweep
from infinity.training.timeline import Timeline

MAX_SKIPPED_IN_A_ROW = 20
# A dynamic loss scale is found by skipping steps: only so many in a row are more than a search.
SCALES_TRIED_IN_SILENCE = 10


@dataclass(frozen=True)
class Progress:
    """Where training is; see [Note: commit]."""

    micro_step: int = 0
    backwards: int = 0  # since the last step()
    global_steps: int = 0  # those that updated
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    loss_scale: ScaleState | None = None  # where the loss is scaled
    micro_batches: int = 0  # of the whole run: calls of step()
    samples: int = 0  # of the whole run: those of windows that are over, skipped ones too

    @property
    def steps(self) -> int:
        """Windows that are over, skipped ones too: what users know as `global_steps`."""
        return self.global_steps + self.skipped_steps


class Rooms(Protocol):
    """The part of `Parts` that a step needs."""

    plan: Plan
    mover: Mover
    store: StateStore
    updater: Updater
    gradients: GradientStore
    sweep: Sweep
    hooks: Hooks
    timeline: Timeline | None


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
        scale_rules: ScaleRules | None = None,
    ) -> None:
        self.scale_rules = scale_rules
        self.progress = Progress(loss_scale=scale_rules.start() if scale_rules else None)
        self.lr_scheduler = lr_scheduler
        self.last_report: StepReport | None = None
        self.batch_samples = 0  # what a window counts for in `Progress.samples`
        self.lr_kwargs: Mapping[str, Any] = {}  # of the scheduler's step in the next commit
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
        self._timeline = rooms.timeline  # until it is over
        if self._timeline is not None:
            self._timeline.start()
        self.steps = [0] * len(index_of)  # updates so far, by parameter index
        self._rooms = rooms
        optimizer.connect_state(self._read_state)

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by now, and so gradients of this window are; 1.0 if not."""
        state = self.progress.loss_scale
        return 1.0 if state is None else state.scale

    def count_backward(self) -> None:
        """A backward of the current micro-batch is complete."""
        if self._timeline is not None:
            self._timeline.micro_batch(self.progress.micro_step)
        self.progress = replace(self.progress, backwards=self.progress.backwards + 1)

    def end_micro_batch(self) -> None:
        """The next micro-batch of the same window begins."""
        progress = self.progress
        self.progress = replace(
            progress,
            micro_step=progress.micro_step + 1,
            backwards=0,
            micro_batches=progress.micro_batches + 1,
        )

    def start_over(self) -> None:
        """The accumulation window is empty again."""
        self.progress = replace(self.progress, micro_step=0, backwards=0)

    def update(self, clipping: float) -> None:
        """Commit a step from the gradients as they are; the sweep then runs behind the caller.

        A step whose gradients are not finite is skipped; the first of a row of them is warned of.
        Raises `TrainingError` after too many skipped steps in a row, or at the smallest loss
        scale, and what the commit raised (an edited parameter, a scheduler) after the step has
        happened.
        """
        self._gradients.finish()  # a backward the engine did not see may have left some open
        with self._mover.lanes.stall("norm"):
            norm = math.sqrt(self._gradients.square_sum())
        before = self.progress.loss_scale
        norm /= self.loss_scale
        skipped = not math.isfinite(norm)
        culprits = self._gradients.non_finite() if skipped else []
        factor = 0.0 if skipped else 1.0
        if clipping and not skipped:
            factor = min(1.0, clipping / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
        self._gradients.settle()
        computed = self._mover.lanes.device.compute_event()  # here: streams belong to threads
        with self._rooms.hooks.owner.shut():
            job, error = self._commit(norm, factor, culprits, computed)
        if job is not None:
            self._sweep.submit(job)
        if error is not None:
            raise error
        if culprits:
            self._refuse_to_go_on(before, culprits)
            self._say_skipped(before, culprits)

    def _refuse_to_go_on(self, before: ScaleState | None, culprits: Sequence[str]) -> None:
        """Raise if steps are skipped and nothing will change that; the last one has been."""
        rules = self.scale_rules
        if rules is not None and before is not None and rules.dynamic:
            if rules.is_exhausted(before):
                raise scale_exhausted(before, culprits)
            return  # the next scale may do
        if self.progress.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise TrainingError(
                f"the gradients of {self.progress.skipped_in_a_row} steps in a row were not "
                f"finite; first in {culprits[0]!r}",
                because="the loss is NaN or infinite, or the learning rate diverged"
                + (f", or the loss scale {before.scale:g} is too large" if before else ""),
                remedy="lower the learning rate, or look at the loss and the data"
                + ("; or leave loss_scale.value out: then the scale is found" if before else ""),
            )

    def _say_skipped(self, before: ScaleState | None, culprits: Sequence[str]) -> None:
        """Warn once in a row of skipped steps, when it is no search for the loss scale any more."""
        count, rules = self.progress.skipped_in_a_row, self.scale_rules
        if count != (SCALES_TRIED_IN_SILENCE if rules is not None and rules.dynamic else 1):
            return
        what = f"step {self.progress.steps} was" if count == 1 else f"{count} steps in a row were"
        scale = f", at a loss scale of {before.scale:g}" if before else ""
        warnings.warn(
            f"{what} skipped: gradients are not finite, first that of {culprits[0]!r}{scale}; "
            "weights stay as they were. Look at the loss and the data of this batch; the next "
            "warning comes after a step that was not skipped",
            InfinityWarning,
            stacklevel=4,
        )

    def _commit(
        self, norm: float, factor: float, culprits: Sequence[str], computed: Event
    ) -> tuple[SweepJob | None, Exception | None]:
        """The step happens: a job for the sweep, and what went wrong after that.

        With `culprits`, whose gradients are not finite, it is skipped.
        """
        skipped, progress = bool(culprits), self.progress
        rules, scale = self.scale_rules, progress.loss_scale
        unscaled = factor / scale.scale if scale is not None else factor
        job = None if skipped else self._make_job(unscaled, computed)
        self.progress = replace(
            progress,
            micro_step=0,
            backwards=0,
            global_steps=progress.global_steps + (not skipped),
            skipped_steps=progress.skipped_steps + skipped,
            skipped_in_a_row=progress.skipped_in_a_row + 1 if skipped else 0,
            micro_batches=progress.micro_batches + 1,
            samples=progress.samples + self.batch_samples,
            loss_scale=rules.after(scale, skipped) if rules and scale else scale,
        )
        # From here the step has happened: whatever fails, the units that are pending get their
        # update, and `update` raises the error after it.
        failure: Exception | None = None
        try:
            if job is not None:
                for index in job.steps:
                    self.steps[index] += 1
                self._rooms.updater.begin(job.hypers, job.steps)
                self._mover.make_pending(job.units)
        except PresenceError as error:
            failure = error
        try:
            if job is None:
                self._gradients.reset()
            else:
                job = replace(job, landing=self._gradients.hand_over())
            self._report(norm, factor, culprits, scale)
            self._optimizer.mark_stepped()
            if not skipped and self.lr_scheduler is not None:
                self.lr_scheduler.step(**self.lr_kwargs)
            if job is not None and self.document is not None:
                job = replace(job, document=self.document())
        except Exception as error:
            failure = failure or error
        return job, failure

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
        self._rooms.hooks.owner.check()
        index = self._index_of.get(id(parameter))
        if index is None:
            raise ConfigError("this parameter does not belong to the engine's module")
        self._sweep.finish()
        rooms, hyper = self._rooms, self._optimizer.hypers(self._index_of).get(index)
        return read_state(rooms.store, rooms.updater, index, hyper, self.steps)

    def _report(
        self, norm: float, factor: float, culprits: Sequence[str], scale: ScaleState | None
    ) -> None:
        self.last_report = self._meter.read(
            step=self.progress.steps,
            grad_norm=norm,
            clip_factor=factor,
            skipped=bool(culprits),
            surprises=self._cycles.surprises(),
            loss_scale=scale.scale if scale is not None else 1.0,
            non_finite=culprits[0] if culprits else "",
        )
        if self._timeline is not None and not self._timeline.step(self.last_report):
            self._timeline = None
        if self._journal is not None:
            self._journal.write({"event": "step", **vars(self.last_report)})

"""Steps of training: gradient norm, clip factor and commit.

[Note: commit]
A commit makes units pending, advances the counters, and captures everything that the update depends
on in a job for the optimizer pass. `TrainingCounters` is one frozen object that a single assignment
replaces: from then on the step has happened, even if something fails later.

[Note: exceptions]
After an exception in a forward no parameter is bound and nothing else is lost. After one in a
backward the accumulation window starts over. If `step()` raises, either the step has happened or
the window starts over.

[Note: loss scale]
Backward starts from the scaled loss; gradients are stored scaled, and the update multiplies by clip
factor / scale, so unscaling is free. Non-finite gradients make the square sums non-finite. The
state of the scale is part of `TrainingCounters`: it changes with the step or not at all.
"""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from infinity.distributed.compare import as_json
from infinity.errors import (
    ConfigError,
    InfinityError,
    InfinityWarning,
    ResidencyError,
    TrainingError,
    TransferError,
)
from infinity.model.torch_private import close_checkpoints, without_torch_function
from infinity.offload.handover import UpdateJob
from infinity.optim.offloaded import OffloadedOptimizer, mark_stepped
from infinity.profiling.step_log import StepLog
from infinity.profiling.step_report import Meter, StepReport
from infinity.storage.device import Event
from infinity.training.components import EngineComponents
from infinity.training.loss_scale import ScaleRules, ScaleState, exhausted_scale_error
from infinity.training.optimizer_state import read_state

MAX_SKIPPED_IN_A_ROW = 20
# Skipped steps in a row that warn under a dynamic loss scale: fewer are its search.
SKIPPED_BEFORE_WARNING = 10
_WARN_AT_BACKWARDS = 16  # in one micro-batch: step() is probably missing


@dataclass(frozen=True)
class TrainingCounters:
    """Counters of training; immutable, see [Note: commit]."""

    global_steps: int = 0  # steps that updated
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    loss_scale: ScaleState | None = None  # None if the loss is not scaled
    micro_batches: int = 0  # calls of step() in the whole run
    samples: int = 0  # in completed windows of the whole run, skipped ones too

    @property
    def steps(self) -> int:
        """Number of completed windows, skipped ones included; `global_steps` for users."""
        return self.global_steps + self.skipped_steps


@dataclass(frozen=True)
class StepInputs:
    """Arguments of a step from the engine.

    `samples` is the number of samples in the window, `lr_kwargs` are passed to the scheduler's
    step, and `document` returns the document of the commit (None if the run is not durable).
    """

    samples: int
    lr_kwargs: Mapping[str, Any]
    document: Callable[[], Mapping[str, Any]] | None


class StepRunner:
    """Turns accumulated gradients into jobs of the optimizer pass, and counts steps."""

    def __init__(
        self,
        components: EngineComponents,
        optimizer: OffloadedOptimizer,
        index_of: Mapping[int, int],
        lr_scheduler: Any,
        step_log: StepLog | None,
        scale_rules: ScaleRules | None = None,
    ) -> None:
        self.scale_rules = scale_rules
        self.counters = TrainingCounters(loss_scale=scale_rules.start() if scale_rules else None)
        self.lr_scheduler = lr_scheduler
        self.last_report: StepReport | None = None
        self.steps = [0] * len(index_of)  # updates so far, by parameter index
        self._components = components
        self._units = components.plan.units
        self._prefetcher = components.prefetcher
        self._gradients = components.gradients
        self._window = components.window
        self._ranks = components.ranks
        self._guard = components.guard
        self._store = components.store
        self._transfers = components.transfers
        self._updater = components.updater
        self._optimizer_pass = components.optimizer_pass
        self._optimizer = optimizer
        self._index_of = dict(index_of)
        self._step_log = step_log
        self._meter = Meter(components.transfers, components.hooks.watch)
        self._timeline = components.timeline  # None after the last traced step
        if self._timeline is not None:
            self._timeline.start()
        optimizer.connect_state(self._read_state)

    @property
    def loss_scale(self) -> float:
        """Factor of the loss and of the gradients in this window; 1.0 without a loss scale."""
        state = self.counters.loss_scale
        return 1.0 if state is None else state.scale

    def count_backward(self) -> None:
        """Count a backward of the current micro-batch."""
        if self._timeline is not None:
            self._timeline.micro_batch(self._window.micro_step)
        self._window.backwards += 1
        self._window.account()
        if self._window.backwards == _WARN_AT_BACKWARDS:
            self._warn(
                f"{_WARN_AT_BACKWARDS} backwards, and no engine.step(): nothing was updated. Call "
                "it after each backward; optimizer.step() of an optimizer that was not passed to "
                "initialize() does nothing here"
            )

    def end_micro_batch(self) -> None:
        """Begin the next micro-batch of the same window."""
        count = self._window.backwards
        if count == self._window.length > 2:
            self._warn(
                f"{count} backwards before one engine.step(), which ended micro-batch "
                f"{self._window.micro_step + 1} of {count}: call step() after each backward; "
                f"gradient_accumulation_steps: {count} decides which of them update"
            )
        self._window.end_micro_batch()
        self.counters = replace(self.counters, micro_batches=self.counters.micro_batches + 1)

    def _warn(self, text: str) -> None:
        """Warn on the first rank only."""
        if self._ranks.rank == 0:
            warnings.warn(text, InfinityWarning, stacklevel=6)

    # --- rollback --------------------------------------------------------------------------------

    def clean_up_forward(self, error: Exception) -> None:
        """Clean up after an exception in a forward; gradients are retained."""
        close_checkpoints(error)
        self._components.recover()
        self._components.cycles.end()

    def roll_back(self, error: Exception | None = None) -> None:
        """Discard the gradients of the accumulation window; `error` ended a backward."""
        if error is not None:
            close_checkpoints(error)
        self._window.account()
        self._window.clear()
        self._components.recover()
        self._components.hooks.drop_gradients()
        self._gradients.reset()
        self._components.cycles.end()

    @contextmanager
    def together(self, doing: str, *, loses: bool = True) -> Iterator[None]:
        """Propagate exceptions to all ranks; start the window over if gradients are lost.

        The window starts over on all ranks, even if one failed: otherwise a rank would add to
        gradients that others discarded. `loses` is False if the block cannot lose gradients.
        """
        before = self.counters
        try:
            yield
        except Exception as error:
            refused = isinstance(error, InfinityError) and not isinstance(error, TransferError)
            lost = loses and not refused
            try:
                if (lost or self._ranks.count > 1) and self.counters is before:
                    self.roll_back()
            finally:
                self._ranks.broadcast_error(doing, error)
            raise

    # --- the step --------------------------------------------------------------------------------

    def update(self, clipping: float, inputs: StepInputs) -> None:
        """Commit a step of the accumulated gradients; the optimizer pass runs in the background.

        A step whose gradients are not finite is skipped, with one warning per row of such steps.
        An error of the commit itself (an edited parameter, a scheduler) is raised after the step
        has happened.

        Raises:
            TrainingError: Too many steps in a row were skipped, or one at the smallest loss scale;
                or a parameter that cannot be updated has a gradient; or `clipping` is negative or
                NaN.
        """
        if not (clipping or 0.0) >= 0:
            raise TrainingError(
                f"engine.gradient_clipping is {clipping}",
                remedy="assign the largest global norm, or 0 for none, and call step() again",
            )
        self._gradients.finish()  # after a backward that the engine did not start
        self._gradients.complete()
        # Operations that may fail on one rank alone come before the ranks synchronize for the norm:
        # after it all commit.
        self._gradients.settle()
        self._store.wait_shared_copies()
        params_by_index = self._optimizer.params_by_index(self._index_of)
        self._updater.check(params_by_index)
        self._check_gradients(params_by_index)
        equal_values: dict[str, int] = {}  # must be equal on all ranks
        if self._ranks.count > 1:
            values = as_json(self._optimizer.group_values()).encode()
            equal_values = self._window.position | {
                "values of the optimizer's groups": zlib.crc32(values),
                "gradient_clipping": zlib.crc32(repr(clipping).encode()),
            }
        with self._transfers.stall("norm"):
            norm = math.sqrt(self._gradients.square_sum(equal_values))
        scale = self.counters.loss_scale
        norm /= self.loss_scale
        skipped = not math.isfinite(norm)
        culprits = self._gradients.non_finite() if skipped else []
        clip_factor = 0.0 if skipped else 1.0
        if clipping and not skipped:
            clip_factor = min(1.0, clipping / (norm + 1e-6))  # as in clip_grad_norm_
        # Recorded on this thread, since current streams belong to threads.
        computed = self._transfers.device.compute_event()
        with self._guard.locked():
            job, error = self._commit(
                norm, clip_factor, culprits, computed, params_by_index, inputs
            )
        if job is not None:
            self._optimizer_pass.submit(job)
        if error is not None:
            raise error
        if culprits:
            self._check_skipped(scale, culprits)
            self._warn_skipped(scale, culprits)

    def _check_skipped(self, scale: ScaleState | None, culprits: Sequence[str]) -> None:
        """Raise `TrainingError` if later steps would be skipped like the last one."""
        rules = self.scale_rules
        if rules is not None and scale is not None and rules.dynamic:
            if rules.is_exhausted(scale):
                raise exhausted_scale_error(scale, culprits)
            return  # a lower scale may work
        if self.counters.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise TrainingError(
                f"the gradients of {self.counters.skipped_in_a_row} steps in a row were not "
                f"finite; first in {culprits[0]!r}",
                because="the loss is NaN or infinite, or the learning rate diverged, or an "
                "autograd.Function keeps a weight in ctx without ctx.save_for_backward, or the "
                "loss uses a view of a weight that was read outside a call of the engine"
                + (f", or the loss scale {scale.scale:g} is too large" if scale else ""),
                remedy="lower the learning rate, or look at the loss and the data"
                + ("; or leave loss_scale.value out: then the scale is found" if scale else ""),
            )

    def _check_gradients(self, params_by_index: Mapping[int, Any]) -> None:
        """Raise `TrainingError` for gradients of parameters that cannot be updated."""
        partition = self._components.partition
        with without_torch_function():
            grads = [parameter.grad for parameter in partition.parameters]
        for index, grad in enumerate(grads):
            if grad is not None and partition.trained[index]:
                partition.parameters[index].grad = None
                raise TrainingError(
                    f"{partition.names[index]!r} has a .grad that did not come to the engine; it "
                    "is dropped",
                    because="gradients move during backward: one was put there by hand, or "
                    "parameters were swapped (torch.__future__.set_swap_module_params_on_"
                    "conversion), and the engine's hooks with them",
                    remedy="engine.set_gradient(parameter, value) after a backward",
                )
        for index in self._gradients.arrived():
            if index not in params_by_index:
                raise TrainingError(
                    f"{partition.names[index]!r} has a gradient, and is in no group of the "
                    "optimizer any more",
                    because="groups, or parameters in them, were removed",
                    remedy="requires_grad_(False) freezes it; or a group with lr 0",
                )

    def _warn_skipped(self, scale: ScaleState | None, culprits: Sequence[str]) -> None:
        """Warn once per row of skipped steps, if it is longer than a search for the loss scale."""
        rules = self.scale_rules
        count = self.counters.skipped_in_a_row
        if count != (SKIPPED_BEFORE_WARNING if rules is not None and rules.dynamic else 1):
            return
        steps = f"step {self.counters.steps} was" if count == 1 else f"{count} steps in a row were"
        at_scale = f", at a loss scale of {scale.scale:g}" if scale else ""
        self._warn(
            f"{steps} skipped: gradients are not finite, first that of {culprits[0]!r}{at_scale}; "
            "weights stay as they were. Likely causes: the loss or the data of this batch, or a "
            "view of a weight that was read outside a call of the engine; the next warning comes "
            "after a step that was not skipped",
        )

    def _commit(
        self, norm: float, clip_factor: float, culprits: Sequence[str], computed: Event,
        params_by_index: Mapping[int, Any], inputs: StepInputs,
    ) -> tuple[UpdateJob | None, Exception | None]:  # fmt: skip
        """Commit the step; return its job, and an error to raise once the job is submitted.

        The step is skipped, without a job, if there are `culprits`: parameters whose gradients are
        not finite.
        """
        skipped = bool(culprits)
        counters = self.counters
        rules = self.scale_rules
        scale = counters.loss_scale
        grad_scale = clip_factor / scale.scale if scale is not None else clip_factor
        job = None if skipped else self._make_job(grad_scale, computed, params_by_index)
        if job is not None and not job.units:
            self._warn(
                f"step {counters.steps + 1} updates nothing: no gradient came to the engine; is "
                "the loss made of what engine(...) returned, or of another copy of the model?"
            )
        self.counters = replace(
            counters,
            global_steps=counters.global_steps + (not skipped),
            skipped_steps=counters.skipped_steps + skipped,
            skipped_in_a_row=counters.skipped_in_a_row + 1 if skipped else 0,
            micro_batches=counters.micro_batches + 1,
            samples=counters.samples + inputs.samples,
            loss_scale=rules.after(scale, skipped) if rules and scale else scale,
        )
        self._window.end()
        # The step has happened: even if something fails below, pending units are updated, and
        # `update` raises the error after it has submitted the job.
        failure: Exception | None = None
        try:
            if job is not None:
                for index in job.steps:
                    self.steps[index] += 1
                self._updater.begin(params_by_index, job.steps)
                self._prefetcher.make_pending(job.units)
        except ResidencyError as error:
            failure = error
        try:
            if job is None:
                self._gradients.reset()
            else:
                job = replace(job, copies=self._gradients.take_copies())
            self._report(norm, clip_factor, culprits, scale)
            mark_stepped(self._optimizer)
            if not skipped and self.lr_scheduler is not None:
                self.lr_scheduler.step(**inputs.lr_kwargs)
            if job is not None and inputs.document is not None:
                job = replace(job, document=inputs.document())
        except Exception as error:
            failure = failure or error
        return job, failure

    def _make_job(
        self, grad_scale: float, computed: Event, params_by_index: Mapping[int, Any]
    ) -> UpdateJob:
        """Return a job with everything that the optimizer pass depends on."""
        arrived = self._gradients.arrived()
        units = self._units
        order = dict.fromkeys([*self._components.cycles.training.first_uses(), *range(len(units))])
        return UpdateJob(
            units=tuple(
                u for u in order if any(s.parameter in arrived for s in units[u].trained_segments)
            ),
            params_by_index={i: params_by_index[i] for i in arrived},
            steps={i: self.steps[i] + 1 for i in arrived},
            grad_scale=grad_scale,
            computed=computed,
        )

    def _read_state(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Implement `OffloadedOptimizer.read_state`."""
        self._guard.check()
        index = self._index_of.get(id(parameter))
        if index is None:
            raise ConfigError("this parameter does not belong to the engine's module")
        components = self._components
        self._optimizer_pass.finish()  # groups are captured while no update runs
        rule_params = self._optimizer.params_by_index(self._index_of).get(index)
        return read_state(components.store, components.updater, index, rule_params, self.steps)

    def _report(
        self, norm: float, clip_factor: float, culprits: Sequence[str], scale: ScaleState | None
    ) -> None:
        tokens, router_loss = self._components.hooks.expert_calls.take()
        self.last_report = self._meter.report(
            self._components.cycles.mispredictions(),
            step=self.counters.steps,
            grad_norm=norm,
            clip_factor=clip_factor,
            skipped=bool(culprits),
            loss_scale=scale.scale if scale is not None else 1.0,
            non_finite=culprits[0] if culprits else "",
            expert_tokens=tokens,
            router_loss=router_loss,
        )
        if self._timeline is not None and not self._timeline.step(self.last_report):
            self._timeline = None
        if self._step_log is not None:
            self._step_log.write({"event": "step", **self.last_report.record()})

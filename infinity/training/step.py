"""One step: norm, clip factor, and the commit, after which the step has happened.

[Note: commit]
Units become pending, counters advance, and a job for the optimizer pass holds all that the update
depends on. `TrainingCounters` is one frozen object, replaced as a whole: once it is replaced the
step has happened, whatever fails later.

[Note: exceptions]
After an exception in a forward nothing is bound and nothing else is lost. After one in a backward
the accumulation window starts over. A `step()` that raised has happened, or the window starts over.

[Note: loss scale]
Backward starts from the scaled loss; gradients are stored scaled, and the update multiplies by clip
factor / scale, so unscaling costs nothing. Non-finite gradients show in the square sums. The state
of the scale is part of `TrainingCounters`: it changes with the step or not at all.
"""

from __future__ import annotations

import copy
import logging
import math
import re
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from infinity.config.schema import LossScaleConfig
from infinity.distributed.context import as_json
from infinity.errors import (
    ConfigError,
    InfinityError,
    InfinityWarning,
    ResidencyError,
    TrainingError,
    TransferError,
    first_lines,
    listed,
)
from infinity.model.buffers import find_buffers
from infinity.model.torch_private import end_checkpoints
from infinity.optim.moments import COMPUTE_DTYPES
from infinity.optim.offloaded import OffloadedOptimizer
from infinity.profiling.step_log import Journal
from infinity.profiling.step_report import Meter, StepReport
from infinity.storage.device import Event
from infinity.training.components import EngineComponents
from infinity.training.optimizer_pass import UpdateJob
from infinity.training.parameter_access import read_state

# Loss scaling for fp16: by how much the loss is multiplied, by DeepSpeed's rules, step for step.
#
# What is less than 6e-8 vanishes in fp16. So the loss is multiplied before backward, and the
# update multiplies by the inverse as part of its clip factor. Where a gradient is not finite the
# step is skipped, and a dynamic scale may be halved:
#
# - the first `hysteresis - 1` overflows cost patience only, every later one halves the scale, but
#   never below the minimum;
# - the scale doubles in the first step that lies `window + 1` steps behind the last overflow, and
#   every `window` steps from then on (before the first overflow: after `window` steps and one);
# - patience is full again when the scale doubles, or with `consecutive` in every good step.
#
# [Note: one more step]
# DeepSpeed counts the good steps that lie *between* the last overflow and this one, which is why a
# window is one step longer after an overflow, and at the start, than from one doubling to the
# next.


FACTOR = 2.0
MAX_HISTORY = 32  # changes of the scale that are kept for people to read


@dataclass(frozen=True)
class ScaleState:
    """Where a scale is; replaced as a whole.

    `patience` counts overflows: at 1 the next one halves the scale. `steps` counts all that were
    tried, `last_overflow` is that count before the last overflow, -1 if there was none. `history`
    has (steps before it, scale) of the latest changes, oldest first.
    """

    scale: float
    patience: int = 1
    steps: int = 0
    last_overflow: int = -1
    history: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class ScaleRules:
    """How a scale goes on; without `dynamic` it never changes. `window` is steps."""

    initial: float
    dynamic: bool = True
    window: int = 1000
    hysteresis: int = 2
    consecutive: bool = False
    minimum: float = 1.0

    @staticmethod
    def of(config: LossScaleConfig) -> ScaleRules:
        """The rules of a configuration."""
        return ScaleRules(
            initial=config.value or 2.0**config.initial_power,
            dynamic=not config.value,
            window=config.window,
            hysteresis=config.hysteresis,
            consecutive=config.consecutive_hysteresis,
            minimum=config.min,
        )

    def start(self) -> ScaleState:
        """Before the first step."""
        return ScaleState(self.initial, self.hysteresis, history=((0, self.initial),))

    def is_exhausted(self, state: ScaleState) -> bool:
        """Whether there is no answer to another overflow."""
        return self.dynamic and state.patience <= 1 and state.scale <= self.minimum

    def after(self, state: ScaleState, overflow: bool) -> ScaleState:
        """The state after one more step."""
        scale, patience = state.scale, state.patience
        last_overflow = state.steps if overflow else state.last_overflow
        if self.dynamic and overflow:
            if patience <= 1:
                scale = max(scale / FACTOR, min(self.minimum, scale))
            else:
                patience -= 1
        elif self.dynamic:
            between = state.steps - last_overflow - 1
            doubles = between > 0 and between % self.window == 0
            scale *= FACTOR if doubles else 1.0
            patience = self.hysteresis if doubles or self.consecutive else patience
        history = state.history
        if scale != state.scale:
            history = (*history, (state.steps + 1, scale))[-MAX_HISTORY:]
        return ScaleState(scale, patience, state.steps + 1, last_overflow, history)

    def restored(self, saved: Mapping[str, Any]) -> ScaleState:
        """What `as_data` gave. A scale that does not change is that of the configuration."""
        history = tuple((int(step), float(scale)) for step, scale in saved["history"])
        state = ScaleState(
            float(saved["scale"]),
            int(saved["patience"]),
            int(saved["steps"]),
            int(saved["last_overflow"]),
            history,
        )
        if not self.dynamic and state.scale != self.initial:
            state = replace(state, scale=self.initial)
        return replace(state, patience=max(1, min(state.patience, self.hysteresis)))


def as_data(state: ScaleState) -> dict[str, Any]:
    """Plain data, for a checkpoint."""
    return asdict(state) | {"history": [list(change) for change in state.history]}


def story(state: ScaleState) -> str:
    """The latest scales in words: "65536, 32768 after step 3, ..."; skipped steps count."""
    return ", ".join(
        f"{scale:g}" + (f" after step {step}" if step else "") for step, scale in state.history
    )


def scale_exhausted(state: ScaleState, culprits: Sequence[str]) -> TrainingError:
    """What to raise where gradients overflow at the smallest scale; `culprits` are parameters."""
    first, last = culprits[0], culprits[-1]
    module = first.rpartition(".")[0]
    where = f"first in {first!r}" + (f" of the module {module!r}" if module else "")
    if len(culprits) > 1:
        where += f", and in {len(culprits) - 1} more up to {last!r}"
    return TrainingError(
        f"gradients are not finite at the smallest loss scale, {state.scale:g}: {where}",
        because=f"the scale went {story(state)}; values above 65504 are infinite in fp16, and "
        "backward carries infinities from later layers to earlier ones",
        remedy='write precision: bf16 (DeepSpeed: "bf16": {"enabled": true}), above all for models '
        "that were trained in bf16; or lower the learning rate, look at the loss and the data, or "
        "set loss_scale.min below 1",
    )


# What a call of the engine may be given.

_OTHER_DTYPE = re.compile(r"\b(dtype|scalar type|Input type)\b")  # torch's words where two meet


class Inputs:
    """Looks at what a model is called with; with `casts` floats become bf16 or fp16."""

    def __init__(self, module: nn.Module, components: EngineComponents, *, casts: bool) -> None:
        self._module = module
        self._cut, self._device = components.partition, components.device.torch_device
        self._dtype = COMPUTE_DTYPES[components.plan.precision.name]
        self._casts = casts and self._dtype is not torch.float32
        self._warned = False

    def admit(self, arguments: Any) -> Any:
        """Move tensors to the device, however deep, and cast floats where `casts` was asked for.

        As FSDP2 moves inputs. Numbers (tensors of no dimension) and the batch sizes of a
        `PackedSequence` stay in RAM. Raises `TrainingError` for a tensor on meta, and for a
        parameter that requires a gradient and has no state for it.
        """
        for name, parameter, trained in zip(
            self._cut.names, self._cut.parameters, self._cut.trained, strict=True
        ):
            if parameter.requires_grad and not trained:
                raise TrainingError(
                    f"parameter {name!r} requires a gradient, but was frozen when the engine was "
                    "made and has no optimizer state",
                    remedy="pass it to initialize(model_parameters=...), which gives state to "
                    "parameters that are frozen for now, or keep it frozen",
                )
        others = self._of_other_dtype(arguments) if self._casts else []
        if others and not self._warned:
            self._warned = True
            logging.getLogger("infinity").info(
                "cast_inputs: %s of an input become %s, here and in later calls",
                listed(sorted({str(t.dtype) for t in others})), self._dtype,
            )  # fmt: skip
        return _map_tensors(arguments, self._prepare)

    def _prepare(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "meta" != self._device.type:
            raise TrainingError(
                f"an input tensor is on meta, the engine computes on {self._device}",
                because="a tensor on meta has no values",
                remedy="make the batch in RAM or on the device",
            )
        if tensor.dim() or tensor.device.type != "cpu":
            tensor = tensor.to(self._device)
        return tensor.to(self._dtype) if self._casts and tensor.is_floating_point() else tensor

    def explain(self, error: Exception, arguments: Any) -> None:
        """Raise `TrainingError` where an input of another dtype may be what torch refused; note
        buffers that are.
        """
        if not isinstance(error, RuntimeError) or not _OTHER_DTYPE.search(str(error)):
            return
        cast = (
            "; or write cast_inputs: true, which does so with all floating inputs (among keys of "
            'DeepSpeed\'s: "infinity": {"cast_inputs": true})'
        )
        for tensor in self._of_other_dtype(arguments):
            raise TrainingError(
                f"an input of shape {tuple(tensor.shape)} is {tensor.dtype}, the engine computes "
                f"in {self._dtype}",
                because=first_lines(error),
                remedy=f"cast it: tensor.to({self._dtype})"
                + (cast if self._dtype is not torch.float32 else ""),
            ) from error
        floating = [b for b in find_buffers(self._module) if b.value.is_floating_point()]
        others = [b.names[0] for b in floating if b.value.dtype is not self._dtype]
        if others:
            error.add_note(
                f"the engine computes in {self._dtype}, buffers keep their dtype: if "
                f"{listed(list(map(repr, others)))} meets weights, cast it there: b.to(x.dtype)"
            )

    def _of_other_dtype(self, arguments: Any) -> list[Tensor]:
        found = _tensors(arguments)
        return [t for t in found if t.is_floating_point() and t.dtype is not self._dtype]


def _map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return `value` with its tensors changed; a container of which none changes stays itself."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        items = {key: _map_tensors(item, change) for key, item in value.items()}
        changed = {key: item for key, item in items.items() if item is not value[key]}
        if changed:
            value = copy.copy(value) if isinstance(value, MutableMapping) else dict(value)
            value.update(changed)
    elif isinstance(value, list | tuple):
        parts = [_map_tensors(item, change) for item in value]
        if isinstance(value, PackedSequence):
            parts[1] = value.batch_sizes  # torch wants them in RAM
        if any(a is not b for a, b in zip(parts, value, strict=True)):
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def _tensors(value: Any) -> list[Tensor]:
    found = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _map_tensors(value, keep)
    return found


MAX_SKIPPED_IN_A_ROW = 20
# A dynamic loss scale is found by skipping steps: only so many in a row are more than a search.
SCALES_TRIED_IN_SILENCE = 10
_MANY_BACKWARDS = 16  # of one micro-batch: more than there are losses


@dataclass(frozen=True)
class TrainingCounters:
    """Where training is; see [Note: commit]."""

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


@dataclass(frozen=True)
class StepInputs:
    """What the engine gives a step.

    `samples` are those of the window, `lr_kwargs` go to the scheduler's step; `document`, where
    steps are durable, makes what a committed step holds beside the state.
    """

    samples: int
    lr_kwargs: Mapping[str, Any]
    document: Callable[[], Mapping[str, Any]] | None


class StepRunner:
    """Turns accumulated gradients into an optimizer pass; counts steps, per parameter too."""

    def __init__(
        self,
        components: EngineComponents,
        optimizer: OffloadedOptimizer,
        index_of: Mapping[int, int],
        lr_scheduler: Any,
        journal: Journal | None,
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
        self._optimizer = optimizer
        self._index_of = dict(index_of)
        self._journal = journal
        self._meter = Meter(components.transfers, components.hooks.watch)
        self._timeline = components.timeline  # until it is over
        if self._timeline is not None:
            self._timeline.start()
        optimizer.connect_state(self._read_state)

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by now, and so gradients of this window are; 1.0 if not."""
        state = self.counters.loss_scale
        return 1.0 if state is None else state.scale

    def count_backward(self) -> None:
        """A backward of the current micro-batch is complete."""
        if self._timeline is not None:
            self._timeline.micro_batch(self._window.micro_step)
        self._window.backwards += 1
        self._window.account()
        if self._window.backwards == _MANY_BACKWARDS:
            self._warn(
                f"{_MANY_BACKWARDS} backwards, and no engine.step(): nothing was updated. Call it "
                "after each backward; optimizer.step() of an optimizer that was not passed to "
                "initialize() does nothing here"
            )

    def end_micro_batch(self) -> None:
        """The next micro-batch of the same window begins."""
        if (count := self._window.backwards) == self._window.length > 2:
            self._warn(
                f"{count} backwards before one engine.step(), which ended micro-batch "
                f"{self._window.micro_step + 1} of {count}: call step() after each backward; "
                f"gradient_accumulation_steps: {count} decides which of them update"
            )
        self._window.end_micro_batch()
        self.counters = replace(self.counters, micro_batches=self.counters.micro_batches + 1)

    def _warn(self, text: str) -> None:
        """Of what all ranks do one says it."""
        if self._components.ranks.rank == 0:
            warnings.warn(text, InfinityWarning, stacklevel=6)

    # --- rollback --------------------------------------------------------------------------------

    def end_forward(self, error: Exception) -> None:
        """An exception ended a forward: nothing is lost but that."""
        end_checkpoints(error)
        self._components.recover()
        self._components.cycles.end()

    def roll_back(self, error: Exception | None = None) -> None:
        """The accumulation window starts over, empty; `error` ended a backward."""
        if error is not None:
            end_checkpoints(error)
        self._window.account()
        self._window.start_over()
        self._components.recover()
        self._components.hooks.drop_gradients()
        self._gradients.reset()
        self._components.cycles.end()

    @contextmanager
    def together(self, doing: str, *, loses: bool = True) -> Iterator[None]:
        """What raises inside is told to the other ranks; if it `loses` gradients, the window starts
        over.

        Of several ranks on all of them, whichever failed: else one would add what others drop.
        """
        before = self.counters
        try:
            yield
        except Exception as error:
            lost = loses and _loses_gradients(error)
            try:
                if (lost or self._components.ranks.count > 1) and self.counters is before:
                    self.roll_back()
            finally:
                self._components.ranks.broadcast_error(doing, error)
            raise

    # --- the step --------------------------------------------------------------------------------

    def update(self, clipping: float, given: StepInputs) -> None:
        """Commit a step from the gradients as they are; the optimizer pass then runs behind the
        caller.

        A step whose gradients are not finite is skipped; the first of a row of them is warned of.
        Raises `TrainingError` after too many skipped steps in a row, or at the smallest loss
        scale, and what the commit raised (an edited parameter, a scheduler) after the step has
        happened.
        """
        self._gradients.finish()  # a backward the engine did not see may have left some open
        self._gradients.complete()
        # What may fail on one rank alone comes before ranks meet for the norm: then all commit.
        self._gradients.settle()
        self._components.store.settle_copies()
        params_by_index = self._optimizer.params_by_index(self._index_of)
        self._components.updater.check(params_by_index)
        self._refuse_others(params_by_index)
        equal = self._must_be_equal(clipping) if self._components.ranks.count > 1 else {}
        with self._prefetcher.transfers.stall("norm"):
            norm = math.sqrt(self._gradients.square_sum(equal))
        before = self.counters.loss_scale
        norm /= self.loss_scale
        skipped = not math.isfinite(norm)
        culprits = self._gradients.non_finite() if skipped else []
        factor = 0.0 if skipped else 1.0
        if clipping and not skipped:
            factor = min(1.0, clipping / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
        # Here: streams belong to threads.
        computed = self._prefetcher.transfers.device.compute_event()
        with self._components.guard.locked():
            job, error = self._commit(norm, factor, culprits, computed, params_by_index, given)
        if job is not None:
            self._components.optimizer_pass.submit(job)
        if error is not None:
            raise error
        if culprits:
            self._refuse_to_go_on(before, culprits)
            self._say_skipped(before, culprits)

    def _must_be_equal(self, clipping: float) -> dict[str, int]:
        """What ranks must have alike where they meet for a step."""
        values = as_json(self._optimizer.group_values()).encode()
        return self._window.place | {
            "values of the optimizer's groups": zlib.crc32(values),
            "gradient_clipping": zlib.crc32(repr(clipping).encode()),
        }

    def _refuse_to_go_on(self, before: ScaleState | None, culprits: Sequence[str]) -> None:
        """Raise if steps are skipped and nothing will change that; the last one has been."""
        rules = self.scale_rules
        if rules is not None and before is not None and rules.dynamic:
            if rules.is_exhausted(before):
                raise scale_exhausted(before, culprits)
            return  # the next scale may do
        if self.counters.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise TrainingError(
                f"the gradients of {self.counters.skipped_in_a_row} steps in a row were not "
                f"finite; first in {culprits[0]!r}",
                because="the loss is NaN or infinite, or the learning rate diverged, or an "
                "autograd.Function keeps a weight in ctx without ctx.save_for_backward, or the "
                "loss uses a view of a weight that was read outside a call of the engine"
                + (f", or the loss scale {before.scale:g} is too large" if before else ""),
                remedy="lower the learning rate, or look at the loss and the data"
                + ("; or leave loss_scale.value out: then the scale is found" if before else ""),
            )

    def _refuse_others(self, params_by_index: Mapping[int, Any]) -> None:
        """Raise for gradients that a step cannot be made of."""
        partition = self._components.partition
        for parameter, trained, name in zip(
            partition.parameters, partition.trained, partition.names, strict=True
        ):
            if trained and parameter.grad is not None:
                parameter.grad = None
                raise TrainingError(
                    f"{name!r} has a .grad that did not come to the engine; it is dropped",
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

    def _say_skipped(self, before: ScaleState | None, culprits: Sequence[str]) -> None:
        """Warn once in a row of skipped steps, when it is no search for the loss scale any more."""
        count, rules = self.counters.skipped_in_a_row, self.scale_rules
        if count != (SCALES_TRIED_IN_SILENCE if rules is not None and rules.dynamic else 1):
            return
        what = f"step {self.counters.steps} was" if count == 1 else f"{count} steps in a row were"
        scale = f", at a loss scale of {before.scale:g}" if before else ""
        self._warn(
            f"{what} skipped: gradients are not finite, first that of {culprits[0]!r}{scale}; "
            "weights stay as they were. Likely causes: the loss or the data of this batch, or a "
            "view of a weight that was read outside a call of the engine; the next warning comes "
            "after a step that was not skipped",
        )

    def _commit(
        self, norm: float, factor: float, culprits: Sequence[str], computed: Event,
        params_by_index: Mapping[int, Any], given: StepInputs,
    ) -> tuple[UpdateJob | None, Exception | None]:  # fmt: skip
        """The step happens: a job for the optimizer pass, and what went wrong after that.

        With `culprits`, whose gradients are not finite, it is skipped.
        """
        skipped, progress = bool(culprits), self.counters
        rules, scale = self.scale_rules, progress.loss_scale
        unscaled = factor / scale.scale if scale is not None else factor
        job = None if skipped else self._make_job(unscaled, computed, params_by_index)
        if job is not None and not job.units:
            self._warn(
                f"step {progress.steps + 1} updates nothing: no gradient came to the engine; is "
                "the loss made of what engine(...) returned, or of another copy of the model?"
            )
        self.counters = replace(
            progress,
            global_steps=progress.global_steps + (not skipped),
            skipped_steps=progress.skipped_steps + skipped,
            skipped_in_a_row=progress.skipped_in_a_row + 1 if skipped else 0,
            micro_batches=progress.micro_batches + 1,
            samples=progress.samples + given.samples,
            loss_scale=rules.after(scale, skipped) if rules and scale else scale,
        )
        self._window.end()
        # From here the step has happened: whatever fails, the units that are pending get their
        # update, and `update` raises the error after it.
        failure: Exception | None = None
        try:
            if job is not None:
                for index in job.steps:
                    self.steps[index] += 1
                self._components.updater.begin(params_by_index, job.steps)
                self._prefetcher.make_pending(job.units)
        except ResidencyError as error:
            failure = error
        try:
            if job is None:
                self._gradients.reset()
            else:
                job = replace(job, copies=self._gradients.hand_over())
            self._report(norm, factor, culprits, scale)
            self._optimizer.mark_stepped()
            if not skipped and self.lr_scheduler is not None:
                self.lr_scheduler.step(**given.lr_kwargs)
            if job is not None and given.document is not None:
                job = replace(job, document=given.document())
        except Exception as error:
            failure = failure or error
        return job, failure

    def _make_job(
        self, factor: float, computed: Event, params_by_index: Mapping[int, Any]
    ) -> UpdateJob:
        """Everything the optimizer pass depends on, as it is now."""
        arrived = self._gradients.arrived()
        units = self._units
        order = dict.fromkeys([*self._components.cycles.training.first_uses(), *range(len(units))])
        return UpdateJob(
            units=tuple(
                u for u in order if any(s.parameter in arrived for s in units[u].trained_segments)
            ),
            params_by_index={i: params_by_index[i] for i in arrived},
            steps={i: self.steps[i] + 1 for i in arrived},
            grad_scale=factor,
            computed=computed,
        )

    def _read_state(self, parameter: nn.Parameter) -> dict[str, Any]:
        """`OffloadedOptimizer.read_state`."""
        self._components.guard.check()
        index = self._index_of.get(id(parameter))
        if index is None:
            raise ConfigError("this parameter does not belong to the engine's module")
        components = self._components
        components.optimizer_pass.finish()  # groups are captured while no update runs
        rule_params = self._optimizer.params_by_index(self._index_of).get(index)
        return read_state(components.store, components.updater, index, rule_params, self.steps)

    def _report(
        self, norm: float, factor: float, culprits: Sequence[str], scale: ScaleState | None
    ) -> None:
        tokens, router_loss = self._components.hooks.routed.take()
        self.last_report = self._meter.report(
            self._components.cycles.mispredictions(),
            step=self.counters.steps,
            grad_norm=norm,
            clip_factor=factor,
            skipped=bool(culprits),
            loss_scale=scale.scale if scale is not None else 1.0,
            non_finite=culprits[0] if culprits else "",
            expert_tokens=tokens,
            router_loss=router_loss,
        )
        if self._timeline is not None and not self._timeline.step(self.last_report):
            self._timeline = None
        if self._journal is not None:
            self._journal.write({"event": "step", **self.last_report.record()})


def _loses_gradients(error: Exception) -> bool:
    """Whether gradients were lost on their way; other errors of ours are refusals."""
    return isinstance(error, TransferError) or not isinstance(error, InfinityError)

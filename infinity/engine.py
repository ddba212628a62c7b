"""The engine: forward, backward, step, values, close. Thin: every deed is done in its room."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from infinity.errors import (
    EngineClosedError,
    InfinityError,
    PresenceError,
    TrainingError,
)
from infinity.journal import Journal
from infinity.optim.offloaded import OffloadedOptimizer
from infinity.parts import Parts
from infinity.plan.forecast import forecast_bytes
from infinity.plan.plan import Plan
from infinity.plan.tape import Tape, guess_cycle
from infinity.training.report import Meter, StepReport
from infinity.training.state_dict import ModuleStateHooks, StateDict, state_dict_of
from infinity.training.sweep import SweepJob
from infinity.training.values import Values, targets

MAX_SKIPPED_IN_A_ROW = 20


@dataclass(frozen=True)
class Progress:
    """Where training is; replaced as a whole, so that an interruption finds it old or new."""

    micro_step: int = 0
    backwards: int = 0  # since the last step()
    global_steps: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0


class Engine:
    """Owns a module's memory while it is trained. Made by `infinity.initialize`.

    `module` is the user's module; `optimizer` holds the parameter groups; `plan` says what lives
    where. A context manager: leaving closes.
    """

    def __init__(
        self,
        module: nn.Module,
        parts: Parts,
        optimizer: OffloadedOptimizer,
        *,
        gradient_clipping: float,
        journal: Journal | None,
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.plan: Plan = parts.plan
        self.lr_scheduler: Any = None
        self.gradient_clipping = gradient_clipping
        self.last_report: StepReport | None = None
        self._parts = parts
        self._journal = journal
        self._index_of = {id(p): i for i, p in enumerate(parts.cut.parameters)}
        self._steps = [0] * len(parts.cut.parameters)
        self._progress = Progress()
        self._cycle_open = False
        self._after_commit: Exception | None = None  # of a step that happened all the same
        num_units = len(self.plan.units)
        self._tapes = {grad: Tape(guess_cycle(num_units, backward=grad)) for grad in (True, False)}
        self._values = Values(parts.store, parts.mover, parts.adam, _settler(parts))
        parts.hooks.lent = self._values.lent
        self._state_hooks = ModuleStateHooks(module, self._values, self._index_of)
        self._meter = Meter(parts.lanes)
        self._closed = False
        self._finalizer = weakref.finalize(self, parts.close)
        optimizer.connect(self.step)
        self._pid = os.getpid()
        _after_fork(self)

    # --- training ------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward; same arguments, same result."""
        self._check_usable()
        self._check_arguments(args, kwargs)
        self._values.take_back_all()
        self._begin_cycle()
        hooks = self._parts.hooks
        mark = hooks.mark()
        # No `finally`: an interruption may strike inside one, and then the rest of it is skipped.
        try:
            torch.set_autocast_cache_enabled(False)  # it would keep casts of weights that move
            hooks.saved.push()
            result = self.module(*args, **kwargs)
            hooks.restore(mark)
            if not torch.is_grad_enabled():
                self._end_cycle()
            return result
        except BaseException:
            hooks.restore(mark)
            self._parts.mover.recover()
            self._end_cycle()
            raise

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> Tensor:
        """Backward of one micro-batch; gradients leave to their homes as they are made.

        The loss is divided by `gradient_accumulation_steps`; the scaled loss is returned. After
        an exception the accumulation window starts over: its gradients are dropped and
        `micro_step` is 0 again.
        """
        self._check_usable()
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise TrainingError(
                "backward needs a scalar loss that depends on trained parameters, got "
                + (f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(type(loss))),
                remedy="reduce the loss with .mean(); call the engine outside torch.no_grad()",
            )
        micro_batches = self.plan.micro_batches
        scaled = loss / micro_batches if micro_batches > 1 else loss
        result = scaled.detach()
        gradients, hooks = self._parts.gradients, self._parts.hooks
        gradients.last_micro_batch = self._is_last_micro_batch()
        mark = hooks.mark()
        try:
            scaled.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
            gradients.finish()
            self._end_cycle()
            self._progress = replace(self._progress, backwards=self._progress.backwards + 1)
            return result
        except BaseException:
            hooks.restore(mark)  # a recomputation pushes pairs of its own
            self._start_over()
            raise

    def _start_over(self) -> None:
        """After an exception: the accumulation window is empty again."""
        self._progress = replace(self._progress, micro_step=0, backwards=0)
        self._parts.mover.recover()
        self._parts.hooks.drop_gradients()
        self._parts.gradients.reset()
        self._end_cycle()

    def step(self) -> None:
        """End a micro-batch; at the end of the accumulation window, update.

        Returns once the norm and the clip factor are known; the sweep runs behind the next
        forward. A step whose gradients are not all finite is skipped and counted. Interrupted,
        it has happened, or the accumulation window starts over: `global_steps` and `micro_step`
        tell.
        """
        progress = self._progress
        culprit = None
        try:
            self._check_usable()
            if progress.backwards == 0:
                raise TrainingError(
                    "step() without a backward since the last one",
                    because="gradients reach the engine through engine.backward(loss)",
                    remedy="replace loss.backward() by engine.backward(loss)",
                )
            if not self._is_last_micro_batch():
                self._progress = replace(progress, micro_step=progress.micro_step + 1, backwards=0)
                return
            self._end_cycle()
            self._values.take_back_all()
            self._finish_sweep()
            norm, skipped, factor = self._norm_and_factor()
            culprit = self._parts.gradients.first_non_finite() if skipped else None
            self._parts.gradients.settle()
            self._parts.sweep.submit(lambda: self._commit(norm, factor, skipped))
        except InfinityError:
            raise  # a refusal: nothing has happened
        except BaseException:
            self._parts.sweep.await_commit()
            if self._progress is progress:
                self._start_over()
            raise
        error, self._after_commit = self._after_commit, None
        if error is not None:
            raise error
        if self._progress.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise TrainingError(
                f"the gradients of {self._progress.skipped_in_a_row} steps in a row were not "
                f"finite; first in {culprit!r}",
                because="the loss is NaN or infinite, or the learning rate diverged",
                remedy="lower the learning rate, or look at the loss and the data",
            )

    def _norm_and_factor(self) -> tuple[float, bool, float]:
        """(global norm, whether to skip, what gradients are multiplied by)."""
        with self._parts.lanes.stall("norm"):
            norm = math.sqrt(self._parts.gradients.square_sum())
        if not math.isfinite(norm):
            return norm, True, 0.0
        clipping = self.gradient_clipping
        return norm, False, min(1.0, clipping / (norm + 1e-6)) if clipping else 1.0

    def _commit(self, norm: float, factor: float, skipped: bool) -> SweepJob | None:
        """The step happens, on the sweep thread: units become pending, counters advance."""
        progress, parts = self._progress, self._parts
        job = None if skipped else self._make_job(factor)
        progress = replace(
            progress,
            micro_step=0,
            backwards=0,
            global_steps=progress.global_steps + (not skipped),
            skipped_steps=progress.skipped_steps + skipped,
            skipped_in_a_row=progress.skipped_in_a_row + 1 if skipped else 0,
        )
        self._progress = progress
        # From here the step has happened: whatever fails, the units that are pending get their
        # update, and `step` raises the error after it.
        try:
            if job is not None:
                for index in job.steps:
                    self._steps[index] += 1
                parts.mover.make_pending(job.units)
        except PresenceError as error:
            self._after_commit = error
        parts.gradients.reset()
        try:
            self._report(norm, factor, skipped)
            self.optimizer.mark_stepped()
            if not skipped and self.lr_scheduler is not None:
                self.lr_scheduler.step()
        except Exception as error:
            self._after_commit = self._after_commit or error
        return job

    def _make_job(self, factor: float) -> SweepJob:
        """Everything the sweep depends on, as it is now."""
        arrived = self._parts.gradients.arrived()
        hypers = self.optimizer.hypers(self._index_of)
        order = dict.fromkeys(self._tapes[True].first_uses())
        order.update(dict.fromkeys(range(len(self.plan.units))))
        units = self.plan.units
        return SweepJob(
            units=tuple(
                u for u in order if any(s.parameter in arrived for s in units[u].trained_segments)
            ),
            hypers={i: hypers[i] for i in arrived},
            steps={i: self._steps[i] + 1 for i in arrived},
            grad_scale=factor,
        )

    def _report(self, norm: float, factor: float, skipped: bool) -> None:
        surprises = self._parts.mover.surprises + sum(t.surprises for t in self._tapes.values())
        self.last_report = self._meter.read(
            step=self._progress.global_steps,
            grad_norm=norm,
            clip_factor=factor,
            skipped=skipped,
            surprises=surprises,
        )
        if self._journal is not None:
            self._journal.write({"event": "step", **vars(self.last_report)})

    # --- cycles ----------------------------------------------------------------------------------

    def _is_last_micro_batch(self) -> bool:
        return self._progress.micro_step + 1 == self.plan.micro_batches

    def _begin_cycle(self) -> None:
        mover = self._parts.mover
        tape = self._tapes[torch.is_grad_enabled()]
        if self._cycle_open and mover.tape is tape:
            return  # a second forward before the backward
        self._end_cycle()
        mover.tape = tape
        mover.wraps = not (torch.is_grad_enabled() and self._is_last_micro_batch())
        tape.begin()
        self._cycle_open = True

    def _end_cycle(self) -> None:
        mover = self._parts.mover
        if mover.tape is not None:
            mover.tape.end()
            mover.tape = None
        self._cycle_open = False

    # --- values ----------------------------------------------------------------------------------

    def state_dict(self, *, master: bool = False) -> StateDict:
        """Names to full values, read tensor by tensor as they are asked for.

        With `master`, trained parameters come as fp32 masters, bit for bit.
        """
        self._check_usable()
        return state_dict_of(self.module, self._values, self._index_of, master=master)

    def load_state_dict(self, state: Mapping[str, Tensor], *, strict: bool = True) -> None:
        """Take full values, tensor by tensor; fp32 values become masters as they are.

        Raises `ConfigError` naming all missing, unexpected and misshapen entries, before
        anything is changed.
        """
        self._check_usable()
        self.state_dict().load(state, strict=strict)

    def materialized(
        self,
        target: nn.Module | nn.Parameter | Iterable[nn.Module | nn.Parameter],
        *,
        master: bool = False,
    ) -> AbstractContextManager[None]:
        """Inside the block the named parameters hold full values that may be read and edited.

        Edits are kept. With `master` trained parameters are fp32 masters in the block.
        """
        self._check_usable()
        return self._values.materialized(targets(target, self._index_of), master=master)

    def gradient(self, parameter: nn.Parameter) -> Tensor:
        """A copy of the parameter's accumulated gradient in this window (`p.grad` is None)."""
        self._check_usable()
        (index,) = targets(parameter, self._index_of)
        return self._parts.gradients.read(index).view(parameter.shape)

    # --- the rest --------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> Engine:
        """`module.train(mode)`."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """`module.eval()`."""
        return self.train(False)

    @property
    def device(self) -> torch.device:
        """Where inputs must be."""
        return self._parts.device.torch_device

    @property
    def global_steps(self) -> int:
        """Steps that updated parameters."""
        self._parts.sweep.await_commit()
        return self._progress.global_steps

    @property
    def micro_step(self) -> int:
        """Micro-batches of the current accumulation window that are behind us."""
        self._parts.sweep.await_commit()
        return self._progress.micro_step

    @property
    def skipped_steps(self) -> int:
        """Steps skipped because gradients were not finite."""
        self._parts.sweep.await_commit()
        return self._progress.skipped_steps

    @property
    def grad_norm(self) -> float | None:
        """Global gradient norm of the last step, before clipping."""
        return self.last_report.grad_norm if self.last_report else None

    def forecast(self) -> dict[str, int]:
        """Predicted bytes per lane and step, for the order of units learnt so far."""
        return forecast_bytes(self.plan, self._tapes[True].sequence)

    def counters(self) -> dict[str, int]:
        """Bytes per lane since the engine was made, the initial state included."""
        return self._parts.lanes.moved()

    def settle(self) -> None:
        """Wait until no update is owed and everything is home."""
        self._check_usable()
        self._finish_sweep()
        for unit in range(len(self.plan.units)):
            self._parts.store.settle_writes(unit)

    def close(self, *, restore: bool = False) -> None:
        """Give everything back: threads, pins, files, disk space. Idempotent.

        Parameters are absent afterwards; with `restore` they first get their full values back,
        in RAM, in the compute dtype.
        """
        if self._closed or os.getpid() != self._pid:
            return
        values = None
        if restore:
            self._values.take_back_all()
            values = [self._values.read(i) for i in range(len(self._parts.cut.parameters))]
        self._closed = True
        self._state_hooks.remove()
        try:
            self._finalizer()
        finally:
            if self._journal is not None:
                self._journal.close()
            if values is not None:
                self._parts.presence.restore(values)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _finish_sweep(self) -> None:
        self._parts.sweep.finish()
        self._parts.mover.check()

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise PresenceError(
                f"this engine belongs to process {self._pid}; {os.getpid()} is a fork of it",
                because="a DataLoader worker or another child touched the engine",
                remedy="use the engine only in the process that made it",
            )
        if self._closed:
            raise EngineClosedError("the engine is closed", remedy="make a new one")
        self._parts.mover.check()

    def _check_arguments(self, args: Any, kwargs: Any) -> None:
        for tensor in _tensors((args, kwargs)):
            if tensor.device != self.device:
                raise TrainingError(
                    f"an input tensor is on {tensor.device}, the engine computes on {self.device}",
                    remedy=f"move the batch: tensor.to({str(self.device)!r}) (engine.device)",
                )
        for index, parameter in enumerate(self._parts.cut.parameters):
            if parameter.requires_grad and not self._parts.cut.trained[index]:
                raise TrainingError(
                    f"parameter {self._parts.cut.names[index]!r} requires a gradient, but was "
                    "frozen when the engine was made and has no optimizer state",
                    remedy="pass it to initialize(model_parameters=...), which gives state to "
                    "parameters that are frozen for now, or keep it frozen",
                )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _settler(parts: Parts) -> Callable[[], None]:
    """What waits for updates; refers to no engine, so that one that is dropped can be closed."""

    def settle() -> None:
        parts.sweep.finish()
        parts.mover.check()

    return settle


def _after_fork(engine: Engine) -> None:
    """In a forked child: parameters are absent, because the slots were not inherited."""
    reference = weakref.ref(engine)

    def absent() -> None:
        engine = reference()
        if engine is not None and not engine._closed:
            engine._parts.presence.absent_in_child()
            engine._finalizer.detach()

    os.register_at_fork(after_in_child=absent)

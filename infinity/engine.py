"""The engine: forward, backward, step, values, close. Thin: every deed is done in its room."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from infinity.engine_state import EngineState
from infinity.errors import InfinityError, TrainingError, TransferError
from infinity.journal import Journal
from infinity.optim.offloaded import OffloadedOptimizer
from infinity.parts import Parts
from infinity.plan.forecast import forecast_bytes
from infinity.plan.plan import Plan
from infinity.training.checkpoints import Checkpoints
from infinity.training.cycles import Cycles
from infinity.training.inputs import check_inputs
from infinity.training.owner import Owner
from infinity.training.report import StepReport
from infinity.training.run_state import RunState
from infinity.training.state_dict import ModuleStateHooks
from infinity.training.stepper import Stepper
from infinity.training.values import Values

_IN_PLACE = "has been modified by an inplace operation: [torch."  # torch's own words


class Engine(EngineState):
    """Owns a module's memory while it is trained. Made by `infinity.initialize`.

    `module` is the user's module; `optimizer` holds the parameter groups; `plan` says what lives
    where. A context manager: leaving closes.
    """

    # What became of each key, where the configuration was DeepSpeed's: `Translation`, else None.
    translation: Any = None

    def __init__(
        self,
        module: nn.Module,
        parts: Parts,
        optimizer: OffloadedOptimizer,
        *,
        gradient_clipping: float,
        lr_scheduler: Any = None,
        journal: Journal | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.plan: Plan = parts.plan
        self.gradient_clipping = gradient_clipping
        self._parts = parts
        self._journal = journal
        self._index_of = {id(p): i for i, p in enumerate(parts.cut.parameters)}
        self._cycles = Cycles(parts.mover)
        self._stepper = Stepper(
            parts, self._cycles, optimizer, self._index_of, lr_scheduler, journal
        )
        self._values = Values(parts.store, parts.mover, parts.kernels, parts.sweep.finish)
        parts.hooks.lent = self._values.lent
        parts.hooks.write_edits = self._values.flush_edits
        names = parts.cut.names
        run_state = RunState(self._stepper, optimizer, parts.updater, self._index_of, names)
        self._checkpoints = Checkpoints(
            module, parts, self._stepper, self._values, run_state, self._index_of,
            optimizer.rule.name, config or {},
        )  # fmt: skip
        if parts.durability is not None:
            self._stepper.document = self._checkpoints.document
            if parts.resumed:
                self._checkpoints.restore_document(parts.resumed)
        self._state_hooks = ModuleStateHooks(module, self._values, self._index_of)
        self._closed = False
        self._finalizer = weakref.finalize(self, parts.close)
        optimizer.connect(self.step)
        self._owner = Owner()
        _after_fork(self)

    # --- training ------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward; same arguments, same result."""
        self._check_usable()
        self._check_arguments(args, kwargs)
        self._values.take_back_all()
        self._cycles.begin(last_micro_batch=self._is_last_micro_batch())
        hooks = self._parts.hooks
        mark = hooks.mark()
        # No `finally`: an interruption may strike inside one, and then the rest of it is skipped.
        try:
            torch.set_autocast_cache_enabled(False)  # it would keep casts of weights that move
            hooks.saved.push()
            result = self.module(*args, **kwargs)
            hooks.restore(mark)
            if not torch.is_grad_enabled():
                self._cycles.end()
            return result
        except BaseException:
            hooks.restore(mark)
            self._parts.mover.recover()
            self._cycles.end()
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
            self._cycles.end()
            self._stepper.count_backward()
            return result
        except BaseException as error:
            hooks.restore(mark)  # a recomputation pushes pairs of its own
            self._start_over()
            if _IN_PLACE in str(error) and isinstance(error, RuntimeError):
                raise TrainingError(
                    str(error),
                    because="a tensor was changed in place, or weights were used in a loss outside "
                    "the engine call and have been moved since",
                    remedy="compute penalties on weights inside the module's forward",
                ) from error
            raise

    def _start_over(self) -> None:
        """After an exception: the accumulation window is empty again."""
        self._stepper.start_over()
        self._parts.mover.recover()
        self._parts.hooks.drop_gradients()
        self._parts.gradients.reset()
        self._cycles.end()

    def step(self) -> None:
        """End a micro-batch; at the end of the accumulation window, update.

        Returns once the norm and the clip factor are known; the sweep runs behind the next
        forward. A step whose gradients are not all finite is skipped and counted. Interrupted,
        or where gradients were lost on their way home (`TransferError`), it has happened, or the
        accumulation window starts over: `global_steps` and `micro_step`
        tell.
        """
        progress = self._stepper.progress
        self._parts.saver.warn()
        try:
            self._check_usable()
            if progress.backwards == 0:
                raise TrainingError(
                    "step() without a backward since the last one",
                    because="gradients reach the engine through engine.backward(loss)",
                    remedy="replace loss.backward() by engine.backward(loss)",
                )
            if not self._is_last_micro_batch():
                self._stepper.end_micro_batch()
                return
            self._cycles.end()
            self._values.take_back_all()
            self._values.settle()
            self._stepper.update(self.gradient_clipping)
        except TransferError:
            if self._stepper.progress is progress:  # gradients were lost on their way home
                self._start_over()
            raise
        except InfinityError:
            raise  # a refusal, or an error of a step that has happened
        except BaseException:
            self._parts.sweep.await_commit()
            if self._stepper.progress is progress:
                self._start_over()
            raise

    def zero_grad(self) -> None:
        """Start the accumulation window over: its gradients are dropped, `micro_step` is 0.

        For loops that caught an interruption between `backward()` and `step()`.
        """
        self._check_usable()
        self._start_over()

    def _is_last_micro_batch(self) -> bool:
        return self._stepper.progress.micro_step + 1 == self.plan.micro_batches

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
    def lr_scheduler(self) -> Any:
        """The scheduler the engine steps, or None."""
        return self._stepper.lr_scheduler

    @property
    def last_report(self) -> StepReport | None:
        """What the last step did; None before the first."""
        return self._stepper.last_report

    @property
    def global_steps(self) -> int:
        """Steps that updated parameters."""
        self._parts.sweep.await_commit()
        return self._stepper.progress.global_steps

    @property
    def micro_step(self) -> int:
        """Micro-batches of the current accumulation window that are behind us."""
        self._parts.sweep.await_commit()
        return self._stepper.progress.micro_step

    @property
    def skipped_steps(self) -> int:
        """Steps skipped because gradients were not finite."""
        self._parts.sweep.await_commit()
        return self._stepper.progress.skipped_steps

    @property
    def grad_norm(self) -> float | None:
        """Global gradient norm of the last step, before clipping."""
        return self.last_report.grad_norm if self.last_report else None

    def forecast(self) -> dict[str, int]:
        """Predicted bytes per lane and step, for the order of units learnt so far."""
        return forecast_bytes(self.plan, self._cycles.training.sequence)

    def counters(self) -> dict[str, int]:
        """Bytes per lane since the engine was made, the initial state included."""
        return self._parts.lanes.moved()

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is slow or risky about the paths of this run; told by `initialize` too."""
        return tuple(self._parts.disk.warnings) if self._parts.disk is not None else ()

    def drives(self) -> dict[str, dict[str, Any]]:
        """Per path in use: device, file system, share of the state, speed, bytes and times."""
        return self._parts.disk.drives() if self._parts.disk is not None else {}

    def close(self, *, restore: bool = False) -> None:
        """Give everything back: threads, pins, files, disk space. Idempotent.

        A checkpoint that is being saved is completed first; what made one fail is raised when all
        is given back. Parameters are absent afterwards; with `restore` they first get their full
        values back, in RAM, in the compute dtype.
        """
        if (self._closed and self._parts.closed) or not self._owner.is_here():
            return
        values, failure = None, None
        if not self._closed:
            try:
                self._parts.saver.finish()
                if restore:
                    self._values.take_back_all()
                    count = len(self._parts.cut.parameters)
                    values = [self._values.read(i) for i in range(count)]
            except BaseException as error:
                failure = error
        self._closed = True
        self._state_hooks.remove()
        try:
            self._parts.close()
        finally:
            if self._parts.closed:
                self._finalizer.detach()
            if self._journal is not None:
                self._journal.close()
            if values is not None:
                self._parts.presence.restore(values)
        if failure is not None:
            raise failure

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _check_arguments(self, args: Any, kwargs: Any) -> None:
        check_inputs((args, kwargs), self.device)
        for index, parameter in enumerate(self._parts.cut.parameters):
            if parameter.requires_grad and not self._parts.cut.trained[index]:
                raise TrainingError(
                    f"parameter {self._parts.cut.names[index]!r} requires a gradient, but was "
                    "frozen when the engine was made and has no optimizer state",
                    remedy="pass it to initialize(model_parameters=...), which gives state to "
                    "parameters that are frozen for now, or keep it frozen",
                )


def _after_fork(engine: Engine) -> None:
    """In a forked child: parameters are absent, because the slots were not inherited."""
    reference = weakref.ref(engine)

    def absent() -> None:
        engine = reference()
        if engine is not None and not engine._closed:
            engine._parts.presence.absent_in_child()
            engine._finalizer.detach()

    os.register_at_fork(after_in_child=absent)

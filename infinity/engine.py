"""The engine: forward, backward, step, values, close. Thin: every deed is done in its room."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from infinity.engine_calls import EngineCalls
from infinity.errors import InfinityError, TrainingError, TransferError
from infinity.journal import Journal
from infinity.model.ownership import freeze, name_engine
from infinity.optim.offloaded import OffloadedOptimizer
from infinity.parts import Parts
from infinity.plan.plan import Plan
from infinity.training.checkpoints import Checkpoints
from infinity.training.cycles import Cycles
from infinity.training.inputs import check_inputs
from infinity.training.loss_scale import ScaleRules
from infinity.training.merge_guard import MergeGuard
from infinity.training.owner import exclusive
from infinity.training.recovery import Recovery
from infinity.training.run_state import RunState
from infinity.training.state_dict import ModuleStateHooks
from infinity.training.stepper import Stepper
from infinity.training.values import Values
from infinity.training.window import Window

_IN_PLACE = "has been modified by an inplace operation: [torch."  # torch's own words


class Engine(EngineCalls):
    """Owns a module's memory while it is trained. Made by `infinity.initialize`.

    `module` is the user's module; `optimizer` holds the parameter groups; `plan` says what lives
    where. A context manager: leaving closes. What it does not have itself is the module's:
    `engine.generate(...)` is `engine.module.generate(...)`.
    """

    def __init__(
        self,
        module: nn.Module,
        parts: Parts,
        optimizer: OffloadedOptimizer,
        *,
        gradient_clipping: float,
        scale_rules: ScaleRules | None = None,
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
        self._window = Window(parts.plan)
        self._set_micro_batches(self._window.length)
        self._cycles = Cycles(parts.mover)
        parts.hooks.watch_root(module, *self._cycles.around_calls())
        self._stepper = Stepper(
            parts, self._cycles, optimizer, self._index_of, lr_scheduler, journal, scale_rules
        )
        self._recovery = Recovery(parts, self._stepper, self._cycles, self._window)
        self._owner = parts.hooks.owner
        self._values = Values(
            parts.store, parts.mover, parts.kernels, parts.sweep.finish, self._owner
        )
        parts.hooks.lent = self._values.lent
        parts.hooks.write_edits = self._values.flush_edits
        names = parts.cut.names
        run_state = RunState(self._stepper, optimizer, parts.updater, self._index_of, names)
        self._checkpoints = Checkpoints(
            module, parts, self._stepper, self._values, run_state, self._index_of,
            optimizer.rule.name, config or {}, self._window,
        )  # fmt: skip
        if parts.durability is not None:
            self._stepper.document = self._checkpoints.document
            if parts.resumed:
                self._checkpoints.restore_document(parts.resumed)
        self._closed = False
        self._own(module)
        self._owner.fail = partial(_fail, weakref.ref(self))
        self._finalizer = weakref.finalize(self, parts.drop)
        optimizer.connect(self.step, self._drop_arrivals)
        _after_fork(self)

    def _own(self, module: nn.Module) -> None:
        """What the module and its parameters know of the engine, until that is closed or gone."""
        parts, parameters = self._parts, self._parts.cut.parameters
        parts.also(ModuleStateHooks(module, self._values, self._index_of).remove)
        parts.also(MergeGuard(module, self._values, self._index_of).remove)
        if not any(parts.cut.trained):
            parts.also(freeze(parameters))
        name_engine(parameters, self)
        parts.also(partial(name_engine, parameters, None))
        if self._journal is not None:
            parts.also(self._journal.close, last=True)

    # --- training ------------------------------------------------------------------------------

    @exclusive
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward; same arguments, same result."""
        self._check_usable()
        self._check_arguments(args, kwargs)
        self._checkpoints.run_state.first_forward()
        self._values.take_back_all()
        self._end_users_backward()
        last = self.is_gradient_accumulation_boundary()
        self._parts.gradients.last_micro_batch = last
        self._cycles.begin(last_micro_batch=last)
        hooks = self._parts.hooks
        mark = hooks.mark()
        try:
            torch.set_autocast_cache_enabled(False)  # it would keep casts of weights that move
            hooks.saved.push()
            result = self.module(*args, **kwargs)
            if not torch.is_grad_enabled():
                self._cycles.end_call()
            hooks.release(result)
            return result
        except Exception as error:
            self._recovery.end_forward(error)
            raise
        finally:
            hooks.restore(mark)

    @exclusive
    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> Tensor:
        """Backward of one micro-batch; gradients leave to their homes as they are made.

        The loss is divided by `gradient_accumulation_steps`, unless `scale_wrt_gas` is false: then
        you have done that. It is returned so; in fp16 backward starts from that times the loss
        scale. Several backwards before one `step()` add up. After an exception the accumulation
        window starts over: its gradients are dropped and `micro_step` is 0 again.

        `loss.backward()` does the same, but in fp16: there `engine.scale(loss).backward()`.
        """
        self._check_trains("backward()")
        self._refuse_unscaled()
        micro_batches = self._window.length if scale_wrt_gas else 1
        scaled = self._scaled(loss)
        scaled = scaled / micro_batches if micro_batches > 1 else scaled
        result = loss.detach() / micro_batches if micro_batches > 1 else loss.detach()
        gradients, hooks = self._parts.gradients, self._parts.hooks
        gradients.last_micro_batch = self.is_gradient_accumulation_boundary()
        mark = hooks.mark()
        try:
            hooks.divisor = 1
            scaled.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
            gradients.finish()
            self._cycles.end()
            hooks.release(None)
            self._end_backward()
            return result
        except Exception as error:
            self._recovery.start_over(error)
            if _IN_PLACE in str(error) and isinstance(error, RuntimeError):
                raise TrainingError(
                    str(error),
                    because="a tensor was changed in place, or weights were used in a loss outside "
                    "the engine call and have been moved since",
                    remedy="compute penalties on weights inside the module's forward",
                ) from error
            raise
        finally:
            hooks.restore(mark)  # a recomputation pushes pairs of its own

    @exclusive
    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale, for a backward of your own; as it is but in fp16.

        The result is fp32, whatever the loss is: fp16 ends at 65504. It is divided by
        `gradient_accumulation_steps` in fp16, where its gradients otherwise are when they arrive.
        Raises `TrainingError` for what has no backward.
        """
        scaled = self._scaled(loss)
        if scaled is loss:
            return loss
        self._refuse_unscaled()
        self._window.scaled = True
        self._parts.hooks.divisor = 1
        return scaled / self._window.length

    def _scaled(self, loss: Tensor) -> Tensor:
        self._check_usable()
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise TrainingError(
                "backward needs a scalar loss that depends on trained parameters, got "
                + (f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(type(loss))),
                remedy="reduce the loss with .mean(); call the engine outside torch.no_grad()",
            )
        progress = self._stepper.progress
        self._window.check(progress.micro_step)
        state = progress.loss_scale
        return loss if state is None else loss.float() * state.scale

    def _end_backward(self) -> None:
        self._stepper.count_backward()
        self._forget_arrivals()

    def _forget_arrivals(self) -> None:
        """What has arrived is accounted for; what will arrive comes from a loss as it is."""
        self._recovery.forget_arrivals()

    def _end_users_backward(self) -> None:
        """Gradients may have come by `loss.backward()`: then do what `backward` does at its end."""
        window = self._window
        if self._parts.hooks.num_arrived == window.seen:
            return
        self._refuse_unscaled()
        window.check(self._stepper.progress.micro_step)
        try:
            self._parts.gradients.finish()
            self._cycles.end()
            self._end_backward()
        except Exception as error:
            if _loses_gradients(error):
                self._recovery.start_over()
            raise

    def _refuse_unscaled(self) -> None:
        """In fp16, gradients that came of a loss that `scale` did not make are dropped."""
        window = self._window
        arrived = self._parts.hooks.num_arrived != window.seen
        if arrived and self._stepper.progress.loss_scale is not None and not window.scaled:
            self._recovery.start_over()
            raise TrainingError(
                "gradients came from loss.backward(), and the loss was not scaled",
                because="in fp16 a loss is multiplied by the loss scale, here "
                f"{self.loss_scale:g}: small gradients would vanish; the window starts over",
                remedy="engine.backward(loss), or engine.scale(loss).backward(), after the last "
                "step or forward",
            )

    @exclusive
    def _drop_arrivals(self) -> None:
        """`optimizer.zero_grad()`: drop what a `loss.backward()` left that is not accounted for."""
        if self._parts.hooks.num_arrived != self._window.seen:
            self._recovery.start_over()

    @exclusive
    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a micro-batch; at the end of the accumulation window, update.

        `lr_kwargs` go to the `step` of the learning rate schedule, as `metrics` of
        `ReduceLROnPlateau` does.

        Returns once the norm and the clip factor are known; the sweep runs behind the next
        forward. A step whose gradients are not all finite is skipped and counted. After an error,
        as where gradients were lost on their way home (`TransferError`), it has happened, or the
        accumulation window starts over: `global_steps` and `micro_step` tell.
        """
        self._parts.saver.warn()
        self._check_usable()
        self._window.updated = False
        self._check_trains("step()")
        self._end_users_backward()
        before = self._stepper.progress
        self._window.check_step(before.backwards)
        if not self.is_gradient_accumulation_boundary():
            self._stepper.end_micro_batch()
            return
        try:
            self._cycles.end()
            self._parts.mover.verify(may_wait=True)
            self._parts.mover.release_all(reached=True)
            self._values.take_back_all()
            self._values.settle()
            self._stepper.batch_samples = self.train_batch_size()
            self._stepper.lr_kwargs = lr_kwargs or {}
            self._stepper.update(self.gradient_clipping)
            report = self._stepper.last_report
            self._window.updated = report is not None and not report.skipped
        except Exception as error:
            if self._stepper.progress is before and _loses_gradients(error):
                self._recovery.start_over()
            raise

    @exclusive
    def zero_grad(self) -> None:
        """Start the accumulation window over: its gradients are dropped, `micro_step` is 0.

        For loops that caught an exception between `backward()` and `step()`.
        """
        self._check_usable()
        self._recovery.start_over()

    # --- the rest --------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """`engine(...)`."""
        return self(*args, **kwargs)

    @exclusive
    def train(self, mode: bool = True) -> Engine:
        """`module.train(mode)`."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """`module.eval()`."""
        return self.train(False)

    def close(self, *, restore: bool = False) -> None:
        """Give everything back: threads, pins, files, disk space. Idempotent.

        An engine that nothing refers to any more does that too, but its module then refuses. In a
        forked child nothing happens. A checkpoint that is being saved is completed first; what made
        one fail is raised when all is given back. Parameters are absent afterwards; with `restore`
        they first get their full values back, in RAM, in the compute dtype.
        """
        if self._owner.is_here() and not (self._closed and self._parts.closed):
            self._close(restore)

    @exclusive
    def _close(self, restore: bool) -> None:
        values = None
        failure: BaseException | None = None
        if not self._closed:
            try:
                if self._parts.mover.failure is None:
                    failure = self._parts.mover.find_edit(may_wait=True)
                self._parts.saver.finish()
                if restore:
                    self._values.take_back_all()
                    count = len(self._parts.cut.parameters)
                    values = [self._values.read(i) for i in range(count)]
            except BaseException as error:
                failure = failure or error
        self._closed = True
        try:
            self._parts.close()
        finally:
            if self._parts.closed:
                self._finalizer.detach()
            if values is not None:
                self._parts.presence.restore(values)
        if failure is not None:
            raise failure

    def destroy(self) -> None:
        """`close()`."""
        self.close()

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


def _loses_gradients(error: Exception) -> bool:
    """Whether gradients were lost on their way home; other errors of ours are refusals."""
    return isinstance(error, TransferError) or not isinstance(error, InfinityError)


def _fail(reference: weakref.ref[Engine]) -> None:
    """A call ended in the middle. A signal handler's: it takes no lock."""
    engine = reference()
    if engine is not None:
        mover, step = engine._parts.mover, engine._stepper.progress.steps + 1
        mover.failure = mover.failure or TrainingError(
            f"a call was interrupted in the middle, in step {step}"
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

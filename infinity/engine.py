"""The engine: forward, backward, step, values, checkpoints, close; deeds are done in its rooms."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from infinity.errors import (
    ConfigError,
    EngineClosedError,
    TrainingError,
)
from infinity.journal import Journal
from infinity.model.offloaded_parameter import name_engine, unname_engine
from infinity.model.parameters import freeze, move_buffers, zero_grad_of
from infinity.offload.owner import exclusive
from infinity.offload.report import StepReport
from infinity.optim.offloaded import OffloadedOptimizer
from infinity.plan.forecast import forecast_bytes
from infinity.plan.plan import Plan
from infinity.training.batches import LossFn, micro_batches_of, train_one
from infinity.training.checkpoints import Checkpoints, Wanted
from infinity.training.parameter_access import MergeGuard, targets, write_state
from infinity.training.parts import Parts
from infinity.training.run_state import RunState, Stateful
from infinity.training.state_dict import ModuleStateHooks, StateDict, state_dict_of
from infinity.training.step import Given, Inputs, ScaleRules, Stepper

_IN_PLACE = "has been modified by an inplace operation: [torch."  # torch's own words


class Engine:
    """Owns a module's memory while it is trained. Made by `infinity.initialize`.

    `module` is the user's module; `optimizer` holds the parameter groups; `plan` says what lives
    where, `ranks` who trains together. A context manager: leaving closes. What it does not have
    itself is the module's: `engine.generate(...)` is `engine.module.generate(...)`.
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
        micro_batch_size: int = 1,
    ) -> None:
        self._set_micro_batch_size(micro_batch_size)
        self.module = module
        self.optimizer = optimizer
        self.plan: Plan = parts.plan
        self.gradient_clipping = gradient_clipping
        self.ranks = parts.ranks
        self._parts = parts
        self._journal = journal
        self._index_of = {id(p): i for i, p in enumerate(parts.cut.parameters)}
        self._owner = parts.owner
        self._window = parts.window
        self._cycles = parts.cycles
        self._values = parts.values
        self._inputs = Inputs(module, parts, casts=bool((config or {}).get("cast_inputs")))
        self._stepper = Stepper(
            parts, optimizer, self._index_of, lr_scheduler, journal, scale_rules
        )
        names = parts.cut.names
        run_state = RunState(
            self._stepper, self._window, optimizer, parts.updater, self._index_of, names
        )
        self._checkpoints = Checkpoints(
            module, parts, self._stepper, self._values, run_state, self._index_of,
            optimizer.rule.name, config or {},
        )  # fmt: skip
        if parts.resumed:
            self._checkpoints.restore_document(parts.resumed)
        self._closed = False
        self._own(module)
        self._owner.fail = partial(_fail, weakref.ref(self))
        self._finalizer = weakref.finalize(self, parts.drop, weakref.ref(self))
        optimizer.connect(self.step, self._drop_arrivals)
        _after_fork(self)

    def _own(self, module: nn.Module) -> None:
        """What the module and its parameters know of the engine, until that is closed or gone."""
        parts, parameters = self._parts, self._parts.cut.parameters
        hooks = ModuleStateHooks(module, self._values, self._index_of)
        parts.installation.on_new = hooks.add
        parts.also(hooks.remove)
        parts.also(MergeGuard(module, self._values, self._index_of).remove)
        if not any(parts.cut.trained):
            parts.also(freeze(parameters))
        vars(module)["zero_grad"] = zero_grad_of(module, self._drop_arrivals)
        parts.also(partial(vars(module).pop, "zero_grad", None))
        name_engine(parameters, self, parts.access)
        parts.also(partial(unname_engine, parameters))
        if self._journal is not None:
            parts.also(self._journal.close, last=True)

    if not TYPE_CHECKING:  # for a type checker an engine has only what it has itself

        def __getattr__(self, name: str) -> Any:
            """What an engine does not have is the module's."""
            module, absent = self.__dict__.get("module"), object()
            found = absent if name.startswith("__") else getattr(module, name, absent)
            if found is absent:
                raise AttributeError(
                    f"neither {type(self).__name__} nor its module, a {type(module).__name__}, "
                    f"has {name!r}"
                )
            return found

    # --- training --------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward; same arguments, same result."""
        return self.forward(*args, **kwargs)

    @exclusive
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """`engine(...)`."""
        self._check_usable()
        with self._stepper.together("a forward", loses=False):
            args, kwargs = self._inputs.admit((args, kwargs))
            self._checkpoints.run_state.first_forward()
            self._values.take_back_all()
            self._end_users_backward()
            self._cycles.begin(last_micro_batch=self._window.is_last)
            return self._forward(args, kwargs)

    def _forward(self, args: Any, kwargs: Any) -> Any:
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
            self._stepper.end_forward(error)
            self._inputs.explain(error, (args, kwargs))
            raise
        finally:
            hooks.restore(mark)

    @exclusive
    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> Tensor:
        """Backward of one micro-batch; gradients leave for their tier as they are made.

        The loss is divided by `gradient_accumulation_steps`, unless `scale_wrt_gas` is false: then
        you have done that. It is returned so; backward starts from that, divided by the number of
        ranks, and in fp16 times the loss scale. Several backwards before one `step()` add up. After
        an exception the window starts over: gradients are dropped and `micro_step` is 0 again.

        `loss.backward()` does the same, but in fp16: there `engine.scale(loss).backward()`.
        """
        self._check_trains("backward()")
        self._refuse_unscaled()
        micro_batches = self._window.length if scale_wrt_gas else 1
        scaled, share = self._scaled(loss), micro_batches * self._window.ranks
        scaled = scaled / share if share > 1 else scaled
        result = loss.detach() / micro_batches if micro_batches > 1 else loss.detach()
        gradients, hooks = self._parts.gradients, self._parts.hooks
        mark = hooks.mark(backward=True)
        try:
            self._window.divisor = 1
            scaled.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
            gradients.finish()
            self._cycles.end()
            hooks.release(None)
            self._stepper.count_backward()
            return result
        except Exception as error:
            self._stepper.roll_back(error)
            self.ranks.tell("a backward", error)
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
        self._window.scaled, self._window.divisor = True, 1
        return scaled / self._window.share

    @exclusive
    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a micro-batch; at the end of the accumulation window, update.

        `lr_kwargs` go to the `step` of the learning rate schedule, as `metrics` of
        `ReduceLROnPlateau` does.

        Returns once the norm and the clip factor are known, the pass of the step before (and its
        durable commit) is over, and gradients that rest on disk are there; the optimizer pass runs
        behind the next forward. A step whose gradients are not all finite is skipped and counted.
        After an error, as where gradients were lost on their way (`TransferError`), it has
        happened, or the accumulation window starts over: `global_steps` and `micro_step` tell.
        """
        self._parts.saver.warn()
        self._check_usable()
        self._window.updated = False
        self._check_trains("step()")
        self._end_users_backward()
        self._window.check_step()
        if not self._window.is_last:
            self._stepper.end_micro_batch()
            return
        with self._stepper.together("a step"):
            self._cycles.end()
            self._parts.prefetcher.verify(every=True)
            self._parts.prefetcher.release_all(reached=True)
            self._values.take_back_all()
            self._values.settle()
            samples = self._micro_batch_size * self._window.share
            document = None if self._parts.durability is None else self._checkpoints.document
            self._stepper.update(self.gradient_clipping, Given(samples, lr_kwargs or {}, document))
            report = self._stepper.last_report
            self._window.updated = report is not None and not report.skipped

    @exclusive
    def train_batch(self, data: Any, loss_fn: LossFn | None = None) -> Tensor:
        """A whole step in one call: forward, backward and `step()` of every micro-batch.

        `data` is the batch of a step: a tensor, or a mapping, tuple or list of tensors, nested too.
        Each (samples, ...) is cut into `gradient_accumulation_steps` views; what is 0-dim or no
        tensor goes to every micro-batch. Or an iterator, `iter(loader)`: so many are taken.

        A mapping is called `engine(**batch)`, a tuple or list `engine(*batch)`. The loss is what
        the model returns: a scalar, `.loss`, `["loss"]`, the first of a tuple. Or it is
        `loss_fn(output, target)`: of a tuple or list the target is the last, which the model is not
        given then; else it is the micro-batch.

        Returns the mean of the micro-batches' losses, () in fp32, detached; nothing waits for it.
        So a label weighs more where many beside it are ignored, as in DeepSpeed. The mean over all
        labels: `loss_fn` = their summed loss * micro-batches / labels of the step.

        Raises `TrainingError` for other data, and where a window is open. After any exception the
        step has happened, or the window starts over: `global_steps` tells.
        """
        self._check_usable()
        self._check_trains("train_batch()")
        self._end_users_backward()
        self._window.check_whole()
        count = self._window.length
        total = torch.zeros((), dtype=torch.float32, device=self.device)
        try:
            with self.ranks.telling("a batch"):
                for batch in micro_batches_of(data, count):
                    total += train_one(self, batch, loss_fn)
        except Exception:
            if self._window.is_open or self._window.has_news:
                self._stepper.roll_back()
            raise
        return total / count

    @exclusive
    def zero_grad(self) -> None:
        """Start the accumulation window over: its gradients are dropped, `micro_step` is 0.

        For loops that caught an exception between `backward()` and `step()`.
        """
        self._check_usable()
        self._stepper.roll_back()

    @exclusive
    def train(self, mode: bool = True) -> Self:
        """`module.train(mode)`."""
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        """`module.eval()`."""
        return self.train(False)

    # --- the accumulation window -----------------------------------------------------------------

    @property
    def micro_step(self) -> int:
        """Micro-batches of the current accumulation window that are behind us."""
        return self._window.micro_step

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-batch is the last of its window: `step()` would update."""
        return self._window.is_last

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Say by hand whether the current micro-batch is the last, from now on; None: count again.

        A window may then be longer or shorter than `gradient_accumulation_steps`, by which losses
        are divided all the same, unless `backward(scale_wrt_gas=False)`. `step()` may be called for
        the last micro-batch only. Where gradients rest in 16 bits (`gradient_accumulation_steps`
        of 1) a second micro-batch is refused: its sum would lose bits.
        """
        self._check_usable()
        self._window.boundary = None if is_boundary is None else bool(is_boundary)

    def _set_micro_batch_size(self, size: int) -> None:
        if type(size) is not int or size < 1:
            raise ConfigError(f"a micro-batch of {size!r} samples", remedy="1 or more")
        self._micro_batch_size = size

    def _scaled(self, loss: Tensor) -> Tensor:
        self._check_usable()
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise TrainingError(
                "backward needs a scalar loss that depends on trained parameters, got "
                + (f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(type(loss))),
                remedy="reduce the loss with .mean(); call the engine outside torch.no_grad()"
                if isinstance(loss, Tensor)
                else "pass the loss itself: output.loss, output['loss'] or output[0], and no "
                "number made by .item()",
            )
        self._window.check()
        state = self._stepper.progress.loss_scale
        return loss if state is None else loss.float() * state.scale

    def _end_users_backward(self) -> None:
        """Gradients may have come by `loss.backward()`: then do what `backward` does at its end."""
        if not self._window.has_news:
            return
        self._refuse_unscaled()
        self._window.check()
        with self._stepper.together("a backward"):
            self._parts.gradients.finish()
            self._cycles.end()
            self._stepper.count_backward()

    def _refuse_unscaled(self) -> None:
        """In fp16, gradients that came of a loss that `scale` did not make are dropped."""
        window, scale = self._window, self._stepper.progress.loss_scale
        if window.has_news and scale is not None and not window.scaled:
            self._stepper.roll_back()
            raise TrainingError(
                "gradients came from loss.backward(), and the loss was not scaled",
                because="in fp16 a loss is multiplied by the loss scale, here "
                f"{self.loss_scale:g}: small gradients would vanish; the window starts over",
                remedy="engine.backward(loss), or engine.scale(loss).backward(), after the last "
                "step or forward",
            )

    @exclusive
    def _drop_arrivals(self) -> None:
        """`zero_grad()` of optimizer or module: drop the window between a backward and `step()`."""
        if self._window.has_news or self._window.backwards:
            self._stepper.roll_back()

    # --- values ----------------------------------------------------------------------------------

    @exclusive
    def state_dict(self, *, master: bool = False) -> StateDict:
        """Names to full values, read one by one when asked for; `master`: exact fp32 masters."""
        self._check_usable()
        return state_dict_of(self.module, self._values, self._index_of, master=master)

    @exclusive
    def load_state_dict(self, state: Mapping[str, Tensor], *, strict: bool = True) -> None:
        """Take full values, tensor by tensor; fp32 values become masters as they are.

        Raises `ConfigError` naming all missing, unexpected and misshapen entries, before
        anything is changed.
        """
        self._check_usable()
        Engine.state_dict(self).load(state, strict=strict)

    @exclusive
    def save_weights(
        self,
        directory: str | os.PathLike[str],
        dtype: torch.dtype | str | None = None,
        max_shard: int | str = "5GiB",
    ) -> list[Path]:
        """Write safetensors that Hugging Face and `load_weights` take; returns the files.

        Tensor by tensor, from any tier, persistent buffers included; tied weights once, under
        their first name. `dtype`: None is the compute dtype; torch.float32 or "fp32" the exact
        master; "bf16"; "fp16". Buffers, and frozen parameters that are not floats, keep theirs.

        Weights saved there before are replaced as a whole: whoever looks, also after a kill -9,
        finds all old ones or all new ones. Only one save at a time can be in a directory.

        Raises `ConfigError`, `DoesNotFitError` (disk full) or `MachineError` (also while somebody
        else saves there); training may go on after any, and files saved there before stay.
        """
        self._check_usable()
        return Engine.state_dict(self).save(Path(directory), dtype, max_shard)

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

    def is_materialized(self, parameter: nn.Parameter) -> bool:
        """Whether a block of `materialized` lends this parameter a full value now."""
        return self._index_of.get(id(parameter)) in self._values.lent

    @exclusive
    def gradient(self, parameter: nn.Parameter) -> Tensor:
        """A copy of the parameter's accumulated gradient in this window (`p.grad` is None).

        In fp16 it comes in fp32, without the loss scale.
        """
        self._check_usable()
        (index,) = targets(parameter, self._index_of)
        with self.ranks.telling("reads a gradient"):
            value = self._parts.gradients.read(index).view(parameter.shape)
        state = self._stepper.progress.loss_scale
        return value if state is None else value.float() / state.scale

    @exclusive
    def set_gradient(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Put another gradient in the place of what was accumulated in this window.

        `value` has the parameter's shape, and no loss scale. It is kept in the dtype that gradients
        rest in: fp32 where `gradient_accumulation_steps` is above 1, else the compute dtype.
        """
        with self.ranks.telling("sets a gradient"):
            index = self._index_for(parameter, value)
        state = self._stepper.progress.loss_scale
        scaled = value.float() * (1.0 if state is None else state.scale)
        self._parts.prefetcher.await_consumed(self._parts.hooks.unit_of(index))
        self._parts.gradients.replace(index, scaled.reshape(-1))

    @exclusive
    def set_optimizer_state(self, parameter: nn.Parameter, name: str, value: Tensor) -> None:
        """Replace one moment of a parameter, by torch's name: "exp_avg", "exp_avg_sq", ...

        `value` has the parameter's shape; it is stored as `optimizer.moments` says. What there is
        to read: `engine.optimizer.read_state(parameter)`. Raises `ConfigError` for other names, and
        where an optimizer of torch's keeps the state.
        """
        index = self._index_for(parameter, value)
        self._values.take_back_all()
        self._values.settle()
        layout, segment = self._values.place_of(index)
        hyper = self.optimizer.hypers(self._index_of).get(index)
        self._values.before_change(layout.index)
        parts, place = self._parts, (layout, segment)
        write_state(parts.store, parts.updater, parts.kernels, place, hyper, name, value)

    def _index_for(self, parameter: nn.Parameter, value: Tensor) -> int:
        self._check_usable()
        (index,) = targets(parameter, self._index_of)
        _, segment = self._values.place_of(index)
        if not segment.trained:
            raise ConfigError(f"{segment.name!r} is frozen and has no optimizer state")
        if tuple(value.shape) != segment.shape:
            got = tuple(value.shape)
            raise ConfigError(f"{segment.name!r} has shape {segment.shape}, got {got}")
        return index

    @exclusive
    def settle(self) -> None:
        """Wait until no update is owed and everything is where it rests."""
        self._check_usable()
        self._values.settle()
        for unit in range(len(self.plan.units)):
            self._parts.store.settle_writes(unit)

    # --- checkpoints -----------------------------------------------------------------------------

    @exclusive
    def save_checkpoint(
        self,
        directory: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        keep_last: int | None = None,
        wait: bool = False,
    ) -> Path:
        """Save everything that decides the next step to `directory/tag`; returns that path.

        `tag` is `global_stepN` by default; `client_state` plain data, given back by
        `load_checkpoint`. Returns once the snapshot is fixed: the bytes are copied while training
        goes on, and the checkpoint appears, whole, when all are on stable storage (with `wait`,
        before this returns). Then `latest` names it, unless `save_latest` is false, and only the
        `keep_last` newest stay. `exclude_frozen_parameters` asks for what is so anyway: files of
        frozen weights are written once and shared with the checkpoint before; loading needs them.

        Raises `CheckpointError`, `ConfigError`, `DoesNotFitError` (disk full) or `MachineError`;
        training may go on after any. What fails behind the caller's back is warned of by the next
        `step()` and raised by the next `save_checkpoint`, `finish_saving` or `close`.
        """
        self._check_usable(every=True)
        self._end_users_backward()
        return self._checkpoints.save(
            Path(directory).expanduser(), tag, client_state or {},
            save_latest=save_latest, keep_last=keep_last, wait=wait,
        )  # fmt: skip

    @property
    def saving(self) -> bool:
        """Whether a save goes on behind the caller's back; of several ranks `step()` ends it."""
        return self._parts.saver.busy

    @exclusive
    def finish_saving(self) -> None:
        """Wait until the last checkpoint is on stable storage; raises what made it fail."""
        self._check_usable()
        self._parts.saver.finish()

    @exclusive
    def load_checkpoint(
        self,
        directory: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: None = None,
    ) -> tuple[str, dict[str, Any]] | tuple[None, None]:
        """Go on where a checkpoint was saved, under whatever placement; same bits as without.

        Or where a durable run ended, of any number of ranks: `directory` is one of its. Returns
        (path, client_state); (None, None) with a warning where there is none. Without
        `load_optimizer_states` weights become fp32 masters, moments stay; with `load_module_only`
        counters, schedule and generators stay too. Raises `CheckpointError` naming all that does
        not fit before anything changes, or the first damaged tensor: then load another one.
        """
        self._owner.check()
        self._check_open()
        self._parts.prefetcher.verify(every=True)
        if custom_load_fn is not None:
            raise ConfigError(
                "load_checkpoint(custom_load_fn=...) is not supported",
                because="it would copy values into parameters that are not there",
                remedy="load with load_module_only=True, then edit inside engine.materialized(...)",
            )
        wanted = Wanted(
            load_optimizer_states, load_lr_scheduler_states, load_module_only, load_module_strict
        )
        found = self._checkpoints.load(Path(directory).expanduser(), tag, wanted)
        self._window.account()  # for what arrived before
        return found

    def register_state(self, name: str, item: Stateful) -> None:
        """Save `item.state_dict()`, plain data, in every checkpoint, and give it back on loading.

        For what else decides the run: a DataLoader with a position, a curriculum. The loader that
        `initialize` made is registered. State that was loaded before is given back at once.
        """
        self._checkpoints.run_state.register(name, item)

    @property
    def resumed(self) -> bool:
        """Whether `initialize` went on from a committed step (`durable`, `resume`)."""
        return self._parts.resumed is not None

    @exclusive
    def restore_random_state(self) -> bool:
        """Put the random generators back where a resumed run, or a loaded checkpoint, had them.

        `initialize` (`resume`) and `load_checkpoint` have done so; what is drawn between them and
        the training loop, by a DataLoader for instance, shifts what comes after. Call this right
        before the loop then. False, and nothing is changed, if nothing was restored.
        """
        self._check_usable()
        return self._checkpoints.run_state.restore_rng()

    # --- what it says of itself ------------------------------------------------------------------

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
    def grad_norm(self) -> float | None:
        """Global gradient norm of the last step, before clipping and without the loss scale."""
        return self.last_report.grad_norm if self.last_report else None

    @property
    def loss_scale(self) -> float:
        """What the next loss is multiplied by in backward; 1.0 unless in fp16."""
        return self._stepper.loss_scale

    @property
    def global_steps(self) -> int:
        """Steps so far, `skipped_steps` among them, as in DeepSpeed."""
        return self._stepper.progress.steps

    @property
    def skipped_steps(self) -> int:
        """Steps skipped because gradients were not finite."""
        return self._stepper.progress.skipped_steps

    def __repr__(self) -> str:
        return self.plan.line(type(self).__name__, type(self.module).__name__, self.device)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is slow or risky about the device and paths of this run; `initialize` tells too."""
        disk = self._parts.disk
        return (*self._parts.device.warnings, *(disk.warnings if disk is not None else ()))

    def forecast(self) -> dict[str, int]:
        """Predicted bytes per direction and step, for the order of units learnt so far."""
        sizes = getattr(self._parts.activations, "learnt", None)
        summed = self._parts.hooks.summed_units if self._window.arrived else None
        return forecast_bytes(self.plan, self._cycles.training.sequence, sizes, summed)

    def counters(self) -> dict[str, int]:
        """Bytes per direction since the engine was made, the initial state included."""
        return self._parts.transfers.moved()

    def drives(self) -> dict[str, dict[str, Any]]:
        """Per path in use: device, file system, share of the state, speed, bytes and times."""
        return self._parts.disk.drives() if self._parts.disk is not None else {}

    # --- the end ---------------------------------------------------------------------------------

    def close(self, *, restore: bool = False) -> None:
        """Give everything back: threads, pins, files, disk space. Idempotent.

        In a forked child nothing happens. A checkpoint that is being saved is completed first; what
        made one fail is raised when all is given back. With `restore` parameters get their full
        values back, in RAM, in the compute dtype, and buffers are there; else the module refuses
        them: `EngineClosedError`. An engine that nothing refers to any more gives all back but
        weights: these stay with the module, which has them in RAM once it is asked for one.
        """
        if self._owner.is_here() and not (self._closed and self._parts.closed):
            self._close(restore)

    @exclusive
    def _close(self, restore: bool, *, rest: bool = False) -> None:
        values = None
        failure: BaseException | None = None
        if not self._closed:
            try:
                if self._parts.prefetcher.failure is None:
                    failure = self._parts.prefetcher.find_edit(every=True)
                self._parts.saver.finish()
                if rest and failure is None:
                    self._parts.rest()
                    self._closed = True
                    self._finalizer.detach()
                    return
                if restore:
                    self._values.take_back_all()
                    count = len(self._parts.cut.parameters)
                    values = {i: self._values.read(i) for i in range(count)}
            except BaseException as error:
                failure = failure or error
        self._closed = True
        try:
            self._parts.installation.gone = values is None
            self._parts.close()
        finally:
            if self._parts.closed:
                self._finalizer.detach()
            if values is not None:
                self._parts.binding.restore(values)
                move_buffers(self.module, torch.device("cpu"), lambda buffer: buffer)
        if failure is not None:
            raise failure

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self.ranks.end_by(error)
        self.close()

    def _check_usable(self, *, every: bool = False) -> None:
        self._owner.check()
        self._check_open()
        with self.ranks.telling("uses the engine"):
            self._parts.prefetcher.check()
            self._parts.prefetcher.verify(every=every)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError("the engine is closed", remedy="make a new one")

    def _check_trains(self, what: str) -> None:
        if not any(self._parts.cut.trained):
            raise TrainingError(
                f"{what} of an engine for inference",
                because="no parameter has optimizer state: the model was frozen, or initialize() "
                "got neither an optimizer section nor an optimizer",
                remedy="give one, and requires_grad_(True) before initialize()",
            )


def _fail(reference: weakref.ref[Engine]) -> None:
    """A call ended in the middle. A signal handler's: it takes no lock."""
    engine = reference()
    if engine is not None:
        prefetcher, step = engine._parts.prefetcher, engine._stepper.progress.steps + 1
        engine.ranks.give_up()
        prefetcher.failure = prefetcher.failure or TrainingError(
            f"a call was interrupted in the middle, in step {step}"
        )


def _after_fork(engine: Engine) -> None:
    """In a forked child: parameters are offloaded, because the slots were not inherited."""
    reference = weakref.ref(engine)

    def offload() -> None:
        engine = reference()
        if engine is not None and not engine._closed:
            engine._parts.binding.offload_in_child()
            engine._finalizer.detach()

    os.register_at_fork(after_in_child=offload)

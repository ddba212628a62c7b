"""Training engine: forward, backward, step, parameter access and checkpoints.

`Engine` is a facade over `training/` and `offload/`.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from infinity.config.settings import Settings
from infinity.errors import ConfigError, EngineClosedError, TrainingError
from infinity.model.offloaded_parameter import attach_engine, detach_engine
from infinity.model.parameters import freeze, make_zero_grad, move_buffers
from infinity.offload.call_guard import engine_call
from infinity.optim.moments import COMPUTE_DTYPES
from infinity.optim.offloaded import OffloadedOptimizer
from infinity.plan.forecast import forecast_bytes
from infinity.plan.layout import Segment
from infinity.plan.plan import Plan
from infinity.profiling.step_log import StepLog
from infinity.profiling.step_report import StepReport
from infinity.training.adapted_parameters import AdaptedParameters
from infinity.training.batches import LossFn, iter_micro_batches, train_micro_batch
from infinity.training.checkpoints import Checkpoints, LoadSelection
from infinity.training.components import EngineComponents
from infinity.training.inputs import Inputs
from infinity.training.loss_scale import ScaleRules
from infinity.training.merge_guard import MergeGuard
from infinity.training.optimizer_state import write_state
from infinity.training.parameter_access import targets
from infinity.training.resumable_loader import ResumableLoader
from infinity.training.run_state import RunState, Stateful
from infinity.training.state_dict import ModuleStateHooks, StateDict, state_dict_of
from infinity.training.step import StepInputs, StepRunner, TrainingCounters


class Engine:
    """Training engine of a module with offloaded weights, gradients and optimizer state.

    Made by `infinity.initialize`. A context manager that closes the engine on exit. Attributes
    that the engine lacks are forwarded to the module: `engine.generate(...)` calls
    `engine.module.generate(...)`.

    Attributes:
        module: The module that was passed to `initialize`.
        optimizer: Parameter groups, as in a `torch.optim.Optimizer`; `step()` is the engine's.
        plan: Tier of every unit's weights, moments and gradients, and the predicted bytes.
        ranks: Processes that train together.
        gradient_clipping: Maximum global norm of gradients; 0 for no clipping. May be assigned
            between steps.

    Example:
        >>> engine, optimizer, _, _ = infinity.initialize(model, {"nvme_path": "/mnt/nvme"})
        >>> for x, y in loader:
        ...     loss = engine(x.to(engine.device), y.to(engine.device))
        ...     engine.backward(loss)
        ...     engine.step()
        >>> engine.close()
    """

    def __init__(
        self,
        module: nn.Module,
        components: EngineComponents,
        optimizer: OffloadedOptimizer,
        settings: Settings,
        *,
        lr_scheduler: Any = None,
        loader: Any = None,
        step_log: StepLog | None = None,
    ) -> None:
        config = settings.config
        self._set_micro_batch_size(settings.batch_size)
        self.module = module
        self.optimizer = optimizer
        self.plan: Plan = components.plan
        self.gradient_clipping = float(config.gradient_clipping)
        self.ranks = components.ranks
        self._components = components
        self._step_log = step_log
        self._index_of = {id(p): i for i, p in enumerate(components.partition.parameters)}
        self._guard = components.guard
        self._device = components.device
        self._partition = components.partition
        self._hooks = components.hooks
        self._installation = components.installation
        self._window = components.window
        self._cycles = components.cycles
        self._values = components.values
        self._bound = components.bound
        self._gradients = components.gradients
        self._saver = components.saver
        self._failure = components.failure
        self._inputs = Inputs(
            module,
            self._partition,
            self.device,
            COMPUTE_DTYPES[self.plan.precision.name],
            casts=config.cast_inputs,
        )
        self._autocast = config.autocast
        scale_rules = ScaleRules.of(config.loss_scale) if config.precision == "fp16" else None
        self._step_runner = StepRunner(
            components, optimizer, self._index_of, lr_scheduler, step_log, scale_rules
        )
        self._run_state = RunState(
            self._step_runner, self._window, optimizer, components.updater, self._index_of,
            self._partition.names,
        )  # fmt: skip
        self._checkpoints = Checkpoints(
            module, components, self._step_runner, self._values, self._run_state, self._index_of,
            optimizer.rule.name, config,
        )  # fmt: skip
        if components.resumed:
            self._checkpoints.restore_document(components.resumed)
        self._closed = False
        self._attach(module)
        self._guard.fail = partial(_mark_interrupted, weakref.ref(self))
        self._finalizer = weakref.finalize(self, components.drop, weakref.ref(self))
        optimizer.connect(self.step, self._discard_window)
        _after_fork(self)
        if isinstance(loader, ResumableLoader):
            self.register_state("training_data", loader)

    @property
    def _counters(self) -> TrainingCounters:
        return self._step_runner.counters

    def _attach(self, module: nn.Module) -> None:
        components, parameters = self._components, self._partition.parameters
        hooks = ModuleStateHooks(module, self._values, self._index_of)
        self._installation.on_new_module = hooks.add
        components.add_cleanup(hooks.remove)
        components.add_cleanup(AdaptedParameters(module).remove)
        components.add_cleanup(MergeGuard(module, self._values, self._index_of).remove)
        if not any(self._partition.trained):
            components.add_cleanup(freeze(parameters))
        vars(module)["zero_grad"] = make_zero_grad(module, self._discard_window)
        components.add_cleanup(partial(vars(module).pop, "zero_grad", None))
        attach_engine(parameters, self, components.access)
        components.add_cleanup(partial(detach_engine, parameters))
        if self._step_log is not None:
            components.add_cleanup(self._step_log.close, last=True)

    if not TYPE_CHECKING:  # type checkers see only attributes of the engine

        def __getattr__(self, name: str) -> Any:
            """Return attributes of the module that the engine lacks."""
            module = self.__dict__.get("module")
            absent = object()
            value = absent if name.startswith("__") else getattr(module, name, absent)
            if value is absent:
                raise AttributeError(
                    f"neither {type(self).__name__} nor its module, a {type(module).__name__}, "
                    f"has {name!r}"
                )
            return value

    # --- training --------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward.

        Args:
            *args: Positional arguments of the module's forward; tensors on `device`.
            **kwargs: Keyword arguments of the module's forward.

        Returns:
            The result of the module's forward.

        Raises:
            EngineClosedError: The engine was closed.
            TrainingError: The forward failed with a cause known to the engine.
        """
        return self.forward(*args, **kwargs)

    @engine_call
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward without its hooks; see `__call__`.

        Args:
            args: Passed to the module.
            kwargs: Passed to the module.

        Returns:
            The outputs of the module.
        """
        self._check_usable()
        with self._step_runner.together("a forward", loses=False):
            args, kwargs = self._inputs.prepare((args, kwargs))
            self._run_state.warn_if_rng_used()
            self._values.release_all_materialized()
            self._finish_external_backward()
            self._cycles.begin(last_micro_batch=self._window.is_last)
            autocast: AbstractContextManager[Any] = nullcontext()  # the caller's stays active
            if self._autocast:
                autocast = torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)
            hooks = self._hooks
            mark = hooks.mark()
            try:
                torch.set_autocast_cache_enabled(False)  # casts of moved weights
                hooks.saved.push()
                with autocast:
                    result = self.module(*args, **kwargs)
                if not torch.is_grad_enabled():
                    self._cycles.end_call()
                hooks.release(result)
                return result
            except Exception as error:
                self._step_runner.clean_up_forward(error)
                self._inputs.annotate_error(error, (args, kwargs))
                raise
            finally:
                hooks.restore(mark)

    @engine_call
    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> Tensor:
        """Run the backward of one micro-batch, and move its gradients to their tier.

        Several backwards before one `step()` are summed. `loss.backward()` does the same, except in
        fp16: there use `engine.scale(loss).backward()`.

        Args:
            loss: Scalar loss of the forward, shape ``()`` or one element.
            retain_graph: Passed to `torch.Tensor.backward`.
            scale_wrt_gas: Divide the loss by `gradient_accumulation_steps`. Set to False if the
                loss is divided already.

        Returns:
            The detached loss, divided by `gradient_accumulation_steps` if `scale_wrt_gas`.

        Raises:
            TrainingError: `loss` is not a scalar that depends on trained parameters, a tensor was
                modified in place, or a weight was used outside the engine call and has been moved
                since. The accumulation window is discarded: `micro_step` is 0 again.
        """
        self._check_trains("backward()")
        self._require_scaled()
        micro_batches = self._window.length if scale_wrt_gas else 1
        scaled, share = self._scaled(loss), micro_batches * self._window.ranks
        scaled = scaled / share if share > 1 else scaled
        result = loss.detach() / micro_batches if micro_batches > 1 else loss.detach()
        mark = self._hooks.mark(backward=True)
        try:
            self._window.divisor = 1
            scaled.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
            self._gradients.finish()
            self._cycles.end()
            self._hooks.release(None)
            self._step_runner.count_backward()
            return result
        except Exception as error:
            self._step_runner.roll_back(error)
            self.ranks.broadcast_error("a backward", error)
            in_place = "has been modified by an inplace operation: [torch." in str(error)
            if in_place and isinstance(error, RuntimeError):
                raise TrainingError(
                    str(error),
                    because="a tensor was changed in place, or weights were used in a loss outside "
                    "the engine call and have been moved since",
                    remedy="compute penalties on weights inside the module's forward",
                ) from error
            raise
        finally:
            self._hooks.restore(mark)  # a recomputation pushes its own pairs

    @engine_call
    def scale(self, loss: Tensor) -> Tensor:
        """Multiply a loss by the loss scale, for `loss.backward()` in fp16.

        Args:
            loss: Scalar loss, shape ``()`` or one element.

        Returns:
            `loss` itself, except in fp16: there the loss in fp32 (the fp16 maximum is 65504), times
            the loss scale, divided by `gradient_accumulation_steps`.

        Raises:
            TrainingError: `loss` is not a scalar that depends on trained parameters.
        """
        scaled = self._scaled(loss)
        if scaled is loss:
            return loss
        self._require_scaled()
        self._window.scaled, self._window.divisor = True, 1
        return scaled / self._window.share

    @engine_call
    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a micro-batch; at the end of the accumulation window, update the parameters.

        Returns once the gradient norm is known, the previous optimizer pass and its commit have
        finished, and gradients on disk are written. The optimizer pass of this step runs during the
        next forward. A step with gradients that are not finite is skipped and counted.

        Args:
            lr_kwargs: Arguments of the learning rate schedule's `step`, such as ``{"metrics":
                loss}`` of `ReduceLROnPlateau`.

        Raises:
            TrainingError: There was no backward since the last step, or this is inside `no_sync`.
            TransferError: Gradients were lost. Either the step was committed or the window is
                discarded; `global_steps` and `micro_step` show which.
        """
        self._saver.warn()
        self._check_usable()
        self._window.updated = False
        self._check_trains("step()")
        self._installation.check_unguarded()
        self._finish_external_backward()
        self._window.check_step()
        if not self._window.is_last:
            self._step_runner.end_micro_batch()
            return
        with self._step_runner.together("a step"):
            self._cycles.end()
            self._bound.verify(every=True)
            self._bound.release_all(reached=True)
            self._values.release_all_materialized()
            self._values.finish_updates()
            samples = self._micro_batch_size * self._window.share
            document = None if self._components.durability is None else self._checkpoints.document
            self._step_runner.update(
                self.gradient_clipping, StepInputs(samples, lr_kwargs or {}, document)
            )
            report = self._step_runner.last_report
            self._window.updated = report is not None and not report.skipped

    @engine_call
    def train_batch(self, data: Any, loss_fn: LossFn | None = None) -> Tensor:
        """Run a complete step: forward, backward and `step()` of every micro-batch.

        Args:
            data: The batch of a step: a tensor, or a nested mapping, tuple or list of tensors. Each
                tensor of shape ``(samples, ...)`` is split into `gradient_accumulation_steps`
                views; scalars and other values are passed to every micro-batch. Or an iterator such
                as ``iter(loader)``, which is advanced by `gradient_accumulation_steps`
                micro-batches. Mappings are passed as ``engine(**batch)``, tuples and lists as
                ``engine(*batch)``.
            loss_fn: Called as ``loss_fn(output, target)``, where `target` is the last item of a
                tuple or list, which is not passed to the model, or else the micro-batch. Default:
                the loss is the output, its ``.loss``, its ``["loss"]``, or its first item.

        Returns:
            Mean of the micro-batches' losses, shape ``()``, fp32, detached. As in DeepSpeed, each
            micro-batch has equal weight, regardless of ignored labels. For the mean over all labels
            return ``summed_loss * micro_batches / labels_of_the_step`` from `loss_fn`.

        Raises:
            TrainingError: `data` cannot be split, or an accumulation window is open. After any
                exception the step was committed or the window is discarded; see `global_steps`.
        """
        self._check_usable()
        self._check_trains("train_batch()")
        self._finish_external_backward()
        self._window.check_full()
        count = self._window.length
        total = torch.zeros((), dtype=torch.float32, device=self.device)
        try:
            with self.ranks.propagate_errors("a batch"):
                for batch in iter_micro_batches(data, count):
                    total += train_micro_batch(self, batch, loss_fn)
        except Exception:
            if self._window.is_open or self._window.has_external_gradients:
                self._step_runner.roll_back()
            raise
        return total / count

    @engine_call
    def zero_grad(self) -> None:
        """Discard the gradients of the accumulation window; `micro_step` is 0 again.

        For loops that catch an exception between `backward()` and `step()`.
        """
        self._check_usable()
        self._step_runner.roll_back()

    @engine_call
    def train(self, mode: bool = True) -> Self:
        """Set the module to training mode, like `torch.nn.Module.train`.

        Args:
            mode: False for evaluation mode.

        Returns:
            The engine.
        """
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        """Set the module to evaluation mode.

        Returns:
            The engine.
        """
        return self.train(False)

    # --- the accumulation window -----------------------------------------------------------------

    @property
    def micro_step(self) -> int:
        """Number of finished micro-batches in the current accumulation window."""
        return self._window.micro_step

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return True if the current micro-batch is the last of its window."""
        return self._window.is_last

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Set explicitly whether the current micro-batch is the last of its window.

        Windows may then be longer or shorter than `gradient_accumulation_steps`. Losses are still
        divided by it, unless `backward(scale_wrt_gas=False)`.

        Args:
            is_boundary: True or False, until set again; None to count micro-batches.

        Raises:
            TrainingError: Raised later, by a second micro-batch if `gradient_accumulation_steps` is
                1: gradients are stored in 16 bits, and their sum would lose precision.
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
        scale_state = self._counters.loss_scale
        return loss if scale_state is None else loss.float() * scale_state.scale

    def _finish_external_backward(self) -> None:
        """Finish a `loss.backward()` of the caller as `backward` does at its end."""
        if not self._window.has_external_gradients:
            return
        self._require_scaled()
        self._window.check()
        with self._step_runner.together("a backward"):
            self._gradients.finish()
            self._cycles.end()
            self._step_runner.count_backward()

    def _require_scaled(self) -> None:
        """Discard the window and raise if an fp16 gradient comes from a loss without loss scale."""
        scaling = self._counters.loss_scale is not None
        if self._window.has_external_gradients and scaling and not self._window.scaled:
            self._step_runner.roll_back()
            raise TrainingError(
                "gradients came from loss.backward(), and the loss was not scaled",
                because="in fp16 a loss is multiplied by the loss scale, here "
                f"{self.loss_scale:g}: small gradients would vanish; the window starts over",
                remedy="engine.backward(loss), or engine.scale(loss).backward(), after the last "
                "step or forward",
            )

    @engine_call
    def _discard_window(self) -> None:
        """Discard the window, if it has a backward; `zero_grad()` of the optimizer and module."""
        if self._window.has_external_gradients or self._window.backwards:
            self._step_runner.roll_back()

    # --- values ----------------------------------------------------------------------------------

    @engine_call
    def state_dict(self, *, master: bool = False) -> StateDict:
        """Return the names and full values of the module's parameters and persistent buffers.

        Args:
            master: Return the fp32 masters of trained parameters instead of weights in the compute
                dtype.

        Returns:
            A mapping that reads each value when it is accessed, as a tensor in RAM. Also has the
            extra state of modules (`torch.nn.Module.get_extra_state`).
        """
        self._check_usable()
        return state_dict_of(self.module, self._values, self._index_of, master=master)

    @engine_call
    def load_state_dict(self, state: Mapping[str, Tensor], *, strict: bool = True) -> None:
        """Load full values, one tensor at a time.

        Args:
            state: Values by the names of `state_dict`. Values in fp32 become masters without
                rounding.
            strict: Raise if names are missing or unexpected.

        Raises:
            ConfigError: Entries are missing, unexpected or of another shape; all are listed, and
                nothing was changed.
        """
        self._check_usable()
        Engine.state_dict(self).load(state, strict=strict)

    @engine_call
    def save_weights(
        self,
        directory: str | os.PathLike[str],
        dtype: torch.dtype | str | None = None,
        max_shard: int | str = "5GiB",
    ) -> list[Path]:
        """Write weights as safetensors that Hugging Face and `load_weights` read.

        One tensor at a time is in RAM. Persistent buffers are included; tied weights are written
        once, under their first name. The weights are replaced atomically: a reader finds either the
        old or the new ones, also after a crash.

        Args:
            directory: Directory to write to; created if missing.
            dtype: None for the compute dtype, or ``torch.float32`` / ``"fp32"`` for the exact
                masters, ``"bf16"`` or ``"fp16"``. Buffers and frozen parameters that are not
                floating-point keep their dtype.
            max_shard: Maximum file size in bytes, or a string such as ``"5GiB"``. A larger tensor
                is a file alone.

        Returns:
            Paths of the files; the index last, if there are several.

        Raises:
            ConfigError: `dtype` is unknown.
            DoesNotFitError: The disk is full.
            MachineError: The directory cannot be written, another process saves there, or a file
                of older weights could not be removed after the new ones were written. After any
                other error older files are unchanged. Training may continue after all errors.
        """
        self._check_usable()
        return Engine.state_dict(self).save(Path(directory), dtype, max_shard)

    def materialized(
        self,
        target: nn.Module | nn.Parameter | Iterable[nn.Module | nn.Parameter],
        *,
        master: bool = False,
    ) -> AbstractContextManager[None]:
        """Return a context manager in which parameters hold full values, to read and edit.

        Args:
            target: A module, a parameter, or several of them.
            master: Show trained parameters as fp32 masters.

        Returns:
            A context manager; edits are written back when it exits.

        Raises:
            ConfigError: A parameter does not belong to the engine's module.
        """
        self._check_usable()
        return self._values.materialized(targets(target, self._index_of), master=master)

    def is_materialized(self, parameter: nn.Parameter) -> bool:
        """Return True while this parameter is in a block of `materialized`.

        Args:
            parameter: A parameter of the module.
        """
        return self._index_of.get(id(parameter)) in self._values.materialized_dtypes

    @engine_call
    def gradient(self, parameter: nn.Parameter) -> Tensor:
        """Return a copy of a parameter's accumulated gradient; `p.grad` is None.

        Args:
            parameter: A trained parameter of the module.

        Returns:
            A tensor of the parameter's shape on `device`; in fp16 it is fp32, without loss scale.

        Raises:
            ConfigError: The parameter is frozen.
            TrainingError: It has no gradient in this accumulation window.
        """
        index, _ = self._find_trained(parameter)
        with self.ranks.propagate_errors("reads a gradient"):
            value = self._gradients.read(index).view(parameter.shape)
        scale_state = self._counters.loss_scale
        return value if scale_state is None else value.float() / scale_state.scale

    @engine_call
    def set_gradient(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Replace the accumulated gradient of a parameter.

        `step()` may follow without a backward: gradients can be computed in any other way.

        Args:
            parameter: A trained parameter of the module.
            value: Tensor of the parameter's shape, without loss scale. Stored in fp32 if
                `gradient_accumulation_steps` is above 1, else in the compute dtype.

        Raises:
            ConfigError: The parameter is frozen, or the shape differs.
        """
        with self.ranks.propagate_errors("sets a gradient"):
            index = self._index_for(parameter, value)
        scaled = value.float() * self.loss_scale
        handover = self._components.prefetcher.handover
        for unit in self._values.units_of(index):
            handover.wait_gradients_read(unit)
        for piece, rows in self._values.rows(index):
            self._gradients.replace(piece, scaled[rows].reshape(-1))
        self._window.count_set_gradient()

    @engine_call
    def set_optimizer_state(self, parameter: nn.Parameter, name: str, value: Tensor) -> None:
        """Replace one moment of a parameter.

        `engine.optimizer.read_state(parameter)` reads it.

        Args:
            parameter: A trained parameter of the module.
            name: Its name in torch: ``"exp_avg"``, ``"exp_avg_sq"``, ``"momentum_buffer"``, ...
            value: Tensor of the parameter's shape, stored in the format of `optimizer.moments`.

        Raises:
            ConfigError: There is no such moment, the shape differs, or an adapted torch optimizer
                holds the state.
        """
        index = self._index_for(parameter, value)
        self._values.release_all_materialized()
        self._values.finish_updates()
        components = self._components
        params_by_index = self.optimizer.params_by_index(self._index_of)
        for piece, rows in self._values.rows(index):
            location = self._values.location_of(piece)
            self._values.before_change(location[0].index)
            write_state(
                components.store,
                components.updater,
                components.kernels,
                location,
                params_by_index.get(piece),
                name,
                value[rows],
            )

    def _find_trained(self, parameter: nn.Parameter) -> tuple[int, Segment]:
        self._check_usable()
        (index,) = targets(parameter, self._index_of)
        _, segment = self._values.location_of(index)
        if not segment.trained:
            raise ConfigError(
                f"{segment.name!r} is frozen and has neither a gradient nor optimizer state"
            )
        return index, segment

    def _index_for(self, parameter: nn.Parameter, value: Tensor) -> int:
        index, segment = self._find_trained(parameter)
        if tuple(value.shape) != segment.full_shape:
            got = tuple(value.shape)
            raise ConfigError(f"{segment.name!r} has shape {segment.full_shape}, got {got}")
        return index

    @engine_call
    def settle(self) -> None:
        """Block until no update is pending and all state is in its tier."""
        self._check_usable()
        self._values.finish_updates()
        store = self._components.store
        for unit in range(len(self.plan.units)):
            store.wait_writes(unit)

    # --- checkpoints -----------------------------------------------------------------------------

    @engine_call
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
        """Save the complete training state to ``directory/tag``.

        Returns when the snapshot is taken. Bytes are copied while training continues; the
        checkpoint is published when all of them are on stable storage.

        Args:
            directory: Parent of the checkpoints; its own parent must exist.
            tag: Name of the checkpoint. Default: ``global_stepN``.
            client_state: Plain data (numbers, strings, lists, mappings), returned by
                `load_checkpoint`.
            save_latest: Write the checkpoint's name to the file ``latest``.
            exclude_frozen_parameters: Ignored; accepted for compatibility with DeepSpeed. Files of
                frozen weights are shared with the previous checkpoint; loading needs them.
            keep_last: Number of newest checkpoints to keep; None keeps all.
            wait: Return only when the checkpoint is on stable storage.

        Returns:
            Path of the checkpoint.

        Raises:
            CheckpointError: The previous save failed, the checkpoint exists already, or another
                process saves there.
            ConfigError: `tag` or `client_state` cannot be saved.
            DoesNotFitError: The disk is full.
            MachineError: The directory cannot be written. Training may continue after any error.
                Background failures are a warning of the next `step()`, and are raised by the next
                `save_checkpoint`, `finish_saving` or `close`.
        """
        self._check_usable(every=True)
        self._finish_external_backward()
        return self._checkpoints.save(
            Path(directory).expanduser(), tag, client_state or {},
            save_latest=save_latest, keep_last=keep_last, wait=wait,
        )  # fmt: skip

    @property
    def saving(self) -> bool:
        """True while a checkpoint is written in the background."""
        return self._saver.busy

    @engine_call
    def finish_saving(self) -> None:
        """Block until the last checkpoint is on stable storage.

        Raises:
            DoesNotFitError: The disk is full.
            MachineError: Writing it failed.
        """
        self._check_usable()
        self._saver.finish()

    @engine_call
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
        """Load a checkpoint or a durable run, saved with any placement and number of ranks.

        Training continues bitwise as it would have without the interruption.

        Args:
            directory: The directory of `save_checkpoint`, or one of a durable run.
            tag: Name of the checkpoint. Default: the one that ``latest`` names.
            load_module_strict: Raise if parameters are missing or unexpected.
            load_optimizer_states: If False, weights are loaded as fp32 masters, and moments stay
                unchanged.
            load_lr_scheduler_states: If False, the learning rate schedule stays unchanged.
            load_module_only: Load only weights; counters, schedule and random generators stay
                unchanged.
            custom_load_fn: Not supported; must be None.

        Returns:
            ``(path, client_state)``; ``(None, None)`` with a warning if there is no checkpoint.

        Raises:
            CheckpointError: The checkpoint does not match the model (all reasons are listed, and
                nothing was changed), or a tensor is damaged: then load another one before training.
        """
        self._guard.check()
        self._check_open()
        self._bound.verify(every=True)
        if custom_load_fn is not None:
            raise ConfigError(
                "load_checkpoint(custom_load_fn=...) is not supported",
                because="it would copy values into parameters that are not there",
                remedy="load with load_module_only=True, then edit inside engine.materialized(...)",
            )
        wanted = LoadSelection(
            load_optimizer_states, load_lr_scheduler_states, load_module_only, load_module_strict
        )
        result = self._checkpoints.load(Path(directory).expanduser(), tag, wanted)
        self._window.account()  # gradients that arrived before the load
        return result

    def register_state(self, name: str, item: Stateful) -> None:
        """Include an object's state in every checkpoint.

        For example the position of a DataLoader, or a curriculum. The loader that `initialize`
        returns is registered already.

        Args:
            name: Unique name of the state.
            item: Object with `state_dict()`, which returns plain data, and `load_state_dict`. If a
                checkpoint was loaded before, `load_state_dict` is called immediately.
        """
        self._run_state.register(name, item)

    @property
    def resumed(self) -> bool:
        """True if `initialize` continued from a committed step (`durable`, `resume`)."""
        return self._components.resumed is not None

    @engine_call
    def restore_random_state(self) -> bool:
        """Restore the random generators of a resumed run or a loaded checkpoint again.

        `initialize` and `load_checkpoint` restore them. Call this directly before the training loop
        if other code, such as a DataLoader, has drawn random numbers since.

        Returns:
            False if nothing was resumed or loaded; then nothing is changed.
        """
        self._check_usable()
        return self._run_state.restore_rng()

    # --- properties and reports ------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Device of computation and of inputs."""
        return self._device.torch_device

    @property
    def lr_scheduler(self) -> Any:
        """Learning rate schedule that `step` advances, or None."""
        return self._step_runner.lr_scheduler

    @property
    def last_report(self) -> StepReport | None:
        """Report of the last step: norm, bytes and stalls; None before the first step."""
        return self._step_runner.last_report

    @property
    def grad_norm(self) -> float | None:
        """Global gradient norm of the last step, before clipping, without loss scale."""
        return self.last_report.grad_norm if self.last_report else None

    @property
    def loss_scale(self) -> float:
        """Factor that the next loss is multiplied by in backward; 1.0 except in fp16."""
        return self._step_runner.loss_scale

    @property
    def global_steps(self) -> int:
        """Number of steps, including skipped ones, as in DeepSpeed."""
        return self._counters.steps

    @property
    def skipped_steps(self) -> int:
        """Number of steps skipped because gradients were not finite."""
        return self._counters.skipped_steps

    def __repr__(self) -> str:
        return self.plan.line(type(self).__name__, type(self.module).__name__, self.device)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about devices and paths that `initialize` has issued."""
        disk = self._components.disk
        return (*self._device.warnings, *(disk.warnings if disk is not None else ()))

    def forecast(self) -> dict[str, int]:
        """Return the predicted bytes of a step by direction, for the recorded access order."""
        sizes = getattr(self._components.activations, "learnt", None)
        summed = self._hooks.slice_summed_units if self._window.arrived else None
        return forecast_bytes(self.plan, self._cycles.training.sequence, sizes, summed)

    def counters(self) -> dict[str, int]:
        """Return the bytes moved so far by direction, including the initial state."""
        return self._components.transfers.moved()

    def drives(self) -> dict[str, dict[str, Any]]:
        """Return for each path in use: device, file system, share of state, rate, bytes, times.

        Raises:
            EngineClosedError: The engine is closed.
        """
        self._check_open()
        disk = self._components.disk
        return {} if disk is None else disk.drives()

    # --- close -----------------------------------------------------------------------------------

    def close(self, *, restore: bool = False) -> None:
        """Release threads, pinned memory, files and disk space. Idempotent.

        A checkpoint in progress is completed first. No effect in a forked child. If an engine is
        garbage-collected without `close`, its weights stay available to the module, and are read
        into RAM when the module is used again.

        Args:
            restore: Set the module's parameters to their full values, in RAM and in the compute
                dtype. Otherwise using the module raises `EngineClosedError`.

        Raises:
            DoesNotFitError, MachineError: The last checkpoint could not be written. All resources
                are released nevertheless.
        """
        if self._guard.in_creating_process() and not (self._closed and self._components.closed):
            self._close(restore)

    @engine_call
    def _close(self, restore: bool, *, keep_weights: bool = False) -> None:
        values = None
        failure: BaseException | None = None
        if not self._closed:
            try:
                if self._failure.error is None:
                    failure = self._bound.find_edit(every=True)
                self._saver.finish()
                if keep_weights and failure is None:
                    self._components.keep_weights()
                    self._closed = True
                    self._finalizer.detach()
                    return
                if restore:
                    self._values.release_all_materialized()
                    count = self._partition.num_model_params
                    values = {i: self._values.read(i) for i in range(count)}
            except BaseException as error:
                failure = failure or error
        self._closed = True
        try:
            self._installation.values_lost = values is None
            self._components.close()
        finally:
            if self._components.closed:
                self._finalizer.detach()
            if values is not None:
                self._components.binding.restore(values)
                move_buffers(self.module, torch.device("cpu"), lambda buffer: buffer)
        if failure is not None:
            raise failure

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self.ranks.abort(error)
        self.close()

    def _check_usable(self, *, every: bool = False) -> None:
        self._guard.check()
        self._check_open()
        with self.ranks.propagate_errors("uses the engine"):
            self._failure.check()
            self._bound.verify(every=every)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError("the engine is closed", remedy="make a new one")

    def _check_trains(self, what: str) -> None:
        if not any(self._partition.trained):
            raise TrainingError(
                f"{what} of an engine for inference",
                because="no parameter has optimizer state: the model was frozen, or initialize() "
                "got neither an optimizer section nor an optimizer",
                remedy="give one, and requires_grad_(True) before initialize()",
            )


def _mark_interrupted(reference: weakref.ref[Engine]) -> None:
    """Mark the engine failed after an interrupted call; takes no lock, as a signal handler."""
    engine = reference()
    if engine is not None:
        step = engine._counters.steps + 1
        engine.ranks.mark_failed()
        engine._failure.note(TrainingError(f"a call was interrupted in the middle, in step {step}"))


def _after_fork(engine: Engine) -> None:
    """Register a fork handler that offloads parameters in the child, which lacks the slots."""
    reference = weakref.ref(engine)

    def offload() -> None:
        engine = reference()
        if engine is not None and not engine._closed:
            engine._components.binding.offload_in_child()
            engine._finalizer.detach()

    os.register_at_fork(after_in_child=offload)

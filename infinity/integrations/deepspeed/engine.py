"""Engine with DeepSpeed's methods and their semantics."""

from __future__ import annotations

import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property, partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from infinity.checkpoint.directory import find_tag, holds_only_checkpoint_files
from infinity.checkpoint.manifest import MANIFEST_NAME, check_tag
from infinity.common.files import atomic_write, make_directories
from infinity.config.settings import Settings
from infinity.engine import Engine
from infinity.errors import (
    CheckpointError,
    ConfigError,
    EngineClosedError,
    InfinityWarning,
    TrainingError,
)
from infinity.integrations.deepspeed.config import Translation
from infinity.integrations.deepspeed.import_checkpoint import is_zero
from infinity.integrations.deepspeed.keys import KEYS, read_value
from infinity.integrations.deepspeed.monitors import MonitorMaster, get_monitor_config
from infinity.integrations.deepspeed.offload_states import (
    OffloadDevice,
    OffloadStateTypeEnum,
    check_offload_states,
    state_devices,
)
from infinity.integrations.deepspeed.settings import DeepSpeedSettings
from infinity.integrations.deepspeed.source import find_source
from infinity.integrations.deepspeed.zero import mark, unmark
from infinity.offload.call_guard import engine_call
from infinity.optim.offloaded import OffloadedOptimizer
from infinity.profiling.step_log import StepLog
from infinity.storage.run_dir import RECORD_NAME
from infinity.training.components import EngineComponents
from infinity.training.resumable_loader import ResumableLoader
from infinity.training.state_dict import StateDict, state_dict_of

_PICKLED = (".bin", ".pt", ".pth")


def _constant(value: Any) -> Callable[[Any], Any]:
    return lambda self: value


_REPLACED = ".replaced"


def _restore_replaced(root: Path) -> None:
    """Rename checkpoints back whose replacement was interrupted before it was complete."""
    for old in root.glob(f"*{_REPLACED}"):
        directory = old.with_name(old.name.removesuffix(_REPLACED))
        if (
            not directory.exists()
            and (old / MANIFEST_NAME).is_file()
            and holds_only_checkpoint_files(old)
        ):
            with suppress(OSError):
                old.rename(directory)


def _reject_deepspeed_checkpoint(root: Path, tag: str | None, universal: bool) -> None:
    """Raise `CheckpointError` if DeepSpeed wrote the checkpoint."""
    if tag is None:
        kind = "universal " if universal and (root / "latest_universal").is_file() else None
    elif (root / tag / MANIFEST_NAME).is_file():
        kind = None
    elif (root / tag / "zero").is_dir():
        kind = "universal "
    else:
        kind = "" if is_zero(root, tag) else None
    if kind is not None:
        command = f"infinity checkpoint import-deepspeed {root} OUT"
        raise CheckpointError(
            f"{root / (tag or '')} has a {kind}checkpoint that DeepSpeed wrote",
            remedy=f"{command} on the ZeRO checkpoint that it was converted from, then load OUT"
            if kind
            else f"{command}, then load OUT",
        )


class Answer(float):
    """Callable float, for an attribute that is a method in DeepSpeed's engine."""

    def __call__(self) -> float:
        """Return the number."""
        return float(self)


class DeepSpeedEngine(Engine, nn.Module):
    """Engine with DeepSpeed's methods; see docs/migrating-from-deepspeed.md.

    Made by `infinity.initialize`, and by that of `infinity.deepspeed`. An `nn.Module` whose only
    child is `module`, so names of parameters and of the state dict begin with "module.".
    """

    config: Any = None  # as passed to `initialize`
    translation: Translation | None = None  # of `config`, if it is DeepSpeed's
    training_dataloader: Any = None

    mp_world_size = 1
    _destroyed = False

    __call__ = nn.Module.__call__  # run hooks registered on the engine, then forward

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
        nn.Module.__init__(self)
        del self.training  # read from the module by __getattr__
        if isinstance(settings, DeepSpeedSettings):
            self.translation, self.config = settings.translation, settings.given
        self.training_dataloader = loader
        super().__init__(
            module, components, optimizer, settings,
            lr_scheduler=lr_scheduler, loader=loader, step_log=step_log,
        )  # fmt: skip
        if not self._config_value("managed_gradient_accumulation"):
            self.set_gradient_accumulation_boundary(True)  # each step() updates
        vars(self)["module"] = module  # in addition to `_modules`: found without __getattr__

    def _attach(self, module: nn.Module) -> None:
        super()._attach(module)
        parameters = self._components.partition.parameters
        mark(parameters)
        self._components.add_cleanup(partial(unmark, parameters))
        for submodule in module.modules():
            if guard := vars(submodule).get("_apply"):  # modules without state have none
                guard.stays = True

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return attributes of the module that the engine lacks."""
            with suppress(AttributeError):
                return nn.Module.__getattr__(self, name)
            return super().__getattr__(name)

    # --- attributes that are methods in DeepSpeed's engine ---------------------------------------

    @property
    def loss_scale(self) -> Answer:
        """Factor of the next loss in backward; 1.0 except in fp16. Callable, as in DeepSpeed."""
        return Answer(super().loss_scale)

    @property
    def lr_scheduler(self) -> Any:
        """Schedule that the engine steps, or None. Set to None to step it in the script."""
        return super().lr_scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, scheduler: Any) -> None:
        self._step_runner.lr_scheduler = scheduler

    @property
    def gradient_clipping(self) -> Answer:
        """Largest global norm of gradients, 0 for no clipping. Callable and settable."""
        return Answer(self._gradient_clipping)

    @gradient_clipping.setter
    def gradient_clipping(self, norm: float) -> None:
        self._gradient_clipping = norm

    # --- batches ---------------------------------------------------------------------------------

    def train_batch_size(self) -> int:
        """Return the samples of an update: micro-batch x accumulation steps x ranks."""
        return self._micro_batch_size * self._window.share

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples of a micro-batch on one rank."""
        return self._micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Return the micro-batches of an update on each rank, unless the script sets boundaries."""
        return self._window.length

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return samples of an update and of a micro-batch, and micro-batches of an update."""
        return self.train_batch_size(), self._micro_batch_size, self._window.length

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Set the samples of an update over all ranks, by changing the number of micro-batches.

        Arguments are DeepSpeed's.

        Raises:
            ConfigError: It is no multiple of micro-batch x ranks, or gradients are stored in 16
                bits, which do not allow accumulation.
            TrainingError: The accumulation window is open; call this between updates.
        """
        least = self._micro_batch_size * self.ranks.count
        steps, remainder = divmod(train_batch_size, least)
        if remainder or steps < 1:
            on_ranks = "" if self.ranks.count == 1 else f" on each of {self.ranks.count} ranks"
            raise ConfigError(
                f"train_batch_size {train_batch_size} is no multiple of the micro-batch of "
                f"{self._micro_batch_size} samples{on_ranks}",
                remedy=f"{max(steps, 1) * least}, or set_train_micro_batch_size() first",
            )
        self.set_gradient_accumulation_steps(steps)

    def set_gradient_accumulation_steps(self, steps: int) -> None:
        """Set the micro-batches of an update; predictions of the plan do not change.

        Args:
            steps: Micro-batches of an update on each rank, 1 or more.

        Raises:
            ConfigError: Gradients are stored in 16 bits, which do not allow accumulation.
            TrainingError: The accumulation window is open; call this between updates.
        """
        self._check_usable()
        self._finish_external_backward()
        if self._window.is_open:
            raise TrainingError(
                f"the window of {self._window.length} micro-batches has begun: "
                f"{self._window.micro_step} are complete",
                remedy="change it right after the step() that updates; Engine.zero_grad(engine) "
                "drops the window",
            )
        self._window.set_length(steps)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Set the samples of a micro-batch, for counting samples; loaders do not change.

        Arguments are DeepSpeed's.
        """
        self._set_micro_batch_size(micro_batch_size)

    @property
    def micro_steps(self) -> int:
        """Number of calls of `step()` since the run began."""
        return self._step_runner.counters.micro_batches

    @property
    def global_samples(self) -> int:
        """Samples of all closed accumulation windows, skipped steps included."""
        return self._step_runner.counters.samples

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the accumulation window open; `step()` raises inside the block."""
        self._check_usable()
        self._window.no_sync += 1
        try:
            yield
        finally:
            self._window.no_sync -= 1

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Do nothing: gradients of several backwards are summed without it."""
        self._check_usable()
        yield

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """Do nothing: gradients are summed during backward.

        Other arguments are accepted for compatibility and have no effect.
        """

    # --- optimizer -------------------------------------------------------------------------------

    def get_global_grad_norm(self) -> float | None:
        """Return the gradient norm of the last step, before clipping; None before the first."""
        return self.grad_norm

    def was_step_applied(self) -> bool:
        """Return True if the last `step()` updated parameters: at a boundary, and not skipped."""
        return self._window.updated

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of all parameter groups, until a schedule sets another.

        Arguments are DeepSpeed's.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def optimizer_name(self) -> str:
        """Return the name of the update rule."""
        return self.optimizer.rule.name

    @engine_call
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the last `loss.backward()`, but not those of `engine.backward`.

        This is DeepSpeed's behavior; `Engine.zero_grad(engine)` restarts the accumulation window.
        Other arguments are accepted for compatibility and have no effect.
        """
        self._check_usable()
        self._discard_window()

    @engine_call
    def _discard_window(self) -> None:
        if self._window.has_external_gradients:
            self._step_runner.roll_back()

    def get_mom(self) -> list[Any]:
        """Return the momentum of each parameter group, or its betas."""
        groups = self.optimizer.param_groups
        return [group.get("momentum", group.get("betas")) for group in groups]

    # --- configuration ---------------------------------------------------------------------------

    def _config_value(self, key: str) -> Any:
        """Return the value of a DeepSpeed key; if it is not given, or "auto", its default."""
        rows = () if self.translation is None else self.translation.rows
        values = [row.given for row in rows if row.key == key and row.given not in (None, "auto")]
        if values:
            return read_value(KEYS[key].kind, values[0])
        default = KEYS[key].default
        return None if default == "-" else json.loads(default)

    def steps_per_print(self) -> Any:
        """Return the steps between printed lines; None by default."""
        return self._config_value("steps_per_print")

    def wall_clock_breakdown(self) -> bool:
        """Return True if the configuration asks for it; it has no effect."""
        return bool(self._config_value("wall_clock_breakdown"))

    def fp16_enabled(self) -> bool:
        """Return True if the run computes in fp16, with loss scaling."""
        return self.plan.precision.name == "fp16"

    def bfloat16_enabled(self) -> bool:
        """Return True if the run computes in bf16."""
        return self.plan.precision.name == "bf16"

    def zero_optimization(self) -> bool:
        """Return True if the DeepSpeed configuration has a stage above 0."""
        return self.zero_optimization_stage() > 0

    def zero_optimization_stage(self) -> int:
        """Return the stage of the DeepSpeed configuration, else 0; any stage shards all state."""
        return int(self._config_value("zero_optimization.stage") or 0)

    def zero_optimization_partition_gradients(self) -> bool:
        """Return True if the stage is 2 or 3."""
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Return True if the stage is 3."""
        return self.zero_optimization_stage() >= 3

    def zero_offload_optimizer(self) -> OffloadDevice | None:
        """Return where the plan stores optimizer state: an object whose `device` is cpu or nvme.

        None if all of it is on the GPU.
        """
        return OffloadDevice.of({placement.state for placement in self.plan.placements})

    def zero_offload_param(self) -> OffloadDevice | None:
        """Return where the plan stores weights, as `zero_offload_optimizer`."""
        return OffloadDevice.of({placement.weight for placement in self.plan.placements})

    zero_gather_16bit_weights_on_model_save = _constant(True)  # unsharded weights are always saved

    # --- ranks -----------------------------------------------------------------------------------

    @property
    def global_rank(self) -> int:
        """Number of this rank."""
        return self.ranks.rank

    @property
    def local_rank(self) -> int:
        """Number of this rank on its machine."""
        return self.ranks.local_rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.ranks.count

    dp_world_size = world_size

    def get_data_parallel_rank(self) -> int:
        """Return `global_rank`: each rank has its own data."""
        return self.ranks.rank

    def get_data_parallel_world_size(self) -> int:
        """Return `world_size`."""
        return self.ranks.count

    def get_data_parallel_group(self) -> Any:
        """Return torch's default process group; None for one process."""
        return None if self.ranks.count == 1 else torch.distributed.group.WORLD

    get_model_parallel_rank = _constant(0)
    get_sequence_parallel_world_size = _constant(1)
    get_sequence_parallel_group = _constant(None)

    # --- data and monitors -----------------------------------------------------------------------

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[..., Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> Any:
        """Return a loader of micro-batches, like the one of `initialize(training_data=...)`.

        Ranks take micro-batches of `batch_size` samples of the dataset in turn; default: the size
        of the configuration. The loader shuffles if `route` is "train", and gets `collate_fn`. Its
        position is saved with checkpoints. Raises `ConfigError` for a `data_sampler`. Other
        arguments are accepted for compatibility and have no effect.
        """
        if data_sampler is not None:
            raise ConfigError(
                "deepspeed_io(data_sampler=...) is not supported",
                remedy="torch.utils.data.DataLoader(dataset, sampler=...), in place of it",
            )
        size = self._micro_batch_size if batch_size is None else batch_size
        drop_last, shuffled = self._config_value("dataloader_drop_last"), route == "train"
        return ResumableLoader(
            dataset, self.ranks, shuffled=shuffled, batch_size=size, collate_fn=collate_fn,
            drop_last=drop_last,
        )  # fmt: skip

    @cached_property
    def monitor(self) -> MonitorMaster:
        """Monitors that the configuration enables."""
        source = None if self.translation is None else find_source(self.config)
        return MonitorMaster(get_monitor_config({} if source is None else source.raw))

    # --- checkpoints -----------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: Any = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        keep_last: int | None = None,
        wait: bool = True,
    ) -> Path:
        """Save a checkpoint like :meth:`Engine.save_checkpoint`, replacing one of the same tag.

        Until the new checkpoint is complete, the previous one is in `TAG.replaced`;
        `load_checkpoint` loads it for the same tag. `tag` is converted by `str`; default:
        `global_stepN`. Frozen weights share files with the previous checkpoint:
        `exclude_frozen_parameters` has no effect. Other arguments are DeepSpeed's.

        Args:
            keep_last: Remove all but this number of newest checkpoints; None keeps all.
            wait: Block until the checkpoint is complete. If False, training goes on.

        Returns:
            The directory of the checkpoint.

        Raises:
            ConfigError: The directory of the tag has files that do not belong to a checkpoint.
        """
        name = f"global_step{self.global_steps}" if tag is None else str(tag)
        check_tag(name)
        directory = Path(save_dir).expanduser() / name
        replaced = directory.with_name(name + _REPLACED)
        with self.ranks.collective_section("renames the previous checkpoint"):
            if not self.ranks.rank:
                make_directories(directory.parent)
                _restore_replaced(directory.parent)
            replaces = self.ranks.rank == 0 and directory.is_dir()
            if replaces:
                if not holds_only_checkpoint_files(directory):
                    raise ConfigError(
                        f"{directory} holds files that do not belong to a checkpoint",
                        because="a checkpoint of that tag would replace it",
                        remedy="use another tag, or move those files",
                    )
                shutil.rmtree(replaced, ignore_errors=True)
                directory.rename(replaced)
        waits = self.ranks.synchronize("renames the previous checkpoint", int(wait or replaces))
        try:
            saved = super().save_checkpoint(
                save_dir, name, client_state, save_latest, exclude_frozen_parameters,
                keep_last=keep_last, wait=any(rank_waits for rank_waits, *_ in waits),
            )  # fmt: skip
        except BaseException:
            if replaces and not directory.exists():
                replaced.rename(directory)
            raise
        if replaces:
            shutil.rmtree(replaced, ignore_errors=True)
        return saved

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: None = None,
    ) -> tuple[str, dict[str, Any]] | tuple[None, None]:
        """Load a checkpoint like :meth:`Engine.load_checkpoint`.

        If a save of the tag was interrupted, the previous checkpoint of the tag is loaded. Without
        `load_optimizer_states`, weights become fp32 masters and moments stay unchanged.
        `custom_load_fn` must be None. Arguments are DeepSpeed's.

        Returns:
            The directory of the checkpoint and the `client_state`; (None, None) if there is none.

        Raises:
            CheckpointError: The checkpoint is damaged, or of another model.
        """
        root = Path(load_dir).expanduser()
        if not (root / RECORD_NAME).is_file():
            with self.ranks.propagate_errors("looks for a checkpoint"):
                found_tag = find_tag(root, None if tag is None else str(tag))
                _reject_deepspeed_checkpoint(
                    root, found_tag, self._config_value("checkpoint.load_universal")
                )
            replaced = f"{found_tag}{_REPLACED}"
            if (
                found_tag
                and not (root / found_tag).exists()
                and (root / replaced / MANIFEST_NAME).is_file()
            ):
                tag = replaced
        return super().load_checkpoint(
            load_dir,
            None if tag is None else str(tag),
            load_module_strict,
            load_optimizer_states,
            load_lr_scheduler_states,
            load_module_only,
            custom_load_fn,
        )

    # --- state dicts and weights -----------------------------------------------------------------

    @engine_call
    def state_dict(
        self,
        *args: Any,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        master: bool = False,
    ) -> Any:
        """Return a lazy mapping of names, prefixed with `prefix` and "module.", to full values.

        With `destination`, which :meth:`torch.nn.Module.state_dict` of a parent module passes, fill
        that dict with all values at once, in the compute dtype. `master` returns exact fp32 masters
        instead. Other arguments are accepted for compatibility and have no effect.
        """
        self._check_usable()
        if args or destination is not None:
            return nn.Module.state_dict(
                self, *args, destination=destination, prefix=prefix, keep_vars=keep_vars
            )
        prefix = f"{prefix}module."
        return state_dict_of(
            self.module, self._values, self._index_of, master=master, prefix=prefix
        )

    @engine_call
    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> None:
        """Load full values by name, with or without the prefix "module.".

        See :meth:`Engine.load_state_dict`. Values are copied, whatever `assign` is. Arguments are
        DeepSpeed's.
        """
        known = Engine.state_dict(self)
        if not any(name in known for name in state_dict):
            state_dict = {name.removeprefix("module."): v for name, v in state_dict.items()}
        super().load_state_dict(state_dict, strict=strict)

    @engine_call
    def module_state_dict(
        self,
        destination: dict[str, Tensor] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Tensor]:
        """Return all values of the module by name, on the CPU, in the compute dtype.

        The full model must fit in RAM; `state_dict()` reads one value at a time. Values are copies,
        whatever `keep_vars` is. Arguments are DeepSpeed's.
        """
        state = self._state(exclude_frozen=exclude_frozen_parameters)
        target = {} if destination is None else destination
        target.update({prefix + name: state[name] for name in state})
        return target

    @engine_call
    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False,
        z3_params_to_fetch: Any = None,
        allowed_missing_keys: Any = None,
    ) -> None:
        """Load full values into the module.

        `checkpoint` has them by name, or under "module". Names other than `allowed_missing_keys`
        must not be missing if `strict`. `custom_load_fn` is called as `custom_load_fn(src=values,
        dst=module)`, while all parameters of the module are materialized. Other arguments are
        accepted for compatibility and have no effect.
        """
        values = checkpoint.get("module", checkpoint)
        state_dict = values if isinstance(values, Mapping) else checkpoint
        if custom_load_fn is None:
            current = {} if not allowed_missing_keys else Engine.state_dict(self)
            absent = [n for n in allowed_missing_keys or () if n in current and n not in state_dict]
            complete = {**state_dict, **{name: current[name] for name in absent}}
            self.load_state_dict(complete, strict=strict)
            return
        with self.materialized(self.module):
            custom_load_fn(src=state_dict, dst=self.module)

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Tensor]:
        """Return `module_state_dict()`; accelerate calls this name."""
        return self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)

    @engine_call
    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str | None = None,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the weights in the compute dtype.

        By default as safetensors in shards of 5 GiB, like `save_weights`; with a name that ends in
        .bin, .pt or .pth in one file for `torch.load`, for which all weights must fit in RAM. Other
        names raise `ConfigError`. Arguments are DeepSpeed's.

        Returns:
            True.
        """
        state = self._state(exclude_frozen=exclude_frozen_parameters)
        directory = Path(save_dir).expanduser()
        if save_filename is None:
            state.save(directory, None, "5GiB")
        elif save_filename.endswith(_PICKLED):
            with self.ranks.collective_section("saves weights"):
                values: dict[str, Tensor] = {}
                for name in state:  # all ranks read; rank 0 stores the values
                    value = state[name]
                    values |= {} if self.ranks.rank else {name: value}
                if not self.ranks.rank:
                    path = directory / save_filename
                    make_directories(path.parent)
                    with atomic_write(path) as file:
                        torch.save(values, file)
        else:
            raise ConfigError(
                f"save_filename is {save_filename!r}",
                remedy="leave it out for model.safetensors, in shards of 5 GiB; or a name that "
                f"ends in {', '.join(_PICKLED)}",
            )
        return True

    save_fp16_model = save_16bit_model

    def _state(self, *, exclude_frozen: bool) -> StateDict:
        state = Engine.state_dict(self)
        if not exclude_frozen:
            return state
        trained = {
            i for i, p in enumerate(self._components.partition.parameters) if p.requires_grad
        }
        selected = {name: i for name, i in state.parameters.items() if i in trained}
        return StateDict(self._values, selected, state.buffers, state.extra, master=False)

    # --- memory ----------------------------------------------------------------------------------

    @engine_call
    def compile(
        self,
        backend: str = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the forward of every block at its first call in training mode.

        Other modules are not compiled; offloading is unchanged. `backend` and `compile_kwargs` are
        passed to `torch.compile`; with other arguments, which have no effect, it warns. Raises
        `ConfigError` if there is no block, or CUDA graphs are requested. Arguments are DeepSpeed's.
        """
        self._check_usable()
        if schedule is not None or compiled_autograd_enabled:
            warnings.warn(
                "engine.compile() does not use schedule and compiled_autograd_enabled",
                InfinityWarning,
                stacklevel=2,
            )
        self._components.forwards.compile_units(backend=backend, **(compile_kwargs or {}))

    @property
    def is_compiled(self) -> bool:
        """Whether blocks are compiled, or will be at their first call."""
        return self._components.forwards.num_compiled > 0

    def empty_partition_cache(self) -> None:
        """Do nothing: the plan reserves all device memory, and there is no cache."""

    @engine_call
    def offload_states(
        self,
        include: Any = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Block until pending updates are written to RAM or disk; raise if state is on the GPU.

        The plan fixes the placement: device memory that it reserves is released by `close()` only.
        `include` has kinds of state, default all; `device` must be "cpu". Other arguments are
        accepted for compatibility and have no effect.

        Raises:
            ConfigError: The plan reserves GPU memory for these states; the message has sizes and
                the remedy.
        """
        self._check_usable()
        check_offload_states(self.plan, include, device)
        self.settle()

    def reload_states(self, non_blocking: bool = False) -> None:
        """Do nothing: `offload_states` moves no state that must be reloaded.

        Other arguments are accepted for compatibility and have no effect.
        """
        self._check_usable()

    def get_state_devices(self, state: OffloadStateTypeEnum) -> set[Any]:
        """Return the torch devices, and the string "disk", on which a kind of state is stored.

        Arguments are DeepSpeed's.
        """
        return state_devices(self.plan, self.device, state)

    def destroy(self) -> None:
        """Release everything except weights; see :meth:`Engine.close`.

        As in DeepSpeed, the module keeps its weights in their compute dtype, and the next
        `initialize` of the module uses them. After a failure of the engine they are lost.
        """
        if self._guard.in_creating_process() and not self._closed:
            self._close(restore=False, keep_weights=self._components.failure.error is None)
            self._destroyed = True
            _patch_trainer()

    def _check_open(self) -> None:
        if self._destroyed:
            raise EngineClosedError(
                "the engine was destroyed",
                because="engine.destroy() was called, as accelerate's free_memory() does",
                remedy="call initialize() on the module again: it has its weights",
            )
        super()._check_open()


def _patch_trainer() -> None:
    """Patch transformers' Trainer to prepare the module of a destroyed engine again.

    `Trainer.train()` begins with `accelerator.free_memory()`, which destroys the engine of an
    earlier `train()` or `evaluate()`, and then uses that engine as a wrapped model.
    """
    trainer: Any = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    original = getattr(trainer, "_wrap_model", None)
    if original is None or hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def wrap_model(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(model, DeepSpeedEngine) and model._destroyed:
            model = model.module
        return original(self, model, *args, **kwargs)

    trainer._wrap_model = wrap_model

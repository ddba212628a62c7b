"""The engine with DeepSpeed's calls, each with DeepSpeed's meaning."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infinity.engine import Engine
from infinity.errors import ConfigError, InfinityWarning, TrainingError
from infinity.files import atomic_write, make_directories
from infinity.offload.owner import exclusive
from infinity.plan.layout import Tier
from infinity.training.parameter_access import (
    OffloadDevice,
    OffloadStateTypeEnum,
    places_of,
    refuse_to_move,
)
from infinity.training.state_dict import StateDict

_PICKLED = (".bin", ".pt", ".pth")


def _always(value: Any) -> Callable[[Any], Any]:
    """A method that returns the same value always."""
    return lambda self: value


class DeepSpeedEngine(Engine):
    """`Engine` as scripts written for DeepSpeed know it; see docs/migrating-from-deepspeed.md."""

    # What became of each key, where the configuration was DeepSpeed's: `Translation`, else None.
    translation: Any = None
    # The configuration as `initialize` got it, and the loader that it made.
    config: Any = None
    training_dataloader: Any = None

    mp_world_size = 1
    cur_scale = Engine.loss_scale

    # --- batches ---------------------------------------------------------------------------------

    def train_batch_size(self) -> int:
        """Samples of an update: micro-batch x accumulation steps x ranks."""
        return self._micro_batch_size * self._window.share

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of a micro-batch, as the configuration or `initialize(batch_size=...)` says."""
        return self._micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of an update on each rank, unless a boundary is set by hand."""
        return self._window.length

    def get_batch_info(self) -> tuple[int, int, int]:
        """Samples of an update, of a micro-batch, and micro-batches of an update on each rank."""
        return self.train_batch_size(), self._micro_batch_size, self._window.length

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Another number of samples an update, by another number of micro-batches.

        Between updates only. Raises `ConfigError` where it is no multiple of the micro-batch, or
        where gradients rest in 16 bits, which cannot hold sums.
        """
        least = self._micro_batch_size * self.ranks.count
        steps, rest = divmod(train_batch_size, least)
        if rest or steps < 1:
            on_all = "" if self.ranks.count == 1 else f" on each of {self.ranks.count} ranks"
            raise ConfigError(
                f"train_batch_size {train_batch_size} is no multiple of the micro-batch of "
                f"{self._micro_batch_size} samples{on_all}",
                remedy=f"{max(steps, 1) * least}, or set_train_micro_batch_size() first",
            )
        self.set_gradient_accumulation_steps(steps)

    def set_gradient_accumulation_steps(self, steps: int) -> None:
        """Another number of micro-batches an update; as `set_train_batch_size`.

        Predictions of the plan stay those of the configuration.
        """
        self._check_usable()
        self._end_users_backward()
        if self._window.is_open:
            raise TrainingError(
                f"the window of {self._window.length} micro-batches has begun: "
                f"{self._window.micro_step} are behind us",
                remedy="change it right after the step() that updates, or zero_grad() first",
            )
        self._window.set_length(steps)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Another number of samples a micro-batch, for counting; loaders stay as they are."""
        self._set_micro_batch_size(micro_batch_size)

    @property
    def micro_steps(self) -> int:
        """Calls of `step()` since the run began."""
        return self._stepper.progress.micro_batches

    @property
    def global_samples(self) -> int:
        """Samples of all windows that are over, those of skipped steps too."""
        return self._stepper.progress.samples

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """No micro-batch in the block is the last of its window; `step()` is refused in it."""
        self._check_usable()
        self._window.no_sync += 1
        try:
            yield
        finally:
            self._window.no_sync -= 1

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """For several backwards before a step: gradients are summed as they come all the same."""
        self._check_usable()
        yield

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """Nothing to do: gradients are summed as they come."""

    # --- what the optimizer does -----------------------------------------------------------------

    def get_global_grad_norm(self) -> float | None:
        """Gradient norm of the last step, before clipping; None before the first."""
        return self.grad_norm

    def was_step_applied(self) -> bool:
        """Whether the last `step()` updated parameters: at a boundary, and not skipped."""
        return self._window.updated

    def get_lr(self) -> list[float]:
        """The learning rate of each parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """The momentum of each parameter group, or its betas."""
        groups = self.optimizer.param_groups
        return [group.get("momentum", group.get("betas")) for group in groups]

    # --- what was chosen -------------------------------------------------------------------------

    def fp16_enabled(self) -> bool:
        """Whether the run computes in fp16, with loss scaling."""
        return self.plan.precision.name == "fp16"

    def bfloat16_enabled(self) -> bool:
        """Whether the run computes in bf16."""
        return self.plan.precision.name == "bf16"

    amp_enabled = _always(False)  # apex is not used

    def zero_optimization(self) -> bool:
        """Whether the DeepSpeed configuration named a stage above 0."""
        return self.zero_optimization_stage() > 0

    def zero_optimization_stage(self) -> int:
        """The stage that the DeepSpeed configuration named, else 0; ranks share all at any."""
        rows = () if self.translation is None else self.translation.rows
        given = [row.given for row in rows if row.key == "zero_optimization.stage"]
        return int(given[0]) if given and given[0] not in (None, "auto") else 0

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether that stage is 2 or 3."""
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether that stage is 3."""
        return self.zero_optimization_stage() >= 3

    def zero_offload_optimizer(self) -> OffloadDevice | None:
        """Where the plan lets optimizer state rest: `.device` is cpu or nvme; None: not away."""
        return OffloadDevice.of({placement.state for placement in self.plan.placements})

    def zero_offload_param(self) -> OffloadDevice | None:
        """Where the plan lets weights rest; as `zero_offload_optimizer`."""
        return OffloadDevice.of({placement.weight for placement in self.plan.placements})

    def zero_cpu_offload(self) -> bool:
        """Whether the plan lets any optimizer state rest in RAM."""
        return any(placement.state is Tier.HOST for placement in self.plan.placements)

    def zero_has_nvme_offload(self) -> bool:
        """Whether the plan lets anything rest on disk."""
        return any(self.plan.memory[Tier.DISK].values())

    zero_gather_16bit_weights_on_model_save = _always(True)  # they are always saved whole

    # --- who trains together ---------------------------------------------------------------------

    @property
    def global_rank(self) -> int:
        """The number of this rank."""
        return self.ranks.rank

    @property
    def local_rank(self) -> int:
        """Its number on this machine."""
        return self.ranks.local_rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.ranks.count

    dp_world_size = world_size

    def get_data_parallel_rank(self) -> int:
        """`global_rank`: every rank has data of its own."""
        return self.ranks.rank

    def get_data_parallel_world_size(self) -> int:
        """`world_size`."""
        return self.ranks.count

    def get_data_parallel_group(self) -> Any:
        """torch's default group; None where there is one process."""
        return None if self.ranks.count == 1 else torch.distributed.group.WORLD

    get_model_parallel_rank = _always(0)
    get_sequence_parallel_world_size = _always(1)
    get_sequence_parallel_group = _always(None)

    # --- values ----------------------------------------------------------------------------------

    @exclusive
    def module_state_dict(
        self,
        destination: dict[str, Tensor] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Tensor]:
        """All values of the module at once, on the CPU, in the dtype it computes in.

        For one at a time: `state_dict()`. `keep_vars` is not looked at: values are copies.
        """
        state = self._state(exclude_frozen=exclude_frozen_parameters)
        target = {} if destination is None else destination
        target.update({prefix + name: state[name] for name in state})
        return target

    @exclusive
    def load_module_state_dict(
        self,
        state_dict: Mapping[str, Tensor],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False,
    ) -> None:
        """`load_state_dict`; `custom_load_fn(src=, dst=)` gets the module, its values at hand."""
        if custom_load_fn is None:
            self.load_state_dict(state_dict, strict=strict)
            return
        with self.materialized(self.module):
            custom_load_fn(src=state_dict, dst=self.module)

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Tensor]:
        """`module_state_dict()`, by the name under which accelerate asks for it."""
        return self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)

    @exclusive
    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str | None = None,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the weights as they compute, as `save_weights` does: safetensors, shard by shard.

        With a `save_filename` that ends in .bin, .pt or .pth one file for `torch.load`, which
        takes RAM for all weights at once. Raises `ConfigError` for other names.
        """
        state = self._state(exclude_frozen=exclude_frozen_parameters)
        directory = Path(save_dir).expanduser()
        if save_filename is None:
            state.save(directory, None, "5GiB")
        elif save_filename.endswith(_PICKLED):
            with self.ranks.settle("saves weights"):
                values: dict[str, Tensor] = {}
                for name in state:  # all ranks read, and the first keeps
                    value = state[name]
                    values |= {} if self.ranks.rank else {name: value}
                if not self.ranks.rank:
                    make_directories(directory)
                    with atomic_write(directory / save_filename) as file:
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
        state = self.state_dict()
        if not exclude_frozen:
            return state
        required = {i for i, p in enumerate(self._parts.cut.parameters) if p.requires_grad}
        kept = {name: i for name, i in state.parameters.items() if i in required}
        return StateDict(self._values, kept, state.buffers, master=False)

    # --- memory ----------------------------------------------------------------------------------

    @exclusive
    def compile(
        self,
        backend: str = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile every block's forward, when it is first called in training mode.

        `compile_kwargs` go to `torch.compile`. The rest of the model runs as it is; weights go on
        being moved. `schedule` and compiled autograd are not used, and a warning says so.

        Raises `ConfigError` where there is no block to compile, or for CUDA graphs.
        """
        self._check_usable()
        if schedule is not None or compiled_autograd_enabled:
            warnings.warn(
                "engine.compile() does not use schedule and compiled_autograd_enabled",
                InfinityWarning,
                stacklevel=2,
            )
        self._parts.forwards.compile_units(backend=backend, **(compile_kwargs or {}))

    @property
    def is_compiled(self) -> bool:
        """Whether blocks are, or will be, compiled."""
        return self._parts.forwards.num_compiled > 0

    def empty_partition_cache(self) -> None:
        """Nothing to do: device memory is what the plan reserved, and nothing is cached beside."""

    @exclusive
    def offload_states(
        self,
        include: Any = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Ends with all states in `include` (default: all) off the compute device, or raises.

        Where the plan keeps them in RAM or on disk anyway, or the CPU computes, that is so when
        everything owed is written; then this waits for it. What the plan reserved on a GPU stays
        there as long as the engine lives: `ConfigError` says how much and how to plan otherwise.
        """
        self._check_usable()
        refuse_to_move(self.plan, include, device)
        self.settle()

    def reload_states(self, non_blocking: bool = False) -> None:
        """Nothing to do: `offload_states` took nothing from where it is needed."""
        self._check_usable()

    def get_state_devices(self, state: OffloadStateTypeEnum) -> set[Any]:
        """Where a kind of state rests: torch devices, and "disk"."""
        return places_of(self.plan, self.device, state)

    def destroy(self) -> None:
        """`close()`."""
        self.close()

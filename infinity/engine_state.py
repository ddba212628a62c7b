"""What an engine holds, as its user sees it: values read, edited, saved and loaded."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from infinity.errors import ConfigError, EngineClosedError
from infinity.optim.offloaded import OffloadedOptimizer
from infinity.parts import Parts
from infinity.plan.plan import Plan
from infinity.training.checkpoints import Checkpoints, Wanted
from infinity.training.optimizer_state import write_state
from infinity.training.owner import Owner, exclusive
from infinity.training.run_state import Stateful
from infinity.training.state_dict import StateDict, state_dict_of
from infinity.training.stepper import Stepper
from infinity.training.values import Values, targets


class EngineState:
    """The half of `Engine` that is about its state; `Engine` makes what it uses."""

    module: nn.Module
    plan: Plan
    optimizer: OffloadedOptimizer
    _parts: Parts
    _stepper: Stepper
    _values: Values
    _checkpoints: Checkpoints
    _owner: Owner
    _index_of: dict[int, int]
    _closed: bool

    # --- values ----------------------------------------------------------------------------------

    @exclusive
    def state_dict(self, *, master: bool = False) -> StateDict:
        """Names to full values, read tensor by tensor as they are asked for.

        With `master`, trained parameters come as fp32 masters, bit for bit.
        """
        self._check_usable()
        return state_dict_of(self.module, self._values, self._index_of, master=master)

    @exclusive
    def load_state_dict(self, state: Mapping[str, Tensor], *, strict: bool = True) -> None:
        """Take full values, tensor by tensor; fp32 values become masters as they are.

        Raises `ConfigError` naming all missing, unexpected and misshapen entries, before
        anything is changed.
        """
        self._check_usable()
        self.state_dict().load(state, strict=strict)

    @exclusive
    def save_weights(
        self,
        directory: str | os.PathLike[str],
        dtype: torch.dtype | str | None = None,
        max_shard: int | str = "5GiB",
    ) -> list[Path]:
        """Write safetensors that Hugging Face and `load_weights` take; returns the files.

        Tensor by tensor, out of any homes, persistent buffers included; tied weights once, under
        their first name. `dtype`: None is the compute dtype; torch.float32 or "fp32" the exact
        master; "bf16"; "fp16". Buffers, and frozen parameters that are not floats, keep theirs.

        Weights saved there before are replaced as a whole: whoever looks, also after a kill -9,
        finds all old ones or all new ones. Only one save at a time can be in a directory.

        Waits for updates that are owed. Raises `ConfigError`, `DoesNotFitError` (disk full) or
        `MachineError` (also while somebody else saves there); training may go on after any of
        them, and files saved there before stay.
        """
        self._check_usable()
        return self.state_dict().save(Path(directory), dtype, max_shard)

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
        value = self._parts.gradients.read(index).view(parameter.shape)
        state = self._stepper.progress.loss_scale
        return value if state is None else value.float() / state.scale

    @exclusive
    def set_gradient(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Put another gradient in the place of what was accumulated in this window.

        `value` has the parameter's shape, and no loss scale. It is kept in the dtype that gradients
        rest in: fp32 where `gradient_accumulation_steps` is above 1, else the compute dtype.
        """
        self._check_usable()
        (index,) = targets(parameter, self._index_of)
        self._check_value(index, value)
        state = self._stepper.progress.loss_scale
        scaled = value.float() * (1.0 if state is None else state.scale)
        self._parts.mover.await_consumed(self._parts.hooks.unit_of(index))
        self._parts.gradients.replace(index, scaled.reshape(-1))

    @exclusive
    def set_optimizer_state(self, parameter: nn.Parameter, name: str, value: Tensor) -> None:
        """Replace one moment of a parameter, by torch's name: "exp_avg", "exp_avg_sq", ...

        `value` has the parameter's shape; it is stored as `optimizer.moments` says. What there is
        to read: `engine.optimizer.read_state(parameter)`. Raises `ConfigError` for other names, and
        where an optimizer of torch's keeps the state.
        """
        self._check_usable()
        (index,) = targets(parameter, self._index_of)
        self._check_value(index, value)
        self._values.take_back_all()
        self._values.settle()
        layout, segment = self._values.place_of(index)
        hyper = self.optimizer.hypers(self._index_of).get(index)
        self._values.guard(layout.index)
        parts = self._parts
        write_state(
            parts.store, parts.updater, parts.kernels, (layout, segment), hyper, name, value
        )

    def _check_value(self, index: int, value: Tensor) -> None:
        _, segment = self._values.place_of(index)
        if not segment.trained:
            raise ConfigError(f"{segment.name!r} is frozen and has no optimizer state")
        if tuple(value.shape) != segment.shape:
            raise ConfigError(
                f"{segment.name!r} has shape {segment.shape}, got {tuple(value.shape)}"
            )

    # --- checkpoints -----------------------------------------------------------------------------

    def _end_users_backward(self) -> None:
        """See `Engine`: a `loss.backward()` that may have come counts from now on."""
        raise NotImplementedError

    def _forget_arrivals(self) -> None:
        """See `Engine`: gradients that have come are accounted for."""
        raise NotImplementedError

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
        self._check_usable(may_wait=True)
        self._end_users_backward()
        return self._checkpoints.save(
            Path(directory).expanduser(), tag, client_state or {},
            save_latest=save_latest, keep_last=keep_last, wait=wait,
        )  # fmt: skip

    @property
    def saving(self) -> bool:
        """Whether a checkpoint is being copied behind the caller's back."""
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

        Returns (path, client_state); (None, None) with a warning where there is none. Without
        `load_optimizer_states` weights become fp32 masters, and moments stay as they are; with
        `load_module_only` counters, schedule and random generators stay as well. Raises
        `CheckpointError` naming all that does not fit before anything is changed, or the first
        damaged tensor: the engine is unusable then until a checkpoint is loaded.
        """
        self._owner.check()
        self._check_open()
        self._parts.mover.verify(may_wait=True)
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
        self._forget_arrivals()  # of the state before
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

    @exclusive
    def settle(self) -> None:
        """Wait until no update is owed and everything is home."""
        self._check_usable()
        self._values.settle()
        for unit in range(len(self.plan.units)):
            self._parts.store.settle_writes(unit)

    def _check_usable(self, *, may_wait: bool = False) -> None:
        self._owner.check()
        self._check_open()
        self._parts.mover.check()
        self._parts.mover.verify(may_wait=may_wait)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError("the engine is closed", remedy="make a new one")

"""State of a run that is not stored in a tier: counters, groups, schedule, generators.

It is plain data by parameter name, independent of the placement. Together with the weights,
moments, buffers and gradients it determines the result of the next step.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Protocol

import torch

from infinity.errors import CheckpointError, InfinityWarning, first_lines
from infinity.offload.window import AccumulationWindow
from infinity.optim.offloaded import OffloadedOptimizer, mark_stepped
from infinity.optim.update import KernelUpdater, Updater
from infinity.training.loss_scale import state_to_dict
from infinity.training.rng_state import capture_rng, changed_generators, restore_rng
from infinity.training.step import StepRunner, TrainingCounters

# The loss scale is saved under a key of its own, since only fp16 has one.
_COUNTERS = tuple(field.name for field in fields(TrainingCounters) if field.name != "loss_scale")
_SCHEDULE_REMEDY = (
    "give initialize() the same scheduler, or load_checkpoint(..., load_lr_scheduler_states=False)"
)
_MEMBER_KEYS = ("params", "param_names")  # a group's keys that name its parameters


class Stateful(Protocol):
    """Object whose state is saved with the run; see `engine.register_state`."""

    def state_dict(self) -> Any:
        """Return plain data: numbers, strings, lists, dicts, tensors, arrays."""

    def load_state_dict(self, state: Any) -> Any:
        """Restore data that `state_dict` returned."""


def _check_compatible(current: Mapping[str, Any], saved: Mapping[str, Any], what: str) -> None:
    """Raise `CheckpointError` if a saved value cannot replace the current one of its name."""
    for name, value in current.items():
        if name in saved and not _is_compatible(saved[name], value):
            raise CheckpointError(
                f"the checkpoint's {name} of {what} is {saved[name]!r:.60}, and {value!r:.60} here",
                because="it was changed, or was saved with another optimizer or schedule",
            )


def _is_compatible(saved: Any, current: Any) -> bool:
    """Return True if one value may replace the other: equal types, lists of equal length."""
    if isinstance(current, torch.Tensor) or isinstance(saved, torch.Tensor):
        return True
    if isinstance(current, list | tuple) and isinstance(saved, list | tuple):
        return len(current) == len(saved) and all(map(_is_compatible, saved, current))
    flags = [value is None or isinstance(value, bool) for value in (current, saved)]
    if any(flags):
        return all(flags)
    pair = current, saved
    return all(isinstance(v, int | float) for v in pair) or type(current) is type(saved)


class RunState:
    """Captures and restores the state of a run; `names` has parameter names by index."""

    def __init__(
        self,
        step_runner: StepRunner,
        window: AccumulationWindow,
        optimizer: OffloadedOptimizer,
        updater: Updater,
        index_of: Mapping[int, int],
        names: Sequence[str],
    ) -> None:
        self._registered: dict[str, Stateful] = {}
        self._loaded: dict[str, Any] = {}  # states of objects that are not registered yet
        self._rng: dict[str, Any] | None = None  # generator states that were restored last
        self._resumed = False  # by `initialize`, before the first forward
        self._step_runner = step_runner
        self._window = window
        self._optimizer = optimizer
        self._updater = updater
        self._index_of = index_of
        self._names = names

    def register(self, name: str, item: Stateful) -> None:
        """Save and restore the state of this object too; restores it now if it was loaded."""
        self._registered[name] = item
        if name in self._loaded:
            self._load(name, item)

    def _load(self, name: str, item: Stateful) -> None:
        """Restore the loaded state of an object; raise `CheckpointError` if it refuses it."""
        try:
            item.load_state_dict(self._loaded.pop(name))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the state that was registered as {name!r} cannot be loaded: "
                f"{type(error).__name__}: {first_lines(error)}",
                because="another program saved it, or the object has changed since",
                remedy="load another checkpoint, or register the object that saved this state",
            ) from error

    def capture(self) -> dict[str, Any]:
        """Return the current state; no step may be in progress."""
        scheduler = self._step_runner.lr_scheduler
        counters, window = self._step_runner.counters, self._window
        scale = counters.loss_scale
        position = {"micro_step": window.micro_step, "backwards": window.backwards}
        return {
            "progress": {name: getattr(counters, name) for name in _COUNTERS} | position,
            "loss_scale": None if scale is None else state_to_dict(scale),
            "steps": dict(zip(self._names, self._step_runner.steps, strict=True)),
            "groups": [
                {
                    "parameters": self._members(group),
                    "values": {key: v for key, v in group.items() if key not in _MEMBER_KEYS},
                }
                for group in self._optimizer.param_groups
            ],
            "kept": {self._names[i]: kept for i, kept in self._updater.extra_state().items()},
            "rounding_seed": self._updater.seed if isinstance(self._updater, KernelUpdater) else 0,
            "scheduler": None if scheduler is None else scheduler.state_dict(),
            "scheduler_type": "" if scheduler is None else type(scheduler).__name__,
            "rng": capture_rng(),
            "registered": {name: item.state_dict() for name, item in self._registered.items()},
        }

    def check(self, state: Mapping[str, Any], *, optimizer: bool, scheduler: bool) -> None:
        """Raise `CheckpointError` if the state does not fit this run. Changes nothing."""
        required = {"progress", "steps", "groups", "kept", "scheduler", "rng", "registered"}
        missing = sorted(required - set(state))
        if missing:
            raise CheckpointError(f"the checkpoint's run state lacks {', '.join(missing)}")
        known_counters = {*_COUNTERS, "micro_step", "backwards"}
        if not {"micro_step", "backwards"} <= set(state["progress"]) <= known_counters:
            raise CheckpointError("the checkpoint's counters are not those of this version")
        if optimizer:
            self._check_groups(state["groups"])
            self._check_scale(state)
        schedule = self._step_runner.lr_scheduler
        has_schedule = schedule is not None
        if scheduler and schedule is not None and state["scheduler"] is not None:
            saved_type = state.get("scheduler_type", "")  # not in checkpoints of earlier versions
            if saved_type and saved_type != type(schedule).__name__:
                raise CheckpointError(
                    f"the checkpoint's learning rate schedule is a {saved_type}, this engine's a "
                    f"{type(schedule).__name__}",
                    remedy=_SCHEDULE_REMEDY,
                )
            _check_compatible(
                schedule.state_dict(), state["scheduler"], "the learning rate schedule"
            )
        if scheduler and has_schedule != (state["scheduler"] is not None):
            raise CheckpointError(
                f"the checkpoint has {'no' if has_schedule else 'a'} learning rate schedule, this "
                f"engine has {'one' if has_schedule else 'none'}",
                remedy=_SCHEDULE_REMEDY,
            )
        not_saved = sorted(set(self._registered) - set(state["registered"]))
        if not_saved:
            raise CheckpointError(
                f"the checkpoint has no state of {', '.join(map(repr, not_saved))}",
                because="they were registered with engine.register_state after it was saved",
                remedy="register them after load_checkpoint",
            )

    def _check_scale(self, state: Mapping[str, Any]) -> None:
        """Raise `CheckpointError` if gradients of an open window have another constant scale."""
        rules = self._step_runner.scale_rules
        saved = state.get("loss_scale")
        is_open = state["progress"]["micro_step"] or state["progress"]["backwards"]
        if rules is None or rules.dynamic or saved is None or not is_open:
            return
        if saved["scale"] == rules.initial:
            return
        raise CheckpointError(
            f"the checkpoint was saved within an accumulation window whose gradients have the "
            f"loss scale {saved['scale']:g}; this engine has {rules.initial:g}",
            remedy=f"loss_scale.value: {saved['scale']:g}, or "
            "load_checkpoint(..., load_optimizer_states=False)",
        )

    def restore(
        self, state: Mapping[str, Any], *, optimizer: bool = True, scheduler: bool = True
    ) -> None:
        """Restore a state that `check` accepted; generators last."""
        try:
            self._restore(state, optimizer=optimizer, scheduler=scheduler)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise CheckpointError(
                f"the checkpoint's run state cannot be restored: {error!r}",
                because="it was made by another program, or the registered states have changed",
            ) from error

    def _restore(self, state: Mapping[str, Any], *, optimizer: bool, scheduler: bool) -> None:
        rules = self._step_runner.scale_rules
        scale = self._step_runner.counters.loss_scale
        saved_scale = state.get("loss_scale")
        if rules is not None and optimizer and saved_scale is not None:
            scale = rules.restored(saved_scale)
        counters = dict(state["progress"])
        micro_step, backwards = int(counters.pop("micro_step")), int(counters.pop("backwards"))
        progress = TrainingCounters(**counters, loss_scale=scale)
        self._window.clear()  # without optimizer states, gradients are not loaded either
        if optimizer:
            for group, saved in zip(self._optimizer.param_groups, state["groups"], strict=True):
                group.update({k: v for k, v in saved["values"].items() if k not in _MEMBER_KEYS})
            # Ranges of a stack of experts share its name, and have equal states.
            kept = state["kept"]
            self._updater.load_extra_state(
                {i: kept[n] for i, n in enumerate(self._names) if n in kept}
            )
            self._step_runner.steps[:] = [state["steps"][name] for name in self._names]
            if isinstance(self._updater, KernelUpdater):
                self._updater.seed = state["rounding_seed"]
            self._window.micro_step, self._window.backwards = micro_step, backwards
        self._step_runner.counters = progress
        schedule = self._step_runner.lr_scheduler
        if scheduler and schedule is not None:
            schedule.load_state_dict(state["scheduler"])
        if progress.global_steps:
            mark_stepped(self._optimizer)
        self._loaded = dict(state["registered"])
        for name, item in self._registered.items():
            self._load(name, item)
        self._rng = state["rng"]
        self.restore_rng()

    def restore_rng(self) -> bool:
        """Restore the generators again; return False if nothing was restored before."""
        self._resumed = False
        if self._rng is not None:
            restore_rng(self._rng)
        return self._rng is not None

    def resumed(self) -> None:
        """Mark the state as restored by `initialize`, until the first forward."""
        self._resumed = True

    def warn_if_rng_used(self) -> None:
        """Warn if random numbers were drawn since the run was resumed."""
        if not self._resumed or self._rng is None:
            return
        self._resumed = False
        changed = changed_generators(self._rng)
        if changed:
            warnings.warn(
                f"random numbers were drawn ({', '.join(changed)}) between initialize(), which put "
                "the generators back where the last committed step left them, and this forward: "
                "unless the training loop draws them in every step, dropout differs from an "
                "undisturbed run; engine.restore_random_state() right before the loop puts them "
                "back again",
                InfinityWarning,
                stacklevel=4,
            )

    def adopt(self, global_steps: int, steps: Mapping[str, int]) -> None:
        """Set the counters from an imported checkpoint, which has no run state."""
        scale = self._step_runner.counters.loss_scale
        self._step_runner.counters = TrainingCounters(global_steps=global_steps, loss_scale=scale)
        self._step_runner.steps[:] = [steps.get(name, 0) for name in self._names]
        if global_steps:
            mark_stepped(self._optimizer)

    def _members(self, group: Mapping[str, Any]) -> list[str]:
        return [self._names[self._index_of[id(p)]] for p in group["params"]]

    def _check_groups(self, saved: Any) -> None:
        groups = self._optimizer.param_groups
        if len(saved) != len(groups):
            raise CheckpointError(
                f"the checkpoint has {len(saved)} parameter groups, this engine {len(groups)}",
                remedy="give initialize() the same groups, or "
                "load_checkpoint(..., load_optimizer_states=False)",
            )
        for number, (group, entry) in enumerate(zip(groups, saved, strict=True)):
            members, saved_members = set(self._members(group)), set(entry["parameters"])
            if members != saved_members:
                examples = sorted(members ^ saved_members)[:3]
                raise CheckpointError(
                    f"parameter group {number} holds other parameters than in the checkpoint: "
                    f"{', '.join(examples)}, ...",
                    remedy="give initialize() the same groups, or "
                    "load_checkpoint(..., load_optimizer_states=False)",
                )
            _check_compatible(group, entry["values"], f"parameter group {number}")

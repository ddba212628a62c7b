"""Interfaces of update rules and updaters, and their implementation for the built-in rules.

The optimizer pass splits chunks into tiles (ranges of a parameter with all their state in one
memory), and an `Updater` steps each tile: with kernels in this module, with any torch optimizer in
`adapter.py`. Neither knows units, tiers or files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from infinity.errors import ConfigError
from infinity.optim.cpu import CpuKernels, Piece
from infinity.optim.moments import Moment
from infinity.optim.rules import RULES, RuleParams, lossy_notes, matrix_steps, reserved_moments
from infinity.types import MomentFormat


@dataclass(frozen=True, slots=True)
class Tile:
    """Range of a flat parameter from element `first`, with state and gradient, for one update.

    `weight` is fp32 with `master_state` None, bf16 with an int16 residual, or fp16 with the fp32
    master; `gradient` is fp32, or of the weight's dtype. All are 1-D views in one memory (of the
    device for device updates), and are updated in place. `parameter` is the parameter's index,
    `shape` its full shape, `rule_params` its entry of `OffloadedOptimizer.params_by_index`, and
    `step` the number of this update, from 1. Tiles of one parameter and step come in order.
    """

    parameter: int
    shape: tuple[int, ...]
    first: int
    weight: Tensor
    master_state: Tensor | None
    moments: tuple[Moment, ...]
    gradient: Tensor
    rule_params: Any
    step: int


class Updater(Protocol):
    """Runs the steps of an update rule on tiles."""

    def check(self, params_by_index: Mapping[int, Any]) -> None:
        """Raise `ConfigError` if no step is possible with these groups; changes nothing."""

    def update(self, tiles: Sequence[Tile], grad_scale: float) -> None:
        """Update tiles in place; gradients are multiplied by `grad_scale` first."""

    def begin(self, params_by_index: Mapping[int, Any], steps: Mapping[int, int]) -> None:
        """Begin a committed step, whose tiles are those of the parameters in `steps`.

        `params_by_index` has all parameters of the groups, including those without a gradient.
        """

    def extra_state(self) -> dict[int, dict[str, Any]]:
        """Return the serializable state of each parameter, without moments."""

    def load_extra_state(self, saved: Mapping[int, Mapping[str, Any]]) -> None:
        """Restore state returned by `extra_state`."""

    def state_of(
        self,
        parameter: int,
        rule_params: Any,
        moments: Sequence[Moment],
        shape: tuple[int, ...],
        step: int,
    ) -> dict[str, Any]:
        """Return the state of a full parameter, by torch's names, as new tensors."""


class Rule(Protocol):
    """Interface of an update rule for the engine: its state, and its updater.

    `moments` has the format of each moment, set by `reserve`. With `needs_full`, tiles are full
    parameters. For `matrix_steps` see `infinity.optim.rules.matrix_steps`.
    """

    name: str
    moments: tuple[MomentFormat, ...]
    needs_full: bool
    matrix_steps: int
    notes: tuple[str, ...]

    def capture(self, group: Mapping[str, Any]) -> Any:
        """Return the current values of a group; raises `ConfigError` for invalid ones."""

    def reserve(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Set `moments` for these groups; later values of groups must not need more."""

    def tile_elements(self, largest: int) -> int:
        """Return the elements of a tile buffer, given those of the largest parameter."""

    def initial(self, captured: Any) -> tuple[float, ...]:
        """Return the initial values of moments; empty for zeros."""

    def updater(
        self, kernels: CpuKernels, names: Sequence[str], largest: int, seed: int
    ) -> Updater:
        """Return the updater. `names` are those of the parameters by index."""


class BuiltInRule:
    """One of the built-in rules; see `Rule`."""

    def __init__(self, name: str, moments: MomentFormat = MomentFormat.FP32) -> None:
        self.name = name
        self.needs_full = False  # for all parameters; Muon needs it for matrices
        self.moments: tuple[MomentFormat, ...] = ()
        self.notes = lossy_notes(moments)
        self.matrix_steps = 0
        self._format = moments
        self._reserved = False
        self._matrices: set[int] = set()  # ids of the parameters stored as full matrices

    def capture(self, group: Mapping[str, Any]) -> RuleParams:
        """Return the current values of a group; raises `ConfigError` if they need other state."""
        rule_params = RULES[self.name].of(group)
        if self._reserved and rule_params.num_moments > len(self.moments):
            name = rule_params.switch
            raise ConfigError(
                f"group[{name!r}] is {group[name]}, but was 0 when the engine was made",
                because=f"no memory was reserved for the state of {name}",
                remedy=f"set it back to 0 and call step() again; to use {name} later, start with "
                f"optimizer.{name} above 0: a schedule may change it then",
            )
        use_muon = not rule_params.kernel
        matrices = self._matrices
        if (
            (use_muon or matrices)
            and self._reserved
            and any((id(p) in matrices) != use_muon for p in group.get("params", ()))
        ):
            raise ConfigError(
                f"use_muon is {use_muon} for parameters that began with {not use_muon}",
                because="their placement and layout were chosen for it when the engine was made",
                remedy="restore it and call step() again; or make an engine with these groups",
            )
        return rule_params

    def reserve(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Reserve the moments of the group that needs the most."""
        self.moments = reserved_moments(self.name, groups, self._format)
        self.matrix_steps = matrix_steps(self.name, groups)
        matrices = [group for group in groups if not self.capture(group).kernel]
        self._matrices = {id(p) for group in matrices for p in group.get("params", ())}
        self._reserved = True

    def tile_elements(self, largest: int) -> int:
        """Return 0: the kernels need no tile buffers."""
        return 0

    def initial(self, captured: RuleParams) -> tuple[float, ...]:
        """Return initial values of moments other than zeros, which few rules have."""
        return captured.initial if any(captured.initial) else ()

    def updater(
        self, kernels: CpuKernels, names: Sequence[str], largest: int, seed: int
    ) -> KernelUpdater:
        """Return an updater that uses the kernels."""
        return KernelUpdater(kernels, names, seed)


class KernelUpdater:
    """Updates tiles by the kernels; see `Updater`.

    `names` are those of the parameters, for the seeds of rounding.
    """

    def __init__(self, kernels: CpuKernels, names: Sequence[str], seed: int) -> None:
        self.kernels = kernels
        self._names = names
        self.seed = seed
        # By parameter, the step that made moments with a `switch` (SGD's buffer): torch's state
        # lacks them until then, while their memory is always reserved.
        self._first_steps: dict[int, int] = {}

    def update(self, tiles: Sequence[Tile], grad_scale: float) -> None:
        """Update all tiles in place, as one job."""
        self.kernels.update_all(self.pieces(tiles, grad_scale))

    def pieces(self, tiles: Sequence[Tile], grad_scale: float) -> list[Piece]:
        """Return the kernel arguments of the tiles, on any device."""
        return [self._piece(tile, grad_scale) for tile in tiles]

    def _piece(self, tile: Tile, grad_scale: float) -> Piece:
        rule_params = self._with_first_step(tile.parameter, tile.rule_params, tile.step).with_shape(
            tile.shape
        )
        moments = tile.moments[: rule_params.num_moments]
        exact = all(moment.format.is_exact for moment in moments)
        name = self._names[tile.parameter]
        return Piece(
            tile.weight,
            tile.master_state,
            moments,
            tile.gradient,
            rule_params,
            tile.step,
            grad_scale,
            0 if exact else rounding_key(self.seed, name, tile.step),
            tile.first,
        )

    def check(self, params_by_index: Mapping[int, Any]) -> None:
        """Do nothing: `BuiltInRule.capture` has checked the groups."""

    def _with_first_step(self, parameter: int, rule_params: RuleParams, step: int) -> RuleParams:
        """Return the values for a parameter, including the step that made its moments."""
        if not rule_params.switch or not rule_params.num_moments:
            return rule_params
        return rule_params.with_first_step(self._first_steps.setdefault(parameter, step))

    def begin(self, params_by_index: Mapping[int, Any], steps: Mapping[int, int]) -> None:
        """Record the step of parameters whose moments it makes."""
        for parameter, step in steps.items():
            self._with_first_step(parameter, params_by_index[parameter], step)

    def extra_state(self) -> dict[int, dict[str, Any]]:
        """Return the serializable state of each parameter, without moments."""
        return {parameter: {"begins": step} for parameter, step in self._first_steps.items()}

    def load_extra_state(self, saved: Mapping[int, Mapping[str, Any]]) -> None:
        """Restore state returned by `extra_state`."""
        self._first_steps = {parameter: entry["begins"] for parameter, entry in saved.items()}

    def moment_names(self, parameter: int, rule_params: RuleParams) -> tuple[str, ...]:
        """Return torch's names of the moments that `state_of` returns for this parameter."""
        begun = not rule_params.switch or parameter in self._first_steps
        return rule_params.state_names[: rule_params.num_moments] if begun else ()

    def state_of(
        self,
        parameter: int,
        rule_params: RuleParams,
        moments: Sequence[Moment],
        shape: tuple[int, ...],
        step: int,
    ) -> dict[str, Any]:
        """Return moments decoded to fp32, and the step count if torch's state has it.

        SGD's buffer is included from its first step with momentum on, as in torch.
        """
        state: dict[str, Any] = {"step": step_count(step)} if rule_params.counts else {}
        if rule_params.switch:
            present = moments if parameter in self._first_steps else ()
        else:
            present = moments[: rule_params.num_moments]
        for name, moment, nonnegative in zip(
            rule_params.state_names, present, rule_params.nonnegative, strict=False
        ):
            values = torch.empty(moment.values.numel(), dtype=torch.float32, device="cpu")
            self.kernels.decode(moment, values, signed=not nonnegative)
            state[name] = values.view(shape)
        return state


def step_count(steps: Any) -> Tensor:
    """Return a step count as an fp32 CPU tensor, like torch, independent of its defaults."""
    return torch.tensor(float(steps), dtype=torch.float32, device="cpu")


def rounding_key(seed: int, name: str, step: int) -> int:
    """Return the 64-bit rounding key of a parameter and step; independent of placement."""
    digest = hashlib.blake2b(f"{seed}\0{name}\0{step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")

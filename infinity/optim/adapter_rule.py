"""The update rule of an adapted optimizer, and its check before every step.

[Note: small parameters step first]
Before a step is committed, small parameters take it: all together as in plain torch, and tile by
tile as in the engine. Both must agree in every bit of parameters, state and group entries;
otherwise the step is rejected, and nothing has changed. The small parameters have the entries that
the groups have in this step, edits included, and the scalars that the optimizer stored for the
model's parameters (their step counts). So behavior that begins at some step is detected in that
step, also in a resumed run. For each shape, one parameter has taken all checks since the engine was
made, and one begins: an entry that is switched on may need state that was not planned, or that
older parameters lack.

Thus a value that is computed from several parameters of one call is detected if the optimizer uses
it under a condition on counts, entries or shapes, which small parameters share with the model. A
condition on the model's values is not covered: a norm of all gradients that is only used above a
threshold is detected only if the small parameters exceed it. Their gradients cycle through three
magnitudes. No check excludes a global variable.

Groups of one kind differ only in rates (nonzero floats), such as a learning rate per layer. A few
groups of each kind step in a check, in rotation: a hundred would take half a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infinity.errors import ConfigError
from infinity.optim.adapter import (
    COUPLING_CAUSE,
    COUPLING_REMEDY,
    TILE_ELEMENTS,
    AdaptedOptimizer,
    AdapterFacts,
    Captured,
    Group,
    are_rates,
    copied,
    differences,
    on_cpu,
    same,
    small_shape,
)
from infinity.optim.adapter_probe import SCALES, Small, Trial
from infinity.optim.cpu import CpuKernels
from infinity.types import MomentFormat

GROUPS_PER_KIND = 4  # groups per check; more than SCALES, so that each group steps with each scale


class AdapterRule:
    """The update rule of an adapted optimizer; see `infinity.optim.update.Rule`."""

    def __init__(self, facts: AdapterFacts) -> None:
        self.facts = facts
        self.name = facts.name
        self.needs_full = facts.needs_full
        self.matrix_steps = 0
        self.moments = (MomentFormat.FP32,) * facts.num_moments
        tiles = "full parameters" if facts.needs_full else f"tiles of {TILE_ELEMENTS} elements"
        self.notes: tuple[str, ...] = (
            f"{facts.name} is run by torch on {tiles}: slower than the built-in rules",
        )

    def capture(self, group: Mapping[str, Any]) -> Captured:
        """Copy the group's entries."""
        entries = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        shapes = {small_shape(p.shape) for p in group["params"]}
        return Captured(copied(entries), frozenset(shapes))

    def reserve(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Copy the groups; the trial has determined `moments` from them."""
        self._planned = [self.capture(group).entries for group in groups if group["params"]]

    def tile_elements(self, largest: int) -> int:
        """Return the size of full parameters, or of tiles that torch steps in one thread."""
        return largest if self.needs_full else min(largest, TILE_ELEMENTS)

    def initial(self, captured: Any) -> tuple[float, ...]:
        """Return an empty tuple: an adapted optimizer initializes its state itself."""
        return ()

    def updater(
        self, kernels: CpuKernels, names: Sequence[str], largest: int, seed: int
    ) -> CheckedOptimizer:
        """Return the adapted optimizer, with its check before every step."""
        size = self.tile_elements(largest)
        return CheckedOptimizer(self.facts, size, kernels, names, self._planned)


@dataclass(frozen=True)
class _CheckedGroup:
    """A group before a step, the shapes of its parameters, and the scalars of one parameter."""

    group: Group
    shapes: frozenset[tuple[int, ...]]
    scalars: Mapping[str, Any]

    def is_same_kind(self, other: _CheckedGroup) -> bool:
        """Return True if both groups are of one kind; see [Note: small parameters step first]."""
        given, other_given = self.group.given, other.group.given
        return (
            self.shapes == other.shapes
            and given.keys() == other_given.keys()
            and all(
                same(given[k], other_given[k]) or are_rates(given[k], other_given[k]) for k in given
            )
            and same(self.scalars, other.scalars)
        )


class CheckedOptimizer(AdaptedOptimizer):
    """An adapted optimizer that takes each step on small parameters first."""

    def __init__(
        self,
        facts: AdapterFacts,
        tile_elements: int,
        kernels: CpuKernels,
        names: Sequence[str],
        planned: Sequence[Mapping[str, Any]],
    ) -> None:
        super().__init__(facts, tile_elements, kernels, names)
        self._passed_entries = planned  # group entries that passed the last check
        # By group: its small parameters, after the last check with this group.
        self._smalls: dict[int, list[Small]] = {}
        self._num_checks = 0

    def check(self, params_by_index: Mapping[int, Captured]) -> None:
        """Raise `ConfigError` if small parameters cannot take a step with these groups.

        See [Note: small parameters step first].
        """
        groups = []
        for indices, group in self.grouped(params_by_index):
            state = next((self._states[i] for i in indices if i in self._states), None)
            scalars: dict[str, Any] = {} if state is None else {"scalars": state.scalars}
            groups.append(_CheckedGroup(group, params_by_index[indices[0]].shapes, scalars))
        entries = [checked.group.rule_params for checked in groups]
        chosen = self._choose_groups(groups)
        small_states = {number: self._smalls.get(number, []) for number in chosen}
        for _ in range(
            1 if all(small_states.values()) else 2
        ):  # the first makes state for the second
            starts, offset = {}, 0
            for number in chosen:
                for position, small in enumerate(small_states[number]):
                    saved = {**small.extra_state, **groups[number].scalars}
                    starts[2 * (offset + position)] = Small(saved, small.moments)
                offset += len(groups[number].shapes)
            scale = SCALES[self._num_checks % len(SCALES)]
            self._num_checks += 1
            trial_groups = [
                (groups[number].group.given, groups[number].shapes) for number in chosen
            ]
            with on_cpu():
                try:
                    trial = Trial(self.facts, trial_groups, scale, starts=starts)
                    problem, trial_smalls = trial.compare(self.facts, trial.plain())
                except Exception as error:
                    problem, trial_smalls = repr(error), ()
            if problem:
                raise self._refusal(problem, entries)
            stepped = iter(trial_smalls[::2])
            small_states = {n: [next(stepped) for _ in groups[n].shapes] for n in chosen}
        self._smalls |= small_states
        self._passed_entries = entries

    def _choose_groups(self, groups: Sequence[_CheckedGroup]) -> list[int]:
        """Return the indices of the groups in this check: a few of each kind, in rotation."""
        kinds: list[list[int]] = []
        for number, group in enumerate(groups):
            kind = next((kind for kind in kinds if group.is_same_kind(groups[kind[0]])), None)
            if kind is None:
                kinds.append(kind := [])
            kind.append(number)
        chosen = []
        for kind in kinds:
            first = self._num_checks % len(kind)
            chosen += (kind[first:] + kind[:first])[:GROUPS_PER_KIND]
        return sorted(chosen)

    def _refusal(self, problem: str, entries: Sequence[Mapping[str, Any]]) -> ConfigError:
        edits: dict[str, str] = {}
        for old, new in zip(self._passed_entries, entries, strict=True):
            edits |= differences(old, new)
        if not edits:
            return ConfigError(
                f"{self.facts.name} cannot take the next step: on small parameters, {problem}",
                because=COUPLING_CAUSE,
                remedy=COUPLING_REMEDY,
            )
        names = " and ".join(edits)
        return ConfigError(
            f"{self.facts.name} cannot step with {' and '.join(edits.values())}",
            because=f"tried on small parameters: {problem}; the stored state was planned from the "
            "groups that initialize() got",
            remedy=f"set {names} back and call step() again; to use it later, pass it to "
            f"initialize() switched on (such as {names} > 0): a schedule may change it after that",
        )

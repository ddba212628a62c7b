"""The update rule of an adapted optimizer, and its check before every step.

[Note: small parameters step first]
Before a step is committed, small parameters take it: all together as in plain torch, and tile by
tile as the engine does. They must agree in every bit of parameters, state and group entries; else
the step is refused, and nothing has changed. They have the entries that the groups have in this
step, edits included, and the scalars that the optimizer keeps of the model's parameters (their
step counts), so what an optimizer does from some step on shows in that step, also in a run that
was resumed. Of each shape one has stepped along since the engine was made, and one begins: an entry
that is switched on may need state that was not planned, or that older parameters lack.

So a value that several parameters of one call make together is found by whatever the optimizer goes
by that these share with the model: counts, entries, the shape. Not by the model's own values: a
norm of all gradients that is used above a threshold only is found if small parameters pass it.
Their gradients are of three magnitudes, in turn. Nothing of this is a proof for a global variable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from infinity.errors import ConfigError
from infinity.optim.adapter import (
    COUPLED,
    SEPARATE,
    TILE_ELEMENTS,
    AdaptedOptimizer,
    AdapterFacts,
    Captured,
    copied,
    differences,
    on_cpu,
    small_shape,
)
from infinity.optim.adapter_probe import SCALES, Small, Trial
from infinity.optim.cpu import CpuKernels
from infinity.types import MomentFormat


class AdapterRule:
    """The rule that an adapted optimizer is; see `infinity.optim.update.Rule`."""

    def __init__(self, facts: AdapterFacts) -> None:
        self.facts = facts
        self.name = facts.name
        self.whole = facts.whole
        self.matrix_steps = 0
        self.moments = (MomentFormat.FP32,) * facts.num_moments
        parts = "whole parameters" if facts.whole else f"tiles of {TILE_ELEMENTS} elements"
        self.notes: tuple[str, ...] = (
            f"{facts.name} is run by torch on {parts}: slower than the built-in rules",
        )

    def capture(self, group: Mapping[str, Any]) -> Captured:
        """Copy the group's entries."""
        entries = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        shapes = {small_shape(p.shape, whole=True) for p in group["params"]}
        return Captured(copied(entries), frozenset(shapes))

    def reserve(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Copy the groups: the trial has planned the moments from these."""
        self._planned = [self.capture(group).entries for group in groups if group["params"]]

    def tile_elements(self, largest: int) -> int:
        """Whole parameters, or tiles that torch steps in one thread."""
        return largest if self.whole else min(largest, TILE_ELEMENTS)

    def initial(self, captured: Any) -> tuple[float, ...]:
        """Return nothing: an adapted optimizer fills its state itself."""
        return ()

    def updater(
        self, kernels: CpuKernels, names: Sequence[str], largest: int, seed: int
    ) -> CheckedOptimizer:
        """Return the adapted optimizer with its check."""
        size = self.tile_elements(largest)
        return CheckedOptimizer(self.facts, size, kernels, names, self._planned)


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
        self._passed = planned  # entries of groups that passed the last check
        self._smalls: Sequence[Small] = ()  # parameters that step along, as that left them
        self._num_checks = 0

    def check(self, params_by_index: Mapping[int, Captured]) -> None:
        """Raise `ConfigError` if small parameters cannot take a step with these groups.

        See [Note: small parameters step first].
        """
        groups, entries, scalars = [], [], list[Mapping[str, Any]]()
        for indices, group in self.grouped(params_by_index):
            shapes = params_by_index[indices[0]].shapes
            kept = next((self._kept[i] for i in indices if i in self._kept), None)
            groups.append((group.given, shapes))
            entries.append(group.rule_params)
            scalars += [{} if kept is None else {"scalars": kept.scalars}] * len(shapes)
        smalls = self._smalls
        for _ in range(1 if smalls else 2):  # the first makes state, the second uses it
            starts = {
                2 * number: Small({**small.kept, **own}, small.moments)
                for number, (small, own) in enumerate(zip(smalls, scalars, strict=False))
            }
            scale = SCALES[self._num_checks % len(SCALES)]
            self._num_checks += 1
            with on_cpu():
                try:
                    trial = Trial(self.facts, groups, scale, starts=starts)
                    problem, left = trial.compare(self.facts, trial.plain())
                except Exception as error:
                    problem, left = repr(error), ()
            if problem:
                raise self._refusal(problem, entries)
            smalls = left[::2]
        self._smalls, self._passed = smalls, entries

    def _refusal(self, problem: str, entries: Sequence[Mapping[str, Any]]) -> ConfigError:
        edits: dict[str, str] = {}
        for old, new in zip(self._passed, entries, strict=True):
            edits |= differences(old, new)
        if not edits:
            return ConfigError(
                f"{self.facts.name} cannot take the next step: on small parameters, {problem}",
                because=COUPLED,
                remedy=SEPARATE,
            )
        names = " and ".join(edits)
        return ConfigError(
            f"{self.facts.name} cannot step with {' and '.join(edits.values())}",
            because=f"tried on small parameters: {problem}; the stored state was planned from the "
            "groups that initialize() got",
            remedy=f"set {names} back and call step() again; to use it later, let initialize() "
            f"get it switched on ({names} > 0, say): a schedule may change it then",
        )

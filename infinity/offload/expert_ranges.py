"""Ranges of a layer's experts, lent to the modules that compute them; see `model/stacks.py`.

Rows of a stack are parameters of their own, which no module has: leaves of autograd whose unit is
fetched when a module reads them, as by access of an attribute. The stack itself stays the module's
parameter, always offloaded: its values are read and written by way of its rows
(`training/parameter_access.py`), and it gets no gradient.

A range that no token was sent to is left out: nothing is fetched, computed or saved, and its
gradient is zero (`GradientStore.complete`), as that of such experts is in plain torch. Ranks use a
range if one of them does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from infinity.distributed.context import DistContext
from infinity.errors import ResidencyError
from infinity.model.partitioner import Rows
from infinity.model.stacks import StackRange, lend_ranges
from infinity.offload.hooks import Hooks


def _nothing() -> None:
    """Begin or end a call of a module of experts."""


class ExpertRanges:
    """Answers `stack_ranges` for the modules of one engine."""

    def __init__(
        self,
        hooks: Hooks,
        rows: Sequence[Rows],
        parameters: Sequence[nn.Parameter],
        ranks: DistContext,
    ) -> None:
        self._hooks = hooks
        self._parameters = parameters
        self._ranks = ranks
        by_module: dict[str, list[Rows]] = {}
        for one in rows:
            by_module.setdefault(one.stacks.path, []).append(one)
        self._modules = [found[0].stacks.module for found in by_module.values()]
        for module, found in zip(self._modules, by_module.values(), strict=True):
            lend_ranges(module, partial(self._lend, found))
            # A checkpoint inside the layer would keep all ranges that it computes again.
            hooks.watch_root(module, _nothing, _nothing)

    def remove(self) -> None:
        """Leave the modules as they were."""
        for module in self._modules:
            lend_ranges(module, None)
        self._modules = []

    def _lend(self, rows: Sequence[Rows], counts: Sequence[int] | None) -> Iterator[StackRange]:
        wanted = [counts is None or any(counts[one.first : one.end]) for one in rows]
        if self._ranks.count > 1:
            with self._ranks.propagate_errors("routes tokens to experts"):
                self._ranks.synchronize(f"routes tokens to {rows[0].stacks.path}")
                flags = torch.tensor(wanted, dtype=torch.uint8, device="cpu")
                wanted = self._ranks.gather(flags).any(0).tolist()
        for one, is_wanted in zip(rows, wanted, strict=True):
            if is_wanted:
                yield StackRange(one.first, one.end, partial(self._read, one))

    def _read(self, rows: Rows, name: str) -> Tensor:
        origins = dict(rows.stacks.members)
        materialized_now = [origin in self._hooks.materialized_now for origin in origins.values()]
        stack = self._parameters[origins[name]]
        if any(materialized_now):
            if not all(materialized_now):
                raise ResidencyError(
                    f"{rows.stacks.path!r} computes while some of its parameters are materialized",
                    remedy="leave the `with engine.materialized(...)` block first, or materialize "
                    "the whole module",
                )
            return stack[rows.first : rows.end]
        parameter = self._parameters[rows.parameters[name]]
        parameter.requires_grad = stack.requires_grad
        return self._hooks.touch(parameter)

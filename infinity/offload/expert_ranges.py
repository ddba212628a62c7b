"""Ranges of a layer's experts, fetched for the modules that compute them; see `model/stacks.py`.

The rows of a stack in one range are a separate parameter that is registered in no module: an
autograd leaf whose unit is fetched when a module reads it, as on attribute access. The stack itself
stays the module's parameter and is always offloaded: its values are read and written through its
rows (`training/parameter_values.py`), and it gets no gradient.

A range without tokens is skipped: nothing is fetched, computed or saved, and its gradient is zero
(`GradientStore.complete`), as in plain torch. All ranks use a range if one of them has tokens for
it. Slices of a block pass its ranges together: `shared_ranges.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from infinity.distributed.context import DistContext
from infinity.errors import ResidencyError
from infinity.model.partitioner import Rows
from infinity.model.stacks import (
    RangeCall,
    StackRange,
    compute_full,
    full_gradient_error,
    gradient_hooks,
    set_range_executor,
    stacks_of,
)
from infinity.offload.expert_calls import ExpertCalls
from infinity.offload.hooks import Hooks, is_infinity_hook


def _no_op() -> None:
    """No-op to run around calls of a module of experts."""


class Experts:
    """One module of experts; handles its calls of `compute_ranges`."""

    def __init__(
        self, hooks: Hooks, rows: list[Rows], parameters: Sequence[nn.Parameter], ranks: DistContext
    ) -> None:
        self.module = rows[0].stacks.module
        self._hooks = hooks
        self._expert_calls = hooks.expert_calls
        self._rows = rows
        self._parameters = parameters
        self._ranks = ranks
        set_range_executor(self.module, self._compute)
        for name, origin in rows[0].stacks.members:
            if (stack := parameters[origin]).requires_grad:
                register: Any = stack.register_post_accumulate_grad_hook
                hooks.keep([register(self._gradient_hook(name))])
        # Pushes the saved-tensor hooks around calls: without them, a checkpoint inside the layer
        # would keep all ranges that it recomputes in their slots.
        hooks.register_call_hooks(self.module, _no_op, _no_op)

    def _gradient_hook(self, name: str) -> Callable[[Tensor], None]:
        """Return a hook that receives the gradient of a stack that was used while materialized."""

        def hook(stack: Tensor) -> None:
            gradient, stack.grad = stack.grad, None
            if gradient is not None:
                for rows in self._rows:
                    self._hooks.receive(rows.parameters[name], gradient[rows.first : rows.end])

        return hook

    def _compute(self, call: RangeCall) -> Tensor:
        if (computer := self._expert_calls.begin_range_call()) is not None:
            return computer(self, call)
        return self.compute(call)

    def compute(self, call: RangeCall) -> Tensor:
        """Return the result of a call, computed range by range."""
        self.count(call)
        used = self.used([call.counts])
        pairs = zip(used, call.split(used), strict=True)
        return torch.cat(
            [call.compute(self.view_of(rows, call), *tensors) for rows, tensors in pairs]
        )

    def count(self, call: RangeCall) -> None:
        """Count the tokens of a call in a training forward."""
        self._expert_calls.add(self.module, self._rows[0].stacks.path, call.counts)

    def used(self, counts: Sequence[Sequence[int]]) -> list[Rows]:
        """Return the ranges for which any of these calls has tokens, on any rank.

        Without any tokens, return the first range, which computes the empty result.
        """
        has_tokens = [any(any(c[rows.first : rows.end]) for c in counts) for rows in self._rows]
        if self._ranks.count > 1:
            with self._ranks.propagate_errors("routes tokens to experts"):
                self._ranks.synchronize(f"routes tokens to {self._rows[0].stacks.path}")
                flags = torch.tensor(has_tokens, dtype=torch.uint8, device="cpu")
                has_tokens = self._ranks.gather(flags).any(0).tolist()
        used = [rows for rows, is_used in zip(self._rows, has_tokens, strict=True) if is_used]
        return used or self._rows[:1]

    def view_of(self, rows: Rows, call: RangeCall) -> StackRange:
        """Return the `StackRange` to pass to the compute function of a call."""
        return StackRange(rows.first, rows.end, call.counts, partial(self.read, rows))

    def read(self, rows: Rows, name: str) -> Tensor:
        """Fetch a range, and return its rows of the stack `name`."""
        origins = dict(rows.stacks.members)
        materialized = [origin in self._hooks.materialized_dtypes for origin in origins.values()]
        stack = self._parameters[origins[name]]
        if any(materialized):
            if not all(materialized):
                raise ResidencyError(
                    f"{rows.stacks.path!r} computes while some of its parameters are materialized",
                    remedy="leave the `with engine.materialized(...)` block first, or materialize "
                    "the whole module",
                )
            return stack[rows.first : rows.end]
        # Registered in a block in which the stack was materialized.
        if not all(map(is_infinity_hook, gradient_hooks(stack))):
            raise full_gradient_error(f"{rows.stacks.path}.{name}", "a hook")
        parameter = self._parameters[rows.parameters[name]]
        parameter.requires_grad = stack.requires_grad
        return self._hooks.touch(parameter)


def _compute_counted(calls: ExpertCalls, path: str, module: nn.Module, call: RangeCall) -> Tensor:
    """Count the tokens of experts that are stored in their layer's unit, and compute them."""
    calls.add(module, path, call.counts)
    return compute_full(module, call)


class ExpertRanges:
    """All modules of an engine with stacks of experts, cut into ranges or not."""

    def __init__(
        self,
        hooks: Hooks,
        root: nn.Module,
        rows: Sequence[Rows],
        parameters: Sequence[nn.Parameter],
        ranks: DistContext,
    ) -> None:
        by_module: dict[str, list[Rows]] = {}
        for entry in rows:
            by_module.setdefault(entry.stacks.path, []).append(entry)
        self._modules = [
            Experts(hooks, module_rows, parameters, ranks).module
            for module_rows in by_module.values()
        ]
        for path, module in root.named_modules():
            if path not in by_module and stacks_of(module):
                compute = partial(_compute_counted, hooks.expert_calls, path, module)
                set_range_executor(module, compute)
                self._modules.append(module)

    def remove(self) -> None:
        """Reset the modules to compute their experts themselves."""
        for module in self._modules:
            set_range_executor(module, None)
        self._modules = []

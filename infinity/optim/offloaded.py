"""`engine.optimizer`: a real `torch.optim.Optimizer` whose groups the sweeps obey.

It holds parameter groups, so that any `torch.optim.lr_scheduler` works over it; moments and
masters live in the engine's tiers. `step()` is the engine's step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from infinity.errors import ConfigError
from infinity.optim.adamw import AdamHyper


class OffloadedOptimizer(torch.optim.Optimizer):
    """AdamW or Adam over offloaded state; per-group `lr`, `betas`, `eps`, `weight_decay`.

    `groups` is what any torch optimizer takes. Groups may change values at any time; what a
    sweep uses is captured at `step()`.
    """

    def __init__(
        self,
        groups: list[nn.Parameter] | list[dict[str, Any]],
        defaults: dict[str, Any],
        *,
        decoupled: bool,
    ) -> None:
        super().__init__(groups, defaults)
        self.decoupled = decoupled
        self._engine_step: Callable[[], None] | None = None
        for group in self.param_groups:
            self._hyper(group)

    def connect(self, engine_step: Callable[[], None]) -> None:
        """Name what `step()` does."""
        self._engine_step = engine_step

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """The engine's `step()`; closures are not supported."""
        if closure is not None:
            raise ConfigError("engine steps take no closure", remedy="call engine.step()")
        if self._engine_step is not None:
            self._engine_step()

    def mark_stepped(self) -> None:
        """Tell torch's schedulers, which otherwise warn, that a step came before theirs."""
        self._opt_called = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to do: gradients leave as they are made, and are consumed by `step()`."""

    def hypers(self, index_of: dict[int, int]) -> dict[int, AdamHyper]:
        """Parameter index -> hyper-parameters now."""
        found: dict[int, AdamHyper] = {}
        for group in self.param_groups:
            hyper = self._hyper(group)
            for parameter in group["params"]:
                found[index_of[id(parameter)]] = hyper
        return found

    def _hyper(self, group: dict[str, Any]) -> AdamHyper:
        beta1, beta2 = group["betas"]
        return AdamHyper(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            decoupled=self.decoupled,
        )

"""Selection of the access order to prefetch along: training cycle, or call without gradients.

Every call of the module without gradients is a cycle: `engine(...)`, `module(...)`, and each token
of `generate()`. So eviction goes by the next use of a unit in these calls, too. A training cycle
that such a call interrupts continues after it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from infinity.offload.prefetch import Prefetcher
from infinity.plan.access_order import AccessOrder, usual_cycle
from infinity.plan.plan import Plan


class Cycles:
    """Access orders of an engine, and the open cycle; `plan/access_order.py` defines a cycle."""

    def __init__(self, prefetcher: Prefetcher, plan: Plan) -> None:
        self.training = AccessOrder(usual_cycle(plan))
        self.without_grad = AccessOrder(usual_cycle(plan, backward=False))
        self._prefetcher = prefetcher
        self._open = False
        self._interrupted: bool | None = None  # `wraps` of the interrupted training cycle

    def begin(self, *, last_micro_batch: bool) -> None:
        """Begin a forward; a second forward before the backward belongs to the same cycle."""
        grad = torch.is_grad_enabled()
        order = self.training if grad else self.without_grad
        if self._open and self._prefetcher.order is order:
            return
        if self._open and not grad:
            self._interrupted = self._prefetcher.wraps
        else:
            self.end()
        self._prefetcher.follow(order, wraps=not (grad and last_micro_batch))
        order.begin()
        self._open = True

    def end_call(self) -> None:
        """End a call without gradients, if one is in progress."""
        if self._prefetcher.order is not self.without_grad:
            return
        self.without_grad.end()
        wraps, self._interrupted = self._interrupted, None
        if wraps is None:
            self._prefetcher.follow(None)
            self._open = False
        else:
            self._prefetcher.follow(self.training, wraps=wraps)

    def end(self) -> None:
        """End the cycle in progress, and learn its order."""
        self.end_call()
        if (order := self._prefetcher.order) is not None:
            order.end()
            self._prefetcher.follow(None)
        self._open = False

    def call_hooks(self) -> tuple[Callable[[], None], Callable[[], None]]:
        """Return the functions to run before and after a call of the model."""
        cache_states: list[bool] = []  # autocast cache enabled, before each call in progress

        def before() -> None:
            cache_states.append(torch.is_autocast_cache_enabled())
            torch.set_autocast_cache_enabled(False)  # it would cache casts of weights that move
            if not torch.is_grad_enabled():
                self.begin(last_micro_batch=False)

        def after() -> None:
            if cache_states:
                torch.set_autocast_cache_enabled(cache_states.pop())
            self.end_call()

        return before, after

    def mispredictions(self) -> int:
        """Return the number of unexpected uses, and of updates that could not be published."""
        unexpected = self.training.mispredictions + self.without_grad.mispredictions
        return self._prefetcher.handover.mispredictions + unexpected

"""Optimizers of torch and of users, which have no rule in the library."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import optim

Groups = list[dict[str, Any]]
Maker = Callable[[Groups], optim.Optimizer]


class SignedMomentum(optim.Optimizer):
    """Custom optimizer with a count in the group, rebound state and rebound `.data`."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                old = state.get("momentum", torch.zeros_like(p))
                state["momentum"] = old * 0.9 + p.grad
                p.data = p.data - group["lr"] / group["count"] * state["momentum"].sign()


class _PerParameter(optim.Optimizer):
    """Optimizer that steps one parameter at a time by `_update`, which is not elementwise."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group["lr"])

    def _update(self, p: Any, lr: float) -> None:
        raise NotImplementedError


class TrustRatio(_PerParameter):
    """LAMB-like optimizer: the length of a step is proportional to the parameter's norm."""

    def _update(self, p: Any, lr: float) -> None:
        m = self.state[p].setdefault("m", torch.zeros_like(p))
        m.lerp_(p.grad, 0.1)
        p.sub_(m * (lr * p.norm() / (m.norm() + 1e-6)))


class TowardsStart(_PerParameter):
    """Pulls parameters towards their initial values; for zeros (biases) its state is a scalar."""

    def _update(self, p: Any, lr: float) -> None:
        first = p.clone() if p.any() else p.new_zeros(())
        start = self.state[p].setdefault("start", first)
        p.sub_(p.grad + (p - start) * 0.1, alpha=lr)


ELEMENTWISE: dict[str, Maker] = {
    "NAdam": optim.NAdam,
    "RMSprop": lambda groups: optim.RMSprop(groups, lr=1e-3, centered=True, momentum=0.9),
    "Adadelta": lambda groups: optim.Adadelta(groups, lr=0.5),
    "Rprop": optim.Rprop,
    "ASGD": lambda groups: optim.ASGD(groups, lr=1e-2, t0=2),
    "Adamax": optim.Adamax,
    "RAdam": lambda groups: optim.RAdam(groups, lr=1e-2, decoupled_weight_decay=True),
    "AMSGrad": lambda groups: optim.AdamW(groups, lr=1e-2, amsgrad=True),
    "Adagrad": lambda groups: optim.Adagrad(groups, initial_accumulator_value=0.5),
    "SGD": lambda groups: optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True),
    "own": SignedMomentum,
}
WHOLE: dict[str, Maker] = {
    "Adafactor": lambda groups: optim.Adafactor(groups, lr=1e-2),
    "TrustRatio": TrustRatio,
    "TowardsStart": TowardsStart,
}
if importlib.util.find_spec("pytorch_optimizer"):  # a library's Lamb
    WHOLE["Lamb"] = lambda groups: importlib.import_module("pytorch_optimizer").Lamb(groups, lr=0.1)

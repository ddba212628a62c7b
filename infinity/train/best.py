"""Held-out losses of a run so far: the best, and early stopping."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict


class _BestState(BaseModel):
    model_config = ConfigDict(strict=True)

    of: str
    loss: float
    step: int
    last: int
    worse: int
    kept: float
    kept_step: int


class Best:
    """The smallest held-out loss and its step; a state for `engine.register_state`.

    `last` is the step of the last evaluation, -1 before any; `worse` counts those since the best.
    `kept` is the loss of the weights in the directory for the best ones, `kept_step` their step.
    Losses of other data than `of` says are not compared with: then it begins anew, and is `anew`.
    """

    def __init__(self, of: str = "") -> None:
        self.of, self.anew = of, False
        self.loss, self.step = math.inf, -1
        self.last, self.worse = -1, 0
        self.kept, self.kept_step = math.inf, -1

    def on_evaluation(self, step: int, loss: float) -> None:
        """A held-out loss, in nats a token; one that is not finite is never the best."""
        better = loss < self.loss
        if better:
            self.loss, self.step = loss, step
        self.last, self.worse = step, 0 if better else self.worse + 1

    def state_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {name: value for name, value in vars(self).items() if name != "anew"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse; raises `ValueError` for values that no run has."""
        found = _BestState.model_validate({"of": self.of, **state})
        if found.of == self.of:
            vars(self).update(found)
        else:
            self.anew = found.step >= 0

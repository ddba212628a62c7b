"""Held-out losses of a run so far: the best, and early stopping."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Best(BaseModel):
    """The smallest held-out loss and its step; a state for `engine.register_state`.

    `last` is the step of the last evaluation, -1 before any; `worse` counts those since the best.
    `kept` is the loss of the weights in the directory for the best ones, `kept_step` their step.
    Losses of other data than `of` says are not compared with: then it begins anew, and is `anew`.
    """

    model_config = ConfigDict(strict=True)

    of: str = ""
    loss: float = math.inf
    step: int = -1
    last: int = -1
    worse: int = 0
    kept: float = math.inf
    kept_step: int = -1
    anew: bool = Field(default=False, exclude=True)

    def on_evaluation(self, step: int, loss: float) -> None:
        """A held-out loss, in nats a token; one that is not finite is never the best."""
        better = loss < self.loss
        if better:
            self.loss, self.step = loss, step
        self.last, self.worse = step, 0 if better else self.worse + 1

    def state_dict(self) -> dict[str, Any]:
        """Plain data."""
        return self.model_dump()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse; raises `ValueError` for values that no run has."""
        if missing := self.state_dict().keys() - {"of", *state}:
            raise ValueError(f"it has no {' and no '.join(sorted(missing))}")
        found = Best.model_validate({"of": self.of, **state})
        if found.of == self.of:
            vars(self).update(found)
        else:
            self.anew = found.step >= 0

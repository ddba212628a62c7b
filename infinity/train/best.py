"""Best held-out loss of a run, and the counter of early stopping."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Best(BaseModel):
    """The smallest held-out loss and its step; a state for `engine.register_state`.

    `last` is the step of the last evaluation, -1 before any; `worse` counts the evaluations since
    the best. `kept` and `kept_step` are loss and step of the weights saved in best/. `of`
    identifies the held-out data: a state of other data is not loaded, and `anew` is set if that
    state had a best loss.
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
        """Record a held-out loss in nats per token; NaN and inf are never the best."""
        better = loss < self.loss
        if better:
            self.loss, self.step = loss, step
        self.last, self.worse = step, 0 if better else self.worse + 1

    def state_dict(self) -> dict[str, Any]:
        """Return the fields as plain data, without `anew`."""
        return self.model_dump()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of the same data; raise `ValueError` for missing or invalid values."""
        if missing := self.state_dict().keys() - {"of", *state}:
            raise ValueError(f"it has no {' and no '.join(sorted(missing))}")
        loaded = Best.model_validate({"of": self.of, **state})
        if loaded.of == self.of:
            vars(self).update(loaded)
        else:
            self.anew = loaded.step >= 0

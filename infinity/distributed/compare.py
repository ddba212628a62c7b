"""Comparison of values that must be equal on all ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from infinity.distributed.context import DistContext
from infinity.errors import ConfigError


def as_json(facts: Any) -> str:
    """Serialize facts for comparison, tensors with all digits."""
    return json.dumps(facts, default=lambda v: v.tolist() if isinstance(v, Tensor) else str(v))


def check_equal(ranks: DistContext, what: str, facts: Mapping[str, Any]) -> None:
    """Raise `ConfigError` on every rank if `facts` (plain data) of two ranks differ.

    The message names the first difference and its ranks; `what` describes the facts in it.
    """
    if ranks.count == 1:
        return
    mine = json.loads(as_json(dict(facts)))
    ranks.synchronize(f"compares {what}")
    every = ranks.all_gather_object(mine)
    for number, theirs in enumerate(every):
        found = _difference(every[0], theirs)
        if found is not None:
            where, first, other = found
            raise ConfigError(
                f"ranks 0 and {number} differ in {what}: {where} is {first} on rank 0, {other} on "
                f"rank {number}",
                because="ranks train one model, with one configuration",
                remedy="give every rank the same: build the model after the same "
                "torch.manual_seed(...), read the configuration from one file",
            )


def _difference(one: Any, other: Any, where: str = "") -> tuple[str, str, str] | None:
    """Return the path and both values of the first difference in plain data, or None."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *(k for k in other if k not in one)]:
            inside = f"{where}.{key}" if where else str(key)
            found = _difference(one.get(key), other.get(key), inside)
            if found is not None:
                return found
        return None
    return None if one == other else (where, f"{one!r:.200}", f"{other!r:.200}")

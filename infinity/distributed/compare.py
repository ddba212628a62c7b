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
    local_facts = json.loads(as_json(dict(facts)))
    ranks.synchronize(f"compares {what}")
    all_facts = ranks.all_gather_object(local_facts)
    for number, rank_facts in enumerate(all_facts):
        difference = _difference(all_facts[0], rank_facts)
        if difference is not None:
            path, initial_value, rank_value = difference
            raise ConfigError(
                f"ranks 0 and {number} differ in {what}: {path} is {initial_value} on rank 0, "
                f"{rank_value} on rank {number}",
                because="ranks train one model, with one configuration",
                remedy="give every rank the same: build the model after the same "
                "torch.manual_seed(...), read the configuration from one file",
            )


def _difference(first: Any, second: Any, path: str = "") -> tuple[str, str, str] | None:
    """Return the path and both values of the first difference in plain data, or None."""
    if isinstance(first, dict) and isinstance(second, dict):
        for key in [*first, *(k for k in second if k not in first)]:
            inner_path = f"{path}.{key}" if path else str(key)
            difference = _difference(first.get(key), second.get(key), inner_path)
            if difference is not None:
                return difference
        return None
    return None if first == second else (path, f"{first!r:.200}", f"{second!r:.200}")

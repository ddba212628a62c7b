"""States of the random generators that a training loop may draw from, captured and restored."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from infinity.common import accelerators
from infinity.errors import CheckpointError


def capture_rng() -> dict[str, Any]:
    """Return generator states of torch (CPU and accelerators), NumPy and Python."""
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }
    return state | accelerators.rng_states()


def restore_rng(state: dict[str, Any]) -> None:
    """Restore what `capture_rng` returned; states of devices that are missing are left out.

    Raises:
        CheckpointError: The states cannot be restored; some of them may have been by then.
    """
    try:
        torch.set_rng_state(state["torch"])
        np.random.set_state(state["numpy"])
        random.setstate(state["python"])
        accelerators.set_rng_states(state)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"the saved states of random generators cannot be restored: {error}",
            because="they were saved by another version of torch, NumPy or Python",
        ) from error


def moved_since(state: dict[str, Any]) -> list[str]:
    """Which generators are not where `capture_rng` found them: "torch", "numpy", ..."""
    now = capture_rng()
    return [name for name in state if name in now and not _equal(now[name], state[name])]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor | np.ndarray):
        return bool((one == other).all())
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)

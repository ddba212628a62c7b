"""Capture and restore of the states of random number generators."""

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
    """Restore the states that `capture_rng` returned, except those of missing devices.

    Raises:
        CheckpointError: A state cannot be restored; others may have been by then.
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


def changed_generators(state: dict[str, Any]) -> list[str]:
    """Return the generators whose states differ from `state`: "torch", "numpy", ..."""
    current = capture_rng()
    return [name for name in state if name in current and not _equal(current[name], state[name])]


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor | np.ndarray):
        return bool((a == b).all())
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b)

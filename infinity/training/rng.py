"""The states of every random generator a training loop may draw from, taken and put back."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from infinity.errors import CheckpointError


def capture_rng() -> dict[str, Any]:
    """The states of torch's CPU and accelerator generators, NumPy's global one and Python's."""
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Put back what `capture_rng` took; generators of devices that are not here are left out.

    Raises `CheckpointError` if these are no such states; some may be put back then.
    """
    try:
        torch.set_rng_state(state["torch"])
        np.random.set_state(state["numpy"])
        random.setstate(state["python"])
        if torch.cuda.is_available():
            for index, value in enumerate(state.get("cuda", ())[: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(value, index)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"the saved states of random generators cannot be put back: {error}",
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

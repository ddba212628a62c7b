"""DeepSpeed's `comm` for the one process there is: no process group is needed or made."""

from __future__ import annotations

from typing import Any

from infinity.integrations.front_door import init_distributed


def is_initialized() -> bool:
    """True: one process is always in touch with itself."""
    return True


def get_rank(group: Any = None) -> int:
    """0."""
    return 0


def get_local_rank() -> int:
    """0."""
    return 0


def get_world_size(group: Any = None) -> int:
    """1."""
    return 1


def barrier(group: Any = None) -> None:
    """Nobody to wait for."""


def destroy_process_group(group: Any = None) -> None:
    """There is none."""


__all__ = [
    "barrier",
    "destroy_process_group",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "init_distributed",
    "is_initialized",
]

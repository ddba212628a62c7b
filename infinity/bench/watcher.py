"""Whoever wants to know how far a benchmark is."""

from __future__ import annotations

from typing import Protocol


class Watcher(Protocol):
    """Told about phases and parts."""

    def begin(self, title: str, total: int) -> None:
        """A phase of `total` parts starts; the one before is over."""

    def advance(self, done: int | None = None) -> None:
        """One part is through, or `done` of them are."""

"""The process that made an engine: the only one that may use it."""

from __future__ import annotations

import os

from infinity.errors import PresenceError


class Owner:
    """Remembers the process; a forked child has neither the engine's slots nor its threads."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    def is_here(self) -> bool:
        """Whether this is that process."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raise `PresenceError` in a forked child."""
        if not self.is_here():
            raise PresenceError(
                f"this engine belongs to process {self._pid}; process {os.getpid()} is a fork "
                "of it and has neither its slots nor its threads",
                because="a DataLoader worker or another child touched the offloaded model",
                remedy="use the engine and its model only in the process that made the engine; "
                "give workers plain data",
            )

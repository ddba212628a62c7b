"""How much of each tier the engines of this process have reserved.

The one process-wide record of the library: budgets belong to the process, as its memory does, so
a second engine must see what the first one took. It holds numbers only, and a dead engine's line
vanishes with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping


class Reservations:
    """Bytes per tier, by owner."""

    def __init__(self) -> None:
        self._taken: weakref.WeakKeyDictionary[object, dict[str, int]] = weakref.WeakKeyDictionary()

    def take(self, owner: object, tier_bytes: Mapping[str, int]) -> None:
        """Record what an engine reserved."""
        self._taken[owner] = dict(tier_bytes)

    def release(self, owner: object) -> None:
        """Forget it; idempotent."""
        self._taken.pop(owner, None)

    def total(self, tier: str) -> int:
        """Bytes of a tier that all engines of the process hold."""
        return sum(taken.get(tier, 0) for taken in self._taken.values())


PROCESS = Reservations()

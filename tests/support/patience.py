"""Waiting in tests, which must pass on a slow day too."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], seconds: float = 240.0) -> bool:
    """Wait for a condition; return False if it is not met within `seconds`, as in a hang only."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.005)
    return bool(condition())

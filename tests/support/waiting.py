"""Waiting for conditions in tests, with timeouts that slow machines do not reach."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], seconds: float = 240.0) -> bool:
    """Wait for a condition; return False if it is not met within `seconds`, which means a hang."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.005)
    return bool(condition())

"""Waiting in tests, and what a busy machine may spoil: tests must pass on a slow day too."""

from __future__ import annotations

import time
from collections.abc import Callable

ATTEMPTS = 8


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> bool:
    """Wait for a condition that comes true by itself; False if it has not within `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.005)
    return bool(condition())


def in_a_quiet_moment(check: Callable[[], None]) -> None:
    """Pass if the check passes in one of a few attempts.

    For what can only be seen by a clock, and what a busy machine may hide but never fake.
    """
    for _ in range(ATTEMPTS - 1):
        try:
            return check()
        except AssertionError:
            time.sleep(0.2)
    return check()

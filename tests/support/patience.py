"""Waiting in tests: for something that will be so, however slow the machine is today."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_for(condition: Callable[[], object], what: str = "", seconds: float = 60.0) -> None:
    """Return once the condition holds; fail after `seconds`, saying what was waited for."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"waited {seconds:g} s for {what or 'a condition'}")
        time.sleep(0.005)

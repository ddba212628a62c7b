"""Engines whose disk gives nothing back until they are closed, and what happens only in a wait.

Nothing here looks at a clock: a block of a held engine is late by hours, `close` lets it go.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from support.native_io import slow_engine

from infinity._aio import Engine

LONG_S = 300.0  # only a hang takes so long


def held_engine(backend: str, queue_depth: int = 4) -> Engine:
    return slow_engine(backend, 1, queue_depth)


@contextmanager
def while_this_thread_waits(action: Callable[[], object]) -> Iterator[None]:
    """Inside, `action` runs in another thread as soon as this one lets go of the interpreter.

    Threads do not take turns meanwhile: what does not let go is not interrupted.
    """
    gate = threading.Event()
    thread = threading.Thread(target=lambda: (gate.wait(), action()))
    interval = sys.getswitchinterval()
    thread.start()
    sys.setswitchinterval(1e5)
    gate.set()
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        thread.join()

"""Engines whose disk gives nothing back until they are closed, and what happens only in a wait.

Nothing here looks at a clock: a block of a held engine is late by hours, `close` lets it go.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import pytest
from support.native_io import slow_engine

from infinity._aio import AioError, Engine, Ticket

LONG_S = 300.0  # only a hang takes so long


def held_engine(backend: str, queue_depth: int = 4) -> Engine:
    return slow_engine(backend, 1, queue_depth)


def wait_all(tickets: Sequence[Ticket], timeout_s: float = LONG_S) -> bool:
    """Whether all are over in time; their errors are left to them."""
    for ticket in tickets:
        with suppress(AioError):
            ticket.wait(timeout_s)
    return all(ticket.done() for ticket in tickets)


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


def interrupt(engine: Engine, wait: Callable[[], object], tickets: Sequence[Ticket]) -> None:
    """Ctrl-C ends a wait for tickets that have not come; afterwards the engine is closed."""
    interrupted = threading.Event()
    in_time: list[bool] = []

    def strike() -> None:
        signal.raise_signal(signal.SIGINT)
        in_time.append(interrupted.wait(LONG_S / 5))
        engine.close()

    with while_this_thread_waits(strike):
        with pytest.raises(KeyboardInterrupt):
            wait()
        assert not any(ticket.done() for ticket in tickets)
        interrupted.set()
    assert in_time == [True]

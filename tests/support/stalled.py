"""Engines whose requests do not complete until they are closed, and actions during a wait.

No clock is involved: a block of a held engine takes hours, unless `close` cancels it.
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

LONG_S = 300.0  # exceeded only by a hang


def stalled_engine(backend: str, queue_depth: int = 4) -> Engine:
    return slow_engine(backend, 1, queue_depth)


def wait_all(tickets: Sequence[Ticket], timeout_s: float = LONG_S) -> bool:
    """Wait for all tickets and return whether all are done; their errors are ignored."""
    for ticket in tickets:
        with suppress(AioError):
            ticket.wait(timeout_s)
    return all(ticket.done() for ticket in tickets)


@contextmanager
def run_when_gil_is_released(action: Callable[[], object]) -> Iterator[None]:
    """Run `action` in another thread as soon as this one releases the GIL.

    The switch interval is so long that only an explicit release of the GIL switches threads.
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
    """Assert that Ctrl-C ends a wait for tickets that are not done; then close the engine."""
    interrupted = threading.Event()
    in_time: list[bool] = []

    def send_interrupt() -> None:
        signal.raise_signal(signal.SIGINT)
        in_time.append(interrupted.wait(LONG_S / 5))
        engine.close()

    with run_when_gil_is_released(send_interrupt):
        with pytest.raises(KeyboardInterrupt):
            wait()
        assert not any(ticket.done() for ticket in tickets)
        interrupted.set()
    assert in_time == [True]

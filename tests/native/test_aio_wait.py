"""Waiting for one of several tickets, and for all of them."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from support.native_io import BLOCK, Buffer, make_file, noise, slow_engine
from support.patience import in_a_quiet_moment

from infinity._aio import READ, AioError, Engine, Ticket, wait_all, wait_any


def some(engine: Engine, path: Path, lengths: list[int]) -> list[Ticket]:
    file = make_file(path, noise(max(lengths) * BLOCK))
    tickets = []
    for length in lengths:
        target = Buffer(length * BLOCK)
        segment = (file, 0, length * BLOCK, target.address)
        tickets.append(engine.submit(READ, [segment], keep=target))
    return tickets


def test_any_returns_the_first_to_finish(backend: str, tmp_path: Path) -> None:
    engine = slow_engine(backend, 100 * BLOCK, queue_depth=1)
    tickets = some(engine, tmp_path / "f", [4, 2, 3])
    tickets[1].promote()
    assert wait_any(tickets) == 1
    assert tickets[1].done()
    assert not tickets[2].done()
    assert wait_any([tickets[2], tickets[1]]) == 1  # at once
    assert wait_all(tickets)
    assert wait_any(tickets) == 0
    engine.close()


def test_timeouts(backend: str, tmp_path: Path) -> None:
    engine = slow_engine(backend, BLOCK)
    tickets = some(engine, tmp_path / "f", [2, 2])
    start = time.monotonic()
    assert wait_any(tickets, 0.1) is None
    assert wait_all(tickets, timeout_s=0.1) is False
    assert wait_any(tickets, 0.0) is None
    assert time.monotonic() - start >= 0.2
    assert not any(ticket.done() for ticket in tickets)
    assert wait_all(tickets, 60.0) is True
    assert wait_all([]) is True
    with pytest.raises(ValueError, match="at least one"):
        wait_any([])
    with pytest.raises(TypeError, match="Ticket"):
        wait_all([1])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="number"):
        wait_any(tickets, float("nan"))
    engine.close()


def test_errors_are_left_to_the_tickets(engine: Engine, tmp_path: Path) -> None:
    file = make_file(tmp_path / "f", bytes(BLOCK))
    target = Buffer(2 * BLOCK)
    bad = engine.submit(READ, [(file, 0, 2 * BLOCK, target.address)])
    good = engine.submit(READ, [(file, 0, BLOCK, target.address)])
    assert wait_all([bad, good])
    assert wait_any([bad]) == 0
    with pytest.raises(AioError) as caught:
        bad.wait()
    assert caught.value.errno == errno.EIO
    assert good.wait()


def test_tickets_of_two_engines(backend: str, tmp_path: Path) -> None:
    slow, fast = slow_engine(backend, BLOCK), Engine(backend=backend)
    late = some(slow, tmp_path / "f", [4])
    early = some(fast, tmp_path / "g", [4])
    assert wait_any([*late, *early], 20.0) == 1
    slow.close()
    assert wait_all([*late, *early], 60.0)
    fast.close()


@pytest.mark.parametrize("wait", [wait_any, wait_all])
def test_the_interpreter_is_free_meanwhile(backend: str, tmp_path: Path, wait: object) -> None:
    """Python threads compute while others wait: more than half of what they do alone."""
    assert callable(wait)
    engine = slow_engine(backend, BLOCK)
    tickets = some(engine, tmp_path / "f", [2, 2])
    counts = [0, 0]
    stop = threading.Event()

    def count(index: int) -> None:
        while not stop.is_set():
            counts[index] += 1
            time.sleep(0)

    def look() -> None:
        before = list(counts)
        wait(tickets, 0.3)
        during = [now - then for now, then in zip(counts, before, strict=True)]
        assert all(number > 100 for number in during), during

    threads = [threading.Thread(target=count, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    try:
        in_a_quiet_moment(look)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        engine.close()


def test_interrupting(backend: str, tmp_path: Path) -> None:
    engine = slow_engine(backend, BLOCK)
    tickets = some(engine, tmp_path / "f", [4, 4])
    for wait in (wait_any, wait_all):
        timer = threading.Timer(0.15, lambda: signal.raise_signal(signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            wait(tickets)
        timer.join()
    assert not any(ticket.done() for ticket in tickets)
    engine.close()


def test_in_a_forked_child(backend: str, tmp_path: Path) -> None:
    engine = slow_engine(backend, 4 * BLOCK)
    tickets = some(engine, tmp_path / "f", [2])
    calls = [
        lambda: wait_any(tickets),
        lambda: wait_all(tickets),
        tickets[0].cancel,
        tickets[0].promote,
        engine.outstanding,
        engine.device_counters,
    ]
    child = os.fork()
    if child == 0:
        refused = 0
        for call in calls:
            try:
                call()
            except AioError as error:
                refused += "process" in str(error)
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == len(calls)
    assert wait_all(tickets)
    engine.close()

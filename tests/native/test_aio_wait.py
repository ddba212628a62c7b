"""Waiting for one of several tickets, and for all of them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.held import LONG_S, held_engine, interrupt, while_this_thread_waits
from support.native_io import BLOCK, Buffer, make_file, noise
from support.patience import wait_until

from infinity._aio import READ, AioError, Engine, Ticket, wait_all, wait_any


def some(engine: Engine, path: Path, lengths: list[int]) -> list[Ticket]:
    file = make_file(path, noise(max(lengths) * BLOCK))
    tickets = []
    for length in lengths:
        target = Buffer(length * BLOCK)
        segment = (file, 0, length * BLOCK, target.address)
        tickets.append(engine.submit(READ, [segment], keep=target))
    return tickets


def two_held(backend: str, path: Path) -> tuple[Engine, list[Ticket]]:
    """Tickets that end well, when their engine is closed."""
    engine = held_engine(backend)
    tickets = some(engine, path, [2, 2])
    assert wait_until(lambda: engine.counters()["in_flight_blocks"] == 4)
    return engine, tickets


def test_any_returns_the_first_to_finish(backend: str, tmp_path: Path) -> None:
    """Of two engines."""
    slow, late = two_held(backend, tmp_path / "f")
    fast = Engine(backend=backend)
    tickets = [late[0], *some(fast, tmp_path / "g", [4]), late[1]]
    assert wait_any(tickets, LONG_S) == 1
    assert [ticket.done() for ticket in tickets] == [False, True, False]
    assert wait_any([tickets[2], tickets[1]]) == 1  # at once
    slow.close()
    assert wait_all(tickets, LONG_S)
    assert wait_any(tickets) == 0
    fast.close()


def test_timeouts(backend: str, tmp_path: Path) -> None:
    engine, tickets = two_held(backend, tmp_path / "f")
    assert wait_any(tickets, 0.02) is None
    assert wait_all(tickets, timeout_s=0.02) is False
    assert wait_any(tickets, 0.0) is None
    assert not any(ticket.done() for ticket in tickets)
    engine.close()
    assert wait_all(tickets, LONG_S) is True
    assert wait_all([]) is True
    with pytest.raises(ValueError, match="at least one"):
        wait_any([])
    with pytest.raises(TypeError, match="Ticket"):
        wait_all([1])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="number"):
        wait_any(tickets, float("nan"))


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


@pytest.mark.parametrize(("wait", "result"), [(wait_any, 0), (wait_all, True)])
def test_the_interpreter_is_free_meanwhile(
    backend: str, tmp_path: Path, wait: Callable[..., object], result: object
) -> None:
    """What they wait for happens because another Python thread runs."""
    engine, tickets = two_held(backend, tmp_path / "f")
    with while_this_thread_waits(engine.close):
        assert wait([tickets[0]], LONG_S) == result
    assert wait_all(tickets, LONG_S)


@pytest.mark.parametrize("wait", [wait_any, wait_all])
def test_interrupting(backend: str, tmp_path: Path, wait: Callable[[list[Ticket]], object]) -> None:
    engine, tickets = two_held(backend, tmp_path / "f")
    interrupt(engine, lambda: wait(tickets), tickets)


def test_in_a_forked_child(backend: str, tmp_path: Path) -> None:
    engine, tickets = two_held(backend, tmp_path / "f")
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
    engine.close()
    assert wait_all(tickets, LONG_S)

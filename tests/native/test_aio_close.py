"""Tests of waiting, interrupting, forking and closing of the native I/O engine."""

from __future__ import annotations

import errno
import gc
import os
import signal
from pathlib import Path

import pytest
from support.native_io import BLOCK, Buffer, make_file, noise
from support.stalled import LONG_S, interrupt, run_when_gil_is_released, stalled_engine
from support.waiting import wait_until

from infinity._aio import READ, AioError, Engine


def test_wait_releases_the_gil(backend: str, tmp_path: Path) -> None:
    engine = stalled_engine(backend)
    file = make_file(tmp_path / "f", bytes(4 * BLOCK))
    target = Buffer(4 * BLOCK)
    ticket = engine.submit(READ, [(file, 0, 4 * BLOCK, target.address)])
    assert wait_until(lambda: engine.counters()["in_flight_blocks"] == 4)
    assert ticket.wait(0.01) is False
    with pytest.raises(ValueError, match="number"):
        ticket.wait(float("nan"))
    assert not ticket.done()
    assert ticket.times_ns is None
    with run_when_gil_is_released(engine.close):
        assert ticket.wait(LONG_S) is True
    assert ticket.times_ns is not None


def test_interrupted_wait_leaves_the_request_running(backend: str, tmp_path: Path) -> None:
    engine = stalled_engine(backend)
    data = noise(4 * BLOCK)
    file = make_file(tmp_path / "f", data)
    target = Buffer(4 * BLOCK)
    ticket = engine.submit(READ, [(file, 0, 4 * BLOCK, target.address)])
    assert wait_until(lambda: engine.counters()["in_flight_blocks"] == 4)
    interrupt(engine, ticket.wait, [ticket])
    assert ticket.wait(LONG_S)
    assert target.bytes() == data


def test_close_cancels_queued_requests(backend: str, tmp_path: Path) -> None:
    engine = stalled_engine(backend)
    data = noise(20 * BLOCK)
    file = make_file(tmp_path / "f", data)
    target = Buffer(20 * BLOCK)
    tickets = [
        engine.submit(READ, [(file, i * BLOCK, BLOCK, target.address + i * BLOCK)])
        for i in range(20)
    ]
    file.close()  # pending requests keep the descriptor open
    assert wait_until(lambda: engine.counters()["in_flight_blocks"] == 4)
    engine.close()  # cancels queued requests
    cancelled = 0
    for i, ticket in enumerate(tickets):
        assert ticket.done()
        if ticket.error is None:
            assert ticket.wait()
            assert target.bytes(i * BLOCK, BLOCK) == data[i * BLOCK : (i + 1) * BLOCK]
            continue
        with pytest.raises(AioError) as caught:
            ticket.wait()
        assert (caught.value.errno, caught.value.filename) == (errno.ECANCELED, file.path)
        cancelled += 1
    assert cancelled == 16
    engine.close()
    with pytest.raises(AioError) as caught:
        engine.submit(READ, [])
    assert caught.value.errno == errno.ECANCELED


def test_dropped_engine_waits_for_blocks_in_flight(backend: str, tmp_path: Path) -> None:
    file = make_file(tmp_path / "f", bytes(8 * BLOCK))
    target = Buffer(8 * BLOCK)
    engine = stalled_engine(backend, queue_depth=2)
    ticket = engine.submit(READ, [(file, 0, 8 * BLOCK, target.address)])
    del engine
    gc.collect()
    assert ticket.done()
    with pytest.raises(AioError, match="closed"):
        ticket.wait()


def test_engine_in_forked_child_raises(backend: str, tmp_path: Path) -> None:
    engine = stalled_engine(backend)
    file = make_file(tmp_path / "f", bytes(4 * BLOCK))
    target = Buffer(4 * BLOCK)
    ticket = engine.submit(READ, [(file, 0, 4 * BLOCK, target.address)])
    assert wait_until(lambda: engine.counters()["in_flight_blocks"] == 4)
    child = os.fork()
    if child == 0:
        status = 0
        calls = [ticket.wait, ticket.cancel, engine.counters]
        calls += [lambda: engine.submit(READ, []), engine.device_counters, engine.close]
        for call in calls:
            try:
                call()
                status = 1
            except OSError as error:
                status |= 2 * ("process" not in str(error))
        del call, calls, engine, ticket, file
        gc.collect()
        child_engine = Engine(backend=backend)
        child_engine.close()
        os._exit(status)
    ended: list[int] = []

    def reap() -> bool:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            ended.append(os.waitstatus_to_exitcode(status))
        return bool(pid)

    if not wait_until(reap):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pytest.fail("the child hangs")
    assert ended == [0]
    assert not ticket.done()
    engine.close()
    assert ticket.wait(LONG_S)


def test_dropped_ticket_waits_for_its_transfer(backend: str, tmp_path: Path) -> None:
    """Dropping a ticket waits for its transfer, so that its memory can be reused."""
    file = make_file(tmp_path / "file", noise(4 * BLOCK))
    buffer = Buffer(4 * BLOCK)
    engine = stalled_engine(backend)
    ticket = engine.submit(READ, [(file, 0, 4 * BLOCK, buffer.address)])
    assert wait_until(lambda: engine.counters()["in_flight_blocks"] == 4)
    events: list[str] = []

    def close() -> None:
        events.append("closing")
        engine.close()

    with run_when_gil_is_released(close):
        del ticket
        events.append("dropped")
        assert engine.counters()["in_flight_blocks"] == 0
    assert events == ["closing", "dropped"]
    file.close()

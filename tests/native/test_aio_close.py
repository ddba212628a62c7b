"""Waiting, interrupting, forking, closing."""

from __future__ import annotations

import errno
import gc
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from support.native_io import BLOCK, Buffer, make_file, noise, slow_engine
from support.patience import wait_until

from infinity._aio import READ, AioError, Engine


def test_waits_release_the_interpreter(backend: str, tmp_path: Path) -> None:
    engine = slow_engine(backend, 8 * BLOCK)
    file = make_file(tmp_path / "f", bytes(4 * BLOCK))
    target = Buffer(4 * BLOCK)
    ticks = 0
    stop = False

    def tick() -> None:
        nonlocal ticks
        while not stop:
            ticks += 1
            time.sleep(0.005)

    thread = threading.Thread(target=tick)
    ticket = engine.submit(READ, [(file, 0, 4 * BLOCK, target.address)])
    thread.start()
    before = ticks
    assert ticket.wait(0.1) is False
    assert not ticket.done()
    assert ticket.latency_ns == 0
    assert ticket.wait(30.0) is True
    assert ticks - before > 10
    assert 0.4e9 < ticket.latency_ns < 30e9
    stop = True
    thread.join()
    engine.close()


def test_interrupting_a_wait(backend: str, tmp_path: Path) -> None:
    engine = slow_engine(backend, BLOCK)
    data = noise(4 * BLOCK)
    file = make_file(tmp_path / "f", data)
    target = Buffer(4 * BLOCK)
    ticket = engine.submit(READ, [(file, 0, 4 * BLOCK, target.address)])
    timer = threading.Timer(0.2, lambda: signal.raise_signal(signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        ticket.wait()
    timer.join()
    assert not ticket.done()
    assert ticket.wait(30.0)
    assert target.bytes() == data
    engine.close()


def test_closing_with_requests_in_flight(backend: str, tmp_path: Path) -> None:
    engine = slow_engine(backend, 4 * BLOCK)
    data = noise(20 * BLOCK)
    file = make_file(tmp_path / "f", data)
    target = Buffer(20 * BLOCK)
    tickets = [
        engine.submit(READ, [(file, i * BLOCK, BLOCK, target.address + i * BLOCK)])
        for i in range(20)
    ]
    file.close()  # requests keep it open
    assert wait_until(lambda: engine.counters()["in_flight_blocks"] > 0)
    engine.close()  # does not wait for all: that would take 5 s
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
    assert 0 < cancelled < 20
    mark = bytes([7]) * target.nbytes
    target.map[:] = mark
    time.sleep(0.1)
    assert target.bytes() == mark
    engine.close()
    with pytest.raises(AioError) as caught:
        engine.submit(READ, [])
    assert caught.value.errno == errno.ECANCELED


def test_a_dropped_engine_finishes_what_the_kernel_holds(backend: str, tmp_path: Path) -> None:
    file = make_file(tmp_path / "f", bytes(8 * BLOCK))
    target = Buffer(8 * BLOCK)
    engine = slow_engine(backend, 2 * BLOCK, queue_depth=2)
    ticket = engine.submit(READ, [(file, 0, 8 * BLOCK, target.address)])
    del engine
    gc.collect()
    assert ticket.done()
    with pytest.raises(AioError, match="closed"):
        ticket.wait()


def test_after_a_fork(backend: str, tmp_path: Path) -> None:
    engine = slow_engine(backend, 4 * BLOCK)
    file = make_file(tmp_path / "f", bytes(4 * BLOCK))
    target = Buffer(4 * BLOCK)
    ticket = engine.submit(READ, [(file, 0, 4 * BLOCK, target.address)])
    child = os.fork()
    if child == 0:
        status = 0
        for call in (lambda: engine.submit(READ, []), ticket.wait, engine.counters, engine.close):
            try:
                call()
                status = 1
            except OSError as error:
                status |= 2 * ("process" not in str(error))
        del call, engine, ticket, file
        gc.collect()
        own = Engine(backend=backend)
        own.close()
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
    assert ticket.wait(30.0)
    engine.close()


def test_a_dropped_ticket_waits_for_its_bytes(backend: str, tmp_path: Path) -> None:
    """Memory is idle once nobody holds the ticket, even if nobody waited."""
    file = make_file(tmp_path / "file", noise(1 << 20))
    buffer = Buffer(1 << 20)
    engine = slow_engine(backend, 4 << 20)
    start = time.monotonic()
    ticket = engine.submit(READ, [(file, 0, 1 << 20, buffer.address)])
    del ticket
    assert time.monotonic() - start > 0.15
    assert engine.counters()["in_flight_blocks"] == 0
    engine.close()
    file.close()

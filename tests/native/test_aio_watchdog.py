"""Tests of the watchdog: requests that never complete raise an error that names them."""

from __future__ import annotations

import errno
import gc
import re
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
from support.leaks import descriptors, native_threads
from support.native_io import BLOCK, Buffer, make_file
from support.waiting import wait_until

from infinity._aio import READ, WRITE, AioError, Engine, File

STUCK = "seed=1,kinds=stuck,rate=1"
STUCK_AFTER_S = 0.05


def stuck_engine(backend: str, **settings: object) -> Engine:
    return Engine(
        backend=backend,
        block_size=BLOCK,
        queue_depth=4,
        stuck_after_s=STUCK_AFTER_S,
        faults=STUCK,
        **settings,  # type: ignore[arg-type]
    )


def raises_timeout(call: Callable[[], object]) -> AioError:
    with pytest.raises(AioError) as caught:
        call()
    assert caught.value.errno == errno.ETIMEDOUT
    return caught.value


def in_flight(engine: Engine) -> int:
    return engine.counters()["in_flight_blocks"]


def test_timeout_error_names_outstanding_requests(backend: str, tmp_path: Path) -> None:
    file = make_file(tmp_path / "f", bytes(8 * BLOCK))
    target = Buffer(8 * BLOCK)
    engine = stuck_engine(backend)
    ticket = engine.submit(WRITE, [(file, BLOCK, 6 * BLOCK, target.address)])
    assert wait_until(lambda: in_flight(engine) == 4)
    error = raises_timeout(ticket.wait)
    assert (error.op, error.filename) == ("write", file.path)
    assert (error.offset, error.length) == (BLOCK, BLOCK)
    assert "no completion from the device" in str(error)
    text = f"write of {BLOCK} bytes at offset {BLOCK} of '{file.path}' for "
    assert re.search(re.escape(text) + r"\d+\.\d", str(error))
    assert re.search(r"and \d+ others", str(error))
    assert not ticket.done()
    assert in_flight(engine) == 4
    raises_timeout(engine.close)


def test_close_of_stuck_engine_raises_and_leaks_nothing(backend: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(8 * BLOCK))
    target = Buffer(8 * BLOCK)
    files, threads = descriptors(), native_threads()
    for _ in range(2):
        file = File(str(tmp_path / "f"), direct="off")
        engine = stuck_engine(backend)
        tickets = [engine.submit(READ, [(file, 0, 2 * BLOCK, target.address)]) for _ in range(5)]
        wait_until(lambda engine=engine: in_flight(engine) == 4)  # type: ignore[misc]
        error = raises_timeout(engine.close)
        assert (error.op, error.filename) == ("close", file.path)
        assert all(ticket.done() and ticket.error for ticket in tickets)
        engine.close()  # raises only once
        with pytest.raises(AioError, match="closed"):
            engine.submit(READ, [])
        del engine, tickets, file, error  # the traceback of the error holds the engine
    gc.collect()
    assert wait_until(lambda: native_threads() <= threads), native_threads() - threads
    assert wait_until(lambda: descriptors() <= files), descriptors() - files


def test_queued_ticket_behind_stuck_device_times_out(backend: str, tmp_path: Path) -> None:
    file = make_file(tmp_path / "f", bytes(8 * BLOCK))
    target = Buffer(8 * BLOCK)
    engine = stuck_engine(backend)
    first = engine.submit(READ, [(file, 0, 4 * BLOCK, target.address)])
    assert wait_until(lambda: in_flight(engine) == 4)
    queued = engine.submit(READ, [(file, 4 * BLOCK, BLOCK, target.address)])
    raises_timeout(first.wait)
    raises_timeout(queued.wait)
    assert queued.cancel() is True
    raises_timeout(engine.close)


@pytest.mark.clock
def test_slow_disk_does_not_trigger_watchdog(backend: str, tmp_path: Path) -> None:
    file = make_file(tmp_path / "f", bytes(4 * BLOCK))
    target = Buffer(4 * BLOCK)
    engine = Engine(backend=backend, block_size=BLOCK, slow_bytes_per_s=1, stuck_after_s=0.3)
    slow = engine.submit(READ, [(file, 0, 4 * BLOCK, target.address)])
    assert slow.wait(0.7) is False  # no error
    engine.close()
    assert slow.wait()


class Referent:
    """Object that supports weak references."""


def test_dropped_stuck_ticket_leaks_memory_and_counts_it(backend: str, tmp_path: Path) -> None:
    file = make_file(tmp_path / "f", bytes(BLOCK))
    target = Buffer(BLOCK)
    engine = stuck_engine(backend)
    referent = Referent()
    alive = weakref.ref(referent)
    ticket = engine.submit(READ, [(file, 0, BLOCK, target.address)], keep=(referent, target))
    assert wait_until(lambda: in_flight(engine) == 1)
    del referent
    del ticket
    gc.collect()
    assert alive() is not None
    counters = engine.counters()
    assert (counters["leaked_tickets"], counters["leaked_bytes"]) == (1, BLOCK)
    raises_timeout(engine.close)


def test_completed_ticket_releases_kept_objects(engine: Engine, tmp_path: Path) -> None:
    file = make_file(tmp_path / "f", bytes(BLOCK))
    target = Buffer(BLOCK)
    referent = Referent()
    alive = weakref.ref(referent)
    ticket = engine.submit(READ, [(file, 0, BLOCK, target.address)], keep=referent)
    del referent
    assert alive() is not None
    assert ticket.wait()
    del ticket
    assert alive() is None
    assert engine.counters()["leaked_tickets"] == 0


def test_invalid_watchdog_settings_are_refused() -> None:
    for value in (-1.0, float("nan"), 1e10):
        with pytest.raises(ValueError, match="stuck_after_s"):
            Engine(stuck_after_s=value)
    with pytest.raises(ValueError, match="watchdog"):
        Engine(faults="seed=1")

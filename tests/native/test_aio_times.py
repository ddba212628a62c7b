"""Tests of the times of tickets: submitted, begun, completed."""

from __future__ import annotations

import time
from pathlib import Path

from support.native_io import BLOCK, Buffer, make_file, slow_engine
from support.stalled import LONG_S, stalled_engine
from support.waiting import wait_until

from infinity._aio import READ, Engine


def test_ticket_times_use_perf_counter_clock(engine: Engine, tmp_path: Path) -> None:
    file = make_file(tmp_path / "f", bytes(4 * BLOCK))
    target = Buffer(4 * BLOCK)
    before = time.perf_counter_ns()
    ticket = engine.submit(READ, [(file, 0, 4 * BLOCK, target.address)])
    after = time.perf_counter_ns()
    assert ticket.wait(LONG_S)
    assert ticket.times_ns is not None
    submitted, begun, completed = ticket.times_ns
    assert before <= submitted <= after
    assert submitted <= begun <= completed <= time.perf_counter_ns()


def test_queued_ticket_begins_after_previous_ends(backend: str, tmp_path: Path) -> None:
    engine = slow_engine(backend, 50 * BLOCK, queue_depth=1)
    file = make_file(tmp_path / "f", bytes(4 * BLOCK))
    target = Buffer(4 * BLOCK)
    first, second = (engine.submit(READ, [(file, 0, 2 * BLOCK, target.address)]) for _ in range(2))
    assert first.wait(LONG_S)
    assert second.wait(LONG_S)
    assert first.times_ns is not None
    assert second.times_ns is not None
    assert second.times_ns[0] < second.times_ns[1]
    assert first.times_ns[2] <= second.times_ns[1]
    engine.close()


def test_running_ticket_has_no_times(backend: str, tmp_path: Path) -> None:
    engine = stalled_engine(backend, queue_depth=1)
    file = make_file(tmp_path / "f", bytes(BLOCK))
    target = Buffer(BLOCK)
    tickets = [engine.submit(READ, [(file, 0, BLOCK, target.address)]) for _ in range(2)]
    assert [ticket.times_ns for ticket in tickets] == [None, None]
    engine.close()


def test_cancelled_ticket_has_zero_duration(backend: str, tmp_path: Path) -> None:
    engine = stalled_engine(backend, queue_depth=1)
    file = make_file(tmp_path / "f", bytes(4 * BLOCK))
    target = Buffer(4 * BLOCK)
    first = engine.submit(READ, [(file, 0, BLOCK, target.address)])
    second = engine.submit(READ, [(file, 0, BLOCK, target.address)])
    assert second.cancel()
    assert second.times_ns is not None
    assert second.times_ns[1] == second.times_ns[2] >= second.times_ns[0] > 0
    assert wait_until(lambda: engine.counters()["in_flight_blocks"] == 1)
    engine.close()
    assert first.wait(LONG_S)

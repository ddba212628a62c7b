"""Tests of priorities, promotion and cancellation, on a slow disk that does one block at a time."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from support.native_io import BLOCK, Buffer, make_file, noise, slow_engine
from support.stalled import LONG_S, wait_all
from support.waiting import wait_until

from infinity._aio import (
    BACKGROUND,
    NORMAL,
    READ,
    URGENT,
    WRITE,
    AioError,
    Engine,
    Ticket,
)

NUM_BLOCKS = 40


class SlowDisk:
    """Engine of depth 1 with one file and one buffer; requests are multiples of a block."""

    def __init__(self, backend: str, path: Path, blocks_per_s: int = 400) -> None:
        self.engine = slow_engine(backend, blocks_per_s * BLOCK, queue_depth=1)
        self.data = noise(NUM_BLOCKS * BLOCK)
        self.file = make_file(path, self.data)
        self.target = Buffer(NUM_BLOCKS * BLOCK)

    def submit(self, num_blocks: int, priority: int, op: int = READ, first: int = 0) -> Ticket:
        at = first * BLOCK
        segment = (self.file, at, num_blocks * BLOCK, self.target.address + at)
        return self.engine.submit(op, [segment], priority=priority)

    def close(self) -> None:
        self.engine.close()
        self.file.close()


@pytest.fixture
def disk(backend: str, tmp_path: Path) -> Iterator[SlowDisk]:
    disk = SlowDisk(backend, tmp_path / "f")
    yield disk
    disk.close()


def submit_while_busy(disk: SlowDisk, submit: Callable[[], list[Ticket]]) -> list[Ticket]:
    """Return tickets that were all submitted while the disk was busy with other requests."""
    for count in (1, 3, 9, 27, 81):  # more if this machine is busy; the last takes four seconds
        first = [disk.submit(20, URGENT) for _ in range(count)]
        tickets = submit()
        if not first[-1].done():
            return tickets
        assert wait_all(tickets)
    pytest.fail("this machine is slower than the slow disk")


def completion_order(tickets: Sequence[Ticket]) -> list[int]:
    """Return the indices of the tickets in order of completion."""
    assert wait_until(lambda: all(ticket.done() for ticket in tickets))
    return sorted(range(len(tickets)), key=lambda index: end_time(tickets[index]))


def end_time(ticket: Ticket) -> int:
    assert ticket.times_ns is not None
    return ticket.times_ns[2]


def test_priority_classes_complete_in_order(disk: SlowDisk) -> None:
    classes = (BACKGROUND, NORMAL, URGENT, NORMAL)
    tickets = submit_while_busy(disk, lambda: [disk.submit(6, priority) for priority in classes])
    assert completion_order(tickets) == [2, 1, 3, 0]


def test_default_priority_is_normal(disk: SlowDisk) -> None:
    segment = (disk.file, 0, 6 * BLOCK, disk.target.address)

    def submit() -> list[Ticket]:
        low, default = disk.submit(6, BACKGROUND), disk.engine.submit(READ, [segment])
        return [low, default, disk.submit(6, URGENT)]

    assert completion_order(submit_while_busy(disk, submit)) == [2, 1, 0]
    for priority in (-1, 3):
        with pytest.raises(ValueError, match="priority must be"):
            disk.submit(1, priority)


def test_no_priority_class_starves(disk: SlowDisk) -> None:
    flood = [disk.submit(NUM_BLOCKS, URGENT) for _ in range(3)]
    others = [disk.submit(2, NORMAL), disk.submit(2, BACKGROUND)]
    assert wait_until(flood[-1].done)
    assert completion_order([*others, flood[-1]])[-1] == 2


def test_wait_promotes_ticket(disk: SlowDisk) -> None:
    def submit() -> list[Ticket]:
        return [*(disk.submit(40, NORMAL) for _ in range(2)), disk.submit(4, BACKGROUND)]

    *others, low = submit_while_busy(disk, submit)
    assert low.wait(0.0) is False  # a timeout of 0 does not promote
    assert low.wait(LONG_S)
    assert wait_all(others)
    assert end_time(low) < end_time(others[1])


def test_reads_and_writes_alternate(disk: SlowDisk) -> None:
    """Two long queues of reads and writes are served alternately."""

    def submit() -> list[Ticket]:
        return [disk.submit(1, NORMAL, op, first=i) for op in (READ, WRITE) for i in range(8)]

    directions = [index // 8 for index in completion_order(submit_while_busy(disk, submit))]
    lead = [sum(1 - 2 * direction for direction in directions[:end]) for end in range(1, 17)]
    assert max(map(abs, lead)) <= 2, directions


def test_cancel_queued_and_running_tickets(backend: str, tmp_path: Path) -> None:
    disk = SlowDisk(backend, tmp_path / "f", blocks_per_s=10)
    running = disk.submit(30, NORMAL)
    waiting = disk.submit(30, NORMAL)
    assert waiting.cancel() is True
    assert waiting.done()
    with pytest.raises(AioError, match="cancelled") as caught:
        waiting.wait()
    assert (caught.value.errno, caught.value.filename) == (errno.ECANCELED, disk.file.path)
    assert wait_until(lambda: disk.engine.counters()["in_flight_blocks"] > 0)
    assert running.cancel() is False  # a block is in flight
    with pytest.raises(AioError) as caught:
        running.wait(LONG_S)
    assert caught.value.errno == errno.ECANCELED
    assert running.cancel() is True
    counters = disk.engine.counters()
    assert counters["queued_blocks"] == counters["in_flight_blocks"] == 0
    assert counters["read_requests"] < 20
    disk.close()


def test_cancel_of_completed_ticket_has_no_effect(engine: Engine, tmp_path: Path) -> None:
    data = noise(BLOCK)
    target = Buffer(BLOCK)
    ticket = engine.submit(READ, [(make_file(tmp_path / "f", data), 0, BLOCK, target.address)])
    assert ticket.wait()
    assert ticket.cancel() is True
    assert ticket.wait()
    assert ticket.error is None
    assert target.bytes() == data

"""Who goes first, who waits, and who is called back. The disk does one block after the other."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.native_io import BLOCK, Buffer, make_file, noise, slow_engine
from support.patience import wait_until

from infinity._aio import (
    BACKGROUND,
    NORMAL,
    READ,
    URGENT,
    WRITE,
    AioError,
    Engine,
    Ticket,
    wait_all,
)

NUM_BLOCKS = 40


class SlowDisk:
    """One engine of depth 1, one file, one buffer; requests are of whole blocks."""

    def __init__(self, backend: str, path: Path, blocks_per_s: int = 100) -> None:
        self.engine = slow_engine(backend, blocks_per_s * BLOCK, queue_depth=1)
        self.data = noise(NUM_BLOCKS * BLOCK)
        self.file = make_file(path, self.data)
        self.target = Buffer(NUM_BLOCKS * BLOCK)

    def submit(self, num_blocks: int, priority: int, op: int = READ, first: int = 0) -> Ticket:
        at = first * BLOCK
        segment = (self.file, at, num_blocks * BLOCK, self.target.address + at)
        return self.engine.submit(op, [segment], priority=priority)


@pytest.fixture
def disk(backend: str, tmp_path: Path) -> SlowDisk:
    return SlowDisk(backend, tmp_path / "f")


def order(tickets: Sequence[Ticket]) -> list[int]:
    """Indices of finished tickets, first to last."""
    assert wait_until(lambda: all(ticket.done() for ticket in tickets))
    return sorted(range(len(tickets)), key=lambda index: ended(tickets[index]))


def ended(ticket: Ticket) -> int:
    assert ticket.times_ns is not None
    return ticket.times_ns[2]


def test_classes_finish_in_order(disk: SlowDisk) -> None:
    first = disk.submit(20, NORMAL)  # keeps the disk busy while the others queue up
    tickets = [disk.submit(6, priority) for priority in (BACKGROUND, NORMAL, URGENT, NORMAL)]
    assert order(tickets) == [2, 1, 3, 0]
    assert first.wait()
    disk.engine.close()


def test_the_default_is_the_middle_class(disk: SlowDisk) -> None:
    disk.submit(20, NORMAL)
    low = disk.submit(6, BACKGROUND)
    default = disk.engine.submit(READ, [(disk.file, 0, 6 * BLOCK, disk.target.address)])
    high = disk.submit(6, URGENT)
    assert order([low, default, high]) == [2, 1, 0]
    for priority in (-1, 3):
        with pytest.raises(ValueError, match="priority must be"):
            disk.submit(1, priority)
    disk.engine.close()


def test_no_class_starves(disk: SlowDisk) -> None:
    flood = [disk.submit(NUM_BLOCKS, URGENT) for _ in range(3)]
    normal = disk.submit(2, NORMAL)
    low = disk.submit(2, BACKGROUND)
    assert wait_until(flood[-1].done)
    assert order([normal, low, flood[-1]])[-1] == 2
    disk.engine.close()


def test_waiting_promotes(disk: SlowDisk) -> None:
    disk.submit(20, NORMAL)
    others = [disk.submit(8, NORMAL) for _ in range(3)]
    low = disk.submit(4, BACKGROUND)
    assert low.wait(0.0) is False  # looking is not waiting
    assert low.wait(60.0)
    assert wait_until(lambda: all(ticket.done() for ticket in others))
    assert all(ended(low) < ended(ticket) for ticket in others[1:])
    disk.engine.close()


def test_promoting_without_waiting(disk: SlowDisk) -> None:
    disk.submit(20, NORMAL)
    others = [disk.submit(8, NORMAL) for _ in range(2)]
    low = disk.submit(4, BACKGROUND)
    low.promote()
    assert order([*others, low]) == [2, 0, 1]
    low.promote()  # nothing is left to promote
    disk.engine.close()


def test_reads_and_writes_take_turns(disk: SlowDisk) -> None:
    """Two long requests of different direction end together, not one after the other."""
    read = disk.submit(16, NORMAL, READ, first=0)
    write = disk.submit(16, NORMAL, WRITE, first=20)
    assert wait_all([read, write])
    assert read.latency_ns > 0.8 * write.latency_ns
    disk.engine.close()


def test_cancelling(disk: SlowDisk) -> None:
    running = disk.submit(30, NORMAL)
    queued = disk.submit(30, NORMAL)
    assert queued.cancel() is True
    assert queued.done()
    with pytest.raises(AioError, match="cancelled") as caught:
        queued.wait()
    assert (caught.value.errno, caught.value.filename) == (errno.ECANCELED, disk.file.path)
    assert wait_until(lambda: bool(disk.engine.outstanding()))
    assert running.cancel() is False  # a block is with the kernel
    with pytest.raises(AioError) as caught:
        running.wait(10.0)
    assert caught.value.errno == errno.ECANCELED
    assert running.cancel() is True
    counters = disk.engine.counters()
    assert counters["queued_blocks"] == counters["in_flight_blocks"] == 0
    assert counters["read_requests"] < 20
    disk.engine.close()


def test_cancelling_what_is_done_changes_nothing(engine: Engine, tmp_path: Path) -> None:
    data = noise(BLOCK)
    target = Buffer(BLOCK)
    ticket = engine.submit(READ, [(make_file(tmp_path / "f", data), 0, BLOCK, target.address)])
    assert ticket.wait()
    assert ticket.cancel() is True
    assert ticket.wait()
    assert ticket.error is None
    assert target.bytes() == data

"""Tests of queue depth, counters and the rate limit of the native I/O engine."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.leaks import descriptors, native_threads
from support.native_io import BLOCK, Buffer, make_file, slow_engine
from support.stalled import LONG_S, stalled_engine
from support.waiting import wait_until

from infinity._aio import READ, WRITE, Engine, File


def test_queue_depth_bounds_blocks_in_flight(backend: str, tmp_path: Path) -> None:
    engine = stalled_engine(backend, queue_depth=3)
    file = make_file(tmp_path / "f", bytes(20 * BLOCK))
    target = Buffer(20 * BLOCK)
    tickets = [engine.submit(READ, [(file, 0, 5 * BLOCK, target.address)]) for _ in range(4)]
    assert not any(ticket.done() for ticket in tickets)
    assert wait_until(lambda: engine.counters()["in_flight_blocks"] == 3)
    assert engine.counters()["queued_blocks"] == 17
    engine.close()


def test_counters_of_blocks_and_tickets(backend: str, tmp_path: Path) -> None:
    engine = Engine(backend=backend, block_size=BLOCK, queue_depth=3)
    file = make_file(tmp_path / "f", bytes(20 * BLOCK))
    target = Buffer(20 * BLOCK)
    tickets = [engine.submit(READ, [(file, 0, 5 * BLOCK, target.address)]) for _ in range(4)]
    seen = 0
    while not all(ticket.done() for ticket in tickets):
        counters = engine.counters()
        seen = max(seen, counters["in_flight_blocks"])
        assert counters["in_flight_blocks"] + counters["queued_blocks"] <= 20
    assert seen <= 3
    counters = engine.counters()
    assert counters["read_requests"] == 20
    assert counters["read_bytes"] == 20 * BLOCK
    assert counters["tickets"] == 4
    assert counters["write_requests"] == counters["write_bytes"] == counters["write_ns"] == 0
    assert 0 < counters["busy_ns"] <= counters["read_ns"] * 1.01
    engine.close()


@pytest.mark.clock
def test_rate_limit_is_shared_by_reads_and_writes(backend: str, tmp_path: Path) -> None:
    engine = slow_engine(backend, 32 * BLOCK)
    file = make_file(tmp_path / "f", bytes(16 * BLOCK))
    target = Buffer(16 * BLOCK)
    cpu_start = time.process_time()
    start = time.monotonic()
    tickets = [
        engine.submit(op, [(file, i * BLOCK, 4 * BLOCK, target.address + i * BLOCK)])
        for i, op in ((0, READ), (4, WRITE), (8, READ), (12, WRITE))
    ]
    for ticket in tickets:
        assert ticket.wait(30.0)
    assert 0.45 < time.monotonic() - start < 2.0  # 16 blocks at 32 blocks a second
    assert time.process_time() - cpu_start < 0.3
    engine.close()


def test_rate_limit_bounds_reads_and_writes(backend: str, tmp_path: Path) -> None:
    """Blocks complete one after the other, none faster than the rate allows."""
    engine = slow_engine(backend, 500 * BLOCK, queue_depth=8)
    file = make_file(tmp_path / "f", bytes(8 * BLOCK))
    target = Buffer(8 * BLOCK)
    tickets = [
        engine.submit(op, [(file, i * BLOCK, BLOCK, target.address + i * BLOCK)])
        for i, op in enumerate((READ, WRITE) * 4)
    ]
    assert all(ticket.wait(LONG_S) for ticket in tickets)
    first = min(ticket.times_ns[1] for ticket in tickets if ticket.times_ns)
    ends = sorted(ticket.times_ns[2] for ticket in tickets if ticket.times_ns)
    for number, end in enumerate(ends, start=1):  # lower bounds only: the rate is a maximum
        assert end - first > 0.9e9 * number / 500
    engine.close()


def test_engine_leaks_no_descriptors_or_threads(backend: str, tmp_path: Path) -> None:
    target = Buffer(BLOCK)
    (tmp_path / "f").write_bytes(bytes(BLOCK))
    files, threads = descriptors(), native_threads()
    for iteration in range(12):
        engine = slow_engine(backend, 10**9) if iteration % 2 else Engine(backend=backend)
        file = File(str(tmp_path / "f"), direct="off")
        ticket = engine.submit(READ, [(file, 0, BLOCK, target.address)])
        if iteration % 3:
            engine.close()
        del engine, file, ticket
    assert wait_until(lambda: native_threads() <= threads), native_threads() - threads
    assert wait_until(lambda: descriptors() <= files), descriptors() - files


@pytest.fixture
def files_on_two_devices(tmp_path: Path) -> Iterator[list[File]]:
    memory = Path("/dev/shm")
    if not memory.is_dir() or os.stat(memory).st_dev == os.stat(tmp_path).st_dev:
        pytest.skip("one device only")
    first = make_file(tmp_path / "f", bytes(8 * BLOCK))
    path = memory / f"aio-test-{os.getpid()}"
    second = make_file(path, bytes(8 * BLOCK))
    path.unlink()
    yield [first, second]
    first.close()
    second.close()


def check_device_counters(engine: Engine, files: list[File], backend: str) -> None:
    """Read both files and write one; check the counters of each device."""
    target = Buffer(16 * BLOCK)
    segments = [
        (file, 0, 8 * BLOCK, target.address + i * 8 * BLOCK) for i, file in enumerate(files)
    ]
    assert engine.device_counters() == {}
    assert engine.submit(READ, segments).wait()
    assert engine.submit(WRITE, segments[:1]).wait()
    devices = engine.device_counters()
    assert set(devices) == {file.device for file in files}
    for file, num_written in zip(files, (8, 0), strict=True):
        counters = devices[file.device]
        assert counters["backend"] == backend
        assert (counters["read_requests"], counters["write_requests"]) == (8, num_written)
        assert (counters["read_bytes"], counters["write_bytes"]) == (8 * BLOCK, num_written * BLOCK)
        assert counters["queued_blocks"] == counters["in_flight_blocks"] == 0
        assert counters["read_queue_ns"] > 0 < counters["read_device_ns"]
        assert (
            counters["read_device_ns"] + counters["write_device_ns"] <= counters["busy_ns"] * 1.01
        )
    totals = engine.counters()
    for key in ("read_bytes", "write_bytes", "read_requests", "read_queue_ns"):
        assert totals[key] == sum(int(counters[key]) for counters in devices.values())


def test_device_counters(backend: str, files_on_two_devices: list[File]) -> None:
    engine = Engine(backend=backend, block_size=BLOCK, queue_depth=1)
    check_device_counters(engine, files_on_two_devices, backend)
    engine.close()


def test_devices_transfer_concurrently(backend: str, files_on_two_devices: list[File]) -> None:
    engine = stalled_engine(backend, queue_depth=1)
    target = Buffer(2 * BLOCK)
    segments = [
        (f, 0, BLOCK, target.address + i * BLOCK) for i, f in enumerate(files_on_two_devices)
    ]
    ticket = engine.submit(READ, segments)
    assert wait_until(lambda: engine.counters()["in_flight_blocks"] == 2)
    counted = engine.device_counters().values()
    assert [counters["in_flight_blocks"] for counters in counted] == [1, 1]
    engine.close()
    assert ticket.wait(LONG_S)


@pytest.mark.clock
def test_device_times_of_slow_engine(backend: str, files_on_two_devices: list[File]) -> None:
    engine = slow_engine(backend, 64 * BLOCK, queue_depth=1)
    check_device_counters(engine, files_on_two_devices, backend)
    devices = engine.device_counters().values()
    for counters in devices:
        # At depth 1 the k-th block queues for k - 1 others: 28 block times in all.
        assert 20 / 64 < int(counters["read_queue_ns"]) / 1e9 < 2.0
        assert 0.1 < int(counters["read_device_ns"]) / 1e9 < 1.0
    busy_ns = engine.counters()["busy_ns"]
    assert busy_ns < 0.9 * sum(int(counters["busy_ns"]) for counters in devices)
    engine.close()

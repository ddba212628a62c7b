"""Depth, counters and the artificially slow disk."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from support.native_io import BLOCK, Buffer, make_file, slow_engine
from support.patience import in_a_quiet_moment, wait_until

from infinity._aio import READ, WRITE, Engine, File


def test_the_depth_is_bounded_and_submitting_never_waits(backend: str, tmp_path: Path) -> None:
    engine = slow_engine(backend, 10 * BLOCK, queue_depth=3)
    file = make_file(tmp_path / "f", bytes(20 * BLOCK))
    target = Buffer(20 * BLOCK)
    tickets = [engine.submit(READ, [(file, 0, 5 * BLOCK, target.address)]) for _ in range(4)]
    assert not tickets[-1].done()  # for two seconds
    seen = 0
    while not all(ticket.done() for ticket in tickets):
        counters = engine.counters()
        seen = max(seen, counters["in_flight_blocks"])
        assert counters["in_flight_blocks"] + counters["queued_blocks"] <= 20
        time.sleep(0.005)
    assert 1 <= seen <= 3
    counters = engine.counters()
    assert counters["read_requests"] == 20
    assert counters["read_bytes"] == 20 * BLOCK
    assert counters["tickets"] == 4
    assert counters["write_requests"] == counters["write_bytes"] == counters["write_ns"] == 0
    assert 0 < counters["busy_ns"] <= counters["read_ns"] * 1.01
    engine.close()


def test_a_slow_engine_keeps_its_rate_over_both_directions(backend: str, tmp_path: Path) -> None:
    engine = slow_engine(backend, 32 * BLOCK)
    file = make_file(tmp_path / "f", bytes(16 * BLOCK))
    target = Buffer(16 * BLOCK)

    def move() -> None:
        cpu_start = time.process_time()
        start = time.monotonic()
        tickets = [
            engine.submit(op, [(file, i * BLOCK, 4 * BLOCK, target.address + i * BLOCK)])
            for i, op in ((0, READ), (4, WRITE), (8, READ), (12, WRITE))
        ]
        for ticket in tickets:
            assert ticket.wait(30.0)
        elapsed_s = time.monotonic() - start
        assert 0.45 < elapsed_s < 2.0  # 16 blocks at 32 blocks a second
        assert time.process_time() - cpu_start < 0.3

    in_a_quiet_moment(move)
    engine.close()


def test_no_descriptor_or_thread_is_leaked(backend: str, tmp_path: Path) -> None:
    def usage() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    target = Buffer(BLOCK)
    (tmp_path / "f").write_bytes(bytes(BLOCK))
    before = usage()
    for turn in range(50):
        engine = slow_engine(backend, 10**9) if turn % 2 else Engine(backend=backend)
        file = File(str(tmp_path / "f"), direct="off")
        ticket = engine.submit(READ, [(file, 0, BLOCK, target.address)])
        if turn % 3:
            engine.close()
        del engine, file, ticket
    assert wait_until(lambda: usage() <= before), (before, usage())


def test_counters_of_devices(backend: str, tmp_path: Path) -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir() or os.stat(memory).st_dev == os.stat(tmp_path).st_dev:
        pytest.skip("one device only")
    first = make_file(tmp_path / "f", bytes(8 * BLOCK))
    path = memory / f"aio-test-{os.getpid()}"
    second = make_file(path, bytes(8 * BLOCK))
    path.unlink()
    target = Buffer(16 * BLOCK)
    both = [(first, 0, 8 * BLOCK, target.address)]
    both.append((second, 0, 8 * BLOCK, target.address + 8 * BLOCK))

    def count() -> None:
        engine = slow_engine(backend, 64 * BLOCK, queue_depth=1)
        assert engine.device_counters() == {}
        assert engine.submit(READ, both).wait()
        assert engine.submit(WRITE, both[:1]).wait()
        devices = engine.device_counters()
        assert set(devices) == {first.device, second.device}
        for file, num_written in ((first, 8), (second, 0)):
            now = devices[file.device]
            assert now["backend"] == backend
            assert (now["read_requests"], now["write_requests"]) == (8, num_written)
            assert (now["read_bytes"], now["write_bytes"]) == (8 * BLOCK, num_written * BLOCK)
            assert now["queued_blocks"] == now["in_flight_blocks"] == 0
            # At depth 1 the k-th block queues for k - 1 others: 28 block times in all.
            assert 20 / 64 < now["read_queue_ns"] / 1e9 < 2.0
            assert 0.1 < now["read_device_ns"] / 1e9 < 1.0
            assert now["read_device_ns"] + now["write_device_ns"] <= now["busy_ns"] * 1.01
        totals = engine.counters()
        for key in ("read_bytes", "write_bytes", "read_requests", "read_queue_ns"):
            assert totals[key] == sum(int(now[key]) for now in devices.values())
        # The devices work at the same time.
        assert totals["busy_ns"] < 0.9 * sum(int(now["busy_ns"]) for now in devices.values())
        engine.close()

    in_a_quiet_moment(count)

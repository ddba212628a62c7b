"""Tests of reads and writes of the native I/O engine: sizes, alignments, concurrent callers."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest
from support.native_io import BLOCK, KIB, Buffer, make_file, noise
from support.stalled import LONG_S

from infinity._aio import READ, WRITE, Engine, File


@pytest.mark.parametrize("offset", [0, 1, 4095, BLOCK, 3 * BLOCK + 7])
@pytest.mark.parametrize("length", [0, 1, 511, 4096, BLOCK, BLOCK + 1, 9 * BLOCK + 17])
def test_buffered_round_trip(engine: Engine, tmp_path: Path, offset: int, length: int) -> None:
    before = noise(16 * BLOCK)
    file = make_file(tmp_path / "f", before)
    data = noise(length, seed=2)
    source = Buffer(length, data)
    target = Buffer(length)
    written = engine.submit(WRITE, [(file, offset, length, source.address)])
    assert written.wait() is True
    assert (tmp_path / "f").read_bytes() == before[:offset] + data + before[offset + length :]
    read = engine.submit(READ, [(file, offset, length, target.address)])
    assert read.wait(LONG_S) is True
    assert target.bytes() == data
    assert (read.nbytes, read.error, read.done()) == (length, None, True)
    assert written.nbytes == length


@pytest.mark.parametrize("offset", [0, 4096, BLOCK + 8192])
@pytest.mark.parametrize("length", [4096, BLOCK - 4096, BLOCK, 7 * BLOCK + 4096])
def test_direct_round_trip(engine: Engine, tmp_path: Path, offset: int, length: int) -> None:
    file = File(str(tmp_path / "f"), create=True)
    if not file.direct:
        pytest.skip("no direct I/O here")
    file.allocate(16 * BLOCK)
    assert file.size == 16 * BLOCK
    data = noise(length)
    source = Buffer(length, data)
    target = Buffer(length)
    engine.submit(WRITE, [(file, offset, length, source.address)]).wait()
    engine.submit(READ, [(file, offset, length, target.address)]).wait()
    assert target.bytes() == data
    assert (tmp_path / "f").read_bytes()[offset : offset + length] == data


def test_scatter_list_is_one_ticket(engine: Engine, tmp_path: Path) -> None:
    files = [make_file(tmp_path / name, noise(8 * BLOCK, seed)) for seed, name in enumerate("abc")]
    contents = [(tmp_path / name).read_bytes() for name in "abc"]
    rng = random.Random(3)
    target = Buffer(64 * BLOCK)
    segments = []
    expected = b""
    for _ in range(60):
        index, length = rng.randrange(3), rng.choice([0, 1, 100, 4096, BLOCK, 2 * BLOCK + 5])
        offset = rng.randrange(8 * BLOCK - length)
        segments.append((files[index], offset, length, target.address + len(expected)))
        expected += contents[index][offset : offset + length]
    ticket = engine.submit(READ, segments)
    assert ticket.wait()
    assert ticket.nbytes == len(expected)
    assert target.bytes(0, len(expected)) == expected
    assert engine.counters()["tickets"] == 1


def test_empty_request_completes_immediately(engine: Engine, tmp_path: Path) -> None:
    file = make_file(tmp_path / "f", b"x")
    for segments in ([], [(file, 0, 0, 0), (file, 5, 0, 0)]):
        ticket = engine.submit(READ, segments)
        assert ticket.done()
        assert ticket.wait(0.0)
        assert ticket.nbytes == 0


def test_engine_is_shared_by_many_threads(engine: Engine, tmp_path: Path) -> None:
    size = 3 * BLOCK + 100
    file = make_file(tmp_path / "f", bytes(8 * size))
    problems: list[object] = []

    def work(index: int) -> None:
        try:
            for iteration in range(25):
                data = noise(size, seed=100 * index + iteration)
                source = Buffer(size, data)
                target = Buffer(size)
                engine.submit(WRITE, [(file, index * size, size, source.address)]).wait()
                engine.submit(READ, [(file, index * size, size, target.address)]).wait()
                if target.bytes() != data:
                    problems.append((index, iteration))
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert problems == []
    counters = engine.counters()
    assert counters["read_bytes"] == counters["write_bytes"] == 8 * 25 * size
    assert counters["in_flight_blocks"] == counters["queued_blocks"] == 0


def test_short_reads_are_continued(engine: Engine) -> None:
    """A read of a /proc file returns about a page, whatever the requested length."""
    path, length = "/proc/kallsyms", 48 * KIB
    try:
        with open(path, "rb") as plain:
            expected = plain.read(length)
            first = os.pread(plain.fileno(), length, 0)
    except OSError:
        pytest.skip("no /proc/kallsyms")
    if len(expected) < length or len(first) == length:
        pytest.skip("this /proc/kallsyms gives all at once")
    target = Buffer(length)
    assert engine.submit(READ, [(File(path, read_only=True), 0, length, target.address)]).wait()
    assert target.bytes() == expected

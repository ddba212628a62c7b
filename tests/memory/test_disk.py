"""Tests of the disk tier on real files: round trips, errors, free space and checksums."""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.fault_injection import faulty_io
from support.loops import loop_mount
from torch import Tensor

from infinity import _aio
from infinity.config.schema import IoConfig
from infinity.errors import ConfigError, DoesNotFitError, TransferError
from infinity.storage.disk import Disk, Extent
from infinity.storage.disk_speed import measure_speeds
from infinity.storage.host_arena import HostArena
from infinity.types import PAGE

SIZES = [1, PAGE, 3 * PAGE + 1, 40 * PAGE, 7 * PAGE, 129 * PAGE]


@contextmanager
def open_disk(
    root: Path, num_paths: int = 1, sizes: list[int] = SIZES, **io: Any
) -> Iterator[tuple[Disk, list[Extent]]]:
    """Yield a disk with one extent per size; assert at exit that no file is left."""
    paths = [root / f"drive{i}" for i in range(num_paths)]
    for path in paths:
        path.mkdir(exist_ok=True)
    if num_paths > 1:
        io.setdefault("weights", (1.0,) * num_paths)
    disk = Disk(paths, IoConfig(block_size=io.pop("block_size", 4 * PAGE), **io))
    try:
        extents = [disk.extent(n, f"unit 'u{i}', chunk 0") for i, n in enumerate(sizes)]
        disk.allocate()
        yield disk, extents
    finally:
        disk.close()
    assert not [name for path in paths for name in os.listdir(path)]


def random_bytes(nbytes: int, seed: int) -> Tensor:
    """Return random bytes in memory aligned for direct I/O."""
    view = HostArena(nbytes).view(0, nbytes)
    values = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
    view.copy_(torch.from_numpy(values))
    return view


def empty_bytes(nbytes: int) -> Tensor:
    return HostArena(nbytes).view(0, nbytes)


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("backend", ["threads", "io_uring"])
@pytest.mark.parametrize("num_paths", [1, 2, 3])
def test_random_extent_ranges_round_trip(
    tmp_path: Path, num_paths: int, backend: str, verify: bool
) -> None:
    if backend == "io_uring":
        try:
            _aio.Engine(backend="io_uring").close()
        except OSError as error:
            pytest.skip(str(error))
    weights = {1: None, 2: (2.0, 1.0), 3: (1.0, 3.0, 0.5)}[num_paths]
    choose = random.Random(num_paths)
    with open_disk(tmp_path, num_paths, backend=backend, verify=verify, weights=weights) as (
        disk,
        extents,
    ):
        assert len([size for size in disk.used if size]) == num_paths
        expected_bytes = [random_bytes(extent.nbytes, i) for i, extent in enumerate(extents)]
        disk.write(list(zip(extents, expected_bytes, strict=True))).wait()
        for turn in range(60):
            reads, expected = [], []
            for _ in range(choose.randint(1, 4)):
                which = choose.randrange(len(extents))
                pages = extents[which].nbytes // PAGE
                start = choose.randrange(pages)
                count = choose.randint(1, pages - start)
                extent_range = extents[which].part(start * PAGE, count * PAGE)
                reads.append((extent_range, empty_bytes(extent_range.nbytes)))
                expected.append((which, slice(start * PAGE, (start + count) * PAGE)))
            if turn % 3 == 0:
                (extent, buffer), (which, byte_range) = reads[0], expected[0]
                buffer.copy_(random_bytes(extent.nbytes, 1000 + turn))
                expected_bytes[which][byte_range] = buffer
                disk.write([(extent, buffer)]).wait()
                continue
            disk.read(reads).wait()
            for (_, buffer), (which, byte_range) in zip(reads, expected, strict=True):
                assert torch.equal(buffer, expected_bytes[which][byte_range])


def test_extents_striped_by_weights(tmp_path: Path) -> None:
    sizes = [64 * PAGE] * 12
    with open_disk(tmp_path, 2, sizes, weights=(3.0, 1.0), block_size=PAGE) as (disk, _):
        assert disk.used == (48 * PAGE * 12, 16 * PAGE * 12)
        for path, used in zip(disk.paths, disk.used, strict=True):
            (file,) = path.glob("*/state.bin")
            assert file.stat().st_size == used
            assert file.stat().st_blocks * 512 >= used  # reserved
        drives = disk.drives()
        assert [drive["nbytes"] for drive in drives.values()] == list(disk.used)
        assert [drive["speed"] for drive in drives.values()] == [3.0, 1.0]


def test_read_error_names_owner_and_file(tmp_path: Path) -> None:
    with open_disk(tmp_path, 2) as (disk, extents):
        (file,) = disk.paths[1].glob("*/state.bin")
        os.truncate(file, 0)  # without the engine's knowledge: the read hits end of file
        buffer = empty_bytes(extents[5].nbytes)
        ticket = disk.read([(extents[0], empty_bytes(PAGE)), (extents[5], buffer)])
        with pytest.raises(TransferError, match=r"unit 'u5', chunk 0: .*end of file") as caught:
            ticket.wait()
        error = caught.value
        assert error.path == str(file)
        assert error.errno == errno.EIO
        assert error.length > 0
        with pytest.raises(TransferError, match="unit 'u5'"):
            ticket.wait()  # raised again by a second wait


def test_small_drive_filled_and_overflow_error_names_drives(tmp_path: Path) -> None:
    """Of 20 MiB, a drive with 8 MiB free gets at most 8; an overflow names both drives."""
    sizes = [1 << 20] * 20
    with loop_mount(tmp_path, mib=16) as small, loop_mount(tmp_path, mib=64) as large:
        free = os.statvfs(small).f_bavail * os.statvfs(small).f_frsize
        ballast = small / "ballast"
        with open(ballast, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, free - (8 << 20))
        disk = Disk([small, large], IoConfig(weights=(1.0, 1.0), block_size=64 << 10, verify=True))
        try:
            extents = [disk.extent(n, f"unit 'u{i}'") for i, n in enumerate(sizes)]
            disk.allocate()
            assert sum(disk.used) == 20 << 20
            assert 6 << 20 < disk.used[0] <= 8 << 20
            data = [random_bytes(extent.nbytes, i) for i, extent in enumerate(extents)]
            disk.write(list(zip(extents, data, strict=True))).wait()
            for extent, expected in zip(extents, data, strict=True):
                read_back = empty_bytes(extent.nbytes)
                disk.read([(extent, read_back)]).wait()
                assert torch.equal(read_back, expected)
        finally:
            disk.close()
        disk = Disk([small, large], IoConfig(weights=(1.0, 1.0)))
        try:
            disk.extent(90 << 20)
            with pytest.raises(DoesNotFitError) as caught:
                disk.allocate()
        finally:
            disk.close()
        for text in ("90.00 MiB needed", f"free at {small}", f"free at {large}", "missing"):
            assert text in str(caught.value)


def test_enospc_during_reservation_names_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Free space may disappear between the check and the reservation."""
    with loop_mount(tmp_path, mib=16) as path:
        disk = Disk([path], IoConfig())
        try:
            disk.extent(40 << 20)
            monkeypatch.setattr(disk.scratches[0], "check_space", lambda required: None)
            with pytest.raises(TransferError) as caught:
                disk.allocate()
        finally:
            disk.close()
        assert caught.value.errno == errno.ENOSPC
        assert str(path) in str(caught.value)
        assert "the file system is full" in str(caught.value)
        assert not list(path.iterdir())


def test_measure_speeds_skips_path_without_space(tmp_path: Path) -> None:
    """Two files on one device are measured; a path without space gets speed 1."""
    engine = _aio.Engine()
    files = [_aio.File(str(tmp_path / name), create=True) for name in "abc"]
    first, second, third = measure_speeds(engine, files, [1 << 30, 1 << 30, 1000])
    engine.close()
    assert min(first, second) > 1.0 == third
    assert [file.size > 0 for file in files] == [True, True, False]


@pytest.mark.clock
def test_measure_speeds_duration_and_agreement(tmp_path: Path) -> None:
    """Two files on one device are measured as similar, within five seconds."""
    engine = _aio.Engine()
    files = [_aio.File(str(tmp_path / name), create=True) for name in "ab"]
    begin = time.perf_counter()
    first, second = measure_speeds(engine, files, [1 << 30, 1 << 30])
    assert time.perf_counter() - begin < 5  # slightly more than PROBE_S on an idle machine
    assert 0.2 < first / second < 5
    assert min(first, second) > 1 << 20
    engine.close()


# --- checksums -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_paths", [1, 2])
def test_corrupted_page_detected(tmp_path: Path, num_paths: int) -> None:
    """Each page is corrupted in turn, without the engine's knowledge; every change is detected."""
    with open_disk(tmp_path, num_paths, verify=True) as (disk, extents):
        data = [random_bytes(extent.nbytes, i) for i, extent in enumerate(extents)]
        disk.write(list(zip(extents, data, strict=True))).wait()
        files = [next(path.glob("*/state.bin")) for path in disk.paths]
        found = []
        for index, size in enumerate(disk.used):
            for offset in range(0, size, PAGE):
                position = offset + (offset // PAGE * 37) % PAGE
                with open(files[index], "r+b", buffering=0) as file:
                    original = os.pread(file.fileno(), 1, position)
                    os.pwrite(file.fileno(), bytes([original[0] ^ 0x10]), position)
                    os.fsync(file.fileno())
                    ticket = disk.read([(e, empty_bytes(e.nbytes)) for e in extents])
                    with pytest.raises(TransferError) as caught:
                        ticket.wait()
                    os.pwrite(file.fileno(), original, position)
                    os.fsync(file.fileno())
                error = caught.value
                assert (error.path, error.offset) == (str(files[index]), offset)
                assert error.errno == errno.EBADMSG
                assert "are not the bytes written" in str(error)
                found.append(str(error).split(":")[0])
        assert set(found) == {extent.owner for extent in extents}
        for extent, expected in zip(extents, data, strict=True):
            read_back = empty_bytes(extent.nbytes)
            disk.read([(extent, read_back)]).wait()
            assert torch.equal(read_back, expected)


def test_no_checksums_without_verify(tmp_path: Path) -> None:
    with open_disk(tmp_path) as (disk, extents):
        disk.write([(extents[0], random_bytes(PAGE, 0))]).wait()
        (file,) = disk.paths[0].glob("*/state.bin")
        with open(file, "r+b", buffering=0) as raw:
            raw.write(b"other")
            os.fsync(raw.fileno())
        read_back = empty_bytes(PAGE)
        disk.read([(extents[0], read_back)]).wait()
        assert bytes(read_back[:5].tolist()) == b"other"


def test_lost_write_detected(tmp_path: Path) -> None:
    """A page that still holds its previous bytes is reported as corrupted."""
    with open_disk(tmp_path, verify=True) as (disk, extents):
        extent = extents[3]
        disk.write([(extent, random_bytes(extent.nbytes, 1))]).wait()
        (file,) = disk.paths[0].glob("*/state.bin")
        (piece,) = disk._stripes.pieces(extent.offset + 5 * PAGE, PAGE)
        with open(file, "r+b", buffering=0) as raw:
            old = os.pread(raw.fileno(), PAGE, piece.offset)
            disk.write([(extent, random_bytes(extent.nbytes, 2))]).wait()
            os.pwrite(raw.fileno(), old, piece.offset)
            os.fsync(raw.fileno())
        with pytest.raises(TransferError, match="unit 'u3'") as caught:
            disk.read([(extent, empty_bytes(extent.nbytes))]).wait()
        assert caught.value.offset == piece.offset


def test_read_of_unwritten_page_raises(tmp_path: Path) -> None:
    with open_disk(tmp_path, verify=True) as (disk, extents):
        ticket = disk.read([(extents[0], empty_bytes(PAGE))])
        with pytest.raises(TransferError, match="are not the bytes written"):
            ticket.wait()


def test_late_wait_checks_sums_at_submission(tmp_path: Path) -> None:
    """A late wait, after a later write to the same extent was submitted, raises no false error."""
    with open_disk(tmp_path, verify=True) as (disk, extents):
        first, second, read_back = random_bytes(PAGE, 1), random_bytes(PAGE, 2), empty_bytes(PAGE)
        disk.write([(extents[1], first)]).wait()
        reading = disk.read([(extents[1], read_back)])
        while not reading.done():
            pass
        writing = disk.write([(extents[1], second)])
        reading.wait()
        assert torch.equal(read_back, first)
        writing.wait()
        read_back.fill_(0)  # after the first wait the buffer may be reused
        reading.wait()


# --- stuck and rejected requests -----------------------------------------------------------------


def test_stuck_request_times_out_and_close_returns(tmp_path: Path) -> None:
    path = tmp_path / "drive"
    path.mkdir()
    with faulty_io(faults="seed=1,kinds=stuck,rate=1"):
        disk = Disk([path], IoConfig(timeout_s=0.2))
    extent = disk.extent(PAGE, "unit 'u', chunk 7")
    disk.allocate()
    ticket = disk.write([(extent, random_bytes(PAGE, 0))])
    with pytest.raises(TransferError, match=r"unit 'u', chunk 7: .*outstanding") as caught:
        ticket.wait()
    assert caught.value.errno == errno.ETIMEDOUT
    assert not ticket.done()
    with pytest.raises(TransferError, match="outstanding"):
        disk.close()
    assert not list(path.iterdir())  # removed despite the error


def test_native_engine_rejection_raises_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="io: "), faulty_io(faults="seed=1,kinds=fire"):
        Disk([tmp_path], IoConfig())
    assert not list(tmp_path.iterdir())

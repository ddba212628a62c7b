"""Tests of native I/O files: file system and device, transfer sizes, the page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
from pathlib import Path

import pytest
from support.leaks import descriptors
from support.native_io import BLOCK, Buffer, make_file, noise
from support.waiting import wait_until

from infinity._aio import READ, WRITE, Engine, File

EXTENT = 1 << 20
SIZES = [1, 4095, 4096, BLOCK - 1, BLOCK + 1, EXTENT - 1, EXTENT, EXTENT + 1, 3 * EXTENT + 1]


def mount_type(path: Path) -> str:
    """Return the type of the last mount with the device of `path`, from mountinfo."""
    device = os.stat(path).st_dev
    found = ""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, tail = line.partition(" - ")
        if fields.split()[2] == f"{os.major(device)}:{os.minor(device)}":
            found = tail.split()[0]
    return found


def test_file_reports_file_system_and_device(tmp_path: Path) -> None:
    directories = [tmp_path, Path("/dev/shm"), Path("/proc/self")]
    for directory in (directory for directory in directories if mount_type(directory)):
        path = (
            directory / "status"
            if directory.name == "self"
            else directory / f"aio-test-{os.getpid()}"
        )
        if not path.exists():
            path.write_bytes(b"x")
        file = File(str(path), read_only=True)
        expected = {"overlay": "overlayfs", "fuseblk": "fuse", "devtmpfs": "tmpfs"}.get(
            mount_type(directory)
        )
        assert file.file_system == (expected or mount_type(directory))
        device = os.stat(path).st_dev
        assert file.device == f"{os.major(device)}:{os.minor(device)}"
        assert file.direct == (file.direct_reason == "")
        if path.name != "status":
            path.unlink()
    file.close()
    with pytest.raises(ValueError, match="closed"):
        _ = file.device


def test_direct_reason_explains_buffered_io(tmp_path: Path) -> None:
    assert make_file(tmp_path / "f", b"x", direct="off").direct_reason == "direct=off was asked for"
    reason = File("/proc/self/status", read_only=True).direct_reason
    assert reason == "proc offers no direct I/O for this file: it is made up by the kernel"


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("direct", ["off", "auto"])
def test_round_trip_in_scattered_extents(
    backend: str, tmp_path: Path, nbytes: int, direct: str
) -> None:
    """A logical range is scattered over extents of the file; compared with plain Python reads."""
    rng = random.Random(nbytes)
    path = tmp_path / "f"
    file = make_file(path, noise(8 * EXTENT), direct=direct)
    step = max(file.offset_alignment, file.memory_alignment)
    padded = -(-nbytes // step) * step
    extents = rng.sample(range(8), k=-(-padded // EXTENT))
    data = noise(nbytes, seed=3)
    source, target = Buffer(padded, data), Buffer(padded)

    def segments(buffer: Buffer) -> list[tuple[File, int, int, int]]:
        return [
            (file, extent * EXTENT, min(EXTENT, padded - start), buffer.address + start)
            for extent, start in zip(extents, range(0, padded, EXTENT), strict=True)
        ]

    expected = bytearray(path.read_bytes())
    for _, offset, length, address in segments(source):
        start = address - source.address
        expected[offset : offset + length] = source.bytes(start, length)
    engine = Engine(backend=backend)
    assert engine.submit(WRITE, segments(source)).wait()
    assert path.read_bytes() == expected
    assert engine.submit(READ, segments(target)).wait()
    assert target.bytes(0, nbytes) == data
    engine.close()


def resident_pages(file: File, nbytes: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(file.fd, nbytes) as view:
        anchor = ctypes.c_char.from_buffer(view)
        pages = (ctypes.c_ubyte * (nbytes // mmap.PAGESIZE))()
        address = ctypes.c_void_p(ctypes.addressof(anchor))
        assert libc.mincore(address, ctypes.c_size_t(nbytes), pages) == 0
        del anchor
    return sum(page & 1 for page in pages)


def test_buffered_io_is_dropped_from_page_cache(backend: str, tmp_path: Path) -> None:
    nbytes = 12 * EXTENT
    file = File(str(tmp_path / "f"), create=True, direct="off")
    if file.file_system == "tmpfs":
        pytest.skip("the pages of tmpfs are its file")
    file.allocate(nbytes)
    data = noise(nbytes)
    source, target = Buffer(nbytes, data), Buffer(nbytes)
    engine = Engine(backend=backend)
    assert engine.submit(WRITE, [(file, 0, nbytes, source.address)]).wait()
    assert wait_until(lambda: resident_pages(file, nbytes) == 0)
    assert engine.submit(READ, [(file, 0, nbytes, target.address)]).wait()
    assert wait_until(lambda: resident_pages(file, nbytes) == 0)
    assert target.bytes() == data
    # Control: pages that Python reads stay resident, so the measurement works.
    assert (tmp_path / "f").read_bytes() == data
    assert resident_pages(file, nbytes) > 0
    engine.close()


def test_file_is_closed_after_its_last_request(engine: Engine, tmp_path: Path) -> None:
    before = descriptors()
    file = make_file(tmp_path / "f", noise(EXTENT))
    target = Buffer(EXTENT)
    ticket = engine.submit(READ, [(file, 0, EXTENT, target.address)])
    file.close()
    assert ticket.wait()
    assert wait_until(lambda: descriptors() <= before)

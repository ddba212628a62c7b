"""Tests of argument checks and of kernel errors in the native I/O engine."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from support.native_io import BLOCK, Buffer, in_subprocess, make_file, noise
from support.stalled import LONG_S

from infinity._aio import READ, WRITE, AioError, Engine, File


@pytest.mark.parametrize(
    ("what", "offset", "length", "shift"),
    [("offset", 100, 4096, 0), ("length", 0, 4097, 0), ("address", 0, 4096, 1)],
)
def test_unaligned_direct_requests_are_refused(
    engine: Engine, tmp_path: Path, what: str, offset: int, length: int, shift: int
) -> None:
    file = make_file(tmp_path / "f", bytes(2 * BLOCK), direct="auto")
    if not file.direct or file.memory_alignment == 1:
        pytest.skip("no direct I/O here")
    target = Buffer(2 * BLOCK)
    good = (file, 0, 4096, target.address)
    with pytest.raises(ValueError, match=f"segment 1 .*the {what} must be a multiple of"):
        engine.submit(READ, [good, (file, offset, length, target.address + shift)])
    assert engine.counters()["tickets"] == 0


def test_invalid_arguments_are_refused(engine: Engine, tmp_path: Path) -> None:
    file = make_file(tmp_path / "f", bytes(100))
    target = Buffer(100)
    with pytest.raises(ValueError, match="segment 0: the offset is negative"):
        engine.submit(READ, [(file, -1, 10, target.address)])
    with pytest.raises(ValueError, match="null"):
        engine.submit(READ, [(file, 0, 10, 0)])
    with pytest.raises(ValueError, match=r"2\*\*63"):
        engine.submit(READ, [(file, 2**63 - 5, 10, target.address)])
    with pytest.raises(TypeError, match="segment 0 must be a tuple"):
        engine.submit(READ, [(file, 0, 10)])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="the length must be an int"):
        engine.submit(READ, [(file, 0, 1.5, target.address)])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="READ or WRITE"):
        engine.submit(7, [])
    with pytest.raises(ValueError, match="backend must be"):
        Engine(backend="libaio")
    with pytest.raises(ValueError, match="queue_depth"):
        Engine(queue_depth=0)
    file.close()
    with pytest.raises(ValueError, match="is closed"):
        engine.submit(READ, [(file, 0, 10, target.address)])


@pytest.mark.parametrize("direct", ["off", "auto"])
def test_read_past_end_of_file_raises(engine: Engine, tmp_path: Path, direct: str) -> None:
    path = tmp_path / "f"
    file = make_file(path, noise(BLOCK + BLOCK // 2 + 100), direct=direct)
    target = Buffer(4 * BLOCK)
    ticket = engine.submit(READ, [(file, BLOCK, BLOCK, target.address)])
    for _ in range(2):  # each wait raises again
        with pytest.raises(AioError) as caught:
            ticket.wait(LONG_S)
        error = caught.value
        assert isinstance(error, OSError)
        assert (error.errno, error.strerror) == (errno.EIO, "unexpected end of file")
        assert (error.filename, error.op) == (str(path), "read")
        assert (error.offset, error.length) == (BLOCK, BLOCK)
        for word in (str(path), "read", str(BLOCK), "EIO", "unexpected end of file", "likely"):
            assert word in str(error)
    assert ticket.done()
    assert ticket.error == str(caught.value)


def test_kernel_errors_are_raised(engine: Engine, tmp_path: Path) -> None:
    source = Buffer(4096, noise(4096))
    path = tmp_path / "f"
    cases = [
        (make_file(path, bytes(4096), read_only=True), source.address, errno.EBADF, "EBADF"),
        (File("/dev/full", direct="off"), source.address, errno.ENOSPC, "disk is full"),
        (make_file(tmp_path / "g", b""), 4096, errno.EFAULT, "not mapped"),
    ]
    for file, address, number, text in cases:
        with pytest.raises(AioError, match=text) as caught:
            engine.submit(WRITE, [(file, 0, 4096, address)]).wait(LONG_S)
        assert caught.value.errno == number
        assert caught.value.filename == file.path
        assert (caught.value.op, caught.value.length) == ("write", 4096)
    assert engine.counters()["write_requests"] == 3
    assert engine.counters()["write_bytes"] == 0


def test_failed_block_cancels_remaining_blocks_of_ticket(backend: str, tmp_path: Path) -> None:
    engine = Engine(backend=backend, block_size=4096, queue_depth=1)
    file = make_file(tmp_path / "f", noise(100 * 4096))
    target = Buffer(100 * 4096)
    bad = engine.submit(
        READ, [(file, 1000 * 4096, 4096, target.address), (file, 0, 100 * 4096, target.address)]
    )
    good = engine.submit(READ, [(file, 0, 4096, target.address)])
    with pytest.raises(AioError):
        bad.wait()
    assert good.wait()
    assert engine.counters()["read_requests"] == 2
    assert engine.counters()["queued_blocks"] == 0
    engine.close()


def test_write_beyond_file_size_limit_raises(backend: str, tmp_path: Path) -> None:
    """The write that crosses the limit is short; its continuation must fail."""
    out = in_subprocess(
        """
        import ctypes, mmap, resource, sys
        resource.setrlimit(resource.RLIMIT_FSIZE, (10000, 10000))
        file = _aio.File(sys.argv[2], create=True, direct="off")
        data = mmap.mmap(-1, 65536)
        address = ctypes.addressof(ctypes.c_char.from_buffer(data))
        engine = _aio.Engine(backend=sys.argv[1])
        try:
            engine.submit(_aio.WRITE, [(file, 0, 65536, address)]).wait(600)
        except _aio.AioError as error:
            print(error.errno, error.op, error.length, file.size)
        """,
        backend,
        str(tmp_path / "f"),
    )
    assert out.split() == [str(errno.EFBIG), "write", "65536", "10000"]


def test_file_open_allocate_and_close(tmp_path: Path) -> None:
    path = str(tmp_path / "f")
    with pytest.raises(AioError) as caught:
        File(path)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, path)
    file = File(path, create=True)
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert not os.get_inheritable(file.fd)
    with pytest.raises(AioError) as caught:
        File(path, create=True)
    assert caught.value.errno == errno.EEXIST
    with pytest.raises(ValueError, match="direct must be"):
        File(path, direct="perhaps")
    buffered = File(path, direct="off")
    assert (buffered.direct, buffered.memory_alignment, buffered.offset_alignment) == (False, 1, 1)
    with pytest.raises(AioError) as caught:
        File("/proc/self/status", read_only=True, direct="on")
    assert caught.value.errno == errno.EINVAL
    assert not File("/proc/self/status", read_only=True, direct="auto").direct
    file.allocate(100_000)
    file.allocate(10)
    file.sync()
    assert file.size == 100_000
    with pytest.raises(AioError) as caught:
        file.allocate(2**62)
    assert caught.value.errno in (errno.EFBIG, errno.ENOSPC)  # depends on the file system
    assert caught.value.op == "allocate"
    file.close()
    file.close()
    assert file.fd == -1
    assert file.path == path

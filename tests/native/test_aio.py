"""The native I/O engine: one contract, held by both back ends."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infinity import _aio
from infinity._aio import READ, WRITE, AioError, Engine, File

BACKENDS = ["io_uring", "threads"]
KIB = 1024
BLOCK = 64 * KIB


class Buffer:
    """Page-aligned memory with an address."""

    def __init__(self, nbytes: int, data: bytes = b"") -> None:
        self.map = mmap.mmap(-1, max(nbytes, 1))
        self.map[: len(data)] = data
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.nbytes = nbytes

    def bytes(self, start: int = 0, length: int | None = None) -> bytes:
        return self.map[start : self.nbytes if length is None else start + length]


def noise(nbytes: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def wait_until(condition: Callable[[], bool], timeout_s: float = 5.0) -> bool:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return condition()


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    result = _aio.probe(str(tmp_path))[request.param]
    assert isinstance(result, dict)
    if not result["ok"]:
        pytest.skip(f"{request.param}: {result['reason']}")
    return str(request.param)


@pytest.fixture
def engine(backend: str) -> Iterator[Engine]:
    engine = Engine(backend=backend, block_size=BLOCK, queue_depth=4)
    assert engine.backend == backend
    yield engine
    engine.close()


def slow_engine(backend: str, bytes_per_s: int, queue_depth: int = 4) -> Engine:
    return Engine(
        backend=backend, block_size=BLOCK, queue_depth=queue_depth, slow_bytes_per_s=bytes_per_s
    )


def make_file(path: Path, data: bytes, *, direct: str = "off", read_only: bool = False) -> File:
    path.write_bytes(data)
    return File(str(path), direct=direct, read_only=read_only)


LOAD = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("infinity._aio", {_aio.__file__!r})
_aio = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_aio)
"""


def in_subprocess(script: str, *arguments: str) -> str:
    """Run a script that prints, with `_aio` loaded alone: the package would bring torch along."""
    run = subprocess.run(
        [sys.executable, "-c", LOAD + textwrap.dedent(script), *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


# --- moving bytes ---------------------------------------------------------------------------------


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
    assert read.wait(10.0) is True
    assert target.bytes() == data
    assert (read.op, read.nbytes, read.error, read.done()) == (READ, length, None, True)
    assert (written.op, written.nbytes) == (WRITE, length)


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


def test_scatter_lists_are_one_ticket(engine: Engine, tmp_path: Path) -> None:
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


def test_an_empty_request_is_done_at_once(engine: Engine, tmp_path: Path) -> None:
    file = make_file(tmp_path / "f", b"x")
    for segments in ([], [(file, 0, 0, 0), (file, 5, 0, 0)]):
        ticket = engine.submit(READ, segments)
        assert ticket.done()
        assert ticket.wait(0.0)
        assert ticket.nbytes == 0


def test_many_python_threads_share_an_engine(engine: Engine, tmp_path: Path) -> None:
    size = 3 * BLOCK + 100
    file = make_file(tmp_path / "f", bytes(8 * size))
    problems: list[object] = []

    def work(index: int) -> None:
        try:
            for turn in range(25):
                data = noise(size, seed=100 * index + turn)
                source = Buffer(size, data)
                target = Buffer(size)
                engine.submit(WRITE, [(file, index * size, size, source.address)]).wait()
                engine.submit(READ, [(file, index * size, size, target.address)]).wait()
                if target.bytes() != data:
                    problems.append((index, turn))
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert problems == []
    counters = engine.counters()
    assert counters["read_bytes"] == counters["write_bytes"] == 8 * 25 * size
    assert counters["in_flight_blocks"] == counters["queued_blocks"] == 0


def test_short_transfers_are_continued(engine: Engine) -> None:
    """A /proc file gives a page or so per read, however much is asked for."""
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


# --- refusals and errors --------------------------------------------------------------------------


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


def test_nonsense_is_refused(engine: Engine, tmp_path: Path) -> None:
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
def test_reading_past_the_end(engine: Engine, tmp_path: Path, direct: str) -> None:
    path = tmp_path / "f"
    file = make_file(path, noise(BLOCK + BLOCK // 2 + 100), direct=direct)
    target = Buffer(4 * BLOCK)
    ticket = engine.submit(READ, [(file, BLOCK, BLOCK, target.address)])
    for _ in range(2):  # every time
        with pytest.raises(AioError) as caught:
            ticket.wait(10.0)
        error = caught.value
        assert isinstance(error, OSError)
        assert (error.errno, error.strerror) == (errno.EIO, "unexpected end of file")
        assert (error.filename, error.op) == (str(path), "read")
        assert (error.offset, error.length) == (BLOCK, BLOCK)
        for word in (str(path), "read", str(BLOCK), "EIO", "unexpected end of file", "likely"):
            assert word in str(error)
    assert ticket.done()
    assert ticket.error == str(caught.value)


def test_errors_of_the_kernel_are_raised(engine: Engine, tmp_path: Path) -> None:
    source = Buffer(4096, noise(4096))
    path = tmp_path / "f"
    cases = [
        (make_file(path, bytes(4096), read_only=True), source.address, errno.EBADF, "EBADF"),
        (File("/dev/full", direct="off"), source.address, errno.ENOSPC, "disk is full"),
        (make_file(tmp_path / "g", b""), 4096, errno.EFAULT, "not mapped"),
    ]
    for file, address, number, text in cases:
        with pytest.raises(AioError, match=text) as caught:
            engine.submit(WRITE, [(file, 0, 4096, address)]).wait(10.0)
        assert caught.value.errno == number
        assert caught.value.filename == file.path
        assert (caught.value.op, caught.value.length) == ("write", 4096)
    assert engine.counters()["write_requests"] == 3
    assert engine.counters()["write_bytes"] == 0


def test_a_failed_block_stops_the_rest_of_its_ticket(backend: str, tmp_path: Path) -> None:
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


def test_a_file_size_limit_is_an_error(backend: str, tmp_path: Path) -> None:
    """The write that crosses the limit is short; going on must fail, not be taken for success."""
    out = in_subprocess(
        """
        import ctypes, mmap, resource, sys
        resource.setrlimit(resource.RLIMIT_FSIZE, (10000, 10000))
        file = _aio.File(sys.argv[2], create=True, direct="off")
        data = mmap.mmap(-1, 65536)
        address = ctypes.addressof(ctypes.c_char.from_buffer(data))
        engine = _aio.Engine(backend=sys.argv[1])
        try:
            engine.submit(_aio.WRITE, [(file, 0, 65536, address)]).wait(10)
        except _aio.AioError as error:
            print(error.errno, error.op, error.length, file.size)
        """,
        backend,
        str(tmp_path / "f"),
    )
    assert out.split() == [str(errno.EFBIG), "write", "65536", "10000"]


def test_opening(tmp_path: Path) -> None:
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
    assert (caught.value.errno, caught.value.op) == (errno.EFBIG, "allocate")
    file.close()
    file.close()
    assert file.fd == -1
    assert file.path == path


# --- waiting, interrupting, closing ---------------------------------------------------------------


def test_waits_release_the_interpreter(backend: str, tmp_path: Path) -> None:
    engine = slow_engine(backend, 8 * BLOCK)
    file = make_file(tmp_path / "f", bytes(4 * BLOCK))
    target = Buffer(4 * BLOCK)
    ticks = 0
    stop = False

    def tick() -> None:
        nonlocal ticks
        while not stop:
            ticks += 1
            time.sleep(0.005)

    thread = threading.Thread(target=tick)
    ticket = engine.submit(READ, [(file, 0, 4 * BLOCK, target.address)])
    thread.start()
    before = ticks
    assert ticket.wait(0.1) is False
    assert not ticket.done()
    assert ticket.latency_ns == 0
    assert ticket.wait(30.0) is True
    assert ticks - before > 10
    assert 0.4e9 < ticket.latency_ns < 5e9
    stop = True
    thread.join()
    engine.close()


def test_interrupting_a_wait(backend: str, tmp_path: Path) -> None:
    engine = slow_engine(backend, 2 * BLOCK)
    data = noise(4 * BLOCK)
    file = make_file(tmp_path / "f", data)
    target = Buffer(4 * BLOCK)
    ticket = engine.submit(READ, [(file, 0, 4 * BLOCK, target.address)])
    timer = threading.Timer(0.2, lambda: signal.raise_signal(signal.SIGINT))
    timer.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        ticket.wait()
    assert time.monotonic() - start < 1.5
    timer.join()
    assert not ticket.done()
    assert ticket.wait(30.0)
    assert target.bytes() == data
    engine.close()


def test_closing_with_requests_in_flight(backend: str, tmp_path: Path) -> None:
    engine = slow_engine(backend, 4 * BLOCK)
    data = noise(20 * BLOCK)
    file = make_file(tmp_path / "f", data)
    target = Buffer(20 * BLOCK)
    tickets = [
        engine.submit(READ, [(file, i * BLOCK, BLOCK, target.address + i * BLOCK)])
        for i in range(20)
    ]
    file.close()  # requests keep it open
    assert wait_until(lambda: engine.counters()["in_flight_blocks"] > 0)
    start = time.monotonic()
    engine.close()
    assert time.monotonic() - start < 2.0
    cancelled = 0
    for i, ticket in enumerate(tickets):
        assert ticket.done()
        if ticket.error is None:
            assert ticket.wait()
            assert target.bytes(i * BLOCK, BLOCK) == data[i * BLOCK : (i + 1) * BLOCK]
            continue
        with pytest.raises(AioError) as caught:
            ticket.wait()
        assert (caught.value.errno, caught.value.filename) == (errno.ECANCELED, file.path)
        cancelled += 1
    assert 0 < cancelled < 20
    mark = bytes([7]) * target.nbytes
    target.map[:] = mark
    time.sleep(0.1)
    assert target.bytes() == mark
    engine.close()
    with pytest.raises(AioError) as caught:
        engine.submit(READ, [])
    assert caught.value.errno == errno.ECANCELED


def test_a_dropped_engine_finishes_what_the_kernel_holds(backend: str, tmp_path: Path) -> None:
    file = make_file(tmp_path / "f", bytes(8 * BLOCK))
    target = Buffer(8 * BLOCK)
    engine = slow_engine(backend, 2 * BLOCK, queue_depth=2)
    ticket = engine.submit(READ, [(file, 0, 8 * BLOCK, target.address)])
    del engine
    gc.collect()
    assert ticket.done()
    with pytest.raises(AioError, match="closed"):
        ticket.wait()


def test_after_a_fork(backend: str, tmp_path: Path) -> None:
    engine = slow_engine(backend, 4 * BLOCK)
    file = make_file(tmp_path / "f", bytes(4 * BLOCK))
    target = Buffer(4 * BLOCK)
    ticket = engine.submit(READ, [(file, 0, 4 * BLOCK, target.address)])
    child = os.fork()
    if child == 0:
        status = 0
        for call in (lambda: engine.submit(READ, []), ticket.wait, engine.counters, engine.close):
            try:
                call()
                status = 1
            except OSError as error:
                status |= 2 * ("process" not in str(error))
        del call, engine, ticket, file
        gc.collect()
        own = Engine(backend=backend)
        own.close()
        os._exit(status)
    ended: list[int] = []

    def reap() -> bool:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            ended.append(os.waitstatus_to_exitcode(status))
        return bool(pid)

    if not wait_until(reap, 10.0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pytest.fail("the child hangs")
    assert ended == [0]
    assert ticket.wait(30.0)
    engine.close()


# --- depth, counters, speed -----------------------------------------------------------------------


def test_the_depth_is_bounded_and_submitting_never_waits(backend: str, tmp_path: Path) -> None:
    engine = slow_engine(backend, 16 * BLOCK, queue_depth=3)
    file = make_file(tmp_path / "f", bytes(20 * BLOCK))
    target = Buffer(20 * BLOCK)
    start = time.monotonic()
    tickets = [engine.submit(READ, [(file, 0, 5 * BLOCK, target.address)]) for _ in range(4)]
    assert time.monotonic() - start < 0.8
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


# --- probing --------------------------------------------------------------------------------------

DENY = """
    import ctypes, errno, struct, sys

    def deny(number):  # seccomp: this system call answers EPERM
        code = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x50000 | errno.EPERM),
                (0x06, 0, 0, 0x7FFF0000)]
        program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *c) for c in code))
        header = struct.pack("HxxxxxxQ", len(code), ctypes.addressof(program))
        libc = ctypes.CDLL(None, use_errno=True)
        null = ctypes.c_void_p(0)
        assert libc.prctl(38, ctypes.c_ulong(1), null, null, null) == 0
        assert libc.prctl(22, ctypes.c_ulong(2), header, null, null) == 0, ctypes.get_errno()

    deny(int(sys.argv[1]))
    engine = _aio.Engine()
    print(engine.backend, "|", engine.backend_reason)
    engine.close()
    try:
        _aio.Engine(backend="io_uring")
    except _aio.AioError as error:
        print(error.errno, error)
    found = _aio.probe(sys.argv[2])
    print(found["io_uring"]["ok"], found["threads"]["ok"])
"""


@pytest.mark.parametrize(("number", "name"), [(425, "io_uring_setup"), (426, "io_uring_enter")])
def test_falling_back_says_why(tmp_path: Path, number: int, name: str) -> None:
    if not (isinstance(result := _aio.probe(str(tmp_path))["io_uring"], dict) and result["ok"]):
        pytest.skip("no io_uring to take away")
    first, second, third = in_subprocess(DENY, str(number), str(tmp_path)).splitlines()
    assert first.startswith("threads | threads:")
    assert f"{name} failed with EPERM (seccomp" in first
    assert second.startswith(str(errno.EPERM))
    assert name in second
    assert third == "False True"


def test_probing(tmp_path: Path) -> None:
    found = _aio.probe(str(tmp_path))
    assert set(found) == {
        "io_uring",
        "threads",
        "direct",
        "memory_alignment",
        "offset_alignment",
        "file_system",
    }
    threads = found["threads"]
    assert isinstance(threads, dict)
    assert threads["ok"], threads
    assert list(tmp_path.iterdir()) == []
    assert found["file_system"]
    with pytest.raises(AioError) as caught:
        _aio.probe(str(tmp_path / "missing"))
    assert caught.value.errno == errno.ENOENT


def test_a_dropped_ticket_waits_for_its_bytes(backend: str, tmp_path: Path) -> None:
    """Memory is idle once nobody holds the ticket, even if nobody waited."""
    file = make_file(tmp_path / "file", noise(1 << 20))
    buffer = Buffer(1 << 20)
    engine = slow_engine(backend, 4 << 20)
    start = time.monotonic()
    ticket = engine.submit(READ, [(file, 0, 1 << 20, buffer.address)])
    del ticket
    assert time.monotonic() - start > 0.15
    assert engine.counters()["in_flight_blocks"] == 0
    engine.close()
    file.close()

"""Loads of the swap benchmark, with their test files and buffers.

Each path has one file with two regions of equal size: samples read the first and write the second.
A chunk has one of a few random patterns, selected by its index, so that bytes read and written can
be checked after the measured time.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

import numpy as np

import infinity._aio as _aio
from infinity.common.files import refused
from infinity.common.sizes import format_size
from infinity.errors import ConfigError, DoesNotFitError, InfinityError, MachineError
from infinity.plan.machine import disk_free_bytes
from infinity.storage.run_dir import Scratch

Mode: TypeAlias = Literal["read", "write", "mixed"]
MODES: tuple[Mode, ...] = ("read", "write", "mixed")


@dataclass(frozen=True)
class Span:
    """A range of one test file, moved `num_passes` times in order."""

    offset: int
    nbytes: int
    num_passes: int

    @property
    def total_bytes(self) -> int:
        """Bytes moved over all passes."""
        return self.nbytes * self.num_passes


@dataclass(frozen=True)
class ChunkRequest:
    """One chunk to move; `index` is its number in the file and selects its pattern."""

    is_write: bool
    offset: int
    index: int


@dataclass(frozen=True)
class Load:
    """Bytes moved in one sample: a span to read and one to write per test file.

    `salt` differs between samples and shifts the patterns to write, so that a lost write cannot
    pass the check.
    """

    mode: Mode
    chunk_bytes: int
    reads: tuple[Span | None, ...]
    writes: tuple[Span | None, ...]
    salt: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes moved in both directions over all files."""
        return sum(span.total_bytes for span in (*self.reads, *self.writes) if span)

    @property
    def num_files(self) -> int:
        """Number of test files, one per path."""
        return len(self.reads)

    def pieces(self, file_index: int) -> Iterator[ChunkRequest]:
        """Yield the chunks of one file in order; mixed loads alternate reads and writes."""
        reads = _chunks(self.reads[file_index], False, self.chunk_bytes)
        writes = _chunks(self.writes[file_index], True, self.chunk_bytes)
        if self.mode != "mixed":
            yield from reads
            yield from writes
            return
        for pair in zip(reads, writes, strict=True):
            yield from pair

    def blocks(self, file_index: int, block_bytes: int) -> Iterator[tuple[ChunkRequest, int, int]]:
        """Yield (chunk, offset in it, bytes) of one file; mixed loads alternate blocks."""
        chunks = list(self.pieces(file_index))
        group = 2 if self.mode == "mixed" else 1
        for first in range(0, len(chunks), group):
            for start in range(0, self.chunk_bytes, block_bytes):
                nbytes = min(block_bytes, self.chunk_bytes - start)
                for chunk in chunks[first : first + group]:
                    yield chunk, start, nbytes


def _chunks(span: Span | None, is_write: bool, chunk_bytes: int) -> Iterator[ChunkRequest]:
    if span is None:
        return
    for _ in range(span.num_passes):
        for offset in range(span.offset, span.offset + span.nbytes, chunk_bytes):
            yield ChunkRequest(is_write, offset, offset // chunk_bytes)


def make_load(
    mode: Mode, *, rates: Sequence[float], target_s: float, chunk_bytes: int, region_bytes: int
) -> Load:
    """Return a load that takes about `target_s` seconds.

    Files move bytes in proportion to their rate, so that all drives finish together.

    Args:
        mode: Directions to move bytes in.
        rates: Bytes per second of each file's drive in this mode, both directions together. A
            file with rate 0 moves nothing.
        target_s: Duration of the sample in seconds.
        chunk_bytes: Bytes of a chunk.
        region_bytes: Bytes of each half of a file, a multiple of `chunk_bytes`.
    """
    assert region_bytes % chunk_bytes == 0, (region_bytes, chunk_bytes)
    reads: list[Span | None] = []
    writes: list[Span | None] = []
    for rate in rates:
        if not rate:
            reads.append(None)
            writes.append(None)
            continue
        nbytes_wanted = rate * target_s / (2 if mode == "mixed" else 1)
        num_chunks = max(1, -(-int(nbytes_wanted) // chunk_bytes))
        region_chunks = region_bytes // chunk_bytes
        # Complete passes, so that contenders with other block sizes move the same bytes.
        num_passes = max(1, round(num_chunks / region_chunks))
        nbytes = min(num_chunks, region_chunks) * chunk_bytes
        reads.append(Span(0, nbytes, num_passes) if mode != "write" else None)
        writes.append(Span(region_bytes, nbytes, num_passes) if mode != "read" else None)
    return Load(mode, chunk_bytes, tuple(reads), tuple(writes))


def region_bytes_of(file_bytes: int, chunk_bytes: int) -> int:
    """Return the bytes of each half of a test file: a multiple of `chunk_bytes`.

    Raises:
        ConfigError: Half of the file is smaller than a chunk.
    """
    region_bytes = file_bytes // 2 // chunk_bytes * chunk_bytes
    if region_bytes < chunk_bytes:
        raise ConfigError(
            f"{format_size(file_bytes)} per path are too small for a chunk of "
            f"{format_size(chunk_bytes)} to read and one to write",
            remedy=f"--gib {2 * chunk_bytes / 2**30:g} or more",
        )
    return region_bytes


NUM_SLOTS = 4  # chunks in flight per file and direction, as in an optimizer pass
NUM_PATTERNS = 5
PAGE = 4096

Array = np.ndarray[Any, np.dtype[np.uint8]]


class Testbed:
    """Test files and buffers; a context manager that removes the files on exit."""

    __test__ = False  # not a test class of pytest

    def __init__(self, paths: Sequence[Path], region_bytes: int, chunk_bytes: int) -> None:
        assert region_bytes % chunk_bytes == 0
        assert chunk_bytes % PAGE == 0
        if len(set(paths)) < len(paths):
            raise ConfigError("the same path is given twice", remedy="give each drive once")
        self.paths = tuple(paths)
        self.region_bytes = region_bytes
        self.chunk_bytes = chunk_bytes
        self.file_paths: list[Path] = []
        self.direct: list[bool] = []
        self._scratches: list[Scratch] = []
        memory = mapped(NUM_PATTERNS * chunk_bytes)
        pattern = np.random.default_rng().integers(0, 2**64, len(memory) // 8, dtype=np.uint64)
        memory[:] = pattern.view(np.uint8)
        self._patterns = memory.reshape(NUM_PATTERNS, chunk_bytes)
        rings = mapped(len(paths) * NUM_SLOTS * chunk_bytes)
        self._rings = rings.reshape(len(paths), NUM_SLOTS, chunk_bytes)

    @property
    def num_files(self) -> int:
        """Number of test files, one per path."""
        return len(self.paths)

    def prepare(self, progress: Callable[[int, int], None] = lambda done, total: None) -> Self:
        """Create the test files and write every byte of them once.

        Args:
            progress: Called with the bytes written and the bytes to write.

        Raises:
            InfinityError: A path cannot be used or has too little free space. `close` removes
                files created before the error.
        """
        self._check_space()
        for path in self.paths:
            self._scratches.append(Scratch.create(path))
            self.file_paths.append(self._scratches[-1].path("bench.bin"))
        file_bytes = 2 * self.region_bytes
        for number, file_path in enumerate(self.file_paths):

            def report(done: int, before: int = number * file_bytes) -> None:
                progress(before + done, self.num_files * file_bytes)

            try:
                self._write_once(file_path, report)
            except OSError as error:
                raise refused(f"{self.paths[number]} cannot be used", error) from error
        return self

    def _check_space(self) -> None:
        devices = []
        for path in self.paths:
            try:
                devices.append(os.stat(path).st_dev)
            except OSError as error:
                remedy = f"mkdir -p {path}" if isinstance(error, FileNotFoundError) else None
                raise MachineError(
                    f"{path} cannot be used", because=error.strerror, remedy=remedy
                ) from error
        num_files = Counter(devices)
        for path, device in zip(self.paths, devices, strict=True):
            needed = 2 * self.region_bytes * num_files[device]
            free = disk_free_bytes(path)
            if needed > free:
                raise DoesNotFitError(
                    f"{format_size(needed)} of test files are needed, {format_size(free)} are free"
                    f" at {path}, {format_size(needed - free)} are missing",
                    because="test files are written once before they are measured",
                    remedy="a smaller --gib, a path with more free space, or free space there",
                )

    def _write_once(self, file_path: Path, progress: Callable[[int], None]) -> None:
        file = _aio.File(str(file_path), create=True)
        try:
            self.direct.append(file.direct)
            file.allocate(2 * self.region_bytes)
            with contextlib.closing(_aio.Engine()) as engine:
                tickets: list[_aio.Ticket] = []
                for index in range(2 * self.region_bytes // self.chunk_bytes):
                    if len(tickets) == NUM_SLOTS:
                        tickets.pop(0).wait()
                    offset = index * self.chunk_bytes
                    segment = (file, offset, self.chunk_bytes, address_of(self.pattern(index)))
                    tickets.append(engine.submit(_aio.WRITE, [segment]))
                    progress(offset)
                for ticket in tickets:
                    ticket.wait()
            file.sync()
            progress(2 * self.region_bytes)
        finally:
            file.close()

    def pattern(self, index: int, salt: int = 0) -> Array:
        """Return the content of chunk `index` written with `salt`; do not modify it."""
        pattern: Array = self._patterns[(index + salt) % NUM_PATTERNS]
        return pattern

    def slot(self, file_index: int, number: int) -> Array:
        """Return a buffer of one chunk to read into; each file has `NUM_SLOTS`."""
        slot: Array = self._rings[file_index, number % NUM_SLOTS]
        return slot

    def poison(self) -> None:
        """Invert a byte in each page of each slot, so that `check_slots` detects lost reads."""
        self._rings[:, :, ::PAGE] ^= 0xFF

    def check_slots(self, load: Load) -> None:
        """Compare the chunks read last, still in the slots, with their patterns.

        Raises:
            InfinityError: A byte differs.
        """
        for file_index in range(load.num_files):
            reads = [chunk for chunk in load.pieces(file_index) if not chunk.is_write]
            for number in range(max(0, len(reads) - NUM_SLOTS), len(reads)):
                expected = self.pattern(reads[number].index)
                if not np.array_equal(self.slot(file_index, number), expected):
                    raise self.wrong_bytes("read", file_index, reads[number].offset)

    def check_written(self, load: Load) -> None:
        """Read one page of up to eight written chunks per file and compare it.

        Raises:
            InfinityError: A byte differs.
        """
        page = mmap.mmap(-1, PAGE)
        for file_index, file_path in enumerate(self.file_paths):
            chunks = {p.index: p for p in load.pieces(file_index) if p.is_write}
            if not chunks:
                continue
            fd = open_file(file_path, write=False, direct=self.direct[file_index])
            try:
                numbers = sorted(chunks)[:: max(1, len(chunks) // 8)]
                for count, index in enumerate(numbers):
                    start = count * 7 * PAGE % self.chunk_bytes
                    os.preadv(fd, [page], chunks[index].offset + start)
                    if page[:] != self.pattern(index, load.salt)[start : start + PAGE].tobytes():
                        raise self.wrong_bytes("write", file_index, chunks[index].offset)
                if not self.direct[file_index]:
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)

    def wrong_bytes(self, op: str, file_index: int, offset: int) -> InfinityError:
        """Return the error for a `read` or `write` that moved wrong bytes."""
        location = f"{self.file_paths[file_index]}, offset {offset}"
        return InfinityError(
            f"a {op} transferred wrong bytes: {location}",
            because="bytes were lost or changed on their way to the drive or back",
            remedy="do not train on this drive; check `dmesg` and its health (`smartctl -a`)",
        )

    def close(self) -> None:
        """Remove the test files."""
        while self._scratches:
            self._scratches.pop().remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def open_file(path: Path, *, write: bool, direct: bool) -> int:
    """Open a test file and return its descriptor."""
    flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC
    return os.open(path, flags | (os.O_DIRECT if direct else 0))


def address_of(array: Array) -> int:
    """Return the address of the first byte."""
    return int(array.ctypes.data)


def mapped(nbytes: int) -> Array:
    """Return page-aligned memory with all pages present, huge pages where available.

    Requests in huge pages have few segments, which doubles the rate on some drives. All contenders
    use such memory.
    """
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MachineError(
            f"the system refused to reserve {format_size(nbytes)} of RAM: {error}",
            remedy="end other programs, or check `ulimit -v`",
        ) from error
    memory.madvise(mmap.MADV_DONTFORK)
    with contextlib.suppress(OSError):  # kernels without transparent huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, dtype=np.uint8)
    array[::PAGE] = 1
    return array

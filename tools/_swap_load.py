"""What a sample of the swap benchmark moves, and the test files and memory it moves between.

Each path gets one file of two regions of the same size: samples read the first and write the
second. A chunk carries one of a few random patterns, which one follows from its number, so that
what a contender read or wrote can be checked afterwards, outside the time that is measured.
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

from infinity import _aio
from infinity.errors import DoesNotFitError, InfinityError, MachineError
from infinity.files import refused
from infinity.plan.machine import disk_free_bytes
from infinity.sizes import format_size
from infinity.storage.run_dir import Scratch

Mode: TypeAlias = Literal["read", "write", "mixed"]
MODES: tuple[Mode, ...] = ("read", "write", "mixed")


@dataclass(frozen=True)
class Span:
    """A range of one test file that is gone through `num_passes` times, front to back."""

    offset: int
    nbytes: int
    num_passes: int

    @property
    def total_bytes(self) -> int:
        return self.nbytes * self.num_passes


@dataclass(frozen=True)
class Piece:
    """One chunk that is moved; `index` is its number in the file: its pattern follows from it."""

    is_write: bool
    offset: int
    index: int


@dataclass(frozen=True)
class Load:
    """One sample for every contender alike: per test file a span to read and one to write.

    `salt` differs from sample to sample and shifts the patterns that are written, so that a write
    which did not happen cannot look like one that did.
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
        return len(self.reads)

    def pieces(self, file_index: int) -> Iterator[Piece]:
        """Yield the chunks of one file in order; a read and a write take turns when mixed."""
        reads = _chunks(self.reads[file_index], False, self.chunk_bytes)
        writes = _chunks(self.writes[file_index], True, self.chunk_bytes)
        if self.mode != "mixed":
            yield from reads
            yield from writes
            return
        for pair in zip(reads, writes, strict=True):
            yield from pair

    def blocks(self, file_index: int, block_bytes: int) -> Iterator[tuple[Piece, int, int]]:
        """Yield (piece, start in it, bytes) of one file; when mixed, blocks take turns."""
        pieces = list(self.pieces(file_index))
        group = 2 if self.mode == "mixed" else 1
        for first in range(0, len(pieces), group):
            for start in range(0, self.chunk_bytes, block_bytes):
                nbytes = min(block_bytes, self.chunk_bytes - start)
                for piece in pieces[first : first + group]:
                    yield piece, start, nbytes


def _chunks(span: Span | None, is_write: bool, chunk_bytes: int) -> Iterator[Piece]:
    if span is None:
        return
    for _ in range(span.num_passes):
        for offset in range(span.offset, span.offset + span.nbytes, chunk_bytes):
            yield Piece(is_write, offset, offset // chunk_bytes)


def make_load(
    mode: Mode, *, rates: Sequence[float], target_s: float, chunk_bytes: int, region_bytes: int
) -> Load:
    """Return a load that takes about `target_s` seconds.

    `rates` are bytes per second of each file's drive in this mode, both directions together. Each
    file takes part in proportion, so that the drives end together; not at all at 0. Every file
    has a first region of `region_bytes` (whole chunks) to read and a second one as large to write.
    """
    assert region_bytes % chunk_bytes == 0, (region_bytes, chunk_bytes)
    reads: list[Span | None] = []
    writes: list[Span | None] = []
    for rate in rates:
        if not rate:
            reads.append(None)
            writes.append(None)
            continue
        wanted = rate * target_s / (2 if mode == "mixed" else 1)
        num_chunks = max(1, -(-int(wanted) // chunk_bytes))
        in_region = region_bytes // chunk_bytes
        # Whole passes, so that contenders who cut the range differently move the same bytes.
        num_passes = max(1, round(num_chunks / in_region))
        nbytes = min(num_chunks, in_region) * chunk_bytes
        reads.append(Span(0, nbytes, num_passes) if mode != "write" else None)
        writes.append(Span(region_bytes, nbytes, num_passes) if mode != "read" else None)
    return Load(mode, chunk_bytes, tuple(reads), tuple(writes))


NUM_SLOTS = 4  # chunks in flight per file and direction, as in an optimizer pass
NUM_PATTERNS = 5
PAGE = 4096

Array = np.ndarray[Any, np.dtype[np.uint8]]


class Testbed:
    """Test files and buffers; a context manager that leaves nothing behind."""

    __test__ = False  # not a test, whatever its name looks like to pytest

    def __init__(self, paths: Sequence[Path], region_bytes: int, chunk_bytes: int) -> None:
        assert region_bytes % chunk_bytes == 0
        assert chunk_bytes % PAGE == 0
        self.paths = tuple(paths)
        self.region_bytes = region_bytes
        self.chunk_bytes = chunk_bytes
        self.file_paths: list[Path] = []
        self.direct: list[bool] = []
        self._scratches: list[Scratch] = []
        memory = mapped(NUM_PATTERNS * chunk_bytes)
        words = np.random.default_rng().integers(0, 2**64, len(memory) // 8, dtype=np.uint64)
        memory[:] = words.view(np.uint8)
        self._patterns = memory.reshape(NUM_PATTERNS, chunk_bytes)
        rings = mapped(len(paths) * NUM_SLOTS * chunk_bytes)
        self._rings = rings.reshape(len(paths), NUM_SLOTS, chunk_bytes)

    @property
    def num_files(self) -> int:
        return len(self.paths)

    def prepare(self, progress: Callable[[int, int], None] = lambda done, total: None) -> Self:
        """Make the files and write every byte of them once.

        `progress` is told (bytes written, bytes in all). Raises `MachineError`, `DoesNotFitError`
        or `TransferError`; what was made is removed by `close`.
        """
        self._check_space()
        for path in self.paths:
            self._scratches.append(Scratch.create(path))
            self.file_paths.append(self._scratches[-1].path("bench.bin"))
        file_bytes = 2 * self.region_bytes
        for number, file_path in enumerate(self.file_paths):

            def tell(done: int, before: int = number * file_bytes) -> None:
                progress(before + done, self.num_files * file_bytes)

            try:
                self._write_once(file_path, tell)
            except OSError as error:
                raise refused(f"{self.paths[number]} cannot be used", error) from error
        return self

    def _check_space(self) -> None:
        devices = [_device_of(path) for path in self.paths]
        num_files = Counter(devices)
        for path, device in zip(self.paths, devices, strict=True):
            needed = 2 * self.region_bytes * num_files[device]
            free = disk_free_bytes(path)
            if needed > free:
                raise DoesNotFitError(
                    f"{format_size(needed)} of test files are needed, {format_size(free)} are free"
                    f" at {path}, {format_size(needed - free)} are missing",
                    because="extents are written once before they are measured",
                    remedy="a smaller --gib, or a --path with more room",
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
        finally:
            file.close()

    def pattern(self, index: int, salt: int = 0) -> Array:
        """What chunk `index` holds after being written with `salt`; chunk_bytes, not to change."""
        pattern: Array = self._patterns[(index + salt) % NUM_PATTERNS]
        return pattern

    def slot(self, file_index: int, number: int) -> Array:
        """A buffer of one chunk to read into; `NUM_SLOTS` of them per file."""
        slot: Array = self._rings[file_index, number % NUM_SLOTS]
        return slot

    def poison(self) -> None:
        """Spoil every page of every slot, so that a read which did not happen is noticed."""
        self._rings[:, :, ::PAGE] ^= 0xFF

    def check_slots(self, load: Load) -> None:
        """Compare the chunks that were read last, and should be in the slots, with the truth.

        Raises `InfinityError` when a byte differs.
        """
        for file_index in range(load.num_files):
            reads = [piece for piece in load.pieces(file_index) if not piece.is_write]
            for number in range(max(0, len(reads) - NUM_SLOTS), len(reads)):
                truth = self.pattern(reads[number].index)
                if not np.array_equal(self.slot(file_index, number), truth):
                    raise self.wrong_bytes("read", file_index, reads[number].offset)

    def check_written(self, load: Load) -> None:
        """Read one page of up to eight written chunks per file and compare.

        Raises `InfinityError` when a byte differs.
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
        """Return the error for a contender that was fast and wrong."""
        place = f"{self.file_paths[file_index]}, offset {offset}"
        return InfinityError(f"a {op} delivered other bytes than it should: {place}")

    def close(self) -> None:
        while self._scratches:
            self._scratches.pop().remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def open_file(path: Path, *, write: bool, direct: bool) -> int:
    flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC
    return os.open(path, flags | (os.O_DIRECT if direct else 0))


def address_of(array: Array) -> int:
    return int(array.ctypes.data)


def mapped(nbytes: int) -> Array:
    """Page-aligned memory, every page present; huge ones where the system gives them.

    A request then has few pieces, which on some drives doubles the rate: so they are everybody's.
    """
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MachineError(
            f"the system refused to reserve {format_size(nbytes)} of RAM: {error}",
            remedy="a smaller --chunk, or check `ulimit -v`",
        ) from error
    memory.madvise(mmap.MADV_DONTFORK)
    with contextlib.suppress(OSError):  # kernels without transparent huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, dtype=np.uint8)
    array[::PAGE] = 1
    return array


def _device_of(path: Path) -> int:
    try:
        return os.stat(path).st_dev
    except OSError as error:
        remedy = f"mkdir -p {path}" if isinstance(error, FileNotFoundError) else None
        raise MachineError(
            f"{path} cannot be used", because=error.strerror, remedy=remedy
        ) from error

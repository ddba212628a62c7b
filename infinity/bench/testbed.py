"""Test files on the drives, already written, and the memory that bytes come from and go to.

Each path gets one file of two regions of the same size: samples read the first and write the
second. A chunk carries one of a few random patterns, which one follows from its number, so that
what a contender read or wrote can be checked afterwards, outside the time that is measured.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from infinity import _aio
from infinity.bench.load import Load
from infinity.errors import DoesNotFitError, InfinityError, MachineError
from infinity.memory.disk_errors import transfer_error
from infinity.memory.scratch import Scratch
from infinity.plan.machine import disk_free_bytes
from infinity.sizes import format_size

NUM_SLOTS = 4  # chunks in flight per file and direction, as in a sweep
NUM_PATTERNS = 5
PAGE = 4096

Progress = Callable[[int, int], None]
Array = np.ndarray[Any, np.dtype[np.uint8]]


def io_failure(error: OSError, where: Path | str) -> InfinityError:
    """Return our error for a failed open or transfer of a benchmark."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = "a smaller --gib, or a --path with more room"
        return DoesNotFitError(f"{where} is full", because=str(error), remedy=remedy)
    if isinstance(error, _aio.AioError):
        return transfer_error(error)
    return MachineError(f"{where} cannot be used", because=str(error))


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
        """One per path."""
        return len(self.paths)

    def prepare(self, progress: Progress = lambda done, total: None) -> Self:
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
                raise io_failure(error, self.paths[number]) from error
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
        """Remove the files. Safe to call twice."""
        while self._scratches:
            self._scratches.pop().remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def open_file(path: Path, *, write: bool, direct: bool) -> int:
    """Open an existing test file and return its descriptor."""
    flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC
    return os.open(path, flags | (os.O_DIRECT if direct else 0))


def address_of(array: Array) -> int:
    """The address of the first byte."""
    return int(array.ctypes.data)


def mapped(nbytes: int) -> Array:
    """Page-aligned memory with every page present, and not given to forked children.

    Huge pages where the system gives them: a request then has few pieces, which on some drives
    doubles the rate. So they are everybody's.
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

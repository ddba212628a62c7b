"""What one writes without an engine: O_DIRECT threads, buffered files, an aiofiles loop."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import aiofiles
import numpy as np

from infinity.bench.contender import Sample, timed
from infinity.bench.load import Load, Piece
from infinity.bench.testbed import Array, Testbed, io_failure, mapped, open_file
from infinity.sizes import format_size

_Block = tuple[Piece, int, int]


class PlainThreads:
    """Python threads that call preadv and pwritev with O_DIRECT; system calls release the GIL.

    Each thread reads into one block of its own, which stays in the processor's cache: an advantage
    over engines that fill whole chunks, and so a stricter reference.
    """

    family = "plain"

    def __init__(self, testbed: Testbed, block_size: int, num_threads: int) -> None:
        self._testbed = testbed
        self._block_size = block_size
        self._num_threads = num_threads
        self._fds = [
            open_file(path, write=True, direct=direct)
            for path, direct in zip(testbed.file_paths, testbed.direct, strict=True)
        ]
        count = num_threads * testbed.num_files
        self._buffers = mapped(count * block_size).reshape(count, block_size)
        self._pool = ThreadPoolExecutor(count)
        # Starting threads is set-up: each takes one task that waits for all the others.
        barrier = threading.Barrier(count)
        list(self._pool.map(lambda _: barrier.wait(60), range(count)))

    @property
    def name(self) -> str:
        """The settings."""
        kind = "" if all(self._testbed.direct) else "buffered "
        return f"plain {kind}{format_size(self._block_size)} x {self._num_threads} threads"

    def run(self, load: Load) -> Sample:
        """Move the load and check each thread's last block; raises our errors."""
        queues = [iter(list(load.blocks(i, self._block_size))) for i in range(load.num_files)]
        last: list[tuple[int, Array, _Block]] = []

        def work() -> None:
            tasks = [
                self._pool.submit(
                    self._go,
                    load,
                    number % load.num_files,
                    queues[number % load.num_files],
                    buffer,
                )
                for number, buffer in enumerate(self._buffers)
            ]
            last.extend(found for task in tasks if (found := task.result()) is not None)

        try:
            sample = timed(work, load)
        except OSError as error:
            raise io_failure(error, self._testbed.file_paths[0]) from error
        for file_index, buffer, (piece, start, nbytes) in last:
            truth = self._testbed.pattern(piece.index)[start : start + nbytes]
            if not np.array_equal(buffer[:nbytes], truth):
                raise self._testbed.wrong_bytes("read", file_index, piece.offset + start)
        self._testbed.check_written(load)
        return sample

    def _go(
        self, load: Load, file_index: int, queue: Iterator[_Block], buffer: Array
    ) -> tuple[int, Array, _Block] | None:
        """Take blocks until there are none; return the last one read."""
        fd, last = self._fds[file_index], None
        for block in queue:  # a list's iterator may be shared: taking one is a single step
            piece, start, nbytes = block
            if piece.is_write:
                data = self._testbed.pattern(piece.index, load.salt)[start : start + nbytes]
                moved = os.pwritev(fd, [data.data], piece.offset + start)
            else:
                moved = os.preadv(fd, [buffer[:nbytes].data], piece.offset + start)
                last = file_index, buffer, block
            if moved != nbytes:
                raise OSError(f"{moved} of {nbytes} bytes were moved")
        return last

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown()
        while self._fds:
            os.close(self._fds.pop())


class _Buffered:
    """Common to those who go through the page cache: it is dropped before, and flushed within."""

    family = "buffered"
    block_size = 2**20

    def __init__(self, testbed: Testbed) -> None:
        self._testbed = testbed
        self._fds = [open_file(p, write=True, direct=False) for p in testbed.file_paths]

    def run(self, load: Load) -> Sample:
        """Move the load; writes count until they are on the drive, as with O_DIRECT."""
        self.drop_cache()
        if load.mode != "write":
            self._testbed.poison()
        try:
            sample = timed(lambda: self.move(load), load)
        except OSError as error:
            raise io_failure(error, self._testbed.file_paths[0]) from error
        finally:
            self.drop_cache()
        self._testbed.check_slots(load)
        self._testbed.check_written(load)
        return sample

    def drop_cache(self) -> None:
        """Forget what the page cache holds of the test files."""
        for fd in self._fds:
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def move(self, load: Load) -> None:
        """Move every byte."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the files."""
        while self._fds:
            os.close(self._fds.pop())


class BufferedFiles(_Buffered):
    """One thread that reads and writes plain files, then flushes them."""

    name = "plain buffered files"

    def move(self, load: Load) -> None:
        """Move every byte, drive after drive."""
        for file_index, fd in enumerate(self._fds):
            for piece, start, buffer in _buffers(self._testbed, load, file_index, self.block_size):
                (os.pwritev if piece.is_write else os.preadv)(fd, [buffer], piece.offset + start)
            if load.mode != "read":
                os.fdatasync(fd)


class AiofilesLoop(_Buffered):
    """An asyncio loop over aiofiles: one file object and coroutine per drive and direction."""

    family = "aiofiles"
    name = "aiofiles loop"

    def move(self, load: Load) -> None:
        """Move every byte."""
        asyncio.run(self._move(load))

    async def _move(self, load: Load) -> None:
        parts = [
            self._stream(load, file_index, is_write)
            for file_index in range(load.num_files)
            for is_write in (False, True)
        ]
        await asyncio.gather(*parts)

    async def _stream(self, load: Load, file_index: int, is_write: bool) -> None:
        path = self._testbed.file_paths[file_index]
        async with aiofiles.open(path, "r+b", buffering=0) as file:
            for piece, start, buffer in _buffers(self._testbed, load, file_index, self.block_size):
                if piece.is_write == is_write:
                    await file.seek(piece.offset + start)
                    await (file.write if is_write else file.readinto)(buffer)
            if is_write and load.mode != "read":
                sync = partial(os.fdatasync, file.fileno())
                await asyncio.get_running_loop().run_in_executor(None, sync)


def _buffers(
    testbed: Testbed, load: Load, file_index: int, block_size: int
) -> Iterator[tuple[Piece, int, memoryview]]:
    """Yield (piece, start, what to read into or write from) for each block of one file."""
    num_reads = 0
    for piece, start, nbytes in load.blocks(file_index, block_size):
        if piece.is_write:
            chunk = testbed.pattern(piece.index, load.salt)
        else:
            chunk = testbed.slot(file_index, num_reads)
            num_reads += start + nbytes == load.chunk_bytes
        yield piece, start, chunk.data[start : start + nbytes]

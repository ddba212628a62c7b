"""Contenders of the swap benchmark: infinity's I/O engine, and plain threads with O_DIRECT."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np

import infinity._aio as _aio
from infinity.common.files import refused
from infinity.common.sizes import format_size
from infinity.config.schema import IoConfig
from infinity.errors import InfinityError
from infinity.swap_benchmark.load import (
    NUM_SLOTS,
    Array,
    ChunkRequest,
    Load,
    Testbed,
    address_of,
    mapped,
    open_file,
)

_DEFAULTS = IoConfig()


class UnavailableError(InfinityError):
    """A contender cannot run on this machine; the others continue."""


@dataclass(frozen=True)
class Sample:
    """One measurement; `cpu_s` is the CPU time of the process, including native threads."""

    duration_s: float
    nbytes: int
    cpu_s: float

    @property
    def rate(self) -> float:
        """Bytes per second, both directions together."""
        return self.nbytes / self.duration_s

    @property
    def cpu_s_per_gib(self) -> float:
        """Processor seconds per GiB moved."""
        return self.cpu_s / (self.nbytes / 2**30)


class Contender(Protocol):
    """A program that moves loads. Set-up and checks are not timed; `close` is idempotent."""

    family: str  # io_uring, threads, plain, cached, or one of the contenders in tools/
    name: str  # the family and its settings

    def run(self, load: Load) -> Sample:
        """Move the load, check its bytes and return the measurement."""

    def close(self) -> None:
        """Release threads, files and memory."""


def timed(work: Callable[[], None], load: Load) -> Sample:
    """Measure one call of `work`, which moves the load in this process."""
    cpu_s = time.process_time()
    started_s = time.perf_counter()
    work()
    duration_s = time.perf_counter() - started_s
    return Sample(duration_s, load.total_bytes, time.process_time() - cpu_s)


def checked(testbed: Testbed, work: Callable[[], None], load: Load) -> Sample:
    """Measure one call of `work`, which reads into the slots, and check its bytes.

    Raises:
        InfinityError: A request failed, or wrong bytes were read or written.
    """
    if load.mode != "write":
        testbed.poison()
    try:
        sample = timed(work, load)
    except OSError as error:
        paths = ", ".join(map(str, testbed.file_paths))
        raise refused(f"{paths} cannot be used", error) from error
    testbed.check_slots(load)
    testbed.check_written(load)
    return sample


@dataclass(frozen=True)
class IoSettings:
    """The keys of the `io:` section that affect speed; `block_size` in bytes."""

    backend: str = "io_uring"
    block_size: int = _DEFAULTS.block_size
    queue_depth: int = _DEFAULTS.queue_depth
    num_threads: int = _DEFAULTS.num_threads

    @property
    def name(self) -> str:
        """Back end, block size and parallelism."""
        parallelism = f"x {self.queue_depth}"
        if self.backend == "threads":
            parallelism = f"x {self.num_threads} threads"
        return f"{self.backend} {format_size(self.block_size)} {parallelism}"


class EngineContender:
    """`infinity._aio` with one set of settings."""

    def __init__(self, testbed: Testbed, settings: IoSettings) -> None:
        self.family = settings.backend
        self.settings = settings
        self._testbed = testbed
        try:
            self._engine = _aio.Engine(
                backend=settings.backend,
                block_size=settings.block_size,
                queue_depth=settings.queue_depth,
                num_threads=settings.num_threads,
            )
        except OSError as error:
            what = f"{settings.backend} cannot start on this machine"
            raise UnavailableError(what, because=str(error)) from error
        self.name = settings.name
        self._files = [_aio.File(str(path)) for path in testbed.file_paths]

    def run(self, load: Load) -> Sample:
        """Move the load and check its bytes; raises the errors of `checked`."""
        return checked(self._testbed, lambda: self._move_all(load), load)

    def _move_all(self, load: Load) -> None:
        if load.num_files == 1:
            self._move_file(load, 0)
            return
        with ThreadPoolExecutor(load.num_files) as pool:
            for task in [pool.submit(self._move_file, load, i) for i in range(load.num_files)]:
                task.result()

    def _move_file(self, load: Load, file_index: int) -> None:
        """Keep `NUM_SLOTS` chunks per direction in flight until all are done."""
        limit = NUM_SLOTS * (2 if load.mode == "mixed" else 1)
        in_flight: deque[_aio.Ticket] = deque()
        file, num_reads = self._files[file_index], 0
        for chunk in load.pieces(file_index):
            if len(in_flight) == limit:
                in_flight.popleft().wait()
            # Priorities of an optimizer pass: read-ahead precedes write-back.
            if chunk.is_write:
                buffer = self._testbed.pattern(chunk.index, load.salt)
                op, priority = _aio.WRITE, _aio.BACKGROUND
            else:
                buffer = self._testbed.slot(file_index, num_reads)
                num_reads += 1
                op, priority = _aio.READ, _aio.NORMAL
            segment = (file, chunk.offset, load.chunk_bytes, address_of(buffer))
            in_flight.append(self._engine.submit(op, [segment], priority=priority))
        for ticket in in_flight:
            ticket.wait()

    def close(self) -> None:
        """Close the engine and its files."""
        self._engine.close()
        for file in self._files:
            file.close()


_Block = tuple[ChunkRequest, int, int]


class PlainThreads:
    """Python threads that call preadv and pwritev with O_DIRECT; system calls release the GIL.

    Reads go to the same amount of memory as the engine's, `NUM_SLOTS` chunks. With `cached` each
    thread reads into a single block: if a processor copies the bytes of a drive, as on virtual
    machines, they then stay in its cache. No program that uses the bytes reaches that rate; it
    shows the share of memory in a difference.
    """

    def __init__(
        self, testbed: Testbed, block_size: int, num_threads: int, *, cached: bool = False
    ) -> None:
        self._testbed, self._block_size = testbed, block_size
        self.family = "cached" if cached else "plain"
        kind = "" if all(testbed.direct) else "buffered "
        self.name = f"{self.family} {kind}{format_size(block_size)} x {num_threads} threads"
        self._fds = [
            open_file(path, write=True, direct=direct)
            for path, direct in zip(testbed.file_paths, testbed.direct, strict=True)
        ]
        count = num_threads * testbed.num_files
        window = NUM_SLOTS * testbed.chunk_bytes // (num_threads * block_size)
        num_blocks = 1 if cached else max(1, window)
        memory = mapped(count * num_blocks * block_size)
        self._buffers = memory.reshape(count, num_blocks, block_size)
        self._pool = ThreadPoolExecutor(count)
        # Start all threads during set-up: each gets one task that waits for the others.
        barrier = threading.Barrier(count)
        list(self._pool.map(lambda _: barrier.wait(60), range(count)))

    def run(self, load: Load) -> Sample:
        """Move the load and check the last block of each thread; raises like `checked`."""
        queues = [iter(list(load.blocks(i, self._block_size))) for i in range(load.num_files)]
        last: list[tuple[int, Array, _Block]] = []

        def work() -> None:
            assignments = zip(itertools.cycle(range(load.num_files)), self._buffers)
            tasks = [
                self._pool.submit(self._move_blocks, load, i, queues[i], b) for i, b in assignments
            ]
            results = [task.result() for task in tasks]
            last.extend(result for result in results if result is not None)

        try:
            sample = timed(work, load)
        except OSError as error:
            path = self._testbed.file_paths[0]
            raise refused(f"{path} cannot be used", error) from error
        for file_index, buffer, (chunk, start, nbytes) in last:
            expected = self._testbed.pattern(chunk.index)[start : start + nbytes]
            if not np.array_equal(buffer[:nbytes], expected):
                raise self._testbed.wrong_bytes("read", file_index, chunk.offset + start)
        self._testbed.check_written(load)
        return sample

    def _move_blocks(
        self, load: Load, file_index: int, queue: Iterator[_Block], buffers: Array
    ) -> tuple[int, Array, _Block] | None:
        """Move blocks until the queue is empty; return the last one read."""
        fd, last, targets = self._fds[file_index], None, itertools.cycle(buffers)
        for block in queue:  # threads share the list iterator: `next` is atomic
            chunk, start, nbytes = block
            if chunk.is_write:
                data = self._testbed.pattern(chunk.index, load.salt)[start : start + nbytes]
                moved = os.pwritev(fd, [data.data], chunk.offset + start)
            else:
                buffer = next(targets)
                moved = os.preadv(fd, [buffer[:nbytes].data], chunk.offset + start)
                last = file_index, buffer, block
            if moved != nbytes:
                raise OSError(f"{moved} of {nbytes} bytes were moved")
        return last

    def close(self) -> None:
        """Stop the threads and close the files."""
        self._pool.shutdown()
        while self._fds:
            os.close(self._fds.pop())

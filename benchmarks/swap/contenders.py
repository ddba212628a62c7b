"""Contenders of the swap benchmark: fio, DeepSpeed's aio_handle and buffered files."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import aiofiles
import torch

from infinity.common.sizes import format_size
from infinity.swap_benchmark.contenders import Sample, UnavailableError, checked, timed
from infinity.swap_benchmark.load import NUM_SLOTS, ChunkRequest, Load, Span, Testbed, open_file


class _Buffered:
    """Base of contenders with buffered I/O; the page cache is dropped before each run."""

    family = "buffered"
    block_size = 2**20

    def __init__(self, testbed: Testbed) -> None:
        self._testbed = testbed
        self._fds = [open_file(p, write=True, direct=False) for p in testbed.file_paths]

    def run(self, load: Load) -> Sample:
        """Move the load; the time of writes includes flushing to the drive, as with O_DIRECT."""
        self.drop_cache()
        try:
            return checked(self._testbed, lambda: self.move(load), load)
        finally:
            self.drop_cache()

    def drop_cache(self) -> None:
        for fd in self._fds:
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def move(self, load: Load) -> None:
        raise NotImplementedError

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())


class BufferedFiles(_Buffered):
    """Buffered reads and writes of one thread, then a flush."""

    name = "plain buffered files"

    def move(self, load: Load) -> None:
        for file_index, fd in enumerate(self._fds):
            for piece, start, buffer in _buffers(self._testbed, load, file_index, self.block_size):
                (os.pwritev if piece.is_write else os.preadv)(fd, [buffer], piece.offset + start)
            if load.mode != "read":
                os.fdatasync(fd)


class AiofilesLoop(_Buffered):
    """An asyncio loop over aiofiles, with one file object and coroutine per drive and direction."""

    family = "aiofiles"
    name = "aiofiles loop"

    def move(self, load: Load) -> None:
        asyncio.run(self._move(load))

    async def _move(self, load: Load) -> None:
        directions = itertools.product(range(load.num_files), (False, True))
        await asyncio.gather(*(self._stream(load, i, is_write) for i, is_write in directions))

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
) -> Iterator[tuple[ChunkRequest, int, memoryview]]:
    """Yield (piece, start, buffer) for each block of one file."""
    num_reads = 0
    for piece, start, nbytes in load.blocks(file_index, block_size):
        if piece.is_write:
            chunk = testbed.pattern(piece.index, load.salt)
        else:
            chunk = testbed.slot(file_index, num_reads)
            num_reads += start + nbytes == load.chunk_bytes
        yield piece, start, chunk.data[start : start + nbytes]


_PATIENCE_S = 600.0


class Fio:
    """fio with one ioengine and depth; for "psync" the depth is the number of jobs per direction.

    Its buffers have depth x block bytes of random data and stay in the processor cache, unlike
    chunks. Only the run time of the jobs counts, not the start of the program.
    """

    family = "fio"

    def __init__(self, testbed: Testbed, engine: str, block_size: int, depth: int) -> None:
        self._testbed = testbed
        self._program = shutil.which("fio")
        if self._program is None:
            raise UnavailableError("fio is not installed", remedy="apt-get install fio")
        self._engine, self._block_size, self._depth = engine, block_size, depth
        self.name = f"fio {engine} {format_size(block_size)} x {depth}"

    def run(self, load: Load) -> Sample:
        """Run all jobs at once until the last one ends; raise `UnavailableError` on failure."""
        output = self._output([*self._common(), *self._jobs(load)])
        jobs = parse_jobs(output)
        moved = sum(job[way]["io_bytes"] for job in jobs for way in ("read", "write"))
        if moved != load.total_bytes:
            what = f"{self.name} moved {moved} bytes instead of {load.total_bytes}"
            raise UnavailableError(what, because=str({job["error"] for job in jobs}))
        busy_s = max(job[way]["runtime"] for job in jobs for way in ("read", "write")) / 1e3
        cpu_s = sum((j["usr_cpu"] + j["sys_cpu"]) / 100 * j["job_runtime"] / 1e3 for j in jobs)
        # fio reports milliseconds: shorter runs count as 1 ms.
        return Sample(max(busy_s, 1e-3), moved, cpu_s)

    def _common(self) -> list[str]:
        return [
            f"--direct={int(all(self._testbed.direct))}",
            "--thread",
            "--output-format=json",
            f"--ioengine={self._engine}",
            f"--bs={self._block_size}",
            "--overwrite=1",
            "--fallocate=none",
            # The buffers are random already.
            "--scramble_buffers=0",
        ]

    def _jobs(self, load: Load) -> list[str]:
        jobs = []
        for index, path in enumerate(self._testbed.file_paths):
            for way, span in (("read", load.reads[index]), ("write", load.writes[index])):
                if span is not None:
                    options = [f"--name={way}-{index}", f"--filename={path}", f"--rw={way}"]
                    jobs += [*options, *self._span(span)]
        return jobs

    def _span(self, span: Span) -> list[str]:
        if self._engine != "psync":
            options = [f"--offset={span.offset}", f"--size={span.nbytes}"]
            return [*options, f"--io_size={span.total_bytes}", f"--iodepth={self._depth}"]
        job_bytes = span.nbytes // self._depth
        if job_bytes * self._depth != span.nbytes or job_bytes % self._block_size:
            raise UnavailableError(f"{self.name} cannot divide {format_size(span.nbytes)}")
        return [
            f"--numjobs={self._depth}",
            f"--offset={span.offset}",
            f"--offset_increment={job_bytes}",
            f"--size={job_bytes}",
            f"--io_size={job_bytes * span.num_passes}",
        ]

    def _output(self, arguments: list[str]) -> str:
        """Run fio; it has always ended on return or raise, because it would recreate files."""
        assert self._program is not None
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        # A separate session: Ctrl-C reaches only this process, which kills fio.
        command = [self._program, *arguments]
        start = partial(subprocess.Popen, command, text=True, start_new_session=True, **pipes)
        started: list[subprocess.Popen[str]] = []
        try:
            # In another thread: a signal raised during the start would lose the process.
            with ThreadPoolExecutor(1) as pool:
                pool.submit(lambda: started.append(start())).result()
            (process,) = started
            output, errors = process.communicate(timeout=_PATIENCE_S)
        except BaseException:
            for process in started:
                process.kill()
                process.communicate()
            raise
        if process.returncode != 0:
            text = (errors.strip() or output.strip())[-300:]
            raise UnavailableError(f"{self.name} ended with {process.returncode}", because=text)
        return output

    def close(self) -> None:
        pass


def parse_jobs(output: str) -> list[dict[str, Any]]:
    """Return the jobs of fio's JSON output, which may follow warnings.

    Raises `UnavailableError` if there is no JSON.
    """
    start = output.find("{")
    try:
        return list(json.loads(output[max(start, 0) :])["jobs"])
    except (ValueError, KeyError, TypeError) as error:
        because = output.strip()[:200] or "it printed nothing"
        raise UnavailableError("fio's output cannot be read", because=because) from error


class DeepSpeedHandle:
    """`aio_handle` with locked tensors of one chunk, and two handles per direction.

    `wait` of a handle waits for all its requests, so a single handle would have none in flight at
    each wait. With two, the requests of the other keep the drive busy.
    """

    family = "deepspeed"

    def __init__(self, testbed: Testbed, block_size: int, depth: int, num_threads: int) -> None:
        self._testbed = testbed
        self.name = f"deepspeed {format_size(block_size)} x {depth}, {num_threads} thread(s)"
        if not all(testbed.direct):
            raise UnavailableError("deepspeed needs O_DIRECT, which this file system does not take")
        make_handle = _handle_type()
        arguments = (block_size, depth, True, True, num_threads)
        self._handles = [make_handle(*arguments) for _ in range(4)]
        self._tensors: list[Any] = []
        example = torch.empty(0, dtype=torch.uint8)
        for _ in range(2 * NUM_SLOTS):
            tensor = self._handles[0].new_cpu_locked_tensor(testbed.chunk_bytes, example)
            tensor.fill_(1)
            self._tensors.append(tensor)

    def run(self, load: Load) -> Sample:
        """Move the load and check the last chunks read."""
        targets, sources = self._tensors[:NUM_SLOTS], self._tensors[NUM_SLOTS:]
        pieces = [(i, piece) for i in range(load.num_files) for piece in load.pieces(i)]
        # Write buffers are filled with random chunks before the timing.
        for number, tensor in enumerate(sources):
            tensor.copy_(torch.from_numpy(self._testbed.pattern(number, load.salt).copy()))
        reads = [request for request in pieces if not request[1].is_write]
        writes = [request for request in pieces if request[1].is_write]
        sample = timed(lambda: self._move(reads, writes, targets, sources), load)
        for number in range(max(0, len(reads) - NUM_SLOTS), len(reads)):
            file_index, piece = reads[number]
            expected = torch.from_numpy(self._testbed.pattern(piece.index).copy())
            if not torch.equal(targets[number % NUM_SLOTS], expected):
                raise self._testbed.wrong_bytes("read", file_index, piece.offset)
        return sample

    def _move(
        self,
        reads: list[tuple[int, ChunkRequest]],
        writes: list[tuple[int, ChunkRequest]],
        targets: list[Any],
        sources: list[Any],
    ) -> None:
        """Alternate between two halves of the buffers, one in flight during waits for the other."""
        half = NUM_SLOTS // 2
        busy: set[int] = set()
        for first in range(0, max(len(reads), len(writes)), half):
            handle_index = first // half % 2
            directions = (
                ("async_pread", handle_index, reads, targets),
                ("async_pwrite", 2 + handle_index, writes, sources),
            )
            for call, handle, pieces, tensors in directions:
                if handle in busy:
                    self._handles[handle].wait()
                    busy.discard(handle)
                for number in range(first, min(first + half, len(pieces))):
                    self._start(call, handle, pieces[number], tensors[number % NUM_SLOTS])
                    busy.add(handle)
        for handle in busy:
            self._handles[handle].wait()

    def _start(
        self, call: str, handle: int, request: tuple[int, ChunkRequest], tensor: Any
    ) -> None:
        file_index, piece = request
        path = str(self._testbed.file_paths[file_index])
        if getattr(self._handles[handle], call)(tensor, path, piece.offset) != 0:
            raise UnavailableError(f"{self.name}: {call} failed at offset {piece.offset} of {path}")

    def close(self) -> None:
        while self._tensors:
            self._handles[0].free_cpu_locked_tensor(self._tensors.pop())


def _handle_type() -> Any:
    """Return `aio_handle`; raise `UnavailableError` if it cannot be imported or built."""
    if importlib.util.find_spec("deepspeed") is None:
        raise UnavailableError("deepspeed is not importable")
    try:
        builder = importlib.import_module("deepspeed.ops.op_builder")
        return builder.AsyncIOBuilder().load().aio_handle
    except Exception as error:  # its build fails in many ways
        because = str(error).strip()[-300:]
        raise UnavailableError("deepspeed's asynchronous I/O does not load", because=because) from (
            error
        )

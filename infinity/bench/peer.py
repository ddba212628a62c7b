"""The asynchronous I/O handle of DeepSpeed as a contender, where it can be imported."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
from typing import Any

from infinity.bench.contender import Sample, UnavailableError, timed
from infinity.bench.load import Load, Piece
from infinity.bench.testbed import NUM_SLOTS, Testbed
from infinity.sizes import format_size


class DeepSpeedHandle:
    """`aio_handle` with locked tensors of one chunk, at its best: two handles per direction.

    A handle's `wait` means "everything", so one handle alone would run dry at each wait; with two
    the other one's requests keep the drive busy.
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
        import torch

        example = torch.empty(0, dtype=torch.uint8)
        for _ in range(2 * NUM_SLOTS):
            tensor = self._handles[0].new_cpu_locked_tensor(testbed.chunk_bytes, example)
            tensor.fill_(1)
            self._tensors.append(tensor)

    def run(self, load: Load) -> Sample:
        """Move the load and check the chunks that were read last; raises our errors."""
        import torch

        targets, sources = self._tensors[:NUM_SLOTS], self._tensors[NUM_SLOTS:]
        pieces = [(i, piece) for i in range(load.num_files) for piece in load.pieces(i)]
        # Its write buffers are filled beforehand: four chunks of random data, ours and its own.
        for number, tensor in enumerate(sources):
            tensor.copy_(torch.from_numpy(self._testbed.pattern(number, load.salt).copy()))
        reads = [found for found in pieces if not found[1].is_write]
        writes = [found for found in pieces if found[1].is_write]
        sample = timed(lambda: self._move(reads, writes, targets, sources), load)
        for number in range(max(0, len(reads) - NUM_SLOTS), len(reads)):
            file_index, piece = reads[number]
            truth = torch.from_numpy(self._testbed.pattern(piece.index).copy())
            if not torch.equal(targets[number % NUM_SLOTS], truth):
                raise self._testbed.wrong_bytes("read", file_index, piece.offset)
        return sample

    def _move(
        self,
        reads: list[tuple[int, Piece]],
        writes: list[tuple[int, Piece]],
        targets: list[Any],
        sources: list[Any],
    ) -> None:
        """Let two halves of the buffers take turns: one is waited for while the other moves."""
        half = NUM_SLOTS // 2
        waiting: list[bool] = [False] * 4
        turns = zip(
            itertools.count(),
            itertools.zip_longest(range(0, len(reads), half), range(0, len(writes), half)),
        )
        for turn, (first_read, first_write) in turns:
            side = turn % 2
            for handle in (side, 2 + side):
                if waiting[handle]:
                    self._handles[handle].wait()
                    waiting[handle] = False
            for number in () if first_read is None else range(first_read, first_read + half):
                if number < len(reads):
                    self._start("async_pread", side, reads[number], targets[number % NUM_SLOTS])
                    waiting[side] = True
            for number in () if first_write is None else range(first_write, first_write + half):
                if number < len(writes):
                    data = sources[number % NUM_SLOTS]
                    self._start("async_pwrite", 2 + side, writes[number], data)
                    waiting[2 + side] = True
        for handle in range(4):
            if waiting[handle]:
                self._handles[handle].wait()

    def _start(self, call: str, handle: int, found: tuple[int, Piece], tensor: Any) -> None:
        file_index, piece = found
        path = str(self._testbed.file_paths[file_index])
        if getattr(self._handles[handle], call)(tensor, path, piece.offset) != 0:
            raise UnavailableError(f"{self.name}: {call} failed at offset {piece.offset} of {path}")

    def close(self) -> None:
        """Free the locked memory."""
        while self._tensors:
            self._handles[0].free_cpu_locked_tensor(self._tensors.pop())


def _handle_type() -> Any:
    """Return the class; raises `UnavailableError` when it cannot be imported or built."""
    if importlib.util.find_spec("deepspeed") is None:
        raise UnavailableError("deepspeed is not importable")
    try:
        builder = importlib.import_module("deepspeed.ops.op_builder")
        return builder.AsyncIOBuilder().load().aio_handle
    except Exception as error:  # its build fails in many ways, none of them ours
        because = str(error).strip()[-300:]
        raise UnavailableError("deepspeed's asynchronous I/O does not load", because=because) from (
            error
        )

"""Checkpoint files that several ranks write together, each rank its shards.

The first rank creates the files and writes their headers. Every rank writes ranges, none across the
end of a block, and records their checksums. Combined, these are the checksums of full blocks, as if
one rank had written the files from start to end.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

import infinity._aio as _aio
from infinity.checkpoint.directory import refusal
from infinity.checkpoint.manifest import BLOCK_BYTES, FileRecord, Shard
from infinity.common.files import write_at
from infinity.errors import CheckpointError, MachineError

_FLAGS = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
Streams = Mapping[str, Sequence[Shard]]


@dataclass
class _PendingRange:
    """Contiguous bytes of a file, up to the end of a block, that are not written yet."""

    block: Tensor
    file_index: int = 0
    first: int = 0
    filled: int = 0
    crc32c: int = 0


@dataclass
class RangeWriter:
    """Writer of one rank's ranges of existing files; used by one thread, and not after an error.

    `rows` (int64) has one row per range: index of the file, first byte, bytes, CRC32C.
    """

    directory: Path
    streams: Streams
    rows: Tensor = field(default_factory=lambda: torch.zeros((0, 4), dtype=torch.int64))
    _fds: list[int] = field(default_factory=list)
    _locations: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    _pending: dict[str, _PendingRange] = field(default_factory=dict)
    _ranges: list[tuple[int, int, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Open the files. Raises `MachineError`."""
        try:
            for stream, shards in self.streams.items():
                self._pending[stream] = _PendingRange(torch.empty(BLOCK_BYTES, dtype=torch.uint8))
                for shard in shards:
                    offset = len(shard.header)
                    for tensor in shard.tensors:
                        self._locations[stream, tensor.name] = len(self._fds), offset
                        offset += tensor.nbytes
                    self._fds.append(os.open(self.directory / shard.name, _FLAGS))
        except FileNotFoundError as error:
            self.abort()
            raise MachineError(
                f"{self.directory}, which the first rank created, does not exist on this one",
                because="each node has a separate directory of this name, or it was removed",
                remedy="save to a directory on a file system that all nodes share",
            ) from error
        except OSError as error:
            self.abort()
            raise refusal("saving", self.directory, error) from error

    def write_headers(self) -> None:
        """Write the safetensors headers; called on the first rank only. Raises like `write`."""
        file_index = 0
        for stream, shards in self.streams.items():
            for shard in shards:
                data = torch.frombuffer(bytearray(shard.header), dtype=torch.uint8)
                self._write(self._pending[stream], file_index, 0, data)
                file_index += 1

    def write(self, stream: str, name: str, first: int, data: Tensor) -> None:
        """Write bytes (uint8, 1-D, on the CPU) of a tensor, starting at its byte `first`.

        `data` is copied before this returns. Raises `DoesNotFitError` or `MachineError`.
        """
        file_index, start = self._locations[stream, name]
        self._write(self._pending[stream], file_index, start + first, data.contiguous())

    def _write(self, pending: _PendingRange, file_index: int, offset: int, data: Tensor) -> None:
        done = 0
        while done < data.numel():
            if (pending.file_index, pending.first + pending.filled) != (file_index, offset + done):
                self._flush(pending)
                pending.file_index, pending.first = file_index, offset + done
            end = pending.first + pending.filled
            count = min(BLOCK_BYTES - end % BLOCK_BYTES, data.numel() - done)
            # Copy and checksum in one pass: the checksum is that of the written bytes.
            target, source = pending.block.data_ptr() + pending.filled, data.data_ptr() + done
            pending.crc32c = _aio.crc32c_copy(target, source, count, pending.crc32c)
            pending.filled += count
            done += count
            if (pending.first + pending.filled) % BLOCK_BYTES == 0:
                self._flush(pending)

    def _flush(self, pending: _PendingRange) -> None:
        if not pending.filled:
            return
        try:
            data = pending.block[: pending.filled].numpy().data
            write_at(self._fds[pending.file_index], data, pending.first)
        except OSError as error:
            raise refusal("saving", self.directory, error) from error
        self._ranges.append((pending.file_index, pending.first, pending.filled, pending.crc32c))
        pending.first, pending.filled, pending.crc32c = pending.first + pending.filled, 0, 0

    def finish(self) -> None:
        """Write, sync and close all files; `rows` is complete afterwards. Raises like `write`."""
        for pending in self._pending.values():
            self._flush(pending)
        try:
            for file in self._fds:
                os.fsync(file)
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise refusal("saving", self.directory, error) from error
        self.abort()
        self.rows = torch.tensor(self._ranges, dtype=torch.int64).view(-1, 4)

    def abort(self) -> None:
        """Close the files; idempotent."""
        files, self._fds = self._fds, []
        for file in files:
            with suppress(OSError):
                os.close(file)


def combine_file_records(ranges: Tensor, streams: Streams) -> dict[str, tuple[FileRecord, ...]]:
    """Return the files of each stream with the checksums of their blocks, from all ranks' rows.

    Raises `CheckpointError` if bytes were written by no rank, or twice.
    """
    rows = sorted(map(tuple, ranges.tolist()))
    files = [(stream, shard) for stream, shards in streams.items() for shard in shards]
    crcs: list[list[int]] = [[] for _ in files]
    ends = [0] * len(files)
    zeros = torch.zeros(BLOCK_BYTES, dtype=torch.uint8)
    for file_index, first, nbytes, crc32c in rows:
        if first != ends[file_index]:
            break
        ends[file_index] += nbytes
        if first % BLOCK_BYTES == 0:
            crcs[file_index].append(crc32c)
        else:  # crc(a + b) = crc(a + zeros) ^ crc(zeros) ^ crc(b), with len(zeros) == len(b)
            before = crcs[file_index][-1]
            padded = _aio.crc32c(zeros.data_ptr(), nbytes, before)
            crcs[file_index][-1] = padded ^ _aio.crc32c(zeros.data_ptr(), nbytes) ^ crc32c
    records: dict[str, tuple[FileRecord, ...]] = dict.fromkeys(streams, ())
    for (stream, shard), block_crcs, end in zip(files, crcs, ends, strict=True):
        if end != shard.nbytes:
            raise CheckpointError(
                f"{shard.name}: bytes from {end} on were written by no rank, or by two"
            )
        record = FileRecord(shard.name, stream, shard.nbytes, BLOCK_BYTES, tuple(block_crcs))
        records[stream] = (*records[stream], record)
    return records

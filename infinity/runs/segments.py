"""Tokens in files: written in shards, read in place, and checked the first time they are read.

Reads are `pread`s. A mapping would count as this process's memory, which the engine watches, and
a file that was cut short would end the process.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infinity.errors import CheckpointError, MachineError
from infinity.stable import open_new, write_new

BLOCK_BYTES = 1 << 16  # what one checksum is of
SHARD_TOKENS = 1 << 26

Tokens = NDArray[np.generic]


@dataclass(frozen=True)
class SegmentFacts:
    """A run of tokens in a file, and where the CRC-32 of each block of it are.

    Paths may be relative to the corpus's directory. `offset` is in bytes, `dtype` a name of numpy.
    """

    path: str
    checksums: str
    dtype: str
    offset: int
    count: int

    @property
    def itemsize(self) -> int:
        """Bytes of a token."""
        return np.dtype(self.dtype).itemsize

    @property
    def num_blocks(self) -> int:
        """Checksums there are."""
        return -(-self.count * self.itemsize // BLOCK_BYTES)


class SegmentReader:
    """Reads any tokens of a segment; remembers which blocks were found to be whole.

    Raises `CheckpointError` for a file that is missing, of another length, or damaged.
    """

    def __init__(self, directory: Path, facts: SegmentFacts) -> None:
        self.facts = facts
        self._path = directory / facts.path
        self._dtype = np.dtype(facts.dtype).newbyteorder("<")
        self._length = facts.count * facts.itemsize
        self._checked = bytearray(facts.num_blocks)
        try:
            self._checksums = np.fromfile(directory / facts.checksums, dtype="<u4")
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self._damaged(error.strerror or str(error)) from error
        size = os.fstat(self._descriptor).st_size
        if size < facts.offset + self._length or len(self._checksums) != facts.num_blocks:
            self.close()
            raise self._damaged(f"it has {size} bytes, not {facts.offset + self._length}")

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def read(self, start: int, count: int) -> Tokens:
        """Tokens `start` to `start + count`, all in this segment."""
        first, end = start * self._dtype.itemsize, (start + count) * self._dtype.itemsize
        blocks = range(first // BLOCK_BYTES, -(-end // BLOCK_BYTES))
        if all(self._checked[block] for block in blocks):
            data = self._bytes(first, end)
        else:
            begin = blocks.start * BLOCK_BYTES
            whole = self._bytes(begin, min(blocks.stop * BLOCK_BYTES, self._length))
            self._check(whole, blocks)
            data = whole[first - begin : end - begin]
        return np.frombuffer(data, dtype=self._dtype)

    def _check(self, data: bytes, blocks: range) -> None:
        for block, crc in zip(blocks, block_checksums(data), strict=True):
            if crc != self._checksums[block]:
                where = self.facts.offset + block * BLOCK_BYTES
                raise self._damaged(f"its bytes from {where} on are not those that were written")
            self._checked[block] = 1

    def _bytes(self, first: int, end: int) -> bytes:
        try:
            data = os.pread(self._descriptor, end - first, self.facts.offset + first)
        except OSError as error:
            raise MachineError(f"{self._path} cannot be read: {error.strerror}") from error
        if len(data) != end - first:
            raise self._damaged("it was cut short while it was read")
        return data

    def _damaged(self, because: str) -> CheckpointError:
        return CheckpointError(
            f"{self._path} does not hold the tokens that were prepared",
            because=because,
            remedy=f"rm -r {self._path.parent}, and start again: they are made anew"
            if self.facts.offset == 0 and not Path(self.facts.path).is_absolute()
            else "put the file back as it was, or start a new run",
        )


def block_checksums(data: bytes | memoryview) -> Iterator[int]:
    """The CRC-32 of each block; the last may be shorter."""
    view = memoryview(data)
    for begin in range(0, len(view), BLOCK_BYTES):
        yield zlib.crc32(view[begin : begin + BLOCK_BYTES])


class ShardWriter:
    """Appends tokens to the shards of a directory. Raises `OSError`.

    `finish` puts everything on stable storage and returns what was written.
    """

    def __init__(self, directory: Path, dtype: str, shard_tokens: int = SHARD_TOKENS) -> None:
        self._directory = directory
        self._dtype = np.dtype(dtype)
        self._name = dtype
        self._shard_tokens = shard_tokens
        self._file: Any = None
        self._held = bytearray()  # less than a block
        self._checksums: list[int] = []
        self._count = 0  # in this shard
        self.written: list[SegmentFacts] = []
        self.largest = -1

    def append(self, tokens: Tokens) -> None:
        """Write tokens; they must fit the dtype."""
        if not tokens.size:
            return
        self.largest = max(self.largest, int(tokens.max()))
        start = 0
        while start < tokens.size:
            if self._file is None:
                self._file = open_new(self._directory / self._shard_name)
            part = tokens[start : start + self._shard_tokens - self._count]
            self._held += part.astype(self._dtype.newbyteorder("<")).tobytes()
            self._count += part.size
            start += part.size
            self._write(len(self._held) - len(self._held) % BLOCK_BYTES)
            if self._count == self._shard_tokens:
                self._end_shard()

    def finish(self) -> list[SegmentFacts]:
        """End the last shard."""
        self._end_shard()
        return self.written

    def abandon(self) -> None:
        """Close what is open."""
        if self._file is not None:
            self._file.close()
            self._file = None

    @property
    def _shard_name(self) -> str:
        return f"tokens-{len(self.written):05}.bin"

    def _write(self, nbytes: int) -> None:
        if nbytes:
            data = bytes(self._held[:nbytes])
            del self._held[:nbytes]
            self._checksums += block_checksums(data)
            self._file.write(data)

    def _end_shard(self) -> None:
        if self._file is None:
            return
        self._write(len(self._held))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        checksums = f"checksums-{len(self.written):05}.bin"
        write_checksums(self._directory / checksums, self._checksums)
        facts = SegmentFacts(self._shard_name, checksums, self._name, 0, self._count)
        self.written.append(facts)
        self._checksums, self._count = [], 0


def write_checksums(path: Path, checksums: list[int]) -> None:
    """Write and sync the checksums of a segment. Raises `OSError`."""
    write_new(path, np.asarray(checksums, dtype="<u4").tobytes(), 0o644)

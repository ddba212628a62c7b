"""Files in blocks with one CRC32C each: written once from start to end, or read.

Reads and writes bypass the page cache where the file system allows it, several aligned blocks at a
time. All files of a checkpoint share one `Pool` of write buffers; each reader has its own buffer.
"""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

import infinity._aio as _aio
from infinity.common.files import open_new
from infinity.storage.staging import host_buffer

RING_BLOCKS = 4  # blocks of a reader that are in flight or in use at once
# Maximum of a writer. A drive is faster with more, and the thread that fills the blocks may be
# descheduled for some milliseconds; docs/benchmarks has numbers.
WRITES_IN_FLIGHT = 16
_PAGE = 4096
_READ_ONLY = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Pool:
    """Page-aligned memory for blocks that are filled and written, shared by several files.

    `num_filled` is the maximum number of blocks being filled at once: one for each open file.
    """

    def __init__(self, engine: _aio.Engine, block_bytes: int, num_filled: int) -> None:
        nbytes = (WRITES_IN_FLIGHT + num_filled) * block_bytes
        # Huge pages where the kernel provides them: direct I/O pins its memory page by page.
        memory = host_buffer(nbytes)
        self.block_bytes = block_bytes
        self._engine = engine
        self._free = [memory[at : at + block_bytes] for at in range(0, nbytes, block_bytes)]
        self._writes: deque[tuple[_aio.Ticket, Tensor]] = deque()  # oldest first

    def take(self) -> Tensor:
        """Return a free block (uint8). Raises `AioError` if an earlier write failed."""
        while len(self._writes) >= WRITES_IN_FLIGHT:
            self._finish_oldest()
        return self._free.pop()

    def write(self, file: _aio.File, offset: int, block: Tensor, nbytes: int) -> None:
        """Start writing `nbytes` of a taken block, which becomes free when the write completes."""
        pieces = [(file, offset, nbytes, block.data_ptr())]
        self._writes.append((self._engine.submit(_aio.WRITE, pieces, keep=block), block))

    def wait_all(self) -> None:
        """Wait for all writes. Raises `AioError`."""
        while self._writes:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        ticket, block = self._writes[0]
        ticket.wait()
        self._writes.popleft()
        self._free.append(block)

    def drop(self) -> None:
        """Cancel all writes; the pool cannot be used afterwards."""
        for ticket, _ in self._writes:
            ticket.cancel()
        self._writes.clear()  # the destructor of a ticket waits for the kernel


class BlockWriter:
    """Writer of a new file of known size; all methods raise `OSError`."""

    def __init__(self, path: Path, nbytes: int, pool: Pool) -> None:
        self.path = path
        self.crc32c: list[int] = []  # of the full blocks
        self._nbytes = nbytes
        self._pool = pool
        self._block: Tensor | None = None  # being filled
        self._filled = 0  # bytes in the block
        self._block_crc32c = 0  # CRC32C of these bytes
        # Created here: the native module would make it readable only by its owner.
        open_new(path).close()
        self._file = _aio.File(str(path))
        self._alignment = max(_PAGE, self._file.offset_alignment)
        try:
            self._file.allocate(self._aligned(nbytes))
        except BaseException:
            self._file.close()
            raise

    def _aligned(self, nbytes: int) -> int:
        return -(-nbytes // self._alignment) * self._alignment

    @property
    def remaining(self) -> int:
        """Bytes that remain to be appended."""
        return self._nbytes - len(self.crc32c) * self._pool.block_bytes - self._filled

    def append(self, data: Tensor) -> None:
        """Copy the next bytes (uint8, 1-D, on the CPU), at most `remaining`."""
        data = data.contiguous()
        done = 0
        while done < data.numel():
            if self._block is None:
                self._block = self._pool.take()
            count = min(self._block.numel() - self._filled, data.numel() - done)
            # Copy and checksum in one pass: the checksum matches the written bytes even if `data`
            # is modified concurrently. On this thread: it takes a fraction of the write's time.
            target, source = self._block.data_ptr() + self._filled, data.data_ptr() + done
            self._block_crc32c = _aio.crc32c_copy(target, source, count, self._block_crc32c)
            self._filled += count
            done += count
            if self._filled == self._block.numel():
                self._write_block(self._block)

    def _write_block(self, block: Tensor) -> None:
        offset = len(self.crc32c) * block.numel()
        padded = self._aligned(self._filled)  # direct writes need it; `finish` truncates the file
        block[self._filled : padded] = 0
        self._pool.write(self._file, offset, block, padded)
        self.crc32c.append(self._block_crc32c)
        self._block, self._filled, self._block_crc32c = None, 0, 0

    def finish(self) -> None:
        """Write the last block, sync the file, and close it."""
        assert self.remaining == 0, (self.path, self.remaining)
        if self._block is not None:
            self._write_block(self._block)
        self._pool.wait_all()  # writes of other files too; files end rarely
        os.ftruncate(self._file.fd, self._nbytes)
        self._file.sync()
        self._file.close()

    def drop(self) -> None:
        """Close the file, complete or not; the pool must be dropped first."""
        self._file.close()


class BlockReader:
    """Reader of a file in blocks that verifies their CRCs and reads ahead."""

    def __init__(
        self, path: Path, nbytes: int, block_bytes: int, crc32c: Sequence[int], engine: _aio.Engine
    ) -> None:
        """Raises `OSError`; `ChangedError` if `path` is not a regular file of `nbytes`."""
        self.path = path
        self._nbytes = nbytes
        self._block_bytes = block_bytes
        self._crc32c = crc32c
        self._engine = engine
        self._memory = host_buffer(RING_BLOCKS * block_bytes)
        # By block: its read in flight, or None if it is in memory. Blocks with the same index
        # modulo RING_BLOCKS share a slot of the memory.
        self._tickets: dict[int, _aio.Ticket | None] = {}
        self._verified_block: int | None = None
        self._buffered_fd = os.open(path, _READ_ONLY)
        try:
            info = os.fstat(self._buffered_fd)
            _check_stat(info, nbytes)
            self._file = _aio.File(str(path), read_only=True)
            opened = os.fstat(self._file.fd)
            if (opened.st_dev, opened.st_ino) != (info.st_dev, info.st_ino):
                self._file.close()
                raise ChangedError("it was replaced while it was opened")
        except BaseException:
            os.close(self._buffered_fd)
            raise

    def block(self, index: int) -> Tensor:
        """Return the bytes (uint8) of a block, valid until the next call.

        Raises `OSError`, and `WrongBytesError` if the CRC32C of the block is wrong.
        """
        memory = self._block_view(index)
        if index == self._verified_block:
            return memory
        self._verified_block = None
        # Random access reads less ahead: it would wait for blocks that are never used.
        ahead = RING_BLOCKS if index in self._tickets or index == 0 else 2
        for block in range(index, min(index + ahead, len(self._crc32c))):
            is_end = self._block_view(block).numel() % self._file.offset_alignment != 0
            # An unaligned end is read synchronously, not ahead: its errors must not be raised
            # for another block.
            if block not in self._tickets and (block == index or not is_end):
                self._start_read(block, buffered=is_end)
        try:
            if (ticket := self._tickets[index]) is not None:
                ticket.wait()
        except BaseException:
            self._discard_blocks()
            raise
        self._tickets[index] = None
        actual_crc32c = _aio.crc32c(memory.data_ptr(), memory.numel())
        if actual_crc32c != self._crc32c[index]:
            self._discard_blocks()
            raise WrongBytesError(actual_crc32c, self._crc32c[index])
        self._verified_block = index
        return memory

    def _block_view(self, index: int) -> Tensor:
        size = self._block_bytes
        start = index % RING_BLOCKS * size
        return self._memory[start : start + min(size, self._nbytes - index * size)]

    def _start_read(self, block: int, *, buffered: bool) -> None:
        for other in [b for b in self._tickets if b % RING_BLOCKS == block % RING_BLOCKS]:
            self._cancel(other)
        memory = self._block_view(block)
        offset = block * self._block_bytes
        if buffered:
            target, done = memory.numpy().data, 0
            while done < len(target):
                count = os.preadv(self._buffered_fd, [target[done:]], offset + done)
                if count == 0:
                    raise ChangedError(f"it ends at byte {offset + done}, not {self._nbytes}")
                done += count
            os.posix_fadvise(self._buffered_fd, offset, 0, os.POSIX_FADV_DONTNEED)
            self._tickets[block] = None
            return
        piece = self._file, offset, memory.numel(), memory.data_ptr()
        self._tickets[block] = self._engine.submit(_aio.READ, [piece], keep=memory)

    def _cancel(self, block: int) -> None:
        """Free the slot of a block; cancel its read if it is in flight."""
        ticket = self._tickets.pop(block)
        if ticket is not None:
            ticket.cancel()  # the destructor waits for the kernel

    def _discard_blocks(self) -> None:
        for block in list(self._tickets):
            self._cancel(block)
        self._verified_block = None

    def close(self) -> None:
        """Close the file."""
        self._discard_blocks()
        self._file.close()
        descriptor, self._buffered_fd = self._buffered_fd, -1
        if descriptor >= 0:
            os.close(descriptor)


class ChangedError(Exception):
    """A file was replaced, or is not a regular file."""


class WrongBytesError(Exception):
    """The CRC32C of a block is wrong."""

    def __init__(self, found: int, expected: int) -> None:
        super().__init__(f"its CRC32C is {found:08x}, not {expected:08x}")


def regular_file_size(path: Path, nbytes: int | None = None) -> int:
    """Return the size of a regular file, not a link. Raises `OSError` or `ChangedError`."""
    info = os.lstat(path)
    _check_stat(info, nbytes)
    return info.st_size


def _check_stat(info: os.stat_result, nbytes: int | None) -> None:
    if stat.S_ISLNK(info.st_mode):
        raise ChangedError("it is a symbolic link")
    if not stat.S_ISREG(info.st_mode):
        raise ChangedError("it is not a regular file")
    if nbytes is not None and info.st_size != nbytes:
        raise ChangedError(f"it has {info.st_size} bytes, not {nbytes}")

"""The disk tier: preallocated files in private scratch directories, and tickets over them.

Extents are handed out once, before training, round-robin over the given paths; nothing is ever
extended while training. A ticket is one request, however many extents it names; waiting for it
raises a `TransferError` that names path, offset, length and errno.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from infinity import _aio
from infinity.config import IoConfig
from infinity.errors import MachineError, TransferError
from infinity.memory.scratch import Scratch
from infinity.plan.layout import PAGE, round_up


@dataclass(frozen=True, slots=True)
class Extent:
    """A reserved range on disk: which path, byte offset, bytes."""

    path_index: int
    offset: int
    nbytes: int

    def part(self, start: int, nbytes: int) -> Extent:
        """A range inside this one; `start` counts from its beginning."""
        assert 0 <= start <= start + nbytes <= self.nbytes, (start, nbytes, self.nbytes)
        return Extent(self.path_index, self.offset + start, nbytes)


class Ticket(Protocol):
    """One outstanding request."""

    def done(self) -> bool:
        """Whether it is over, well or not; never blocks."""

    def wait(self) -> None:
        """Block until it is over; raises its error."""


class DiskTicket:
    """A native ticket; holds its buffers alive and turns errors into ours."""

    def __init__(self, raw: _aio.Ticket, buffers: Sequence[Tensor]) -> None:
        self._raw = raw
        self._buffers: Sequence[Tensor] | None = buffers

    def done(self) -> bool:
        """Whether the request is over."""
        return self._raw.done()

    def wait(self) -> None:
        """Block until it is over; raises `TransferError`."""
        try:
            self._raw.wait()
        except _aio.AioError as error:
            raise transfer_error(error) from error
        self._buffers = None


def transfer_error(error: _aio.AioError) -> TransferError:
    """Our error for a native one, with the likely cause and what to do."""
    causes = {
        5: ("the drive or file system reports a failure", "check `dmesg` and the drive's health"),
        28: ("the file system is full", "free space on nvme_path or point it elsewhere"),
        125: ("the engine was closed while the request was queued", "do not use a closed engine"),
    }
    because, remedy = causes.get(error.errno or 0, (None, "check nvme_path"))
    return TransferError(
        str(error),
        path=str(error.filename),
        offset=error.offset,
        length=error.length,
        errno=error.errno or 0,
        because=because,
        remedy=remedy,
    )


class Disk:
    """Scratch directories, one state file in each, and the native engine that moves bytes."""

    def __init__(self, paths: Sequence[Path], io: IoConfig) -> None:
        self._sizes = [0] * len(paths)
        self._next = 0
        self._files: list[_aio.File] = []
        self.scratches: list[Scratch] = []
        self._aio: _aio.Engine | None = None
        try:
            for path in paths:
                self.scratches.append(Scratch.create(path))
            self._aio = _aio.Engine(
                backend=io.backend,
                block_size=io.block_size,
                queue_depth=io.queue_depth,
                num_threads=io.num_threads,
                slow_bytes_per_s=io.slow_bytes_per_s,
            )
        except OSError as error:
            self.close()
            raise MachineError(
                f"the I/O back end {io.backend!r} cannot start: {error}",
                remedy="use io.backend=auto or io.backend=threads",
            ) from error
        except BaseException:
            self.close()
            raise

    @property
    def backend(self) -> str:
        """The I/O back end in use, with the reason."""
        assert self._aio is not None
        return f"{self._aio.backend} ({self._aio.backend_reason})"

    def extent(self, nbytes: int) -> Extent:
        """Promise a page-aligned extent; only before `allocate`."""
        assert not self._files, "extents are handed out before allocation"
        index = self._next
        self._next = (index + 1) % len(self._sizes)
        extent = Extent(index, self._sizes[index], round_up(nbytes, PAGE))
        self._sizes[index] += extent.nbytes
        return extent

    def allocate(self) -> None:
        """Create and preallocate the files; raises `DoesNotFitError` with the missing bytes."""
        for scratch, size in zip(self.scratches, self._sizes, strict=True):
            scratch.check_space(size)
        for scratch, size in zip(self.scratches, self._sizes, strict=True):
            try:
                file = _aio.File(str(scratch.path("state.bin")), create=True)
                self._files.append(file)
                file.allocate(max(size, PAGE))
            except _aio.AioError as error:
                raise transfer_error(error) from error
            except OSError as error:
                raise MachineError(f"cannot create the state file: {error}") from error

    def read(self, pieces: Sequence[tuple[Extent, Tensor]]) -> DiskTicket:
        """Start reading extents into uint8 buffers of their size."""
        return self._submit(_aio.READ, pieces)

    def write(self, pieces: Sequence[tuple[Extent, Tensor]]) -> DiskTicket:
        """Start writing uint8 buffers to extents of their size."""
        return self._submit(_aio.WRITE, pieces)

    def _submit(self, op: int, pieces: Sequence[tuple[Extent, Tensor]]) -> DiskTicket:
        assert self._aio is not None
        segments = []
        for extent, buffer in pieces:
            assert buffer.numel() == extent.nbytes, (buffer.numel(), extent.nbytes)
            file = self._files[extent.path_index]
            segments.append((file, extent.offset, extent.nbytes, buffer.data_ptr()))
        return DiskTicket(self._aio.submit(op, segments), [b for _, b in pieces])

    def counters(self) -> dict[str, int]:
        """The native engine's counters; see `_aio.Engine.counters`."""
        return self._aio.counters() if self._aio is not None else {}

    def close(self) -> None:
        """Wait for what the kernel holds, close files, remove the scratch directories."""
        if self._aio is not None:
            self._aio.close()
        for file in self._files:
            file.close()
        self._files = []
        for scratch in self.scratches:
            scratch.remove()

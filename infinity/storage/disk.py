"""Disk tier: preallocated files in private scratch directories, and tickets of their requests.

Extents are allocated before training in one logical address space. When all extents are known, the
space is striped over the drives in proportion to their speed (see `striping`) and reserved; it
never grows during training. A ticket is one request over any number of extents and drives; waiting
for it raises a `TransferError` that names unit, path, offset, length and errno.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import infinity._aio as _aio
from infinity.common.files import check_linked
from infinity.config.schema import IoConfig
from infinity.errors import ConfigError, MachineError, TransferError
from infinity.storage import drives
from infinity.storage.disk_speed import measure_speeds
from infinity.storage.os_errors import corruption, does_not_fit, transfer_error
from infinity.storage.run_dir import Scratch
from infinity.storage.staging import host_buffer
from infinity.storage.store import Pieces, Priority
from infinity.storage.striping import Stripes, Striping
from infinity.types import PAGE, Tier, round_up

# With `io.verify`, RAM holds a CRC32C of every page on disk.
#
# The checksum of a page is computed when its write is submitted, and compared when a read of it
# completes. It detects changes by drive, cable, controller, file system and other programs, and
# lost writes. 4 bytes per page of 4096 are 0.1 % of the data on disk; any page-aligned range of an
# extent can be read and checked separately.


CHECKSUM_BYTES = 4  # per page


def checksum(tensor: Tensor) -> int:
    """Return a checksum of a contiguous tensor: CRC32C on the CPU, `sum_of_int64` on a device.

    Synchronizes with the device; only the sum is copied to the host.
    """
    flat = tensor.detach().view(-1).view(torch.uint8)
    if flat.device.type == "cpu":
        return _aio.crc32c(flat.data_ptr(), flat.numel(), 0)
    return sum_of_int64(flat)


def sum_of_int64(flat: Tensor) -> int:
    """Return the weighted sum of bytes (uint8, 1-D, aligned to 8) read as int64, modulo 2**64.

    Each integer is multiplied by an odd weight that is distinct within a block of `_WORDS`, so that
    exchanged integers change the sum.
    """
    aligned = flat.numel() // 8 * 8
    values, tail = flat[:aligned].view(torch.int64), flat[aligned:].long()
    weights = torch.arange(1, 2 * min(max(values.numel(), 8), _WORDS), 2, device=flat.device)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for block in (*torch.split(values, _WORDS), tail):
        total = total * _FACTOR + (block * weights[: block.numel()]).sum()
    return int(total)


_WORDS = 1 << 20  # 8 MiB of int64; the sum takes two buffers of this size
_FACTOR = 0x5851F42D4C957F2D  # odd, with many bits set; the multiplier of Knuth's MMIX


class Checksums:
    """Checksums of the logical space: one little-endian uint32 per page, stored as int32.

    The expected checksums of a read are copied when it is submitted: when it is checked, a later
    write to its range may have been submitted.
    """

    def __init__(self, num_bytes: int) -> None:
        num_pages = -(-num_bytes // PAGE)
        self._sums = host_buffer(num_pages * CHECKSUM_BYTES).view(torch.int32)

    def written(self, offset: int, buffer: Tensor) -> None:
        """Store the checksums of bytes (uint8) that are being written to a logical offset."""
        sums = self._range(offset, buffer.numel())
        _aio.crc32c_blocks(buffer.data_ptr(), buffer.numel(), PAGE, sums.data_ptr())

    def expected(self, offset: int, nbytes: int) -> Tensor:
        """Return the expected checksums of the pages of a range; int32, one per page."""
        return self._range(offset, nbytes).clone()

    def stored(self, offset: int, nbytes: int) -> bytes:
        """Return the checksums of a range in their file format, 4 bytes per page."""
        return bytes(self._range(offset, nbytes).view(torch.uint8).numpy())

    def restore(self, offset: int, nbytes: int, stored: bytes) -> None:
        """Set the checksums of a range from the output of `stored`."""
        values = torch.frombuffer(bytearray(stored), dtype=torch.int32)
        self._range(offset, nbytes).copy_(values)

    def _range(self, offset: int, nbytes: int) -> Tensor:
        assert offset % PAGE == 0, offset
        assert nbytes % PAGE == 0, nbytes
        return self._sums[offset // PAGE : (offset + nbytes) // PAGE]


def stored_checksums(read: Callable[[int, int], bytes], extent: Extent) -> bytes:
    """Return an extent's page checksums from a file, padded with zeros if the file is too short.

    `read(offset, nbytes)` reads the file that holds `Checksums.stored` of all pages.
    """
    nbytes = extent.nbytes // PAGE * CHECKSUM_BYTES
    return read(extent.offset // PAGE * CHECKSUM_BYTES, nbytes).ljust(nbytes, b"\0")


def wrong_pages(pages: Tensor, stored: bytes) -> list[int]:
    """Return the indices of pages (uint8) that do not match `stored` (see `Checksums.stored`)."""
    num_pages = pages.numel() // PAGE
    expected = torch.frombuffer(bytearray(stored), dtype=torch.int32)
    actual = torch.empty(num_pages, dtype=torch.int32, device="cpu")
    _aio.crc32c_blocks(pages.data_ptr(), pages.numel(), PAGE, actual.data_ptr())
    return [int(page) for page in (actual != expected).nonzero()]


STATE_NAME = "state.bin"
# Share and maximum of the bytes left free on each of several paths, for file system metadata.
_SPARE_DIVISOR = 64
_SPARE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Extent:
    """A reserved range of the logical space, in full pages; `owner` names it in errors."""

    offset: int
    nbytes: int
    owner: str

    @property
    def tier(self) -> Tier:
        return Tier.DISK

    def part(self, start: int, nbytes: int) -> Extent:
        """Return a range inside this one; `start` is relative to its beginning."""
        assert 0 <= start <= start + nbytes <= self.nbytes, (start, nbytes, self.nbytes)
        return Extent(self.offset + start, nbytes, self.owner)

    def addressable_view(self, *, by_device: bool) -> None:
        """Return None: no processor addresses a disk."""


def _merge_adjacent(pieces: Pieces) -> list[tuple[Extent, Tensor]]:
    """Merge pieces that are adjacent both on disk and in memory.

    The kinds of a chunk form one record with the same layout in the buffer: a single transfer.
    """
    merged: list[tuple[Extent, Tensor]] = []
    for extent, buffer in pieces:
        assert isinstance(extent, Extent)
        if merged:
            last_extent, last_buffer = merged[-1]
            on_disk = (
                last_extent.offset + last_extent.nbytes == extent.offset
                and last_extent.owner == extent.owner
            )
            in_memory = (
                last_buffer.data_ptr() + last_buffer.numel() == buffer.data_ptr()
                and last_buffer.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
            )
            if on_disk and in_memory:
                nbytes = last_extent.nbytes + extent.nbytes
                merged[-1] = (
                    Extent(last_extent.offset, nbytes, last_extent.owner),
                    last_buffer.as_strided((nbytes,), (1,), last_buffer.storage_offset()),
                )
                continue
        merged.append((extent, buffer))
    return merged


class DiskTicket:
    """A native ticket: keeps its buffers alive, verifies bytes read, translates errors.

    Deleting a ticket before its end waits for it. The native module never frees a buffer that the
    kernel may still write to.
    """

    def __init__(
        self,
        request: _aio.Ticket,
        disk: Disk,
        pieces: Sequence[tuple[Extent, Tensor]],
        expected: Sequence[Tensor],
    ) -> None:
        self.request: _aio.Ticket | None = request  # None: completed and verified
        self._disk = disk
        self._pieces = pieces
        self._expected = expected  # checksums of the pages read; empty: not verified
        self._failure: TransferError | None = None

    def done(self) -> bool:
        request = self.request  # another waiting thread may clear it
        return request is None or request.done()

    def wait(self) -> None:
        """Block until the request has ended; every call after a failure raises `TransferError`."""
        request = self.request
        if request is None:
            return
        if self._failure is not None:
            raise self._failure.untraced()
        try:
            request.wait()
        except _aio.AioError as error:
            owner = self._disk.owner_at(self._pieces, str(error.filename), error.offset)
            failure = transfer_error(error, owner)
            if not request.done():
                self._disk.stuck = self._disk.stuck or failure.untraced()
            raise failure from error
        if self._expected:
            self._failure = self._disk.first_corruption(self._pieces, self._expected)
            if self._failure is not None:
                raise self._failure.untraced()
        self.request = None
        self._pieces = self._expected = ()


class Disk:
    """Store of the disk tier: scratch directories with one state file each, and the native engine.

    `warnings` lists problems of the paths; complete after `allocate`. `stuck` is the error of the
    first request that the kernel did not complete within `io.timeout_s`.
    """

    joins = True

    def __init__(self, paths: Sequence[Path], io: IoConfig, stored: Striping | None = None) -> None:
        self.warnings: list[str] = []
        self.stuck: TransferError | None = None
        self._stored = stored
        if stored is not None:
            paths = [directory.parent for directory in stored.directories]
        elif io.weights is None and len(paths) > 1:
            paths, self.warnings = drives.one_per_file_system(paths)
        if len(paths) > 1:
            self.warnings += drives.shared_drives(paths)
        self.paths = tuple(paths)
        self.speeds = tuple(io.weights or ()) if len(paths) > 1 else ()
        self.used: tuple[int, ...] = ()
        self._verify = io.verify is True  # "auto" is resolved by the plan
        self.checksums: Checksums | None = None
        self._capacities: tuple[int, ...] = ()
        self._stripe_bytes = io.block_size if stored is None else stored.stripe_bytes
        self._stripes = Stripes(len(paths), self._stripe_bytes)
        self._files: list[_aio.File] = []
        self.scratches: list[Scratch] = []
        self._engine: _aio.Engine | None = None
        try:
            for directory in stored.directories if stored is not None else ():
                self.scratches.append(Scratch.adopt(directory))
            for path in paths if stored is None else ():
                primary = self.scratches[0].directory if self.scratches else None
                self.scratches.append(Scratch.create(path, primary))
            self._engine = _aio.Engine(
                backend=io.backend,
                block_size=io.block_size,
                queue_depth=io.queue_depth,
                num_threads=io.num_threads,
                stuck_after_s=io.timeout_s,
            )
        except ValueError as error:
            self.close()
            raise ConfigError(f"io: {error}") from error
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
        """Name of the I/O back end in use, with the reason."""
        assert self._engine is not None
        return f"{self._engine.backend} ({self._engine.backend_reason})"

    # --- reserving ---------------------------------------------------------------------------

    def extent(self, nbytes: int, owner: str = "", cuts: Sequence[int] = ()) -> Extent:
        """Reserve full pages of the logical space; only before `allocate`.

        `owner` names the bytes in errors. `cuts` are the offsets at which sections begin that are
        also read separately; each section is spread over the drives.
        """
        return Extent(self._stripes.add(nbytes, cuts), round_up(nbytes, PAGE), owner)

    def reserve(self, sizes: Sequence[int], owners: Sequence[str]) -> list[Extent]:
        return [self.extent(size, owner) for size, owner in zip(sizes, owners, strict=True)]

    def allocate(self) -> None:
        """Assign the extents to drives, and create and reserve the files.

        Raises `DoesNotFitError` with the missing bytes, `TransferError` or `MachineError`.
        """
        create = self._stored is None
        for scratch in self.scratches:
            try:
                self._files.append(_aio.File(str(scratch.path(STATE_NAME)), create=create))
            except _aio.AioError as error:
                raise transfer_error(error) from error
            except OSError as error:
                raise MachineError(f"cannot open the state file: {error}") from error
        if self._stored is not None:
            self.speeds = self._stored.speeds
        elif len(self.paths) > 1 and not self.speeds:
            assert self._engine is not None
            free_bytes = [scratch.free_bytes() for scratch in self.scratches]
            self.speeds = tuple(measure_speeds(self._engine, self._files, free_bytes))
        self._distribute()
        for file, size in zip(self._files, self.used, strict=True):
            try:
                file.allocate(max(size, PAGE))
            except _aio.AioError as error:
                raise transfer_error(error) from error
        if self._verify:
            self.checksums = Checksums(self._stripes.total)
        for path, file, size in zip(self.paths, self._files, self.used, strict=True):
            self.warnings += drives.file_system_warnings(path, file, size)

    def _distribute(self) -> None:
        total = self._stripes.total
        if self._stored is not None:
            stored = self._stored
            self._stripes.redistribute(stored, [file.size for file in self._files])
            self.used, self._capacities = stored.used, stored.capacities
            return
        if len(self.paths) == 1:
            self.used = tuple(self._stripes.distribute([1.0], [total]))
            self.scratches[0].check_space(total)
            return
        free_bytes = [
            scratch.free_bytes() + file.size
            for scratch, file in zip(self.scratches, self._files, strict=True)
        ]
        if sum(f // PAGE * PAGE for f in free_bytes) < total:
            raise does_not_fit(total, dict(zip(self.paths, free_bytes, strict=True)))
        reduced = [f - min(f // _SPARE_DIVISOR, _SPARE_BYTES) for f in free_bytes]
        capacities = reduced if sum(f // PAGE * PAGE for f in reduced) >= total else free_bytes
        self._capacities = tuple(capacities)
        self.used = tuple(self._stripes.distribute(self.speeds, capacities))

    @property
    def striping(self) -> Striping:
        """Assignment of the logical space to files, after `allocate`; input `stored` of `Disk`."""
        directories = tuple(scratch.directory for scratch in self.scratches)
        return Striping(directories, self._stripe_bytes, self.speeds, self._capacities, self.used)

    # --- transfers ---------------------------------------------------------------------------

    def read(self, pieces: Pieces, priority: Priority = Priority.NORMAL) -> DiskTicket:
        """Start reading extents into uint8 buffers of equal size."""
        merged = _merge_adjacent(pieces)
        expected: list[Tensor] = []
        if self.checksums is not None:
            expected = [self.checksums.expected(e.offset, e.nbytes) for e, _ in merged]
        return self._submit(_aio.READ, merged, priority, expected)

    def write(self, pieces: Pieces, priority: Priority = Priority.BACKGROUND) -> DiskTicket:
        """Start writing uint8 buffers, which must not change until the end, to extents."""
        merged = _merge_adjacent(pieces)
        if self.checksums is not None:
            for extent, buffer in merged:
                self.checksums.written(extent.offset, buffer)
        return self._submit(_aio.WRITE, merged, priority, ())

    def learn(self, extent: Extent, buffer: Tensor) -> None:
        """Read an extent and store the checksums of its current bytes."""
        assert self.checksums is not None
        self._submit(_aio.READ, [(extent, buffer)], Priority.NORMAL, ()).wait()
        self.checksums.written(extent.offset, buffer)

    def sync(self) -> None:
        """Flush completed writes to stable storage.

        Raises `TransferError`, and `RemovedError` if a file was unlinked.
        """
        for file in self._files:
            try:
                file.sync()
            except _aio.AioError as error:
                raise transfer_error(error) from error
            check_linked(file.fd, file.path)

    def _submit(
        self,
        op: int,
        pieces: Sequence[tuple[Extent, Tensor]],
        priority: Priority,
        expected: Sequence[Tensor],
    ) -> DiskTicket:
        assert self._engine is not None
        segments = []
        for extent, buffer in pieces:
            assert buffer.numel() == extent.nbytes, (buffer.numel(), extent.nbytes)
            address = buffer.data_ptr()
            for file_range in self._stripes.pieces(extent.offset, extent.nbytes):
                file = self._files[file_range.path_index]
                segments.append((file, file_range.offset, file_range.nbytes, address))
                address += file_range.nbytes
        request = self._engine.submit(op, segments, priority=priority, keep=[b for _, b in pieces])
        return DiskTicket(request, self, pieces, expected)

    # --- errors ------------------------------------------------------------------------------

    def owner_at(self, pieces: Sequence[tuple[Extent, Tensor]], path: str, offset: int) -> str:
        """Return the owner of the bytes that a ticket moved at an offset of a file; "" if none."""
        for extent, _ in pieces:
            for file_range in self._stripes.pieces(extent.offset, extent.nbytes):
                contains = file_range.offset <= offset < file_range.offset + file_range.nbytes
                if contains and self._files[file_range.path_index].path == path:
                    return extent.owner
        return ""

    def first_corruption(
        self, pieces: Sequence[tuple[Extent, Tensor]], expected: Sequence[Tensor]
    ) -> TransferError | None:
        """Return the error for the first page with a wrong checksum; None if all are right."""
        for (extent, buffer), sums in zip(pieces, expected, strict=True):
            actual = torch.empty_like(sums)
            _aio.crc32c_blocks(buffer.data_ptr(), buffer.numel(), PAGE, actual.data_ptr())
            if not torch.equal(actual, sums):
                page = int((actual != sums).nonzero()[0])
                found, wanted = int(actual[page]) & 0xFFFFFFFF, int(sums[page]) & 0xFFFFFFFF
                (file_range,) = self._stripes.pieces(extent.offset + page * PAGE, PAGE)
                path = self._files[file_range.path_index].path
                return corruption(extent.owner, path, file_range.offset, PAGE, found, wanted)
        return None

    # --- counters ----------------------------------------------------------------------------

    def counters(self) -> dict[str, int]:
        """The native engine's counters; see `_aio.Engine.counters`."""
        return self._engine.counters() if self._engine is not None else {}

    def times_s(self, op: str) -> dict[str, float]:
        """Return seconds that blocks of `op`, "read" or "write", spent in "queue" and "device"."""
        assert self._engine is not None
        counters = self._engine.device_counters().values()
        return {
            stage: sum(int(c[f"{op}_{stage}_ns"]) for c in counters) / 1e9
            for stage in ("queue", "device")
        }

    def drives(self) -> dict[str, dict[str, Any]]:
        """Return per path: the device, reserved bytes, speed, and counters.

        `nbytes` are reserved bytes; `speed` is relative, or bytes per second if it was measured
        (None for one path); the counters are those of the device, see
        `_aio.Engine.device_counters`.
        """
        assert self._engine is not None
        counters = self._engine.device_counters()
        speeds = self.speeds or (None,) * len(self.paths)
        return {
            str(path): {
                "device": file.device,
                "file_system": file.file_system,
                "direct": file.direct,
                "nbytes": nbytes,
                "speed": speed,
                **counters.get(file.device, {}),
            }
            for path, file, nbytes, speed in zip(
                self.paths, self._files, self.used, speeds, strict=True
            )
        }

    def close(self) -> None:
        """Wait for requests in flight, close files, remove directories that are not durable.

        Attempts every step, and raises the first error. If the kernel does not complete a request,
        the error names the request, and its memory is never reused.
        """
        failure: Exception | None = None
        if self._engine is not None:
            try:
                self._engine.close()
            except _aio.AioError as error:
                failure = transfer_error(error)
        for file in self._files:
            file.close()
        self._files = []
        for scratch in self.scratches:
            try:
                scratch.remove()
            except MachineError as error:
                failure = failure or error
        if failure is not None:
            raise failure

"""CRC32C of every page on disk, kept in RAM apart from the data (`io.verify`).

A page's checksum is taken when its write is submitted, and compared when a read of it completes,
so it finds what drive, cable, controller, file system and other programs do to bytes at rest or
on their way; a write that never reached the disk as well. 4 bytes per page of 4096 is 0.1 % of
what rests on disk; any page-aligned part of an extent can be read and checked alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from infinity import _aio
from infinity.memory.host import HostArena
from infinity.plan.layout import PAGE

CHECKSUM_BYTES = 4  # per page
_BLOCK_BYTES = 64 << 20  # brought from a device at a time


def checksum(tensor: Tensor) -> int:
    """CRC32C of a contiguous tensor's bytes; of one on a device, the caller waits for it."""
    flat, crc = tensor.detach().view(-1).view(torch.uint8), 0
    for start in range(0, flat.numel(), _BLOCK_BYTES):
        here = flat[start : start + _BLOCK_BYTES].cpu()
        crc = _aio.crc32c(here.data_ptr(), here.numel(), crc)
    return crc


class Checksums:
    """One little-endian uint32 per page of the logical space; int32 in torch, bits compared.

    A read's checksums are looked up when it is submitted: by the time it is checked, its range
    may have been promised to a later write.
    """

    def __init__(self, num_bytes: int) -> None:
        num_pages = -(-num_bytes // PAGE)
        arena = HostArena(num_pages * CHECKSUM_BYTES)
        self._sums = arena.view(0, num_pages * CHECKSUM_BYTES).view(torch.int32)

    def written(self, offset: int, buffer: Tensor) -> None:
        """Remember the checksums of bytes (uint8) that are on their way to a logical offset."""
        sums = self._range(offset, buffer.numel())
        _aio.crc32c_blocks(buffer.data_ptr(), buffer.numel(), PAGE, sums.data_ptr())

    def expected(self, offset: int, nbytes: int) -> Tensor:
        """What the pages of a range must have when they are read; int32, one per page."""
        return self._range(offset, nbytes).clone()

    def stored(self, offset: int, nbytes: int) -> bytes:
        """The checksums of a range as they are kept in a file, 4 bytes per page."""
        return bytes(self._range(offset, nbytes).view(torch.uint8).numpy())

    def restore(self, offset: int, nbytes: int, stored: bytes) -> None:
        """The inverse of `stored`."""
        values = torch.frombuffer(bytearray(stored), dtype=torch.int32)
        self._range(offset, nbytes).copy_(values)

    def _range(self, offset: int, nbytes: int) -> Tensor:
        assert offset % PAGE == 0, offset
        assert nbytes % PAGE == 0, nbytes
        return self._sums[offset // PAGE : (offset + nbytes) // PAGE]


def wrong_pages(pages: Tensor, stored: bytes) -> list[int]:
    """Which pages (uint8) do not have the checksums that a file holds (`Checksums.stored`).

    What is missing of those counts as 0: such a page is wrong, as it is for a run that goes on.
    """
    count = pages.numel() // PAGE
    data = bytearray(stored.ljust(count * CHECKSUM_BYTES, b"\0"))
    wanted = torch.frombuffer(data, dtype=torch.int32)
    found = torch.empty(count, dtype=torch.int32)
    _aio.crc32c_blocks(pages.data_ptr(), pages.numel(), PAGE, found.data_ptr())
    return [int(page) for page in (found != wanted).nonzero()]


def first_difference(buffer: Tensor, expected: Tensor) -> tuple[int, int, int] | None:
    """(byte offset in the buffer, checksum found, checksum expected) of the first wrong page."""
    found = torch.empty_like(expected)
    _aio.crc32c_blocks(buffer.data_ptr(), buffer.numel(), PAGE, found.data_ptr())
    if torch.equal(found, expected):
        return None
    page = int((found != expected).nonzero()[0])
    return page * PAGE, int(found[page]) & 0xFFFFFFFF, int(expected[page]) & 0xFFFFFFFF

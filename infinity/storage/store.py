"""Stores: one object per tier with a common protocol; a `Range` is reserved by a store.

Code that moves or updates state does not branch on tiers. It asks a range for a tensor over its
bytes (`addressable_view`), and if neither the CPU nor a kernel can address them, reads them into a
buffer and writes them back. A new tier needs a class with the methods of `Store`, a member of
`Tier`, and its budget and rates in the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol, Self

from torch import Tensor

from infinity.storage.device import HAPPENED, Device, Event, merge_events
from infinity.storage.host_arena import make_arena
from infinity.types import PAGE, Tier, round_up


class Priority(IntEnum):
    """Priority of queued requests; waiting for a ticket makes its queued requests URGENT."""

    URGENT = 0  # a thread is waiting
    NORMAL = 1  # prefetches
    BACKGROUND = 2  # write-back


class Range(Protocol):
    """Reserved bytes of one tier."""

    @property
    def tier(self) -> Tier:
        """Tier of the store that reserved the range: HOST if the device is the host."""

    @property
    def nbytes(self) -> int: ...

    def part(self, start: int, nbytes: int) -> Self:
        """Return a range inside this one; `start` is relative to its beginning, in bytes."""

    def addressable_view(self, *, by_device: bool) -> Tensor | None:
        """Return a uint8 tensor over the bytes themselves; None if they are not addressable.

        They must be addressable by a kernel of the device if `by_device`, else by the CPU.
        """


Pieces = Sequence[tuple[Range, Tensor]]  # ranges, and host buffers (uint8) of their sizes


class Store(Protocol):
    """One tier: reserves ranges, and copies their bytes from and to buffers in host memory."""

    joins: bool
    """True if a request may have many pieces; otherwise the caller requests each separately."""

    def reserve(self, sizes: Sequence[int], owners: Sequence[str]) -> Sequence[Range]:
        """Reserve ranges of `sizes` bytes, before training; `owners` name them in errors."""

    def read(self, pieces: Pieces, priority: Priority = Priority.NORMAL) -> Event:
        """Start copying ranges to buffers. Raises `TransferError` here or in `Event.wait`."""

    def write(self, pieces: Pieces, priority: Priority = Priority.BACKGROUND) -> Event:
        """Start copying buffers, which must not change until the end, to ranges."""


@dataclass(frozen=True, slots=True)
class MemoryRange:
    """A range (uint8) of host memory, or of device memory that is not host memory."""

    tier: Tier
    data: Tensor

    @property
    def nbytes(self) -> int:
        return self.data.numel()

    def part(self, start: int, nbytes: int) -> MemoryRange:
        assert 0 <= start <= start + nbytes <= self.nbytes, (start, nbytes, self.nbytes)
        return MemoryRange(self.tier, self.data[start : start + nbytes])

    def addressable_view(self, *, by_device: bool) -> Tensor | None:
        """Return the bytes: host memory in both cases, device memory only if `by_device`."""
        return self.data if by_device or self.tier is not Tier.DEVICE else None


class HostStore:
    """Store of pinned RAM."""

    joins = False

    def __init__(self, device: Device) -> None:
        self._device = device

    def reserve(self, sizes: Sequence[int], owners: Sequence[str]) -> list[MemoryRange]:
        """Reserve one pinned mapping for all ranges, each page-aligned."""
        arena = make_arena(sizes)
        if any(sizes):
            self._device.pin(arena)
        return [MemoryRange(Tier.HOST, arena.carve(nbytes)) for nbytes in sizes]

    def read(self, pieces: Pieces, priority: Priority = Priority.NORMAL) -> Event:
        for source, buffer in pieces:
            buffer.copy_(_data_of(source))
        return HAPPENED

    def write(self, pieces: Pieces, priority: Priority = Priority.BACKGROUND) -> Event:
        for target, buffer in pieces:
            _data_of(target).copy_(buffer)
        return HAPPENED


class DeviceStore:
    """Store of device memory; reads are ordered after the compute issued so far."""

    joins = False

    def __init__(self, device: Device) -> None:
        self._device = device

    def reserve(self, sizes: Sequence[int], owners: Sequence[str]) -> list[MemoryRange]:
        """Reserve all ranges in one allocation. Raises `DoesNotFitError`."""
        arena = self._device.reserve(sum(round_up(nbytes, PAGE) for nbytes in sizes))
        ranges, offset = [], 0
        for nbytes in sizes:
            ranges.append(MemoryRange(Tier.DEVICE, arena.view(offset, nbytes)))
            offset += round_up(nbytes, PAGE)
        return ranges

    def read(self, pieces: Pieces, priority: Priority = Priority.NORMAL) -> Event:
        return merge_events(
            [self._device.copy_d2h(buffer, _data_of(source)) for source, buffer in pieces]
        )

    def write(self, pieces: Pieces, priority: Priority = Priority.BACKGROUND) -> Event:
        """Copy from host to device, not delayed by copies that wait for a slot."""
        return merge_events(
            [self._device.copy_h2d_unordered(_data_of(target), buffer) for target, buffer in pieces]
        )


def _data_of(source: Range) -> Tensor:
    data = source.addressable_view(by_device=True)
    assert data is not None
    return data

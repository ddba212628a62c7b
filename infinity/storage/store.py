"""Stores: one object for each tier, all with one protocol; a `Range` is bytes that one reserved.

Whoever moves or updates state asks a range who reaches its bytes where they are, and has those that
nobody does read into a buffer and written back: no tier is asked for by name. A further tier is a
class with the methods of `Store`, a member of `Tier`, and its budget and rates in the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol, Self

from torch import Tensor

from infinity.storage.device import HAPPENED, AllOf, Device, Event
from infinity.storage.host_arena import arena_for
from infinity.types import PAGE, Tier, round_up


class Priority(IntEnum):
    """Order of queued requests; waiting for a ticket makes its remaining ones URGENT."""

    URGENT = 0  # somebody waits for it
    NORMAL = 1  # reads ahead of their use
    BACKGROUND = 2  # writes nobody waits for


class Range(Protocol):
    """Reserved bytes of one tier; `tier` names the store that moves them."""

    @property
    def tier(self) -> Tier:
        """Of the store that reserved it: HOST for memory of a device that is the host."""

    @property
    def nbytes(self) -> int:
        """Its size."""

    def part(self, start: int, nbytes: int) -> Self:
        """A range inside this one; `start` counts bytes from its beginning."""

    def reached(self, *, by_device: bool) -> Tensor | None:
        """Its very bytes (uint8), where the CPU, or else a kernel of the device, may use them."""


Pieces = Sequence[tuple[Range, Tensor]]  # ranges, and host buffers (uint8) of their sizes


class Store(Protocol):
    """One tier: reserves ranges, and moves their bytes from and to buffers in host memory."""

    joins: bool
    """Whether many pieces make one request; else they are asked for one by one."""

    def reserve(self, sizes: Sequence[int], owners: Sequence[str]) -> Sequence[Range]:
        """Ranges of these sizes in bytes, before training; `owners` name them in errors."""

    def read(self, pieces: Pieces, priority: Priority = Priority.NORMAL) -> Event:
        """Start to copy ranges to their buffers. Raises `TransferError`, or waiting does."""

    def write(self, pieces: Pieces, priority: Priority = Priority.BACKGROUND) -> Event:
        """Start to copy buffers to their ranges; the buffers may not change until it is over."""


@dataclass(frozen=True, slots=True)
class MemoryRange:
    """Bytes (uint8) of host memory, or of a device with memory of its own."""

    tier: Tier
    data: Tensor

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.data.numel()

    def part(self, start: int, nbytes: int) -> MemoryRange:
        """A range inside this one."""
        assert 0 <= start <= start + nbytes <= self.nbytes, (start, nbytes, self.nbytes)
        return MemoryRange(self.tier, self.data[start : start + nbytes])

    def reached(self, *, by_device: bool) -> Tensor | None:
        """Host memory is reached by both (kernels have it copied), a device's by its kernels."""
        return self.data if by_device or self.tier is not Tier.DEVICE else None


class HostStore:
    """Pinned RAM."""

    joins = False

    def __init__(self, device: Device) -> None:
        self._device = device

    def reserve(self, sizes: Sequence[int], owners: Sequence[str]) -> list[MemoryRange]:
        """One pinned mapping for all of them, each on pages of its own."""
        arena = arena_for(sizes)
        if any(sizes):
            self._device.pin(arena)
        return [MemoryRange(Tier.HOST, arena.carve(nbytes)) for nbytes in sizes]

    def read(self, pieces: Pieces, priority: Priority = Priority.NORMAL) -> Event:
        """Copies at once."""
        for source, buffer in pieces:
            buffer.copy_(_bytes(source))
        return HAPPENED

    def write(self, pieces: Pieces, priority: Priority = Priority.BACKGROUND) -> Event:
        """Copies at once."""
        for target, buffer in pieces:
            _bytes(target).copy_(buffer)
        return HAPPENED


class DeviceStore:
    """Memory of a device of its own; copies out come after the compute issued so far."""

    joins = False

    def __init__(self, device: Device) -> None:
        self._device = device

    def reserve(self, sizes: Sequence[int], owners: Sequence[str]) -> list[MemoryRange]:
        """One reservation for all of them. Raises `DoesNotFitError`."""
        arena = self._device.reserve(sum(round_up(nbytes, PAGE) for nbytes in sizes))
        found, offset = [], 0
        for nbytes in sizes:
            found.append(MemoryRange(Tier.DEVICE, arena.view(offset, nbytes)))
            offset += round_up(nbytes, PAGE)
        return found

    def read(self, pieces: Pieces, priority: Priority = Priority.NORMAL) -> Event:
        """Device to host."""
        return together(
            [self._device.copy_d2h(buffer, _bytes(source)) for source, buffer in pieces]
        )

    def write(self, pieces: Pieces, priority: Priority = Priority.BACKGROUND) -> Event:
        """Host to device, behind no copy that waits for a slot."""
        return together(
            [self._device.copy_h2d_unordered(_bytes(target), buffer) for target, buffer in pieces]
        )


def _bytes(location: Range) -> Tensor:
    found = location.reached(by_device=True)
    assert found is not None
    return found


def together(events: Sequence[Event]) -> Event:
    """One event for several; each is waited for, so that no error of one is lost."""
    if not events:
        return HAPPENED
    return events[0] if len(events) == 1 else AllOf(events)

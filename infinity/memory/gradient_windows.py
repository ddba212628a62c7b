"""Gradients that rest on disk are summed in windows: RAM buffers as large as a unit's range.

A window is written home when its unit is complete, and read back when the next micro-batch reaches
the unit. Used by one thread at a time: whoever sums (`gradient_sums.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from infinity.errors import TransferError
from infinity.memory.disk import Extent, Ticket
from infinity.memory.host import arena_for
from infinity.memory.lanes import Lanes
from infinity.plan.layout import Tier
from infinity.plan.plan import Plan
from infinity.plan.reserve import largest_window, num_windows

Stall = Callable[[str], AbstractContextManager[None]]


def untimed(cause: str) -> AbstractContextManager[None]:
    """The stall of a thread whose waits keep nobody waiting."""
    return nullcontext()


@dataclass(eq=False)
class _Window:
    """A RAM buffer that stands in for one unit's gradient range on disk."""

    buffer: Tensor
    unit: int | None = None
    last_unit: int | None = None  # whose bytes the write in flight saves
    ticket: Ticket | None = None  # the read that fills it, or the write that saves it


class GradientWindows:
    """Extents of all units whose gradients rest on disk, and the windows onto them.

    `stall` times waits, by cause.
    """

    def __init__(self, plan: Plan, lanes: Lanes, dtype: torch.dtype, stall: Stall) -> None:
        self.extents: dict[int, Extent] = {}
        self._plan = plan
        self._lanes = lanes
        self._dtype = dtype
        self._stall = stall
        self._saved: set[int] = set()  # units whose extents hold gradients of this window
        self._arrived: dict[int, int] = {}  # unit -> arrivals since its window was opened
        for unit in plan.units:
            if unit.numel and plan.homes[unit.index].gradient is Tier.DISK:
                assert lanes.disk is not None
                owner = f"unit {unit.name!r}, gradients"
                nbytes = unit.numel * plan.gradient_itemsize
                self.extents[unit.index] = lanes.disk.extent(nbytes, owner)
        nbytes = largest_window(plan)
        arena = arena_for([nbytes] * num_windows(plan))
        self._windows = [_Window(arena.carve(nbytes)) for _ in range(num_windows(plan))]

    def forget(self) -> None:
        """Drop the buffers; nothing moves any more."""
        self._windows.clear()

    def write_once(self) -> None:
        """Write every extent, before training: a first write of reserved space is a slow one."""
        for turn, (unit, extent) in enumerate(self.extents.items()):
            window = self._windows[turn % len(self._windows)]
            if window.ticket is not None:
                window.ticket.wait()
            window.last_unit = unit
            piece = extent, window.buffer[: extent.nbytes]
            window.ticket = self._lanes.write([piece], label=(unit, "gradient"))
        self.settle()

    def expect(self, unit: int) -> None:
        """The unit's gradients will arrive soon: start reading what was saved of them."""
        if unit in self._saved and self._find(unit) is None:
            for window in self._windows:
                if window.unit is None and (window.ticket is None or window.ticket.done()):
                    self._open(unit, window)
                    return

    def range(self, unit: int) -> Tensor:
        """The unit's flat range, in RAM; it may be written until the next call."""
        window = self._find(unit)
        if window is None:
            free = [w for w in self._windows if w.unit is None]
            if not free:
                oldest = self._windows[0]
                assert oldest.unit is not None
                self._save(oldest.unit)
                free = [oldest]
            self._open(unit, free[0])
            window = free[0]
        self._wait(window)
        # Most recently used last.
        self._windows.sort(key=lambda w: w is window)
        nbytes = self._plan.units[unit].numel * self._plan.gradient_itemsize
        return window.buffer[:nbytes].view(self._dtype)

    def count(self, unit: int) -> None:
        """One more gradient lies in the unit's range; with its last one the window goes home."""
        self._arrived[unit] = self._arrived.get(unit, 0) + 1
        if self._arrived[unit] == len(self._plan.units[unit].trained_segments):
            self._save(unit)

    def save(self) -> None:
        """Start writing every open window home."""
        for window in list(self._windows):
            if window.unit is not None:
                self._save(window.unit)

    @property
    def writing(self) -> bool:
        """Whether some window may still be on its way home."""
        return any(w.unit is None and w.ticket is not None for w in self._windows)

    def settle(self, unit: int | None = None) -> None:
        """Wait for writes that closed windows have in flight: of one unit, or of all."""
        for window in self._windows:
            wanted = unit is None or window.last_unit == unit
            if window.unit is None and wanted:
                self._wait(window)  # a write that failed stays, and fails whoever asks again

    def reset(self) -> None:
        """Nothing was saved, nothing is open; what is in flight is waited for, and dropped."""
        for window in self._windows:
            ticket, window.ticket, window.unit = window.ticket, None, None
            if ticket is not None:
                with contextlib.suppress(TransferError):
                    ticket.wait()
        self._saved.clear()
        self._arrived.clear()

    def _find(self, unit: int) -> _Window | None:
        return next((w for w in self._windows if w.unit == unit), None)

    def _wait(self, window: _Window) -> None:
        if window.ticket is not None:
            with self._stall("gradient"):
                window.ticket.wait()
            window.ticket = None

    def _open(self, unit: int, window: _Window) -> None:
        self._wait(window)
        window.unit = unit
        self._arrived[unit] = 0
        if unit in self._saved:
            extent = self.extents[unit]
            self.settle(unit)  # an earlier window may still be writing it
            piece = extent, window.buffer[: extent.nbytes]
            window.ticket = self._lanes.read([piece], label=(unit, "gradient"))

    def _save(self, unit: int) -> None:
        """Write the window home; it is free when the write has ended."""
        window = self._find(unit)
        assert window is not None
        self._wait(window)
        window.unit, window.last_unit = None, unit
        if not self._arrived.get(unit):
            return  # expected, but nothing came: home is what was read
        extent = self.extents[unit]
        piece = extent, window.buffer[: extent.nbytes]
        window.ticket = self._lanes.write([piece], label=(unit, "gradient"))
        self._saved.add(unit)
        self._arrived[unit] = 0

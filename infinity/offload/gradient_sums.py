"""Accumulation of gradients into their unit's range in RAM, with their square sums.

Ranges on disk have buffers in RAM (`GradientWindows`).

[Note: sums]
On a CPU the training thread accumulates, as gradients arrive. For a device with its own memory a
worker thread does (`GradientWorker`), and everything in this file belongs to it: the training
thread reads only while nothing is queued. Decisions made when a gradient arrives (whether it is the
first of its parameter, or the last of the window) are queued with it. Either way gradients are
added in the order of arrival.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from infinity.errors import TransferError
from infinity.offload.transfers import Transfers
from infinity.optim.cpu import CpuKernels
from infinity.plan.budget import gradient_window_bytes, num_gradient_windows
from infinity.plan.layout import Segment
from infinity.plan.plan import Plan
from infinity.profiling.trace_recorder import Laps
from infinity.storage.device import Event
from infinity.storage.staging import host_buffer
from infinity.storage.store import Range


def segment_slice(flat: Tensor, segment: Segment) -> Tensor:
    """Return the parameter's slice of its unit's flat range, or of a shard of that range."""
    first, end = segment.within(0, flat.numel())
    return flat[first:end]


def norm_slices(flat: Tensor, segment: Segment) -> Sequence[Tensor]:
    """Return the slices of a full gradient that the norm sums separately: a stack's experts."""
    return (flat,) if segment.stack is None else flat.view(segment.shape[0], -1).unbind()


@dataclass(eq=False)
class _Buffer:
    """RAM buffer for the gradients of one unit that are stored on disk."""

    memory: Tensor
    unit: int | None = None
    last_unit: int | None = None  # of the write in flight
    ticket: Event | None = None  # the read that fills it, or the write that saves it


class GradientWindows:
    """RAM buffers for gradients on disk: each holds the gradients of a unit while they are summed.

    A buffer is written to the unit's range in `ranges` when all gradients of the unit have arrived,
    and read back when the next micro-batch reaches the unit.
    """

    def __init__(
        self,
        plan: Plan,
        transfers: Transfers,
        dtype: torch.dtype,
        ranges: Mapping[int, Range],
    ) -> None:
        self.ranges = ranges
        self._plan = plan
        self._transfers = transfers
        self._dtype = dtype
        # Only waits of the training thread are timed.
        self._stall = transfers.stall if plan.unified else nullcontext
        self._saved: set[int] = set()  # units whose ranges hold sums of earlier micro-batches
        self._expected: list[int] = []  # requested reads that wait for a buffer
        self._arrived: dict[int, int] = {}  # unit -> gradients since its buffer was opened
        nbytes = gradient_window_bytes(plan)
        self._buffers = [_Buffer(host_buffer(nbytes)) for _ in range(num_gradient_windows(plan))]

    def free(self) -> None:
        """Free the buffers; nothing may be in flight."""
        self._buffers.clear()

    def prewrite(self) -> None:
        """Write every range before training: the first write of reserved space is slow."""
        for index, unit in enumerate(self.ranges):
            buffer = self._buffers[index % len(self._buffers)]
            if buffer.ticket is not None:
                buffer.ticket.wait()
            self._write(unit, buffer)
        self.settle()

    def expect(self, unit: int) -> None:
        """Start to read the unit's saved gradients, which are needed soon.

        Reads start in the order of calls: a unit read before its turn would have to be evicted for
        earlier ones, and read again.
        """
        if unit in self._saved and self._find(unit) is None and unit not in self._expected:
            self._expected.append(unit)
        for buffer in self._buffers:
            may_open = buffer.unit is None and (buffer.ticket is None or buffer.ticket.done())
            if self._expected and may_open:
                self._open(self._expected.pop(0), buffer)

    def range(self, unit: int) -> Tensor:
        """Return the unit's flat range in RAM, which is valid until the next call."""
        buffer = self._find(unit)
        if buffer is None:
            if unit in self._expected:
                self._expected.remove(unit)
            free = [b for b in self._buffers if b.unit is None]
            if not free:
                oldest = self._buffers[0]
                assert oldest.unit is not None
                self._save(oldest.unit)
                free = [oldest]
            self._open(unit, free[0])
            buffer = free[0]
        self._wait(buffer)
        # Most recently used last.
        self._buffers.sort(key=lambda b: b is buffer)
        nbytes = self._plan.gradient_bytes(self._plan.local_units[unit])
        return buffer.memory[:nbytes].view(self._dtype)

    def count(self, unit: int) -> None:
        """Count a gradient added to the unit's range; start to write it back after the last one."""
        self._arrived[unit] = self._arrived.get(unit, 0) + 1
        expected = len(self._plan.local_units[unit].trained_segments) * self._plan.ranks
        if self._arrived[unit] == expected:
            self._save(unit)

    def save(self) -> None:
        """Start to write back every open buffer."""
        self._expected.clear()
        for buffer in list(self._buffers):
            if buffer.unit is not None:
                self._save(buffer.unit)

    @property
    def writing(self) -> bool:
        """Return True while some buffer may still be written."""
        return any(b.unit is None and b.ticket is not None for b in self._buffers)

    def settle(self, unit: int | None = None) -> None:
        """Wait for writes in flight of closed buffers: of one unit, or of all."""
        for buffer in self._buffers:
            matches = unit is None or buffer.last_unit == unit
            if buffer.unit is None and matches:
                self._wait(buffer)  # a failed write keeps its ticket: later waits raise too

    def reset(self) -> None:
        """Discard all gradients, after waiting for requests in flight."""
        for buffer in self._buffers:
            ticket, buffer.ticket, buffer.unit = buffer.ticket, None, None
            if ticket is not None:
                with suppress(TransferError):
                    ticket.wait()
        self._saved.clear()
        self._expected.clear()
        self._arrived.clear()

    def _find(self, unit: int) -> _Buffer | None:
        return next((b for b in self._buffers if b.unit == unit), None)

    def _wait(self, buffer: _Buffer) -> None:
        if buffer.ticket is not None:
            with self._stall("gradient"):
                buffer.ticket.wait()
            buffer.ticket = None

    def _open(self, unit: int, buffer: _Buffer) -> None:
        self._wait(buffer)
        buffer.unit = unit
        self._arrived[unit] = 0
        if unit in self._saved:
            self.settle(unit)  # an earlier buffer may still be writing it
            location = self.ranges[unit]
            piece = location, buffer.memory[: location.nbytes]
            buffer.ticket = self._transfers.read([piece], label=(unit, "gradient"))

    def _save(self, unit: int) -> None:
        """Write the buffer back; it is free when the write has ended."""
        buffer = self._find(unit)
        assert buffer is not None
        self._wait(buffer)
        buffer.unit, buffer.last_unit = None, unit
        if not self._arrived.get(unit):
            return  # no gradient arrived: the range on disk is current
        self._write(unit, buffer)
        self._saved.add(unit)
        self._arrived[unit] = 0

    def _write(self, unit: int, buffer: _Buffer) -> None:
        """Start to write the buffer to its unit's range."""
        location, buffer.last_unit = self.ranges[unit], unit
        piece = location, buffer.memory[: location.nbytes]
        buffer.ticket = self._transfers.write([piece], label=(unit, "gradient"))


class GradientSums:
    """Accumulation into `ram` (unit -> flat range), or into the windows of other units.

    `squares` maps parameters to the square sums of a complete gradient: one per slice of
    `norm_slices`, or of several ranks one per block (`NormTree`). `transfers` is passed if sums
    overlap with compute: they get their own track in a trace.
    """

    def __init__(
        self,
        kernels: CpuKernels,
        ram: Mapping[int, Tensor],
        windows: GradientWindows,
        transfers: Transfers | None,
        *,
        by_blocks: bool,
    ) -> None:
        self.squares: dict[int, Any] = {}
        self._kernels = kernels
        self._by_blocks = by_blocks
        self._transfers = transfers
        self._ram = ram
        self._windows = windows

    def add(
        self, unit: int, segment: Segment, gradient: Tensor, *, first: bool, complete: bool
    ) -> None:
        """Add one gradient; the `first` overwrites. If `complete`, sum the squares while in cache.

        `gradient` is flat, in RAM, of any dtype of parameters.
        """
        in_ram = self._ram.get(unit)
        target = segment_slice(self._windows.range(unit) if in_ram is None else in_ram, segment)
        self.squares.pop(segment.parameter, None)
        trace = None if self._transfers is None else self._transfers.trace
        laps = Laps(trace, unit)
        if first:
            self._kernels.convert(target, gradient)
        else:
            self._kernels.accumulate(target, gradient)
        if complete:
            self.squares[segment.parameter] = self.square_sums(target, segment)
        laps.lap("sums", "gradient", target.numel() * target.element_size())
        if in_ram is None:
            self._windows.count(unit)

    def square(self, unit: int, segment: Segment) -> None:
        """Sum the squares of a gradient that was copied to its range in RAM."""
        target = segment_slice(self._ram[unit], segment)
        self.squares[segment.parameter] = self.square_sums(target, segment)

    def square_sums(self, flat: Tensor, segment: Segment) -> Any:
        """Return the square sums of a gradient, as in `squares`."""
        if self._by_blocks:
            return self._kernels.square_blocks(flat)
        return [self._kernels.square_sum(part) for part in norm_slices(flat, segment)]

    def drop(self, parameter: int) -> None:
        """Discard the squares of a parameter whose gradient is replaced."""
        self.squares.pop(parameter, None)

    def reset(self) -> None:
        self.squares.clear()

"""Gradients on their way out: accumulated into the unit's flat range, wherever that rests.

Each arrival (one call of a parameter's post-accumulate hook) is added separately: the first
of an accumulation window overwrites, later ones add, in fp32 when micro-batches are summed and
in the compute dtype otherwise. Square sums are taken as the last micro-batch's gradients arrive,
while they are in cache, one per parameter, over one fixed tree.

Gradients that rest on disk are accumulated in windows: unit-sized RAM buffers that are written
home when the unit is complete, and read back when the next micro-batch reaches the unit.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from infinity.errors import TrainingError, TransferError
from infinity.memory.device import DeviceArena, Event
from infinity.memory.disk import Extent, Ticket
from infinity.memory.host import HostArena, arena_for
from infinity.memory.lanes import Lanes
from infinity.optim.cpu import CpuKernels
from infinity.plan.layout import PAGE, Segment, Tier, round_up
from infinity.plan.plan import Plan
from infinity.plan.reserve import NUM_BOUNCES, largest_trained, largest_window, num_windows


@dataclass(eq=False)
class _Window:
    """A RAM buffer that stands in for one unit's gradient range on disk."""

    buffer: Tensor
    unit: int | None = None
    last_unit: int | None = None  # whose bytes the write in flight saves
    ticket: Ticket | None = None  # the read that fills it, or the write that saves it


@dataclass(eq=False, slots=True)
class _Arrival:
    """A gradient whose copy to the host is under way; `source` stays alive until it ends."""

    event: Event
    segment: Segment
    unit: int
    bounced: Tensor
    source: Tensor


class GradientStore:
    """Ranges, windows and square sums of all units; used by the training thread.

    The sweep reads ranges through `ram`, `on_device` and `extent` after `finish`.
    """

    def __init__(self, plan: Plan, lanes: Lanes, kernels: CpuKernels) -> None:
        self.plan = plan
        self.lanes = lanes
        self.kernels = kernels
        self.dtype = torch.bfloat16 if plan.gradient_itemsize == 2 else torch.float32
        self.last_micro_batch = True  # square sums are worth taking now
        self.ram: dict[int, Tensor] = {}
        self.on_device: dict[int, Tensor] = {}
        self.extents: dict[int, Extent] = {}
        self._places = {
            s.parameter: (u.index, s) for u in plan.units for s in u.segments if s.trained
        }
        self._has: set[int] = set()
        self._squares: dict[int, float] = {}
        self._saved: set[int] = set()  # units whose extents hold gradients of this window
        self._arrived: dict[int, int] = {}  # unit -> arrivals since its window was opened
        self._pending: deque[_Arrival] = deque()
        self._reserve()

    def _reserve(self) -> None:
        plan, device = self.plan, self.lanes.device
        homes = {u.index: plan.homes[u.index].gradient for u in plan.units if u.numel}
        sizes = {u: plan.units[u].numel * plan.gradient_itemsize for u in homes}
        in_ram = [
            u for u, h in homes.items() if h is Tier.HOST or (h is Tier.DEVICE and plan.unified)
        ]
        arena = arena_for([sizes[u] for u in in_ram])
        for unit in in_ram:
            self.ram[unit] = arena.carve(sizes[unit]).view(self.dtype)
        away = [u for u, h in homes.items() if h is Tier.DEVICE and not plan.unified]
        self._device_arena: DeviceArena | None = None
        if away:
            self._device_arena = device.reserve(sum(round_up(sizes[u], PAGE) for u in away))
            offset = 0
            for unit in away:
                part = self._device_arena.view(offset, sizes[unit])
                self.on_device[unit] = part.view(self.dtype)
                offset += round_up(sizes[unit], PAGE)
        for unit, home in homes.items():
            if home is Tier.DISK:
                assert self.lanes.disk is not None
                owner = f"unit {plan.units[unit].name!r}, gradients"
                self.extents[unit] = self.lanes.disk.extent(sizes[unit], owner)
        nbytes = largest_window(plan)
        arena = arena_for([nbytes] * num_windows(plan))
        self._windows = [_Window(arena.carve(nbytes)) for _ in range(num_windows(plan))]
        bounce = 0 if plan.unified else NUM_BOUNCES * largest_trained(plan)
        bounce_arena = HostArena(bounce)
        if bounce:
            device.pin(bounce_arena)
        self._bounce = bounce_arena.view(0, bounce)
        self._bounced = 0

    def forget(self) -> None:
        """Drop the reserved ranges."""
        self.ram.clear()
        self.on_device.clear()
        self._windows.clear()
        self._pending.clear()
        self._device_arena = None
        self._bounce = torch.empty(0, dtype=torch.uint8)

    def write_once(self) -> None:
        """Write every extent, before training: a first write of reserved space is a slow one."""
        for turn, (unit, extent) in enumerate(self.extents.items()):
            window = self._windows[turn % len(self._windows)]
            if window.ticket is not None:
                window.ticket.wait()
            window.last_unit = unit
            window.ticket = self.lanes.write([(extent, window.buffer[: extent.nbytes])])
        self.settle()

    # --- arrivals --------------------------------------------------------------------------

    def receive(self, parameter: int, gradient: Tensor) -> None:
        """Take one gradient; it is accumulated now, or as soon as its copy has ended."""
        unit, segment = self._places[parameter]
        if gradient.layout is not torch.strided:
            raise TrainingError(
                f"the gradient of {segment.name!r} is sparse; flat gradient ranges are dense",
                remedy="use sparse=False in nn.Embedding",
            )
        if segment.numel == 0:
            return
        flat = gradient.detach().contiguous().view(-1)
        if unit in self.on_device:
            self._accumulate_on_device(unit, segment, flat)
        elif self.plan.unified:
            self._accumulate(unit, segment, flat)
        else:
            self._send(unit, segment, flat)

    def _accumulate_on_device(self, unit: int, segment: Segment, gradient: Tensor) -> None:
        target = self._part(self.on_device[unit], segment)
        if segment.parameter in self._has:
            target.add_(gradient)
        else:
            target.copy_(gradient)
        self._has.add(segment.parameter)
        self._squares.pop(segment.parameter, None)

    def _send(self, unit: int, segment: Segment, gradient: Tensor) -> None:
        """Start the copy to the host; earlier arrivals that have ended are accumulated."""
        nbytes = gradient.numel() * gradient.element_size()
        start = round_up(self._bounced, 64)
        if start + nbytes > self._bounce.numel():
            self.drain()
            start = 0
        bounced = self._bounce[start : start + nbytes]
        self._bounced = start + nbytes
        event = self.lanes.copy_out(bounced, gradient.view(torch.uint8))
        arrival = _Arrival(event, segment, unit, bounced.view(gradient.dtype), gradient)
        self._pending.append(arrival)
        while self._pending and self._pending[0].event.done():
            self._land(self._pending.popleft())

    def drain(self) -> None:
        """Accumulate everything that is still on its way."""
        while self._pending:
            with self.lanes.stall("gradient"):
                self._pending[0].event.wait()
            self._land(self._pending.popleft())
        self._bounced = 0

    def _land(self, arrival: _Arrival) -> None:
        self._accumulate(arrival.unit, arrival.segment, arrival.bounced)

    def _accumulate(self, unit: int, segment: Segment, gradient: Tensor) -> None:
        home = self.ram.get(unit)
        target = self._part(self._window(unit) if home is None else home, segment)
        if segment.parameter in self._has:
            self.kernels.accumulate(target, gradient)
        else:
            self.kernels.convert(target, gradient)
        self._has.add(segment.parameter)
        self._squares.pop(segment.parameter, None)
        if self.last_micro_batch:
            self._squares[segment.parameter] = self.kernels.square_sum(target)
        if home is None:
            self._arrived[unit] = self._arrived.get(unit, 0) + 1
            if self._arrived[unit] == len(self.plan.units[unit].trained_segments):
                self._save(unit)

    def _part(self, flat: Tensor, segment: Segment) -> Tensor:
        return flat[segment.offset : segment.offset + segment.numel]

    # --- windows ---------------------------------------------------------------------------

    def expect(self, unit: int) -> None:
        """The unit's gradients will arrive soon: start reading what was saved of them."""
        if unit in self.extents and unit in self._saved and self._find(unit) is None:
            for window in self._windows:
                if window.unit is None and (window.ticket is None or window.ticket.done()):
                    self._open(unit, window)
                    return

    def _find(self, unit: int) -> _Window | None:
        return next((w for w in self._windows if w.unit == unit), None)

    def _window(self, unit: int) -> Tensor:
        """The open window of a unit whose gradients rest on disk."""
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
        if window.ticket is not None:
            with self.lanes.stall("gradient"):
                window.ticket.wait()
            window.ticket = None
        # Most recently used last; one call, because an interruption must not lose a window.
        self._windows.sort(key=lambda w: w is window)
        numel = self.plan.units[unit].numel
        return window.buffer[: numel * self.plan.gradient_itemsize].view(self.dtype)

    def _open(self, unit: int, window: _Window) -> None:
        if window.ticket is not None:
            with self.lanes.stall("gradient"):
                window.ticket.wait()
            window.ticket = None
        window.unit = unit
        self._arrived[unit] = 0
        if unit in self._saved:
            extent = self.extents[unit]
            self._settle(unit)  # an earlier window may still be writing it
            window.ticket = self.lanes.read([(extent, window.buffer[: extent.nbytes])])

    def _settle(self, unit: int | None) -> None:
        """Wait for writes that closed windows have in flight: of one unit, or of all."""
        for window in self._windows:
            wanted = unit is None or window.last_unit == unit
            if window.unit is None and window.ticket is not None and wanted:
                ticket, window.ticket = window.ticket, None
                with self.lanes.stall("gradient"):
                    ticket.wait()

    def _save(self, unit: int) -> None:
        """Write the window home; it is free when the write has ended."""
        window = self._find(unit)
        assert window is not None
        if window.ticket is not None:
            window.ticket.wait()
            window.ticket = None
        window.unit, window.last_unit = None, unit
        if not self._arrived.get(unit):
            return  # expected, but nothing came: home is what was read
        extent = self.extents[unit]
        window.ticket = self.lanes.write([(extent, window.buffer[: extent.nbytes])])
        self._saved.add(unit)
        self._arrived[unit] = 0

    # --- the end of a backward, and of a window ----------------------------------------------

    def finish(self) -> None:
        """End of a backward: everything has been accumulated and is home or on its way."""
        self.drain()
        for window in list(self._windows):
            if window.unit is not None:
                self._save(window.unit)

    def settle(self) -> None:
        """Wait until all gradients are home; then the sweep may read extents."""
        self._settle(None)

    def arrived(self) -> frozenset[int]:
        """Parameters that have a gradient in this accumulation window."""
        return frozenset(self._has)

    def square_sum(self) -> float:
        """Sum of squares of all gradients, in parameter order, fp64; after `finish`."""
        self._sum_on_device()
        total = 0.0
        for parameter in sorted(self._has):
            if parameter not in self._squares:
                self._squares[parameter] = self.kernels.square_sum(self.read(parameter))
            total += self._squares[parameter]
        return total

    def _sum_on_device(self) -> None:
        """Square sums of what rests on a device with kernels: the same tree, nothing moves."""
        if not self.plan.device_kernels:
            return
        parts = {
            parameter: self._part(self.on_device[unit], segment)
            for parameter, (unit, segment) in self._places.items()
            if parameter in self._has and parameter not in self._squares and unit in self.on_device
        }
        if parts:
            sums = self.lanes.device.square_sums(list(parts.values()))
            self._squares.update(zip(parts, sums, strict=True))

    def first_non_finite(self) -> str | None:
        """Name of the first parameter whose gradient is not finite; after `square_sum`."""
        for parameter in sorted(self._has):
            if not math.isfinite(self._squares[parameter]):
                return self._places[parameter][1].name
        return None

    def read(self, parameter: int) -> Tensor:
        """A flat copy of one accumulated gradient; raises `TrainingError` if there is none."""
        unit, segment = self._places[parameter]
        if parameter not in self._has:
            raise TrainingError(f"parameter {segment.name!r} has no gradient in this window")
        self.finish()
        if unit in self.ram:
            return self._part(self.ram[unit], segment).clone()
        if unit in self.on_device:
            source = self._part(self.on_device[unit], segment)
            target = torch.empty(segment.numel, dtype=self.dtype)
            self.lanes.copy_out(target.view(torch.uint8), source.view(torch.uint8)).wait()
            return target
        self._settle(unit)
        extent = self.extents[unit]
        buffer = HostArena(extent.nbytes).view(0, extent.nbytes)
        self.lanes.read([(extent, buffer)]).wait()
        numel = self.plan.units[unit].numel
        return self._part(buffer[: numel * self.plan.gradient_itemsize].view(self.dtype), segment)

    def reset(self) -> None:
        """Start a new accumulation window; also after an interruption."""
        for arrival in self._pending:
            arrival.event.wait()
        self._pending.clear()
        self._bounced = 0
        for window in self._windows:
            ticket, window.ticket, window.unit = window.ticket, None, None
            if ticket is not None:
                with contextlib.suppress(TransferError):  # what it moved is dropped
                    ticket.wait()
        self._has.clear()
        self._squares.clear()
        self._saved.clear()
        self._arrived.clear()

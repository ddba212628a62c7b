"""Gradients in RAM are added into where their unit's range is, and their square sums taken.

[Note: sums]
On a CPU the training thread does, as gradients arrive. On a device of its own memory a thread
does (`GradientWorker`), and everything here, with the windows, is that thread's: the
training thread looks only when nothing is queued. What was decided when a gradient arrived (is
it the first of its parameter, the last of the window) is handed over with it. Both ways add in
the order of arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from infinity.offload.gradient_windows import GradientWindows
from infinity.offload.transfers import Transfers
from infinity.optim.cpu import CpuKernels
from infinity.plan.layout import Segment
from infinity.profiling.trace_recorder import Laps


def part(flat: Tensor, segment: Segment) -> Tensor:
    """Return a parameter's elements in its unit's flat range; of a shard those that lie in it."""
    first, end = segment.within(0, flat.numel())
    return flat[first:end]


def apart(flat: Tensor, segment: Segment) -> Sequence[Tensor]:
    """Return the parts of a full gradient that the norm sums separately: of a stack each expert."""
    return (flat,) if segment.stack is None else flat.view(segment.shape[0], -1).unbind()


class GradientSums:
    """Sums into `ram` (unit -> flat range), or into the windows of other units.

    `squares` holds for each parameter the result of `square` over a complete sum. `transfers` are
    given where sums run while compute does, for a track of their own in a trace.
    """

    def __init__(
        self,
        kernels: CpuKernels,
        square: Callable[[Tensor, Segment], Any],
        ram: Mapping[int, Tensor],
        windows: GradientWindows,
        transfers: Transfers | None,
    ) -> None:
        self.squares: dict[int, Any] = {}
        self._kernels = kernels
        self._square = square
        self._transfers = transfers
        self._ram = ram
        self._windows = windows

    def add(
        self, unit: int, segment: Segment, gradient: Tensor, *, first: bool, complete: bool
    ) -> None:
        """Add one gradient; the `first` overwrites. Once `complete` squares are summed, in cache.

        `gradient` is flat, in RAM, of any dtype that parameters have.
        """
        in_ram = self._ram.get(unit)
        target = part(self._windows.range(unit) if in_ram is None else in_ram, segment)
        self.squares.pop(segment.parameter, None)
        trace = None if self._transfers is None else self._transfers.trace
        laps = Laps(trace, unit)
        if first:
            self._kernels.convert(target, gradient)
        else:
            self._kernels.accumulate(target, gradient)
        if complete:
            self.squares[segment.parameter] = self._square(target, segment)
        laps.lap("sums", "gradient", target.numel() * target.element_size())
        if in_ram is None:
            self._windows.count(unit)

    def square(self, unit: int, segment: Segment) -> None:
        """Sum the squares of what lies in RAM already."""
        self.squares[segment.parameter] = self._square(part(self._ram[unit], segment), segment)

    def drop(self, parameter: int) -> None:
        """Discard the squares of a parameter whose gradient is replaced."""
        self.squares.pop(parameter, None)

    def reset(self) -> None:
        """Discard all squares."""
        self.squares.clear()

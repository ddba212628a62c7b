"""Gradients in RAM are added into where their unit's range is, and their square sums taken.

[Note: who sums]
On a CPU the training thread does, as gradients arrive. On a device of its own memory a thread does
(`gradient_worker.py`), and everything here, with the windows, is that thread's: the training thread
looks only when nothing is queued. What was decided when a gradient arrived (is it the first of its
parameter, the last of the window) is handed over with it. Both ways add in the order of arrival.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from infinity.memory.gradient_windows import GradientWindows
from infinity.memory.lanes import Lanes
from infinity.optim.cpu import CpuKernels
from infinity.plan.layout import Segment


def part(flat: Tensor, segment: Segment) -> Tensor:
    """A parameter's elements of its unit's flat range."""
    return flat[segment.offset : segment.offset + segment.numel]


class GradientSums:
    """Sums into `ram` (unit -> flat range), or into the windows of units that are not there.

    `squares` holds parameter -> sum of squares, of sums that were said to be complete. `lanes`
    are given where sums go on beside compute, to be a lane of their own in a trace.
    """

    def __init__(
        self,
        kernels: CpuKernels,
        ram: Mapping[int, Tensor],
        windows: GradientWindows,
        lanes: Lanes | None,
    ) -> None:
        self.squares: dict[int, float] = {}
        self._kernels = kernels
        self._lanes = lanes
        self._ram = ram
        self._windows = windows

    def add(
        self, unit: int, segment: Segment, gradient: Tensor, *, first: bool, complete: bool
    ) -> None:
        """Add one gradient; the `first` overwrites. Once `complete` squares are summed, in cache.

        `gradient` is flat, in RAM, of any dtype that parameters have.
        """
        home = self._ram.get(unit)
        target = part(self._windows.range(unit) if home is None else home, segment)
        self.squares.pop(segment.parameter, None)
        trace = None if self._lanes is None else self._lanes.trace
        laps = None if trace is None else trace.laps(unit)
        if first:
            self._kernels.convert(target, gradient)
        else:
            self._kernels.accumulate(target, gradient)
        if complete:
            self.squares[segment.parameter] = self._kernels.square_sum(target)
        if laps is not None:
            laps.lap("sums", "gradient", target.numel() * target.element_size())
        if home is None:
            self._windows.count(unit)

    def square(self, unit: int, segment: Segment) -> None:
        """Sum the squares of what lies in RAM already."""
        total = self._kernels.square_sum(part(self._ram[unit], segment))
        self.squares[segment.parameter] = total

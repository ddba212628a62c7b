"""Accumulation of gradients into their unit's range in RAM, with their square sums.

[Note: sums]
On a CPU the training thread accumulates, as gradients arrive. For a device with its own memory a
worker thread does (`GradientWorker`), and everything in this file, including the windows, belongs
to it: the training thread reads only while nothing is queued. Decisions made when a gradient
arrives (whether it is the first of its parameter, or the last of the window) are queued with it.
Either way gradients are added in the order of arrival.
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


def segment_slice(flat: Tensor, segment: Segment) -> Tensor:
    """Return the parameter's slice of its unit's flat range, or of a shard of that range."""
    first, end = segment.within(0, flat.numel())
    return flat[first:end]


def norm_slices(flat: Tensor, segment: Segment) -> Sequence[Tensor]:
    """Return the slices of a full gradient that the norm sums separately: a stack's experts."""
    return (flat,) if segment.stack is None else flat.view(segment.shape[0], -1).unbind()


class GradientSums:
    """Accumulation into `ram` (unit -> flat range), or into the windows of other units.

    `squares` maps parameters to the result of `square` for a complete sum. `transfers` is passed if
    sums overlap with compute: they get their own track in a trace.
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
            self.squares[segment.parameter] = self._square(target, segment)
        laps.lap("sums", "gradient", target.numel() * target.element_size())
        if in_ram is None:
            self._windows.count(unit)

    def square(self, unit: int, segment: Segment) -> None:
        """Sum the squares of a gradient that was copied to its range in RAM."""
        self.squares[segment.parameter] = self._square(
            segment_slice(self._ram[unit], segment), segment
        )

    def drop(self, parameter: int) -> None:
        """Discard the squares of a parameter whose gradient is replaced."""
        self.squares.pop(parameter, None)

    def reset(self) -> None:
        self.squares.clear()

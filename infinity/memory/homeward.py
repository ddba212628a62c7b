"""Gradients that go straight from a device to where they rest in RAM, and their square sums.

No byte of them passes through the CPU: the copy lands in the home itself, and where the device has
kernels it takes the sum of squares before the gradient is gone. Neither backward nor `step()` waits
for a copy: the norm waits for the sums, and the sweep, which is handed the copies that are still
under way, for those of a unit before it updates that.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from torch import Tensor

from infinity.memory.device import HAPPENED, Event, SquareSums
from infinity.memory.lanes import Lanes


@dataclass(eq=False, slots=True)
class Copy:
    """A copy under way; `source` must stay alive until it ends: nobody else may get its memory."""

    unit: int
    event: Event
    source: Tensor

    def done(self) -> bool:
        """Whether the copy has ended."""
        return self.event.done()

    def wait(self) -> None:
        """Block until it has."""
        self.event.wait()


class Homeward:
    """Copies under way; at most `limit` bytes of gradients are kept alive for them."""

    def __init__(self, lanes: Lanes, limit: int) -> None:
        self._lanes = lanes
        self._limit = limit
        self._under_way: deque[Copy] = deque()
        self._nbytes = 0
        self._sent: dict[int, Event] = {}  # by parameter

    def send(self, unit: int, parameter: int, target: Tensor, source: Tensor) -> Event:
        """Start copying `source` (uint8, on the device) to its place in RAM."""
        event = self._lanes.copy_out(target, source, label=(unit, "gradient"))
        self._sent[parameter] = event
        self._under_way.append(Copy(unit, event, source))
        self._nbytes += source.numel()
        while self._nbytes > self._limit:  # copies are slower than the backward: memory is bounded
            with self._lanes.stall("gradient"):
                self._under_way[0].event.wait()
            self.let_go()
        self.let_go()
        return event

    def let_go(self) -> None:
        """Let gradients go whose copies have ended."""
        while self._under_way and self._under_way[0].event.done():
            self._nbytes -= self._under_way.popleft().source.numel()

    def sent(self, parameter: int) -> Event:
        """When the parameter's place holds what was sent; it has happened if nothing was."""
        return self._sent.get(parameter, HAPPENED)

    def wait(self, parameter: int) -> None:
        """Wait until the parameter's place holds what was sent."""
        event = self.sent(parameter)
        if not event.done():
            with self._lanes.stall("gradient"):
                event.wait()

    def hand_over(self) -> dict[int, list[Copy]]:
        """Copies under way by unit, and forget them: whoever reads a unit's range waits for its.

        Until then nothing may be sent there. Each copy must be kept until it has ended.
        """
        self.let_go()
        handed: dict[int, list[Copy]] = {}
        for copy in self._under_way:
            handed.setdefault(copy.unit, []).append(copy)
        self._forget()
        return handed

    def reset(self) -> None:
        """Wait for all copies, and forget them: the next window writes the same ranges."""
        for copy in self._under_way:
            copy.wait()
        self._forget()

    def _forget(self) -> None:
        self._under_way.clear()
        self._nbytes = 0
        self._sent.clear()


class SquaresOnDevice:
    """Square sums that a device takes of gradients as they leave, a unit at a time."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._unit = -1  # that gradients are waiting of
        self._waiting: dict[int, Tensor] = {}  # by parameter
        self._begun: list[tuple[list[int], SquareSums]] = []
        self._newest: dict[int, int] = {}  # parameter -> which of `_begun` counts

    def add(self, unit: int, parameter: int, gradient: Tensor, *, complete: int) -> None:
        """Take one gradient; with the unit's `complete`-th, or another unit's, sums are begun."""
        if unit != self._unit:  # not all parameters of a unit need have a gradient
            self.flush()
            self._unit = unit
        self._waiting[parameter] = gradient
        if len(self._waiting) == complete:
            self.flush()

    def flush(self) -> None:
        """Begin what is waiting."""
        if self._waiting:
            waiting, self._waiting = self._waiting, {}
            sums = self._lanes.device.begin_square_sums(list(waiting.values()))
            self._newest.update(dict.fromkeys(waiting, len(self._begun)))
            self._begun.append((list(waiting), sums))

    def drop(self, parameter: int) -> None:
        """What was taken of this parameter is not its gradient any more."""
        self._waiting.pop(parameter, None)
        self._newest.pop(parameter, None)

    def results(self) -> dict[int, float]:
        """Parameter -> sum of squares of all that was added; waits once, for the last of them."""
        self.flush()
        found: dict[int, float] = {}
        for number in reversed(range(len(self._begun))):  # when the last is there, all are
            parameters, sums = self._begun[number]
            for parameter, total in zip(parameters, sums.result(), strict=True):
                if self._newest.get(parameter) == number:
                    found[parameter] = total
        self.reset()
        return found

    def reset(self) -> None:
        """Forget everything."""
        self._waiting.clear()
        self._begun.clear()
        self._newest.clear()

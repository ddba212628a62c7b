"""Copies of gradients from the device directly to their ranges in RAM, and their square sums.

The CPU touches no byte: the copy engine writes to the final range, and a device with kernels sums
the squares before the gradient is freed. Backward waits for a copy only if too many are in flight
(their gradients take device memory), `step()` only for the sums of a device without kernels. The
optimizer pass is handed the copies still in flight, and waits for those of a unit before it updates
the unit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from torch import Tensor

from infinity.offload.transfers import Transfers
from infinity.storage.device import HAPPENED, Device, Event, SquareSums


@dataclass(eq=False, slots=True)
class Copy:
    """Copy in flight, which keeps `source` alive until it has ended."""

    unit: int
    event: Event
    source: Tensor

    def done(self) -> bool:
        return self.event.done()

    def wait(self) -> None:
        self.event.wait()


class GradientCopies:
    """Copies in flight, which keep at most `limit` bytes of gradients alive."""

    def __init__(self, transfers: Transfers, limit: int) -> None:
        self._transfers = transfers
        self._limit = limit
        self._under_way: deque[Copy] = deque()
        self._nbytes = 0
        self._sent: dict[int, Event] = {}  # last copy by parameter

    def send(self, unit: int, parameter: int, target: Tensor, source: Tensor) -> Event:
        """Start to copy `source` (uint8, on the device) to its range `target` in RAM.

        Blocks while more than `limit` bytes are in flight.
        """
        event = self._transfers.copy_d2h(target, source, label=(unit, "gradient"))
        self._sent[parameter] = event
        self._under_way.append(Copy(unit, event, source))
        self._nbytes += source.numel()
        while self._nbytes > self._limit:  # backward is ahead of the copies: bound the memory
            with self._transfers.stall("gradient"):
                self._under_way[0].event.wait()
            self.let_go()
        self.let_go()
        return event

    def let_go(self) -> None:
        """Release gradients whose copies have ended."""
        while self._under_way and self._under_way[0].event.done():
            self._nbytes -= self._under_way.popleft().source.numel()

    def sent(self, parameter: int) -> Event:
        """Return the event after which the parameter's range holds its gradient."""
        return self._sent.get(parameter, HAPPENED)

    def wait(self, parameter: int) -> None:
        """Wait until the parameter's range holds its gradient."""
        event = self.sent(parameter)
        if not event.done():
            with self._transfers.stall("gradient"):
                event.wait()

    def hand_over(self) -> dict[int, list[Copy]]:
        """Return copies in flight by unit, for the reader of a unit's range to wait for.

        Until then nothing may be copied to the range. Keep each copy alive until it has ended.
        """
        self.let_go()
        handed: dict[int, list[Copy]] = {}
        for copy in self._under_way:
            handed.setdefault(copy.unit, []).append(copy)
        self._forget()
        return handed

    def reset(self) -> None:
        """Wait for all copies and drop them: the next window writes the same ranges."""
        for copy in self._under_way:
            copy.wait()
        self._forget()

    def _forget(self) -> None:
        self._under_way.clear()
        self._nbytes = 0
        self._sent.clear()


class SquaresOnDevice:
    """Square sums computed by the device as gradients arrive, one unit at a time."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._unit = -1  # of the waiting gradients
        self._waiting: dict[int, Sequence[Tensor]] = {}  # by parameter
        self._begun: list[tuple[dict[int, int], SquareSums]] = []  # parameter -> number of sums
        self._newest: dict[int, int] = {}  # parameter -> index in `_begun` of its valid sums

    def add(self, unit: int, parameter: int, gradient: Sequence[Tensor], *, complete: int) -> None:
        """Queue a gradient, cut by `apart`; the sums of a unit begin with its `complete`-th one."""
        if unit != self._unit:  # some parameters of a unit may have no gradient
            self.flush()
            self._unit = unit
        self._waiting[parameter] = gradient
        if len(self._waiting) == complete:
            self.flush()

    def flush(self) -> None:
        """Begin the sums of queued gradients."""
        waiting, self._waiting = self._waiting, {}
        self.begin(waiting)

    def begin(self, gradients: Mapping[int, Sequence[Tensor]]) -> None:
        """Begin the sums of these gradients, by parameter, cut by `apart`."""
        if gradients:
            flat = [part for parts in gradients.values() for part in parts]
            sums = self._device.begin_square_sums(flat)
            self._newest.update(dict.fromkeys(gradients, len(self._begun)))
            self._begun.append(({p: len(parts) for p, parts in gradients.items()}, sums))

    def drop(self, parameter: int) -> None:
        """Discard the sums of a parameter whose gradient is replaced."""
        self._waiting.pop(parameter, None)
        self._newest.pop(parameter, None)

    def results(self) -> dict[int, list[float]]:
        """Return sums of squares by parameter; blocks once, for the newest of them."""
        self.flush()
        found: dict[int, list[float]] = {}
        for number in reversed(range(len(self._begun))):  # once the newest are complete, all are
            counts, sums = self._begun[number]
            totals = iter(sums.result())
            for parameter, count in counts.items():
                here = list(islice(totals, count))
                if self._newest.get(parameter) == number:
                    found[parameter] = here
        self.reset()
        return found

    def reset(self) -> None:
        self._waiting.clear()
        self._begun.clear()
        self._newest.clear()

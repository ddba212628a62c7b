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
        self._in_flight: deque[Copy] = deque()
        self._nbytes = 0
        self._sent: dict[int, Event] = {}  # last copy by parameter

    def send(self, unit: int, parameter: int, target: Tensor, source: Tensor) -> Event:
        """Start to copy `source` (uint8, on the device) to its range `target` in RAM.

        Blocks while more than `limit` bytes are in flight.
        """
        event = self._transfers.copy_d2h(target, source, label=(unit, "gradient"))
        self._sent[parameter] = event
        self._in_flight.append(Copy(unit, event, source))
        self._nbytes += source.numel()
        while self._nbytes > self._limit:  # backward is ahead of the copies: bound the memory
            with self._transfers.stall("gradient"):
                self._in_flight[0].event.wait()
            self.release_done()
        self.release_done()
        return event

    def release_done(self) -> None:
        """Release gradients whose copies have ended."""
        while self._in_flight and self._in_flight[0].event.done():
            self._nbytes -= self._in_flight.popleft().source.numel()

    def sent(self, parameter: int) -> Event:
        """Return the event after which the parameter's range holds its gradient."""
        return self._sent.get(parameter, HAPPENED)

    def wait(self, parameter: int) -> None:
        """Wait until the parameter's range holds its gradient."""
        event = self.sent(parameter)
        if not event.done():
            with self._transfers.stall("gradient"):
                event.wait()

    def take_copies(self) -> dict[int, list[Copy]]:
        """Return copies in flight by unit, for the reader of a unit's range to wait for.

        Until then nothing may be copied to the range. Keep each copy alive until it has ended.
        """
        self.release_done()
        copies: dict[int, list[Copy]] = {}
        for copy in self._in_flight:
            copies.setdefault(copy.unit, []).append(copy)
        self._clear()
        return copies

    def reset(self) -> None:
        """Wait for all copies and drop them: the next window writes the same ranges."""
        for copy in self._in_flight:
            copy.wait()
        self._clear()

    def _clear(self) -> None:
        self._in_flight.clear()
        self._nbytes = 0
        self._sent.clear()


class SquaresOnDevice:
    """Square sums computed by the device as gradients arrive, one unit at a time."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._unit = -1  # of the queued gradients
        self._queued: dict[int, Sequence[Tensor]] = {}  # by parameter
        self._launches: list[tuple[dict[int, int], SquareSums]] = []  # parameter -> number of sums
        self._valid_launch: dict[int, int] = {}  # parameter -> index in `_launches`

    def add(self, unit: int, parameter: int, gradient: Sequence[Tensor], *, complete: int) -> None:
        """Queue a gradient, cut by `norm_slices`.

        The sums of a unit begin with its gradient number `complete`.
        """
        if unit != self._unit:  # some parameters of a unit may have no gradient
            self.flush()
            self._unit = unit
        self._queued[parameter] = gradient
        if len(self._queued) == complete:
            self.flush()

    def flush(self) -> None:
        """Begin the sums of queued gradients."""
        queued, self._queued = self._queued, {}
        self.begin(queued)

    def begin(self, gradients: Mapping[int, Sequence[Tensor]]) -> None:
        """Begin the sums of these gradients, by parameter, cut by `norm_slices`."""
        if gradients:
            tensors = [tensor for slices in gradients.values() for tensor in slices]
            sums = self._device.begin_square_sums(tensors)
            self._valid_launch.update(dict.fromkeys(gradients, len(self._launches)))
            self._launches.append(({p: len(slices) for p, slices in gradients.items()}, sums))

    def drop(self, parameter: int) -> None:
        """Discard the sums of a parameter whose gradient is replaced."""
        self._queued.pop(parameter, None)
        self._valid_launch.pop(parameter, None)

    def results(self) -> dict[int, list[float]]:
        """Return sums of squares by parameter; blocks once, for the newest of them."""
        self.flush()
        squares: dict[int, list[float]] = {}
        for number in reversed(range(len(self._launches))):  # once the newest are complete, all are
            counts, sums = self._launches[number]
            totals = iter(sums.result())
            for parameter, count in counts.items():
                parameter_sums = list(islice(totals, count))
                if self._valid_launch.get(parameter) == number:
                    squares[parameter] = parameter_sums
        self.reset()
        return squares

    def reset(self) -> None:
        self._queued.clear()
        self._launches.clear()
        self._valid_launch.clear()

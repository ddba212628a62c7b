"""Movement: every byte between tiers passes here, is counted, and waits are timed by cause."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from infinity.errors import InfinityError, TransferError
from infinity.memory.device import HAPPENED, Device, Event
from infinity.memory.disk import Disk, Extent, Priority, Ticket
from infinity.plan.plan import LANES

DISK_LANES = {"disk_read": "read", "disk_write": "write"}
STALLS = ("disk_read", "disk_write", "update", "copy", "slot", "gradient", "norm")


class AllOf:
    """Several events as one."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = events

    def done(self) -> bool:
        """Whether all have happened."""
        return all(e.done() for e in self.events)

    def wait(self) -> None:
        """Block until all have happened."""
        for event in self.events:
            event.wait()


def after_all(*events: Event) -> Event:
    """One event for several; those that have happened cost nothing."""
    open_events = [e for e in events if not e.done()]
    if not open_events:
        return HAPPENED
    return open_events[0] if len(open_events) == 1 else AllOf(open_events)


class Lanes:
    """Counted movement over a device and, where there is one, a disk.

    Stalls are seconds the calling thread waited; only the training thread uses `stall`.
    """

    def __init__(self, device: Device, disk: Disk | None) -> None:
        self.device = device
        self.disk = disk
        self._lock = threading.Lock()
        self._moved = dict.fromkeys(LANES, 0)
        self._stall_s = dict.fromkeys(STALLS, 0.0)
        self._stalled = False

    def read(
        self, pieces: Sequence[tuple[Extent, Tensor]], priority: Priority = Priority.NORMAL
    ) -> Ticket:
        """Disk to RAM."""
        ticket = self._disk().read(pieces, priority)
        self._count("disk_read", pieces)
        return ticket

    def write(
        self, pieces: Sequence[tuple[Extent, Tensor]], priority: Priority = Priority.BACKGROUND
    ) -> Ticket:
        """RAM to disk."""
        ticket = self._disk().write(pieces, priority)
        self._count("disk_write", pieces)
        return ticket

    def copy_in(self, target: Tensor, source: Tensor, after: Event = HAPPENED) -> Event:
        """Host to device."""
        if not self.device.unified:
            self._add("to_device", target.numel())
        return self.device.copy_in(target, source, after)

    def copy_out(self, target: Tensor, source: Tensor, after: Event = HAPPENED) -> Event:
        """Device to host, after the compute issued so far."""
        if not self.device.unified:
            self._add("from_device", target.numel())
        return self.device.copy_out(target, source, after)

    @contextmanager
    def stall(self, cause: str) -> Iterator[None]:
        """Time a wait of the training thread; inside another stall it counts for that one."""
        if self._stalled:
            yield
            return
        self._stalled = True
        start = time.perf_counter()
        try:
            yield
        finally:
            self._stalled = False
            self._stall_s[cause] += time.perf_counter() - start

    def forget_stall(self) -> None:
        """After an interruption: no stall is being timed."""
        self._stalled = False

    def moved(self) -> dict[str, int]:
        """Bytes per lane since the start."""
        with self._lock:
            return dict(self._moved)

    def stalled_s(self) -> dict[str, float]:
        """Seconds waited per cause since the start."""
        return dict(self._stall_s)

    @property
    def stuck(self) -> TransferError | None:
        """The first request that the kernel did not let go of in time; its memory is lost."""
        return self.disk.stuck if self.disk is not None else None

    def disk_times_s(self) -> dict[str, dict[str, float]]:
        """Per disk lane, seconds since the start that blocks were queued, and with the device.

        Summed over blocks, many of which are under way at the same time.
        """
        if self.disk is None:
            return {lane: {"queue": 0.0, "device": 0.0} for lane in DISK_LANES}
        return {lane: self.disk.times_s(op) for lane, op in DISK_LANES.items()}

    def _disk(self) -> Disk:
        if self.disk is None:  # pragma: no cover - the plan never homes without a disk
            raise InfinityError("something was homed on disk, but this run has no disk")
        return self.disk

    def _count(self, lane: str, pieces: Sequence[tuple[Extent, Tensor]]) -> None:
        self._add(lane, sum(extent.nbytes for extent, _ in pieces))

    def _add(self, lane: str, nbytes: int) -> None:
        with self._lock:
            self._moved[lane] += nbytes

"""Movement: every byte between tiers passes here, is counted, and waits are timed by cause."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from infinity.errors import InfinityError, TransferError
from infinity.memory.device import HAPPENED, Device, Event
from infinity.memory.disk import Disk, Extent, Priority, Ticket
from infinity.memory.traced import NO_LABEL, Label, TracedTicket, traced_copy
from infinity.plan.plan import LANES
from infinity.trace.recorder import NO_UNIT, Trace

DISK_LANES = {"disk_read": "read", "disk_write": "write"}
STALLS = ("disk_read", "disk_write", "update", "copy", "slot", "gradient", "norm")


class Lanes:
    """Counted movement over a device and, where there is one, a disk.

    Stalls are seconds the calling thread waited; only the training thread uses `stall`. A `label`
    says in the trace what is moved.
    """

    def __init__(self, device: Device, disk: Disk | None) -> None:
        self.device = device
        self.disk = disk
        self._lock = threading.Lock()
        self._moved = dict.fromkeys(LANES, 0)
        self._stall_s = dict.fromkeys(STALLS, 0.0)
        self._stalled = False
        self.trace: Trace | None = None  # see `follow`

    def follow(self, trace: Trace | None) -> None:
        """Record all movement, and stalls, in a trace from now on, or no more."""
        self.device.time_events(trace is not None)
        self.trace = trace

    def read(
        self,
        pieces: Sequence[tuple[Extent, Tensor]],
        priority: Priority = Priority.NORMAL,
        label: Label = NO_LABEL,
    ) -> Ticket:
        """Disk to RAM."""
        ticket = self._disk().read(pieces, priority)
        self._count("disk_read", pieces)
        trace = self.trace
        return ticket if trace is None else TracedTicket(ticket, trace, "disk_read", label)

    def write(
        self,
        pieces: Sequence[tuple[Extent, Tensor]],
        priority: Priority = Priority.BACKGROUND,
        label: Label = NO_LABEL,
    ) -> Ticket:
        """RAM to disk."""
        ticket = self._disk().write(pieces, priority)
        self._count("disk_write", pieces)
        trace = self.trace
        return ticket if trace is None else TracedTicket(ticket, trace, "disk_write", label)

    def copy_in(
        self, target: Tensor, source: Tensor, after: Event = HAPPENED, label: Label = NO_LABEL
    ) -> Event:
        """Host to device."""
        return self._copy("to_device", self.device.copy_in, target, source, after, label)

    def copy_out(
        self, target: Tensor, source: Tensor, after: Event = HAPPENED, label: Label = NO_LABEL
    ) -> Event:
        """Device to host, after the compute issued so far."""
        return self._copy("from_device", self.device.copy_out, target, source, after, label)

    def bring(
        self, target: Tensor, source: Tensor, after: Event = HAPPENED, label: Label = NO_LABEL
    ) -> Event:
        """Host to device, held up by no other copy: see `Device.bring`."""
        return self._copy("to_device", self.device.bring, target, source, after, label)

    def copy_back(
        self, target: Tensor, source: Tensor, after: Event = HAPPENED, label: Label = NO_LABEL
    ) -> Event:
        """Device to host, after `after` alone: see `Device.copy_back`."""
        return self._copy("from_device", self.device.copy_back, target, source, after, label)

    def _copy(
        self,
        lane: str,
        copy: Callable[[Tensor, Tensor, Event], Event],
        target: Tensor,
        source: Tensor,
        after: Event,
        label: Label,
    ) -> Event:
        if self.device.unified:
            return copy(target, source, after)
        self._add(lane, target.numel())
        trace = self.trace  # another thread may end it
        if trace is None:
            return copy(target, source, after)
        return traced_copy(trace, lane, copy, target, source, after, label)

    @contextmanager
    def stall(self, cause: str, unit: int = NO_UNIT) -> Iterator[None]:
        """Time a wait of the training thread; inside another stall it counts for that one."""
        if self._stalled:
            yield
            return
        self._stalled = True
        start = time.perf_counter_ns()
        try:
            yield
        finally:
            self._stalled = False
            end = time.perf_counter_ns()
            self._stall_s[cause] += (end - start) / 1e9
            if self.trace is not None:
                self.trace.add("stall", cause, unit, start, end)

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

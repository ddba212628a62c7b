"""Copies between tiers, with byte counters and stall timers by cause."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from torch import Tensor

from infinity.errors import TransferError
from infinity.optim.cpu import Piece
from infinity.plan.plan import DIRECTIONS
from infinity.profiling.trace_recorder import NO_UNIT, Trace
from infinity.storage.device import HAPPENED, Device, Event, merge_events
from infinity.storage.disk import Disk, DiskTicket
from infinity.storage.store import DeviceStore, HostStore, Pieces, Priority, Store
from infinity.types import Tier

# Identifies moved bytes in the trace: (index of the unit, name of the kind).
Label = tuple[int, str]
NO_LABEL: Label = (NO_UNIT, "other")


class TracedTicket:
    """Disk ticket that is recorded in the trace once, when it is found to be complete."""

    def __init__(self, ticket: DiskTicket, trace: Trace, direction: str, label: Label) -> None:
        self._ticket = ticket
        self._trace = trace
        self._direction = direction
        self._label = label
        # A list, since `pop` is atomic: two threads may find the request complete at once.
        self._unrecorded = [ticket.request]
        trace.watch(self)

    def done(self) -> bool:
        """Return True if the request is complete."""
        return self._ticket.done()

    def wait(self) -> None:
        """Block until the request is complete; if it failed, raise `TransferError` at each call."""
        try:
            self._ticket.wait()
        finally:
            self.note()

    def note(self) -> None:
        """Record the request if it is complete and was not recorded."""
        request = self._unrecorded[0] if self._unrecorded else None
        times = request.times_ns if request is not None else None
        if request is None or times is None:
            return
        with suppress(IndexError):
            self._unrecorded.pop()
            failed = {"failed": request.error} if request.error else None
            submitted, begin, end = times
            unit, kind = self._label
            nbytes = request.nbytes
            self._trace.add(
                self._direction, kind, unit, begin, end, nbytes, submitted=submitted, args=failed
            )

    def __del__(self) -> None:
        self.note()


def record(
    trace: Trace, direction: str, name: str, unit: int, event: Event, nbytes: int, submitted: int
) -> None:
    """Record an operation of the device that ends with `event`."""
    end: Any = event
    begin = getattr(event, "began", None)
    if begin is None:
        begin, end = submitted, time.perf_counter_ns()
    trace.add(direction, name, unit, begin, end, nbytes, submitted=submitted)


_DIRECTIONS = {
    (Tier.DISK, "read"): "disk_read",
    (Tier.DISK, "write"): "disk_write",
    (Tier.DEVICE, "read"): "from_device",
    (Tier.DEVICE, "write"): "to_device",
}
DISK_DIRECTIONS = {"disk_read": "read", "disk_write": "write"}


class StallCause(NamedTuple):
    """Cause of waits of the training thread, and its remedy; also in ARCHITECTURE.md."""

    meaning: str
    remedy: str


STALLS = {
    "disk_read": StallCause(
        "weights, or a saved tensor, were still being read from the drive",
        "more weights in RAM (`budget.host`), larger `prefetch_units`, another path in `nvme_path`",
    ),
    "disk_write": StallCause(
        "weights were needed before they were written, or tensors were saved faster than written",
        "as `disk_read`; `activations` on the host",
    ),
    "update": StallCause(
        "the unit was not updated yet, or a call (save, eval, `settle`) needs all updates",
        "more tokens a step, more optimizer state in RAM or on the device, `cpu.num_threads`",
    ),
    "copy": StallCause(
        "a copy between RAM and the device had not ended",
        "more weights on the device (`budget.device`), more tokens a micro-batch",
    ),
    "gather": StallCause(
        "another rank had not reached this point, or its bytes had not arrived",
        "batches of one size on every rank; faster links; more tokens a micro-batch",
    ),
    "slot": StallCause(
        "every slot was in use, or was being filled by an update",
        "a larger `prefetch_units` (more slots); drop graphs and aliases of weights",
    ),
    "gradient": StallCause(
        "gradients arrived faster than they were copied from the device, read or written",
        "gradients in RAM (`budget.host`); fewer micro-batches of more tokens",
    ),
    "norm": StallCause(
        "`step()` waited for the last gradients and their square sums",
        "as `gradient`; no step can avoid this wait",
    ),
}


class Transfers:
    """Copies between tiers, with byte counters and stall timers.

    Stalls are the seconds that the training thread waited; only that thread uses `stall`. A `label`
    names the moved bytes in the trace.
    """

    def __init__(self, device: Device, disk: Disk | None) -> None:
        self.device = device
        self.disk = disk
        host = HostStore(device)
        self.stores: dict[Tier, Store] = {
            Tier.DEVICE: host if device.unified else DeviceStore(device),
            Tier.HOST: host,
        }
        if disk is not None:
            self.stores[Tier.DISK] = disk
        self._lock = threading.Lock()
        self._moved = dict.fromkeys(DIRECTIONS, 0)
        self._stall_s = dict.fromkeys(STALLS, 0.0)
        self._is_stalled = False
        self.trace: Trace | None = None  # see `follow`

    def follow(self, trace: Trace | None) -> None:
        """Record all copies and stalls in a trace from now on; None stops it."""
        self.device.time_events(trace is not None)
        self.trace = trace

    def read(
        self, pieces: Pieces, priority: Priority = Priority.NORMAL, label: Label = NO_LABEL
    ) -> Event:
        """Read ranges of any tiers into buffers in RAM."""
        return self._move(pieces, lambda store, group: store.read(group, priority), label, "read")

    def write(
        self, pieces: Pieces, priority: Priority = Priority.BACKGROUND, label: Label = NO_LABEL
    ) -> Event:
        """Write buffers in RAM to ranges of any tiers; they must not change before it ends."""
        return self._move(pieces, lambda store, group: store.write(group, priority), label, "write")

    def _move(
        self, pieces: Pieces, submit: Callable[[Store, Pieces], Event], label: Label, op: str
    ) -> Event:
        """Start one request per tier, or per piece if the tier's store does not join pieces."""
        events: list[Event] = []
        for tier in dict.fromkeys(location.tier for location, _ in pieces):
            store = self.stores[tier]
            selected = [piece for piece in pieces if piece[0].tier is tier]
            for group in [selected] if store.joins else [[piece] for piece in selected]:
                submitted = time.perf_counter_ns()
                event = submit(store, group)
                direction = _DIRECTIONS.get((tier, op))
                if direction is not None:
                    nbytes = sum(location.nbytes for location, _ in group)
                    event = self._count_and_trace(direction, event, nbytes, submitted, label)
                events.append(event)
        return merge_events(events)

    def _count_and_trace(
        self, direction: str, event: Event, nbytes: int, submitted: int, label: Label
    ) -> Event:
        self.count(direction, nbytes)
        trace = self.trace  # read once: another thread may reset it
        if trace is None:
            return event
        if isinstance(event, DiskTicket):
            return TracedTicket(event, trace, direction, label)
        unit, kind = label
        record(trace, direction, kind, unit, event, nbytes, submitted)
        return event

    def copy_h2d(
        self, target: Tensor, source: Tensor, after: Event = HAPPENED, label: Label = NO_LABEL
    ) -> Event:
        """Copy from host to device."""
        return self._copy("to_device", self.device.copy_h2d, target, source, after, label)

    def copy_d2h(
        self, target: Tensor, source: Tensor, after: Event = HAPPENED, label: Label = NO_LABEL
    ) -> Event:
        """Copy from device to host, after the compute issued so far."""
        return self._copy("from_device", self.device.copy_d2h, target, source, after, label)

    def copy_h2d_unordered(
        self, target: Tensor, source: Tensor, after: Event = HAPPENED, label: Label = NO_LABEL
    ) -> Event:
        """Copy from host to device, ordered after no other copy."""
        return self._copy("to_device", self.device.copy_h2d_unordered, target, source, after, label)

    def copy_d2h_unordered(
        self, target: Tensor, source: Tensor, after: Event = HAPPENED, label: Label = NO_LABEL
    ) -> Event:
        """Copy from device to host, ordered after `after` alone."""
        return self._copy(
            "from_device", self.device.copy_d2h_unordered, target, source, after, label
        )

    def run_on_comm_stream(
        self, direction: str, start: Callable[[], Event], nbytes: int, after: Event = HAPPENED
    ) -> Event:
        """Start a transfer between ranks that overlaps compute; this rank receives `nbytes`."""
        self.count(direction, nbytes)
        return self.device.run_on_comm_stream(start, after)

    def update(self, pieces: Sequence[Piece], after: Event, unit: int) -> Event:
        """Start an update on the device over pieces of a unit, and return its end."""
        submitted = time.perf_counter_ns()
        event = self.device.update(pieces, after)
        trace = self.trace  # read once: another thread may reset it
        if trace is not None:
            record(trace, "update", "update", unit, event, 0, submitted)
        return event

    def _copy(
        self,
        direction: str,
        copy: Callable[[Tensor, Tensor, Event], Event],
        target: Tensor,
        source: Tensor,
        after: Event,
        label: Label,
    ) -> Event:
        if self.device.unified:
            return copy(target, source, after)
        submitted = time.perf_counter_ns() if self.trace is not None else 0
        event = copy(target, source, after)
        if not submitted:
            self.count(direction, target.numel())
            return event
        return self._count_and_trace(direction, event, target.numel(), submitted, label)

    @contextmanager
    def stall(self, cause: str, unit: int = NO_UNIT) -> Iterator[None]:
        """Time a wait of the training thread; a nested stall counts for the outer cause."""
        if self._is_stalled:
            yield
            return
        self._is_stalled = True
        start = time.perf_counter_ns()
        try:
            yield
        finally:
            self._is_stalled = False
            end = time.perf_counter_ns()
            self._stall_s[cause] += (end - start) / 1e9
            if self.trace is not None:
                self.trace.add("stall", cause, unit, start, end)

    def moved(self) -> dict[str, int]:
        """Return bytes per direction since the start."""
        with self._lock:
            return dict(self._moved)

    def stalled_s(self) -> dict[str, float]:
        """Return seconds waited per cause since the start."""
        return dict(self._stall_s)

    @property
    def stuck(self) -> TransferError | None:
        """Error of the first request not completed by the kernel in time; its buffer is lost."""
        return self.disk.stuck if self.disk is not None else None

    def disk_times_s(self) -> dict[str, dict[str, float]]:
        """Return the seconds that blocks were queued and in the device, per disk direction.

        Summed over blocks, many of which are in flight at the same time.
        """
        if self.disk is None:
            return {direction: {"queue": 0.0, "device": 0.0} for direction in DISK_DIRECTIONS}
        return {direction: self.disk.times_s(op) for direction, op in DISK_DIRECTIONS.items()}

    def count(self, direction: str, nbytes: int) -> None:
        """Add to the bytes moved in a direction."""
        with self._lock:
            self._moved[direction] += nbytes

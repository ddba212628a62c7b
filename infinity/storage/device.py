"""Interface between the engine and a compute device.

Operations are ordered by events, not by synchronization: a copy takes the event after which it
begins, and returns the event of its end. Compute is ordered by `compute_event` (the end of all
compute issued so far) and `compute_wait` (compute issued from now on begins after an event). On a
CPU the device is the host: copies are synchronous and every event has already happened.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from infinity.errors import MachineError
from infinity.optim.cpu import Piece
from infinity.profiling.trace_recorder import Stamp
from infinity.storage.host_arena import HostArena


class Event(Protocol):
    """Point in the order of copies or compute.

    The event of the end of a copy or an update may also be a `Stamp`, with a second one, `began`,
    of the start; see `Device.time_events`.
    """

    def done(self) -> bool:
        """Return True if it has happened. Never blocks."""

    def wait(self) -> None:
        """Block the host until it has happened."""


class CompletedEvent:
    """An event that has already happened."""

    def done(self) -> bool:
        return True

    def wait(self) -> None: ...


HAPPENED = CompletedEvent()


class AllOf:
    """Conjunction of several events."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = events

    def done(self) -> bool:
        return all(e.done() for e in self.events)

    def wait(self) -> None:
        for event in self.events:
            event.wait()


def merge_events(events: Sequence[Event]) -> Event:
    """Return one event for several; waiting waits for each, so that every error is raised."""
    if not events:
        return HAPPENED
    return events[0] if len(events) == 1 else AllOf(events)


def after_all(*events: Event) -> Event:
    """Return one event for several, like `merge_events`, but drop events that have happened."""
    flat_events = [e for event in events for e in getattr(event, "events", (event,))]
    pending = [e for e in flat_events if not e.done()]
    if not pending:
        return HAPPENED
    return pending[0] if len(pending) == 1 else AllOf(pending)


class SquareSums(Protocol):
    """Pending sums of squares."""

    def result(self) -> list[float]:
        """Block until the sums are available and return them; computed in fp64."""


class DeviceArena(Protocol):
    """Reserved device memory."""

    nbytes: int

    def view(self, offset: int, nbytes: int) -> Tensor:
        """Return a uint8 tensor over a range, with a separate storage."""


class Device(ABC):
    """Interface to the memory, copies and order of one compute device.

    Implement it for another accelerator. `CpuDevice` is the simplest implementation, `CudaDevice`
    (in `storage/cuda.py`) the complete one.

    Attributes:
        torch_device: The `torch.device`.
        unified: Device memory is host memory, so that nothing is copied.
        host_clock: Compute has finished when its call returns.
        warnings: Reasons why the device is slower than it should be.
    """

    torch_device: torch.device
    unified: bool
    host_clock = True
    warnings: Sequence[str] = ()

    @abstractmethod
    def reserve(self, nbytes: int) -> DeviceArena:
        """Reserve device memory.

        Args:
            nbytes: Size in bytes.

        Returns:
            The reserved memory.

        Raises:
            DoesNotFitError: The device does not have this memory.
        """

    @abstractmethod
    def memory_bytes(self) -> int | None:
        """Return the free bytes of device memory; None if `unified`."""

    @abstractmethod
    def copy_h2d(self, target: Tensor, source: Tensor, after: Event = HAPPENED) -> Event:
        """Copy host memory to the device. May return before the copy has ended.

        Args:
            target: Device memory, uint8, 1-D.
            source: Host memory, uint8, of the same size.
            after: The copy begins after this event.

        Returns:
            The end of the copy.
        """

    @abstractmethod
    def copy_d2h(self, target: Tensor, source: Tensor, after: Event = HAPPENED) -> Event:
        """Copy device memory to the host, after all compute issued so far. May return before the
        copy has ended.

        Args:
            target: Host memory, uint8, 1-D.
            source: Device memory, uint8, of the same size.
            after: The copy also begins after this event.

        Returns:
            The end of the copy.
        """

    def copy_d2h_unordered(self, target: Tensor, source: Tensor, after: Event = HAPPENED) -> Event:
        """Copy device memory to the host, after `after` only, not after compute. May return before
        the copy has ended.

        Args:
            target: Reserved host memory, uint8, 1-D, which outlives the copy.
            source: Reserved device memory, uint8, of the same size, which outlives the copy.
            after: The copy begins after this event.

        Returns:
            The end of the copy.
        """
        return self.copy_d2h(target, source, after)

    def copy_h2d_unordered(self, target: Tensor, source: Tensor, after: Event = HAPPENED) -> Event:
        """Copy host memory to the device on a separate stream, so that no other copy delays it. May
        return before the copy has ended.

        Args:
            target: Device memory, uint8, 1-D.
            source: Host memory, uint8, of the same size.
            after: The copy begins after this event.

        Returns:
            The end of the copy.
        """
        return self.copy_h2d(target, source, after)

    @abstractmethod
    def compute_event(self) -> Event:
        """Return the end of all compute issued so far."""

    @abstractmethod
    def compute_wait(self, event: Event) -> None:
        """Order compute issued from now on after `event`. Blocks the host only if the device
        cannot wait for the event itself.

        Args:
            event: An event of this device.
        """

    def sync_compute_stream(self) -> None:  # noqa: B027
        """Order compute of the calling thread, on any stream, after all compute so far.

        Raises:
            ResidencyError: A CUDA graph is being captured.
        """

    def why_no_kernels(self) -> str | None:
        """Return why the host updates optimizer state on this device; None if `update` works."""
        return "there are no kernels for this device"

    def update(self, pieces: Sequence[Piece], after: Event = HAPPENED) -> Event:
        """Run one optimizer step on device memory, in place. May return before it has ended.

        Args:
            pieces: Ranges of parameters, with their gradients, moments and settings.
            after: The update begins after this event.

        Returns:
            The end of the update.

        Raises:
            MachineError: There are no kernels; see `why_no_kernels`.
        """
        raise MachineError("an update was requested on the device", because=self.why_no_kernels())

    def begin_square_sums(self, tensors: Sequence[Tensor]) -> SquareSums:
        """Start summing the squares of device tensors, after all compute issued so far.

        Args:
            tensors: Device tensors.

        Returns:
            The pending sums, one per tensor, in fp64.

        Raises:
            MachineError: There are no kernels; see `why_no_kernels`.
        """
        raise MachineError(
            "sums of squares were requested on the device", because=self.why_no_kernels()
        )

    def attach_worker_thread(self) -> None:  # noqa: B027
        """Mark the calling thread as one that only copies and updates. Its operations are ordered
        by the compute stream of the computing thread.
        """

    def run_on_comm_stream(self, start: Callable[[], Event], after: Event = HAPPENED) -> Event:
        """Start a transfer between ranks that reads or writes device memory.

        Args:
            start: Starts the transfer and returns its end.
            after: The transfer begins after this event.

        Returns:
            The end of the transfer; nothing on the device waits for it implicitly.
        """
        after.wait()
        return start()

    def time_events(self, wanted: bool) -> None:  # noqa: B027
        """Turn timing of copies and updates on or off.

        Args:
            wanted: Whether to record times.
        """

    def stamp(self) -> int | Stamp:
        """Return the current point in the order of compute: nanoseconds, or a pending `Stamp`."""
        return time.perf_counter_ns()

    def synchronize(self) -> None:  # noqa: B027
        """Block until all copies and all compute have ended. Used only after an exception."""

    def pin(self, arena: HostArena) -> None:  # noqa: B027  (nothing to pin on a CPU)
        """Make host memory reachable by asynchronous copies.

        Args:
            arena: Memory to page-lock until `unpin` or `close`.
        """

    def unpin(self) -> None:  # noqa: B027
        """Undo every `pin`; memory stays valid and keeps its addresses."""

    def return_freed_memory(self) -> None:  # noqa: B027
        """Return device memory that torch caches to the driver."""

    def close(self) -> None:  # noqa: B027
        """Release pinned memory, streams and threads."""


class CpuDevice(Device):
    """The CPU: device memory is host memory."""

    torch_device = torch.device("cpu")
    unified = True

    def __init__(self) -> None:
        self.copier: Callable[[Tensor, Tensor], object] = Tensor.copy_

    def reserve(self, nbytes: int) -> HostArena:
        return HostArena(nbytes)

    def memory_bytes(self) -> int | None:
        return None

    def copy_h2d(self, target: Tensor, source: Tensor, after: Event = HAPPENED) -> Event:
        self.copier(target, source)
        return HAPPENED

    def copy_d2h(self, target: Tensor, source: Tensor, after: Event = HAPPENED) -> Event:
        self.copier(target, source)
        return HAPPENED

    def compute_event(self) -> Event:
        return HAPPENED

    def compute_wait(self, event: Event) -> None:
        event.wait()

"""The one interface through which the engine touches a compute device.

Ordering is by events, never by synchronising: a copy names the event it must come after, and
returns the event that marks its end. Compute is ordered by `compute_event` (all compute issued
so far) and `compute_wait` (compute issued from now on comes after an event). On a CPU the device
is the host: copies are immediate and every event has already happened.
"""

from __future__ import annotations

import contextlib
import mmap
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from infinity.common.sizes import format_size
from infinity.errors import MachineError
from infinity.optim.cpu import Piece
from infinity.profiling.trace_recorder import Stamp
from infinity.types import PAGE, Tier, round_up

# Host memory reserved once: exact size, page-aligned, huge pages where allowed.
#
# An arena is an anonymous mapping. It is never unmapped by hand: tensors made over it keep it
# alive, and it goes back to the system when the last of them dies. Forked children do not inherit
# the pages (`MADV_DONTFORK`): a DataLoader worker would double a private pool, and forking during
# O_DIRECT transfers into private memory is unsafe.


class HostArena:
    """One reserved mapping of `nbytes` (rounded up to pages), carved by offset."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = round_up(max(nbytes, PAGE), PAGE)
        try:
            self._map = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise MachineError(
                f"the system refused to reserve {format_size(self.nbytes)} of RAM: {error}",
                remedy="lower budget.host, or check `ulimit -v`",
            ) from error
        self._map.madvise(mmap.MADV_DONTFORK)
        with contextlib.suppress(OSError):  # kernels without transparent huge pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._carved = 0

    def view(self, offset: int, nbytes: int) -> Tensor:
        """A uint8 tensor over a range, with a storage object of its own."""
        assert 0 <= offset <= offset + nbytes <= self.nbytes, (offset, nbytes, self.nbytes)
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._map, dtype=torch.uint8, count=nbytes, offset=offset)

    def carve(self, nbytes: int) -> Tensor:
        """The next free range, page-aligned; reservation is planned, so it cannot run out."""
        start = self._carved
        self._carved = round_up(start + nbytes, PAGE)
        return self.view(start, nbytes)


def arena_for(sizes: Sequence[int]) -> HostArena:
    """An arena that exactly holds page-aligned ranges of these sizes."""
    return HostArena(sum(round_up(size, PAGE) for size in sizes))


# How much of each tier the engines of this process have reserved.
#
# The one process-wide record of the library: budgets belong to the process, as its memory does, so
# a second engine must see what the first one took. It holds numbers only, and a dead engine's line
# vanishes with it.


@dataclass(frozen=True)
class _Taken:
    tier_bytes: Mapping[Tier, int]
    device: torch.device
    unified: bool
    promised: bool


class Reservations:
    """Bytes per tier, by owner."""

    def __init__(self) -> None:
        self._taken: weakref.WeakKeyDictionary[object, _Taken] = weakref.WeakKeyDictionary()

    def take(
        self,
        owner: object,
        tier_bytes: Mapping[Tier, int],
        device: Device,
        *,
        promised: bool = False,
    ) -> None:
        """Record the reservation of an engine on `device`; `promised` bytes are not taken yet."""
        where = device.torch_device
        self._taken[owner] = _Taken(dict(tier_bytes), where, device.unified, promised)

    def release(self, owner: object) -> None:
        """Forget it; idempotent."""
        self._taken.pop(owner, None)

    def ram(self) -> int:
        """Bytes of RAM that all engines of the process hold."""
        return sum(
            one.tier_bytes.get(Tier.HOST, 0) + one.unified * one.tier_bytes.get(Tier.DEVICE, 0)
            for one in self._taken.values()
        )

    def total(self, tier: Tier) -> int:
        """Bytes of a tier that they hold; those of all devices are one tier here."""
        return sum(one.tier_bytes.get(tier, 0) for one in self._taken.values())

    def on_device(self, device: Device, *, only_real: bool = False) -> int:
        """Return bytes of `device` that its engines hold, with or without promised ones."""
        return sum(
            one.tier_bytes.get(Tier.DEVICE, 0)
            for one in self._taken.values()
            if one.device == device.torch_device and not (only_real and one.promised)
        )


PROCESS = Reservations()


class Event(Protocol):
    """Point in the order of copies or compute.

    An event that ends a copy or an update may also be a `Stamp`, and have another, `began`, of its
    start; see `Device.time_events`.
    """

    def done(self) -> bool:
        """Return True if it has happened. Never blocks."""

    def wait(self) -> None:
        """Block the host until it has happened."""


class Happened:
    """An event that lies in the past."""

    def done(self) -> bool:
        """Always true."""
        return True

    def wait(self) -> None:
        """Returns at once."""


HAPPENED = Happened()


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
    single = [e for event in events for e in getattr(event, "events", (event,))]
    open_events = [e for e in single if not e.done()]
    if not open_events:
        return HAPPENED
    return open_events[0] if len(open_events) == 1 else AllOf(open_events)


class SquareSums(Protocol):
    """Sums of squares that a device was asked for."""

    def result(self) -> list[float]:
        """The sums, in fp64; waits for them."""


class DeviceArena(Protocol):
    """Reserved device memory."""

    nbytes: int

    def view(self, offset: int, nbytes: int) -> Tensor:
        """A uint8 device tensor over a range, with a storage object of its own."""


class Device(ABC):
    """Interface to the memory, copies and order of one compute device.

    Implement it for another accelerator. `CpuDevice` is the simplest implementation, `CudaDevice`
    (in `storage/cuda.py`) the complete one.

    Attributes:
        torch_device: The `torch.device`.
        unified: Device memory is host memory, and nothing is copied.
        host_clock: Compute has finished when its call returns.
        warnings: Reasons why the device is slower than it should be.
    """

    torch_device: torch.device
    unified: bool  # device memory is host memory: nothing needs copying
    host_clock = True  # compute is over when its call returns
    warnings: Sequence[str] = ()  # what is slower than it should be, and why

    @abstractmethod
    def reserve(self, nbytes: int) -> DeviceArena:
        """Reserve device memory.

        Args:
            nbytes: Bytes.

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
        """Copy device memory to the host, after all compute issued so far. May return early.

        Args:
            target: Host memory, uint8, 1-D.
            source: Device memory, uint8, of the same size.
            after: The copy begins after this event, too.

        Returns:
            The end of the copy.
        """

    def copy_d2h_unordered(self, target: Tensor, source: Tensor, after: Event = HAPPENED) -> Event:
        """Copy device memory that no compute touches to the host, after `after` alone. May return
        early.

        Args:
            target: Reserved host memory, uint8, 1-D, which outlives the copy.
            source: Reserved device memory, uint8, of the same size, which outlives the copy.
            after: The copy begins after this event.

        Returns:
            The end of the copy.
        """
        return self.copy_d2h(target, source, after)

    def copy_h2d_unordered(self, target: Tensor, source: Tensor, after: Event = HAPPENED) -> Event:
        """Copy host memory to the device on a stream that no other copy to the device delays.

        Args:
            target: Device memory, uint8, 1-D.
            source: Host memory, uint8, of the same size.
            after: The copy begins after this event.

        Returns:
            The end of the copy. May return early.
        """
        return self.copy_h2d(target, source, after)

    @abstractmethod
    def compute_event(self) -> Event:
        """Return the end of all compute issued so far."""

    @abstractmethod
    def compute_wait(self, event: Event) -> None:
        """Order compute issued from now on after `event`. Blocks the host only if it must.

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
        """Run one optimizer step on device memory, in place. May return early.

        Args:
            pieces: Ranges of parameters, with their gradients, moments and settings.
            after: The update begins after this event.

        Returns:
            The end of the update.

        Raises:
            MachineError: There are no kernels; see `why_no_kernels`.
        """
        raise MachineError("an update was asked of the device", because=self.why_no_kernels())

    def begin_square_sums(self, tensors: Sequence[Tensor]) -> SquareSums:
        """Start to sum the squares of device tensors, after all compute issued so far.

        Args:
            tensors: Device tensors.

        Returns:
            The sums, in fp64, when they are asked for.

        Raises:
            MachineError: There are no kernels; see `why_no_kernels`.
        """
        raise MachineError("square sums were asked of the device", because=self.why_no_kernels())

    def attach_worker_thread(self) -> None:  # noqa: B027
        """Mark the calling thread as one that computes nothing: its compute is that of other
        threads.
        """

    def run_on_comm_stream(self, start: Callable[[], Event], after: Event = HAPPENED) -> Event:
        """Start a transfer between ranks that reads or writes device memory.

        Args:
            start: Starts the transfer and returns its end.
            after: The transfer begins after this event.

        Returns:
            The end of the transfer, for which nothing on the device waits implicitly.
        """
        after.wait()
        return start()

    def time_events(self, wanted: bool) -> None:  # noqa: B027
        """Turn the recording of times of copies and updates on or off.

        Args:
            wanted: Whether to record.
        """

    def stamp(self) -> int | Stamp:
        """Return the time in the order of compute: nanoseconds, or an object with them later."""
        return time.perf_counter_ns()

    def synchronize(self) -> None:  # noqa: B027
        """Wait for all copies and all compute. Used after an exception only."""

    def pin(self, arena: HostArena) -> None:  # noqa: B027  (a CPU has nothing to pin)
        """Make host memory reachable by asynchronous copies.

        Args:
            arena: Memory to page-lock; it stays so until `unpin` or `close`.
        """

    def unpin(self) -> None:  # noqa: B027
        """Undo every `pin`; no memory moves."""

    def return_freed_memory(self) -> None:  # noqa: B027
        """Return device memory that torch caches to the driver."""

    def close(self) -> None:  # noqa: B027
        """Release pinned memory, streams and threads."""


class CpuDevice(Device):
    """The host itself."""

    torch_device = torch.device("cpu")
    unified = True

    def __init__(self) -> None:
        self.copier: Callable[[Tensor, Tensor], object] = Tensor.copy_

    def reserve(self, nbytes: int) -> HostArena:
        """RAM, like any other."""
        return HostArena(nbytes)

    def memory_bytes(self) -> int | None:
        """None: the device's memory is the host's."""
        return None

    def copy_h2d(self, target: Tensor, source: Tensor, after: Event = HAPPENED) -> Event:
        """Copies at once."""
        self.copier(target, source)
        return HAPPENED

    def copy_d2h(self, target: Tensor, source: Tensor, after: Event = HAPPENED) -> Event:
        """Copies at once."""
        self.copier(target, source)
        return HAPPENED

    def compute_event(self) -> Event:
        """Compute on a CPU is over when the call returns."""
        return HAPPENED

    def compute_wait(self, event: Event) -> None:
        """Compute has no order of its own: the host waits."""
        event.wait()

"""Fake accelerator on a CPU, which detects missing synchronization without a GPU.

Its memory is separate from the host's, and copies run later, on worker threads, in a seeded order.
Compute runs synchronously on the calling thread, as torch CPU operations over "device" tensors.
Until a copy ends its target holds poison (0xFF bytes: NaN in every float type), and a copy reads
its source only when it runs, so a source that is reused too early yields wrong bytes. `violations`
collects broken rules.

[Note: memory]
On CUDA a copy in flight does not keep its memory alive: freed memory may be reused at once. So a
copy holds no reference here either. When it runs, its memory must still be alive: an arena through
any reference, other device memory through its storage. Copies to or from pageable host memory are
not asynchronous on CUDA: they are forbidden, except those of `PAGEABLE_COPIERS`, which are waited
for at once.
"""

from __future__ import annotations

import ctypes
import heapq
import mmap
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from infinity.errors import DoesNotFitError
from infinity.optim.cpu import CpuKernels, Piece
from infinity.optim.moments import Moment
from infinity.storage.device import HAPPENED, Device, Event, SquareSums
from infinity.storage.host_arena import HostArena

_RETRY_S = 1e-3  # polling interval of jobs that wait for an event of another device
_TIMEOUT_S = 120.0  # timeout, so that a bug of the fake hangs one test and not all that follow

# Functions that may copy to and from pageable memory: before training, and where a user reads or
# sets values. (Calibration measures both kinds.)
PAGEABLE_COPIERS = {
    ("infinity.training.initial_write", "_write_chunk"),
    ("infinity.training.initial_write", "_write_frozen"),
    ("infinity.checkpoint.durability", "load_memory_tiers"),
    ("infinity.offload.state", "read_shard"),
    ("infinity.offload.state", "write_shard"),
    ("infinity.offload.gradients", "_read"),
    ("infinity.profiling.processor_rates", "copy_in"),
    ("infinity.profiling.processor_rates", "copy_out"),
}
FORWARDING_MODULES = {
    "infinity.storage.device",
    "infinity.storage.store",
    "infinity.storage.staging",
    "infinity.offload.transfers",
}
# These copy to and from a buffer of their caller.
_STAGING = {("infinity.offload.state", "stage"), ("infinity.offload.state", "send")}


@dataclass(frozen=True)
class Range:
    """Reserved memory; `mapping` is alive for as long as a tensor over it."""

    first: int
    end: int
    mapping: weakref.ref[mmap.mmap]

    @classmethod
    def of(cls, arena: HostArena) -> Range:
        first = arena.view(0, arena.nbytes).data_ptr()
        return cls(first, first + arena.nbytes, weakref.ref(arena._map))


def range_of(tensor: Tensor, ranges: Iterable[Range]) -> Range | None:
    """Return the live range that contains a tensor."""
    first = tensor.data_ptr()
    end = first + tensor.numel() * tensor.element_size()
    matches = (r for r in ranges if r.first <= first and end <= r.end and r.mapping() is not None)
    return next(matches, None)


class FakeStamp:
    """Timestamp that is None until it is reached."""

    def __init__(self) -> None:
        self.at_ns: int | None = None

    def time_ns(self) -> int | None:
        return self.at_ns


class FakeEvent(FakeStamp):
    """Event set at the end of its copy, with the times of its start and end."""

    def __init__(self, hasten: Callable[[FakeEvent], None] | None = None) -> None:
        super().__init__()
        self._set = threading.Event()
        self.began = FakeStamp()
        self._hasten = hasten
        self.is_wanted = False  # a thread waits for it

    def begin(self) -> None:
        self.began.at_ns = time.perf_counter_ns()

    def done(self) -> bool:
        return self._set.is_set()

    def wait(self) -> None:
        if self._hasten is not None and not self.done():
            self._hasten(self)
        end = time.monotonic() + _TIMEOUT_S
        while not self._set.wait(0.1):
            assert time.monotonic() < end, "a copy of the fake device never ends"

    def set(self) -> None:
        self.at_ns = time.perf_counter_ns()
        self._set.set()


@dataclass(order=True)
class _Job:
    """Entry of the queue: earliest time, predecessor, action, and the event of its end."""

    due: float
    number: int
    after: Event = field(compare=False)
    run: Callable[[], None] = field(compare=False)
    event: FakeEvent = field(compare=False)
    was_early: bool = field(default=False, compare=False)  # came up before its predecessor ended


class FakeSums:
    """Square sums, which are available at once since compute is synchronous."""

    def __init__(self, sums: list[float]) -> None:
        self.sums = sums

    def result(self) -> list[float]:
        return self.sums


class FakeAccelerator(Device):
    """Fake accelerator; see the module's docstring.

    Args:
        max_delay_s: Upper bound of the delay of a copy.
        on_demand: Run a copy at once when a thread waits for it. Then even delays of minutes cost
            no time, and no copy ends in time by chance if the wait for it is missing.
    """

    torch_device = torch.device("cpu")
    unified = False

    def __init__(
        self,
        seed: int = 0,
        *,
        max_delay_s: float = 0.002,
        memory: int = 1 << 32,
        workers: int = 2,
        kernels: bool = False,
        on_demand: bool = False,
    ) -> None:
        self._random = random.Random(seed)
        self._max_delay_s = max_delay_s
        self._memory = memory
        self._kernels = CpuKernels(num_threads=1) if kernels else None
        self.num_copies = 0
        self.num_updates = 0
        self.reserved: list[Range] = []
        self.pinned: list[Range] = []
        self.violations: list[str] = []
        self._queue: list[_Job] = []
        self._on_demand = on_demand
        self._changed = threading.Condition()
        self._closing = False
        self._writing: dict[int, FakeEvent] = {}
        self._threads = [
            threading.Thread(target=self._work, name=f"fake-copy-{i}", daemon=True)
            for i in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def reserve(self, nbytes: int) -> HostArena:
        if nbytes > self._memory:
            raise DoesNotFitError(f"the fake device has {self._memory} bytes, not {nbytes}")
        self._memory -= nbytes
        arena = HostArena(nbytes)
        self.reserved.append(Range.of(arena))
        return arena

    def memory_bytes(self) -> int | None:
        return self._memory

    def copy_h2d(self, target: Tensor, source: Tensor, after: Event = HAPPENED) -> Event:
        return self._copy("copy in", target, source, after)

    def copy_d2h(self, target: Tensor, source: Tensor, after: Event = HAPPENED) -> Event:
        return self._copy("copy out", target, source, after)

    def copy_d2h_unordered(self, target: Tensor, source: Tensor, after: Event = HAPPENED) -> Event:
        return self._copy("copy back", target, source, after)

    def _copy(self, name: str, target: Tensor, source: Tensor, after: Event) -> Event:
        assert target.dtype is torch.uint8
        assert source.dtype is torch.uint8
        assert target.numel() == source.numel()
        event = self._new_event()
        device_tensor, host_tensor = (target, source) if name == "copy in" else (source, target)
        references = (
            [self._device_memory(device_tensor), self._host_memory(host_tensor, name)]
            if target.numel()
            else []
        )
        start = target.data_ptr()
        target, source = alias(target), alias(source)
        previous = self._writing.get(start)
        if previous is not None and not previous.done() and not after_covers(after, previous):
            self.violations.append("a copy into a range overlaps an earlier one in flight")

        def run() -> None:
            event.begin()
            alive = [reference() for reference in references]
            if any(memory is None for memory in alive):
                self.violations.append(f"{name}: memory was let go before the copy was over")
            else:
                target.copy_(source)
            del alive
            event.set()

        if after.done():
            target.fill_(0xFF)  # a read before the wait gets NaN
        self._submit(run, event, [start], after)
        return event

    def _device_memory(self, tensor: Tensor) -> Callable[[], object | None]:
        """Return a function that references device memory during the copy; None if it was freed."""
        found = range_of(tensor, self.reserved)
        if found is not None:
            return found.mapping
        storage = StorageWeakRef(tensor.untyped_storage())
        return lambda: torch.UntypedStorage._new_with_weak_ptr(storage.cdata)

    def _host_memory(self, tensor: Tensor, name: str) -> Callable[[], object | None]:
        """Like `_device_memory`, for host memory.

        A copy of pageable memory is complete, on its host side, before the call returns.
        """
        found = range_of(tensor, self.pinned)
        if found is not None:
            return found.mapping
        caller = asker()
        if caller is not None and caller not in PAGEABLE_COPIERS:
            self.violations.append(f"{name}: host memory is not pinned, for {'.'.join(caller)}")
        return lambda: tensor

    def _submit(
        self, run: Callable[[], None], event: FakeEvent, starts: Iterable[int], after: Event
    ) -> None:
        """Queue an action that runs after `after` and writes memory at `starts` until `event`."""
        with self._changed:
            due = time.perf_counter() + self._random.random() * self._max_delay_s
            self.num_copies += 1
            heapq.heappush(self._queue, _Job(due, self.num_copies, after, run, event))
            self._writing.update(dict.fromkeys(starts, event))
            self._changed.notify()

    def _new_event(self) -> FakeEvent:
        return FakeEvent(self._hasten if self._on_demand else None)

    def _hasten(self, event: Event) -> None:
        """Make the job of an event, and all jobs that it depends on, due now."""
        with self._changed:
            jobs = {id(job.event): job for job in self._queue}
            wanted = [event]
            while wanted:
                current = wanted.pop()
                if isinstance(current, FakeEvent):
                    current.is_wanted = True  # a worker may hold its job
                job = jobs.pop(id(current), None)
                if job is not None:
                    job.due *= job.was_early
                    wanted += parts_of(job.after)
            heapq.heapify(self._queue)
            self._changed.notify_all()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            if job.after.done():
                job.run()
                self._retry_waiting()
            else:  # its predecessor may be behind it in the queue
                self._requeue(job)
            del job  # it refers to the target's storage, which would pin the slot

    def _requeue(self, job: _Job) -> None:
        with self._changed:
            job.due, job.was_early = time.perf_counter() + _RETRY_S, True
            heapq.heappush(self._queue, job)
            if job.event.is_wanted:
                self._hasten(job.event)

    def _retry_waiting(self) -> None:
        """Make jobs due that were waiting for a predecessor."""
        with self._changed:
            for job in self._queue:
                job.due *= not job.was_early
            heapq.heapify(self._queue)
            self._changed.notify_all()

    def _next(self) -> _Job | None:
        """Return the next job that is due; None after `close`."""
        with self._changed:
            while self._queue or not self._closing:
                timeout_s = 0.1  # a second Ctrl-C may come between a push and its notify
                if self._queue:
                    timeout_s = min(timeout_s, self._queue[0].due - time.perf_counter())
                    if timeout_s <= 0:
                        return heapq.heappop(self._queue)
                self._changed.wait(timeout_s)
            return None

    # --- optimizer kernels: those of the CPU on "device" memory, run by the queue ---

    def why_no_kernels(self) -> str | None:
        return "this fake device was made without" if self._kernels is None else None

    def update(self, pieces: Sequence[Piece], after: Event = HAPPENED) -> Event:
        assert self._kernels is not None
        kernels, event = self._kernels, self._new_event()
        pieces = [aliased(piece) for piece in pieces]
        written = [bytes_of(t) for piece in pieces for t in written_by(piece)]
        values = []
        if after.done():  # else copies into them may be in flight, and have poisoned them
            values = [tensor.clone() for tensor in written]
            for tensor in written:
                tensor.fill_(0xFF)  # a read before the wait gets NaN

        def run() -> None:
            event.begin()
            for tensor, value in zip(written, values, strict=bool(values)):
                tensor.copy_(value)
            kernels.update_all(pieces)
            event.set()

        self._submit(run, event, [tensor.data_ptr() for tensor in written], after)
        self.num_updates += 1
        return event

    def begin_square_sums(self, tensors: Sequence[Tensor]) -> SquareSums:
        assert self._kernels is not None
        return FakeSums([self._kernels.square_sum(tensor) for tensor in tensors])

    def compute_event(self) -> Event:
        return HAPPENED

    def compute_wait(self, event: Event) -> None:
        event.wait()

    def synchronize(self) -> None:
        for event in list(self._writing.values()):
            event.wait()

    def pin(self, arena: HostArena) -> None:
        self.pinned.append(Range.of(arena))

    def close(self) -> None:
        with self._changed:
            self._closing = True
            for job in self._queue:
                job.due *= not self._on_demand
            heapq.heapify(self._queue)
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        if self._kernels is not None:
            self._kernels.close()


def bytes_of(tensor: Tensor) -> Tensor:
    """Return a view of a tensor's bytes."""
    return tensor.view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def written_by(piece: Piece) -> list[Tensor]:
    """Return the tensors that an update of a piece writes."""
    stored = [t for moment in piece.moments for t in (moment.values, moment.scales)]
    return [t for t in (piece.weight, piece.master_state, *stored) if t is not None]


def aliased(piece: Piece) -> Piece:
    """Return the piece with tensors that hold no reference to its memory."""

    def alias_of(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else alias(bytes_of(tensor)).view(tensor.dtype)

    return piece._replace(
        weight=alias_of(piece.weight),
        master_state=alias_of(piece.master_state),
        gradient=alias_of(piece.gradient),
        moments=[Moment(alias_of(m.values), alias_of(m.scales), m.format) for m in piece.moments],
    )


def asker() -> tuple[str, str] | None:
    """Return the module and function of the engine that requested a copy; None for the test."""
    frame = sys._getframe(1)
    while frame is not None:
        call = frame.f_globals["__name__"], frame.f_code.co_name
        if (
            call[0].startswith("infinity.")
            and call[0] not in FORWARDING_MODULES
            and call not in _STAGING
        ):
            return call
        frame = frame.f_back
    return None


def alias(tensor: Tensor) -> Tensor:
    """Return a tensor over the same bytes that does not keep them alive."""
    raw = (ctypes.c_uint8 * tensor.numel()).from_address(tensor.data_ptr())
    return torch.frombuffer(raw, dtype=torch.uint8) if tensor.numel() else tensor


def parts_of(after: Event) -> Iterator[Event]:
    """Return the single events of an event that may combine several."""
    for part in getattr(after, "events", (after,)):
        yield from (part,) if part is after else parts_of(part)


def after_covers(after: Event, event: Event) -> bool:
    """Return whether waiting for `after` implies `event`."""
    parts = getattr(after, "events", None)
    return after is event or (parts is not None and event in parts)

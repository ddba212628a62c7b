"""A device that differs from the host on a CPU: memory of its own, and copies that really
happen later, on worker threads, in a seeded order. Finds missing waits without a GPU.

Compute runs on the calling thread, as torch CPU operations over "device" tensors, so the end of
compute is always now; what is asynchronous are the copies. Until a copy ends its target holds
poison (0xFF bytes: NaN in every float type), and a copy reads its source only when it runs, so a
source that is reused too early delivers the wrong bytes. `violations` collects broken rules.
"""

from __future__ import annotations

import ctypes
import heapq
import random
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from infinity.errors import DoesNotFitError
from infinity.memory.device import HAPPENED, Device, Event
from infinity.memory.host import HostArena


class FakeEvent:
    """Set when its copy has ended."""

    def __init__(self) -> None:
        self._set = threading.Event()

    def done(self) -> bool:
        return self._set.is_set()

    def wait(self) -> None:
        while not self._set.wait(0.1):
            pass

    def set(self) -> None:
        self._set.set()


class FakeAccelerator(Device):
    """See the module's docstring. `max_delay_s` bounds how late a copy may start."""

    torch_device = torch.device("cpu")
    unified = False

    def __init__(
        self, seed: int = 0, *, max_delay_s: float = 0.002, memory: int = 1 << 32, workers: int = 2
    ) -> None:
        self._random = random.Random(seed)
        self._max_delay_s = max_delay_s
        self._memory = memory
        self.num_copies = 0
        self.pinned: list[HostArena] = []
        self.violations: list[str] = []
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
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
        return HostArena(nbytes)

    def memory_bytes(self) -> int | None:
        return self._memory

    def copy_in(self, target: Tensor, source: Tensor, after: Event = HAPPENED) -> Event:
        return self._copy(target, source, after)

    def copy_out(self, target: Tensor, source: Tensor, after: Event = HAPPENED) -> Event:
        return self._copy(target, source, after)

    def _copy(self, target: Tensor, source: Tensor, after: Event) -> Event:
        assert target.dtype is torch.uint8
        assert source.dtype is torch.uint8
        assert target.numel() == source.numel()
        event = FakeEvent()
        start = target.data_ptr()
        target = alias(target)  # as on a GPU, a copy under way is no reference to a residency
        previous = self._writing.get(start)
        if previous is not None and not previous.done() and not after_covers(after, previous):
            self.violations.append("a copy into a range overlaps an earlier one in flight")

        def run() -> None:
            after.wait()
            target.copy_(source)
            event.set()

        if after.done():
            target.fill_(0xFF)  # whoever reads before waiting gets NaN
        with self._changed:
            due = time.perf_counter() + self._random.random() * self._max_delay_s
            self.num_copies += 1
            heapq.heappush(self._queue, (due, self.num_copies, run))
            self._writing[start] = event  # not before: an interruption may strike above
            self._changed.notify()
        return event

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closing:
                    self._changed.wait()
                if not self._queue:
                    return
                due, _, run = heapq.heappop(self._queue)
            time.sleep(max(0.0, due - time.perf_counter()))
            run()
            del run  # it refers to the target's storage, which would pin the slot

    def compute_event(self) -> Event:
        return HAPPENED

    def compute_wait(self, event: Event) -> None:
        event.wait()

    def synchronize(self) -> None:
        for event in list(self._writing.values()):
            event.wait()

    def pin(self, arena: HostArena) -> None:
        self.pinned.append(arena)

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()


def alias(tensor: Tensor) -> Tensor:
    """The same bytes under a storage of their own; does not keep them alive."""
    raw = (ctypes.c_uint8 * tensor.numel()).from_address(tensor.data_ptr())
    return torch.frombuffer(raw, dtype=torch.uint8) if tensor.numel() else tensor


def after_covers(after: Event, event: Event) -> bool:
    """Whether waiting for `after` implies `event`."""
    parts = getattr(after, "events", None)
    return after is event or (parts is not None and event in parts)

"""Background thread that accumulates gradients once their device-to-host copies complete.

[Note: one queue]
Tasks run in the order in which they were queued: the order of additions does not depend on when
copies end. Each waits for its own events first. The training thread only queues; it waits for space
in the staging buffer (`reserve`), and for results of queued tasks (`drain`).
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from infinity.errors import EngineFailedError, TransferError
from infinity.offload.transfers import Transfers
from infinity.plan.budget import largest_window, num_windows
from infinity.plan.plan import Plan
from infinity.storage.device import Event
from infinity.storage.staging import host_buffer
from infinity.storage.store import Range
from infinity.types import round_up

# Gradients that rest where nobody computes are summed in windows: RAM buffers of a unit's size.
#
# A window is written back when its unit is complete, and read back when the next micro-batch
# reaches the unit. Used by one thread at a time: whoever sums (`gradients.py`).


Stall = Callable[[str], AbstractContextManager[None]]


def untimed(cause: str) -> AbstractContextManager[None]:
    """Stall timer for a thread that no other waits for."""
    return nullcontext()


@dataclass(eq=False)
class _Window:
    """RAM buffer for the gradients of one unit that are stored on disk."""

    buffer: Tensor
    unit: int | None = None
    last_unit: int | None = None  # whose bytes the write in flight saves
    ticket: Event | None = None  # the read that fills it, or the write that saves it


class GradientWindows:
    """RAM buffers for the gradients of units whose `ranges` cannot be added to.

    `stall` times waits, by cause.
    """

    def __init__(
        self,
        plan: Plan,
        transfers: Transfers,
        dtype: torch.dtype,
        ranges: Mapping[int, Range],
        stall: Stall,
    ) -> None:
        self.ranges = ranges
        self._plan = plan
        self._transfers = transfers
        self._dtype = dtype
        self._stall = stall
        self._saved: set[int] = set()  # units whose places hold gradients of this window
        self._expected: list[int] = []  # whose reads were asked for, and could not begin
        self._arrived: dict[int, int] = {}  # unit -> arrivals since its window was opened
        nbytes = largest_window(plan)
        self._windows = [_Window(host_buffer(nbytes)) for _ in range(num_windows(plan))]

    def forget(self) -> None:
        """Free the buffers, once nothing moves."""
        self._windows.clear()

    def write_once(self) -> None:
        """Write every range before training: the first write of reserved space is slow."""
        for turn, unit in enumerate(self.ranges):
            window = self._windows[turn % len(self._windows)]
            if window.ticket is not None:
                window.ticket.wait()
            self._send(unit, window)
        self.settle()

    def expect(self, unit: int) -> None:
        """Start to read the unit's saved gradients, which are needed soon.

        In the order of calls: a buffer read before its turn would have to be evicted for those that
        come first, and read again.
        """
        if unit in self._saved and self._find(unit) is None and unit not in self._expected:
            self._expected.append(unit)
        for window in self._windows:
            may_open = window.unit is None and (window.ticket is None or window.ticket.done())
            if self._expected and may_open:
                self._open(self._expected.pop(0), window)

    def range(self, unit: int) -> Tensor:
        """Return the unit's flat range in RAM; it may be written until the next call."""
        window = self._find(unit)
        if window is None:
            if unit in self._expected:
                self._expected.remove(unit)
            free = [w for w in self._windows if w.unit is None]
            if not free:
                oldest = self._windows[0]
                assert oldest.unit is not None
                self._save(oldest.unit)
                free = [oldest]
            self._open(unit, free[0])
            window = free[0]
        self._wait(window)
        # Most recently used last.
        self._windows.sort(key=lambda w: w is window)
        nbytes = self._plan.gradient_bytes(self._plan.local_units[unit])
        return window.buffer[:nbytes].view(self._dtype)

    def count(self, unit: int) -> None:
        """Count a gradient in the unit's range; the last one has the buffer written back."""
        self._arrived[unit] = self._arrived.get(unit, 0) + 1
        expected = len(self._plan.local_units[unit].trained_segments) * self._plan.ranks
        if self._arrived[unit] == expected:
            self._save(unit)

    def save(self) -> None:
        """Start to write back every open buffer."""
        self._expected.clear()
        for window in list(self._windows):
            if window.unit is not None:
                self._save(window.unit)

    @property
    def writing(self) -> bool:
        """Return True while some buffer may still be written."""
        return any(w.unit is None and w.ticket is not None for w in self._windows)

    def settle(self, unit: int | None = None) -> None:
        """Wait for writes in flight of closed buffers: of one unit, or of all."""
        for window in self._windows:
            wanted = unit is None or window.last_unit == unit
            if window.unit is None and wanted:
                self._wait(window)  # a write that failed stays, and fails whoever asks again

    def reset(self) -> None:
        """Discard all gradients, after waiting for requests in flight."""
        for window in self._windows:
            ticket, window.ticket, window.unit = window.ticket, None, None
            if ticket is not None:
                with suppress(TransferError):
                    ticket.wait()
        self._saved.clear()
        self._expected.clear()
        self._arrived.clear()

    def _find(self, unit: int) -> _Window | None:
        return next((w for w in self._windows if w.unit == unit), None)

    def _wait(self, window: _Window) -> None:
        if window.ticket is not None:
            with self._stall("gradient"):
                window.ticket.wait()
            window.ticket = None

    def _open(self, unit: int, window: _Window) -> None:
        self._wait(window)
        window.unit = unit
        self._arrived[unit] = 0
        if unit in self._saved:
            self.settle(unit)  # an earlier window may still be writing it
            location = self.ranges[unit]
            piece = location, window.buffer[: location.nbytes]
            window.ticket = self._transfers.read([piece], label=(unit, "gradient"))

    def _save(self, unit: int) -> None:
        """Write the buffer back; it is free when the write has ended."""
        window = self._find(unit)
        assert window is not None
        self._wait(window)
        window.unit, window.last_unit = None, unit
        if not self._arrived.get(unit):
            return  # expected, but nothing came: at rest is what was read
        self._send(unit, window)
        self._saved.add(unit)
        self._arrived[unit] = 0

    def _send(self, unit: int, window: _Window) -> None:
        """Start to write the buffer to its unit's range."""
        location, window.last_unit = self.ranges[unit], unit
        piece = location, window.buffer[: location.nbytes]
        window.ticket = self._transfers.write([piece], label=(unit, "gradient"))


@dataclass(eq=False, slots=True)
class _Task:
    """A function to run after events.

    `source` is kept alive until they have happened, and the bytes `first` to `end` of the staging
    buffer are reserved until it has run.
    """

    run: Callable[[], None]
    after: Sequence[Event]
    source: Tensor | None
    first: int
    end: int
    dropped: bool = False
    over: threading.Event = field(default_factory=threading.Event)


class GradientWorker:
    """The thread, its queue, and the `staging` buffer (uint8, pinned) for copies.

    An error of a task is raised by `check` and `drain`, until `reset`; later tasks do not run.
    """

    def __init__(self, transfers: Transfers, staging: Tensor) -> None:
        self._transfers = transfers
        self._staging = staging
        self._tasks: deque[_Task] = deque()  # not over; the thread takes them out
        self._landing: deque[_Task] = deque()  # those that may use the staging buffer, oldest first
        self._queue: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()  # None: the end
        self._error: BaseException | None = None
        self._follows = False  # the device's compute; on the thread
        self._thread = threading.Thread(target=self._loop, name="infinity-gradients", daemon=True)

    def open(self) -> None:
        """Start the thread, before training."""
        self._thread.start()

    def close(self) -> None:
        """Drop queued tasks, and end the thread. Idempotent."""
        self._drop()
        self._queue.put(None)
        # The garbage collector may close a dropped engine on any thread, this one's too.
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join()

    def forget(self) -> None:
        """Free the staging buffer."""
        self._landing.clear()
        self._staging = torch.empty(0, dtype=torch.uint8)

    # --- the training thread -------------------------------------------------------------------

    def allocate(self, nbytes: int) -> tuple[int, Tensor]:
        """Reserve bytes of the staging buffer for the next task; waits for space.

        Bytes are released in the order of tasks, so the buffer is a ring.
        """
        while (first := self._room(nbytes)) is None:
            self._wait(self._landing[0])
        return first, self._staging[first : first + nbytes]

    def _room(self, nbytes: int) -> int | None:
        """Return the offset of that many free bytes, or None."""
        while self._landing and self._landing[0].over.is_set():
            self._landing.popleft()
        if not self._landing:
            assert nbytes <= self._staging.numel()
            return 0
        tail, head = self._landing[0].first, self._landing[-1].end
        first = round_up(head, 64)
        limit = self._staging.numel() if head > tail else tail
        if first + nbytes <= limit:
            return first
        return 0 if head > tail and nbytes <= tail else None

    def put(
        self,
        run: Callable[[], None],
        after: Sequence[Event] = (),
        source: Tensor | None = None,
        landing: tuple[int, Tensor] | None = None,
    ) -> None:
        """Queue a function to run once all events have happened. Never blocks."""
        first, end = (0, 0) if landing is None else (landing[0], landing[0] + landing[1].numel())
        task = _Task(run, after, source, first, end)
        self._tasks.append(task)
        if landing is not None:
            self._landing.append(task)
        self._queue.put(task)

    def check(self) -> None:
        """Raise the error of a task."""
        if self._error is not None:
            raise _untraced(self._error)

    def drain(self) -> None:
        """Wait until all queued tasks have run."""
        for task in self._tasks.copy():
            self._wait(task)
        self.check()

    def reset(self) -> None:
        """Drop queued tasks, once their copies have ended, and the error."""
        for task in self._drop():
            self._wait(task)
        self._error = None
        self._landing.clear()

    def _drop(self) -> deque[_Task]:
        queued = self._tasks.copy()
        for task in queued:
            task.dropped = True
        return queued

    def _wait(self, task: _Task) -> None:
        if task.over.is_set():
            return
        with self._transfers.stall("gradient"):
            while not task.over.wait(_LOOK_AGAIN_S):
                if not self._thread.is_alive() and not task.over.is_set():
                    raise EngineFailedError(
                        f"{len(self._tasks)} gradients wait for thread {self._thread.name!r}, "
                        "which has ended",
                        remedy="close the engine, and resume from the last commit "
                        "(`resume: auto`) or checkpoint",
                    )

    # --- the thread ----------------------------------------------------------------------------

    def _loop(self) -> None:
        while (task := self._queue.get()) is not None:
            self._do(task)
            self._tasks.popleft()
            task.over.set()
            del task

    def _do(self, task: _Task) -> None:
        try:
            if not self._follows:
                self._transfers.device.attach_worker_thread()
                self._follows = True
            for event in task.after:
                event.wait()
            task.source = None
            if self._error is None and not task.dropped:
                task.run()
        except BaseException as error:
            self._error = self._error or _untraced(error)


_LOOK_AGAIN_S = 1.0  # whether the thread still lives: backward on a GPU cannot be interrupted


def _untraced(error: BaseException) -> BaseException:
    """Return the error without frames, which would keep graphs and memory alive."""
    if isinstance(error, TransferError):
        return error.untraced()
    return error.with_traceback(None)

"""Background thread that accumulates gradients once their device-to-host copies complete.

[Note: one queue]
Tasks run in the order in which they were queued, so the order of additions does not depend on when
copies end. Each task first waits for its events. The training thread only queues; it waits for
space in the staging buffer (`allocate`), and for the results of queued tasks (`drain`).
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from infinity.errors import EngineFailedError, TransferError
from infinity.offload.transfers import Transfers
from infinity.storage.device import Event
from infinity.types import round_up


@dataclass(eq=False, slots=True)
class _Task:
    """Function to run after events.

    `source` is kept alive until the events have happened. The bytes from `first` to `end` of the
    staging buffer are reserved until the function has run.
    """

    run: Callable[[], None]
    after: Sequence[Event]
    source: Tensor | None
    first: int
    end: int
    dropped: bool = False
    over: threading.Event = field(default_factory=threading.Event)


class GradientWorker:
    """Worker thread, its queue, and the `staging` buffer (uint8, pinned) for copies.

    An error of a task is raised by `check` and `drain`, until `reset`; later tasks do not run.
    """

    def __init__(self, transfers: Transfers, staging: Tensor) -> None:
        self._transfers = transfers
        self._staging = staging
        self._tasks: deque[_Task] = deque()  # incomplete tasks; removed by the worker thread
        self._landing: deque[_Task] = deque()  # users of the staging buffer, oldest first
        self._queue: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()  # None ends it
        self._error: BaseException | None = None
        self._follows = False  # whether the worker thread is attached to the device
        self._thread = threading.Thread(target=self._loop, name="infinity-gradients", daemon=True)

    def open(self) -> None:
        """Start the thread, before training."""
        self._thread.start()

    def close(self) -> None:
        """Drop queued tasks and end the thread. Idempotent."""
        self._drop()
        self._queue.put(None)
        # The garbage collector may close a dropped engine on any thread, including this worker.
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join()

    def forget(self) -> None:
        """Free the staging buffer."""
        self._landing.clear()
        self._staging = torch.empty(0, dtype=torch.uint8)

    # --- called by the training thread ---------------------------------------------------------

    def allocate(self, nbytes: int) -> tuple[int, Tensor]:
        """Reserve bytes of the staging buffer for the next task; waits for space.

        Bytes are released in the order of tasks, so the buffer is a ring.
        """
        while (first := self._room(nbytes)) is None:
            self._wait(self._landing[0])
        return first, self._staging[first : first + nbytes]

    def _room(self, nbytes: int) -> int | None:
        """Return the offset of `nbytes` free bytes, or None."""
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
        """Raise the error of a failed task."""
        if self._error is not None:
            raise _untraced(self._error)

    def drain(self) -> None:
        """Wait until all queued tasks have run; raise the error of a failed one."""
        for task in self._tasks.copy():
            self._wait(task)
        self.check()

    def reset(self) -> None:
        """Drop the error and all queued tasks, after their events."""
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

    # --- run by the worker thread --------------------------------------------------------------

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


# Seconds between checks that the thread is alive: backward on a GPU cannot be interrupted.
_LOOK_AGAIN_S = 1.0


def _untraced(error: BaseException) -> BaseException:
    """Return the error without its traceback, which would keep graphs and memory alive."""
    if isinstance(error, TransferError):
        return error.untraced()
    return error.with_traceback(None)

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
    finished: threading.Event = field(default_factory=threading.Event)


class GradientWorker:
    """Worker thread, its queue, and the `staging` buffer (uint8, pinned) for copies.

    An error of a task is raised by `check` and `drain`, until `reset`; later tasks do not run.
    """

    def __init__(self, transfers: Transfers, staging: Tensor) -> None:
        self._transfers = transfers
        self._staging = staging
        self._tasks: deque[_Task] = deque()  # incomplete tasks; removed by the worker thread
        self._staged: deque[_Task] = deque()  # users of the staging buffer, oldest first
        self._queue: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()  # None ends it
        self._error: BaseException | None = None
        self._attached = False  # whether the worker thread is attached to the device
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

    def free(self) -> None:
        """Free the staging buffer."""
        self._staged.clear()
        self._staging = torch.empty(0, dtype=torch.uint8)

    # --- called by the training thread ---------------------------------------------------------

    def allocate(self, nbytes: int) -> tuple[int, Tensor]:
        """Reserve bytes of the staging buffer for the next task; waits for space.

        Bytes are released in the order of tasks, so the buffer is a ring.
        """
        while (offset := self._free_offset(nbytes)) is None:
            self._wait(self._staged[0])
        return offset, self._staging[offset : offset + nbytes]

    def _free_offset(self, nbytes: int) -> int | None:
        """Return the offset of `nbytes` free bytes, or None."""
        while self._staged and self._staged[0].finished.is_set():
            self._staged.popleft()
        if not self._staged:
            assert nbytes <= self._staging.numel()
            return 0
        tail, head = self._staged[0].first, self._staged[-1].end
        offset = round_up(head, 64)
        limit = self._staging.numel() if head > tail else tail
        if offset + nbytes <= limit:
            return offset
        return 0 if head > tail and nbytes <= tail else None

    def put(
        self,
        run: Callable[[], None],
        after: Sequence[Event] = (),
        source: Tensor | None = None,
        reservation: tuple[int, Tensor] | None = None,
    ) -> None:
        """Queue a function to run once all events have happened. Never blocks.

        `reservation` is the result of `allocate`, if the function uses it.
        """
        first, end = 0, 0
        if reservation is not None:
            first, buffer = reservation
            end = first + buffer.numel()
        task = _Task(run, after, source, first, end)
        self._tasks.append(task)
        if reservation is not None:
            self._staged.append(task)
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
        self._staged.clear()

    def _drop(self) -> deque[_Task]:
        queued = self._tasks.copy()
        for task in queued:
            task.dropped = True
        return queued

    def _wait(self, task: _Task) -> None:
        if task.finished.is_set():
            return
        with self._transfers.stall("gradient"):
            while not task.finished.wait(_ALIVE_CHECK_S):
                if not self._thread.is_alive() and not task.finished.is_set():
                    raise EngineFailedError(
                        f"{len(self._tasks)} gradients wait for thread {self._thread.name!r}, "
                        "which has ended",
                        remedy="close the engine, and resume from the last commit "
                        "(`resume: auto`) or checkpoint",
                    )

    # --- run by the worker thread --------------------------------------------------------------

    def _loop(self) -> None:
        while (task := self._queue.get()) is not None:
            self._run(task)
            self._tasks.popleft()
            task.finished.set()
            del task

    def _run(self, task: _Task) -> None:
        try:
            if not self._attached:
                self._transfers.device.attach_worker_thread()
                self._attached = True
            for event in task.after:
                event.wait()
            task.source = None
            if self._error is None and not task.dropped:
                task.run()
        except BaseException as error:
            self._error = self._error or _untraced(error)


# Seconds between checks that the thread is alive: backward on a GPU cannot be interrupted.
_ALIVE_CHECK_S = 1.0


def _untraced(error: BaseException) -> BaseException:
    """Return the error without its traceback, which would keep graphs and memory alive."""
    if isinstance(error, TransferError):
        return error.untraced()
    return error.with_traceback(None)

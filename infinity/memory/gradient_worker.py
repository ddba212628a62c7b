"""A thread that does with gradients what must wait for their copies, so that nobody else waits.

[Note: one queue]
Tasks run one after the other, in the order they were queued: what is added to what, and when, does
not depend on how copies end. Each waits for its own events first. The training thread queues and
goes on; it waits only for room in the bounce buffer (`place`), and where it needs what was queued
(`drain`).
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from infinity.errors import TransferError
from infinity.memory.device import Event
from infinity.memory.lanes import Lanes
from infinity.plan.layout import round_up


@dataclass(eq=False, slots=True)
class _Task:
    """Something to do after events.

    Until they have happened `source` stays alive, and until it is over nobody else gets the bytes
    `first` to `end` of the bounce buffer.
    """

    run: Callable[[], None]
    after: Sequence[Event]
    source: Tensor | None
    first: int
    end: int
    dropped: bool = False
    over: threading.Event = field(default_factory=threading.Event)


class GradientWorker:
    """The thread, its queue, and the `bounce` buffer (uint8, pinned) in which gradients land.

    What a task raises is raised by `check` and `drain`, until `reset`; tasks behind it do not run.
    """

    def __init__(self, lanes: Lanes, bounce: Tensor) -> None:
        self._lanes = lanes
        self._bounce = bounce
        self._tasks: deque[_Task] = deque()  # not over; the thread takes them out
        self._landing: deque[_Task] = deque()  # those that may use the bounce buffer, oldest first
        self._queue: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()  # None: the end
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._loop, name="infinity-gradients", daemon=True)

    def open(self) -> None:
        """Start the thread; before training, where an exception ends in `close`."""
        self._thread.start()

    def close(self) -> None:
        """Drop what is queued, and end the thread; safe to repeat."""
        self._drop()
        self._queue.put(None)
        # The garbage collector may close a dropped engine on any thread, this one's too.
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join()

    def forget(self) -> None:
        """Drop the bounce buffer."""
        self._landing.clear()
        self._bounce = torch.empty(0, dtype=torch.uint8)

    # --- the training thread -------------------------------------------------------------------

    def place(self, nbytes: int) -> tuple[int, Tensor]:
        """Room for the next task in the bounce buffer, and where it is; waits until there is some.

        Room is given back in the order of tasks, so the buffer is a ring.
        """
        while (first := self._room(nbytes)) is None:
            self._wait(self._landing[0])
        return first, self._bounce[first : first + nbytes]

    def _room(self, nbytes: int) -> int | None:
        """Where so many bytes are free; None if they are not yet."""
        while self._landing and self._landing[0].over.is_set():
            self._landing.popleft()
        if not self._landing:
            assert nbytes <= self._bounce.numel()
            return 0
        tail, head = self._landing[0].first, self._landing[-1].end
        first = round_up(head, 64)
        limit = self._bounce.numel() if head > tail else tail
        if first + nbytes <= limit:
            return first
        return 0 if head > tail and nbytes <= tail else None

    def put(
        self,
        run: Callable[[], None],
        after: Sequence[Event] = (),
        source: Tensor | None = None,
        place: tuple[int, Tensor] | None = None,
    ) -> None:
        """Queue something that is done once all events have happened; never waits."""
        first, end = (0, 0) if place is None else (place[0], place[0] + place[1].numel())
        task = _Task(run, after, source, first, end)
        self._tasks.append(task)
        if place is not None:
            self._landing.append(task)
        self._queue.put(task)

    def check(self) -> None:
        """Raise what a task raised."""
        if self._error is not None:
            raise _untraced(self._error)

    def drain(self) -> None:
        """Wait until everything is done that is queued."""
        for task in self._tasks.copy():
            self._wait(task)
        self.check()

    def reset(self) -> None:
        """Drop what is queued, once its copies have ended; forget an error."""
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
        if not task.over.is_set():
            with self._lanes.stall("gradient"):
                task.over.wait()

    # --- the thread ----------------------------------------------------------------------------

    def _loop(self) -> None:
        while (task := self._queue.get()) is not None:
            self._do(task)
            self._tasks.popleft()
            task.over.set()
            del task

    def _do(self, task: _Task) -> None:
        try:
            for event in task.after:
                event.wait()
            task.source = None
            if self._error is None and not task.dropped:
                task.run()
        except BaseException as error:
            self._error = self._error or _untraced(error)


def _untraced(error: BaseException) -> BaseException:
    """The error without frames: to be remembered, it must not keep graphs and memory alive."""
    if isinstance(error, TransferError):
        return error.untraced()
    return error.with_traceback(None)

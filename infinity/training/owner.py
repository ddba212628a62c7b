"""Who may use an engine: the process that made it, and there one thread at a time.

[Note: one thread]
A call belongs to the thread that makes it until it returns: `engine(...)`, `model(...)`, a block
called by itself, a backward, a step, a save. Meanwhile any other thread gets an error, from the
engine's calls and from the module's hooks alike; between calls the engine may change threads.
Autograd runs the backward of a device of its own memory on threads of its own, which belong to the
call. A call that ended without saying so (an exception in a `loss.backward()`) is told by its
frame: that is on its thread's stack no more. SIGINT waits for a call's end (`interrupts.py`).
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from types import CodeType, FrameType
from typing import Any, ParamSpec, TypeVar

from infinity.errors import PresenceError
from infinity.model.torch_private import inside_backward
from infinity.training.interrupts import DEFERRAL

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, eq=False, slots=True)
class Call:
    """The outermost call that is under way: its thread, and a frame that lasts as long."""

    thread: int
    frame_id: int  # not the frame, which would keep what its function holds
    code: CodeType  # ids of frames are used again

    @property
    def is_over(self) -> bool:
        """Whether its frame has gone from its thread's stack."""
        frame = sys._current_frames().get(self.thread)
        while frame is not None:
            if id(frame) == self.frame_id and frame.f_code is self.code:
                return False
            frame = frame.f_back
        return True


class Owner:
    """Remembers the process, and the call under way.

    A forked child has neither the engine's slots nor its threads. With `backward_threads` autograd
    may run a backward on threads of its own.
    """

    def __init__(self, *, backward_threads: bool = False) -> None:
        self._pid = os.getpid()
        self._backward_threads = backward_threads
        self._calls: dict[str, Call] = {}  # one at most; to set a default is atomic
        self.fail: Callable[[], None] = lambda: None  # told of a call that ends in the middle
        self._shut = False

    def is_here(self) -> bool:
        """Whether this is that process."""
        return os.getpid() == self._pid

    @property
    def busy(self) -> bool:
        """Whether a call is under way."""
        return bool(self._calls)

    def check(self) -> None:
        """Raise `PresenceError` in a forked child, during another thread's call, and if shut."""
        if not self.is_here():
            raise PresenceError(
                f"this engine belongs to process {self._pid}; process {os.getpid()} is a fork "
                "of it and has neither its slots nor its threads",
                because="a DataLoader worker or another child touched the offloaded model",
                remedy="use the engine and its model only in the process that made the engine; "
                "give workers plain data",
            )
        if self._shut:
            raise PresenceError(
                "the engine, or its model, was used from inside a step",
                because="a schedule, or what is saved with a step, is asked while weights change",
                remedy="use them between calls of the engine",
            )
        call = self.elsewhere()
        if call is not None:
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            raise PresenceError(
                f"thread {threading.current_thread().name!r} used the engine, or its model, while "
                f"a call of thread {names.get(call.thread, call.thread)!r} is under way",
                because="weights move while a call runs, for one thread",
                remedy="one thread at a time: a lock around the calls, or a queue to the thread "
                "that trains; DataLoader workers and the like are given plain data",
            )

    @contextmanager
    def shut(self) -> Iterator[None]:
        """Nobody may use the engine in the block, this thread neither."""
        self._shut = True
        try:
            yield
        finally:
            self._shut = False

    def elsewhere(self) -> Call | None:
        """The call that is under way on another thread, if one is."""
        call = self._calls.get("call")
        if call is None or call.thread == get_ident():
            return None
        if self._backward_threads and inside_backward():
            return None
        return None if call.is_over else call

    def enter(self, frame: FrameType) -> Call | None:
        """A call begins that lasts as long as `frame`; None within another one of this thread.

        Raises `PresenceError` as `check` does.
        """
        mine = Call(get_ident(), id(frame), frame.f_code)
        while True:
            self.check()
            call = self._calls.setdefault("call", mine)
            if call is mine:
                DEFERRAL.begin(mine, self.fail)
                return mine
            if not call.is_over:
                return None
            self.leave(call)

    def leave(self, call: Call | None) -> None:
        """The call is over; raises `KeyboardInterrupt` if that was asked for meanwhile."""
        if call is not None and self._calls.get("call") is call:
            self._calls.clear()
            DEFERRAL.end(call)


def exclusive(method: Callable[P, R]) -> Callable[P, R]:
    """A method that is a call, of an object with an `_owner`.

    What ends it in the middle, and is no `Exception`, is a second Ctrl-C or another signal.
    """

    @functools.wraps(method)
    def alone(*args: P.args, **kwargs: P.kwargs) -> R:
        it: Any = args[0]
        call = it._owner.enter(sys._getframe())
        try:
            return method(*args, **kwargs)
        except Exception:
            raise
        except BaseException:
            it._owner.fail()
            raise
        finally:
            it._owner.leave(call)

    return alone

"""Guards calls of an engine: the process that created it, and one thread at a time.

[Note: one thread]
A call belongs to the thread that makes it until it returns: `engine(...)`, `model(...)`, a block
called alone, a backward, a step, a save. During a call any other thread gets an error, from the
engine's calls and from the module's hooks; between calls the engine may change threads. Autograd
runs the backward of a device with memory of its own on its own threads, which belong to the call. A
call that ended without `leave` (an exception in a `loss.backward()`) is recognized by its frame,
which is no longer on its thread's stack. SIGINT waits for the end of a call: see [Note: Ctrl-C] in
`sigint.py`.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, repeat
from threading import get_ident
from types import CodeType, FrameType
from typing import Any, ParamSpec, TypeVar

from infinity.errors import ResidencyError
from infinity.model.torch_private import inside_backward
from infinity.offload.sigint import DEFERRAL

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, eq=False, slots=True)
class Call:
    """The outermost call in progress: its thread, and a frame that lives as long."""

    thread: int
    frame_id: int  # not the frame, which would keep what its function holds
    code: CodeType  # ids of frames are used again

    @property
    def is_over(self) -> bool:
        """Return True if its frame is no longer on its thread's stack."""
        if self.thread != get_ident():
            frames = _stack_of(self.thread)
            return not any(id(f) == self.frame_id and f.f_code is self.code for f in frames)
        frame: FrameType | None = sys._getframe()
        while frame is not None:  # no list of them: one of our own would hold itself
            if id(frame) == self.frame_id and frame.f_code is self.code:
                return False
            frame = frame.f_back
        return True


def _stack_of(thread: int) -> list[FrameType]:
    """Return the frames of another thread, which may be running, innermost first.

    Uses one call into C, without a garbage collection: in either the thread might continue, and a
    freed frame would be followed. (Seen under load with Python 3.11: `f_back` of one was a tuple.)
    """
    frames: list[Any] = []
    collecting = gc.isenabled()
    gc.disable()
    try:
        outwards = accumulate(repeat("f_back"), getattr, initial=sys._current_frames().get(thread))
        deque(map(frames.append, outwards), maxlen=0)
    except AttributeError:  # of None, behind the outermost
        frames.pop()
    finally:
        if collecting:
            gc.enable()
    return frames


class CallGuard:
    """Holds the process, and the call in progress.

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
        """Return True in the process that created the engine."""
        return os.getpid() == self._pid

    def computes_here(self) -> bool:
        """Return True on the process and thread of the call in progress."""
        call = self._calls.get("call")
        return call is not None and call.thread == get_ident() and self.is_here()

    @property
    def busy(self) -> bool:
        """Return True during a call."""
        return bool(self._calls)

    def check(self) -> None:
        """Raise `ResidencyError` in a forked child, during another thread's call, and if locked."""
        if not self.is_here():
            raise ResidencyError(
                f"this engine belongs to process {self._pid}; process {os.getpid()} is a fork "
                "of it and has neither its slots nor its threads",
                because="a DataLoader worker or another child touched the offloaded model",
                remedy="use the engine and its model only in the process that made the engine; "
                "give workers plain data",
            )
        if self._shut:
            raise ResidencyError(
                "the engine, or its model, was used from inside a step",
                because="schedules and states saved with a step are called while weights change",
                remedy="use them between calls of the engine",
            )
        call = self.elsewhere()
        if call is not None:
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            raise ResidencyError(
                f"thread {threading.current_thread().name!r} used the engine, or its model, while "
                f"a call of thread {names.get(call.thread, call.thread)!r} is under way",
                because="weights move while a call runs, for one thread",
                remedy="one thread at a time: a lock around the calls, or a queue to the thread "
                "that trains; DataLoader workers and the like are given plain data",
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Reject all calls in the block, those of this thread too."""
        self._shut = True
        try:
            yield
        finally:
            self._shut = False

    def elsewhere(self) -> Call | None:
        """Return the call in progress on another thread, if there is one."""
        call = self._calls.get("call")
        if call is None or call.thread == get_ident():
            return None
        if self._backward_threads and inside_backward():
            return None
        return None if call.is_over else call

    def enter(self, frame: FrameType) -> Call | None:
        """Begin a call that lasts as long as `frame`; None inside another one of this thread.

        Raises `ResidencyError` as `check` does.
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
        """End the call; raise `KeyboardInterrupt` if SIGINT arrived during it."""
        if call is not None and self._calls.get("call") is call:
            self._calls.clear()
            DEFERRAL.end(call)


def engine_call(method: Callable[P, R]) -> Callable[P, R]:
    """Make a method of an object with a `_guard` a call of the engine.

    A second Ctrl-C or another signal, no `Exception`, may end it in the middle.
    """

    @functools.wraps(method)
    def alone(*args: P.args, **kwargs: P.kwargs) -> R:
        it: Any = args[0]
        call = it._guard.enter(sys._getframe())
        try:
            return method(*args, **kwargs)
        except Exception:
            raise
        except BaseException:
            it._guard.fail()
            raise
        finally:
            it._guard.leave(call)

    return alone

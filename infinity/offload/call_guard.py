"""Guard of engine calls: only in the process that created the engine, one thread at a time.

[Note: one thread]
A call (`engine(...)`, `model(...)`, a block called directly, a backward, a step, a save) belongs to
its thread until it returns. During a call every other thread gets an error, from the engine's
methods and from the module's hooks; between calls another thread may use the engine. Autograd runs
the backward of an accelerator on its own threads, which belong to the call. A call that ended
without `leave` (an exception in a `loss.backward()`) is recognized by its frame, which is no longer
on its thread's stack. SIGINT waits for the end of a call: see [Note: Ctrl-C] in `sigint.py`.
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
    """Outermost call in progress: its thread, and a frame that lives as long as the call."""

    thread: int
    frame_id: int  # not the frame, which would keep its locals alive
    code: CodeType  # compared too: ids of freed frames are reused

    @property
    def is_over(self) -> bool:
        """Return True if its frame is no longer on its thread's stack."""
        if self.thread != get_ident():
            frames = _stack_of(self.thread)
            return not any(id(f) == self.frame_id and f.f_code is self.code for f in frames)
        frame: FrameType | None = sys._getframe()
        while frame is not None:  # not a list of frames: it would contain its own frame
            if id(frame) == self.frame_id and frame.f_code is self.code:
                return False
            frame = frame.f_back
        return True


def _stack_of(thread: int) -> list[FrameType]:
    """Return the frames of another thread, which may be running, innermost first.

    Walks the stack in one call into C, with garbage collection disabled: otherwise the other thread
    might continue in between, and the walk follow a freed frame. (Seen under load with Python 3.11:
    `f_back` of a frame was a tuple.)
    """
    frames: list[Any] = []
    gc_enabled = gc.isenabled()
    gc.disable()
    try:
        outer_frames = accumulate(
            repeat("f_back"), getattr, initial=sys._current_frames().get(thread)
        )
        deque(map(frames.append, outer_frames), maxlen=0)
    except AttributeError:  # `f_back` of None, past the outermost frame
        frames.pop()
    finally:
        if gc_enabled:
            gc.enable()
    return frames


class CallGuard:
    """Process that may use an engine, and the call in progress.

    A forked child has neither the engine's slots nor its threads. With `backward_threads` autograd
    may run a backward on its own threads.
    """

    def __init__(self, *, backward_threads: bool = False) -> None:
        self._pid = os.getpid()
        self._backward_threads = backward_threads
        self._calls: dict[str, Call] = {}  # at most one; a dict for its atomic `setdefault`
        self.fail: Callable[[], None] = lambda: None  # called when a call is interrupted
        self._locked = False

    def in_creating_process(self) -> bool:
        """Return True in the process that created the engine."""
        return os.getpid() == self._pid

    def in_current_call(self) -> bool:
        """Return True on the process and thread of the call in progress."""
        call = self._calls.get("call")
        return call is not None and call.thread == get_ident() and self.in_creating_process()

    @property
    def busy(self) -> bool:
        return bool(self._calls)

    def check(self) -> None:
        """Raise `ResidencyError` in a forked child, during another thread's call, and if locked."""
        if not self.in_creating_process():
            raise ResidencyError(
                f"this engine belongs to process {self._pid}; process {os.getpid()} is a fork "
                "of it and has neither its slots nor its threads",
                because="a DataLoader worker or another child touched the offloaded model",
                remedy="use the engine and its model only in the process that made the engine; "
                "give workers plain data",
            )
        if self._locked:
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
        """Reject all calls in the block, including those of this thread."""
        self._locked = True
        try:
            yield
        finally:
            self._locked = False

    def elsewhere(self) -> Call | None:
        """Return the call in progress on another thread, if there is one."""
        call = self._calls.get("call")
        if call is None or call.thread == get_ident():
            return None
        if self._backward_threads and inside_backward():
            return None
        return None if call.is_over else call

    def enter(self, frame: FrameType) -> Call | None:
        """Begin a call that lasts as long as `frame`; return None inside a call of this thread.

        Raises `ResidencyError` as `check` does.
        """
        new_call = Call(get_ident(), id(frame), frame.f_code)
        while True:
            self.check()
            call = self._calls.setdefault("call", new_call)
            if call is new_call:
                DEFERRAL.begin(new_call, self.fail)
                return new_call
            if not call.is_over:
                return None
            self.leave(call)

    def leave(self, call: Call | None) -> None:
        """End the call; raise `KeyboardInterrupt` if SIGINT arrived during it."""
        if call is not None and self._calls.get("call") is call:
            self._calls.clear()
            DEFERRAL.end(call)


def engine_call(method: Callable[P, R]) -> Callable[P, R]:
    """Decorate a method of an object with a `_guard`, so that it runs as an engine call.

    The engine fails if the method is interrupted (a second Ctrl-C, or another exception that is not
    an `Exception`).
    """

    @functools.wraps(method)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        owner: Any = args[0]
        call = owner._guard.enter(sys._getframe())
        try:
            return method(*args, **kwargs)
        except Exception:
            raise
        except BaseException:
            owner._guard.fail()
            raise
        finally:
            owner._guard.leave(call)

    return guarded

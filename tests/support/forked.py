"""Children that are forked from a server which has imported torch: a start costs milliseconds.

Nothing but imports has happened in the server: no thread, no lock and no engine is inherited. One
server serves all tests of a process.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import FrameType
from typing import Any

import infinity

TESTS = str(Path(__file__).parent.parent)
LIBRARY = str(Path(infinity.__file__).parent)
PRELOADED = ["infinity.startup", "infinity.training.checkpoints", "support.durable"]


@cache
def server() -> ForkServerContext:
    """The server, told where the tests are: it imports what children need."""
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = TESTS
    try:
        forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before
    return context


def start(
    target: Callable[..., None], *args: Any, die_at_line: int | None = None
) -> ForkServerProcess:
    """A child that runs `target`; killed -9 at the n-th line of the library that it runs."""
    child = server().Process(target=_run, args=(target, args, die_at_line))
    child.start()
    return child


def _run(target: Callable[..., None], args: tuple[Any, ...], line: int | None) -> None:
    if line is not None:
        die_at(line)
    target(*args)


def die_at(line: int) -> None:
    """Kill this process before the n-th line of the library, in whatever thread, from now on.

    No clock says when: that would strike elsewhere on a slow day. Native threads go on meanwhile.
    """
    numbers = itertools.count(1)

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(LIBRARY):
            return None
        if event == "line" and next(numbers) >= line:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    threading.settrace(trace)
    sys.settrace(trace)


def call(function: Callable[..., Any], *args: Any) -> Any:
    """What a function returns that runs in a child."""
    receiving, sending = server().Pipe(duplex=False)
    child = server().Process(target=_answer, args=(sending, function, args))
    child.start()
    sending.close()
    try:
        result, failure = receiving.recv()
    except EOFError:
        result, failure = None, "the child died"
    child.join()
    child.close()
    receiving.close()
    assert failure is None, failure
    return result


def _answer(sending: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        sending.send((function(*args), None))
    except BaseException:
        sending.send((None, traceback.format_exc()))

"""Children that are forked from a server which has imported torch: a start costs milliseconds.

Nothing but imports has happened in the server: no thread, no lock and no engine is inherited. One
server serves all tests of a process.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import re
import runpy
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import infinity

TESTS = str(Path(__file__).parent.parent)
LIBRARY = str(Path(infinity.__file__).parent)
HANG_S = 600  # only a hang takes so long
# In a fork torch makes its pool of threads anew when it is next asked for; two threads that ask at
# once may find none ("Invalid thread pool!"). So it is asked while there is one thread.
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(torch.get_num_threads()))


@cache
def server() -> ForkServerContext:
    """The server, told where the tests are: it imports what children need."""
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["support.preloaded"])
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
    target: Callable[..., Any],
    *args: Any,
    die_at_line: int | None = None,
    environment: Mapping[str, str] | None = None,
    out: Path | None = None,
    err: Path | None = None,
) -> ForkServerProcess:
    """A child that runs `target`; killed -9 at the n-th line of the library that it runs.

    It has variables beside this process's; what it prints is added to files, both to `out` alone.
    """
    told = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    child = server().Process(target=_run, args=(target, args, die_at_line, told, out, err or out))
    child.start()
    return child


def _run(
    target: Callable[..., Any],
    args: tuple[Any, ...],
    line: int | None,
    environment: Mapping[str, str],
    *printed: Path | None,
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for number, path in enumerate(printed, 1):
        if path is not None:
            with path.open("ab") as file:
                os.dup2(file.fileno(), number)
    torch.set_num_threads(1)
    if line is not None:
        die_at(line)
    target(*args)


class Program:
    """A script, or a function, as a process of its own that ends with its block."""

    def __init__(
        self, program: Path | Callable[..., Any], *arguments: Any, **environment: str
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="program-")
        self.out, self.err = (Path(self._folder.name) / name for name in ("out", "err"))
        target = run_script if isinstance(program, Path) else program
        args = (program, arguments) if isinstance(program, Path) else arguments
        for path in (self.out, self.err):
            path.touch()
        self.process = start(target, *args, environment=environment, out=self.out, err=self.err)

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.process.terminate()  # which a launcher passes on
        self.process.join(60)
        self.process.kill()
        self.process.join()
        self.process.close()
        self._folder.cleanup()

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def said(self, pattern: str) -> bool:
        """Whether a line of stdout begins like that, or it has ended."""
        found = re.search(f"^{pattern}", self.out.read_text(), re.MULTILINE)
        return found is not None or not self.process.is_alive()

    def end(self) -> tuple[int | None, str, str]:
        """Its exit code, and what it has printed on stdout and stderr."""
        self.process.join(HANG_S)
        return self.process.exitcode, self.out.read_text(), self.err.read_text()


def run_script(path: Path, arguments: Sequence[str]) -> None:
    """As `python path arguments`."""
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")


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

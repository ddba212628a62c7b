"""Child processes forked from a server that has imported torch: a start costs milliseconds.

The server has only imported modules, so children inherit no threads, held locks or engines. One
server is used by all tests of a process.
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
HANG_S = 600  # exceeded only by a hang
# After a fork torch makes its thread pool on first use, which is not thread-safe ("Invalid thread
# pool!"). So it is made while there is one thread.
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(torch.get_num_threads()))


@cache
def server() -> ForkServerContext:
    """Return the server; it has the tests on its path and imports the modules children need."""
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
    kill_at_line: int | None = None,
    environment: Mapping[str, str] | None = None,
    out: Path | None = None,
    err: Path | None = None,
) -> ForkServerProcess:
    """Start a child that runs `target`.

    Args:
        target: Function to run.
        *args: Its arguments.
        kill_at_line: Kill the child with SIGKILL at the n-th line of the library that it runs.
        environment: Variables to add to those of this process.
        out: File to which stdout is appended, and stderr too if `err` is None.
        err: File to which stderr is appended.
    """
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    child = server().Process(
        target=_run, args=(target, args, kill_at_line, variables, out, err or out)
    )
    child.start()
    return child


def _run(
    target: Callable[..., Any],
    args: tuple[Any, ...],
    line: int | None,
    environment: Mapping[str, str],
    *outputs: Path | None,
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for number, path in enumerate(outputs, 1):
        if path is not None:
            with path.open("ab") as file:
                os.dup2(file.fileno(), number)
    torch.set_num_threads(1)
    if line is not None:
        kill_at_line(line)
    target(*args)


class Program:
    """Context manager that runs a script or a function in a separate process."""

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
        self.process.terminate()  # a launcher forwards it to its children
        self.process.join(60)
        self.process.kill()
        self.process.join()
        self.process.close()
        self._folder.cleanup()

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def said(self, pattern: str) -> bool:
        """Return whether a line of stdout begins with `pattern`, or the process has ended."""
        found = re.search(f"^{pattern}", self.out.read_text(), re.MULTILINE)
        return found is not None or not self.process.is_alive()

    def end(self) -> tuple[int | None, str, str]:
        """Wait for the process; return its exit code, stdout and stderr."""
        self.process.join(HANG_S)
        return self.process.exitcode, self.out.read_text(), self.err.read_text()


def run_script(path: Path, arguments: Sequence[str]) -> None:
    """Run a script, as `python path arguments` does."""
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")


def kill_at_line(line: int) -> None:
    """Kill this process before the n-th library line from now on, counted over all threads.

    A timer would hit other lines on a slow machine. Native threads continue until the kill.
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
    """Run a function in a child and return its result."""
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

"""What one test left behind: engines still open, threads of ours, files and rings.

Found by difference, not by count: what was there before the test may go meanwhile, as garbage does.
"""

from __future__ import annotations

import gc
import os
import tempfile
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from support.patience import wait_until

from infinity.engine import Engine

Open = frozenset[tuple[int, str]]
_OURS = (tempfile.gettempdir(), "anon_inode:[io_uring]")


def tasks() -> set[str]:
    """Ids of this process's threads, those unknown to Python included."""
    return set(os.listdir("/proc/self/task"))


def native_threads() -> set[str]:
    """Threads that native engines have made."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            if (task / "comm").read_text().startswith("infinity-"):
                found.add(task.name)
    return found


def threads() -> set[threading.Thread]:
    """The library's threads, as Python knows them."""
    return {t for t in threading.enumerate() if t.name.startswith("infinity-")}


def descriptors() -> Open:
    """Open files of tests, and rings, each with what it is open on."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own, or one that another thread closes
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith(_OURS):
                found.add((int(name), target))
    return frozenset(found)


class Watch:
    """Knows every engine that is made while it watches."""

    def __init__(self) -> None:
        self._engines: weakref.WeakSet[Engine] = weakref.WeakSet()
        made = Engine.__init__

        def noted(engine: Engine, *args: object, **more: object) -> None:
            self._engines.add(engine)
            made(engine, *args, **more)  # type: ignore[arg-type]

        Engine.__init__ = noted  # type: ignore[method-assign]

    def one_test(self) -> Iterator[None]:
        """Close what a test leaves open; an error if something stays.

        Engines of wider fixtures are there before, and are not closed.
        """
        wider = weakref.WeakSet(self._engines)
        running, opened = threads(), descriptors()
        yield
        for engine in list(self._engines):
            if engine not in wider:
                with suppress(Exception):  # what a failed engine says was the test's to look at
                    engine.close()
        if threads() - running or descriptors() - opened:
            gc.collect()
        wait_until(lambda: not threads() - running)
        left = [thread.name for thread in threads() - running]
        left += [target for _, target in descriptors() - opened]
        assert not left, f"the test left behind: {left}"

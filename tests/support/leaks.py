"""Detection of resources that a test leaks: open engines, library threads, files and rings.

Sets are compared, not counts: resources from before the test may be freed during it, as garbage is.
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
    """Return the ids of this process's threads, native ones included."""
    return set(os.listdir("/proc/self/task"))


def native_threads() -> set[str]:
    """Return the ids of threads made by native engines."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            if (task / "comm").read_text().startswith("infinity-"):
                found.add(task.name)
    return found


def threads() -> set[threading.Thread]:
    """Return the library's Python threads."""
    return {t for t in threading.enumerate() if t.name.startswith("infinity-")}


def descriptors() -> Open:
    """Return open files below the temporary directory and io_uring rings, with their targets."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # of the listing itself, or closed by another thread
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith(_OURS):
                found.add((int(name), target))
    return frozenset(found)


class Watch:
    """Registry of all engines made since it was created."""

    def __init__(self) -> None:
        self._engines: weakref.WeakSet[Engine] = weakref.WeakSet()
        made = Engine.__init__

        def noted(engine: Engine, *args: object, **more: object) -> None:
            self._engines.add(engine)
            made(engine, *args, **more)  # type: ignore[arg-type]

        Engine.__init__ = noted  # type: ignore[method-assign]

    def one_test(self) -> Iterator[None]:
        """Close engines that a test leaves open; assert that no thread or file remains.

        Engines of fixtures with a wider scope exist before the test and are not closed.
        """
        wider = weakref.WeakSet(self._engines)
        running, opened = threads(), descriptors()
        yield
        for engine in list(self._engines):
            if engine not in wider:
                with suppress(Exception):  # the test has checked the error of a failed engine
                    engine.close()
        if threads() - running or descriptors() - opened:
            gc.collect()
        wait_until(lambda: not threads() - running)
        left = [thread.name for thread in threads() - running]
        left += [target for _, target in descriptors() - opened]
        assert not left, f"the test left behind: {left}"

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

from support.waiting import wait_until

from infinity.engine import Engine

Open = frozenset[tuple[int, str]]
_TEST_TARGETS = (tempfile.gettempdir(), "anon_inode:[io_uring]")


def tasks() -> set[str]:
    """Return the ids of this process's threads, native ones included."""
    return set(os.listdir("/proc/self/task"))


def native_threads() -> set[str]:
    """Return the ids of threads made by native engines."""
    ids = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            if (task / "comm").read_text().startswith("infinity-"):
                ids.add(task.name)
    return ids


def threads() -> set[threading.Thread]:
    """Return the library's Python threads."""
    return {t for t in threading.enumerate() if t.name.startswith("infinity-")}


def descriptors() -> Open:
    """Return open files below the temporary directory and io_uring rings, with their targets."""
    opened = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # of the listing itself, or closed by another thread
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith(_TEST_TARGETS):
                opened.add((int(name), target))
    return frozenset(opened)


class Watch:
    """Registry of all engines made since it was created."""

    def __init__(self) -> None:
        self._engines: weakref.WeakSet[Engine] = weakref.WeakSet()
        original_init = Engine.__init__

        def init_and_register(engine: Engine, *args: object, **keywords: object) -> None:
            self._engines.add(engine)
            original_init(engine, *args, **keywords)  # type: ignore[arg-type]

        Engine.__init__ = init_and_register  # type: ignore[method-assign]

    def one_test(self) -> Iterator[None]:
        """Close engines that a test leaves open; assert that no thread or file remains.

        Engines of fixtures with a wider scope exist before the test and are not closed.
        """
        existing = weakref.WeakSet(self._engines)
        running, opened = threads(), descriptors()
        yield
        for engine in list(self._engines):
            if engine not in existing:
                with suppress(Exception):  # the test has checked the error of a failed engine
                    engine.close()
        if threads() - running or descriptors() - opened:
            gc.collect()
        wait_until(lambda: not threads() - running)
        leaked = [thread.name for thread in threads() - running]
        leaked += [target for _, target in descriptors() - opened]
        assert not leaked, f"the test left behind: {leaked}"

"""One torch thread for every test, since xdist fills the cores; a Ctrl-C that works; own caches.

Every test begins clean: engines that one left open are closed, and what stays behind is its error.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from support import free_ram  # noqa: F401
from support.leaks import Watch
from support.progress import Progress

torch.set_num_threads(1)
# The same examples every time, so that red means changed; `make test-big` looks for new ones.
settings.register_profile("same", derandomize=True, database=None, deadline=None)
settings.register_profile("search", deadline=None)
settings.load_profile("same")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started by a shell in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--keep-seconds", action="store_true", help="write the seconds of each file for progress"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Imports(), "imports")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress(config), "progress")


class Imports:
    """Freezes what was imported: to look through it for garbage took 0.2 s a time.

    What tests make is collected as before.
    """

    def __init__(self) -> None:
        self._frozen = 0

    def pytest_collection_finish(self) -> None:
        self._freeze()

    def pytest_runtest_logfinish(self) -> None:
        if len(sys.modules) > self._frozen + 10:  # transformers imports models on first use
            self._freeze()

    def _freeze(self) -> None:
        gc.collect()
        gc.freeze()
        self._frozen = len(sys.modules)


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is kept of this machine stays out of the user's home, and is not read there."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before


@pytest.fixture(scope="module")
def in_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory in RAM if there is one with enough space: a container's has 64 MiB."""
    shared = Path("/dev/shm")
    usable = os.access(shared, os.W_OK) and shutil.disk_usage(shared).free > 1 << 30
    with tempfile.TemporaryDirectory(
        dir=shared if usable else tmp_path_factory.mktemp("slow")
    ) as path:
        yield Path(path)


@pytest.fixture(scope="session")
def watch() -> Watch:
    """Knows the engines of this process."""
    return Watch()


@pytest.fixture(autouse=True)
def one_seed() -> None:
    """Torch begins each process with another; a test that draws draws the same each time."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def nothing_left(watch: Watch) -> Iterator[None]:
    """Each test's leaks are its own."""
    yield from watch.one_test()

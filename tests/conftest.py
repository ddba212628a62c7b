"""Configuration of all tests: one torch thread (xdist uses all cores), Ctrl-C, caches, leaks.

Engines that a test leaves open are closed after it, and leaked resources are reported as its error.
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
# Deterministic examples, so that a failure means a change; `make test-big` searches for new ones.
settings.register_profile("same", derandomize=True, database=None, deadline=None)
settings.register_profile("search", deadline=None)
settings.load_profile("same")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background by a shell
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--keep-seconds", action="store_true", help="write the seconds of each file for progress"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(FrozenImports(), "imports")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress(config), "progress")


class FrozenImports:
    """Plugin that freezes imported objects for the garbage collector, which saves 0.2 s a run.

    Objects created by tests are collected as before.
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
def temporary_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use a temporary XDG cache, so that the user's cache is neither read nor written."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before


@pytest.fixture(scope="module")
def in_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Directory in RAM if /dev/shm has more than 1 GiB free (64 MiB in many containers)."""
    shared = Path("/dev/shm")
    usable = os.access(shared, os.W_OK) and shutil.disk_usage(shared).free > 1 << 30
    with tempfile.TemporaryDirectory(
        dir=shared if usable else tmp_path_factory.mktemp("slow")
    ) as path:
        yield Path(path)


@pytest.fixture(scope="session")
def watch() -> Watch:
    """Registry of the engines of this process."""
    return Watch()


@pytest.fixture(autouse=True)
def seed_torch() -> None:
    """Seed torch, so that a test draws the same numbers in every process."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def check_leaks(watch: Watch) -> Iterator[None]:
    """Report the leaks of each test as its own error."""
    yield from watch.one_test()

"""kill -9 at any moment: the next start goes on, and ends where an undisturbed run ends."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
from support import crash_child
from support.small import MIXED, ON_DEVICE, ON_DISK

# Packages only: the server does not know where the tests are.
PRELOADED = ["infinity.startup", "infinity.training.checkpoints", "torch"]


@pytest.fixture(scope="module")
def server() -> ForkServerContext:
    """Children are forked from a process that has imported torch, and nothing else happened in."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


Job = tuple[Callable[[str, dict[str, str], int], None], dict[str, str], int]


def undisturbed(server: ForkServerContext, folder: Path, job: Job) -> tuple[str, float]:
    """The digest at the end of a run that nobody kills, and the seconds it takes."""
    for name in ("first", "second"):  # the server itself starts with the first
        start = time.monotonic()
        child = process(server, folder / name, job)
        child.join(600)
        assert child.exitcode == 0
    return (folder / "second" / "done").read_text(), time.monotonic() - start


def process(server: ForkServerContext, folder: Path, job: Job) -> ForkServerProcess:
    """A child that does the job in a folder, which may be there."""
    target, homes, every = job
    folder.mkdir(parents=True, exist_ok=True)
    child = server.Process(target=target, args=(str(folder), homes, every))
    child.start()
    return child


def phase_of(folder: Path) -> str:
    """What a killed child was at."""
    file = folder / "phase"
    words = file.read_text().split() if file.exists() else []
    return words[0] if words else "nothing"


def killed_until_done(
    server: ForkServerContext, folder: Path, job: Job, longest_s: float, seed: int
) -> Counter[str]:
    """Starts and kills children till one reaches the end; returns what the kills struck."""
    draw = random.Random(seed)
    struck: Counter[str] = Counter()
    while True:
        child = process(server, folder, job)
        child.join(draw.uniform(0, longest_s))
        if not child.is_alive():
            assert child.exitcode == 0, child.exitcode
            return struck
        assert child.pid is not None
        with suppress(ProcessLookupError):  # it has ended by itself just now
            os.kill(child.pid, signal.SIGKILL)
        child.join()
        struck[phase_of(folder)] += 1


def survive(server: ForkServerContext, folder: Path, job: Job, kills: int) -> Counter[str]:
    """Journeys full of kills until there were so many; each must end where it should."""
    expected, duration_s = undisturbed(server, folder / "undisturbed", job)
    struck: Counter[str] = Counter()
    journey = 0
    while sum(struck.values()) < kills:
        journey += 1
        here = folder / f"journey{journey}"
        struck += killed_until_done(server, here, job, duration_s * 1.1, journey)
        assert (here / "done").read_text() == expected
        assert not list((here / "saved").glob("*.tmp"))
        durable = job[0] is crash_child.train_durably
        # A directory that was being made is left alone for ten minutes.
        left = [p for p in (here / "nvme").iterdir() if not p.name.startswith(".infinity-new-")]
        assert len(left) == durable, "the last start has cleaned up"
        shutil.rmtree(here)
    return struck


JOBS: dict[str, Job] = {
    "checkpoints, disk": (crash_child.train_and_save, ON_DISK, 2),
    "checkpoints, mixed": (crash_child.train_and_save, MIXED, 1),
    "checkpoints, device": (crash_child.train_and_save, ON_DEVICE, 3),
    "durable, disk": (crash_child.train_durably, ON_DISK, 1),
    "durable, mixed": (crash_child.train_durably, MIXED, 2),
    "durable, device": (crash_child.train_durably, ON_DEVICE, 3),
}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", JOBS)
def test_killed_at_random_moments(server: ForkServerContext, tmp_path: Path, name: str) -> None:
    struck = survive(server, tmp_path, JOBS[name], 35)
    assert struck["step"], struck


@pytest.mark.big
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", JOBS)
def test_killed_very_often(
    server: ForkServerContext, tmp_path: Path, name: str, record_property: Any
) -> None:
    struck = survive(server, tmp_path, JOBS[name], 200)
    record_property("struck", dict(struck))
    if "CRASH_REPORT" in os.environ:
        with open(os.environ["CRASH_REPORT"], "a") as file:
            words = ", ".join(f"{count} {what}" for what, count in struck.most_common())
            file.write(f"| {name} | {sum(struck.values())} | {words} |\n")

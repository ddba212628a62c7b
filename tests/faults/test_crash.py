"""Tests of runs killed with SIGKILL: the next start resumes and reaches the same final state."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support import crash_child, forked
from support.small import MIXED, ON_DEVICE, ON_DISK

Job = tuple[Callable[[str, dict[str, str], int], None], dict[str, str], int]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Digest of the final state of an uninterrupted run; the same for every job and placement."""
    folder = tmp_path_factory.mktemp("undisturbed")
    crash_child.train_and_save(str(folder), ON_DEVICE, crash_child.TOTAL_STEPS + 1)
    return (folder / "done").read_text()


def start(folder: Path, job: Job, kill_at_line: int | None = None) -> Any:
    """Start a child that runs the job in a folder, which may exist."""
    target, placement, every = job
    folder.mkdir(parents=True, exist_ok=True)
    return forked.start(target, str(folder), placement, every, kill_at_line=kill_at_line)


def phase_of(folder: Path) -> str:
    """Return the phase in which a child was killed."""
    file = folder / "phase"
    fields = file.read_text().split() if file.exists() else []
    return fields[0] if fields else "nothing"


def check_end(folder: Path, job: Job, expected: str) -> None:
    """Assert that the last start reached the expected state and removed leftovers."""
    assert (folder / "done").read_text() == expected
    assert not list((folder / "saved").glob("*.tmp"))
    durable = job[0] is crash_child.train_durably
    # A directory under construction is not removed for ten minutes.
    remaining = [p for p in (folder / "nvme").iterdir() if not p.name.startswith(".infinity-new-")]
    assert len(remaining) == durable, "the last start left directories behind"


def kill_until_done(folder: Path, job: Job, longest_s: float, seed: int) -> Counter[str]:
    """Start and kill children until one finishes; return the number of kills by phase."""
    rng = random.Random(seed)
    kills: Counter[str] = Counter()
    while True:
        child = start(folder, job)
        child.join(rng.uniform(0, longest_s))
        if not child.is_alive():
            assert child.exitcode == 0, child.exitcode
            return kills
        with suppress(ProcessLookupError):  # it may have just exited
            os.kill(child.pid, signal.SIGKILL)
        child.join()
        kills[phase_of(folder)] += 1


JOBS: dict[str, Job] = {
    "checkpoints, disk": (crash_child.train_and_save, ON_DISK, 2),
    "checkpoints, mixed": (crash_child.train_and_save, MIXED, 1),
    "checkpoints, device": (crash_child.train_and_save, ON_DEVICE, 3),
    "durable, disk": (crash_child.train_durably, ON_DISK, 1),
    "durable, mixed": (crash_child.train_durably, MIXED, 2),
    "durable, device": (crash_child.train_durably, ON_DEVICE, 3),
}


# Lines executed in all threads: up to 22 000 by a start, 20 000 by a step, 12 000 by a save.
LINES = (9_000, 34_000, 56_000, 62_000, 100_000)


@pytest.mark.parametrize("name", JOBS)
def test_kill_at_any_line_resumes_to_same_state(tmp_path: Path, expected: str, name: str) -> None:
    job, kills = JOBS[name], Counter[str]()
    rng = random.Random(name)
    for line in LINES:
        child = start(tmp_path, job, kill_at_line=line + rng.randrange(3_000))
        child.join()
        assert child.exitcode in (0, -signal.SIGKILL)
        kills[phase_of(tmp_path) if child.exitcode else "done"] += 1
    assert kills["step"], kills
    assert kills.total() - kills["done"] >= 3, kills
    child = start(tmp_path, job)
    child.join()
    assert child.exitcode == 0
    check_end(tmp_path, job, expected)


@pytest.mark.big
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", JOBS)
def test_repeated_kills_resume_to_same_state(
    tmp_path: Path, expected: str, name: str, record_property: Any
) -> None:
    """Kill runs at random times, 200 kills in all; each run must reach the expected state."""
    job = JOBS[name]
    forked.call(os.getpid)  # start the fork server before measuring
    before = time.monotonic()
    start(tmp_path / "measured", job).join()
    longest_s = 1.1 * (time.monotonic() - before)
    kills: Counter[str] = Counter()
    number = 0
    while sum(kills.values()) < 200:
        number += 1
        folder = tmp_path / f"run{number}"
        kills += kill_until_done(folder, job, longest_s, number)
        check_end(folder, job, expected)
        shutil.rmtree(folder)
    assert kills["step"], kills
    record_property("struck", dict(kills))
    if "CRASH_REPORT" in os.environ:
        with open(os.environ["CRASH_REPORT"], "a") as file:
            summary = ", ".join(f"{count} {what}" for what, count in kills.most_common())
            file.write(f"| {name} | {sum(kills.values())} | {summary} |\n")

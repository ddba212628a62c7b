"""Tests of durable steps with processes killed at arbitrary times and with failing drives."""

from __future__ import annotations

import errno
import os
import random
import signal
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import forked
from support.durable import (
    PLACEMENTS,
    durable_engine,
    equal,
    gated,
    stacked,
    state_of,
    step,
    train_and_log,
    undisturbed,
)

from infinity.errors import EngineFailedError, TransferError

STEPS = 4
# Slow drives lengthen optimizer passes and commits, so more kills hit them.
CASES: dict[str, dict[str, Any]] = {
    "all on disk": {"placement": PLACEMENTS["all on disk"]},
    "all on disk, slow": {
        "placement": PLACEMENTS["all on disk"],
        "io": {"slow_bytes_per_s": 4 << 20},
    },
    "moments in RAM": {
        "placement": PLACEMENTS["moments in RAM"],
        "commit_every": 1,
        "io": {"slow_bytes_per_s": 8 << 20},
    },
    "all in RAM, every third": {"placement": PLACEMENTS["all in RAM"], "commit_every": 3},
    "experts in ranges": {
        "placement": PLACEMENTS["all on disk"],
        "experts_per_unit": 3,
        "build": stacked,
    },
}
TIME_FACTORS = {"experts in ranges": 2}  # more units take more time


def kill_repeatedly(root: Path, case: str, moments: Iterable[int | float | None]) -> int:
    """Kill children and compare the last one's state with an uninterrupted run; return its steps.

    Each moment is for one child: the number of executed library lines at which it is killed, or the
    seconds after which it is killed, or None if it closes after two steps.
    """
    path, options = root / "nvme", {**CASES[case]}
    build, experts = options.pop("build", gated), options.get("experts_per_unit", "auto")
    path.mkdir()
    every, last = options.get("commit_every", 1), 0
    for moment in (*moments, None):
        (root / "told").write_text("")
        line, extra = moment if isinstance(moment, int) else None, 2 if moment is None else None
        args = str(root), options, extra, build
        child = forked.start(train_and_log, *args, kill_at_line=line)
        if isinstance(moment, float):
            child.join(moment)
            os.kill(child.pid, signal.SIGKILL)
        child.join()
        assert child.exitcode == (0 if moment is None else -signal.SIGKILL)
        if reported := [int(number) for number in (root / "told").read_text().split()]:
            # A step is reported when it returns; its commit follows while the next step trains.
            assert last - every <= reported[0] <= last + every, (last, reported)
            last = reported[-1]
    expected = undisturbed(last, build=build, experts=experts)
    assert equal(torch.load(root / "state.pt", weights_only=True), expected)
    # One run throughout; dead directories are removed unless they were created just now.
    remaining = [entry for entry in path.iterdir() if not entry.name.startswith(".infinity-new-")]
    assert len(remaining) == 1
    return last


def fail_repeatedly(root: Path, seeds: range) -> Counter[str]:
    """Train on a faulty disk until it fails, then resume from the last commit without faults."""
    seen: Counter[str] = Counter()
    states = [undisturbed(number) for number in range(STEPS + 1)]
    for seed in seeds:
        rng, path = random.Random(seed), root / str(seed)
        path.mkdir()
        placement = PLACEMENTS[rng.choice(list(PLACEMENTS))]
        faults = f"seed={seed},kinds=eio+enospc+flip+short+reorder,rate={rng.choice((1e-3, 1e-2))}"
        options = {"placement": placement, "commit_every": rng.choice((1, 2)), "prefetch_units": 1}
        reported = 0
        try:
            io = {"faults": faults, "block_size": 4096}
            with durable_engine(path, gated(), **options, io=io) as engine:
                while engine.global_steps < STEPS:
                    step(engine)
                    reported = engine.global_steps
                assert equal(state_of(engine), states[STEPS])
            seen["right"] += 1
        except (TransferError, EngineFailedError):
            seen["failed"] += 1
        if not list(path.iterdir()):
            seen["never began"] += 1
            continue
        with durable_engine(path, gated(), **options, resume="auto") as engine:
            resumed_step = engine.global_steps
            assert reported - options["commit_every"] <= resumed_step <= reported + 1, seed
            try:
                assert equal(state_of(engine), states[resumed_step]), seed
                seen["resumed"] += 1
            except TransferError as error:  # a bit flipped while it was written
                if error.errno != errno.EBADMSG:
                    raise
                seen["flipped"] += 1
    return seen


def test_failing_drive_gives_exact_state_or_error(tmp_path: Path) -> None:
    """Training ends with exact results or an error; resuming from the last commit is exact."""
    seen = fail_repeatedly(tmp_path, range(10))
    assert seen["failed"] > 1, seen
    assert seen["resumed"] > 1, seen


@pytest.mark.big
def test_failing_drive_gives_exact_state_or_error_many_seeds(tmp_path: Path) -> None:
    seen = fail_repeatedly(tmp_path, range(10, 80))
    assert seen["failed"] > 10, seen
    assert seen["resumed"] > 10, seen


@pytest.mark.parametrize("case", CASES)
def test_kill_at_any_line_loses_no_committed_step(tmp_path: Path, case: str) -> None:
    rng, every = random.Random(case), CASES[case].get("commit_every", 1)
    # A start runs 20 000 lines, as does a step; more on a busy machine, because threads poll.
    starts = (5_000, 40_000, 90_000 + 25_000 * every)
    lines = [TIME_FACTORS.get(case, 1) * rng.randrange(start, start + 20_000) for start in starts]
    # The two children that close take four steps.
    assert kill_repeatedly(tmp_path, case, [lines[0], None, *lines[1:]]) > 4


@pytest.mark.big
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", CASES)
def test_kill_at_random_times_loses_no_committed_step(tmp_path: Path, case: str) -> None:
    rng = random.Random(case)
    longest_s = 0.5 * TIME_FACTORS.get(case, 1)
    moments = [None if rng.random() < 0.1 else rng.uniform(0, longest_s) for _ in range(100)]
    assert kill_repeatedly(tmp_path, case, moments) > 20

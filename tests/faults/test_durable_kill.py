"""Durable steps, where processes are killed -9 at random moments, and where drives fail."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.durable import HOMES, State, durable_engine, equal, gated, state_of, step
from support.small import settings

import infinity
from infinity.errors import EngineFailedError, TransferError

STEPS = 4
TESTS = Path(__file__).parent.parent
# More and slower: wider windows in sweeps and commits.
CASES: dict[str, dict[str, Any]] = {
    "all on disk": {"homes": HOMES["all on disk"]},
    "all on disk, slow": {"homes": HOMES["all on disk"], "io": {"slow_bytes_per_s": 4 << 20}},
    "verified, moments in RAM": {
        "homes": HOMES["moments in RAM"],
        "durable_every": 1,
        "io": {"verify": True, "slow_bytes_per_s": 8 << 20},
    },
    "all in RAM, every third": {"homes": HOMES["all in RAM"], "durable_every": 3},
}


def undisturbed(steps: int) -> State:
    given = settings(Path("unused"), HOMES["all in RAM"])
    del given["nvme_path"]
    with infinity.initialize(gated(), given)[0] as engine:
        for _ in range(steps):
            step(engine)
        return state_of(engine)


def kill_often(root: Path, case: str, kills: int, seed: int) -> int:
    """Returns how many children were killed; the last one's state must be as if none was."""
    path, more = root / "nvme", CASES[case]
    path.mkdir()
    command = [sys.executable, "-m", "support.durable", str(path), str(seed), str(kills)]
    ran = subprocess.run(
        [*command, json.dumps(more)],
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:] + ran.stdout[-500:]
    outcomes = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(outcomes) == kills + 1
    every, told = more.get("durable_every", 1), 0
    for outcome in outcomes:
        if not outcome["told"]:
            continue  # killed before it had begun
        first, told_now = outcome["told"][0], outcome["told"][-1]
        # A step is told when it has returned; its commit follows, while the next step trains.
        assert told - every <= first <= told + every, outcomes
        told = told_now
        if not outcome["killed"]:
            assert outcome["status"] == 0
    stored = torch.load(root / "state.pt", weights_only=True)
    state = {(int(k.split("|")[0]), k.split("|")[1]): v for k, v in stored.items()}
    assert equal(state, undisturbed(told))
    # One run all the time; what never began is cleaned up, but for what was being made just now.
    left = [entry for entry in path.iterdir() if not entry.name.startswith(".infinity-new-")]
    assert len(left) == 1
    return sum(outcome["killed"] for outcome in outcomes)


def fail_often(root: Path, seeds: range) -> Counter[str]:
    """Train over a faulty disk until it fails, and then from the last commit over a sound one."""
    seen: Counter[str] = Counter()
    states = [undisturbed(number) for number in range(STEPS + 1)]
    for seed in seeds:
        choose, path = random.Random(seed), root / str(seed)
        path.mkdir()
        homes = HOMES[choose.choice(list(HOMES))]
        faults = (
            f"seed={seed},kinds=eio+enospc+flip+short+reorder,rate={choose.choice((1e-3, 1e-2))}"
        )
        more = {"homes": homes, "durable_every": choose.choice((1, 2)), "look_ahead": 1}
        told = 0
        try:
            io = {"verify": True, "faults": faults, "block_size": 4096}
            with durable_engine(path, gated(), **more, io=io) as engine:
                while engine.global_steps < STEPS:
                    step(engine)
                    told = engine.global_steps
                assert equal(state_of(engine), states[STEPS])
            seen["right"] += 1
        except (TransferError, EngineFailedError):
            seen["failed"] += 1
        if not list(path.iterdir()):
            seen["never began"] += 1
            continue
        with durable_engine(path, gated(), **more, io={"verify": True}, resume="auto") as engine:
            found = engine.global_steps
            assert told - more["durable_every"] <= found <= told + 1, seed
            try:
                assert equal(state_of(engine), states[found]), seed
                seen["resumed"] += 1
            except TransferError as error:  # a bit that was flipped on its way to the disk
                if error.errno != errno.EBADMSG:
                    raise
                seen["flipped"] += 1
    return seen


def test_a_drive_that_fails(tmp_path: Path) -> None:
    """The right bits, or an error; and from the last commit on the right bits again."""
    seen = fail_often(tmp_path, range(40))
    assert seen["failed"] > 5, seen
    assert seen["resumed"] > 5, seen


@pytest.mark.parametrize("case", CASES)
def test_killed_at_random_moments(tmp_path: Path, case: str) -> None:
    assert kill_often(tmp_path, case, 10, seed=1) >= 8


@pytest.mark.big
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", CASES)
def test_killed_at_random_moments_at_length(tmp_path: Path, case: str) -> None:
    seed = random.Random(case).randrange(1 << 20)
    assert kill_often(tmp_path, case, 100, seed) >= 80

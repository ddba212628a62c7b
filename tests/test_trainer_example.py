"""examples/trainer.py in a process of its own: it trains, saves, loads, and goes on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "trainer.py"


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *arguments],
        capture_output=True, text=True, timeout=600, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def loss_of(output: str) -> str:
    found = re.search(r"held-out loss (\S+) nats", output)
    assert found, output
    return found[1]


def test_the_example_trains_and_goes_on(tmp_path: Path) -> None:
    through = run("--steps", "4", "--out", str(tmp_path / "out"))
    assert 3.0 < float(loss_of(through)) < 5.5  # ln(256) is 5.545
    assert "def __init__(self" in through
    assert "disk" in through
    left = {p.name for p in (tmp_path / "out").iterdir()}
    assert left == {"checkpoint-2", "checkpoint-4", "final"}
    (tmp_path / "out" / "checkpoint-4" / "trainer_state.json").unlink()
    again = run("--steps", "4", "--out", str(tmp_path / "out"), "--resume")
    assert loss_of(again) == loss_of(through)

"""A model larger than the RAM it is given: the same bits as with room for everything.

The small budget is a memory control group: the process, its page cache, everything. What does not
fit is killed by the kernel, so that passing is the proof.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent.parent
IN_CGROUP = TESTS / "memory" / "run_in_cgroup.sh"
MIB = 1 << 20
ON_DISK = {"weights": "disk", "moments": "disk", "gradients": "disk"}
NO_GROUP = 77


def live(job: dict[str, Any], limit: int | None = None) -> dict[str, Any]:
    """Run one life, in a memory control group of `limit` bytes if one is given."""
    command = [sys.executable, "-m", "support.larger_than_ram", json.dumps(job)]
    if limit is not None:
        command = [str(IN_CGROUP), str(limit), *command]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=False)
    if done.returncode == NO_GROUP:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout)
    result["cgroup_peak"] = done.stderr.rpartition("peak ")[2].strip()
    return result


def compare(job: dict[str, Any], limit: int, tmp_path: Path) -> dict[str, Any]:
    """Both lives; what they must have in common is checked here."""
    found = {}
    for name, host, homes, group in (
        ("small", limit, ON_DISK, limit),
        ("roomy", 20 << 30, {}, None),
    ):
        folder = tmp_path / name
        folder.mkdir()
        own = {"path": str(folder), "save_dir": str(folder / "saved"), "host": host, "homes": homes}
        found[name] = live({**job, **own}, group)
        left = [entry.name for entry in folder.iterdir()]
        assert left == ["saved"]
        shutil.rmtree(folder / "saved")
    small, roomy = found["small"], found["roomy"]
    for key in ("losses", "onward", "grad_norm", "evaluated", "fresh", "loaded", "digest"):
        assert small[key] == roomy[key], key
    for life in found.values():
        assert life["resumed"] == life["onward"]
    assert small["loaded"] == small["evaluated"] != small["fresh"]
    assert len(set(small["losses"])) == len(small["losses"])
    assert small["tier_bytes"]["disk"] > small["state_bytes"]
    # The other one has what the plan found room for in RAM: all of a model that is not too large.
    assert roomy["tier_bytes"]["disk"] < small["tier_bytes"]["disk"] / 2
    small["roomy_disk_bytes"] = roomy["tier_bytes"]["disk"]
    return small


def disk_room(path: Path, nbytes: int) -> None:
    facts = os.statvfs(path)
    if facts.f_bavail * facts.f_frsize < nbytes:
        pytest.skip(f"{path} has less than {nbytes >> 30} GiB free")


@pytest.mark.timeout(1200)  # two lives of a minute or two each, on a machine that does more
def test_state_eight_times_the_memory(tmp_path: Path) -> None:
    job = {
        "width": 640,
        "num_layers": 84,
        "vocab_size": 512,
        "context": 8,
        "precision": "fp32",  # few processors of a test machine multiply bf16 fast
        "steps": 2,
        "micro_batches": 2,
        "reload": "born",
    }
    limit = 576 * MIB
    disk_room(tmp_path, 12 << 30)
    small = compare(job, limit, tmp_path)
    assert small["state_bytes"] >= 8 * limit
    assert small["roomy_disk_bytes"] == 0  # the other one never touched the disk


@pytest.mark.big
@pytest.mark.timeout(7200)
def test_1_3_billion_parameters_in_two_gibibytes(tmp_path: Path) -> None:
    job = {
        "width": 2048,
        "num_layers": 24,
        "vocab_size": 32000,
        "context": 8,
        "precision": "bf16",
        "steps": 3,
        "micro_batches": 2,
        "reload": "loaded",
    }
    disk_room(tmp_path, 40 << 30)
    small = compare(job, 2 << 30, tmp_path)
    assert small["state_bytes"] >= 15_000_000_000

"""Tests of training a model larger than the available RAM, against a run with enough RAM.

The small run is limited by a memory control group, which includes the page cache. The kernel
kills a process that exceeds it, so passing is the proof.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
from support.larger_than_ram import NUM_STACKS, live

from infinity.plan.machine import mount_of

TESTS = Path(__file__).resolve().parent.parent
IN_CGROUP = TESTS / "memory" / "run_in_cgroup.sh"
MIB = 1 << 20
ON_DISK = {"weights": "disk", "optimizer_state": "disk", "gradients": "disk"}
NO_GROUP = 77


@cache
def process_bytes() -> int:
    """Return the resident memory of a process that imported torch (over twice with CUDA)."""
    code = "import support.larger_than_ram as _; print(open('/proc/self/statm').read().split()[1])"
    done = subprocess.run([sys.executable, "-c", code], cwd=TESTS, stdout=PIPE, check=True)
    return int(done.stdout) * os.sysconf("SC_PAGESIZE")


def run_in_cgroup(limit: int, job: dict[str, Any]) -> dict[str, Any]:
    """Run the job in a memory control group of `limit` bytes."""
    command = [sys.executable, "-m", "support.larger_than_ram", json.dumps(job)]
    command = [str(IN_CGROUP), str(limit), *command]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=False)
    if done.returncode == NO_GROUP:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def compare_runs(
    job: dict[str, Any], limit: int, path: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run the job in the small group and in this process, and assert equal results.

    Only the small run resumes from its checkpoint: test_resume of tests/parity covers RAM.
    """

    def job_in(name: str, **more: Any) -> dict[str, Any]:
        (path / name).mkdir()
        return job | {"path": str(path / name), "save_dir": str(path / name / "saved")} | more

    small = run_in_cgroup(limit, job_in("small", host=limit, placement=ON_DISK))
    roomy = live(job_in("roomy", host=20 << 30, placement={}, reload=""))
    for name in ("small", "roomy"):
        assert [entry.name for entry in (path / name).iterdir()] == ["saved"]
        shutil.rmtree(path / name)
    for key in ("losses", "onward", "grad_norm", "evaluated", "digest"):
        assert small[key] == roomy[key], key
    if job["reload"]:
        assert small["resumed"] == small["onward"]
        assert small["loaded"] == small["evaluated"] != small.get("fresh")
    values = [*small["losses"], *small["onward"], small["evaluated"]]
    assert len(set(values)) == len(values)
    assert small["tier_bytes"]["disk"] > small["state_bytes"]
    # The other run stores in RAM whatever fits: all of a model that is not too large.
    assert roomy["tier_bytes"]["disk"] < small["tier_bytes"]["disk"] / 2
    return small, roomy


def require_disk_space(path: Path, nbytes: int) -> None:
    if mount_of(path).file_system in ("tmpfs", "ramfs"):
        pytest.skip(f"{path} is in RAM, and so is a disk tier there")
    facts = os.statvfs(path)
    if facts.f_bavail * facts.f_frsize < nbytes:
        pytest.skip(f"{path} has less than {nbytes >> 30} GiB free")


def make_job(width: int, num_layers: int, steps: int) -> dict[str, Any]:
    return {
        "width": width,
        "num_layers": num_layers,
        "vocab_size": 512,
        "context": 8,
        "precision": "fp32",  # few test machines multiply bf16 fast
        "steps": steps,
        "micro_batches": 2,
        "reload": "initialized",
    }


def compare_state(
    tmp_path: Path, times: float, extra_bytes: int, width: int, layers_per_gib: int
) -> None:
    """Train with state of `times` the limit, which is the process and `extra_bytes`."""
    # More library pages are loaded as more code is used. A control group counts whole pages.
    limit = (process_bytes() * 5 // 4 + extra_bytes) // MIB * MIB
    num_layers = math.ceil(layers_per_gib * limit / (1 << 30))
    require_disk_space(tmp_path, int(3 * times * limit))
    small, roomy = compare_runs(make_job(width, num_layers, 1), limit, tmp_path)
    assert small["state_bytes"] >= times * limit
    assert roomy["tier_bytes"]["disk"] == 0  # it did not use the disk


@pytest.mark.timeout(1200)
def test_expert_layer_larger_than_memory(tmp_path: Path) -> None:
    """The weights of one layer exceed the memory limit of the process."""
    width, share = 512, 1.1
    stack_share = share / NUM_STACKS  # each parameter is created as one stack
    limit = int((process_bytes() * 5 / 4 + 120 * MIB) / (1 - stack_share)) // MIB * MIB
    num_experts = math.ceil(share * limit / (4 * NUM_STACKS * width**2))
    require_disk_space(tmp_path, 8 * limit)
    job = make_job(width, 1, 1) | {"num_experts": num_experts, "experts_per_unit": 4}
    job["reload"] = ""  # it would double the duration
    small, roomy = compare_runs(job, limit, tmp_path)
    assert small["largest_layer_bytes"] >= share * limit
    assert roomy["tier_bytes"]["disk"] == 0  # it did not use the disk


@pytest.mark.big
@pytest.mark.timeout(1200)
def test_state_larger_than_memory(tmp_path: Path) -> None:
    """The weights, a third of the state, exceed the memory left to the engine."""
    compare_state(tmp_path, 1.25, 150 * MIB, 384, 64)


@pytest.mark.big
@pytest.mark.timeout(7200)
def test_state_eight_times_memory(tmp_path: Path) -> None:
    compare_state(tmp_path, 8, 340 * MIB, 640, 150)


@pytest.mark.big
@pytest.mark.timeout(7200)
def test_1_3_billion_parameters_in_2_gib(tmp_path: Path) -> None:
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
    require_disk_space(tmp_path, 40 << 30)
    small, _ = compare_runs(job, 2 << 30, tmp_path)
    assert small["state_bytes"] >= 15_000_000_000

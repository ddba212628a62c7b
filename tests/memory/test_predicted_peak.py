"""Tests of the planned memory of each tier against the measured peak of the process.

On a CPU, and with the fake accelerator, the device is RAM as well: both are measured together.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import forked
from support.measured_run import measure
from support.process_memory import SMALL_BYTES, needs_peak

MIB = 1 << 20
ON_DISK = {"weights": "disk", "optimizer_state": "disk", "gradients": "disk"}
IN_RAM = {"weights": "device", "optimizer_state": "host", "gradients": "host"}
# 38 million parameters in 3 blocks of 48 MiB: large compared with the noise of a process.
MODEL = {"width": 1024, "num_layers": 3, "vocab_size": 512, "tokens": 8, "init": True}
GRADIENTS = (48 - 16) * MIB  # of a block, without the largest one
RUNS: dict[str, dict[str, Any]] = {
    "separate device memory": {
        "config": {"placement": ON_DISK | {"gradients": "host"}, "prefetch_units": 1},
        "fake": True,
    },
    "all on disk": {"config": {"placement": ON_DISK}},
    "all on disk, built in RAM": {"config": {"placement": ON_DISK}, "init": False},
    "gradients in RAM": {
        "config": {"placement": ON_DISK | {"gradients": "host"}},
        "micro_batches": 2,
    },
    "all in RAM": {"config": {"placement": IN_RAM}},
    "8 bit": {
        "config": {"placement": IN_RAM | {"weights": "disk"}, "optimizer": {"moments": "8bit"}},
    },
    "by budget": {"config": {"prefetch_units": 1}, "host": 630 * MIB},
}
# An embedding of 128 MiB with weights in slots, not yet touched by the initial write.
INITIAL_WRITE = RUNS["all in RAM"] | {
    "width": 512,
    "num_layers": 1,
    "vocab_size": 65_536,
    "steps": 0,
}


def measure_runs(path: Path, runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    jobs = []
    for index, job in enumerate(runs.values()):
        directory = path / str(index)
        directory.mkdir()
        common = {
            "micro_batches": 1,
            "steps": 2,
            "fake": False,
            "host": None,
            "path": str(directory),
        }
        jobs.append(MODEL | common | job)
    return dict(zip(runs, forked.call(measure, jobs), strict=True))


QUICK = ("separate device memory", "gradients in RAM", "all in RAM", "by budget")


@needs_peak
@pytest.mark.parametrize("names", [QUICK, pytest.param(tuple(RUNS), marks=pytest.mark.big)])
def test_measured_peaks_match_plan(tmp_path: Path, names: tuple[str, ...]) -> None:
    runs = {name: RUNS[name] for name in names}
    found = measure_runs(tmp_path, runs | {"initial_write": INITIAL_WRITE})
    assert_initial_write_peak(found.pop("initial_write"))
    for name, one in found.items():
        host, ram = one["memory"]["host"], ram_of(one)
        assert one["initialized"] <= ram + SMALL_BYTES, name
        ram += one["activations"] - host["saving"]  # nothing is saved
        assert one["peak"] <= ram + SMALL_BYTES, name
        # All gradients of a unit are planned, one is held. Unused buffers are not resident.
        ram -= GRADIENTS + host["staging"]
        if RUNS[name].get("fake"):  # would be pinned, but is not resident on the fake accelerator
            ram -= host["fetch staging"] + host["gradient staging"] + host["initial_write"]
        assert one["peak"] >= ram - SMALL_BYTES, name
        record = one["on_disk"] - sum(one["memory"]["disk"].values())
        assert 0 <= record < 4096, name  # record of the process that owns the extents
        assert one["moved"] == one["forecast"], name
    tiers = [set(kind) for kind in found["by budget"]["placement"].values()]
    assert len(set.union(*tiers)) > 1, "the budget must mix tiers"


def ram_of(found: dict[str, Any]) -> int:
    return sum(sum(found["memory"][tier].values()) for tier in ("host", "device"))


def assert_initial_write_peak(found: dict[str, Any]) -> None:
    host, ram = found["memory"]["host"], ram_of(found)
    assert found["initialized"] <= ram + SMALL_BYTES
    assert found["initialized"] > ram - host["initial_write"] - host["gradients"]

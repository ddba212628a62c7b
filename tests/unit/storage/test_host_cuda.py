"""Tests of `CudaDevice` without a GPU, on an emulated "cuda" device of torch.

Tensors belong to that device, a backward runs on the device's thread, and unordered accesses are
reported; see `support/host_cuda.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.cuda_on_host import compiler

TESTS = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.skipif(torch.version.cuda is not None, reason="torch has a CUDA of its own"),
    pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="written for torch 2.13"),
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler"),
]
# GPU tests that measure time, capture or compile cannot run here.
EXCLUDED = ("compiled", "capture", "queued", "cache", "square", "many")
# One test of each kind.
SELECTED = ("updates[2-disk]", "device-ram", "alternating", "results[host]", "once", "trace")
SELECTED += ("loss[ram]", "another_thread", "invalid_input", "cpu_adam", "handed_out")
NUM_SELECTED = 14


def run_python(*command: str) -> str:
    """Run a Python command, check that it succeeds, and return its stdout."""
    paths = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, *command],
        cwd=TESTS.parent,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return done.stdout


@pytest.mark.parametrize("chosen", [SELECTED, pytest.param((), marks=pytest.mark.big)])
def test_gpu_tests_pass_on_host(chosen: tuple[str, ...]) -> None:
    conditions = [f"({' or '.join(chosen)})"] if chosen else []
    conditions += [f"not {word}" for word in EXCLUDED]
    output = run_python(
        *("-m", "pytest", "-q", "-p", "support.host_cuda", "-p", "no:cacheprovider"),
        *("-m", "gpu", "-k", " and ".join(conditions), str(TESTS / "gpu")),
    )
    # A renamed GPU test must not leave the selection unnoticed.
    assert (f"{NUM_SELECTED} passed" if chosen else " passed") in output
    assert "skipped" not in output


def test_unordered_accesses_are_reported() -> None:
    counts = json.loads(
        run_python("-c", "from support import host_cuda, unordered; unordered.main()")
    )
    assert counts.pop("nothing") == 0
    assert len(counts) == 6
    assert all(count > 0 for count in counts.values()), counts

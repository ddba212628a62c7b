"""The engine on a CUDA device without a GPU: `CudaDevice` itself, on torch's device of that name.

Its tensors are the device's own to torch, a backward runs on the device's thread, and what nothing
orders is told; see `support/host_cuda.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.cuda_on_host import compiler

TESTS = Path(__file__).parent
pytestmark = [
    pytest.mark.skipif(torch.version.cuda is not None, reason="torch has a CUDA of its own"),
    pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="written for torch 2.13"),
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler"),
]
# What takes a GPU's time, captures or compiles is not for this one.
NOT_HERE = ("compiled", "capture", "queued", "cache", "square", "many")


def python(*command: str) -> str:
    """What it printed; it must end well."""
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


@pytest.mark.parametrize(
    ("file", "chosen"),
    [
        (
            "test_overlap.py",
            "streamed and disk or device-ram or in_turn or recomputed or once or trace or own",
        ),
        pytest.param("test_overlap.py", "", marks=pytest.mark.big),
        ("test_cuda.py", "bf16 and host"),
        pytest.param("test_cuda.py", "", marks=pytest.mark.big),
        ("test_standalone_cuda.py", ""),
        ("test_fused_adam.py", "thread or input"),
    ],
)
def test_tests_of_a_gpu_pass(file: str, chosen: str) -> None:
    words = [f"({chosen})"] if chosen else []
    words += [f"not {word}" for word in NOT_HERE]
    told = python(
        *("-m", "pytest", "-q", "-p", "support.host_cuda", "-p", "no:cacheprovider"),
        *("-m", "gpu", "-k", " and ".join(words), str(TESTS / "gpu" / file)),
    )
    assert " passed" in told
    assert "skipped" not in told


BROKEN = """
import sys
from support import host_cuda
import torch
import infinity
from infinity.storage import cuda
from infinity.storage.cuda import CudaDevice
from support.small import VOCABULARY, small_model

how = sys.argv[1]
CudaDevice._PIN_SLICE = 1 << 14
if how == "copies cross registrations":
    CudaDevice._registered_parts = lambda self, address, nbytes: [(0, nbytes)]
if how == "copies out do not wait for compute":
    CudaDevice.copy_out = lambda self, target, source, after=None: self._copy(
        self._out, target, source, cuda.HAPPENED)
if how == "copies wait for nothing":
    plain = CudaDevice._copy
    CudaDevice._copy = lambda self, stream, target, source, after: plain(
        self, stream, target, source, cuda.HAPPENED)
if how == "compute waits for nothing":
    CudaDevice.compute_wait = lambda self, event: None
if how == "the host waits for nothing":
    cuda.CudaEvent.wait = lambda self: None
    cuda.CudaEvent.done = lambda self: True
place = dict.fromkeys(("weights", "moments", "gradients"), "host")
update = "device" if how == "all is well" else "cpu"
config = {"placement": place, "precision": "bf16", "update": update}
engine, *_ = infinity.initialize(small_model(num_blocks=8, width=32), config, device="cuda")
with engine:
    for _ in range(3):
        loss = engine(torch.randint(0, VOCABULARY, (2, 16), device="cuda"))
        engine.backward(loss)
        engine.step()
    try:
        engine(torch.randint(0, VOCABULARY, (2, 16)))
    except infinity.errors.TrainingError as error:
        assert "is on cpu" in str(error)
    try:
        loss + torch.ones(3)
    except RuntimeError as error:
        assert "two devices" in str(error)
    else:
        raise AssertionError("tensors of two devices met")
print(len(host_cuda.violations()))
"""


@pytest.mark.parametrize(
    "how",
    [
        "all is well",
        "copies cross registrations",
        "copies out do not wait for compute",
        "copies wait for nothing",
        "compute waits for nothing",
        "the host waits for nothing",
    ],
)
def test_what_nothing_orders_is_told(how: str) -> None:
    told = int(python("-c", BROKEN, how))
    assert (told == 0) == (how == "all is well")

"""CUDA kernels run on the host: `fused_adam.cu`, built by the machine's C++ compiler.

`HostLauncher` replaces `CudaLauncher`, so that everything in `CudaKernels` but the launch itself
runs without a GPU. Libraries are built once per variant and cached in the temporary directory.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from infinity.optim import cuda_compile
from infinity.optim.cuda_launch import Launch, Variant

_HERE = Path(__file__).parent
_FLAGS = ("-std=c++20", "-O2", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-shared")
_WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-unused-function")


def compiler() -> str | None:
    """Return a C++ compiler of this machine, or None."""
    chosen = os.environ.get("CXX")
    return chosen or next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


class HostLauncher:
    """Launcher that runs kernels synchronously on the calling thread and records the launches."""

    def __init__(self) -> None:
        self.launched: list[Launch] = []

    def __call__(self, launch: Launch, stream: object) -> None:
        del stream
        self.launched.append(launch)
        arguments = (ctypes.c_void_p * len(launch.arguments))(
            *(ctypes.addressof(argument) for argument in launch.arguments)
        )
        library = _library(launch.variant)
        ran = library.run(launch.kernel.encode(), launch.blocks, launch.threads, arguments)
        assert ran, f"no kernel {launch.kernel} in {launch.variant}"

    def scratch(self, num_elements: int, stream: object) -> torch.Tensor:
        del stream
        return torch.full((num_elements,), float("nan"), dtype=torch.float64)


@cache
def _library(variant: Variant) -> ctypes.CDLL:
    source = _HERE / "cuda_on_host.cpp"
    sources = (cuda_compile.source(), source.read_text(), (_HERE / "cuda_on_host.h").read_text())
    digest = hashlib.sha256(repr((sources, variant, _FLAGS)).encode()).hexdigest()[:24]
    folder = Path(tempfile.gettempdir()) / f"infinity-cuda-on-host-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    target = folder / f"{digest}.so"
    if not target.exists():
        temporary = folder / f"{digest}.{os.getpid()}.so"
        command = [compiler() or "c++", *_FLAGS, *_WARNINGS, f"-I{_HERE}"]
        command += [f"-I{cuda_compile.folder()}", *(f"-D{name}={value}" for name, value in variant)]
        subprocess.run([*command, "-o", str(temporary), str(source)], check=True)
        os.replace(temporary, target)
    return ctypes.CDLL(str(target))

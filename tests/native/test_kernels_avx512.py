"""Test of the AVX-512 kernels with emulated intrinsics, on any CPU, against the baseline kernels.

On a CPU with AVX-512 all other tests run the real kernels as well.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from infinity import _adam

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "csrc/adam"
EMULATED = ROOT / "tests/native/emulated"
COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
FLAGS = ["-std=c++20", "-O1", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi"]


def compile_kernels(target: Path, name: str, *flags: str) -> None:
    table = f"k{name.capitalize()}Kernels"
    defines = [f'-DINFINITY_ISA_NAME="{name}"', f"-DINFINITY_ISA_TABLE={table}"]
    source = str(KERNELS / "isa.cpp")
    subprocess.run(
        [str(COMPILER), *FLAGS, *flags, *defines, "-c", source, "-o", str(target)], check=True
    )


@pytest.mark.big
@pytest.mark.timeout(1200)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="compares with SSE2")
@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_emulated_avx512_kernels_equal_baseline(tmp_path) -> None:
    baseline, emulated, program = (tmp_path / name for name in ("a.o", "b.o", "compare"))
    compile_kernels(baseline, "baseline")
    compile_kernels(emulated, "emulated", f"-I{EMULATED}", "-D__AVX512F__=1")
    subprocess.run(
        [
            str(COMPILER),
            *FLAGS,
            f"-I{KERNELS}",
            str(EMULATED / "compare.cpp"),
            str(baseline),
            str(emulated),
            "-o",
            str(program),
        ],
        check=True,
    )
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert f"{288 * len(_adam.rules())} cases, 0 different" in done.stdout

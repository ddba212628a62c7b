"""Tests of compiling the CUDA kernels: options, machine code, cache, missing dependencies.

NVRTC needs no GPU. Tests that compile skip where `cuda-core` and NVRTC are not installed (`make
setup` installs them); $INFINITY_CUDA_SITE names another folder to import them from.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support.cuda_pieces import combinations

from infinity.errors import MachineError
from infinity.optim import cuda, cuda_compile, cuda_launch
from infinity.optim.cuda import CudaKernels
from infinity.optim.cuda_compile import default_folder, read_cached, write_cached

CSRC = Path(__file__).parents[3] / "csrc" / "adam"
ARCHES = ("sm_80", "sm_90")
VARIANT = (
    ("INFINITY_RULE", "Adam"),
    ("INFINITY_LAYOUT", "SplitWeight"),
    ("INFINITY_GRADIENT", "Bf16"),
    ("INFINITY_MOMENTS", "Fp32Moment"),
)
# Fused multiply-add, approximate division and roots, flushed denormals. fp64 squares are exact.
FORBIDDEN = re.compile(r"\b(?:fma\.\S*f32|mad\.\S*f32|\S+\.approx\S*|\S+\.ftz\S*|\S+\.full\.f32)\b")


@pytest.fixture(scope="module", autouse=True)
def _site():
    folder = os.environ.get("INFINITY_CUDA_SITE")
    if folder:
        sys.path.append(folder)
        for library in Path(folder).glob("nvidia/*/lib/libnvrtc.so.*"):
            ctypes.CDLL(str(library))  # cuda-core searches only the folders of the interpreter
    cuda_compile.version.cache_clear()
    yield
    if folder:
        sys.path.remove(folder)


@pytest.fixture
def compiler(_site):
    if (reason := cuda_compile.why_not()) is not None:
        pytest.skip(reason)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "deep" / "kernels"
    monkeypatch.setenv("INFINITY_KERNEL_CACHE", str(folder))
    return folder


def variant_of(combination) -> cuda_launch.Variant:
    rule, weight, gradient, format = combination
    names = (rule.capitalize(), cuda_launch.LAYOUTS[weight], cuda_launch.TYPES[gradient])
    macros = ("INFINITY_RULE", "INFINITY_LAYOUT", "INFINITY_GRADIENT", "INFINITY_MOMENTS")
    return tuple(zip(macros, (*names, cuda_launch.FORMATS[format]), strict=True))


def ptx(variant: cuda_launch.Variant) -> str:
    """Return the PTX of a variant, compiled with the options of machine code.

    cuda-core needs a driver to make PTX, so this calls NVRTC directly.
    """
    bindings = importlib.import_module("cuda.bindings.nvrtc")

    def checked(answer):
        assert int(answer[0]) == 0, answer
        return answer[1] if len(answer) > 1 else None

    chosen = cuda_compile.options("compute_80", variant).as_bytes("nvrtc", "ptx")
    program = checked(
        bindings.nvrtcCreateProgram(cuda_compile.source().encode(), b"fused_adam.cu", 0, [], [])
    )
    checked(bindings.nvrtcCompileProgram(program, len(chosen), chosen))
    text = b" " * checked(bindings.nvrtcGetPTXSize(program))
    checked(bindings.nvrtcGetPTX(program, text))
    return text.decode()


def variants() -> list[cuda_launch.Variant]:
    """Return the variants in a deterministic order."""
    return sorted({variant_of(c) for c in combinations(every=False)} | {VARIANT})


@pytest.mark.parametrize(
    "start", [0, *(pytest.param(n, marks=pytest.mark.big) for n in range(1, 6))]
)
def test_every_combination_compiles(compiler, cache, start: int) -> None:
    """Compile a third of the variants, each for one architecture; big tests compile the others.

    `test_instructions_are_exact_and_vectorised` compiles all of them, but only to PTX.
    """
    for number, variant in enumerate(variants()[start % 3 :: 3], start // 3):
        code = cuda_compile.cubin(ARCHES[number % 2], variant)
        assert code.startswith(b"\x7fELF")
    for arch in ARCHES:
        assert cuda_compile.cubin(arch, cuda_launch.SQUARES).startswith(b"\x7fELF")


def test_instructions_are_exact_and_vectorised(compiler) -> None:
    texts = {variant: ptx(variant) for variant in [*variants(), cuda_launch.SQUARES]}
    for variant, text in texts.items():
        assert FORBIDDEN.findall(text) == [], variant
        assert ".local" not in text, variant  # no register spills
    adam = texts[VARIANT]
    assert "div.rn.f32" in adam
    assert "sqrt.rn.f32" in adam
    for moved in ("ld.global.cg.v4.f32", "st.global.cg.v4.f32", "st.global.cg.v4.u16"):
        assert moved in adam


def test_forbidden_pattern_matches_inexact_instructions() -> None:
    for wrong in ("fma.rn.f32 %f1", "div.approx.f32", "mul.ftz.f32", "div.full.f32"):
        assert FORBIDDEN.search(f"\t{wrong} ")
    for right in ("div.rn.f32 ", "sqrt.rn.f32 ", "mul.rn.f32 ", "fma.rn.f64 ", "mad.lo.s32 "):
        assert not FORBIDDEN.search(f"\t{right}")


def test_cubin_compiled_once_and_cached(compiler, cache, monkeypatch) -> None:
    first = cuda_compile.cubin("sm_80", VARIANT)
    (entry,) = cache.iterdir()
    with monkeypatch.context() as patch:
        core = importlib.import_module("cuda.core")
        patch.setattr(core, "Program", None)  # a second compilation would raise
        assert cuda_compile.cubin("sm_80", VARIANT) == first
    entry.write_bytes(entry.read_bytes()[:-1])  # a damaged entry is ignored
    again = cuda_compile.cubin("sm_80", VARIANT)  # bytes differ: symbol names have random parts
    assert again.startswith(b"\x7fELF")
    assert cuda_compile.cubin("sm_80", VARIANT) == again
    assert cuda_compile.cubin("sm_90", VARIANT) not in (first, again)
    assert len(list(cache.iterdir())) == 2


def test_compile_error_shows_source(compiler, cache, monkeypatch) -> None:
    monkeypatch.setattr(cuda_compile, "source", lambda: "this is no kernel")
    with pytest.raises(MachineError, match="did not compile") as caught:
        cuda_compile.cubin("sm_80", VARIANT)
    assert "this is no kernel" in (caught.value.because or "")


# --- without NVRTC -------------------------------------------------------------------------------


def test_missing_cuda_core_reason_reported(monkeypatch) -> None:
    cuda_compile.version.cache_clear()
    cuda_compile.core.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    reason = cuda_compile.why_not()
    assert reason is not None
    assert "cuda.core" in reason
    with pytest.raises(MachineError, match=re.escape("torch-infinity[cuda]")):
        cuda_compile.version()
    cuda_compile.version.cache_clear()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without CUDA is needed")
def test_missing_gpu_reason_reported() -> None:
    reason = cuda.why_not(torch.device("cuda"))
    assert reason is not None
    assert "torch" in reason
    with pytest.raises(MachineError, match="not a CUDA device"):
        CudaKernels("cuda")
    with pytest.raises(MachineError, match="cpu is not a CUDA device"):
        CudaKernels("cpu")


def test_source_is_self_contained() -> None:
    text = cuda_compile.source()
    assert "#include" not in text
    assert "#pragma once" not in text
    for name in ("update_small", "struct Adagrad", "fold_partials", "struct Segment"):
        assert text.count(name) >= 1
    assert text.count("struct Segment {") == 1


def test_cmake_installs_every_source_file() -> None:
    sources = {cuda_compile.SOURCE}
    while True:
        included = {
            i for p in sources for i in re.findall(r'#include "(.*)"', (CSRC / p).read_text())
        }
        if included <= sources:
            break
        sources |= included
    listed = (CSRC / "CMakeLists.txt").read_text()
    (installed,) = re.findall(r"install\(FILES ([^)]*?)\s+DESTINATION infinity/optim\)", listed)
    assert set(installed.split()) == sources


def test_cache_entries_distinct_and_persistent(cache: Path) -> None:
    assert read_cached("a", "b") is None
    write_cached(b"one", "a", "b")
    write_cached(b"two", "ab", "")
    assert read_cached("a", "b") == b"one"
    assert read_cached("ab", "") == b"two"
    write_cached(b"three", "a", "b")
    assert read_cached("a", "b") == b"three"
    assert len(list(cache.iterdir())) == 2  # no partially written entry


@pytest.mark.parametrize("damage", [b"", b"short", b"\0" * 100])
def test_damaged_cache_entry_ignored(cache: Path, damage: bytes) -> None:
    write_cached(b"payload", "key")
    (entry,) = cache.iterdir()
    entry.write_bytes(damage)
    assert read_cached("key") is None
    write_cached(b"payload", "key")
    assert read_cached("key") == b"payload"


def test_unwritable_cache_skipped(cache: Path) -> None:
    cache.parent.write_text("in the way")
    write_cached(b"payload", "key")
    assert read_cached("key") is None


def test_default_cache_folder(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("INFINITY_KERNEL_CACHE", raising=False)
    assert default_folder() == tmp_path / "infinity" / "kernels"
    monkeypatch.setenv("INFINITY_KERNEL_CACHE", str(tmp_path / "mine"))
    assert default_folder() == tmp_path / "mine"


def test_concurrent_cache_writers_leave_valid_entry(cache: Path) -> None:
    payloads = [bytes([k]) * 100_000 for k in range(3)]

    def write_and_read(payload: bytes) -> bool:
        for _ in range(60):
            write_cached(payload, "key")
            if read_cached("key") not in payloads:
                return False
        return True

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(write_and_read, payloads))
    assert len(list(cache.iterdir())) == 1

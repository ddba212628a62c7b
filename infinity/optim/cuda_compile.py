"""Run-time compilation of `fused_adam.cu` by NVRTC, through `cuda-core`, with a cache on disk.

Needs no nvcc, CUDA headers or torch. The source is package data; in a source tree it is read from
csrc/adam. NVRTC compiles without a GPU and without a driver. The same-bits guarantee depends on the
options: no fused multiply-add, IEEE division and square root, no flushing of denormals.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

from infinity.common.files import atomic_write
from infinity.errors import MachineError, first_lines

# Cache of compiled GPU kernels on disk, shared by processes.
#
# An entry is one file: the SHA-256 of the payload, then the payload. It is written to a temporary
# file and renamed, so concurrent readers and writers never see a partial entry. An entry with a
# wrong checksum counts as missing; if the folder is not usable, nothing is cached.


_DIGEST_BYTES = hashlib.sha256().digest_size


def read_cached(*key: str) -> bytes | None:
    """Return the payload cached under `key`; None if it is missing or damaged."""
    try:
        entry = _cache_file(key).read_bytes()
    except OSError:
        return None
    payload = entry[_DIGEST_BYTES:]
    return payload if hashlib.sha256(payload).digest() == entry[:_DIGEST_BYTES] else None


def write_cached(payload: bytes, *key: str) -> None:
    """Cache `payload` under `key`; does nothing if the folder is not writable."""
    path = _cache_file(key)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with atomic_write(path, 0o600) as file:
            file.write(hashlib.sha256(payload).digest() + payload)


def _cache_file(key: tuple[str, ...]) -> Path:
    digests = b"".join(hashlib.sha256(part.encode()).digest() for part in key)
    return default_folder() / f"{hashlib.sha256(digests).hexdigest()}.cubin"


def default_folder() -> Path:
    """Return `$INFINITY_KERNEL_CACHE`, or `infinity/kernels` in `$XDG_CACHE_HOME` or `~/.cache`."""
    if chosen := os.environ.get("INFINITY_KERNEL_CACHE"):
        return Path(chosen)
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(caches) / "infinity" / "kernels"


SOURCE = "fused_adam.cu"
_PACKAGE = Path(__file__).parent
_SOURCE_FOLDERS = (_PACKAGE, _PACKAGE.parents[1] / "csrc" / "adam")  # of a wheel, a source tree
_INCLUDE = re.compile(r'^#include "([\w.]+)"\n', re.MULTILINE)
_OPTIONS = {"std": "c++17", "fma": False, "ftz": False, "prec_div": True, "prec_sqrt": True}
_CORE = "cuda.core"
_REMEDY = "pip install 'torch-infinity[cuda]'"


def why_not() -> str | None:
    """Return why kernels cannot be compiled on this machine (one line), or None."""
    try:
        version()
    except MachineError as error:
        return f"{error.what}: {error.because}"
    return None


@cache
def version() -> str:
    """Return NVRTC's version, such as "13.0"; raises `MachineError` if it is not usable."""
    try:
        core()
        bindings = importlib.import_module("cuda.bindings.nvrtc")
        _, major, minor = bindings.nvrtcVersion()
    # Third-party loaders locate and load the libraries lazily, with errors of any type.
    except Exception as error:
        raise MachineError(
            "the CUDA kernels cannot be compiled", because=first_lines(error), remedy=_REMEDY
        ) from error
    return f"{major}.{minor}"


def folder() -> Path:
    """Return the folder of the kernel source."""
    for candidate in _SOURCE_FOLDERS:
        if (candidate / SOURCE).is_file():
            return candidate
    raise MachineError(
        f"{SOURCE} is not in the installed package",
        because=f"looked in {' and '.join(map(str, _SOURCE_FOLDERS))}",
        remedy="reinstall torch-infinity",
    )


@cache
def source() -> str:
    """Return the kernel source as one text, with includes of the project's files expanded."""
    return _expand_includes(SOURCE, set())


def options(arch: str, defines: tuple[tuple[str, str], ...]) -> Any:
    """Return `cuda.core.ProgramOptions` for `arch` ("sm_90", or "compute_90" for PTX)."""
    return core().ProgramOptions(arch=arch, define_macro=list(defines) or None, **_OPTIONS)


def cubin(arch: str, defines: tuple[tuple[str, str], ...]) -> bytes:
    """Return machine code for `arch` ("sm_90"), compiled with `defines` or from the cache.

    Raises `MachineError` if NVRTC is missing or rejects the source.
    """
    nvrtc_version = version()
    digest = hashlib.sha256(source().encode()).hexdigest()
    key = (digest, arch, nvrtc_version, repr((_OPTIONS, defines)))
    cached = read_cached(*key)
    if cached is not None:
        return cached
    try:
        program = core().Program(source(), "c++", options(arch, defines))
        code = bytes(program.compile("cubin").code)
    except Exception as error:
        raise MachineError(
            f"NVRTC {nvrtc_version} did not compile {SOURCE} for {arch}", because=str(error)
        ) from error
    write_cached(code, *key)
    return code


@cache
def core() -> Any:
    """Import cuda-core's module, `cuda.core.experimental` before version 1."""
    module = importlib.import_module(_CORE)
    return (
        module if hasattr(module, "Program") else importlib.import_module(f"{_CORE}.experimental")
    )


def _expand_includes(name: str, seen: set[str]) -> str:
    """Return the text of a source file; each include of a project file is expanded once."""
    if name in seen:
        return ""
    seen.add(name)
    text = (folder() / name).read_text(encoding="utf-8").replace("#pragma once\n", "")
    return _INCLUDE.sub(lambda match: _expand_includes(match[1], seen), text)

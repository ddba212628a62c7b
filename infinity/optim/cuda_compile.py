"""From `fused_adam.cu` to machine code of a GPU: NVRTC at run time, through `cuda-core`.

No nvcc, no CUDA headers, nothing of torch. The source travels as package data; in a source tree it
is read from csrc/adam. NVRTC compiles without a GPU and without a driver. The options are part of
the same-bits promise: no fused multiply-add, true division and square root, denormals kept.
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

# Compiled GPU kernels on disk, so that a second process need not compile them again.
#
# An entry is one file: the SHA-256 of the payload, then the payload. It is written beside its
# final name and renamed, so that a reader sees all of it or nothing, and processes may race. An
# entry whose sum does not fit is as good as none; a folder that cannot be used only makes this
# forgetful.


_SUM_BYTES = hashlib.sha256().digest_size


def kept(*key: str) -> bytes | None:
    """The payload last kept under `key`, None if there is none or it is damaged."""
    try:
        entry = _file_of(key).read_bytes()
    except OSError:
        return None
    payload = entry[_SUM_BYTES:]
    return payload if hashlib.sha256(payload).digest() == entry[:_SUM_BYTES] else None


def keep(payload: bytes, *key: str) -> None:
    """Keep `payload` under `key`; does nothing where the folder cannot be written."""
    path = _file_of(key)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with atomic_write(path, 0o600) as file:
            file.write(hashlib.sha256(payload).digest() + payload)


def _file_of(key: tuple[str, ...]) -> Path:
    sums = b"".join(hashlib.sha256(part.encode()).digest() for part in key)
    return default_folder() / f"{hashlib.sha256(sums).hexdigest()}.cubin"


def default_folder() -> Path:
    """`$INFINITY_KERNEL_CACHE`, else `infinity/kernels` below `$XDG_CACHE_HOME` or `~/.cache`."""
    if chosen := os.environ.get("INFINITY_KERNEL_CACHE"):
        return Path(chosen)
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(caches) / "infinity" / "kernels"


SOURCE = "fused_adam.cu"
_HERE = Path(__file__).parent
_FOLDERS = (_HERE, _HERE.parents[1] / "csrc" / "adam")  # a wheel's, a source tree's
_INCLUDE = re.compile(r'^#include "([\w.]+)"\n', re.MULTILINE)
_OPTIONS = {"std": "c++17", "fma": False, "ftz": False, "prec_div": True, "prec_sqrt": True}
_CORE = "cuda.core"
_REMEDY = "pip install 'torch-infinity[cuda]'"


def why_not() -> str | None:
    """Why kernels cannot be compiled here, in one line; None if they can."""
    try:
        version()
    except MachineError as error:
        return f"{error.what}: {error.because}"
    return None


@cache
def version() -> str:
    """NVRTC's version, such as "13.0"; raises `MachineError` where it cannot be used."""
    try:
        core()
        bindings = importlib.import_module("cuda.bindings.nvrtc")
        _, major, minor = bindings.nvrtcVersion()
    # The libraries are found and loaded by others, late, with errors of their own.
    except Exception as error:
        raise MachineError(
            "the CUDA kernels cannot be compiled", because=first_lines(error), remedy=_REMEDY
        ) from error
    return f"{major}.{minor}"


def folder() -> Path:
    """Where the kernel source is."""
    for candidate in _FOLDERS:
        if (candidate / SOURCE).is_file():
            return candidate
    raise MachineError(
        f"{SOURCE} is not in the installed package",
        because=f"looked in {' and '.join(map(str, _FOLDERS))}",
        remedy="reinstall torch-infinity",
    )


@cache
def source() -> str:
    """The kernel source as one text; includes of our own files are put in their place."""
    return _expanded(SOURCE, set())


def options(arch: str, defines: tuple[tuple[str, str], ...]) -> Any:
    """`cuda.core.ProgramOptions` for `arch` ("sm_90", or "compute_90" for PTX)."""
    return core().ProgramOptions(arch=arch, define_macro=list(defines) or None, **_OPTIONS)


def cubin(arch: str, defines: tuple[tuple[str, str], ...]) -> bytes:
    """Machine code for `arch` ("sm_90"), compiled with `defines` or kept from before.

    Raises `MachineError` where NVRTC is missing or refuses the source.
    """
    found_version = version()
    digest = hashlib.sha256(source().encode()).hexdigest()
    key = (digest, arch, found_version, repr((_OPTIONS, defines)))
    found = kept(*key)
    if found is not None:
        return found
    try:
        program = core().Program(source(), "c++", options(arch, defines))
        code = bytes(program.compile("cubin").code)
    except Exception as error:
        raise MachineError(
            f"NVRTC {found_version} did not compile {SOURCE} for {arch}", because=str(error)
        ) from error
    keep(code, *key)
    return code


@cache
def core() -> Any:
    """cuda-core's module; before version 1 it was called experimental."""
    module = importlib.import_module(_CORE)
    return (
        module if hasattr(module, "Program") else importlib.import_module(f"{_CORE}.experimental")
    )


def _expanded(name: str, seen: set[str]) -> str:
    """The text of a file with our own includes expanded once each."""
    if name in seen:
        return ""
    seen.add(name)
    text = (folder() / name).read_text(encoding="utf-8").replace("#pragma once\n", "")
    return _INCLUDE.sub(lambda match: _expanded(match[1], seen), text)

"""Files, buffers and throttled engines for the tests of `infinity._aio`."""

from __future__ import annotations

import ctypes
import mmap
import random
import subprocess
import sys
import textwrap
from pathlib import Path

from infinity import _aio
from infinity._aio import Engine, File

KIB = 1024
BLOCK = 64 * KIB


class Buffer:
    """Page-aligned memory with an address."""

    def __init__(self, nbytes: int, data: bytes = b"") -> None:
        self.map = mmap.mmap(-1, max(nbytes, 1))
        self.map[: len(data)] = data
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.nbytes = nbytes

    def bytes(self, start: int = 0, length: int | None = None) -> bytes:
        return self.map[start : self.nbytes if length is None else start + length]


def noise(nbytes: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def slow_engine(backend: str, bytes_per_s: int, queue_depth: int = 4) -> Engine:
    return Engine(
        backend=backend, block_size=BLOCK, queue_depth=queue_depth, slow_bytes_per_s=bytes_per_s
    )


def make_file(path: Path, data: bytes, *, direct: str = "off", read_only: bool = False) -> File:
    path.write_bytes(data)
    return File(str(path), direct=direct, read_only=read_only)


LOAD = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("infinity._aio", {_aio.__file__!r})
_aio = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_aio)
"""


def in_subprocess(script: str, *arguments: str) -> str:
    """Run a script and return its output.

    `_aio` is loaded without its package, which would import torch.
    """
    run = subprocess.run(
        [sys.executable, "-c", LOAD + textwrap.dedent(script), *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout

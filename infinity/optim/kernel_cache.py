"""Compiled GPU kernels on disk, so that a second process need not compile them again.

An entry is one file: the SHA-256 of the payload, then the payload. It is written beside its final
name and renamed, so that a reader sees all of it or nothing, and processes may race. An entry
whose sum does not fit is as good as none. Must not know what it stores.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

from infinity.stable import atomic_write

_SUM_BYTES = hashlib.sha256().digest_size


class KernelCache:
    """A folder of payloads by key; a folder that cannot be used only makes it forgetful."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder` is made when first written to; by default `default_folder()`."""
        self.folder = default_folder() if folder is None else folder

    def get(self, *key: str) -> bytes | None:
        """The payload last put under `key`, None if there is none or it is damaged."""
        try:
            entry = self._path(key).read_bytes()
        except OSError:
            return None
        payload = entry[_SUM_BYTES:]
        return payload if hashlib.sha256(payload).digest() == entry[:_SUM_BYTES] else None

    def put(self, payload: bytes, *key: str) -> None:
        """Keep `payload` under `key`; does nothing where the folder cannot be written."""
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with atomic_write(self._path(key), 0o600) as file:
                file.write(hashlib.sha256(payload).digest() + payload)

    def _path(self, key: tuple[str, ...]) -> Path:
        sums = b"".join(hashlib.sha256(part.encode()).digest() for part in key)
        return self.folder / f"{hashlib.sha256(sums).hexdigest()}.cubin"


def default_folder() -> Path:
    """`$INFINITY_KERNEL_CACHE`, else `infinity/kernels` below `$XDG_CACHE_HOME` or `~/.cache`."""
    if chosen := os.environ.get("INFINITY_KERNEL_CACHE"):
        return Path(chosen)
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(caches) / "infinity" / "kernels"

"""Files and names that must outlast a loss of power."""

from __future__ import annotations

import os
from pathlib import Path


def write_new(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write a file that must not exist yet, and put it on stable storage. Raises `OSError`."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Make the names in a directory as lasting as the files' contents. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

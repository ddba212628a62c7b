"""Small files without which a durable run cannot be found or read, watched while it is active."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from infinity.common.files import atomic_write
from infinity.errors import RemovedError


class WatchedFiles:
    """Open files that are written once; one that was removed is written again."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}

    def watch(self, paths: Iterable[Path]) -> None:
        """Watch these files from now on. Raises `OSError`."""
        for path in paths:
            self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)

    def check(self) -> None:
        """Write removed files again and raise `RemovedError`.

        Otherwise later commits would go into a directory that cannot be resumed from.
        """
        for path, descriptor in self._descriptors.items():
            if os.fstat(descriptor).st_nlink:
                continue
            content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
            restored = False
            with suppress(OSError):
                with atomic_write(path) as file:
                    file.write(content)
                restored = True
            raise RemovedError(
                f"{path} was removed while its run was active",
                because="a program, or a cleanup job, removed it",
                remedy="find that program; the file was written again, and resume: auto resumes "
                "from the last committed step"
                if restored
                else "find that program; then resume from the last checkpoint that is left",
            )

    def close(self) -> None:
        """Close the files; idempotent."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

"""What the system refuses while a checkpoint is written or read, as errors of ours."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from infinity import _aio
from infinity.errors import DoesNotFitError, InfinityError, MachineError, TransferError
from infinity.sizes import format_size

_CAUSES: dict[int, tuple[str, str]] = {
    errno.EIO: (
        "the drive or the file system reports a failure",
        "check `dmesg` and the drive's health (`smartctl -a`)",
    ),
    errno.EROFS: (
        "the file system is read-only, as file systems become after an error of the drive",
        "mount it writable, or save somewhere else",
    ),
    errno.EACCES: ("its permissions forbid it", "chown or chmod it, or use another directory"),
    errno.EPERM: ("its permissions forbid it", "chown or chmod it, or use another directory"),
    errno.ENOENT: ("it is not there, or was removed meanwhile", "look who removes files there"),
    errno.ENOTDIR: (
        "a file is where a directory should be",
        "give the directory that checkpoints are saved to",
    ),
    errno.EFBIG: (
        "the process or the file system does not allow files of this size",
        "raise `ulimit -f`, or save smaller shards",
    ),
    errno.ENOLCK: ("its file system has no locks", "use a directory on a local file system"),
    errno.EOPNOTSUPP: ("its file system lacks that", "use a directory on a local file system"),
    errno.ETIMEDOUT: ("the drive hangs, or the network behind it", "check `dmesg`"),
}


def refusal(doing: str, path: Path, error: OSError, nbytes: int | None = None) -> InfinityError:
    """The error for `error`, met while `doing` ("writing") something to `path`.

    `nbytes` is what the whole needs. `DoesNotFitError` for a full disk, else `MachineError`.
    """
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        needed = "" if nbytes is None else f"; the checkpoint needs {format_size(nbytes)}"
        return DoesNotFitError(
            f"{doing} {path}: the disk is full{needed}",
            because=f"{error.strerror} (errno {error.errno}); {free_text(path)}",
            remedy="free space there, or save somewhere else",
        )
    because, remedy = _CAUSES.get(error.errno or 0, (None, None))
    what = f"{doing} {path} failed: {error.strerror or error} (errno {error.errno})"
    if isinstance(error, _aio.AioError) and error.op in ("read", "write"):
        return TransferError(
            what,
            path=str(path),
            offset=error.offset,
            length=error.length,
            errno=error.errno or 0,
            because=because,
            remedy=remedy,
        )
    return MachineError(what, because=because, remedy=remedy)


def free_bytes(path: Path) -> int:
    """What a process may still write there. Raises `OSError`."""
    facts = os.statvfs(path)
    return facts.f_bavail * facts.f_frsize


def free_text(path: Path) -> str:
    """How much is free at a path, or above it where it does not exist."""
    for place in (path, *path.parents):
        try:
            return f"{format_size(free_bytes(place))} free there"
        except OSError:
            continue
    return "free space unknown"

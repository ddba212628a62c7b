"""Durable and atomic file operations, lock files, and translation of system errors.

Files survive a power failure, and other processes may read them while they are replaced. Symbolic
links in place of a file are not followed, except by `json_lines`. Only the owner may write new
files, regardless of the umask.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import stat
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Self, TextIO

from infinity.common.sizes import format_size
from infinity.errors import DoesNotFitError, MachineError, RemovedError, TransferError

# Modes before the umask is applied.
FILE_MODE = 0o644
FOLDER_MODE = 0o755
SHARED_FOLDER_MODE = 0o775  # of directories that the user named, which a group may share
TEMPORARY_NAME = re.compile(r"\.infinity-[0-9a-f]{16}\.tmp")


# Error number -> cause and remedy.
_ADVICE: dict[int, tuple[str, str]] = {
    errno.EIO: (
        "the drive or the file system reports a failure",
        "check `dmesg` and the drive's health (`smartctl -a`)",
    ),
    errno.ENOSPC: ("the file system is full", "free space there, or use another place"),
    errno.EDQUOT: ("the disk quota is used up", "raise the quota, or use another place"),
    errno.EROFS: (
        "the file system is read-only, as file systems become after an error of the drive",
        "check `dmesg`, and mount it writable; or use another place",
    ),
    errno.EACCES: ("its permissions forbid it", "chown or chmod it, or use another place"),
    errno.EPERM: ("its permissions forbid it", "chown or chmod it, or use another place"),
    errno.ENOENT: (
        "it does not exist, or was just removed",
        "check which process removes files there",
    ),
    errno.ENOTDIR: ("a file is where a directory should be", "name a directory"),
    errno.EFBIG: (
        "the process or the file system does not allow files of this size",
        "raise `ulimit -f`, or write smaller files",
    ),
    errno.ENOLCK: ("its file system cannot lock files", "use a local file system"),
    errno.EOPNOTSUPP: ("its file system lacks that", "use a local file system"),
    errno.ECANCELED: (
        "the engine was closed while the request was queued",
        "do not use a closed engine",
    ),
    errno.ETIMEDOUT: (
        "the drive hangs, or the network behind it does",
        "check `dmesg`; close the engine; raise io.timeout_s if the drive is only slow",
    ),
}


def advice(error: OSError) -> tuple[str | None, str | None]:
    """Return the cause and a remedy of a system error; None for unknown error numbers."""
    because, remedy = _ADVICE.get(error.errno or 0, (None, None))
    if error.errno in (errno.EACCES, errno.EPERM):
        because = f"{because} to user id {os.geteuid()}"
    return because, remedy


def refused(
    what: str, error: OSError, path: Path | None = None, *, remedy: str | None = None
) -> DoesNotFitError | MachineError:
    """Translate a system error to an `InfinityError`; `what` names the failed operation.

    For a full disk the message has the free bytes at `path`. `remedy` replaces the usual one of the
    error number. Returns a `DoesNotFitError` for a full disk, and a `TransferError` for a read or
    write of the native module.
    """
    because, usual_remedy = advice(error)
    what = f"{what}: {error.strerror or error} (errno {error.errno})"
    remedy = remedy or usual_remedy
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        if path is not None:
            because = f"{because}; {free_text(path)}"
        return DoesNotFitError(what, because=because, remedy=remedy)
    if getattr(error, "op", "") in ("read", "write"):
        return transfer_refused(what, error, path, remedy=remedy)
    return MachineError(what, because=because, remedy=remedy)


def transfer_refused(
    what: str, error: Any, path: Path | None = None, *, remedy: str | None
) -> TransferError:
    """Translate a failed request of the native module; the message is `what` alone."""
    because, _ = advice(error)
    return TransferError(
        what,
        path=str(path or error.filename),
        offset=error.offset,
        length=error.length,
        errno=error.errno or 0,
        because=because,
        remedy=remedy,
    )


def free_bytes(path: Path) -> int:
    """Return the free bytes at `path` for an unprivileged user. Raises `OSError`."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def free_text(path: Path) -> str:
    """Return the free bytes and inodes at a path, or at its nearest existing parent, as text."""
    for candidate in (path, *path.parents):
        with suppress(OSError):
            inodes = os.statvfs(candidate).f_favail
            return f"{format_size(free_bytes(candidate))} and {inodes} inodes free there"
    return "free space unknown"


def temporary_name() -> str:
    """Return a random name that matches `TEMPORARY_NAME`."""
    return f".infinity-{secrets.token_hex(8)}.tmp"


def open_new(path: Path, mode: int = FILE_MODE) -> BinaryIO:
    """Create and open a file; neither a file nor a link may exist there. Raises `OSError`."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, mode), "wb")


def write_new(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Create a file that must not exist, on stable storage. Raises `OSError`."""
    with open_new(path, mode) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_at(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` at `offset`, in several calls if needed. Raises `OSError`."""
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, offset)
        view = view[count:]
        offset += count


def check_linked(descriptor: int, path: str | Path) -> None:
    """Raise `RemovedError` if the open file at `path` was removed."""
    if os.fstat(descriptor).st_nlink == 0:
        raise RemovedError(
            f"{path} was removed while it was in use",
            because="a program, or a cleanup job, removed it or its directory; bytes written to it "
            "since then are lost",
            remedy="find that program; then resume from the last checkpoint that is left",
        )


def make_directories(path: Path, mode: int = SHARED_FOLDER_MODE) -> None:
    """Create a directory and its missing parents durably. Raises `OSError`."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        directory.mkdir(mode, exist_ok=True)
        sync_directory(directory.parent)


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the lines of a file that are JSON objects, with the objects; none if it is missing.

    Other lines are skipped: a kill may have truncated the last one. Raises `OSError`, also if
    `path` is a pipe or a device, which may be endless.
    """
    with suppress(FileNotFoundError), _open_regular(path) as file:
        while line := file.readline(16 << 20):  # characters
            with suppress(ValueError, RecursionError):
                record = json.loads(line)
                if isinstance(record, dict):
                    yield line, record


def _open_regular(path: Path) -> TextIO:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return open(descriptor, encoding="utf-8", errors="replace")


def read_small(path: Path, offset: int = 0, nbytes: int = 1 << 30) -> bytes:
    """Read at most `nbytes` of a file, without following links or blocking on pipes.

    Raises `OSError`.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        remaining = os.fstat(descriptor).st_size - offset
        return os.pread(descriptor, max(min(remaining, nbytes), 0), offset)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_write(path: Path, mode: int = FILE_MODE) -> Iterator[BinaryIO]:
    """Yield a file that replaces `path` atomically and durably when the block ends.

    If the block raises, nothing is changed. Raises `OSError`, also if `path` is a link, a device or
    a directory: replacing `/dev/null` would break other programs, and the target of a link would
    keep its old content.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise OSError(errno.EINVAL, "it is a link or a device, not a regular file", str(path))
    temporary = path.with_name(temporary_name())
    try:
        with open_new(temporary, mode) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Sync the entries of a directory to stable storage. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class LockFile:
    """A lock on an empty file, held until `release`, `close` or the end of the process.

    A lock file that a dead process left can be locked; it marks other files left by that process.
    """

    def __init__(
        self, path: Path, *, create: bool = True, shared: bool = False, dir_fd: int | None = None
    ) -> None:
        """Lock `path`.

        Raises `BlockingIOError` if another process holds the lock, `FileNotFoundError` if the file
        is missing and `create` is False, and `OSError` with EEXIST if it is not an empty file.
        """
        self.path = path
        self._owner = os.getpid()
        self._descriptor = -1
        while self._descriptor < 0:
            self._descriptor = _open_locked(path, dir_fd, create=create, shared=shared)
        _held_locks.add(self)

    @property
    def held(self) -> bool:
        """True if this process holds the lock; False in a forked child."""
        return self._descriptor >= 0 and self._owner == os.getpid()

    def release(self) -> None:
        """Remove the lock file and release the lock; no effect after `close`. Idempotent."""
        if self.held:
            with suppress(OSError):
                self.path.unlink(missing_ok=True)
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock without removing its file, which marks files to remove. Idempotent."""
        _held_locks.discard(self)
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _open_locked(path: Path, dir_fd: int | None, *, create: bool, shared: bool) -> int:
    """Return the descriptor of a locked lock file; -1 if it was removed before it was locked."""
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_RDONLY if shared else os.O_RDWR)
    descriptor = os.open(path, flags | (os.O_CREAT if create else 0), 0o600, dir_fd=dir_fd)
    try:
        status = os.fstat(descriptor)
        # The owner is not checked: some file systems report one owner for all files.
        if not stat.S_ISREG(status.st_mode) or status.st_size:
            raise OSError(errno.EEXIST, "a file of another making has that name", str(path))
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink:
            return descriptor
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return -1


# A forked child inherits every descriptor and must close it: a DataLoader worker that outlives a
# killed run would otherwise keep its locks. Closing an inherited descriptor does not unlock the
# parent's.
_held_locks: weakref.WeakSet[LockFile] = weakref.WeakSet()


def _close_locks_in_child() -> None:
    for lock in list(_held_locks):
        lock.close()


os.register_at_fork(after_in_child=_close_locks_in_child)

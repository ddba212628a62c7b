"""Who may write a checkpoint's directory, and the removal of what dead writers left.

A writer of TAG holds the lock of `.TAG.infinity-lock` from before `TAG.tmp` exists until `TAG` is
in its place, so a lock that can be taken beside a `TAG.tmp` belongs to the dead. The lock file
goes last. Only files that a checkpoint can contain are ever removed, and never through links.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import weakref
from contextlib import suppress
from pathlib import Path

from infinity.checkpoint.layout import TEMPORARY_SUFFIX, check_tag, is_our_file
from infinity.checkpoint.refusals import refusal
from infinity.errors import CheckpointError, ConfigError

_LOCK_PREFIX, _LOCK_SUFFIX = ".", ".infinity-lock"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LOCK = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class TagLock:
    """The right to make or remove `ROOT/TAG.tmp`, held until `release`."""

    def __init__(self, root: Path, tag: str) -> None:
        """Raises `CheckpointError` if another writer has it, `MachineError` if nobody can."""
        self._path = root / f"{_LOCK_PREFIX}{tag}{_LOCK_SUFFIX}"
        found: int | None = None
        try:
            while found is None:
                found = _lock(self._path, create=True)
        except BlockingIOError:
            raise CheckpointError(
                f"the checkpoint {root / tag} is being written by another process",
                remedy="wait for it, or choose another tag",
            ) from None
        except OSError as error:
            raise refusal("locking", self._path, error) from error
        self._descriptor = found
        _held.add(self)

    def release(self) -> None:
        """Remove the lock file and let go; after `let_go` it does nothing. Idempotent."""
        if self._descriptor >= 0:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
        self.let_go()

    def let_go(self) -> None:
        """Close the lock file: it stays, and tells the next writer what to remove."""
        _held.discard(self)
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _lock(path: Path, *, create: bool) -> int | None:
    """The descriptor of a lock file that is locked; None if it was removed meanwhile.

    Raises `BlockingIOError` if somebody has it, and `OSError`.
    """
    descriptor = os.open(path, _LOCK | (os.O_CREAT if create else 0), 0o666)
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode) or facts.st_size or facts.st_uid != os.geteuid():
            raise OSError(errno.EEXIST, "a file of another making has that name")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink:
            return descriptor
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def new_latest_name(tag: str) -> str:
    """What the next `latest` is called until it is in its place."""
    return f".latest.{tag}.infinity-new"


def remove_stale(root: Path) -> list[Path]:
    """Remove what writers that died left under `root`; returns the directories that are gone.

    What is locked, somebody else's, or cannot be removed stays. Never raises `OSError`.
    """
    removed: list[Path] = []
    try:
        names = sorted(os.listdir(root))
    except OSError:
        return removed
    for name in names:
        tag = name.removeprefix(_LOCK_PREFIX).removesuffix(_LOCK_SUFFIX)
        if name != f"{_LOCK_PREFIX}{tag}{_LOCK_SUFFIX}":
            continue
        with suppress(OSError, ConfigError):
            check_tag(tag)
            descriptor = _lock(root / name, create=False)
            if descriptor is None:
                continue
            try:
                if remove_temporary(root, tag):
                    removed.append(root / f"{tag}{TEMPORARY_SUFFIX}")
                (root / name).unlink()
            finally:
                os.close(descriptor)
    return removed


def remove_temporary(root: Path, tag: str) -> bool:
    """Remove `TAG.tmp`, whose lock is held; whether there was one. Raises `OSError`."""
    with suppress(FileNotFoundError):
        (root / new_latest_name(tag)).unlink()
    return remove_files(root / f"{tag}{TEMPORARY_SUFFIX}")


def remove_files(directory: Path) -> bool:
    """Remove a directory of files of ours; whether there was one.

    Raises `OSError`: ENOTEMPTY if it holds anything else, which then stays.
    """
    try:
        descriptor = os.open(directory, _DIRECTORY)
    except FileNotFoundError:
        return False
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "it belongs to another user")
        with os.scandir(descriptor) as found:
            entries = [entry for entry in found if is_our_file(entry.name)]
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                with suppress(FileNotFoundError):
                    os.unlink(entry.name, dir_fd=descriptor)
    finally:
        os.close(descriptor)
    os.rmdir(directory)
    return True


# A forked child holds a copy of every lock; it must let go, or a DataLoader worker that outlives
# a killed run would keep what that run left looking alive.
_held: weakref.WeakSet[TagLock] = weakref.WeakSet()


def _let_go_in_child() -> None:
    for lock in list(_held):
        lock.let_go()


os.register_at_fork(after_in_child=_let_go_in_child)

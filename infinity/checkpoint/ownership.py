"""Who may write a checkpoint's directory, and the removal of what dead writers left.

A writer of TAG holds the lock of `.TAG.infinity-lock` from before `TAG.tmp` exists until `TAG` is
in its place, so a lock that can be taken beside a `TAG.tmp` belongs to the dead. The lock file
goes last. Only files that a checkpoint can contain are ever removed, and never through links.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

from infinity.checkpoint.layout import TEMPORARY_SUFFIX, check_tag, is_our_file
from infinity.checkpoint.refusals import refusal
from infinity.errors import CheckpointError, ConfigError
from infinity.stable import LockFile

_LOCK_PREFIX, _LOCK_SUFFIX = ".", ".infinity-lock"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class TagLock(LockFile):
    """The right to make or remove `ROOT/TAG.tmp`, held until `release`."""

    def __init__(self, root: Path, tag: str) -> None:
        """Raises `CheckpointError` if another writer has it, `MachineError` if nobody can."""
        path = root / f"{_LOCK_PREFIX}{tag}{_LOCK_SUFFIX}"
        try:
            super().__init__(path)
        except BlockingIOError:
            raise CheckpointError(
                f"the checkpoint {root / tag} is being written by another process",
                remedy="wait for it, or choose another tag",
            ) from None
        except OSError as error:
            raise refusal("locking", path, error) from error


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
            lock = LockFile(root / name, create=False)
            try:
                if remove_temporary(root, tag):
                    removed.append(root / f"{tag}{TEMPORARY_SUFFIX}")
                lock.release()
            finally:
                lock.let_go()
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

"""Checkpoints below a root directory: listing, `latest`, and the removal of old ones."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from infinity.checkpoint.manifest import (
    FORMAT_NAME,
    LATEST_NAME,
    MANIFEST_NAME,
    TEMPORARY_SUFFIX,
    check_tag,
    is_checkpoint_file_name,
)
from infinity.common.files import LockFile, read_small, refused
from infinity.common.sizes import format_size
from infinity.errors import CheckpointError, ConfigError, InfinityError


def refusal(doing: str, path: Path, error: OSError, nbytes: int | None = None) -> InfinityError:
    """Return the error for an `OSError` raised while `doing` ("writing") something to `path`.

    `nbytes` is the size of the checkpoint, for the message.
    """
    needed = "" if nbytes is None else f" (the checkpoint needs {format_size(nbytes)})"
    return refused(f"{doing} {path} failed{needed}", error, path)


# Locks of checkpoint writers, and the removal of files that dead writers left.
#
# A writer of TAG holds the lock of `.TAG.infinity-lock` from before `TAG.tmp` exists until it has
# been renamed to `TAG`. So if `TAG.tmp` exists and its lock can be taken, its writer is dead. The
# lock file is removed last. Only files that a checkpoint can contain are ever removed, and links
# are never followed.


_LOCK_PREFIX, _LOCK_SUFFIX = ".", ".infinity-lock"
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class TagLock(LockFile):
    """Exclusive lock for creating or removing `ROOT/TAG.tmp`, held until `release`."""

    def __init__(self, root: Path, tag: str) -> None:
        """Raises `CheckpointError` if another writer holds the tag, `MachineError` on failure."""
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
    """Return the temporary name of the next `latest`."""
    return f".latest.{tag}.infinity-new"


def remove_stale(root: Path) -> list[Path]:
    """Remove the files of dead writers under `root`; return the removed directories.

    Directories that are locked, belong to another user or cannot be removed are left. Never raises
    `OSError`.
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
            with LockFile(root / name, create=False) as lock:
                if remove_temporary(root, tag):
                    removed.append(root / f"{tag}{TEMPORARY_SUFFIX}")
                lock.release()
    return removed


def remove_temporary(root: Path, tag: str) -> bool:
    """Remove `TAG.tmp`, whose lock is held; return True if it existed. Raises `OSError`."""
    with suppress(FileNotFoundError):
        (root / new_latest_name(tag)).unlink()
    return remove_files(root / f"{tag}{TEMPORARY_SUFFIX}")


def remove_files(directory: Path) -> bool:
    """Remove a directory of checkpoint files; return True if it existed.

    Raises `OSError`: ENOTEMPTY if it holds other files, which are left.
    """
    try:
        descriptor = os.open(directory, _DIRECTORY_FLAGS)
    except FileNotFoundError:
        return False
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "it belongs to another user")
        with os.scandir(descriptor) as scan:
            entries = [entry for entry in scan if is_checkpoint_file_name(entry.name)]
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                with suppress(FileNotFoundError):
                    os.unlink(entry.name, dir_fd=descriptor)
    finally:
        os.close(descriptor)
    os.rmdir(directory)
    return True


_MAX_LATEST_BYTES = 4096
_PREFIX = f'{{\n"format": "{FORMAT_NAME}"'.encode()


@dataclass(frozen=True, slots=True)
class Found:
    """Checkpoint below a root: its tag, the time its manifest was written, and its size.

    `has_infinity_manifest`: the manifest begins like one of this format.
    """

    tag: str
    written_ns: int
    nbytes: int
    has_infinity_manifest: bool


def find_tag(root: Path, tag: str | None) -> str | None:
    """Return `tag`, or the tag that `latest` names if it is None; None if there is no `latest`.

    Raises `ConfigError` for an invalid tag, `CheckpointError` for a damaged `latest`,
    `MachineError` if `latest` cannot be read.
    """
    if tag is not None:
        return check_tag(tag)
    path = Path(root).expanduser() / LATEST_NAME
    try:
        text = read_small(path, nbytes=_MAX_LATEST_BYTES).decode()
        return check_tag(text.removesuffix("\n"))
    except FileNotFoundError:
        return None
    except (ConfigError, UnicodeDecodeError) as error:
        reason = error.what if isinstance(error, ConfigError) else "it is not text"
        raise CheckpointError(
            f"{path} does not name a checkpoint: {reason}",
            remedy="name the tag, and save again or write the tag into that file",
        ) from None
    except OSError as error:
        if os.path.islink(path):
            raise CheckpointError(f"{path} is a symbolic link, which is not followed") from None
        raise refusal("reading", path, error) from error


def missing_latest_message(root: Path) -> str:
    """Describe why `find_tag` found no checkpoint; suggest a call if `root` is one itself."""
    why = f"{root} has no checkpoint that is called the latest"
    if not (root / MANIFEST_NAME).is_file():
        return why
    path = root.absolute()
    call = f'load_checkpoint("{path.parent}", tag="{path.name}")'
    return f"{why}, but is a checkpoint itself: {call}"


def checkpoints(root: Path, *, any_manifest: bool = False) -> list[Found]:
    """Return the checkpoints below `root`, newest first; with `any_manifest` damaged ones too.

    Raises `MachineError`.
    """
    result = []
    try:
        for entry in os.scandir(root):
            with suppress(OSError, ConfigError):
                if entry.is_dir(follow_symlinks=False) and check_tag(entry.name):
                    result.append(_checkpoint_info(Path(entry.path)))
    except OSError as error:
        raise refusal("reading", root, error) from error
    result = [
        checkpoint for checkpoint in result if checkpoint.has_infinity_manifest or any_manifest
    ]
    return sorted(result, key=lambda checkpoint: (-checkpoint.written_ns, checkpoint.tag))


def tags(root: Path) -> list[str]:
    """Return the tags of all checkpoints, sound or damaged, and the one that `latest` names.

    Raises `MachineError`, and as `find_tag` does.
    """
    found_tags = [checkpoint.tag for checkpoint in checkpoints(root, any_manifest=True)]
    latest = find_tag(root, None)
    return found_tags if latest is None or latest in found_tags else [*found_tags, latest]


def _checkpoint_info(directory: Path) -> Found:
    """Describe a directory with a manifest; raises `OSError` if it has none."""
    try:
        has_infinity_manifest = (
            read_small(directory / MANIFEST_NAME, nbytes=len(_PREFIX)) == _PREFIX
        )
    except OSError:
        has_infinity_manifest = False
    written_ns = os.lstat(directory / MANIFEST_NAME).st_mtime_ns
    with os.scandir(directory) as entries:
        sizes = [entry.stat(follow_symlinks=False).st_size for entry in entries]
    return Found(directory.name, written_ns, sum(sizes), has_infinity_manifest)


def prune(
    root: Path, keep: int, *, protected_tags: Sequence[str] = (), dry_run: bool = False
) -> list[Found]:
    """Remove all but the last `keep` checkpoints and return them; with `dry_run` only list them.

    Never removes the checkpoint that `latest` names, tags in `protected_tags`, or directories that
    hold other files. Raises `ConfigError` for `keep` below 1, `MachineError` if the system refuses;
    checkpoints that were removed before the error stay removed.
    """
    if keep < 1:
        raise ConfigError(f"at least 1 checkpoint must be kept, not {keep}")
    root = Path(root).expanduser()
    protected = {find_tag(root, None), *protected_tags}
    existing = checkpoints(root)
    candidates = [checkpoint for checkpoint in existing if checkpoint.tag not in protected]
    num_left = max(keep - (len(existing) - len(candidates)), 0)
    removed = [
        checkpoint
        for checkpoint in candidates[num_left:]
        if holds_only_checkpoint_files(root / checkpoint.tag)
    ]
    if not dry_run:
        for checkpoint in removed:
            _remove(root, checkpoint)
    return removed


def discard(root: Path, tag: str) -> None:
    """Remove a checkpoint if it exists and its directory holds no other files.

    Raises `MachineError` if the system refuses.
    """
    with suppress(FileNotFoundError):
        checkpoint = _checkpoint_info(root / tag)
        if checkpoint.has_infinity_manifest and holds_only_checkpoint_files(root / tag):
            _remove(root, checkpoint)


def holds_only_checkpoint_files(directory: Path) -> bool:
    """Return True if a directory holds only files of a checkpoint."""
    with os.scandir(directory) as entries:
        return all(
            is_checkpoint_file_name(e.name) and e.is_file(follow_symlinks=False) for e in entries
        )


def _remove(root: Path, checkpoint: Found) -> None:
    """Rename, then remove: a partly removed directory must not look like a checkpoint."""
    try:
        with TagLock(root, checkpoint.tag) as lock:
            remove_temporary(root, checkpoint.tag)
            os.rename(root / checkpoint.tag, root / f"{checkpoint.tag}{TEMPORARY_SUFFIX}")
            remove_temporary(root, checkpoint.tag)
            lock.release()
    except OSError as error:
        doing = f"removing the checkpoint of {format_size(checkpoint.nbytes)} in"
        raise refusal(doing, root / checkpoint.tag, error) from error

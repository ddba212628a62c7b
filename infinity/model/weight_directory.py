"""A directory of weights, and how a save into it is seen: as a whole, or not at all.

[Note: atomic save]
A save writes into a folder of its own in the directory, and then renames its files into theirs.
Shards have names of this save alone, so that none is replaced under a reader of the older index.
Readers, transformers as well as `WeightFiles`, take model.safetensors before an index. So new
weights are seen from the moment on when model.safetensors is renamed; or, of shards, the index,
or, where an older model.safetensors is still there, when that is removed. What is older goes after
that; each step is on stable storage before the next. What a killed save left is removed by the
next one, and never by another that still runs: there is one at a time, by a lock in the directory.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import ENOLCK, ENOSPC, ENOSYS, EOPNOTSUPP
from pathlib import Path

from infinity.common.files import FOLDER_MODE, LockFile, make_directories, refused, sync_directory
from infinity.common.sizes import format_size
from infinity.errors import MachineError

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_OLDER = re.compile(
    r"model(-([0-9a-f]{8}-)?[0-9]{5}-of-[0-9]{5})?\.safetensors|model\.safetensors\.index\.json"
)  # as transformers and we call what a new save takes the place of
_OUR_SHARD = re.compile(r"model-[0-9a-f]{8}-[0-9]{5}-of-[0-9]{5}\.safetensors")
_FOLDER = re.compile(r"\.infinity-saving-[0-9a-f]{16}")
_LOCK_NAME = ".infinity-saving.lock"
_NO_LOCKS = (ENOLCK, ENOSYS, EOPNOTSUPP)


def shard_names(count: int) -> list[str]:
    """Return the file names of a save, without the index; shards of saves never share names."""
    save = secrets.token_hex(4)
    several = [f"model-{save}-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    return several if count > 1 else [SINGLE_NAME]


def holds_weights(directory: Path) -> bool:
    """Whether a save into the directory has come to its end, ever."""
    return any((directory / name).exists() for name in (SINGLE_NAME, INDEX_NAME))


def without_index(directory: Path) -> tuple[list[Path], list[Path]]:
    """The safetensors files of a directory that has no index: whole ones, and parts of a save.

    Shards that no index names may be some of many.
    """
    found = sorted(directory.glob("*.safetensors"))
    parts = [path for path in found if _OUR_SHARD.fullmatch(path.name)]
    return [path for path in found if path not in parts], parts


@contextmanager
def saving(directory: Path, nbytes: int = 0) -> Iterator[Path]:
    """Context with a private folder, whose files are moved to `directory` at the end.

    See [Note: atomic save]; files beside the weights get theirs just before. If the block raises,
    `directory` is as it was. It is made if it is missing. Raises `DoesNotFitError` if the disk is
    full or lacks `nbytes`, `MachineError` if the system refuses, or somebody saves there already.
    """
    try:
        make_directories(directory)
        with _locked(directory):
            _remove_left(directory)
            if shutil.disk_usage(directory).free < nbytes:  # before hours of reading, not after
                raise OSError(ENOSPC, os.strerror(ENOSPC))
            folder = directory / f".infinity-saving-{secrets.token_hex(8)}"
            try:
                folder.mkdir(0o700)
                yield folder
                _publish(folder, directory)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        what = f"{directory}: the weights need {format_size(nbytes)}, and cannot be saved"
        raise refused(what, error, directory) from error


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    path = directory / _LOCK_NAME
    lock = None
    try:
        lock = LockFile(path)
    except BlockingIOError:
        raise MachineError(
            f"{directory}: weights are being saved there already",
            because=f"another save holds the lock {path.name}",
            remedy="wait until that is done, or save into another directory",
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        path.unlink(missing_ok=True)  # a file system without locks: who saves there must know
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def _remove_left(directory: Path) -> None:
    """Remove what savers that died left. Of shards that the index names weights may be seen."""
    index = ""
    with suppress(FileNotFoundError):
        index = (directory / INDEX_NAME).read_text(encoding="utf-8", errors="replace")
    for path in directory.iterdir():
        if _FOLDER.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
        elif _OUR_SHARD.fullmatch(path.name) and path.name not in index:
            with suppress(OSError):
                path.unlink()


def _publish(folder: Path, directory: Path) -> None:
    """Give all files of the folder their places; those that are replaced by them go."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        _settle(path)
    last = next((name for name in (SINGLE_NAME, INDEX_NAME) if (folder / name) in files), None)
    moved = [directory / path.relative_to(folder) for path in files if path.name != last]
    try:
        for path in moved:
            path.parent.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
            os.rename(folder / path.relative_to(directory), path)
        for parent in {directory, *(path.parent for path in moved)}:
            sync_directory(parent)
        if last is None:  # adapters
            return
        os.rename(folder / last, directory / last)
        sync_directory(directory)
        if last == INDEX_NAME:
            (directory / SINGLE_NAME).unlink(missing_ok=True)
    except BaseException:
        if last is not None and (folder / last).exists():  # nobody sees the new shards yet
            _remove([path for path in moved if _OUR_SHARD.fullmatch(path.name)])
        raise
    kept = {last, *(path.name for path in moved)}
    there = [path for path in directory.iterdir() if path.name not in kept]
    older = [path for path in there if _OLDER.fullmatch(path.name)]
    # The index first: one that names files which are gone would be an error to whoever asks it.
    left = _remove(sorted(older, key=lambda path: path.name != INDEX_NAME))
    if left:
        raise MachineError(
            f"{directory}: the weights are saved; of older ones {left[0].filename} is left",
            because=left[0].strerror,
            remedy="remove it: some programs read whatever is there",
        )
    sync_directory(directory)


def _remove(paths: list[Path]) -> list[OSError]:
    """Remove files; return the system errors of those that remain."""
    refused = []
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            refused.append(error)
    return refused


def _settle(path: Path) -> None:
    """Sync a file to stable storage, writable by its owner only, whichever library wrote it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a file system without modes
            os.fchmod(descriptor, os.fstat(descriptor).st_mode & FOLDER_MODE)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Atomic saves into a directory of weights.

[Note: atomic save]
A save writes into a private folder in the directory, and then renames its files into the directory.
Shard names are unique to a save, so that no shard is replaced while a reader uses the older index.
Readers (transformers and `WeightFiles`) prefer model.safetensors to an index. The rename of
model.safetensors therefore publishes the new weights; for shards, the rename of the index does, or
the removal of an older model.safetensors. Older files are removed after that. Each step is on
stable storage before the next. Leftovers of a killed save are removed by the next one, never those
of a running save: a lock in the directory admits one save at a time.
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
# Files of transformers and infinity that a new save replaces.
_REPLACED_NAME = re.compile(
    r"model(-([0-9a-f]{8}-)?[0-9]{5}-of-[0-9]{5})?\.safetensors|model\.safetensors\.index\.json"
)
_INFINITY_SHARD = re.compile(r"model-[0-9a-f]{8}-[0-9]{5}-of-[0-9]{5}\.safetensors")
_FOLDER_NAME = re.compile(r"\.infinity-saving-[0-9a-f]{16}")


def shard_names(count: int) -> list[str]:
    """Return the file names of a save, without the index; names of shards are unique."""
    save_id = secrets.token_hex(4)
    names = [f"model-{save_id}-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    return names if count > 1 else [SINGLE_NAME]


def holds_weights(directory: Path) -> bool:
    """Return True if a save into the directory has ever been completed."""
    return any((directory / name).exists() for name in (SINGLE_NAME, INDEX_NAME))


def files_without_index(directory: Path) -> tuple[list[Path], list[Path]]:
    """Return the complete safetensors files of a directory without an index, and the shards.

    Without an index the set of shards may be incomplete.
    """
    files = sorted(directory.glob("*.safetensors"))
    shards = [path for path in files if _INFINITY_SHARD.fullmatch(path.name)]
    return [path for path in files if path not in shards], shards


@contextmanager
def saving(directory: Path, nbytes: int = 0) -> Iterator[Path]:
    """Yield a private folder whose files are moved to `directory` at the end.

    See [Note: atomic save]; files other than weights are moved first. If the block raises,
    `directory` is unchanged. It is created if missing. Raises `DoesNotFitError` if the disk is
    full or has less than `nbytes` free, and `MachineError` for other system errors and while
    another save into the directory runs.
    """
    try:
        make_directories(directory)
        with _exclusive_save(directory):
            _remove_leftovers(directory)
            # Before the weights are read, which may take hours.
            if shutil.disk_usage(directory).free < nbytes:
                raise OSError(ENOSPC, os.strerror(ENOSPC))
            folder = directory / f".infinity-saving-{secrets.token_hex(8)}"
            try:
                folder.mkdir(0o700)
                yield folder
                _publish(folder, directory)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        message = f"{directory}: the weights need {format_size(nbytes)}, and cannot be saved"
        raise refused(message, error, directory) from error


@contextmanager
def _exclusive_save(directory: Path) -> Iterator[None]:
    path = directory / ".infinity-saving.lock"
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
        if error.errno not in (ENOLCK, ENOSYS, EOPNOTSUPP):
            raise
        path.unlink(missing_ok=True)  # a file system without locks: the caller serializes saves
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def _remove_leftovers(directory: Path) -> None:
    """Remove files that killed saves left; shards that the index lists may be in use."""
    index_text = ""
    with suppress(FileNotFoundError):
        index_text = (directory / INDEX_NAME).read_text(encoding="utf-8", errors="replace")
    for path in directory.iterdir():
        if _FOLDER_NAME.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
        elif _INFINITY_SHARD.fullmatch(path.name) and path.name not in index_text:
            with suppress(OSError):
                path.unlink()


def _publish(folder: Path, directory: Path) -> None:
    """Move all files of the folder to the directory, and remove the weights they replace."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        _sync_file(path)
    # Renamed last, which publishes the weights; None for adapters.
    final = next((name for name in (SINGLE_NAME, INDEX_NAME) if (folder / name) in files), None)
    moved = [directory / path.relative_to(folder) for path in files if path.name != final]
    try:
        for path in moved:
            make_directories(path.parent, FOLDER_MODE)
            os.rename(folder / path.relative_to(directory), path)
        for parent in {directory, *(path.parent for path in moved)}:
            sync_directory(parent)
        if final is None:
            return
        os.rename(folder / final, directory / final)
        sync_directory(directory)
        if final == INDEX_NAME:
            (directory / SINGLE_NAME).unlink(missing_ok=True)
    except BaseException:
        if final is not None and (folder / final).exists():  # no index lists the new shards yet
            _unlink_all([path for path in moved if _INFINITY_SHARD.fullmatch(path.name)])
        raise
    new_names = {final, *(path.name for path in moved)}
    other_files = [path for path in directory.iterdir() if path.name not in new_names]
    older = [path for path in other_files if _REPLACED_NAME.fullmatch(path.name)]
    # The index first: one that lists missing files would be an error to its readers.
    errors = _unlink_all(sorted(older, key=lambda path: path.name != INDEX_NAME))
    if errors:
        raise MachineError(
            f"{directory}: the weights are saved; of older ones {errors[0].filename} is left",
            because=errors[0].strerror,
            remedy="remove it: some programs read whatever is there",
        )
    sync_directory(directory)


def _unlink_all(paths: list[Path]) -> list[OSError]:
    """Remove files; return the system errors of those that remain."""
    errors = []
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            errors.append(error)
    return errors


def _sync_file(path: Path) -> None:
    """Sync a file to stable storage, and make it writable by its owner only."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # file systems without modes
            os.fchmod(descriptor, os.fstat(descriptor).st_mode & FOLDER_MODE)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Private directory on a drive that holds the state of one run.

[Note: marking]
A durable run on several paths has a directory on each; the record of the first directory decides
for all. It first lists the others (`announce`), then the others are marked durable, and the first
directory last. If a first directory lists others and is not durable, its run died in between; it is
removed together with the others.

Invariants: a directory has its final name only while its lock is held or after its run has died.
Only directories with infinity's name pattern, created by the same user, are ever removed, and none
of a run that committed a step, regardless of `run.json`. The lock file is deleted last, so that the
next run recognizes and completes an interrupted removal.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from infinity.common.checksummed_json import first_sealed, read_sealed, unseal, write_sealed
from infinity.common.files import (
    TEMPORARY_NAME,
    LockFile,
    free_bytes,
    read_small,
    refused,
    sync_directory,
)
from infinity.common.parsed_json import Count, Flag, Text, Texts, made
from infinity.errors import MachineError
from infinity.storage.os_errors import checked_root, does_not_fit, refusal

RECORD_FORMAT, RECORD_VERSION = "torch-infinity-run", 3


@dataclass(frozen=True)
class _OwnerRecord:
    """Required and optional keys of `run.json` with their types."""

    durable: Flag
    pid: Count
    hostname: Text
    created: Text
    run: Text = ""
    primary: Text = ""
    index: Count = 0
    members: Texts = ()


def read_record(directory: Path) -> dict[str, Any]:
    """Read the record of a run directory.

    Raises `OSError`, and `ValueError` for a damaged or invalid record.
    """
    record = read_sealed(directory / RECORD_NAME, RECORD_FORMAT, RECORD_VERSION)
    owner = made(_OwnerRecord, record)
    if any("\0" in path for path in (*owner.members, owner.primary)):
        raise ValueError("it names an invalid path")
    return record


def write_record(path: Path, *, durable: bool = False, **facts: Any) -> None:
    """Write the record of a run directory and sync it to disk."""
    record: dict[str, Any] = {
        "durable": durable,
        "pid": os.getpid(),
        "hostname": socket.gethostname(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        **facts,
    }
    write_sealed(path, RECORD_FORMAT, RECORD_VERSION, record, 0o600)


_RANK_NAME = re.compile(r"rank-([0-9]+)")
_RUN_NAME = re.compile(r"infinity-run-[0-9]+-[0-9a-f]{16}")
# A directory under construction: it matches the pattern above only once its lock is held.
_NEW_NAME = re.compile(r"\.infinity-new-[0-9]+-[0-9a-f]{16}")
# Creating a directory takes milliseconds; an older one was abandoned.
_NEW_GRACE_S = 600.0
LOCK_NAME = "lock"
RECORD_NAME = "run.json"
DURABLE_MARKER_NAME = "kept"  # empty file that marks a directory as durable
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Scratch:
    """Directory of one run under an `nvme_path`; created by `create`, deleted by `remove`.

    A `durable` directory is not deleted; `Scratch.adopt` opens it again.
    """

    def __init__(self, directory: Path, lock: LockFile, *, durable: bool = False) -> None:
        self.directory = directory
        self.durable = durable
        self._lock = lock

    @classmethod
    def create(cls, nvme_path: str | os.PathLike[str], primary: Path | None = None) -> Self:
        """Remove directories of dead runs under `nvme_path`, then create and lock a new one.

        `primary` is the first directory of a run with several. Raises `MachineError` if
        `nvme_path` is missing, is not a directory, or cannot be written or locked, and
        `DoesNotFitError` if not even a directory fits.
        """
        root = checked_root(nvme_path)
        remove_dead_runs(root)
        facts: dict[str, Any] = {} if primary is None else {"primary": str(primary)}
        suffix = f"{os.getpid()}-{secrets.token_hex(8)}"
        new = root / f".infinity-new-{suffix}"
        final = root / f"infinity-run-{suffix}"
        lock = None
        try:
            new.mkdir(mode=0o700)
            lock = LockFile(new / LOCK_NAME)
            write_record(new / RECORD_NAME, **facts)
            new.rename(final)
        except BaseException as error:
            shutil.rmtree(new, ignore_errors=True)
            if lock is not None:
                lock.close()
            if isinstance(error, OSError):
                raise refusal(root, error) from error
            raise
        return cls(final, lock)

    @classmethod
    def adopt(cls, directory: Path) -> Self:
        """Lock the directory of a durable run that has ended, to continue it.

        Raises `MachineError` if the directory is in use or cannot be opened.
        """
        return cls(directory, lock_durable(directory), durable=True)

    def announce(self, run: str, members: Sequence[Path]) -> None:
        """Record the directories about to be marked durable with this one; see [Note: marking].

        Raises `MachineError`.
        """
        self._write(durable=False, run=run, members=[str(path) for path in members])

    def keep(self, facts: Mapping[str, Any]) -> None:
        """Mark the directory as durable, with `facts` in its record; it is never removed again.

        The caller must have synced the contents of its files; this syncs directory entries only.
        Raises `MachineError`.
        """
        self._write(durable=True, **facts)
        self.durable = True
        try:  # the record may be replaced by an older copy
            os.close(os.open(self.directory / DURABLE_MARKER_NAME, os.O_WRONLY | os.O_CREAT, 0o600))
            sync_directory(self.directory)
        except OSError as error:
            raise refusal(self.directory, error) from error

    def _write(self, *, durable: bool, **facts: Any) -> None:
        """Replace the record and sync it to disk."""
        try:
            write_record(self.directory / RECORD_NAME, durable=durable, **facts)
            sync_directory(self.directory.parent)
        except OSError as error:
            raise refusal(self.directory, error) from error

    def path(self, name: str) -> Path:
        """Return the path of the file `name`, a plain file name; the caller creates the file."""
        assert name == os.path.basename(name)
        assert name not in ("", ".", "..", LOCK_NAME, RECORD_NAME, DURABLE_MARKER_NAME)
        return self.directory / name

    def free_bytes(self) -> int:
        """Return the free bytes of this disk for ordinary users; raises `MachineError`."""
        try:
            return free_bytes(self.directory)
        except OSError as error:
            raise refusal(self.directory, error) from error

    def check_space(self, required_bytes: int) -> None:
        """Raise `DoesNotFitError` unless `required_bytes` more bytes fit on this disk now."""
        free_bytes = self.free_bytes()
        if free_bytes < required_bytes:
            raise does_not_fit(required_bytes, {self.directory.parent: free_bytes})

    def remove(self) -> None:
        """Delete the directory unless it is durable, and release its lock. Idempotent.

        No effect in a forked child, because the parent owns the directory. Raises `MachineError` if
        something could not be deleted; the lock is released even then, so that a later run
        cleans up.
        """
        if not self._lock.held:
            return
        try:
            if not self.durable:
                _delete(self.directory.parent, self.directory.name)
        except OSError as error:
            what = f"{self.directory} could not be removed"
            raise refused(what, error, remedy=f"rm -r {self.directory}") from error
        finally:
            self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()


def unmark_durable(directories: Sequence[Path], run: str) -> None:
    """Undo `Scratch.keep` for a run that has ended; it is removed like other dead runs.

    `directories` begins with the first directory of the run. Raises `MachineError`.
    """
    first, *others = directories
    with lock_durable(first) as lock:
        Scratch(first, lock).announce(run, others)


def lock_durable(directory: Path, *, shared: bool = False) -> LockFile:
    """Lock a durable run that has ended; `shared` between readers.

    Raises `MachineError` if the run is in use or cannot be opened.
    """
    try:
        return LockFile(directory / LOCK_NAME, create=False, shared=shared)
    except BlockingIOError as error:
        raise MachineError(
            f"the durable run in {directory} is in use by another process",
            remedy="end that process first",
        ) from error
    except OSError as error:
        raise refused(f"{directory / LOCK_NAME} cannot be locked", error) from error


def of_rank(nvme_path: Path, rank: int) -> Path:
    """Return the parent of the run directories of one of several ranks."""
    return nvme_path / f"rank-{rank}"


def remove_dead_runs_of_ranks(nvme_path: Path, local_ranks: Sequence[int], count: int) -> None:
    """Remove dead runs of the ranks `local_ranks`, and of ranks beyond the current `count`.

    Ranks of other nodes are skipped: if nodes share `nvme_path`, locks may not work across nodes.
    """
    for number, path in directories_by_rank(nvme_path).items():
        if number in local_ranks or (number >= count and 0 in local_ranks):
            with suppress(MachineError):  # another process may remove it concurrently
                remove_dead_runs(path)
    if count > 1 and 0 in local_ranks:
        remove_dead_runs(nvme_path)


def directories_by_rank(nvme_path: Path) -> dict[int, Path]:
    """Return the existing directories of ranks, of any run, by rank."""
    directories = {}
    with suppress(OSError):
        for path in sorted(nvme_path.iterdir()):
            if (match := _RANK_NAME.fullmatch(path.name)) and path.is_dir():
                directories[int(match[1])] = path
    return directories


def _list_root(nvme_path: str | os.PathLike[str]) -> tuple[Path, list[str]]:
    root = checked_root(nvme_path)
    try:
        return root, sorted(os.listdir(root))
    except OSError as error:
        raise refusal(root, error) from error


def run_records(nvme_path: str | os.PathLike[str]) -> dict[Path, dict[str, Any]]:
    """Return all run directories under `nvme_path` with their run.json; oldest first.

    The record is {} if run.json is missing or damaged. Links to directories and directories of
    other users are included; see `foreign_reason`. Raises `MachineError`.
    """
    root, names = _list_root(nvme_path)
    records: dict[Path, dict[str, Any]] = {}
    for name in names:
        if _RUN_NAME.fullmatch(name):
            with suppress(OSError):
                file_type = stat.S_IFMT((root / name).lstat().st_mode)
                if file_type in (stat.S_IFDIR, stat.S_IFLNK):
                    records[root / name] = _read_record(root / name)
    return dict(sorted(records.items(), key=lambda item: str(item[1].get("created"))))


def durable_records(nvme_path: str | os.PathLike[str]) -> dict[Path, dict[str, Any]]:
    """Return `run_records` of the user's durable directories."""
    records = run_records(nvme_path)
    return {
        path: record
        for path, record in records.items()
        if record.get("durable") is True and not foreign_reason(path)
    }


def foreign_reason(directory: Path) -> str:
    """Return why a run directory is not used or removed automatically; "" for one of this user."""
    with suppress(OSError):
        status = directory.lstat()
        if stat.S_ISLNK(status.st_mode):
            return f"it is a link to {os.readlink(directory)}"
        if status.st_uid != os.geteuid():
            return (
                f"it belongs to user id {status.st_uid}, and this process runs as {os.geteuid()} "
                "(use a separate nvme_path for each user)"
            )
    return ""


def has_commits(directory: Path, record: Mapping[str, Any]) -> bool:
    """Return True if a step was committed in a directory, or in the first directory of its run.

    Commits count even if `record` is not durable, because the file may be an older copy. Returns
    True for a directory marked durable whose first directory is missing: its drive may not be
    mounted.
    """
    first = Path(str(record.get("primary", directory)))
    if (directory / DURABLE_MARKER_NAME).exists() and not first.is_dir():
        return True
    for folder in (directory, first):
        for path in folder.glob("commit-*.bin"):
            with suppress(OSError, ValueError):
                sequence = unseal(first_sealed(read_small(path))).get("sequence")
                if isinstance(sequence, int) and sequence > 0:
                    return True
    return False


def died_while_marking(directory: Path, record: Mapping[str, Any]) -> bool:
    """Return True if the run of a durable directory died while marking; see [Note: marking]."""
    first = Path(str(record.get("primary")))
    is_named = str(directory) in _read_record(first).get("members", [])
    return is_named and _RUN_NAME.fullmatch(first.name) is not None


def is_live(directory: Path) -> bool:
    """Return True if a process holds the lock of the directory."""
    try:
        LockFile(directory / LOCK_NAME, create=False, shared=True).close()
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def remove_dead_runs(nvme_path: str | os.PathLike[str]) -> list[Path]:
    """Delete the directories of dead runs under `nvme_path` and return their paths.

    A run is dead if its lock can be acquired. Not deleted: live runs, runs marked durable or with a
    committed step, links, directories of other users, directories with other names. Directories
    that cannot be deleted are left for the next run. Raises `MachineError` if `nvme_path` is not a
    readable directory.
    """
    root, names = _list_root(nvme_path)
    removed = []
    for name in names:
        is_new = _NEW_NAME.fullmatch(name) is not None
        is_run = _RUN_NAME.fullmatch(name) is not None
        if (is_run or is_new) and _remove_if_dead(root, name, is_new=is_new):
            removed.append(root / name)
    for path, record in durable_records(root).items():  # removed with their first directory
        if died_while_marking(path, record):
            first = Path(str(record["primary"]))
            _remove_if_dead(first.parent, first.name, is_new=False)
            if not path.exists():
                removed.append(path)
    return removed


def _remove_if_dead(root: Path, name: str, *, is_new: bool) -> bool:
    with suppress(OSError):
        directory_fd = os.open(root / name, _DIRECTORY_FLAGS)
        try:
            status = os.fstat(directory_fd)
            if status.st_uid != os.geteuid():
                return False
            if is_new and time.time() - status.st_mtime < _NEW_GRACE_S:
                return False
            if _read_record(root / name).get("durable") is True:
                return False  # not even locked: a continuing run may be acquiring the lock
            return _remove_locked(root, name, directory_fd, is_new=is_new)
        finally:
            os.close(directory_fd)
    return False


def _remove_locked(root: Path, name: str, directory_fd: int, *, is_new: bool) -> bool:
    try:
        lock = LockFile(Path(LOCK_NAME), create=False, dir_fd=directory_fd)
    except FileNotFoundError:
        # Only an interrupted removal or creation leaves no lock; the directory is then empty.
        os.rmdir(root / name)
        return True
    with lock:
        if not _may_be_removed(root / name, directory_fd, is_new=is_new):
            return False
        _delete(root, name)
        return True


def _may_be_removed(directory: Path, directory_fd: int, *, is_new: bool) -> bool:
    """Return True if a locked directory may be deleted; first deletes the members it lists."""
    names = os.listdir(directory_fd)
    if RECORD_NAME not in names:
        return all(name == LOCK_NAME or TEMPORARY_NAME.fullmatch(name) for name in names)
    record = _read_record(directory)
    if is_new and not record:
        return True  # the directory never had its final name
    if record.get("durable") is not False or has_commits(directory, record):
        return False
    return is_new or _remove_members(record)


def _remove_members(record: Mapping[str, Any]) -> bool:
    """Delete the other directories of a dead run, listed by the record of its first directory.

    Returns False if one of them is in use; see [Note: marking]. Raises `OSError`.
    """
    for path in map(Path, record.get("members", [])):
        if not _RUN_NAME.fullmatch(path.name):
            continue
        try:
            lock = LockFile(path / LOCK_NAME, create=False)
        except FileNotFoundError:
            continue  # already removed
        except BlockingIOError:
            return False
        with lock:
            member_record = _read_record(path)
            is_same_run = member_record.get("run") == record.get("run")
            is_dead = member_record.get("durable") is False or is_same_run
            if is_dead and not foreign_reason(path) and not has_commits(path, member_record):
                _delete(path.parent, path.name)
    return True


def _read_record(directory: Path) -> dict[str, Any]:
    """Return the record of a directory; {} if it is missing or damaged."""
    with suppress(OSError, ValueError):
        return read_record(directory)
    return {}


def _delete(root: Path, name: str) -> None:
    """Delete `root/name`: files of the run, the record, the lock, then the directory."""
    with suppress(FileNotFoundError):
        directory_fd = os.open(root / name, _DIRECTORY_FLAGS)
        try:
            with os.scandir(directory_fd) as scan:
                entries = list(scan)
            entries.sort(key=lambda entry: (entry.name == LOCK_NAME, entry.name == RECORD_NAME))
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.name, dir_fd=directory_fd)
                else:
                    with suppress(FileNotFoundError):
                        os.unlink(entry.name, dir_fd=directory_fd)
        finally:
            os.close(directory_fd)
        os.rmdir(root / name)

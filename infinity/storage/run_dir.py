"""The private directory on a disk where one run keeps its state while it lives.

[Note: marking]
A durable run on several paths has a directory on each, and the first one's record decides for all:
it first names the others (`announce`), then they are marked, it comes last. A first directory that
names others and is not durable was left by a run that died meanwhile; it goes with all of them.

Invariants: the directory can be seen under its final name only while its lock is held or after its
run has died; only directories of our own pattern, owner and making are ever removed; the lock file
goes last, so a removal that was cut short is recognised and finished by the next run.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
import stat
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from infinity.crc32c import crc32c
from infinity.errors import MachineError
from infinity.files import read_small, sync_directory, temporary_name, write_new
from infinity.storage.os_errors import checked_root, does_not_fit, free_bytes, refusal

# What a scratch directory says of the run that made it (`run.json`), and how JSON is sealed.


RECORD_VERSION = 2


def seal(content: Mapping[str, Any]) -> bytes:
    """The text of an object that says, with a checksum over all the rest, whether it is whole."""
    return json.dumps({**content, "checksum": _checksum(content)}, indent=1).encode()


def unseal(data: bytes) -> dict[str, Any]:
    """The inverse; raises `ValueError` for what was changed, or never was sealed."""
    try:
        content = json.loads(data)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(content, dict) or content.pop("checksum", None) != _checksum(content):
        raise ValueError("its checksum does not fit")
    return content


def _checksum(content: Mapping[str, Any]) -> int:
    return crc32c(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def write_record(path: Path, *, durable: bool = False, **facts: Any) -> None:
    """Write who the run is, and make sure that it is on the disk before the run can be seen."""
    record: dict[str, Any] = {
        "version": RECORD_VERSION,
        "durable": durable,
        "pid": os.getpid(),
        "start_ticks": _start_ticks(os.getpid()),
        "hostname": socket.gethostname(),
        "boot_id": _read("/proc/sys/kernel/random/boot_id"),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        **facts,
    }
    write_new(path, seal(record))


def _start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; the name may hold anything."""
    fields = (_read(f"/proc/{pid}/stat") or "").rpartition(")")[2].split()
    return int(fields[19]) if len(fields) > 19 else None


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


_RUN_NAME = re.compile(r"infinity-run-[0-9]+-[0-9a-f]{16}")
# A directory that is being made: invisible to the pattern above until its lock is held.
_NEW_NAME = re.compile(r"\.infinity-new-[0-9]+-[0-9a-f]{16}")
# Making takes milliseconds; what is older was abandoned between two system calls.
_NEW_GRACE_S = 600.0
LOCK_NAME = "lock"
RECORD_NAME = "run.json"
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LOCK_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


class Scratch:
    """One run's directory under an `nvme_path`; made by `Scratch.create`, gone after `remove`.

    One that is `durable` stays, whatever happens to the run; `Scratch.adopt` opens it again.
    """

    def __init__(self, directory: Path, lock_fd: int, *, durable: bool = False) -> None:
        self.directory = directory
        self.durable = durable
        self._lock_fd = lock_fd
        self._owner_pid = os.getpid()
        _open_scratches.add(self)

    @classmethod
    def create(cls, nvme_path: str | os.PathLike[str]) -> Self:
        """Remove what dead runs left under `nvme_path`, then make and lock a new directory there.

        Raises `MachineError` if `nvme_path` is missing, is not a directory, or cannot be written
        or locked, and `DoesNotFitError` if not even a directory fits.
        """
        root = checked_root(nvme_path)
        remove_dead_runs(root)
        suffix = f"{os.getpid()}-{secrets.token_hex(8)}"
        new, final = root / f".infinity-new-{suffix}", root / f"infinity-run-{suffix}"
        lock_fd = -1
        try:
            new.mkdir(mode=0o700)
            lock_fd = os.open(new / LOCK_NAME, _LOCK_FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            write_record(new / RECORD_NAME)
            new.rename(final)
        except BaseException as error:
            shutil.rmtree(new, ignore_errors=True)
            if lock_fd >= 0:
                os.close(lock_fd)
            if isinstance(error, OSError):
                raise refusal(root, error) from error
            raise
        return cls(final, lock_fd)

    @classmethod
    def adopt(cls, directory: Path) -> Self:
        """Lock the directory of a durable run that is over, to go on in it.

        Raises `MachineError` if it is in use, or cannot be opened.
        """
        lock_fd = -1
        try:
            lock_fd = os.open(directory / LOCK_NAME, _LOCK_FLAGS)
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if lock_fd >= 0:
                os.close(lock_fd)
            if error.errno == errno.EWOULDBLOCK:
                raise in_use(directory) from error
            raise refusal(directory, error) from error
        return cls(directory, lock_fd, durable=True)

    def announce(self, run: str, members: Sequence[Path]) -> None:
        """Say which directories are about to be kept with this one; see [Note: marking].

        Raises `MachineError`.
        """
        self._write(durable=False, run=run, members=[str(path) for path in members])

    def keep(self, facts: Mapping[str, Any]) -> None:
        """Make it durable: from now on it is never removed; `facts` go into its record.

        Everything in it must be on the disk before, which this makes sure of for names only.
        Raises `MachineError`.
        """
        self._write(durable=True, **facts)
        self.durable = True

    def _write(self, *, durable: bool, **facts: Any) -> None:
        """Replace the record, for good."""
        new = self.directory / temporary_name()
        try:
            write_record(new, durable=durable, **facts)
            sync_directory(self.directory)
            new.rename(self.directory / RECORD_NAME)
            sync_directory(self.directory)
            sync_directory(self.directory.parent)
        except OSError as error:
            raise refusal(self.directory, error) from error

    def path(self, name: str) -> Path:
        """Return where the file `name`, a plain file name, lies; the caller makes the file."""
        assert name == os.path.basename(name)
        assert name not in ("", ".", "..", LOCK_NAME, RECORD_NAME)
        return self.directory / name

    def free_bytes(self) -> int:
        """Return the space an ordinary user may still fill on this disk."""
        return free_bytes(self.directory)

    def check_space(self, required_bytes: int) -> None:
        """Raise `DoesNotFitError` unless `required_bytes` more bytes fit on this disk now."""
        free_bytes = self.free_bytes()
        if free_bytes < required_bytes:
            raise does_not_fit(required_bytes, {self.directory.parent: free_bytes})

    def remove(self) -> None:
        """Delete the directory, unless it is durable, and give up its lock. Safe to call twice.

        A forked child does nothing: the directory is its parent's. Raises `MachineError` if
        something could not be deleted; the lock is given up all the same, so that a later run
        cleans up.
        """
        if self._lock_fd < 0 or self._owner_pid != os.getpid():
            return
        try:
            if not self.durable:
                _delete(self.directory.parent, self.directory.name)
        except OSError as error:
            because = error.strerror
            remedy = f"rm -r {self.directory}"
            raise MachineError(
                f"{self.directory} could not be removed", because=because, remedy=remedy
            ) from error
        finally:
            self._release()

    def _release(self) -> None:
        _open_scratches.discard(self)
        lock_fd, self._lock_fd = self._lock_fd, -1
        if lock_fd >= 0:
            os.close(lock_fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()


def in_use(directory: Path) -> MachineError:
    """The error for a durable run that another process has locked."""
    return MachineError(
        f"the durable run in {directory} is in use by another process",
        remedy="end that process first",
    )


def run_records(nvme_path: str | os.PathLike[str]) -> dict[Path, dict[str, Any]]:
    """All run directories under `nvme_path`, and what their run.json says; oldest first.

    Of one whose run.json is missing or damaged nothing is known: {}. Links, and what belongs to
    other people, are left out. Raises `MachineError`.
    """
    root = checked_root(nvme_path)
    try:
        names = sorted(os.listdir(root))
    except OSError as error:
        raise refusal(root, error) from error
    found: dict[Path, dict[str, Any]] = {}
    for name in names:
        if _RUN_NAME.fullmatch(name):
            with suppress(OSError):
                facts = (root / name).lstat()
                if facts.st_uid == os.geteuid() and stat.S_ISDIR(facts.st_mode):
                    found[root / name] = _read_record(root / name)
    return dict(sorted(found.items(), key=lambda item: str(item[1].get("created"))))


def durable_records(nvme_path: str | os.PathLike[str]) -> dict[Path, dict[str, Any]]:
    """As `run_records`, but of directories that say that they are durable."""
    found = run_records(nvme_path)
    return {path: record for path, record in found.items() if record.get("durable") is True}


def never_began(directory: Path, record: Mapping[str, Any]) -> bool:
    """Whether a durable directory is of a run that died in its marking; see [Note: marking]."""
    first = Path(str(record.get("primary")))
    named = _read_record(first).get("members")
    is_named = isinstance(named, list) and str(directory) in named
    return is_named and _RUN_NAME.fullmatch(first.name) is not None


def is_live(directory: Path) -> bool:
    """Whether a process holds the directory's lock."""
    with suppress(OSError):
        lock_fd = os.open(directory / LOCK_NAME, _LOCK_FLAGS)
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(lock_fd)
    return False


def remove_dead_runs(nvme_path: str | os.PathLike[str]) -> list[Path]:
    """Delete the directories of dead runs under `nvme_path` and return their paths.

    A run is dead when its lock can be taken. Left alone: live runs, runs marked durable, links,
    other people's directories, anything that does not look as we made it. What cannot be deleted
    is left for the next run. Raises `MachineError` if `nvme_path` is not a readable directory.
    """
    root = checked_root(nvme_path)
    try:
        names = sorted(os.listdir(root))
    except OSError as error:
        raise refusal(root, error) from error
    removed = []
    for name in names:
        is_run, is_new = _RUN_NAME.fullmatch(name), _NEW_NAME.fullmatch(name)
        if (is_run or is_new) and _remove_if_dead(root, name, is_new=bool(is_new)):
            removed.append(root / name)
    for path, record in durable_records(root).items():  # what others should have taken along
        if never_began(path, record):
            first = Path(str(record["primary"]))
            _remove_if_dead(first.parent, first.name, is_new=False)
            removed += [] if path.exists() else [path]
    return removed


def _remove_if_dead(root: Path, name: str, *, is_new: bool) -> bool:
    with suppress(OSError):
        directory_fd = os.open(root / name, _DIRECTORY_FLAGS)
        try:
            facts = os.fstat(directory_fd)
            if facts.st_uid != os.geteuid():
                return False
            if is_new and time.time() - facts.st_mtime < _NEW_GRACE_S:
                return False
            return _remove_locked(root, name, directory_fd, is_new=is_new)
        finally:
            os.close(directory_fd)
    return False


def _remove_locked(root: Path, name: str, directory_fd: int, *, is_new: bool) -> bool:
    try:
        lock_fd = os.open(LOCK_NAME, _LOCK_FLAGS, dir_fd=directory_fd)
    except FileNotFoundError:
        # Only a removal or a making that was cut short leaves no lock, and then nothing else.
        os.rmdir(root / name)
        return True
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Another process may have removed it between our open and our lock.
        if os.fstat(lock_fd).st_nlink == 0:
            return False
        if not _may_be_removed(directory_fd, is_new=is_new):
            return False
        if not is_new and not _remove_members(_read_record(root / name)):
            return False
        _delete(root, name)
        return True
    finally:
        os.close(lock_fd)


def _may_be_removed(directory_fd: int, *, is_new: bool) -> bool:
    """Return whether the record says so; a directory without one must be empty but for the lock."""
    try:
        record_fd = os.open(RECORD_NAME, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=directory_fd)
    except FileNotFoundError:
        return os.listdir(directory_fd) == [LOCK_NAME]
    with os.fdopen(record_fd, "rb") as file:
        try:
            record = unseal(file.read(1 << 20))
        except ValueError:
            return is_new  # while it is made the record may be half written; later it never is
    return record.get("durable") is False


def _remove_members(record: Mapping[str, Any]) -> bool:
    """Delete what a dead run was about to keep beside the directory of this record.

    Returns whether none of it is left; see [Note: marking]. Raises `OSError`.
    """
    members = record.get("members", [])
    for path in map(Path, members if isinstance(members, list) else []):
        if not _RUN_NAME.fullmatch(path.name):
            continue
        try:
            lock_fd = os.open(path / LOCK_NAME, _LOCK_FLAGS)
        except FileNotFoundError:
            continue  # gone before
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            there = _read_record(path)
            dead = there.get("durable") is False or there.get("run") == record.get("run")
            if dead and path.lstat().st_uid == os.geteuid():
                _delete(path.parent, path.name)
        except BlockingIOError:
            return False
        finally:
            os.close(lock_fd)
    return True


def _read_record(directory: Path) -> dict[str, Any]:
    """What a directory's record says; nothing where there is none that is whole."""
    with suppress(OSError, ValueError):
        return unseal(read_small(directory / RECORD_NAME))
    return {}


def _delete(root: Path, name: str) -> None:
    """Delete `root/name`: first what the run wrote, then the record, then the lock, then itself."""
    with suppress(FileNotFoundError):
        directory_fd = os.open(root / name, _DIRECTORY_FLAGS)
        try:
            with os.scandir(directory_fd) as found:
                entries = list(found)
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


# A forked child holds a copy of every lock. It must let go, or a DataLoader worker that outlives a
# killed run would keep that run's directory looking alive. (Closing a copy does not unlock.)
_open_scratches: weakref.WeakSet[Scratch] = weakref.WeakSet()


def _let_go_in_child() -> None:
    for scratch in list(_open_scratches):
        scratch._release()


os.register_at_fork(after_in_child=_let_go_in_child)

"""The commit record of a durable run: the few bytes that say which copies are the state.

[Note: two copies]
A record is written to two files, one after the other, each synced, after everything that it speaks
of is on stable storage and before anything is written over what the record before it speaks of. So
at any moment at least one file is whole, and *every whole file names a state that is still there*:
both hold the same record; or the second still holds the one before, of which nothing has been
overwritten yet. Whatever is cut short, flipped or lost, loading takes the whole record with the
highest sequence number. A run that goes on first makes both files equal again (`repair`): otherwise
its first pass would overwrite what the older one names. See docs/decisions/0016.

[Note: two phases]
Of several ranks each has such files of its own. The first file of a step prepares it, and the
second one commits it, after all ranks have met and so said that it is prepared on all. Loading
takes the highest sequence number that *every* rank has in one of its files, of the same step: one
that is prepared on all is rolled forward, and one that is not is rolled back. (At the end of a run
ranks prepare without a meeting, and one of them may have failed a step before.) See
docs/decisions/0025.

[Note: one history]
A record holds a CRC of the page checksums of each unit that it names, and these hold CRCs of the
pages: state that is read through a record is the state that was committed with it, whichever files
were set back or exchanged. `session` is a random id on which all ranks agree at each start. Within
a session each sequence number stands for one commit, so records of several ranks with the same
number and session are of the same commit.

A record is sealed JSON, and behind it lies what is left of longer ones.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from infinity.checkpoint.plain import decode, encode
from infinity.checkpoint.schemas import check_run_state
from infinity.common.checksummed_json import first_sealed, seal, unseal
from infinity.common.files import check_linked, read_small, refused, sync_directory, write_at
from infinity.common.parsed_json import Count, Counts, Text, Texts, made
from infinity.errors import CheckpointError, MachineError

COMMIT_NAMES = ("commit-a.bin", "commit-b.bin")
OF_EACH_RANK = ("rng", "registered")  # of a run's state; all else is the same on all ranks
_FORMAT, _VERSION = "torch-infinity-commit", 4
_RESERVED_BYTES = 64 << 10


@dataclass(frozen=True)
class OpenWindow:
    """The checkpoint that was loaded within an accumulation window, and the CRC of its manifest."""

    root: Text
    tag: Text
    manifest_crc32c: Count


@dataclass(frozen=True)
class _StoredDocument:
    run: Any
    buffers: Any
    persistent: Texts
    window: OpenWindow | None


@dataclass(frozen=True)
class Document:
    """Data of a committed step besides the stored state.

    `run` are counters, groups, generators and so on; `persistent` names those buffers that are of
    the state dict. Within an accumulation window, where only a load can commit, `window` is the
    checkpoint that its gradients are read from: they have no place in a commit.
    """

    run: dict[str, Any] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    persistent: frozenset[str] = frozenset()
    window: OpenWindow | None = None

    def to_json(self) -> dict[str, Any]:
        """A snapshot of it, which is JSON; empty where there is nothing."""
        if not self.run:
            return {}
        return {
            "run": encode(self.run, "the run's state"),
            "buffers": encode(self.buffers, "the buffers"),
            "persistent": sorted(self.persistent),
            "window": None if self.window is None else asdict(self.window),
        }

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> Document:
        """The inverse. Raises `CheckpointError`."""
        if found == {}:
            return Document()
        try:
            stored = made(_StoredDocument, found)
            run, buffers = decode(stored.run), decode(stored.buffers)
            check_run_state({**run, "buffers": buffers}, "the document of a commit")
            return Document(run, buffers, frozenset(stored.persistent), stored.window)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"the document of a commit cannot be read: {error}") from error


def with_kept(document: Mapping[str, Any], kept: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a document as JSON with the optimizer's state of parameters, by name."""
    run = {**document["run"], "kept": encode(dict(kept), "the optimizer's state")}
    return {**document, "run": run}


class CommitKey(NamedTuple):
    """Identity of a commit, the same on all ranks; see [Note: one history]. Ordered by age."""

    sequence: int
    step: int
    session: str

    def __str__(self) -> str:
        return f"{self.sequence} (update {self.step}, start {self.session[:8]})"


@dataclass(frozen=True)
class CommitRecord:
    """One committed state.

    Attributes:
        run: Id of the run directory.
        session: Id of the start that committed it.
        sequence: Number of commits of the run before this one.
        step: Number of updates.
        copies: Active copy (0 or 1) of each unit's trained state.
        frozen_copies: Active copy of each unit's frozen parameters.
        checksums: CRC32C of the page checksums of each unit's active copies, its trained state and
            then its frozen parameters; empty if none are kept.
        document: Result of `Document.to_json`.
        plan: Checksum of the `plan.json` that the state was written by; empty in runs of before.
        when: UTC, ISO 8601.
    """

    run: Text
    session: Text
    sequence: Count
    step: Count
    copies: Counts
    frozen_copies: Counts
    checksums: Counts
    document: Any
    plan: Text = ""
    when: Text = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    @property
    def key(self) -> CommitKey:
        """Identity of the commit."""
        return CommitKey(self.sequence, self.step, self.session)

    def is_of(self, run: str, num_units: int) -> bool:
        """Return whether the record can be of this run, which has that many units."""
        return (
            self.run == run
            and len(self.copies) == len(self.frozen_copies) == num_units
            and {*self.copies, *self.frozen_copies} <= {0, 1}
            and len(self.checksums) in (0, 2 * num_units)
        )

    def to_bytes(self) -> bytes:
        """As a file holds it."""
        return seal({"format": _FORMAT, "version": _VERSION, **vars(self)})

    @staticmethod
    def from_bytes(data: bytes) -> CommitRecord | None:
        """The record at the beginning of a file; None where there is no whole one.

        Raises `ValueError` for one of another version.
        """
        try:
            found = unseal(first_sealed(data))
        except ValueError:
            return None
        if (found.get("format"), found.get("version")) != (_FORMAT, _VERSION):
            raise ValueError("it is of another version")
        record = made(CommitRecord, found)
        if not {0, 1}.issuperset((*record.copies, *record.frozen_copies)):
            raise ValueError("it names copies that there are not")
        return record


class SmallFile:
    """A small file that is written in place and synced.

    All methods raise `MachineError`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1
        with self._doing("opened"):
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._fd = os.open(path, flags, 0o600)

    @contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            found = refused(f"{self.path} could not be {what}", error, self.path)
            raise MachineError(
                found.what,
                because=f"the steps of a durable run are committed there; {found.because}",
                remedy="look at the drive and its space; resume: auto goes on from the last commit",
            ) from error

    def write(self, offset: int, data: bytes) -> None:
        """Write all of `data`."""
        with self._doing("written"):
            write_at(self._fd, data, offset)

    def sync(self) -> None:
        """Put it on stable storage; raises `RemovedError` where it has no name any more."""
        with self._doing("synced"):
            os.fsync(self._fd)
            check_linked(self._fd, self.path)

    def reserve(self, nbytes: int) -> None:
        """Take the space beforehand, where the file system can."""
        with self._doing("reserved"):
            os.posix_fallocate(self._fd, 0, nbytes)

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return `count` bytes, fewer at the end of the file."""
        with self._doing("read"):
            return os.pread(self._fd, nbytes, offset)

    def close(self) -> None:
        """Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class CommitFiles:
    """The two files of one run's record; see [Note: two copies]."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: list[SmallFile] = []
        try:
            for name in COMMIT_NAMES:
                self._files.append(SmallFile(directory / name))
        except BaseException:
            self.close()
            raise

    def reserve(self) -> None:
        """Take the space for records of a common size."""
        for file in self._files:
            file.reserve(_RESERVED_BYTES)

    def prepare(self, record: CommitRecord) -> None:
        """The first file: one rank that is alone would load it from now on."""
        self._put(record, self._files[:1])

    def commit(self, record: CommitRecord) -> None:
        """Write the second file of a prepared commit, which frees extents of the one before."""
        self._put(record, self._files[1:])

    def repair(self, record: CommitRecord) -> None:
        """Make both files hold a record that was read from one of them, which is not touched."""
        there = read_commits(self._directory, record.run, len(record.copies))
        self._put(record, [file for file in self._files if there[file.path] != record])
        sync_directory(self._directory)

    @staticmethod
    def _put(record: CommitRecord, files: Sequence[SmallFile]) -> None:
        data = record.to_bytes()
        for file in files:
            file.write(0, data)
            file.sync()

    def close(self) -> None:
        """Close the files; idempotent."""
        for file in self._files:
            file.close()


def read_commits(directory: Path, run: str, num_units: int) -> dict[Path, CommitRecord | str]:
    """Return the record in each file of a run, or why it has none, as the end of a sentence."""
    found: dict[Path, CommitRecord | str] = {}
    for path in (directory / name for name in COMMIT_NAMES):
        try:
            record = CommitRecord.from_bytes(read_small(path))
        except OSError as error:
            found[path] = f"cannot be read: {error.strerror}"
        except ValueError:
            found[path] = "is of another version"
        else:
            found[path] = record or "is torn or damaged: its checksum does not fit"
            if record is not None and not record.is_of(run, num_units):
                found[path] = f"is of another run, {record.run}"
    return found


def foreign_checksums(path: Path, record: CommitRecord, unit: str) -> CheckpointError:
    """Return the error for a file of page checksums that is not of a commit."""
    return CheckpointError(
        f"{path} does not hold the checksums of {unit} that update {record.step} committed",
        because="it is damaged, or this file, the commit records and the state are of different "
        "times: restored in part, or copied while the run went on",
        remedy=f"restore all files of {path.parent} from one copy; or start a new run (resume: "
        "never) and load a checkpoint",
    )


def intact_records(
    directory: Path, found: Mapping[Path, CommitRecord | str]
) -> dict[CommitKey, CommitRecord]:
    """Return the intact records among the results of `read_commits`; `CheckpointError` if none."""
    records = [record for record in found.values() if isinstance(record, CommitRecord)]
    if not records:
        raise CheckpointError(
            f"the durable run in {directory} has no whole commit record",
            because="; ".join(f"{path.name} {why}" for path, why in found.items()),
            remedy="restore one of them from a backup; the state cannot be read without it",
        )
    return {record.key: record for record in records}


def last_common(records: Sequence[Iterable[CommitKey]], where: Path) -> CommitKey:
    """Return the newest commit that every rank has an intact record of.

    Args:
        records: Commits of each rank.
        where: A directory of the run, for the message.

    Raises:
        CheckpointError: There is none.
    """
    every = [set(there) for there in records]
    common = every[0].intersection(*every)
    if not common:
        listing = [", ".join(map(str, sorted(keys))) for keys in every]
        raise CheckpointError(
            f"the ranks of the durable run in {where} have no commit in common: "
            + "; ".join(f"rank {rank} has {keys}" for rank, keys in enumerate(listing)),
            because="a record of one of them is damaged, or its directory was set back to an older "
            "copy or is of another start",
            remedy="restore the directories of all ranks from one copy (or one of commit-a.bin, "
            "commit-b.bin if only that is damaged); or start a new run (resume: never) and load a "
            "checkpoint",
        )
    return max(common)

"""Commit record of a durable run: the small document that names the copies that form the state.

[Note: two copies]
A record is written to two files, one after the other, each synced: after all data that it names is
on stable storage, and before any extent that the previous record names is overwritten. So at any
moment at least one file is intact, and *every intact file names a state that still exists*: both
hold the same record, or the second still holds the previous one, no extent of which has been
overwritten yet. Whatever is torn, flipped or lost, loading takes the intact record with the highest
sequence number. A run that resumes first makes both files equal again (`repair`): otherwise its
first pass would overwrite the state that the older record names. See docs/decisions/0016.

[Note: two phases]
With several ranks, each has two such files. Writing the first file of a step prepares the step, and
writing the second commits it, after a barrier has shown that all ranks have prepared it. Loading
takes the highest sequence number that *every* rank has in one of its files, for the same step: a
step that is prepared on all ranks is rolled forward, any other is rolled back. (At the end of a run
ranks prepare without a barrier, and one of them may have failed one step earlier.) See
docs/decisions/0025.

[Note: one history]
A record holds a CRC of the page checksums of each unit that it names, and these are CRCs of the
pages: state that is read through a record is the state that was committed with it, even if files
were restored from an older copy or exchanged. `session` is a random id on which all ranks agree at
each start. Within a session each sequence number identifies one commit, so records of several ranks
with the same number and session are of the same commit.

A record is sealed JSON. The end of a longer, older record may follow it in the file.
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
PER_RANK_KEYS = ("rng", "registered")  # keys of the run state that differ between ranks
_FORMAT, _VERSION = "torch-infinity-commit", 4
_RESERVED_BYTES = 64 << 10


@dataclass(frozen=True)
class OpenWindow:
    """Checkpoint that was loaded within an accumulation window, and the CRC of its manifest."""

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
    """Data of a committed step in addition to the stored state.

    `run` holds counters, groups, generators etc.; `persistent` names the buffers in the state dict.
    Within an accumulation window, where only a load can commit, `window` is the checkpoint from
    which to read the gradients: a commit does not hold them.
    """

    run: dict[str, Any] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    persistent: frozenset[str] = frozenset()
    window: OpenWindow | None = None

    def to_json(self) -> dict[str, Any]:
        """Return a snapshot as JSON; empty if there is no run state."""
        if not self.run:
            return {}
        return {
            "run": encode(self.run, "the run's state"),
            "buffers": encode(self.buffers, "the buffers"),
            "persistent": sorted(self.persistent),
            "window": None if self.window is None else asdict(self.window),
        }

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Document:
        """Invert `to_json`. Raises `CheckpointError`."""
        if document == {}:
            return Document()
        try:
            stored = made(_StoredDocument, document)
            run, buffers = decode(stored.run), decode(stored.buffers)
            check_run_state({**run, "buffers": buffers}, "the document of a commit")
            return Document(run, buffers, frozenset(stored.persistent), stored.window)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"the document of a commit cannot be read: {error}") from error


def with_optimizer_state(document: Mapping[str, Any], kept: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a JSON document with `kept`, the optimizer state by parameter name, replaced."""
    run = {**document["run"], "kept": encode(dict(kept), "the optimizer's state")}
    return {**document, "run": run}


class CommitKey(NamedTuple):
    """Identity of a commit, equal on all ranks; see [Note: one history]. Ordered by age."""

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
        sequence: Number of earlier commits of the run.
        step: Number of updates.
        copies: Active copy (0 or 1) of each unit's trained state.
        frozen_copies: Active copy of each unit's frozen parameters.
        checksums: CRC32C of the page checksums of each unit's active copies, its trained state and
            then its frozen parameters; empty without page checksums.
        document: Result of `Document.to_json`.
        plan: Checksum of the `plan.json` of the state; empty in runs of older versions.
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

    def belongs_to_run(self, run: str, num_units: int) -> bool:
        """Return True if the record can belong to this run, which has `num_units` units."""
        return (
            self.run == run
            and len(self.copies) == len(self.frozen_copies) == num_units
            and len(self.checksums) in (0, 2 * num_units)
        )

    def to_bytes(self) -> bytes:
        """Return the content of a commit file."""
        return seal({"format": _FORMAT, "version": _VERSION, **vars(self)})

    @staticmethod
    def from_bytes(data: bytes) -> CommitRecord | None:
        """Return the record at the beginning of a file; None if there is no intact one.

        Raises `ValueError` for a record of another version or with invalid values.
        """
        try:
            members = unseal(first_sealed(data))
        except ValueError:
            return None
        if (members.get("format"), members.get("version")) != (_FORMAT, _VERSION):
            raise ValueError("it is of another version")
        record = made(CommitRecord, members)
        if not {0, 1}.issuperset((*record.copies, *record.frozen_copies)):
            raise ValueError("it names copies that do not exist")
        return record


class SmallFile:
    """A small file that is written in place and synced.

    All methods raise `MachineError`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1
        with self._translating_errors("opened"):
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._fd = os.open(path, flags, 0o600)

    @contextmanager
    def _translating_errors(self, action: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            refusal = refused(f"{self.path} could not be {action}", error, self.path)
            raise MachineError(
                refusal.what,
                because=f"the steps of a durable run are committed to it; {refusal.because}",
                remedy="check the drive and its free space; resume: auto resumes from the last "
                "commit",
            ) from error

    def write(self, offset: int, data: bytes) -> None:
        """Write all of `data`."""
        with self._translating_errors("written"):
            write_at(self._fd, data, offset)

    def sync(self) -> None:
        """Sync the file; raises `RemovedError` if it was unlinked."""
        with self._translating_errors("synced"):
            os.fsync(self._fd)
            check_linked(self._fd, self.path)

    def reserve(self, nbytes: int) -> None:
        """Allocate `nbytes` of disk space in advance."""
        with self._translating_errors("reserved"):
            os.posix_fallocate(self._fd, 0, nbytes)

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes, fewer at the end of the file."""
        with self._translating_errors("read"):
            return os.pread(self._fd, nbytes, offset)

    def close(self) -> None:
        """Close the file; idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class CommitFiles:
    """The two commit files of one run; see [Note: two copies]."""

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
        """Allocate disk space for records of a typical size."""
        for file in self._files:
            file.reserve(_RESERVED_BYTES)

    def prepare(self, record: CommitRecord) -> None:
        """Write the first file; a single rank would load this record from now on."""
        self._write_record(record, self._files[:1])

    def commit(self, record: CommitRecord) -> None:
        """Write the second file of a prepared record; the extents of the previous one are free."""
        self._write_record(record, self._files[1:])

    def repair(self, record: CommitRecord) -> None:
        """Make both files hold a record that was read from one of them, which is not written."""
        records = read_commits(self._directory, record.run, len(record.copies))
        self._write_record(record, [file for file in self._files if records[file.path] != record])
        sync_directory(self._directory)

    @staticmethod
    def _write_record(record: CommitRecord, files: Sequence[SmallFile]) -> None:
        data = record.to_bytes()
        for file in files:
            file.write(0, data)
            file.sync()

    def close(self) -> None:
        """Close the files; idempotent."""
        for file in self._files:
            file.close()


def read_commits(directory: Path, run: str, num_units: int) -> dict[Path, CommitRecord | str]:
    """Return the record in each commit file of a run, or a message to append to its path."""
    results: dict[Path, CommitRecord | str] = {}
    for path in (directory / name for name in COMMIT_NAMES):
        try:
            record = CommitRecord.from_bytes(read_small(path))
        except OSError as error:
            results[path] = f"cannot be read: {error.strerror}"
        except ValueError as error:
            results[path] = f"cannot be used: {error}"
        else:
            results[path] = record or "is torn or damaged: its checksum does not match"
            if record is not None and not record.belongs_to_run(run, num_units):
                results[path] = f"is of another run, {record.run}"
    return results


def checksum_mismatch_error(path: Path, record: CommitRecord, unit: str) -> CheckpointError:
    """Return the error for a file of page checksums that does not match a commit."""
    return CheckpointError(
        f"{path} does not hold the checksums of {unit} that update {record.step} committed",
        because="it is damaged, or this file, the commit records and the state are from different "
        "times: partly restored, or copied while the run was active",
        remedy=f"restore all files of {path.parent} from one copy; or start a new run (resume: "
        "never) and load a checkpoint",
    )


def intact_records(
    directory: Path, results: Mapping[Path, CommitRecord | str]
) -> dict[CommitKey, CommitRecord]:
    """Return the intact records of `read_commits` by key; raises `CheckpointError` if none is."""
    records = [record for record in results.values() if isinstance(record, CommitRecord)]
    if not records:
        raise CheckpointError(
            f"the durable run in {directory} has no intact commit record",
            because="; ".join(f"{path.name} {why}" for path, why in results.items()),
            remedy="restore one of them from a backup; the state cannot be read without it",
        )
    return {record.key: record for record in records}


def newest_common_commit(records: Sequence[Iterable[CommitKey]], where: Path) -> CommitKey:
    """Return the newest commit of which every rank has an intact record.

    Args:
        records: Commits of each rank.
        where: A directory of the run, for the message.

    Raises:
        CheckpointError: The ranks have no commit in common.
    """
    key_sets = [set(rank_keys) for rank_keys in records]
    common = key_sets[0].intersection(*key_sets)
    if not common:
        listing = [", ".join(map(str, sorted(keys))) for keys in key_sets]
        raise CheckpointError(
            f"the ranks of the durable run in {where} have no commit in common: "
            + "; ".join(f"rank {rank} has {keys}" for rank, keys in enumerate(listing)),
            because="a record of one of them is damaged, or its directory was restored from an "
            "older copy or is of another start",
            remedy="restore the directories of all ranks from one copy (or one of commit-a.bin, "
            "commit-b.bin if only that is damaged); or start a new run (resume: never) and load a "
            "checkpoint",
        )
    return max(common)

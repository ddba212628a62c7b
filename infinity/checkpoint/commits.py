"""The commit record of a durable run: the few bytes that say which sides are the state.

[Note: two copies]
A record is written to two files, one after the other, each synced, after everything that it speaks
of is on stable storage and before anything is written over what the record before it speaks of. So
at any moment at least one file is whole, and *every whole file names a state that is still there*:
both hold the same record; or the second still holds the one before, of which nothing has been
overwritten yet. Whatever is cut short, flipped or lost, loading takes the whole record with the
highest sequence number. A run that goes on first makes both files equal again (`mend`): otherwise
its first pass would overwrite what the older one names. See docs/decisions/0016.

A file is a fixed head, a JSON header, and the document: opaque bytes that whoever trains wants
back (counters, random states, buffers, ...).
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from infinity.crc32c import crc32c
from infinity.errors import CheckpointError, MachineError
from infinity.files import read_small, sync_directory
from infinity.formats import MOMENT_BLOCK, MomentFormat
from infinity.offload.state import UnitState
from infinity.plan.layout import PRECISIONS, Kind, Segment, UnitLayout
from infinity.plan.plan import Plan, RuleFacts
from infinity.storage.disk import Extent

# What `plan.json` says of the bytes of a durable run: which of them are whose.


SCALES = "_scales"
SCALE_BYTES = 4


def committed_extents(unit: UnitState) -> Iterator[tuple[Extent, int | None]]:
    """(extent, chunk) of a unit's committed state; no chunk for its frozen bytes."""
    if unit.sides:
        yield from ((e, i) for i, e in enumerate(unit.sides[unit.turn.current]))
    if unit.frozen_sides:
        yield unit.frozen_sides[unit.frozen_turn.current], None


def holders(plan: Plan, unit: UnitState, chunk: int | None, low: int, high: int) -> Iterator[str]:
    """What bytes `low` to `high` of a chunk's record, or of the frozen bytes, belong to."""
    layout = unit.layout
    if chunk is None:
        for segment in (s for s in layout.segments if not s.trained):
            if segment.offset < high and segment.offset + segment.nbytes > low:
                yield f"weight of {segment.name!r}"
        return
    first, count = layout.chunk(chunk, plan.chunk_elements)
    for kind in plan.whole_record.kinds:
        start = plan.whole_record.offset(kind, count)
        values = count * itemsize(plan, kind)
        areas = [(kind.value, start, values, itemsize(plan, kind), 1)]
        if kind in plan.precision.moment_kinds:
            scales = plan.precision.format_of(kind).num_scales(count) * SCALE_BYTES
            areas.append((kind.value + SCALES, start + values, scales, SCALE_BYTES, MOMENT_BLOCK))
        for what, begin, nbytes, item, elements in areas:
            a, b = max(low, begin) - begin, min(high, begin + nbytes) - begin
            if a >= b:
                continue
            for segment in layout.trained_segments:
                one, other = segment.within(first, count)
                one, other = max(one, a // item * elements), min(other, -(-b // item) * elements)
                if one < other:
                    yield f"{what} of {segment.name!r}"


def plan_of(facts: Mapping[str, Any], homes: Sequence[Any]) -> Plan:
    """As much of a run's plan as its `plan.json` holds: enough to find every byte."""
    moments = tuple(MomentFormat(name) for name in facts["moments"])
    precision = replace(PRECISIONS[facts["precision"]], moments=moments)
    units = []
    for index, unit in enumerate(facts["units"]):
        segments = tuple(
            Segment(**{**segment, "shape": tuple(segment["shape"])}, parameter=-1, group=-1)
            for segment in unit["segments"]
        )
        layout = UnitLayout(
            index, unit["name"], segments, unit["numel"], unit["frozen_bytes"], precision.weight
        )
        units.append(layout)
    return Plan(
        precision=precision,
        units=tuple(units),
        homes=tuple(homes),
        slot_classes=(),
        chunk_elements=facts["chunk_elements"],
        num_stages=0,
        look_ahead=0,
        micro_batches=1,
        gradient_itemsize=facts["gradient_itemsize"],
        unified=True,
        verify=False,
        memory={},
        budget={},
        rule=RuleFacts(name=facts["rule"], moments=moments),
        durable=True,
    )


def itemsize(plan: Plan, kind: Kind) -> int:
    """Bytes of an element of a state kind, scales not counted."""
    if kind is Kind.WEIGHT:
        return plan.precision.weight
    if kind is plan.precision.rest_kind:
        return plan.precision.rest
    return plan.precision.format_of(kind).itemsize


COMMIT_NAMES = ("commit-a.bin", "commit-b.bin")
_MAGIC = b"INFCMT01"
# magic, bytes of the header, bytes of the document, CRC32C of both; then that of these 24 bytes
_HEAD = struct.Struct("<8sIQI")
_CHECK = struct.Struct("<I")
_HEAD_BYTES = _HEAD.size + _CHECK.size
_RESERVED_BYTES = 64 << 10


@dataclass(frozen=True)
class CommitRecord:
    """One committed state.

    `sides` and `frozen_sides` hold 0 or 1 per unit. `checksums` says that the file of checksums
    fits. `run` ties it to a directory; `when` is UTC, ISO 8601.
    """

    run: str
    sequence: int
    step: int
    sides: tuple[int, ...]
    frozen_sides: tuple[int, ...]
    checksums: bool
    document: bytes
    when: str = ""

    def to_bytes(self) -> bytes:
        """As a file holds it."""
        header = {
            "run": self.run,
            "sequence": self.sequence,
            "step": self.step,
            "sides": "".join(map(str, self.sides)),
            "frozen_sides": "".join(map(str, self.frozen_sides)),
            "checksums": self.checksums,
            "when": self.when or datetime.now(UTC).isoformat(timespec="seconds"),
        }
        text = json.dumps(header).encode()
        crc = crc32c(text + self.document)
        head = _HEAD.pack(_MAGIC, len(text), len(self.document), crc)
        return head + _CHECK.pack(crc32c(head)) + text + self.document

    @staticmethod
    def from_bytes(data: bytes) -> CommitRecord | None:
        """The record at the beginning of a file; None where there is no whole one."""
        if len(data) < _HEAD_BYTES:
            return None
        head = data[: _HEAD.size]
        (check,) = _CHECK.unpack_from(data, _HEAD.size)
        magic, header_bytes, document_bytes, crc = _HEAD.unpack(head)
        end = _HEAD_BYTES + header_bytes + document_bytes
        if magic != _MAGIC or check != crc32c(head) or len(data) < end:
            return None
        if crc32c(data[_HEAD_BYTES:end]) != crc:
            return None
        header = json.loads(data[_HEAD_BYTES : _HEAD_BYTES + header_bytes])
        header |= {key: tuple(map(int, header[key])) for key in ("sides", "frozen_sides")}
        return CommitRecord(**header, document=data[_HEAD_BYTES + header_bytes : end])


class SmallFile:
    """A small file that is written in place and synced; beside the state, never in its way."""

    def __init__(self, path: Path) -> None:
        self.path = path
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._fd = os.open(path, flags, 0o600)
        except OSError as error:
            raise self._failed("opened", error) from error

    def write(self, offset: int, data: bytes) -> None:
        """Write all of `data`; raises `MachineError`."""
        view = memoryview(data)
        try:
            while view:
                written = os.pwrite(self._fd, view, offset)
                view, offset = view[written:], offset + written
        except OSError as error:
            raise self._failed("written", error) from error

    def sync(self) -> None:
        """Put it on stable storage; raises `MachineError`."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise self._failed("synced", error) from error

    def reserve(self, nbytes: int) -> None:
        """Take the space beforehand, where the file system can."""
        try:
            os.posix_fallocate(self._fd, 0, nbytes)
        except OSError as error:
            raise self._failed("reserved", error) from error

    def read(self, offset: int, nbytes: int) -> bytes:
        """So many bytes, fewer where the file ends; raises `MachineError`."""
        try:
            return os.pread(self._fd, nbytes, offset)
        except OSError as error:
            raise self._failed("read", error) from error

    def holds(self, data: bytes) -> bool:
        """Whether the file begins with `data`; what cannot be read does not."""
        try:
            return os.pread(self._fd, len(data), 0) == data
        except OSError:
            return False

    def close(self) -> None:
        """Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _failed(self, what: str, error: OSError) -> MachineError:
        return MachineError(
            f"{self.path} could not be {what}: {error.strerror} (errno {error.errno})",
            because="the steps of a durable run are committed there",
            remedy="look at the drive and its space; resume: auto goes on from the last commit",
        )


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

    def write(self, record: CommitRecord) -> None:
        """Commit: from the moment that this returns the record is what is loaded."""
        self._put(record.to_bytes(), self._files)

    def mend(self, record: CommitRecord) -> None:
        """Make both files hold a record that was read from one of them, which is not touched."""
        data = record.to_bytes()
        self._put(data, [file for file in self._files if not file.holds(data)])
        sync_directory(self._directory)

    @staticmethod
    def _put(data: bytes, files: Sequence[SmallFile]) -> None:
        for file in files:
            file.write(0, data)
            file.sync()

    def close(self) -> None:
        """Close the files; idempotent."""
        for file in self._files:
            file.close()


def read_commits(directory: Path, run: str) -> dict[Path, CommitRecord | str]:
    """What each file of a run holds: a record, or why there is none that counts, in words."""
    found: dict[Path, CommitRecord | str] = {}
    for path in (directory / name for name in COMMIT_NAMES):
        try:
            record = CommitRecord.from_bytes(read_small(path))
        except OSError as error:
            found[path] = f"cannot be read: {error.strerror}"
        except (ValueError, KeyError, TypeError):
            found[path] = "is of another version"
        else:
            found[path] = record or "is torn or damaged: its checksum does not fit"
            if record is not None and record.run != run:
                found[path] = f"is of another run, {record.run}"
    return found


def last_commit(directory: Path, run: str) -> CommitRecord:
    """The newest whole record of a run; raises `CheckpointError` if there is none."""
    return newest(directory, read_commits(directory, run))


def newest(directory: Path, found: Mapping[Path, CommitRecord | str]) -> CommitRecord:
    """As `last_commit`, of what `read_commits` found."""
    records = [record for record in found.values() if isinstance(record, CommitRecord)]
    if not records:
        raise CheckpointError(
            f"the durable run in {directory} has no whole commit record",
            because="; ".join(f"{path.name} {why}" for path, why in found.items()),
            remedy="bring one of them back from a copy; the state cannot be told without",
        )
    return max(records, key=lambda record: record.sequence)

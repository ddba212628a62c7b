"""Reader of the last committed state of a durable run, with the interface of a checkpoint.

Used by tools, and to load a run into another placement. Offsets follow from `plan.json` and the
last commit record. The directories are locked for reading, so that no run resumes in them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infinity.checkpoint.commits import (
    PER_RANK_KEYS,
    CommitKey,
    CommitRecord,
    Document,
    checksum_mismatch_error,
    intact_records,
    newest_common_commit,
    read_commits,
)
from infinity.checkpoint.directory import refusal
from infinity.checkpoint.durable_runs import SUMS_NAME, StoredRun, read_all_ranks
from infinity.checkpoint.manifest import BUFFERS, BufferRecord, Manifest, ParameterRecord
from infinity.checkpoint.plain import encode
from infinity.checkpoint.reader import StateReader, damaged
from infinity.checkpoint.streams import StreamRange, frozen_ranges, pieces, state_streams
from infinity.common.crc32c import crc32c
from infinity.common.files import LockFile
from infinity.errors import CheckpointError, MachineError, listed
from infinity.offload.state import ExtentAllocator, UnitState, request_extents
from infinity.plan.plan import Plan
from infinity.storage.disk import STATE_NAME, Extent, stored_checksums, wrong_pages
from infinity.storage.run_dir import lock_durable
from infinity.storage.striping import Stripes
from infinity.types import PAGE, Tier, round_up

_READ_BYTES = 1 << 20  # per read; a multiple of PAGE


class DurableReader(StateReader):
    """Reader of a durable run's last commit: its streams, and the buffers of its document.

    `directories` are those of the run, rank by rank, the first of each rank first; `plan` is the
    part of the first rank's plan that `plan.json` holds. Directories that were moved are searched
    for in `roots`.
    """

    def __init__(self, directory: str | os.PathLike[str], roots: Iterable[Path] = ()) -> None:
        """Raises `CheckpointError` if the run is damaged or incomplete, `MachineError` if it is
        in use.
        """
        self._rank_readers: list[_RankReader] = []
        try:
            for run in read_all_ranks(Path(directory).expanduser().absolute(), roots):
                self._rank_readers.append(_RankReader(run))
            first = self._rank_readers[0]
            super().__init__(first.directory)
            last_key = newest_common_commit(
                [list(reader.records) for reader in self._rank_readers], first.directory
            )
            for reader in self._rank_readers:
                reader.open(last_key)
        except BaseException:
            self.close()
            raise
        self.directories = tuple(
            path for reader in self._rank_readers for path in reader.directories
        )
        self.plan, self.record, self.document = first.plan, first.record, first.document
        self.manifest = _manifest(
            first.facts, self.plan, self.record, self._run_state(), self.document
        )
        specs = state_streams(self.plan)
        if self.manifest.buffers:
            specs[BUFFERS] = [buffer.spec for buffer in self.manifest.buffers]
        self._specs = {
            stream: {spec.name: spec for spec in tensors} for stream, tensors in specs.items()
        }
        self._locations: dict[tuple[str, str], list[tuple[_RankReader, Extent, StreamRange]]] = {}
        for reader in self._rank_readers:
            for extent, ranges in reader.extents:
                for span in ranges:
                    locations = self._locations.setdefault((span.stream, span.name), [])
                    locations.append((reader, extent, span))

    def _run_state(self) -> Any:
        """Return the run's state as JSON; with several ranks, including the state of each."""
        if len(self._rank_readers) == 1 or not self.document.run:
            return self.record.document.get("run", {})
        first_buffers = self.document.buffers
        rank_states = []
        optimizer_state: dict[str, Any] = {}
        for reader in self._rank_readers:
            state = {n: reader.document.run[n] for n in PER_RANK_KEYS}
            state["buffers"] = {
                n: value
                for n, value in reader.document.buffers.items()
                if n not in first_buffers or not torch.equal(value, first_buffers[n])
            }
            rank_states.append(state)
            # The rank with the last shard of a parameter wins, as in a save.
            names = {s.name for unit in reader.plan.local_units for s in unit.trained_segments}
            optimizer_state |= {n: v for n, v in reader.document.run["kept"].items() if n in names}
        return encode(
            {**self.document.run, "kept": optimizer_state, "ranks": rank_states}, "the run's state"
        )

    @property
    def verified(self) -> bool:
        """True if the state has checksums (`io.verify`)."""
        return all(reader.verified for reader in self._rank_readers)

    @property
    def nbytes(self) -> int:
        """Bytes of the committed state, including padding."""
        return sum(extent.nbytes for reader in self._rank_readers for extent, _ in reader.extents)

    def verify(self, seen: Callable[[int], None] | None = None) -> Iterator[str]:
        """See `StateReader.verify`; checks each page. Without checksums nothing is read."""
        for reader in self._rank_readers if self.verified else ():
            yield from reader.verify(seen)

    def close(self) -> None:
        """Close the directories; idempotent."""
        for reader in self._rank_readers:
            reader.close()

    def _fill(self, stream: str, name: str, first_byte: int, target: Tensor) -> None:
        end = first_byte + target.numel()
        if stream == BUFFERS:
            flat = self.document.buffers[name].contiguous().view(-1).view(torch.uint8)
            target.copy_(flat[first_byte:end])
            return
        for reader, extent, span in self._locations[stream, name]:
            low, high = max(first_byte, span.first), min(end, span.first + span.nbytes)
            if low < high:
                start = span.start + low - span.first
                reader.fill(extent, start, target[low - first_byte : high - first_byte])


class _RankReader:
    """Locked directories and committed extents of one rank of a run."""

    def __init__(self, run: StoredRun) -> None:
        """Raises as `DurableReader` does."""
        self.directory = run.directory
        self.directories = run.striping.directories
        self.facts = run.facts
        self.plan = run.plan
        self.record: CommitRecord
        self.document: Document
        self.extents: list[tuple[Extent, list[StreamRange]]] = []
        # By offset of each extent whose page checksums do not match the commit.
        self._checksum_errors: dict[int, CheckpointError] = {}
        self._striping = run.striping
        self._stripes = Stripes(len(self.directories), run.striping.stripe_bytes)
        self._locks: list[LockFile] = []
        self._state_fds: list[int] = []
        self._checksum_fd = -1
        try:
            for member in self.directories:
                self._locks.append(lock_durable(member, shared=True))
                self._state_fds.append(_open(member / STATE_NAME))
            # Read the records again: the directories are locked only now.
            results = read_commits(run.directory, run.record.run, len(run.plan.units))
            self.records = intact_records(run.directory, results)
        except BaseException:
            self.close()
            raise

    def open(self, key: CommitKey) -> None:
        """Read the record, document and extents of a commit; raises `CheckpointError`."""
        self.record = self.records[key]
        if self.record.checksums:
            self._checksum_fd = _open(self.directory / SUMS_NAME)
        self.document = Document.from_json(self.record.document)
        groups = list(committed(self.plan, self.record, self))
        self.extents = [item for group in groups for item in group]
        sizes = [os.fstat(file).st_size for file in self._state_fds]
        self._stripes.redistribute(self._striping, sizes)
        sums = zip(groups, self.record.checksums, strict=True) if self.verified else ()
        for group, crc in sums:
            extents = [extent for extent, _ in group]
            stored = [stored_checksums(self._read_checksums, extent) for extent in extents]
            if crc32c(b"".join(stored)) != crc:
                for extent in extents:
                    path = self.directory / SUMS_NAME
                    self._checksum_errors[extent.offset] = checksum_mismatch_error(
                        path, self.record, extent.owner
                    )

    def extent(self, nbytes: int, owner: str = "", cuts: Sequence[int] = ()) -> Extent:
        """Reserve an extent, as `Disk.extent` does."""
        return Extent(self._stripes.add(nbytes, cuts), round_up(nbytes, PAGE), owner)

    @property
    def verified(self) -> bool:
        """True if the state has checksums."""
        return self._checksum_fd >= 0

    def verify(self, seen: Callable[[int], None] | None) -> Iterator[str]:
        """See `DurableReader.verify`."""
        for file in self._state_fds:  # drop the page cache: read from the drive
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        for extent, ranges in self.extents:
            if error := self._checksum_errors.get(extent.offset):
                yield error.what
            for start in range(0, extent.nbytes, _READ_BYTES):
                page_range = extent.part(start, min(_READ_BYTES, extent.nbytes - start))
                try:
                    for page in self._wrong_pages(page_range, self._read_pages(page_range)):
                        yield self._describe_page(extent, start + page * PAGE, ranges)
                except (CheckpointError, MachineError) as error:
                    yield error.what
                if seen is not None:
                    seen(page_range.nbytes)

    def close(self) -> None:
        """Close the directories; idempotent."""
        descriptors, locks = [*self._state_fds, self._checksum_fd], self._locks
        self._state_fds, self._locks, self._checksum_fd = [], [], -1
        for descriptor in (d for d in descriptors if d >= 0):
            os.close(descriptor)
        for lock in locks:
            lock.close()

    def fill(self, extent: Extent, start: int, target: Tensor) -> None:
        """Read a range of an extent; the full pages around it are read and verified."""
        if error := self._checksum_errors.get(extent.offset):
            raise error
        end = start + target.numel()
        for first in range(start // PAGE * PAGE, end, _READ_BYTES):
            page_range = extent.part(first, min(_READ_BYTES, round_up(end, PAGE) - first))
            data = self._read_pages(page_range)
            if self.verified and self._wrong_pages(page_range, data):
                raise damaged(
                    f"{page_range.owner} in {self.directory} is damaged: a checksum is wrong"
                )
            low, high = max(start, first), min(end, first + page_range.nbytes)
            target[low - start : high - start].copy_(data[low - first : high - first])

    def _read_pages(self, page_range: Extent) -> Tensor:
        data = bytearray()
        for file_range in self._stripes.pieces(page_range.offset, page_range.nbytes):
            try:
                chunk = os.pread(
                    self._state_fds[file_range.path_index], file_range.nbytes, file_range.offset
                )
            except OSError as error:
                path = self.directories[file_range.path_index] / STATE_NAME
                action = f"reading {page_range.owner}, at byte {file_range.offset} of"
                raise refusal(action, path, error) from error
            if len(chunk) < file_range.nbytes:
                raise damaged(f"a state file of {self.directory} ends inside {page_range.owner}")
            data += chunk
        return torch.frombuffer(data, dtype=torch.uint8)

    def _wrong_pages(self, page_range: Extent, pages: Tensor) -> list[int]:
        """Return the indices, within `part`, of pages that differ from their checksums."""
        return wrong_pages(pages, stored_checksums(self._read_checksums, page_range))

    def _read_checksums(self, offset: int, nbytes: int) -> bytes:
        try:
            return os.pread(self._checksum_fd, nbytes, offset)
        except OSError as error:
            message = f"checksums of {self.directory} cannot be read: {error.strerror}"
            raise CheckpointError(message) from error

    def _describe_page(self, extent: Extent, start: int, ranges: Sequence[StreamRange]) -> str:
        """Describe a damaged page of an extent and the tensors that it holds bytes of."""
        (file_range,) = self._stripes.pieces(extent.offset + start, PAGE)
        names = [
            f"{span.stream} of {span.name!r}"
            for span in ranges
            if span.start < start + PAGE and span.start + span.nbytes > start
        ]
        path = self.directories[file_range.path_index] / STATE_NAME
        return (
            f"{path} is damaged: bytes {file_range.offset} to {file_range.offset + PAGE - 1}, "
            f"{extent.owner}, which hold {listed(names, limit=3) or 'no parameter'}"
        )


def committed(
    plan: Plan, record: CommitRecord, disk: ExtentAllocator
) -> Iterator[list[tuple[Extent, list[StreamRange]]]]:
    """Yield the extents of each active copy in the order of a record, with the ranges they hold.

    `disk` reserves the extents. Each unit yields two lists: trained state, and frozen parameters.
    """
    units = [UnitState(layout, plan.record(layout)) for layout in plan.local_units]
    for unit in units:
        request_extents(plan, unit, disk)
    for layout, placement in zip(plan.local_units, plan.placements, strict=True):
        if layout.numel and placement.gradient is Tier.DISK:  # after all state, as in a run
            disk.extent(layout.numel * plan.gradient_itemsize)
    for unit, copy, frozen in zip(units, record.copies, record.frozen_copies, strict=True):
        trained_extents = []
        for chunk, extent in enumerate(unit.copies[copy] if unit.copies else ()):
            _, count = unit.layout.chunk(chunk, plan.chunk_elements)
            ranges = []
            full_record = plan.full_record(unit.layout)
            for kind in full_record.kinds:
                start = full_record.offset(kind, count)
                for span in pieces(plan, unit.layout, chunk, kind):
                    ranges.append(span._replace(start=start + span.start))
            trained_extents.append((extent, ranges))
        yield trained_extents
        layout = plan.units[unit.layout.index]
        extents = [unit.frozen_copies[frozen]] if unit.frozen_copies else []
        yield [(extent, list(frozen_ranges(layout, plan.rank))) for extent in extents]


def _manifest(
    facts: Mapping[str, Any], plan: Plan, record: CommitRecord, run: Any, document: Document
) -> Manifest:
    """Return a commit in the form of a checkpoint's manifest."""
    steps, progress = document.run.get("steps", {}), document.run.get("progress", {})
    segments = [s for layout in plan.units for s in layout.segments if s.begins]
    return Manifest(
        engine_version=facts["engine_version"],
        # Skipped steps change nothing, and are committed with the next step.
        global_steps=record.step + progress.get("skipped_steps", 0),
        precision=plan.precision.name,
        rule=facts["rule"],
        moments=tuple(form.value for form in plan.precision.moments),
        parameters=tuple(
            ParameterRecord(
                s.name, (), s.full_shape, s.dtype, s.trained, steps.get(s.name, 0), s.form
            )
            for s in segments
        ),
        buffers=tuple(
            BufferRecord.of([name], value, persistent=name in document.persistent)
            for name, value in document.buffers.items()
        ),
        run=run,
        client_state={},
        config={},
        plan={"ranks": plan.ranks},
    )


def _open(path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    with suppress(OSError):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    return descriptor

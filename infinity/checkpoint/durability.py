"""Commits of a durable run: from a finished optimizer pass to a step that survives any crash.

[Note: commit of a step]
1. State of changed units that is stored in RAM or on a device is written to the active copy on
   disk, where the optimizer pass has already written the other kinds.
2. All writes of all units complete, and every state file is synced.
3. With `io.verify` the page checksums of changed copies are written to a file and synced.
4. One record is written and synced: the step is prepared. It holds the copies, a CRC of the page
   checksums of each, and the document.
5. A barrier shows that all ranks have prepared the step; a single rank skips it.
6. The record is written and synced a second time: the step is committed (`commits.py`).
Only then may the previously committed copy be written. All of this runs on the optimizer thread,
concurrently with the training thread, before the next optimizer pass begins. With several ranks,
5 and 6 run on the training thread the next time it needs all updates, as `step()` does.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

from infinity.checkpoint.commits import (
    CommitFiles,
    CommitKey,
    CommitRecord,
    SmallFile,
    checksum_mismatch_error,
    intact_records,
    newest_common_commit,
    read_commits,
)
from infinity.checkpoint.durable_plan import PLAN_NAME, plan_checksum, state_tag, write_plan
from infinity.checkpoint.durable_runs import SUMS_NAME, StoredRun
from infinity.checkpoint.kept_files import WatchedFiles
from infinity.common.crc32c import crc32c
from infinity.common.files import refused
from infinity.distributed.context import DistContext
from infinity.errors import CheckpointError
from infinity.offload.state import ExtentCopies, StateStore, UnitState
from infinity.offload.transfers import Label, Transfers
from infinity.plan.budget import FROZEN_COPY_BYTES, NUM_COMMIT_BUFFERS, commit_buffer_bytes
from infinity.plan.plan import Plan
from infinity.profiling.trace_recorder import NO_UNIT, Laps
from infinity.storage.device import Event
from infinity.storage.disk import CHECKSUM_BYTES, STATE_NAME, Extent, stored_checksums
from infinity.storage.run_dir import LOCK_NAME, RECORD_NAME
from infinity.storage.staging import BufferPool, host_buffer
from infinity.storage.store import Range
from infinity.types import PAGE, Kind

_WRITES_IN_FLIGHT = 8  # maximum of a commit
_LABEL: Label = (NO_UNIT, "commit")


class Durability:
    """Commit protocol of one run; called by the optimizer thread, and at start and end.

    `step` counts updates; a caller that loads the state of another step may set it.
    """

    def __init__(
        self, plan: Plan, transfers: Transfers, store: StateStore, stored: StoredRun | None
    ) -> None:
        assert transfers.disk is not None
        self.plan = plan
        self.transfers = transfers
        self.store = store
        self.step = 0
        self._ranks: DistContext = store.ranks
        self._prepared: CommitRecord | None = None  # prepared on this rank, not committed yet
        self._disk = transfers.disk
        self._primary = self._disk.scratches[0]
        self._run = self._primary.directory.name.rpartition("-")[2]
        self._session = ""
        self._plan_checksum = "" if stored is None else plan_checksum(stored.facts)
        self._sequence = 0
        self._steps_since_commit = 0
        self.document: Mapping[str, Any] | None = {}  # of the last step
        self._buffers = BufferPool(NUM_COMMIT_BUFFERS, commit_buffer_bytes(plan), transfers.device)
        self._records = CommitFiles(self._primary.directory)
        self._checksum_file: SmallFile | None = None
        self._watched_files = WatchedFiles()
        self._checksums: dict[int, int] = {}  # those of a record, by position
        try:
            if self._disk.checksums is not None:
                path = self._primary.path(SUMS_NAME)
                if stored is not None and stored.record.checksums and not path.exists():
                    raise CheckpointError(
                        f"{path} is missing, which holds the checksums of the state",
                        remedy="restore it; or accept the state unverified: io.verify: false",
                    )
                self._checksum_file = SmallFile(path)
            if stored is not None:
                self._resume(stored)
        except BaseException:
            self.close()
            raise

    # --- beginning and end -------------------------------------------------------------------

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Commit the initial state as step 0; the directories are never removed afterwards.

        `facts` is a result of `durable_plan.model_facts`. The first copies of all units have been
        written.
        """
        self._records.reserve()
        directories = [scratch.directory for scratch in self._disk.scratches]
        striping = self._disk.striping
        self._ranks.synchronize("begins a durable run")
        report = self._run, secrets.token_hex(8)
        group, self._session = self._ranks.all_gather_object(report)[0]
        facts = {**facts, "rank": self._ranks.rank, "group": group}
        path = self._primary.path(PLAN_NAME)
        self._plan_checksum = write_plan(path, self._run, facts, self.plan, striping)
        for index, (scratch, used) in enumerate(
            zip(self._disk.scratches, striping.used, strict=True)
        ):
            with closing(SmallFile(scratch.path(STATE_NAME))) as file:  # a page after the extents
                file.write(used, state_tag(self._run, index))
                file.sync()
        for state in self.store.units:
            state.copy.dirty = state.frozen_copy.dirty = True
        self._prepare({}, in_memory=False)
        self.agree()
        common = {"run": self._run, "primary": str(directories[0])}
        try:
            with self._ranks.collective_section("begins a durable run"):
                if len(directories) > 1:
                    self._primary.announce(self._run, directories[1:])
                # The first directory last: it makes all valid.
                for index, scratch in reversed(list(enumerate(self._disk.scratches))):
                    scratch.keep({**common, "index": index})
        except BaseException:
            for scratch in self._disk.scratches:
                scratch.durable = False  # nothing is committed: all are removed at close
            raise
        self._watch_files()

    def _watch_files(self) -> None:
        """Watch the files in every directory that are written only once."""
        plan = self._primary.path(PLAN_NAME)
        records = (scratch.directory / RECORD_NAME for scratch in self._disk.scratches)
        locks = (scratch.directory / LOCK_NAME for scratch in self._disk.scratches)
        try:
            self._watched_files.watch([plan, *records, *locks])
        except OSError as error:
            raise refused(f"{error.filename} cannot be opened", error) from error

    def free(self) -> None:
        """Free the commit buffers."""
        self._buffers.free()

    def close(self) -> None:
        """Close the files; idempotent."""
        self._watched_files.close()
        self._records.close()
        if self._checksum_file is not None:
            self._checksum_file.close()

    # --- steps -------------------------------------------------------------------------------

    def finish_step(self, document: Mapping[str, Any] | None, stopped: Callable[[], bool]) -> None:
        """Count a finished optimizer pass; commit if `durable_every` is reached.

        Without a `document`, or if `stopped` returns True during the commit, nothing is committed.
        Raises `TransferError` and `MachineError`; a new run then resumes from the last commit.
        """
        self.step += 1
        self._steps_since_commit += 1
        self.document, self.store.edited = document, False
        if document is not None and self._steps_since_commit >= self.plan.durable_every:
            self._prepare(document, stopped=stopped)

    def finish(self) -> None:
        """Commit the last step unless it is committed or was edited since; no update may run.

        With several ranks only prepare it: at the end of a run the others may no longer
        synchronize. The next start rolls it forward if all ranks have prepared it.
        """
        if self._steps_since_commit and self.document is not None and not self.store.edited:
            self._prepare(self.document)

    def commit(self, document: Mapping[str, Any], step: int) -> None:
        """Commit the current state as `step`, after a state was loaded.

        No optimizer pass may run, and no parameter may be materialized. Raises as `finish_step` and
        `agree` do.
        """
        self.step, self.document, self.store.edited = step, document, False
        self._prepare(document)
        self.agree()

    def agree(self) -> None:
        """Commit the prepared step once all ranks have prepared it; collective.

        Until then neither copy may be written. No optimizer pass may run. Raises `MachineError`,
        and as `DistContext.synchronize` does.
        """
        record = self._prepared
        if record is None:
            return
        self._ranks.synchronize(f"commits update {record.step}")
        self._records.commit(record)
        self._prepared = None
        for state in self.store.units:
            state.copy.commit()
            state.frozen_copy.commit()

    def _prepare(
        self,
        document: Mapping[str, Any],
        *,
        stopped: Callable[[], bool] = lambda: False,
        in_memory: bool = True,
    ) -> None:
        changed = [state for state in self.store.units if state.copy.dirty]
        frozen = [state for state in self.store.units if state.frozen_copy.dirty]
        laps = Laps(self.transfers.trace)
        if in_memory and not self._write_memory(changed, frozen, stopped):
            return
        for state in self.store.units:
            for write in tuple(state.writes):  # the training thread may remove entries
                write.wait()
        laps.lap("saving", "commit: write state in memory")
        self._disk.sync()
        self._watched_files.check()
        laps.lap("saving", "commit: sync")
        self._write_checksums()
        units = self.store.units
        record = CommitRecord(
            run=self._run,
            session=self._session,
            sequence=self._sequence,
            step=self.step,
            copies=tuple(state.copy.active for state in units),
            frozen_copies=tuple(state.frozen_copy.active for state in units),
            checksums=tuple(self._checksums[i] for i in sorted(self._checksums)),
            document=document,
            plan=self._plan_checksum,
        )
        assert self._prepared is None
        self._records.prepare(record)
        self._prepared = record
        self._sequence += 1
        self._steps_since_commit = 0
        if self._ranks.count == 1:
            self.agree()
        laps.lap("saving", "commit: record")

    # --- memory to disk ----------------------------------------------------------------------

    def _write_memory(
        self, changed: list[UnitState], frozen: list[UnitState], stopped: Callable[[], bool]
    ) -> bool:
        """Write state in memory to the active copies; return False if it was stopped."""
        for state in changed:  # updates and copies into a device may still be in flight
            if any(map(state.on_device, state.memory)):
                for write in tuple(state.writes):
                    write.wait()
        writes: deque[Event] = deque()
        for extent, source_range in self._memory_ranges(changed, frozen):
            if stopped():
                break
            while len(writes) >= _WRITES_IN_FLIGHT:
                writes.popleft().wait()
            source = source_range.addressable_view(by_device=False)
            if source is not None:
                writes.append(self.transfers.write([(extent, source)], label=_LABEL))
                continue
            buffer = self._buffers.take()
            self.transfers.read(
                [(source_range, buffer[: source_range.nbytes])], label=_LABEL
            ).wait()
            write = self.transfers.write([(extent, buffer[: source_range.nbytes])], label=_LABEL)
            self._buffers.give_back(buffer, write)
        for write in writes:
            write.wait()
        self._buffers.settle()
        return not stopped()

    def _memory_ranges(
        self, changed: list[UnitState], frozen: list[UnitState]
    ) -> Iterator[tuple[Extent, Range]]:
        """Yield (extent of the active copy, range in memory), each at most the size of a buffer."""
        for state in changed:
            for index in range(state.layout.num_chunks(self.plan.chunk_elements)):
                for kind in state.memory:
                    unit = state.layout.index
                    target = self.store.on_disk(unit, kind, index, state.copy.active)
                    yield target, self.store.chunk(unit, kind, index)
        for state in frozen:
            if state.frozen_copies and Kind.WEIGHT in state.memory:
                layout, extent = state.layout, state.frozen_copies[state.frozen_copy.active]
                source_range = state.memory[Kind.WEIGHT].part(
                    layout.trained_bytes, layout.frozen_bytes
                )
                step = (
                    FROZEN_COPY_BYTES
                    if source_range.addressable_view(by_device=False) is None
                    else source_range.nbytes
                )
                for first in range(0, source_range.nbytes, step):
                    nbytes = min(step, source_range.nbytes - first)
                    yield extent.part(first, nbytes), source_range.part(first, nbytes)

    # --- checksums ---------------------------------------------------------------------------

    def _write_checksums(self, *, unchanged: bool = False) -> None:
        """Write and sync the page checksums of changed active copies, or of all if `unchanged`."""
        sums = self._disk.checksums
        if self._checksum_file is None or sums is None:
            return
        for position, (copy, extents) in enumerate(_active_copies(self.store.units)):
            if not (copy.dirty or unchanged):
                continue
            stored = [sums.stored(extent.offset, extent.nbytes) for extent in extents]
            for extent, data in zip(extents, stored, strict=True):
                self._checksum_file.write(extent.offset // PAGE * CHECKSUM_BYTES, data)
            self._checksums[position] = crc32c(b"".join(stored))
        self._checksum_file.sync()

    def _restore_checksums(self, record: CommitRecord) -> None:
        """Load the page checksums of a commit; if it has none, compute them from the state.

        Raises `CheckpointError` if the checksum file does not match the commit.
        """
        sums, file = self._disk.checksums, self._checksum_file
        if sums is None or file is None:
            return
        for position, (_, extents) in enumerate(_active_copies(self.store.units)):
            if not record.checksums:
                for extent in extents:
                    for start in range(0, extent.nbytes, 1 << 24):
                        chunk = extent.part(start, min(1 << 24, extent.nbytes - start))
                        self._disk.learn(chunk, host_buffer(chunk.nbytes))
                continue
            stored = [stored_checksums(file.read, extent) for extent in extents]
            self._checksums[position] = crc32c(b"".join(stored))
            if self._checksums[position] != record.checksums[position]:
                name = self.store.units[position // 2].layout.name
                raise checksum_mismatch_error(file.path, record, name)
            for extent, data in zip(extents, stored, strict=True):
                sums.restore(extent.offset, extent.nbytes, data)
        if not record.checksums:
            self._write_checksums(unchanged=True)

    # --- resuming ----------------------------------------------------------------------------

    def _resume(self, stored: StoredRun) -> None:
        """Restore copies, counters and checksums of the run to resume; collective."""
        # Read the records again: the directory is locked only now.
        num_units = len(self.store.units)
        results = read_commits(stored.directory, stored.record.run, num_units)
        records = intact_records(stored.directory, results)
        self._ranks.synchronize("looks for the last commit")
        reports = self._ranks.all_gather_object([sorted(records), secrets.token_hex(8)])
        keys = [[CommitKey(*key) for key in rank_keys] for rank_keys, _ in reports]
        record = records[newest_common_commit(keys, stored.directory)]
        self._session = reports[0][1]
        for path, problem in results.items():
            if isinstance(problem, str):
                self._disk.warnings.append(
                    f"{path} {problem}; the other commit file is intact: the run resumes from "
                    f"update {record.step}, and this file is written again"
                )
        self._records.repair(record)
        self.document = record.document
        self._run, self.step, self._sequence = record.run, record.step, record.sequence + 1
        for state, copy, frozen in zip(
            self.store.units, record.copies, record.frozen_copies, strict=True
        ):
            state.copy.active = state.copy.committed = copy
            state.frozen_copy.active = state.frozen_copy.committed = frozen
        self._restore_checksums(record)
        self._watch_files()

    def load_memory_tiers(self, progress: Callable[[int, int, str], None] | None) -> None:
        """Read state in RAM and on devices from the committed copies; raises as reads do."""
        units = self.store.units
        total, done = self.plan.commit_bytes, 0
        for state in units:
            reads: list[Event] = []
            for extent, source_range in self._memory_ranges([state], [state]):
                target = source_range.addressable_view(by_device=False)
                if target is not None:
                    reads.append(self.transfers.read([(extent, target)]))
                else:
                    buffer = host_buffer(source_range.nbytes)
                    self.transfers.read([(extent, buffer)]).wait()
                    self.transfers.write([(source_range, buffer)]).wait()
                done += extent.nbytes
            for read in reads:
                read.wait()
            if progress is not None:
                progress(min(done, total), total, f"reading the durable state: {state.layout.name}")


def _active_copies(units: Sequence[UnitState]) -> Iterator[tuple[ExtentCopies, Sequence[Extent]]]:
    """Yield each unit's active copies and their extents, in the order of a record's checksums."""
    for state in units:
        for copy, copies in (
            (state.copy, state.copies),
            (state.frozen_copy, [[extent] for extent in state.frozen_copies]),
        ):
            yield copy, copies[copy.active] if copies else ()

"""Distributed context: ranks, collectives, and errors propagated between ranks.

[Note: collective calls]
Ranks run the same program, each on its own data, and synchronize in the same order: where a unit is
used, at the end of a backward, in a step. At each synchronization every rank reports the operation
it is about to start; only then do bytes move. So ranks that diverge or fail raise an error on all
ranks instead of hanging: if one reports a failure, all exchange their operations and errors, and
raise. Code that may fail on one rank alone runs in a `collective_section`, which ends with a
synchronization; between a synchronization and the start of the operations agreed on, nothing may
fail on one rank alone.

An error ends the operation of all ranks, which may continue. A rank whose engine has failed cannot:
it reports that once and stops synchronizing, so later synchronizations fail at once on all ranks.

Only the training thread starts transfers between ranks, in the same order on all ranks. Weights and
gradients move concurrently with compute, on a separate channel, so that no synchronization waits
for them.
"""

from __future__ import annotations

import json
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from infinity.common.crc32c import crc32c_of
from infinity.errors import InfinityError, MachineError, TrainingError

NOTES = 8  # integers that a rank may report at a synchronization


class Work(Protocol):
    """An asynchronous collective; an `Event` of `storage/device.py`."""

    def done(self) -> bool:
        """Return True if the collective has completed. Never blocks."""

    def wait(self) -> None:
        """Block until the collective has completed.

        With NCCL it blocks the current stream, not the host.

        Raises:
            MachineError: The other ranks are lost.
        """


class CompletedWork:
    """Work that has completed."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        """Return at once."""


class DistContext(ABC):
    """Rank `rank` of `count`, and `local_rank` of the `local_count` ranks on this machine.

    Tensors are uint8 or int64, contiguous unless noted, in host memory or in the memory of the
    rank's device. Every rank calls the same methods in the same order. The tensors of a collective
    must not be used until its `Work` has completed.
    """

    rank: int
    count: int
    local_rank: int
    local_count: int
    _failed = False  # this rank cannot continue
    _operation = "begins"  # of the last synchronization
    _last_reports: Sequence[Sequence[str]] = ()  # of all ranks, once one has failed

    @abstractmethod
    def all_gather(self, full: Tensor, *, overlap: bool = False) -> Work:
        """Start an in-place all-gather of `count` equal shards; the local one must be in place.

        Args:
            full: Shards of all ranks. In host memory it may be a matrix of (count, n) of which
                only the rows are contiguous.
            overlap: Use the channel that runs concurrently with compute and synchronizations.
        """

    @abstractmethod
    def all_to_all(self, received: Tensor, sent: Tensor) -> Work:
        """Start to send shard r of `sent` to rank r, and to receive shard r of `received` from it.

        It runs concurrently with compute and synchronizations.
        """

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Copy `tensor`, in host memory, from the rank `source` to all others."""

    def check(self, device: torch.device) -> None:  # noqa: B027
        """Raise `ConfigError` if the backend cannot send tensors of this device."""

    def close(self) -> None:  # noqa: B027
        """Release connections."""

    def abort(self, error: BaseException) -> None:  # noqa: B027
        """Store the error that ends this rank, for the messages of ranks that lose it."""

    def new_subgroup(self, sets: Sequence[Sequence[int]], *, by_host: bool = False) -> DistContext:
        """Return a context over the set of ranks that contains this one; the caller closes it.

        Args:
            sets: Disjoint sets of ranks, equal on all ranks, which call this together. In the new
                context `rank` and `count` are those of the set, as if all were on one node.
            by_host: The context is used for tensors in host memory only.
        """
        raise NotImplementedError

    @property
    def local_ranks(self) -> range:
        """Ranks on this machine."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_count)

    @property
    def num_nodes(self) -> int:
        """Number of machines."""
        return -(-self.count // self.local_count)

    # --- composed ---------------------------------------------------------------------------------

    def gather(self, local: Tensor) -> Tensor:
        """Return every rank's `local` (n) as a tensor of (count, n) in host memory."""
        full = torch.empty((self.count, local.numel()), dtype=local.dtype, device="cpu")
        full[self.rank] = local
        if local.numel():
            self._await(self.all_gather(full.view(-1)))
        return full

    def gather_ragged(self, local: Tensor) -> list[Tensor]:
        """Return every rank's `local` (1-D), of any number of elements, in host memory."""
        sizes = self.gather(torch.tensor([local.numel()], device="cpu"))[:, 0].tolist()
        padded = torch.zeros(max(sizes), dtype=local.dtype, device="cpu")
        padded[: local.numel()] = local
        return [row[:size] for row, size in zip(self.gather(padded), sizes, strict=True)]

    def _await(self, work: Work) -> None:
        """Wait for a collective that other ranks may start much later."""
        work.wait()

    def num_sharing_processors(self) -> int:
        """Return the number of ranks on this machine that share processors with this one.

        All of them, unless a launcher binds ranks to processors (`torchrun --numa-binding`).
        """
        if self.count == 1:
            return 1
        self.synchronize("counts processors")
        affinities = self.all_gather_object(sorted(os.sched_getaffinity(0)))
        local = set(affinities[self.rank])
        return sum(not local.isdisjoint(affinities[rank]) for rank in self.local_ranks)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the `value` of every rank; it must be serializable as JSON."""
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        return [json.loads(row.numpy().tobytes()) for row in self.gather_ragged(data)]

    def synchronize(
        self, doing: str, *notes: int, error: BaseException | None = None
    ) -> Sequence[Sequence[int]]:
        """Synchronize with the other ranks, which must start the same operation.

        Args:
            doing: Operation, as a verb phrase for messages; compared across ranks.
            notes: At most `NOTES` integers to exchange.
            error: Error of this rank, reported to the others, which raise.

        Returns:
            The notes of every rank.

        Raises:
            TrainingError: A rank reported an error (raised on all ranks but that one), starts
                another operation, or has failed before.
        """
        if self.count == 1:
            return [notes]
        if self._last_reports:
            raise divergence_error(self.rank, self._last_reports)
        self._operation = doing
        failed = 0 if error is None else 1 + self._failed
        local = [zlib.crc32(doing.encode()), failed, *notes]
        assert len(notes) <= NOTES
        local += [0] * (2 + NOTES - len(local))
        table = self.gather(torch.tensor(local, device="cpu")).tolist()
        if any(failed or key != local[0] for key, failed, *_ in table):
            message = "" if error is None else f"{type(error).__name__}: {error}"
            reports = self.all_gather_object([doing, message])
            if any(failed > 1 for _, failed, *_ in table):
                self._last_reports = reports
            if error is None:
                raise divergence_error(self.rank, reports)
        return [rank_notes for _, _, *rank_notes in table]

    def assert_equal_across_ranks(
        self, doing: str, *notes: int, values: Mapping[str, int], remedy: str | None = None
    ) -> Sequence[Sequence[int]]:
        """Synchronize, and raise `TrainingError` on all ranks if one of `values` differs."""
        rank_notes = self.synchronize(doing, *notes, *values.values())
        for column, what in enumerate(values, start=len(notes)):
            if len({row[column] for row in rank_notes}) > 1:
                first = rank_notes[0][column]
                rank = next(r for r, row in enumerate(rank_notes) if row[column] != first)
                raise CollectiveError(
                    f"ranks 0 and {rank} differ ({doing}): {what}",
                    because="each rank must do the same calls, and set the same values; it may be "
                    "that one rank caught an error and continued, or alone set a learning rate",
                    remedy=remedy or "end all ranks, and go on from the last checkpoint or commit",
                )
        return rank_notes

    def synchronize_write(self, what: str, *values: Tensor | None) -> None:
        """Synchronize before a write of full values, of which each rank writes its shard.

        Raises:
            TrainingError: The values differ between ranks. Raised on all of them.
        """
        if self.count > 1:
            checksums = [crc32c_of(value) for value in values if value is not None]
            self.assert_equal_across_ranks(
                f"writes {what}",
                values={f"new values of {what}": zlib.crc32(repr(checksums).encode())},
                remedy="make the same edit on all ranks (from one: torch.distributed.broadcast); "
                "this was not written, nor what comes after it",
            )

    @contextmanager
    def propagate_errors(self, doing: str) -> Iterator[None]:
        """On an exception, make every other rank raise at its next synchronization.

        The block may itself synchronize.
        """
        try:
            yield
        except Exception as error:
            self.broadcast_error(doing, error)
            raise

    def broadcast_error(self, doing: str, raised: Exception) -> None:
        """Report an error to the other ranks, unless it was propagated before."""
        error: BaseException = raised
        if self.count == 1 or is_propagated(error):
            return
        while error.__cause__ is not None:  # mark the first cause: it may be raised again
            error = error.__cause__
        error.add_note(PROPAGATED)
        with suppress(InfinityError):
            self.synchronize(doing, error=raised)

    def mark_failed(self) -> None:
        """Make the next reported error final: this rank cannot continue."""
        self._failed = self.count > 1

    @contextmanager
    def collective_section(self, doing: str) -> Iterator[None]:
        """Synchronize after the block, so that an exception on one rank raises on all ranks."""
        with self.propagate_errors(doing):
            yield
        self.synchronize(doing)


class CollectiveError(TrainingError):
    """Error that is raised on all ranks."""


class LostRankError(MachineError):
    """Error for ranks that can no longer be reached."""


PROPAGATED = "(raised on every rank)"


def is_propagated(error: BaseException | None) -> bool:
    """Return True if an error, or one in its chain, is raised on all ranks."""
    while error is not None:
        marked = PROPAGATED in getattr(error, "__notes__", ())
        if marked or isinstance(error, CollectiveError | LostRankError):
            return True
        error = error.__cause__ or error.__context__
    return False


def divergence_error(rank: int, reports: Sequence[Sequence[str]]) -> TrainingError:
    """Return the error to raise on `rank`, from each rank's (operation, error message or "")."""
    failed = [(r, doing, message) for r, (doing, message) in enumerate(reports) if message]
    if failed:
        number, doing, message = failed[0]
        return CollectiveError(
            f"rank {number} failed ({doing}): {message}",
            because="ranks train together: what one cannot do ends the step of all",
        )
    ranks_by_operation: dict[str, list[int]] = {}
    for number, (doing, _) in enumerate(reports):
        ranks_by_operation.setdefault(doing, []).append(number)
    operations = "; ".join(
        f"{doing} on {format_ranks(numbers)}" for doing, numbers in ranks_by_operation.items()
    )
    return CollectiveError(
        f"ranks do different things: {operations}",
        because="they must call the engine, and use the model's units, in one order",
        remedy=f"look at the calls of rank {rank} before: ranks need the same number of batches, "
        "no unit that only some data needs, no call of the engine (a save, state_dict, evaluation) "
        "on one rank alone",
    )


def format_ranks(numbers: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 0, 2"."""
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


class SingleProcess(DistContext):
    """Context of a single process; collectives do nothing."""

    rank = local_rank = 0
    count = local_count = 1

    def all_gather(self, full: Tensor, *, overlap: bool = False) -> Work:
        return CompletedWork()

    def all_to_all(self, received: Tensor, sent: Tensor) -> Work:
        received.copy_(sent)
        return CompletedWork()

    def broadcast(self, tensor: Tensor, source: int) -> None: ...


SINGLE_PROCESS = SingleProcess()

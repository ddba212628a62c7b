"""Our engine as a contender: chunks in flight as a sweep has them, one driver per drive."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import asdict, dataclass

from infinity import _aio
from infinity.bench.contender import Sample, UnavailableError, timed
from infinity.bench.load import Load
from infinity.bench.testbed import NUM_SLOTS, Testbed, address_of, io_failure
from infinity.errors import InfinityError
from infinity.sizes import format_size


@dataclass(frozen=True)
class IoSettings:
    """What the `io:` section of a configuration says about speed; `block_size` in bytes."""

    backend: str = "io_uring"
    block_size: int = 2**20
    queue_depth: int = 8
    num_threads: int = 4

    @property
    def name(self) -> str:
        """For people."""
        many = f"x {self.queue_depth}"
        if self.backend == "threads":
            many = f"x {self.num_threads} threads"
        return f"{self.backend} {format_size(self.block_size)} {many}"

    def as_dict(self) -> dict[str, str | int]:
        """For JSON."""
        return asdict(self)


class EngineContender:
    """`infinity._aio` with one set of settings."""

    def __init__(self, testbed: Testbed, settings: IoSettings) -> None:
        self.family = settings.backend
        self.settings = settings
        self._testbed = testbed
        try:
            self._engine = _aio.Engine(
                backend=settings.backend,
                block_size=settings.block_size,
                queue_depth=settings.queue_depth,
                num_threads=settings.num_threads,
            )
        except OSError as error:
            what = f"{settings.backend} cannot start here"
            raise UnavailableError(what, because=str(error)) from error
        self._files = [_aio.File(str(path)) for path in testbed.file_paths]

    @property
    def name(self) -> str:
        """The settings."""
        return self.settings.name

    def run(self, load: Load) -> Sample:
        """Move the load; raises `TransferError`, or `InfinityError` for wrong bytes."""
        if load.mode != "write":
            self._testbed.poison()
        sample = timed(lambda: self._drive_all(load), load)
        self._testbed.check_slots(load)
        self._testbed.check_written(load)
        return sample

    def _drive_all(self, load: Load) -> None:
        if load.num_files == 1:
            self._drive(load, 0)
            return
        errors: list[InfinityError] = []

        def drive(index: int) -> None:
            try:
                self._drive(load, index)
            except InfinityError as error:
                errors.append(error)

        threads = [threading.Thread(target=drive, args=(i,)) for i in range(load.num_files)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def _drive(self, load: Load, file_index: int) -> None:
        """Keep `NUM_SLOTS` chunks per direction in flight until all are through."""
        limit = NUM_SLOTS * (2 if load.mode == "mixed" else 1)
        in_flight: deque[_aio.Ticket] = deque()
        file, num_reads = self._files[file_index], 0
        try:
            for piece in load.pieces(file_index):
                if len(in_flight) == limit:
                    in_flight.popleft().wait()
                if piece.is_write:
                    buffer = self._testbed.pattern(piece.index, load.salt)
                else:
                    buffer = self._testbed.slot(file_index, num_reads)
                    num_reads += 1
                segment = (file, piece.offset, load.chunk_bytes, address_of(buffer))
                # As a sweep does: write-back gives way to read-ahead.
                op, priority = (
                    (_aio.WRITE, _aio.BACKGROUND) if piece.is_write else (_aio.READ, _aio.NORMAL)
                )
                in_flight.append(self._engine.submit(op, [segment], priority=priority))
            for ticket in in_flight:
                ticket.wait()
        except OSError as error:
            raise io_failure(error, self._testbed.file_paths[file_index]) from error

    def close(self) -> None:
        """Wait for what is in flight, stop the threads."""
        self._engine.close()
        for file in self._files:
            file.close()

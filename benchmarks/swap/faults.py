"""Fault injection: reads and writes over a back end that fails on purpose.

Each kind of fault is injected separately, then all together. A request must transfer the right
bytes or raise the error of its fault. The engine cannot detect a bit flipped by the drive; as with
`io.verify`, a CRC32C stored separately from the data must detect it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infinity import _aio
from infinity.cli.terminal import say
from infinity.common.files import refused
from infinity.storage.drives import probe_path
from infinity.storage.run_dir import Scratch
from infinity.swap_benchmark.rounds import usable_backends

# Permitted errno by fault; short, delayed and reordered transfers must succeed.
RIGHT_ERRORS: dict[str, frozenset[int]] = {
    "short": frozenset(),
    "delay": frozenset(),
    "reorder": frozenset(),
    "eio": frozenset({errno.EIO}),
    "enospc": frozenset({errno.ENOSPC}),
    "flip": frozenset(),
    "stuck": frozenset({errno.ETIMEDOUT}),
}
_ALL_KINDS = "+".join(RIGHT_ERRORS)
_NUM_CHUNKS = 32
_CHUNK, _BLOCK, _PAGE = 256 * 2**10, 16 * 2**10, 4096
_WINDOW = 8  # requests in flight
_RATE = 0.03  # fraction of blocks; a chunk has 16
_STUCK_AFTER_S = 0.25
_PATIENCE_S = 60.0  # longer waits are hangs


@dataclass
class Outcome:
    """Counts of the results of requests under one kind of fault."""

    kind: str
    backend: str
    requests: int = 0
    right: int = 0
    raised: Counter[str] = field(default_factory=Counter)  # permitted errors by name
    caught: int = 0  # reads with flipped bits detected by the checksum
    silent: int = 0  # success with wrong bytes that no checksum detected
    wrong_error: int = 0  # errors that the fault does not permit, and hangs
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.silent and not self.wrong_error

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "raised": dict(self.raised), "ok": self.ok}


def check_faults(paths: Sequence[Path], seed: int) -> dict[str, Any]:
    """Run every kind of fault on every back end and path; return a JSON-serializable report.

    `ok` is False if a request silently transferred wrong bytes, raised an error that its fault does
    not permit, or hung. Raises `MachineError` or `DoesNotFitError` if a path cannot be used.
    """
    backends = usable_backends([probe_path(path).backends for path in paths])
    kinds = [*RIGHT_ERRORS, _ALL_KINDS]
    say("injecting faults ...")
    outcomes: list[Outcome] = []
    for path in paths:
        with Scratch.create(path) as scratch:
            for backend in backends:
                for number, kind in enumerate(kinds):
                    file = str(scratch.path(f"{backend}-{number}.bin"))
                    try:
                        outcomes.append(_Trial(file, backend, kind, seed).run())
                    except OSError as error:
                        raise refused(f"{path} cannot be used", error, path) from error
    return {
        "ok": all(outcome.ok for outcome in outcomes),
        "seed": seed,
        "path": ", ".join(str(path) for path in paths),
        "crc32c": _aio.crc32c_kind,
        "kinds": [outcome.as_dict() for outcome in outcomes],
    }


class _Trial:
    """One kind of fault on one back end: write all chunks, then read all chunks."""

    def __init__(self, path: str, backend: str, kind: str, seed: int) -> None:
        self._path, self._backend, self._kind, self._seed = path, backend, kind, seed
        kinds = kind.split("+")
        self._errors = frozenset[int]().union(*(RIGHT_ERRORS[name] for name in kinds))
        self._may_flip, self._may_stick = "flip" in kinds, "stuck" in kinds
        self._outcome = Outcome("all together" if len(kinds) > 1 else kind, backend)
        bytes_of = random.Random(seed)
        self._expected = [bytes_of.randbytes(_CHUNK) for _ in range(_NUM_CHUNKS)]

    def run(self) -> Outcome:
        with contextlib.closing(_aio.File(self._path, create=True)) as file:
            file.allocate(_NUM_CHUNKS * _CHUNK)
            for transfer in (self._write, self._read):
                for first in range(0, _NUM_CHUNKS, _WINDOW):
                    transfer(file, range(first, first + _WINDOW))
        return self._outcome

    def _move(
        self, op: int, salt: int, file: _aio.File, chunks: range
    ) -> Iterator[tuple[int, mmap.mmap]]:
        """Start all requests, wait for them, and yield index and memory of the successful ones."""
        engine = _aio.Engine(  # per window: its stuck requests must not persist
            backend=self._backend,
            block_size=_BLOCK,
            queue_depth=_WINDOW,
            stuck_after_s=_STUCK_AFTER_S if self._may_stick else 0,
            faults=f"seed={self._seed * 1000 + salt},kinds={self._kind},rate={_RATE}",
        )
        try:
            started = []
            for index in chunks:
                memory = _filled(self._expected[index] if op == _aio.WRITE else b"")
                segment = (file, index * _CHUNK, _CHUNK, _address(memory))
                started.append((index, memory, engine.submit(op, [segment], keep=memory)))
            yield from ((i, memory) for i, memory, ticket in started if self._ends_well(ticket))
        finally:
            try:
                engine.close()
            except _aio.AioError as error:
                # Only stuck requests may make close() fail.
                if not (self._may_stick and error.errno == errno.ETIMEDOUT):
                    self._wrong(f"close: {error}")

    def _write(self, file: _aio.File, chunks: range) -> None:
        written = {index for index, _ in self._move(_aio.WRITE, chunks.start, file, chunks)}
        # Plain reads check the file; plain writes repair failed chunks.
        fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        try:
            for index in chunks:
                data = os.pread(fd, _CHUNK, index * _CHUNK)
                if index in written and data == self._expected[index]:
                    self._outcome.right += 1
                elif index in written:
                    self._silent(f"chunk {index} was written, but not to the disk")
                if data != self._expected[index]:
                    os.pwrite(fd, self._expected[index], index * _CHUNK)
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)

    def _read(self, file: _aio.File, chunks: range) -> None:
        """Compare the bytes read with the expected ones and their checksums."""
        for index, memory in self._move(_aio.READ, 500 + chunks.start, file, chunks):
            is_right = memory[:] == self._expected[index]
            passes = checksums(memory) == checksums(_filled(self._expected[index]))
            if is_right and passes:
                self._outcome.right += 1
            elif is_right:
                self._wrong(f"chunk {index}: the checksum refuses good bytes")
            elif passes:
                self._silent(f"chunk {index}: wrong bytes, and the checksum does not see it")
            elif self._may_flip:
                self._outcome.caught += 1
            else:
                self._silent(f"chunk {index}: wrong bytes, although no bit was flipped")

    def _ends_well(self, ticket: _aio.Ticket) -> bool:
        self._outcome.requests += 1
        try:
            if ticket.wait(_PATIENCE_S):
                return True
            self._wrong(f"no answer within {_PATIENCE_S:.0f} s")
        except _aio.AioError as error:
            if error.errno in self._errors:
                self._outcome.raised[errno.errorcode[error.errno]] += 1
            else:
                self._wrong(str(error))
        return False

    def _wrong(self, note: str) -> None:
        self._outcome.wrong_error += 1
        self._outcome.notes.append(note)

    def _silent(self, note: str) -> None:
        self._outcome.silent += 1
        self._outcome.notes.append(note)


def _filled(data: bytes) -> mmap.mmap:
    memory = mmap.mmap(-1, _CHUNK)
    memory[: len(data)] = data
    return memory


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def checksums(memory: mmap.mmap) -> bytes:
    """Return one CRC32C per page of `memory`, four bytes each."""
    crcs = (ctypes.c_uint32 * -(-len(memory) // _PAGE))()
    _aio.crc32c_blocks(_address(memory), len(memory), _PAGE, ctypes.addressof(crcs))
    return bytes(crcs)

"""How fast the paths of a run move bytes together, through the very disk tier of a run.

Same striping, engine, block size and depth; chunk records in flight as in a sweep; bytes that no
drive can compress, over a range that is written before the clock starts. A slow disk is given
smaller records and a smaller range, so that time bounds the whole. Files that are not direct
(tmpfs, some network mounts) are measured as they are, page cache included.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import torch

from infinity.config import IoConfig
from infinity.memory.disk import Disk, DiskTicket, Extent
from infinity.memory.host import HostArena
from infinity.plan.layout import PAGE

RECORD_BYTES = 12 << 20  # a chunk of 2**20 parameters
SPAN_BYTES = 256 << 20  # at most; and a quarter of what is free
_NUM_IN_FLIGHT = 4
_NUM_PASSES = 3  # the kinds take turns: virtual disks wander
_PREPARE_SHARE = 0.25  # of the time, at most, is for the first write
_LEAST_BYTES = 1 << 20
_TRIAL_BYTES = 4 << 20
_READ, _WRITE = False, True
_KINDS = {"disk_read": (_READ,), "disk_write": (_WRITE,), "disk_mixed": (_READ, _WRITE)}


def measure_disk(paths: Sequence[Path], io: IoConfig, seconds: float) -> dict[str, float]:
    """Bytes per second of all `paths` together: `disk_read`, `disk_write` and `disk_mixed`.

    Takes about `seconds`, and with several paths half a second more, in which the disk tier
    weighs them against each other. Nothing is left on the paths, whatever happens. Raises what
    the disk tier raises: `MachineError`, `DoesNotFitError`, `TransferError`.
    """
    disk = Disk(paths, io)
    try:
        free_bytes = sum(scratch.free_bytes() for scratch in disk.scratches)
        span = min(SPAN_BYTES, max(free_bytes // 4, 2 * _LEAST_BYTES)) // _LEAST_BYTES
        region = disk.extent(span * _LEAST_BYTES, "the measurement of the disk's speed")
        disk.allocate()
        return _Probe(disk, region, seconds).rates()
    finally:
        disk.close()


class _Probe:
    """Moves records of one region; reads come from its first half, writes go to its second."""

    def __init__(self, disk: Disk, region: Extent, seconds: float) -> None:
        self._disk = disk
        self._region = region
        self._seconds = seconds
        self._pass_s = seconds * (1 - _PREPARE_SHARE) / (_NUM_PASSES * len(_KINDS))
        self._record_bytes = min(RECORD_BYTES, region.nbytes // 2)
        arena = HostArena(_NUM_IN_FLIGHT * self._record_bytes)
        self._buffers = [
            arena.view(i * self._record_bytes, self._record_bytes) for i in range(_NUM_IN_FLIGHT)
        ]
        noise = torch.frombuffer(bytearray(os.urandom(self._record_bytes)), dtype=torch.uint8)
        for buffer in self._buffers:
            buffer.copy_(noise)
        self._next = {_READ: 0, _WRITE: 0}
        self._num_records = 0

    def rates(self) -> dict[str, float]:
        """The three medians."""
        started = time.perf_counter()
        self._try_out()
        self._prepare()
        passes: dict[str, list[float]] = {name: [] for name in _KINDS}
        for _ in range(_NUM_PASSES):
            for name, kinds in _KINDS.items():
                passes[name].append(self._run(kinds))
            if time.perf_counter() - started > self._seconds:
                break
        return {name: statistics.median(found) for name, found in passes.items()}

    def _try_out(self) -> None:
        """Choose records so small that several go into a pass."""
        nbytes = min(_TRIAL_BYTES, self._record_bytes)
        rate = 0.0
        for _ in range(2):  # the first write of reserved space is slower
            started = time.perf_counter()
            self._submit(_WRITE, 0, nbytes, 0).wait()
            rate = nbytes / (time.perf_counter() - started)
        wanted = int(rate * self._pass_s / _NUM_IN_FLIGHT) // PAGE * PAGE
        self._record_bytes = min(self._record_bytes, max(wanted, _LEAST_BYTES))

    def _prepare(self) -> None:
        """Write the region from its beginning, as far as time goes, two records at least."""
        most = self._region.nbytes // self._record_bytes
        end = time.perf_counter() + self._seconds * _PREPARE_SHARE
        in_flight: deque[DiskTicket] = deque()
        while self._num_records < most and (self._num_records < 2 or time.perf_counter() < end):
            if len(in_flight) == _NUM_IN_FLIGHT:
                in_flight.popleft().wait()
            slot = self._num_records % _NUM_IN_FLIGHT
            in_flight.append(self._submit(_WRITE, self._num_records, self._record_bytes, slot))
            self._num_records += 1
        for ticket in in_flight:
            ticket.wait()

    def _run(self, kinds: Sequence[bool]) -> float:
        """Move records for the time of a pass, `kinds` taking turns; bytes per second."""
        half = self._num_records // 2
        in_flight: deque[DiskTicket] = deque()
        count = 0
        started = time.perf_counter()
        while count == 0 or time.perf_counter() - started < self._pass_s:
            for kind in kinds:
                if len(in_flight) == _NUM_IN_FLIGHT:
                    in_flight.popleft().wait()
                index = self._next[kind] % half + (half if kind is _WRITE else 0)
                self._next[kind] += 1
                slot = count % _NUM_IN_FLIGHT
                in_flight.append(self._submit(kind, index, self._record_bytes, slot))
                count += 1
        for ticket in in_flight:
            ticket.wait()
        return count * self._record_bytes / (time.perf_counter() - started)

    def _submit(self, kind: bool, index: int, nbytes: int, slot: int) -> DiskTicket:
        piece = (self._region.part(index * nbytes, nbytes), self._buffers[slot][:nbytes])
        return self._disk.write([piece]) if kind is _WRITE else self._disk.read([piece])

"""Speeds of drives: of each beside the others, for their shares, and of the disk tier as a whole.

For shares only the ratio matters, so all drives are measured at the same time, as they will be
used: what they share (a bus, a controller, the processor) is shared then too. The tier is measured
as a sweep uses it: chunk records in flight, through the same striping and engine. No drive can
compress the data; a slow one is given smaller records and a smaller range, so that time bounds all.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from infinity import _aio
from infinity.memory.disk_errors import transfer_error
from infinity.memory.host import HostArena
from infinity.plan.layout import PAGE

if TYPE_CHECKING:
    from infinity.memory.disk import Disk, DiskTicket, Extent

PROBE_S = 0.4  # timed; preparing and the last requests come on top
SPAN = 32 << 20  # bytes of each file that are written and read
BLOCK = 1 << 20
DEPTH = 4  # requests in flight per drive
_SAME = 0.1  # speeds within this share of the fastest are called equal: the noise of a probe

_RECORD_BYTES = 12 << 20  # of the tier: a chunk of 2**20 parameters
_LEAST_BYTES, _TRIAL_BYTES = 1 << 20, 4 << 20
_NUM_IN_FLIGHT = 4
_NUM_PASSES = 3  # the kinds take turns: virtual disks wander
_PREPARE_SHARE = 0.25  # of the time, at most, is for the first write
_READ, _WRITE = False, True
_KINDS = {"disk_read": (_READ,), "disk_write": (_WRITE,), "disk_mixed": (_READ, _WRITE)}


def measure_speeds(
    engine: _aio.Engine, files: Sequence[_aio.File], room: Sequence[int]
) -> list[float]:
    """Bytes per second of each file, half read and half written; files are written over.

    `room` is bytes each file may grow by. A file without room for one block counts as one byte
    per second, since it cannot hold much. Raises `TransferError`.
    """
    noise = HostArena(BLOCK)
    source = noise.view(0, BLOCK)
    source.copy_(torch.frombuffer(bytearray(os.urandom(BLOCK)), dtype=torch.uint8))
    spans = [min(SPAN, free // 2) // BLOCK * BLOCK for free in room]
    try:
        with ThreadPoolExecutor(len(files), thread_name_prefix="infinity-probe") as pool:
            jobs = [
                pool.submit(_measure, engine, file, span, source)
                for file, span in zip(files, spans, strict=True)
            ]
            speeds = [job.result() for job in jobs]
    except _aio.AioError as error:
        raise transfer_error(error) from error
    fastest = max(speeds)
    return [fastest if speed > (1 - _SAME) * fastest else speed for speed in speeds]


def _measure(engine: _aio.Engine, file: _aio.File, span: int, source: Tensor) -> float:
    if not span:
        return 1.0
    file.allocate(span)
    arena = HostArena(DEPTH * BLOCK)
    targets = [arena.view(i * BLOCK, BLOCK) for i in range(DEPTH)]
    # Reserved space is slow to write for the first time, so a part is written before the clock
    # starts; on a slow drive a small part.
    prepared = 0
    begin = time.perf_counter()
    while prepared < span and time.perf_counter() - begin < PROBE_S / 8:
        segment = (file, prepared, BLOCK, source.data_ptr())
        engine.submit(_aio.WRITE, [segment]).wait()
        prepared += BLOCK
    in_flight: deque[_aio.Ticket] = deque()
    begin = now = time.perf_counter()
    moved = turn = 0
    while now - begin < PROBE_S or in_flight:
        if now - begin < PROBE_S and len(in_flight) < DEPTH:
            offset = turn // 2 * BLOCK % prepared
            buffer = source if turn % 2 else targets[turn % DEPTH]
            op = _aio.WRITE if turn % 2 else _aio.READ
            in_flight.append(engine.submit(op, [(file, offset, BLOCK, buffer.data_ptr())]))
            turn += 1
        else:
            in_flight.popleft().wait()
            moved += BLOCK
            now = time.perf_counter()
    return moved / (now - begin)


def measure_tier(disk: Disk, seconds: float, most_bytes: int) -> dict[str, float]:
    """Bytes per second of the whole tier, not yet allocated: `disk_read`, `_write` and `_mixed`.

    Writes `most_bytes` at most, and a quarter of what is free. Raises what the disk raises.
    """
    free_bytes = sum(scratch.free_bytes() for scratch in disk.scratches)
    span = min(most_bytes, max(free_bytes // 4, 2 * _LEAST_BYTES)) // _LEAST_BYTES * _LEAST_BYTES
    region = disk.extent(span, "the measurement of the disk's speed")
    disk.allocate()
    return _Tier(disk, region, seconds).rates()


class _Tier:
    """Moves records of a region; reads come from its first half, writes go to its second."""

    def __init__(self, disk: Disk, region: Extent, seconds: float) -> None:
        self._disk, self._region, self._seconds = disk, region, seconds
        self._pass_s = seconds * (1 - _PREPARE_SHARE) / (_NUM_PASSES * len(_KINDS))
        nbytes = self._nbytes = min(_RECORD_BYTES, region.nbytes // 2)
        arena = HostArena(_NUM_IN_FLIGHT * nbytes)
        self._buffers = [arena.view(i * nbytes, nbytes) for i in range(_NUM_IN_FLIGHT)]
        noise = torch.frombuffer(bytearray(os.urandom(nbytes)), dtype=torch.uint8)
        for buffer in self._buffers:
            buffer.copy_(noise)
        self._in_flight: deque[DiskTicket] = deque()
        self._next = {_READ: 0, _WRITE: 0}

    def rates(self) -> dict[str, float]:
        """The three medians."""
        started = time.perf_counter()
        self._choose_size()
        half = self._prepare() // 2
        passes: dict[str, list[float]] = {name: [] for name in _KINDS}
        for _ in range(_NUM_PASSES):
            for name, kinds in _KINDS.items():
                passes[name].append(self._run(kinds, half))
            if time.perf_counter() - started > self._seconds:
                break
        return {name: statistics.median(found) for name, found in passes.items()}

    def _choose_size(self) -> None:
        """Records so small that several go into a pass."""
        most, self._nbytes = self._nbytes, min(_TRIAL_BYTES, self._nbytes)
        for _ in range(2):  # the first write of reserved space is slower
            once_s = time.perf_counter()
            self._move(_WRITE, 0)
            self._wait()
            once_s = time.perf_counter() - once_s
        wanted = int(self._nbytes / once_s * self._pass_s / _NUM_IN_FLIGHT) // PAGE * PAGE
        self._nbytes = min(most, max(wanted, _LEAST_BYTES))

    def _prepare(self) -> int:
        """Write records from the beginning, as far as time goes, two at least; how many."""
        count, most = 0, self._region.nbytes // self._nbytes
        end = time.perf_counter() + self._seconds * _PREPARE_SHARE
        while count < most and (count < 2 or time.perf_counter() < end):
            self._move(_WRITE, count)
            count += 1
        self._wait()
        return count

    def _run(self, kinds: Sequence[bool], half: int) -> float:
        """Move records for the time of a pass, `kinds` taking turns; bytes per second."""
        count = 0
        started = time.perf_counter()
        while count == 0 or time.perf_counter() - started < self._pass_s:
            for kind in kinds:
                self._move(kind, self._next[kind] % half + (half if kind is _WRITE else 0))
                self._next[kind] += 1
                count += 1
        self._wait()
        return count * self._nbytes / (time.perf_counter() - started)

    def _move(self, kind: bool, index: int) -> None:
        if len(self._in_flight) == _NUM_IN_FLIGHT:
            self._in_flight.popleft().wait()
            self._buffers.append(self._buffers.pop(0))  # the one that is free now
        buffer = self._buffers[len(self._in_flight)][: self._nbytes]
        piece = (self._region.part(index * self._nbytes, self._nbytes), buffer)
        start = self._disk.write if kind is _WRITE else self._disk.read
        self._in_flight.append(start([piece]))

    def _wait(self) -> None:
        while self._in_flight:
            self._in_flight.popleft().wait()

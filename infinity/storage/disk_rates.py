"""Benchmark of the disk tier with the pattern of an optimizer pass: chunk records in flight."""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from infinity.config.schema import IoConfig
from infinity.plan.rates import DISK_PER_CPU_S
from infinity.storage.disk import Disk, DiskTicket, Extent
from infinity.storage.disk_speed import run_in_flight
from infinity.storage.staging import host_buffer
from infinity.types import PAGE

SPAN_BYTES = 256 << 20  # maximum of the disk used, and at most a quarter of the free space
_RECORD_BYTES = 12 << 20  # a disk record: a chunk of 2**20 parameters
_MIN_RECORD_BYTES, _TRIAL_BYTES = 1 << 20, 4 << 20
_NUM_IN_FLIGHT = 4
_NUM_PASSES = 3  # directions alternate, because rates of virtual disks drift
_PREPARE_SHARE = 0.25  # maximum share of the time for the first write
_IDLE_SHARE = 0.25  # additional share for matrix products without disk I/O
_MIN_LOST_SHARE = 0.01  # minimum share of the time lost by products; less is noise
_READ, _WRITE = False, True
_DIRECTIONS = {"disk_read": (_READ,), "disk_write": (_WRITE,), "disk_mixed": (_READ, _WRITE)}
NUM_NOISE, MIN_CALLS = 2**20, 3


def measure_disk(
    paths: Sequence[Path], io: IoConfig, seconds: float, *, busy: bool = False
) -> dict[str, float]:
    """Measure the disk tier over all `paths` together.

    Writes at most `SPAN_BYTES`, and at most a quarter of the free space. Files that are not direct
    (tmpfs, some network mounts) are measured through the page cache.

    Args:
        paths: Folders on the drives, as in `nvme_path`.
        io: Back end, block size and depth to measure with.
        seconds: Approximate duration; several paths take half a second more, in which the disk tier
            measures their relative speeds.
        busy: Measure while all processors multiply matrices, and measure their slowdown.

    Returns:
        `disk_read`, `disk_write` and `disk_mixed` in bytes per second; if `busy` also
        `disk_per_cpu_s`, bytes per second of lost compute.

    Raises:
        InfinityError: The disk tier cannot be opened, reserved, read or written.
    """
    with contextlib.closing(Disk(paths, io)) as disk:
        free_bytes = sum(scratch.free_bytes() for scratch in disk.scratches)
        nbytes = min(SPAN_BYTES, max(free_bytes // 4, 2 * _MIN_RECORD_BYTES))
        nbytes = nbytes // _MIN_RECORD_BYTES * _MIN_RECORD_BYTES
        region = disk.extent(nbytes, "the measurement of the disk's speed")
        disk.allocate()
        tier = _TierBenchmark(disk, region, seconds)
        return _rates_under_load(disk, tier, seconds) if busy else tier.rates()


def _rates_under_load(disk: Disk, tier: _TierBenchmark, seconds: float) -> dict[str, float]:
    """Return rates of the tier while all processors multiply matrices, and `disk_per_cpu_s`."""
    matrix = make_noise(torch.float32).view(1024, -1)

    def multiply() -> None:
        matrix @ matrix

    multiply()
    idle_rate = calls_per_s(multiply, _IDLE_SHARE * seconds, statistics.median)
    with repeating(multiply) as calls:
        started, calls_before, counters_before = time.perf_counter(), calls(), disk.counters()
        rates = tier.rates()
        elapsed_s = time.perf_counter() - started
        num_calls, counters = calls() - calls_before, disk.counters()
    moved = sum(counters[name] - counters_before[name] for name in ("read_bytes", "write_bytes"))
    lost_s = max(elapsed_s - num_calls / idle_rate, _MIN_LOST_SHARE * elapsed_s)
    return rates | {DISK_PER_CPU_S: moved / lost_s}


class _TierBenchmark:
    """Transfers of records of a region: reads from its first half, writes to its second."""

    def __init__(self, disk: Disk, region: Extent, seconds: float) -> None:
        self._disk, self._region, self._seconds = disk, region, seconds
        self._pass_s = seconds * (1 - _PREPARE_SHARE) / (_NUM_PASSES * len(_DIRECTIONS))
        nbytes = self._nbytes = min(_RECORD_BYTES, region.nbytes // 2)
        self._buffers = [host_buffer(nbytes) for _ in range(_NUM_IN_FLIGHT)]
        noise = torch.frombuffer(bytearray(os.urandom(nbytes)), dtype=torch.uint8)
        for buffer in self._buffers:
            buffer.copy_(noise)
        self._next_record = {_READ: 0, _WRITE: 0}

    def rates(self) -> dict[str, float]:
        """Return the median rate of each entry of `_DIRECTIONS`, in bytes per second."""
        started = time.perf_counter()
        # A record size so small that several fit into a pass.
        largest, self._nbytes = self._nbytes, min(_TRIAL_BYTES, self._nbytes)
        for _ in range(2):  # the first write to reserved space is slower
            _, once_s = self._write(0, least=1)
        fitting = int(self._nbytes / once_s * self._pass_s / _NUM_IN_FLIGHT) // PAGE * PAGE
        self._nbytes = min(largest, max(fitting, _MIN_RECORD_BYTES))
        # Write records from the beginning of the region while time permits, for the reads.
        half_records = self._write(_PREPARE_SHARE * self._seconds)[0] // 2
        passes: dict[str, list[float]] = {name: [] for name in _DIRECTIONS}
        for _ in range(_NUM_PASSES):
            for name, directions in _DIRECTIONS.items():
                passes[name].append(self._rate(directions, half_records))
            if time.perf_counter() - started > self._seconds:
                break
        return {name: statistics.median(values) for name, values in passes.items()}

    def _write(self, seconds: float, least: int = 2) -> tuple[int, float]:
        """Write records from the beginning; return their number and the seconds taken."""
        capacity = self._region.nbytes // self._nbytes
        return run_in_flight(
            lambda n: self._move(_WRITE, n, n),
            seconds,
            depth=_NUM_IN_FLIGHT,
            least=least,
            most=capacity,
        )

    def _rate(self, directions: Sequence[bool], half_records: int) -> float:
        """Move records in alternating `directions` for a pass; return bytes per second."""

        def start(turn: int) -> DiskTicket:
            direction = directions[turn % len(directions)]
            index = self._next_record[direction] % half_records
            if direction is _WRITE:
                index += half_records
            self._next_record[direction] += 1
            return self._move(direction, index, turn)

        count, seconds = run_in_flight(
            start, self._pass_s, depth=_NUM_IN_FLIGHT, least=len(directions)
        )
        return count * self._nbytes / seconds

    def _move(self, direction: bool, index: int, turn: int) -> DiskTicket:
        buffer = self._buffers[turn % _NUM_IN_FLIGHT][: self._nbytes]
        piece = (self._region.part(index * self._nbytes, self._nbytes), buffer)
        return (self._disk.write if direction is _WRITE else self._disk.read)([piece])


@contextlib.contextmanager
def repeating(function: Callable[[], object]) -> Iterator[Callable[[], int]]:
    """Repeat `function` on a thread; yield a function that returns its number of calls."""
    stop, calls = threading.Event(), 0

    def repeat() -> None:
        nonlocal calls
        while not stop.is_set():
            function()
            calls += 1

    thread = threading.Thread(target=repeat, name="infinity-load")
    thread.start()
    try:
        yield lambda: calls
    finally:
        stop.set()
        thread.join()


def calls_per_s(
    work: Callable[[], None], seconds: float, statistic: Callable[[list[float]], float] = min
) -> float:
    """Return calls per second of `work`, which must be warm, from the fastest of several calls.

    Differences between calls are interference by other programs, which must not be cached. Pass
    `statistics.median` as `statistic` for work that allocates memory in each call and waits for its
    pages.
    """
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < MIN_CALLS or time.perf_counter() < end:
        times.append(timed(work))
    return 1 / statistic(times)


def timed(work: Callable[[], None]) -> float:
    """Return the duration of one call in seconds."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def make_noise(dtype: torch.dtype) -> Tensor:
    """Return `NUM_NOISE` normal values with std 0.02; the global random state is not changed."""
    return (torch.randn(NUM_NOISE, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype)

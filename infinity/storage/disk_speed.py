"""Measurement of the relative speeds of drives, and of requests in flight.

Shares depend on ratios only, so all drives are measured concurrently, as they are used: a common
bus, controller or processor is shared during the measurement, too.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

import infinity._aio as _aio
from infinity.storage.os_errors import transfer_error
from infinity.storage.staging import host_buffer

PROBE_S = 0.4  # timed part, without preparation and the last requests
SPAN = 32 << 20  # bytes of each file that are written and read
BLOCK = 1 << 20
DEPTH = 4  # requests in flight per drive
_UNLIMITED = 1 << 60
_NOISE_SHARE = 0.1  # speeds within this share of the fastest count as equal (noise)


class Ticket(Protocol):
    """A request in flight."""

    def wait(self) -> object:
        """Block until the request has ended."""


def measure_speeds(
    engine: _aio.Engine, files: Sequence[_aio.File], free_bytes: Sequence[int]
) -> list[float]:
    """Return bytes per second of each file, half read and half written; overwrites the files.

    `free_bytes` is the number of bytes by which each file may grow. A file that cannot grow by two
    blocks has a speed of one byte per second. Raises `TransferError`.
    """
    source = host_buffer(BLOCK)
    source.copy_(torch.frombuffer(bytearray(os.urandom(BLOCK)), dtype=torch.uint8))
    spans = [min(SPAN, free // 2) // BLOCK * BLOCK for free in free_bytes]
    try:
        with ThreadPoolExecutor(len(files), thread_name_prefix="infinity-probe") as pool:
            jobs = [
                pool.submit(_file_speed, engine, file, span, source)
                for file, span in zip(files, spans, strict=True)
            ]
            speeds = [job.result() for job in jobs]
    except _aio.AioError as error:
        raise transfer_error(error) from error
    fastest = max(speeds)
    return [fastest if speed > (1 - _NOISE_SHARE) * fastest else speed for speed in speeds]


def run_in_flight(
    start: Callable[[int], Ticket],
    seconds: float,
    *,
    depth: int,
    least: int = 1,
    most: int = _UNLIMITED,
) -> tuple[int, float]:
    """Start requests with `depth` in flight; return their number and the seconds they took.

    `start(n)` starts request n, after request n - `depth` has ended. At least `least` and at most
    `most` requests are started.
    """
    in_flight: deque[Ticket] = deque()
    count, begin_s = 0, time.perf_counter()
    while count < most and (count < least or time.perf_counter() - begin_s < seconds):
        if len(in_flight) == depth:
            in_flight.popleft().wait()
        in_flight.append(start(count))
        count += 1
    for ticket in in_flight:
        ticket.wait()
    return count, time.perf_counter() - begin_s


def _file_speed(engine: _aio.Engine, file: _aio.File, span: int, source: Tensor) -> float:
    if not span:
        return 1.0
    file.allocate(span)
    buffer = host_buffer(DEPTH * BLOCK)
    targets = [buffer[at : at + BLOCK] for at in range(0, DEPTH * BLOCK, BLOCK)]

    def write(turn: int) -> _aio.Ticket:
        return engine.submit(_aio.WRITE, [(file, turn * BLOCK, BLOCK, source.data_ptr())])

    # The first write to reserved space is slow, so blocks are written before the measurement, for a
    # limited time.
    prepared, _ = run_in_flight(write, PROBE_S / 8, depth=1, most=span // BLOCK)

    def read_or_write(turn: int) -> _aio.Ticket:
        offset = turn // 2 % prepared
        if turn % 2:
            return write(offset)
        target = targets[turn % DEPTH].data_ptr()
        return engine.submit(_aio.READ, [(file, offset * BLOCK, BLOCK, target)])

    count, seconds = run_in_flight(read_or_write, PROBE_S, depth=DEPTH)
    return count * BLOCK / seconds

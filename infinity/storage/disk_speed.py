"""Speeds of drives, each beside the others, for their shares.

Only the ratio matters, so all are measured at the same time, as they will be used: what they share
(a bus, a controller, the processor) is shared then too.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

import infinity._aio as _aio
from infinity.storage.device import HostArena
from infinity.storage.os_errors import transfer_error

PROBE_S = 0.4  # timed; preparing and the last requests come on top
SPAN = 32 << 20  # bytes of each file that are written and read
BLOCK = 1 << 20
DEPTH = 4  # requests in flight per drive
_SAME = 0.1  # speeds within this share of the fastest are called equal: the noise of a probe


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

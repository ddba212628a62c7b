"""How fast a step could be: lane rates of the disk, and the two bounds of DESIGN, section 1."""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import torch

from infinity import _aio
from infinity.config import IoConfig

PIECE_BYTES = 12 * 2**20  # a chunk of 2**20 parameters
NUM_PIECES = 32
NUM_IN_FLIGHT = 4
NUM_PASSES = 3


@dataclass(frozen=True)
class Rates:
    """Bytes per second of the disk; `mixed` counts both directions, moved 1:1."""

    read: float
    write: float
    mixed: float


@dataclass(frozen=True)
class Phases:
    """Seconds of one micro-batch's forward and backward, and of one step's update, alone."""

    forward_s: float
    backward_s: float
    update_s: float


@dataclass(frozen=True)
class Traffic:
    """Disk bytes of one step with weights and state on disk and gradients in RAM.

    The sweep writes as much as it reads. What else is read are weights: once for the last
    backward (the first forward gets them from the sweep), twice for every other micro-batch.
    """

    sweep_bytes: int  # both directions
    weight_pass_bytes: float  # one forward or backward

    @staticmethod
    def of(predicted: dict[str, int], num_micro_batches: int) -> Traffic:
        """Divide a plan's predicted bytes."""
        written, read = predicted["disk_write"], predicted["disk_read"]
        return Traffic(2 * written, (read - written) / (2 * num_micro_batches - 1))


def schedule_bound_s(
    phases: Phases, rates: Rates, traffic: Traffic, num_micro_batches: int, unified: bool
) -> float:
    """Return the shortest step that keeps today's order of work."""
    weights_s = traffic.weight_pass_bytes / rates.read
    sweep_s = traffic.sweep_bytes / rates.mixed
    middle_s = max(phases.forward_s + phases.backward_s, 2 * weights_s)
    if unified:
        first_s = max(phases.forward_s + phases.update_s, sweep_s)
    else:
        first_s = max(phases.forward_s, phases.update_s, sweep_s)
    return (num_micro_batches - 1) * middle_s + max(phases.backward_s, weights_s) + first_s


def ideal_bound_s(
    phases: Phases, rates: Rates, traffic: Traffic, num_micro_batches: int, unified: bool
) -> float:
    """Return the shortest step that any order of the same work could have."""
    compute_s = num_micro_batches * (phases.forward_s + phases.backward_s)
    num_passes = 2 * num_micro_batches - 1
    disk_s = traffic.sweep_bytes / rates.mixed + num_passes * traffic.weight_pass_bytes / rates.read
    if unified:
        return max(compute_s + phases.update_s, disk_s)
    return max(compute_s, phases.update_s, disk_s)


def measure_rates(folder: Path) -> Rates:
    """Read, write and mix pieces of a scratch file in `folder` with the engine's own I/O."""
    io = IoConfig()
    half = NUM_PIECES * PIECE_BYTES
    path = folder / f"probe-{os.getpid()}"
    file = _aio.File(str(path), create=True)
    engine = _aio.Engine(
        backend=io.backend,
        block_size=io.block_size,
        queue_depth=io.queue_depth,
        num_threads=io.num_threads,
    )
    try:
        memory = mmap.mmap(-1, NUM_IN_FLIGHT * PIECE_BYTES)
        data = torch.frombuffer(memory, dtype=torch.uint8)
        data.random_(generator=torch.Generator().manual_seed(0))  # drives compress
        prober = _Prober(engine, file, data)
        file.allocate(2 * half)
        prober.run([(_aio.WRITE, offset) for offset in range(0, 2 * half, PIECE_BYTES)])
        reads = [(_aio.READ, offset) for offset in range(0, half, PIECE_BYTES)]
        writes = [(_aio.WRITE, half + offset) for _, offset in reads]
        mixed = [part for pair in zip(reads, writes, strict=True) for part in pair]
        passes = [
            (prober.run(reads), prober.run(writes), prober.run(mixed)) for _ in range(NUM_PASSES)
        ]
        return Rates(*(statistics.median(kind) for kind in zip(*passes, strict=True)))
    finally:
        engine.close()
        file.close()
        path.unlink()


class _Prober:
    def __init__(self, engine: _aio.Engine, file: _aio.File, data: torch.Tensor) -> None:
        self._engine = engine
        self._file = file
        self._data = data

    def run(self, pieces: list[tuple[int, int]]) -> float:
        """Move (operation, offset) pieces, a few in flight, and return bytes per second."""
        tickets: deque[_aio.Ticket] = deque()
        started = time.perf_counter()
        for index, (operation, offset) in enumerate(pieces):
            if len(tickets) == NUM_IN_FLIGHT:
                tickets.popleft().wait()
            address = self._data.data_ptr() + index % NUM_IN_FLIGHT * PIECE_BYTES
            segment = (self._file, offset, PIECE_BYTES, address)
            tickets.append(self._engine.submit(operation, [segment]))
        for ticket in tickets:
            ticket.wait()
        return len(pieces) * PIECE_BYTES / (time.perf_counter() - started)

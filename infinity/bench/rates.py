"""Measures the rates that a plan's times are computed from: disk, copies, updates, compute.

Each is measured alone, briefly, and through what a run uses: the disk tier, the `Device`, the
optimizer's kernels on chunks of parameters. Nothing is left behind, neither files nor memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from infinity.bench.disk_rates import measure_disk
from infinity.config import IoConfig
from infinity.formats import MomentFormat
from infinity.memory.device import HAPPENED, Device, DeviceArena, Event
from infinity.memory.host import HostArena
from infinity.optim.cpu import CpuKernels, Piece
from infinity.optim.moments import VALUE_DTYPES, Moment
from infinity.optim.rules import AdamHyper
from infinity.plan.layout import PAGE, round_up
from infinity.plan.machine import read_machine
from infinity.plan.rates import DISK, PRECISIONS, UPDATE_FORMATS, Rates, nominal

SECONDS = 2.0
DISK_SHARE = 0.55  # of the time; the disk binds most runs, and wanders most
_UPDATE_SHARE = 0.17  # the host's, all formats together; the device's gets a third of it more
_COPY_SHARE = 0.05
_COMPUTE_SHARE = 0.17

CHUNK = 2**20  # parameters of a chunk record
_LEAST_CHUNKS, _MOST_CHUNKS = 8, 64
# Without moments: weight and residual, and a gradient, in 16 bits each.
_BYTES_BESIDE_MOMENTS = 6
_LARGEST_BYTES = _BYTES_BESIDE_MOMENTS + 2 * 4
_COPY_BYTES = 32 << 20
_NUM_NOISE = 2**20
_LEAST_CALLS = 3
_MATRIX_SIZES = (128, 256, 512, 1024, 2048, 4096)
_FLOP = 3 * 2  # three products, a multiplication and an addition each
_NUM_PARTS = 6  # a larger size of matrices is tried while one takes less than such a part
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def measure_rates(
    paths: Sequence[Path],
    device: Device,
    *,
    io: IoConfig,
    num_threads: int,
    seconds: float = SECONDS,
) -> Rates:
    """Measure for about `seconds`; more with several paths, or on a machine that is very slow.

    `num_threads` are those of the host's kernels. Without `paths` the disk's rates are nominal:
    nothing can be measured, and nothing is planned with them. `device` stays open. Raises what the
    disk tier and the device raise.
    """
    numbers = measure_processors(device, num_threads, seconds)
    if paths:
        numbers |= measure_disk(paths, io, DISK_SHARE * seconds)
    else:
        defaults = nominal(device.unified).numbers()
        numbers |= {name: defaults[name] for name in DISK}
    return Rates.of(numbers)


def measure_processors(
    device: Device, num_threads: int, seconds: float = SECONDS
) -> dict[str, float]:
    """All but the disk's rates, by the names of `Rates.numbers`, in their share of `seconds`."""
    numbers = _host_updates(num_threads, _UPDATE_SHARE * seconds / len(UPDATE_FORMATS))
    if not device.unified:
        numbers |= _copies(device, _COPY_SHARE * seconds / 2)
        numbers |= _device_update(device, _UPDATE_SHARE * seconds / len(UPDATE_FORMATS))
    for precision in PRECISIONS:
        share_s = _COMPUTE_SHARE * seconds / len(PRECISIONS)
        numbers[f"compute.{precision}"] = _flop_per_s(device, _DTYPES[precision], share_s)
    if device.torch_device.type == "cuda":
        torch.cuda.empty_cache()  # budgets are derived from what is free
    return numbers


def _calls_per_s(work: Callable[[], None], seconds: float) -> float:
    """How often `work` could be done in a second: by the fastest of several calls.

    The work is always the same, so that only neighbours and interruptions make a difference, and
    what is measured once should not remember who else was there. `work` is warm already.
    """
    fastest_s, count = math.inf, 0
    end = time.perf_counter() + seconds
    while count < _LEAST_CALLS or time.perf_counter() < end:
        fastest_s = min(fastest_s, _timed(work))
        count += 1
    return 1 / fastest_s


def _timed(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _noise(dtype: torch.dtype) -> Tensor:
    """Values of the size of weights; of a generator of its own, for the user's must not move."""
    return (torch.randn(_NUM_NOISE, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype)


# --- updates ---------------------------------------------------------------------------------


def _host_updates(num_threads: int, seconds: float) -> dict[str, float]:
    num_chunks = _num_chunks()
    arena = HostArena(num_chunks * CHUNK * _LARGEST_BYTES + 8 * PAGE)
    numbers = {}
    with CpuKernels(num_threads) as kernels:
        for name in UPDATE_FORMATS:
            pieces = _pieces(arena, num_chunks, MomentFormat(name))

            def update(pieces: Sequence[Piece] = pieces) -> None:
                for piece in pieces:  # a sweep comes chunk by chunk
                    kernels.update_all([piece])

            update()
            numbers[f"update.{name}"] = _calls_per_s(update, seconds) * num_chunks * CHUNK
    return numbers


def _num_chunks() -> int:
    """So many that no cache holds half of them, even with 8-bit moments."""
    machine = read_machine()
    smallest = _BYTES_BESIDE_MOMENTS + 2
    wanted = -(-2 * machine.cache_bytes // (smallest * CHUNK))
    most = machine.host_available_bytes // 8 // (CHUNK * _LARGEST_BYTES)
    return max(1, min(most, _MOST_CHUNKS, max(wanted, _LEAST_CHUNKS)))


def _pieces(arena: DeviceArena, num_chunks: int, kind: MomentFormat) -> list[Piece]:
    """Chunks to update in an arena: weights and gradients like real ones, fresh moments."""
    count, offset = num_chunks * CHUNK, 0

    def carve(dtype: torch.dtype, count: int) -> Tensor:
        nonlocal offset
        nbytes = count * dtype.itemsize
        tensor = arena.view(offset, nbytes).view(dtype)
        offset += round_up(nbytes, PAGE)
        return tensor

    weight, gradient = carve(torch.bfloat16, count), carve(torch.bfloat16, count)
    residual = carve(torch.int16, count)
    moments = []
    for _ in range(2):
        values = carve(VALUE_DTYPES[kind], count)
        num_scales = kind.num_scales(count)
        scales = carve(torch.float32, num_scales) if num_scales else None
        moments.append(Moment(values, scales, kind))
    for stored in (residual, *(t for m in moments for t in (m.values, m.scales) if t is not None)):
        stored.zero_()
    noise = _noise(torch.bfloat16).to(weight.device)
    for tensor in (weight, gradient):
        tensor.view(-1, _NUM_NOISE).copy_(noise)  # pages that were only read would be one page
    hyper = AdamHyper(lr=1e-4)
    return [
        Piece(
            weight[first : first + CHUNK],
            residual[first : first + CHUNK],
            [moment.part(first, first + CHUNK) for moment in moments],
            gradient[first : first + CHUNK],
            hyper,
            100,
            first=first,
        )
        for first in range(0, count, CHUNK)
    ]


def _device_update(device: Device, seconds: float) -> dict[str, float]:
    """The device's own kernels with fp32 moments; nothing where there are none."""
    free_bytes = device.memory_bytes() or 0
    num_chunks = min(_MOST_CHUNKS, free_bytes // 16 // (CHUNK * _LARGEST_BYTES))
    if num_chunks == 0 or device.why_no_kernels() is not None:
        return {}
    arena = device.reserve(num_chunks * CHUNK * _LARGEST_BYTES + 8 * PAGE)
    pieces = _pieces(arena, num_chunks, MomentFormat.FP32)

    def update() -> None:
        device.update(pieces, after=device.compute_event()).wait()

    update()
    return {"device_update": _calls_per_s(update, seconds) * num_chunks * CHUNK}


# --- copies and compute ----------------------------------------------------------------------


def _copies(device: Device, seconds: float) -> dict[str, float]:
    # torch's own pinned memory: `Device.pin` would hold on to it until the device is closed.
    pinned = device.torch_device.type == "cuda"
    host = torch.zeros(_COPY_BYTES, dtype=torch.uint8, pin_memory=pinned)
    there = device.reserve(_COPY_BYTES).view(0, _COPY_BYTES)
    return {
        "to_device": _copy_rate(lambda after: device.copy_in(there, host, after), seconds),
        "from_device": _copy_rate(lambda after: device.copy_out(host, there, after), seconds),
    }


def _copy_rate(copy: Callable[[Event], Event], seconds: float) -> float:
    """Bytes per second with two copies under way, so that the lane is never empty."""
    copy(HAPPENED).wait()
    count = 0
    event: Event = HAPPENED
    started = time.perf_counter()
    while count < _LEAST_CALLS or time.perf_counter() - started < seconds:
        before, event = event, copy(event)
        before.wait()
        count += 1
    event.wait()
    return count * _COPY_BYTES / (time.perf_counter() - started)


def _flop_per_s(device: Device, dtype: torch.dtype, seconds: float) -> float:
    """Of the three products of a linear layer, as large as fit into `seconds` several times."""
    noise = _noise(dtype).to(device.torch_device)
    part_s, rate = seconds / _NUM_PARTS, 0.0
    for size in _MATRIX_SIZES:
        work = _linear_layer(device, noise, size)
        work()  # libraries choose, allocate and compile when first called
        once_s = _timed(work)
        before, rate = rate, size**3 / once_s
        # Where a neighbour holds one of the processors, a small product takes as long as the
        # neighbour's turn: then a larger one takes no longer, and tells more.
        if once_s > seconds or (once_s > part_s and rate < 2 * before):
            break
    if once_s > seconds:
        return _FLOP * rate
    times = max(1, int(part_s / once_s))  # so that waiting for a device does not count
    return _calls_per_s(lambda: work(times), seconds) * times * _FLOP * size**3


def _linear_layer(device: Device, noise: Tensor, size: int) -> Callable[..., None]:
    """What forward and backward multiply: kernels for one of these may be far from the others."""
    num_copies = -(-size * size // _NUM_NOISE)
    given = noise.repeat(num_copies)[: size * size].view(size, size)  # rows may well repeat
    weight, out = given.clone(), torch.empty_like(given)

    def work(times: int = 1) -> None:
        for _ in range(times):
            torch.mm(given, weight.t(), out=out)
            torch.mm(given, weight, out=out)
            torch.mm(given.t(), weight, out=out)
        device.compute_event().wait()

    return work

"""Rates of this machine (disk, copies, updates, compute), measured once and cached.

Each rate is measured briefly and through the code of a run: the disk tier, the `Device`, the
optimizer's kernels on chunks of parameters. Rates are measured separately, with two exceptions that
model a training step: if the host computes, its processors are busy while the disk is measured; if
it does not, copies run while the host's updates are measured. No files or memory are left behind.
Links between ranks are measured by all ranks together (`cached_links`).

The cache has one JSON file for the processors, one for each measured set of paths and number of
ranks, and one for traffic between nodes, below `$XDG_CACHE_HOME/infinity/rates` or
`~/.cache/infinity/rates`. A file has a description of the measured hardware, the day and the rates.
Files are replaced atomically, so processes may race. A damaged file, or one with another
description, counts as missing; if the folder is not usable, nothing is cached.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import statistics
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from infinity.common.accelerators import is_accelerator, name_of
from infinity.common.files import atomic_write
from infinity.config.schema import IoConfig
from infinity.distributed.context import DistContext, Work
from infinity.errors import InfinityWarning
from infinity.optim.cpu import CpuKernels, Piece
from infinity.optim.moments import COMPUTE_DTYPES, VALUE_DTYPES, Moment
from infinity.optim.rules import AdamW
from infinity.plan import rates as names
from infinity.plan.load import ProcessorTimes, load_between
from infinity.plan.machine import cpu_model, mount_of, read_machine, threads_for
from infinity.plan.plan import BETWEEN_HOSTS, LINKS
from infinity.plan.rates import Rates
from infinity.storage.device import HAPPENED, CpuDevice, Device, DeviceArena, Event
from infinity.storage.disk_rates import (
    LEAST_CALLS,
    NUM_NOISE,
    calls_per_s,
    make_noise,
    measure_disk,
    repeating,
    timed,
)
from infinity.storage.disk_speed import keep_moving
from infinity.storage.host_arena import HostArena
from infinity.types import PAGE, MomentFormat, round_up

LINK_SECONDS = 1.0  # for both collectives
# For disk, updates, copies and products. Other operations of a block take two seconds more on two
# cores; several paths or a very slow machine take longer.
SECONDS = 2.0
# Shares of the time. The disk limits most runs, and its rate varies most. The host's update share
# covers all formats; the device's update takes a third of it in addition.
_DISK_SHARE, _UPDATE_SHARE, _COPY_SHARE, _COMPUTE_SHARE = 0.55, 0.17, 0.05, 0.17
_BETWEEN_SHARE = 0.04  # for each of seven measurements

_CHUNK = NUM_NOISE  # parameters
_LEAST_CHUNKS, _MOST_CHUNKS = 8, 64
_BYTES_BESIDE_MOMENTS = 6  # weight, residual and gradient, 16 bits each
_LARGEST_BYTES = _BYTES_BESIDE_MOMENTS + 2 * 4
_COPY_BYTES = _LINK_BYTES = 32 << 20  # gathered bytes: the size of a small unit
_MATRIX_SIZES = (128, 256, 512, 1024, 2048, 4096)
_FLOP = 3 * 2  # three products with a multiplication and an addition each
_WARM_S = 1.0  # seconds of products before those of a GPU are timed
_NUM_PARTS = 6  # larger matrices are tried while a call takes less than this fraction
# Transformer block without matrix products, by `Device.unified`: its width and maximum number of
# tokens. In a context of `_SHORT` tokens attention costs no more than its fixed overhead.
_WIDTH, _MOST_TOKENS = {True: 1024, False: 2048}, {True: 1024, False: 16384}
_HEAD, _SHORT, _LONG = 64, 64, 1024
_TOKEN_WIDTHS = 40  # maximum memory of a token, in values per unit of width
_MEMORY_DIVISOR = 8  # divisor of the free device memory
_NUM_LOGITS, _LEAST_ROWS, _MOST_ROWS = 32768, 32, {True: 512, False: 1024}

_FORMAT = 1  # of cache entries; increment when the meaning of a rate changes
# Accepted names of rates: a damaged cache must not influence a plan.
_NAMES = {
    *names.DISK,
    names.DISK_PER_CPU_S,
    *names.COPIES,
    *names.UPDATE,
    *names.COMPUTE,
    names.DEVICE_UPDATE,
}
_NAMES |= {*LINKS, names.BETWEEN_NODES, BETWEEN_HOSTS}
_Numbers = dict[str, float]
_CachedRates = tuple[_Numbers, str]  # rates and the day of the measurement
# Description of the hardware, required names of rates, and a function that measures them.
_Measurement = tuple[dict[str, Any], set[str], Callable[[float], _Numbers]]


@dataclass(frozen=True)
class KnownRates:
    """Rates, the (oldest) day they were measured, and the names of nominal rates.

    `measured` is None if no rate was measured.
    """

    rates: Rates
    measured: str | None
    nominal: tuple[str, ...] = ()

    @property
    def origin(self) -> str:
        """Human-readable origin of the rates."""
        nominal = self.nominal if self.measured else self.rates.numbers()
        return names.rates_origin(self.rates, tuple(nominal), self.measured)


def cached_rates(
    paths: Sequence[Path],
    device: Device,
    *,
    io: IoConfig | None = None,
    num_threads: int = 0,
    refresh: bool = False,
    seconds: float = SECONDS,
    root: Path = Path("/"),
) -> KnownRates:
    """Return the cached rates of this machine with these paths; measure and cache missing ones.

    Cache entries are keyed by processor, its count, RAM, device and threads; those of disks also by
    the mount of each path and the settings in `io`. `num_threads` 0 selects the default of a run.
    `refresh` ignores the cache. `root` is the parent of /proc and /sys. `device` is not closed.
    Rates measured while other programs used the processors are not cached, with a warning. Raises
    errors of the disk tier and the device.
    """
    entries, loads = [], set[str]()
    for description, needed, measure in _measurements(paths, device, io, num_threads, root):
        entry = None if refresh else _read_cache(description, needed)
        if entry is None:
            before = ProcessorTimes.now()
            entry = measure(seconds), datetime.now(UTC).date().isoformat()
            if load := load_between(before, ProcessorTimes.now()):
                loads.add(load)
            else:
                _write_cache(description, *entry)
        entries.append(entry)
    if loads:
        warnings.warn(
            f"{max(loads)} while rates were measured: they may be too low, are not kept, and are "
            "measured again the next time",
            InfinityWarning,
            stacklevel=2,
        )
    return _combined(entries, paths, device)


def kept_rates(
    paths: Sequence[Path],
    device: Device,
    *,
    io: IoConfig | None = None,
    num_threads: int = 0,
    gpus: int = 1,
    nodes: int = 1,
) -> KnownRates:
    """Return the rates cached by `cached_rates` and `cached_links`, without measuring.

    Missing rates are nominal and listed in `nominal`. More than one rank (`gpus` on each of
    `nodes`) also has links. Raises `MachineError` for a missing path.
    """
    measurements = _measurements(paths, device, io, num_threads, Path("/"))
    entries = [_read_cache(description, needed) for description, needed, _ in measurements]
    links = kept_links(device, gpus, nodes)
    known = _combined([k for k in (*entries, links) if k is not None], paths, device)
    rates, nominal = names.with_links(
        known.rates, gpus, nodes, unified=device.unified, across=links is not None
    )
    return KnownRates(rates, known.measured, (*known.nominal, *nominal))


def kept_links(device: Device, gpus: int, nodes: int) -> _CachedRates | None:
    """Return cached rates between ranks, and their day; None if there are none.

    If this number of nodes was not measured, combines the rates between nodes with those between
    the ranks of one node, as far as they are cached.
    """
    if gpus * nodes == 1:
        return None
    entry = _read_cache(_link_key(device, gpus, nodes), LINKS)
    if entry is None and nodes > 1:
        entry = _read_cache(_link_key(device), {names.BETWEEN_NODES})
        within_node = kept_links(device, gpus, 1)
        if entry is not None and within_node is not None:
            entry = entry[0] | within_node[0], min(entry[1], within_node[1])
    return entry


def cached_links(
    ranks: DistContext, device: Device, *, refresh: bool = False, seconds: float = LINK_SECONDS
) -> tuple[_Numbers, str]:
    """Return rates between these ranks and their day; measure unless cached on every node.

    Collective over all ranks. Cache entries are keyed by processor, device, ranks per node and
    nodes. With several nodes it also measures and caches, for plans with other numbers of nodes,
    the rate a node receives while only ranks of different nodes communicate (and that of a rank
    between RAM), and the rate of ranks while only ranks of one node communicate. Raises the error
    of a lost rank.
    """
    gpus, nodes = ranks.local_count, ranks.num_nodes
    cached = None if refresh else _read_cache(_link_key(device, gpus, nodes), LINKS)
    entries = ranks.all_gather_object(cached)
    if all(entries):
        oldest = min(entries, key=lambda entry: entry[1])  # the same on all ranks
        return oldest[0], oldest[1]
    numbers, day = measure_links(ranks, device, seconds), datetime.now(UTC).date().isoformat()
    new_entries = [(_link_key(device, gpus, nodes), numbers)]
    if {*ranks.all_gather_object(gpus)} == {gpus} and nodes > 1:  # equal number of ranks per node
        node_sets = [[*range(first, first + gpus)] for first in range(0, ranks.count, gpus)]
        peer_sets = [*zip(*node_sets, strict=True)]
        between_peers = _slowest_of_sets(ranks, peer_sets, device, seconds)
        host_rates = between_peers
        if not device.unified:
            host_rates = _slowest_of_sets(ranks, peer_sets, CpuDevice(), seconds)
        node_rates = {names.BETWEEN_NODES: gpus * between_peers["all_to_all"]}
        node_rates[BETWEEN_HOSTS] = host_rates["all_gather"]
        numbers |= node_rates
        new_entries.append((_link_key(device), node_rates))
        if gpus > 1:
            within_node = _slowest_of_sets(ranks, node_sets, device, seconds)
            new_entries.append((_link_key(device, gpus, 1), within_node))
    if ranks.local_rank == 0:
        for key, rates in new_entries:
            _write_cache(key, rates, day)
    ranks.synchronize("keeps rates")  # the files exist when any rank returns
    return numbers, day


def _link_key(device: Device, *ranks: int) -> dict[str, Any]:
    """Return the cache key of links for (ranks per node, nodes), or between nodes if empty."""
    computer = {"format": _FORMAT, "processor": cpu_model(), "device": device_name(device)}
    return computer | {"ranks": [*ranks]}


def _slowest_of_sets(
    ranks: DistContext, sets: Sequence[Sequence[int]], device: Device, seconds: float
) -> dict[str, float]:
    """Measure links within all `sets` concurrently; return the rates of the slowest rank."""
    with contextlib.closing(ranks.new_subgroup(sets)) as subgroup:
        rates = measure_links(subgroup, device, seconds)
    slowest = ranks.gather(torch.tensor([*rates.values()], dtype=torch.float64)).amin(0)
    return dict(zip(rates, slowest.tolist(), strict=True))


def measure_links(
    ranks: DistContext, device: Device, seconds: float = LINK_SECONDS
) -> dict[str, float]:
    """Return bytes per second that the slowest rank receives, by collective.

    Messages have the size of a unit, and are in the memory that a run sends from.
    """
    nbytes = _LINK_BYTES // ranks.count * ranks.count
    arena = device.reserve(2 * nbytes)
    source, target = arena.view(0, nbytes), arena.view(nbytes, nbytes)
    collectives: dict[str, Callable[[], Work]] = {
        "all_gather": lambda: ranks.all_gather(source, overlap=True),
        "all_to_all": lambda: ranks.all_to_all(target, source),
    }
    numbers, received = {}, nbytes - nbytes // ranks.count
    for name, collective in collectives.items():

        def call(collective: Callable[[], Work] = collective) -> None:
            collective().wait()
            device.compute_event().wait()

        call()
        # All ranks must make the same number of calls: the smallest of all.
        counts = [int(seconds / len(collectives) / timed(call)), LEAST_CALLS]
        count = min(int(n) for n in ranks.gather(torch.tensor([max(counts)])))
        times = torch.tensor([timed(call) for _ in range(count)], dtype=torch.float64)
        numbers[name] = received / float(ranks.gather(times).amax(0).median())
    return numbers


def _combined(entries: Sequence[_CachedRates], paths: Sequence[Path], device: Device) -> KnownRates:
    numbers = {name: rate for rates, _ in entries for name, rate in rates.items()}
    # If compute was measured but no device update, the device has no update kernels.
    lacks_kernels = names.COMPUTE[0] in numbers and names.DEVICE_UPDATE not in numbers
    without = (names.DEVICE_UPDATE,) if lacks_kernels else ()
    rates, nominal = names.completed(numbers, unified=device.unified, without=without)
    if not paths:  # the plan uses no disk rates
        nominal = tuple(name for name in nominal if name not in names.DISK)
    return KnownRates(rates, min((day for _, day in entries), default=None), nominal)


def _measurements(
    paths: Sequence[Path], device: Device, io: IoConfig | None, num_threads: int, root: Path
) -> list[_Measurement]:
    """Return the measured parts of the machine: processors, and disks if there are paths."""
    machine, settings = read_machine(root=root), io or IoConfig()
    computer = {
        "format": _FORMAT,
        "processor": cpu_model(root),
        "num_cpus": machine.num_cpus,
        "ram_gib": round(machine.host_ram_bytes / 2**30),
    }
    threads = threads_for(num_threads, machine.num_cpus, unified=device.unified)
    processors = computer | {
        "num_threads": threads,
        "device": device_name(device),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
    }
    needed = {*names.UPDATE, *names.COMPUTE, *(() if device.unified else names.COPIES)}
    measurements: list[_Measurement] = [
        (processors, needed, lambda s: measure_processors(device, threads, s))
    ]
    if paths:
        per_cpu = (names.DISK_PER_CPU_S,) if device.unified else ()
        disks = computer | {
            "disks": [asdict(mount_of(path, root)) for path in paths],
            "io": settings.model_dump(mode="json", exclude={"timeout_s"}),  # does not affect speed
            "beside_products": device.unified,
        }

        def measure(seconds: float) -> _Numbers:
            return measure_disk(paths, settings, _DISK_SHARE * seconds, busy=device.unified)

        measurements.append((disks, {*names.DISK, *per_cpu}, measure))
    return measurements


def device_name(device: Device) -> str:
    """Return the name of a compute device; "cpu" for the host."""
    if is_accelerator(device.torch_device):
        return name_of(device.torch_device)
    name = f"{type(device).__name__} on {device.torch_device}"  # a device of a test
    return "cpu" if isinstance(device, CpuDevice) else name


def default_folder() -> Path:
    """Return `infinity/rates` below `$XDG_CACHE_HOME` or `~/.cache`."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(caches) / "infinity" / "rates"


def _cache_path(description: dict[str, Any]) -> Path:
    key = hashlib.sha256(json.dumps(description, sort_keys=True).encode())
    return default_folder() / f"{key.hexdigest()[:32]}.json"


def _read_cache(description: dict[str, Any], needed: Collection[str]) -> _CachedRates | None:
    """Return a cache entry; None if it is missing, damaged or lacks a needed rate."""
    try:
        entry = json.loads(_cache_path(description).read_text(encoding="utf-8"))
        if entry["of"] != description:
            return None
        numbers = {str(name): float(rate) for name, rate in entry["rates"].items()}
        measured = date.fromisoformat(entry["measured"]).isoformat()
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    is_valid = all(math.isfinite(rate) and rate > 0 for rate in numbers.values())
    return (numbers, measured) if is_valid and set(needed) <= set(numbers) <= _NAMES else None


def _write_cache(description: dict[str, Any], numbers: _Numbers, measured: str) -> None:
    path = _cache_path(description)
    entry = {"of": description, "measured": measured, "rates": numbers}
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with atomic_write(path, 0o600) as file:
            file.write(json.dumps(entry, indent=1).encode())


def measure_processors(
    device: Device, num_threads: int, seconds: float = SECONDS
) -> dict[str, float]:
    """Return all rates but those of the disk, by the names of `Rates.numbers`."""
    share_s = _UPDATE_SHARE * seconds / len(names.UPDATE_FORMATS)
    copies = [] if device.unified else _copy_functions(device)[-1]
    with repeating(lambda: _copy_rate(copies, 0.0)) if copies else contextlib.nullcontext():
        numbers = _host_updates(num_threads, share_s)
    if copies:
        numbers |= measure_copies(device, _COPY_SHARE * seconds)
        numbers |= _device_update(device, share_s)
    for precision in names.PRECISIONS:
        share_s = _COMPUTE_SHARE * seconds / len(names.PRECISIONS)
        numbers[f"compute.{precision}"] = _flop_per_s(device, COMPUTE_DTYPES[precision], share_s)
    with torch.inference_mode(False), torch.enable_grad():
        for precision in names.PRECISIONS:
            rates = _block_rates(device, COMPUTE_DTYPES[precision], _BETWEEN_SHARE * seconds)
            numbers[f"between.{precision}"], numbers[f"attention.{precision}"] = rates
        numbers["logits"] = _logits_per_s(device, _BETWEEN_SHARE * seconds)
    device.return_freed_memory()  # budgets are derived from free memory
    return numbers


def _warm(work: Callable[[], None]) -> float:
    """Return the seconds of `work` after a warm-up call (memory, choice of kernels)."""
    work()
    return timed(work)


def _host_updates(num_threads: int, seconds: float) -> dict[str, float]:
    num_chunks, numbers = _num_chunks(), dict[str, float]()
    arena = HostArena(pieces_bytes(num_chunks))
    with CpuKernels(num_threads) as kernels:
        for name in names.UPDATE_FORMATS:
            pieces = pieces_in(arena, num_chunks, MomentFormat(name))

            def update(pieces: Sequence[Piece] = pieces) -> None:
                for first in range(0, len(pieces), 4):  # batch size of an optimizer pass
                    kernels.update_all(pieces[first : first + 4])

            update()
            numbers[f"update.{name}"] = calls_per_s(update, seconds) * num_chunks * _CHUNK
    return numbers


def _num_chunks() -> int:
    """Return a number of chunks of at least twice the cache size, even with 8-bit moments."""
    machine = read_machine()
    needed = -(-2 * machine.cache_bytes // ((_BYTES_BESIDE_MOMENTS + 2) * _CHUNK))
    fitting = machine.host_available_bytes // 8 // (_CHUNK * _LARGEST_BYTES)
    return max(1, min(fitting, _MOST_CHUNKS, max(needed, _LEAST_CHUNKS)))


def pieces_bytes(num_chunks: int) -> int:
    """Return the bytes of an arena for `pieces_in`, sufficient for every format."""
    return num_chunks * _CHUNK * _LARGEST_BYTES + 8 * PAGE


def pieces_in(
    arena: DeviceArena, num_chunks: int, kind: MomentFormat, *, at_once: int = 1
) -> list[Piece]:
    """Return pieces of `at_once` chunks each: random weights and gradients, zero moments."""
    count, offset, size = num_chunks * _CHUNK, 0, at_once * _CHUNK

    def carve(dtype: torch.dtype, count: int = count) -> Tensor:
        nonlocal offset
        nbytes = count * dtype.itemsize
        tensor = arena.view(offset, nbytes).view(dtype)
        offset += round_up(nbytes, PAGE)
        return tensor

    weight, gradient = carve(torch.bfloat16), carve(torch.bfloat16)
    residual = carve(torch.int16)
    moments = []
    for _ in range(2):
        values = carve(VALUE_DTYPES[kind])
        num_scales = kind.num_scales(count)
        scales = carve(torch.float32, num_scales) if num_scales else None
        moments.append(Moment(values, scales, kind))
    for stored in (residual, *(t for m in moments for t in (m.values, m.scales) if t is not None)):
        stored.zero_()
    noise = make_noise(torch.bfloat16).to(weight.device)
    for tensor in (weight, gradient):
        tensor.view(-1, NUM_NOISE).copy_(noise)  # unwritten pages would all be the zero page
    pieces = []
    for first in range(0, count, size):
        span = slice(first, min(first + size, count))
        parts = [moment.part(span.start, span.stop) for moment in moments]
        rule_params = AdamW(lr=1e-4)
        pieces.append(
            Piece(
                weight[span], residual[span], parts, gradient[span], rule_params, 100, first=first
            )
        )
    return pieces


def _device_update(device: Device, seconds: float) -> dict[str, float]:
    """Measure the device's update kernels with fp32 moments; {} if there are none."""
    free_bytes = device.memory_bytes() or 0
    num_chunks = min(_MOST_CHUNKS, free_bytes // 16 // (_CHUNK * _LARGEST_BYTES))
    if num_chunks == 0 or device.why_no_kernels() is not None:
        return {}
    arena = device.reserve(pieces_bytes(num_chunks))
    # One piece, because the rate excludes the host's overhead per piece.
    pieces = pieces_in(arena, num_chunks, MomentFormat.FP32, at_once=num_chunks)

    def update() -> None:
        device.update(pieces, after=device.compute_event()).wait()

    update()
    return {"device_update": calls_per_s(update, seconds) * num_chunks * _CHUNK}


def measure_copies(device: Device, seconds: float) -> dict[str, float]:
    """Return bytes per second of `names.COPIES` for a device that is not unified."""
    each = zip(names.COPIES, _copy_functions(device), strict=True)
    return {name: _copy_rate(copies, seconds / len(names.COPIES)) for name, copies in each}


def _copy_functions(device: Device) -> tuple[list[Callable[[Event], Event]], ...]:
    """Return functions that start a copy: to the device, from the device, and both."""
    # Pinned by torch: `Device.pin` would keep it pinned until the device is closed.
    pinned = is_accelerator(device.torch_device)
    arena = device.reserve(2 * _COPY_BYTES)
    device_views = [arena.view(i * _COPY_BYTES, _COPY_BYTES) for i in range(2)]
    host_buffers = [
        torch.zeros(_COPY_BYTES, dtype=torch.uint8, pin_memory=pinned) for _ in device_views
    ]

    def copy_in(after: Event) -> Event:
        return device.copy_h2d(device_views[0], host_buffers[0], after)

    def copy_out(after: Event) -> Event:
        return device.copy_d2h(host_buffers[1], device_views[1], after)

    return [copy_in], [copy_out], [copy_in, copy_out]


def _copy_rate(copies: Sequence[Callable[[Event], Event]], seconds: float) -> float:
    """Return bytes per second of alternating `copies`, with two of each in flight."""
    events: list[Event] = [HAPPENED] * len(copies)

    def next_copy(turn: int) -> Event:
        direction = turn % len(copies)
        events[direction] = copies[direction](events[direction])
        return events[direction]

    keep_moving(next_copy, 0.0, depth=1, least=len(copies))
    depth = 2 * len(copies)
    count, seconds = keep_moving(next_copy, seconds, depth=depth, least=LEAST_CALLS)
    return count * _COPY_BYTES / seconds


def _flop_per_s(device: Device, dtype: torch.dtype, seconds: float) -> float:
    """Return FLOP per second of the three products of a linear layer that take `seconds`."""
    noise = make_noise(dtype).to(device.torch_device)
    call_s, rate = seconds / _NUM_PARTS, 0.0
    for size in _MATRIX_SIZES:
        work = _linear_layer(device, noise, size)
        once_s = _warm(work)
        smaller_rate, rate = rate, size**3 / once_s
        # If another program occupies a processor, a small product takes at least one of its time
        # slices: a larger product then takes no longer, and gives a better estimate.
        if once_s > seconds or (once_s > call_s and rate < 2 * smaller_rate):
            break
    if once_s > seconds:
        return _FLOP * rate
    num_calls = max(1, int(call_s / once_s))  # amortizes waiting for the device
    if device.host_clock:
        return calls_per_s(lambda: work(num_calls), seconds) * num_calls * _FLOP * size**3
    # A GPU lowers its clock after sustained load, as in training.
    calls_per_s(lambda: work(num_calls), _WARM_S)
    per_s = calls_per_s(lambda: work(num_calls), seconds, statistics.median)
    return per_s * num_calls * _FLOP * size**3


def _linear_layer(device: Device, noise: Tensor, size: int) -> Callable[..., None]:
    """Return the products of forward and backward: speeds of their kernels may differ."""
    inputs = _matrix(noise, size, size)
    weight, out = inputs.clone(), torch.empty_like(inputs)

    def work(num_calls: int = 1) -> None:
        for _ in range(num_calls):
            torch.mm(inputs, weight.t(), out=out)
            torch.mm(inputs, weight, out=out)
            torch.mm(inputs.t(), weight, out=out)
        device.compute_event().wait()

    return work


def _block_rates(device: Device, dtype: torch.dtype, seconds: float) -> tuple[float, float]:
    """Return bytes per second of a block without its products, and FLOP per second of attention.

    Bytes are counted as in `plan.cost`, with a context so short that attention costs only its
    overhead; FLOP of attention are those of a longer context, in the time beyond the short one.
    """
    width, max_tokens = _WIDTH[device.unified], _MOST_TOKENS[device.unified]
    if (free_bytes := device.memory_bytes()) is not None:
        max_tokens = min(
            max_tokens, free_bytes // _MEMORY_DIVISOR // (_TOKEN_WIDTHS * width * dtype.itemsize)
        )
    work, tokens = _double_until_slow(
        lambda n: _block(device, dtype, n), 2 * _SHORT, max_tokens, seconds
    )
    values = tokens * 16 * width  # inputs and outputs of its products: 16 h per token
    moved_bytes = values * (names.PASSES_FORWARD + names.PASSES_BACKWARD) * dtype.itemsize
    between = moved_bytes * calls_per_s(work, seconds, statistics.median)
    longest, times = min(_LONG, tokens), []
    for context in (_SHORT, longest):
        work = _attention(device, dtype, tokens, context)
        work()
        times.append(1 / calls_per_s(work, seconds, statistics.median))
    short_s, long_s = times
    longer_s = max(long_s - short_s, long_s / 10)  # on a busy machine the short one may take longer
    return between, 7 * tokens * width * (longest - _SHORT) / longer_s


def _block(device: Device, dtype: torch.dtype, tokens: int) -> Callable[[], None]:
    """Return a GPT block without products: norms, attention, activation, residual sums."""
    width, noise = _WIDTH[device.unified], make_noise(dtype).to(device.torch_device)
    scale = torch.ones(width, dtype=dtype, device=device.torch_device)
    leaves = [_leaf(noise, tokens, n * width) for n in (1, 3, 1, 4, 1)]
    stream, qkv, out, up, down = leaves

    def work() -> None:
        after = stream + out
        norms = [F.layer_norm(x, (width,), scale, scale) for x in (stream, after)]
        _backward(device, [*norms, _attend(qkv, _SHORT), F.gelu(up), after + down], leaves)

    return work


def _attention(device: Device, dtype: torch.dtype, tokens: int, context: int) -> Callable[[], None]:
    """Return forward and backward of attention only."""
    noise = make_noise(dtype).to(device.torch_device)
    qkv = _leaf(noise, tokens, 3 * _WIDTH[device.unified])
    return lambda: _backward(device, [_attend(qkv, context)], [qkv])


def _attend(qkv: Tensor, context: int) -> Tensor:
    tokens, width = len(qkv), qkv.shape[1] // 3
    heads = qkv.view(-1, context, 3, width // _HEAD, _HEAD)
    query, key, value = heads.permute(2, 0, 3, 1, 4).unbind()
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return out.transpose(1, 2).reshape(tokens, width)


def _backward(device: Device, outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    for gradient in torch.autograd.grad(outputs, leaves, [output.detach() for output in outputs]):
        gradient.sum(0)  # the gradients of biases
    device.compute_event().wait()


def _logits_per_s(device: Device, seconds: float) -> float:
    """Return logits per second of fp32 cross entropy of bf16 logits, forward and backward."""
    noise = make_noise(torch.bfloat16).to(device.torch_device)

    def make_work(rows: int) -> Callable[[], None]:
        logits = _leaf(noise, rows, _NUM_LOGITS)
        targets = torch.zeros(rows, dtype=torch.long, device=device.torch_device)

        def work() -> None:
            torch.autograd.grad(F.cross_entropy(logits.float(), targets), logits)
            device.compute_event().wait()

        return work

    work, rows = _double_until_slow(make_work, _LEAST_ROWS, _MOST_ROWS[device.unified], seconds)
    return rows * _NUM_LOGITS * calls_per_s(work, seconds, statistics.median)


def _double_until_slow(
    make_work: Callable[[int], Callable[[], None]], size: int, most: int, seconds: float
) -> tuple[Callable[[], None], int]:
    """Double `size` while a call takes less than `seconds`; return the work and its size."""
    while _warm(work := make_work(size)) < seconds and 2 * size <= most:
        size *= 2
    return work, size


def _leaf(noise: Tensor, rows: int, columns: int) -> Tensor:
    return _matrix(noise, rows, columns).requires_grad_()


def _matrix(noise: Tensor, rows: int, columns: int) -> Tensor:
    """Return a matrix of repeated noise."""
    count = rows * columns
    return noise.repeat(-(-count // NUM_NOISE))[:count].view(rows, columns)

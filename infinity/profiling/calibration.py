"""Measured rates of this machine: disk, copies, updates, compute; measured once, then kept.

Each is measured briefly, and through what a run uses: the disk tier, the `Device`, the optimizer's
kernels on chunks of parameters; and alone, but for the disk where the host computes, whose
processors are busy then, as they are in a step, and for the host's updates where it does not, whose
memory copies pass. Neither files nor memory are left behind. Links between ranks are measured where
ranks are: by all of them together (`cached_links`).

What is kept is one JSON file for the processors, one for each set of paths and each number of ranks
that were measured, one for what passes between nodes, below `$XDG_CACHE_HOME/infinity/rates` or
`~/.cache/infinity/rates`: what was measured on what, the day, the rates. Files are replaced as a
whole, so processes may race. One that is damaged, or is about something else, is as good as none; a
folder that cannot be used only makes the cache forgetful.
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

LINK_SECONDS = 1.0  # of both collectives
# Of disk, updates, copies and products; what stands between those takes two more on two cores, and
# all of it more with several paths, or on a machine that is very slow.
SECONDS = 2.0
# Shares of the time. The disk binds most runs, and wanders most; the host's updates are of all
# formats together, the device's get a third of it more.
_DISK_SHARE, _UPDATE_SHARE, _COPY_SHARE, _COMPUTE_SHARE = 0.55, 0.17, 0.05, 0.17
_BETWEEN_SHARE = 0.04  # of each of seven

_CHUNK = NUM_NOISE  # parameters
_LEAST_CHUNKS, _MOST_CHUNKS = 8, 64
_BYTES_BESIDE_MOMENTS = 6  # weight, residual and gradient in 16 bits each
_LARGEST_BYTES = _BYTES_BESIDE_MOMENTS + 2 * 4
_COPY_BYTES = _LINK_BYTES = 32 << 20  # gathered: of the size of a small unit
_MATRIX_SIZES = (128, 256, 512, 1024, 2048, 4096)
_FLOP = 3 * 2  # three products, a multiplication and an addition each
_WARM_S = 1.0  # of products, before those of a GPU are timed
_NUM_PARTS = 6  # a larger size of matrices is tried while one takes less than such a part
# Of the block that has everything but products, where RAM computes and elsewhere: its width, and
# tokens, as many as take no longer than is given. In a context of so few attention costs what it
# costs anyway.
_WIDTH, _MOST_TOKENS = {True: 1024, False: 2048}, {True: 1024, False: 16384}
_HEAD, _SHORT, _LONG = 64, 64, 1024
_TOKEN_WIDTHS = 40  # what a token of it takes at most, and the part of a device's memory for all
_MEMORY_PART = 8
_NUM_LOGITS, _LEAST_ROWS, _MOST_ROWS = 32768, 32, {True: 512, False: 1024}

_FORMAT = 1  # of what is kept; counts up when what is measured changes its meaning
# What may be kept; a stranger's number must not get into a plan.
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
_Kept = tuple[_Numbers, str]  # and the day
# What is described, the names that its rates must have, and how to measure them.
_Part = tuple[dict[str, Any], set[str], Callable[[float], _Numbers]]


@dataclass(frozen=True)
class KnownRates:
    """Rates, the day they were measured (of several parts the oldest), and which are nominal.

    `measured` is None where nothing was.
    """

    rates: Rates
    measured: str | None
    nominal: tuple[str, ...] = ()

    @property
    def origin(self) -> str:
        """Where they come from, for people."""
        guessed = self.nominal if self.measured else self.rates.numbers()
        return names.rates_origin(self.rates, tuple(guessed), self.measured)


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
    """The rates of this machine with these paths: those kept, or else measured now and kept.

    What is kept holds for a processor, its count, the RAM, the device and the threads; the disk's
    also for what is mounted at each path and the settings in `io`. `num_threads` 0 is as many as a
    run takes. `refresh` measures whatever is kept. `root` replaces the place of /proc and /sys.
    `device` stays open. What was measured while other programs used the processors is not kept, and
    a warning says so. Raises what the disk tier and the device raise.
    """
    found, loads = [], set[str]()
    for of, needed, measure in _parts(paths, device, io, num_threads, root):
        kept = None if refresh else _read(of, needed)
        if kept is None:
            before = ProcessorTimes.now()
            kept = measure(seconds), datetime.now(UTC).date().isoformat()
            if load := load_between(before, ProcessorTimes.now()):
                loads.add(load)
            else:
                _write(of, *kept)
        found.append(kept)
    if loads:
        warnings.warn(
            f"{max(loads)} while rates were measured: they may be too low, are not kept, and are "
            "measured again the next time",
            InfinityWarning,
            stacklevel=2,
        )
    return _known(found, paths, device)


def kept_rates(
    paths: Sequence[Path],
    device: Device,
    *,
    io: IoConfig | None = None,
    num_threads: int = 0,
    gpus: int = 1,
    nodes: int = 1,
) -> KnownRates:
    """What `cached_rates` and `cached_links` have kept of this machine; nothing is measured.

    What was not kept is nominal, and is said to be; `gpus` ranks on each of `nodes` also have
    links. Raises `MachineError` for a path that is not there.
    """
    parts = _parts(paths, device, io, num_threads, Path("/"))
    found = [_read(of, needed) for of, needed, _ in parts]
    links = kept_links(device, gpus, nodes)
    known = _known([k for k in (*found, links) if k is not None], paths, device)
    rates, guessed = names.with_links(
        known.rates, gpus, nodes, unified=device.unified, across=links is not None
    )
    return KnownRates(rates, known.measured, (*known.nominal, *guessed))


def kept_links(device: Device, gpus: int, nodes: int) -> _Kept | None:
    """Return cached rates between a number of ranks, and their day; None if there are none.

    For a number of nodes that was not measured what passes between nodes, and between the ranks of
    one, if that was.
    """
    if gpus * nodes == 1:
        return None
    found = _read(_links(device, gpus, nodes), LINKS)
    if found is None and nodes > 1:
        found = _read(_links(device), {names.BETWEEN_NODES})
        inside = kept_links(device, gpus, 1)
        if found is not None and inside is not None:
            found = found[0] | inside[0], min(found[1], inside[1])
    return found


def cached_links(
    ranks: DistContext, device: Device, *, refresh: bool = False, seconds: float = LINK_SECONDS
) -> tuple[_Numbers, str]:
    """Rates between these ranks, and the day: those kept on every node, or measured now and kept.

    All ranks call it together. They hold for a processor and device, and for so many ranks on so
    many nodes. Of several nodes it also measures, and keeps for plans of other numbers of nodes,
    what a node receives while only ranks of different nodes send (and a rank from RAM to RAM), and
    what ranks receive while only those of one node do. Raises what a lost rank raises.
    """
    gpus, nodes = ranks.local_count, ranks.num_nodes
    kept = None if refresh else _read(_links(device, gpus, nodes), LINKS)
    days = ranks.all_gather_object(kept)
    if all(days):
        found = min(days, key=lambda one: one[1])  # one answer, though each node keeps its own
        return found[0], found[1]
    numbers, day = measure_links(ranks, device, seconds), datetime.now(UTC).date().isoformat()
    kinds = [(_links(device, gpus, nodes), numbers)]
    if {*ranks.all_gather_object(gpus)} == {gpus} and nodes > 1:  # as many on each
        by_node = [[*range(first, first + gpus)] for first in range(0, ranks.count, gpus)]
        peers = [*zip(*by_node, strict=True)]
        across = _measure_sets(ranks, peers, device, seconds)
        hosts = across if device.unified else _measure_sets(ranks, peers, CpuDevice(), seconds)
        between = {names.BETWEEN_NODES: gpus * across["all_to_all"]}
        between[BETWEEN_HOSTS] = hosts["all_gather"]
        numbers |= between
        kinds.append((_links(device), between))
        if gpus > 1:
            inside = _measure_sets(ranks, by_node, device, seconds)
            kinds.append((_links(device, gpus, 1), inside))
    if ranks.local_rank == 0:
        for of, rates in kinds:
            _write(of, rates, day)
    ranks.synchronize("keeps rates")  # whoever looks for them now finds them
    return numbers, day


def _links(device: Device, *ranks: int) -> dict[str, Any]:
    """Return a key for the links between ranks and nodes; between any two nodes."""
    computer = {"format": _FORMAT, "processor": cpu_model(), "device": device_name(device)}
    return computer | {"ranks": [*ranks]}


def _measure_sets(
    ranks: DistContext, sets: Sequence[Sequence[int]], device: Device, seconds: float
) -> dict[str, float]:
    """What each rank of these sets receives while all sets are at it: the slowest one's."""
    with contextlib.closing(ranks.new_subgroup(sets)) as subgroup:
        found = measure_links(subgroup, device, seconds)
    slowest = ranks.gather(torch.tensor([*found.values()], dtype=torch.float64)).amin(0)
    return dict(zip(found, slowest.tolist(), strict=True))


def measure_links(
    ranks: DistContext, device: Device, seconds: float = LINK_SECONDS
) -> dict[str, float]:
    """Bytes per second that each rank receives, while all do, by collective: the slowest rank's.

    Of messages as large as a unit's, in the memory that a run sends from.
    """
    nbytes = _LINK_BYTES // ranks.count * ranks.count
    arena = device.reserve(2 * nbytes)
    one, other = arena.view(0, nbytes), arena.view(nbytes, nbytes)
    work: dict[str, Callable[[], Work]] = {
        "all_gather": lambda: ranks.all_gather(one, overlap=True),
        "all_to_all": lambda: ranks.all_to_all(other, one),
    }
    numbers, received = {}, nbytes - nbytes // ranks.count
    for name, collective in work.items():

        def once(collective: Callable[[], Work] = collective) -> None:
            collective().wait()
            device.compute_event().wait()

        once()
        # All must do as many: as the slowest has time for.
        wanted = [int(seconds / len(work) / timed(once)), LEAST_CALLS]
        count = min(int(n) for n in ranks.gather(torch.tensor([max(wanted)])))
        times = torch.tensor([timed(once) for _ in range(count)], dtype=torch.float64)
        numbers[name] = received / float(ranks.gather(times).amax(0).median())
    return numbers


def _known(found: Sequence[_Kept], paths: Sequence[Path], device: Device) -> KnownRates:
    numbers = {name: rate for rates, _ in found for name, rate in rates.items()}
    # A device that was measured, and has no update of its own, has no kernels.
    has_none = names.COMPUTE[0] in numbers and names.DEVICE_UPDATE not in numbers
    without = (names.DEVICE_UPDATE,) if has_none else ()
    rates, guessed = names.completed(numbers, unified=device.unified, without=without)
    if not paths:  # nothing is planned with the disk's
        guessed = tuple(name for name in guessed if name not in names.DISK)
    return KnownRates(rates, min((day for _, day in found), default=None), guessed)


def _parts(
    paths: Sequence[Path], device: Device, io: IoConfig | None, num_threads: int, root: Path
) -> list[_Part]:
    """The processors, and the disks where there are paths."""
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
    parts: list[_Part] = [(processors, needed, lambda s: measure_processors(device, threads, s))]
    if paths:
        per_cpu = (names.DISK_PER_CPU_S,) if device.unified else ()
        disks = computer | {
            "disks": [asdict(mount_of(path, root)) for path in paths],
            "io": settings.model_dump(mode="json", exclude={"timeout_s"}),  # no speed
            "beside_products": device.unified,
        }

        def measure(seconds: float) -> _Numbers:
            return measure_disk(paths, settings, _DISK_SHARE * seconds, busy=device.unified)

        parts.append((disks, {*names.DISK, *per_cpu}, measure))
    return parts


def device_name(device: Device) -> str:
    """Return the name of a compute device; "cpu" for the host."""
    if is_accelerator(device.torch_device):
        return name_of(device.torch_device)
    name = f"{type(device).__name__} on {device.torch_device}"  # of a test's device
    return "cpu" if isinstance(device, CpuDevice) else name


def default_folder() -> Path:
    """`infinity/rates` below `$XDG_CACHE_HOME` or `~/.cache`."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(caches) / "infinity" / "rates"


def _file_of(of: dict[str, Any]) -> Path:
    key = hashlib.sha256(json.dumps(of, sort_keys=True).encode())
    return default_folder() / f"{key.hexdigest()[:32]}.json"


def _read(of: dict[str, Any], needed: Collection[str]) -> _Kept | None:
    """Return cached rates of `of`, if all needed names are there; else None."""
    try:
        entry = json.loads(_file_of(of).read_text(encoding="utf-8"))
        if entry["of"] != of:
            return None
        numbers = {str(name): float(rate) for name, rate in entry["rates"].items()}
        measured = date.fromisoformat(entry["measured"]).isoformat()
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    good = all(math.isfinite(rate) and rate > 0 for rate in numbers.values())
    return (numbers, measured) if good and set(needed) <= set(numbers) <= _NAMES else None


def _write(of: dict[str, Any], numbers: _Numbers, measured: str) -> None:
    path, entry = _file_of(of), {"of": of, "measured": measured, "rates": numbers}
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with atomic_write(path, 0o600) as file:
            file.write(json.dumps(entry, indent=1).encode())


def measure_processors(
    device: Device, num_threads: int, seconds: float = SECONDS
) -> dict[str, float]:
    """All but the disk's rates, by the names of `Rates.numbers`, in their share of `seconds`."""
    share_s = _UPDATE_SHARE * seconds / len(names.UPDATE_FORMATS)
    both = [] if device.unified else _copies(device)[-1]
    with repeating(lambda: _copy_rate(both, 0.0)) if both else contextlib.nullcontext():
        numbers = _host_updates(num_threads, share_s)
    if both:
        numbers |= measure_copies(device, _COPY_SHARE * seconds)
        numbers |= _device_update(device, share_s)
    for precision in names.PRECISIONS:
        share_s = _COMPUTE_SHARE * seconds / len(names.PRECISIONS)
        numbers[f"compute.{precision}"] = _flop_per_s(device, COMPUTE_DTYPES[precision], share_s)
    with torch.inference_mode(False), torch.enable_grad():
        for precision in names.PRECISIONS:
            found = _block_rates(device, COMPUTE_DTYPES[precision], _BETWEEN_SHARE * seconds)
            numbers[f"between.{precision}"], numbers[f"attention.{precision}"] = found
        numbers["logits"] = _logits_per_s(device, _BETWEEN_SHARE * seconds)
    device.return_freed_memory()  # budgets are derived from what is free
    return numbers


def _warm(work: Callable[[], None]) -> float:
    """Seconds of `work`, once its memory is there and its kernels are chosen."""
    work()
    return timed(work)


def _host_updates(num_threads: int, seconds: float) -> dict[str, float]:
    num_chunks, numbers = _num_chunks(), dict[str, float]()
    arena = HostArena(pieces_bytes(num_chunks))
    with CpuKernels(num_threads) as kernels:
        for name in names.UPDATE_FORMATS:
            pieces = pieces_in(arena, num_chunks, MomentFormat(name))

            def update(pieces: Sequence[Piece] = pieces) -> None:
                for first in range(0, len(pieces), 4):  # an optimizer pass takes so many at once
                    kernels.update_all(pieces[first : first + 4])

            update()
            numbers[f"update.{name}"] = calls_per_s(update, seconds) * num_chunks * _CHUNK
    return numbers


def _num_chunks() -> int:
    """Return a number of chunks that no cache holds half of, even with 8-bit moments."""
    machine = read_machine()
    wanted = -(-2 * machine.cache_bytes // ((_BYTES_BESIDE_MOMENTS + 2) * _CHUNK))
    most = machine.host_available_bytes // 8 // (_CHUNK * _LARGEST_BYTES)
    return max(1, min(most, _MOST_CHUNKS, max(wanted, _LEAST_CHUNKS)))


def pieces_bytes(num_chunks: int) -> int:
    """Bytes of an arena for `pieces_in`, whatever the format."""
    return num_chunks * _CHUNK * _LARGEST_BYTES + 8 * PAGE


def pieces_in(
    arena: DeviceArena, num_chunks: int, kind: MomentFormat, *, at_once: int = 1
) -> list[Piece]:
    """Return pieces of a number of chunks: realistic weights and gradients, new moments."""
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
        tensor.view(-1, NUM_NOISE).copy_(noise)  # pages that were only read would be one page
    pieces = []
    for first in range(0, count, size):
        part = slice(first, min(first + size, count))
        kept = [moment.part(part.start, part.stop) for moment in moments]
        rule_params = AdamW(lr=1e-4)
        pieces.append(
            Piece(weight[part], residual[part], kept, gradient[part], rule_params, 100, first=first)
        )
    return pieces


def _device_update(device: Device, seconds: float) -> dict[str, float]:
    """The device's own kernels with fp32 moments; nothing where there are none."""
    free_bytes = device.memory_bytes() or 0
    num_chunks = min(_MOST_CHUNKS, free_bytes // 16 // (_CHUNK * _LARGEST_BYTES))
    if num_chunks == 0 or device.why_no_kernels() is not None:
        return {}
    arena = device.reserve(pieces_bytes(num_chunks))
    # In one piece: what the host does for each is no part of this rate.
    pieces = pieces_in(arena, num_chunks, MomentFormat.FP32, at_once=num_chunks)

    def update() -> None:
        device.update(pieces, after=device.compute_event()).wait()

    update()
    return {"device_update": calls_per_s(update, seconds) * num_chunks * _CHUNK}


def measure_copies(device: Device, seconds: float) -> dict[str, float]:
    """Bytes per second to a device with memory of its own, from it, and of both at once."""
    each = zip(names.COPIES, _copies(device), strict=True)
    return {name: _copy_rate(copies, seconds / len(names.COPIES)) for name, copies in each}


def _copies(device: Device) -> tuple[list[Callable[[Event], Event]], ...]:
    """What starts a copy to the device after an event, one from it, and either."""
    # torch's own pinned memory: `Device.pin` would hold on to it until the device is closed.
    pinned = is_accelerator(device.torch_device)
    arena = device.reserve(2 * _COPY_BYTES)
    there = [arena.view(i * _COPY_BYTES, _COPY_BYTES) for i in range(2)]
    host = [torch.zeros(_COPY_BYTES, dtype=torch.uint8, pin_memory=pinned) for _ in there]

    def bring(after: Event) -> Event:
        return device.copy_h2d(there[0], host[0], after)

    def take(after: Event) -> Event:
        return device.copy_d2h(host[1], there[1], after)

    return [bring], [take], [bring, take]


def _copy_rate(copies: Sequence[Callable[[Event], Event]], seconds: float) -> float:
    """Bytes per second of these kinds in turn, two copies of each under way: none is ever empty."""
    events: list[Event] = [HAPPENED] * len(copies)

    def next_copy(turn: int) -> Event:
        kind = turn % len(copies)
        events[kind] = copies[kind](events[kind])
        return events[kind]

    keep_moving(next_copy, 0.0, depth=1, least=len(copies))
    depth = 2 * len(copies)
    count, seconds = keep_moving(next_copy, seconds, depth=depth, least=LEAST_CALLS)
    return count * _COPY_BYTES / seconds


def _flop_per_s(device: Device, dtype: torch.dtype, seconds: float) -> float:
    """Of the three products of a linear layer, as large as fit into `seconds` several times."""
    noise = make_noise(dtype).to(device.torch_device)
    part_s, rate = seconds / _NUM_PARTS, 0.0
    for size in _MATRIX_SIZES:
        work = _linear_layer(device, noise, size)
        once_s = _warm(work)
        before, rate = rate, size**3 / once_s
        # Where a neighbour holds one of the processors, a small product takes as long as the
        # neighbour's turn: then a larger one takes no longer, and tells more.
        if once_s > seconds or (once_s > part_s and rate < 2 * before):
            break
    if once_s > seconds:
        return _FLOP * rate
    times = max(1, int(part_s / once_s))  # so that waiting for a device does not count
    if device.host_clock:
        return calls_per_s(lambda: work(times), seconds) * times * _FLOP * size**3
    # A GPU lowers its clock once it has drawn much power for a while, as it does in training.
    calls_per_s(lambda: work(times), _WARM_S)
    return calls_per_s(lambda: work(times), seconds, statistics.median) * times * _FLOP * size**3


def _linear_layer(device: Device, noise: Tensor, size: int) -> Callable[..., None]:
    """What forward and backward multiply: kernels for one of these may be far from the others."""
    given = _matrix(noise, size, size)
    weight, out = given.clone(), torch.empty_like(given)

    def work(times: int = 1) -> None:
        for _ in range(times):
            torch.mm(given, weight.t(), out=out)
            torch.mm(given, weight, out=out)
            torch.mm(given.t(), weight, out=out)
        device.compute_event().wait()

    return work


def _block_rates(device: Device, dtype: torch.dtype, seconds: float) -> tuple[float, float]:
    """What stands between the products of a block, in bytes per second, and FLOP of attention.

    Bytes are counted as `plan.cost` counts them, at a context that attention takes no longer for;
    attention's are those of a longer one, without what the short one takes.
    """
    width, most = _WIDTH[device.unified], _MOST_TOKENS[device.unified]
    if (free_bytes := device.memory_bytes()) is not None:
        most = min(most, free_bytes // _MEMORY_PART // (_TOKEN_WIDTHS * width * dtype.itemsize))
    work, tokens = _doubled(lambda n: _block(device, dtype, n), 2 * _SHORT, most, seconds)
    values = tokens * 16 * width  # its matrices would take and give 16 h
    passed = values * (names.PASSES_FORWARD + names.PASSES_BACKWARD) * dtype.itemsize
    between = passed * calls_per_s(work, seconds, statistics.median)
    longest, times = min(_LONG, tokens), []
    for context in (_SHORT, longest):
        work = _attention(device, dtype, tokens, context)
        work()
        times.append(1 / calls_per_s(work, seconds, statistics.median))
    short_s, long_s = times
    longer_s = max(long_s - short_s, long_s / 10)  # on a busy machine the short one may be late
    return between, 7 * tokens * width * (longest - _SHORT) / longer_s


def _block(device: Device, dtype: torch.dtype, tokens: int) -> Callable[[], None]:
    """A GPT block without its products: norms, attention, an activation function, residual sums."""
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
    """Return the rate of attention in the block alone."""
    noise = make_noise(dtype).to(device.torch_device)
    qkv = _leaf(noise, tokens, 3 * _WIDTH[device.unified])
    return lambda: _backward(device, [_attend(qkv, context)], [qkv])


def _attend(qkv: Tensor, context: int) -> Tensor:
    tokens, width = len(qkv), qkv.shape[1] // 3
    heads = qkv.view(-1, context, 3, width // _HEAD, _HEAD)
    query, key, value = heads.permute(2, 0, 3, 1, 4).unbind()
    found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return found.transpose(1, 2).reshape(tokens, width)


def _backward(device: Device, made: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    for found in torch.autograd.grad(made, leaves, [one.detach() for one in made]):
        found.sum(0)  # of what products made: the gradients of their biases
    device.compute_event().wait()


def _logits_per_s(device: Device, seconds: float) -> float:
    """Of cross entropy in fp32 of bf16 logits, forward and backward."""
    noise = make_noise(torch.bfloat16).to(device.torch_device)

    def of(rows: int) -> Callable[[], None]:
        logits = _leaf(noise, rows, _NUM_LOGITS)
        targets = torch.zeros(rows, dtype=torch.long, device=device.torch_device)

        def work() -> None:
            torch.autograd.grad(F.cross_entropy(logits.float(), targets), logits)
            device.compute_event().wait()

        return work

    work, rows = _doubled(of, _LEAST_ROWS, _MOST_ROWS[device.unified], seconds)
    return rows * _NUM_LOGITS * calls_per_s(work, seconds, statistics.median)


def _doubled(
    of: Callable[[int], Callable[[], None]], size: int, most: int, seconds: float
) -> tuple[Callable[[], None], int]:
    """Work `of` a size that was doubled while it took less than `seconds`, and the size."""
    while _warm(work := of(size)) < seconds and 2 * size <= most:
        size *= 2
    return work, size


def _leaf(noise: Tensor, rows: int, columns: int) -> Tensor:
    return _matrix(noise, rows, columns).requires_grad_()


def _matrix(noise: Tensor, rows: int, columns: int) -> Tensor:
    """Values of noise; rows may well repeat."""
    count = rows * columns
    return noise.repeat(-(-count // NUM_NOISE))[:count].view(rows, columns)

"""Rates of this machine (disk, copies, updates, compute), measured once and cached.

Each rate is measured briefly and through the code of a run: the disk tier, the `Device`, the
optimizer's kernels on chunks of parameters. Rates are measured separately, with two exceptions that
model a training step: if the host computes, its processors are busy while the disk is measured; if
it does not, copies run while the host's updates are measured. No files or memory are left behind.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from infinity.config.schema import IoConfig
from infinity.errors import InfinityWarning
from infinity.plan import rates as names
from infinity.plan.load import ProcessorTimes, describe_other_load
from infinity.plan.machine import cpu_model, mount_of, read_machine, threads_for
from infinity.plan.rates import Rates
from infinity.profiling.link_rates import read_cached_links
from infinity.profiling.processor_rates import SECONDS, measure_processors
from infinity.profiling.rate_cache import FORMAT, CachedRates, device_name, read_cache, write_cache
from infinity.storage.device import Device
from infinity.storage.disk_rates import measure_disk

# Description of the hardware, required names of rates, and a function that measures them.
_Measurement = tuple[dict[str, Any], set[str], Callable[[float], dict[str, float]]]


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
        entry = None if refresh else read_cache(description, needed)
        if entry is None:
            before = ProcessorTimes.now()
            entry = measure(seconds), datetime.now(UTC).date().isoformat()
            if load := describe_other_load(before, ProcessorTimes.now()):
                loads.add(load)
            else:
                write_cache(description, *entry)
        entries.append(entry)
    if loads:
        warnings.warn(
            f"{max(loads)} while rates were measured: they may be too low, are not cached, and are "
            "measured again next time",
            InfinityWarning,
            stacklevel=2,
        )
    return _combined(entries, paths, device)


def cached_or_nominal_rates(
    paths: Sequence[Path],
    device: Device,
    *,
    io: IoConfig | None = None,
    num_threads: int = 0,
    gpus: int = 1,
    nodes: int = 1,
) -> KnownRates:
    """Return the rates that `cached_rates` and `link_rates.cached_links` stored; measure none.

    Missing rates are nominal and listed in `nominal`. More than one rank (`gpus` on each of
    `nodes`) also has links. Raises `MachineError` for a missing path.
    """
    measurements = _measurements(paths, device, io, num_threads, Path("/"))
    entries = [read_cache(description, needed) for description, needed, _ in measurements]
    links = read_cached_links(device, gpus, nodes)
    known = _combined([k for k in (*entries, links) if k is not None], paths, device)
    rates, nominal = names.with_links(
        known.rates, gpus, nodes, unified=device.unified, across=links is not None
    )
    return KnownRates(rates, known.measured, (*known.nominal, *nominal))


def _combined(entries: Sequence[CachedRates], paths: Sequence[Path], device: Device) -> KnownRates:
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
        "format": FORMAT,
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
        needed = {*names.DISK, *per_cpu}
        # More than half of the time: the disk limits most runs, and its rate varies most.
        measurements.append(
            (disks, needed, lambda s: measure_disk(paths, settings, 0.55 * s, busy=device.unified))
        )
    return measurements

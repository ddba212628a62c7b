"""Measured rates on disk, so that each machine and each path is measured once.

An entry is one JSON file below `$XDG_CACHE_HOME/infinity/rates` or `~/.cache/infinity/rates`: what
was measured on what, the day, the rates. It is written beside its final name and renamed, so that
a reader sees all of it or nothing, and processes may race. Whatever is damaged, or is about
something else, is as good as none; a folder that cannot be used only makes the cache forgetful.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import torch

from infinity.bench.disk_rates import measure_disk
from infinity.bench.rates import DISK_SHARE, SECONDS, measure_processors
from infinity.config import IoConfig
from infinity.memory.device import CpuDevice, Device
from infinity.plan.machine import cpu_model, mount_of, read_machine
from infinity.plan.rates import (
    COMPUTE,
    COPIES,
    DEVICE_UPDATE,
    DISK,
    UPDATE,
    Rates,
    completed,
    nominal,
    rates_origin,
)
from infinity.stable import atomic_write

FORMAT = 1  # counts up when what is measured changes its meaning
_Numbers = dict[str, float]
# What an entry may hold; a stranger's number must not get into a plan.
_NAMES = {*DISK, *COPIES, *UPDATE, *COMPUTE, DEVICE_UPDATE}
# Settings of the disk tier that no speed depends on.
_OTHER_SETTINGS = {"stuck_after_s"}


@dataclass(frozen=True)
class MeasuredRates:
    """Rates, and the day they were measured; of several parts the oldest."""

    rates: Rates
    measured: str


@dataclass(frozen=True)
class KnownRates:
    """Rates of which some were measured; `nominal` names those that were not.

    `measured` is the day of the oldest part, None where nothing was measured.
    """

    rates: Rates
    nominal: tuple[str, ...]
    measured: str | None

    @property
    def origin(self) -> str:
        """Where they come from, for people."""
        nominal = self.nominal if self.measured else self.rates.numbers()
        return rates_origin(self.rates, tuple(nominal), self.measured)


def cached_rates(
    paths: Sequence[Path],
    device: Device,
    *,
    io: IoConfig | None = None,
    num_threads: int = 0,
    refresh: bool = False,
    seconds: float = SECONDS,
    folder: Path | None = None,
    root: Path = Path("/"),
) -> MeasuredRates:
    """The rates of this machine with these paths: those kept, or else measured now and kept.

    What is kept holds for a processor, its count, the RAM, the device and the threads; the disk's
    also for what is mounted at each path and the settings in `io`. `num_threads` 0 is as many as a
    run takes. `refresh` measures whatever is kept. `folder` replaces the default, `root` the place
    of /proc and /sys. Raises what `measure_rates` raises.
    """
    io = io or IoConfig()
    computer = _computer(num_threads, root)
    threads = int(computer["num_threads"])
    cache = _Cache(default_folder() if folder is None else folder, refresh)
    numbers, measured = cache.find(
        _processors_of(computer, device),
        _needed(device),
        lambda: measure_processors(device, threads, seconds),
    )
    if paths:
        disk, disk_measured = cache.find(
            _disks_of(computer, paths, io, root),
            set(DISK),
            lambda: measure_disk(paths, io, DISK_SHARE * seconds),
        )
        measured = min(measured, disk_measured)
    else:
        defaults = nominal(device.unified).numbers()
        disk = {name: defaults[name] for name in DISK}
    return MeasuredRates(Rates.of(numbers | disk), measured)


def kept_rates(
    paths: Sequence[Path],
    device: Device,
    *,
    io: IoConfig | None = None,
    num_threads: int = 0,
    folder: Path | None = None,
    root: Path = Path("/"),
) -> KnownRates:
    """What `cached_rates` has kept of this machine and these paths; nothing is measured.

    What was not kept is nominal, and is said to be. Raises `MachineError` for a path that is not
    there.
    """
    computer = _computer(num_threads, root)
    cache = _Cache(default_folder() if folder is None else folder, refresh=False)
    numbers: _Numbers = {}
    days = []
    parts = [(_processors_of(computer, device), _needed(device))]
    if paths:
        parts.append((_disks_of(computer, paths, io or IoConfig(), root), set(DISK)))
    for of, needed in parts:
        kept = cache.kept(of, needed)
        if kept is not None:
            numbers |= kept[0]
            days.append(kept[1])
    # A device that was measured, and has no update of its own, has no kernels.
    without = {DEVICE_UPDATE} - numbers.keys() if numbers.keys() & set(COMPUTE) else set()
    rates, guessed = completed(numbers, unified=device.unified, without=without)
    if not paths:  # nothing is planned with the disk's
        guessed = tuple(name for name in guessed if name not in DISK)
    return KnownRates(rates, guessed, min(days, default=None))


def _computer(num_threads: int, root: Path) -> dict[str, Any]:
    machine = read_machine(root=root)
    return {
        "format": FORMAT,
        "processor": cpu_model(root),
        "num_cpus": machine.num_cpus,
        "ram_gib": round(machine.host_ram_bytes / 2**30),
        "num_threads": num_threads or machine.num_cpus,
    }


def _processors_of(computer: dict[str, Any], device: Device) -> dict[str, Any]:
    """What describes all rates but the disk's."""
    torch_facts = {"torch": torch.__version__, "torch_threads": torch.get_num_threads()}
    return computer | {"device": device_name(device)} | torch_facts


def _disks_of(
    computer: dict[str, Any], paths: Sequence[Path], io: IoConfig, root: Path
) -> dict[str, Any]:
    """What describes the disk's rates."""
    alone = {name: fact for name, fact in computer.items() if name != "num_threads"}
    return (
        alone
        | {"disks": [asdict(mount_of(path, root)) for path in paths]}
        | {"io": io.model_dump(mode="json", exclude=_OTHER_SETTINGS)}
    )


def _needed(device: Device) -> set[str]:
    return {*UPDATE, *COMPUTE, *(() if device.unified else COPIES)}


def default_folder() -> Path:
    """`infinity/rates` below `$XDG_CACHE_HOME` or `~/.cache`."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(caches) / "infinity" / "rates"


def device_name(device: Device) -> str:
    """What a compute device calls itself; "cpu" for the host."""
    if device.torch_device.type == "cuda":
        return torch.cuda.get_device_name(device.torch_device)
    if isinstance(device, CpuDevice):
        return "cpu"
    # A test's device: nobody may take what is measured of it for the host's.
    return f"{type(device).__name__} on {device.torch_device}"


class _Cache:
    """A folder of entries; with `refresh` nothing in it is looked at."""

    def __init__(self, folder: Path, refresh: bool) -> None:
        self._folder = folder
        self._refresh = refresh

    def find(
        self, of: dict[str, Any], needed: Collection[str], measure: Callable[[], _Numbers]
    ) -> tuple[_Numbers, str]:
        """The numbers of what `of` describes, and their day; `needed` names must be among them."""
        kept = self.kept(of, needed)
        if kept is not None:
            return kept
        numbers = measure()
        today = datetime.now(UTC).date().isoformat()
        _write(self._path(of), {"of": of, "measured": today, "rates": numbers})
        return numbers, today

    def kept(self, of: dict[str, Any], needed: Collection[str]) -> tuple[_Numbers, str] | None:
        """The same if it was measured before, else None."""
        return None if self._refresh else _read(self._path(of), of, needed)

    def _path(self, of: dict[str, Any]) -> Path:
        key = json.dumps(of, sort_keys=True)
        return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _read(path: Path, of: dict[str, Any], needed: Collection[str]) -> tuple[_Numbers, str] | None:
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
        if entry["of"] != of:
            return None
        numbers = {str(name): float(rate) for name, rate in entry["rates"].items()}
        measured = date.fromisoformat(entry["measured"]).isoformat()
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    good = all(math.isfinite(rate) and rate > 0 for rate in numbers.values())
    return (numbers, measured) if good and set(needed) <= set(numbers) <= _NAMES else None


def _write(path: Path, entry: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with atomic_write(path, 0o600) as file:
            file.write(json.dumps(entry, indent=1).encode())

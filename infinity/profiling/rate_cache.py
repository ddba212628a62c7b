"""Cache of measured rates in JSON files.

The cache has one file for the processors, one for each measured set of paths and number of ranks,
and one for traffic between nodes, below `$XDG_CACHE_HOME/infinity/rates` or
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
from collections.abc import Collection
from datetime import date
from pathlib import Path
from typing import Any

from infinity.common.accelerators import is_accelerator, name_of
from infinity.common.files import atomic_write
from infinity.plan import rates as names
from infinity.plan.plan import BETWEEN_HOSTS, LINKS
from infinity.storage.device import CpuDevice, Device

FORMAT = 1  # of cache entries; increment when the meaning of a rate changes
# Accepted names of rates: a damaged cache must not influence a plan.
_NAMES = {
    *names.DISK,
    names.DISK_PER_CPU_S,
    *names.COPIES,
    *names.UPDATE,
    *names.COMPUTE,
    names.DEVICE_UPDATE,
    *LINKS,
    names.BETWEEN_NODES,
    BETWEEN_HOSTS,
}
CachedRates = tuple[dict[str, float], str]  # rates by name, and the day of the measurement


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


def read_cache(description: dict[str, Any], needed: Collection[str]) -> CachedRates | None:
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


def write_cache(description: dict[str, Any], numbers: dict[str, float], measured: str) -> None:
    path = _cache_path(description)
    entry = {"of": description, "measured": measured, "rates": numbers}
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with atomic_write(path, 0o600) as file:
            file.write(json.dumps(entry, indent=1).encode())

"""What this computer offers: memory, processors, disks and limits, read and never guessed.

Everything is read below a `root`, so that a test can hand in a made-up computer. A file that is
missing or unreadable means "no such limit"; only a path that the user named is an error.

Note: the container's truth. /proc/meminfo shows the whole host inside a container. The kernel kills
by the memory cgroup, and any ancestor may be the one that is full, so every number here is the
minimum over the host and all levels of the cgroup, version 1 and version 2.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from infinity.common.sizes import parse_size
from infinity.errors import ConfigError, MachineError

# cgroup v1 says "no limit" with the largest page-aligned 63-bit number.
_NO_LIMIT_BYTES = 2**62
# The share of memory that is ours to plan with; the rest is for activations on a CPU device, page
# cache, the data loader and whoever else lives on the machine.
HOST_BUDGET_SHARE = 0.8
# Environment variable: how much RAM a machine will have whose RAM grows as it is used.
HOST_RAM = "INFINITY_HOST_RAM"


@dataclass(frozen=True)
class Mount:
    """The file system of a path; its fields identify a drive."""

    device: str
    """"major:minor" of stat's st_dev."""
    source: str
    """What is mounted, such as "/dev/nvme0n1p2" or "server:/export"; "" where it is not told."""
    file_system: str
    """"ext4"; "" where it is not told."""


@dataclass(frozen=True)
class Machine:
    """Facts about one computer, as seen by this process. Sizes are in bytes."""

    host_ram_bytes: int
    """RAM this process may ever use: the minimum of the host's and every cgroup's limit."""
    host_available_bytes: int
    """RAM that can be taken now without swapping or being killed."""
    process_rss_bytes: int
    """RAM this process holds already."""
    num_cpus: int
    """Processors this process may use: the affinity mask, cut to the cgroup's quota, at least 1."""
    disk_free_bytes: tuple[tuple[Path, int], ...]
    """Space an ordinary user may still fill, for each path that was asked about."""
    memlock_bytes: int | None
    """How much may be locked in memory; `None` is unlimited."""
    thp_mode: str
    """Transparent huge pages: "always", "madvise", "never" or "unknown"."""
    cache_bytes: int = 0
    """Of all last-level caches together; 0 where it is not told."""
    cpu_quota: int | None = None
    """Processors' time that the cgroup has, for all its processes together; `None` is unlimited."""


def read_machine(paths: Iterable[str | os.PathLike[str]] = (), root: Path = Path("/")) -> Machine:
    """Return the facts, with the free space of the disk below each of `paths`.

    `root` replaces "/" as the place of /proc and /sys, not of `paths`. Raises `MachineError` if a
    path cannot be looked at or if the total memory cannot be read.
    """
    meminfo = read_meminfo(root)
    if "MemTotal" not in meminfo:
        because = f"{root / 'proc/meminfo'} has no MemTotal"
        raise MachineError("the size of the RAM is unknown", because=because)
    total_bytes = meminfo["MemTotal"]
    available_bytes = meminfo.get("MemAvailable", meminfo.get("MemFree", total_bytes))
    for limit_bytes, room_bytes in _memory_limits(root):
        total_bytes = min(total_bytes, limit_bytes)
        available_bytes = min(available_bytes, room_bytes)
    locked = _found(root / "proc/self/limits", r"^Max locked memory\s+([0-9]+)\s")
    allowed, quota = _num_allowed_cpus(root), _cpu_quota(root)
    huge_pages = root / "sys/kernel/mm/transparent_hugepage/enabled"
    return Machine(
        host_ram_bytes=total_bytes,
        host_available_bytes=max(0, available_bytes),
        process_rss_bytes=_kib(root / "proc/self/status", r"^VmRSS:\s*([0-9]+) kB$"),
        num_cpus=allowed if quota is None else min(allowed, quota),
        disk_free_bytes=tuple((Path(path), disk_free_bytes(Path(path))) for path in paths),
        memlock_bytes=int(locked) if locked else None,
        thp_mode=_found(huge_pages, r"\[(\w+)\]") or "unknown",
        cache_bytes=_cache_bytes(root),
        cpu_quota=quota,
    )


def memory_room(root: Path = Path("/")) -> tuple[int, int]:
    """Return (limit of this process, bytes left of it) at this moment.

    Of the machine and all levels of its cgroup, the one with least left. Takes well below 1 ms.
    """
    meminfo = read_meminfo(root)
    total_bytes = meminfo.get("MemTotal", 0)
    rooms = [(total_bytes, meminfo.get("MemAvailable", total_bytes)), *_memory_limits(root)]
    return min(rooms, key=lambda limit_and_room: limit_and_room[1])


def high_water_bytes(root: Path = Path("/")) -> int:
    """Return the peak RAM of this process; 0 if the kernel does not report it."""
    return _kib(root / "proc/self/status", r"^VmHWM:\s*([0-9]+) kB$")


def shared_rss_bytes(root: Path = Path("/")) -> int:
    """Return resident RAM that other processes may map, too; 0 if not reported."""
    return _kib(root / "proc/self/status", r"^RssShmem:\s*([0-9]+) kB$")


def default_host_budget_bytes(machine: Machine) -> int:
    """Return the host budget where none is given: 80 % of what this process may come to hold."""
    reachable_bytes = machine.host_available_bytes + machine.process_rss_bytes
    return int(HOST_BUDGET_SHARE * min(machine.host_ram_bytes, reachable_bytes))


def disk_free_bytes(path: Path) -> int:
    """Return the space an ordinary user may still fill on the disk of `path`, in bytes.

    Raises `MachineError` if `path` is no directory, or cannot be looked at.
    """
    try:
        facts = os.statvfs(path)
    except OSError as error:
        raise _unseen(path, "free space is unknown", error) from error
    if not path.is_dir():  # the disk of a file is known, but nothing can be kept there
        raise MachineError(f"{path} is not a directory", remedy="give a directory on that drive")
    return facts.f_bavail * facts.f_frsize


def may_have_gpu(root: Path = Path("/")) -> bool:
    """Return whether torch could find a GPU: CUDA's driver or ROCm's device is there.

    For who would rather not import torch, which takes seconds, to hear that there is none.
    """
    if (root / "dev/kfd").exists():
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def cpu_model(root: Path = Path("/")) -> str:
    """Return the processor's name, or its architecture where that is not known."""
    name = _found(root / "proc/cpuinfo", r"^model name\s*:\s*(.+)$")
    return name.strip() if name else platform.machine()


def mount_of(path: Path, root: Path = Path("/")) -> Mount:
    """Return what `path` lies on; `root` replaces "/" as the place of /proc, not of `path`.

    Raises `MachineError` if `path` does not exist or cannot be looked at.
    """
    try:
        number = os.stat(path).st_dev
        resolved = os.path.realpath(path)
    except OSError as error:
        raise _unseen(path, "cannot be looked at", error) from error
    best, source, kind = "", "", ""
    for _, mount_point, what in mounts(root):
        inside = (resolved + "/").startswith(mount_point.rstrip("/") + "/")
        # What is mounted later on the same path hides what was there.
        if inside and len(mount_point) >= len(best):
            best, source, kind = mount_point, what[1], what[0]
    return Mount(f"{os.major(number)}:{os.minor(number)}", source, kind)


def _unseen(path: Path, what: str, error: OSError) -> MachineError:
    if isinstance(error, FileNotFoundError):
        return MachineError(f"{path} does not exist", remedy=f"mkdir -p {path}")
    return MachineError(f"{path}: {what}", because=error.strerror)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _found(path: Path, pattern: str) -> str | None:
    """Return the group of a pattern in a file; `None` where there is no such line, or no file."""
    match = re.search(pattern, _read(path) or "", re.MULTILINE)
    return match[1] if match else None


def _kib(path: Path, pattern: str) -> int:
    """Return a number of KiB in a file as bytes, 0 if missing."""
    return int(_found(path, pattern) or 0) * 1024


def _number(path: Path) -> int | None:
    """Return the number a file holds; `None` for "max", for v1's "no limit" and for no file."""
    with suppress(ValueError):
        number = int((_read(path) or "").strip())
        return number if 0 <= number < _NO_LIMIT_BYTES else None
    return None


def read_meminfo(root: Path) -> dict[str, int]:
    """Return the fields of /proc/meminfo: bytes, and numbers of huge pages.

    Some virtual machines get more RAM as they use it: the environment variable `HOST_RAM` sets
    what they will have.

    Raises:
        ConfigError: The variable is not a size.
    """
    text = _read(root / "proc/meminfo") or ""
    numbers = re.findall(r"^(\w+):\s+([0-9]+)( kB)?", text, re.MULTILINE)
    found = {name: int(number) * (1024 if unit else 1) for name, number, unit in numbers}
    if (size := os.environ.get(HOST_RAM)) and "MemTotal" in found:
        try:
            more = max(parse_size(size) - found["MemTotal"], 0)
        except ConfigError as error:
            what = f"the environment variable {HOST_RAM} is {size!r}"
            remedy = f'set {HOST_RAM}="128GiB", or unset it'
            raise ConfigError(what, because=error.what, remedy=remedy) from None
        for name in ("MemTotal", "MemAvailable"):
            if name in found:
                found[name] += more
    return found


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, room left) in bytes for every level of the cgroups that has a limit."""
    for controller, limit, usage, reclaimable in (
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ("", "memory.max", "memory.current", "inactive_file"),
    ):
        for level in _levels(root, controller):
            limit_bytes = _number(level / limit)
            if limit_bytes is None:
                continue
            # Clean page cache counts as used, but is dropped before anyone is killed.
            stat = dict(re.findall(r"^(\w+) ([0-9]+)$", _read(level / "memory.stat") or "", re.M))
            used_bytes = (_number(level / usage) or 0) - int(stat.get(reclaimable, 0))
            yield limit_bytes, limit_bytes - max(0, used_bytes)


def _levels(root: Path, controller: str) -> Iterator[Path]:
    """Yield this process's cgroup directory and its ancestors; controller "" is version 2."""
    mount = _cgroup_mount(root, controller)
    path = cgroup_path(root, controller)
    if mount is None or path is None:
        return
    mount_root, mount_point = mount
    # In a container the mount may show only a part of the tree the path is written against.
    if mount_root != "/" and (path + "/").startswith(mount_root + "/"):
        path = path[len(mount_root) :]
    parts = [part for part in path.split("/") if part]
    if ".." in parts:
        parts = []
    top = root / mount_point.lstrip("/")
    for depth in range(len(parts), -1, -1):
        level = top.joinpath(*parts[:depth])
        if level.is_dir():
            yield level


def cgroup_path(root: Path, controller: str) -> str | None:
    """Return the path of this process's cgroup; the limit is its own or that of one above it."""
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, _, fields = line.partition(":")
        controllers, _, path = fields.partition(":")
        if controller in controllers.split(","):
            return path
    return None


def _cgroup_mount(root: Path, controller: str) -> tuple[str, str] | None:
    """Return (the part of the hierarchy that is mounted, where) or `None`."""
    for mount_root, mount_point, what in mounts(root):
        is_v1 = what[0] == "cgroup" and bool(controller) and controller in what[2].split(",")
        if is_v1 or (what[0] == "cgroup2" and not controller):
            return mount_root, mount_point
    return None


def mounts(root: Path) -> Iterator[tuple[str, str, list[str]]]:
    """Yield (part that is mounted, where, [type, source, options]) of every mount."""
    for line in (_read(root / "proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        where, what = before.split(), after.split()
        if len(where) >= 5 and len(what) >= 3:
            yield where[3], _unescaped(where[4]), [what[0], _unescaped(what[1]), what[2]]


def _unescaped(name: str) -> str:
    """Decode escaped blanks and backslashes of mountinfo."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), name)


def threads_for(wanted: int, num_cpus: int, ranks: int = 1, *, unified: bool) -> int:
    """Return threads of one rank's optimizer kernels, where `ranks` share the processors.

    `wanted` are those of all ranks, 0 what suits the machine: every CPU; but beside a device with
    memory of its own three of each rank's are left to the threads that launch its work (training,
    backward and the optimizer pass).
    """
    return max((wanted or num_cpus) // ranks - (0 if wanted or unified else _LAUNCHING), 1)


_LAUNCHING = 3


def _cpu_quota(root: Path) -> int | None:
    """The least of all levels', at least 1."""
    found = []
    for level in _levels(root, ""):
        quota, _, period = (_read(level / "cpu.max") or "").strip().partition(" ")
        if quota.isdigit() and period.isdigit():
            found.append(_ceil(int(quota), int(period)))
    for level in _levels(root, "cpu"):
        quota_us = _number(level / "cpu.cfs_quota_us")
        period_us = _number(level / "cpu.cfs_period_us")
        if quota_us and period_us:
            found.append(_ceil(quota_us, period_us))
    return max(1, min(found)) if found else None


def _ceil(numerator: int, denominator: int) -> int:
    return -(-numerator // max(1, denominator))


def _num_allowed_cpus(root: Path) -> int:
    """Count the affinity mask, as `os.sched_getaffinity` would, from a file under `root`."""
    allowed = _found(root / "proc/self/status", r"^Cpus_allowed_list:\s*([0-9,-]+)$")
    if allowed is None:
        return len(os.sched_getaffinity(0))
    count = 0
    for part in allowed.split(","):
        first, _, last = part.partition("-")
        count += int(last or first) - int(first) + 1
    return count


@cache
def _cache_bytes(root: Path) -> int:
    """Add up the caches of the highest level, each once however many processors share it.

    Read once: these are hundreds of files where there are many processors.
    """
    caches: dict[int, dict[str, int]] = {}
    for folder in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cache/index[0-9]*"):
        level = _number(folder / "level")
        size = re.fullmatch(r"([0-9]+)K", (_read(folder / "size") or "").strip())
        shared_by = (_read(folder / "shared_cpu_list") or folder.parent.parent.name).strip()
        if level is not None and size is not None:
            caches.setdefault(level, {})[shared_by] = int(size[1]) * 1024
    return sum(caches[max(caches)].values()) if caches else 0

"""Memory, processors, disks and limits of this machine, as the kernel reports them.

All files are read below a `root`, so that tests can describe another machine. A missing or
unreadable file means that there is no such limit; only a path passed by the user raises.

[Note: container limits]
Inside a container /proc/meminfo shows the memory of the host. The OOM killer acts on the memory
cgroup, and any ancestor may be the full one, so every number here is the minimum over the host and
all levels of the cgroup, versions 1 and 2.
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

# cgroup v1 reports "no limit" as the largest page-aligned 63-bit number.
_NO_LIMIT_BYTES = 2**62
# Share of the available RAM in the default host budget. The remainder is for the page cache, the
# data loader and other processes, and on a CPU device for activations.
HOST_BUDGET_SHARE = 0.8
# Environment variable: the RAM that a virtual machine with growing memory can reach.
HOST_RAM = "INFINITY_HOST_RAM"


@dataclass(frozen=True)
class Mount:
    """The file system of a path; its fields identify a drive."""

    device: str
    """"major:minor" of stat's st_dev."""
    source: str
    """Mounted source, such as "/dev/nvme0n1p2" or "server:/export"; "" if unknown."""
    file_system: str
    """Type of the file system, such as "ext4"; "" if unknown."""


@dataclass(frozen=True)
class Machine:
    """Facts about one machine, as seen by this process. Sizes are in bytes."""

    host_ram_bytes: int
    """RAM limit of this process: the minimum of the host's RAM and every cgroup's limit."""
    host_available_bytes: int
    """RAM that can be allocated now without swapping or being killed."""
    process_rss_bytes: int
    """Resident RAM of this process."""
    num_cpus: int
    """Processors this process may use: the affinity mask, limited by the cgroup's quota; >= 1."""
    disk_free_bytes: tuple[tuple[Path, int], ...]
    """Free bytes for an unprivileged user, by path."""
    memlock_bytes: int | None
    """Limit of locked memory; `None` is unlimited."""
    thp_mode: str
    """Transparent huge pages: "always", "madvise", "never" or "unknown"."""
    cache_bytes: int = 0
    """Total of all last-level caches; 0 if unknown."""
    cpu_quota: int | None = None
    """Processors' worth of time for all processes of the cgroup; `None` is unlimited."""


def read_machine(paths: Iterable[str | os.PathLike[str]] = (), root: Path = Path("/")) -> Machine:
    """Return the facts about this machine, with the free disk space at each of `paths`.

    `root` replaces "/" for /proc and /sys, but not for `paths`. Raises `MachineError` if a path
    cannot be accessed, or the total memory cannot be read.
    """
    meminfo = read_meminfo(root)
    if "MemTotal" not in meminfo:
        because = f"{root / 'proc/meminfo'} has no MemTotal"
        raise MachineError("the size of the RAM is unknown", because=because)
    total_bytes = meminfo["MemTotal"]
    available_bytes = meminfo.get("MemAvailable", meminfo.get("MemFree", total_bytes))
    for limit_bytes, free_bytes in _memory_limits(root):
        total_bytes = min(total_bytes, limit_bytes)
        available_bytes = min(available_bytes, free_bytes)
    memlock = _search(root / "proc/self/limits", r"^Max locked memory\s+([0-9]+)\s")
    num_allowed = _num_allowed_cpus(root)
    quota = _cpu_quota(root)
    huge_pages = root / "sys/kernel/mm/transparent_hugepage/enabled"
    return Machine(
        host_ram_bytes=total_bytes,
        host_available_bytes=max(0, available_bytes),
        process_rss_bytes=_kib_as_bytes(root / "proc/self/status", r"^VmRSS:\s*([0-9]+) kB$"),
        num_cpus=num_allowed if quota is None else min(num_allowed, quota),
        disk_free_bytes=tuple((Path(path), disk_free_bytes(Path(path))) for path in paths),
        memlock_bytes=int(memlock) if memlock else None,
        thp_mode=_search(huge_pages, r"\[(\w+)\]") or "unknown",
        cache_bytes=_cache_bytes(root),
        cpu_quota=quota,
    )


def memory_headroom(root: Path = Path("/")) -> tuple[int, int]:
    """Return (memory limit, free bytes below it) of this process now.

    The tightest of the machine and all levels of its cgroup. Takes well below 1 ms.
    """
    meminfo = read_meminfo(root)
    total_bytes = meminfo.get("MemTotal", 0)
    limits = [(total_bytes, meminfo.get("MemAvailable", total_bytes)), *_memory_limits(root)]
    return min(limits, key=lambda limit_and_free: limit_and_free[1])


def peak_ram_bytes() -> int:
    """Return the peak RAM of this process; 0 if the kernel does not report it."""
    return _kib_as_bytes(Path("/proc/self/status"), r"^VmHWM:\s*([0-9]+) kB$")


def shared_rss_bytes() -> int:
    """Return the resident shared memory of this process; 0 if the kernel does not report it."""
    return _kib_as_bytes(Path("/proc/self/status"), r"^RssShmem:\s*([0-9]+) kB$")


def default_host_budget_bytes(machine: Machine) -> int:
    """Return the host budget if none is configured: 80 % of the RAM this process can reach."""
    reachable_bytes = machine.host_available_bytes + machine.process_rss_bytes
    return int(HOST_BUDGET_SHARE * min(machine.host_ram_bytes, reachable_bytes))


def disk_free_bytes(path: Path) -> int:
    """Return the free bytes for an unprivileged user on the disk of `path`.

    Raises `MachineError` if `path` is not a directory, or cannot be accessed.
    """
    try:
        stats = os.statvfs(path)
    except OSError as error:
        raise _access_error(path, "free space is unknown", error) from error
    if not path.is_dir():  # statvfs accepts a file, but nothing can be stored below one
        raise MachineError(f"{path} is not a directory", remedy="give a directory on that drive")
    return stats.f_bavail * stats.f_frsize


def may_have_gpu() -> bool:
    """Return True if CUDA's driver or ROCm's device exists, so that torch may find a GPU.

    Avoids an import of torch, which takes seconds, on machines without a GPU.
    """
    if Path("/dev/kfd").exists():
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def cpu_model(root: Path = Path("/")) -> str:
    """Return the processor's name, or its architecture if the name is unknown."""
    name = _search(root / "proc/cpuinfo", r"^model name\s*:\s*(.+)$")
    return name.strip() if name else platform.machine()


def mount_of(path: Path, root: Path = Path("/")) -> Mount:
    """Return the mount of `path`; `root` replaces "/" for /proc, but not for `path`.

    Raises `MachineError` if `path` does not exist or cannot be accessed.
    """
    try:
        device_number = os.stat(path).st_dev
        resolved = os.path.realpath(path)
    except OSError as error:
        raise _access_error(path, "cannot be looked at", error) from error
    longest, source, file_system = "", "", ""
    for _, mount_point, fields in mounts(root):
        inside = (resolved + "/").startswith(mount_point.rstrip("/") + "/")
        # A later mount on the same path hides an earlier one.
        if inside and len(mount_point) >= len(longest):
            longest, source, file_system = mount_point, fields[1], fields[0]
    return Mount(f"{os.major(device_number)}:{os.minor(device_number)}", source, file_system)


def _access_error(path: Path, message: str, error: OSError) -> MachineError:
    if isinstance(error, FileNotFoundError):
        return MachineError(f"{path} does not exist", remedy=f"mkdir -p {path}")
    return MachineError(f"{path}: {message}", because=error.strerror)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _search(path: Path, pattern: str) -> str | None:
    """Return the first group of a pattern in a file; None without a match, or without a file."""
    match = re.search(pattern, _read(path) or "", re.MULTILINE)
    return match[1] if match else None


def _kib_as_bytes(path: Path, pattern: str) -> int:
    """Return a number of KiB in a file as bytes; 0 if missing."""
    return int(_search(path, pattern) or 0) * 1024


def _read_number(path: Path) -> int | None:
    """Return the number in a file; None for "max", for v1's "no limit", and without a file."""
    with suppress(ValueError):
        number = int((_read(path) or "").strip())
        return number if 0 <= number < _NO_LIMIT_BYTES else None
    return None


def read_meminfo(root: Path) -> dict[str, int]:
    """Return the fields of /proc/meminfo: bytes, and numbers of huge pages.

    The memory of some virtual machines grows with use: the environment variable `HOST_RAM` sets the
    total that they can reach.

    Raises:
        ConfigError: The variable is not a size.
    """
    text = _read(root / "proc/meminfo") or ""
    numbers = re.findall(r"^(\w+):\s+([0-9]+)( kB)?", text, re.MULTILINE)
    fields = {name: int(number) * (1024 if unit else 1) for name, number, unit in numbers}
    if (size := os.environ.get(HOST_RAM)) and "MemTotal" in fields:
        try:
            extra_bytes = max(parse_size(size) - fields["MemTotal"], 0)
        except ConfigError as error:
            message = f"the environment variable {HOST_RAM} is {size!r}"
            remedy = f'set {HOST_RAM}="128GiB", or unset it'
            raise ConfigError(message, because=error.what, remedy=remedy) from None
        for name in ("MemTotal", "MemAvailable"):
            if name in fields:
                fields[name] += extra_bytes
    return fields


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, free bytes) for every level of the cgroups that has a limit."""
    for controller, limit, usage, reclaimable in (
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ("", "memory.max", "memory.current", "inactive_file"),
    ):
        for level in _cgroup_levels(root, controller):
            limit_bytes = _read_number(level / limit)
            if limit_bytes is None:
                continue
            # Clean page cache counts as used, but is dropped before a process is killed.
            stat = dict(re.findall(r"^(\w+) ([0-9]+)$", _read(level / "memory.stat") or "", re.M))
            used_bytes = (_read_number(level / usage) or 0) - int(stat.get(reclaimable, 0))
            yield limit_bytes, limit_bytes - max(0, used_bytes)


def _cgroup_levels(root: Path, controller: str) -> Iterator[Path]:
    """Yield this process's cgroup directory and its ancestors; controller "" is version 2."""
    mount = _cgroup_mount(root, controller)
    path = cgroup_path(root, controller)
    if mount is None or path is None:
        return
    mount_root, mount_point = mount
    # In a container the mount may be a subtree, while the path starts at the root of the hierarchy.
    if mount_root != "/" and (path + "/").startswith(mount_root + "/"):
        path = path[len(mount_root) :]
    names = [name for name in path.split("/") if name]
    if ".." in names:
        names = []
    top = root / mount_point.lstrip("/")
    for depth in range(len(names), -1, -1):
        level = top.joinpath(*names[:depth])
        if level.is_dir():
            yield level


def cgroup_path(root: Path, controller: str) -> str | None:
    """Return the path of this process's cgroup; None if it is in no cgroup of `controller`.

    The effective limit may be that of an ancestor. Controller "" is version 2.
    """
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, _, fields = line.partition(":")
        controllers, _, path = fields.partition(":")
        if controller in controllers.split(","):
            return path
    return None


def _cgroup_mount(root: Path, controller: str) -> tuple[str, str] | None:
    """Return (mounted root in the hierarchy, mount point), or None."""
    for mount_root, mount_point, fields in mounts(root):
        is_v1 = fields[0] == "cgroup" and bool(controller) and controller in fields[2].split(",")
        if is_v1 or (fields[0] == "cgroup2" and not controller):
            return mount_root, mount_point
    return None


def mounts(root: Path) -> Iterator[tuple[str, str, list[str]]]:
    """Yield (mounted root, mount point, [type, source, options]) of every mount."""
    for line in (_read(root / "proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        mount, source = before.split(), after.split()
        if len(mount) >= 5 and len(source) >= 3:
            yield mount[3], _unescaped(mount[4]), [source[0], _unescaped(source[1]), source[2]]


def _unescaped(name: str) -> str:
    """Decode the octal escapes of blanks and backslashes in mountinfo."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), name)


def threads_for(wanted: int, num_cpus: int, ranks: int = 1, *, unified: bool) -> int:
    """Return the number of threads for one rank's optimizer kernels; at least 1.

    `wanted` is the total of all `ranks` on the machine. If it is 0, every CPU is used, except for
    `_LAUNCH_THREADS` CPUs per rank if the device has separate memory: these are left to the threads
    that launch its work (training, backward and the optimizer pass).
    """
    reserved = 0 if wanted or unified else _LAUNCH_THREADS
    return max((wanted or num_cpus) // ranks - reserved, 1)


_LAUNCH_THREADS = 3  # CPUs per rank


def _cpu_quota(root: Path) -> int | None:
    """Return the smallest quota of all levels in processors, at least 1; None if unlimited."""
    quotas = []
    for level in _cgroup_levels(root, ""):
        quota, _, period = (_read(level / "cpu.max") or "").strip().partition(" ")
        if quota.isdigit() and period.isdigit():
            quotas.append(_ceil_div(int(quota), int(period)))
    for level in _cgroup_levels(root, "cpu"):
        quota_us = _read_number(level / "cpu.cfs_quota_us")
        period_us = _read_number(level / "cpu.cfs_period_us")
        if quota_us and period_us:
            quotas.append(_ceil_div(quota_us, period_us))
    return max(1, min(quotas)) if quotas else None


def _ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // max(1, denominator))


def _num_allowed_cpus(root: Path) -> int:
    """Return the size of the affinity mask, from a file under `root` if it is there."""
    allowed = _search(root / "proc/self/status", r"^Cpus_allowed_list:\s*([0-9,-]+)$")
    if allowed is None:
        return len(os.sched_getaffinity(0))
    count = 0
    for cpu_range in allowed.split(","):
        first, _, last = cpu_range.partition("-")
        count += int(last or first) - int(first) + 1
    return count


@cache
def _cache_bytes(root: Path) -> int:
    """Return the total size of the caches of the highest level; a shared cache counts once.

    Cached because these are hundreds of files on machines with many processors.
    """
    caches: dict[int, dict[str, int]] = {}
    for folder in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cache/index[0-9]*"):
        level = _read_number(folder / "level")
        size = re.fullmatch(r"([0-9]+)K", (_read(folder / "size") or "").strip())
        shared_by = (_read(folder / "shared_cpu_list") or folder.parent.parent.name).strip()
        if level is not None and size is not None:
            caches.setdefault(level, {})[shared_by] = int(size[1]) * 1024
    return sum(caches[max(caches)].values()) if caches else 0

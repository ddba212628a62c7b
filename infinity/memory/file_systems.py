"""What lies behind a path: which device, which drive, and what its file system costs."""

from __future__ import annotations

import array
import fcntl
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from infinity import _aio
from infinity.sizes import format_size

_GET_FLAGS = 0x80086601  # FS_IOC_GETFLAGS
_NO_COPY_ON_WRITE = 0x00800000  # FS_NOCOW_FL
_IN_RAM = ("tmpfs", "ramfs")
_REMEDY = "choose an nvme_path on a local ext4 or xfs file system"


def device_of(path: Path) -> str:
    """The device behind a path as "major:minor"; "" where it cannot be asked."""
    with suppress(OSError):
        device = os.stat(path).st_dev
        return f"{os.major(device)}:{os.minor(device)}"
    return ""


def drive_of(device: str, sysfs: Path = Path("/sys")) -> str:
    """The whole drive that a partition "major:minor" belongs to; else the device itself."""
    with suppress(OSError):
        node = (sysfs / "dev/block" / device).resolve(strict=True)
        if (node / "partition").exists():
            return (node.parent / "dev").read_text().strip()
    return device


def one_per_file_system(paths: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """The first path on each file system, and what to say about the others."""
    kept: dict[str, Path] = {}
    warnings = []
    for path in paths:
        device = device_of(path)
        first = kept.setdefault(device or str(path), path)
        if first is not path:
            warnings.append(
                f"nvme_path {path} is on the same device ({device}) as {first} and is not used: "
                "two directories on one device are no faster than one; give each drive once, or "
                "set io.weights to use both all the same"
            )
    return list(kept.values()), warnings


def shared_drives(paths: Sequence[Path], sysfs: Path = Path("/sys")) -> list[str]:
    """What to say about paths that are partitions of one drive, or directories of one device."""
    first: dict[str, Path] = {}
    warnings = []
    for path in paths:
        drive = drive_of(device_of(path), sysfs)
        other = first.setdefault(drive or str(path), path)
        if other is not path:
            warnings.append(
                f"nvme_path {other} and {path} share one drive ({drive}): they add room, not speed"
            )
    return warnings


def file_system_warnings(path: Path, file: _aio.File, nbytes: int) -> list[str]:
    """What it costs to keep `nbytes` in `file` below `path`; nothing for a good local drive."""
    name, size = file.file_system, format_size(nbytes)
    warnings = []
    if name in _IN_RAM:
        warnings.append(
            f"nvme_path {path} is {name}, which is RAM: the {size} kept there count as memory, "
            "also against a container's limit, and nothing is offloaded; choose an nvme_path on a "
            "drive"
        )
    elif not file.direct:
        warnings.append(
            f"nvme_path {path} ({name}) takes no direct I/O ({file.direct_reason}): every byte is "
            "copied through the page cache, which costs CPU time, and RAM while it is written "
            f"back; {_REMEDY}"
        )
    if name == "nfs":
        warnings.append(
            f"nvme_path {path} is NFS: all {size} of state cross the network every step, and a "
            "lost connection stops the training (see io.stuck_after_s); the lock of a killed run "
            f"may live on at the server; {_REMEDY}"
        )
    if name == "btrfs" and not _overwrites_in_place(file.fd):
        warnings.append(
            f"nvme_path {path} is btrfs, which copies on write: space reserved beforehand does not "
            "help, every write is a new allocation and checksummed by the CPU; use an empty "
            f"directory with `chattr +C {path}` (nodatacow), or an ext4 or xfs file system"
        )
    return warnings


def _overwrites_in_place(fd: int) -> bool:
    """Whether a btrfs file is marked nodatacow."""
    flags = array.array("l", [0])
    with suppress(OSError):
        fcntl.ioctl(fd, _GET_FLAGS, flags)
    return bool(flags[0] & _NO_COPY_ON_WRITE)

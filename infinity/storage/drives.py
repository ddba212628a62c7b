"""Properties of the drive behind a path: device, file system, direct I/O, back ends, warnings."""

from __future__ import annotations

import fcntl
import os
from array import array
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import infinity._aio as _aio
from infinity.common.files import refused
from infinity.common.sizes import format_size
from infinity.errors import MachineError
from infinity.storage.run_dir import Scratch

_GET_FLAGS = 0x80086601  # FS_IOC_GETFLAGS
_NO_COPY_ON_WRITE = 0x00800000  # FS_NOCOW_FL
_IN_RAM = ("tmpfs", "ramfs")
_REMEDY = "choose an nvme_path on a local ext4 or xfs file system"


def device_of(path: Path) -> str:
    """Return the device behind a path as "major:minor"; "" if it is unknown."""
    with suppress(OSError):
        device = os.stat(path).st_dev
        return f"{os.major(device)}:{os.minor(device)}"
    return ""


def drive_of(device: str, sysfs: Path) -> str:
    """Return the drive of a partition, both as "major:minor"; any other device unchanged."""
    with suppress(OSError):
        node = (sysfs / "dev/block" / device).resolve(strict=True)
        if (node / "partition").exists():
            return (node.parent / "dev").read_text().strip()
    return device


def one_per_file_system(paths: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """Return the first path on each file system, and warnings about the others."""
    first_paths: dict[str, Path] = {}
    warnings = []
    for path in paths:
        device = device_of(path)
        first = first_paths.setdefault(device or str(path), path)
        if first is not path:
            warnings.append(
                f"nvme_path {path} is on the same device ({device}) as {first} and is not used: "
                "two directories on one device are no faster than one; give each drive once, or "
                "set io.weights to use both anyway"
            )
    return list(first_paths.values()), warnings


def shared_drives(paths: Sequence[Path], sysfs: Path = Path("/sys")) -> list[str]:
    """Return warnings about paths that share a drive, as partitions or directories."""
    first_paths: dict[str, Path] = {}
    warnings = []
    for path in paths:
        drive = drive_of(device_of(path), sysfs)
        first = first_paths.setdefault(drive or str(path), path)
        if first is not path:
            warnings.append(
                f"nvme_path {first} and {path} share one drive ({drive}): they add capacity, not "
                "speed"
            )
    return warnings


def file_system_warnings(path: Path, file: _aio.File, nbytes: int) -> list[str]:
    """Return warnings about `nbytes` in `file` below `path`; none for a good local drive."""
    name, size = file.file_system, format_size(nbytes)
    warnings = []
    if name in _IN_RAM:
        warnings.append(
            f"nvme_path {path} is {name}, which is RAM: the {size} stored there count as memory, "
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
            "lost connection stops the training (see io.timeout_s); the lock of a killed run "
            f"may persist on the server; {_REMEDY}"
        )
    if name == "btrfs":
        flags = array("l", [0])
        with suppress(OSError):
            fcntl.ioctl(file.fd, _GET_FLAGS, flags)
        if not flags[0] & _NO_COPY_ON_WRITE:
            warnings.append(
                f"nvme_path {path} is btrfs, which copies on write: space reserved beforehand "
                "does not help, every write is a new allocation and checksummed by the CPU; use "
                f"an empty directory with `chattr +C {path}` (nodatacow), or an ext4 or xfs file "
                "system"
            )
    return warnings


@dataclass(frozen=True)
class Drive:
    """Properties of one path, determined by writing and reading there. Sizes in bytes."""

    path: str
    file_system: str
    device: str
    """Number and name, such as "254:0 vda"; number only for file systems without a device."""
    model: str
    direct: bool
    direct_reason: str
    """Reason for buffered I/O; "" if direct."""
    memory_alignment: int
    offset_alignment: int
    free_bytes: int
    total_bytes: int
    backends: dict[str, dict[str, Any]]
    """`{"ok": bool, "reason": str}` by back end."""
    notes: list[str]
    """Warnings about the file system; empty for a good local drive."""

    @property
    def in_ram(self) -> bool:
        """True if the file system keeps its bytes in RAM."""
        return self.file_system in _IN_RAM

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a dict for JSON."""
        return asdict(self)


def probe_path(path: Path) -> Drive:
    """Probe `path` with a temporary run directory, which is removed.

    Raises `MachineError` if the path is missing, not a directory or not writable, or if no back end
    works there, and `DoesNotFitError` if not even a block fits.
    """
    with Scratch.create(path) as scratch:
        statistics = os.statvfs(path)
        free_bytes = statistics.f_bavail * statistics.f_frsize
        try:
            backends = _aio.probe(str(scratch.directory))
            with closing(_aio.File(str(scratch.path("look.bin")), create=True)) as file:
                file.allocate(4096)
                direct, reason = file.direct, file.direct_reason
                alignments = file.memory_alignment, file.offset_alignment
                file_system = file.file_system
                notes = file_system_warnings(path, file, free_bytes)
        except OSError as error:
            raise refused(f"{path} cannot be used", error, path) from error
    if not any(result["ok"] for result in backends.values()):
        because = "; ".join(f"{name}: {result['reason']}" for name, result in backends.items())
        raise MachineError(f"{path}: no I/O back end works", because=because)
    device_number = os.stat(path).st_dev
    name, model = _block_device(device_number)
    return Drive(
        path=str(path),
        file_system=file_system,
        device=f"{os.major(device_number)}:{os.minor(device_number)} {name}".strip(),
        model=model,
        direct=direct,
        direct_reason=reason,
        memory_alignment=alignments[0],
        offset_alignment=alignments[1],
        free_bytes=free_bytes,
        total_bytes=statistics.f_blocks * statistics.f_frsize,
        backends=backends,
        notes=notes,
    )


def chosen_backend() -> tuple[str, str]:
    """Return the back end that `backend="auto"` selects in this process, and the reason."""
    with closing(_aio.Engine()) as engine:
        return engine.backend, engine.backend_reason


def _block_device(number: int) -> tuple[str, str]:
    """Return the kernel name and the model of a block device; "" for a missing one."""
    path = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    try:
        folder = path.resolve(strict=True)
    except OSError:
        return "", ""
    # The folder of a partition is below that of its disk, and only the disk has a model.
    for candidate in (folder, folder.parent):
        with suppress(OSError):
            return folder.name, (candidate / "device/model").read_text(encoding="utf-8").strip()
    return folder.name, ""

"""Which bytes lie on which drive: one logical space, dealt in stripes over several paths.

Extents are promised one after the other, so the logical space is dense; when all are known, it is
dealt. A record is split, rather than given whole to one drive: an optimizer pass has only two reads
in flight and consumes them in order, so whole records would leave a drive idle whenever two in a
row lie on the other one, and a fetch that somebody waits for would run at the speed of one drive.

Each part of a record (the weights, the moments) is dealt by a count of its own, because a fetch
reads the weights alone: they too must be spread in proportion, over the whole and over any few
records in a row.
"""

from __future__ import annotations

import fcntl
import operator
import os
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import infinity._aio as _aio
from infinity.common.files import refused
from infinity.common.sizes import format_size
from infinity.errors import CheckpointError, MachineError
from infinity.storage.run_dir import Scratch
from infinity.types import PAGE, round_up

# What lies behind a path: device, drive, file system and its costs, direct I/O, back ends.


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
    """Return warnings about `nbytes` in `file` below `path`; none for a good local drive."""
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
            "lost connection stops the training (see io.timeout_s); the lock of a killed run "
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
    flags = array("l", [0])
    with suppress(OSError):
        fcntl.ioctl(fd, _GET_FLAGS, flags)
    return bool(flags[0] & _NO_COPY_ON_WRITE)


@dataclass(frozen=True)
class Drive:
    """Facts about one path, found by writing and reading there. Sizes in bytes."""

    path: str
    file_system: str
    device: str
    """Number and name, such as "254:0 vda"; file systems without a device have a number only."""
    model: str
    direct: bool
    direct_reason: str
    """Why it is buffered; "" when direct."""
    memory_alignment: int
    offset_alignment: int
    free_bytes: int
    total_bytes: int
    backends: dict[str, dict[str, Any]]
    """For each back end `{"ok": bool, "reason": str}`."""
    notes: list[str]
    """What keeping state there costs; empty for a good local drive."""

    @property
    def in_ram(self) -> bool:
        """True if the file system keeps its bytes in RAM."""
        return self.file_system in _IN_RAM

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def look_at(path: Path) -> Drive:
    """Try `path` as a run would use it, and leave nothing there.

    Raises `MachineError` if it is missing, not a directory or not writable, or if no back end
    works there, and `DoesNotFitError` if not even a block fits.
    """
    with Scratch.create(path) as scratch:
        space = os.statvfs(path)
        free_bytes = space.f_bavail * space.f_frsize
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
    if not any(answer["ok"] for answer in backends.values()):
        because = "; ".join(f"{name}: {answer['reason']}" for name, answer in backends.items())
        raise MachineError(f"{path}: no I/O back end works", because=because)
    number = os.stat(path).st_dev
    name, model = _block_device(number)
    return Drive(
        path=str(path),
        file_system=file_system,
        device=f"{os.major(number)}:{os.minor(number)} {name}".strip(),
        model=model,
        direct=direct,
        direct_reason=reason,
        memory_alignment=alignments[0],
        offset_alignment=alignments[1],
        free_bytes=free_bytes,
        total_bytes=space.f_blocks * space.f_frsize,
        backends=backends,
        notes=notes,
    )


def chosen_backend() -> tuple[str, str]:
    """Return which back end `backend="auto"` takes in this process, and why."""
    with closing(_aio.Engine()) as engine:
        return engine.backend, engine.backend_reason


def _block_device(number: int) -> tuple[str, str]:
    """Return the kernel's name and the model of a block device; "" where there is none."""
    path = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    try:
        real = path.resolve(strict=True)
    except OSError:
        return "", ""
    # A partition lies inside its disk, and only the disk has a model.
    for folder in (real, real.parent):
        with suppress(OSError):
            return real.name, (folder / "device/model").read_text(encoding="utf-8").strip()
    return real.name, ""


@dataclass(frozen=True, slots=True)
class FileRange:
    """A range of one path's file; `offset` and `nbytes` in bytes."""

    path_index: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Striping:
    """All that decides where the bytes of the logical space lie; the inputs of its dealing."""

    directories: tuple[Path, ...]
    stripe_bytes: int
    speeds: tuple[float, ...]
    room: tuple[int, ...]
    used: tuple[int, ...]


class Stripes:
    """The logical space of one run: promised, then placed once, then asked."""

    def __init__(self, num_paths: int, stripe_bytes: int) -> None:
        self.total = 0
        self._num_paths = num_paths
        self._stripe_bytes = stripe_bytes
        self._promised: list[tuple[int, tuple[int, ...]]] = []  # bytes, and where its parts start
        # One entry per stretch that is contiguous in memory and on its path; arrays, because a
        # terabyte is a million stripes.
        self._starts = array("q")
        self._paths = array("H")
        self._offsets = array("q")

    def promise(self, nbytes: int, cuts: Sequence[int] = ()) -> int:
        """Reserve whole pages; returns the logical offset. Parts begin at 0 and at each cut."""
        assert not self._starts, "extents are promised before they are placed"
        start = self.total
        self.total += round_up(nbytes, PAGE)
        if self._num_paths > 1:
            self._promised.append((self.total - start, tuple(cuts)))
        return start

    def distribute(self, weights: Sequence[float], room: Sequence[int]) -> list[int]:
        """Deal everything in proportion to `weights`, no path beyond its `room`; bytes per path.

        The rooms together must hold the total. Where one path has too little, what it has is
        spread over all extents, and the others take the rest in proportion.
        """
        if self._num_paths == 1:
            self._append(0, 0, 0)
            return [self.total]
        room = [r // PAGE * PAGE for r in room]
        assert sum(room) >= self.total, (room, self.total)
        dealer = _Dealer(fair_shares(self.total, weights, room), room)
        logical = 0
        for nbytes, cuts in self._promised:
            edges = sorted({0, nbytes, *(c // PAGE * PAGE for c in cuts)})
            for part, (start, end) in enumerate(pairwise(edges)):
                for at in range(start, end, self._stripe_bytes):
                    size = min(self._stripe_bytes, end - at)
                    for piece in dealer.deal(part, size):
                        self._append(logical, piece.path_index, piece.offset)
                        logical += piece.nbytes
        self._promised.clear()
        return dealer.used

    def distribute_again(self, stored: Striping, sizes: Sequence[int]) -> None:
        """Deal everything as it was dealt for a run that is continued; raises `CheckpointError`.

        `sizes` are those of the files in bytes.
        """
        room = stored.room or (self.total,)
        used = self.distribute(stored.speeds or (1.0,), room) if sum(room) >= self.total else []
        if tuple(used) != stored.used or any(map(operator.lt, sizes, used)):
            raise CheckpointError(
                f"the durable run in {stored.directories[0]} needs {used} bytes of its state "
                f"files; they were {list(stored.used)} and are {list(sizes)}",
                because="a file was cut short, or another version of infinity placed them",
            )

    def _append(self, start: int, path: int, offset: int) -> None:
        """Remember a stretch, unless it merely goes on where the last one ended."""
        is_next = self._starts and self._offsets[-1] + (start - self._starts[-1]) == offset
        if is_next and self._paths[-1] == path:
            return
        self._starts.append(start)
        self._paths.append(path)
        self._offsets.append(offset)

    def pieces(self, start: int, nbytes: int) -> Iterator[FileRange]:
        """The ranges that hold `nbytes` from the logical offset `start`, in logical order."""
        index, end = bisect_right(self._starts, start) - 1, start + nbytes
        while start < end:
            last = self._starts[index + 1] if index + 1 < len(self._starts) else end
            size = min(last, end) - start
            offset = self._offsets[index] + (start - self._starts[index])
            yield FileRange(self._paths[index], offset, size)
            start += size
            index += 1


def fair_shares(total: int, weights: Sequence[float], room: Sequence[int]) -> list[float]:
    """Bytes per path so that all finish together; a path without that much room is filled up."""
    shares = [0.0] * len(weights)
    left, open_paths = float(total), set(range(len(weights)))
    while open_paths and left > 0:
        rate = left / sum(weights[p] for p in open_paths)
        full = {p for p in open_paths if weights[p] * rate >= room[p]}
        for path in full or open_paths:
            shares[path] = float(room[path]) if full else weights[path] * rate
        if not full:
            break
        left -= sum(room[p] for p in full)
        open_paths -= full
    return shares


class _Dealer:
    """Gives each stripe to the path that is furthest behind its share."""

    def __init__(self, shares: Sequence[float], room: Sequence[int]) -> None:
        self.used = [0] * len(room)
        self._shares = shares
        self._room = room
        self._by_part: dict[int, list[int]] = {}

    def deal(self, part: int, nbytes: int) -> Iterator[FileRange]:
        """Where a stripe of some part of a record goes: whole, but for the last scraps of room."""
        mine = self._by_part.setdefault(part, [0] * len(self.used))
        while nbytes:
            left = [room - used for room, used in zip(self._room, self.used, strict=True)]
            fits = [p for p in range(len(left)) if left[p] >= nbytes and self._shares[p] > 0]
            if fits:
                path = min(fits, key=lambda p: (mine[p] + self.used[p] + nbytes) / self._shares[p])
                size = nbytes
            else:
                path = max(range(len(left)), key=lambda p: left[p])
                size = min(nbytes, left[path])
            yield FileRange(path, self.used[path], size)
            self.used[path] += size
            mine[path] += size
            nbytes -= size

"""What lies below a path: file system, device, direct I/O, alignment, and which back ends work."""

from __future__ import annotations

import contextlib
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from infinity import _aio
from infinity.bench.testbed import io_failure
from infinity.errors import MachineError
from infinity.memory.file_systems import file_system_warnings
from infinity.memory.scratch import Scratch

BACKENDS = ("io_uring", "threads")


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
            found = _aio.probe(str(scratch.directory))
            with contextlib.closing(_aio.File(str(scratch.path("look.bin")), create=True)) as file:
                file.allocate(4096)
                direct, reason = file.direct, file.direct_reason
                alignments = file.memory_alignment, file.offset_alignment
                file_system = file.file_system
                notes = file_system_warnings(path, file, free_bytes)
        except OSError as error:
            raise io_failure(error, path) from error
    backends = {name: _answer(found.get(name)) for name in BACKENDS}
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
    with contextlib.closing(_aio.Engine()) as engine:
        return engine.backend, engine.backend_reason


def _answer(found: object) -> dict[str, Any]:
    if isinstance(found, dict):
        return {"ok": bool(found.get("ok")), "reason": str(found.get("reason", ""))}
    return {"ok": False, "reason": "not in this build"}


def _block_device(number: int) -> tuple[str, str]:
    """Return the kernel's name and the model of a block device; "" where there is none."""
    place = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    try:
        real = place.resolve(strict=True)
    except OSError:
        return "", ""
    # A partition lies inside its disk, and only the disk has a model.
    for folder in (real, real.parent):
        with contextlib.suppress(OSError):
            return real.name, (folder / "device/model").read_text(encoding="utf-8").strip()
    return real.name, ""

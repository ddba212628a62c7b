"""What a scratch directory says of the run that made it (`run.json`), and how JSON is sealed."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from infinity.crc32c import crc32c
from infinity.stable import write_new

RECORD_VERSION = 2


def seal(content: Mapping[str, Any]) -> bytes:
    """The text of an object that says, with a checksum over all the rest, whether it is whole."""
    return json.dumps({**content, "checksum": _checksum(content)}, indent=1).encode()


def unseal(data: bytes) -> dict[str, Any]:
    """The inverse; raises `ValueError` for what was changed, or never was sealed."""
    try:
        content = json.loads(data)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(content, dict) or content.pop("checksum", None) != _checksum(content):
        raise ValueError("its checksum does not fit")
    return content


def _checksum(content: Mapping[str, Any]) -> int:
    return crc32c(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def write_record(path: Path, *, durable: bool = False, **facts: Any) -> None:
    """Write who the run is, and make sure that it is on the disk before the run can be seen."""
    record: dict[str, Any] = {
        "version": RECORD_VERSION,
        "durable": durable,
        "pid": os.getpid(),
        "start_ticks": _start_ticks(os.getpid()),
        "hostname": socket.gethostname(),
        "boot_id": _read("/proc/sys/kernel/random/boot_id"),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        **facts,
    }
    write_new(path, seal(record))


def _start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; the name may hold anything."""
    fields = (_read(f"/proc/{pid}/stat") or "").rpartition(")")[2].split()
    return int(fields[19]) if len(fields) > 19 else None


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None

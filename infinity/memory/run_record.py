"""What a scratch directory says of the run that made it: `run.json`."""

from __future__ import annotations

import json
import os
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from infinity.stable import write_new

RECORD_VERSION = 1


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
    write_new(path, json.dumps(record, indent=2).encode())


def _start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; the name may hold anything."""
    fields = (_read(f"/proc/{pid}/stat") or "").rpartition(")")[2].split()
    return int(fields[19]) if len(fields) > 19 else None


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None

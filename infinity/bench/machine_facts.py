"""What this machine is, for the head of a report: read from the system, never guessed."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from typing import Any

from infinity.plan.machine import cpu_model, read_machine


def machine_facts() -> dict[str, Any]:
    """Return processor, kernel, Python, memory and load, JSON-able; sizes in bytes."""
    machine = read_machine()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "system": platform.system(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "processor": cpu_model(),
        "num_cpus": machine.num_cpus,
        "host_ram_bytes": machine.host_ram_bytes,
        "load_average": os.getloadavg()[0],
    }

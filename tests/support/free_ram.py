"""Free RAM as tests see it: at least 12 GiB, or all that the machine has.

A default budget is a share of the RAM that is free at the moment. Tests of small models would fail
where other programs have taken most of it. Importing this module is enough, in a test process or in
the fork server; cgroup limits hold as before.
"""

from __future__ import annotations

from pathlib import Path

from infinity.plan import machine

LEAST_BYTES = 12 << 30
_read = machine.read_meminfo


def _read_meminfo(root: Path) -> dict[str, int]:
    sizes = _read(root)
    if root == Path("/") and "MemAvailable" in sizes:
        least = min(LEAST_BYTES, sizes.get("MemTotal", 0))
        sizes["MemAvailable"] = max(sizes["MemAvailable"], least)
    return sizes


machine.read_meminfo = _read_meminfo

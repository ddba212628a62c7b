"""Patch of the free RAM that tests see: at least 12 GiB, or the total RAM of the machine.

A default budget is a share of the RAM that is free at the moment. Tests of small models would fail
on a machine whose RAM is mostly used by other programs. Importing this module applies the patch, in
a test process or in the fork server; cgroup limits still hold.
"""

from __future__ import annotations

from pathlib import Path

from infinity.plan import machine

LEAST_BYTES = 12 << 30
_read = machine.read_meminfo


def _read_meminfo(root: Path) -> dict[str, int]:
    sizes = _read(root)
    if root == Path("/") and "MemAvailable" in sizes:
        minimum = min(LEAST_BYTES, sizes.get("MemTotal", 0))
        sizes["MemAvailable"] = max(sizes["MemAvailable"], minimum)
    return sizes


machine.read_meminfo = _read_meminfo

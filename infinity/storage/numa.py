"""NUMA placement of host memory: copies from a remote node cross the link between processors.

The policy is a preference: if the node is full, pages come from another one. Linux only; calls
mbind(2) directly, because libnuma is not installed on every machine.
"""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

_PREFERRED = 1  # MPOL_PREFERRED
_MOVE = 1 << 1  # MPOL_MF_MOVE: also migrate existing pages
_MBIND = {"x86_64": 237, "aarch64": 235}
_MASK_BITS = 1024  # size of the largest node mask of the kernel
_WORD = 8 * ctypes.sizeof(ctypes.c_ulong)


def prefer_node(address: int, nbytes: int, node: int) -> bool:
    """Prefer `node` for the pages of a page-aligned range; return False if that is not possible."""
    call_number = _MBIND.get(platform.machine())
    if call_number is None or not 0 <= node < _MASK_BITS:
        return False
    mask = (ctypes.c_ulong * (_MASK_BITS // _WORD))()
    mask[node // _WORD] = 1 << (node % _WORD)
    library = ctypes.CDLL(None, use_errno=True)
    library.syscall.restype = ctypes.c_long
    values = (call_number, address, nbytes, _PREFERRED, mask, _MASK_BITS + 1, _MOVE)
    arguments = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in values]
    return bool(library.syscall(*arguments) == 0)


def node_of_pci(domain: int, bus: int, device: int, root: Path = Path("/")) -> int | None:
    """Return the node next to a PCI device; None if it is unknown or there is only one node."""
    name = f"{domain:04x}:{bus:02x}:{device:02x}.0"
    try:
        node = int((root / "sys/bus/pci/devices" / name / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None

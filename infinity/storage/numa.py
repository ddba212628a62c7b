"""NUMA placement of host memory: copies from a far node cross the link between processors.

The policy is a preference: where the node is full, pages come from another one. Linux only, by
the system call itself, since libnuma is not on every machine (mbind(2)).
"""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

_PREFERRED = 1  # MPOL_PREFERRED
_MOVE = 1 << 1  # MPOL_MF_MOVE: pages that are there already
_MBIND = {"x86_64": 237, "aarch64": 235}
_MASK_BITS = 1024  # of the kernel's largest node mask
_WORD = 8 * ctypes.sizeof(ctypes.c_ulong)


def prefer_node(address: int, nbytes: int, node: int) -> bool:
    """Take the pages of a page-aligned range from `node`; False where that cannot be asked for."""
    number = _MBIND.get(platform.machine())
    if number is None or not 0 <= node < _MASK_BITS:
        return False
    mask = (ctypes.c_ulong * (_MASK_BITS // _WORD))()
    mask[node // _WORD] = 1 << (node % _WORD)
    library = ctypes.CDLL(None, use_errno=True)
    library.syscall.restype = ctypes.c_long
    values = (number, address, nbytes, _PREFERRED, mask, _MASK_BITS + 1, _MOVE)
    arguments = [ctypes.c_ulong(w) if isinstance(w, int) else w for w in values]
    return bool(library.syscall(*arguments) == 0)


def node_of_pci(domain: int, bus: int, device: int, root: Path = Path("/")) -> int | None:
    """The node next to a PCI device; None where there is one node only, or nothing is known."""
    name = f"{domain:04x}:{bus:02x}:{device:02x}.0"
    try:
        node = int((root / "sys/bus/pci/devices" / name / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None

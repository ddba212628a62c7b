"""Which NUMA node host memory comes from: copies from a far one cross the processors' link.

The policy is a preference: where the node is full, pages come from another one. Linux only, by
the system calls themselves, since libnuma is not on every machine (mbind(2), get_mempolicy(2)).
"""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

PREFERRED = 1  # MPOL_PREFERRED
_MOVE = 1 << 1  # MPOL_MF_MOVE: pages that are there already
_OF_ADDRESS = 1 << 1  # MPOL_F_ADDR
_CALLS = {"x86_64": (237, 239), "aarch64": (235, 236)}  # mbind, get_mempolicy
_MASK_BITS = 1024  # of the kernel's largest node mask
_WORD = 8 * ctypes.sizeof(ctypes.c_ulong)


def prefer_node(address: int, nbytes: int, node: int) -> bool:
    """Take the pages of a page-aligned range from `node`; False where that cannot be asked for."""
    calls = _CALLS.get(platform.machine())
    if calls is None or not 0 <= node < _MASK_BITS:
        return False
    mask = (ctypes.c_ulong * (_MASK_BITS // _WORD))()
    mask[node // _WORD] = 1 << (node % _WORD)
    words = (address, nbytes, PREFERRED, mask, _MASK_BITS + 1, _MOVE)
    return _call(calls[0], *words)


def preferred_node(address: int) -> int | None:
    """The node that the page at `address` is to come from; None without a preference."""
    calls = _CALLS.get(platform.machine())
    if calls is None:
        return None
    policy = ctypes.c_int()
    mask = (ctypes.c_ulong * (_MASK_BITS // _WORD))()
    if not _call(calls[1], ctypes.byref(policy), mask, _MASK_BITS + 1, address, _OF_ADDRESS):
        return None
    if policy.value != PREFERRED:
        return None
    bits = sum(int(word) << (i * _WORD) for i, word in enumerate(mask))
    return bits.bit_length() - 1 if bits else None


def node_of_pci(domain: int, bus: int, device: int, root: Path = Path("/")) -> int | None:
    """The node next to a PCI device; None where there is one node only, or nothing is known."""
    name = f"{domain:04x}:{bus:02x}:{device:02x}.0"
    try:
        node = int((root / "sys/bus/pci/devices" / name / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _call(number: int, *words: object) -> bool:
    library = ctypes.CDLL(None, use_errno=True)
    library.syscall.restype = ctypes.c_long
    arguments = [ctypes.c_ulong(w) if isinstance(w, int) else w for w in words]
    return bool(library.syscall(ctypes.c_long(number), *arguments) == 0)

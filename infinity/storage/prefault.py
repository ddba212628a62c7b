"""Page faulting with several threads, before a driver registers the pages.

New pages are allocated and zeroed on first access; a driver does that with one thread, at a few
GB/s.
"""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, since Linux 5.14
_PREFAULT_SLICE = 128 << 20
_PREFAULT_THREADS = 8


def prefault(address: int, nbytes: int) -> bool:
    """Allocate all pages of a page-aligned range, with several threads; contents are preserved.

    Returns False if the kernel does not support it; pages are then allocated on first access.
    """
    library = ctypes.CDLL(None, use_errno=True)
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def populate(start: int) -> bool:
        size = min(_PREFAULT_SLICE, nbytes - start)
        return bool(library.madvise(address + start, size, _POPULATE_WRITE) == 0)

    starts = range(0, nbytes, _PREFAULT_SLICE)
    with ThreadPoolExecutor(min(_PREFAULT_THREADS, len(starts)), "infinity-prefault") as pool:
        return all(pool.map(populate, starts))

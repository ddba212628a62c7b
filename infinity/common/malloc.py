"""Return of free memory to the system: the C heap, and pages of a mapping."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress


def return_freed_memory() -> None:
    """Return freed memory of the C heap to the system; no effect outside glibc.

    glibc caches freed tensors below its mmap threshold, up to 32 MiB each, and small objects
    between them prevent it from merging the holes: 150 MiB after a few steps of a model with 28 MB
    units. On the CPU, the peak of a step exceeds the bytes of tensors by this amount; with a fixed
    threshold (MALLOC_MMAP_THRESHOLD_=65536) the two are equal. Packed operands of matrix products
    are not included.
    """
    with suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def free_pages(address: int, nbytes: int) -> None:
    """Free pages of an anonymous mapping, which stays mapped; Linux only."""
    with suppress(OSError, AttributeError):
        madvise = ctypes.CDLL(None).madvise
        madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), mmap.MADV_DONTNEED)

"""Memory that goes back to the system: the C library's heap, and pages of a mapping."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress


def return_freed_memory() -> None:
    """Return freed memory that the C library keeps to the system, where it supports that.

    glibc keeps freed tensors below its threshold, up to 32 MiB each, and small objects between
    them keep it from joining the holes: 150 MiB after some steps of a model with 28 MB units. That
    is what a step's peak has over what tensors hold, where the CPU computes: with glibc's threshold
    fixed (MALLOC_MMAP_THRESHOLD_=65536) the two are one. Packed operands of products are not in it.
    """
    with suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def free_pages(address: int, nbytes: int) -> None:
    """Give the system whole pages of an anonymous mapping, which stays mapped; Linux only."""
    with suppress(OSError, AttributeError):
        madvise = ctypes.CDLL(None).madvise
        madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), mmap.MADV_DONTNEED)

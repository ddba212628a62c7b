"""Memory that this process holds, in numbers of bytes that do not depend on the machine.

[Note: resident memory in tests]
Resident memory is measured only in a separate process that has called `count_held`, and without
file-backed pages: a fork maps those of libraries anew, and a CUDA build has more of them. glibc
keeps freed tensors of up to 32 MiB in its heap and seldom reuses such a hole; with a fixed
threshold each tensor of 64 KiB or more is a mapping, which ends when the tensor is freed. Huge
pages are disabled: the first byte of a thread's stack would take 2 MiB. The kernel's counters lag
by up to one batch on each CPU that the process has run on (Linux 6.2 to 6.15), so it runs on two.
"""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

import pytest

_MMAP_THRESHOLD = -3, 1 << 16  # mallopt
_DISABLE_HUGE_PAGES = 41, 1, 0, 0, 0  # prctl
_CLEAR_REFS = Path("/proc/self/clear_refs")
_MAX_CPUS = 2
# For counters of anonymous and of file-backed pages, each read twice.
_COUNTER_LAG = 4 * _MAX_CPUS * max(32, 2 * (os.cpu_count() or 1)) * os.sysconf("SC_PAGESIZE")
# Tolerance for Python objects, allocations below the threshold and thread stacks.
SMALL_BYTES = (4 << 20) + _COUNTER_LAG

needs_peak = pytest.mark.skipif(
    not os.access(_CLEAR_REFS, os.W_OK),
    reason=f"{_CLEAR_REFS} cannot be written, so the kernel's high-water mark cannot be reset",
)


def count_held() -> None:
    """Prepare this process, which ends with the test, for measurements of memory."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc
        assert libc.mallopt(*_MMAP_THRESHOLD)
    libc.prctl(*_DISABLE_HUGE_PAGES)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:_MAX_CPUS])


def resident_bytes() -> int:
    """Return the bytes of anonymous and shared memory that this process holds now."""
    return _status("RssAnon") + _status("RssShmem")


class Peak:
    """Peak of the bytes held by this process since `reset`, relative to those at creation."""

    def __init__(self) -> None:
        self._start = resident_bytes()
        self.reset()

    def reset(self) -> None:
        """Reset the peak, but not the baseline."""
        _CLEAR_REFS.write_text("5")

    @property
    def grown(self) -> int:
        """Bytes by which the peak exceeds the baseline."""
        return _status("VmHWM") - _status("RssFile") - self._start


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s*([0-9]+) kB$", Path("/proc/self/status").read_text(), re.M)
    assert found is not None, name
    return int(found[1]) << 10

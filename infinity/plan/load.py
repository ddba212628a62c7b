"""CPU load of other programs during a measurement."""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil

QUIET_SHARE = 0.15  # of all processors: background load of a desktop or a monitor
IDLE_SHARE = 0.5  # of all processors: with more idle time no thread waits for a processor
# Seconds of all processors together: less is a few ticks of the kernel's counters.
MIN_LOAD_SAMPLE_S = 1.0


@dataclass(frozen=True)
class ProcessorTimes:
    """Seconds of processor time since boot, summed over all processors.

    Attributes:
        user: Spent in programs, this process included. Kernel time is not counted: kernel threads
            also do the disk I/O of this process.
        idle: Idle, or waiting for a disk.
        process: Spent in this process; included in `user`.
        count: Number of processors.
    """

    user: float
    idle: float
    process: float
    count: int

    @staticmethod
    def now() -> ProcessorTimes | None:
        """Return the kernel's current counters; None if they cannot be read."""
        try:
            times = psutil.cpu_times()
        except (OSError, ValueError, IndexError, psutil.Error):
            return None
        count = psutil.cpu_count() or 1
        user, idle = times.user + times.nice, times.idle + times.iowait
        return ProcessorTimes(user, idle, os.times().user, count)


def describe_other_load(before: ProcessorTimes | None, after: ProcessorTimes | None) -> str:
    """Describe the processor use of other programs between two moments; "" if it is small.

    Rates that were measured under such a load may be too low.
    """
    if before is None or after is None:
        return ""
    others = (after.user - before.user) - (after.process - before.process)
    idle = after.idle - before.idle
    total = idle + (after.user - before.user)
    if total < MIN_LOAD_SAMPLE_S or others < QUIET_SHARE * total or idle > IDLE_SHARE * total:
        return ""
    return f"other programs used {others / total * after.count:.1f} of {after.count} processors"

"""How much other programs use this machine's processors while something is measured."""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil

# Others take less of all processors than this where nobody works beside a measurement: a desktop,
# a monitor. With more idle time than the second number nobody waits for a processor.
QUIET_SHARE = 0.15
IDLE_SHARE = 0.5
LEAST_S = 1.0  # of all processors together: less is a few ticks of the clock that counts them


@dataclass(frozen=True)
class ProcessorTimes:
    """Seconds that all processors spent since the start of the machine.

    Attributes:
        user: In programs, ours included. What kernels do for others' disks is no part of it: they
            do it for ours, too, on threads of their own.
        idle: With nothing to run, or waiting for a disk.
        own: In this process, as a part of `user`.
        count: Number of processors.
    """

    user: float
    idle: float
    process: float
    count: int

    @staticmethod
    def now() -> ProcessorTimes | None:
        """Return the counts of the kernel; None where they cannot be read."""
        try:
            times = psutil.cpu_times()
        except (OSError, ValueError, IndexError, psutil.Error):
            return None
        count = psutil.cpu_count() or 1
        user, idle = times.user + times.nice, times.idle + times.iowait
        return ProcessorTimes(user, idle, os.times().user, count)


def load_between(before: ProcessorTimes | None, after: ProcessorTimes | None) -> str:
    """Describe the use of processors by other programs between two moments; "" if it is small.

    A measurement beside such a load is not what the machine can do.
    """
    if before is None or after is None:
        return ""
    others = (after.user - before.user) - (after.process - before.process)
    idle = after.idle - before.idle
    total = idle + (after.user - before.user)
    if total < LEAST_S or others < QUIET_SHARE * total or idle > IDLE_SHARE * total:
        return ""
    return f"other programs used {others / total * after.count:.1f} of {after.count} processors"

"""Processor time of a benchmark by thread, and time stolen by the hypervisor."""

from __future__ import annotations

import os
import threading
from collections import Counter
from pathlib import Path

_STEAL = 7  # position in the first line of /proc/stat: see proc(5)


def cpu_seconds() -> Counter[str]:
    """Return the processor seconds of the threads of this process by thread name.

    "torch" is the main thread and all threads without an `infinity-` name; "stolen" is the steal
    time of all processors of the machine since boot.
    """
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    seconds: Counter[str] = Counter()
    for task in Path("/proc/self/task").iterdir():
        try:
            name = names.get(int(task.name)) or (task / "comm").read_text().strip()
            nanoseconds = int((task / "schedstat").read_text().split()[0])
        except OSError:  # a thread that has ended, or a kernel without scheduler statistics
            continue
        seconds[name if name.startswith("infinity-") else "torch"] += nanoseconds / 1e9
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    seconds["stolen"] = int(fields[_STEAL]) / os.sysconf("SC_CLK_TCK")
    return seconds

"""Who takes part in a benchmark: anything that can run a load and say how long it took."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from infinity.bench.load import Load
from infinity.errors import InfinityError


class UnavailableError(InfinityError):
    """This contender cannot take part here; says why. Others go on."""


@dataclass(frozen=True)
class Sample:
    """One measurement."""

    duration_s: float
    nbytes: int
    cpu_s: float | None
    """Processor time of the whole process, native threads included; None where it is not known."""

    @property
    def rate(self) -> float:
        """Bytes per second, both directions together."""
        return self.nbytes / self.duration_s

    @property
    def cpu_s_per_gib(self) -> float | None:
        """Processor seconds for each GiB moved."""
        return None if self.cpu_s is None else self.cpu_s / (self.nbytes / 2**30)


class Contender(Protocol):
    """Moves loads. Set-up happens before, checks after what is measured."""

    family: str
    """"io_uring", "threads", "fio", "plain", "deepspeed", "buffered" or "aiofiles"."""

    @property
    def name(self) -> str:
        """The family and its settings."""

    def run(self, load: Load) -> Sample:
        """Move every byte of the load, check what was moved, and return the measurement."""

    def close(self) -> None:
        """Let go of files and threads. Safe to call twice."""


def timed(work: Callable[[], None], load: Load) -> Sample:
    """Run `work` in this process and measure it."""
    cpu_s = time.process_time()
    started_s = time.perf_counter()
    work()
    duration_s = time.perf_counter() - started_s
    return Sample(duration_s, load.total_bytes, time.process_time() - cpu_s)

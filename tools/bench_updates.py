#!/usr/bin/env python3
"""Time the optimizer pass on the CPU, streamed to the device, and as planned, on simulated links.

    python tools/bench_updates.py --links 22e9

Works without a GPU: copies to and from the device take the time of links with `--links` bytes per
second in each direction, kernels take no time, and nothing is moved. Updates on the CPU, calls and
threads are real; the memory bandwidth of copies is not simulated. `auto` is the choice of the plan
by the rates of this machine with those links, which are measured first. Contenders take turns; the
result is the median.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence

import torch
from bench_host_time import IN_RAM, NullDevice
from torch import Tensor

import infinity
from infinity.optim.cpu import Piece
from infinity.profiling.calibration import cached_rates
from infinity.storage.device import HAPPENED, Event

WIDTH, NUM_UNITS = 8192, 3


class Later(Event):
    """An event that completes at a given time."""

    def __init__(self, end: float) -> None:
        self.end = end

    def wait(self) -> None:
        """Sleep until the event completes."""
        remaining = self.end - time.perf_counter()
        if remaining > 0:  # sleep(0) takes time, too
            time.sleep(remaining)

    def done(self) -> bool:
        """Return True if the time has passed."""
        return time.perf_counter() >= self.end


def end_of(event: Event) -> float:
    """Return the time at which an event completes, but at least now."""
    events = getattr(event, "events", (event,))
    return max(time.perf_counter(), *(getattr(member, "end", 0.0) for member in events))


class SlowLinks(NullDevice):
    """A device with two simulated links, one per direction, that are busy during copies."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self._rate, self._free = rate, {"in": 0.0, "out": 0.0}

    def memory_bytes(self) -> int | None:
        """Return the memory of a consumer GPU."""
        return 24 << 30

    def _copy(self, way: str, nbytes: int, after: Event) -> Event:
        begin = max(self._free[way], end_of(after))
        self._free[way] = begin + nbytes / self._rate
        return Later(self._free[way])

    def copy_h2d(self, target: Tensor, source: Tensor, after: Event = HAPPENED) -> Event:
        """Occupy the link; copy nothing."""
        return self._copy("in", source.numel(), after)

    def copy_d2h(self, target: Tensor, source: Tensor, after: Event = HAPPENED) -> Event:
        """Occupy the link; copy nothing."""
        return self._copy("out", source.numel(), after)

    copy_h2d_unordered, copy_d2h_unordered = copy_h2d, copy_d2h

    def update(self, pieces: Sequence[Piece], after: Event = HAPPENED) -> Event:
        """Return an event that completes with `after`; update nothing."""
        return Later(end_of(after))


class Contender:
    """An engine with state in RAM and the given `update`, with the times of its passes."""

    def __init__(self, update: str, links: float, threads: int) -> None:
        torch.manual_seed(0)
        layers = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_UNITS))
        config = {"precision": "bf16", "placement": IN_RAM, "update": update,
                  "gradient_clipping": 0, "cpu": {"num_threads": threads}}  # fmt: skip
        model, device = torch.nn.Sequential(*layers), SlowLinks(links)
        self.engine = infinity.initialize(model, config, device=device)[0]
        self.seconds: list[float] = []

    def turn(self) -> None:
        """Run one step and record the time of its optimizer pass."""
        inputs = torch.ones(1, WIDTH, dtype=torch.bfloat16)
        self.engine.backward(self.engine(inputs).square().mean())
        self.engine.settle()
        begin = time.perf_counter()
        self.engine.step()
        self.engine.settle()
        self.seconds.append(time.perf_counter() - begin)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print a table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--links", type=float, default=22e9, help="bytes a second, each way")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="that update")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        cached_rates((), SlowLinks(options.links), num_threads=options.threads)
        contenders = {
            update: Contender(update, options.links, options.threads)
            for update in ("cpu", "device", "auto")
        }
    for _ in range(1 + options.rounds):
        for contender in contenders.values():
            contender.turn()
    numel = WIDTH * WIDTH * NUM_UNITS
    print(f"{numel:,} parameters, links of {options.links / 1e9:g} GB/s, {options.threads} threads")
    for update, contender in contenders.items():
        seconds = statistics.median(contender.seconds[1:])
        print(f"{update:>7}  {1e3 * seconds:6.1f} ms  {numel / seconds / 1e9:5.2f} G parameters/s  "
              f"{contender.engine.plan.updates_line}")  # fmt: skip
        contender.engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

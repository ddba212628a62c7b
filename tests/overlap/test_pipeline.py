"""Tests of the overlap of transfers with compute, by gates and by timing.

The timed tests assert only durations dominated by sleeping: the native engine throttles the disk
by a clock, compute is `time.sleep`, and the margins are wide.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support import fault_injection
from support.stalled import LONG_S
from torch import Tensor, nn

import infinity
from infinity.offload.handover import UpdateJob
from infinity.training.unit_updater import UnitUpdater

BLOCKS, DIM, SLEEP_S = 8, 64, 0.01
BLOCK_BYTES = 12 * (DIM * DIM + 2048)  # approximate bytes per block and optimizer pass, each way


class _SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        time.sleep(SLEEP_S)
        return gradient


class SlowBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(SLEEP_S)
        return x + torch.tanh(_SlowBackward.apply(self.linear(x)))


class SlowModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SlowBlock() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def make_engine(path: Path, *, prefetch_units: int, slow_bytes_per_s: int) -> infinity.Engine:
    torch.manual_seed(0)
    engine, *_ = fault_injection.initialize(
        SlowModel(),
        {
            "nvme_path": str(path),
            "placement": {"weights": "disk", "optimizer_state": "disk", "gradients": "host"},
            "chunk_size": 4096,
            "prefetch_units": prefetch_units,
            "io": {"slow_bytes_per_s": slow_bytes_per_s},
        },
        poison=None,
    )
    return engine


def time_steps(engine: infinity.Engine, count: int, *, serial: bool) -> tuple[float, list[float]]:
    """Return the time of the fastest step after the first, and the losses.

    The fastest, because a busy machine only adds time. `serial` waits for the optimizer pass after
    each step.
    """
    torch.manual_seed(1)
    seconds, losses = [], []
    for _ in range(count):
        x = torch.randn(2, DIM, dtype=torch.bfloat16)
        start = time.perf_counter()
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        if serial:
            engine.settle()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
    return min(seconds[1:]), losses


def test_next_forward_overlaps_optimizer_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The optimizer pass waits at its last unit until the next step computes a block."""
    process = UnitUpdater._process
    forward_started, started_in_time = threading.Event(), []

    def gated(self: UnitUpdater, job: UpdateJob, work: Any) -> None:
        if work.unit == job.units[-1] and not started_in_time:
            started_in_time.append(forward_started.wait(LONG_S))
        process(self, job, work)

    monkeypatch.setattr(UnitUpdater, "_process", gated)
    with make_engine(tmp_path, prefetch_units=2, slow_bytes_per_s=0) as engine:
        x = torch.randn(2, DIM, dtype=torch.bfloat16)
        engine.backward(engine(x))
        engine.step()  # returns before the optimizer pass has finished
        assert not forward_started.is_set()
        blocks = engine.module.blocks
        blocks[0].register_forward_hook(lambda *_: forward_started.set())
        engine.backward(engine(x))
    assert started_in_time == [True]


@pytest.mark.clock
def test_pipelined_step_faster_than_serial(tmp_path: Path) -> None:
    """An optimizer pass takes about as long as a forward; overlapped, it costs almost nothing."""
    # All blocks are read and written in the time of one forward, which then hides the pass.
    rate = int(2 * BLOCKS * BLOCK_BYTES / (BLOCKS * SLEEP_S))
    with make_engine(tmp_path, prefetch_units=0, slow_bytes_per_s=rate) as engine:
        serial_s, serial_losses = time_steps(engine, 6, serial=True)
    with make_engine(tmp_path, prefetch_units=2, slow_bytes_per_s=rate) as engine:
        pipelined_s, losses = time_steps(engine, 6, serial=False)
    assert losses == serial_losses
    compute_s = 2 * BLOCKS * SLEEP_S
    assert serial_s > 1.35 * compute_s, "the slow disk must show when nothing overlaps"
    assert pipelined_s < 0.85 * serial_s, (pipelined_s, serial_s, compute_s)


@pytest.mark.clock
def test_stall_times_account_for_wall_time(tmp_path: Path) -> None:
    """Time that is not compute is attributed to a cause."""
    rate = int(2 * BLOCKS * BLOCK_BYTES / (3 * BLOCKS * SLEEP_S))  # the disk is the bottleneck
    with make_engine(tmp_path, prefetch_units=1, slow_bytes_per_s=rate) as engine:
        time_steps(engine, 4, serial=False)
        report = engine.last_report
    assert report is not None
    compute_s = 2 * BLOCKS * SLEEP_S
    stalled_s = sum(report.stall_s.values())
    assert stalled_s > 0.3 * compute_s, "a disk slower than compute must stall it"
    unexplained_s = report.wall_s - stalled_s - compute_s
    assert -0.02 < unexplained_s < 0.75 * compute_s, (report.wall_s, report.stall_s, compute_s)
    assert report.stall_s["update"] + report.stall_s["disk_read"] > 0.8 * stalled_s

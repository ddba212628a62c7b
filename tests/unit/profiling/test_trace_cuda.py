"""Tests of converting CUDA event times to host time, with simulated events."""

from __future__ import annotations

import struct
import time
from typing import Any

import pytest
import torch

from infinity.storage.cuda_events import FAR_MS, CudaClock, CudaEvent, CudaSpan, CudaStamp


class SimulatedGpu:
    """Simulated device clock and progress; counts host waits."""

    def __init__(self) -> None:
        self.now_ms = 7_000_000.0  # device clock: started long before the process
        self.done_ms = self.now_ms  # events up to this time are complete
        self.waits = 0


class SimulatedEvent:
    """Simulated `torch.cuda.Event`; times are 32-bit floats of milliseconds."""

    gpu: SimulatedGpu

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.timing, self.blocking = enable_timing, blocking
        self.at_ms = float("nan")

    def record(self, stream: Any) -> None:
        self.at_ms = self.gpu.now_ms

    def query(self) -> bool:
        return self.at_ms <= self.gpu.done_ms

    def synchronize(self) -> None:
        self.gpu.waits += 1
        self.gpu.done_ms = max(self.gpu.done_ms, self.at_ms)

    def elapsed_time(self, end: SimulatedEvent) -> float:
        assert self.timing and end.timing  # noqa: PT018
        assert self.query() and end.query()  # noqa: PT018
        (rounded,) = struct.unpack("f", struct.pack("f", end.at_ms - self.at_ms))
        return float(rounded)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimulatedGpu:
    gpu = SimulatedGpu()
    monkeypatch.setattr(SimulatedEvent, "gpu", gpu, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", SimulatedEvent)
    return gpu


def test_event_times_are_host_times_without_waiting(gpu: SimulatedGpu) -> None:
    stream: Any = None
    before = time.perf_counter_ns()
    clock = CudaClock(stream)
    after = time.perf_counter_ns()
    assert gpu.waits == 1  # the wait that aligns both clocks
    gpu.now_ms += 5
    begin = CudaStamp(clock, stream)
    gpu.now_ms += 2
    span = CudaSpan(begin, clock, stream)
    assert begin.time_ns() is None
    assert span.time_ns() is None
    gpu.done_ms = gpu.now_ms - 1
    assert begin.time_ns() is not None
    assert span.time_ns() is None
    gpu.done_ms = gpu.now_ms
    began, ended = span.began.time_ns(), span.time_ns()
    assert began is not None
    assert ended is not None
    assert before + 5_000_000 <= began <= after + 5_000_000
    assert ended - began == 2_000_000
    assert began == begin.time_ns()
    assert gpu.waits == 1


def test_event_times_stay_exact_for_hours(gpu: SimulatedGpu) -> None:
    stream: Any = None
    clock = CudaClock(stream)
    start_ms, start_ns = gpu.now_ms, clock._anchor_ns
    worst_ns = 0.0
    for _ in range(5000):  # ten hours
        gpu.now_ms += FAR_MS * 0.73 + 0.123
        gpu.done_ms = gpu.now_ms
        stamp = CudaStamp(clock, stream)
        found = stamp.time_ns()
        assert found is not None
        worst_ns = max(worst_ns, abs(found - start_ns - (gpu.now_ms - start_ms) * 1e6))
    far_ms = gpu.now_ms - start_ms
    single_anchor_ms = struct.unpack("f", struct.pack("f", far_ms))[0]
    assert far_ms > 3.6e7
    assert worst_ns < 1e6  # a millisecond in ten hours; slices of a step are exact to a microsecond
    assert abs(single_anchor_ms - far_ms) < 4  # what a single anchor would give


def test_event_without_timing_is_unchanged(gpu: SimulatedGpu) -> None:
    event = CudaEvent(None)  # type: ignore[arg-type]
    assert not event.raw.timing
    assert event.done()
    assert not hasattr(event, "began")

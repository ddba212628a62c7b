"""Tests of the memory watch: budgets, low machine memory, and reported activations."""

from __future__ import annotations

import itertools
import time
import warnings
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from support.internals import components
from support.small import WIDTH, Block, SmallModel, batch, settings, train
from torch import Tensor, nn

import infinity
from infinity.errors import DoesNotFitError, InfinityWarning
from infinity.profiling import memory_watch

MIB = 1 << 20


class AllocatingBlock(Block):
    """Block that allocates `wanted` bytes in each forward."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.extra_bytes = 0
        self.allocated: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.extra_bytes:
            self.allocated.append(torch.ones(self.extra_bytes // 4))
        return super().forward(x)


def allocating_model() -> SmallModel:
    torch.manual_seed(0)
    model = SmallModel()
    model.blocks = nn.ModuleList(AllocatingBlock(WIDTH) for _ in range(3))  # one class: same units
    return model


def budget_above_now(nbytes: int) -> dict[str, Any]:
    """Return a host budget `nbytes` above what a small engine will plan."""
    rss_bytes = max(psutil.Process().memory_info().rss, 320 * MIB)
    return {"budget": {"host": rss_bytes + nbytes}}


def test_exceeded_budget_raises_with_unit_and_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_watch, "SAMPLE_S", 0.0)
    model = allocating_model()
    block = model.blocks[0]
    assert isinstance(block, AllocatingBlock)
    config = settings(tmp_path, **budget_above_now(256 * MIB))
    with infinity.initialize(model, config)[0] as engine:
        train(engine, 1)
        block.extra_bytes = 512 * MIB
        with pytest.raises(DoesNotFitError) as caught:
            engine(batch(0))
        text = str(caught.value)
        for expected in ("in the forward of unit 'blocks.1'", "(host tier)", "budget.host is",
                     "were planned", "estimated at", "for 18 tokens", "try: smaller"):  # fmt: skip
            assert expected in text, text
        block.extra_bytes = 0
        block.allocated.clear()
        train(engine, 1)  # only the failed step is lost


def test_memory_near_budget_warns_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_watch, "SAMPLE_S", 0.0)
    monkeypatch.setattr(memory_watch, "NEAR_SHARE", 0.0)
    config = settings(tmp_path, **budget_above_now(256 * MIB))
    with infinity.initialize(allocating_model(), config)[0] as engine:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            monkeypatch.setattr(components(engine).hooks.watch, "_next_trim_s", 0.0)
            train(engine, 2)
        texts = [str(w.message) for w in caught if issubclass(w.category, InfinityWarning)]
        assert len(texts) == 1
        assert "budget.host is" in texts[0]


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_freed_heap_is_returned_near_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    calls: list[None] = []
    monkeypatch.setattr(memory_watch, "TRIM_SHARE", share)
    config = settings(tmp_path, **budget_above_now(1 << 30))
    with infinity.initialize(allocating_model(), config)[0] as engine:
        train(engine, 2)  # the first two steps always return freed memory
        monkeypatch.setattr(memory_watch, "return_freed_memory", lambda: calls.append(None))
        train(engine, 3)
    assert len(calls) == (0 if share else 3 * 2), "before each backward, and after each step"


def test_low_machine_memory_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_watch, "SAMPLE_S", 0.0)
    with infinity.initialize(allocating_model(), settings(tmp_path))[0] as engine:
        train(engine, 1)
        monkeypatch.setattr(memory_watch, "LIMIT_CHECK_S", 0.0)
        monkeypatch.setattr(memory_watch, "memory_headroom", lambda: (1000 * MIB, 15 * MIB))
        monkeypatch.setattr(memory_watch, "LOOK_AGAIN_S", 0.0)
        components(engine).hooks.watch._next_limit_check_s = 0.0
        with pytest.raises(DoesNotFitError, match=r"15.00 MiB are left of 1000.00 MiB"):
            train(engine, 1)


def test_transient_low_memory_reading_does_not_raise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = itertools.chain([15] * memory_watch.RECHECKS, itertools.repeat(500))
    monkeypatch.setattr(memory_watch, "SAMPLE_S", 0.0)
    with infinity.initialize(allocating_model(), settings(tmp_path))[0] as engine:
        train(engine, 1)
        monkeypatch.setattr(memory_watch, "LIMIT_CHECK_S", 0.0)
        monkeypatch.setattr(memory_watch, "LOOK_AGAIN_S", 0.0)
        monkeypatch.setattr(
            memory_watch, "memory_headroom", lambda: (1000 * MIB, next(readings) * MIB)
        )
        components(engine).hooks.watch._next_limit_check_s = 0.0
        train(engine, 1)
    assert next(readings) == 500


def test_first_step_reports_include_activation_memory(tmp_path: Path) -> None:
    with infinity.initialize(allocating_model(), settings(tmp_path))[0] as engine:
        for step in range(3):
            train(engine, 1)
            report = engine.last_report
            assert report is not None
            found = report.memory
            assert found["peak"] > 0
            assert ("activations" in found) == (step < 2)
            if step < 2:
                assert found["tokens"] == 18
                assert found["estimated"] > 0
                assert found["activations"] == max(found["peak"] - found["held"], 0)


def test_watch_samples_at_limited_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with infinity.initialize(allocating_model(), settings(tmp_path))[0] as engine:
        train(engine, 3)
        watcher = components(engine).hooks.watch
        samples: list[float] = []
        monkeypatch.setattr(watcher, "_sample", lambda *config: samples.append(config[2]))
        ticks = itertools.count(time.monotonic() + 10, memory_watch.SAMPLE_S / 100)
        monkeypatch.setattr(memory_watch, "time", SimpleNamespace(monotonic=ticks.__next__))
        for _ in range(10_000):
            watcher.at(0, "forward")
        monkeypatch.undo()
        assert 90 <= len(samples) <= 101  # every hundredth
        assert all(b - a >= memory_watch.SAMPLE_S for a, b in pairwise(samples))


def test_budget_excludes_memory_reserved_by_later_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_watch, "SAMPLE_S", 0.0)
    wide = SmallModel(num_blocks=2, width=2048)  # 128 MiB of weights, 512 MiB with all state
    config = settings(tmp_path, **budget_above_now(128 * MIB))
    placement = {"weights": "device", "optimizer_state": "host", "gradients": "host"}
    with (
        infinity.initialize(allocating_model(), config)[0] as engine,
        infinity.initialize(wide, settings(tmp_path, placement, chunk_size=1 << 20))[0],
    ):
        train(engine, 1)

"""Tests of the thread pool of the kernels: concurrent callers, fork, close, float modes, misuse."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from support.adam_values import (
    ADAMW,
    BF16,
    Source,
    assert_same,
    bits,
    copy_aligned,
    fp32_moments,
    update_piece,
)
from support.reference import reference_square_sum, reference_update

from infinity import _adam
from infinity.errors import ConfigError, EngineClosedError
from infinity.optim.cpu import CpuKernels


def test_two_threads_share_one_pool() -> None:
    source = Source(5)
    n = 150_001
    state = source.state(n, split=True, wild=False)
    gradient = source.floats(n, BF16, wild=False)
    total = source.floats(n, torch.float32, wild=False)
    want_total, want_state = total.clone(), [copy_aligned(tensor) for tensor in state]
    for step in range(1, 9):
        reference_update(*want_state[:2], fp32_moments(want_state), gradient, ADAMW, step)
    for _ in range(8):
        want_total.add_(gradient)
    started = threading.Barrier(2)

    def update_all() -> None:
        started.wait()
        for step in range(1, 9):
            update_piece(pool, *state[:2], fp32_moments(state), gradient, ADAMW, step)

    def accumulate() -> None:
        started.wait()
        for _ in range(8):
            pool.accumulate(total, gradient)

    with CpuKernels(3) as pool, ThreadPoolExecutor(2) as executor:
        for future in [executor.submit(update_all), executor.submit(accumulate)]:
            future.result(timeout=600)
    assert_same(state, want_state)
    np.testing.assert_array_equal(bits(total), bits(want_total))


def test_close_during_calls_finishes_them_and_rejects_later_ones() -> None:
    """Calls in progress when the pool closes return correct results; later ones raise."""
    values = Source(6).floats(300_000, torch.float32, wild=False)
    want = reference_square_sum(values)
    pool = CpuKernels(4)
    started = [threading.Event() for _ in range(4)]

    def call_until_closed(event: threading.Event) -> None:
        while True:
            assert pool.square_sum(values) == want
            event.set()

    def work(event: threading.Event) -> None:
        with pytest.raises((EngineClosedError, RuntimeError)):
            call_until_closed(event)

    with ThreadPoolExecutor(4) as executor:
        futures = [executor.submit(work, event) for event in started]
        try:
            assert all(event.wait(600) for event in started)
        finally:
            pool.close()
        for future in futures:
            future.result(timeout=600)


def test_flush_denormal_does_not_change_results() -> None:
    source = Source(8)
    state = source.state(50_000, split=True)
    gradient = source.floats(50_000, torch.float32)
    want = [copy_aligned(tensor) for tensor in state]
    reference_update(*want[:2], fp32_moments(want), gradient, ADAMW, 1)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    try:
        with CpuKernels(2) as pool:
            update_piece(pool, *state[:2], fp32_moments(state), gradient, ADAMW, 1)
        assert float(torch.full((1,), 1e-40) * 2) == 0.0  # torch's setting is restored
    finally:
        torch.set_flush_denormal(False)
    assert_same(state, want)


def run_in_child(body: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.alarm(600)
            body()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_pool_in_forked_child_raises_and_does_not_hang() -> None:
    values = torch.ones(200_000)
    address = values.data_ptr()
    pool = _adam.Pool(3)
    assert pool.square_sum(n=200_000, source=address, source_dtype=_adam.FP32) == 200_000.0
    pools = [pool]
    del pool

    def child() -> None:
        with pytest.raises(RuntimeError, match="fork"):
            pools[0].square_sum(n=200_000, source=address, source_dtype=_adam.FP32)
        pools[0].close()
        pools.clear()  # runs the destructor
        fresh = _adam.Pool(2)
        assert fresh.square_sum(n=200_000, source=address, source_dtype=_adam.FP32) == 200_000.0
        fresh.close()

    assert run_in_child(child) == 0
    assert pools[0].square_sum(n=10, source=address, source_dtype=_adam.FP32) == 10.0


def test_close_is_idempotent_and_final() -> None:
    pool = CpuKernels(3)
    pool.square_sum(torch.ones(200_000))
    pool.close()
    pool.close()
    with pytest.raises(EngineClosedError):
        pool.square_sum(torch.ones(3))
    raw = _adam.Pool()
    raw.close()
    with pytest.raises(RuntimeError, match="closed"):
        raw.copy(nbytes=0, target=0, source=0)


def test_pool_arguments_are_validated() -> None:
    assert _adam.Pool().num_threads == len(os.sched_getaffinity(0))
    assert _adam.Pool().isa == _adam.isas()[-1]
    assert [_adam.Pool(isa=isa).isa for isa in _adam.isas()] == _adam.isas()
    with pytest.raises(ValueError, match=f"sse9.*{_adam.isas()[0]}"):
        _adam.Pool(isa="sse9")
    with pytest.raises(ValueError, match="negative"):
        _adam.Pool(-1)
    with pytest.raises(ConfigError, match="not available"):
        CpuKernels(isa="sse9")
    pool = _adam.Pool(1)
    with pytest.raises(ValueError, match="null"):
        pool.split(n=1, master=0, weight=64, residual=64)
    with pytest.raises(ValueError, match="aligned"):
        pool.square_sum(n=1, source=66, source_dtype=_adam.FP32)
    with pytest.raises(ValueError, match="dtype"):
        pool.square_sum(n=1, source=64, source_dtype=9)


@pytest.mark.parametrize("nbytes", [0, 1, 1000, 600_001, 20_000_003])
def test_copy_writes_only_the_target(nbytes) -> None:
    source = torch.randint(0, 255, (nbytes + 3,), dtype=torch.uint8)[3:]
    with CpuKernels(3) as pool:
        for offset in (0, 1, 63):
            target = torch.full((nbytes + 128,), 255, dtype=torch.uint8)
            pool.copy(target[offset : offset + nbytes], source)
            assert torch.equal(target[offset : offset + nbytes], source)
            assert (target[:offset] == 255).all()
            assert (target[offset + nbytes :] == 255).all()

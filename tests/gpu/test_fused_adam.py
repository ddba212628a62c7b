"""Tests on a real GPU of the fused kernels: bitwise equal to the CPU kernels, and asynchronous."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import pytest
import torch
from support.cuda_pieces import BF16, FLOATS, FP32, HYPERS, PieceBuffers, combinations

from infinity.errors import ConfigError, ResidencyError
from infinity.optim import cuda, cuda_compile
from infinity.optim.cpu import CpuKernels
from infinity.optim.cuda import CudaKernels
from infinity.optim.cuda_launch import SQUARE_TILE, TILE
from infinity.optim.rules import AdamW
from infinity.types import MomentFormat

NO_CUDA = not torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NO_CUDA, reason="torch sees no CUDA device"),
]
SIZES = (1, 3, 127, 128, 129, TILE - 1, TILE, TILE + 1, 300_000)
ADAM = AdamW(lr=1e-2, weight_decay=0.1)


@pytest.fixture(scope="module")
def cpu():
    with CpuKernels() as kernels:
        yield kernels


@pytest.fixture(scope="module")
def gpu() -> CudaKernels:
    device = torch.device("cuda", 0)
    assert cuda.why_not(device) is None  # a GPU without its kernels is a failure, not a skip
    return CudaKernels(device)


@pytest.mark.parametrize("rule", HYPERS)
def test_update_equals_cpu_kernels(gpu, cpu, rule: str) -> None:
    wrong = []
    for combination in combinations(every=True):
        if combination[0] != rule:
            continue
        _, weight, gradient, format = combination
        source = PieceBuffers(seed=7)
        for aligned, wild in itertools.product((True, False), repeat=2):
            params_by_index = itertools.cycle(HYPERS[rule])
            states = [
                source.make(n, weight, gradient, h, format, aligned=aligned, wild=wild)
                for n, h in zip(SIZES, params_by_index, strict=False)
            ]
            on_gpu = [state.copy("cuda:0") for state in states]
            gpu.update_all([state.piece for state in on_gpu])
            cpu.update_all([state.piece for state in states])
            same = [a.same_bytes(b) for a, b in zip(states, on_gpu, strict=True)]
            if not all(same):
                wrong.append((combination, aligned, wild, same))
    assert wrong == []


@pytest.mark.parametrize("step_count", [20])
def test_update_equals_cpu_kernels_after_many_steps(gpu, cpu, step_count: int) -> None:
    state = PieceBuffers(seed=3).make(1_000_000, BF16, BF16, ADAM, MomentFormat.INT8, wild=False)
    on_gpu = state.copy("cuda:0")
    for step in range(1, step_count + 1):
        state.step = on_gpu.step = step
        cpu.update_all([state.piece])
        gpu.update_all([on_gpu.piece])
    assert state.same_bytes(on_gpu)


@pytest.mark.parametrize("count", [40, 300, 700])
def test_update_of_many_parameters_and_groups(gpu, cpu, count: int) -> None:
    source = PieceBuffers(seed=1)
    params_by_index = [AdamW(lr=10.0**-k) for k in range(1, 5)]
    states = [
        source.make(977 * k % 9001 + 1, BF16, BF16, params_by_index[k % 4], MomentFormat.FP32)
        for k in range(count)
    ]
    on_gpu = [state.copy("cuda:0") for state in states]
    gpu.update_all([state.piece for state in on_gpu])
    cpu.update_all([state.piece for state in states])
    assert all(a.same_bytes(b) for a, b in zip(states, on_gpu, strict=True))


@pytest.mark.parametrize("dtype", FLOATS)
def test_square_sums_equal_cpu_kernels(gpu, cpu, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = [0, 1, 4095, 4097, SQUARE_TILE, SQUARE_TILE + 1, 1026 * SQUARE_TILE + 9, 5]
    tensors = [torch.randn(n, generator=generator).to(dtype) for n in sizes]
    on_gpu = [tensor.cuda() for tensor in tensors]
    sums = torch.empty(len(sizes), dtype=torch.float64, device="cuda:0")
    gpu.square_sums(on_gpu, sums)
    assert sums.tolist() == [cpu.square_sum(tensor) for tensor in tensors]
    on_gpu[-1][2] = torch.nan
    assert gpu.square_sum(on_gpu[-1]) != gpu.square_sum(on_gpu[-1])


def test_update_is_enqueued_on_current_stream(gpu, cpu) -> None:
    state = PieceBuffers(seed=2).make(200_000, BF16, BF16, ADAM, MomentFormat.FP32, wild=False)
    on_gpu = state.copy("cuda:0")
    gpu.update_all([state.copy("cuda:0").piece])  # compiles and loads the kernels
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    gradient = on_gpu["gradient"].clone()
    on_gpu["gradient"].zero_()
    torch.cuda.synchronize()
    large = torch.ones(8192, 8192, device="cuda:0")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(100):
            torch.mm(large, large)  # some 2 s of fp32 in all
        on_gpu["gradient"].copy_(gradient)
        gpu.update_all([on_gpu.piece])
        queued = not stream.query()
    assert queued  # the host did not wait
    stream.synchronize()
    cpu.update_all([state.piece])
    assert state.same_bytes(on_gpu)


def test_update_launched_from_another_thread(gpu, cpu) -> None:
    state = PieceBuffers(seed=4).make(5000, FP32, FP32, ADAM, MomentFormat.FP32)
    on_gpu = state.copy("cuda:0")
    errors: list[BaseException] = []

    def work() -> None:
        try:
            gpu.update_all([on_gpu.piece])
            torch.cuda.synchronize()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    cpu.update_all([state.piece])
    assert errors == []
    assert state.same_bytes(on_gpu)


def test_compiled_kernels_are_cached(tmp_path: Path, monkeypatch) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setenv("INFINITY_KERNEL_CACHE", str(tmp_path))
    CudaKernels(device)  # launches one kernel of each kind
    assert len(list(tmp_path.iterdir())) == 2
    monkeypatch.setattr(cuda_compile.core(), "Program", lambda *_: pytest.fail("compiled again"))
    second = CudaKernels(device)
    assert second.square_sum(torch.ones(10, device=device)) == 10.0


def test_invalid_input_is_refused(gpu) -> None:
    piece = PieceBuffers(seed=5).make(300, BF16, BF16, ADAM, MomentFormat.FP32).copy("cuda:0").piece
    with pytest.raises(ResidencyError, match="gradient is on cpu"):
        gpu.update_all([piece._replace(gradient=piece.gradient.cpu())])
    with pytest.raises(ConfigError, match="overlap"):
        gpu.update_all([piece, piece])

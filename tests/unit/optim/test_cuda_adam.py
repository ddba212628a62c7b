"""Tests of the CUDA kernels without a GPU: `fused_adam.cu` runs thread by thread on the host.

Only the launch is emulated; checks, tables, tiles, warps and arithmetic are the real code.
tests/gpu/test_fused_adam.py compares the same pieces on a GPU.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from support.cuda_on_host import HostLauncher, compiler
from support.cuda_pieces import (
    BF16,
    FLOATS,
    FP16,
    FP32,
    HYPERS,
    Combination,
    PieceBuffers,
    combinations,
)
from support.reference import reference_update

from infinity.errors import ConfigError, InfinityError, ResidencyError
from infinity.optim.cpu import CpuKernels, Piece
from infinity.optim.cuda import CudaKernels
from infinity.optim.cuda_launch import SQUARE_TILE, TILE
from infinity.optim.moments import Moment
from infinity.optim.rules import AdamW
from infinity.types import MomentFormat

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler to emulate with")
SIZES = (1, 3, 127, 128, 129, TILE - 1, TILE, TILE + 1, 2 * TILE + 777)
ADAM = AdamW(lr=1e-2, weight_decay=0.1)


@pytest.fixture(scope="module")
def cpu():
    with CpuKernels(num_threads=1) as kernels:
        yield kernels


@pytest.fixture
def launcher() -> HostLauncher:
    return HostLauncher()


@pytest.fixture
def cuda(launcher: HostLauncher) -> CudaKernels:
    return CudaKernels("cpu", launcher)


def check_combination(
    cuda: CudaKernels, cpu: CpuKernels, combination: Combination, rounds: int = 4
) -> None:
    """Compare CUDA, CPU and reference updates of all sizes.

    In two rounds either the aligned or the unaligned pieces have wild values, in four rounds both.
    """
    rule, weight, gradient, format = combination
    source = PieceBuffers(seed=7)
    for number in range(rounds):
        wild = number % 2 == 0
        params_by_index = itertools.cycle(HYPERS[rule])
        buffers = []
        for index, (n, h) in enumerate(zip(SIZES, params_by_index, strict=False)):
            aligned = (index + number + number // 2) % 2 == 0
            options: dict[str, Any] = {"aligned": aligned, "wild": wild, "first": 128 * n}
            buffers.append(source.make(n, weight, gradient, h, format, **options))
        on_cuda, on_cpu, on_reference = ([buffer.copy() for buffer in buffers] for _ in range(3))
        cuda.update_all([buffer.piece for buffer in on_cuda])
        cpu.update_all([buffer.piece for buffer in on_cpu])
        for n, before, from_cuda, from_cpu, from_reference in zip(
            SIZES, buffers, on_cuda, on_cpu, on_reference, strict=True
        ):
            reference_update(*from_reference.piece)
            assert n < 100 or not wild or not from_cuda.same_bytes(before), n
            assert from_cuda.same_bytes(from_cpu), (n, number)
            assert from_cuda.same_bytes(from_reference), (n, number)


def name_of(combination: Combination) -> str:
    return "-".join(str(getattr(field, "value", field)).split(".")[-1] for field in combination)


@pytest.mark.parametrize("combination", combinations(every=False), ids=name_of)
def test_update_bitwise_equal_to_cpu_and_reference(cuda, cpu, combination) -> None:
    check_combination(cuda, cpu, combination, rounds=2)


@pytest.mark.big
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("rule", HYPERS)
def test_update_bitwise_equal_for_every_combination(cuda, cpu, rule: str) -> None:
    for combination in combinations(every=True):
        if combination[0] == rule:
            check_combination(cuda, cpu, combination)


def test_one_launch_updates_many_parameters_and_groups(cuda, cpu, launcher) -> None:
    source = PieceBuffers(seed=1)
    params_by_index = [AdamW(lr=10.0**-k) for k in range(1, 5)]
    for count, kernel in ((40, "update_small"), (41, "update_large"), (340, "update_large")):
        buffers = [
            source.make(17 * k % 131 + 1, BF16, BF16, params_by_index[k % 4], MomentFormat.FP32)
            for k in range(count)
        ]
        for buffer in buffers:
            buffer.grad_scale, buffer.step = 0.5, 3
        copies = [buffer.copy() for buffer in buffers]
        launcher.launched.clear()
        cuda.update_all([buffer.piece for buffer in buffers])
        cpu.update_all([buffer.piece for buffer in copies])
        assert [launch.kernel for launch in launcher.launched] == [kernel]
        assert all(a.same_bytes(b) for a, b in zip(buffers, copies, strict=True))


@pytest.mark.parametrize(("count", "num_groups"), [(700, 1), (150, 150), (20, 15)])
def test_full_launch_table_starts_another_launch(
    cuda, cpu, launcher, count: int, num_groups: int
) -> None:
    source = PieceBuffers(seed=2)
    buffers = [source.make(130, FP32, FP32, ADAM, MomentFormat.FP32) for _ in range(count)]
    for k, buffer in enumerate(buffers):
        buffer.grad_scale, buffer.step = 1.0, k % num_groups + 1
    copies = [buffer.copy() for buffer in buffers]
    launcher.launched.clear()
    cuda.update_all([buffer.piece for buffer in buffers])
    cpu.update_all([buffer.piece for buffer in copies])
    assert len(launcher.launched) == max(-(-count // 340), -(-num_groups // 70))
    assert all(a.same_bytes(b) for a, b in zip(buffers, copies, strict=True))


def test_scalars_distinguished_by_bits(cuda, cpu) -> None:
    buffers = [PieceBuffers(seed=3).make(64, FP32, FP32, ADAM, MomentFormat.FP32) for _ in range(2)]
    for buffer, scale in zip(buffers, (0.0, -0.0), strict=True):
        buffer.grad_scale, buffer.step = scale, 1
    copies = [buffer.copy() for buffer in buffers]
    cuda.update_all([buffer.piece for buffer in buffers])
    cpu.update_all([copies[0].piece])
    reference_update(*copies[1].piece)
    assert all(a.same_bytes(b) for a, b in zip(buffers, copies, strict=True))


@pytest.mark.parametrize("format", list(MomentFormat))
def test_chunked_update_bitwise_equal_to_full_update(cuda, format: MomentFormat) -> None:
    n, first = 3 * TILE + 300, 2**32 - 2 * 128
    full = PieceBuffers(seed=4).make(n, BF16, BF16, ADAM, format, first=first)
    chunked = full.copy()
    cuda.update_all([full.piece])
    piece = chunked.piece
    for start in range(0, n, 640):
        end = min(start + 640, n)
        chunk = piece._replace(
            weight=piece.weight[start:end],
            master_state=None if piece.master_state is None else piece.master_state[start:end],
            gradient=piece.gradient[start:end],
            moments=[moment.part(start, end) for moment in piece.moments],
            first=first + start,
        )
        cuda.update_all([chunk])
    assert chunked.same_bytes(full)


def test_stochastic_rounding_beyond_four_billion_elements(cuda, cpu) -> None:
    for first in (2**32 - 6, 2**32, 2**40 + 1):
        buffer = PieceBuffers(seed=5).make(
            300, FP32, FP32, ADAM, MomentFormat.BF16_STOCHASTIC, first=first, wild=False
        )
        cpu_buffer = buffer.copy()
        cuda.update_all([buffer.piece])
        cpu.update_all([cpu_buffer.piece])
        assert buffer.same_bytes(cpu_buffer), first


@pytest.mark.parametrize("dtype", FLOATS)
def test_square_sums_bitwise_equal_to_cpu(cuda, cpu, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = [0, 1, 15, 17, 4095, 4096, 4097, 8193, SQUARE_TILE - 1, SQUARE_TILE, SQUARE_TILE + 1]
    sizes += [3 * SQUARE_TILE + 5, 0]
    tensors = [
        (torch.randn(n + 1, generator=generator) * 10.0 ** (n % 7 - 3)).to(dtype)[n % 2 :][:n]
        for n in sizes
    ]
    sums = torch.full((len(sizes),), math.nan, dtype=torch.float64)
    cuda.square_sums(tensors, sums)
    assert sums.tolist() == [cpu.square_sum(tensor) for tensor in tensors]
    assert sums.tolist() == [cuda.square_sum(tensor) for tensor in tensors]


def test_square_sums_of_more_than_a_thousand_tiles(cuda, cpu) -> None:
    generator = torch.Generator().manual_seed(1)
    tensor = torch.empty(1026 * SQUARE_TILE + 9, dtype=BF16).normal_(generator=generator)
    assert cuda.square_sum(tensor) == cpu.square_sum(tensor)


def test_square_sums_of_many_tensors_of_several_dtypes(cuda, cpu, launcher) -> None:
    generator = torch.Generator().manual_seed(2)
    tensors = [torch.randn(k, generator=generator).to(FLOATS[k % 3]) for k in range(450)]
    sums = torch.empty(len(tensors), dtype=torch.float64)
    launcher.launched.clear()
    cuda.square_sums(tensors, sums)
    assert sums.tolist() == [cpu.square_sum(tensor) for tensor in tensors]
    assert len(launcher.launched) == 2 * 3 * 2  # two kernels, three dtypes, 127 tensors per table


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_square_sum_propagates_non_finite_values(cuda, dtype: torch.dtype, value: float) -> None:
    tensor = torch.ones(5000, dtype=dtype)
    tensor[4321] = value
    total = cuda.square_sum(tensor)
    assert math.isnan(total) if math.isnan(value) else total == math.inf


def test_empty_update_launches_nothing(cuda, launcher) -> None:
    launcher.launched.clear()
    cuda.update_all([])
    empty = torch.empty(0)
    cuda.update_all([Piece(empty, None, [Moment(empty)] * 2, empty, ADAM, 1)])
    assert launcher.launched == []
    assert cuda.square_sum(torch.empty(0)) == 0.0


def invalid_pieces() -> dict[str, tuple[dict[str, object], type[InfinityError], str]]:
    """Return replacements in a valid 8-bit split piece of 300 elements, with the errors."""
    long, wide = torch.zeros(301, dtype=BF16), torch.zeros(600, dtype=BF16)
    moment = Moment.zeros(300, MomentFormat.INT8)
    exact = Moment.zeros(300, MomentFormat.FP32)
    return {
        "size": ({"gradient": long}, ConfigError, "gradient has 301 elements, expected 300"),
        "dtype": ({"gradient": torch.zeros(300).double()}, ConfigError, "gradient has dtype"),
        "strides": ({"gradient": wide[::2]}, ResidencyError, "contiguous"),
        "device": ({"gradient": long.to("meta")[:300]}, ResidencyError, "gradient is on meta"),
        "no master_state": ({"master_state": None}, ConfigError, "master_state is missing"),
        "master_state": ({"master_state": torch.zeros(300)}, ConfigError, "master_state has dtype"),
        "weight": ({"weight": torch.zeros(300, dtype=torch.int8)}, ConfigError, "weight has"),
        "moments": ({"moments": [moment]}, ConfigError, "1 moments for"),
        "formats": ({"moments": [moment, exact]}, ConfigError, "different formats"),
        "scales": ({"moments": [moment._replace(scales=None)] * 2}, ConfigError, "no scales"),
        "short scales": (
            {"moments": [moment._replace(scales=torch.zeros(2))] * 2},
            ConfigError,
            "scales has 2 elements, expected 3",
        ),
        "first": ({"first": 64}, ConfigError, "begins at element 64"),
        "step": ({"step": 0}, ConfigError, "step is 0"),
        "key": ({"key": -1}, ConfigError, "64 bits"),
        "overlap": ({"moments": [moment, moment]}, ConfigError, "overlap"),
    }


@pytest.mark.parametrize("case", invalid_pieces())
def test_invalid_input_rejected_before_any_write(cuda, case: str) -> None:
    replaced, error, text = invalid_pieces()[case]
    buffers = [PieceBuffers(9).make(300, BF16, BF16, ADAM, MomentFormat.INT8) for _ in range(2)]
    before = [buffer.copy() for buffer in buffers]
    with pytest.raises(error, match=text):
        cuda.update_all([buffers[0].piece, buffers[1].piece._replace(**replaced)])
    assert all(a.same_bytes(b) for a, b in zip(buffers, before, strict=True))


def test_step_zero_rejected_before_first_launch(cuda) -> None:
    buffers = [
        PieceBuffers(9).make(300, dtype, dtype, ADAM, MomentFormat.FP32) for dtype in (FP32, BF16)
    ]
    before = [buffer.copy() for buffer in buffers]
    buffers[1].step = 0
    with pytest.raises(ConfigError, match="step is 0"):
        cuda.update_all([buffer.piece for buffer in buffers])
    assert all(a.same_bytes(b) for a, b in zip(buffers, before, strict=True))


def test_overlapping_pieces_rejected(cuda) -> None:
    buffers = [PieceBuffers(9).make(300, FP32, FP32, ADAM, MomentFormat.FP32) for _ in range(2)]
    first, second = (buffer.piece for buffer in buffers)
    for clash in ({"gradient": first.weight}, {"weight": first.weight}):
        with pytest.raises(ConfigError, match="overlap"):
            cuda.update_all([first, second._replace(**clash)])
    cuda.update_all([first, second._replace(gradient=first.gradient)])  # only read


def test_fp16_weights_equal_rounded_masters(cuda) -> None:
    buffer = PieceBuffers(10).make(500, FP16, FP16, ADAM, MomentFormat.FP32, wild=False)
    cuda.update_all([buffer.piece])
    assert torch.equal(buffer["weight"], buffer["master_state"].to(FP16))

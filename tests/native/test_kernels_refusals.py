"""Tests of argument checks in the kernels: an error before any byte is changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.adam_values import ADAMW, Source, update_piece

from infinity import _adam
from infinity.errors import ConfigError, EngineClosedError, InfinityError, ResidencyError
from infinity.optim.cpu import CpuKernels, Piece
from infinity.optim.moments import Moment
from infinity.optim.rules import SGD, Lion
from infinity.types import MomentFormat

N = 256


@pytest.fixture(scope="module")
def kernels() -> Iterator[CpuKernels]:
    with CpuKernels(1) as pool:
        yield pool


def valid_arguments(kind: MomentFormat = MomentFormat.FP32) -> dict[str, Any]:
    state = Source(1).update_state(N, "split", ADAMW, kind, wild=False)
    return {
        "weight": state.weight,
        "master_state": state.master_state,
        "moments": state.moments,
        "gradient": torch.ones(N),
        "rule_params": ADAMW,
        "step": 1,
    }


def int8_moments(**changes: Any) -> list[Moment]:
    fresh = Moment.zeros(N, MomentFormat.INT8)
    return [fresh._replace(**changes), Moment.zeros(N, MomentFormat.INT8)]


SHARED = torch.zeros(2 * N)
INVALID: list[tuple[dict[str, Any], type[InfinityError], str]] = [
    ({"weight": torch.zeros(N)}, ConfigError, "master_state"),
    ({"weight": torch.zeros(N, dtype=torch.float64)}, ConfigError, "weight has dtype"),
    ({"weight": torch.zeros(N - 1, dtype=torch.bfloat16)}, ConfigError, "elements"),
    ({"master_state": None}, ConfigError, "missing"),
    ({"master_state": torch.zeros(N)}, ConfigError, "master_state has dtype"),
    ({"master_state": torch.zeros(N - 1, dtype=torch.int16)}, ConfigError, "255 elements"),
    ({"gradient": torch.zeros(N + 1)}, ConfigError, "gradient has 257 elements"),
    ({"gradient": torch.zeros(N, dtype=torch.int32)}, ConfigError, "gradient has dtype"),
    ({"gradient": torch.zeros(N, device="meta")}, ResidencyError, "gradient is on meta"),
    ({"gradient": torch.zeros(2 * N)[::2]}, ResidencyError, "strides"),
    ({"gradient": torch.zeros(2, N // 2)}, ResidencyError, "shape"),
    ({"gradient": torch.full((1,), torch.nan).expand(N)}, ResidencyError, "strides"),
    ({"moments": []}, ConfigError, "0 moments"),
    ({"moments": [Moment(torch.zeros(N))] * 3}, ConfigError, "3 moments"),
    ({"rule_params": Lion(lr=0.1)}, ConfigError, "2 moments"),
    ({"rule_params": SGD(lr=0.1)}, ConfigError, "2 moments"),
    ({"moments": [Moment(torch.zeros(N))] * 2}, ConfigError, "overlap"),
    (
        {"moments": [Moment(SHARED[:N]), Moment(SHARED[N - 1 : 2 * N - 1])]},
        ConfigError,
        "overlap",
    ),
    ({"gradient": SHARED[1 : N + 1], "moments": [Moment(SHARED[:N]), Moment(torch.zeros(N))]},
     ConfigError, "overlap"),
    ({"moments": [Moment(torch.zeros(N)), Moment(torch.zeros(N - 1))]}, ConfigError, "moment 2"),
    ({"moments": int8_moments(scales=None)}, ConfigError, "no scales"),
    ({"moments": int8_moments(scales=torch.zeros(1))}, ConfigError, "scales has 1 elements"),
    ({"moments": int8_moments(values=torch.zeros(N))}, ConfigError, "moment 1 has dtype"),
    (
        {"moments": [Moment(torch.zeros(N)), Moment.zeros(N, MomentFormat.BF16)]},
        ConfigError,
        "different formats",
    ),
    ({"moments": int8_moments(), "first": 64}, ConfigError, "element 64"),
    ({"key": -1}, ConfigError, "key -1"),
    ({"key": 2**64}, ConfigError, "64 bits"),
    ({"first": -128}, ConfigError, "first -128"),
    ({"step": 0}, ConfigError, "step is 0"),
    ({"step": -1}, ConfigError, "step is -1"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "pattern"), INVALID, ids=lambda value: str(value)[:40])
def test_invalid_input_raises_and_changes_nothing(kernels, change, error, pattern) -> None:
    arguments = valid_arguments() | change
    tensors = [arguments["weight"], arguments["master_state"], arguments["gradient"]]
    tensors += [tensor for m in arguments["moments"] for tensor in (m.values, m.scales)]
    on_cpu = [t for t in tensors if t is not None and t.is_cpu]
    before = [tensor.clone() for tensor in on_cpu]
    with pytest.raises(error, match=pattern):
        update_piece(kernels, **arguments)
    with pytest.raises(error, match=pattern):
        kernels.update_all([Piece(**valid_arguments()), Piece(**arguments)])
    with pytest.raises(error, match=pattern):
        kernels.prepare([Piece(**arguments)])
    for tensor, copy in zip(on_cpu, before, strict=True):
        assert torch.equal(tensor.nan_to_num(7), copy.nan_to_num(7))


def test_invalid_piece_leaves_valid_pieces_unchanged(kernels) -> None:
    first = valid_arguments()
    state = [first["weight"], first["master_state"], *(m.values for m in first["moments"])]
    before = [tensor.clone() for tensor in state]
    with pytest.raises(ConfigError, match="step is 0"):
        kernels.update_all([Piece(**first), Piece(**(valid_arguments() | {"step": 0}))])
    assert all(torch.equal(one, other) for one, other in zip(state, before, strict=True))


def test_overlapping_pieces_are_refused(kernels) -> None:
    piece = Piece(**valid_arguments())
    with pytest.raises(ConfigError, match="overlap"):
        kernels.update_all([piece, piece])
    same_gradient = Piece(**(valid_arguments() | {"gradient": piece.gradient}))
    kernels.update_all([piece, same_gradient])  # inputs may be shared


def test_invalid_arguments_of_helpers_are_refused(kernels) -> None:
    fp32, bf16 = torch.zeros(8), torch.zeros(8, dtype=torch.bfloat16)
    with pytest.raises(ResidencyError, match="strides"):
        kernels.square_sum(torch.full((1,), torch.nan).expand(8))
    with pytest.raises(ResidencyError, match="strides"):
        kernels.square_sum(torch.zeros(2, 2))
    with pytest.raises(ResidencyError, match="meta"):
        kernels.square_sum(torch.zeros(8, device="meta"))
    with pytest.raises(ConfigError, match="overlap"):
        kernels.accumulate(fp32[1:], fp32[:-1])
    with pytest.raises(ConfigError, match="bytes"):
        kernels.copy(fp32, bf16)
    with pytest.raises(ConfigError, match="values has dtype"):
        kernels.encode(bf16, Moment.zeros(8, MomentFormat.BF16), signed=True)
    with pytest.raises(ConfigError, match="moment has 9 elements"):
        kernels.decode(Moment.zeros(9, MomentFormat.BF16), fp32, signed=True)
    with pytest.raises(ConfigError, match="overlap"):
        kernels.encode(fp32, Moment(fp32), signed=True)
    with pytest.raises(ConfigError, match="cut at element 64"):
        Moment.zeros(N, MomentFormat.INT8).part(64, N)


def test_closed_pool_raises() -> None:
    pool = CpuKernels(1)
    pool.close()
    with pytest.raises(EngineClosedError):
        update_piece(pool, **valid_arguments())
    with pytest.raises(EngineClosedError):
        pool.decode(Moment(torch.zeros(4)), torch.zeros(4), signed=True)
    with pytest.raises(EngineClosedError):
        pool.prepare([Piece(**valid_arguments())])


def test_native_piece_validates_arguments() -> None:
    address = torch.zeros(64).data_ptr()

    def piece(**changes: Any) -> _adam.Piece:
        sizes = {"n": 8, "rule": 0, "layout": 0, "format": 0, "gradient_dtype": _adam.FP32}
        addresses = {"weight": address, "master_state": 0, "gradient": address + 96}
        addresses |= {"moment1": address + 32, "scales1": 0}
        addresses |= {"moment2": address + 64, "scales2": 0}
        others = {"key": 0, "first": 0, "scalars": [1.0] * 9}
        return _adam.Piece(**(sizes | addresses | others | changes))

    piece()
    for changes, pattern in (
        ({"rule": len(_adam.rules())}, "rule"),
        ({"layout": 3}, "layout"),
        ({"format": -1}, "format"),
        ({"gradient_dtype": 9}, "dtype"),
        ({"scalars": [1.0]}, "9 scalars"),
        ({"weight": 0}, "weight is null"),
        ({"moment2": address + 2}, "aligned"),
        ({"gradient": address}, "overlap"),
        ({"format": 3, "first": 1}, "multiple of 128"),
        ({"format": 3}, "scales of moment 1 is null"),
    ):
        with pytest.raises(ValueError, match=pattern):
            piece(**changes)

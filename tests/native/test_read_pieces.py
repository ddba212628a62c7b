"""Tests of the fast conversion of tensors to native pieces (DLPack) against the slow one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.adam_values import ADAMW, Source
from torch import nn

from infinity.errors import ConfigError
from infinity.optim import cpu
from infinity.optim.cpu import CpuKernels, Piece
from infinity.optim.rules import SGD, Lion
from infinity.types import MomentFormat

HYPERS = (ADAMW, Lion(0.1), SGD(0.1), SGD(0.1, momentum=0.9, dampening=0.5))
LAYOUTS = ("fp32", "split", "fp16")
pytestmark = pytest.mark.skipif(cpu._DLPACK_API is None, reason="torch has no table of DLPack")


@pytest.fixture(scope="module")
def kernels() -> Iterator[CpuKernels]:
    with CpuKernels(1) as pool:
        yield pool


def make_pieces(layout: str, kind: MomentFormat, n: int, *, first: int = 256) -> list[Piece]:
    source, pieces = Source(5), []
    for number, rule_params in enumerate(HYPERS):
        state = source.update_state(n, layout, rule_params, kind, wild=False)
        gradient = torch.linspace(-1, 1, n).to((torch.float32, torch.bfloat16)[number % 2])
        moments = state.moments[: rule_params.num_moments]
        pieces.append(
            Piece(
                state.weight, state.master_state, moments, gradient, rule_params, 3, 0.5, 77, first
            )
        )
    return pieces


def convert_fast(pieces: list[Piece]) -> list[Any] | None:
    return cpu._convert_fast(pieces, cpu._settings(pieces))


def state_tensors(pieces: list[Piece]) -> list[torch.Tensor]:
    tensors = [
        t
        for p in pieces
        for t in (p.weight, p.master_state, *(x for m in p.moments for x in m[:2]))
    ]
    return [t for t in tensors if t is not None]


@pytest.mark.parametrize("kind", list(MomentFormat))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", [0, 1, 300])
def test_fast_and_slow_conversion_agree(
    kernels: CpuKernels, layout: str, kind: MomentFormat, n: int, monkeypatch: Any
) -> None:
    fast, slow = make_pieces(layout, kind, n), make_pieces(layout, kind, n)
    assert len(convert_fast(fast) or ()) == len(slow)
    kernels.update_all(fast)
    monkeypatch.setattr(cpu, "_DLPACK_API", None)
    kernels.update_all(slow)
    for one, two in zip(state_tensors(fast), state_tensors(slow), strict=True):
        assert torch.equal(one.view(torch.uint8), two.view(torch.uint8))


@pytest.mark.parametrize(
    "changes",
    [
        {"gradient": torch.zeros(300, dtype=torch.float64)},
        {"gradient": torch.zeros(301)},
        {"gradient": torch.zeros(600)[::2]},
        {"gradient": torch.zeros(3, 100)},
        {"gradient": torch.zeros(300, device="meta")},
        {"gradient": torch.zeros(300).to_sparse()},
        {"gradient": nn.Parameter(torch.zeros(300))},
        {"gradient": None},
        {"gradient": [0.0] * 300},
        {"master_state": None},
        {"master_state": torch.zeros(300)},
        {"moments": ()},
        {"moments": None},
        {"first": 3},
        {"first": -1},
        {"key": 2**64},
        {"key": None},
    ],
    ids=str,
)
def test_unusual_arguments_use_slow_conversion(changes: dict[str, Any]) -> None:
    pieces = make_pieces("split", MomentFormat.INT8, 300)
    assert convert_fast(pieces) is not None
    pieces[0] = pieces[0]._replace(**changes)
    assert convert_fast(pieces) is None
    assert convert_fast(pieces[1:]) is not None  # no pending exception


def test_nn_parameter_uses_slow_conversion(kernels: CpuKernels) -> None:
    (piece, *_), (other, *_) = (make_pieces("fp32", MomentFormat.FP32, 300) for _ in range(2))
    kernels.update_all([piece])
    with_parameter = other._replace(weight=nn.Parameter(other.weight, requires_grad=False))
    assert convert_fast([with_parameter]) is None
    kernels.update_all([with_parameter])
    assert torch.equal(piece.weight, other.weight)


def test_fast_conversion_of_no_pieces_and_foreign_api(
    kernels: CpuKernels, monkeypatch: Any
) -> None:
    assert convert_fast([]) == []
    kernels.update_all([])
    monkeypatch.setattr(cpu, "_DLPACK_API", object())  # not a capsule
    pieces = make_pieces("fp32", MomentFormat.FP32, 300)
    assert convert_fast(pieces) is None
    kernels.update_all(pieces)
    with pytest.raises(ConfigError, match="overlap"):
        kernels.update_all([pieces[0], pieces[0]])

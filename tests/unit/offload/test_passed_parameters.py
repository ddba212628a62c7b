"""Tests of a parameter of one module that is passed to other modules, which also need slots."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import fault_injection
from support.internals import components
from support.small import ON_DEVICE, ON_DISK, settings
from torch import Tensor, nn

import infinity
from infinity.engine import Engine

WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, table: Tensor) -> Tensor:
        return x + self.linear(x) @ table


class Reader(nn.Module):
    """Module that owns the table and reads it by attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)

    def forward(self) -> Tensor:
        return self.table


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.reader = Reader()
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        table = self.reader.table
        for block in self.blocks:
            x = block(x, table=table)
        return x.square().mean()


def build() -> Model:
    torch.manual_seed(3)
    return Model()


def train(path: Path, placement: dict[str, str]) -> tuple[list[float], dict[str, Tensor], int]:
    engine: Engine
    engine, *_ = fault_injection.initialize(build(), settings(path, placement, prefetch_units=0))
    with engine:
        losses = []
        for step in range(4):
            x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(step))
            loss = engine(x)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        with torch.no_grad():
            losses.append(engine.module(x).item())
        num_in_forward = sum(
            entry.forward_depth for entry in components(engine).prefetcher.ledger.entries
        )
        return losses, dict(engine.state_dict(master=True)), num_in_forward


def test_parameter_read_by_another_module_stays_resident(tmp_path: Path) -> None:
    losses, state, num_in_forward = train(tmp_path, ON_DISK)
    expected_losses, expected, _ = train(tmp_path, ON_DEVICE)
    assert losses == expected_losses
    assert [n for n in expected if not torch.equal(state[n], expected[n])] == []
    assert num_in_forward == 0
    plain = build()
    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(0))
    assert losses[0] == pytest.approx(plain(x).item(), rel=1e-6)


def test_forward_exception_releases_shared_parameter(tmp_path: Path) -> None:
    model = build()
    engine, *_ = infinity.initialize(model, settings(tmp_path, ON_DISK, prefetch_units=0))
    with engine:
        with pytest.raises(RuntimeError):
            engine(torch.ones(5, WIDTH + 1))
        assert (
            sum(entry.forward_depth for entry in components(engine).prefetcher.ledger.entries) == 0
        )
        assert engine(torch.ones(5, WIDTH)).isfinite()

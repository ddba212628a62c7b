"""Tests of accumulation windows combined with loss scaling, torch backwards and pending copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_accelerator import FakeAccelerator
from torch import Tensor, nn

import infinity.integrations.deepspeed
from infinity.engine import Engine
from infinity.errors import CheckpointError, TrainingError

IN_RAM = {"weights": "host", "optimizer_state": "host", "gradients": "host"}


def make_engine(precision: str = "fp32", windows: int = 1, **options: Any) -> Engine:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)])
    config = {
        "precision": precision,
        "gradient_accumulation_steps": windows,
        "optimizer": {"type": "SGD", "lr": 0.1},
        "placement": IN_RAM,
    }
    return infinity.integrations.deepspeed.initialize(
        model, config, **{"device": torch.device("cpu"), **options}
    )[0]


def inputs(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(1)).to(dtype)


def loss_of(engine: Engine, factor: float = 1.0) -> Tensor:
    return engine(inputs()).pow(2).mean() * factor


@pytest.mark.parametrize("factor", [3.0, float("nan")])
def test_device_norm_recomputed_after_accumulation(factor: float) -> None:
    norms = []
    for device in (torch.device("cpu"), FakeAccelerator(kernels=True)):
        with make_engine(device=device) as engine:
            engine.backward(loss_of(engine))
            with engine.no_sync():
                engine.backward(loss_of(engine, factor))
            engine.step()
            norms.append((engine.grad_norm, engine.skipped_steps))
    assert str(norms[0]) == str(norms[1])
    assert norms[0][1] == (factor != factor)


@pytest.mark.parametrize("by_engine", [True, False])
def test_unscaled_backward_detected_before_scaled_one(by_engine: bool) -> None:
    with make_engine("fp16") as engine:
        y = engine(inputs(torch.float16))
        y.float().pow(2).mean().backward(retain_graph=True)
        scaled = engine.backward if by_engine else engine.scale
        with pytest.raises(TrainingError, match="was not scaled"):
            scaled(y.float().mean())
        engine.backward(engine(inputs(torch.float16)).float().mean())  # a new window
        engine.step()
        assert engine.global_steps == 1


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        raise RuntimeError("out of memory")


def test_zero_grad_after_failed_backward_resets_window() -> None:
    with make_engine() as engine:
        engine.backward(loss_of(engine))
        engine.step()
        expected = engine.grad_norm
    with make_engine() as engine:
        first, second, third = engine.module
        y = third(second(_Fails.apply(first(inputs()))))
        with pytest.raises(RuntimeError, match="out of memory"):
            y.pow(2).mean().backward()
        engine.optimizer.zero_grad()
        engine.backward(loss_of(engine))
        engine.step()
        assert engine.grad_norm == expected


def test_gradient_readable_while_copy_in_flight() -> None:
    with make_engine("bf16", 2, device=FakeAccelerator(max_delay_s=0.05)) as engine:
        engine(inputs(torch.bfloat16)).float().pow(2).mean().backward()
        for parameter in engine.module.parameters():
            assert engine.gradient(parameter).abs().sum() > 0


def test_checkpoint_after_torch_backward_keeps_gradients(tmp_path: Path) -> None:
    norms = []
    with make_engine() as engine:
        loss_of(engine).backward()
        engine.save_checkpoint(tmp_path / "saved", wait=True)
        engine.step()
        norms.append(engine.grad_norm)
    with make_engine() as engine:
        engine.load_checkpoint(tmp_path / "saved")
        engine.step()
        norms.append(engine.grad_norm)
    assert norms[0] == norms[1] is not None


def test_checkpoint_requires_same_accumulation_steps(tmp_path: Path) -> None:
    with make_engine(windows=2) as engine:
        engine.set_gradient_accumulation_steps(4)
        for _ in range(3):
            engine.backward(loss_of(engine))
            engine.step()
        engine.save_checkpoint(tmp_path / "saved", wait=True)
    with (
        make_engine(windows=2) as engine,
        pytest.raises(CheckpointError, match="of 4 micro-batches"),
    ):
        engine.load_checkpoint(tmp_path / "saved")
    with make_engine(windows=4) as engine:
        engine.load_checkpoint(tmp_path / "saved")
        assert engine.micro_step == 3
        assert engine.is_gradient_accumulation_boundary()

"""Tests of updates by device kernels of units placed on the device: equal bits, no transfers.

The fake accelerator runs kernels when its queue reaches them, and poisons their outputs until
then, so a missing wait shows as NaN.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from overlap.test_old_graphs import NUMEL, Shift
from support.fake_accelerator import FakeAccelerator
from support.grids import diagonal
from support.models import CASES
from support.trainer import Result, make_config, train_case

import infinity

STEPS = 8
ALL = ("device", "device", "device")
NAMES = ("gpt", "encoder_decoder", "frozen", "routed")


def run(name: str, device: Any, placement: tuple[str, str, str] = ALL, **changes: Any) -> Result:
    return train_case(name, device, placement, STEPS, **changes)


def with_kernels(seed: int = 0) -> FakeAccelerator:
    return FakeAccelerator(seed, max_delay_s=0.002, kernels=True)


@pytest.mark.parametrize(("name", "precision"), diagonal(NAMES, ["bf16", "fp16", "fp32"]))
def test_device_update_is_bitwise_equal_without_transfers(name: str, precision: str) -> None:
    expected = run(name, "cpu", precision=precision, gradient_accumulation_steps=2)
    fake = with_kernels()
    result = run(name, fake, precision=precision, gradient_accumulation_steps=2)
    assert result.differences(expected) == []
    assert fake.violations == []
    assert fake.num_updates > 0
    assert result.plan is not None
    assert result.plan.memory["host"]["staging"] == 0
    if CASES[name].regular:
        assert result.report is not None
        assert result.report.moved == result.forecast
        assert result.forecast["from_device"] == result.forecast["to_device"] == 0


@pytest.mark.parametrize("moments", ["bf16", "bf16_stochastic", "8bit"])
def test_device_update_with_lossy_moments_matches_cpu(moments: str) -> None:
    changes = {"precision": "bf16", "optimizer": {"lr": 1e-2, "moments": moments}}
    expected = run("gpt", "cpu", **changes)
    assert run("gpt", with_kernels(), **changes).differences(expected) == []
    other = run("gpt", with_kernels(), **{**changes, "optimizer": {"lr": 1e-2}})
    assert other.differences(expected) != []  # the formats are indeed lossy


@pytest.mark.parametrize("placement", [("device", "device", "host"), ("host", "device", "device")])
def test_partly_resident_state_is_updated_by_cpu_if_configured(
    placement: tuple[str, str, str],
) -> None:
    expected = run("gpt", "cpu", precision="bf16")
    fake = with_kernels()
    result = run("gpt", fake, placement, precision="bf16", update="cpu")
    assert result.differences(expected) == []
    assert fake.num_updates == 0
    assert result.report is not None
    assert result.report.moved == result.forecast


def test_torch_optimizer_runs_on_host() -> None:
    def losses(device: Any) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(40, 40) for _ in range(3)))
        config = make_config(ALL)
        del config["optimizer"]
        engine, *_ = infinity.initialize(
            model, config, optimizer=lambda g: torch.optim.RMSprop(g, lr=1e-3), device=device
        )
        found = []
        generator = torch.Generator().manual_seed(1)
        with engine:
            for _ in range(STEPS):
                loss = engine(torch.randn(5, 40, generator=generator)).square().mean()
                engine.backward(loss)
                engine.step()
                found.append(loss.item())
        return found

    fake = with_kernels()
    assert losses(fake) == losses("cpu")
    assert fake.num_updates == 0


def test_plan_notes_missing_device_kernels() -> None:
    no_kernels = run("gpt", FakeAccelerator(max_delay_s=0.0005), precision="bf16")
    assert no_kernels.plan is not None
    assert any("this fake device was made without" in note for note in no_kernels.plan.notes)
    assert no_kernels.differences(run("gpt", "cpu", precision="bf16")) == []
    offloaded = run("gpt", FakeAccelerator(), ("host", "host", "host"), precision="bf16")
    kernels = run("gpt", with_kernels(), precision="bf16")
    for result in (offloaded, kernels):
        assert result.plan is not None
        assert not any("updated by the host" in note for note in result.plan.notes)


def masters_after_an_old_backward(device: Any) -> torch.Tensor:
    config = make_config(ALL, gradient_clipping=0.0)
    engine, *_ = infinity.initialize(Shift(), config, device=device)
    generator = torch.Generator().manual_seed(0)
    with engine:
        first, second = (engine(torch.randn(NUMEL, generator=generator)) for _ in range(2))
        engine.backward(first)
        engine.step()  # the update is queued and delayed
        engine.backward(second)
        engine.step()
        return engine.state_dict(master=True)["bias"]


def test_old_graph_backward_waits_for_queued_update() -> None:
    expected = masters_after_an_old_backward("cpu")
    delayed = FakeAccelerator(max_delay_s=0.02, kernels=True)
    assert torch.equal(masters_after_an_old_backward(delayed), expected)


def test_state_dict_waits_for_queued_update() -> None:
    for seed in range(12):  # each seed delays queued work differently
        delayed = FakeAccelerator(seed, max_delay_s=0.02, kernels=True)
        config = make_config(ALL, precision="bf16")
        engine, *_ = infinity.initialize(torch.nn.Linear(64, 64), config, device=delayed)
        with engine:
            engine.backward(engine(torch.ones(2, 64, dtype=torch.bfloat16)).sum())
            engine.step()
            values = engine.state_dict(master=True)
            assert all(value.isfinite().all() for value in values.values()), seed

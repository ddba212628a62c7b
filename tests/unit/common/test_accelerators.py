"""Tests of accelerator support with a fake device module in place of `torch.xpu`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from infinity.common import accelerators
from infinity.errors import ConfigError
from infinity.storage.devices import ACCELERATORS, resolve_device


@pytest.fixture
def device_module(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    states = {0: torch.tensor([1]), 1: torch.tensor([2])}
    module = SimpleNamespace(
        states=states,
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: len(states),
        get_rng_state_all=lambda: [state.clone() for state in states.values()],
        get_rng_state=lambda device: states[device.index].clone(),
        set_rng_state=lambda state, where: states.update({getattr(where, "index", where): state}),
    )
    monkeypatch.setattr(accelerators, "TYPES", ("xpu",))
    monkeypatch.setattr(torch, "get_device_module", lambda kind: {"xpu": module}[kind])
    return module


def test_type_count_and_backend_follow_device_module(device_module: SimpleNamespace) -> None:
    assert accelerators.accelerator_type() == "xpu"
    assert accelerators.num_accelerators() == 2
    assert accelerators.backend() == "xccl"
    assert accelerators.is_accelerator(torch.device("xpu", 1))
    device_module.is_available = lambda: False
    assert accelerators.accelerator_type() is None
    assert accelerators.num_accelerators() == 0
    assert accelerators.backend() == "gloo"
    assert not accelerators.is_accelerator(torch.device("cpu"))


def test_rng_states_of_missing_devices_skipped(device_module: SimpleNamespace) -> None:
    saved = accelerators.rng_states()
    assert {kind: [int(state) for state in states] for kind, states in saved.items()} == {
        "xpu": [1, 2]
    }
    device_module.states.clear()
    device_module.states[0] = torch.tensor([9])
    accelerators.set_rng_states(saved)
    assert device_module.states == {0: torch.tensor([1])}
    device_module.is_initialized = lambda: False
    assert accelerators.rng_states() == {}


def test_fork_rng_restores_accelerator_and_cpu_generators(
    device_module: SimpleNamespace,
) -> None:
    before = torch.get_rng_state()
    with accelerators.fork_rng([torch.device("xpu", 1), torch.device("cpu")]):
        device_module.states.update({0: torch.tensor([8]), 1: torch.tensor([9])})
        torch.rand(1)
    assert torch.equal(torch.get_rng_state(), before)
    assert device_module.states == {0: torch.tensor([8]), 1: torch.tensor([2])}


def test_every_type_has_device_and_others_rejected() -> None:
    assert set(ACCELERATORS) == set(accelerators.TYPES)
    with pytest.raises(ConfigError, match=r"(?s)'meta' is not supported yet.*'cpu', 'cuda'"):
        resolve_device("meta")

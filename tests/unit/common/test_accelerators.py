"""Accelerators of a type that this machine does not have, behind a module such as `torch.cuda`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from infinity.common import accelerators


@pytest.fixture
def device_module(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    states = {0: torch.tensor([1]), 1: torch.tensor([2])}
    module = SimpleNamespace(
        states=states,
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: len(states),
        get_rng_state_all=lambda: [state.clone() for state in states.values()],
        set_rng_state=lambda state, index: states.update({index: state}),
    )
    monkeypatch.setattr(accelerators, "TYPES", ("xpu",))
    monkeypatch.setattr(torch, "get_device_module", lambda kind: {"xpu": module}[kind])
    return module


def test_type_number_and_backend_are_those_of_the_module(device_module: SimpleNamespace) -> None:
    assert accelerators.accelerator_type() == "xpu"
    assert accelerators.num_accelerators() == 2
    assert accelerators.backend() == "xccl"
    assert accelerators.is_accelerator(torch.device("xpu", 1))
    device_module.is_available = lambda: False
    assert accelerators.accelerator_type() is None
    assert accelerators.num_accelerators() == 0
    assert accelerators.backend() == "gloo"
    assert not accelerators.is_accelerator(torch.device("cpu"))


def test_rng_states_of_missing_devices_are_left_out(device_module: SimpleNamespace) -> None:
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

"""What CPUAdam keeps between steps: it must not outlive the tensors it was made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.trainer import same_bits
from torch import Tensor, nn

import infinity
from infinity.errors import PresenceError

SHAPE = (9, 40)


def gradient(step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(step)).to(dtype)


def other_memory(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> None:
    parameter.data = parameter.data.clone().mul_(1.5)


def other_moment(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> None:
    state = optimizer.state[parameter]
    state["exp_avg"] = state["exp_avg"] * 0.5


def edited_moment(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> None:
    optimizer.state[parameter]["exp_avg_sq"].mul_(2)


def edited_count(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> None:
    optimizer.state[parameter]["step"].fill_(40)


def other_count(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> None:
    optimizer.state[parameter]["step"] = torch.tensor(40.0)


def no_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> None:
    del optimizer.state[parameter]


def other_gradient_order(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad.t().contiguous().t()


@pytest.mark.parametrize(
    "edit",
    [
        other_memory,
        other_moment,
        edited_moment,
        edited_count,
        other_count,
        no_state,
        other_gradient_order,
    ],
)
def test_edits_between_steps_are_seen_as_torch_sees_them(edit: Callable[..., None]) -> None:
    pairs: list[tuple[torch.optim.Optimizer, nn.Parameter]] = []
    for kind in (infinity.CPUAdam, torch.optim.AdamW):
        parameter = nn.Parameter(gradient(99))
        pairs.append((kind([parameter], lr=0.01), parameter))
    for step in range(6):
        for optimizer, parameter in pairs:
            parameter.grad = gradient(step)
            if step in (2, 3):
                edit(optimizer, parameter)
            optimizer.step()
        ours, theirs = (p.detach() for _, p in pairs)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    first, second = ({k: float(v.sum()) for k, v in o.state[p].items()} for o, p in pairs)
    assert first == pytest.approx(second, rel=1e-4)


def test_a_count_that_is_no_tensor_counts_on() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = infinity.CPUAdam([parameter])
    for step in (1, 2, 8):
        parameter.grad = torch.ones(3)
        if step == 8:
            optimizer.state[parameter]["step"] = 7
        optimizer.step()
        assert float(optimizer.state[parameter]["step"]) == step


def test_a_parameter_that_lost_its_order_is_refused() -> None:
    parameter = nn.Parameter(gradient(0))
    optimizer = infinity.CPUAdam([parameter])
    parameter.grad = gradient(1)
    optimizer.step()
    parameter.data = parameter.data.as_strided((40, 9), (1, 40))  # the same address
    parameter.grad = gradient(2).t()
    with pytest.raises(PresenceError, match="strides"):
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_asking_for_the_state_changes_no_bit(dtype: torch.dtype) -> None:
    """A state dict adds a fingerprint to the state, which the next step takes away."""

    def run(ask: bool) -> Any:
        parameter = nn.Parameter(gradient(0, dtype))
        optimizer = infinity.CPUAdam([parameter], lr=1e-3)
        for step in range(5):
            parameter.grad = gradient(step, dtype)
            optimizer.step()
            if ask:
                optimizer.state_dict()
        return parameter.detach(), *optimizer.state[parameter].values()

    asked, plain = run(ask=True), run(ask=False)
    assert all(same_bits(one, two) for one, two in zip(asked, plain, strict=False))

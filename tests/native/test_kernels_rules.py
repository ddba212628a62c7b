"""Tests of the update rules against torch's optimizers, or their definitions if torch has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.adam_values import BY_KERNEL, Source, update_piece

from infinity.errors import ConfigError
from infinity.optim.cpu import CpuKernels
from infinity.optim.moments import Moment
from infinity.optim.rules import RULES, SGD, Adagrad, Adam, AdamW, Lion, RuleParams
from infinity.optim.update import KernelUpdater, Tile
from infinity.types import MomentFormat

MakeOptimizer = Callable[..., torch.optim.Optimizer]
CASES: list[tuple[RuleParams, MakeOptimizer, dict[str, Any]]] = [
    (SGD(lr=0.1), torch.optim.SGD, {"lr": 0.1}),
    (
        SGD(lr=0.1, weight_decay=0.01, maximize=True),
        torch.optim.SGD,
        {"lr": 0.1, "weight_decay": 0.01, "maximize": True},
    ),
    (
        SGD(lr=0.1, momentum=0.9, dampening=0.3),
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.3},
    ),
    (
        SGD(lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
    ),
    (
        Adagrad(lr=0.1, lr_decay=0.01, weight_decay=0.1, initial_accumulator_value=0.5),
        torch.optim.Adagrad,
        {"lr": 0.1, "lr_decay": 0.01, "weight_decay": 0.1, "initial_accumulator_value": 0.5},
    ),
    (
        AdamW(lr=1e-2, weight_decay=0.1, maximize=True),
        torch.optim.AdamW,
        {"lr": 1e-2, "weight_decay": 0.1, "maximize": True},
    ),
    (
        Adam(lr=1e-2, weight_decay=0.1, maximize=True),
        torch.optim.Adam,
        {"lr": 1e-2, "weight_decay": 0.1, "maximize": True},
    ),
]


@pytest.mark.parametrize(("rule_params", "make", "arguments"), CASES, ids=lambda case: str(case))
def test_rules_follow_torch_for_ten_steps(rule_params, make, arguments) -> None:
    """Results differ only by the rounding of torch's fused operations."""
    source = Source(41)
    n = 3000
    torch_weight = torch.nn.Parameter(torch.randn(n, generator=torch.Generator().manual_seed(1)))
    weight = torch_weight.detach().clone()
    optimizer = make([torch_weight], foreach=False, **arguments)
    moments = [
        Moment(torch.full((n,), value)) for value in rule_params.initial[: rule_params.num_moments]
    ]
    with CpuKernels(1) as kernels:
        for step in range(1, 11):
            gradient = source.floats(n, torch.float32, wild=False)
            torch_weight.grad = gradient.clone()
            optimizer.step()
            update_piece(kernels, weight, None, moments, gradient, rule_params, step)
            torch.testing.assert_close(weight, torch_weight.detach(), rtol=2e-5, atol=2e-6)
    assert not torch.equal(weight, torch.zeros(n))


def test_lion_equals_its_definition() -> None:
    source = Source(42)
    rule_params = Lion(lr=0.01, weight_decay=0.1)
    p, m = np.zeros(2000), np.zeros(2000)
    weight, moment = torch.zeros(2000), Moment(torch.zeros(2000))
    with CpuKernels(1) as kernels:
        for step in range(1, 6):
            gradient = source.floats(2000, torch.float32, wild=False)
            g = gradient.double().numpy()
            p = p * (1 - 0.01 * 0.1) - 0.01 * np.sign(0.9 * m + 0.1 * g)
            m = 0.99 * m + 0.01 * g
            update_piece(kernels, weight, None, [moment], gradient, rule_params, step)
    np.testing.assert_allclose(weight.numpy(), p, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(moment.values.numpy(), m, rtol=1e-5, atol=1e-7)


def test_lion_propagates_nan() -> None:
    weight, moment = torch.ones(4), Moment(torch.zeros(4))
    with CpuKernels(1) as kernels:
        gradient = torch.tensor([1.0, torch.nan, -1.0, 0.0])
        update_piece(kernels, weight, None, [moment], gradient, Lion(lr=0.5), 1)
    assert weight.isnan().tolist() == [False, True, False, False]
    assert weight[[0, 2, 3]].tolist() == [0.5, 1.5, 1.0]


def test_sgd_first_momentum_is_the_gradient() -> None:
    moment = Moment.zeros(8, MomentFormat.FP32)
    gradient = torch.arange(8.0)
    rule_params = SGD(lr=1.0, momentum=0.9, dampening=0.5)
    with CpuKernels(1) as kernels:
        update_piece(kernels, torch.zeros(8), None, [moment], gradient, rule_params, 1)
        assert torch.equal(moment.values, gradient)
        update_piece(kernels, torch.zeros(8), None, [moment], gradient, rule_params, 2)
    torch.testing.assert_close(moment.values, 0.9 * gradient + 0.5 * gradient)


def test_sgd_momentum_enabled_later_starts_with_gradient() -> None:
    """Torch creates the buffer in the first step with momentum and keeps it in steps without."""
    momenta = (0.0, 0.9, 0.5, 0.0, 0.9)
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, 300))
    torch_sgd = torch.optim.SGD([parameter], lr=0.1, dampening=0.3)
    weight, moment = parameter.detach().clone(), Moment.zeros(300, MomentFormat.FP32)
    state: dict[str, torch.Tensor] = {}
    with CpuKernels(1) as kernels:
        updater = KernelUpdater(kernels, ["a", "b"], seed=0)
        for step, momentum in enumerate(momenta, 3):
            parameter.grad = torch.sin(torch.arange(300.0) * step)
            torch_sgd.param_groups[0]["momentum"] = momentum
            torch_sgd.step()
            rule_params = SGD(lr=0.1, momentum=momentum, dampening=0.3)
            tiles = [
                Tile(1, (300,), first, weight[first:end], None, (moment.part(first, end),),
                     parameter.grad[first:end], rule_params, step)
                for first, end in ((0, 128), (128, 300))
            ]  # fmt: skip
            for tile in tiles:
                updater.update([tile], 1.0)
            torch.testing.assert_close(weight, parameter.detach(), rtol=1e-6, atol=1e-7)
            state = updater.state_of(1, rule_params, [moment], (300,), step)
            assert state.keys() == {
                k for k, v in torch_sgd.state[parameter].items() if v is not None
            }
        assert updater.extra_state() == {1: {"begins": 4}}
    buffer = torch_sgd.state[parameter]["momentum_buffer"]
    torch.testing.assert_close(state["momentum_buffer"], buffer, rtol=1e-6, atol=1e-7)


def test_momentum_start_step_is_recorded_and_restored() -> None:
    params_by_index = {0: SGD(0.1), 1: SGD(0.1, momentum=0.9), 2: SGD(0.1, momentum=0.9)}
    with CpuKernels(1) as kernels:
        updater, other = (KernelUpdater(kernels, ["a", "b", "c"], 0) for _ in range(2))
        updater.begin(params_by_index, {0: 7, 1: 7})
        updater.begin(params_by_index, {0: 8, 1: 8, 2: 1})
        other.load_extra_state(updater.extra_state())
        assert other.extra_state() == updater.extra_state() == {1: {"begins": 7}, 2: {"begins": 1}}


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("rule", BY_KERNEL)
def test_invalid_hyperparameters_are_refused(rule, value) -> None:
    defaults = RULES[rule].defaults()
    for name, default in defaults.items():
        if isinstance(default, tuple):
            for number in (0, 1):
                pair = [value if at == number else 0.9 for at in (0, 1)]
                with pytest.raises(ConfigError, match=f"{name[:-1]}{number + 1} is {value}"):
                    RULES[rule].of({**defaults, name: pair})
        elif not isinstance(default, bool) and not (name == "dampening" and value < 0):
            with pytest.raises(ConfigError, match=f"{name} is {value}"):
                RULES[rule].of({**defaults, name: value})


def test_invalid_nesterov_and_step_are_refused() -> None:
    for momentum, dampening in ((0.0, 0.0), (0.9, 0.1)):
        with pytest.raises(ConfigError, match="nesterov"):
            SGD(lr=0.1, momentum=momentum, dampening=dampening, nesterov=True)
    for rule in BY_KERNEL.values():
        for step in (0, -3):
            with pytest.raises(ConfigError, match=f"step is {step}"):
                rule().scalars(step)

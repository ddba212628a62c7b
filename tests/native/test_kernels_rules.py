"""Rules against torch's own optimizers, and against their definitions where torch has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.adam_values import Source

from infinity.errors import ConfigError
from infinity.formats import MomentFormat
from infinity.optim.cpu import CpuKernels
from infinity.optim.moments import Moment
from infinity.optim.rules import AdagradHyper, AdamHyper, Hyper, LionHyper, SgdHyper

Make = Callable[..., torch.optim.Optimizer]
CASES: list[tuple[Hyper, Make, dict[str, Any]]] = [
    (SgdHyper(lr=0.1), torch.optim.SGD, {"lr": 0.1}),
    (
        SgdHyper(lr=0.1, weight_decay=0.01, maximize=True),
        torch.optim.SGD,
        {"lr": 0.1, "weight_decay": 0.01, "maximize": True},
    ),
    (
        SgdHyper(lr=0.1, momentum=0.9, dampening=0.3),
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.3},
    ),
    (
        SgdHyper(lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
    ),
    (
        AdagradHyper(lr=0.1, lr_decay=0.01, weight_decay=0.1, initial_accumulator_value=0.5),
        torch.optim.Adagrad,
        {"lr": 0.1, "lr_decay": 0.01, "weight_decay": 0.1, "initial_accumulator_value": 0.5},
    ),
    (
        AdamHyper(lr=1e-2, weight_decay=0.1, maximize=True),
        torch.optim.AdamW,
        {"lr": 1e-2, "weight_decay": 0.1, "maximize": True},
    ),
    (
        AdamHyper(lr=1e-2, weight_decay=0.1, decoupled=False, maximize=True),
        torch.optim.Adam,
        {"lr": 1e-2, "weight_decay": 0.1, "maximize": True},
    ),
]


@pytest.mark.parametrize(("hyper", "make", "arguments"), CASES, ids=lambda case: str(case))
def test_ten_steps_follow_torch(hyper, make, arguments) -> None:
    """Step by step from the start; only torch's fused operations may differ, by roundings."""
    source = Source(41)
    n = 3000
    theirs = torch.nn.Parameter(torch.randn(n, generator=torch.Generator().manual_seed(1)))
    ours = theirs.detach().clone()
    optimizer = make([theirs], foreach=False, **arguments)
    moments = [Moment(torch.full((n,), value)) for value in hyper.initial[: hyper.num_moments]]
    with CpuKernels(1) as kernels:
        for step in range(1, 11):
            gradient = source.floats(n, torch.float32, wild=False)
            theirs.grad = gradient.clone()
            optimizer.step()
            kernels.update(ours, None, moments, gradient, hyper, step)
            torch.testing.assert_close(ours, theirs.detach(), rtol=2e-5, atol=2e-6)
    assert not torch.equal(ours, torch.zeros(n))


def test_lion_is_its_definition() -> None:
    source = Source(42)
    hyper = LionHyper(lr=0.01, beta1=0.9, beta2=0.99, weight_decay=0.1)
    p, m = np.zeros(2000), np.zeros(2000)
    ours, moment = torch.zeros(2000), Moment(torch.zeros(2000))
    with CpuKernels(1) as kernels:
        for step in range(1, 6):
            gradient = source.floats(2000, torch.float32, wild=False)
            g = gradient.double().numpy()
            p = p * (1 - 0.01 * 0.1) - 0.01 * np.sign(0.9 * m + 0.1 * g)
            m = 0.99 * m + 0.01 * g
            kernels.update(ours, None, [moment], gradient, hyper, step)
    np.testing.assert_allclose(ours.numpy(), p, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(moment.values.numpy(), m, rtol=1e-5, atol=1e-7)


def test_lion_keeps_a_nan_visible() -> None:
    weight, moment = torch.ones(4), Moment(torch.zeros(4))
    with CpuKernels(1) as kernels:
        gradient = torch.tensor([1.0, torch.nan, -1.0, 0.0])
        kernels.update(weight, None, [moment], gradient, LionHyper(lr=0.5), 1)
    assert weight.isnan().tolist() == [False, True, False, False]
    assert weight[[0, 2, 3]].tolist() == [0.5, 1.5, 1.0]


def test_the_first_momentum_is_the_gradient() -> None:
    moment = Moment.zeros(8, MomentFormat.FP32)
    gradient = torch.arange(8.0)
    hyper = SgdHyper(lr=1.0, momentum=0.9, dampening=0.5)
    with CpuKernels(1) as kernels:
        kernels.update(torch.zeros(8), None, [moment], gradient, hyper, 1)
        assert torch.equal(moment.values, gradient)
        kernels.update(torch.zeros(8), None, [moment], gradient, hyper, 2)
    torch.testing.assert_close(moment.values, 0.9 * gradient + 0.5 * gradient)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (AdamHyper, "lr"),
        (AdamHyper, "eps"),
        (AdamHyper, "weight_decay"),
        (AdamHyper, "beta1"),
        (AdamHyper, "beta2"),
        (LionHyper, "lr"),
        (LionHyper, "beta2"),
        (SgdHyper, "lr"),
        (SgdHyper, "momentum"),
        (SgdHyper, "weight_decay"),
        (AdagradHyper, "lr_decay"),
        (AdagradHyper, "initial_accumulator_value"),
    ],
)
def test_hyper_parameters_without_meaning_are_refused(make, name, value) -> None:
    with pytest.raises(ConfigError, match=name):
        make(**{"lr": 0.1, name: value})


def test_more_refusals_of_hyper_parameters() -> None:
    for momentum, dampening in ((0.0, 0.0), (0.9, 0.1)):
        with pytest.raises(ConfigError, match="nesterov"):
            SgdHyper(lr=0.1, momentum=momentum, dampening=dampening, nesterov=True)
    with pytest.raises(ConfigError, match="dampening"):
        SgdHyper(lr=0.1, momentum=0.9, dampening=float("nan"))
    for hyper in (AdamHyper(0.1), LionHyper(0.1), SgdHyper(0.1), AdagradHyper(0.1)):
        for step in (0, -3):
            with pytest.raises(ConfigError, match=f"step is {step}"):
                hyper.scalars(step)

"""Tests of the built-in update rules in fp32 against plain torch, or a reference for Lion."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models import CASES
from support.trainer import Run, make_config, make_device, train, train_torch
from torch import Tensor

from infinity.errors import ConfigError, EngineFailedError

DISK = ("disk", "disk", "disk")
STEPS = 8
LOSS_RTOL = 2e-6  # relative; test_torch.py explains why not equal
WEIGHT_ATOL = 2e-5  # absolute


class ReferenceLion(torch.optim.Optimizer):
    """Algorithm 2 of Chen et al. 2023, in the order of its authors' code."""

    def __init__(
        self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(torch.sign(m * beta1 + p.grad * (1 - beta1)), alpha=-group["lr"])
                m.mul_(beta2).add_(p.grad, alpha=1 - beta2)


RULES: dict[str, dict[str, Any]] = {
    "AdamW-maximize": {"type": "AdamW", "eps": 1e-4, "maximize": True},
    "SGD": {"type": "SGD", "lr": 0.05, "weight_decay": 0.01},
    "SGD-momentum": {"type": "SGD", "lr": 0.05, "momentum": 0.9, "dampening": 0.3},
    "SGD-nesterov": {"type": "SGD", "lr": 0.02, "momentum": 0.9, "nesterov": True},
    "Adagrad": {"type": "Adagrad", "eps": 1e-4, "lr_decay": 0.1, "weight_decay": 0.01},
    "Adagrad-initial": {"type": "Adagrad", "initial_accumulator_value": 0.5},
}


def config_of(optimizer: dict[str, Any], **overrides: Any) -> dict[str, Any]:
    return {**make_config(DISK, gradient_clipping=0.5, **overrides), "optimizer": optimizer}


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=0, atol=WEIGHT_ATOL, msg=name)


@pytest.mark.parametrize("name", RULES)
def test_fp32_rule_close_to_torch(name: str) -> None:
    case, config = CASES["gpt"], config_of(RULES[name])
    batches = case.batches(STEPS)
    result = train(case.build(), batches, config, device=make_device("fake"), groups=case.groups)
    reference = train_torch(case.build(), batches, config, groups=case.groups)
    assert result.losses == pytest.approx(reference.losses, rel=LOSS_RTOL)
    assert_close(result.masters, reference.masters)
    assert len(set(reference.losses)) == STEPS


def test_lion_close_to_reference() -> None:
    """A sign may flip where the interpolation is zero up to rounding: a difference of 2 lr."""
    case = CASES["buffered"]
    options = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}
    config = config_of({"type": "Lion", **options})
    batches = case.batches(STEPS)
    result = train(case.build(), batches, config, device=make_device("fake"))
    reference = train_torch(
        case.build(),
        batches,
        config,
        make_optimizer=lambda groups: ReferenceLion(groups, **options),
    )
    assert result.losses == pytest.approx(reference.losses, rel=1e-3)
    flipped = total = 0
    for name, value in reference.masters.items():
        if value.is_floating_point():
            difference = (result.masters[name] - value).abs()
            flipped += int((difference > WEIGHT_ATOL).sum())
            total += value.numel()
            assert float(difference.max()) <= 2 * STEPS * options["lr"] + WEIGHT_ATOL
    assert flipped <= total * 0.01


def test_groups_with_and_without_momentum_match_torch() -> None:
    """The group that needs the most moments determines what is reserved."""
    case = CASES["gpt"]
    config = config_of({"type": "SGD", "lr": 0.05})

    def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
        split = case.groups
        assert split is not None
        first, *others = split(model)
        return [{**first, "momentum": 0.9}, *others]

    batches = case.batches(STEPS)
    result = train(case.build(), batches, config, device="cpu", groups=groups)
    reference = train_torch(case.build(), batches, config, groups=groups)
    assert result.plan is not None
    assert len(result.plan.precision.moments) == 1
    assert_close(result.masters, reference.masters)


def test_param_group_keys_match_rule() -> None:
    for optimizer in ({}, *RULES.values(), {"type": "Lion"}):
        with Run(CASES["gpt"].build(), config_of(optimizer), device="cpu") as run:
            (group,) = run.engine.optimizer.param_groups
            expected = set(run.config.optimizer.parameters())
            assert set(group) == {"params", *expected}


def test_unreserved_momentum_is_rejected_at_step() -> None:
    case = CASES["gpt"]
    with Run(case.build(), config_of({"type": "SGD", "lr": 0.05}), device="cpu") as run:
        run.engine.backward(case.batch(0).call(run.engine))
        run.engine.optimizer.param_groups[0]["momentum"] = 0.9
        with pytest.raises((ConfigError, EngineFailedError), match="was 0 when the engine was"):
            run.engine.step()


def test_one_cycle_schedule_of_momentum_matches_torch() -> None:
    """OneCycleLR cycles the momentum."""
    case, config = CASES["gpt"], config_of({"type": "SGD", "lr": 0.01, "momentum": 0.9})
    batches = case.batches(STEPS)

    def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=STEPS + 1)

    result = train(case.build(), batches, config, device="cpu", lr_scheduler=one_cycle)
    reference = train_torch(case.build(), batches, config, make_scheduler=one_cycle)
    assert_close(result.masters, reference.masters)

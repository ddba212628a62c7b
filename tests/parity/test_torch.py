"""Tests of the engine against plain torch with torch's AdamW and `clip_grad_norm_`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.grids import diagonal
from support.models import CASES
from support.reference import reference_square_sum
from support.rounding import split_master
from support.trainer import (
    Run,
    cast_frozen,
    make_config,
    make_device,
    same_bits,
    square_sum,
    torch_groups,
    train,
    train_torch,
)
from torch import Tensor, nn

DISK = ("disk", "disk", "disk")
STEPS = 6
# fp32: both compute bitwise equal gradients in the first step. torch's update fuses multiply and
# add, and its square root is not correctly rounded: some ulp of each weight per step. eps is raised
# because some gradients are zero up to rounding (the bias of keys under softmax), and Adam would
# make full steps of that noise.
EPS = 1e-4
FP32_LOSS = 2e-6  # relative
FP32_WEIGHT = 2e-5  # absolute; weights are about 0.1 to 1, and change by 1e-2 per step
# bf16: once a rounding to bf16 differs, gradients differ by their own rounding (2^-9).
BF16_LOSS = 2e-3
BF16_WEIGHT = 2e-2


@pytest.mark.parametrize(
    ("name", "micro_batches", "kind"), diagonal([*CASES], [3, 1], ["AdamW", "AdamW", "Adam"])
)
def test_fp32_training_close_to_torch(name: str, micro_batches: int, kind: str) -> None:
    case = CASES[name]
    config = make_config(
        DISK,
        gradient_accumulation_steps=micro_batches,
        optimizer={"eps": EPS, "type": kind},
    )
    batches = case.batches(STEPS * micro_batches)
    result = train(case.build(), batches, config, device=make_device("fake"), groups=case.groups)
    reference = train_torch(case.build(), batches, config, groups=case.groups)
    assert result.losses[0] == reference.losses[0]
    assert max(reference.norms) > 0.5  # clipping takes effect
    assert result.norms == pytest.approx(reference.norms, rel=1e-4)
    assert result.losses == pytest.approx(reference.losses, rel=FP32_LOSS)
    assert_close(result.masters, reference.masters, FP32_WEIGHT)


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if value.is_floating_point():
            torch.testing.assert_close(actual[name], value, rtol=0, atol=tolerance, msg=name)
        else:
            assert same_bits(actual[name], value), name


@pytest.mark.parametrize("name", CASES)
def test_bf16_training_close_to_torch(name: str) -> None:
    """The reference uses bf16 copies of fp32 masters, bf16 gradients, and AdamW on the masters."""
    case = CASES[name]
    config = make_config(DISK, precision="bf16", optimizer={"eps": EPS})
    batches = case.batches(STEPS)
    result = train(case.build(), batches, config, device=make_device("fake"), groups=case.groups)
    losses, masters = _bf16_emulation(case.build(), batches, config, case.groups)
    assert result.losses[0] == losses[0]
    # A rounding may route a token to another expert.
    assert result.losses == pytest.approx(losses, rel=BF16_LOSS * (1 + (name == "stacked")))
    for key, value in masters.items():
        torch.testing.assert_close(result.masters[key], value, rtol=0, atol=BF16_WEIGHT, msg=key)


def _bf16_emulation(
    model: nn.Module,
    batches: list[Any],
    config: dict[str, Any],
    groups: Callable[[nn.Module], list[dict[str, Any]]] | None,
) -> tuple[list[float], dict[str, Tensor]]:
    cast_frozen(model, torch.bfloat16)
    masters: dict[int, nn.Parameter] = {}
    master_groups: list[dict[str, Any]] = []
    for group in torch_groups(model, groups):
        group_masters = []
        for parameter in group["params"]:
            master = nn.Parameter(parameter.detach().clone())
            masters[id(parameter)] = master
            group_masters.append(master)
        master_groups.append({**group, "params": group_masters})
    settings = config["optimizer"]
    optimizer = torch.optim.AdamW(
        master_groups,
        lr=settings["lr"],
        eps=settings["eps"],
        weight_decay=settings["weight_decay"],
        foreach=False,
        fused=False,
    )

    def publish() -> None:
        for parameter in model.parameters():
            if id(parameter) in masters:
                flat = masters[id(parameter)].detach().reshape(-1)
                parameter.data = split_master(flat)[0].view(parameter.shape)

    publish()
    losses = []
    for batch in batches:
        loss = batch.call(model)
        loss.backward()
        losses.append(loss.item())
        for parameter in model.parameters():
            if id(parameter) in masters and parameter.grad is not None:
                masters[id(parameter)].grad = parameter.grad.float()
                parameter.grad = None
        nn.utils.clip_grad_norm_(masters.values(), config["gradient_clipping"], foreach=False)
        optimizer.step()
        optimizer.zero_grad()
        publish()
    named = {n: masters[id(p)] for n, p in model.named_parameters() if id(p) in masters}
    return losses, {name: master.detach() for name, master in named.items()}


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.7**step),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=7),
    "one_cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(
        o, max_lr=2e-2, total_steps=STEPS + 1
    ),
}


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("by_engine", [True, False], ids=["engine_steps_it", "user_steps_it"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_match_torch(name: str, by_engine: bool) -> None:
    """Groups have different rates; OneCycleLR changes betas too."""
    case, make = CASES["gpt"], SCHEDULERS[name]
    config = make_config(DISK, optimizer={"eps": EPS})
    batches = case.batches(STEPS)
    reference_lr: list[list[float]] = []

    def record_lr(index: int, model: nn.Module) -> None:
        reference_lr.append([g["lr"] for g in optimizers[0].param_groups])

    optimizers: list[torch.optim.Optimizer] = []

    def make_recorded(optimizer: torch.optim.Optimizer) -> Any:
        optimizers.append(optimizer)
        return make(optimizer)

    reference = train_torch(
        case.build(),
        batches,
        config,
        groups=case.groups,
        make_scheduler=make_recorded,
        before_batch=record_lr,
    )
    options = {"lr_scheduler": make} if by_engine else {}
    engine_lr, losses = [], []
    with Run(case.build(), config, device="cpu", groups=case.groups, **options) as run:
        engine = run.engine
        scheduler = None if by_engine else make(engine.optimizer)
        for batch in batches:
            engine_lr.append([g["lr"] for g in engine.optimizer.param_groups])
            loss = batch.call(engine)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            if scheduler is not None:
                scheduler.step()
        masters = run.masters()
    assert engine_lr == reference_lr
    assert len({tuple(rates) for rates in engine_lr}) > STEPS // 2
    assert losses == pytest.approx(reference.losses, rel=FP32_LOSS)
    assert_close(masters, reference.masters, FP32_WEIGHT)


@pytest.mark.parametrize(
    "by_engine",
    [
        True,
        False,
    ],
    ids=["engine_steps_it", "user_steps_it"],
)
def test_scheduler_step_does_not_warn(by_engine: bool) -> None:
    case, make = CASES["gpt"], SCHEDULERS["cosine"]
    options = {"lr_scheduler": make} if by_engine else {}
    with Run(case.build(), make_config(), device="cpu", **options) as run:
        scheduler = None if by_engine else make(run.engine.optimizer)
        run.engine.backward(case.batch(0).call(run.engine))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run.engine.step()
            if scheduler is not None:
                scheduler.step()


def test_learning_rate_is_captured_at_step() -> None:
    """Edits of groups during an optimizer pass do not affect it."""
    case = CASES["gpt"]
    config = make_config(DISK, precision="bf16")
    batches = case.batches(10)
    expected = train(case.build(), batches, config, device="cpu")
    losses = []
    with Run(case.build(), config, device="cpu") as run:
        engine = run.engine
        group = engine.optimizer.param_groups[0]
        lr = group["lr"]
        for batch in batches:
            loss = batch.call(engine)
            engine.backward(loss)
            group["lr"] = lr
            engine.step()
            group.update(lr=math.inf)
            losses.append(loss.item())
        masters = run.masters()
    assert losses == expected.losses
    assert all(same_bits(masters[k], v) for k, v in expected.masters.items())


@pytest.mark.parametrize("size", [0, 1, 300, 4096, 5000, 3 * 4096 + 17])
def test_square_sum_matches_reference(size: int) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(size))
    assert square_sum(values) == reference_square_sum(values)
    assert square_sum(values.bfloat16()) == reference_square_sum(values.bfloat16())

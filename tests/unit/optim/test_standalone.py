"""Tests of CPUAdam and FusedAdam as drop-in replacements of torch's AdamW and Adam."""

from __future__ import annotations

import copy
import gc
import os
import signal
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.leaks import tasks
from support.reference import reference_update
from support.trainer import same_bits
from support.waiting import wait_until
from torch import Tensor, nn

import infinity
from infinity.errors import ConfigError, InfinityError
from infinity.optim.moments import Moment
from infinity.optim.rules import AdamW

SHAPES = ((17, 9), (33,), (), (2, 3, 4, 5), (0, 4), (700, 11))
CLASSES = (infinity.CPUAdam, infinity.FusedAdam)
STEPS = 6


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def parameters(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]


def gradients(number: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + number)
    return [torch.randn(s, generator=generator).to(dtype) for s in SHAPES]


def steps(optimizer: Any, params: list[nn.Parameter], first: int = 0, count: int = STEPS) -> None:
    for number in range(first, first + count):
        for parameter, gradient in zip(params, gradients(number, params[0].dtype), strict=True):
            parameter.grad = gradient
        optimizer.step()


def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": params[:3], "lr": 3e-2, "betas": (0.8, 0.99)},
        {"params": params[3:], "weight_decay": 0.2},
    ]


def assert_close(actual: list[nn.Parameter], expected: list[nn.Parameter]) -> None:
    for actual_param, expected_param in zip(actual, expected, strict=True):
        torch.testing.assert_close(
            actual_param.detach(), expected_param.detach(), rtol=2e-6, atol=2e-6
        )


def assert_same(actual: list[nn.Parameter], expected: list[nn.Parameter]) -> None:
    for actual_param, expected_param in zip(actual, expected, strict=True):
        assert same_bits(actual_param.detach(), expected_param.detach())


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("adamw", [True, False])
@pytest.mark.parametrize("maximize", [True, False])
def test_step_matches_torch(kind: Any, adamw: bool, maximize: bool) -> None:
    params, torch_params = parameters(), parameters()
    options = {"lr": 1e-2, "eps": 1e-6, "weight_decay": 0.1, "maximize": maximize}
    peer = torch.optim.AdamW if adamw else torch.optim.Adam
    optimizer = kind(groups(params), adamw_mode=adamw, **options)
    torch_optimizer = peer(groups(torch_params), foreach=False, **options)
    steps(optimizer, params)
    steps(torch_optimizer, torch_params)
    assert_close(params, torch_params)
    for param, torch_param in zip(params, torch_params, strict=True):
        if param.numel():
            assert optimizer.state[param].keys() == torch_optimizer.state[torch_param].keys()
            assert (
                optimizer.state[param]["step"]
                == torch_optimizer.state[torch_param]["step"]
                == STEPS
            )
            for name in ("exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(
                    optimizer.state[param][name], torch_optimizer.state[torch_param][name]
                )


def test_defaults_match_torch() -> None:
    optimizer, torch_optimizer = infinity.CPUAdam(parameters()), torch.optim.AdamW(parameters())
    for name in ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize"):
        assert optimizer.defaults[name] == torch_optimizer.defaults[name]


def test_step_without_bias_correction() -> None:
    (p,) = params = [nn.Parameter(torch.full((5,), 2.0))]
    optimizer = infinity.CPUAdam(params, lr=0.1, weight_decay=0.0, bias_correction=False)
    p.grad = torch.full((5,), 3.0)
    optimizer.step()
    m, v = 0.1 * 3, 0.001 * 9
    torch.testing.assert_close(p.detach(), torch.full((5,), 2 - 0.1 * m / (v**0.5 + 1e-8)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_bitwise_equal_to_reference(dtype: torch.dtype) -> None:
    params = parameters(dtype)
    optimizer = infinity.CPUAdam(params, lr=1e-2, num_threads=2)
    steps(optimizer, params)
    for index, start in enumerate(parameters(dtype)):
        weight = start.detach().clone().reshape(-1)
        master_state: Tensor | None = None
        if dtype is torch.bfloat16:
            master_state = torch.zeros_like(weight, dtype=torch.int16)
        elif dtype is torch.float16:
            master_state = weight.float()
        moments = [Moment(torch.zeros(weight.numel())) for _ in range(2)]
        for step in range(1, STEPS + 1):
            gradient = gradients(step - 1, dtype)[index].reshape(-1)
            reference_update(weight, master_state, moments, gradient, AdamW(lr=1e-2), step)
        assert same_bits(params[index].detach().reshape(-1), weight)
        if weight.numel():
            assert same_bits(
                optimizer.state[params[index]]["exp_avg"].reshape(-1), moments[0].values
            )


@pytest.mark.parametrize("moments", ["bf16", "8bit"])
def test_lossy_moments_rejected_outside_engine(moments: str) -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = infinity.CPUAdam([p], moments=moments)
    p.grad = torch.ones(3)
    with pytest.raises(ConfigError, match=f"moments='{moments}' is for the engine"):
        optimizer.step()
    assert torch.equal(p.detach(), torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_master_accumulates_updates_below_last_bit(dtype: torch.dtype) -> None:
    """Updates far below the last bit accumulate with a master and are lost without."""
    moved = {}
    for master in (True, False):
        (p,) = params = [nn.Parameter(torch.ones(8, dtype=dtype))]
        optimizer = infinity.CPUAdam(params, lr=1e-4, weight_decay=0.0, master=master)
        for _ in range(200):
            p.grad = torch.ones(8, dtype=dtype)
            optimizer.step()
        moved[master] = 1 - float(p.detach()[0])
        assert any(name in optimizer.state[p] for name in ("residual", "master")) == master
    assert moved[True] == pytest.approx(200 * 1e-4, rel=0.2)
    assert moved[False] == 0


@pytest.mark.parametrize("gradient_dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_narrower_dtype_accepted(gradient_dtype: torch.dtype) -> None:
    """torch allows another dtype of `.grad` only if `grad_dtype` is set explicitly."""
    params, expected_params = parameters(), parameters()
    optimizer, expected_optimizer = (
        infinity.CPUAdam(params, lr=1e-2),
        infinity.CPUAdam(expected_params, lr=1e-2),
    )
    for number in range(3):
        for param, expected_param, g in zip(
            params, expected_params, gradients(number, gradient_dtype), strict=True
        ):
            param.grad_dtype = None
            param.grad, expected_param.grad = g, g.float()
        optimizer.step()
        expected_optimizer.step()
    assert_same(params, expected_params)


def test_grad_scale_applied() -> None:
    params, expected_params = parameters(), parameters()
    optimizer, expected_optimizer = infinity.CPUAdam(params), infinity.CPUAdam(expected_params)
    for param, expected_param, g in zip(params, expected_params, gradients(0), strict=True):
        param.grad, expected_param.grad = g * 4, g.clone()
    optimizer.step(grad_scale=0.25)
    expected_optimizer.step()
    assert_same(params, expected_params)


# --- state dicts, copies ---------------------------------------------------------------------


@pytest.mark.parametrize("from_torch", [True, False], ids=["from_torch", "to_torch"])
def test_state_dict_exchanged_with_torch(from_torch: bool) -> None:
    params, torch_params = parameters(), parameters()
    optimizer, torch_optimizer = (
        infinity.CPUAdam(groups(params)),
        torch.optim.AdamW(groups(torch_params)),
    )
    if from_torch:
        steps(torch_optimizer, torch_params)
        optimizer.load_state_dict(torch_optimizer.state_dict())
    else:
        steps(optimizer, params)
        torch_optimizer.load_state_dict(
            copy.deepcopy(optimizer.state_dict())
        )  # torch would share the tensors
    with torch.no_grad():
        for param, torch_param in zip(params, torch_params, strict=True):
            (param if from_torch else torch_param).copy_(torch_param if from_torch else param)
    steps(optimizer, params, first=STEPS)
    steps(torch_optimizer, torch_params, first=STEPS)
    assert_close(params, torch_params)
    assert [g["lr"] for g in optimizer.param_groups] == [3e-2, 1e-3]


def test_step_count_independent_of_torch_defaults() -> None:
    """A step count in fp16 could not exceed 2048."""
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("meta"):
            weight = nn.Parameter(torch.ones(3, dtype=torch.float32, device="cpu"))
            optimizer = infinity.CPUAdam([weight])
            weight.grad = torch.ones(3, dtype=torch.float32, device="cpu")
            optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    step = optimizer.state[weight]["step"]
    assert (step.item(), step.dtype, step.device.type) == (1, torch.float32, "cpu")


def test_lazily_negated_gradient_resolved() -> None:
    weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    weights[0].grad = torch._neg_view(torch.ones(3))
    weights[1].grad = -torch.ones(3)
    infinity.CPUAdam(weights).step()
    assert torch.equal(*weights)
    assert (weights[0] > 1).all()


def test_incompatible_state_dict_rejected_and_state_unchanged() -> None:
    params = parameters()
    optimizer = infinity.CPUAdam(params)
    steps(optimizer, params)
    before = copy.deepcopy(optimizer.state_dict())
    amsgrad = torch.optim.AdamW(amsgrad_params := parameters(), amsgrad=True)
    steps(amsgrad, amsgrad_params)
    sgd = torch.optim.SGD(sgd_params := parameters(), momentum=0.9)
    steps(sgd, sgd_params)
    for source, message in ((amsgrad, "amsgrad"), (sgd, "lacks step")):
        with pytest.raises(ConfigError, match=message):
            optimizer.load_state_dict(source.state_dict())
    with pytest.raises(ValueError, match="doesn't match the size"):
        optimizer.load_state_dict(infinity.CPUAdam(parameters()[:2]).state_dict())
    after = optimizer.state_dict()
    assert all(
        same_bits(after["state"][i][n], v) for i, s in before["state"].items() for n, v in s.items()
    )


# --- usage -----------------------------------------------------------------------------------


def test_scheduler_closure_and_zero_grad_match_torch() -> None:
    def run(kind: Any) -> tuple[list[float], list[Tensor]]:
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = kind(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=8)
        inputs = torch.randn(4, 6)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            return loss

        losses = []
        for _ in range(7):
            losses.append(optimizer.step(closure).item())
            scheduler.step()
        return losses, [p.detach() for p in model.parameters()]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        actual, expected = run(infinity.CPUAdam), run(torch.optim.AdamW)
    assert actual[0] == pytest.approx(expected[0], rel=1e-5)
    for actual_param, expected_param in zip(actual[1], expected[1], strict=True):
        torch.testing.assert_close(actual_param, expected_param, rtol=1e-5, atol=1e-6)


def test_tensor_learning_rate_accepted() -> None:
    params, expected_params = parameters(), parameters()
    rate = torch.tensor(0.25)
    optimizer, expected_optimizer = (
        infinity.CPUAdam(params, lr=rate),
        infinity.CPUAdam(expected_params, lr=0.25),
    )
    steps(optimizer, params, count=2)
    steps(expected_optimizer, expected_params, count=2)
    rate.fill_(0.125)
    expected_optimizer.param_groups[0]["lr"] = 0.125
    steps(optimizer, params)
    steps(expected_optimizer, expected_params)
    assert_same(params, expected_params)


def test_step_hooks_run() -> None:
    (p,) = params = [nn.Parameter(torch.ones(4))]
    optimizer = infinity.CPUAdam(params, lr=0.5, weight_decay=0.0)
    seen: list[Any] = []
    optimizer.register_step_pre_hook(
        lambda _, __, kwargs: seen.append((kwargs, float(p.detach()[0])))
    )
    optimizer.register_step_post_hook(lambda *_: seen.append(float(p.detach()[0])))
    p.grad = torch.ones(4)
    optimizer.step(grad_scale=2.0)
    assert seen == [({"grad_scale": 2.0}, 1.0), pytest.approx(0.5)]


def test_forked_child_starts_new_threads() -> None:
    params = [nn.Parameter(torch.ones(300_000))]
    optimizer = infinity.CPUAdam(params, num_threads=2)
    params[0].grad = torch.ones(300_000)
    optimizer.step()
    child = os.fork()
    if child == 0:
        signal.alarm(600)
        try:
            optimizer.step()
            os._exit(0 if optimizer.state[params[0]]["step"] == 2 else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    optimizer.step()
    assert optimizer.state[params[0]]["step"] == 2


@pytest.mark.parametrize("master", [True, False])
@pytest.mark.parametrize(
    "way",
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.float16),
        (torch.float16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
    ids=str,
)
def test_model_dtype_change_continues_training(
    way: tuple[torch.dtype, torch.dtype], master: bool
) -> None:
    """`.half()` and similar calls replace the data of the same parameters."""
    before, after = way
    model = nn.Linear(5, 3).to(before)
    used = infinity.CPUAdam(model.parameters(), lr=1e-2, master=master)

    def step(optimizer: infinity.CPUAdam, model: nn.Module) -> None:
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.5)
        optimizer.step()

    step(used, model)
    model.to(after)
    twin = copy.deepcopy(model)
    fresh = infinity.CPUAdam(twin.parameters(), lr=1e-2, master=master)
    moments = copy.deepcopy(used.state_dict())
    for state in moments["state"].values():
        for name in ("residual", "master"):
            state.pop(name, None)
    fresh.load_state_dict(moments)
    for _ in range(3):
        step(used, model)
        step(fresh, twin)
    assert_same(list(model.parameters()), list(twin.parameters()))
    master_names = {torch.bfloat16: {"residual"}, torch.float16: {"master"}}.get(after, set())
    for p in model.parameters():
        expected_keys = {"step", "exp_avg", "exp_avg_sq"} | (master_names if master else set())
        assert used.state[p].keys() == expected_keys


def test_parameters_without_gradient_unchanged() -> None:
    params = parameters()
    optimizer = infinity.CPUAdam(params)
    params[0].grad = torch.ones(SHAPES[0])
    before = [p.detach().clone() for p in params]
    optimizer.step()
    assert not same_bits(params[0].detach(), before[0])
    for parameter, old in zip(params[1:], before[1:], strict=True):
        assert same_bits(parameter.detach(), old)
        assert parameter not in optimizer.state


def test_step_increments_autograd_version() -> None:
    p = nn.Parameter(torch.ones(4))
    optimizer = infinity.CPUAdam([p])
    loss = (p * p).sum()
    p.grad = torch.ones(4)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_non_contiguous_gradients_accepted() -> None:
    params, expected_params = [nn.Parameter(torch.ones(6, 4))], [nn.Parameter(torch.ones(6, 4))]
    params[0].grad = torch.randn(4, 6).t()
    expected_params[0].grad = params[0].grad.contiguous()
    infinity.CPUAdam(params).step()
    infinity.CPUAdam(expected_params).step()
    assert_same(params, expected_params)


def test_threads_stopped_when_optimizer_freed() -> None:
    before = tasks()

    def used() -> infinity.CPUAdam:
        params = [nn.Parameter(torch.ones(300_000))]
        optimizer = infinity.CPUAdam(params, num_threads=3)
        params[0].grad = torch.ones(300_000)
        optimizer.step()
        return optimizer

    optimizer = used()
    assert tasks() - before
    del optimizer
    gc.collect()
    _await_threads(before)


def _await_threads(before: set[str]) -> None:
    assert wait_until(lambda: not tasks() - before)


def test_default_thread_count_within_affinity() -> None:
    optimizer = infinity.CPUAdam([p := nn.Parameter(torch.ones(3))])
    p.grad = torch.ones(3)
    optimizer.step()
    (kernels,) = optimizer._kernels.values()
    assert 1 <= kernels.num_threads <= len(os.sched_getaffinity(0))


def test_results_independent_of_thread_count() -> None:
    runs = []
    for threads in (1, 2, 5):
        params = parameters()
        steps(infinity.CPUAdam(params, num_threads=threads), params)
        runs.append(params)
    assert_same(runs[0], runs[1])
    assert_same(runs[0], runs[2])


# --- errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr is -1"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"lr": "a"}, "lr='a'"),
        ({"lr": None}, "lr=None"),
        ({"lr": torch.ones(2)}, "lr=tensor"),
        ({"betas": (1.0, 0.9)}, "beta1 is 1"),
        ({"betas": (0.9, float("nan"))}, "beta2 is nan"),
        ({"betas": (-0.1, 0.9)}, "beta1 is -0.1"),
        ({"betas": None}, "betas=None"),
        ({"betas": (0.9,)}, "betas="),
        ({"betas": (0.9, 0.9, 0.9)}, "betas="),
        ({"eps": -1e-8}, "eps is"),
        ({"weight_decay": float("inf")}, "weight_decay is inf"),
        ({"amsgrad": True}, "amsgrad is not supported"),
        ({"moments": "int4"}, "moments is 'int4'"),
    ],
    ids=str,
)
def test_invalid_options_rejected_at_construction(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        infinity.CPUAdam(parameters(), **options)


@pytest.mark.parametrize("kind", CLASSES)
def test_invalid_parameters_rejected_at_construction(kind: Any) -> None:
    for bad, message in (
        (nn.Parameter(torch.ones(4, 6).t()), "strides"),
        (nn.Parameter(torch.ones(4, dtype=torch.float64)), "float64"),
        (nn.Parameter(torch.ones(4, device="meta")), "meta"),
    ):
        with pytest.raises(InfinityError, match=message):
            kind([bad])
        optimizer = kind([nn.Parameter(torch.ones(3))])
        with pytest.raises(InfinityError, match=message):
            optimizer.add_param_group({"params": [bad]})
        assert len(optimizer.param_groups) == 1


def test_invalid_gradients_rejected_before_any_write() -> None:
    good, bad = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4, 2))
    optimizer = infinity.CPUAdam([good, bad])
    good.grad = torch.ones(4)
    bad.grad = torch.ones(4, 2).to_sparse()
    with pytest.raises(ConfigError, match="sparse"):
        optimizer.step()
    bad.grad = torch.ones(4, 2)
    optimizer.param_groups[0]["lr"] = -1
    with pytest.raises(ConfigError, match="lr is -1"):
        optimizer.step()
    shared = torch.ones(10)
    twins = [nn.Parameter(shared[:6]), nn.Parameter(shared[4:])]
    for twin in twins:
        twin.grad = torch.ones(6)
    with pytest.raises(ConfigError, match="overlap"):
        infinity.CPUAdam(twins).step()
    assert same_bits(good.detach(), torch.ones(4))
    assert same_bits(shared, torch.ones(10))


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -float("inf"), 1e39, None, "a"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_invalid_grad_scale_rejected(scale: Any, dtype: torch.dtype) -> None:
    params = parameters(dtype)
    optimizer = infinity.CPUAdam(params)
    steps(optimizer, params)
    weights, states = (
        [p.detach().clone() for p in params],
        copy.deepcopy(optimizer.state_dict()["state"]),
    )
    with pytest.raises(ConfigError, match="grad_scale is"):
        optimizer.step(lambda: pytest.fail("the closure ran"), grad_scale=scale)
    assert all(same_bits(p.detach(), w) for p, w in zip(params, weights, strict=True))
    after = optimizer.state_dict()["state"]
    assert all(same_bits(after[i][n], v) for i, state in states.items() for n, v in state.items())


def test_non_finite_gradients_pass_through() -> None:
    """Infinities and NaN propagate as in the reference and do not affect other elements."""
    p = nn.Parameter(torch.ones(300))
    p.grad = torch.tensor(np.resize([np.inf, np.nan, 1e-45, 3e38, 0.0], 300), dtype=torch.float32)
    infinity.CPUAdam([p], weight_decay=0.0).step()
    assert torch.isnan(p.detach()[1])
    assert p.detach()[4] == 1

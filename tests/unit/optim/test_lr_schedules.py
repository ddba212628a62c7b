"""Tests of learning-rate schedules: closed forms, comparison with DeepSpeed, resume."""

from __future__ import annotations

import json
import math
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small import small_engine, train

from infinity.config.schema import load_config
from infinity.errors import ConfigError, InfinityWarning
from infinity.optim.lr_schedules import DEEPSPEED_SCHEDULES, known_schedules, make_schedule

BASE = (3e-4, 7e-3)  # initial rates of the groups
BY_NAME = {schedule.__name__: schedule for schedule in DEEPSPEED_SCHEDULES}

pytestmark = pytest.mark.filterwarnings("ignore:total_num_steps")


def optimizer(kind: Any = torch.optim.AdamW) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": rate} for rate in BASE]
    made: torch.optim.Optimizer = kind(groups)
    return made


def rates_of(name: str, steps: int, **params: Any) -> list[list[float]]:
    """Return the rates of every group at steps 1, 2, ..."""
    target = optimizer()
    schedule = BY_NAME[name](target, **params)
    found = []
    for _ in range(steps):
        found.append([group["lr"] for group in target.param_groups])
        target.step()
        schedule.step()
    return found


# --- closed form -----------------------------------------------------------------------------
# `n` is the number of completed steps; each function gives the rate of step n + 1.


def log_share(n: int, warmup: int) -> float:
    """Return 0 at steps 1 and 2, then the logarithm of the completed steps to base `warmup`."""
    return math.log(max(n, 1), max(warmup, 2))


def linear_share(n: int, warmup: int) -> float:
    return max(n - 1, 0) / max(warmup, 2)


SHARES = {"log": log_share, "linear": linear_share}


def warmup_value(n: int, low: float, high: float, warmup: int, kind: str) -> float:
    share = SHARES[kind](n, warmup) if n - 1 < max(warmup, 2) else 1.0
    return low + share * (high - low)


@pytest.mark.parametrize("kind", SHARES)
@pytest.mark.parametrize("warmup", [1, 2, 5, 17])
def test_warmup_lr(kind: str, warmup: int) -> None:
    params = {"warmup_num_steps": warmup, "warmup_type": kind}
    found = rates_of("WarmupLR", 30, warmup_min_lr=1e-5, warmup_max_lr=[1e-3, 2e-3], **params)
    for n, rates in enumerate(found):
        expected = [warmup_value(n, 1e-5, high, warmup, kind) for high in (1e-3, 2e-3)]
        assert rates == pytest.approx(expected, rel=1e-12), n
    group_rates = rates_of("WarmupLR", 30, **params)
    assert group_rates[-1] == list(BASE)
    assert group_rates[0] == group_rates[1] == [0.0, 0.0]


@pytest.mark.parametrize("kind", SHARES)
@pytest.mark.parametrize(("warmup", "total"), [(4, 20), (10, 12), (10, 5), (1, 3)])
def test_warmup_decay_lr(kind: str, warmup: int, total: int) -> None:
    found = rates_of(
        "WarmupDecayLR", 40, total_num_steps=total, warmup_min_lr=1e-4, warmup_max_lr=1e-2,
        warmup_num_steps=warmup, warmup_type=kind,
    )  # fmt: skip
    peak = max(warmup, 2)
    for n, rates in enumerate(found):
        expected = warmup_value(n, 1e-4, 1e-2, warmup, kind)
        if n - 1 >= peak:  # linear from the peak to the end
            left = max(total - (n - 1), 0) / max(total - peak, 1)
            expected = 1e-4 + left * (1e-2 - 1e-4)
        assert rates == pytest.approx([expected] * 2, rel=1e-12), n
    assert found[-1] == [1e-4] * 2


@pytest.mark.parametrize("kind", SHARES)
@pytest.mark.parametrize(("warmup", "total"), [(4, 20), (10, 12), (10, 5)])
def test_warmup_cosine_lr(kind: str, warmup: int, total: int) -> None:
    found = rates_of(
        "WarmupCosineLR", 40, total_num_steps=total, warmup_num_steps=warmup, warmup_type=kind,
        warmup_min_ratio=0.1, cos_min_ratio=0.2,
    )  # fmt: skip
    assert found[0] == [0.0, 0.0]  # as in DeepSpeed, the first step ignores warmup_min_ratio
    for n, rates in list(enumerate(found))[1:]:
        ratio = warmup_value(n, 0.1, 1.0, warmup, kind)
        if n - 1 >= warmup:
            done = min((n - warmup) / max(total - warmup, 1), 1.0)
            ratio = 0.2 + 0.8 * math.cos(math.pi / 2 * done) ** 2
        assert rates == pytest.approx([base * ratio for base in BASE], rel=1e-12, abs=1e-18), n


@pytest.mark.parametrize("staircase", [False, True])
def test_lr_range_test(staircase: bool) -> None:
    found = rates_of(
        "LRRangeTest", 20, lr_range_test_min_lr=[1e-4, 1e-3], lr_range_test_step_size=4,
        lr_range_test_step_rate=2.5, lr_range_test_staircase=staircase,
    )  # fmt: skip
    for n, rates in enumerate(found):
        intervals = n // 4 if staircase else n / 4
        expected = [low * (1 + 2.5 * intervals) for low in (1e-4, 1e-3)]
        assert rates == pytest.approx(expected, rel=1e-12), n


def triangle(n: int, first: int, second: int) -> float:
    inside = n % (first + second)
    return inside / first if inside <= first else (first + second - inside) / second


@pytest.mark.parametrize(("first", "second"), [(4, 4), (3, 6), (5, 2)])
@pytest.mark.parametrize("decay", [0, 3])
def test_one_cycle(first: int, second: int, decay: int) -> None:
    target = optimizer()
    schedule = BY_NAME["OneCycle"](
        target, 1e-4, [1e-2, 2e-2], decay_lr_rate=0.5, cycle_first_step_size=first,
        cycle_second_step_size=second, decay_step_size=decay, decay_mom_rate=0.01,
    )  # fmt: skip
    assert [group["betas"] for group in target.param_groups] == [(0.8, 0.99)] * 2
    total = first + second
    for n in range(3 * total):
        if n <= total:
            share = triangle(n, first, second)
            expected = [1e-4 + share * (high - 1e-4) for high in (1e-2, 2e-2)]
            momentum = 0.9 - share * 0.1
        else:
            over = (n - total) / decay if decay else 0.0
            expected, momentum = [1e-4 / (1 + 0.5 * over)] * 2, 0.9 * (1 + 0.01 * over)
        rates = [group["lr"] for group in target.param_groups]
        assert rates == pytest.approx(expected, rel=1e-9), n
        if n:
            assert target.param_groups[1]["betas"] == (pytest.approx(momentum), 0.99), n
        target.step()
        schedule.step()


def test_one_cycle_staircase() -> None:
    found = rates_of(
        "OneCycle", 14, cycle_min_lr=0.0, cycle_max_lr=1.0, cycle_first_step_size=6,
        cycle_second_step_size=8, cycle_first_stair_count=3, cycle_second_stair_count=2,
    )  # fmt: skip
    up, down = [0, 0, 1 / 3, 1 / 3, 2 / 3, 2 / 3, 1], [0.5] * 4 + [0, 0, 0]
    assert [rates[0] for rates in found] == pytest.approx(up + down)


# --- comparison with DeepSpeed ---------------------------------------------------------------


def random_params(name: str, r: random.Random) -> dict[str, Any]:
    """Return random parameters, some left out to use their defaults."""
    if name == "LRRangeTest":
        choices: dict[str, Callable[[], Any]] = {
            "lr_range_test_min_lr": lambda: r.choice([1e-3, [1e-4, 1e-5]]),
            "lr_range_test_step_size": lambda: r.randint(1, 9),
            "lr_range_test_step_rate": lambda: r.random() * 4,
            "lr_range_test_staircase": lambda: r.random() < 0.5,
        }
        needed = {}
    elif name == "OneCycle":
        choices = {
            "decay_lr_rate": lambda: r.choice([0.0, 0.3]),
            "cycle_first_step_size": lambda: r.randint(1, 12),
            "cycle_second_step_size": lambda: r.choice([None, 0, 5, 11]),
            "cycle_first_stair_count": lambda: r.choice([0, 3]),
            "cycle_second_stair_count": lambda: r.choice([None, 0, 4]),
            "decay_step_size": lambda: r.choice([0, 3]),
            "cycle_momentum": lambda: r.random() < 0.8,
            "cycle_min_mom": lambda: r.choice([0.8, [0.7, 0.75]]),
            "decay_mom_rate": lambda: r.choice([0.0, 0.01]),
        }
        needed = {"cycle_min_lr": 1e-4 * r.random(), "cycle_max_lr": r.choice([0.01, [0.01, 3e-3]])}
    else:
        choices = {
            "warmup_num_steps": lambda: r.randint(1, 20),
            "warmup_type": lambda: r.choice(["log", "linear"]),
        }
        needed = {} if name == "WarmupLR" else {"total_num_steps": r.randint(1, 40)}
        if name == "WarmupCosineLR":
            choices["warmup_min_ratio"] = r.random
            choices["cos_min_ratio"] = r.random
        else:
            choices["warmup_min_lr"] = lambda: r.choice([0.0, 1e-5, [1e-6, 2e-5]])
            choices["warmup_max_lr"] = lambda: r.choice([1e-3, [2e-3, 3e-2]])
    return needed | {key: draw() for key, draw in choices.items() if r.random() < 0.8}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", BY_NAME)
def test_schedule_bitwise_equal_to_deepspeed(name: str) -> None:
    deepspeed = pytest.importorskip("deepspeed.runtime.lr_schedules")
    r = random.Random(name)
    for _ in range(60):
        params = random_params(name, r)
        optimizer_a, optimizer_b = optimizer(), optimizer()
        actual, expected = (
            BY_NAME[name](optimizer_a, **params),
            getattr(deepspeed, name)(optimizer_b, **params),
        )
        for step in range(60):
            for actual_group, expected_group in zip(
                optimizer_a.param_groups, optimizer_b.param_groups, strict=True
            ):
                assert (actual_group["lr"], actual_group["betas"]) == (
                    expected_group["lr"],
                    expected_group["betas"],
                ), (params, step)
            optimizer_a.step()
            actual.step()
            expected.step()


# --- behaviour of torch schedules ------------------------------------------------------------

PARAMS: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_num_steps": 6},
    "WarmupDecayLR": {"warmup_num_steps": 6, "total_num_steps": 20},
    "WarmupCosineLR": {"warmup_num_steps": 6, "total_num_steps": 20},
    "LRRangeTest": {"lr_range_test_step_size": 3},
    "OneCycle": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2, "cycle_first_step_size": 5},
}


@pytest.mark.parametrize("name", BY_NAME)
def test_schedule_resumes_from_state_dict(name: str) -> None:
    all_rates = rates_of(name, 20, **PARAMS[name])
    target = optimizer()
    first = BY_NAME[name](target, **PARAMS[name])
    for _ in range(7):
        target.step()
        first.step()
    state = json.loads(json.dumps(first.state_dict()))  # the state is JSON data
    resumed = optimizer()
    second = BY_NAME[name](resumed, **PARAMS[name])
    second.load_state_dict(state)
    assert second.get_last_lr() == all_rates[7]
    for n in range(8, 20):
        resumed.step()
        second.step()
        assert [group["lr"] for group in resumed.param_groups] == all_rates[n]


@pytest.mark.parametrize("name", BY_NAME)
def test_schedule_starts_from_last_batch_iteration(name: str) -> None:
    all_rates = rates_of(name, 20, **PARAMS[name])
    target = optimizer()
    later = BY_NAME[name](target, **PARAMS[name], last_batch_iteration=7)
    found = []
    for _ in range(8, 20):
        found.append([group["lr"] for group in target.param_groups])
        target.step()
        later.step()
    assert found == all_rates[8:]


def test_one_cycle_without_betas_keeps_momentum() -> None:
    target = optimizer(lambda groups: torch.optim.SGD(groups, momentum=0.5))
    with pytest.warns(InfinityWarning, match="leaves the momentum alone"):
        BY_NAME["OneCycle"](target, 1e-4, 1e-2)
    assert [group["momentum"] for group in target.param_groups] == [0.5, 0.5]


def test_warmup_longer_than_total_steps_warns() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        BY_NAME["WarmupDecayLR"](optimizer(), 5, 0.0, [1e-3, 1e-3], warmup_num_steps=10)
    (warning,) = [w for w in caught if issubclass(w.category, InfinityWarning)]
    assert "total_num_steps 5 is less than warmup_num_steps 10" in str(warning.message)
    assert warning.filename == __file__


def test_single_rate_for_groups_of_different_rates_warns() -> None:
    """Muon has different rates for matrices and other parameters."""
    target = optimizer()
    rates = ", ".join(f"{group['lr']:g}" for group in target.param_groups)
    with pytest.warns(
        InfinityWarning, match=f"is the rate of all 2 parameter groups.*{rates}: pass a list"
    ):
        BY_NAME["WarmupLR"](target, warmup_max_lr=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        BY_NAME["WarmupLR"](optimizer(), warmup_max_lr=[1e-3, 2e-3])
        BY_NAME["WarmupCosineLR"](optimizer(), 2000)


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("WarmupLR", {"warmup_type": "cubic"}, "warmup_type is 'cubic'"),
        ("WarmupLR", {"warmup_num_steps": 0}, "warmup_num_steps is 0"),
        ("WarmupLR", {"warmup_num_steps": 1.5}, "warmup_num_steps is 1.5"),
        ("WarmupLR", {"warmup_min_lr": [1.0]}, "warmup_min_lr has 1 values for 2 parameter groups"),
        ("WarmupLR", {"warmup_max_lr": "1"}, "warmup_max_lr is '1'"),
        ("WarmupDecayLR", {"total_num_steps": math.inf}, "total_num_steps is inf"),
        ("WarmupCosineLR", {"total_num_steps": 9, "cos_min_ratio": True}, "cos_min_ratio is True"),
        ("LRRangeTest", {"lr_range_test_step_size": -1}, "lr_range_test_step_size is -1"),
        ("OneCycle", {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_first_step_size": 0}, "is 0"),
        ("OneCycle", {"cycle_min_lr": 0, "cycle_max_lr": 1, "decay_step_size": -1}, "is -1"),
    ],
)  # fmt: skip
def test_invalid_schedule_parameters_rejected(
    name: str, params: dict[str, Any], message: str
) -> None:
    target = optimizer()
    with pytest.raises(ConfigError, match=r"is|has") as caught:
        BY_NAME[name](target, **params)
    assert message in str(caught.value)
    with pytest.raises(ConfigError, match=r"^scheduler\.params\.") as caught:
        make_schedule(name, params, target)
    assert message in str(caught.value)
    assert [group["lr"] for group in target.param_groups] == list(BASE)


def test_integral_floats_accepted() -> None:
    assert rates_of("WarmupLR", 9, warmup_num_steps=6.0) == rates_of(
        "WarmupLR", 9, warmup_num_steps=6
    )


# --- by name ---------------------------------------------------------------------------------


def test_known_schedules_include_torch_and_builtin() -> None:
    known = known_schedules()
    assert list(known) == sorted(known)
    assert known["OneCycleLR"] is torch.optim.lr_scheduler.OneCycleLR
    assert all(known[name] is schedule for name, schedule in BY_NAME.items())
    assert "LRScheduler" not in known
    given = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "1e2"}}}
    scheduler = load_config(given).scheduler
    assert scheduler is not None
    assert scheduler.params == {"warmup_num_steps": 100.0}
    wrong = {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_steps": 3}}}
    with pytest.raises(ConfigError, match="does not take warmup_steps and needs total_num_steps"):
        load_config(wrong)


def test_engine_steps_builtin_schedule(tmp_path: Path) -> None:
    cycle = {"type": "OneCycle", "params": {
        "cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2, "cycle_first_step_size": 2}}  # fmt: skip
    with small_engine(tmp_path, scheduler=cycle) as engine:
        group = engine.optimizer.param_groups[0]
        seen = []
        for step in range(5):
            seen.append((group["lr"], group["betas"][0]))
            train(engine, 1, first=step)
            engine.settle()
    rates, momenta = zip(*seen, strict=True)
    assert rates == pytest.approx([1e-4, 5.05e-3, 1e-2, 5.05e-3, 1e-4])
    assert momenta == pytest.approx([0.8, 0.85, 0.8, 0.85, 0.9])


def test_engine_rejects_invalid_schedule_parameters(tmp_path: Path) -> None:
    warmup = {"type": "WarmupLR", "params": {"warmup_min_lr": [1.0, 2.0]}}
    with (
        pytest.raises(ConfigError, match="2 values for 1 parameter groups"),
        small_engine(tmp_path, scheduler=warmup),
    ):
        pass


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("StepLR", {"step_size": 0}),
        ("StepLR", {"step_size": "x"}),
        ("CosineAnnealingLR", {"T_max": 0}),
        ("ExponentialLR", {"gamma": "x"}),
        ("CyclicLR", {"base_lr": 1e-4, "max_lr": 1e-3, "step_size_up": 0}),
        ("StepLR", {"step_size": 1, "last_epoch": 3}),
    ],
    ids=str,
)
def test_torch_schedule_errors_raised_at_construction(name: str, params: dict[str, Any]) -> None:
    target = optimizer()
    with pytest.raises(ConfigError, match=f"scheduler.params: {name} refuses "):
        make_schedule(name, params, target)
    assert [group["lr"] for group in target.param_groups] == list(BASE)
    assert all("initial_lr" not in group for group in target.param_groups)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("OneCycleLR", {"max_lr": 1e-3, "total_steps": 1}),
        ("ReduceLROnPlateau", {}),
        ("OneCycle", {"cycle_min_lr": [1e-4, 1e-5], "cycle_max_lr": [1e-3, 1e-3]}),
        ("CosineAnnealingLR", {"T_max": 4}),
    ],
    ids=str,
)
def test_make_schedule_trial_leaves_optimizer_unchanged(name: str, params: dict[str, Any]) -> None:
    tried, plain = optimizer(), optimizer()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = make_schedule(name, params, tried)
    expected = known_schedules()[name](plain, **params)
    assert type(made) is type(expected)
    for one, other in zip(tried.param_groups, plain.param_groups, strict=True):
        assert {k: v for k, v in one.items() if k != "params"} == {
            k: v for k, v in other.items() if k != "params"
        }

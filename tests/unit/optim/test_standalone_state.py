"""Tests of the state of CPUAdam: state dicts, copies, pickles, masters and edits."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.trainer import same_bits
from torch import Tensor, nn

import infinity
from infinity.errors import ConfigError, ResidencyError

SHAPES = ((7, 30), (), (0, 4), (200,))
HALVES = (torch.bfloat16, torch.float16)
MASTER_KEYS = {torch.bfloat16: "residual", torch.float16: "master"}


def make(dtype: torch.dtype, seed: int = 0, **options: Any) -> tuple[nn.ParameterList, Any]:
    generator = torch.Generator().manual_seed(seed)
    model = nn.ParameterList(
        nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES
    )
    return model, infinity.CPUAdam(model.parameters(), lr=1e-3, **options)


def train(model: nn.ParameterList, optimizer: Any, seed: int, count: int = 5) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        for p in model:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


def edit(model: nn.ParameterList) -> None:
    """Edit every second element of every tensor by an operation that increments its version."""
    with torch.no_grad():
        for p in model:
            p.view(-1)[::2] += 1


def copied_state(model: nn.ParameterList, optimizer: Any) -> tuple[Any, Any]:
    return copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())


def model_first(model: Any, optimizer: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    weights, state = copied_state(model, optimizer)
    file = io.BytesIO()
    torch.save((weights, state), file)
    weights, state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    other, twin = make(dtype, seed=1)
    other.load_state_dict(weights)
    twin.load_state_dict(state)
    return other, twin


def optimizer_first(model: Any, optimizer: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    weights, state = copied_state(model, optimizer)
    other, twin = make(dtype, seed=1)
    twin.load_state_dict(state)
    other.load_state_dict(weights)
    return other, twin


def deepcopied(model: Any, optimizer: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    return copy.deepcopy((model, optimizer))


def pickled(model: Any, optimizer: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    return pickle.loads(pickle.dumps((model, optimizer)))


def twice(model: Any, optimizer: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    """Save a loaded but unused state again before its model is loaded."""
    weights, state = copied_state(model, optimizer)
    _, between = make(dtype, seed=1)
    between.load_state_dict(state)
    other, twin = make(dtype, seed=2)
    twin.load_state_dict(between.state_dict())
    other.load_state_dict(weights)
    return other, twin


WAYS = (model_first, optimizer_first, deepcopied, pickled, twice)
Restore = Callable[[Any, Any, torch.dtype], tuple[Any, Any]]


def assert_same(one: nn.ParameterList, other: nn.ParameterList) -> None:
    assert all(same_bits(a.detach(), b.detach()) for a, b in zip(one, other, strict=True))


# --- masters ---------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_resumed_training_is_bitwise_equal(dtype: torch.dtype, way: Restore) -> None:
    model, optimizer = make(dtype)
    train(model, optimizer, seed=1)
    other, twin = way(model, optimizer, dtype)
    train(model, optimizer, seed=2)
    train(other, twin, seed=2)
    assert_same(model, other)
    for p, q in zip(model, other, strict=True):
        assert optimizer.state[p].keys() == twin.state[q].keys()
        for name, value in optimizer.state[p].items():
            assert same_bits(value, twin.state[q][name]), name


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", HALVES)
def test_edit_after_restore_overrides_master(dtype: torch.dtype, way: Restore) -> None:
    model, optimizer = make(dtype)
    train(model, optimizer, seed=1)
    other, twin = way(model, optimizer, dtype)
    edit(other)
    assert_edited(other, twin, {id(q): model[i] for i, q in enumerate(other)}, optimizer)


@pytest.mark.parametrize("dtype", HALVES)
def test_edit_between_steps_overrides_master(dtype: torch.dtype) -> None:
    model, optimizer = make(dtype)
    train(model, optimizer, seed=1)
    before = copy.deepcopy((model, optimizer))
    edit(model)
    assert_edited(model, optimizer, dict(zip(map(id, model), before[0], strict=True)), before[1])


def assert_edited(
    model: nn.ParameterList, optimizer: Any, olds: dict[int, nn.Parameter], before: Any
) -> None:
    """Assert that a step with rate 0 keeps edited values, and masters of unedited elements."""
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    values = [p.detach().clone() for p in model]
    train(model, optimizer, seed=2, count=1)
    for p, value in zip(model, values, strict=True):
        assert same_bits(p.detach(), value)
        if p.numel():
            master = optimizer.state[p][MASTER_KEYS[p.dtype]].view(-1)
            old = before.state[olds[id(p)]][MASTER_KEYS[p.dtype]].view(-1)
            assert torch.equal(master[1::2], old[1::2])
            if p.dtype is torch.float16:
                assert torch.equal(master[::2], p.detach().view(-1)[::2].float())


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("value", [0.0, -0.0, float("inf"), -float("inf")])
def test_pruned_parameters_do_not_become_nan(dtype: torch.dtype, value: float) -> None:
    """Only a residual of 0 is valid for these values."""
    model, optimizer = make(dtype)
    train(model, optimizer, seed=1)
    with torch.no_grad():
        model[3].fill_(value)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.param_groups[0]["weight_decay"] = 0.0
    train(model, optimizer, seed=2, count=1)
    assert torch.equal(model[3].detach(), torch.full_like(model[3], value))


@pytest.mark.parametrize("dtype", HALVES)
def test_rejected_step_keeps_master(dtype: torch.dtype) -> None:
    model, optimizer = make(dtype)
    train(model, optimizer, seed=1)
    other, twin = model_first(model, optimizer, dtype)
    other[3].grad = torch.ones(SHAPES[3], dtype=dtype).to_sparse()
    other[0].grad = torch.ones(SHAPES[0], dtype=dtype)
    with pytest.raises(ConfigError, match="sparse"):
        twin.step()
    train(model, optimizer, seed=2)
    train(other, twin, seed=2)
    assert_same(model, other)


@pytest.mark.parametrize("dtype", HALVES)
def test_state_dict_aliases_live_tensors(dtype: torch.dtype) -> None:
    """Like in torch, a state dict shares the live tensors, so a later save has later values."""
    model, optimizer = make(dtype)
    train(model, optimizer, seed=1)
    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    train(model, optimizer, seed=2)
    checkpoint = copy.deepcopy(checkpoint)
    other, twin = make(dtype, seed=1)
    other.load_state_dict(checkpoint["model"])
    twin.load_state_dict(checkpoint["optimizer"])
    train(model, optimizer, seed=3)
    train(other, twin, seed=3)
    assert_same(model, other)


def test_fp16_master_survives_extreme_values() -> None:
    p = nn.Parameter(torch.tensor([60000, 1e-7, -0.0, 1.0], dtype=torch.float16))
    optimizer = infinity.CPUAdam([p], lr=1e4, weight_decay=0.0)
    p.grad = torch.tensor([-1, 0, 0, float("nan")], dtype=torch.float16)
    optimizer.step()
    master = optimizer.state[p]["master"].clone()
    assert p.detach()[0].isinf()
    assert master[0] == 70000
    twin = copy.deepcopy(optimizer)
    (q,) = twin.param_groups[0]["params"]
    q.grad = torch.zeros_like(q)
    twin.param_groups[0]["lr"] = 0.0
    twin.step()
    assert torch.equal(twin.state[q]["master"][:3], master[:3])
    assert twin.state[q]["master"][3].isnan()


# --- errors ----------------------------------------------------------------------------------


def assert_rejected(optimizer: Any, state: Any, message: str) -> None:
    before = copy.deepcopy((optimizer.state_dict(), optimizer.param_groups[0]["lr"]))
    with pytest.raises(ConfigError, match=message):
        optimizer.load_state_dict(state)
    after = optimizer.state_dict()
    for number, state in before[0]["state"].items():
        assert state.keys() == after["state"][number].keys()
        assert all(same_bits(after["state"][number][n], v) for n, v in state.items())
    assert optimizer.param_groups[0]["lr"] == before[1]


def invalid_state(dtype: torch.dtype, change: Callable[[Any], Any]) -> tuple[Any, Any]:
    model, optimizer = make(dtype)
    train(model, optimizer, seed=1)
    _, state = copied_state(model, optimizer)
    state["param_groups"][0]["lr"] = 0.5
    change(state)
    return optimizer, state


def set_entry(name: str, value: Callable[[Tensor], Any]) -> Callable[[Any], None]:
    """Change one entry of the state of the last parameter; earlier ones stay valid."""

    def change(state: Any) -> None:
        last = state["state"][len(SHAPES) - 1]
        last[name] = value(last.get(name))

    return change


@pytest.mark.parametrize(
    ("dtype", "change", "message"),
    [
        (torch.bfloat16, set_entry("residual", lambda t: t.float()), "residual has dtype"),
        (torch.bfloat16, set_entry("residual", lambda t: t.view(20, 10)), "residual has shape"),
        (torch.float16, set_entry("master", lambda t: t.half()), "master has dtype"),
        (torch.float16, set_entry("master", lambda t: t[:1]), "master has shape"),
        (torch.float32, set_entry("exp_avg", lambda t: t.view(20, 10)), "exp_avg has shape"),
        (torch.float32, set_entry("max_exp_avg_sq", lambda t: 1), "amsgrad"),
    ],
)
def test_invalid_parameter_state_rejected(
    dtype: torch.dtype, change: Callable[[Any], Any], message: str
) -> None:
    assert_rejected(*invalid_state(dtype, change), message)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("amsgrad", True, "amsgrad"),
        ("adamw_mode", False, "adamw_mode=False"),
        ("betas", None, "betas=None"),
        ("betas", (0.9,), "betas="),
        ("lr", float("nan"), "lr is nan"),
        ("eps", -1.0, "eps is -1"),
        ("weight_decay", "a", "weight_decay='a'"),
    ],
)
def test_invalid_param_groups_rejected(name: str, value: Any, message: str) -> None:
    def change(state: Any) -> None:
        state["param_groups"][0][name] = value

    assert_rejected(*invalid_state(torch.float32, change), message)


@pytest.mark.parametrize("adamw", [True, False])
def test_torch_state_dict_of_other_rule_rejected(adamw: bool) -> None:
    model, optimizer = make(torch.float32, adamw_mode=adamw)
    train(model, optimizer, seed=1)
    peers = torch.optim.AdamW, torch.optim.Adam
    same, other = peers if adamw else peers[::-1]
    assert_rejected(optimizer, other(model.parameters()).state_dict(), f"adamw_mode={not adamw}")
    optimizer.load_state_dict(same(model.parameters(), lr=0.5).state_dict())
    (group,) = optimizer.param_groups
    assert (group["lr"], group["adamw_mode"]) == (0.5, adamw)


def test_options_missing_in_torch_state_dict_kept() -> None:
    (p,) = [nn.Parameter(torch.ones(3))]
    optimizer = infinity.CPUAdam([{"params": [p], "bias_correction": False, "adamw_mode": False}])
    optimizer.load_state_dict(torch.optim.Adam([p], lr=0.5).state_dict())
    (group,) = optimizer.param_groups
    assert (group["lr"], group["bias_correction"], group["adamw_mode"]) == (0.5, False, False)


# --- hooks -----------------------------------------------------------------------------------


def test_load_state_dict_hooks_run() -> None:
    model, optimizer = make(torch.bfloat16)
    train(model, optimizer, seed=1)
    _, twin = make(torch.bfloat16, seed=1)
    seen: list[Any] = []

    def rewrite(_: Any, state_dict: Any) -> Any:
        """Return a modified state dict, which is the one to load."""
        state = {n: {**s, "step": torch.tensor(40.0)} for n, s in state_dict["state"].items()}
        return {**state_dict, "state": state, "mine": seen.append("pre")}

    def record(loaded: Any) -> None:
        seen.append({float(state["step"]) for state in loaded.state.values()})

    twin.register_load_state_dict_pre_hook(rewrite)
    twin.register_load_state_dict_post_hook(record)
    for _ in range(2):
        twin.load_state_dict(optimizer.state_dict())
    assert seen == ["pre", {40.0}] * 2


def test_non_parameter_state_preserved() -> None:
    model, optimizer = make(torch.float32)
    train(model, optimizer, seed=1)
    state = optimizer.state_dict()
    state["state"]["note"] = "by a user"
    _, twin = make(torch.float32)
    twin.load_state_dict(state)
    assert twin.state["note"] == "by a user"


# --- edits between steps invalidate cached state ----------------------------------------------

EDITED = (9, 40)


def gradient(step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(EDITED, generator=torch.Generator().manual_seed(step)).to(dtype)


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
def test_edits_between_steps_match_torch(edit: Callable[..., None]) -> None:
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
        actual, expected = (p.detach() for _, p in pairs)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    first, second = ({k: float(v.sum()) for k, v in o.state[p].items()} for o, p in pairs)
    assert first == pytest.approx(second, rel=1e-4)


def test_step_count_given_as_int_continues() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = infinity.CPUAdam([parameter])
    for step in (1, 2, 8):
        parameter.grad = torch.ones(3)
        if step == 8:
            optimizer.state[parameter]["step"] = 7
        optimizer.step()
        assert float(optimizer.state[parameter]["step"]) == step


def test_restrided_parameter_rejected() -> None:
    parameter = nn.Parameter(gradient(0))
    optimizer = infinity.CPUAdam([parameter])
    parameter.grad = gradient(1)
    optimizer.step()
    parameter.data = parameter.data.as_strided((40, 9), (1, 40))  # keeps the address
    parameter.grad = gradient(2).t()
    with pytest.raises(ResidencyError, match="strides"):
        optimizer.step()

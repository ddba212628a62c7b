"""Tests of param groups edited between steps by the user, a scheduler or the optimizer itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_accelerator import FakeAccelerator
from support.models import CASES
from support.trainer import Run, make_config, make_device, same_bits
from torch import Tensor, nn, optim

from infinity.errors import ConfigError
from infinity.optim.adapter import differences, same

CASE = CASES["gpt"]
EditsByStep = dict[int, dict[str, Any]]  # step -> entries to edit before it


class Halving(optim.Optimizer):
    """Writes to its group: a step count, and a learning rate halved after every step."""

    def __init__(self, params: Any, lr: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.5, 0.0), "frozen": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            beta, decay = group["betas"]
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(1 - decay).sub_(p.grad, alpha=group["lr"] * beta / group["count"])
            if not group["frozen"]:
                group["lr"] /= 2
                group["betas"] = (beta / 2, decay)


class LateStateChoice(optim.Optimizer):
    """Decides at the first step of a parameter which state it keeps."""

    def __init__(self, params: Any, both: bool = False) -> None:
        super().__init__(params, {"lr": 0.01, "both": both})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["one"] = torch.zeros_like(p)
                    if group["both"]:
                        state["two"] = torch.zeros_like(p)
                for buffer in state.values():
                    p.sub_(buffer.lerp_(p.grad, 0.5), alpha=group["lr"])


def inputs(steps: int) -> Tensor:
    return torch.randn(steps, 4, 16, generator=torch.Generator().manual_seed(0))


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 40), nn.Tanh(), nn.Linear(40, 3))


def config_of(**overrides: Any) -> dict[str, Any]:
    config = make_config(("disk", "disk", "disk"), gradient_clipping=0.0, **overrides)
    if "optimizer" not in overrides:
        del config["optimizer"]
    return config


def train_plain(make: Callable[..., optim.Optimizer], steps: int, edits: EditsByStep) -> nn.Module:
    model = build()
    optimizer = make(model.parameters())
    for number, x in enumerate(inputs(steps)):
        optimizer.param_groups[0].update(edits.get(number, {}))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def step(run: Run, x: Tensor) -> None:
    run.engine.backward(run.engine(x).square().mean())
    run.engine.step()


def assert_same(run: Run, model: nn.Module) -> None:
    for name, value in model.state_dict().items():
        assert same_bits(run.masters()[name], value), name


# --- entries written by the optimizer ------------------------------------------------------------


@pytest.mark.parametrize(
    "edits",
    [
        {},
        {2: {"lr": 0.3}},
        {2: {"lr": 0.3}, 3: {"lr": 0.2}},
        {1: {"betas": (0.4, 0.01)}, 3: {"count": 0}},
        {2: {"lr": 0.3, "frozen": True}, 4: {"frozen": False}},
    ],
)
def test_user_edit_overrides_entry_written_by_optimizer(edits: EditsByStep) -> None:
    reference = train_plain(Halving, 6, edits)
    with Run(build(), config_of(), device=make_device("fake"), optimizer=Halving) as run:
        for number, x in enumerate(inputs(6)):
            run.engine.optimizer.param_groups[0].update(edits.get(number, {}))
            step(run, x)
        assert_same(run, reference)


def test_scheduler_overrides_lr_written_by_optimizer() -> None:
    rates = [0.5, 0.4, 0.3, 0.2, 0.1]

    def schedule(optimizer: optim.Optimizer) -> Any:
        optimizer.param_groups[0]["initial_lr"] = 1.0
        return optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: rates[epoch], last_epoch=-1)

    reference = train_plain(Halving, 4, {i: {"lr": rate} for i, rate in enumerate(rates)})
    options = {"optimizer": lambda groups: Halving(groups, lr=1.0), "lr_scheduler": schedule}
    with Run(build(), config_of(), device="cpu", **options) as run:
        for x in inputs(4):
            step(run, x)
        assert_same(run, reference)


@pytest.mark.parametrize("resumes", [False, True])
def test_optimizer_written_entries_persist_without_gradients(resumes: bool, tmp_path: Path) -> None:
    """Some steps give gradients to part of one group only; another group never has any."""

    def make(model: nn.Module) -> Any:
        weights, biases = [model[0].weight, model[2].weight], [model[0].bias]
        return Halving([{"params": weights}, {"params": biases}, {"params": [model[2].bias]}])

    def loss_of(model: Any, number: int) -> Tensor:
        used = model[0] if number in (0, 1, 4) else model
        return used(inputs(6)[number]).square().mean()

    reference = build()
    optimizer = make(reference)
    for number in range(6):
        loss_of(reference, number).backward()
        optimizer.step()
        optimizer.zero_grad()
    model = build()
    config, device = config_of(), make_device("fake")
    run = Run(model, config, device=device, optimizer=make(model))
    for number in range(6):
        if resumes and number == 2:
            with run:
                run.engine.save_checkpoint(tmp_path, wait=True)
            model = build()
            run = Run(model, config, device=make_device("cpu"), optimizer=make(model))
            run.engine.load_checkpoint(tmp_path)
        run.engine.backward(loss_of(model, number))
        run.engine.step()
    with run:
        assert_same(run, reference)


def test_group_entries_compare_by_value() -> None:
    nan = float("nan")
    for one in (nan, (nan, 1), [torch.ones(2)], torch.ones(2), None, "a", {"a": 1}):
        assert same(one, copy.deepcopy(one))
    assert not same(torch.ones(2), torch.ones(2, dtype=torch.float64))
    assert not same(torch.ones(1), 1.0)
    assert same(1, 1.0)
    assert not same((1, 2), (1, 2, 3))
    off = {"lr": 0.9, "momentum": 0, "betas": (0.9, 0.0), "capturable": False}
    on = {"lr": 0.1, "momentum": 0.9, "betas": (0.9, 0.1), "capturable": False}
    assert list(differences(off, on)) == ["momentum", "betas"]


# --- entries that need unplanned state -----------------------------------------------------------

SGD = {
    "adapted": {"optimizer": lambda groups: optim.SGD(groups, lr=0.1)},
    "built-in": {},
}


def sgd_config(kind: str, **overrides: Any) -> dict[str, Any]:
    rule = {"type": "SGD", "lr": 0.1, "weight_decay": 0.0, **overrides}
    return config_of(optimizer=rule) if kind == "built-in" else config_of()


@pytest.mark.parametrize("kind", SGD)
@pytest.mark.parametrize("retry", [True, False])
def test_enabling_momentum_is_rejected_before_update(kind: str, retry: bool) -> None:
    """After a reset of the entry, the step can be retried, or its gradients recomputed."""
    with Run(build(), sgd_config(kind), device="cpu", **SGD[kind]) as run:
        for x in inputs(4):
            step(run, x)
        expected = run.masters()
    with Run(build(), sgd_config(kind), device=make_device("fake"), **SGD[kind]) as run:
        (group,) = run.engine.optimizer.param_groups
        for number, x in enumerate(inputs(4)):
            if number == 2:
                group["momentum"] = 0.9
                run.engine.backward(run.engine(x).square().mean())
                before = run.masters()
                for _ in range(2):
                    with pytest.raises(ConfigError) as caught:
                        run.engine.step()
                assert "group['momentum']" in str(caught.value)
                assert "0.9" in str(caught.value)
                assert "start with" in str(caught.value) or "switched on" in str(caught.value)
                assert all(same_bits(v, before[k]) for k, v in run.masters().items())
                assert run.engine.global_steps == 2
                group["momentum"] = 0
                if retry:
                    run.engine.step()
                    continue
                run.engine.zero_grad()
            step(run, x)
        assert all(same_bits(v, expected[k]) for k, v in run.masters().items())


@pytest.mark.parametrize(
    ("make", "name", "off", "on"),
    [
        (lambda p: optim.RMSprop(p, lr=1e-3), "momentum", 0, 0.9),
        (lambda p: optim.RMSprop(p, lr=1e-3), "centered", False, True),
        (lambda p: optim.AdamW(p, lr=1e-3), "amsgrad", False, True),
    ],
)
def test_unplanned_state_is_rejected_and_planned_state_can_toggle(
    make: Callable[..., optim.Optimizer], name: str, off: Any, on: Any
) -> None:
    with Run(build(), config_of(), device="cpu", optimizer=make) as run:
        (group,) = run.engine.optimizer.param_groups
        step(run, inputs(1)[0])
        group[name] = on
        with pytest.raises(ConfigError, match=f"group\\['{name}'\\] {on}, which was {off}"):
            step(run, inputs(1)[0])
        group[name] = off
        run.engine.step()

    def switched_on(parameters: Any) -> optim.Optimizer:
        made = make(parameters)
        made.param_groups[0][name] = on
        return made

    edits = {2: {name: off, "lr": 2e-3}, 3: {name: on}, 4: {name: off}}
    reference = train_plain(switched_on, 6, edits)
    with Run(build(), config_of(), device="cpu", optimizer=switched_on) as run:
        for number, x in enumerate(inputs(6)):
            run.engine.optimizer.param_groups[0].update(edits.get(number, {}))
            step(run, x)
        assert_same(run, reference)


class Extrapolated(optim.Optimizer):
    """SGD along the gradient; of order 2 with the change since the previous gradient added."""

    def __init__(self, params: Any, lr: float = 0.1, order: int = 1) -> None:
        super().__init__(params, {"lr": lr, "order": order})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if (gradient := parameter.grad) is not None:
                    parameter.add_(gradient, alpha=-group["lr"])
                    if group["order"] == 2:
                        previous = self.state[parameter].get("previous", gradient)
                        parameter.add_(gradient - previous, alpha=-group["lr"])
                        self.state[parameter]["previous"] = gradient.clone()


def test_refused_step_names_edited_integer_entry() -> None:
    with Run(build(), config_of(), device="cpu", optimizer=Extrapolated) as run:
        (group,) = run.engine.optimizer.param_groups
        step(run, inputs(1)[0])
        group["order"] = 2
        with pytest.raises(ConfigError, match=r"group\['order'\] 2, which was 1"):
            step(run, inputs(1)[0])


def test_momentum_of_one_group_allows_enabling_another() -> None:
    def split(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [{"params": parameters[:2], "momentum": 0.9}, {"params": parameters[2:]}]

    reference = build()
    optimizer = optim.SGD(split(list(reference.parameters())), lr=0.1, dampening=0.3)
    model = build()
    groups = split(list(model.parameters()))

    def maker(groups: list[dict[str, Any]]) -> optim.Optimizer:  # a class is built in
        return optim.SGD(groups, lr=0.1, dampening=0.3)

    with Run(model, config_of(), device="cpu", optimizer=maker, model_parameters=groups) as run:
        for number, x in enumerate(inputs(5)):
            for edited in (optimizer, run.engine.optimizer):
                edited.param_groups[1]["momentum"] = 0.5 if number in (2, 4) else 0
            reference(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            step(run, x)
        assert_same(run, reference)


@pytest.mark.parametrize("device", ["cpu", "kernels"])
@pytest.mark.parametrize("momenta", [(0, 0, 0.9, 0.5, 0, 0.9), (0.9, 0, 0.9, 0.9, 0.9, 0.9)])
def test_built_in_momentum_starts_at_first_gradient(
    momenta: tuple[float, ...], device: str
) -> None:
    """As in torch, also if a scheduler enables it late or the gradient comes late."""
    reference, model = build(), build()
    optimizer = optim.SGD(reference.parameters(), lr=0.1, momentum=0.9, dampening=0.3)
    config = sgd_config("built-in", momentum=0.9, dampening=0.3)
    accelerator: Any = "cpu"
    if device == "kernels":
        accelerator = FakeAccelerator(0, kernels=True)
        config["placement"] = dict.fromkeys(config["placement"], "device")
    with Run(model, config, device=accelerator) as run:
        for number, (x, momentum) in enumerate(zip(inputs(6), momenta, strict=True)):
            for edited in (optimizer, run.engine.optimizer):
                edited.param_groups[0]["momentum"] = momentum
            late = number < 3
            outputs = [reference[0](x) if late else reference(x)]
            outputs[0].square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            run.engine.backward((model[0](x) if late else run.engine(x)).square().mean())
            run.engine.step()
        for name, value in reference.state_dict().items():
            torch.testing.assert_close(run.masters()[name], value, rtol=1e-5, atol=1e-6)
        for parameter, reference_parameter in zip(
            model.parameters(), reference.parameters(), strict=True
        ):
            state = run.engine.optimizer.read_state(parameter)
            expected = optimizer.state[reference_parameter]["momentum_buffer"]
            torch.testing.assert_close(state["momentum_buffer"], expected, rtol=1e-5, atol=1e-6)


def test_new_state_of_parameter_at_first_step_is_rejected() -> None:
    """Parameters that have stepped could continue; a new one would need a second buffer."""
    with Run(build(), config_of(), device="cpu", optimizer=LateStateChoice) as run:
        (group,) = run.engine.optimizer.param_groups
        step(run, inputs(1)[0])
        group["both"] = True
        with pytest.raises(ConfigError, match="keeps 'two'"):
            step(run, inputs(1)[0])


def test_scheduler_enabling_momentum_is_rejected_at_init() -> None:
    def one_cycle(optimizer: optim.Optimizer) -> Any:
        return optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=9)

    for kind, options in SGD.items():
        with pytest.raises(ConfigError, match=r"group\['momentum'\]"):
            Run(build(), sgd_config(kind), device="cpu", lr_scheduler=one_cycle, **options)


# --- state entries under torch's names -----------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("kind", SGD)
def test_sgd_state_has_torch_entries(kind: str, momentum: float) -> None:
    reference, model = build(), build()
    reference_optimizer = optim.SGD(reference.parameters(), lr=0.1, momentum=momentum)
    options: dict[str, Any] = {}
    if kind == "adapted":
        options["optimizer"] = lambda groups: optim.SGD(groups, lr=0.1, momentum=momentum)
    with Run(model, sgd_config(kind, momentum=momentum), device="cpu", **options) as run:
        for x in inputs(2):
            reference(x).square().mean().backward()
            reference_optimizer.step()
            reference_optimizer.zero_grad()
            step(run, x)
        for parameter, reference_parameter in zip(
            model.parameters(), reference.parameters(), strict=True
        ):
            state = run.engine.optimizer.read_state(parameter)
            assert state.keys() == reference_optimizer.state[reference_parameter].keys()
            for name, value in reference_optimizer.state[reference_parameter].items():
                torch.testing.assert_close(state[name], value)

"""Tests of adapted torch optimizers against plain torch on fp32 masters, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_accelerator import FakeAccelerator
from support.models import CASES
from support.optimizers import ELEMENTWISE, WHOLE, SignedMomentum, TrustRatio
from support.rounding import split_master
from support.trainer import PLACEMENTS, Run, make_config, make_device, same_bits, train, train_torch
from torch import Tensor, nn, optim

from infinity.errors import ConfigError, DoesNotFitError, EngineFailedError
from infinity.optim.adapter import TILE_ELEMENTS
from infinity.optim.adapter_probe import Trial, probe_optimizer
from infinity.optim.adapter_rule import AdapterRule
from infinity.optim.update import BuiltInRule

STEPS = 4
CASE = CASES["gpt"]
DISK = ("disk", "disk", "disk")


def config_of(placement: tuple[str, str, str] = DISK, **overrides: Any) -> dict[str, Any]:
    config = make_config(placement, gradient_clipping=0.0, **overrides)
    del config["optimizer"]
    return config


@pytest.mark.parametrize("name", [*ELEMENTWISE, *WHOLE])
def test_fp32_equals_plain_torch(name: str) -> None:
    maker = (ELEMENTWISE | WHOLE)[name]
    batches = CASE.batches(STEPS)
    reference = train_torch(
        CASE.build(), batches, config_of(), groups=CASE.groups, make_optimizer=maker
    )
    number = list(ELEMENTWISE | WHOLE).index(name)
    placement = (DISK, PLACEMENTS[(number * 5) % 27])[number % 2]
    result = train(
        CASE.build(),
        batches,
        config_of(placement),
        device=make_device("fake", number),
        groups=CASE.groups,
        optimizer=maker,
    )
    assert result.losses == reference.losses
    for key, value in reference.masters.items():
        assert same_bits(result.masters[key], value), key
    assert result.report is not None
    assert result.report.moved == result.forecast
    assert result.plan is not None
    chunks = [u.num_chunks(result.plan.chunk_elements) for u in result.plan.units]
    assert (max(chunks) == 1) == (name in WHOLE)
    assert any("slower" in note for note in result.plan.notes)


class Matrices(nn.Module):
    """Model of matrices only, as Muon requires."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48, 48, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def test_adapted_muon_matches_torch_bitwise() -> None:
    inputs = torch.randn(5, 8, 48, generator=torch.Generator().manual_seed(0))

    def build() -> Matrices:
        torch.manual_seed(3)
        return Matrices()

    reference = build()
    muon = optim.Muon(reference.parameters(), lr=0.02)
    for x in inputs:
        reference(x).backward()
        muon.step()
        muon.zero_grad()
    options = {"device": make_device("fake"), "optimizer": lambda g: optim.Muon(g, lr=0.02)}
    with Run(build(), config_of(), **options) as run:
        for x in inputs:
            run.engine.backward(run.engine(x))
            run.engine.step()
        for name, value in reference.state_dict().items():
            assert same_bits(run.masters()[name], value)
        for parameter, reference_parameter in zip(
            run.model.parameters(), reference.parameters(), strict=True
        ):
            state = run.engine.optimizer.read_state(parameter)
            assert same_bits(
                state["momentum_buffer"], muon.state[reference_parameter]["momentum_buffer"]
            )


def test_schedule_free_masters_match_torch_in_train_mode() -> None:
    """Check the train-mode weights; those of `eval()` follow from them and the state."""
    package = pytest.importorskip("schedulefree")

    def maker(groups: list[dict[str, Any]]) -> optim.Optimizer:
        made = package.AdamWScheduleFree(groups, lr=1e-2, betas=(0.8, 0.99), foreach=False)
        made.train()
        return made

    reference, batches = CASE.build(), CASE.batches(STEPS)
    plain = maker([{"params": list(reference.parameters())}])
    for batch in batches:
        batch.call(reference).backward()
        plain.step()
        plain.zero_grad()
    with Run(CASE.build(), config_of(), device="cpu", optimizer=maker) as run:
        for batch in batches:
            run.engine.backward(batch.call(run.engine))
            run.engine.step()
        reference_weights = {
            name: value.detach().clone() for name, value in reference.state_dict().items()
        }
        masters = run.masters()
        assert all(same_bits(masters[name], value) for name, value in reference_weights.items())
        plain.eval()
        for name, parameter in run.model.named_parameters():
            z = run.engine.optimizer.read_state(parameter)["z"]
            expected_average = masters[name].lerp(z, 1 - 1 / 0.8)
            assert same_bits(expected_average, reference.get_parameter(name).detach())
        with pytest.raises(ConfigError, match=r"not in train mode.*\n.*\n.*calls its train\(\)"):
            probe_optimizer(package.AdamWScheduleFree, [{"params": list(run.model.parameters())}])


@pytest.mark.parametrize("name", ["NAdam", "RMSprop", "own", "Adafactor"])
def test_bf16_masters_match_torch_bitwise(name: str) -> None:
    """The reference steps fp32 masters by the gradients of a bf16 model in plain torch."""
    maker = (ELEMENTWISE | WHOLE)[name]
    batches = CASE.batches(STEPS)
    model = CASE.build()
    masters = {p: nn.Parameter(p.detach().clone()) for p in model.parameters()}
    optimizer = maker([{"params": list(masters.values())}])
    losses = []
    for batch in batches:
        for parameter, master in masters.items():
            flat = master.detach().reshape(-1)
            parameter.data = split_master(flat)[0].view(parameter.shape)
            parameter.grad = None
        loss = batch.call(model)
        loss.backward()
        losses.append(loss.item())
        for parameter, master in masters.items():
            master.grad = None if parameter.grad is None else parameter.grad.float()
        optimizer.step()
    for placement in (DISK, ("device", "host", "disk")):
        result = train(
            CASE.build(),
            batches,
            config_of(placement, precision="bf16"),
            device="cpu",
            optimizer=maker,
        )
        assert result.losses == losses
        for key, parameter in model.named_parameters(remove_duplicate=False):
            assert same_bits(result.masters[key], masters[parameter].detach()), key


def test_parameter_larger_than_tile_and_chunk_matches_torch() -> None:
    """The tensor ends in the tail of torch's vectorized loops, and its tiles span chunks."""
    size = 2 * TILE_ELEMENTS + 77

    class Vector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.weight = nn.Parameter(torch.randn(size))

        def forward(self, x: Tensor) -> Tensor:
            return (self.weight * x).tanh().square().sum()

    inputs = torch.randn(4, size, generator=torch.Generator().manual_seed(0))
    for name in ("NAdam", "RMSprop"):
        reference = Vector()
        optimizer = ELEMENTWISE[name]([{"params": [reference.weight]}])
        for x in inputs:
            reference(x).backward()
            optimizer.step()
            optimizer.zero_grad()
        for chunk in (6144, "auto"):
            options = {"device": "cpu", "optimizer": ELEMENTWISE[name]}
            with Run(Vector(), config_of(chunk_size=chunk), **options) as run:
                assert run.engine.plan.chunk_elements == (6144 if chunk == 6144 else 36864 - 2048)
                for x in inputs:
                    run.engine.backward(run.engine(x))
                    run.engine.step()
                assert same_bits(run.masters()["weight"], reference.weight.detach()), (name, chunk)


def test_optimizer_instance_without_state_matches_torch() -> None:
    model, twin = CASE.build(), CASE.build()
    instance = optim.NAdam(model.parameters(), lr=3e-3, betas=(0.8, 0.99))
    batches = CASE.batches(STEPS)
    reference = train_torch(
        twin, batches, config_of(), make_optimizer=lambda g: optim.NAdam(g, 3e-3, (0.8, 0.99))
    )
    result = train(model, batches, config_of(), device="cpu", optimizer=instance)
    assert result.losses == reference.losses
    assert all(same_bits(result.masters[k], v) for k, v in reference.masters.items())


@pytest.mark.parametrize("name", ["cosine", "one_cycle"])
def test_schedulers_drive_adapted_optimizer(name: str) -> None:
    schedules: dict[str, Callable[[optim.Optimizer], Any]] = {
        "cosine": lambda o: optim.lr_scheduler.CosineAnnealingLR(o, T_max=STEPS),
        "one_cycle": lambda o: optim.lr_scheduler.OneCycleLR(o, max_lr=0.01, total_steps=9),
    }
    maker, batches = ELEMENTWISE["RMSprop"], CASE.batches(STEPS)
    reference = train_torch(
        CASE.build(), batches, config_of(), make_optimizer=maker, make_scheduler=schedules[name]
    )
    result = train(
        CASE.build(), batches, config_of(), device="cpu", optimizer=maker,
        lr_scheduler=schedules[name],
    )  # fmt: skip
    assert all(same_bits(result.masters[k], v) for k, v in reference.masters.items())


def test_read_state_has_optimizer_keys_and_values() -> None:
    case, model, twin = CASE, CASE.build(), CASE.build()
    optimizer = optim.NAdam(twin.parameters())
    with Run(model, config_of(), device="cpu", optimizer=optim.NAdam) as run:
        for batch in case.batches(3):
            run.engine.backward(batch.call(run.engine))
            run.engine.step()
            batch.call(twin).backward()
            optimizer.step()
            optimizer.zero_grad()
        for parameter, reference_parameter in zip(
            model.parameters(), twin.parameters(), strict=True
        ):
            state, expected = (
                run.engine.optimizer.read_state(parameter),
                optimizer.state[reference_parameter],
            )
            assert state.keys() == expected.keys()
            assert all(same_bits(state[k], v) for k, v in expected.items())


# --- unsupported optimizers ----------------------------------------------------------------------


def rejection_message(torch_optimizer: Any, model: nn.Module | None = None, **config: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        Run(
            model or CASE.build(),
            {**config_of(), **config},
            device="cpu",
            optimizer=torch_optimizer,
        )
    return str(caught.value)


class _GlobalNorm(SignedMomentum):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        everything = [p for group in self.param_groups for p in group["params"]]
        total = torch.stack([p.grad.norm() for p in everything]).norm()
        for p in everything:
            p.sub_(p.grad / total * 0.01)


class _ClipsLate(SignedMomentum):
    """Clips by the norm of all gradients, but only if that is very large."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        everything = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(everything, 1e7)
        for p in everything:
            p.sub_(p.grad, alpha=0.01)


class _OneRateForAll(optim.Optimizer):
    """Shares a step size among all parameters from step 31 on, like D-Adaptation and Prodigy."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0, "d": 1e-6, "estimate": 0.0, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        estimate = self.param_groups[0]["estimate"]
        for group in self.param_groups:
            estimate += sum(float(p.grad.abs().sum()) for p in group["params"])
        for group in self.param_groups:
            group["estimate"] = estimate
            group["k"] += 1
            rate = group["d"] if group["k"] <= 30 else 1 / estimate
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] * rate)


class _WatchesAll(SignedMomentum):
    """Tracks the largest gradient of all parameters without using it."""

    largest = 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.largest = max(self.largest, float(p.grad.abs().max()))
                p.sub_(p.grad, alpha=group["lr"])


class _SharedState(SignedMomentum):
    """Keeps a count in `state` under a key that is not a parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        shared: Any = self.state["shared"]
        shared["k"] = shared.get("k", 0) + 1
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"])


class _HiddenCount(SignedMomentum):
    calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] / self.calls)


class _Noisy(SignedMomentum):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_((p.grad + torch.randn_like(p)) * group["lr"])


class _Closure(SignedMomentum):
    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()


class _Double(SignedMomentum):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p, dtype=torch.float64))
                p.sub_(m.add_(p.grad).float(), alpha=group["lr"])


class _Idle(SignedMomentum):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (optim.LBFGS, "LBFGS cannot be used with offloaded state"),
        (lambda groups: optim.LBFGS(groups), "by a closure"),
        (optim.SparseAdam, "sparse gradients"),
        (_GlobalNorm, "mixes parameters"),
        (_ClipsLate, "mixes parameters"),
        (_OneRateForAll, "one at a time: group['estimate'] is"),
        (_WatchesAll, "one at a time: it changes its attribute 'largest'"),
        (_SharedState, "one at a time: it changes state['shared']"),
        (_HiddenCount, "keeps state outside"),
        (_Noisy, "draws random numbers"),
        (_Closure, "closure"),
        (_Double, "float64"),
        (_Idle, "changed nothing"),
        (lambda groups: 3, "made a int"),
        (lambda groups: optim.SGD(groups, lr=-1), "Invalid learning rate"),
        (lambda groups: optim.SGD([nn.Parameter(torch.ones(2))]), "was not given to it"),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", "made"),
)
def test_unsupported_optimizer_is_rejected(optimizer: Any, message: str) -> None:
    assert message in rejection_message(optimizer)


# --- coupling that begins late -------------------------------------------------------------------


class _Late(optim.Optimizer):
    """Steps parameters independently up to update 25; calls `couple` from update 26 on."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
        rate = self.couple() if self.is_late() else 1.0
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    count = self.state[p].setdefault("count", torch.zeros(()))
                    p.sub_(p.grad, alpha=rate * group["lr"] / float(count.add_(1)))

    def is_late(self) -> bool:
        return bool(self.param_groups[0]["k"] > 25)

    def couple(self) -> float:
        raise NotImplementedError

    def norm(self) -> float:
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        return float(torch.stack([grad.norm() for grad in grads]).norm())


class _LateNorm(_Late):
    def couple(self) -> float:
        return 1 / (1 + self.norm())


class _LateByAge(_LateNorm):
    """Becomes coupled by the step count of each parameter instead of that of the group."""

    def is_late(self) -> bool:
        return any(float(state["count"]) > 24 for state in self.state.values())


class _LateEstimate(_Late):
    def couple(self) -> float:
        self.param_groups[0]["estimate"] = self.norm()
        return 1.0


class _LateAttribute(_Late):
    def couple(self) -> float:
        self.largest = self.norm()
        return 1.0


class _LateState(_Late):
    def couple(self) -> float:
        shared: Any = self.state["shared"]
        shared["norm"] = self.norm()
        return 1.0


class _LateNoise(_Late):
    def couple(self) -> float:
        return float(torch.rand(()))


def small_run(optimizer: Any, **overrides: Any) -> Run:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 3))
    return Run(model, config_of(**overrides), device="cpu", optimizer=optimizer)


def small_step(run: Run, number: int) -> None:
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(number))
    run.engine.backward(run.engine(x).square().mean())
    run.engine.step()


@pytest.mark.parametrize(
    ("optimizer", "message", "resumes"),
    [
        (_LateNorm, "a parameter of shape", False),
        (_LateByAge, "a parameter of shape", True),
        (_LateEstimate, "group['estimate']", False),
        (_LateAttribute, "its attribute 'largest'", False),
        (_LateState, "state['shared']", False),
        (_LateNoise, "a parameter of shape", False),
    ],
)
def test_late_coupling_is_rejected_before_step(
    optimizer: Any, message: str, resumes: bool, tmp_path: Path
) -> None:
    """A probe with small parameters of the same age detects it; no state has changed then."""
    run = small_run(optimizer)
    for number in range(25):
        small_step(run, number)
    if resumes:
        with run:
            run.engine.save_checkpoint(tmp_path, wait=True)
        run = small_run(optimizer)
        run.engine.load_checkpoint(tmp_path)
    with run:
        before = run.masters()
        with pytest.raises(ConfigError, match="cannot take the next step") as caught:
            small_step(run, 25)
        assert message in str(caught.value)
        assert "mixes parameters" in str(caught.value)
        assert run.engine.global_steps == 25
        assert all(same_bits(v, before[k]) for k, v in run.masters().items())


class _LateGroup(_LateNorm):
    """Becomes coupled at a step that one of its groups specifies."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for group in self.param_groups:
            group.setdefault("until", 25)

    def is_late(self) -> bool:
        return any(group["k"] > group["until"] for group in self.param_groups)


@pytest.mark.parametrize("outlier", [False, True])
def test_groups_differing_in_lr_are_probed_round_robin(
    outlier: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step probes four of the groups in turn; a group that differs otherwise, always."""
    checked = []

    class Recorded(Trial):
        def __init__(self, facts: Any, groups: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(facts, groups, *args, **kwargs)
            checked.append([entries["lr"] for entries, _ in groups])

    monkeypatch.setattr("infinity.optim.adapter_rule.Trial", Recorded)
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(9)))
    rates = [0.01 * 0.9**number for number in range(9)]
    groups = [
        {"params": list(layer.parameters()), "lr": rate}
        for layer, rate in zip(model, rates, strict=True)
    ]
    if outlier:
        groups[5]["until"] = 7
    with Run(
        model, config_of(), device="cpu", groups=lambda _: groups, optimizer=_LateGroup
    ) as run:
        for number in range(7):
            small_step(run, number)
        assert all(len(found) == 4 + outlier for found in checked[2:])
        assert set().union(*checked) == set(rates)
        if outlier:
            assert all(rates[5] in found for found in checked)
            with pytest.raises(ConfigError, match="cannot take the next step"):
                small_step(run, 7)


class _LargeOnes(SignedMomentum):
    """Writes outside a parameter's state once a parameter is larger than those of the probe."""

    def __init__(self, params: Any, where: str = "group") -> None:
        super().__init__(params)
        self.where = where

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.numel() > 512:
                    self.write(group, p)
                p.sub_(p.grad, alpha=group["lr"])

    def write(self, group: dict[str, Any], p: Tensor) -> None:
        if self.where == "divides":
            group["lr"] / float(p.sum())
        elif self.where == "group":
            group["largest"] = float(p.grad.abs().max())  # type: ignore[union-attr]
        elif self.where == "attribute":
            self.flag = True
        elif self.where == "class":
            type(self).seen = 1
        else:
            self.state["shared"]["seen"] = 1  # type: ignore[index]


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("group", r"group\['largest'\]"),
        ("attribute", "its attribute 'flag'"),
        ("class", "its attribute 'seen'"),
        ("state", r"state\['shared'\]"),
    ],
)
def test_value_dependent_coupling_raises_in_update(where: str, message: str) -> None:
    with small_run(lambda groups: _LargeOnes(groups, where)) as run:
        small_step(run, 0)
        with pytest.raises(EngineFailedError, match=message) as caught:
            run.engine.settle()
        assert "_LargeOnes does not update '0.weight' alone" in str(caught.value)


def test_error_in_adapted_step_names_parameter() -> None:
    """The weight is all zeros, and larger than the parameters of the probe."""

    def maker(groups: list[dict[str, Any]]) -> optim.Optimizer:
        return _LargeOnes(groups, "divides")

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 3))
    nn.init.zeros_(model[0].weight)
    with Run(model, config_of(), device="cpu", optimizer=maker) as run:
        small_step(run, 0)
        with pytest.raises(EngineFailedError) as caught:
            run.engine.settle()
    for word in ("_LargeOnes raised ZeroDivisionError", "'0.weight'", "zeros in all of its values"):
        assert word in str(caught.value)


@pytest.mark.parametrize("optimizer", [_GlobalNorm, _OneRateForAll])
def test_coupling_is_detected_with_equal_shapes(optimizer: Any) -> None:
    assert "mixes parameters" in rejection_message(optimizer, Matrices())


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "Adagrad"])
def test_torch_optimizer_instance_maps_to_built_in_rule(name: str) -> None:
    """Groups, learning rates and weight decay of the instance are used."""
    kind, batches = getattr(optim, name), CASE.batches(STEPS)
    reference, model = CASE.build(), CASE.build()

    def groups_of(model: nn.Module) -> list[dict[str, Any]]:
        first, *others = model.parameters()
        return [{"params": [first], "lr": 3e-3}, {"params": others}]

    options = {"lr": 1e-2, "weight_decay": 0.1}
    plain = kind(groups_of(reference), **options, foreach=False)
    losses = []
    for batch in batches:
        loss = batch.call(reference)
        loss.backward()
        plain.step()
        plain.zero_grad()
        losses.append(loss.item())
    optimizer = kind(groups_of(model), **options)
    with Run(model, config_of(), device="cpu", optimizer=optimizer) as run:
        assert isinstance(run.engine.optimizer.rule, BuiltInRule)
        assert run.engine.plan.rule.name == name
        assert run.engine.optimizer.param_groups[0] is optimizer.param_groups[0]
        found = []
        for batch in batches:
            loss = batch.call(run.engine)
            run.engine.backward(loss)
            run.engine.step()
            found.append(loss.item())
    assert found == pytest.approx(losses, rel=1e-5)


def test_torch_optimizer_adapter_or_built_in_selection() -> None:
    """A factory is always adapted; so are settings and subclasses without a built-in rule."""

    class Subclass(optim.AdamW):
        pass

    def rule_of(torch_optimizer: Any, **config: Any) -> Any:
        with Run(
            CASE.build(), config_of() | config, device="cpu", optimizer=torch_optimizer
        ) as run:
            return run.engine.optimizer

    for optimizer in (
        lambda groups: optim.AdamW(groups),
        Subclass,
        lambda g: optim.AdamW(g, amsgrad=True),
    ):
        assert isinstance(rule_of(optimizer).rule, AdapterRule)
    made = rule_of(optim.AdamW, optimizer={"moments": "bf16"})
    assert isinstance(made.rule, BuiltInRule)
    assert [form.value for form in made.rule.moments] == ["bf16", "bf16"]
    assert (made.param_groups[0]["lr"], made.param_groups[0]["weight_decay"]) == (1e-3, 1e-2)
    model = CASE.build()
    amsgrad = optim.AdamW(model.parameters(), amsgrad=True)
    with Run(model, config_of(), device="cpu", optimizer=amsgrad) as run:
        assert isinstance(run.engine.optimizer.rule, AdapterRule)


def test_stepped_duplicate_or_partial_optimizer_is_rejected() -> None:
    model = CASE.build()
    stepped = optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    CASE.batch(0).call(model).backward()
    stepped.step()
    assert "it has stepped; its state cannot be taken over" in rejection_message(stepped, model)
    assert "would not be used" in rejection_message(optim.NAdam, optimizer={"lr": 1.0})
    instance = optim.NAdam(model.parameters())
    fewer = list(model.parameters())[1:]
    with pytest.raises(ConfigError, match="1 of the optimizer not in model_parameters"):
        Run(model, config_of(), optimizer=instance, model_parameters=fewer)


def test_full_parameter_optimizer_over_budget_is_rejected() -> None:
    device = FakeAccelerator(0, max_delay_s=0.001)
    config = config_of(budget={"host": "330 MB", "device": "1 GB"})
    try:
        with pytest.raises(DoesNotFitError, match="full parameters as TrustRatio does"):
            Run(nn.Linear(2000, 2000), config, device=device, optimizer=TrustRatio)
    finally:
        device.close()


def test_adapter_probe_keeps_rng_state_and_allocates_no_parameter() -> None:
    with torch.device("meta"):
        huge = nn.Parameter(torch.empty(1 << 20, 1 << 20))
    before = torch.get_rng_state()
    facts = probe_optimizer(optim.Adagrad, [{"params": [huge]}])
    assert torch.equal(torch.get_rng_state(), before)
    assert facts.groups[0]["params"][0] is huge
    assert facts.make_state is not None

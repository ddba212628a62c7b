"""Tests of Muon for matrices with AdamW for other parameters, against `torch.optim.Muon`.

Placements, ranks, weight formats and resuming are covered by `test_axes.py`.
"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from parity.test_resume import SIMPLEST, ending, micro_step, straight
from parity.test_resume import Run as ResumeRun
from support.fake_accelerator import FakeAccelerator
from support.internals import components
from support.models import CASES
from support.trainer import Run, make_config, same_bits
from torch import nn, optim

import infinity
from infinity.config.schema import load_config
from infinity.errors import ConfigError
from infinity.optim.param_groups import make_optimizer
from infinity.plan.budget import Limits
from infinity.plan.cost import matrix_flops, update_s
from infinity.plan.layout import PRECISIONS, ParameterFacts, lay_out
from infinity.plan.plan import RuleFacts, UpdatePlace, update_place
from infinity.plan.planner import make_plan
from infinity.plan.rates import NOMINAL
from infinity.types import Kind, Tier

CASE = CASES["gpt"]
DISK = ("disk", "disk", "disk")


def config_of(placement: tuple[str, str, str] = DISK, **optimizer: Any) -> dict[str, Any]:
    config = make_config(placement, precision="fp32", gradient_clipping=0.0, update="device")
    return {**config, "optimizer": {"type": "Muon", **optimizer}}


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the matrices of a model other than embeddings, one of which is the tied head."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return [p for p in model.parameters() if p.dim() == 2 and id(p) not in tables]


@pytest.mark.parametrize(
    "options",
    [{"lr": 0.02}, {"nesterov": False, "momentum": 0.8, "adjust_lr_fn": "match_rms_adamw"},
     {"weight_decay": 0.5, "ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3}],
)  # fmt: skip
def test_matrices_match_torch_muon_bitwise(options: dict[str, Any]) -> None:
    """All other parameters have a learning rate of 0, so even the losses are bitwise equal."""
    reference, batches = CASE.build(), CASE.batches(4)
    matrices = hidden_matrices(reference)
    plain = optim.Muon(matrices, **options)
    losses = []
    for batch in batches:
        loss = batch.call(reference)
        loss.backward()
        losses.append(loss.item())
        plain.step()
        reference.zero_grad()
    device, config = (
        FakeAccelerator(1, max_delay_s=0.001, kernels=True),
        config_of(**options, adam_lr=0.0),
    )
    with Run(CASE.build(), config, device=device) as run:
        for batch, expected in zip(batches, losses, strict=True):
            loss = batch.call(run.engine)
            assert loss.item() == expected
            run.engine.backward(loss)
            run.engine.step()
        assert {update_place(run.engine.plan, u.index) for u in run.engine.plan.units} == {
            UpdatePlace.STREAMED
        }
        masters = run.masters()
        assert all(same_bits(masters[n], value) for n, value in reference.state_dict().items())
        for name, parameter in run.model.named_parameters():
            reference_parameter = reference.get_parameter(name)
            state = run.engine.optimizer.read_state(parameter)
            if any(reference_parameter is p for p in matrices):
                assert state.keys() == {"momentum_buffer"}
                assert same_bits(
                    state["momentum_buffer"], plain.state[reference_parameter]["momentum_buffer"]
                )
            else:
                assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}


class Experts(nn.Module):
    """Experts as in transformers 5: stacked weights, and stacked biases."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 24, 16) * 0.1)
        self.down = nn.Parameter(torch.randn(4, 16, 24) * 0.1)
        self.up_bias = nn.Parameter(torch.zeros(4, 24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.einsum("eoi,bi->beo", self.up, x) + self.up_bias
        return torch.einsum("eoi,bei->bo", self.down, torch.relu(inner))


class Mixture(nn.Module):
    """Model of a matrix, a convolution (3D weights too) and stacked experts."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.conv = nn.Linear(16, 16), nn.Conv1d(1, 1, 3, padding=1)
        self.experts = Experts()
        self.head = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.experts(self.conv(self.proj(x)[:, None])[:, 0]))
        return found.square().mean()


def make_mixture() -> tuple[nn.Module, list[torch.Tensor]]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Mixture(), [torch.randn(8, 16) for _ in range(3)]


@pytest.mark.parametrize("kernels", [True, False])
def test_stacked_expert_matrices_match_torch_muon_bitwise(kernels: bool) -> None:
    """Convolution weights and stacked biases are AdamW's, whose learning rate is 0 here."""
    reference, batches = make_mixture()
    stacks = {n: p for n, p in reference.named_parameters() if "experts" in n and p.dim() == 3}
    unstacked = {name: [nn.Parameter(one.clone()) for one in stack.data.unbind()]
             for name, stack in stacks.items()}  # fmt: skip
    others = [reference.get_parameter("proj.weight"), reference.get_parameter("head.weight")]
    plain = optim.Muon([*others, *(one for ones in unstacked.values() for one in ones)], lr=0.02)
    config, device = config_of(lr=0.02, adam_lr=0.0), FakeAccelerator(1, kernels=kernels)
    with Run(make_mixture()[0], config if kernels else {**config, "update": "auto"},
             device=device) as run:  # fmt: skip
        groups = run.engine.optimizer.param_groups
        by_muon = {id(p) for group in groups if group["use_muon"] for p in group["params"]}
        named = {n for n, p in run.model.named_parameters() if id(p) in by_muon}
        assert named == {"proj.weight", "head.weight", "experts.up", "experts.down"}
        (note,) = [n for n in run.engine.plan.notes if "AdamW the" in n]
        assert "Muon steps 10 matrices" in note
        for batch in batches:
            reference.zero_grad()
            reference(batch).backward()
            for name, stack in stacks.items():
                assert stack.grad is not None
                for one, gradient in zip(unstacked[name], stack.grad, strict=True):
                    one.grad = gradient
            plain.step()
            with torch.no_grad():
                for name, stack in stacks.items():
                    stack.copy_(torch.stack(list(unstacked[name])))
            run.engine.backward(run.engine(batch))
            run.engine.step()
        masters = run.masters()
        assert all(same_bits(masters[n], value) for n, value in reference.state_dict().items())
        state = run.engine.optimizer.read_state(run.model.get_parameter("experts.up"))
        momenta = torch.stack(
            [plain.state[one]["momentum_buffer"] for one in unstacked["experts.up"]]
        )
        assert same_bits(state["momentum_buffer"], momenta)


def test_matrix_state_takes_8_bytes_and_plan_reports_split() -> None:
    with Run(CASE.build(), config_of(), device="cpu") as run:
        plan, store = run.engine.plan, components(run.engine).store
        matrices = sum(p.numel() for p in hidden_matrices(run.model))
        others = sum(p.numel() for p in run.model.parameters()) - matrices
        exact = (8 * matrices + 12 * others) / (matrices + others)
        assert plan.bytes_per_parameter == pytest.approx(exact)
        assert f"2 moments in fp32, of matrices 1; {exact:.5g} bytes" in plan.describe()
        for unit, local_unit in zip(plan.units, plan.local_units, strict=True):
            second = store.shard_bytes(local_unit, Kind.MOMENT2)
            paired = sum(s.numel for s in unit.trained_segments if not s.needs_full)
            if local_unit.paired is None:  # stepped by AdamW only
                assert second == store.shard_bytes(local_unit, Kind.MOMENT1)
            else:  # at most a page per small parameter, regardless of the matrices
                assert 4 * paired <= second <= 4 * (paired + 128 * len(unit.segments)) + 4 * 2048
                assert local_unit.num_chunks(plan.chunk_elements) == 1
        assert plan.memory[Tier.DISK]["state"] == sum(
            store.shard_bytes(local_unit, kind)
            for local_unit in plan.local_units
            for kind in plan.precision.kinds[1:]
        )
        (note,) = [n for n in plan.notes if "AdamW the" in n]
        assert f"{len(hidden_matrices(run.model))} matrices" in note
        assert "embed.weight" in note


def test_param_groups_select_muon_or_adamw() -> None:
    """Groups are split unless they set `use_muon`; each half uses the options of its group."""
    model = CASE.build()
    one, two, *remaining = hidden_matrices(model)
    two.use_muon = False  # DeepSpeed's way to mark parameters
    others = [p for p in model.parameters() if all(p is not m for m in hidden_matrices(model))]
    groups = [{"params": iter([one, others[0]]), "lr": 0.5}, {"params": [two]},
              {"params": remaining, "use_muon": False, "betas": (0.5, 0.5)},
              {"params": others[1:3], "lr": 0.6, "adam_lr": 0.7}]  # fmt: skip
    config = config_of(lr=0.02, adam_lr=0.03)
    with Run(model, config, device="cpu", groups=lambda model: groups) as run:
        found = [
            (g["use_muon"], g["lr"], g.get("momentum"), g.get("betas"))
            for g in run.engine.optimizer.param_groups
        ]
        run.engine.close(restore=True)
    assert found == [
        (True, 0.5, 0.95, None),
        (False, 0.5, None, (0.9, 0.999)),
        (False, 0.03, None, (0.9, 0.999)),
        (False, 0.03, None, (0.5, 0.5)),
        (False, 0.7, None, (0.9, 0.999)),
    ]
    invalid_groups = [{"params": list(model.parameters()), "use_muon": True}]
    with pytest.raises(ConfigError, match="put it in a group with use_muon=False"):
        make_optimizer(model, load_config({"optimizer": config["optimizer"]}), invalid_groups)


def steps(run: Run, count: int) -> list[float]:
    """Run `count` steps of one micro-batch; return the losses."""
    losses = []
    for batch in CASE.batches(count):
        loss = batch.call(run.engine)
        run.engine.backward(loss)
        run.engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("group_index", [0, -1])
def test_toggling_use_muon_is_rejected_before_step(group_index: int) -> None:
    """After resetting the group, training continues unaffected."""
    with Run(CASE.build(), config_of(), device="cpu") as run:
        expected = steps(run, 2)
    with Run(CASE.build(), config_of(), device="cpu") as run:
        group = run.engine.optimizer.param_groups[group_index]
        first, second = CASE.batches(2)
        loss = first.call(run.engine)
        run.engine.backward(loss)
        group["use_muon"] = not group["use_muon"]
        with pytest.raises(ConfigError, match="that began with"):
            run.engine.step()
        group["use_muon"] = not group["use_muon"]
        run.engine.step()
        assert [loss.item(), second.call(run.engine).item()] == expected


@pytest.mark.parametrize("kind", [None, optim.NAdam])
def test_use_muon_key_is_ignored_by_other_rules(kind: Any) -> None:
    """The key is an ordinary entry there, and does not affect the layout of state."""
    losses = []
    for key in ("use_muon", "name"):
        model = CASE.build()
        matrices = hidden_matrices(model)
        others = [p for p in model.parameters() if all(p is not m for m in matrices)]
        groups = [{"params": matrices, key: True}, {"params": others, key: False}]
        config = config_of()
        del config["optimizer"]
        options: Any = {"optimizer": kind(groups)} if kind else {"groups": lambda _, g=groups: g}
        with Run(model, config, device="cpu", **options) as run:
            losses.append(steps(run, 2))
    assert losses[0] == losses[1]


def test_muon_durable_run_resumes(tmp_path: Path) -> None:
    config = {"precision": "bf16", "gradient_clipping": 0.1, "optimizer": {"type": "Muon"}}
    run = ResumeRun({**config, "durable": True, "commit_every": 1, "resume": "auto"})
    expected = straight(tmp_path, ResumeRun(config), 6)
    losses = []
    for number, (first, end) in enumerate(pairwise((0, 3, 6))):
        with run.engine(tmp_path / "durable", DISK, seed=number + 1) as engine:
            losses += [micro_step(engine, i) for i in range(first, end)]
            found = ending(engine, losses)
    (directory,) = (tmp_path / "durable").iterdir()  # a checkpoint as well
    with ResumeRun(config).engine(tmp_path / "other", SIMPLEST, seed=4) as engine:
        engine.load_checkpoint(directory)
        loaded = ending(engine, losses)
    for one in (found, loaded, expected):
        one.facts.pop("drawn")
    assert found.differences(expected) == []
    assert loaded.differences(expected) == []


def test_plan_update_time_includes_matrix_products() -> None:
    with Run(CASE.build(), config_of(), device=FakeAccelerator(1, kernels=True)) as run:
        plan = run.engine.plan
        sides = [sorted(p.shape) for p in hidden_matrices(run.model)]
    flops = 5 * sum(4 * m * m * n + 2 * m**3 for m, n in sides)
    assert sum(matrix_flops(unit, plan.rule.matrix_steps) for unit in plan.units) == flops
    host, _, device = update_s(plan, NOMINAL)
    moved = plan.num_trained / NOMINAL.device_update
    assert (host, device) == (0.0, pytest.approx(moved + flops / NOMINAL.compute["bf16"]))


def test_muon_updates_are_streamed_if_buffers_fit() -> None:
    """Device memory not needed for placement is used for the buffers."""
    names = [("w", (4096, 4096)), ("up", (16384, 4096)), ("norm", (4096,))]
    units = tuple(
        lay_out(
            block, f"block {block}",
            [ParameterFacts(f"{block}.{name}", 3 * block + i, shape, "bfloat16", math.prod(shape),
                            2, True, 0, needs_full=len(shape) == 2)
             for i, (name, shape) in enumerate(names)], PRECISIONS["bf16"])
        for block in range(24)
    )  # fmt: skip
    rule = RuleFacts("Muon", matrix_steps=5)

    def places(device: int) -> set[UpdatePlace]:
        limits = Limits(device << 30, 48 << 30, None)
        plan = make_plan(units, load_config({}), limits, unified=False, rule=rule,
                         device_kernels=True, rates=NOMINAL)  # fmt: skip
        return {update_place(plan, unit.index) for unit in units}

    assert UpdatePlace.STREAMED in places(10)
    assert UpdatePlace.CPU not in places(10)
    assert UpdatePlace.CPU in places(2)  # three buffers do not fit


def test_torch_muon_instance_maps_to_built_in_rule() -> None:
    """Its groups are used, so a scheduler over it stays valid; it may include embeddings."""

    def make_muon(model: nn.Module) -> tuple[Any, Any]:
        matrices = [p for p in model.parameters() if p.dim() == 2]
        for p in model.parameters():
            p.requires_grad_(p.dim() == 2)
        muon = optim.Muon(matrices, lr=0.02)
        return muon, optim.lr_scheduler.LambdaLR(muon, lambda step: 1 / (1 + step))

    reference, engine_model = CASE.build(), CASE.build()
    plain, plain_schedule = make_muon(reference)
    optimizer, schedule = make_muon(engine_model)
    config = {"precision": "fp32", "gradient_clipping": 0.0}
    with pytest.raises(ConfigError, match=r'2D parameters(.|\n)*optimizer: {"type": "Muon"}'):
        infinity.initialize(CASE.build(), config, optimizer=optim.Muon)
    engine, *_ = infinity.initialize(engine_model, config, optimizer=optimizer)
    with engine:
        assert "by Muon" in repr(engine)
        assert engine.optimizer.param_groups[0] is optimizer.param_groups[0]
        for batch in CASE.batches(3):
            torch.autograd.backward(batch.call(reference))
            plain.step()
            plain.zero_grad()
            plain_schedule.step()
            engine.backward(batch.call(engine))
            engine.step()
            schedule.step()
        for name, value in engine.state_dict(master=True).items():
            assert same_bits(value, reference.state_dict()[name]), name

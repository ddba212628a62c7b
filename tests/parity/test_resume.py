"""Tests of resuming: N steps equal k steps, save, load in another engine, N - k steps.

Results are bitwise equal for any pair of placements and any precision, within an accumulation
window, with dropout, schedules and all other state of a run.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.adam_values import SECTIONS
from support.grids import diagonal
from support.small import Block, batch
from support.trainer import SIMPLEST, make_config, make_device, same_bits
from torch import Tensor, nn
from torch.nn import functional

import infinity
from infinity.engine import Engine
from infinity.errors import CheckpointError

VOCABULARY, WIDTH = 50, 16


class Model(nn.Module):
    """Model with dropout, a running mean, a non-persistent buffer, tied and frozen weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(3))
        self.running = nn.BatchNorm1d(WIDTH, affine=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        x = self.frozen(self.embedding(tokens))
        for block in self.blocks:
            x = functional.dropout(block(x), 0.1, self.training)
        x = self.running(x.flatten(0, 1).to(self.running.running_mean.dtype)).view_as(x).to(x.dtype)
        logits = self.head(x * (1 + 0.01 * self.calls)).float()
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@dataclass
class Run:
    """Configuration of a run: the config, arguments of `initialize`, the device."""

    config: dict[str, Any] = field(default_factory=dict)
    arguments: Callable[[nn.Module], dict[str, Any]] = lambda model: {}
    device: str = "cpu"

    def engine(self, path: Path, placement: tuple[str, str, str], seed: int) -> Engine:
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        path.mkdir(exist_ok=True)
        model = Model()
        config = make_config(placement, nvme_path=str(path), **self.config)
        engine, *_ = infinity.initialize(
            model, config, device=make_device(self.device, seed), **self.arguments(model)
        )
        return engine


@dataclass
class Ending:
    """Complete state at the end of a run."""

    losses: list[float]
    masters: dict[str, Tensor]
    moments: dict[str, Tensor]
    buffers: dict[str, Tensor]
    facts: dict[str, Any]

    def differences(self, other: Ending) -> list[str]:
        found = [] if self.losses == other.losses else [f"losses {self.losses} {other.losses}"]
        found += [] if self.facts == other.facts else [f"facts {self.facts} {other.facts}"]
        for field_name in ("masters", "moments", "buffers"):
            state, other_state = getattr(self, field_name), getattr(other, field_name)
            found += [f"{field_name}: {n}" for n in state.keys() ^ other_state.keys()]
            found += [
                f"{field_name}: {n}"
                for n in state
                if n in other_state and not same_bits(state[n], other_state[n])
            ]
        return found


def ending(engine: Engine, losses: list[float]) -> Ending:
    moments = {}
    for name, parameter in engine.module.named_parameters():
        if name.startswith("frozen"):
            continue
        for key, value in engine.optimizer.read_state(parameter).items():
            moments[f"{name}.{key}"] = torch.as_tensor(value).clone()
    return Ending(
        losses,
        dict(engine.state_dict(master=True).items()),
        moments,
        {name: value.detach().cpu().clone() for name, value in engine.module.named_buffers()},
        {
            "steps": (engine.global_steps, engine.micro_step, engine.skipped_steps),
            "lr": [group["lr"] for group in engine.optimizer.param_groups],
            "drawn": (torch.rand(2).tolist(), np.random.rand(), random.random()),
        },
    )


def micro_step(engine: Engine, index: int) -> float:
    loss = engine(batch(index).to(engine.device))
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


STRAIGHT: dict[tuple[str, int], Ending] = {}  # results of runs that differ only in their config


def straight(folder: Path, run: Run, num: int) -> Ending:
    key, plain = (repr(run.config), num), type(run) is Run and run.arguments is Run.arguments
    if plain and key in STRAIGHT:
        return STRAIGHT[key]
    with run.engine(folder / "straight", SIMPLEST, seed=1) as engine:
        found = ending(engine, [micro_step(engine, i) for i in range(num)])
    if plain and run.device == "cpu":
        STRAIGHT[key] = found
    return found


def train_resumed(
    folder: Path,
    run: Run,
    num: int,
    cut: int,
    first: tuple[str, str, str],
    second: tuple[str, str, str],
    *,
    save_before_step: bool = False,
) -> Ending:
    """Run `cut` micro-steps under one placement, and the others under another.

    With `between`, save after a backward and before its step.
    """
    saved = folder / f"saved{len(list(folder.iterdir()))}"
    with run.engine(folder / "first", first, seed=1) as engine:
        losses = [micro_step(engine, i) for i in range(cut)]
        if save_before_step:
            loss = engine(batch(cut).to(engine.device))
            engine.backward(loss)
            losses.append(float(loss.detach()))
        engine.save_checkpoint(saved, client_state={"next": cut + save_before_step})
        # Training after the save must not affect the checkpoint.
        if save_before_step:
            engine.step()
        micro_step(engine, 77)
    with run.engine(folder / "second", second, seed=2) as engine:
        micro_step(engine, 78)
        path, client_state = engine.load_checkpoint(saved)
        assert path is not None
        assert client_state == {"next": cut + save_before_step}
        if save_before_step:
            engine.step()
        losses += [micro_step(engine, i) for i in range(cut + save_before_step, num)]
        return ending(engine, losses)


ALL_HOST = ("host", "host", "host")
PLACEMENTS = [SIMPLEST, ALL_HOST, ("disk", "disk", "disk"), ("disk", "host", "disk"),
          ("host", "disk", "host"), ("device", "disk", "disk")]  # fmt: skip


@pytest.mark.parametrize(
    ("first", "second", "precision"),
    diagonal(PLACEMENTS, PLACEMENTS[2:] + PLACEMENTS[:2], ["fp32", "bf16"]),
)
def test_resume_across_placements(tmp_path: Path, first: Any, second: Any, precision: str) -> None:
    run = Run({"precision": precision, "gradient_clipping": 0.5})
    expected = straight(tmp_path, run, 5)
    assert train_resumed(tmp_path, run, 5, 3, first, second).differences(expected) == []


@pytest.mark.parametrize(("other_placement", "offloads"), diagonal(PLACEMENTS[2:4], [False, True]))
def test_resume_to_and_from_discrete_device(
    tmp_path: Path, other_placement: Any, offloads: bool
) -> None:
    run = Run({"precision": "bf16"}, device="fake")
    expected = straight(tmp_path, Run({"precision": "bf16"}), 4)
    first, second = (SIMPLEST, other_placement) if offloads else (other_placement, SIMPLEST)
    assert train_resumed(tmp_path, run, 4, 2, first, second).differences(expected) == []


DISK = ("disk", "disk", "disk")
PLACEMENT_PAIRS = [(DISK, ALL_HOST), (ALL_HOST, DISK)]


@pytest.mark.parametrize(
    ("cut", "save_before_step", "placement"),
    diagonal(range(6), [True, False], PLACEMENT_PAIRS + PLACEMENT_PAIRS[::-1]),
)
def test_resume_within_accumulation_window(
    tmp_path: Path, cut: int, save_before_step: bool, placement: Any
) -> None:
    run = Run({"precision": "bf16", "gradient_accumulation_steps": 3})
    expected = straight(tmp_path, run, 7)
    assert (
        train_resumed(
            tmp_path, run, 7, cut, *placement, save_before_step=save_before_step
        ).differences(expected)
        == []
    )


def two_groups(model: nn.Module) -> dict[str, Any]:
    decayed = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    plain = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "lr": 3e-3}]
    return {"model_parameters": groups}


def with_scheduler(name: str, **params: Any) -> Callable[[nn.Module], dict[str, Any]]:
    kind = getattr(torch.optim.lr_scheduler, name)
    return lambda model: {"lr_scheduler": lambda optimizer: kind(optimizer, **params)}


def with_optimizer(
    make: Callable[[Any], torch.optim.Optimizer],
) -> Callable[[nn.Module], dict[str, Any]]:
    return lambda model: {"optimizer": make}


RUNS = {
    "8bit": Run({"precision": "bf16", "optimizer": {"moments": "8bit"}}),
    "stochastic": Run({"seed": 5, "optimizer": {"moments": "bf16_stochastic"}}),
    "bf16 moments": Run({"optimizer": {"moments": "bf16"}}),
    **{name: Run({"optimizer": section}) for name, section in SECTIONS.items()},
    "SGD without state": Run({"optimizer": {"type": "SGD"}}),
    "groups": Run({}, two_groups),
    "cosine": Run({}, with_scheduler("CosineAnnealingLR", T_max=6)),
    "one cycle": Run({}, with_scheduler("OneCycleLR", max_lr=0.02, total_steps=12)),
    "lambda": Run({}, with_scheduler("LambdaLR", lr_lambda=lambda step: 0.9**step)),
    "fake accelerator": Run({"precision": "bf16"}, device="fake"),
    "verified": Run({"io": {"verify": True}}),
    "small chunks": Run({"chunk_size": 2048, "precision": "bf16"}),
}  # fmt: skip


@pytest.mark.parametrize(("name", "placement"), diagonal([*RUNS], PLACEMENT_PAIRS))
def test_resume_by_configuration(tmp_path: Path, name: str, placement: Any) -> None:
    run = RUNS[name]
    expected = straight(tmp_path, run, 5)
    assert train_resumed(tmp_path, run, 5, 3, *placement).differences(expected) == []


ADAPTED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-3, centered=True, momentum=0.9),
    "NAdam": lambda groups: torch.optim.NAdam(groups, lr=1e-3),
    "AMSGrad": lambda groups: torch.optim.AdamW(groups, lr=1e-3, amsgrad=True),
    "Adafactor": lambda groups: torch.optim.Adafactor(groups, lr=1e-3),
}


@pytest.mark.parametrize(("name", "placement"), diagonal([*ADAPTED], PLACEMENT_PAIRS))
def test_resume_with_torch_optimizer(tmp_path: Path, name: str, placement: Any) -> None:
    run = Run({"precision": "bf16"}, with_optimizer(ADAPTED[name]))

    class AdapterRun(Run):
        def engine(self, path: Path, placement: tuple[str, str, str], seed: int) -> Engine:
            torch.manual_seed(seed)
            np.random.seed(seed)
            random.seed(seed)
            path.mkdir(exist_ok=True)
            config = make_config(placement, nvme_path=str(path), precision="bf16")
            del config["optimizer"]
            arguments = run.arguments(nn.Module())
            model = Model()
            trained = [p for p in model.parameters() if p.requires_grad]
            return infinity.initialize(model, config, model_parameters=trained, **arguments)[0]

    expected = straight(tmp_path, AdapterRun(), 5)
    assert train_resumed(tmp_path, AdapterRun(), 5, 3, *placement).differences(expected) == []


def test_resume_with_other_precision_loads_weights_only(tmp_path: Path) -> None:
    with Run({"precision": "bf16"}).engine(tmp_path / "a", DISK, seed=1) as engine:
        micro_step(engine, 0)
        engine.save_checkpoint(tmp_path / "saved", wait=True)
        masters = dict(engine.state_dict(master=True).items())
    with Run({"precision": "fp32"}).engine(tmp_path / "b", ALL_HOST, seed=2) as engine:
        before = dict(engine.state_dict(master=True).items())
        with pytest.raises(CheckpointError, match="precision 'bf16' there, 'fp32' here"):
            engine.load_checkpoint(tmp_path / "saved")
        after = dict(engine.state_dict(master=True).items())
        assert all(same_bits(before[name], after[name]) for name in before)
        engine.load_checkpoint(tmp_path / "saved", load_optimizer_states=False)
        assert engine.global_steps == 1
        found = dict(engine.state_dict(master=True).items())
        trained = [n for n, p in engine.module.named_parameters() if p.requires_grad]
        assert all(same_bits(found[name], masters[name].float()) for name in trained)

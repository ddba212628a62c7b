"""Tests of the optimizers of InfinityTrainer against those of `transformers.Trainer`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from support.hf_runs import FP32, assert_close_history, llama, trainer_for

from infinity.config.schema import Config
from infinity.errors import ConfigError
from infinity.integrations.huggingface.trainer import InfinityTrainer
from infinity.optim.from_torch import adopt_scheduler, choose_instance
from infinity.optim.offloaded import mark_stepped
from infinity.optim.param_groups import make_optimizer

TOLERANCE = 2e-6


def trained_pair(
    tmp_path: Path, make_options: Any = lambda model: {}, tolerance: float = TOLERANCE,
    kinds: tuple[Any, Any] = (hf.Trainer, InfinityTrainer), **changed: Any,
) -> Any:  # fmt: skip
    trainers = []
    for kind in kinds:
        model = llama()
        options = make_options(model)
        trainers.append(
            trainer_for(kind, tmp_path / kind.__name__, model, options, max_steps=4, **changed)
        )
        trainers[-1].train()
    assert_close_history(trainers[1], trainers[0], tolerance)
    trainers[1].close()
    return trainers[1]


def test_param_groups_with_and_without_decay(tmp_path: Path) -> None:
    trainer = trained_pair(tmp_path)
    decayed, bare = trainer.optimizer.param_groups
    assert (decayed["weight_decay"], bare["weight_decay"]) == (0.1, 0.0)
    assert {p.dim() for p in bare["params"]} == {1}
    assert trainer.optimizer.rule.name == "AdamW"


class OwnGroups(hf.Trainer):  # type: ignore[misc]
    """Return param groups with the optimizer class, as sentence-transformers' trainer does."""

    def get_optimizer_cls_and_kwargs(self, args: Any, model: Any = None) -> tuple[Any, Any]:
        kind, options = super().get_optimizer_cls_and_kwargs(args, model)
        first, *others = self.model.parameters()
        rates = {"params": [first], "lr": 3e-3, "weight_decay": 0.0}
        groups = [rates, {"params": others, "weight_decay": 0.1}, {"params": [], "lr": 1.0}]
        return kind, {**options, "optimizer_dict": groups}


def test_param_groups_from_optimizer_dict(tmp_path: Path) -> None:
    both = type("Both", (InfinityTrainer, OwnGroups), {})
    trainer = trained_pair(tmp_path, kinds=(OwnGroups, both))
    assert trainer.optimizer.rule.name == "AdamW"
    assert [len(group["params"]) for group in trainer.optimizer.param_groups][::2] == [1, 0]


@pytest.mark.parametrize("optim", ["rmsprop", "adafactor"])
def test_other_optimizers_are_adapted(tmp_path: Path, optim: str) -> None:
    tolerance = 2e-5 if optim == "rmsprop" else TOLERANCE  # epsilon is 1e-8: steps of any size
    assert trained_pair(tmp_path, tolerance=tolerance, optim=optim).optimizer.rule.name not in (
        "AdamW",
        "SGD",
    )


def test_optimizer_cls_and_kwargs_match_trainer(tmp_path: Path) -> None:
    given = (torch.optim.NAdam, {"lr": 1e-2, "betas": (0.8, 0.99)})
    trained_pair(tmp_path, lambda _: {"optimizer_cls_and_kwargs": given})
    given = (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True})
    trained_pair(tmp_path, lambda _: {"optimizer_cls_and_kwargs": given}, tolerance=1e-5)


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda ps: torch.optim.AdamW(ps, lr=1e-2, weight_decay=0.2), "AdamW"),
        (lambda ps: torch.optim.Adam(ps, lr=1e-2), "Adam"),
        (lambda ps: torch.optim.SGD(ps, lr=1e-1, momentum=0.9, nesterov=True), "SGD"),
        (lambda ps: torch.optim.Adamax(ps, lr=1e-2), "Adamax"),
    ],
)
def test_optimizer_and_scheduler_objects_match_trainer(
    tmp_path: Path, make: Any, rule: str
) -> None:
    def options(model: Any) -> Any:
        first, *others = model.parameters()
        optimizer = make([{"params": [first], "lr": 3e-3}, {"params": others}])
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        return {"optimizers": (optimizer, schedule)}

    trainer = trained_pair(tmp_path, options)
    assert rule in trainer.optimizer.rule.name
    assert len(trainer.optimizer.param_groups) == 2


@pytest.mark.parametrize("kind", ["AdamW", "NAdam"])  # built in, adapted
def test_schedules_drive_converted_optimizer(kind: str) -> None:
    """Schedules that read the group's current value, nest schedules, or add group entries."""
    schedules = torch.optim.lr_scheduler

    def warm_up(optimizer: Any) -> Any:
        return schedules.LinearLR(optimizer, 0.1, total_iters=4)

    for make in (
        warm_up,
        lambda o: schedules.LambdaLR(o, lambda step: min(1, step / 4)),
        lambda o: schedules.SequentialLR(o, [warm_up(o), schedules.ExponentialLR(o, 0.9)], [4]),
        lambda o: schedules.ChainedScheduler([warm_up(o), schedules.ExponentialLR(o, 0.9)], o),
        lambda o: schedules.OneCycleLR(o, max_lr=1.0, total_steps=10),
    ):
        rates: list[list[tuple[float, tuple[float, float]]]] = []
        for converted in (False, True):
            model = torch.nn.Linear(4, 4)
            groups = [{"params": model.parameters(), "name": "all of them"}]
            given = driven = getattr(torch.optim, kind)(groups, lr=1.0)
            schedule = make(given)
            if converted:
                choice = choose_instance(Config(), given, named=False)
                driven = make_optimizer(model, choice.config, choice.groups, choice.optimizer)
                assert (choice.optimizer is None) == (kind == "AdamW")
                adopt_scheduler(schedule, given)
            rates.append([])
            for _ in range(8):
                rates[-1].append((driven.param_groups[0]["lr"], driven.param_groups[0]["betas"]))
                given.step() if given is driven else mark_stepped(driven)
                schedule.step()
        assert rates[1] == rates[0]


def test_torch_adagrad_with_initial_state_accepted(tmp_path: Path) -> None:
    trained_pair(
        tmp_path, lambda model: {"optimizers": (torch.optim.Adagrad(model.parameters()), None)}
    )


def test_overridden_create_optimizer_matches_trainer(tmp_path: Path) -> None:
    def create(self: Any, model: Any = None) -> Any:
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-3, betas=(0.7, 0.9))
        return self.optimizer

    trainers = []
    for base in (hf.Trainer, InfinityTrainer):
        kind = type("Own", (base,), {"create_optimizer": create})
        trainer = trainer_for(kind, tmp_path / base.__name__, max_steps=3)
        trainer.evaluate()
        trainer.train()
        trainers.append(trainer)
    assert_close_history(trainers[1], trainers[0], TOLERANCE)
    assert len(trainers[1].optimizer.param_groups) == 1
    trainers[1].close()


def test_unsupported_optimizers_raise(tmp_path: Path) -> None:
    class Factory:
        def __call__(self, model: Any, **_: Any) -> Any:
            raise AssertionError

    def trained_with(options: Any) -> None:
        trainer_for(InfinityTrainer, tmp_path, None, options).train()

    with pytest.raises(ConfigError, match="selects parameters from the model"):
        trained_with({"optimizer_cls_and_kwargs": (Factory, {})})
    model = llama()
    stepped = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.ones(1, 4, dtype=torch.int64)).logits.sum().backward()
    stepped.step()
    with pytest.raises(ConfigError, match="it has stepped"):
        trainer_for(InfinityTrainer, tmp_path, model, {"optimizers": (stepped, None)}).train()
    model = llama()
    options = {
        "optimizers": (torch.optim.AdamW(model.parameters()), None),
        "infinity_config": {"optimizer": {"type": "Lion"}},
    }
    with pytest.raises(ConfigError, match="two optimizers"):
        trainer_for(InfinityTrainer, tmp_path, model, options).train()
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters())
    other = torch.optim.AdamW(llama().parameters())
    schedule = torch.optim.lr_scheduler.ConstantLR(other)
    with pytest.raises(ConfigError, match="over another optimizer"):
        trainer_for(InfinityTrainer, tmp_path, model, {"optimizers": (optimizer, schedule)}).train()


def test_muon_splits_param_groups_of_transformers(tmp_path: Path) -> None:
    """Values are those of the arguments, except AdamW's settings in the config."""
    section: dict[str, Any] = {"type": "Muon", "adjust_lr_fn": "match_rms_adamw"}
    for more in ({}, {"adam_lr": 5e-3}):
        options = {"infinity_config": {**FP32, "optimizer": section | more}}
        trainer = trainer_for(InfinityTrainer, tmp_path, llama(), options, max_steps=3,
                              adam_beta1=0.8, lr_scheduler_type="constant")  # fmt: skip
        trainer.train()
        matrices, *others = trainer.optimizer.param_groups
        assert (matrices["lr"], matrices["eps"]) == (1e-2, 1e-7)
        for group in others:
            assert group["lr"] == more.get("adam_lr", 1e-2)
            assert group["betas"] == (0.8, trainer.args.adam_beta2)
            assert group["eps"] == trainer.args.adam_epsilon != matrices["eps"]
        if not more:
            trainer.close()
    found = [(g["use_muon"], g["weight_decay"], g["lr"]) for g in trainer.optimizer.param_groups]
    assert found == [(True, 0.1, 1e-2), (False, 0.1, 5e-3), (False, 0.0, 5e-3)]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    trainer.close()

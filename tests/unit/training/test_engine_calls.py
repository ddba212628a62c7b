"""Tests of the DeepSpeed interface of an engine."""

from __future__ import annotations

import argparse
import copy
import inspect
import itertools
import logging
import re
import warnings
from collections import UserDict, namedtuple
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import fault_injection, small
from support.fake_accelerator import FakeAccelerator
from support.internals import components
from support.small import (
    MIXED,
    ON_DEVICE,
    ON_DISK,
    batch,
    masters,
    same,
    settings,
    small_model,
)
from torch import Tensor, nn

import infinity
from infinity import _initialize
from infinity.engine import Engine
from infinity.errors import (
    CheckpointError,
    ConfigError,
    DoesNotFitError,
    EngineClosedError,
    InfinityWarning,
    ResidencyError,
    TrainingError,
)
from infinity.integrations import deepspeed
from infinity.integrations.deepspeed.engine import DeepSpeedEngine
from infinity.integrations.deepspeed.runtime.zero.offload_config import (
    OffloadDeviceEnum,
    OffloadStateTypeEnum,
)
from infinity.plan.machine import read_machine
from infinity.training import stored_weights

small_engine = partial(small.small_engine, engine_class=DeepSpeedEngine)
PLACEMENTS = {"disk": ON_DISK, "device": ON_DEVICE, "mixed": MIXED}


def mark_big(every: list[Any], few: list[Any]) -> list[Any]:
    """Return all rows as parameters; rows not in `few` run only in `make test-big`."""
    assert set(few) <= set(every)
    return [pytest.param(*row, marks=[] if row in few else [pytest.mark.big]) for row in every]


def deepspeed_config(**more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "infinity": {"cpu": {"num_threads": 1}, "chunk_size": 2048},
        **more,
    }


# --- engine class -----------------------------------------------------------------------------


def test_engine_class_follows_config_style(tmp_path: Path) -> None:
    native_config, deepspeed_style = settings(tmp_path), deepspeed_config()
    args = argparse.Namespace(deepspeed_config=native_config)
    for initialize, arguments, kind in (
        (infinity.initialize, {"config": native_config}, Engine),
        (infinity.initialize, {"config": deepspeed_style}, DeepSpeedEngine),
        (infinity.initialize, {"config_params": native_config}, DeepSpeedEngine),
        (infinity.initialize, {"args": args}, DeepSpeedEngine),
        (infinity.initialize, {"config": deepspeed_style, "engine_class": Engine}, Engine),
        (deepspeed.initialize, {"config": native_config}, DeepSpeedEngine),
    ):
        engine, *_ = initialize(model=small_model(), **arguments)
        with engine:
            assert type(engine) is kind
            assert hasattr(engine, "get_lr") == (kind is DeepSpeedEngine)


# --- the arguments of initialize ---------------------------------------------------------------


def test_positional_arguments_in_deepspeed_order() -> None:
    model, data = small_model(), torch.utils.data.DataLoader([batch(0)])
    parameters = [p for p in model.parameters() if p.requires_grad]
    args = argparse.Namespace()
    result = deepspeed.initialize(
        args, model, None, parameters, data, None, 29500, None, False, None, deepspeed_config()
    )
    engine, optimizer, loader, scheduler = result
    with engine:
        assert engine.module is model
        assert loader is data is engine.training_dataloader
        assert scheduler is None
        assert optimizer.param_groups[0]["lr"] == 1e-2
        assert engine.config == deepspeed_config()


def test_training_data_order_and_resume(tmp_path: Path) -> None:
    """The order is that of torch's `DistributedSampler`; a resume within an epoch warns."""
    samples = [(torch.tensor(n), torch.tensor(n + 10)) for n in range(9)]
    sampler = torch.utils.data.DistributedSampler(samples, num_replicas=1, rank=0, shuffle=True)
    expected = [*sampler]
    args = argparse.Namespace(local_rank=-1)

    def make_engine() -> Any:
        return deepspeed.initialize(
            args, small_model(), training_data=samples, config=deepspeed_config()
        )

    engine, _, loader, _ = make_engine()
    with engine:
        assert args.local_rank == 0, "as set by DeepSpeed's launcher"
        assert [n for first, _ in loader for n in first.tolist()] == expected
        seen = []
        for first, _ in itertools.islice(loader, 2):
            seen += first.tolist()
        engine.save_checkpoint(tmp_path, "saved")
        (tmp_path / "saved" / "notes.txt").write_text("mine")
        with pytest.raises(ConfigError, match="holds files that do not belong to a checkpoint"):
            engine.save_checkpoint(tmp_path, "saved")
        (tmp_path / "saved" / "notes.txt").unlink()
        (tmp_path / "file").write_text("mine")
        with pytest.raises(CheckpointError, match="file is not a directory"):
            engine.save_checkpoint(tmp_path, "file")
        assert (tmp_path / "file").read_text() == "mine"
        (tmp_path / "saved").rename(tmp_path / "saved.replaced")  # as left by a killed save
        (tmp_path / "mine.replaced").mkdir()
        for name in ("a/b", ""):
            with pytest.raises(ConfigError, match="a tag names a directory"):
                engine.save_checkpoint(tmp_path, name)
    engine, _, loader, _ = make_engine()
    with engine:
        engine.load_checkpoint(tmp_path)
        with pytest.warns(InfinityWarning, match="goes on after 2 batches of its pass"):
            remaining = [n for first, _ in loader for n in first.tolist()]
        assert seen + remaining == expected
        engine.save_checkpoint(tmp_path, "other")
    names = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert names == ["mine.replaced", "other", "saved"]


def test_deepspeed_zero_grad_keeps_open_window(tmp_path: Path) -> None:
    config = deepspeed_config(gradient_accumulation_steps=2)
    engine, *_ = deepspeed.initialize(small_model(), config)
    with engine:
        for index in range(4):
            engine.zero_grad()
            engine.backward(engine(batch(index)))
            engine.step()
        assert engine.global_steps == 2
        engine.backward(engine(batch(4)))
        Engine.zero_grad(engine)
        assert engine.micro_step == 0
        with pytest.raises(TrainingError, match="without a backward"):
            engine.step()


@pytest.mark.parametrize("positional", [False, True])
def test_config_file_passed_by_args(tmp_path: Path, positional: bool) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text('{"train_batch_size": 2, "optimizer": {"type": "Adam", "params": {}}}')
    parser = infinity.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
    if positional:
        engine, *_ = deepspeed.initialize(args, small_model())
    else:
        engine, *_ = deepspeed.initialize(args=args, model=small_model())
    engine.close()
    assert engine.train_batch_size() == 2


def test_initialize_accepts_deepspeed_arguments() -> None:
    config = deepspeed_config()
    for positional, named in (
        (False, {"config_params": config}),
        (False, {"config": settings(Path(), ON_DEVICE)}),
        (True, {"config": config}),
    ):
        args, model = argparse.Namespace(local_rank=-1), small_model()
        if positional:
            engine, *_ = infinity.initialize(args, model, None, model.parameters(), **named)
        else:
            engine, *_ = infinity.initialize(
                args=args, model=model, model_parameters=model.parameters(), **named
            )
        with engine:
            assert isinstance(engine, DeepSpeedEngine)
            assert args.local_rank == 0
    with pytest.raises(TypeError, match=r"initialize.* unexpected keyword argument 'modell'"):
        infinity.initialize(modell=small_model())
    plain, *_ = infinity.initialize(small_model(), settings(Path(), ON_DEVICE))
    plain.close()
    assert type(plain) is Engine


def test_core_initialize_has_no_deepspeed_arguments() -> None:
    core, public = inspect.signature(_initialize.initialize), inspect.signature(infinity.initialize)
    assert public == core
    assert not core.parameters.keys() & {"args", "config_params", "mpu", "mesh_param"}
    with pytest.raises(ConfigError, match="zero_optimization is from a DeepSpeed configuration"):
        _initialize.initialize(small_model(), {"zero_optimization": {"stage": 3}})


def test_config_translation_logged_once_not_printed(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, "infinity")
    engine, *_ = deepspeed.initialize(small_model(), deepspeed_config(steps_per_print=10))
    engine.close()
    records = [record for record in caplog.records if record.name == "infinity"]
    assert [record.levelno for record in records] == [logging.INFO]
    heading, *lines = records[0].getMessage().splitlines()
    assert heading == "the DeepSpeed configuration, key by key:"
    rows = engine.translation.rows
    assert [line.split()[0] for line in lines] == [row.key for row in rows]
    for line, row in zip(lines, rows, strict=True):
        assert f"  {row.verdict} " in line
        assert line.endswith(row.note)
    caplog.clear()
    engine, *_ = deepspeed.initialize(small_model(), settings(Path(), ON_DEVICE))
    engine.close()
    assert not caplog.records
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("positional", "named", "text"),
    [
        ((), {"model": nn.Linear(1, 1), "mpu": object()}, "mpu.*not supported"),
        ((), {"model": nn.Linear(1, 1), "mesh_param": (1, 1)}, "mesh_param.*not supported"),
        ((nn.Linear(1, 1), {}), {"config": {}}, "config twice"),
        ((nn.Linear(1, 1), {}, None), {}, "3 positional arguments"),
        ((None, None), {"config": {}}, "no model"),
        ((), {"config": {}}, "no model"),
        ((nn.Linear(1, 1),), {}, "no configuration"),
    ],
)
def test_invalid_deepspeed_arguments_rejected(
    positional: tuple[Any, ...], named: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        deepspeed.initialize(*positional, **named)


def test_optimizer_must_match_model_parameters() -> None:
    model = small_model()
    model.norm.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    config = deepspeed_config()
    del config["optimizer"]
    for parameters in (iter(trained), model.parameters(), [{"params": trained}]):
        optimizer = torch.optim.SGD(trained, lr=0.5)
        result = deepspeed.initialize(
            model=model, optimizer=optimizer, model_parameters=parameters, config=config
        )
        with result[0] as engine:
            assert engine.optimizer.param_groups[0]["lr"] == 0.5
            assert engine.get_lr() == [0.5]
            engine.close(restore=True)
    with pytest.raises(ConfigError, match="1 that require grad are not in the optimizer"):
        deepspeed.initialize(
            model=model,
            optimizer=torch.optim.SGD(trained[1:], lr=0.5),
            model_parameters=trained,
            config=config,
        )
    with pytest.raises(ConfigError, match="1 of the optimizer not in model_parameters"):
        deepspeed.initialize(
            model=model,
            optimizer=torch.optim.SGD(trained, lr=0.5),
            model_parameters=trained[1:],
            config=config,
        )


def test_scheduler_of_passed_optimizer_matches_torch() -> None:
    model, plain = small_model(), small_model()
    rates: list[list[float]] = []
    for training in (model, plain):
        optimizer = torch.optim.SGD(training.parameters(), lr=0.5)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        rates.append([])
        if training is plain:
            for _ in range(3):
                rates[-1].append(optimizer.param_groups[0]["lr"])
                optimizer.step()
                schedule.step()
            continue
        config = deepspeed_config()
        del config["optimizer"]
        engine, _, _, same_schedule = deepspeed.initialize(
            model=model, optimizer=optimizer, lr_scheduler=schedule, config=config
        )
        with engine:
            assert same_schedule is schedule
            for index in range(3):
                rates[-1] += engine.get_lr()
                engine.backward(engine(batch(index)))
                engine.step()
    assert rates[0] == rates[1] == [0.5, 0.25, pytest.approx(1 / 6)]


def test_non_plain_schedulers_resume_from_checkpoint(tmp_path: Path) -> None:
    """`MultiStepLR` has a `Counter` of milestones; the other is not a torch scheduler."""

    class CustomScheduler:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.groups, self.last = optimizer.param_groups, 0

        def step(self) -> None:
            self.last += 1
            self.groups[0]["lr"] = 1.0 / (1 + self.last)

        def state_dict(self) -> dict[str, Any]:
            return {"last": self.last}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.last = state["last"]

    config = deepspeed_config()
    del config["optimizer"]
    for kind in (
        partial(torch.optim.lr_scheduler.MultiStepLR, milestones=[1, 2, 3]),
        CustomScheduler,
    ):
        rates = []
        for steps in (1, 2):
            model = small_model()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            engine, *_ = deepspeed.initialize(
                model=model, optimizer=optimizer, lr_scheduler=kind(optimizer), config=config
            )
            with engine:
                if rates:
                    engine.load_checkpoint(tmp_path)
                for index in range(steps):
                    engine.backward(engine(batch(index)))
                    engine.step()
                    rates += engine.get_lr()
                engine.save_checkpoint(tmp_path)
        assert rates == pytest.approx(
            [0.05, 0.005, 0.0005] if kind is not CustomScheduler else [1 / 2, 1 / 3, 1 / 4]
        )
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with pytest.raises(ConfigError, match="which has no step"):
        deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=1, config=config)


def test_state_of_another_scheduler_is_refused(tmp_path: Path) -> None:
    """It would set attributes of the same name, such as `gamma`, of a schedule without the rest."""
    steps: dict[str, Any] = {"type": "StepLR", "params": {"step_size": 2, "gamma": 0.5}}
    decay: dict[str, Any] = {"type": "ExponentialLR", "params": {"gamma": 0.9}}
    with small_engine(tmp_path, scheduler=steps) as engine:
        small.train(engine, 1)
        saved = tmp_path.parent / f"{tmp_path.name}-saved"
        engine.save_checkpoint(saved, wait=True)
        engine.load_checkpoint(saved)
    with small_engine(tmp_path, scheduler=decay) as engine:
        with pytest.raises(CheckpointError, match=r"is a StepLR, this engine's a ExponentialLR"):
            engine.load_checkpoint(saved)
        engine.load_checkpoint(saved, load_lr_scheduler_states=False)
        assert engine.lr_scheduler.gamma == 0.9


def test_step_passes_lr_kwargs_to_scheduler(tmp_path: Path) -> None:
    def plateau(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)

    with small_engine(tmp_path, arguments={"lr_scheduler": plateau}) as engine:
        rates = []
        for index, metric in enumerate((1.0, 2.0, 3.0)):
            engine.backward(engine(batch(index)))
            engine.step(lr_kwargs={"metrics": metric})
            rates += engine.get_lr()
    assert rates == [1e-2, 5e-3, 2.5e-3]


def test_user_stepped_scheduler_does_not_warn(tmp_path: Path) -> None:
    """torch would warn about the order of steps, although it is correct."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    config = {k: v for k, v in settings(tmp_path, ON_DISK).items() if k != "optimizer"}
    engine, *_ = infinity.initialize(model, config, optimizer=optimizer)
    with engine, warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.backward(engine(batch(0)))
        engine.step()
        schedule.step()
        assert engine.optimizer.param_groups[0]["lr"] == 0.05


def test_passed_optimizer_delegates_to_engine(tmp_path: Path) -> None:
    """Covers step, zero_grad and load_state_dict; the param groups stay the scheduler's objects."""
    found = []
    for by_engine, drops in ((True, True), (False, True), (True, False)):
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5**n)
        config = {k: v for k, v in settings(tmp_path, ON_DISK).items() if k != "optimizer"}
        engine, engine_optimizer, *_ = infinity.initialize(
            model, config, optimizer=optimizer, lr_scheduler=schedule
        )
        with engine:
            for index in range(4):
                if drops:
                    loss = engine(batch(9))
                    engine.backward(loss) if index % 2 else loss.backward()
                    (engine_optimizer if by_engine else optimizer).zero_grad()
                engine(batch(index)).backward()
                (engine_optimizer if by_engine else optimizer).step()
                if index == 1:
                    state = {**engine_optimizer.state_dict(), "state": {}}
                    (engine_optimizer if by_engine else optimizer).load_state_dict(state)
            assert engine.global_steps == 4
            assert engine.optimizer.param_groups[0] is optimizer.param_groups[0]
            with pytest.raises(ConfigError, match="once the engine is made"):
                optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
            assert optimizer.param_groups[0]["lr"] == 0.5**5
            found.append(small.masters(engine))
        assert "zero_grad" not in vars(optimizer)
    assert small.same(found[0], found[1])
    assert small.same(found[0], found[2]), "dropped gradients have no effect"


def test_unsupported_group_options_and_hooks_rejected(tmp_path: Path) -> None:
    """Group options that change the update rule, and hooks on steps."""
    config = settings(tmp_path, ON_DISK)
    model = small_model()
    for option in (
        {"amsgrad": True},
        {"bias_correction": False},
        {"decoupled_weight_decay": False},
    ):
        groups = [{"params": model.parameters(), **option}]
        with pytest.raises(ConfigError, match=f"group has {next(iter(option))}="):
            infinity.initialize(model, config, model_parameters=groups)
    hooked = torch.optim.RMSprop(model.parameters())
    hooked.register_step_post_hook(lambda *_: None)
    del config["optimizer"]
    with pytest.raises(ConfigError, match="RMSprop has hooks on its steps"):
        infinity.initialize(model, config, optimizer=hooked)


def test_read_state_finishes_pass_before_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A torch optimizer validates edits of its groups on the optimizer that the pass steps."""
    calls: list[str] = []

    def note(owner: Any, name: str) -> None:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: (calls.append(name), original(*args))[1])

    with small_engine(tmp_path) as engine:
        engine.backward(engine(batch(0)))
        engine.step()
        note(components(engine).optimizer_pass, "finish")
        note(engine.optimizer, "params_by_index")
        engine.optimizer.read_state(next(engine.module.parameters()))
        assert calls == ["finish", "params_by_index"]
        monkeypatch.undo()


def test_autocast_cache_disabled_in_module_calls(tmp_path: Path) -> None:
    """For calls of the module, with and without gradients."""
    cache_enabled: list[bool] = []
    model = small_model()
    model.norm.register_forward_hook(
        lambda *_: cache_enabled.append(torch.is_autocast_cache_enabled())
    )
    with small_engine(tmp_path, model=model) as engine, torch.autocast("cpu", torch.bfloat16):
        engine.module(batch(0)).backward()
        with torch.no_grad():
            engine.module(batch(0))
        assert cache_enabled == [False, False]
        assert torch.is_autocast_cache_enabled()


def test_meta_default_device_has_no_effect(tmp_path: Path) -> None:
    """Scripts for GPUs set a default device; here it is one without values."""

    def make_optimizer(parameters: Any) -> Any:
        return torch.optim.RMSprop(parameters, lr=1e-2)

    model, tokens = small_model(), batch(0)
    base_config = {k: v for k, v in settings(tmp_path, ON_DISK).items() if k != "optimizer"}
    with torch.device("meta"):
        for kind in (None, make_optimizer):
            config = (
                base_config if kind else base_config | {"optimizer": {"type": "AdamW", "lr": 1e-2}}
            )
            engine, *_ = infinity.initialize(model, config, optimizer=kind, device="cpu")
            parameter = next(engine.module.parameters())
            engine.backward(engine(tokens))
            engine.step()
            assert engine.optimizer.read_state(parameter)
            assert all(value.device.type == "cpu" for value in small.masters(engine).values())
            copied = copy.deepcopy(engine.state_dict())
            assert isinstance(copied, dict)
            assert all(torch.equal(copied[n], v) for n, v in engine.state_dict().items())
            engine.close(restore=True)


def test_inputs_moved_to_device_scalars_and_sizes_kept(tmp_path: Path) -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(3)], enforce_sorted=False)
    Row = namedtuple("Row", "tokens label")
    call_inputs = {
        "packed": packed,
        "rows": [Row(torch.ones(2), 3)],
        "encoding": UserDict(x=batch(0)),
    }
    with small_engine(tmp_path, precision="bf16") as engine:
        inputs: Any = engine._inputs
        prepared = inputs.prepare((call_inputs, {"scale": torch.tensor(2.0)}))
        assert prepared[0] is call_inputs
        inputs._device = torch.device("meta")
        moved, (scale,) = inputs.prepare((call_inputs, (torch.tensor(2.0),)))
        assert scale.device.type == moved["packed"].batch_sizes.device.type == "cpu"
        row = moved["rows"][0]
        assert isinstance(row, Row)
        assert isinstance(moved["encoding"], UserDict)
        tensors = (moved["packed"].data, moved["packed"].sorted_indices, row.tokens)
        assert all(t.device.type == "meta" for t in (*tensors, moved["encoding"]["x"]))
        assert call_inputs["rows"][0].tokens.device.type == "cpu"  # not modified


def test_buffer_dtype_mismatch_error_names_buffer(tmp_path: Path) -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(50, 16), nn.Linear(16, 16)
            self.register_buffer("positions", torch.randn(9, 16))

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.embedding(tokens) + self.positions).float().sum()

    with (
        small_engine(tmp_path, model=Positions(), precision="bf16") as engine,
        pytest.raises(RuntimeError, match="Float and BFloat16") as caught,
    ):
        engine(batch(0))
    assert "if 'positions' meets weights" in caught.value.__notes__[0]


# --- engines for inference ---------------------------------------------------------------------


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_frozen_reference_engine_with_trained_policy(
    tmp_path: Path, placement: str, precision: str
) -> None:
    """A reference model and a policy in one process, as in preference training."""
    plain, reference_plain = small_model(1), small_model(2).requires_grad_(False)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    expected = reference_plain.to(dtype)(batch(0))
    frozen = small_model(2).requires_grad_(False)
    trained_dir = tmp_path / "trained"
    trained_dir.mkdir()
    frozen_dir = tmp_path / "frozen"
    frozen_dir.mkdir()
    config = settings(frozen_dir, PLACEMENTS[placement], precision=precision)
    with (
        small_engine(trained_dir, PLACEMENTS[placement], plain, precision=precision) as policy,
        fault_injection.initialize(frozen, config, engine_class=DeepSpeedEngine)[0] as reference,
    ):
        reference.eval()
        assert not any(p.requires_grad for p in reference.module.parameters())
        for index in range(2):
            with torch.no_grad():
                target = reference(batch(0))
            assert torch.equal(target, expected)
            loss = (policy(batch(index)) - reference(batch(0)).detach()) ** 2
            policy.backward(loss)
            policy.step()
        assert policy.global_steps == 2
        assert reference.plan.memory["host"].get("gradients", 0) == 0
        with pytest.raises(TrainingError, match="engine for inference"):
            reference.backward(torch.ones((), requires_grad=True))
        with pytest.raises(TrainingError, match="engine for inference"):
            reference.step()
        state = reference.module_state_dict()
        assert torch.equal(
            state["blocks.0.up.weight"], small_model(2).blocks[0].up.weight.to(dtype)
        )


def test_second_engine_gets_remaining_budget(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(16)))  # 16 MiB of fp32
    frozen = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(16)))
    frozen.requires_grad_(False)
    config = settings(tmp_path, {}, budget={"host": "6GiB"})
    with deepspeed.initialize(model, config)[0] as policy:
        base = 6 << 30
        assert policy.plan.budget["host"] == base
        with deepspeed.initialize(frozen, config)[0] as reference:
            taken = sum(policy.plan.tier_bytes[tier] for tier in ("host", "device"))
            assert reference.plan.budget["host"] == base - taken
            sizes = [engine.plan.tier_bytes for engine in (policy, reference)]
            assert sizes[0]["host"] + sizes[0]["device"] > 64 << 20
            assert sizes[1]["host"] + sizes[1]["device"] < 24 << 20
            ones = torch.ones(1, 512)
            policy.backward((policy(ones) - reference(ones)).square().mean())
            policy.step()


def test_config_without_optimizer_gives_inference_engine() -> None:
    config = deepspeed_config()
    del config["optimizer"]
    model = small_model()
    engine, optimizer, _, _ = deepspeed.initialize(model=model, config=config)
    with engine:
        assert optimizer.param_groups[0]["params"] == []
        assert engine(batch(0)).requires_grad is False
        with pytest.raises(TrainingError, match="engine for inference"):
            engine.backward(torch.ones((), requires_grad=True))
        engine.close(restore=True)
    assert all(p.requires_grad for p in model.parameters())
    with pytest.raises(ConfigError, match=r"optimizer\.type: must be given"):
        deepspeed.initialize(
            model=small_model(), config=config, model_parameters=small_model().parameters()
        )


# --- windows -----------------------------------------------------------------------------------


def gradients_of(engine: Engine) -> dict[str, Tensor]:
    return {name: engine.gradient(p) for name, p in engine.module.named_parameters()}


def backward_by_engine(engine: Engine, loss: Tensor) -> None:
    engine.backward(loss)


def backward_by_user(engine: Engine, loss: Tensor) -> None:
    loss.backward()


ALL_BACKWARDS = list(itertools.product(PLACEMENTS, ("fp32", "bf16"), (1, 4)))
FEW_BACKWARDS = [
    ("disk", "fp32", 1),
    ("disk", "bf16", 4),
    ("device", "fp32", 4),
    ("device", "bf16", 1),
    ("mixed", "fp32", 4),
    ("mixed", "bf16", 1),
]


@pytest.mark.parametrize(
    ("placement", "precision", "steps"), mark_big(ALL_BACKWARDS, FEW_BACKWARDS)
)
def test_loss_backward_equals_engine_backward(
    tmp_path: Path, placement: str, precision: str, steps: int
) -> None:
    found = []
    for backward in (backward_by_engine, backward_by_user):
        with small_engine(
            tmp_path, PLACEMENTS[placement], precision=precision, gradient_accumulation_steps=steps
        ) as engine:
            norms = []
            for index in range(2 * steps):
                backward(engine, engine(batch(index)))
                engine.step()
                norms.append(engine.grad_norm)
            assert engine.global_steps == 2
            assert engine.micro_steps == 2 * steps
            found.append((norms, masters(engine)))
    assert found[0][0] == found[1][0]
    assert same(found[0][1], found[1][1])


def test_gradients_before_or_dropped_by_zero_grad_ignored(tmp_path: Path) -> None:
    found = []
    for disturbed in (False, True):
        model = small_model()
        if disturbed:
            model(batch(7)).backward()
        with small.small_engine(tmp_path, model=model) as engine:
            for index in range(2):
                if disturbed:
                    engine.backward(engine(batch(8)))
                    model.zero_grad()
                engine.backward(engine(batch(index)))
                engine.step()
            model.zero_grad()  # nothing to drop
            found.append(masters(engine))
        assert "zero_grad" not in vars(model)
    assert same(*found)


def test_hook_that_drops_gradients_raises(tmp_path: Path) -> None:
    """As by an optimizer that steps in backward; a hook that only reads is allowed."""
    model, seen = small_model(), []
    model.norm.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.shape))
    with small_engine(tmp_path, model=model) as engine:
        engine.backward(engine(batch(0)))
        engine.step()
        assert len(seen) == 1
    model = small_model()
    model.norm.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with small_engine(tmp_path, model=model) as engine:
        loss = engine(batch(0))
        with pytest.raises(TrainingError, match="was dropped before it arrived"):
            engine.backward(loss)


def test_loss_of_two_calls_with_user_gradient(tmp_path: Path) -> None:
    found = []
    for by_user in (False, True):
        with small_engine(tmp_path, gradient_accumulation_steps=2) as engine:
            for index in (0, 2):
                loss = engine(batch(index)) + engine(batch(index + 1))
                if by_user:
                    loss.backward(torch.tensor(3.0))
                else:
                    engine.backward(3.0 * loss)
                engine.step()
            found.append(masters(engine))
    assert same(found[0], found[1])


def test_fp16_unscaled_backward_raises(tmp_path: Path) -> None:
    found = []
    for way in ("engine", "scale", "none"):
        with small_engine(tmp_path, precision="fp16", gradient_accumulation_steps=2) as engine:
            for index in range(4):
                loss = engine(batch(index))
                if way == "engine":
                    engine.backward(loss)
                elif way == "scale":
                    engine.scale(loss).backward()
                else:
                    loss.backward()
                    with pytest.raises(TrainingError, match=r"engine\.scale\(loss\)\.backward"):
                        engine.step()
                    assert engine.micro_step == 0
                    break
                engine.step()
            found.append((engine.skipped_steps, masters(engine)))
    assert found[0][0] == found[1][0]
    assert same(found[0][1], found[1][1])


def test_coalesced_backwards_accumulate(tmp_path: Path) -> None:
    with small_engine(tmp_path) as engine, engine.coalesce_grad_reduction():
        engine.backward(engine(batch(0)))
        engine.backward(engine(batch(1)))
        both = gradients_of(engine)
        Engine.zero_grad(engine)
        engine.backward(engine(batch(0)) + engine(batch(1)))
        for name, value in gradients_of(engine).items():
            torch.testing.assert_close(value, both[name])
        engine.step()
        assert engine.global_steps == 1


ALL_WINDOWS = list(
    itertools.product(
        PLACEMENTS, ("fp32", "bf16"), (1, 2, 3, 5), ("accelerate", "every_step", "no_sync")
    )
)
FEW_WINDOWS = [  # all pairs
    ("disk", "fp32", 1, "accelerate"),
    ("device", "bf16", 1, "every_step"),
    ("mixed", "fp32", 1, "no_sync"),
    ("disk", "bf16", 2, "every_step"),
    ("device", "fp32", 2, "no_sync"),
    ("mixed", "bf16", 2, "accelerate"),
    ("disk", "bf16", 3, "no_sync"),
    ("device", "fp32", 3, "accelerate"),
    ("mixed", "fp32", 3, "every_step"),
    ("disk", "fp32", 5, "every_step"),
    ("device", "bf16", 5, "accelerate"),
    ("mixed", "bf16", 5, "no_sync"),
]


@pytest.mark.parametrize(
    ("placement", "precision", "count", "style"), mark_big(ALL_WINDOWS, FEW_WINDOWS)
)
def test_manual_windows_equal_configured_windows(
    tmp_path: Path, placement: str, precision: str, count: int, style: str
) -> None:
    """More or fewer micro-batches than configured equal a window of the configured length."""
    with small_engine(
        tmp_path, PLACEMENTS[placement], precision=precision, gradient_accumulation_steps=count + 1
    ) as engine:
        engine.set_gradient_accumulation_steps(max(count, 1))
        for index in range(2 * count):
            engine.backward(engine(batch(index)))
            engine.step()
        assert engine.global_steps == 2
        expected = masters(engine)
    with small_engine(
        tmp_path, PLACEMENTS[placement], precision=precision, gradient_accumulation_steps=3
    ) as engine:
        for index in range(2 * count):
            last = index % count == count - 1
            if style != "no_sync":
                engine.set_gradient_accumulation_boundary(last)
                assert engine.is_gradient_accumulation_boundary() is last
            else:
                engine.set_gradient_accumulation_boundary(True)
            with nullcontext() if last or style != "no_sync" else engine.no_sync():
                engine.backward(engine(batch(index)) / count, scale_wrt_gas=False)
            if last or style == "every_step":
                engine.step()
                assert engine.was_step_applied() is last
        assert engine.global_steps == 2
        assert same(masters(engine), expected)
        assert engine.micro_steps == (2 * count if style == "every_step" else 2)
        assert engine.global_samples == 2 * engine.train_batch_size() == 6
        engine.set_gradient_accumulation_boundary(None)
        assert engine.is_gradient_accumulation_boundary() is False


def test_manual_window_with_bf16_gradients_rejected(tmp_path: Path) -> None:
    with small_engine(tmp_path, precision="bf16") as engine:
        engine.set_gradient_accumulation_boundary(False)
        loss = engine(batch(0))
        with pytest.raises(TrainingError, match=r"gradient_accumulation_steps is 1.*bfloat16"):
            engine.backward(loss)
        loss.backward()
        with pytest.raises(TrainingError, match="2 bytes each"):
            engine.step()
        engine.zero_grad()
        with engine.no_sync(), pytest.raises(TrainingError, match="set by hand"):
            engine.backward(engine(batch(0)))
        with pytest.raises(ConfigError, match="a window of 2 micro-batches"):
            engine.set_train_batch_size(2)
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(engine(batch(0)))
        engine.step()
        assert engine.global_steps == 1


def test_step_within_no_sync_raises(tmp_path: Path) -> None:
    with small_engine(tmp_path) as engine:
        with engine.no_sync():
            engine.backward(engine(batch(0)))
            assert not engine.is_gradient_accumulation_boundary()
            with pytest.raises(TrainingError, match="no_sync"):
                engine.step()
        engine.backward(engine(batch(1)))
        engine.step()
        assert engine.global_steps == 1


def test_batch_size_can_change_between_updates(tmp_path: Path) -> None:
    arguments = {"batch_size": 2}
    with small_engine(tmp_path, gradient_accumulation_steps=3, arguments=arguments) as engine:
        assert engine.get_batch_info() == (6, 2, 3)
        engine.set_train_batch_size(4)
        assert engine.get_batch_info() == (4, 2, 2)
        assert engine.gradient_accumulation_steps() == 2
        for index in range(2):
            assert torch.equal(engine.backward(loss := engine(batch(index))), loss.detach() / 2)
            engine.step()
        assert (engine.global_steps, engine.global_samples) == (1, 4)
        engine.set_train_micro_batch_size(5)
        assert engine.train_batch_size() == 10
        assert engine.train_micro_batch_size_per_gpu() == 5
        with pytest.raises(ConfigError, match="no multiple of the micro-batch of 5 samples"):
            engine.set_train_batch_size(12)
        engine.backward(engine(batch(0)))
        engine.step()
        with pytest.raises(TrainingError, match="the window of 2 micro-batches has begun"):
            engine.set_train_batch_size(5)
        with pytest.raises(ConfigError, match="0 samples"):
            engine.set_train_micro_batch_size(0)


def test_counters_continue_after_checkpoint(tmp_path: Path) -> None:
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    found = []
    for _ in range(2):
        with small_engine(
            nvme, gradient_accumulation_steps=2, arguments={"batch_size": 3}
        ) as engine:
            engine.load_checkpoint(tmp_path / "saved") if found else None
            for index in range(4 - 2 * len(found)):
                engine.backward(engine(batch(index)))
                engine.step()
            if not found:
                engine.save_checkpoint(tmp_path / "saved", wait=True)
            found.append((engine.micro_steps, engine.global_samples))
    assert found == [(4, 12), (6, 18)]


# --- getters -----------------------------------------------------------------------------------


def test_deepspeed_getters_report_configuration() -> None:
    config = deepspeed_config(
        bf16={"enabled": True},
        gradient_accumulation_steps=4,
        zero_optimization={
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "none"},
        },
    )
    device = FakeAccelerator(1)
    with deepspeed.initialize(model=small_model(), config=config, device=device)[0] as engine:
        assert engine.zero_optimization_stage() == 3
        assert engine.zero_optimization() is True
        assert engine.zero_optimization_partition_gradients() is True
        assert engine.zero_optimization_partition_weights() is True
        assert engine.bfloat16_enabled() is True
        assert engine.fp16_enabled() is False
        assert engine.zero_offload_param() is None
        assert engine.zero_offload_optimizer().device == "cpu" == OffloadDeviceEnum.cpu
        assert engine.get_batch_info() == (8, 2, 4)
        assert engine.get_mom() == [(0.9, 0.999)]
        assert engine.zero_gather_16bit_weights_on_model_save() is True
        assert (engine.global_rank, engine.local_rank, engine.world_size) == (0, 0, 1)
        assert (engine.get_data_parallel_rank(), engine.get_data_parallel_world_size()) == (0, 1)
        assert (engine.get_model_parallel_rank(), engine.get_sequence_parallel_world_size()) == (
            0,
            1,
        )
        assert engine.get_data_parallel_group() is engine.get_sequence_parallel_group() is None
        engine.allreduce_gradients()
        engine.empty_partition_cache()
        assert engine.get_global_grad_norm() is None


def test_zero_stage_of_native_configuration(tmp_path: Path) -> None:
    with small_engine(tmp_path, ON_DISK) as engine:
        assert engine.zero_optimization_stage() == 0
        assert engine.zero_offload_param().device == OffloadDeviceEnum.nvme
        assert engine.zero_optimization() is False


def test_was_step_applied_false_after_skipped_step(tmp_path: Path) -> None:
    with small_engine(tmp_path) as engine:
        engine.backward(engine(batch(0)))
        engine.step()
        assert engine.was_step_applied() is True
        assert engine.get_global_grad_norm() == engine.grad_norm > 0
        engine.backward(engine(batch(0)) * float("nan"))
        engine.step()
        assert engine.was_step_applied() is False
        assert (engine.global_steps, engine.skipped_steps, engine.global_samples) == (2, 1, 2)


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_destroyed_engine_weights_used_by_next_engine(
    tmp_path: Path, placement: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loaded into RAM if all fit, otherwise one at a time; also after a failed attempt."""
    model, config = small_model(), settings(tmp_path, PLACEMENTS[placement], precision="bf16")
    engine = infinity.initialize(model, config, engine_class=DeepSpeedEngine)[0]
    assert isinstance(engine, DeepSpeedEngine)
    small.train(engine, 2)
    expected = engine.module_state_dict()
    engine.destroy()
    with pytest.raises(EngineClosedError, match="was destroyed"):
        engine.step()
    engine.destroy()
    machine = replace(read_machine(), host_available_bytes=0)
    with monkeypatch.context() as patch:
        patch.setattr(stored_weights, "read_machine", lambda: machine)
        with pytest.raises(DoesNotFitError, match="more RAM, and 0 B are available"):
            model.state_dict()
        with pytest.raises(DoesNotFitError):
            infinity.initialize(model, {**config, "budget": {"host": "1KiB"}})
        with pytest.raises(DoesNotFitError, match="more RAM, and 0 B are available"):
            next(model.parameters()).mul_(1)
        if fits:
            patch.undo()
        with small_engine(tmp_path, PLACEMENTS[placement], model, precision="bf16") as following:
            assert len(list(tmp_path.glob("infinity-run-*"))) == (placement != "device")
            assert same(following.module_state_dict(), expected)
            small.train(following, 1)


class PlainLoss(nn.Module):
    """Loss module that contains the model, as in loss libraries."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.model(tokens)
        return loss


def test_engine_as_submodule_trains_saves_and_loads(
    tmp_path: Path,
) -> None:
    hooked: list[nn.Module] = []
    with small_engine(tmp_path) as engine:
        assert isinstance(engine, nn.Module)
        engine.register_forward_hook(lambda module, *_: hooked.append(module))
        loss = PlainLoss(engine)
        assert [n for n, _ in engine.named_parameters()] == [
            f"module.{n}" for n, _ in engine.module.named_parameters()
        ]
        names = set(engine.module.state_dict())
        assert set(engine.state_dict()) == {f"module.{name}" for name in names}
        assert set(loss.state_dict()) == {f"model.module.{name}" for name in names}
        assert loss.eval().to("cpu") is loss
        assert (engine.training, engine.module.training) == (False, False)
        before = masters(engine)
        loss.train()(batch(0)).backward()
        engine.step()
        assert hooked == [engine]
        after = masters(engine)
        assert not same(before, after)
        loss.load_state_dict({f"model.module.{name}": v for name, v in before.items()})
        assert same(masters(engine), before)
        for prefix in ("", "module."):
            engine.load_state_dict({prefix + name: v for name, v in after.items()})
            assert same(masters(engine), after)
            engine.load_state_dict(before)
        with pytest.raises(ResidencyError, match="cannot be copied"):
            copy.deepcopy(engine)
        with pytest.raises(ResidencyError, match="cannot be moved or cast"):
            engine.half()
        assert engine.to("cpu") is engine


def test_missing_attributes_delegate_to_module(tmp_path: Path) -> None:
    with small_engine(tmp_path) as engine:
        assert isinstance(engine, infinity.DeepSpeedEngine)
        assert engine.embedding is engine.module.embedding
        assert engine.training is True
        engine.eval()
        assert engine.training is False
        assert list(engine.parameters()) == list(engine.module.parameters())
        assert torch.equal(engine.forward(batch(0)), engine(batch(0)))
        with pytest.raises(AttributeError, match="nor its module, a SmallModel"):
            _ = engine.nothing
        assert not hasattr(engine, "__len__")
    engine.destroy()
    assert engine.module.embedding is engine.embedding


def test_compile_keeps_results(tmp_path: Path) -> None:
    with small_engine(tmp_path) as engine:
        before = engine(batch(0))
        assert engine.is_compiled is False
        with pytest.warns(InfinityWarning, match="does not use schedule"):
            engine.compile(backend="eager", schedule=[(0, "pass")])
        assert engine.is_compiled is True
        assert torch.equal(engine(batch(0)), before)


# --- state dicts and weights -------------------------------------------------------------------


def test_module_state_dict_saves_and_loads(tmp_path: Path) -> None:
    model = small_model()
    model.norm.requires_grad_(False)
    with small_engine(tmp_path, model=model, precision="bf16") as engine:
        full_state = engine.module_state_dict()
        expected = small_model().bfloat16().state_dict()
        assert full_state.keys() == expected.keys()
        assert all(
            torch.equal(full_state[name], expected[name]) for name in ("norm.bias", "head.weight")
        )
        assert engine._zero3_consolidated_16bit_state_dict().keys() == full_state.keys()
        trained = engine.module_state_dict(exclude_frozen_parameters=True)
        assert full_state.keys() - trained.keys() == {"norm.weight", "norm.bias"}
        target: dict[str, Tensor] = {}
        assert engine.module_state_dict(destination=target, prefix="model.") is target
        assert "model.norm.bias" in target

        engine.load_module_state_dict({**full_state, "norm.bias": full_state["norm.bias"] + 1})
        assert torch.equal(engine.state_dict()["module.norm.bias"], full_state["norm.bias"] + 1)
        with pytest.raises(ConfigError, match="missing"):
            engine.load_module_state_dict({"norm.bias": full_state["norm.bias"]})
        engine.load_module_state_dict({"norm.bias": full_state["norm.bias"]}, strict=False)

        def load(src: dict[str, Tensor], dst: nn.Module) -> None:
            with torch.no_grad():
                dst.get_parameter("norm.bias").copy_(src["bias"])

        engine.load_module_state_dict({"bias": torch.full((16,), 7.0)}, custom_load_fn=load)
        assert bool((engine.state_dict()["module.norm.bias"] == 7).all())


def test_save_16bit_model_formats(tmp_path: Path) -> None:
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    model = small_model()
    model.norm.requires_grad_(False)
    with small_engine(nvme, model=model, precision="bf16") as engine:
        expected = engine.module_state_dict()
        assert engine.save_16bit_model(tmp_path / "a") is True
        assert engine.save_fp16_model(str(tmp_path / "b"), "pytorch_model.bin") is True
        assert engine.save_16bit_model(tmp_path / "c", exclude_frozen_parameters=True) is True
        assert engine.save_16bit_model(tmp_path / "d", "sub/weights.pt") is True
        with pytest.raises(ConfigError, match="save_filename"):
            engine.save_16bit_model(tmp_path, "model.gguf")
    fresh = small_model(5).bfloat16()
    infinity.load_weights(fresh, tmp_path / "a")
    assert torch.equal(fresh.blocks[1].up.weight, expected["blocks.1.up.weight"])
    for path in ("b/pytorch_model.bin", "d/sub/weights.pt"):
        loaded = torch.load(tmp_path / path, weights_only=True)
        assert all(torch.equal(loaded[name], value) for name, value in expected.items())
    missing = infinity.load_weights(fresh, tmp_path / "c", strict=False).missing
    assert set(missing) == {"norm.weight", "norm.bias"}


# --- moving states -----------------------------------------------------------------------------


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_offload_and_reload_states_on_cpu(tmp_path: Path, placement: str) -> None:
    with small_engine(tmp_path, PLACEMENTS[placement]) as engine:
        engine.backward(engine(batch(0)))
        engine.step()
        engine.offload_states()
        expected = {"disk": {"disk"}, "device": {torch.device("cpu")}, "mixed": {"disk"}}
        assert engine.get_state_devices(OffloadStateTypeEnum.lp_params) == expected[placement]
        engine.offload_states(include=[OffloadStateTypeEnum.optim_states], device="cpu")
        engine.reload_states()
        engine.backward(engine(batch(1)))
        engine.step()
        with pytest.raises(ConfigError, match="nvme"):
            engine.offload_states(device="nvme")
        with pytest.raises(ConfigError, match="nothing"):
            engine.offload_states(include=["nothing"])


def test_offload_states_on_gpu_rejected(tmp_path: Path) -> None:
    device = FakeAccelerator(1)
    with small_engine(tmp_path, ON_DEVICE, arguments={"device": device}) as engine:
        assert engine.get_state_devices(OffloadStateTypeEnum.optim_states) == {engine.device}
        with pytest.raises(ConfigError, match=r"on the GPU cannot be released.*\n.*placement"):
            engine.offload_states()


def test_offload_states_refuses_only_included_kinds(tmp_path: Path) -> None:
    tiers, arguments = {**ON_DEVICE, "optimizer_state": "host"}, {"device": FakeAccelerator(1)}
    with small_engine(tmp_path, tiers, arguments=arguments, update="cpu") as engine:
        engine.backward(engine(batch(0)))
        engine.step()
        engine.offload_states(include=[OffloadStateTypeEnum.optim_states])
        for kind, name in (("lp_params", "weights"), ("lp_grads", "gradients")):
            with pytest.raises(ConfigError, match="the plan reserves") as caught:
                engine.offload_states(include=["hp_params", kind])
            assert {*re.findall(r"(\w+) [\d.,]+ \w?i?B", str(caught.value.because))} == {name}


# --- owned parameters --------------------------------------------------------------------------


def test_materialized_parameter_can_be_pickled(tmp_path: Path) -> None:
    with small_engine(tmp_path) as engine:
        weight = engine.module.norm.weight
        with engine.materialized(weight):
            torch.save(weight, tmp_path / "weight.pt")
        loaded = torch.load(tmp_path / "weight.pt", weights_only=True)
        assert torch.equal(loaded, torch.ones(16))
        (tmp_path / "weight.pt").unlink()
        with pytest.raises(ResidencyError):
            engine.module.norm.weight = loaded


def test_checkpoint_with_deepspeed_arguments(tmp_path: Path) -> None:
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    with small_engine(nvme) as engine:
        engine.backward(engine(batch(0)))
        engine.step()
        engine.save_checkpoint(tmp_path / "out", "one", {"epoch": 1}, True)
        engine.save_checkpoint(tmp_path / "out", "two", {}, False, exclude_frozen_parameters=True)
        engine.finish_saving()
        assert (tmp_path / "out" / "latest").read_text().strip() == "one"
        path, state = engine.load_checkpoint(tmp_path / "out", None, True, True, True, False)
        assert path is not None
        assert path.endswith("one")
        assert state == {"epoch": 1}
        with pytest.raises(ConfigError, match="custom_load_fn"):
            engine.load_checkpoint(tmp_path / "out", custom_load_fn=print)

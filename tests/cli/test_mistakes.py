"""Tests of error messages for common mistakes of new users.

Each message names the wrong input and a replacement. No command ends in a traceback.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.runs import settings, write_text
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from typer.testing import CliRunner

import infinity
from infinity.cli.main import app
from infinity.errors import InfinityError, MachineError

# Arguments of `infinity`, the exit code, and the texts in stderr, in this order.
COMMANDS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "verb": ("trian a.yaml", 2, ("'trian'", "did you mean 'train'?")),
    "verb of a group": ("checkpoint exprot . out", 2, ("'exprot'", "'export'")),
    "option": ("train run.yaml --resum auto", 2, ("--resum", "--resume")),
    "no argument": ("train", 2, ("Missing argument 'CONFIG'",)),
    "no unit": ("plan 8b --device 24 --host 64GiB", 2, ("24 bytes", "--device 24GiB")),
    "number": ("plan 8b --tokens many", 2, ("--tokens", "integer")),
    "preset": ("plan 8bb", 2, ("'8bb' is no model known by name", "did you mean '8b'?")),
    "path of a model": ("plan ./llama", 2, ("there is no directory ./llama",)),
    "tier": (
        "plan 8b --host 64GiB placement.weights=nvme", 2,
        ("placement.weights", "got 'nvme'", "did you mean 'disk'?"),
    ),
    "file of a run": ("train trian.yaml", 2, ("trian.yaml does not exist", "infinity init")),
    "section": ("train run.yaml trainig.steps=3", 2, ("trainig", "did you mean 'training'?")),
    "value": ("train run.yaml training.steps=many", 2, ("training.steps", "'many'")),
    "precision": (
        "train run.yaml engine.precision=float16", 2, ("'float16'", "did you mean 'fp16'?"),
    ),
    "rule": ("train run.yaml engine.optimizer.type=AdmaW", 2, ("'AdmaW'", "'AdamW'?")),
    "budget": (
        "train run.yaml engine.budget.host=24", 2, ("engine.budget.host: is 24 bytes", "24GiB"),
    ),
    "two models": (
        "train run.yaml model.path=llama", 2, ("both given", "model.config=null", "llama"),
    ),
    "data": ("train run.yaml data.train=corpus.txt", 2, ("corpus.txt: does not exist",)),
    "length": (
        "train run.yaml data.sequence_length=99", 2,
        ("a context of 64 tokens", "data.sequence_length=64"),
    ),
    "drive": (
        "train run.yaml engine.nvme_path=/mnt/none", 4, ("/mnt/none does not exist", "mkdir -p"),
    ),
    "what to go on from": ("train run.yaml --resume old", 2, ("old: there is no", "--resume auto")),
    "configuration of DeepSpeed": (
        "train ds.json", 2, ("configuration of DeepSpeed", "infinity run", "plan ds.json --model"),
    ),
    "configuration of an engine": ("train engine.yaml", 2, ("of an engine, not of a run", "init")),
    "YAML": ("train broken.yaml", 2, ("broken.yaml: not valid YAML", "line 2")),
    "directory of a run": ("report .", 2, ("holds no run", "infinity report RUN_DIR")),
    "directory of checkpoints": ("checkpoint verify .", 5, ("no checkpoints", "give a run_dir")),
    "directory to generate from": ("generate . hello", 5, ("no checkpoints", "give a run_dir")),
    "script": ("run train.py", 2, ("there is no file train.py",)),
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_command_mistake_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed, code, texts = COMMANDS[name]
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / "text.txt")
    (tmp_path / "run.yaml").write_text(str(settings(tmp_path)))  # JSON is valid YAML
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 3}}')
    (tmp_path / "engine.yaml").write_text("precision: bf16")
    (tmp_path / "broken.yaml").write_text("run_dir: a\n  model: b\n")
    result = CliRunner().invoke(app, typed.split())
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == code, result.stderr
    remaining = result.stderr
    for text in texts:
        assert text in remaining, result.stderr
        remaining = remaining.partition(text)[2]
    assert not (tmp_path / "run" / "run.json").exists()
    if name == "drive":
        assert not (tmp_path / "run" / "data").exists()  # fails before tokenizing


def model(width: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 4))


def engine(**changes: Any) -> Any:
    config = {"precision": "fp32", "gradient_clipping": 1.0, "optimizer": {"lr": 1e-3}}
    return infinity.initialize(model(), config | changes)[0]


def with_engine(act: Callable[[Any], object]) -> Callable[[Path], object]:
    def acted(folder: Path) -> None:
        made = engine()
        with made:
            act(made)

    return acted


X = torch.ones(4, 8)


def load_checkpoint_of_other_model(folder: Path) -> None:
    with engine() as saved:
        saved.save_checkpoint(folder / "saved")
    other = infinity.initialize(model(32), {"precision": "fp32", "gradient_clipping": 1.0})[0]
    with other:
        other.load_checkpoint(folder / "saved")


def call_closed_engine(folder: Path) -> None:
    made = engine()
    made.close()
    made(X)


LOOPS: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "key": (
        lambda _: engine(gradient_cliping=1.0), ("gradient_cliping", "'gradient_clipping'?"),
    ),
    "disk without a drive": (
        lambda _: engine(placement={"optimizer_state": "disk"}),
        ("optimizer_state on disk", "nvme_path"),
    ),
    "optimizer of another model": (
        lambda _: infinity.initialize(
            model(), {"precision": "fp32"}, optimizer=torch.optim.AdamW(model().parameters())
        ),
        ("that the model does not have", "that you pass"),
    ),
    "step alone": (with_engine(lambda e: e.step()), ("without a backward", "engine.backward")),
    "loss of many elements": (with_engine(lambda e: e.backward(e(X))), ("(4, 4)", ".mean()")),
    "edit": (
        with_engine(lambda e: next(e.module.parameters()).data.mul_(2)),
        ("cannot be edited here", "engine.materialized"),
    ),
    "cast": (with_engine(lambda e: e.module.to(torch.bfloat16)), ("cast", "`precision`")),
    "two engines": (
        with_engine(lambda e: infinity.initialize(e.module, {})), ("another engine", "close"),
    ),
    "checkpoint of another model": (
        load_checkpoint_of_other_model, ("does not fit this engine", "(16, 8), not (32, 8)"),
    ),
    "closed engine": (call_closed_engine, ("the engine is closed", "make a new one")),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LOOPS)
def test_training_loop_mistake_is_named(name: str, tmp_path: Path) -> None:
    act, texts = LOOPS[name]
    with pytest.raises(InfinityError) as caught:
        act(tmp_path)
    remaining = str(caught.value)
    for text in texts:
        assert text in remaining, str(caught.value)
        remaining = remaining.partition(text)[2]
    assert caught.value.__cause__ is None  # a single traceback


@pytest.mark.parametrize(("verb", "resumes"), [("train", True), ("run", False)])
def test_killed_rank_remedy_fits_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, resumes: bool
) -> None:
    def launcher(*_: Any) -> Callable[..., None]:
        failure = ProcessFailure(1, 7, -signal.SIGKILL, str(tmp_path / "error.json"))
        return mock.Mock(side_effect=ChildFailedError("train.py", {1: failure}))

    monkeypatch.setattr("infinity.cli.launch.elastic_launch", launcher)
    (script := tmp_path / "train.py").write_text("")
    with mock.patch.dict(os.environ):  # the launcher changes it for its processes
        result = CliRunner().invoke(app, [verb, "--gpus", "2", str(script)])
    assert result.exit_code == MachineError.exit_code
    assert "rank 1 of 2 was ended by SIGKILL" in result.output
    assert "dmesg" in result.output
    assert ("--resume auto" in result.output) == resumes

"""Tests of runs of `infinity train` in this process: loop, resume, placement and export."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from support.forked import HANG_S, Program
from support.ranges import force_largest_range, force_rule_ranges
from support.runs import LENGTH, TINY, losses_of, metrics_of, settings, train, write_text
from support.waiting import wait_until
from typer.testing import CliRunner

from infinity.cli.main import app, main
from infinity.cli.train import TrainPage
from infinity.errors import (
    CheckpointError,
    ConfigError,
    InfinityWarning,
    MachineError,
    TrainingError,
)
from infinity.optim.lr_schedules import WarmupCosineLR
from infinity.plan.batch_schedule import BatchSchedule, choose_schedule
from infinity.storage.device import CpuDevice
from infinity.train.data import Corpus
from infinity.train.preparation import scheduled
from infinity.train.run import Run
from infinity.train.settings import load_run_config
from infinity.train.windows import BatchIterator, split


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Return the directory and losses of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("plain")
    result, watcher = train(settings(folder))
    assert result.steps == 6
    assert not result.stopped
    assert sorted(watcher.evaluations) == [0, 3, 6]
    return folder, losses_of(folder)


def reference_losses(raw: dict[str, Any], data: Path) -> tuple[list[float], Any]:
    """Train on the same windows in plain torch; return the losses and the model."""
    (directory,) = [path for path in data.iterdir() if path.is_dir()]
    corpus = Corpus(directory)
    windows, _ = split(corpus, LENGTH, 0.1)
    batches = BatchIterator(windows, 2, 0, True)
    order = [batches.window_at(i) for i in range(6 * 4)]
    tokens = corpus.read(0, corpus.num_tokens)
    torch.manual_seed(0)
    config = transformers.GPT2Config(**TINY, vocab_size=257, bos_token_id=256, eos_token_id=256)
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = WarmupCosineLR(
        optimizer, total_num_steps=7, warmup_num_steps=2, last_batch_iteration=1
    )
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    losses = []
    for step in range(6):
        total = 0.0
        for micro in range(2):
            indices = order[step * 4 + micro * 2 : step * 4 + micro * 2 + 2]
            batch = torch.stack(
                [torch.from_numpy(tokens[i * LENGTH : (i + 1) * LENGTH]) for i in indices]
            )
            loss = model(input_ids=batch, labels=batch).loss
            total += loss.item() / 2
            (loss / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, model


MIXTURE = {"model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 2,
           "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64,
           "moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2,
           "max_position_embeddings": 64}  # fmt: skip
NO_DROPOUT = {f"model__config__{name}_pdrop": 0.0 for name in ("embd", "attn", "resid")}


def test_run_matches_plain_loop_and_exports_model(tmp_path: Path) -> None:
    raw = settings(tmp_path, **NO_DROPOUT)
    result, watcher = train(raw)
    losses, model = reference_losses(raw, tmp_path / "run" / "data")
    run_losses = [facts.loss for facts in watcher.steps]
    assert run_losses == pytest.approx(losses, rel=1e-4)
    assert losses[-1] < losses[0]
    assert result.model == tmp_path / "run" / "model"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(result.model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(result.model)
    ids = tokenizer("dä cab", return_tensors="pt").input_ids
    assert ids[0].tolist() == list("dä cab".encode())
    assert tokenizer.decode(ids[0]) == "dä cab"
    with torch.no_grad():
        torch.testing.assert_close(
            loaded.eval()(ids).logits, model.eval()(ids).logits, rtol=2e-3, atol=2e-3
        )
    assert loaded.generation_config.eos_token_id == 256


def settings_without_batches(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return settings with model, data and tokens per step, but without micro-batches."""
    raw = settings(folder, training__tokens_per_step=8 * LENGTH, **NO_DROPOUT, **changes)
    del raw["training"]["micro_batch"], raw["engine"]["gradient_accumulation_steps"]
    return raw


def test_plan_chooses_micro_batches_and_resume_keeps_them(tmp_path: Path) -> None:
    """One micro-batch if everything fits; a resumed run keeps the micro-batches it had."""
    raw = settings_without_batches(tmp_path)
    train(raw)
    with Run(load_run_config(raw), "auto") as run:
        prepared = run.prepare()
    assert (prepared.micro_batch, prepared.engine.gradient_accumulation_steps) == (8, 1)
    decided = {"engine.gradient_accumulation_steps": 2, "engine.activations.slices": 4}
    again, chosen = scheduled(prepared, decided, CpuDevice())
    assert chosen.best is not None
    found = again.engine
    assert (again.micro_batch, found.gradient_accumulation_steps) == (4, 2)
    assert (found.activations.slices, again.tokens_per_step) == (4, 8 * LENGTH)


def test_slices_match_losses_of_micro_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is the same up to rounding."""
    schedules = {
        "slices": BatchSchedule(micro_batches=1, slices=4, recompute=1),
        "micro-batches": BatchSchedule(micro_batches=8, slices=1),
    }
    losses = []
    for name, schedule in schedules.items():
        (tmp_path / name).mkdir()
        choose = partial(_choose_fixed, schedule)
        monkeypatch.setattr("infinity.train.preparation.choose_schedule", choose)
        train(settings_without_batches(tmp_path / name))
        losses.append([line["loss"] for line in metrics_of(tmp_path / name) if "loss" in line])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def _choose_fixed(
    schedule: BatchSchedule, case: Any, _: Any, samples: int | None, others: Any
) -> Any:
    return choose_schedule(case, schedule, samples, others)


def test_evaluation_is_loss_of_held_out_windows(tmp_path: Path) -> None:
    result, watcher = train(settings(tmp_path))  # dropout must be off in evaluation
    (directory,) = (tmp_path / "run" / "data").iterdir()
    corpus = Corpus(directory)
    _, held = split(corpus, LENGTH, 0.1)
    batch = torch.stack([held.window(i) for i in range(3)])
    model = transformers.AutoModelForCausalLM.from_pretrained(result.model).eval()
    with torch.no_grad():
        expected = model(input_ids=batch, labels=batch).loss.item()
    assert result.evaluation == pytest.approx(expected, rel=1e-5)
    assert watcher.evaluations[6] == result.evaluation
    assert result.evaluation_before == watcher.evaluations[0]


def test_run_directory_contents(plain: tuple[Path, list[Any]]) -> None:
    folder, _ = plain
    run = folder / "run"
    lines = metrics_of(folder)
    assert [line["step"] for line in lines if line["event"] == "step"] == [1, 2, 3, 4, 5, 6]
    step = next(line for line in lines if line["event"] == "step")
    assert {"loss", "lr", "grad_norm", "tokens_per_s", "step_s", "stall_s", "moved", "memory"} <= (
        step.keys()
    )
    assert step["tokens"] == 2 * 2 * LENGTH
    assert sorted(path.name for path in (run / "checkpoints").iterdir() if path.is_dir()) == [
        "step4",
        "step6",
    ]
    text = (run / "config.yaml").read_text()
    assert "  micro_batch: 2\n" in text
    assert "# data.shuffle: true  # default" in text
    assert "# training.tokens_per_step: 64  # derived" in text
    again, given = load_run_config(run / "config.yaml"), load_run_config(settings(folder))
    assert again.model_dump(exclude_unset=True) == given.model_dump(exclude_unset=True)


def test_resume_after_stop_is_exact(plain: tuple[Path, list[Any]], tmp_path: Path) -> None:
    raw = settings(tmp_path)
    result, _ = train(raw, stop_after=3)
    assert result.stopped
    assert (result.steps, result.num_steps, result.model) == (3, 6, None)
    with pytest.raises(ConfigError, match=r"holds a run already\n.*--resume auto"):
        Run(load_run_config(raw))
    result, watcher = train(raw, "auto")
    assert watcher.done == 3
    assert result.steps == 6
    assert losses_of(tmp_path) == plain[1]
    again, watcher = train(raw, "auto")  # complete: no steps remain
    assert not watcher.steps
    assert again.model is not None
    assert losses_of(tmp_path) == plain[1]


def test_resume_with_more_steps_extends_schedule(
    plain: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    """`auto` follows the longer run; an explicit number of steps is kept."""
    train(settings(tmp_path))
    raw = settings(tmp_path, training__steps=10)
    result, watcher = train(raw, "auto", stop_after=2)
    assert (result.steps, result.num_steps, result.stopped) == (8, 10, True)
    assert any("ends with step 10 now" in note for note in watcher.notes)
    result, again = train(raw, "auto")
    assert not any("ends with step" in note for note in again.notes)
    assert (result.steps, result.stopped) == (10, False)
    assert losses_of(tmp_path)[: len(plain[1])] == plain[1]
    long = settings(tmp_path, training__steps=10, run_dir=str(tmp_path / "long"))
    _, uninterrupted = train(long)
    rates = [facts.lr for facts in uninterrupted.steps]
    assert [facts.lr for facts in (*watcher.steps, *again.steps)] == rates[6:]
    assert rates[0] > 0

    total = "engine.scheduler.params.total_num_steps"
    for number, message in ((8, r"engine\.scheduler\.params was"), (11, "")):
        with Run(load_run_config(raw, [f"{total}={number}"]), "auto") as run:
            if message:
                with pytest.raises(ConfigError, match=message):
                    run.prepare()
            else:
                run.prepare()  # the same number, given explicitly


def test_resume_with_fixed_schedule_and_more_steps_is_refused(tmp_path: Path) -> None:
    schedule = {"type": "CosineAnnealingLR", "params": {"T_max": "auto"}}
    train(settings(tmp_path, engine__scheduler=schedule), stop_after=2)
    raw = settings(tmp_path, engine__scheduler=schedule, training__steps=8)
    elsewhere = raw | {"run_dir": str(tmp_path / "other")}
    for given, resume in ((raw, "auto"), (elsewhere, str(tmp_path / "run"))):
        with (
            Run(load_run_config(given), resume) as run,
            pytest.raises(ConfigError, match="is for 6 steps, and this run has 8") as caught,
        ):
            run.prepare()
        assert "keep training.steps=6; or engine.scheduler.params.T_max=6" in str(caught.value)
    assert not (tmp_path / "other" / "run.json").exists()


def test_resume_after_crash_is_exact(plain: tuple[Path, list[Any]], tmp_path: Path) -> None:
    raw = settings(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        train(raw, die_after=5)
    metrics = tmp_path / "run" / "metrics.jsonl"
    with open(metrics, "a") as file:
        file.write('{"event": "step", "step": 6, "lo')
    assert len(complete_loss_lines(metrics)) == 7  # steps 1 to 5, evaluations 0 and 3
    _, watcher = train(raw, "auto")
    assert watcher.done == 4
    assert losses_of(tmp_path) == plain[1]


def complete_loss_lines(path: Path) -> list[str]:
    lines = path.read_text().splitlines()
    return [line for line in lines if '"loss"' in line and line.endswith("}")]


def test_resume_from_named_checkpoint(plain: tuple[Path, list[Any]], tmp_path: Path) -> None:
    folder, losses = plain
    raw = settings(tmp_path)
    _, watcher = train(raw, str(folder / "run" / "checkpoints" / "step4"))
    assert [facts.step for facts in watcher.steps] == [5, 6]
    assert [loss for event, _, loss in losses_of(tmp_path) if event == "step"] == [
        loss for event, step, loss in losses if event == "step" and step > 4
    ]
    with pytest.raises(ConfigError, match="there is no such directory"):
        Run(load_run_config(settings(tmp_path)), str(tmp_path / "nowhere"))


def test_resume_loads_renamed_checkpoint(plain: tuple[Path, list[Any]], tmp_path: Path) -> None:
    """A checkpoint that `latest` names under another name is loaded or missed, never ignored."""
    run, checkpoints = tmp_path / "run", tmp_path / "run" / "checkpoints"
    shutil.copytree(plain[0] / "run", run)
    (checkpoints / "step6").rename(checkpoints / "good")
    for name in ("good", "bad"):
        (checkpoints / "latest").write_text(name)
        with nullcontext() if name == "good" else pytest.raises(CheckpointError, match="bad"):
            _, watcher = train(settings(tmp_path), "auto")
            assert watcher.done == 6
    assert losses_of(tmp_path) == plain[1]


def test_resume_before_first_checkpoint_uses_starting_checkpoint(
    plain: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    """It restarts from the named checkpoint, not from new weights."""
    folder, losses = plain
    raw = settings(tmp_path, training__checkpoint_every=6)
    with pytest.raises(KeyboardInterrupt):
        train(raw, str(folder / "run" / "checkpoints" / "step4"), die_after=5)
    _, watcher = train(raw, "auto")
    assert watcher.done == 4
    assert [(line.step, line.loss) for line in watcher.steps] == [
        (step, loss) for event, step, loss in losses if event == "step" and step > 4
    ]


def test_checkpoint_of_run_with_other_settings_is_refused(
    plain: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    """The optimizer resumes unchanged, so settings that would have no effect are refused."""
    start = str(plain[0] / "run" / "checkpoints" / "step4")
    for changes, message in (
        ({"engine__optimizer__lr": 1e-3}, "lr is 0.01 in the checkpoint, and 0.001 in this run"),
        (
            {"engine__optimizer__weight_decay": 0.5},
            "weight_decay is 0.01 in the checkpoint, and 0.5 in this run",
        ),
        ({"training__micro_batch": 1}, "of step 4, which would be step 8 with the 2 windows"),
    ):
        with pytest.raises(ConfigError) as caught:
            train(settings(tmp_path, **changes), start)
        assert message in str(caught.value)
        assert not (tmp_path / "run" / "run.json").exists()
    _, watcher = train(settings(tmp_path), start)  # in the same directory
    assert watcher.done == 4


def test_state_on_disk_is_bitwise_equal(plain: tuple[Path, list[Any]], tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    activations = {"checkpoint": "units", "offload": "disk", "min_bytes": 1}  # tokens are known
    raw = settings(
        tmp_path,
        engine__placement="disk",
        engine__nvme_path=str(state),
        engine__activations=activations,
    )
    train(raw)
    assert losses_of(tmp_path) == plain[1]
    moved = [line["moved"]["disk_read"] for line in metrics_of(tmp_path) if "moved" in line]
    assert all(moved[1:])
    assert list(state.iterdir()) == []


def test_durable_run_resumes_without_checkpoints(
    plain: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    state = tmp_path / "state"
    state.mkdir()
    placement = {"weights": "disk", "optimizer_state": "disk", "gradients": "host"}
    raw = settings(
        tmp_path,
        engine__placement=placement,
        engine__nvme_path=str(state),
        engine__durable=True,
        training__checkpoint_every=None,
    )
    result, _ = train(raw, stop_after=3)
    assert result.checkpoint is None
    moved = tmp_path / "moved"
    (tmp_path / "run").rename(moved)  # its state is found by the original name
    _, watcher = train(raw | {"run_dir": str(moved)}, "auto")
    assert watcher.done == 3
    moved.rename(tmp_path / "run")
    assert losses_of(tmp_path) == plain[1]
    for command in (["verify", str(state), "--all"], ["inspect", str(state)]):
        assert CliRunner().invoke(app, ["checkpoint", *command]).exit_code == 0
    inspected = CliRunner().invoke(app, ["checkpoint", "inspect", str(tmp_path / "run")])
    assert inspected.output.startswith(f"{state}/")
    shutil.rmtree(state)
    inspected = CliRunner().invoke(app, ["checkpoint", "inspect", str(tmp_path / "run")])
    assert "has no checkpoint yet" in inspected.stderr


def test_durable_state_from_checkpoint_chooses_new_expert_ranges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_largest_range(monkeypatch)
    raw = settings_without_batches(
        tmp_path,
        model__config=dict(MIXTURE),
        engine__nvme_path=str(tmp_path),
        engine__durable=True,
    )
    _, watcher = train(raw, stop_after=3)
    expected = [step.loss for step in watcher.steps]
    force_rule_ranges(monkeypatch)
    checkpoint = str(tmp_path / "run" / "checkpoints" / "step2")
    _, again = train(raw, checkpoint, stop_after=1)
    assert [step.loss for step in again.steps] == expected[2:]
    force_largest_range(monkeypatch)
    _, watcher = train(raw, "auto")
    assert watcher.done == 3


@pytest.mark.parametrize("named", [False, True])
def test_durable_resume_keeps_expert_ranges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    """State is matched by units, and another machine would choose other ranges.

    Also if the chosen micro-batches are `named` in the configuration from now on.
    """
    force_largest_range(monkeypatch)
    raw = settings_without_batches(
        tmp_path,
        model__config=dict(MIXTURE),
        engine__nvme_path=str(tmp_path),
        engine__durable=True,
        training__checkpoint_every=None,
    )
    train(raw)
    expected = losses_of(tmp_path)
    shutil.rmtree(tmp_path / "run")
    train(raw, stop_after=3)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["experts_per_unit"] == 4
    force_rule_ranges(monkeypatch)
    if named:
        raw["training"]["micro_batch"] = 8
    _, watcher = train(raw, "auto")
    assert watcher.done == 3
    assert losses_of(tmp_path) == expected


def test_durable_state_continued_by_a_copy_is_refused(tmp_path: Path) -> None:
    raw = settings(tmp_path, engine__nvme_path=str(tmp_path / "state"), engine__durable=True)
    (tmp_path / "state").mkdir()
    train(raw, stop_after=1)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    copy = raw | {"run_dir": str(tmp_path / "copy")}
    train(raw, "auto", stop_after=1)
    with pytest.raises(CheckpointError, match=r"another copy of .*/copy has continued"):
        train(copy, "auto")
    _, watcher = train(raw, "auto", stop_after=1)
    assert watcher.done == 2


def test_resume_with_changed_settings_is_refused(plain: tuple[Path, list[Any]]) -> None:
    folder, _ = plain
    for changes, name in (
        ({"engine__optimizer__lr": 1e-3}, "engine.optimizer.lr was 0.01, and is 0.001"),
        ({"training__seed": 1}, "training.seed was 0, and is 1"),
        ({"model__config__n_head": 4}, "model.n_head was 2, and is 4"),
        ({"data__held_out": 0.2}, "data: windows to train on"),
    ):
        with Run(load_run_config(settings(folder, **changes)), "auto") as run:
            with pytest.raises(ConfigError) as caught:
                run.prepare()
            assert name in str(caught.value)


def test_resume_with_other_data_is_refused(tmp_path: Path) -> None:
    raw = settings(tmp_path)
    train(raw, stop_after=2)
    os.utime(tmp_path / "text.txt")  # same content: tokenized again, and equal
    train(raw, "auto", stop_after=1)
    write_text(tmp_path / "text.txt", seed=1)
    with (
        Run(load_run_config(raw), "auto") as run,
        pytest.raises(ConfigError, match=r"data\.tokens was(.|\n)*made of the files"),
    ):
        run.prepare()
    other = settings(tmp_path, run_dir=str(tmp_path / "other"))
    with pytest.raises(CheckpointError, match="other data: corpus was"):
        train(other, str(tmp_path / "run"))


def test_run_directory_is_excluded_from_data(tmp_path: Path) -> None:
    """The run directory is below the data directory."""
    raw = settings(tmp_path, data__train=str(tmp_path))
    train(raw, stop_after=1)
    (tmp_path / "run" / "notes.txt").write_text("no data")
    _, watcher = train(raw, "auto")
    assert watcher.done == 1


def test_changed_held_out_data_resets_best(tmp_path: Path) -> None:
    easy, hard = write_text(tmp_path / "easy.txt", seed=5), tmp_path / "hard.txt"
    hard.write_text("".join(map(chr, range(33, 120))) * 20)
    changes = {"data__held_out": None, "training__early_stop": 2, "training__evaluate_every": 2}
    raw = settings(tmp_path, data__evaluate=str(easy), **changes)
    train(raw, stop_after=4)
    raw["data"]["evaluate"] = str(hard)
    result, watcher = train(raw, "auto")
    assert any("held-out data have changed" in note for note in watcher.notes)
    assert not result.stopped_early
    assert result.best == min(result.evaluation_before, watcher.evaluations[6])


def test_fine_tuning_starts_from_model_weights(tmp_path: Path) -> None:
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=300, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "base")
    raw = settings(
        tmp_path,
        model={"path": str(tmp_path / "base"), "gradient_checkpointing": True},
        training__steps=1,
        data__shuffle=False,
        engine__optimizer__lr=0.0,
        training__export="bf16",
    )
    _, watcher = train(raw)
    (directory,) = (tmp_path / "run" / "data").iterdir()
    corpus = Corpus(directory)
    batch = torch.from_numpy(corpus.read(0, 4 * LENGTH)).view(4, LENGTH)
    expected = model(input_ids=batch, labels=batch).loss.item()
    assert watcher.steps[0].loss == pytest.approx(expected, rel=1e-5)
    saved = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "run" / "model", dtype="auto"
    )
    assert saved.dtype == torch.bfloat16
    for name, value in model.state_dict().items():
        assert torch.equal(saved.state_dict()[name], value.bfloat16()), name


def test_non_finite_loss_ends_run(tmp_path: Path) -> None:
    raw = settings(tmp_path, engine__optimizer__lr=1e30, engine__scheduler=None)
    with pytest.raises(TrainingError, match=r"the loss of step \d is .*\n.*1e\+30") as caught:
        train(raw)
    assert "engine.optimizer.lr=1e+29" in str(caught.value)


def test_missing_tracker_package_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("torch.utils.tensorboard", "tensorboardX", "comet_ml"):
        monkeypatch.setitem(sys.modules, module, None)
    for name, package in (("tensorboard", "tensorboard"), ("comet_ml", "comet-ml")):
        raw = settings(tmp_path, training__report_to=name)
        message = rf"report_to: {name} cannot be(.|\n)*pip install {package};"
        with pytest.raises(MachineError, match=message):
            train(raw)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_tracker_receives_metrics_and_may_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tracker of accelerate with a fake package, which fails at the fourth step."""
    logged: list[tuple[int, dict[str, Any]]] = []

    class FakeWriter:
        def __init__(self, log_dir: str, **options: Any) -> None:
            logged.append((0, {"log_dir": log_dir, **options}))

        def add_scalar(self, name: str, value: Any, global_step: int) -> None:
            if global_step == 4:
                raise OSError("the network is gone")
            logged.append((global_step, {name: value}))

        def flush(self) -> None: ...
        def close(self) -> None: ...

    package = SimpleNamespace(SummaryWriter=FakeWriter)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", package)
    monkeypatch.setattr(torch.utils, "tensorboard", package, raising=False)
    with pytest.warns(InfinityWarning, match=r"tensorboard failed \(the network is gone\)"):
        result, _ = train(settings(tmp_path, training__report_to=["tensorboard"]))
    assert result.steps == 6
    assert logged[0][1] == {"log_dir": str(tmp_path / "run" / "tensorboard"), "purge_step": None}
    losses = [(step, values["train/loss"]) for step, values in logged if "train/loss" in values]
    steps = [r for r in metrics_of(tmp_path) if r["event"] == "step"]
    assert losses == [(r["step"], r["loss"]) for r in steps[:3]]
    names = {name for _, values in logged for name in values}
    assert {"train/tokens_per_s", "stall_s/disk_read", "moved/to_device", "memory/peak"} <= names


# --- the command ---------------------------------------------------------------------------------


def configuration(folder: Path, raw: dict[str, Any]) -> str:
    path = folder / "run.json"
    path.write_text(json.dumps(raw))
    return str(path)


def kill_after(folder: Path, raw: dict[str, Any], count: int) -> None:
    """Train in a child process; kill it after `count` steps and a first checkpoint."""
    metrics, latest = folder / "run" / "metrics.jsonl", folder / "run" / "checkpoints" / "latest"

    def is_ready() -> bool:
        return latest.exists() and metrics.read_text().count('"event": "step"') >= count

    with Program(main, ["train", configuration(folder, raw)]) as program:
        wait_until(lambda: is_ready() or not program.process.is_alive(), HANG_S)
        program.signal(signal.SIGKILL)
        code, _, output = program.end()
    assert code == -signal.SIGKILL, output


@pytest.mark.parametrize("durable", [False, True])
def test_second_signal_stops_immediately_and_names_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    raw = settings(tmp_path, training__checkpoint_every=99)
    if durable:
        raw["engine"] |= {"nvme_path": str(tmp_path), "durable": True}
    original = TrainPage.on_record

    def on_record(self: TrainPage, record: Any) -> None:
        original(self, record)
        if record["step"] == 2:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(TrainPage, "on_record", on_record)
    result = CliRunner().invoke(app, ["train", configuration(tmp_path, raw)])
    assert result.exit_code == 128 + signal.SIGTERM, result.output
    expected = "the last committed step is on disk" if durable else "no checkpoint is complete yet"
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith(f"stopped by SIGTERM; {expected}; go on with: infinity train ")


def test_killed_and_interrupted_runs_resume_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, Any] = {"training__steps": 4000, "training__checkpoint_every": 3}
    raw = settings(tmp_path, **changes)
    raw["engine"]["scheduler"] = None
    kill_after(tmp_path, raw, 5)
    steps: list[int] = []
    original = TrainPage.on_record

    def on_record(self: TrainPage, record: Any) -> None:
        original(self, record)
        steps.extend([record["step"]] * (record["event"] == "step"))
        if len(steps) == 4 and record["event"] == "step":
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(TrainPage, "on_record", on_record)
    arguments = ["train", configuration(tmp_path, raw), "--resume", "auto"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 130, result.output
    assert len(steps) == 4
    assert "Traceback" not in result.output
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith(f"stopped after step {steps[-1]} ")
    assert last.endswith("--resume auto")
    done = metrics_of(tmp_path)[-1]["step"]
    raw["training"]["steps"] = done + 2
    train(raw, "auto")
    uninterrupted = tmp_path / "whole"
    uninterrupted.mkdir()
    expected_run = settings(uninterrupted, **changes)
    expected_run["engine"]["scheduler"] = None
    expected_run["training"]["steps"] = done + 2
    train(expected_run)
    resumed_losses, expected_losses = (
        {(event, step): loss for event, step, loss in losses_of(folder)}
        for folder in (tmp_path, uninterrupted)
    )
    assert len(resumed_losses) >= done
    assert {key: expected_losses[key] for key in resumed_losses if key in expected_losses} == {
        key: resumed_losses[key] for key in resumed_losses if key in expected_losses
    }
    assert {step for event, step in resumed_losses if event == "step"} == set(range(1, done + 3))

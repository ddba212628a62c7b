"""Tests of the `infinity train` and `infinity init` commands: errors, presets and progress."""

from __future__ import annotations

import io
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from rich.console import Console
from support.runs import LENGTH, TINY, settings
from typer.testing import CliRunner

from infinity.cli.init import PRESETS
from infinity.cli.main import app
from infinity.cli.train import TrainPage, format_stalls, format_step
from infinity.errors import ConfigError
from infinity.model.named_models import NAMED
from infinity.plan.rates import Rates, nominal
from infinity.profiling.calibration import KnownRates
from infinity.train.preparation import _from_keys
from infinity.train.settings import load_run_config


@pytest.fixture(autouse=True)
def _measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace measuring by nominal rates."""

    def known(paths: Any, device: Any, **more: Any) -> KnownRates:
        return KnownRates(Rates.of(nominal(device.unified).numbers()), "2026-01-02")

    monkeypatch.setattr("infinity.profiling.calibration.cached_rates", known)
    transformers.logging.set_verbosity_error()  # its handler keeps the first stderr


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def write(folder: Path, **changes: Any) -> str:
    path = folder / "train.json"
    path.write_text(json.dumps(settings(folder, **changes)))
    return str(path)


# --- complete runs -------------------------------------------------------------------------------


def test_train_prints_plan_steps_and_result(tmp_path: Path) -> None:
    config = write(tmp_path)
    code, out, error = run("train", config, "training.steps=2")
    assert code == 0, error
    plan_lines = out.partition("run: done")[0].splitlines()
    assert len(plan_lines) < 10, "the plan, in a few lines"
    assert "no disk (engine.nvme_path=DIR): fits, " in plan_lines[0]
    assert "held-out loss" in out
    for text in (
        "windows of 16 to train on",
        "step 1/2  loss",
        "step 2/2  loss",
        "ETA 0 s",
        "checkpoint: ",
    ):
        assert text in error
    run_dir = tmp_path / "run"
    assert f"details     {run_dir / 'plan.txt'}" in out
    assert "bytes of state per parameter" in (run_dir / "plan.txt").read_text()
    plan = json.loads((run_dir / "plan.json").read_text())
    assert plan["fits"]
    assert plan["work"]["tokens_per_step"] == 64
    assert plan["work"]["context"] == 16, "what attention costs depends on it"
    began = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[0])
    assert began["command"] == f"infinity train {config} training.steps=2"
    assert "# training.steps: " not in (run_dir / "config.yaml").read_text()
    assert (run_dir / "model" / "model.safetensors").exists()
    code, out, error = run("train", config, "training.steps=2")
    assert code == 2
    assert "holds a run that is complete already" in error
    code, out, error = run("train", config, "training.steps=3", "--resume", "auto", "--json")
    assert code == 0, error
    result = json.loads(out)
    assert (result["steps"], result["stopped"]) == (3, False)
    assert "going on from" in error
    assert "WarmupCosineLR ends with step 3 now: the next learning rate is" in error


def test_train_reports_misfit_before_writing_run(tmp_path: Path) -> None:
    changes = {"n_embd": 2048, "n_layer": 24, "n_head": 16}
    given = {f"model__config__{name}": value for name, value in changes.items()}
    code, out, error = run("train", write(tmp_path, **given, engine__budget={"host": "1GiB"}))
    assert code == 3, error
    assert "DOES NOT FIT" in out
    assert "Traceback" not in error
    run_dir = tmp_path / "run"
    assert "DOES NOT FIT" in (run_dir / "plan.txt").read_text()
    assert not (run_dir / "run.json").exists()
    assert not (run_dir / "checkpoints").exists()


# --- errors --------------------------------------------------------------------------------------


def train_error(folder: Path, *options: str, code: int = 2, **changes: Any) -> str:
    found, out, error = run("train", write(folder, **changes), *options)
    assert found == code, error
    assert "Traceback" not in error
    assert error.count("error: ") == 1
    assert out == ""
    assert not (folder / "run" / "run.json").exists()
    return error


def test_all_configuration_errors_are_reported_together(tmp_path: Path) -> None:
    error = train_error(
        tmp_path,
        model={"path": "x", "config": {"model_type": "gpt2"}},
        data__sequence_lenght=3,
        data__sequence_length=1,
        data__format="txt",
        training__epochs=2,
        training__micro_batch=0,
        engine__optimizer__lr=-1,
        engine__resume="auto",
        trainig={},
    )
    for text in (
        "9 mistakes",
        "model: path and config are both given",
        "data.sequence_lenght: unknown key; did you mean 'data.sequence_length'?",
        "data.sequence_length: should be greater than or equal to 2 or 'auto', got 1",
        "data.format: should be",
        "training.epochs: steps are given as well",
        "training.micro_batch: ",
        "engine.optimizer.lr: ",
        "trainig: unknown key; did you mean 'training'?",
    ):
        assert text in error, error


def test_missing_configuration_file(tmp_path: Path) -> None:
    code, _, error = run("train", str(tmp_path / "nosuch.yaml"))
    assert code == 2
    assert "nosuch.yaml does not exist" in error
    assert "try: `infinity init`" in error


def test_required_sections_and_conflicts() -> None:
    with pytest.raises(ConfigError) as caught:
        load_run_config({"model": {}, "data": {}})
    for text in ("run_dir: must be given", "neither path nor config", "data.train: must be given"):
        assert text in str(caught.value)
    with pytest.raises(ConfigError, match="configuration of an engine"):
        load_run_config({"optimizer": {"lr": 1e-3}})
    base = {"run_dir": "r", "model": {"path": "m"}, "data": {"train": "t", "sequence_length": 10}}
    with pytest.raises(ConfigError, match="training: tokens_per_step is 25, which is no multiple"):
        load_run_config(base, ["training.tokens_per_step=25"])
    with pytest.raises(ConfigError, match="engine: gradient_accumulation_steps is given"):
        load_run_config(
            base, ["training.tokens_per_step=20", "engine.gradient_accumulation_steps=2"]
        )
    with pytest.raises(ConfigError, match=r"data\.held_out: evaluate names files already"):
        load_run_config(base, ["data.evaluate=e.txt", "data.held_out=0.1"])
    with pytest.raises(ConfigError, match=r"engine: resume is not for a run; .* --resume auto"):
        load_run_config(base, ["engine.resume=never"])
    assert load_run_config(base, ["engine.seed=3"]).engine.seed == 3
    new_model = base | {"model": {"config": {"model_type": "gpt2"}}}
    remedy = ["model.path=m", "model.config=null"]  # of the error for both
    assert load_run_config(new_model, remedy).model.config is None


@pytest.mark.parametrize("name", NAMED)
def test_published_model_keys_are_accepted_and_typos_refused(
    name: str,
) -> None:
    """Some keys have no default in the class of transformers, which still reads them."""
    found = _from_keys(NAMED[name], None)
    assert found.num_hidden_layers == NAMED[name].get(
        "num_hidden_layers", NAMED[name].get("n_layer")
    )
    for key in ("rope_thet", "head_dimm", "config"):
        with pytest.raises(ConfigError, match=f"model.config.{key}: .* has no such key"):
            _from_keys(NAMED[name] | {key: 64}, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data__train": "/nowhere/a.txt"}, "data.train: /nowhere/a.txt: does not exist"),
        (
            {"data__sequence_length": 65},
            "data.sequence_length is 65, and gpt2 has a context of 64 tokens",
        ),
        ({"model__config__n_layers": 2}, "model.config.n_layers: gpt2 has no such key"),
        ({"model__config__n_head": 0}, "transformers"),
        ({"model__config__n_embd": "abc"}, "n_embd"),
        ({"model__config__model_type": "gpt3"}, "transformers has no model type 'gpt3'"),
        ({"model__config__model_type": "vit"}, "no key"),
        ({"model": {"path": "./nowhere"}}, "there is no directory ./nowhere"),
        ({"model__config__vocab_size": 200}, "the token 256 ends a document"),
        ({"tokenizer": "auto"}, "tokenizer: must be given"),
        ({"tokenizer": "./nowhere"}, "./nowhere has no tokenizer"),
        ({"data__end_of_document": 300}, "the token 300 ends a document"),
        ({"data__sequence_length": "auto", "training__tokens_per_step": 100}, "accumulation"),
    ],
)
def test_inconsistent_settings_are_one_error(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    error = train_error(tmp_path, **changes)
    if message == "no key":
        assert "vit has no such key" in error
    else:
        assert message in error


def test_missing_files_are_reported_together(tmp_path: Path) -> None:
    error = train_error(tmp_path, data__train="/nowhere", model={"path": "./gone"}, tokenizer="./t")
    assert "3 mistakes" in error
    for text in ("/nowhere: does not exist", "no directory ./gone", "./t has no tokenizer"):
        assert text in error


def test_corpus_without_a_window_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("")
    assert "data.train: 0 tokens in 0 documents do not make one window of 16" in train_error(
        tmp_path
    )
    (tmp_path / "text.txt").write_text("a word")
    assert "7 tokens in 1 documents" in train_error(tmp_path)


def test_tokens_outside_vocabulary_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.asarray([3, 999, 3], dtype=np.uint16))
    changes = {"data__train": str(tmp_path / "a.npy"), "model__config__vocab_size": 300}
    error = train_error(tmp_path, **changes)
    assert "holds the token 999 at 1, and the model has 300 tokens" in error
    more = {"tokenizer": "auto", "training__sample": "a prompt"}
    assert "tokenizer: must be given" in train_error(tmp_path, **changes, **more)


def test_unusable_run_directory_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert "cannot be used" in train_error(tmp_path, code=4, run_dir=str(file / "run"))
    full = tmp_path / "full"
    full.mkdir()
    (full / "thesis.txt").write_text("")
    assert "is not empty, and holds no run: thesis.txt" in train_error(tmp_path, run_dir=str(full))


def test_missing_transformers_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install" in train_error(tmp_path)


def test_invalid_configuration_files(tmp_path: Path) -> None:
    for name, text in (("a.yaml", "a: [1"), ("b.yaml", "- 1"), ("c.txt", "")):
        (tmp_path / name).write_text(text)
        code, _, error = run("train", str(tmp_path / name))
        assert code == 2
        assert error.startswith("error: ")
    assert run("train", str(tmp_path / "missing.yaml"))[0] == 2


# --- init and plan -------------------------------------------------------------------------------


PLANNED_SOON = ("tiny-cpu", "pretrain-124m", "chat", "8b-qlora")


@pytest.mark.parametrize(
    "name", [n if n in PLANNED_SOON else pytest.param(n, marks=pytest.mark.big) for n in PRESETS]
)
def test_every_preset_is_valid_and_plannable(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name_of in ("faster", "_adapters"):  # the slowest parts
        monkeypatch.setattr(f"infinity.cli.plan_report.{name_of}", lambda *_, **__: [])
    path = tmp_path / "train.yaml"
    code, _, error = run("init", "--preset", name, "--out", str(path))
    assert code == 0, error
    config = load_run_config(path)
    assert str(path) in path.read_text()
    disk_size = PRESETS[name].partition("disk ")[2]
    assert f"of RAM and {disk_size} of" in path.read_text() or not disk_size
    arguments = ["plan", str(path), "--json"]
    if config.model.path is not None:
        code, _, error = run(*arguments)
        assert code == 4, "the model is not here"
        assert "--model 7b, 13b or 70b" in error
    for line in path.read_text().splitlines():
        if "infinity plan" in line:
            arguments = [*line.split()[2:], "--json"]
    code, out, error = run(*arguments)
    assert code == 0, out + error
    report = json.loads(out)
    assert report["fits"]
    tokens_per_step = config.training.tokens_per_step
    assert report["work"]["tokens_per_step"] == (tokens_per_step or 4 * 128)
    assert report["work"]["sliced_logits"]
    assert ("nf4" in report["plan"]["frozen"]) == name.endswith("qlora"), "with --model, too"
    if config.plans_batch_schedule:
        assert report["schedule"]["runner_up"] is not None


def test_init_does_not_overwrite_without_force(tmp_path: Path) -> None:
    path = tmp_path / "a" / "train.yaml"
    code, _, error = run("init", "--out", str(path))
    assert (code, list(tmp_path.iterdir())) == (2, [])
    assert f"try: mkdir -p {tmp_path / 'a'}" in error
    path.parent.mkdir()
    assert run("init", "--out", str(path))[0] == 0
    path.write_text("mine")
    code, _, error = run("init", "--out", str(path))
    assert (code, path.read_text()) == (2, "mine")
    assert "--force" in error
    assert run("init", "--out", str(path), "--force", "--preset", "7b-24gb")[0] == 0
    assert "Llama" in path.read_text()
    assert "did you mean '7b-24gb'?" in run("init", "--preset", "7b-24gib")[2]
    assert run("init", "--out", str(tmp_path / "train.txt"))[0] == 2
    code, out, _ = run("init", "--out", "-")
    assert code == 0
    assert "run_dir: runs/tiny-cpu" in out


def test_tiny_preset_trains(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    run("init", "--out", str(path))
    code, out, error = run(
        "train",
        str(path),
        f"run_dir={tmp_path / 'run'}",
        "training.steps=12",
        "data.train=" + __file__,
        "engine.budget.host=6GiB",
    )
    assert code == 0, error
    assert "held-out loss" in out
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines if "evaluation" in line]
    assert losses[-1] < losses[0] - 0.5


def test_fine_tuning_page_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "fine-tuning.md").read_text(encoding="utf-8")
    blocks = dict(re.findall(r"```(yaml|json|jinja|console)\n(.*?)```", page, re.DOTALL))
    for name, kind in (("train.yaml", "yaml"), ("chat.jsonl", "json"), ("chat.jinja", "jinja")):
        (tmp_path / name).write_text(blocks[kind])
    monkeypatch.chdir(tmp_path)
    for line in blocks["console"].splitlines():
        arguments = shlex.split(line.removeprefix("$ infinity "), comments=True)
        code, _, error = run(*arguments, "engine.budget.host=6GiB")
        assert code == 0, error
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
    assert (tmp_path / "run" / "best" / "model.safetensors").exists()


def test_plan_accepts_overrides_of_runs(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    assert run("init", "--preset", "tiny-cpu", "--out", str(path))[0] == 0
    code, out, error = run("plan", str(path), "data.sequence_length=32", "--json")
    assert code == 0, error
    assert json.loads(out)["work"]["tokens_per_step"] == 4 * 32
    code, _, error = run("plan", "7b", "data.sequence_length=32")
    assert code == 2
    assert "data: unknown key" in error


def test_remedies_of_train_work(tmp_path: Path) -> None:
    """Remedies are settings, not options of `infinity plan` or other hardware."""
    config = write(tmp_path, engine__budget={"host": "326MiB"})
    code, out, error = run("train", config)
    assert code == 3, out + error
    ways = json.loads((tmp_path / "run" / "plan.json").read_text())["ways"]
    remedies = [way["how"] for way in ways if way["how"] is not None]
    assert remedies
    for number, remedy in enumerate(remedies):
        assert remedy in out
        assert "--" not in remedy
        other = (f"run_dir={tmp_path / str(number)}", "training.steps=1")
        code, out_then, error = run("train", config, *shlex.split(remedy), *other)
        assert code == 0, (remedy, out_then, error)


def test_plan_of_run_matches_training_batches(tmp_path: Path) -> None:
    """For any number of ranks, and for windows of the context length of the model."""
    sizes = ["--device", "4GiB", "--host", "16GiB", "--disk", "64GiB", "--json"]
    batches = {"engine__gradient_accumulation_steps": None, "training__micro_batch": 2}
    path = write(tmp_path, training__tokens_per_step=4 * 2 * LENGTH, **batches)
    config = load_run_config(path)
    for gpus in (1, 2):
        code, out, error = run("plan", path, "--gpus", str(gpus), *sizes)
        assert code == 0, error
        report = json.loads(out)
        assert report["work"]["micro_batches"] == 4 // gpus
        assert config.engine_for(LENGTH, gpus).gradient_accumulation_steps == 4 // gpus
        assert report["work"]["tokens"] == 2 * LENGTH, "of a micro-batch"
    code, _, error = run("plan", path, "--gpus", "3", *sizes)
    assert code == 2
    assert "a step of 4 micro-batches cannot be shared out to 3 ranks" in error
    path = write(tmp_path, data__sequence_length="auto", training__micro_batch=3)
    code, out, error = run("plan", path, *sizes)
    assert code == 0, error
    assert json.loads(out)["work"]["tokens_per_step"] == 2 * 3 * TINY["n_positions"]


def test_plan_of_invalid_run_reports_errors(tmp_path: Path) -> None:
    code, _, error = run("plan", write(tmp_path, engine__placment={}))
    assert code == 2
    assert "engine.placment: unknown key; did you mean 'engine.placement'?" in error


# --- progress page -------------------------------------------------------------------------------


def test_format_step_line() -> None:
    record = {
        "step": 3, "num_steps": 36, "loss": 5.25, "lr": 1e-3, "skipped": True,
        "tokens_per_s": 1064.0, "step_s": 8.0, "left_s": 264.0,
        "stall_s": {"disk_read": 1.2, "slot": 0.08},
    }  # fmt: skip
    assert format_step(record) == (
        "step  3/36  skipped: gradients are not finite  loss 5.2500  lr 1.00e-03  "
        "1,064 tokens/s  waits: read 15%, slots 1%  ETA 4 min 24 s"
    )
    assert format_step(record, 80) == (
        "step  3/36  skipped: gradients are not finite  loss 5.2500  ETA 4 min 24 s"
    )
    assert format_stalls({}, 0.0) == ""


def test_narrow_terminal_shows_bar_and_eta() -> None:
    record = {
        "event": "step", "step": 3, "num_steps": 36_000, "loss": 5.25, "lr": 1e-3, "skipped": False,
        "tokens_per_s": 1064.0, "step_s": 8.0, "left_s": 264.0,
        "stall_s": {"disk_read": 1.2, "slot": 0.8, "update": 0.4, "gradient": 0.2},
    }  # fmt: skip
    page, written = TrainPage(), io.StringIO()
    page._console = Console(file=written, force_terminal=True, width=80, soft_wrap=True)
    with page:
        page.on_record(record)
    lines = re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", written.getvalue()).splitlines()
    shown = [line for line in lines if "ETA 4 min 24 s" in line]
    assert shown
    assert all("━" in line and len(line.rstrip("\r")) <= 80 for line in shown)
    assert all(not line.strip() or "ETA" in line for line in lines)  # a single line

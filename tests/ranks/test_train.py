"""Tests of `infinity train --gpus N`, which starts N processes with torch's launcher."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from ranks.test_processes import HANG_S, TESTS, pytestmark  # noqa: F401
from support.forked import Program
from support.ranks import on_ranks
from support.runs import losses_of, metrics_of, settings, train, write_chat
from support.waiting import wait_until

from infinity.cli.main import main
from infinity.distributed.context import DistContext
from infinity.errors import ConfigError, MachineError
from infinity.train.run import Run
from infinity.train.settings import load_run_config

NO_DROPOUT = {f"model__config__{name}_pdrop": 0.0 for name in ("embd", "attn", "resid")}
LONG = {
    "training__steps": 30,
    "training__evaluate_every": 10,
    "training__checkpoint_every": 10,
    "training__keep_best": True,
    "data__sequence_length": 64,
}


def start_train(folder: Path, raw: dict[str, Any], *arguments: str) -> Program:
    """Start `infinity train` with these arguments in a separate process."""
    (path := folder / "train.json").write_text(json.dumps(raw))
    return Program(main, ["train", str(path), *arguments], PYTHONPATH=str(TESTS.parent))


@pytest.fixture(scope="module")
def single_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an uninterrupted run on one rank."""
    folder = tmp_path_factory.mktemp("alone")
    train(settings(folder, **write_chat(folder, 200), **NO_DROPOUT, **LONG))
    return folder


def run_settings(folder: Path, *, durable: bool = False) -> dict[str, Any]:
    """Return the settings of the same run; if `durable`, it saves no checkpoints."""
    changes: dict[str, Any] = {}
    if durable:
        (folder / "nvme").mkdir()
        changes = {"engine__nvme_path": str(folder / "nvme"), "engine__durable": True}
        changes |= {"engine__commit_every": 1, "training__checkpoint_every": 0}
    return settings(folder, **write_chat(folder, 200), **NO_DROPOUT, **(LONG | changes))


def ranks_with_state(folder: Path) -> list[str]:
    """Return the ranks that have state of the run on disk."""
    (state,) = (folder / "nvme").iterdir()
    return sorted(str(path.parent.relative_to(state)) for path in state.glob("**/infinity-run-*"))


def until_step(folder: Path, number: int) -> None:
    metrics = folder / "run" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and f'"step": {number}' in metrics.read_text(), HANG_S)


def norms_of(folder: Path) -> list[tuple[float, float]]:
    return [(r["lr"], r["grad_norm"]) for r in metrics_of(folder) if r["event"] == "step"]


@pytest.mark.parametrize("durable", [pytest.param(False, marks=pytest.mark.big), True])
def test_run_of_two_ranks_resumed_on_one_matches_single_rank(
    single_run: Path, tmp_path: Path, durable: bool
) -> None:
    raw = run_settings(tmp_path, durable=durable)
    with start_train(tmp_path, raw, "--gpus", "2") as program:
        until_step(tmp_path, 2)
        if durable:  # as a system's memory guard, which ends one process
            workers = psutil.Process(program.process.pid).children()
            next(worker for worker in workers if worker.environ().get("RANK") == "1").terminate()
        else:
            program.signal(signal.SIGINT)
        code, out, error = program.end()
    assert code == 128 + (signal.SIGTERM if durable else signal.SIGINT), error
    assert error.count("finishing this step, then saving") == (not durable)
    assert error.count("by SIGTERM to another rank") == durable
    assert error.count("stopped after step ") == 1
    assert "--gpus 2 --resume auto" in error
    for line in ("windows of 64 to train on", "step  1/30  loss"):
        assert error.count(line) == 1, error
    assert error.count("checkpoint: ") == (not durable)
    assert "each of 2 ranks: " in out
    assert "a node      2 such ranks" in (tmp_path / "run" / "plan.txt").read_text()
    done = len(norms_of(tmp_path))
    assert 2 <= done < 30
    if durable:
        assert ranks_with_state(tmp_path) == ["rank-0", "rank-1"]
    _, watcher = train(raw, "auto")
    assert watcher.done == done
    if durable:
        assert ranks_with_state(tmp_path) == ["."]
        assert f"going on from the committed step {done}" in watcher.notes
    assert losses_of(tmp_path) == losses_of(single_run)
    assert norms_of(tmp_path) == norms_of(single_run)


@pytest.mark.big
@pytest.mark.parametrize("durable", [False, True])
def test_run_of_one_rank_resumes_on_two(single_run: Path, tmp_path: Path, durable: bool) -> None:
    raw = run_settings(tmp_path, durable=durable)
    train(raw, stop_after=10)
    arguments = ("--gpus", "2", "--json", "--resume", "auto")
    if durable:  # a rank is killed, and the same number resumes
        with start_train(tmp_path, raw, *arguments) as program:
            until_step(tmp_path, 15)
            psutil.Process(program.process.pid).children()[-1].kill()
            code, _, error = program.end()
        assert code == MachineError.exit_code
        assert "was ended by SIGKILL" in error
    with start_train(tmp_path, raw, *arguments) as program:
        code, out, error = program.end()
    assert code == 0, error
    if durable:
        assert ranks_with_state(tmp_path) == ["rank-0", "rank-1"]
        assert "going on from the committed step 1" in error
    result = json.loads(out)
    assert (result["steps"], result["tokens"]) == (30, 30 * 256)
    assert losses_of(tmp_path) == losses_of(single_run)
    assert norms_of(tmp_path) == norms_of(single_run)
    assert "going on from" in error
    for name in ("model", "best"):
        resumed_dir, single_dir = (folder / "run" / name for folder in (tmp_path, single_run))
        file = "model.safetensors"
        assert (resumed_dir / file).read_bytes() == (single_dir / file).read_bytes(), name
    assert result["best_step"] in (10, 20, 30)


def test_configuration_error_is_printed_once(tmp_path: Path) -> None:
    raw = settings(tmp_path, engine__gradient_accumulation_steps=3, training__seed="x")
    with start_train(tmp_path, raw, "--gpus", "2") as program:
        code, out, error = program.end()
    assert code == 2, error
    assert error.count("error: ") == error.count("training.seed") == 1
    assert "Traceback" not in error
    assert out == ""


def test_differing_training_data_is_rejected(tmp_path: Path) -> None:
    """As if a node has an incomplete copy."""
    configs = []
    for number in range(2):
        (folder := tmp_path / str(number)).mkdir()
        data = write_chat(folder, 200 - number)
        configs.append(load_run_config(settings(folder, **data, run_dir=str(tmp_path / "run"))))

    def prepare(ranks: DistContext) -> None:
        with Run(configs[ranks.rank], ranks=ranks) as run:
            run.prepare()

    with pytest.raises(ConfigError, match=r"ranks 0 and 1 differ in the run: data\.tokens is "):
        on_ranks(2, prepare)


def test_micro_batches_are_divided_among_ranks_or_rejected(tmp_path: Path) -> None:
    config = load_run_config(settings(tmp_path, engine__gradient_accumulation_steps=6))
    assert config.engine_for(16, 3).gradient_accumulation_steps == 2
    message = r"a step of 6 micro-batches cannot be shared out to 4 ranks(.|\n)*_steps=8, those of"
    with pytest.raises(ConfigError, match=message):
        config.engine_for(16, 4)
    changes = {"engine__gradient_accumulation_steps": None, "training__tokens_per_step": 96}
    config = load_run_config(settings(tmp_path, **changes))
    assert config.engine_for(16, 3).gradient_accumulation_steps == 1
    with pytest.raises(ConfigError, match="tokens_per_step=128"):
        config.engine_for(16, 2)


def test_gpus_option_within_launcher_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from infinity.cli.launch import launch

    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="leave --gpus out, or the launcher"):
        launch(2, ["train"])

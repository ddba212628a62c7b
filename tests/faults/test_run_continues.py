"""Tests of `infinity train` with failing saves, metrics, logs and state drives."""

from __future__ import annotations

import errno
import io
import json
import os
import shlex
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.fault_injection import faulty_io
from support.grids import diagonal
from support.runs import metrics_of, settings, train
from support.waiting import wait_until
from typer.testing import CliRunner

from infinity.checkpoint import writer
from infinity.cli.main import app
from infinity.cli.train import TrainPage
from infinity.errors import DoesNotFitError, MachineError, TransferError
from infinity.plan.rates import Rates, nominal
from infinity.profiling.calibration import KnownRates
from infinity.storage.disk import Disk
from infinity.train import run as runs_run
from infinity.train.metrics import Metrics
from infinity.train.run import Run
from infinity.train.settings import load_run_config
from infinity.training import checkpoints

SetFailures = Callable[..., None]


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Steps and losses of a run without failures."""
    folder = tmp_path_factory.mktemp("plain")
    train(settings(folder))
    return steps_of(folder)


def steps_of(folder: Path) -> list[Any]:
    return [(e["step"], e["loss"]) for e in metrics_of(folder) if e["event"] == "step"]


@pytest.fixture
def set_failures(monkeypatch: pytest.MonkeyPatch) -> SetFailures:
    """Return a function that sets how saves fail, and at which steps."""
    make_writer, original_write_new, original_free_bytes = (
        checkpoints.CheckpointWriter,
        writer.write_new,
        writer.free_bytes,
    )
    failure: dict[str, Any] = {"how": "", "steps": ()}

    def fails(path: Path) -> bool:
        return any(f"step{step}" in str(path) for step in failure["steps"])

    def writer_of(root: Path, tag: str, *args: Any, **kwargs: Any) -> Any:
        failure["tag"] = tag
        if fails(Path(tag)) and failure["how"] == "state":
            raise TransferError("gone", path="/nvme/state.bin", offset=0, length=1, errno=5)
        if fails(Path(tag)) and failure["how"] == "eio":
            with faulty_io(faults="seed=1,kinds=eio,rate=1"):
                return make_writer(root, tag, *args, **kwargs)
        return make_writer(root, tag, *args, **kwargs)

    def write_new(path: Path, *args: Any) -> None:
        if fails(path) and failure["how"] == "read-only":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        original_write_new(path, *args)

    def free_bytes(path: Path) -> int:
        return (
            4096
            if fails(Path(failure["tag"])) and failure["how"] == "full"
            else original_free_bytes(path)
        )

    monkeypatch.setattr(checkpoints, "CheckpointWriter", writer_of)
    monkeypatch.setattr(writer, "write_new", write_new)
    monkeypatch.setattr(writer, "free_bytes", free_bytes)
    return lambda how, steps: failure.update(how=how, steps=steps)


EXPECTED_TEXTS = {
    "full": ("needs ", "4.00 KiB are free: ", "missing"),
    "eio": ("errno 5", "check `dmesg`"),
    "read-only": ("errno 30", "mount it writable"),
}


@pytest.mark.parametrize("how", EXPECTED_TEXTS)
def test_failed_save_does_not_affect_training(
    tmp_path: Path, losses: list[Any], set_failures: SetFailures, how: str
) -> None:
    set_failures(how, (4, 5))
    result, watcher = train(settings(tmp_path))
    assert steps_of(tmp_path) == losses
    assert result.failed_saves in (1, 2)  # a background failure may be known too late for a retry
    root = tmp_path / "run" / "checkpoints"
    assert result.checkpoint == root / "step6"
    assert sorted(path.name for path in root.iterdir() if path.is_dir()) == ["step2", "step6"]
    assert [path.name for path in watcher.files] == ["step2", "step6", "model"]
    (note,) = (note for note in watcher.notes if "not saved" in note)
    for text in (
        "step4 was not saved",
        "training goes on",
        f"is {root / 'step2'}",
        *EXPECTED_TEXTS[how],
    ):
        assert text in note
    events = [entry for entry in metrics_of(tmp_path) if entry["event"] == "not saved"]
    assert len(events) == result.failed_saves
    assert events[0]["tag"] == "step4"


def test_failed_save_is_retried_soon(tmp_path: Path, set_failures: SetFailures) -> None:
    set_failures("full", (20,))
    changes = {"training__steps": 24, "training__checkpoint_every": 20, "engine__scheduler": None}
    result, watcher = train(settings(tmp_path, **changes))
    assert result.failed_saves == 1
    assert [path.name for path in watcher.files] == ["step22", "step24", "model"]


@pytest.mark.parametrize("how", ["full", "eio"])
def test_failed_last_save_raises_after_model_export(
    tmp_path: Path, losses: list[Any], set_failures: SetFailures, how: str
) -> None:
    raw = settings(tmp_path)
    set_failures(how, range(4, 9))
    kind = DoesNotFitError if how == "full" else MachineError
    with pytest.raises(kind, match="the state after step 6 was not saved: ") as caught:
        train(raw)
    root, model = tmp_path / "run" / "checkpoints", tmp_path / "run" / "model"
    text = str(caught.value)
    assert (
        f"failed; the last checkpoint is {root / 'step2'}; the model is complete: {model}" in text
    )
    assert (model / "model.safetensors").exists()
    before = (model / "model.safetensors").read_bytes()
    set_failures("", ())
    result, watcher = train(raw, "auto")
    assert watcher.done == 2
    assert steps_of(tmp_path) == losses
    assert result.checkpoint == root / "step6"
    assert (model / "model.safetensors").read_bytes() == before


def test_stopped_run_that_cannot_save_raises(tmp_path: Path, set_failures: SetFailures) -> None:
    set_failures("full", (3,))
    with pytest.raises(DoesNotFitError, match="after step 3 was not saved") as caught:
        train(settings(tmp_path), stop_after=3)
    assert "--resume auto" in str(caught.value)


def test_failed_save_does_not_hide_the_original_error(
    tmp_path: Path, set_failures: SetFailures
) -> None:
    set_failures("read-only", (2,))
    with pytest.raises(KeyboardInterrupt):
        train(settings(tmp_path), die_after=3)


def test_transfer_error_in_save_ends_the_run(tmp_path: Path, set_failures: SetFailures) -> None:
    set_failures("state", (2,))
    with pytest.raises(TransferError, match="gone"):
        train(settings(tmp_path))


def test_checkpoint_not_named_in_latest_is_replaced(tmp_path: Path) -> None:
    """A kill after the rename of the checkpoint and before the update of `latest`."""
    train(settings(tmp_path), stop_after=4)
    root = tmp_path / "run" / "checkpoints"
    (root / "latest").write_text("step2\n")
    result, watcher = train(settings(tmp_path), resume="auto")
    assert [facts.step for facts in watcher.steps] == [3, 4, 5, 6]
    assert result.failed_saves == 0
    assert sorted(path.name for path in root.iterdir()) == ["latest", "step4", "step6"]


def test_failed_pruning_is_not_a_failed_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prune(*args: Any, **kwargs: Any) -> None:
        raise MachineError("not removed")

    monkeypatch.setattr(writer, "prune", prune)
    result, watcher = train(settings(tmp_path))
    assert (result.failed_saves, result.checkpoint.name) == (0, "step6")
    text = "step4 was saved, but older checkpoints are left: not removed"
    assert any(text in note for note in watcher.notes)


def test_full_disk_for_metrics_and_logs_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    init = Metrics.__init__

    def init_on_full_disk(self: Metrics, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, self._file)
        os.close(full)

    monkeypatch.setattr(Metrics, "__init__", init_on_full_disk)
    result, watcher = train(settings(tmp_path))
    assert result.steps == 6
    (note,) = (note for note in watcher.notes if "without metrics" in note)
    assert os.strerror(errno.ENOSPC) in note

    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    page = TrainPage()
    page._console = Console(file=Full())
    page.on_record(vars(watcher.steps[0]))
    page.note("a line")

    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    page = TrainPage()
    page._console.file = Closed()  # as with `2>&1 | tee log` after Ctrl-C
    page.note("a line")
    page.ask_to_stop(signal.SIGINT)
    assert page.stopping


def test_truncated_metrics_line_is_terminated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = Metrics(tmp_path / "m.jsonl", after=0)
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr("infinity.train.metrics.os.write", lambda file, data: write(file, data[:9]))
        with pytest.raises(MachineError, match="cannot be written: No space"):
            metrics.write({"event": "step", "step": 1})
    metrics.write({"event": "step", "step": 2})
    metrics.close()
    lines = (tmp_path / "m.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == 2
    reopened = Metrics(tmp_path / "m.jsonl", after=2)
    reopened.close()
    assert (tmp_path / "m.jsonl").read_text() == lines[-1] + "\n"


# --- the drive of the state ----------------------------------------------------------------------


class FailedTicket:
    """Ticket of a failed request."""

    def __init__(self, path: str) -> None:
        self.path = path

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        text, remedy = os.strerror(errno.EIO), "check `dmesg`"
        raise TransferError(
            text, path=self.path, offset=0, length=1, errno=errno.EIO, remedy=remedy
        )


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stderr


def run_remedy(error: str, other: Path) -> str:
    """Run the commands of an error's remedy with directory `other`; return the last stderr."""
    other.mkdir()
    (line,) = (line for line in error.splitlines() if line.startswith("  try: "))
    commands, _, hint = line.removeprefix("  try: ").partition("  (")
    assert (
        hint == f"with a directory of yours for {runs_run.OTHER_DRIVE}); or, to stay: check `dmesg`"
    )
    *copies, last = commands.replace(str(runs_run.OTHER_DRIVE), str(other)).split(" && ")
    for copy in copies:
        subprocess.run(shlex.split(copy), check=True)
    infinity, *arguments = shlex.split(last)
    assert infinity == "infinity"
    code, output = run(*arguments)
    assert code == 0, output
    return output


@pytest.mark.parametrize(
    ("kind", "name"),
    diagonal(["durable", "durable on two", "checkpoints", "one drive", "bare"], ["read", "write"]),
)
def test_run_continues_elsewhere_after_state_drive_failure(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    losses: list[Any],
    kind: str,
    name: str,
) -> None:
    """Following the remedy of the message gives the losses of a run without failures."""
    rates = KnownRates(Rates.of(nominal(True).numbers()), "2026-01-02")
    monkeypatch.setattr("infinity.profiling.calibration.cached_rates", lambda *a, **kwargs: rates)
    monkeypatch.setattr(runs_run, "_same_drive", lambda *paths: kind == "one drive")
    durable, paths = kind.startswith("durable"), [tmp_path / "state"]
    paths += [tmp_path / "second"] if kind == "durable on two" else []
    for path in paths:
        path.mkdir()
    config = tmp_path / "run of mine.json"
    settings_dict = settings(
        tmp_path,
        engine__placement={"weights": "disk", "optimizer_state": "disk", "gradients": "disk"},
        engine__nvme_path=[str(path) for path in paths],
        engine__durable=durable or None,
        training__checkpoint_every=None if durable else 99 if kind == "bare" else 2,
    )
    config.write_text(json.dumps(settings_dict))
    failed, original, on_record = [], getattr(Disk, name), TrainPage.on_record

    def request(self: Disk, *args: Any, **kwargs: Any) -> Any:
        if failed:
            return FailedTicket(str(self.scratches[0].directory / "state.bin"))
        return original(self, *args, **kwargs)

    def record_and_fail(self: TrainPage, record: Any) -> None:
        on_record(self, record)
        if record["event"] == "step" and record["step"] == 3:
            if not durable and kind != "bare":  # saved in the background: wait until complete
                assert wait_until((tmp_path / "run" / "checkpoints" / "latest").exists)
            failed.append(True)

    with monkeypatch.context() as patch:
        patch.setattr(Disk, name, request)
        patch.setattr(TrainPage, "on_record", record_and_fail)
        code, error = run("train", str(config), "training.evaluate_every=0")
    assert code == 4, error
    assert "Traceback" not in error
    assert f"error: the drive of {paths[0]}, which holds the state of this run, fails: " in error
    state = Run(load_run_config(config), "auto")
    state.close()
    if durable:
        assert "the commit of update " in error
        assert f" in {paths[0] / state.state.name} is complete" in error
    elif kind == "bare":
        assert "there is no checkpoint to go on from" in error
    else:
        assert f"{tmp_path / 'run' / 'checkpoints' / 'step2'} is complete" in error
    output = run_remedy(error, tmp_path / "other")
    assert ("going on from" in output) == (kind != "bare")
    folder = tmp_path / "other" if kind == "one drive" else tmp_path
    assert steps_of(folder) == losses


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "state.bin", "commit-b.bin", "plan.json", "run.json", "lock"]
)
def test_removed_file_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Writes to a removed open file succeed: without a check 6 steps would seem done.

    Small files that are written once are restored, and the run resumes from its last commit.
    """
    (tmp_path / "nvme").mkdir()
    durable = {"engine__nvme_path": str(tmp_path / "nvme"), "engine__durable": True}
    config, on_record = tmp_path / "run.json", TrainPage.on_record
    config.write_text(json.dumps(settings(tmp_path, **durable, engine__commit_every=1)))
    steps: list[int] = []

    def record_and_remove(self: TrainPage, record: Any) -> None:
        on_record(self, record)
        steps.append(record["step"])
        if steps == [0, 1, 2]:
            (file,) = (tmp_path / ("run" if name == "metrics.jsonl" else "nvme")).rglob(name)
            file.unlink()

    monkeypatch.setattr(TrainPage, "on_record", record_and_remove)
    code, error = run("train", str(config), "training.checkpoint_every=0")
    assert code == 4, error
    assert f"{name} was removed while " in error
    assert "fails:" not in error
    assert steps[-1] < 6
    if name in ("plan.json", "run.json", "lock"):
        code, error = run("train", str(config), "--resume", "auto")
        assert code == 0, error
        assert steps[-1] == 6


def test_unrelated_error_is_passed_through(tmp_path: Path) -> None:
    with Run(load_run_config(settings(tmp_path, engine__nvme_path=str(tmp_path)))) as run:
        run.trains = True
        for error in (
            MachineError(f"{run.directory.path}/model is full"),
            MachineError("the GPU fell off the bus"),
        ):
            assert runs_run.elsewhere(error, run, ["infinity"]) is error

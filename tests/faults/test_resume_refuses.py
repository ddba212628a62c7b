"""Tests of `resume: auto`: after completed steps it resumes or raises, but never restarts silently.

The error names the damaged or missing file, nothing is written, and once the file is restored the
run resumes normally.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from support.durable import PLACEMENTS, durable_engine, gated, step
from support.runs import losses_of, metrics_of, settings, train

from infinity.checkpoint.directory import find_tag
from infinity.checkpoint.writer import CheckpointWriter
from infinity.errors import CheckpointError, ConfigError, InfinityError, MachineError
from infinity.storage.run_dir import Scratch, remove_dead_runs, run_records

DRIVES = ("d0", "d1")
Sabotage = Callable[[Path], Any]


def durable_settings(folder: Path, **changes: Any) -> dict[str, Any]:
    paths = [str(folder / name) for name in DRIVES]
    for path in paths:
        os.makedirs(path, exist_ok=True)
    io = {"weights": [1, 1], "block_size": 4096}
    overrides: dict[str, Any] = {
        "engine__nvme_path": paths,
        "engine__durable": True,
        "engine__io": io,
    }
    overrides |= {"engine__placement": PLACEMENTS["all on disk"], "engine__commit_every": 1}
    return settings(folder, **(overrides | changes))


def state_in(folder: Path, drive: str) -> Path:
    """Return the directory of the state of an `infinity train` run on a drive."""
    (run_directory,) = (folder / drive).iterdir()
    (directory,) = run_directory.iterdir()
    return directory


@contextmanager
def moved_away(path: Path) -> Iterator[None]:
    backup = path.with_name(f"{path.name}.away")
    path.rename(backup)
    yield
    if path.is_dir():  # an empty mount point that was recreated
        path.rmdir()
    backup.rename(path)


def fail_publish(*before: Any, **more: Any) -> None:
    """Fail a save at its end, which leaves the same files as a kill."""
    raise MachineError("the drive is gone")


@contextmanager
def flipped(path: Path) -> Iterator[None]:
    data = path.read_bytes()
    path.write_bytes(bytes([data[0], data[1] ^ 1, *data[2:]]))
    yield
    path.write_bytes(data)


@contextmanager
def owned_by_other_user(directory: Path) -> Iterator[None]:
    """Change the owner, as when a run is started once as root and later as a user."""
    try:
        os.chown(directory, 65534, 65534)
    except PermissionError as error:
        pytest.skip(f"files cannot be given to another user here: {error}")
    yield
    os.chown(directory, os.geteuid(), os.getegid())


@contextmanager
def behind_a_link(directory: Path) -> Iterator[None]:
    """Move the directory to another drive and leave a symlink to it."""
    elsewhere = directory.parent.parent / "elsewhere"
    directory.rename(elsewhere)
    directory.symlink_to(elsewhere)
    yield
    directory.unlink()
    elsewhere.rename(directory)


@contextmanager
def behind_a_link_that_leads_nowhere(directory: Path) -> Iterator[None]:
    with behind_a_link(directory), moved_away(directory.parent.parent / "elsewhere"):
        yield


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    with open(directory / "lock", "r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def not_mounted(folder: Path) -> Iterator[None]:
    """Replace both drives by empty mount points."""
    with moved_away(folder / "d0"), moved_away(folder / "d1"):
        for name in DRIVES:
            (folder / name).mkdir()
        yield


CASES: dict[str, tuple[Callable[[Path], dict[str, Any]], Sabotage, str]] = {
    "state drives not mounted": (durable_settings, not_mounted, "drive is not mounted"),
    "first drive missing": (
        durable_settings,
        lambda f: moved_away(state_in(f, "d0").parent),
        "first directory, .* is missing",
    ),
    "second drive missing": (
        durable_settings,
        lambda f: moved_away(state_in(f, "d1").parent),
        "spreads over 2 paths; missing",
    ),
    "run.json of the state": (
        durable_settings,
        lambda f: flipped(state_in(f, "d0") / "run.json"),
        "run.json is damaged",
    ),
    "run.json of the second drive": (
        durable_settings,
        lambda f: flipped(state_in(f, "d1") / "run.json"),
        "missing|damaged",
    ),
    "plan.json of the state": (
        durable_settings,
        lambda f: flipped(state_in(f, "d0") / "plan.json"),
        "plan.json is damaged",
    ),
    "state of another user": (
        durable_settings,
        lambda f: owned_by_other_user(state_in(f, "d0")),
        "d0/.*: it belongs to user id 65534",
    ),
    "second drive of another user": (
        durable_settings,
        lambda f: owned_by_other_user(state_in(f, "d1")),
        "spreads over 2 paths; missing: .*d1",
    ),
    "state behind a link": (
        durable_settings,
        lambda f: behind_a_link(state_in(f, "d0")),
        "d0/.*: it is a link to .*elsewhere",
    ),
    "link whose drive is not mounted": (
        durable_settings,
        lambda f: behind_a_link_that_leads_nowhere(state_in(f, "d0")),
        "d0/.*: it is a link to .*elsewhere",
    ),
    "state in use": (durable_settings, lambda f: locked(state_in(f, "d0")), "in use by process"),
    "run.json of the run": (
        durable_settings,
        lambda f: flipped(f / "run" / "run.json"),
        "run.json is damaged, which identifies the run",
    ),
    "latest gone": (
        settings,
        lambda f: moved_away(f / "run" / "checkpoints" / "latest"),
        "latest is missing, but 4 steps were done .*--resume .*step4",
    ),
    "checkpoints gone": (
        settings,
        lambda f: moved_away(f / "run" / "checkpoints"),
        "has no checkpoint, but 4 steps were done",
    ),
}


NOT_DURABLE = {"engine__durable": None, "engine__commit_every": None}
# Settings of the first start, changes for the second start, expected error.
CHANGES: dict[str, tuple[Callable[..., dict[str, Any]], dict[str, Any], str]] = {
    "not durable any more": (
        durable_settings,
        NOT_DURABLE,
        r"did 4 steps with engine.durable=true, .*engine.nvme_path=\[.*d0,.*d1\], but .* false",
    ),
    "without nvme_path": (
        durable_settings,
        NOT_DURABLE | {"engine__nvme_path": None, "engine__placement": None, "engine__io": None},
        "did 4 steps with engine.durable=true, and has its state",
    ),
    "checkpoints gone, and rarer": (
        settings,
        {"training__checkpoint_every": 99},
        "has no checkpoint, but 4 steps were done",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_auto_resume_with_changed_settings_refuses_to_restart(tmp_path: Path, case: str) -> None:
    make, changes, pattern = CHANGES[case]
    train(make(tmp_path), stop_after=4)
    metrics_before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with moved_away(tmp_path / "run" / "checkpoints") if make is settings else nullcontext():
        with pytest.raises(InfinityError, match=pattern):
            train(make(tmp_path, **changes), resume="auto")
        assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == metrics_before
    _, watcher = train(make(tmp_path), resume="auto")
    assert [facts.step for facts in watcher.steps] == [5, 6]


def test_named_checkpoint_replaces_durable_state(tmp_path: Path) -> None:
    train(durable_settings(tmp_path), stop_after=4)
    raw = durable_settings(tmp_path, **NOT_DURABLE)
    train(raw, resume=str(tmp_path / "run" / "checkpoints" / "step4"), stop_after=1)
    _, watcher = train(raw, resume="auto")
    assert [facts.step for facts in watcher.steps] == [6]


@pytest.mark.parametrize("case", CASES)
def test_auto_resume_with_missing_state_refuses_to_restart(tmp_path: Path, case: str) -> None:
    make, sabotage, pattern = CASES[case]
    train(make(tmp_path), stop_after=4)
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics_before = metrics.read_bytes()
    with sabotage(tmp_path):
        with pytest.raises(InfinityError) as caught:
            train(make(tmp_path), resume="auto")

        assert re.search(pattern, str(caught.value).replace("\n", " ")), str(caught.value)
        assert metrics.read_bytes() == metrics_before
    result, watcher = train(make(tmp_path), resume="auto")
    assert [facts.step for facts in watcher.steps] == [5, 6]
    assert result.steps == 6
    assert [step for event, step, _ in losses_of(tmp_path) if event == "step"] == [*range(1, 7)]
    for drive in DRIVES if make is durable_settings else ():
        assert state_in(tmp_path, drive)  # exactly one directory


def test_named_checkpoint_resumes_after_lost_state(tmp_path: Path) -> None:
    """The checkpoint must be named explicitly; afterwards the run is durable again."""
    raw = durable_settings(tmp_path)
    train(raw, stop_after=4)
    for drive in DRIVES:
        shutil.rmtree(state_in(tmp_path, drive))
    with pytest.raises(InfinityError, match="has its state below"):
        train(raw, resume="auto")
    train(raw, resume=str(tmp_path / "run" / "checkpoints"), stop_after=1)
    _, watcher = train(raw, resume="auto")
    assert [facts.step for facts in watcher.steps] == [6]
    assert [step for event, step, _ in losses_of(tmp_path) if event == "step"] == [*range(1, 7)]


@pytest.mark.parametrize("every", [4, 2])
def test_auto_resume_before_first_checkpoint_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    """The run restarts with a note, and the metrics of the lost steps are kept in another file.

    The first checkpoint was not due yet, or could not be saved.
    """
    raw = settings(tmp_path, training__checkpoint_every=every)
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWriter, "_publish", fail_publish)
        with pytest.raises(KeyboardInterrupt):
            train(raw, die_after=3)
    metrics_before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    _, watcher = train(raw, resume="auto")
    assert [facts.step for facts in watcher.steps] == [1, 2, 3, 4, 5, 6]
    assert "has steps up to 3, and the run goes on from 0" in "".join(watcher.notes)
    assert (tmp_path / "run" / "metrics.1.jsonl").read_bytes() == metrics_before


def test_auto_resume_from_unnamed_first_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = CheckpointWriter._publish

    def publish_without_latest(self: CheckpointWriter, **more: Any) -> None:
        fail_publish(publish(self, save_latest=False))

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWriter, "_publish", publish_without_latest)
        with pytest.raises(KeyboardInterrupt):
            train(settings(tmp_path), die_after=3)
    assert not (tmp_path / "run" / "checkpoints" / "latest").exists()
    _, watcher = train(settings(tmp_path), resume="auto")
    assert [facts.step for facts in watcher.steps] == [3, 4, 5, 6]


def test_committed_step_missing_from_metrics_is_recovered(tmp_path: Path) -> None:
    raw = durable_settings(tmp_path)
    train(raw, stop_after=4)
    metrics = tmp_path / "run" / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    last, end = metrics_of(tmp_path)[-2:]
    assert (last["event"], end["event"]) == ("step", "ended")
    metrics.write_text("".join(lines[:-2]))
    train(raw, resume="auto")
    recovered = next(r for r in metrics_of(tmp_path) if r["event"] == "step" and r["step"] == 4)
    assert recovered["recovered"]
    assert {key: last[key] for key in recovered if key != "recovered"} == {
        key: value for key, value in recovered.items() if key != "recovered"
    }
    assert [step for event, step, _ in losses_of(tmp_path) if event == "step"] == [*range(1, 7)]


@pytest.mark.parametrize(
    ("drive", "last"), [("d0", "create"), ("d0", "announce"), ("d1", "create")]
)
def test_outdated_run_json_is_refused_and_loses_no_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drive: str, last: str
) -> None:
    """A backup may restore `run.json` from before the directories were marked durable."""
    original, old_records = getattr(Scratch, last), {}

    def keep_old_record(*args: Any) -> Any:
        scratch = original(*args) or args[0]
        old_records[scratch.directory] = (scratch.directory / "run.json").read_bytes()
        return scratch

    monkeypatch.setattr(Scratch, last, keep_old_record)
    raw = durable_settings(tmp_path)
    train(raw, stop_after=4)
    record = state_in(tmp_path, drive) / "run.json"
    newer = record.read_bytes()
    record.write_bytes(old_records[record.parent])
    run_directories = [state_in(tmp_path, name).parent for name in DRIVES]
    assert [remove_dead_runs(path) for path in run_directories] == [[], []]
    if drive == "d1":
        with moved_away(run_directories[0]):  # the first drive is not mounted
            assert remove_dead_runs(run_directories[1]) == []
    with pytest.raises(ConfigError, match=f"{record.parent}: its run.json is an older copy"):
        train(raw, resume="auto")
    record.write_bytes(newer)
    _, watcher = train(raw, resume="auto")
    assert [facts.step for facts in watcher.steps] == [5, 6]


# --- without `infinity train` --------------------------------------------------------------------


@pytest.fixture
def step_log(tmp_path: Path) -> dict[str, Any]:
    """Settings of a durable run of two steps with a step log."""
    (tmp_path / "nvme").mkdir()
    options = {"step_log": str(tmp_path / "journal.jsonl"), "placement": PLACEMENTS["all on disk"]}
    with durable_engine(tmp_path / "nvme", gated(), **options) as engine:
        step(engine)
        step(engine)
    return options


def test_step_log_of_missing_run_refuses_auto_resume(
    tmp_path: Path, step_log: dict[str, Any]
) -> None:
    (directory,) = run_records(tmp_path / "nvme")
    shutil.move(directory, tmp_path / directory.name)
    auto = durable_engine(tmp_path / "nvme", gated(), **step_log, resume="auto")
    with pytest.raises(ConfigError, match=r"journal.jsonl has 2 durable steps"), auto:
        pass
    assert not list((tmp_path / "nvme").iterdir())
    with durable_engine(tmp_path / "nvme", gated(), **step_log, resume="never"):
        pass  # a restart was requested explicitly


def test_run_in_use_cannot_be_resumed_again(tmp_path: Path, step_log: dict[str, Any]) -> None:
    del step_log["step_log"]
    auto: dict[str, Any] = {**step_log, "resume": "auto"}
    with durable_engine(tmp_path / "nvme", gated(), **auto) as engine:
        step(engine)
        second = durable_engine(tmp_path / "nvme", gated(), **auto)
        with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"), second:
            pass
    assert len(run_records(tmp_path / "nvme")) == 1


def trained_steps(raw: dict[str, Any], **how: Any) -> list[int]:
    return [facts.step for facts in train(raw, **how)[1].steps]


def test_start_from_checkpoint_replaces_durable_state(tmp_path: Path) -> None:
    """`auto` resumes the new state; a checkpoint that fails to load changes nothing."""
    raw = durable_settings(tmp_path)
    assert trained_steps(raw, stop_after=4) == [1, 2, 3, 4]
    before = [sorted((tmp_path / drive).iterdir()) for drive in DRIVES]
    root = tmp_path / "run" / "checkpoints"
    files = (p for p in (root / "step4").iterdir() if p.name != "manifest.json")
    with flipped(max(files, key=lambda p: p.stat().st_size)), pytest.raises(InfinityError):
        train(raw, resume=str(root / "step4"))
    assert [sorted((tmp_path / drive).iterdir()) for drive in DRIVES] == before
    assert trained_steps(raw, resume="auto", stop_after=1) == [5]
    assert trained_steps(raw, resume=str(root / "step2"), stop_after=1) == [3]
    assert find_tag(root, None) == "step2"
    for drive, previous in zip(DRIVES, before, strict=True):
        (state,) = (tmp_path / drive).iterdir()
        assert state not in previous
    assert trained_steps(raw, resume="auto") == [4, 5, 6]


def test_copied_run_from_checkpoint_keeps_original_state(tmp_path: Path) -> None:
    raw = durable_settings(tmp_path)
    train(raw, stop_after=4)
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "run", copy)
    copy_settings = {**raw, "run_dir": str(copy)}
    _, watcher = train(copy_settings, resume=str(copy / "checkpoints" / "step2"), stop_after=1)
    assert any("the former state stays" in note for note in watcher.notes)
    assert trained_steps(raw, resume="auto", stop_after=1) == [5]
    assert trained_steps(copy_settings, resume="auto", stop_after=1) == [4]


def test_moved_state_is_not_removed_by_original_run(tmp_path: Path) -> None:
    """A copy that continues with another number of ranks renames the state directories."""
    raw = durable_settings(tmp_path)
    train(raw, stop_after=4)
    moved = []
    for drive in DRIVES:
        (state,) = (tmp_path / drive).iterdir()
        moved.append(state.rename(state.with_name(f"{state.name}-1")))
    with pytest.raises(CheckpointError, match="but no state exists there"):
        train(raw, resume="auto")
    assert all(state.is_dir() for state in moved)


def test_auto_resume_with_missing_run_directory_refuses_to_restart(tmp_path: Path) -> None:
    raw = durable_settings(tmp_path)
    train(raw, stop_after=4)
    with moved_away(tmp_path / "run"):
        with pytest.raises(ConfigError, match="holds the state of a run in"):
            train(raw, resume="auto")
        shutil.rmtree(tmp_path / "run")
    assert trained_steps(raw, resume="auto") == [5, 6]

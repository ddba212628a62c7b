"""Tests of durable runs: resuming bitwise-equal from the last commit after any crash."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.durable import (
    PLACEMENTS,
    Entry,
    Gated,
    Recorder,
    State,
    copies,
    crashed,
    durable_engine,
    equal,
    gated,
    state_of,
    step,
    step_uncommitted,
    undisturbed,
)
from support.fake_accelerator import FakeAccelerator
from support.grids import diagonal
from support.internals import components
from support.small import batch, settings, small_model
from torch import nn

import infinity
from infinity import Engine
from infinity.checkpoint.commits import COMMIT_NAMES, SmallFile
from infinity.checkpoint.durable_runs import read_run
from infinity.errors import (
    CheckpointError,
    ConfigError,
    DoesNotFitError,
    EngineFailedError,
    InfinityWarning,
    MachineError,
    TransferError,
)
from infinity.storage.disk import STATE_NAME as STATE
from infinity.storage.disk import Disk
from infinity.storage.run_dir import remove_dead_runs
from infinity.types import Kind

STEPS = 5
TWO_DRIVES = {"weights": [2, 1], "block_size": 4096}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "all on disk": ("all on disk", {}),
    "in bf16": ("all on disk", {"precision": "bf16"}),
    "weights in RAM": ("weights in RAM", {}),
    "moments in RAM": ("moments in RAM", {}),
    "all in RAM, every third": ("all in RAM", {"commit_every": 3}),
    "moments in RAM, every second": ("moments in RAM", {"commit_every": 2}),
    "no checksums": ("all on disk", {"io": {"verify": False}}),
    "no checksums, moments in RAM": (
        "moments in RAM",
        {"io": {"verify": False}, "commit_every": 2},
    ),
    "two drives": ("all on disk", {"io": TWO_DRIVES}),
    "two drives, weights in RAM": ("weights in RAM", {"io": TWO_DRIVES}),
}


def paths_for(root: Path, overrides: dict[str, Any]) -> list[Path]:
    count = len(overrides.get("io", {}).get("weights", [1]))
    paths = [root / f"drive{index}" for index in range(count)]
    for path in paths:
        path.mkdir()
    return paths


def arguments(case: str) -> dict[str, Any]:
    placement, overrides = CASES[case]
    return {"placement": PLACEMENTS[placement], "commit_every": 1, **overrides}


def check_resumed(paths: list[Path], overrides: dict[str, Any], until: int | None = None) -> int:
    """Resume, check the state of its step and optionally train on; return the resumed step."""
    precision = overrides.get("precision", "fp32")
    with durable_engine(paths, gated(), **{"resume": "auto", **overrides}) as engine:
        found = engine.global_steps
        assert components(engine).resumed is not None
        assert equal(state_of(engine), undisturbed(found, precision))
        while until is not None and engine.global_steps < until:
            step(engine)
        if until is not None:
            assert equal(state_of(engine), undisturbed(until, precision))
    return found


# --- power loss ----------------------------------------------------------------------------------


def record(
    case: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Path], list[Entry]]:
    """Train with recorded disk writes; return the paths and the log of writes since commit 0."""
    overrides, recorder = arguments(case), Recorder(monkeypatch)
    (root / "run").mkdir()
    paths = paths_for(root / "run", overrides)
    with durable_engine(paths, gated(), **overrides) as engine:
        engine.settle()
        shutil.copytree(root / "run", root / "base")
        recorder.active = True
        for _ in range(STEPS):
            step(engine)
            recorder.mark(f"step {engine.global_steps}")
        engine.settle()
        recorder.active = False
    monkeypatch.undo()
    return paths, recorder.log


def commits_before(log: list[Entry], cut: int) -> int:
    """Return how many commits were written and synced to both files before the cut."""
    synced = [e for e in log[:cut] if e.what == "sync" and e.path.endswith(COMMIT_NAMES[1])]
    return len(synced)


@pytest.mark.parametrize("case", CASES)
def test_power_loss_resumes_from_last_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    check_power_loss(case, tmp_path, monkeypatch, 6)


@pytest.mark.big
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("case", CASES)
def test_power_loss_resumes_from_last_commit_many_cuts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    check_power_loss(case, tmp_path, monkeypatch, 150)


def check_power_loss(case: str, root: Path, monkeypatch: pytest.MonkeyPatch, cuts: int) -> None:
    overrides, commit_every = arguments(case), arguments(case)["commit_every"]
    paths, log = record(case, root, monkeypatch)
    assert commits_before(log, len(log)) == STEPS // commit_every
    rng = random.Random(case)
    inside = [i + 1 for i, e in enumerate(log) if e.what == "write" and not e.path.endswith(STATE)]
    seen = set()
    for number in range(cuts):
        cut = rng.randrange(len(log) + 1) if number else len(log)
        if number % 2:  # inside a commit: record written, not yet synced
            cut = rng.choice(inside)
        originals = [root / "base" / path.name for path in paths]
        target = root / f"cut{number}"
        target.mkdir()
        copied_paths, files = copies(originals, target)
        files_by_path = {
            str(root / "run" / Path(k).relative_to(root / "base")): v for k, v in files.items()
        }
        crashed(log, cut, files_by_path, rng)
        found = check_resumed(copied_paths, overrides, until=STEPS if number % 4 == 0 else None)
        at_least = commits_before(log, cut) * commit_every
        assert at_least <= found <= at_least + commit_every, (case, cut)
        assert found % commit_every == 0
        seen.add(found)
        shutil.rmtree(target)
    assert len(seen) > 1


# --- resuming ------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_closed_run_resumes_from_last_step(tmp_path: Path, case: str) -> None:
    """Resumed twice, once from a step at which no commit was due."""
    overrides = arguments(case)
    paths = paths_for(tmp_path, overrides)
    with durable_engine(paths, gated(), **overrides) as engine:
        step(engine)
        step(engine)
    assert check_resumed(paths, overrides, until=4) == 2
    assert check_resumed(paths, overrides, until=STEPS) == 4
    for path in paths:
        assert remove_dead_runs(path) == []
        assert len(list(path.iterdir())) == 1


@pytest.mark.parametrize(("placement", "seed"), diagonal([*PLACEMENTS], range(2)))
def test_resume_with_separate_device_memory(tmp_path: Path, placement: str, seed: int) -> None:
    """State placed on the device is copied out for a commit, and back on resume."""
    overrides = {"nvme_path": str(tmp_path), "durable": True, "commit_every": 2, "resume": "auto"}
    expected_step = 0
    for _ in range(2):
        fake = FakeAccelerator(seed)
        config = settings(tmp_path, PLACEMENTS[placement], **overrides)
        engine, *_ = infinity.initialize(gated(), config, device=fake)
        with engine:
            assert engine.global_steps == expected_step
            assert equal(state_of(engine), undisturbed(expected_step))
            for _ in range(2):
                batch_step(engine)
            expected_step += 2
            assert equal(state_of(engine), undisturbed(expected_step))
        assert not fake.violations


def batch_step(engine: Engine) -> None:
    loss = engine(batch(engine.global_steps, engine.device))
    engine.backward(loss)
    engine.step()


def test_durable_moves_same_bytes_as_non_durable(tmp_path: Path) -> None:
    """With all state on disk, no step moves more bytes; the disk holds the state twice."""
    moved_bytes = {}
    for durable in (False, True):
        path = tmp_path / str(durable)
        path.mkdir()
        with durable_engine(
            path, gated(), placement=PLACEMENTS["all on disk"], durable=durable
        ) as engine:
            steps = []
            for _ in range(4):
                before = engine.counters()
                step(engine)
                engine.settle()
                steps.append({k: v - before[k] for k, v in engine.counters().items()})
            moved_bytes[durable] = steps
            disk = engine.plan.memory["disk"]
            if durable:
                assert disk["durable"] == disk["weights"] + disk["state"]
                assert "every step is committed; without more bytes" in engine.plan.describe()
                assert engine.drives()[str(path)]["nbytes"] == sum(disk.values())
    assert moved_bytes[False] == moved_bytes[True]


@pytest.mark.parametrize("placement", ["weights in RAM", "all in RAM"])
def test_predicted_disk_bytes_match_with_commits(tmp_path: Path, placement: str) -> None:
    with durable_engine(
        tmp_path, small_model(), placement=PLACEMENTS[placement], commit_every=2
    ) as engine:
        for _ in range(2):
            step(engine)
        components(engine).optimizer_pass.finish()
        before = engine.counters()
        for _ in range(4):
            step(engine)
        components(engine).optimizer_pass.finish()
        written = engine.counters()["disk_write"] - before["disk_write"]
        assert written == 4 * engine.forecast()["disk_write"]


def test_commit_every_auto_depends_on_placement(tmp_path: Path) -> None:
    auto: dict[str, Any] = {"commit_every": "auto"}
    with durable_engine(
        tmp_path, small_model(), placement=PLACEMENTS["all on disk"], **auto
    ) as engine:
        assert engine.plan.durable_every == 1
    with durable_engine(
        tmp_path, small_model(), placement=PLACEMENTS["all in RAM"], **auto
    ) as engine:
        every = engine.plan.durable_every
        assert every > 1
        assert f"1 step in {every} is committed, at most {every} are lost" in engine.plan.describe()


# --- edits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("placement", "precision"), diagonal([*PLACEMENTS], ["fp32", "bf16"]))
def test_edit_is_part_of_next_commit(tmp_path: Path, placement: str, precision: str) -> None:
    """Trained and frozen parameters are edited; a crash before the commit undoes the edit."""
    overrides: dict[str, Any] = {
        "placement": PLACEMENTS[placement],
        "precision": precision,
        "commit_every": 1,
    }
    before, edited, after = undisturbed_edit(precision)
    assert not equal(before, edited)
    with durable_engine(tmp_path, gated(), **overrides) as engine:
        step(engine)
        assert equal(state_of(engine), before)
        edit(engine)
        assert equal(state_of(engine), edited)
        copy = tmp_path / "killed"
        shutil.copytree(
            next(tmp_path.glob("infinity-run-*")), copy / "infinity-run-1-0123456789abcdef"
        )
        step(engine)
        assert equal(state_of(engine), after)
    with durable_engine(copy, gated(), **overrides, resume="auto") as engine:
        assert equal(state_of(engine), before)
        edit(engine)
        assert equal(state_of(engine), edited)
        edit(engine)  # in place this time
        assert equal(state_of(engine), edited)
        step(engine)
        assert equal(state_of(engine), after)
    shutil.rmtree(copy)
    with durable_engine(tmp_path, gated(), **overrides, resume="auto") as engine:
        assert engine.global_steps == 2
        assert equal(state_of(engine), after)


def undisturbed_edit(precision: str) -> tuple[State, State, State]:
    """Return the states before and after an edit and after one more step, without a disk."""
    config = settings(Path("unused"), PLACEMENTS["all in RAM"], precision=precision)
    del config["nvme_path"]
    with infinity.initialize(gated(), config)[0] as engine:
        step(engine)
        before = state_of(engine)
        edit(engine)
        edited = state_of(engine)
        step(engine)
        return before, edited, state_of(engine)


def edit(engine: Engine) -> None:
    model = engine.module
    assert isinstance(model, Gated)
    edited = [model.fixed, model.inner.blocks[0].up, model.mixed]
    with engine.materialized(edited), torch.no_grad():
        model.fixed.weight.fill_(0.25)
        model.mixed[0].bias.fill_(2.0)
        model.mixed[1].bias.fill_(1.5)
        model.inner.blocks[0].up.weight.fill_(0.125)


def test_close_does_not_commit_edits_without_document(tmp_path: Path) -> None:
    with durable_engine(
        tmp_path, gated(), placement=PLACEMENTS["all in RAM"], commit_every=4
    ) as engine:
        step(engine)
        edit(engine)
    assert check_resumed([tmp_path], {"placement": PLACEMENTS["all in RAM"]}) == 0


def test_edit_committed_explicitly_is_resumed(tmp_path: Path) -> None:
    """As after loading a checkpoint."""
    with durable_engine(tmp_path, gated(), placement=PLACEMENTS["moments in RAM"]) as engine:
        step(engine)
        edit(engine)
        durability = components(engine).durability
        assert durability is not None
        durability.commit(engine._checkpoints.document(), 7)
        edited = state_of(engine)
        step_uncommitted(engine)
    (directory,) = tmp_path.iterdir()
    assert read_run(directory).record.step == 7
    with durable_engine(tmp_path, gated(), resume="auto") as engine:
        assert engine.global_steps == 1
        assert equal(state_of(engine), edited)


# --- choice of the run to resume -----------------------------------------------------------------


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """Return the directory of a durable run of one step."""
    with durable_engine(tmp_path, gated(), placement=PLACEMENTS["moments in RAM"]) as engine:
        step(engine)
    (directory,) = tmp_path.iterdir()
    return directory


def start_run(path: Path, model: nn.Module | None = None, **overrides: Any) -> Engine:
    config = settings(path, PLACEMENTS["moments in RAM"], **{"durable": True, **overrides})
    return infinity.initialize(model or gated(), config)[0]


def test_new_run_warns_of_existing_durable_run(tmp_path: Path, finished: Path) -> None:
    with pytest.warns(InfinityWarning, match="resume: auto") as caught:
        start_run(tmp_path, durable=False).close()
    assert any(str(finished) in str(w.message) and "update 1" in str(w.message) for w in caught)
    assert list(tmp_path.iterdir()) == [finished]


def test_resume_from_named_directory(tmp_path: Path, finished: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with start_run(other, resume=str(finished)) as engine:
        assert components(engine).resumed
        assert str(finished) in engine.plan.describe()
        with pytest.raises(MachineError, match="in use by another process"):
            start_run(other, resume=str(finished))
    assert not list(other.iterdir())


def test_resume_keeps_placement_and_chunk_size(tmp_path: Path, finished: Path) -> None:
    overrides: dict[str, Any] = {
        "placement": PLACEMENTS["all in RAM"],
        "chunk_size": 4096,
        "resume": "auto",
    }
    with durable_engine(tmp_path, gated(), **overrides) as engine:
        assert engine.plan.chunk_elements == 2048
        assert {h.weight.value for h in engine.plan.placements} == {"disk"}
        assert {h.state.value for h in engine.plan.placements} == {"host"}


def test_resume_with_smaller_budget_is_refused(tmp_path: Path, finished: Path) -> None:
    with pytest.raises(DoesNotFitError, match=r"durable run in .* does not fit the budgets"):
        start_run(tmp_path, resume="auto", budget={"disk": "4KiB"})


def test_resume_auto_with_several_runs_is_refused(tmp_path: Path, finished: Path) -> None:
    with durable_engine(tmp_path, gated(), placement=PLACEMENTS["moments in RAM"]):
        pass
    with pytest.raises(ConfigError, match="2 durable runs fit") as caught:
        start_run(tmp_path, resume="auto")
    for directory, at in zip(
        (finished, *(set(tmp_path.iterdir()) - {finished})), (1, 0), strict=True
    ):
        assert f"{directory} (update {at}, 20" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"precision": "bf16"}, "precision is 'fp32' in the stored run, 'bf16' in this one"),
        (
            {"optimizer": {"type": "Lion", "lr": 1e-3}},
            "optimizer is 'AdamW' in the stored run, 'Lion' in this one",
        ),
        ({"optimizer": {"moments": "bf16"}}, "moments"),
        ({"gradient_accumulation_steps": 2, "precision": "bf16"}, "precision"),
    ],
)
def test_resume_with_changed_settings_is_refused(
    tmp_path: Path, finished: Path, change: dict[str, Any], why: str
) -> None:
    for resume in (str(finished), "auto"):
        with pytest.raises(ConfigError, match=why):
            start_run(tmp_path, resume=resume, **change)


def test_resume_auto_ignores_run_of_other_model(tmp_path: Path, finished: Path) -> None:
    why = "'blocks.0.down.bias' is in the model, but not in the stored run; .* more"
    with pytest.raises(ConfigError, match=why):
        start_run(tmp_path, small_model(), resume=str(finished))
    with pytest.warns(InfinityWarning, match=why):
        engine = start_run(tmp_path, small_model(), resume="auto")
    assert components(engine).resumed is None
    engine.close()


def test_resume_with_missing_drive_names_it(tmp_path: Path) -> None:
    overrides = arguments("two drives")
    paths = paths_for(tmp_path, overrides)
    with durable_engine(paths, gated(), **overrides) as engine:
        step(engine)
    (second,) = paths[1].iterdir()
    moved = second.rename(tmp_path / second.name)
    (first,) = paths[0].iterdir()
    with pytest.raises(CheckpointError, match=f"missing: {second}"):
        check_resumed(paths, {**overrides, "resume": str(first)})
    with pytest.raises(CheckpointError, match=r"not a durable run"):
        check_resumed(paths, {**overrides, "resume": str(paths[0])})
    moved.rename(paths[0] / second.name)  # as if mounted elsewhere: found by the run in its record
    with durable_engine(
        paths, gated(), **{**overrides, "resume": str(paths[0] / second.name)}
    ) as engine:
        assert engine.global_steps == 1
        assert equal(state_of(engine), undisturbed(1))


# --- damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["plan.json", "state.bin"])
def test_resume_with_damaged_files_is_refused(tmp_path: Path, finished: Path, what: str) -> None:
    path = finished / what
    if what == "plan.json":
        plan = json.loads(path.read_text())
        plan["chunk_elements"] = 4096
        path.write_text(json.dumps(plan))
    else:
        path.write_bytes(path.read_bytes()[:-4096])
    with pytest.raises(CheckpointError, match=r"damaged|truncated"):
        start_run(tmp_path, resume=str(finished))
    assert path.exists()


def test_damage_between_runs_is_detected(tmp_path: Path) -> None:
    """Checksums are stored with the commit; without io.verify they are computed on resume."""
    overrides: dict[str, Any] = {"placement": PLACEMENTS["all on disk"]}
    with durable_engine(tmp_path, gated(), **overrides) as engine:
        step(engine)
    without_checksums = {**overrides, "io": {"verify": False}}
    with durable_engine(tmp_path, gated(), **without_checksums, resume="auto") as engine:
        step(engine)
    assert check_resumed([tmp_path], {**overrides}, until=3) == 2
    (directory,) = tmp_path.iterdir()
    state = bytearray((directory / "state.bin").read_bytes())
    assert read_run(directory).record.checksums
    with durable_engine(tmp_path, gated(), **overrides, resume="auto") as engine:
        extent = components(engine).store.on_disk(
            0, Kind.WEIGHT, 0, components(engine).store.units[0].copy.active
        )
    state[extent.offset] ^= 1
    (directory / "state.bin").write_bytes(state)
    resumed = durable_engine(tmp_path, gated(), **overrides, resume="auto")
    with resumed as engine, pytest.raises(TransferError, match="embedding"):
        state_of(engine)


def test_failed_commit_raises_and_loses_only_that_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with durable_engine(tmp_path, gated()) as engine:
        step(engine)
        engine.settle()

        def fail(file: SmallFile) -> None:
            raise MachineError("the drive is gone")

        monkeypatch.setattr(SmallFile, "sync", fail)
        step(engine)
        with pytest.raises(EngineFailedError, match="the drive is gone"):
            engine.settle()
    monkeypatch.undo()
    assert check_resumed([tmp_path], {}) in (1, 2)  # the record may have reached the disk


def test_failed_start_removes_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(disk: Disk) -> None:
        raise MachineError("no sync")

    monkeypatch.setattr(Disk, "sync", fail)
    with pytest.raises(MachineError, match="no sync"):
        start_run(tmp_path)
    assert not list(tmp_path.iterdir())


def test_step_without_document_is_not_committed(tmp_path: Path) -> None:
    with durable_engine(tmp_path, gated()) as engine:
        step(engine)
        step_uncommitted(engine)
        step_uncommitted(engine)
    assert check_resumed([tmp_path], {}, until=STEPS) == 1

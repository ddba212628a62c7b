"""Tests of runs on several paths that die while their directories are marked durable."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import forked
from support.durable import PLACEMENTS, durable_engine, gated, step
from support.internals import components

import infinity
from infinity.errors import InfinityWarning, MachineError
from infinity.storage.run_dir import Scratch, remove_dead_runs

IO = {"weights": [2, 1, 1], "block_size": 4096}


def paths_of(root: Path) -> list[Path]:
    return [root / f"d{number}" for number in range(3)]


def die_at_each_call(root: Path) -> tuple[int, int]:
    """Start runs in `root/0`, `root/1`, ..., each killed one system call of the marking later.

    Returns:
        The number of runs killed, and the exit status of the first one that was not.
    """
    torch.set_num_threads(1)
    for number in range(100):
        for path in paths_of(root / str(number)):
            path.mkdir(parents=True)
        child = os.fork()
        if child == 0:
            start_and_die(paths_of(root / str(number)), number)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            return number, status
    raise AssertionError("a marking of more than 100 calls")


def start_and_die(paths: list[Path], after: int) -> None:
    remaining_calls = after

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def call_or_die(*arguments: Any, **options: Any) -> Any:
            nonlocal remaining_calls
            if remaining_calls == 0:
                os.kill(os.getpid(), 9)
            remaining_calls -= 1
            return call(*arguments, **options)

        return call_or_die

    announce = Scratch.announce

    def start_counting(primary: Scratch, *members: Any) -> None:
        for name in ("open", "fsync", "rename"):
            setattr(os, name, counted(getattr(os, name)))
        announce(primary, *members)

    Scratch.announce = start_counting  # type: ignore[method-assign]
    try:
        with durable_engine(paths, gated(), placement=PLACEMENTS["all on disk"], io=IO):
            os._exit(0)
    except BaseException:
        os._exit(1)


@pytest.fixture(scope="module")
def killed_starts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """Root of the directories of the killed starts, and their number."""
    root = tmp_path_factory.mktemp("marking")
    count, status = forked.call(die_at_each_call, root)
    assert status == 0  # the last one was not killed, and started
    # 4 records: written, synced, renamed, 2 directories synced; 3 marks; the watched files.
    assert count == 4 * 7 + 3 * 3 + 7
    return root, count


def is_durable(directory: Path) -> bool:
    return bool(json.loads((directory / "run.json").read_text())["durable"])


@pytest.mark.parametrize("used", [[0, 1, 2], [0], [1], [2, 1]], ids=str)
def test_killed_marking_is_cleaned_up_or_complete(
    tmp_path: Path, killed_starts: tuple[Path, int], used: list[int]
) -> None:
    """The next run may use any of the paths; the others are cleaned up by their next user."""
    root, count = killed_starts
    outcomes = set()
    for number in range(count + 1):
        folder = root / f"{number}"
        copy = tmp_path / "copy"
        folder.rename(copy)  # records hold absolute paths, so the copy must be at the original path
        shutil.copytree(copy, folder)
        try:
            outcomes.add(check_survival(paths_of(folder), used))
        finally:
            shutil.rmtree(folder)
            copy.rename(folder)
    assert outcomes == {"removed", "complete"}


def check_survival(paths: list[Path], used: list[int]) -> str:
    (first,) = paths[0].iterdir()
    assert all(len(list(path.iterdir())) == 1 for path in paths)
    if is_durable(first):
        for path in paths:
            assert remove_dead_runs(path) == []
        with durable_engine(paths, gated(), resume="auto", io=IO) as engine:
            assert engine.resumed is False or engine.global_steps == 0
            assert components(engine).resumed is not None
            step(engine)
        return "complete"
    announced = "members" in json.loads((first / "run.json").read_text())
    for index in used:
        remove_dead_runs(paths[index])
    remaining = [index for index, path in enumerate(paths) if list(path.iterdir())]
    # An announced run removes all its members; others are separate dead runs.
    assert not set(remaining) & set(used)
    if announced and 0 in used:
        assert remaining == []
    for path in paths:
        remove_dead_runs(path)
        assert list(path.iterdir()) == []
    return "removed"


def test_failed_marking_leaves_no_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = Scratch.keep

    def fail(self: Scratch, facts: Any) -> None:
        if facts["index"] == 0:
            raise MachineError("the drive is gone")
        keep(self, facts)

    for path in paths_of(tmp_path):
        path.mkdir()
    monkeypatch.setattr(Scratch, "keep", fail)
    with (
        pytest.raises(MachineError, match="the drive is gone"),
        durable_engine(paths_of(tmp_path), gated(), io=IO),
    ):
        pass
    assert [list(path.iterdir()) for path in paths_of(tmp_path)] == [[], [], []]


def test_run_being_marked_is_not_removed(tmp_path: Path) -> None:
    for path in paths_of(tmp_path):
        path.mkdir()
    first, second, third = (Scratch.create(path) for path in paths_of(tmp_path))
    first.announce("r", [second.directory, third.directory])
    second.keep({"run": "r", "primary": str(first.directory), "index": 1})
    for path in paths_of(tmp_path):
        assert remove_dead_runs(path) == []
    second.durable = False
    for scratch in (first, second, third):
        scratch.remove()


def test_cleanup_removes_only_members_of_the_run(tmp_path: Path) -> None:
    """Records are untrusted: they may list directories of other runs or of no run."""
    for path in paths_of(tmp_path):
        path.mkdir()
    first, second, third = (Scratch.create(path) for path in paths_of(tmp_path))
    unrelated = tmp_path / "unrelated"
    unrelated.mkdir()
    (unrelated / "lock").touch()
    first.announce("r", [second.directory, third.directory, unrelated])
    second.keep({"run": "other", "primary": str(first.directory), "index": 1})
    third.keep({"run": "r", "primary": str(first.directory), "index": 2})
    for scratch in (first, second, third):
        scratch._lock.close()
    remove_dead_runs(paths_of(tmp_path)[0])
    assert not first.directory.exists()
    assert not third.directory.exists()
    assert second.directory.exists()
    assert unrelated.exists()


def test_member_without_primary_directory_warns(tmp_path: Path) -> None:
    paths = paths_of(tmp_path)
    for path in paths:
        path.mkdir()
    with durable_engine(paths, gated(), io=IO):
        pass
    (first,) = paths[0].iterdir()
    shutil.rmtree(first)
    config = {"nvme_path": [str(path) for path in paths], "precision": "fp32", "io": IO}
    config["placement"] = PLACEMENTS["all on disk"]
    with pytest.warns(
        InfinityWarning, match=f"belongs to a durable run whose first directory, {first}"
    ):
        infinity.initialize(gated(), config)[0].close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert sum(len(list(path.iterdir())) for path in paths) == 2

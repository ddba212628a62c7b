"""Tests of `StepLog`: order, dropped records, disk errors and forked children."""

from __future__ import annotations

import json
import os
import signal
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.forked import HANG_S
from support.waiting import wait_until

from infinity.errors import MachineError
from infinity.profiling.step_log import StepLog


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def step_log_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "step-log" in thread.name]


def stall(monkeypatch: pytest.MonkeyPatch, step_log: StepLog) -> threading.Event:
    """Make the disk of `step_log` hang until the returned event is set."""
    import asyncio

    released, hanging, append = threading.Event(), threading.Event(), step_log._append

    async def slow(lines: list[str]) -> None:
        hanging.set()
        while not released.is_set():
            await asyncio.sleep(0.005)
        await append(lines)

    monkeypatch.setattr(step_log, "_append", slow)
    step_log.write({"first": True})
    assert hanging.wait(60)
    return released


def test_close_writes_every_record_in_order(tmp_path: Path) -> None:
    path = tmp_path / "made" / "here" / "run.jsonl"
    threads = set(threading.enumerate())
    with closing(StepLog(path)) as step_log:
        assert step_log_threads()
        for step in range(3000):
            step_log.write({"step": step})
    assert lines_of(path) == [{"step": step} for step in range(3000)]
    assert step_log.num_dropped == 0
    assert not step_log_threads()
    assert set(threading.enumerate()) <= threads  # worker threads of the event loop ended too


def test_relative_path_is_resolved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    step_log = StepLog("steps.jsonl")
    step_log.write({"step": 1})
    monkeypatch.chdir("other")
    step_log.write({"step": 2})
    step_log.close()
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == 2


def test_second_step_log_appends(tmp_path: Path) -> None:
    for step in range(2):
        with closing(StepLog(tmp_path / "run.jsonl")) as step_log:
            step_log.write({"step": step})
    assert lines_of(tmp_path / "run.jsonl") == [{"step": 0}, {"step": 1}]


def test_write_serializes_record_at_call(tmp_path: Path) -> None:
    record = {"loss": float("nan"), "path": Path("/x"), "more": [float("-inf"), {"a": 1}]}
    with closing(StepLog(tmp_path / "run.jsonl")) as step_log:
        step_log.write(record)
        record["loss"] = 3.0
    assert lines_of(tmp_path / "run.jsonl") == [
        {"loss": "nan", "path": "/x", "more": ["-inf", {"a": 1}]}
    ]


def test_records_are_flushed_without_close(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with closing(StepLog(path)) as step_log:
        step_log.write({"step": 1})
        assert wait_until(lambda: path.read_text(encoding="utf-8"))
        assert lines_of(path) == [{"step": 1}]


def test_full_queue_drops_and_counts_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step_log = StepLog(tmp_path / "run.jsonl", queue_length=10)
    released = stall(monkeypatch, step_log)
    for step in range(25):
        step_log.write({"step": step})
    assert step_log.num_dropped == 15
    released.set()
    step_log.close()
    assert lines_of(tmp_path / "run.jsonl") == [
        {"first": True},
        *({"step": step} for step in range(10)),
        {"event": "dropped", "count": 15},
    ]


def test_close_times_out_on_hanging_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step_log = StepLog(tmp_path / "run.jsonl")
    released = stall(monkeypatch, step_log)
    step_log.write({"step": 1})
    joined: list[float] = []
    join = step_log._thread.join
    with monkeypatch.context() as patch:
        patch.setattr(step_log._thread, "join", lambda limit: (joined.append(limit), join(limit)))
        step_log.close(timeout_s=0.2)
    assert joined == [0.2]  # close() returned although the disk hangs
    assert not released.is_set()
    assert step_log.num_dropped == 2
    released.set()
    step_log._thread.join(HANG_S)


def test_disk_error_is_stored_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "d").mkdir()
    step_log = StepLog(tmp_path / "d" / "run.jsonl")
    (tmp_path / "d" / "run.jsonl").unlink()
    (tmp_path / "d").rmdir()
    step_log.write({"step": 1})
    step_log.close()
    assert isinstance(step_log.failure, FileNotFoundError)
    assert step_log.num_dropped == 1


def test_write_after_close_does_nothing(tmp_path: Path) -> None:
    step_log = StepLog(tmp_path / "run.jsonl")
    step_log.close()
    step_log.close()
    step_log.write({"step": 1})
    assert lines_of(tmp_path / "run.jsonl") == []


def test_unopenable_path_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "run.jsonl"):
        with pytest.raises(MachineError, match="cannot be opened"):
            StepLog(path)
    assert not step_log_threads()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_writes_nothing(tmp_path: Path) -> None:
    held = threading.Lock()
    held.acquire()
    with closing(StepLog(tmp_path / "run.jsonl")) as step_log:
        # The writer thread may hold the lock during the fork; the child could never acquire it.
        pid = os.fork()
        if pid == 0:
            code = 1
            signal.alarm(HANG_S)
            try:
                step_log._lock = held
                step_log.write({"child": True})
                step_log.close(timeout_s=30)
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
        step_log.write({"parent": True})
    assert lines_of(tmp_path / "run.jsonl") == [{"parent": True}]

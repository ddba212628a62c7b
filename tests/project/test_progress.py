"""Tests of the progress plugin, which weights test files by their recorded seconds."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import progress
from support.progress import Progress


def report_of(file: str, when: str = "teardown") -> Any:
    return SimpleNamespace(nodeid=f"{file}::test", when=when, duration=0.1, outcome="passed",
                           passed=True, failed=False, skipped=False)  # fmt: skip


def make_plugin(
    path: Path, monkeypatch: pytest.MonkeyPatch, *, keep: bool = False
) -> tuple[Any, Any]:
    """Return a plugin and the lines that it prints."""
    lines: list[str] = []
    reporter = SimpleNamespace(write_line=lines.append)
    config = SimpleNamespace(
        getoption=lambda name: keep,
        get_verbosity=lambda: 0,
        pluginmanager=SimpleNamespace(get_plugin=lambda name: reporter),
    )
    monkeypatch.setattr(progress, "KEPT", path)
    return Progress(config), lines  # type: ignore[arg-type]


def test_progress_counts_seconds_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path := tmp_path / "seconds.json").write_text(json.dumps({"slow.py": 90.0, "quick.py": 10.0}))
    plugin, lines = make_plugin(path, monkeypatch)
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock.now)
    ids = ["slow.py::a", "slow.py::b"] + [f"quick.py::{i}" for i in range(600)]
    assert plugin.pytest_report_teststatus(report_of("slow.py", "call")) is None, "few tests"
    for _ in range(2):  # two workers report the same collection
        plugin.pytest_xdist_node_collection_finished(ids=ids)
    clock.now = 190.0
    plugin.pytest_runtest_logreport(report_of("slow.py", "call"))
    assert lines == []
    plugin.pytest_runtest_logreport(report_of("slow.py"))
    assert lines == [" 45% after 1 min 30 s, about 1 min 50 s left"]
    for _ in range(299):
        plugin.pytest_runtest_logreport(report_of("quick.py"))
    assert len(lines) == 1, "not yet at the next step"
    plugin.pytest_runtest_logreport(report_of("quick.py"))
    assert lines[1:] == [" 50% after 1 min 30 s, about 1 min 30 s left"]
    assert plugin.pytest_report_teststatus(report_of("slow.py", "call")) == ("passed", "", "")
    failed = SimpleNamespace(**vars(report_of("slow.py", "call")) | {"failed": True})
    assert plugin.pytest_report_teststatus(failed) is None


def test_seconds_are_written_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "seconds.json"
    for keep in (False, True):
        plugin, _ = make_plugin(path, monkeypatch, keep=keep)
        for when in ("setup", "call", "teardown"):
            plugin.pytest_runtest_logreport(report_of("slow.py", when))
        plugin.pytest_sessionfinish()
        assert path.exists() == keep
    assert json.loads(path.read_text()) == {"slow.py": 0.3}

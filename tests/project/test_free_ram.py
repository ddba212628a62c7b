"""Tests of engines do not depend on the RAM that other programs leave."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import forked, free_ram

from infinity.plan import machine

GIB = 1 << 30


def seen_by_a_child(folder: str) -> None:
    """Write who reads the free RAM of a forked process."""
    (Path(folder) / "reader").write_text(machine.read_meminfo.__module__)


def test_other_programs_take_no_ram_from_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crowded = {"MemTotal": 24 * GIB, "MemAvailable": GIB // 8}
    monkeypatch.setattr(free_ram, "_read", lambda root: dict(crowded))
    monkeypatch.setattr(machine, "_memory_limits", lambda root: [])
    assert machine.read_machine().host_available_bytes == free_ram.LEAST_BYTES
    assert machine.memory_room() == (24 * GIB, free_ram.LEAST_BYTES)
    assert machine.read_meminfo(tmp_path) == crowded  # a machine that a test describes


def test_processes_of_tests_see_the_same(tmp_path: Path) -> None:
    child = forked.start(seen_by_a_child, str(tmp_path))
    child.join(forked.HANG_S)
    assert (tmp_path / "reader").read_text() == "support.free_ram"

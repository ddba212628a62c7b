"""Tests that engine tests do not depend on the RAM used by other programs."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import forked, free_ram

from infinity.plan import machine

GIB = 1 << 30


def test_free_ram_seen_by_tests_has_a_minimum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crowded = {"MemTotal": 24 * GIB, "MemAvailable": GIB // 8}
    monkeypatch.setattr(free_ram, "_read", lambda root: dict(crowded))
    monkeypatch.setattr(machine, "_memory_limits", lambda root: [])
    assert machine.read_machine().host_available_bytes == free_ram.LEAST_BYTES
    assert machine.memory_headroom() == (24 * GIB, free_ram.LEAST_BYTES)
    assert machine.read_meminfo(tmp_path) == crowded  # a machine described by a test is not changed


def test_free_ram_patch_applies_in_child_processes() -> None:
    """The child does not import this file, which would import the patch."""
    reader = "__import__('infinity.plan.machine').plan.machine.read_meminfo.__module__"
    assert forked.call(eval, reader) == "support.free_ram"

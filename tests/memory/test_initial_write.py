"""Tests of the peak memory of initializing a model larger than the planned RAM."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.forked import call
from support.init_alone import make_engine_alone
from support.process_memory import SMALL_BYTES, needs_peak

from infinity.model.deferred_init import KEEP_BYTES

pytestmark = needs_peak


def grown(path: Path, way: str) -> dict[str, int]:
    found: dict[str, int] = call(make_engine_alone, path, way)
    assert not list(path.iterdir())
    return found


@pytest.mark.parametrize("way", ["init", "meta", "read"])
def test_initialize_peak_within_plan(tmp_path: Path, way: str) -> None:
    """The peak is the planned memory plus the operands of one operation of an initializer."""
    found = grown(tmp_path, way)
    more = 4 * found["largest"] + SMALL_BYTES  # truncated initialization compares and redraws
    assert found["built"] < (KEEP_BYTES + more if way == "init" else SMALL_BYTES)
    assert found["initialised"] < found["planned"] + more
    assert found["model"] > 2 * (found["planned"] + more), "or nothing is shown"


def test_measurement_includes_model_in_ram(tmp_path: Path) -> None:
    found = grown(tmp_path, "real")
    assert found["built"] > 0.9 * found["model"]

"""Tests of the peak memory of initializing a model larger than the planned RAM."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.forked import call
from support.init_alone import measure_initialization
from support.process_memory import SMALL_BYTES, needs_peak

from infinity.model.deferred_init import KEEP_BYTES

pytestmark = needs_peak


def memory_growth(path: Path, mode: str) -> dict[str, int]:
    found: dict[str, int] = call(measure_initialization, path, mode)
    assert not list(path.iterdir())
    return found


@pytest.mark.parametrize("mode", ["init", "meta", "read"])
def test_initialize_peak_within_plan(tmp_path: Path, mode: str) -> None:
    """The peak is the planned memory plus the operands of one operation of an initializer."""
    found = memory_growth(tmp_path, mode)
    margin = 4 * found["largest"] + SMALL_BYTES  # truncated initialization compares and redraws
    assert found["built"] < (KEEP_BYTES + margin if mode == "init" else SMALL_BYTES)
    assert found["initialized"] < found["planned"] + margin
    assert found["model"] > 2 * (found["planned"] + margin), "the model must be much larger"


def test_measurement_includes_model_in_ram(tmp_path: Path) -> None:
    found = memory_growth(tmp_path, "real")
    assert found["built"] > 0.9 * found["model"]

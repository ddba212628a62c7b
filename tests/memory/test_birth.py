"""A model much larger than what the plan holds in RAM is built and born in little RAM."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.born_alone import give_birth
from support.forked import call

# Shadows and free memory that Init keeps for a while, as `lazy_tensor.py` says.
KEPT_BY_INIT = 96 << 20
# Pages of libraries count, too; those a forked process meets for the first time are not few.
SLACK = 32 << 20


def grown(path: Path, way: str) -> dict[str, int]:
    found: dict[str, int] = call(give_birth, path, way)
    assert not list(path.iterdir())
    return found


@pytest.mark.parametrize("way", ["init", "meta", "read"])
def test_a_model_larger_than_ram_is_born(tmp_path: Path, way: str) -> None:
    """At birth: what the plan reserves, the largest tensor, and what its initialiser needs."""
    found = grown(tmp_path, way)
    working = 4 * found["largest"]  # truncation compares and draws again
    assert found["built"] < (KEPT_BY_INIT + working if way == "init" else 0) + SLACK
    assert found["born"] < found["planned"] + working + SLACK
    assert found["model"] > 2 * (found["planned"] + working + SLACK), "or nothing is shown"


def test_the_measurement_sees_a_model_in_ram(tmp_path: Path) -> None:
    found = grown(tmp_path, "real")
    assert found["built"] > 0.9 * found["model"]

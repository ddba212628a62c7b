"""Fixtures: I/O engines of every back end that this machine supports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.native_io import BLOCK

from infinity import _aio
from infinity._aio import Engine

BACKENDS = ["io_uring", "threads"]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    result = _aio.probe(str(tmp_path))[request.param]
    if not result["ok"]:
        pytest.skip(f"{request.param}: {result['reason']}")
    return str(request.param)


@pytest.fixture
def engine(backend: str) -> Iterator[Engine]:
    engine = Engine(backend=backend, block_size=BLOCK, queue_depth=4)
    assert engine.backend == backend
    yield engine
    engine.close()

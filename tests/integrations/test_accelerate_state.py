"""Tests of accelerate's number of processes against the ranks of an engine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.ranks import on_ranks
from support.small import settings, small_model

from infinity.distributed.context import DistContext
from infinity.errors import ConfigError
from infinity.integrations import deepspeed
from infinity.integrations.deepspeed import processes

hf = pytest.importorskip("transformers")
state = pytest.importorskip("accelerate.state")

from support.hf_runs import trainer_for  # noqa: E402

from infinity.integrations.huggingface.settings import TrainingArguments  # noqa: E402
from infinity.integrations.huggingface.trainer import InfinityTrainer  # noqa: E402


@pytest.fixture(autouse=True)
def no_state() -> Iterator[None]:
    state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Rank 1 of 2 without accelerators; returns the groups that are created."""
    groups: list[Any] = []
    for name, value in {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(state.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(dist, "is_initialized", lambda: bool(groups))
    monkeypatch.setattr(dist, "init_process_group", lambda *a, **given: groups.append(given))
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    return groups


@pytest.mark.parametrize("has_group", [False, True])
def test_state_for_deepspeed_counts_ranks(
    monkeypatch: pytest.MonkeyPatch, launched: list[Any], has_group: bool
) -> None:
    """Also the second state of a process, when there is a group already."""
    monkeypatch.setattr(processes, "find_ranks", lambda timeout: launched.append(timeout))
    monkeypatch.setitem(sys.modules, "deepspeed", deepspeed)
    monkeypatch.setattr(state, "is_deepspeed_available", lambda: True)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    launched += [None] * has_group
    found = state.PartialState()
    assert (found.num_processes, found.process_index, found.device.type) == (2, 1, "cpu")
    assert found.distributed_type == state.DistributedType.DEEPSPEED
    state.PartialState._shared_state.update(num_processes=1, backend=None)
    assert deepspeed.comm.is_initialized()
    assert found.backend is None  # a complete state does not change


def test_training_arguments_count_ranks(
    monkeypatch: pytest.MonkeyPatch, launched: list[Any], tmp_path: Path
) -> None:
    arguments = TrainingArguments(str(tmp_path))
    assert (arguments.use_cpu, arguments.world_size, arguments.process_index) == (True, 2, 1)
    assert launched == [{"backend": "gloo", "rank": 1, "world_size": 2}]
    monkeypatch.delenv("WORLD_SIZE")
    assert not TrainingArguments(str(tmp_path)).use_cpu


def test_engine_of_other_ranks_than_accelerate_raises(tmp_path: Path) -> None:
    def work(ranks: DistContext) -> str:
        with pytest.raises(ConfigError) as error:
            deepspeed.initialize(model=small_model(), config=settings(tmp_path), ranks=ranks)
        return str(error.value)

    kind = state.DistributedType.DEEPSPEED
    state.PartialState._shared_state.update(distributed_type=kind, num_processes=1)
    for message in on_ranks(2, work):
        assert "num_processes of accelerate is 1, and the engine has 2 rank(s)" in message


def test_trainer_with_other_world_size_than_ranks_raises(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trainer = trainer_for(InfinityTrainer, tmp_path)
    monkeypatch.setattr(hf.TrainingArguments, "world_size", 2)
    with pytest.raises(ConfigError, match="accelerate is 2, and the engine has 1 rank"):
        trainer.evaluate()
    assert trainer.engine is None

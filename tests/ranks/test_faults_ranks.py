"""Tests of ranks that hang or whose drive fails: all others end and name rank and cause."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support import forked
from support.durable import PLACEMENTS
from support.internals import components
from support.rank_crash import HANG_S, train_until_rank_hangs
from support.ranks import make_engine, on_ranks, together
from support.small import batch, settings, small_model

from infinity.checkpoint.commits import SmallFile
from infinity.distributed.context import DistContext
from infinity.errors import InfinityError, TransferError
from infinity.storage.disk import Disk
from infinity.training.load_weights import load_weights

COUNT = 3


def start_ranks(folder: Path, patience_s: float | None) -> list[Any]:
    return [
        forked.start(train_until_rank_hangs, str(folder), rank, COUNT, patience_s)
        for rank in range(COUNT)
    ]


def test_hanging_rank_ends_others_within_timeout(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    children = start_ranks(tmp_path, 30.0)
    for rank in (0, 2):
        children[rank].join(HANG_S)
        log = (tmp_path / f"log-{rank}").read_text()
        assert children[rank].exitcode == 1, log
        assert f"rank {rank} of {COUNT} lost the others, rank 1 first: " in log
        assert "hangs, or cannot be reached" in log
        assert "init_process_group(timeout=...)" in log
    assert (tmp_path / "hangs").exists()
    assert children[1].is_alive()
    children[1].kill()  # as torchrun does
    children[1].join()
    assert [path.name for path in (tmp_path / "nvme").iterdir()] == ["rank-1"]
    again = start_ranks(tmp_path, None)  # removes what the killed rank left
    for child in again:
        child.join(HANG_S)
    assert [child.exitcode for child in again] == [0] * COUNT
    assert list((tmp_path / "nvme").iterdir()) == []


def small_config(folder: Path) -> dict[str, Any]:
    config = settings(folder, PLACEMENTS["all on disk"])
    del config["nvme_path"]
    return config


def test_failed_rank_raises_in_every_later_call(tmp_path: Path) -> None:
    """Immediately, on all ranks, even if the first error was caught."""
    models = [small_model() for _ in range(2)]
    lost = TransferError("the drive is gone", path="/", offset=0, length=1, errno=errno.EIO)

    def work(ranks: DistContext) -> list[str]:
        messages = []
        with make_engine(ranks, models[ranks.rank], small_config(tmp_path), tmp_path) as engine:
            for number in range(4):
                if number == 1 and ranks.rank == 1:
                    components(engine).failure.fail(lost)
                try:
                    engine.backward(engine(batch(number)))
                    engine.step()
                    messages.append("")
                except InfinityError as error:
                    messages.append(str(error))
        return messages

    found = on_ranks(2, work)
    for messages, prefix in zip(found, ("rank 1 failed (", "an earlier failure left"), strict=True):
        assert messages[0] == ""
        for message in messages[1:]:
            assert prefix in message
            assert "the drive is gone" in message


def test_weights_unreadable_on_one_rank_are_not_loaded(tmp_path: Path) -> None:
    """Training continues, and the weights can be loaded again."""
    models = [small_model() for _ in range(2)]
    weights = tmp_path / "weights"

    def work(ranks: DistContext) -> str:
        with make_engine(ranks, models[ranks.rank], small_config(tmp_path), tmp_path) as engine:
            engine.save_weights(weights)
            with pytest.raises(InfinityError) as caught:
                load_weights(engine, tmp_path / "nowhere" if ranks.rank else weights)
            engine.backward(engine(batch(0)))
            engine.step()
            assert load_weights(engine, weights).missing == ()
            return str(caught.value)

    found = on_ranks(2, work)
    assert "nowhere" in found[1]
    assert "rank 1 failed (loads weights): " in found[0]
    assert "nowhere" in found[0]


def train(folder: Path, ranks: DistContext, model: Any, steps: int) -> dict[str, torch.Tensor]:
    config = small_config(folder) | {"durable": True, "resume": "auto"}
    with make_engine(ranks, model, config, folder) as engine:
        while engine.global_steps < steps:
            engine.backward(engine(batch(engine.global_steps * ranks.count + ranks.rank)))
            engine.step()
        return {n: v.clone() for n, v in engine.state_dict(master=True).items()}


@pytest.mark.parametrize("where", ["state", "record", "second record"])
def test_full_drive_of_one_rank_keeps_committed_state(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any step: all ranks name it and the cause, and no committed state is lost."""
    models = [small_model() for _ in range(6)]
    sound, broken = tmp_path / "sound", tmp_path / "broken"
    for folder in (sound, broken):
        folder.mkdir()
    expected = on_ranks(2, lambda ranks: train(sound, ranks, models[ranks.rank], 5))[0]
    sync, write, remaining = (
        Disk.sync,
        SmallFile.write,
        {"state": 4, "record": 7, "second record": 6},
    )

    def fail_when_full(path: Path, what: str) -> None:
        if "rank-1" in str(path) and what in where:
            remaining[where] -= 1
            if remaining[where] == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def sync_or_fail(disk: Disk) -> None:
        fail_when_full(disk.paths[0], "state")
        sync(disk)

    def write_or_fail(file: SmallFile, offset: int, data: bytes) -> None:
        if file.path.name.startswith("commit-"):
            with file._translating_errors("written"):
                fail_when_full(file.path, "record")
        write(file, offset, data)

    monkeypatch.setattr(Disk, "sync", sync_or_fail)
    monkeypatch.setattr(SmallFile, "write", write_or_fail)
    results, errors = together(2, lambda r: train(broken, r, models[2 + r.rank], 5))
    assert not results
    assert "No space left" in str(errors[1])
    assert isinstance(errors[0], InfinityError)
    assert "rank 1 failed" in str(errors[0])
    assert "No space left" in str(errors[0])
    monkeypatch.undo()
    found = on_ranks(2, lambda ranks: train(broken, ranks, models[4 + ranks.rank], 5))[0]
    assert [n for n, value in found.items() if not torch.equal(value, expected[n])] == []

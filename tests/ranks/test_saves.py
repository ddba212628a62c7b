"""Tests of checkpoints that ranks write together: files, background saves, and failures."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.models import CASES
from support.ranks import HANG_S, make_engine, on_ranks, train_ranks
from support.trainer import make_config
from torch import Tensor, nn

from infinity.checkpoint.ranges import RangeWriter
from infinity.checkpoint.reader import CheckpointReader
from infinity.distributed.context import DistContext
from infinity.engine import Engine
from infinity.errors import ConfigError, InfinityError, InfinityWarning

GPT = CASES["gpt"]


def files_of(root: Path) -> dict[str, bytes]:
    (directory,) = (path for path in root.iterdir() if path.is_dir())
    return {path.name: path.read_bytes() for path in directory.glob("*.safetensors*")}


@pytest.mark.parametrize("name", ["gpt", "frozen"])
@pytest.mark.parametrize("moments", ["fp32", "8bit"])
def test_checkpoint_files_match_single_rank(name: str, moments: str, tmp_path: Path) -> None:
    """Byte for byte, including block checksums, although blocks span the bytes of several ranks."""
    case, written, sums = CASES[name], [], []
    for count in (1, 2, 3):
        config = make_config(
            ("disk", "host", "host"), precision="bf16", optimizer={"moments": moments}
        )
        config["gradient_accumulation_steps"] = 6 // count
        root = tmp_path / str(count)
        train_ranks(count, case.build, case.batches(6), config, groups=case.groups, save=root)
        written.append(files_of(root))
        manifest = json.loads(next(root.glob("*/manifest.json")).read_text())
        sums.append([file for file in manifest["files"] if "index" not in file["name"]])
    assert len(written[0]) > 2
    assert written[1] == written[0]
    assert written[2] == written[0]
    assert sums[1] == sums[0]
    assert sums[2] == sums[0]


def test_warnings_are_issued_by_one_rank(tmp_path: Path) -> None:
    models, empty = [GPT.build() for _ in range(2)], tmp_path / "empty"
    empty.mkdir()

    def work(ranks: DistContext) -> None:
        (batch,) = GPT.batches(1)
        with make_engine(ranks, models[ranks.rank], make_config(), tmp_path) as engine:
            assert engine.load_checkpoint(empty) == (None, None)
            for _ in range(16):
                engine.backward(batch.call(engine))

    with pytest.warns(InfinityWarning) as caught:
        on_ranks(2, work)
    messages = [str(one.message) for one in caught]
    for found in ("nothing was loaded", "16 backwards, and no engine.step()"):
        assert sum(found in text for text in messages) == 1


def step(engine: Engine, number: int) -> None:
    batches = GPT.batches(2 * (number + 1))
    engine.backward(batches[2 * number + engine.ranks.rank].call(engine))
    engine.step()


def before_second_rank_finishes(monkeypatch: pytest.MonkeyPatch, do: Callable[[], None]) -> None:
    """Call `do` before the second rank, which writes no headers, finishes its ranges of a save."""
    first, write_headers, finish = threading.local(), RangeWriter.write_headers, RangeWriter.finish

    def mark_first_rank(ranges: RangeWriter) -> None:
        first.rank = True  # of this thread
        write_headers(ranges)

    def call_and_finish(ranges: RangeWriter) -> None:
        if not hasattr(first, "rank"):
            do()
        finish(ranges)

    monkeypatch.setattr(RangeWriter, "write_headers", mark_first_rank)
    monkeypatch.setattr(RangeWriter, "finish", call_and_finish)


def test_save_runs_in_background_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one rank is slow, steps continue; the checkpoint exists once all have written it."""
    may_end = threading.Event()
    before_second_rank_finishes(monkeypatch, lambda: assert_set(may_end))
    models, saved = [GPT.build() for _ in range(2)], tmp_path / "saved"

    def work(ranks: DistContext) -> list[bool]:
        with make_engine(ranks, models[ranks.rank], make_config(), tmp_path) as engine:
            step(engine, 0)
            engine.save_checkpoint(saved, "one")
            seen = [engine.saving]
            step(engine, 1)
            seen += [engine.saving, (saved / "one").exists()]
            ranks.synchronize("has looked")
            may_end.set()
            engine.finish_saving()
            return [*seen, engine.saving, (saved / "one" / "manifest.json").exists()]

    assert on_ranks(2, work) == [[True, True, False, False, True]] * 2


def test_save_of_ranks_without_close_is_reported(tmp_path: Path) -> None:
    models = [GPT.build() for _ in range(2)]

    def work(ranks: DistContext) -> None:
        engine = make_engine(ranks, models[ranks.rank], make_config(), tmp_path)
        step(engine, 0)
        engine.save_checkpoint(tmp_path / "saved")
        engine._finalizer()  # as at process exit

    with pytest.warns(InfinityWarning, match="was not saved: ranks complete it") as caught:
        on_ranks(2, work)
    assert len([one for one in caught if "was not saved" in str(one.message)]) == 1
    assert not (tmp_path / "saved" / "latest").exists()


def test_differing_or_damaged_checkpoints_are_rejected(tmp_path: Path) -> None:
    """A copy on one machine may be older, or partly damaged."""
    models, saved = [GPT.build() for _ in range(2)], tmp_path / "saved"

    saved.mkdir()

    def work(ranks: DistContext) -> list[str]:
        messages = []
        with make_engine(ranks, models[ranks.rank], make_config(), tmp_path) as engine:
            for number in range(2):
                step(engine, number)
                engine.save_checkpoint(saved / str(number), "one")
                engine.finish_saving()
            ranks.synchronize("copies")
            if ranks.rank:
                shutil.copytree(saved / "0", saved / "damaged")
                for file in (saved / "damaged" / "one").glob("moment2.safetensors"):
                    file.write_bytes(file.read_bytes()[:-3] + b"bad")
            ranks.synchronize("has copied")
            for root in (str(ranks.rank), "damaged"):
                with pytest.raises(InfinityError) as caught:
                    engine.load_checkpoint(saved / root)
                messages.append(str(caught.value))
            with pytest.raises(InfinityError, match="holds half of it"):
                step(engine, 2)
            engine.load_checkpoint(saved / "0")
            step(engine, 1)
            assert engine.global_steps == 2
        return messages

    for differ, damaged in on_ranks(2, work):
        assert "updates is 1 on rank 0, 2 on rank 1" in differ
        assert "damaged" in damaged


def test_unsavable_state_of_one_rank_is_reported_on_all(tmp_path: Path) -> None:
    """Training continues."""
    models = [GPT.build() for _ in range(2)]

    def work(ranks: DistContext) -> str:
        with make_engine(ranks, models[ranks.rank], make_config(), tmp_path) as engine:
            state = SimpleNamespace(state_dict=lambda: {"of": object() if ranks.rank else 1})
            engine.register_state("own", state)
            step(engine, 0)
            with pytest.raises(InfinityError) as caught:
                engine.save_checkpoint(tmp_path / "saved", "one")
            step(engine, 1)
            assert engine.global_steps == 2
            return str(caught.value)

    for message in on_ranks(2, work):
        assert "registered.own.of is builtins.object, which a checkpoint cannot store" in message


class RunningMean(nn.Module):
    """Model with a running mean, which is of one rank's data and affects later losses."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.register_buffer("mean", torch.zeros(64))
        self.register_buffer("constant", torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.5)
        return (self.inner(x - self.mean) * self.constant).square().mean()


@pytest.mark.parametrize("durable", [False, True])
def test_buffers_are_restored_per_rank(durable: bool, tmp_path: Path) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return RunningMean()

    models = [build() for _ in range(6)]
    config = make_config(("disk", "disk", "disk"))

    def train(engine: Engine, ranks: DistContext, steps: Iterable[int]) -> list[float]:
        losses = []
        for number in steps:
            generator = torch.Generator().manual_seed(10 * number + ranks.rank)
            loss = engine(torch.randn(4, 64, generator=generator))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    def uninterrupted(ranks: DistContext) -> list[float]:
        (folder := tmp_path / "sound").mkdir(exist_ok=True)
        with make_engine(ranks, models.pop(), config, folder) as engine:
            return train(engine, ranks, range(4))

    def interrupted(ranks: DistContext) -> list[float]:
        rank_config = config | ({"durable": True, "resume": "auto"} if durable else {})
        (folder := tmp_path / "stopped").mkdir(exist_ok=True)
        with make_engine(ranks, models.pop(), rank_config, folder) as engine:
            losses = train(engine, ranks, range(2))
            if not durable:
                engine.save_checkpoint(tmp_path / "saves")
        with make_engine(ranks, models.pop(), rank_config, folder) as engine:
            if not durable:
                engine.load_checkpoint(tmp_path / "saves")
            return losses + train(engine, ranks, range(2, 4))

    expected = on_ranks(2, uninterrupted)
    assert expected[0] != expected[1]
    assert on_ranks(2, interrupted) == expected


def test_differing_checkpoint_tags_are_rejected(tmp_path: Path) -> None:
    models = [GPT.build() for _ in range(2)]

    def work(ranks: DistContext) -> str:
        with make_engine(ranks, models[ranks.rank], make_config(), tmp_path) as engine:
            with pytest.raises(ConfigError) as caught:
                engine.save_checkpoint(tmp_path / "saves", f"loss-{ranks.rank}")
            engine.save_checkpoint(tmp_path / "saves", "loss")
            return str(caught.value)

    for message in on_ranks(2, work):
        assert "differ in the checkpoint to save: tag is 'loss-0' on rank 0, 'loss-1'" in message
    assert [path.name for path in (tmp_path / "saves").iterdir() if path.is_dir()] == ["loss"]


@pytest.mark.parametrize("shared", [False, True])
def test_frozen_files_are_written_once(shared: bool, tmp_path: Path) -> None:
    """Later saves link them, as on one rank; after an edit all ranks write new ones."""
    case = CASES["frozen"]
    models = [case.build() for _ in range(2)]
    config = make_config(("host", "host", "host"))
    config["placement"]["shared"] = shared

    def work(ranks: DistContext) -> Tensor:
        with make_engine(ranks, models[ranks.rank], config, tmp_path, groups=case.groups) as engine:
            frozen = next(p for p in engine.module.parameters() if not p.requires_grad)
            for number, tag in enumerate("abc"):
                engine.backward(case.batches(6)[2 * number + ranks.rank].call(engine))
                engine.step()
                engine.save_checkpoint(tmp_path, tag)
            with engine.materialized(frozen):
                frozen.data.mul_(2)
            engine.save_checkpoint(tmp_path, "d")
            with engine.materialized(frozen):
                edited = frozen.detach().clone()
                frozen.data.zero_()
            engine.load_checkpoint(tmp_path, "d")
            with engine.materialized(frozen):
                assert torch.equal(frozen, edited)
            return edited

    on_ranks(2, work)
    directories = [tmp_path / tag for tag in "abcd"]
    a, b, c, d = (sorted(place.glob("frozen*")) for place in directories)
    assert a
    for one, two, three, four in zip(a, b, c, d, strict=True):
        assert one.stat().st_ino == two.stat().st_ino == three.stat().st_ino
        assert four.stat().st_nlink == 1
    assert [one.read_bytes() for one in a] != [one.read_bytes() for one in d]
    for place in directories:
        with CheckpointReader(tmp_path, place.name) as reader:
            assert list(reader.verify()) == []


def assert_set(event: threading.Event) -> None:
    assert event.wait(HANG_S)


def test_finish_saving_on_one_rank_only_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else that rank would assume a complete checkpoint while another still writes."""
    may_end = threading.Event()
    before_second_rank_finishes(monkeypatch, lambda: assert_set(may_end))
    models = [GPT.build() for _ in range(2)]

    def work(ranks: DistContext) -> str:
        with make_engine(ranks, models[ranks.rank], make_config(), tmp_path) as engine:
            step(engine, 0)
            engine.save_checkpoint(tmp_path / "saved", "one")
            with pytest.raises(InfinityError) as caught:
                engine.finish_saving() if ranks.rank == 0 else engine.step()
            may_end.set()
            return str(caught.value)

    for message in on_ranks(2, work):
        assert "waits for a checkpoint on rank 0; looks after a checkpoint on rank 1" in message


def test_full_drive_of_one_rank_fails_save_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks raise; no files are left, and training and later saves continue."""
    models, saved, pwrite = [GPT.build() for _ in range(2)], tmp_path / "saved", os.pwrite
    failing, fails = threading.local(), [True]

    def pwrite_or_fail(file: int, data: bytes, offset: int) -> int:
        if fails and hasattr(failing, "here"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(file, data, offset)

    before_second_rank_finishes(monkeypatch, lambda: setattr(failing, "here", True))
    monkeypatch.setattr(os, "pwrite", pwrite_or_fail)

    def work(ranks: DistContext) -> str:
        with make_engine(ranks, models[ranks.rank], make_config(), tmp_path) as engine:
            step(engine, 0)
            engine.save_checkpoint(saved, "one")
            with pytest.raises(InfinityError) as caught:
                engine.finish_saving()
            ranks.synchronize("has failed")
            assert not list(saved.glob("one*"))
            ranks.synchronize("has looked")
            fails.clear()
            step(engine, 1)
            engine.save_checkpoint(saved, "two", wait=True)
            return str(caught.value)

    found = on_ranks(2, work)
    assert "rank 1 failed (saves a checkpoint): DoesNotFitError" in found[0]
    assert all("No space left" in message for message in found)
    assert (saved / "two" / "manifest.json").exists()

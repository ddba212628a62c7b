"""Tests of files shared with the previous checkpoint, and of when they must not be shared."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoint_files import Sample, sample
from support.durable import gated
from support.small import MIXED, ON_DEVICE, ON_DISK, batch, masters, same, small_engine, train
from torch import Tensor

from infinity.checkpoint.directory import prune
from infinity.checkpoint.reader import CheckpointReader
from infinity.checkpoint.shared_files import _FICLONE, Written
from infinity.checkpoint.writer import CheckpointWriter
from infinity.engine import Engine
from infinity.errors import ResidencyError

FROZEN = "frozen.safetensors"


def write(
    root: Path, tag: str, source: Sample, before: Written | None = None, **options: Any
) -> CheckpointWriter:
    """Write a checkpoint of a sample, with the frozen stream declared unchanged."""
    writer = CheckpointWriter(root, tag, source.streams, before=before, same=("frozen",), **options)
    for (stream, _), data in source.content.items():
        if not writer.shares(stream):
            writer.write(stream, data)
    writer.finish(source.manifest)
    return writer


def inode(path: Path) -> int:
    return path.stat().st_ino


def check_checkpoint(root: Path, tag: str, source: Sample) -> None:
    """Check that the checkpoint is valid and has every tensor of the sample."""
    with CheckpointReader(root, tag) as reader:
        assert list(reader.verify()) == []
        for (stream, name), data in source.content.items():
            found = reader.read(stream, name).reshape(-1).view(torch.uint8)
            assert torch.equal(found, data), (stream, name)


def test_unchanged_stream_is_hard_linked(tmp_path: Path) -> None:
    first, second = sample(1), sample(2)
    second.content["frozen", "frozen.w"] = first.content["frozen", "frozen.w"]
    one = write(tmp_path, "a", first)
    assert one.written is not None
    writer = write(tmp_path, "b", second, one.written)
    nbytes = (tmp_path / "a" / FROZEN).stat().st_size
    assert writer.nbytes == one.nbytes - nbytes
    assert inode(tmp_path / "a" / FROZEN) == inode(tmp_path / "b" / FROZEN)
    assert (tmp_path / "b" / FROZEN).stat().st_nlink == 2
    for path in (tmp_path / "b").iterdir():
        if path.name != FROZEN:
            assert path.stat().st_nlink == 1, path
    check_checkpoint(tmp_path, "a", first)
    check_checkpoint(tmp_path, "b", second)
    assert writer.written is not None
    third_writer = write(tmp_path, "c", second, writer.written)
    assert third_writer.shares("frozen")
    assert [one.tag for one in prune(tmp_path, 1)] == ["b", "a"]
    assert (tmp_path / "c" / FROZEN).stat().st_nlink == 1
    check_checkpoint(tmp_path, "c", second)


def test_aborted_writer_leaves_previous_checkpoint(tmp_path: Path) -> None:
    first = sample(1)
    one = write(tmp_path, "a", first)
    writer = CheckpointWriter(tmp_path, "b", first.streams, before=one.written, same=("frozen",))
    assert (tmp_path / "a" / FROZEN).stat().st_nlink == 2
    writer.abort()
    assert {path.name for path in tmp_path.iterdir()} == {"a", "latest"}
    assert (tmp_path / "a" / FROZEN).stat().st_nlink == 1
    check_checkpoint(tmp_path, "a", first)


def test_unshared_stream_is_written(tmp_path: Path) -> None:
    first, second = sample(1), sample(2)
    one = write(tmp_path, "a", first)
    writer = CheckpointWriter(tmp_path, "b", second.streams, before=one.written, same=("frozen",))
    assert writer.shares("frozen")
    writer.discard_shared_files("frozen")
    for (stream, _), data in second.content.items():
        writer.write(stream, data)
    writer.finish(second.manifest)
    check_checkpoint(tmp_path, "a", first)
    check_checkpoint(tmp_path, "b", second)


def touched(root: Path) -> None:
    data = (root / "a" / FROZEN).read_bytes()
    with open(root / "a" / FROZEN, "r+b") as file:
        file.write(data)


def replaced(root: Path) -> None:
    shutil.copy2(root / "a" / FROZEN, root / "copy")
    os.replace(root / "copy", root / "a" / FROZEN)


def linked(root: Path) -> None:
    (root / "a" / FROZEN).rename(root / "away")
    (root / "a" / FROZEN).symlink_to(root / "away")


def linked_directory(root: Path) -> None:
    (root / "a").rename(root / "away")
    (root / "a").symlink_to(root / "away")


def pruned(root: Path) -> None:
    shutil.rmtree(root / "a")


def cut_short(root: Path) -> None:
    os.truncate(root / "a" / FROZEN, 10)


CHANGES = [touched, replaced, linked, linked_directory, pruned, cut_short]


@pytest.mark.parametrize("change", CHANGES)
def test_modified_source_file_is_written_again(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    source = sample(1)
    one = write(tmp_path, "a", source)
    change(tmp_path)
    away = inode(tmp_path / "away") if (tmp_path / "away").exists() else 0
    writer = write(tmp_path, "b", source, one.written)
    assert not writer.shares("frozen")
    assert (tmp_path / "b" / FROZEN).stat().st_nlink == 1
    assert inode(tmp_path / "b" / FROZEN) != away
    check_checkpoint(tmp_path, "b", source)


@pytest.mark.parametrize("code", [errno.EMLINK, errno.EXDEV, errno.EPERM])
def test_unsupported_hard_link_falls_back_to_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    source = sample(1)
    one = write(tmp_path, "a", source)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    assert not write(tmp_path, "b", source, one.written).shares("frozen")
    check_checkpoint(tmp_path, "b", source)


def test_reflink_is_preferred_to_hard_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reflinks are used where the file system has them; this fake one copies."""
    source = sample(1)
    one = write(tmp_path, "a", source)

    def clone(new: int, request: int, old: int) -> int:
        assert request == _FICLONE
        return os.sendfile(new, old, 0, os.fstat(old).st_size)

    monkeypatch.setattr(fcntl, "ioctl", clone)
    two = write(tmp_path, "b", source, one.written)
    assert two.shares("frozen")
    assert (tmp_path / "b" / FROZEN).stat().st_nlink == 1
    check_checkpoint(tmp_path, "b", source)
    monkeypatch.undo()
    assert write(tmp_path, "c", source, two.written).shares("frozen")
    assert inode(tmp_path / "b" / FROZEN) == inode(tmp_path / "c" / FROZEN)


def test_other_root_or_other_shapes_are_not_shared(tmp_path: Path) -> None:
    source, other = sample(1), sample(1)
    one = write(tmp_path / "x", "a", source)
    assert not write(tmp_path / "y", "a", source, one.written).shares("frozen")
    spec = other.streams["frozen"][0]
    other.streams["frozen"] = [spec._replace(shape=(3, 5))]
    writer = CheckpointWriter(
        tmp_path / "x", "b", other.streams, before=one.written, same=("frozen",)
    )
    assert not writer.shares("frozen")
    writer.abort()


# --- engine --------------------------------------------------------------------------------------


@pytest.fixture
def nvme(tmp_path: Path) -> Path:
    path = tmp_path / "nvme"
    path.mkdir()
    return path


def save(engine: Engine, root: Path, tag: str, **options: Any) -> int:
    """Save a checkpoint and return the inode of its frozen file."""
    return inode(engine.save_checkpoint(root, tag, wait=True, **options) / FROZEN)


def check_frozen(root: Path, tag: str, engine: Engine) -> None:
    """Check that frozen parameters in the checkpoint equal those of the engine."""
    state = engine.state_dict()
    with CheckpointReader(root, tag) as reader:
        assert list(reader.verify()) == []
        assert reader.names("frozen")
        for name in reader.names("frozen"):
            assert torch.equal(reader.read("frozen", name), state[name]), name


@pytest.mark.parametrize("placement", [ON_DISK, MIXED, ON_DEVICE], ids=["disk", "mixed", "device"])
def test_engine_saves_frozen_parameters_once(
    tmp_path: Path, nvme: Path, placement: dict[str, str]
) -> None:
    root = tmp_path / "saved"
    with small_engine(nvme, placement, gated()) as engine:
        train(engine, 1)
        first = save(engine, root, "a")
        train(engine, 1, first=1)
        assert save(engine, root, "b", keep_last=1) == first
        assert {p.name for p in root.iterdir()} == {"b", "latest"}
        check_frozen(root, "b", engine)
        train(engine, 2, first=2)
        expected = masters(engine)
    with small_engine(nvme, ON_DISK, gated()) as engine:
        engine.load_checkpoint(root)
        assert engine.global_steps == 2
        train(engine, 2, first=2)
        assert same(masters(engine), expected)


@pytest.mark.parametrize("placement", [ON_DISK, MIXED, ON_DEVICE], ids=["disk", "mixed", "device"])
def test_engine_writes_edited_frozen_parameters_again(
    tmp_path: Path, nvme: Path, placement: dict[str, str]
) -> None:
    root = tmp_path / "saved"
    with small_engine(nvme, placement, gated()) as engine:
        inodes = [save(engine, root, "a"), save(engine, root, "b")]
        assert inodes[0] == inodes[1]
        with engine.materialized(engine.module.fixed), torch.no_grad():
            engine.module.fixed.weight.fill_(0.25)
        inodes.append(save(engine, root, "c"))
        check_frozen(root, "c", engine)
        engine.load_checkpoint(root, "a")
        inodes.append(save(engine, root, "d"))
        check_frozen(root, "d", engine)
        engine.load_state_dict({"fixed.bias": torch.full((16,), 2.0)}, strict=False)
        inodes.append(save(engine, root, "e"))
        check_frozen(root, "e", engine)
        assert len(set(inodes)) == 4
        assert save(engine, root, "f") == inodes[-1]


def test_save_after_in_place_edit_of_device_weight_raises(tmp_path: Path, nvme: Path) -> None:
    """Modules compute with weights placed on the device, so these can be edited in place."""
    root = tmp_path / "saved"
    with small_engine(nvme, ON_DEVICE, gated()) as engine:
        save(engine, root, "a")
        engine.backward(engine(batch(0)))
        engine.step()
        weight: Tensor = engine.module.fixed.weight.data
        assert weight.stride() == (16, 1)  # bound to the stored weight, not to a placeholder
        weight[3, 5] += 1
        with pytest.raises(ResidencyError, match=r"'fixed.weight' was edited in place .* has chan"):
            save(engine, root, "b")
    assert sorted(path.name for path in root.iterdir() if path.is_dir()) == ["a"]

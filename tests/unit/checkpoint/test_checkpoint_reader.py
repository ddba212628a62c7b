"""Tests of `CheckpointReader`: correct data, single reads of blocks, memory, and I/O faults."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import forked
from support.checkpoint_files import Sample, content, rewrite, same_content, sample, save
from support.fault_injection import faulty_io
from support.process_memory import SMALL_BYTES, Peak, count_held, needs_peak
from torch import Tensor

from infinity.checkpoint import blocks
from infinity.checkpoint.directory import missing_latest_message
from infinity.checkpoint.manifest import BLOCK_BYTES
from infinity.checkpoint.reader import CheckpointReader
from infinity.errors import CheckpointError, ConfigError, InfinityError, MachineError

SHAPES = {"a": (1000, 900), "b": (3,), "c": (2000, 1100), "d": (0, 4), "e": ()}
SHARD = 3 << 20


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Sample]:
    root = tmp_path_factory.mktemp("saved")
    source = sample(1, shapes=SHAPES)
    save(root, "t", source, SHARD)
    return root, source


def test_read_returns_all_saved_tensors(saved: tuple[Path, Sample]) -> None:
    root, source = saved
    assert same_content(content(root, "t"), source.content)
    with CheckpointReader(root, "t") as reader:
        assert reader.manifest.parameters == source.manifest.parameters
        for stream, specs in source.streams.items():
            assert list(reader.names(stream)) == [spec.name for spec in specs]
            for spec in specs:
                facts = reader.facts(stream, spec.name)
                assert (facts.shape, facts.dtype) == (spec.shape, spec.dtype)
        assert list(reader.names("gradient")) == []


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_read_into_any_range(saved: tuple[Path, Sample], data: st.DataObject) -> None:
    root, source = saved
    with CheckpointReader(root, "t") as reader:
        for _ in range(3):
            stream, name = data.draw(st.sampled_from(sorted(source.content)))
            expected = source.content[stream, name]
            first = data.draw(st.integers(0, expected.numel()))
            last = data.draw(st.integers(first, expected.numel()))
            target = torch.full((last - first + 2,), 0xAB, dtype=torch.uint8)
            reader.read_into(stream, name, first, target[1:-1])
            assert torch.equal(target[1:-1], expected[first:last])
            assert target[0] == target[-1] == 0xAB


def test_read_into_random_ranges_of_all_streams(saved: tuple[Path, Sample]) -> None:
    root, source = saved
    rng = random.Random(1)
    keys = [key for key in source.content if source.content[key].numel()]
    with CheckpointReader(root, "t") as reader:
        for _ in range(300):
            key = rng.choice(keys)
            expected = source.content[key]
            first = rng.randrange(expected.numel())
            target = torch.empty(min(rng.choice((1, 99, 70_000)), expected.numel() - first))
            target = torch.empty(target.numel(), dtype=torch.uint8)
            reader.read_into(*key, first, target)
            assert torch.equal(target, expected[first : first + target.numel()])


def test_sequential_reads_read_each_block_once(
    saved: tuple[Path, Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, source = saved
    read: Counter[tuple[str, int]] = Counter()
    start = blocks.BlockReader._start_read

    def counted(self: blocks.BlockReader, block: int, **options: Any) -> None:
        read[self.path.name, block] += 1
        start(self, block, **options)

    monkeypatch.setattr(blocks.BlockReader, "_start_read", counted)
    with CheckpointReader(root, "t") as reader:
        for stream in ("model", "moment1", "residual"):
            for name in reader.names(stream):
                nbytes = source.content[stream, name].numel()
                for first in range(0, nbytes, 77_777):
                    target = torch.empty(min(77_777, nbytes - first), dtype=torch.uint8)
                    reader.read_into(stream, name, first, target)
        expected = {
            (record.name, block)
            for record in reader.manifest.files
            if record.stream in ("model", "moment1", "residual")
            for block in range(len(record.crc32c))
        }
    assert set(read) == expected
    assert set(read.values()) == {1}


def test_files_are_readable_by_safetensors(saved: tuple[Path, Sample]) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    root, source = saved
    found: dict[tuple[str, str], Tensor] = {}
    for path in (root / "t").glob("*.safetensors"):
        stream = path.name.removesuffix(".safetensors").split("-")[0]
        for name, value in safetensors.load_file(path).items():
            found[stream, name] = value.reshape(-1).view(torch.uint8)
    assert same_content(found, source.content)


@needs_peak
def test_read_memory_is_independent_of_tensor_size(tmp_path: Path) -> None:
    """The bound is the block buffers of two files, which have 48 MiB each."""
    save(tmp_path, "t", sample(3, shapes={"a": (24 << 20,)}, moments=()))
    rings = 2 * blocks.RING_BLOCKS * BLOCK_BYTES
    assert forked.call(peak_of_reading, tmp_path) < rings + SMALL_BYTES


def peak_of_reading(root: Path) -> int:
    count_held()
    target = torch.zeros(1 << 20, dtype=torch.uint8)
    peak = Peak()
    with CheckpointReader(root, "t") as reader:
        for first in range(0, 48 << 20, target.numel()):
            reader.read_into("model", "a", first, target)
            reader.read_into("residual", "a", first, target)
        assert list(reader.verify()) == []
        return peak.grown


def test_read_invalid_arguments_are_refused(saved: tuple[Path, Sample]) -> None:
    root, _ = saved
    target = torch.zeros(6, dtype=torch.uint8)
    reader = CheckpointReader(root, "t")
    with pytest.raises(CheckpointError, match="no tensor 'x' in the stream 'model'"):
        reader.facts("model", "x")
    with pytest.raises(CheckpointError, match="no tensor 'a' in the stream 'x'"):
        reader.read_into("x", "a", 0, target)
    for first in (1, -1, 10**20):
        with pytest.raises(ConfigError, match="of tensor 'b', which has 6"):
            reader.read_into("model", "b", first, target)
    for wrong in (target.float(), target.view(2, 3), target.to("meta")):
        with pytest.raises(ConfigError, match="not uint8 in 1-D"):
            reader.read_into("model", "b", 0, wrong)
    reader.read_into("model", "b", 0, target)
    reader.read_into("model", "d", 0, target[:0])
    reader.close()
    reader.close()
    with pytest.raises(ConfigError, match="was closed"):
        reader.read_into("model", "b", 0, target)


@pytest.mark.parametrize("seed", range(12))
def test_read_with_io_faults_is_correct_or_raises(saved: tuple[Path, Sample], seed: int) -> None:
    """A read returns correct data or the right error, and may be retried."""
    root, source = saved
    kinds = ("eio", "flip", "short+delay+reorder")[seed % 3]
    faults = f"seed={seed},kinds={kinds},rate=0.3"
    failures = 0
    with faulty_io(faults=faults):
        reader = CheckpointReader(root, "t")
    with reader:
        for (stream, name), expected in source.content.items():
            for _ in range(2000):  # all 9 blocks of the longest tensor succeed once in 25 tries
                target = torch.empty_like(expected)
                try:
                    reader.read_into(stream, name, 0, target)
                except (CheckpointError, MachineError) as error:
                    failures += 1
                    check_failure(error, kinds, stream)
                    continue
                assert torch.equal(target, expected)
                break
            else:
                raise AssertionError("it fails each time")
    assert (failures > 0) == (seed % 3 < 2)


def check_failure(error: InfinityError, kinds: str, stream: str) -> None:
    assert isinstance(error, CheckpointError if kinds == "flip" else MachineError)
    assert stream in str(error)
    assert "block" in str(error)


def test_verify_reports_io_errors(saved: tuple[Path, Sample]) -> None:
    with faulty_io(faults="seed=1,kinds=eio,rate=1"):
        reader = CheckpointReader(saved[0], "t")
    with reader:
        found = list(reader.verify())
        num_blocks = sum(r.nbytes // BLOCK_BYTES for r in reader.manifest.files)
    assert len(found) >= num_blocks
    assert all("Input/output error" in text for text in found)


def test_read_files_with_other_block_sizes(saved: tuple[Path, Sample], tmp_path: Path) -> None:
    """The block size is a property of the file, not of the reader."""
    from support.checkpoint_files import checksum

    source = sample(4)
    path = save(tmp_path, "t", source, 2000)

    def change(members: dict[str, Any]) -> None:
        for size, record in zip((4096, 8192, 1 << 21, 4096), members["files"], strict=False):
            data = (path / record["name"]).read_bytes()
            chunks = [data[start : start + size] for start in range(0, len(data), size)]
            record.update(block_bytes=size, crc32c=[checksum(chunk) for chunk in chunks])

    rewrite(path / "manifest.json", change)
    assert same_content(content(tmp_path, "t"), source.content)


def test_no_latest_hints_when_root_is_a_checkpoint(saved: tuple[Path, Sample]) -> None:
    root, _ = saved
    text = missing_latest_message(root / "t")
    assert text.endswith(f'but is a checkpoint itself: load_checkpoint("{root}", tag="t")')
    assert (
        missing_latest_message(root.parent)
        == f"{root.parent} has no checkpoint that is called the latest"
    )

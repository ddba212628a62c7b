"""Weights written here load in safetensors, and damaged or hostile files are refused by name."""

from __future__ import annotations

import json
import os
import struct
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from infinity.errors import ConfigError, DoesNotFitError, MachineError
from infinity.model.weight_files import (
    DTYPE_NAMES,
    INDEX_NAME,
    SINGLE_NAME,
    Outgoing,
    WeightFiles,
    write_shards,
)


def some_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {str(dtype): (torch.randn(7, 5) * 10).to(dtype) for dtype in DTYPE_NAMES}
    return {**tensors, "scalar": torch.tensor(3.5), "empty": torch.empty(0, 4),
            "transposed": torch.randn(6, 9).t()}  # fmt: skip


def outgoing(tensors: dict[str, torch.Tensor]) -> list[Outgoing]:
    return [
        Outgoing(n, tuple(t.shape), t.dtype, lambda t=t: t)  # type: ignore[misc]
        for n, t in tensors.items()
    ]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = a.contiguous(), b.contiguous()
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    )


@pytest.mark.parametrize("max_shard", [1 << 30, 200, 1])
def test_what_is_written_loads_in_safetensors_and_here(tmp_path: Path, max_shard: int) -> None:
    tensors = some_tensors()
    files = write_shards(tmp_path, outgoing(tensors), max_shard)
    shards = [f for f in files if f.suffix == ".safetensors"]
    loaded: dict[str, torch.Tensor] = {}
    for shard in shards:
        loaded.update(load_file(shard))
    assert loaded.keys() == tensors.keys()
    assert all(same(loaded[n], t) for n, t in tensors.items())
    if len(shards) > 1:
        index = json.loads((tmp_path / INDEX_NAME).read_text())
        assert index["weight_map"].keys() == tensors.keys()
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    for source in (tmp_path, files[-1]):
        with WeightFiles(source) as weights:
            assert weights.facts.keys() == tensors.keys()
            for name, tensor in tensors.items():
                assert weights.facts[name].shape == tuple(tensor.shape)
                assert same(weights.read(name), tensor)
    assert {p.name for p in tmp_path.iterdir()} == {f.name for f in files}, "no left-overs"


def test_only_one_tensor_is_asked_for_at_a_time(tmp_path: Path) -> None:
    order: list[str] = []

    def read(name: str) -> torch.Tensor:
        order.append(name)
        return torch.ones(3)

    entries = [
        Outgoing(n, (3,), torch.float32, lambda n=n: read(n))  # type: ignore[misc]
        for n in "abcd"
    ]
    write_shards(tmp_path, entries, 24)
    assert order == list("abcd")


def test_a_save_replaces_the_one_before(tmp_path: Path) -> None:
    tensors = some_tensors()
    write_shards(tmp_path, outgoing(tensors), 1)
    (tmp_path / "other.safetensors").write_bytes(b"not ours")
    write_shards(tmp_path, outgoing({"a": torch.ones(2)}), 1 << 20)
    assert {p.name for p in tmp_path.iterdir()} == {SINGLE_NAME, "other.safetensors"}
    write_shards(tmp_path, outgoing(tensors), 1)
    with WeightFiles(tmp_path) as weights:
        assert weights.facts.keys() == tensors.keys()


def test_a_failed_save_leaves_the_one_before(tmp_path: Path) -> None:
    write_shards(tmp_path, outgoing({"a": torch.ones(2)}), 1 << 20)

    def fail() -> torch.Tensor:
        raise KeyboardInterrupt

    entries = [*outgoing(some_tensors()), Outgoing("z", (1,), torch.float32, fail)]
    with pytest.raises(KeyboardInterrupt):
        write_shards(tmp_path, entries, 100)
    assert [p.name for p in tmp_path.iterdir()] == [SINGLE_NAME]
    with WeightFiles(tmp_path) as weights:
        assert torch.equal(weights.read("a"), torch.ones(2))


def test_a_full_disk_is_said_with_the_numbers(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], check=False
    )
    if mounted.returncode != 0:
        pytest.skip("this container may not mount")
    try:
        with pytest.raises(DoesNotFitError, match=r"the weights need 4\.00 MiB"):
            write_shards(tmp_path, outgoing({"a": torch.ones(1 << 20)}), 1 << 30)
        assert list(tmp_path.iterdir()) == []
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="cannot be saved"):
        write_shards(tmp_path / "file", outgoing({"a": torch.ones(1)}), 1 << 20)


def header(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


HOSTILE = {
    "empty": b"",
    "short": b"\x01\x02",
    "huge header": header(b"{}", 2**62),
    "header beyond the file": header(b"{}", 1000),
    "not JSON": header(b"nonsense"),
    "offsets beyond the file": header(
        b'{"a":{"dtype":"F32","shape":[1000000000,1000],"data_offsets":[0,4000000000000]}}'
    ),
    "size does not match": header(b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}')
    + b"12345678",
    "overlap": header(
        b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},'
        b'"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}'
    )
    + b"123456",
    "unknown dtype": header(b'{"a":{"dtype":"X9","shape":[4],"data_offsets":[0,4]}}') + b"1234",
    "overflow": header(
        b'{"a":{"dtype":"F32","shape":[4611686018427387905,4],"data_offsets":[0,16]}}'
    )
    + b"0" * 16,
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_header_is_refused_with_the_file(tmp_path: Path, what: str) -> None:
    file = tmp_path / "bad.safetensors"
    file.write_bytes(HOSTILE[what])
    with pytest.raises(ConfigError, match=r"bad\.safetensors"):
        WeightFiles(file)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "cut.safetensors"
    save_file({"a": torch.ones(1000)}, file)
    os.truncate(file, file.stat().st_size - 100)
    with pytest.raises(ConfigError, match=r"cut\.safetensors"):
        WeightFiles(file)


def test_pickles_and_empty_directories_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no"):
        WeightFiles(tmp_path)
    torch.save({"a": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    for source in (tmp_path, tmp_path / "pytorch_model.bin"):
        with pytest.raises(ConfigError, match="pickle"):
            WeightFiles(source)
    with pytest.raises(ConfigError, match=r"none\.safetensors"):
        WeightFiles(tmp_path / "none.safetensors")


def write_index(directory: Path, weight_map: object) -> None:
    (directory / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))


def test_an_index_is_held_to_its_files(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "one.safetensors")
    save_file({"b": torch.ones(1)}, tmp_path / "two.safetensors")
    write_index(tmp_path, {"a": "two.safetensors", "b": "two.safetensors", "c": "one.safetensors"})
    with pytest.raises(ConfigError, match=r"'a' is in one.*'c' should be in one"):
        WeightFiles(tmp_path)
    write_index(tmp_path, {"a": "one.safetensors", "b": "three.safetensors"})
    with pytest.raises(ConfigError, match="not there: three"):
        WeightFiles(tmp_path)
    for hostile in ("../one.safetensors", "/etc/passwd", "", "..", 7):
        write_index(tmp_path, {"a": hostile})
        with pytest.raises(ConfigError, match="plain file name"):
            WeightFiles(tmp_path)
    write_index(tmp_path, "text")
    with pytest.raises(ConfigError, match="no weight_map"):
        WeightFiles(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_file({"a": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ConfigError, match=r"'a' is in .*one\.safetensors and in .*two"):
        WeightFiles(tmp_path)

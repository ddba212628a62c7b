"""Tests of writing and reading safetensors files, including malformed and hostile ones."""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from infinity.errors import ConfigError, DoesNotFitError, MachineError
from infinity.model.safetensors_file import DTYPE_NAMES
from infinity.model.weight_directory import INDEX_NAME, SINGLE_NAME
from infinity.model.weight_files import TensorToWrite, WeightFiles, write_shards


def sample_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {str(dtype): (torch.randn(7, 5) * 10).to(dtype) for dtype in DTYPE_NAMES}
    return {**tensors, "scalar": torch.tensor(3.5), "empty": torch.empty(0, 4),
            "transposed": torch.randn(6, 9).t()}  # fmt: skip


def outgoing(tensors: dict[str, torch.Tensor]) -> list[TensorToWrite]:
    return [
        TensorToWrite(n, tuple(t.shape), t.dtype, lambda t=t: t)  # type: ignore[misc]
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
def test_written_shards_load_in_safetensors_and_weight_files(
    tmp_path: Path, max_shard: int
) -> None:
    tensors = sample_tensors()
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


def test_unrepresentable_values_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'a'.* hold no torch\.complex128"):
        write_shards(tmp_path / "out", outgoing({"a": torch.ones(1, dtype=torch.complex128)}), 9)
    large = TensorToWrite("a", (2,), torch.float16, lambda: torch.tensor([float("inf"), 1e5]))
    with pytest.raises(ConfigError, match="'a' holds 100000, which is beyond float16"):
        write_shards(tmp_path / "out", [large], 1 << 20)
    infinite = TensorToWrite("a", (2,), torch.float16, lambda: torch.tensor([float("inf"), 1.0]))
    write_shards(tmp_path / "out", [infinite], 1 << 20)


def test_write_reads_each_tensor_once_in_order(tmp_path: Path) -> None:
    order: list[str] = []

    def read(name: str) -> torch.Tensor:
        order.append(name)
        return torch.ones(3)

    entries = [
        TensorToWrite(n, (3,), torch.float32, lambda n=n: read(n))  # type: ignore[misc]
        for n in "abcd"
    ]
    write_shards(tmp_path, entries, 24)
    assert order == list("abcd")


def test_save_replaces_previous_save(tmp_path: Path) -> None:
    tensors = sample_tensors()
    write_shards(tmp_path, outgoing(tensors), 1)
    (tmp_path / "other.safetensors").write_bytes(b"not ours")
    write_shards(tmp_path, outgoing({"a": torch.ones(2)}), 1 << 20)
    assert {p.name for p in tmp_path.iterdir()} == {SINGLE_NAME, "other.safetensors"}
    write_shards(tmp_path, outgoing(tensors), 1)
    with WeightFiles(tmp_path) as weights:
        assert weights.facts.keys() == tensors.keys()


def test_failed_save_keeps_previous_save(tmp_path: Path) -> None:
    write_shards(tmp_path, outgoing({"a": torch.ones(2)}), 1 << 20)

    def fail() -> torch.Tensor:
        raise KeyboardInterrupt

    entries = [*outgoing(sample_tensors()), TensorToWrite("z", (1,), torch.float32, fail)]
    with pytest.raises(KeyboardInterrupt):
        write_shards(tmp_path, entries, 100)
    assert [p.name for p in tmp_path.iterdir()] == [SINGLE_NAME]
    with WeightFiles(tmp_path) as weights:
        assert torch.equal(weights.read("a"), torch.ones(2))


def test_full_disk_error_reports_sizes(tmp_path: Path) -> None:
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


def test_unwritable_directory_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="cannot be saved"):
        write_shards(tmp_path / "file", outgoing({"a": torch.ones(1)}), 1 << 20)


def header(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


def entry(name: str, shape: str, begin: int, end: int, dtype: str = "U8") -> str:
    return f'"{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{end}]}}'


def file_of(*entries: str, data: bytes = b"") -> bytes:
    return header(("{" + ",".join(entries) + "}").encode()) + data


# The contents of a file and a pattern of the error message.
HOSTILE = {
    "empty": (b"", "it has 0 bytes"),
    "short": (b"\x01\x02", "it has 2 bytes"),
    "header of 2**62": (header(b"{}", 2**62), "its header would have"),
    "header of 2**63": (header(b"{}", 2**63), "its header would have 9223372036854775808 bytes"),
    "header of 2**64": (header(b"{}", 2**64 - 1), "its header would have"),
    "header beyond the file": (header(b"{}", 1000), "its header would end at byte 1008 of 10"),
    "not JSON": (header(b"nonsense"), "not JSON"),
    "no object": (header(b"[1]"), "no JSON object"),
    "nested deeply": (header(b"[" * 100_000), "not JSON"),
    "not UTF-8": (header(b'{"\xff":{}}'), "not UTF-8"),
    "UTF-16": (header("{}".encode("utf-16")), "not UTF-8"),
    "NaN": (header(b'{"a":NaN}'), "not JSON"),
    "a name that is no text": (file_of(entry("\\ud800", "[1]", 0, 1), data=b"1"), "is no text"),
    "metadata": (header(b'{"__metadata__":{"a":1}}'), "__metadata__"),
    "no entry": (header(b'{"a":7}'), "tensor 'a' lacks"),
    "incomplete": (header(b'{"a":{"dtype":"U8","shape":[0]}}'), "tensor 'a' lacks"),
    "bytes that are not there": (
        file_of(entry("a", "[1000000000,1000]", 0, 4_000_000_000_000, "F32")),
        "tensor 'a' would end at byte"),
    "size does not match": (file_of(entry("a", "[3]", 0, 8, "F32"), data=b"12345678"),
                            r"tensor 'a' of shape \(3,\) and dtype F32 has 8 bytes, not 12"),
    "overlap": (file_of(entry("a", "[4]", 0, 4), entry("b", "[4]", 2, 6), data=b"123456"),
                "tensor 'b' begins at byte 2, and overlaps"),
    "the same bytes": (file_of(entry("a", "[4]", 0, 4), entry("b", "[4]", 0, 4), data=b"1234"),
                       "tensor 'b' begins at byte 0, and overlaps"),
    "gap": (file_of(entry("a", "[4]", 2, 6), data=b"123456"), "tensor 'a' .* leaves a gap"),
    "bytes behind": (file_of(entry("a", "[4]", 0, 4), data=b"123456"), "its tensors end at"),
    "nothing but bytes": (file_of(data=b"123456"), "its tensors end at"),
    "backwards": (file_of(entry("a", "[4]", 4, 0), data=b"1234"), "tensor 'a' has the data_offs"),
    "negative offset": (file_of(entry("a", "[4]", -4, 0), data=b""), "tensor 'a' has the data_of"),
    "three offsets": (header(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1,2]}}'),
                      "tensor 'a' has the data_offsets"),
    "negative shape": (file_of(entry("a", "[-2,-2]", 0, 4), data=b"1234"),
                       r"tensor 'a' has the shape \[-2, -2\]"),
    "no whole number": (file_of(entry("a", "[4.0]", 0, 4), data=b"1234"), "tensor 'a' has the sh"),
    "true as a number": (file_of(entry("a", "[true]", 0, 1), data=b"1"), "tensor 'a' has the sh"),
    "huge shape": (file_of(entry("a", "[4611686018427387905,4]", 0, 16, "F32"), data=b"0" * 16),
                   "tensor 'a' has the shape"),
    "huge and empty": (file_of(entry("a", f"[0,{2**62},4]", 0, 0)), "tensor 'a' has the shape"),
    "more digits than are read": (file_of(entry("a", f"[{'9' * 5000}]", 0, 4), data=b"1234"),
                                  "not JSON"),
    "unknown dtype": (file_of(entry("a", "[4]", 0, 4, "X9"), data=b"1234"),
                      "tensor 'a' has the dtype 'X9'"),
    "a dtype that is no text": (
        file_of(entry("a", "[4]", 0, 4).replace('"U8"', "[]"), data=b"1234"), "tensor 'a' has the"),
    "one name twice": (file_of(entry("a", "[4]", 0, 4), entry("a", "[4]", 0, 4), data=b"1234"),
                       "'a' is in its header twice"),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_malformed_header_rejected_naming_file_and_tensor(tmp_path: Path, what: str) -> None:
    content, match = HOSTILE[what]
    file = tmp_path / "bad.safetensors"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"bad\.safetensors is not a sound .*{match}"):
        WeightFiles(file)


def test_non_regular_file_rejected(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    with pytest.raises(ConfigError, match="no regular file"):
        WeightFiles(tmp_path / "pipe.safetensors")
    with pytest.raises(ConfigError, match="no regular file"):
        WeightFiles(tmp_path)


def test_mutated_header_accepted_only_if_safetensors_accepts(tmp_path: Path) -> None:
    """Accepted files read equally. Names given twice are rejected as well."""
    save_file(
        {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16),
         "empty": torch.empty(0, 3), "scalar": torch.tensor(1)},
        tmp_path / "sound.safetensors", {"format": "pt"},
    )  # fmt: skip
    sound = (tmp_path / "sound.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", sound[:8])
    file = tmp_path / "mutated.safetensors"
    taken = 0
    for seed in range(1500):
        rng = random.Random(seed)
        text, data = bytearray(sound[8 : 8 + length]), sound[8 + length :]
        for _ in range(rng.choice([1, 1, 2])):
            at = rng.randrange(len(text))
            text[at : at + rng.choice([0, 1, 1])] = rng.choice(
                [b"", b"\xff", *(bytes([c]) for c in b'0123456789-.eE[]{},:" \\abx\0')]
            )
        file.write_bytes(header(bytes(text)) + data)
        try:
            weights = WeightFiles(file)
        except ConfigError:
            continue
        with weights, safe_open(file, "pt") as library:
            assert weights.facts.keys() == set(library.keys()), bytes(text)
            assert all(same(weights.read(n), library.get_tensor(n)) for n in weights.facts)
        taken += 1
    assert taken > 10


def test_truncated_file_rejected(tmp_path: Path) -> None:
    file = tmp_path / "cut.safetensors"
    save_file({"a": torch.ones(1000)}, file)
    os.truncate(file, file.stat().st_size - 100)
    with pytest.raises(ConfigError, match=r"cut\.safetensors"):
        WeightFiles(file)


def test_pickles_and_empty_directories_rejected(tmp_path: Path) -> None:
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


def test_index_must_match_files(tmp_path: Path) -> None:
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
    for damaged in (b"\xff", b"[" * 100_000, b"[]", b"{}"):
        (tmp_path / INDEX_NAME).write_bytes(damaged)
        with pytest.raises(ConfigError, match="no weight_map"):
            WeightFiles(tmp_path)
    write_index(tmp_path, "text")
    with pytest.raises(ConfigError, match="no weight_map"):
        WeightFiles(tmp_path)


def test_tensor_in_two_files_rejected(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_file({"a": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ConfigError, match=r"'a' is in .*one\.safetensors and in .*two"):
        WeightFiles(tmp_path)


def test_nested_extra_file_syncs_every_new_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = set[Path]()

    def sync(directory: Path) -> None:
        synced.add(directory)

    monkeypatch.setattr("infinity.model.weight_directory.sync_directory", sync)
    monkeypatch.setattr("infinity.common.files.sync_directory", sync)

    def write_nested(folder: Path) -> None:
        (folder / "a" / "b").mkdir(parents=True)
        (folder / "a" / "b" / "extra.json").write_text("{}")

    write_shards(tmp_path, outgoing({"w": torch.ones(2)}), 1 << 20, write_nested)
    assert {tmp_path, tmp_path / "a", tmp_path / "a" / "b"} <= synced

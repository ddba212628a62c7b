"""Tests of damaged and hostile checkpoints: refused by name, without allocating claimed sizes.

Random damage is detected by checksums; forged contents with valid checksums, by validation.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoint_files import Sample, checksum, content, rewrite, sample, save, sealed
from support.leaks import descriptors

from infinity.checkpoint.directory import find_tag
from infinity.checkpoint.reader import CheckpointReader
from infinity.errors import CheckpointError, ConfigError, InfinityError

SHARD = 2000  # bytes; splits a stream into several files
Members = dict[str, Any]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Sample]:
    root = tmp_path_factory.mktemp("checkpoints")
    expected = sample(1)
    save(root, "one", expected, SHARD)
    save(root, "two", sample(2), SHARD)
    return root, expected


@pytest.fixture
def root(original: tuple[Path, Sample], tmp_path: Path) -> Path:
    shutil.copytree(original[0], tmp_path / "root")
    return tmp_path / "root"


def refusal(root: Path, tag: str = "one") -> str:
    """Return the message of the error raised by opening the checkpoint."""
    with pytest.raises(CheckpointError) as caught:
        CheckpointReader(root, tag)
    assert caught.value.exit_code == 5
    return str(caught.value)


def problems(root: Path, tag: str = "one") -> list[str]:
    """Return the error raised by opening the checkpoint, or the problems that verify finds."""
    try:
        with CheckpointReader(root, tag) as reader:
            return list(reader.verify())
    except CheckpointError as error:
        return [str(error)]


def flip(path: Path, position: int, mask: int = 1) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ mask]))


def files_of(directory: Path) -> list[Path]:
    return sorted(directory.iterdir())


def test_original_checkpoint_verifies(original: tuple[Path, Sample]) -> None:
    assert problems(original[0]) == problems(original[0], "two") == []
    assert len(files_of(original[0] / "one")) > 10


# --- damage ------------------------------------------------------------------------------------


def test_bit_flips_near_file_ends_are_detected(root: Path) -> None:
    for path in files_of(root / "one"):
        size = path.stat().st_size
        for position in {0, 1, 7, 8, 9, size // 2, size - 2, size - 1}:
            for bit in range(8):
                flip(path, position, 1 << bit)
                found = problems(root)
                assert found, (path, position, bit)
                assert path.name in found[0], (path, position, bit, found)
                flip(path, position, 1 << bit)
    assert problems(root) == []


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_random_flips_are_detected(original: tuple[Path, Sample], data: st.DataObject) -> None:
    root, expected = original
    files = files_of(root / "one")
    path = data.draw(st.sampled_from(files))
    size = path.stat().st_size
    before = path.read_bytes()
    changes = data.draw(
        st.dictionaries(st.integers(0, size - 1), st.integers(1, 255), min_size=1, max_size=4)
    )
    try:
        for position, mask in changes.items():
            flip(path, position, mask)
        found = problems(root)
        assert found
        assert all(path.name in text for text in found)
        assert_exact_or_refused(root, expected)
    finally:
        path.write_bytes(before)


def assert_exact_or_refused(root: Path, written: Sample) -> None:
    """Assert that every readable tensor has the bytes that were written."""
    try:
        reader = CheckpointReader(root, "one")
    except CheckpointError:
        return
    with reader:
        for (stream, name), expected in written.content.items():
            target = torch.empty_like(expected)
            with suppress(CheckpointError):
                reader.read_into(stream, name, 0, target)
                assert torch.equal(target, expected)


def test_flip_error_names_tensor_block_and_byte_range(tmp_path: Path) -> None:
    written = sample(3, shapes={"small": (3,), "large": (1500, 1000)})
    path = save(tmp_path, "t", written) / "model-00001-of-00001.safetensors"
    flip(path, 2_500_000)
    (found,) = problems(tmp_path, "t")
    assert f"{path} is damaged: block 2 (bytes 2097152 to" in found
    assert "which holds 'large': its CRC32C is" in found
    with CheckpointReader(tmp_path, "t") as reader:
        chunk = torch.empty(1000, dtype=torch.uint8)
        reader.read_into("model", "large", 0, chunk)
        assert torch.equal(chunk, written.content["model", "large"][:1000])
        with pytest.raises(CheckpointError, match=r"block 2 .* which holds 'large'"):
            reader.read_into("model", "large", 2_400_000, chunk)
        reader.read_into("model", "large", 100, chunk)
        assert torch.equal(chunk, written.content["model", "large"][100:1100])
        flip(path, 12)  # in the header, while the file is open
        assert "block 0 (bytes 0 to 1048575), which holds the header, 'small', 'large'" in (
            next(reader.verify())
        )


@pytest.mark.parametrize("left", [0, 7, 8, 100, -1])
def test_truncated_extended_or_missing_file_is_refused(root: Path, left: int) -> None:
    for path in files_of(root / "one"):
        before = path.read_bytes()
        path.write_bytes(before[:left])
        assert path.name in refusal(root)
        path.write_bytes(before + b"\0")
        assert path.name in refusal(root)
        path.unlink()
        assert path.name in refusal(root)
        path.write_bytes(before)
    assert problems(root) == []


def test_file_truncated_while_open_is_reported(root: Path) -> None:
    with CheckpointReader(root, "one") as reader:
        record = next(r for r in reader.manifest.files if r.stream == "residual")
        os.truncate(root / "one" / record.name, 100)
        found = list(reader.verify())
    assert len(found) == 1
    assert record.name in found[0]
    assert "it has 100 bytes" in found[0]


def test_swapped_files_are_detected(root: Path) -> None:
    pairs = [
        ("one/moment1-00001-of-00003.safetensors", "one/moment1-00002-of-00003.safetensors"),
        ("one/model-00001-of-00002.safetensors", "one/residual-00001-of-00002.safetensors"),
        ("one/model-00001-of-00002.safetensors", "two/model-00001-of-00002.safetensors"),
        ("one/frozen.safetensors", "two/frozen.safetensors"),
        ("one/buffers.safetensors", "two/buffers.safetensors"),
        ("one/moment2_scales.safetensors", "two/moment2_scales.safetensors"),
    ]
    names = {str(p.relative_to(root)) for tag in ("one", "two") for p in files_of(root / tag)}
    for first, second in pairs:
        assert {first, second} <= names, names
        swap_files(root / first, root / second)
        found = problems(root, "one")
        assert found, (first, second)
        assert any(Path(name).name in found[0] for name in (first, second)), found
        swap_files(root / first, root / second)
    assert problems(root) == []


def swap_files(one: Path, other: Path) -> None:
    temporary = one.with_name("temporary")
    one.rename(temporary)
    other.rename(one)
    temporary.rename(other)


def test_manifest_of_another_checkpoint_is_detected(root: Path) -> None:
    shutil.copy(root / "two/manifest.json", root / "one/manifest.json")
    assert len(problems(root)) > 5


# --- not regular files -------------------------------------------------------------------------


def test_symlinks_pipes_and_directories_are_refused(root: Path, tmp_path: Path) -> None:
    for path in files_of(root / "one"):
        moved = tmp_path / "moved"
        path.rename(moved)
        path.symlink_to(moved)
        text = refusal(root)
        assert path.name in text
        assert "symbolic link" in text
        path.unlink()
        os.mkfifo(path)
        text = refusal(root)  # does not block waiting for a writer
        assert path.name in text
        assert "not a regular file" in text
        path.unlink()
        path.mkdir()
        assert path.name in refusal(root)
        path.rmdir()
        moved.rename(path)
    (root / "link").symlink_to(root / "one")
    assert "symbolic link" in refusal(root, "link")
    assert problems(root) == []


def test_tag_outside_checkpoint_root_is_refused(root: Path) -> None:
    for tag in ("../root/one", "/etc", "..", ".", "", "a/b", "one.tmp", "latest", "a\0b", "a\nb"):
        with pytest.raises(ConfigError, match="the tag"):
            CheckpointReader(root, tag)
        with pytest.raises(ConfigError, match="the tag"):
            find_tag(root, tag)
    assert "no checkpoint" in refusal(root, "three")
    (root / "empty").mkdir()
    assert "no manifest.json" in refusal(root, "empty")


def test_invalid_latest_file_is_refused(root: Path, tmp_path: Path) -> None:
    latest = root / "latest"
    for text in (b"../one", b"/etc/passwd", b"", b"one\ntwo\n", b"\xff", b"a" * 10_000, b"\0"):
        latest.write_bytes(text)
        with pytest.raises(CheckpointError, match="latest does not name a checkpoint"):
            find_tag(root, None)
    latest.unlink()
    (tmp_path / "secret").write_text("one\n")
    latest.symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="latest is a symbolic link"):
        find_tag(root, None)
    latest.unlink()
    os.mkfifo(latest)
    with pytest.raises(InfinityError, match="latest"):
        find_tag(root, None)


# --- forged manifests with a valid checksum ----------------------------------------------------


def file_of(members: Members, stream: str) -> Members:
    found: Members = next(f for f in members["files"] if f["stream"] == stream)
    return found


def set_file(stream: str, key: str, value: Any) -> Callable[[Members], None]:
    return lambda members: file_of(members, stream).update({key: value})


def set_parameter(key: str, value: Any, index: int = 0) -> Callable[[Members], None]:
    return lambda members: members["parameters"][index].update({key: value})


def drop_files(stream: str) -> Callable[[Members], None]:
    def change(members: Members) -> None:
        members["files"] = [f for f in members["files"] if f["stream"] != stream]

    return change


FORGED_MANIFESTS: dict[str, tuple[Callable[[Members], None], str]] = {
    "path up": (set_file("frozen", "name", "../two/frozen.safetensors"), "are called"),
    "absolute path": (set_file("frozen", "name", "/etc/passwd"), "are called"),
    "other name": (set_file("frozen", "name", "manifest.json"), "are called"),
    "file of another stream": (set_file("frozen", "name", "buffers.safetensors"), "are called"),
    "odd stream": (set_file("frozen", "stream", "../x"), "are called"),
    "stream twice": (lambda m: m["files"].append(m["files"][0]), "grouped by stream"),
    "tensors in the index": (set_file("frozen", "stream", "index"), "grouped by|are called"),
    "negative size": (set_file("model", "nbytes", -1), "nbytes is -1"),
    "huge size": (set_file("model", "nbytes", 2**63), "nbytes is 9223372036854775808: "),
    "huge size that is allowed": (set_file("model", "nbytes", 2**62), "checksums, not"),
    "enormous size": (set_file("model", "nbytes", 10**4000), "nbytes is 10000"),
    "size in half bytes": (set_file("model", "nbytes", 1.5), "nbytes is 1.5: .* integer"),
    "size as truth": (set_file("model", "nbytes", True), "nbytes is True: .* integer"),
    "huge blocks": (set_file("model", "block_bytes", 2**40), "not a power of two"),
    "no blocks": (set_file("model", "block_bytes", 0), "not a power of two"),
    "odd blocks": (set_file("model", "block_bytes", 5000), "not a power of two"),
    "fewer checksums": (set_file("model", "crc32c", []), "has 0 checksums, not 1"),
    "more checksums": (set_file("model", "crc32c", [1, 2]), "has 2 checksums, not 1"),
    "checksums too large": (set_file("model", "crc32c", [2**32]), "holds 4294967296"),
    "checksums as text": (set_file("model", "crc32c", ["0"]), r"crc32c\[0\] is '0': .* integer"),
    "file without fields": (lambda m: m["files"].insert(0, {}), r"files\[0\].name is missing"),
    "file as text": (lambda m: m["files"].insert(0, "x"), r"files\[0\] is 'x': "),
    "files as object": (lambda m: m.update(files={}), "files is {}: "),
    "no model": (drop_files("model"), "'wte' is missing in the stream 'model'"),
    "no buffers": (drop_files("buffers"), "'running' is missing in the stream 'buffers'"),
    "other shape": (set_parameter("shape", [16, 40]), r"'wte' .* shape \(40, 16\), not \(16, 40\)"),
    "huge shape": (set_parameter("shape", [2**62, 2**62]), "'wte' has the shape"),
    "negative shape": (set_parameter("shape", [-1]), r"shape\[0\] is -1: .* equal to 0"),
    "other dtype": (set_parameter("dtype", "float32"), "is torch.bfloat16, not torch.float32"),
    "unknown dtype": (set_parameter("dtype", "nn.Module"), "has the dtype 'nn.Module'"),
    "not trained": (set_parameter("trained", False), "'wte' is missing in the stream 'frozen'"),
    "trained": (set_parameter("trained", True, -1), "'frozen.w' is missing in the stream 'model'"),
    "name of another": (set_parameter("name", "h.0.w"), "'h.0.w' is in it twice"),
    "no name": (set_parameter("name", ""), "'' has the shape"),
    "name that is no text": (set_parameter("name", "\ud800"), r"name is '\\ud800': "),
    "alias of another": (set_parameter("aliases", ["running"]), "'running' is in it twice"),
    "renamed": (set_parameter("name", "other"), "'other' is missing"),
    "other moments": (lambda m: m.update(moments=["bf16", "8bit"]), "not torch.bfloat16"),
    "other scales": (lambda m: m.update(moments=["fp32", "bf16"]), "'moment2"),
    "fewer moments": (lambda m: m.update(moments=[]), "the manifest has 0 moments"),
    "more moments": (lambda m: m.update(moments=["fp32"] * 7), "has 7 moments"),
    "unknown moments": (lambda m: m.update(moments=["int1", "8bit"]), "'int1' is unknown"),
    "precision": (lambda m: m.update(precision="fp8"), "precision is 'fp8'"),
    "steps": (lambda m: m.update(global_steps=-1), "global_steps is -1"),
    "next version": (lambda m: m.update(version=[2, 0]), "format version 2.0"),
    "version 0": (lambda m: m.update(version=[0, 9]), "format version 0.9"),
    "no version": (lambda m: m.pop("version"), "version is missing"),
    "odd version": (lambda m: m.update(version=[1]), "format version 1"),
    "version as text": (lambda m: m.update(version="1.0"), "version is '1.0'"),
    "other format": (lambda m: m.update(format="pytorch"), "format is 'pytorch'"),
    "no format": (lambda m: m.pop("format"), "format is None"),
    "no run": (lambda m: m.pop("run"), "run is missing"),
}


@pytest.mark.parametrize("case", FORGED_MANIFESTS)
def test_invalid_manifest_with_valid_checksum_is_refused(root: Path, case: str) -> None:
    change, expected = FORGED_MANIFESTS[case]
    manifest = root / "one/manifest.json"
    rewrite(manifest, change)
    text = refusal(root)
    assert str(root / "one") in text
    with pytest.raises(CheckpointError, match=expected):
        CheckpointReader(root, "one")


def test_rewritten_valid_manifest_is_accepted(root: Path) -> None:
    rewrite(root / "one/manifest.json", lambda m: m.update(version=[1, 7], news={"x": 1}))
    assert problems(root) == []


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('{"a": ' + "[" * 100_000, "not JSON"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000, "not JSON"),
        ('{"a": ' + '{"b":' * 100_000 + "1" + "}" * 100_000, "not JSON"),
        ('{"a": ' + "9" * 100_000, "not JSON"),
        ("[1", "not JSON"),
        (" ", "not JSON"),
        ("\ufeff{", "not JSON"),
    ],
    ids=["open", "deep list", "deep object", "digits", "list", "empty", "mark"],
)  # fmt: skip
def test_hostile_json_manifest_is_refused(root: Path, body: str, expected: str) -> None:
    (root / "one/manifest.json").write_bytes(sealed(body))
    text = refusal(root)
    assert "manifest.json" in text
    assert expected in text


def test_manifest_without_valid_checksum_is_refused(root: Path) -> None:
    path = root / "one/manifest.json"
    data = path.read_bytes()
    members = json.loads(data)
    path.write_text(json.dumps(members))
    assert "does not end with its checksum" in refusal(root)
    path.write_bytes(data.rstrip(b"\n"))
    assert "does not end with its checksum" in refusal(root)
    path.write_bytes(data.replace(b"7", b"8", 1))
    assert "its CRC32C is" in refusal(root)
    path.write_bytes(b"\xff" + data)
    assert "manifest.json" in refusal(root)


def test_oversized_manifest_is_refused(root: Path) -> None:
    os.truncate(root / "one/manifest.json", 1 << 40)
    assert "more than" in refusal(root)


# --- headers -----------------------------------------------------------------------------------


def with_header(path: Path, manifest: Path, header: bytes, tail: bytes) -> None:
    """Replace the header of a file and update its size and CRC in the manifest."""
    data = struct.pack("<Q", len(header)) + header + tail
    path.write_bytes(data)

    def change(members: Members) -> None:
        for record in members["files"]:
            if record["name"] == path.name:
                record.update(nbytes=len(data), crc32c=[checksum(data)])

    rewrite(manifest, change)


def header_of(path: Path) -> tuple[Members, bytes]:
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def test_header_that_contradicts_manifest_is_refused(root: Path) -> None:
    path, manifest = root / "one/frozen.safetensors", root / "one/manifest.json"
    before = path.read_bytes(), manifest.read_bytes()
    header, tail = header_of(path)
    entry = header["frozen.w"]
    cases: list[tuple[Members, str]] = [
        ({"frozen.w": entry | {"shape": [3, 5]}}, r"has the shape (3, 5), not (5, 3)"),
        ({"frozen.w": entry | {"dtype": "I32"}}, "is torch.int32, not torch.float32"),
        ({"frozen.w": entry | {"shape": [2**40, 2**22]}}, "frozen.w"),
        ({"frozen.w": entry | {"data_offsets": [0, 2**50]}}, "frozen.w"),
        ({"frozen.w": entry | {"data_offsets": [8, 68]}}, "frozen.w"),
        ({"other": entry}, "'frozen.w' is missing"),
        ({"frozen.w": entry, "more": entry | {"shape": [0], "data_offsets": [60, 60]}}, "'more'"),
        ({}, "its tensors end at byte"),
    ]
    for forged, expected in cases:
        with_header(path, manifest, json.dumps(forged).encode(), tail)
        text = refusal(root)
        assert expected in text, (forged, text)
        path.write_bytes(before[0])
        manifest.write_bytes(before[1])
    assert problems(root) == []


def test_tensor_in_two_shards_is_refused(root: Path) -> None:
    first, second = (root / f"one/model-0000{i}-of-00002.safetensors" for i in (1, 2))
    header, tail = header_of(first)
    second_header, second_tail = header_of(second)
    name = next(n for n, e in header.items() if n != "__metadata__" and e["data_offsets"][1])
    begin, end = header[name]["data_offsets"]
    second_header[name] = header[name] | {
        "data_offsets": [len(second_tail), len(second_tail) + end - begin]
    }
    with_header(
        second,
        root / "one/manifest.json",
        json.dumps(second_header).encode(),
        second_tail + tail[begin:end],
    )
    text = refusal(root)
    assert f"tensor {name!r} is in {first.name} too" in text


def test_oversized_header_allocates_no_memory(root: Path) -> None:
    path = root / "one/frozen.safetensors"
    size = path.stat().st_size
    for length in (size, 2**40, 2**63, 2**64 - 1):
        with open(path, "r+b") as file:
            file.write(struct.pack("<Q", length))
        with limited_memory(1 << 20):
            assert path.name in refusal(root)


def test_claimed_terabytes_allocate_no_memory(root: Path) -> None:
    """Manifest and header agree on a tensor of 4 TiB that the file does not hold."""
    manifest = root / "one/manifest.json"
    elements = 2**40
    header = json.dumps(
        {"frozen.w": {"dtype": "F32", "shape": [elements], "data_offsets": [0, 4 * elements]}}
    ).encode()
    total = 8 + len(header) + 4 * elements

    def change(members: Members) -> None:
        members["parameters"][-1]["shape"] = [elements]
        file_of(members, "frozen").update(nbytes=total, crc32c=[0])

    rewrite(manifest, change)
    with limited_memory(4 << 20):
        assert "checksums, not" in refusal(root)


class limited_memory:  # noqa: N801
    """Assert that traced allocations stay below a limit; bound the address space to 1 GiB more."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def __enter__(self) -> None:
        self.before = resource.getrlimit(resource.RLIMIT_AS)
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), self.before[1]))
        tracemalloc.start()

    def __exit__(self, *exc_info: object) -> None:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        resource.setrlimit(resource.RLIMIT_AS, self.before)
        assert peak < self.limit, peak


@pytest.fixture(autouse=True)
def check_open_descriptors() -> Iterator[None]:
    before = descriptors()
    yield
    assert descriptors() <= before


def test_repaired_checkpoint_is_readable(root: Path) -> None:
    path = root / "one/frozen.safetensors"
    flip(path, path.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"frozen\.safetensors is damaged"):
        content(root, "one")
    flip(path, path.stat().st_size - 1)
    assert content(root, "one").keys() == sample(1).content.keys()


def test_swapped_header_names_are_detected_by_distant_read(tmp_path: Path) -> None:
    """The header agrees with the manifest and the block that is read is intact."""
    written = sample(3, shapes={"a1": (1000, 1000), "a2": (1000, 1000)})
    path = save(tmp_path, "t", written) / "residual.safetensors"
    data = path.read_bytes()
    data = data.replace(b'"a1"', b'"xx"', 1).replace(b'"a2"', b'"a1"', 1)
    path.write_bytes(data.replace(b'"xx"', b'"a2"', 1))
    with CheckpointReader(tmp_path, "t") as reader:
        target = torch.empty(100, dtype=torch.uint8)
        with pytest.raises(CheckpointError, match=r"block 0 .* which holds the header"):
            reader.read_into("residual", "a1", 1_500_000, target)

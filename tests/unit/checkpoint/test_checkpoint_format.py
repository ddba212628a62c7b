"""Tests of the checkpoint format against docs/checkpoint-format.md and other readers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoint_files import checksum, sample, save
from torch import nn

import infinity
from infinity.checkpoint.manifest import (
    BufferRecord,
    FileRecord,
    Manifest,
    ParameterRecord,
    TensorSpec,
    cut,
    is_checkpoint_file_name,
)
from infinity.checkpoint.reader import CheckpointReader
from infinity.checkpoint.writer import CheckpointWriter
from infinity.errors import CheckpointError
from infinity.model.weight_files import WeightFiles

DOCUMENT = Path(__file__).parents[3] / "docs/checkpoint-format.md"

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
plain = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        texts,
        st.floats(allow_nan=False, allow_infinity=False),
    ),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(texts, inner)),
    max_leaves=8,
)
shapes = st.lists(st.integers(0, 1000), max_size=4).map(tuple)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    names = draw(st.lists(texts, unique=True, min_size=4, max_size=12))
    half = len(names) // 2
    parameters = [
        ParameterRecord(
            name,
            (f"{name}'s alias",) if draw(st.booleans()) and f"{name}'s alias" not in names else (),
            draw(shapes),
            draw(st.sampled_from(["float32", "bfloat16", "float8_e4m3fn"])),
            draw(st.booleans()),
            draw(st.integers(0, 2**63 - 1)),
        )
        for name in names[:half]
    ]
    buffers = [
        BufferRecord(name, (), draw(shapes), draw(st.sampled_from(["int64", "bool"])), True)
        for name in names[half:]
    ]
    sizes = draw(st.lists(st.integers(1, 9000), max_size=3))
    files = [
        FileRecord(
            f"model-{i + 1:05}-of-{len(sizes):05}.safetensors",
            "model",
            nbytes,
            4096,
            tuple(draw(st.integers(0, 2**32 - 1)) for _ in range(-(-nbytes // 4096))),
        )
        for i, nbytes in enumerate(sizes)
    ]
    return Manifest(
        engine_version=draw(texts),
        global_steps=draw(st.integers(0, 2**63 - 1)),
        precision=draw(st.sampled_from(["bf16", "fp32"])),
        rule=draw(texts),
        moments=tuple(draw(st.lists(st.sampled_from(["fp32", "bf16", "8bit"]), max_size=6))),
        parameters=tuple(parameters),
        buffers=tuple(buffers),
        run=draw(plain),
        client_state=draw(plain),
        config=draw(plain),
        plan=draw(plain),
        files=tuple(files),
    )


@settings(max_examples=50, deadline=None)
@given(manifests())
def test_manifest_round_trip(manifest: Manifest) -> None:
    text = manifest.to_bytes()
    text.decode("ascii")
    found = Manifest.from_bytes(text, "here")
    assert found == manifest
    assert found.to_bytes() == text


@settings(max_examples=50, deadline=None)
@given(manifests(), st.data())
def test_manifest_any_edit_is_detected(manifest: Manifest, data: st.DataObject) -> None:
    text = manifest.to_bytes().decode()
    position = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.characters(codec="ascii").filter(lambda c: c != text[position]))
    for changed in (
        text[:position] + other + text[position + 1 :],
        text[:position] + text[position + 1 :],
        text[:position] + other + text[position:],
        text[:position],
    ):
        with pytest.raises(CheckpointError, match=r"^here "):
            Manifest.from_bytes(changed.encode(), "here")


def test_manifest_checksum_matches_documentation(tmp_path: Path) -> None:
    data = (save(tmp_path, "t", sample(1)) / "manifest.json").read_bytes()
    body, seal = data[:-27], data[-27:]
    assert seal == f',\n"checksum": "{checksum(body):08x}"\n}}\n'.encode()
    assert f"{checksum(b'123456789'):08x}" == "e3069283"  # the check value of CRC-32C


def test_format_document_lists_every_member_and_file(tmp_path: Path) -> None:
    text = DOCUMENT.read_text()
    path = save(tmp_path, "t", sample(1), 2000)
    members = json.loads((path / "manifest.json").read_text())
    records = (members["parameters"][0], members["buffers"][0], members["files"][0])
    for key in [*members, *(key for record in records for key in record)]:
        assert f"`{key}`" in text, key
    for stream in ("model", "frozen", "buffers", "residual", "moment1", "moment1_scales",
                   "gradient", "index"):  # fmt: skip
        assert f"`{stream}`" in text, stream
    for mark in ("$tuple", "$set", "$dict", "$int", "$float", "$bytes", "$size", "$dtype",
                 "$tensor", "$array", "$scalar"):  # fmt: skip
        assert f"`{mark}`" in text, mark


def test_is_our_file_matches_only_checkpoint_files(tmp_path: Path) -> None:
    path = save(tmp_path, "t", sample(1), 2000)
    assert all(is_checkpoint_file_name(entry.name) for entry in path.iterdir())
    for name in ("a.txt", "model.safetensors.bak", "x.pt", "lock", "..", "MODEL.safetensors"):
        assert not is_checkpoint_file_name(name)


def test_cut_splits_shards_between_tensors() -> None:
    specs = [TensorSpec(f"t{i}", (n,), torch.uint8) for i, n in enumerate((5, 5, 11, 1, 0, 9, 2))]
    shards = cut("model", specs, 10, numbered=False)
    assert [[t.name for t in s.tensors] for s in shards] == [
        ["t0", "t1"],
        ["t2"],
        ["t3", "t4", "t5"],
        ["t6"],
    ]
    assert [s.name for s in shards] == [f"model-{i:05}-of-00004.safetensors" for i in range(1, 5)]
    assert cut("model", [], 10, numbered=True) == []
    assert [s.name for s in cut("frozen", specs, 99, numbered=False)] == ["frozen.safetensors"]


class Model(nn.Module):
    """Module with trained, frozen and tied weights, and both kinds of buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 3, bias=False)
        self.two = nn.Linear(4, 3, bias=False)
        self.two.weight = self.one.weight
        self.fixed = nn.Parameter(torch.randn(2), requires_grad=False)
        self.register_buffer("kept", torch.randn(3))
        self.register_buffer("passing", torch.randn(3), persistent=False)


def write_model(root: Path, model: Model, *, small: bool = False) -> Path:
    full = not small
    streams = {"model": [TensorSpec("one.weight", (3, 4), torch.float32)]}
    if full:
        streams["frozen"] = [TensorSpec("fixed", (2,), torch.float32)]
        streams["buffers"] = [TensorSpec(n, (3,), torch.float32) for n in ("kept", "passing")]
    one = ParameterRecord("one.weight", ("two.weight",), (3, 4), "float32", True, 1)
    fixed = ParameterRecord("fixed", (), (2,), "float32", False, 0)
    buffers = tuple(
        BufferRecord(name, (), (3,), "float32", name == "kept") for name in ("kept", "passing")
    )
    manifest = replace(
        sample(1).manifest,
        precision="fp32",
        moments=(),
        parameters=(one, fixed) if full else (one,),
        buffers=buffers if full else (),
    )
    writer = CheckpointWriter(root, "small" if small else "t", streams)
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    for stream, specs in streams.items():
        for spec in specs:
            writer.write(stream, state[spec.name].detach().reshape(-1).view(torch.uint8))
    return writer.finish(manifest)


def test_checkpoint_directory_loads_as_weights(tmp_path: Path) -> None:
    """Frozen parameters and persistent buffers are included; other buffers are not."""
    model, other = Model(), Model()
    path = write_model(tmp_path, model)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == {"one.weight", "fixed", "kept"}
    assert index["metadata"]["total_size"] == 4 * (12 + 2 + 3)
    # Hugging Face prefers model.safetensors and would ignore the index.
    assert not (path / "model.safetensors").exists()
    with WeightFiles(path) as files:
        assert set(files.facts) == {"one.weight", "fixed", "kept"}
    loaded = infinity.load_weights(other, path)
    assert (loaded.missing, loaded.unexpected) == ((), ())
    expected = model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in other.state_dict().items())


def test_small_checkpoint_has_a_single_weights_file(tmp_path: Path) -> None:
    path = write_model(tmp_path, Model(), small=True)
    assert sorted(entry.name for entry in path.iterdir()) == [
        "manifest.json",
        "model.safetensors",
        "model.safetensors.index.json",
    ]
    with CheckpointReader(tmp_path, "small") as reader:
        assert list(reader.verify()) == []

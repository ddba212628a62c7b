"""Tests of commit records, their two files, and reading durable state by parameter name."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.durable import PLACEMENTS, durable_engine, gated, state_of, step
from support.internals import components
from torch import Tensor

from infinity.checkpoint.commits import (
    COMMIT_NAMES,
    CommitFiles,
    CommitRecord,
    intact_records,
    read_commits,
)
from infinity.checkpoint.durable_reader import DurableReader
from infinity.engine import Engine
from infinity.errors import CheckpointError, ConfigError, MachineError
from infinity.optim.moments import moment_view
from infinity.types import Kind

# --- records -------------------------------------------------------------------------------------

bits = st.lists(st.integers(0, 1), max_size=20).map(tuple)
sums = st.lists(st.integers(0, (1 << 32) - 1), max_size=20).map(tuple)
records = st.builds(
    CommitRecord,
    run=st.text(max_size=20),
    session=st.text(max_size=20),
    sequence=st.integers(0, 1 << 60),
    step=st.integers(0, 1 << 60),
    copies=bits,
    frozen_copies=bits,
    checksums=sums,
    document=st.dictionaries(st.text(max_size=20), st.text(max_size=500), max_size=5),
    when=st.just("2026-01-01T00:00:00+00:00"),
)


@given(records, st.binary(max_size=50))
def test_record_round_trip_ignores_trailing_bytes(record: CommitRecord, trailing: bytes) -> None:
    assert CommitRecord.from_bytes(record.to_bytes() + trailing) == record


@given(records, st.data())
def test_record_any_flipped_bit_or_truncation_is_detected(
    record: CommitRecord, data: st.DataObject
) -> None:
    text = record.to_bytes()
    cut = data.draw(st.integers(0, len(text) - 1))
    assert CommitRecord.from_bytes(text[:cut]) is None
    flipped = bytearray(text)
    flipped[cut] ^= 1 << data.draw(st.integers(0, 7))
    assert CommitRecord.from_bytes(bytes(flipped)) is None


def make_record(sequence: int, nbytes: int) -> CommitRecord:
    document = {"run": random.Random(sequence).randbytes(nbytes).hex()}
    copies = {"copies": (0, 1), "frozen_copies": (0, 0), "checksums": ()}
    return CommitRecord("r", "s", sequence, sequence * 10, **copies, document=document, when="now")


def last_commit(directory: Path, run: str) -> CommitRecord:
    records = intact_records(directory, read_commits(directory, run, num_units=2))
    return records[max(records)]


def write(files: CommitFiles, record: CommitRecord) -> None:
    files.prepare(record)
    files.commit(record)


def test_record_with_invalid_copies_is_reported_with_the_reason(tmp_path: Path) -> None:
    invalid = replace(make_record(0, 5), copies=(0, 2))
    for name in COMMIT_NAMES:
        (tmp_path / name).write_bytes(invalid.to_bytes())
    reasons = read_commits(tmp_path, "r", num_units=2)
    assert {*reasons.values()} == {"cannot be used: it names copies that do not exist"}


def test_torn_commit_writes_leave_a_valid_record(tmp_path: Path) -> None:
    """Records of varying size are written; each write is torn and each file lost once."""
    rng = random.Random(0)
    files, names = CommitFiles(tmp_path), [tmp_path / name for name in COMMIT_NAMES]
    files.reserve()
    previous = make_record(0, 5)
    write(files, previous)
    for sequence in range(1, 40):
        record = make_record(sequence, rng.choice((0, 10, 3000, 150_000)))
        before = [path.read_bytes() for path in names]
        write(files, record)
        after = [path.read_bytes() for path in names]
        for number, path in enumerate(names):  # power loss while this file is written
            torn = bytearray(after[number])
            for start in range(0, len(torn), 512):
                old = before[number][start : start + 512].ljust(512, b"\0")[: len(torn) - start]
                if rng.random() < 0.5:
                    torn[start : start + 512] = old
            for other, text in zip(names, (after[0], before[1]), strict=True):
                other.write_bytes(torn if other == path else text)
            newest = record if number or bytes(torn) == after[0] else previous
            assert last_commit(tmp_path, "r") == newest
            files.repair(newest)  # afterwards either file may be lost
            for lost, remaining in permutations(names):
                text = lost.read_bytes()
                lost.write_bytes(b"")
                assert last_commit(tmp_path, "r") == newest, remaining
                lost.write_bytes(text)
        files.close()
        files = CommitFiles(tmp_path)
        write(files, record)
        previous = record
    files.close()
    files.close()


def test_commit_files_open_and_read_errors(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="could not be opened"):
        CommitFiles(tmp_path / "missing")
    with pytest.raises(CheckpointError, match=r"commit-a.bin cannot be read: No such file"):
        last_commit(tmp_path, "r")
    files = CommitFiles(tmp_path)
    write(files, make_record(3, 0))
    files.close()
    with pytest.raises(CheckpointError, match=r"commit-b.bin is of another run, r"):
        last_commit(tmp_path, "another")


# --- reading by name -----------------------------------------------------------------------------


def tensors_of(engine: Engine) -> dict[tuple[str, str], Tensor]:
    """Return the bytes of each (stream, parameter) of an engine, from its plan."""
    found: dict[tuple[str, str], list[Tensor]] = {}

    def add(stream: str, name: str, value: Tensor) -> None:
        found.setdefault((stream, name), []).append(value.view(torch.uint8))

    state, plan = state_of(engine), engine.plan
    for layout in plan.units:
        for segment in layout.segments:
            for kind in plan.precision.kinds if segment.trained else (Kind.WEIGHT,):
                flat = state[layout.index, kind.value]
                if not segment.trained:
                    start = layout.trained_bytes + segment.offset
                    add("frozen", segment.name, flat[start : start + segment.nbytes])
                    continue
                for index, (first, count) in enumerate(layout.chunks(plan.chunk_elements)):
                    start_in_chunk, end_in_chunk = segment.within(first, count)
                    if start_in_chunk >= end_in_chunk:
                        continue
                    view = flat[plan.part(layout, kind, index)]
                    if kind in plan.precision.moment_kinds:
                        form = plan.precision.format_of(kind)
                        moment = moment_view(view, count, form).part(start_in_chunk, end_in_chunk)
                        add(kind.value, segment.name, moment.values)
                        if moment.scales is not None:
                            add(f"{kind.value}_scales", segment.name, moment.scales)
                    else:
                        item = view.numel() // count
                        stream = "model" if kind is Kind.WEIGHT else kind.value
                        add(stream, segment.name, view[start_in_chunk * item : end_in_chunk * item])
    return {key: torch.cat(chunks) for key, chunks in found.items()}


SETTINGS: dict[str, dict[str, Any]] = {
    "all on disk": {"placement": PLACEMENTS["all on disk"], "precision": "bf16"},
    "verified, 8 bits": {
        "placement": PLACEMENTS["moments in RAM"],
        "optimizer": {"lr": 1e-2, "moments": "8bit"},
        "io": {"verify": True},
        "commit_every": 2,
    },
    "two drives": {
        "placement": PLACEMENTS["all on disk"],
        "io": {"weights": [2, 1], "block_size": 4096, "verify": True},
    },
}


@pytest.mark.parametrize("case", SETTINGS)
def test_durable_reader_reads_every_parameter_by_name(tmp_path: Path, case: str) -> None:
    overrides = SETTINGS[case]
    paths = [tmp_path / f"d{i}" for i in range(len(overrides.get("io", {}).get("weights", [1])))]
    for path in paths:
        path.mkdir()
    with durable_engine(paths, gated(), **overrides) as engine:
        for _ in range(2):
            step(engine)
        expected = tensors_of(engine)
        buffers = {name: value.clone() for name, value in engine.module.named_buffers()}
        (directory,) = paths[0].iterdir()
        with pytest.raises(MachineError, match="in use by another process"):
            DurableReader(directory)
    rng = random.Random(case)
    with DurableReader(directory) as reader:
        assert reader.record.step == reader.manifest.global_steps == 2
        assert reader.manifest.precision == overrides.get("precision", "fp32")
        assert max(p.step for p in reader.manifest.parameters) == 2
        stored = {(s, n) for s in reader.streams for n in reader.names(s) if s != "buffers"}
        assert stored == expected.keys()
        assert set(reader.names("buffers")) == buffers.keys()
        assert all(torch.equal(reader.read("buffers", n), v) for n, v in buffers.items())
        for (stream, name), value in expected.items():
            assert torch.equal(reader.read(stream, name).view(-1).view(torch.uint8), value), name
            first = rng.randrange(value.numel() + 1)
            chunk = torch.empty(rng.randrange(value.numel() - first + 1), dtype=torch.uint8)
            reader.read_into(stream, name, first, chunk)
            assert torch.equal(chunk, value[first : first + chunk.numel()]), (stream, name)
        for stream, name in (("model", "nobody"), ("moment1", "fixed.bias"), ("x", "extra.bias")):
            with pytest.raises(
                CheckpointError, match=f"no tensor '{name}' in the stream '{stream}'"
            ):
                reader.read(stream, name)
        with pytest.raises(ConfigError, match="bytes 40 to 168 of tensor"):
            reader.read_into("frozen", "fixed.bias", 40, torch.empty(128, dtype=torch.uint8))
    assert reader._rank_readers[0]._state_fds == []
    with durable_engine(paths, gated(), **overrides, resume="auto") as engine:
        assert components(engine).resumed


def test_durable_reader_names_damaged_chunk(tmp_path: Path) -> None:
    with durable_engine(
        tmp_path, gated(), placement=PLACEMENTS["all on disk"], io={"verify": True}
    ):
        pass
    (directory,) = tmp_path.iterdir()
    state = bytearray((directory / "state.bin").read_bytes())
    with DurableReader(directory) as reader:
        _, extent, span = reader._locations["model", "extra.bias"][0]
    state[extent.offset + span.start] ^= 4
    (directory / "state.bin").write_bytes(state)
    message = r"unit 'extra', chunk 0 in .* is damaged: a checksum"
    with DurableReader(directory) as reader, pytest.raises(CheckpointError, match=message):
        reader.read("model", "extra.bias")

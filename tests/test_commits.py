"""The commit record, its two slots, and reading what they speak of by parameter name."""

from __future__ import annotations

import random
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.durable import HOMES, durable_engine, gated, state_of, step
from torch import Tensor

from infinity.checkpoint.commits import COMMIT_NAMES, CommitFiles, CommitRecord, last_commit
from infinity.checkpoint.durable_reader import SCALES, DurableReader
from infinity.engine import Engine
from infinity.errors import CheckpointError, MachineError
from infinity.optim.moments import moment_in
from infinity.plan.layout import Kind

# --- records -------------------------------------------------------------------------------------

bits = st.lists(st.integers(0, 1), max_size=20).map(tuple)
records = st.builds(
    CommitRecord,
    run=st.text(max_size=20),
    sequence=st.integers(0, 1 << 60),
    step=st.integers(0, 1 << 60),
    sides=bits,
    frozen_sides=bits,
    checksums=st.booleans(),
    document=st.binary(max_size=3000),
    when=st.just("2026-01-01T00:00:00+00:00"),
)


@given(records, st.binary(max_size=50))
def test_a_record_comes_back_whatever_lies_behind_it(record: CommitRecord, rest: bytes) -> None:
    assert CommitRecord.from_bytes(record.to_bytes() + rest) == record


@given(records, st.data())
def test_any_flipped_bit_and_any_cut_is_seen(record: CommitRecord, data: st.DataObject) -> None:
    text = record.to_bytes()
    cut = data.draw(st.integers(0, len(text) - 1))
    assert CommitRecord.from_bytes(text[:cut]) is None
    flipped = bytearray(text)
    flipped[cut] ^= 1 << data.draw(st.integers(0, 7))
    assert CommitRecord.from_bytes(bytes(flipped)) is None


def some(sequence: int, document: bytes) -> CommitRecord:
    return CommitRecord("r", sequence, sequence * 10, (0, 1), (0, 0), False, document, when="now")


def test_every_whole_file_names_a_state_that_is_there(tmp_path: Path) -> None:
    """Documents grow and shrink; each write is torn, each file damaged, and the run goes on."""
    choose = random.Random(0)
    files, names = CommitFiles(tmp_path), [tmp_path / name for name in COMMIT_NAMES]
    files.reserve()
    whole = some(0, b"first")
    files.write(whole)
    for sequence in range(1, 40):
        record = some(sequence, choose.randbytes(choose.choice((0, 10, 5000, 300_000))))
        before = [path.read_bytes() for path in names]
        files.write(record)
        after = [path.read_bytes() for path in names]
        for number, path in enumerate(names):  # power is lost while this one is written
            torn = bytearray(after[number])
            for start in range(0, len(torn), 512):
                old = before[number][start : start + 512].ljust(512, b"\0")[: len(torn) - start]
                if choose.random() < 0.5:
                    torn[start : start + 512] = old
            for other, text in zip(names, (after[0], before[1]), strict=True):
                other.write_bytes(torn if other == path else text)
            newest = record if number or bytes(torn) == after[0] else whole
            assert last_commit(tmp_path, "r") == newest
            files.mend(newest)  # and then either may be lost
            for lost, kept in permutations(names):
                text = lost.read_bytes()
                lost.write_bytes(b"")
                assert last_commit(tmp_path, "r") == newest, kept
                lost.write_bytes(text)
        files.close()
        files = CommitFiles(tmp_path)
        files.write(record)
        whole = record
    files.close()
    files.close()


def test_files_that_cannot_be_written_or_read(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="could not be opened"):
        CommitFiles(tmp_path / "missing")
    with pytest.raises(CheckpointError, match=r"commit-a.bin cannot be read: No such file"):
        last_commit(tmp_path, "r")
    files = CommitFiles(tmp_path)
    files.write(some(3, b""))
    files.close()
    with pytest.raises(CheckpointError, match=r"commit-b.bin is of another run, r"):
        last_commit(tmp_path, "another")


# --- reading by name -----------------------------------------------------------------------------


def facts_of(engine: Engine) -> dict[tuple[str, str], Tensor]:
    """(parameter, kind) -> its bytes, from the homes of an engine."""
    found: dict[tuple[str, str], Tensor] = {}
    state, plan = state_of(engine), engine.plan
    for layout in plan.units:
        for segment in layout.segments:
            for kind in plan.precision.kinds if segment.trained else (Kind.WEIGHT,):
                flat = state[layout.index, kind.value]
                if not segment.trained:
                    start = layout.trained_bytes + segment.offset
                    found[segment.name, kind.value] = flat[start : start + segment.nbytes]
                    continue
                values, scales = [], []
                for index, (first, count) in enumerate(layout.chunks(plan.chunk_elements)):
                    low, high = segment.within(first, count)
                    if low >= high:
                        continue
                    view = flat[plan.part(layout, kind, index)]
                    if kind in plan.precision.moment_kinds:
                        form = plan.precision.format_of(kind)
                        moment = moment_in(view, count, form).part(low, high)
                        values.append(moment.values.view(torch.uint8))
                        if moment.scales is not None:
                            scales.append(moment.scales.view(torch.uint8))
                    else:
                        item = view.numel() // count
                        values.append(view[low * item : high * item])
                found[segment.name, kind.value] = torch.cat(values)
                if scales:
                    found[segment.name, kind.value + SCALES] = torch.cat(scales)
    return found


SETTINGS: dict[str, dict[str, Any]] = {
    "all on disk": {"homes": HOMES["all on disk"], "precision": "bf16"},
    "verified, 8 bits": {
        "homes": HOMES["moments in RAM"],
        "optimizer": {"lr": 1e-2, "moments": "8bit"},
        "io": {"verify": True},
        "durable_every": 2,
    },
    "two drives": {
        "homes": HOMES["all on disk"],
        "io": {"weights": [2, 1], "block_size": 4096, "verify": True},
    },
}


@pytest.mark.parametrize("case", SETTINGS)
def test_every_parameter_can_be_read_by_name(tmp_path: Path, case: str) -> None:
    more = SETTINGS[case]
    paths = [tmp_path / f"d{i}" for i in range(len(more.get("io", {}).get("weights", [1])))]
    for path in paths:
        path.mkdir()
    with durable_engine(paths, gated(), **more) as engine:
        for _ in range(2):
            step(engine)
        expected = facts_of(engine)
        (directory,) = paths[0].iterdir()
        with pytest.raises(MachineError, match="in use by another process"):
            DurableReader(directory)
    choose = random.Random(case)
    with DurableReader(directory) as reader:
        assert reader.step == 2
        assert reader.document
        assert reader.plan_facts["precision"] == more.get("precision", "fp32")
        kinds = set(reader.kinds)
        assert {k for _, k in expected} == kinds
        assert {n for n, _ in expected} == set(reader.names)
        for (name, kind), value in expected.items():
            segment = reader.segment(name)
            assert torch.equal(reader.read(name, kind, 0, segment.numel), value), (name, kind)
            if kind.endswith(SCALES):
                continue
            first = choose.randrange(segment.numel + 1)
            count = choose.randrange(segment.numel - first + 1)
            item = value.numel() // segment.numel
            part = value[first * item : (first + count) * item]
            assert torch.equal(reader.read(name, kind, first, count), part)
        for name, kind, first, count, why in (
            ("nobody", "weight", 0, 1, "no parameter 'nobody'"),
            ("fixed.bias", "moment1", 0, 1, "has no 'moment1'"),
            ("fixed.bias", "weight", 10, 7, "has 16 elements"),
            ("extra.bias", "gradient", 0, 1, "has no 'gradient'"),
        ):
            with pytest.raises(CheckpointError, match=why):
                reader.read(name, kind, first, count)
    assert reader._files == []
    with durable_engine(paths, gated(), **more, resume="auto") as engine:
        assert engine._parts.resumed


def test_rot_is_named(tmp_path: Path) -> None:
    with durable_engine(tmp_path, gated(), homes=HOMES["all on disk"], io={"verify": True}):
        pass
    (directory,) = tmp_path.iterdir()
    state = bytearray((directory / "state.bin").read_bytes())
    with DurableReader(directory) as reader:
        unit, _ = reader._places["extra.bias"]
        where = unit.sides[unit.turn.current][0].offset
    state[where] ^= 4
    (directory / "state.bin").write_bytes(state)
    rotten = r"unit 'extra', chunk 0 in .* is not what was written"
    with DurableReader(directory) as reader, pytest.raises(CheckpointError, match=rotten):
        reader.read("extra.bias", "weight", 0, 16)

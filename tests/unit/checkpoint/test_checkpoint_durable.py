"""Tests of the `infinity checkpoint` commands on directories of durable runs."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support.durable import PLACEMENTS, durable_engine, gated, step
from unit.checkpoint.test_checkpoint_cli import flip, run

from infinity.checkpoint.durable_reader import DurableReader
from infinity.model.weight_files import WeightFiles

CASES: dict[str, dict[str, Any]] = {
    "bf16, on disk": {"placement": PLACEMENTS["all on disk"], "precision": "bf16"},
    "fp32, in RAM, no checksums": {
        "placement": PLACEMENTS["all in RAM"],
        "commit_every": 1,
        "io": {"verify": False},
    },
    "fp16, two drives": {
        "placement": PLACEMENTS["moments in RAM"],
        "precision": "fp16",
        "loss_scale": {"value": 128},
        "commit_every": 1,
        "io": {"weights": [2, 1], "block_size": 4096},
    },
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
VERIFIED: dict[str, Any] = {
    "placement": PLACEMENTS["moments in RAM"],
    "precision": "bf16",
    "commit_every": 1,
    "optimizer": {"lr": 1e-2, "moments": "8bit"},
}


def make_paths(root: Path, overrides: dict[str, Any]) -> list[Path]:
    paths = [root / f"d{i}" for i in range(len(overrides.get("io", {}).get("weights", [1])))]
    for path in paths:
        path.mkdir()
    return paths


def train(paths: list[Path], overrides: dict[str, Any], steps: int = 2) -> dict[str, torch.Tensor]:
    """Complete a run and return the fp32 masters of its state dict."""
    with durable_engine(paths, gated(), **overrides) as engine:
        for _ in range(steps):
            step(engine)
        return {k: v.clone() for k, v in engine.state_dict(master=True).items()}


@pytest.mark.parametrize("case", CASES)
def test_inspect_verify_and_export_durable_run(tmp_path: Path, case: str) -> None:
    overrides = CASES[case]
    paths = make_paths(tmp_path, overrides)
    masters = train(paths, overrides)
    (directory,) = paths[0].iterdir()
    code, out, err = run("inspect", paths[0])
    assert (code, err) == (0, "")
    precision = overrides.get("precision", "fp32")
    for text in (
        f"{directory}, a durable run",
        f"step 2, {precision}, AdamW, moments: fp32, fp32",
        "commit 2, 20",
        "checksums of the state: " + ("not stored" if "no checksums" in case else "stored"),
        "moment2",
        "frozen",
    ):
        assert text in out, out
    for location in (directory, *(next(path.iterdir()) for path in paths)):
        assert run("inspect", location) == (0, out, "")
    report = json.loads(run("inspect", directory, "--json")[1])
    assert report["global_steps"] == 2
    assert len(report["directories"]) == len(paths)
    trained = report["trained"]["elements"]
    sizes = {"fp32": (4, None), "bf16": (2, "residual"), "fp16": (2, "master")}
    weight, extra_stream = sizes[precision]
    assert report["streams"]["model"]["nbytes"] == weight * trained
    assert report["streams"]["moment1"]["nbytes"] == 4 * trained
    if extra_stream:
        assert (
            report["streams"][extra_stream]["nbytes"]
            == {"residual": 2, "master": 4}[extra_stream] * trained
        )
    code, out, err = run("verify", directory)
    assert code == 0
    status = "no checksums were stored (io.verify was off)" if "no checksums" in case else "sound, "
    assert f"{directory}: " in out
    assert status in out
    for name, dtype in (("", None), *DTYPES.items()):
        target = tmp_path / f"out{name}"
        option = ["--dtype", name] if name else []
        option += ["--model", "none", "--max-shard", "4KiB"]
        code, out, err = run("export", paths[-1], target, *option)
        assert (code, err) == (0, ""), err
        check_export(target, masters, dtype or DTYPES[precision])


def check_export(target: Path, masters: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Check that exports are masters rounded once, tied weights once, and buffers unchanged."""
    with WeightFiles(target) as files:
        names = set(files.facts)
        assert names == set(masters) - {"inner.head.weight"}
        for name in names:
            found, master = files.read(name), masters[name]
            if name == "inner.offset":
                assert torch.equal(found, master)
                continue
            assert found.dtype is dtype
            assert torch.equal(found, master.to(dtype)), name


def test_export_initial_state_before_first_commit(tmp_path: Path) -> None:
    (path,) = make_paths(tmp_path, {})
    masters = train([path], {"placement": PLACEMENTS["all on disk"]}, steps=0)
    assert "the initial state: no step was committed" in run("inspect", path)[1]
    assert run("export", path, tmp_path / "out")[0] == 0
    del masters["inner.offset"]  # buffers are committed with the first step
    check_export(tmp_path / "out", masters, torch.float32)


def test_verify_locates_any_flipped_bit(tmp_path: Path) -> None:
    """Applies to all committed state. Bits of the inactive copy and of padding are ignored."""
    (path,) = make_paths(tmp_path, {})
    train([path], VERIFIED)
    (directory,) = path.iterdir()
    state = directory / "state.bin"
    with DurableReader(directory) as reader:
        committed_bytes = []
        for extent, _ in reader._rank_readers[0].extents:
            committed_bytes += [
                (extent.offset + position, extent.owner) for position in range(extent.nbytes)
            ]
        streams = {}
        for stream in reader.streams:
            if "extra.weight" in reader.names(stream):
                _, extent, span = reader._locations[stream, "extra.weight"][0]
                streams[stream] = extent.offset + span.start
        committed = {position for position, _ in committed_bytes}
    assert f"{directory}: sound" in run("verify", path)[1]
    rng = random.Random(1)
    for position, owner in rng.sample(committed_bytes, 12):
        flip(state, position)
        code, out, _ = run("verify", path)
        assert code == 5
        page = position // 4096 * 4096
        assert f"{state} is damaged: bytes {page} to {page + 4095}, {owner}, which hold" in out
        assert "1 problem(s)" in out
        flip(state, position)
    assert len(streams) == 6
    for stream, position in streams.items():
        flip(state, position)
        out = run("verify", path)[1]
        assert f"{stream} of 'extra." in out
        code, _, err = run("export", path, tmp_path / "out", "--dtype", "fp32", "--force")
        assert code == (5 if stream in ("model", "residual") else 0)
        assert (f"in {directory} is damaged: a checksum is wrong" in err) == (code == 5)
        flip(state, position)
    ignored = next(
        position for position in range(state.stat().st_size) if position not in committed
    )
    flip(state, ignored)
    assert f"{directory}: sound" in run("verify", path)[1]


def test_verify_reports_damaged_plan(tmp_path: Path) -> None:
    (path,) = make_paths(tmp_path, {})
    train([path], {})
    (directory,) = path.iterdir()
    flip(directory / "plan.json", 100)
    code, out, _ = run("verify", path)
    assert code == 5
    assert "plan.json" in out
    assert f"{directory}: damaged, 1 problem(s)" in out


def test_commands_on_running_run_are_refused(tmp_path: Path) -> None:
    (path,) = make_paths(tmp_path, {})
    with durable_engine([path], gated()) as engine:
        step(engine)
        for command in (("inspect",), ("verify",), ("export",)):
            options = [tmp_path / "out"] if command == ("export",) else []
            code, out, err = run(*command, path, *options)
            assert code == 4, err
            assert "is in use by another process" in err
            assert out == ""
    assert not (tmp_path / "out").exists()


def test_directory_resolution_and_ambiguity(tmp_path: Path) -> None:
    (path,) = make_paths(tmp_path, {})
    code, _, err = run("inspect", path)
    assert code == 5
    assert "there are no checkpoints in it, and it holds no durable run" in err
    for _ in range(2):
        train([path], {"placement": PLACEMENTS["all in RAM"]}, steps=0)
    runs = sorted(path.iterdir())
    for command in ("inspect", "verify"):
        code, _, err = run(command, path)
        assert code == 2
        assert f"{path} holds 2 durable runs" in err
    code, out, _ = run("verify", path, "--all")
    assert code == 0
    assert all(f"{one}: sound" in out for one in runs)
    with durable_engine(path / "..", gated(), durable=False) as engine:  # checkpoints have priority
        engine.save_checkpoint(path, "t", wait=True)
    assert f"{path / 't'}, the latest" in run("inspect", path)[1]
    assert f"{runs[0]}, a durable run" in run("inspect", runs[0])[1]
    code, _, err = run("export", path, runs[0])
    assert code == 2
    assert "is the directory of a run" in err

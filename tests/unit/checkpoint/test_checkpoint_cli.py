"""Tests of the `infinity checkpoint` commands: output, exported files, pruning and errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoint_files import sample, save
from typer.testing import CliRunner

from infinity.checkpoint.reader import CheckpointReader, join, split
from infinity.cli.main import app
from infinity.model.weight_files import WeightFiles
from infinity.optim.cpu import CpuKernels


def run(*arguments: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (1, 2, 3):
        save(tmp_path / "run", f"s{step}", sample(step, global_steps=step), 2000)
    return tmp_path / "run"


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)


# --- join and split ----------------------------------------------------------------------------


def test_join_and_split_match_kernels_bitwise() -> None:
    generator = torch.Generator().manual_seed(1)
    count = 1 << 18
    weight = torch.randint(-(2**15), 2**15, (count,), dtype=torch.int16, generator=generator)
    residual = torch.randint(-(2**15), 2**15, (count,), dtype=torch.int16, generator=generator)
    edges = torch.tensor([-(2**15), -1, 0, 1, 2**15 - 1, 0x7F7F, 0x7F80, 0x7F81, -0x80, -0x81])
    pairs = torch.cartesian_prod(edges, edges).to(torch.int16)
    weight = torch.cat([weight, pairs[:, 0]]).view(torch.bfloat16)
    residual = torch.cat([residual, pairs[:, 1]])
    kernels = CpuKernels()
    try:
        expected = torch.empty(weight.numel())
        kernels.join(weight, residual, expected)
        found = join(weight, residual)
        valid = ~expected.isnan()
        assert torch.equal(found.isnan(), ~valid)
        assert torch.equal(bits(found)[valid], bits(expected)[valid])
        high, low = torch.empty_like(weight), torch.empty_like(residual)
        kernels.split(found, high, low)
        halves = split(found)
        assert torch.equal(bits(halves[0]), bits(high))
        assert torch.equal(halves[1], low)
        assert torch.equal(bits(join(*halves))[valid], bits(found)[valid])
    finally:
        kernels.close()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({4: torch.int32, 2: torch.int16}[tensor.itemsize])


# --- inspect -----------------------------------------------------------------------------------


def test_inspect_reports_checkpoint_contents(root: Path) -> None:
    code, out, err = run("inspect", root)
    assert (code, err) == (0, "")
    for text in (
        f"{root / 's3'}, the latest",
        "step 3, bf16, AdamW, moments: fp32, 8bit",
        "6 tensors, of which 5 are trained; 1 more tied name(s); 2 buffer(s)",
        "client state: note",
        "moment2_scales",
        "other checkpoints: s2, s1",
    ):
        assert text in out, out
    code, out, _ = run("inspect", root, "--tag", "s1", "--json")
    report = json.loads(out)
    assert code == 0
    assert (report["tag"], report["latest"], report["global_steps"]) == ("s1", "s3", 1)
    assert report["tags"] == ["s3", "s2", "s1"]
    assert report["streams"]["moment1"]["tensors"] == 5
    assert report["nbytes"] == sum(
        path.stat().st_size for path in (root / "s1").iterdir() if path.name != "manifest.json"
    )
    assert run("inspect", root / "s1", "--json")[1] == out  # the checkpoint directory works as well
    run_dir = root.parent / "run_dir"
    run_dir.mkdir()
    root.rename(run_dir / "checkpoints")  # as in a run directory of `infinity train`
    code, run_out, _ = run("inspect", run_dir, "--tag", "s1", "--json")
    assert (code, json.loads(run_out)["streams"]) == (0, report["streams"])
    assert run("verify", run_dir, "--all")[0] == 0


# --- verify ------------------------------------------------------------------------------------


def test_verify_names_damaged_files(root: Path) -> None:
    code, out, _ = run("verify", root)
    assert code == 0
    assert out.startswith(f"{root / 's3'}: sound, ")
    for tag, name in (("s1", "residual-00001-of-00002.safetensors"), ("s2", "manifest.json")):
        flip(root / tag / name, -40)
    code, out, _ = run("verify", root)
    assert code == 0
    code, out, err = run("verify", root, "--tag", "s1")
    assert code == 5
    assert "residual-00001-of-00002.safetensors is damaged: block 0 (bytes 0 to" in out
    assert "'wte'" in out
    assert "1 problem(s)" in out
    code, out, err = run("verify", root, "--all")
    assert code == 5
    assert f"{root / 's3'}: sound" in out
    assert f"{root / 's1'}: damaged" in out
    assert f"{root / 's2'}: damaged" in out
    assert "manifest.json is not sound" in out
    assert "Traceback" not in out + err


# --- export ------------------------------------------------------------------------------------


def value(source: Any, stream: str, name: str, dtype: torch.dtype) -> torch.Tensor:
    found: torch.Tensor = source.content[stream, name].view(dtype)
    return found


def finite(seed: int) -> Any:
    """Return a sample with finite weights, small enough for fp16."""
    source = sample(seed, shapes={"wte": (40, 16), "big": (3000, 500), "scalar": ()})
    for (stream, name), data in source.content.items():
        if stream == "model":
            random = torch.randn(data.numel() // 2).to(torch.bfloat16)
            source.content[stream, name] = random.view(torch.uint8)
        if stream in ("frozen", "buffers") and name != "mask":
            source.content[stream, name] = torch.randn(data.numel() // 4).view(torch.uint8)
    return source


def test_export_writes_masters_exactly(tmp_path: Path) -> None:
    source = finite(1)
    save(tmp_path / "run", "t", source)
    kernels = CpuKernels()
    for dtype, name in ((torch.float32, "fp32"), (torch.float16, "fp16"), (None, "")):
        out = tmp_path / f"out{name}"
        option = ["--dtype", name] if name else []
        option += ["--model", "none", "--max-shard", "1MiB"]
        code, text, err = run("export", tmp_path / "run", out, *option)
        assert (code, err) == (0, "")
        assert text.startswith("5 tensors")
        assert (out / "model.safetensors.index.json").exists()
        with WeightFiles(out) as files:
            assert set(files.facts) == {"wte", "big", "scalar", "frozen.w", "running"}
            for key in ("wte", "big", "scalar"):
                weight = value(source, "model", key, torch.bfloat16)
                master = torch.empty(weight.numel())
                kernels.join(weight, value(source, "residual", key, torch.int16), master)
                expected = weight if dtype is None else master.to(dtype)
                assert torch.equal(files.read(key).reshape(-1), expected)
            frozen = value(source, "frozen", "frozen.w", torch.float32)
            assert torch.equal(files.read("frozen.w").reshape(-1), frozen.to(dtype or frozen.dtype))
            running = value(source, "buffers", "running", torch.float32)
            assert torch.equal(files.read("running"), running)
    kernels.close()


def test_export_damaged_checkpoint_fails_without_output(tmp_path: Path) -> None:
    path = save(tmp_path / "run", "t", finite(1))
    flip(path / "residual.safetensors", 2_000_000)
    code, out, err = run("export", tmp_path / "run", tmp_path / "out", "--dtype", "fp32")
    assert code == 5
    assert "residual.safetensors is damaged: block 1" in err
    assert "'big'" in err
    assert out == ""
    assert list((tmp_path / "out").iterdir()) == []
    assert run("export", tmp_path / "run", tmp_path / "out")[0] == 0  # residuals are not needed
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    code, _, err = run("export", tmp_path / "run", tmp_path / "out", "--max-shard", "1MiB")
    assert code == 2
    assert "holds weights already" in err
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    options = ("--max-shard", "1MiB", "--force")
    assert run("export", tmp_path / "run", tmp_path / "out", *options)[0] == 0
    code, _, err = run("export", tmp_path / "run", tmp_path / "a" / "slip" / "out")
    assert (code, "mkdir -p" in err) == (2, True)
    assert not (tmp_path / "a").exists()


def test_export_into_checkpoint_directory_is_refused(root: Path) -> None:
    before = sorted(path.name for path in (root / "s2").iterdir())
    for out in (root / "s2", root / "s3"):
        code, _, err = run("export", root, out)
        assert code == 2
        assert "is a checkpoint" in err
    assert sorted(path.name for path in (root / "s2").iterdir()) == before


def test_export_names_values_outside_dtype_range(tmp_path: Path) -> None:
    source = finite(1)
    source.content["model", "scalar"] = torch.tensor([1e30]).to(torch.bfloat16).view(torch.uint8)
    save(tmp_path / "run", "t", source)
    code, _, err = run("export", tmp_path / "run", tmp_path / "out", "--dtype", "fp16")
    assert code == 2
    assert "'scalar'" in err


# --- prune -------------------------------------------------------------------------------------


def test_prune_dry_run_and_removal(root: Path) -> None:
    code, out, _ = run("prune", root, "--keep", "1", "--dry-run")
    assert code == 0
    assert f"would remove {root / 's2'}" in out
    assert f"would remove {root / 's1'}" in out
    assert "2 checkpoint(s)" in out
    assert (root / "s1").exists()
    code, out, _ = run("prune", root, "--keep", "2")
    assert code == 0
    assert f"removed {root / 's1'}" in out
    assert sorted(path.name for path in root.iterdir()) == ["latest", "s2", "s3"]
    (root / "latest").write_text("s2\n")
    save(root, "s4", sample(4), save_latest=False)
    assert run("prune", root, "--keep", "1")[0] == 0
    assert sorted(path.name for path in root.iterdir()) == ["latest", "s2"]


# --- errors ------------------------------------------------------------------------------------


def test_invalid_arguments_report_errors_without_traceback(root: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    cases: list[tuple[list[str | Path], int, str]] = [
        (["inspect", tmp_path / "nowhere"], 2, "is not a directory"),
        (["inspect", tmp_path / "file"], 2, "is not a directory"),
        (["inspect", tmp_path / "empty"], 5, "has no file `latest`; there are no checkpoints"),
        (["inspect", root, "--tag", "s9"], 5, "no checkpoint 's9'; there are s3, s2, s1"),
        (["inspect", root, "--tag", "../run/s1"], 2, "the tag"),
        (["inspect", root / "s1", "--tag", "s2"], 2, "is a checkpoint already"),
        (["verify", root, "--tag", "s1", "--all"], 2, "leave one of them out"),
        (["verify", tmp_path / "empty", "--all"], 5, "holds no checkpoint"),
        (["verify", tmp_path / "nowhere", "--all"], 4, "nowhere"),
        (["export", root, tmp_path / "out", "--dtype", "int8"], 2, "--dtype is 'int8'"),
        (["export", root, tmp_path / "out", "--max-shard", "much"], 2, "is not a size"),
        (["export", root, tmp_path / "file"], 4, "file"),
        (["prune", tmp_path / "nowhere", "--keep", "1"], 4, "nowhere"),
        (["prune", root, "--keep", "0"], 2, "'--keep'"),
        (["prune", root], 2, "--keep"),
    ]
    for arguments, expected, text in cases:
        code, out, err = run(*arguments)
        assert code == expected, (arguments, out, err)
        assert text in " ".join(err.split()), (arguments, err)
        assert out == ""


def test_verify_without_latest_lists_tags(root: Path) -> None:
    (root / "latest").unlink()
    code, _, err = run("verify", root)
    assert code == 5
    assert "there are s3, s2, s1" in err
    assert "--tag s3" in err
    assert run("verify", root, "--tag", "s3")[0] == 0


def test_help_of_every_command_has_an_example() -> None:
    for name in ("inspect", "verify", "export", "prune", "import-deepspeed"):
        code, out, _ = run(name, "--help")
        assert code == 0
        assert f"For example: infinity checkpoint {name} " in " ".join(out.split())
    assert "import-deepspeed" in run()[1]


def test_export_checkpoint_without_masters(tmp_path: Path) -> None:
    source = finite(2)
    for stream in [s for s in source.streams if s not in ("model", "frozen", "buffers")]:
        del source.streams[stream]
        source.content = {k: v for k, v in source.content.items() if k[0] != stream}
    source.manifest = replace(source.manifest, moments=())
    save(tmp_path / "run", "t", source)
    assert run("export", tmp_path / "run", tmp_path / "out", "--dtype", "fp32")[0] == 0
    with WeightFiles(tmp_path / "out") as files, CheckpointReader(tmp_path / "run", "t") as reader:
        assert list(reader.names("residual")) == []
        weight = value(source, "model", "big", torch.bfloat16)
        assert torch.equal(files.read("big").reshape(-1), weight.float())

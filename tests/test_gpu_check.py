"""`tools/gpu_check.sh` without a GPU: what it would run, what it says, and its report."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import _gpu_check as tool
import bench_step
import presets

ROOT = Path(__file__).resolve().parent.parent
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")


def script(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / "tools" / "gpu_check.sh"), *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHON": sys.executable, **environment},
    )


@pytest.mark.parametrize("stage", tool.STAGES)
def test_what_it_runs_is_there(stage: str, tmp_path: Path) -> None:
    """Every file, and every option of the step benchmark; none is stopped by the whole's limit."""
    checks = tool.checks_of([stage], tmp_path)
    for check in checks:
        for word in check.command:
            if word.startswith(("tests/", "tools/")):
                assert (ROOT / word).exists(), word
        if "tools/bench_step.py" in check.command:
            options = check.command[check.command.index("tools/bench_step.py") + 1 :]
            parsed = bench_step._parser().parse_args(options)
            assert parsed.device == "cuda"
            assert parsed.model in presets.PRESETS
    building = tool.build(tmp_path)
    assert sum(check.limit_s for check in [*building, *checks]) <= tool.LIMIT_S < 600
    assert len({check.name for check in checks}) == len(checks)


def test_a_dry_run_says_all_and_does_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = script("--dry-run", *tool.STAGES, OUT=str(out))
    assert done.returncode == 0, done.stderr
    for words in ("-m gpu tests/gpu", "bench_adam_cuda", "llama-8b", "--device-budget 24GiB"):
        assert words in done.stdout
    assert not out.exists()
    assert script("--dry-run", "all").returncode == 2


@needs_no_gpu
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = script(OUT=str(out))
    assert done.returncode == 4
    assert "sees no CUDA device" in done.stderr
    assert "nothing was built, run or reported" in done.stderr
    assert not out.exists()


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert [line for line in tool.missing(ROOT / "pyproject.toml") if "cuda-core" not in line] == []
    project = tmp_path / "pyproject.toml"
    project.write_text(
        text.replace('"psutil>=5.9"', '"psutil>=999"').replace('"aiofiles', '"no-such-package')
    )
    found = "\n".join(tool.missing(project))
    assert "psutil>=999: " in found
    assert "no-such-package>=24.1: not there" in found
    project.write_text(text.replace('"nanobind>=2.9"', '"nanobind>=999"'))
    assert "nanobind>=999" in "\n".join(tool.missing(project))


def python(name: str, code: str, limit_s: float = 60, json: bool = False) -> tool.Check:
    return tool.Check(name, limit_s, [sys.executable, "-c", code], json)


def test_a_failure_hides_nothing_and_the_report_says_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    until = time.monotonic() + 300
    checks = [
        python("good", "import sys; print('{}'); print('a table', file=sys.stderr)", json=True),
        python("bad", "print('why'); raise SystemExit(7)"),
        python("slow", "import time; print('begun', flush=True); time.sleep(600)", limit_s=8),
        python("last", "print('x\\n' * 500 + 'the end')"),
    ]
    results = tool.run_all(checks, tmp_path, until)
    results += tool.run_all([python("late", "print(1)")], tmp_path, time.monotonic())
    assert [result.code for result in results] == [0, 7, tool.STOPPED, 0, None]
    assert (tmp_path / "good.json").read_text() == "{}\n"
    report = tool.write_report(results, "NVIDIA H200 139 GiB, 16 CPU cores\n", ["quick"], tmp_path)
    assert report.name.startswith("gpu_quick_nvidia-h200-139_20")
    text = report.read_text()
    for words in (
        "| good | passed |",
        "| bad | FAILED, exit code 7 |",
        "| slow | stopped after",
        "| late | not run: no time was left |",
        "a table",
        "why",
        "begun",
        "the end",
    ):
        assert words in text
    assert text.count("\nx") <= tool.SHOWN_LINES
    assert "bad: exit code 7" in (tmp_path / "log.txt").read_text()
    assert "bad: exit code 7" in capsys.readouterr().out

"""Tests of `tools/bench_quality.py` (resume, summary) and the table of `tools/bench_rules.py`."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(TOOLS), *sys.path])
    return loaded("bench_quality")


def losses(out: Path, variant: str) -> list[float]:
    found: list[float] = json.loads((out / f"{variant}.json").read_text())["losses"]
    return found


def test_variants_resume_bitwise_and_are_compared(bench: ModuleType, tmp_path: Path) -> None:
    small = ["--model", "gpt-tiny", "--context", "16", "--micro-batch", "1", "--warm-up", "2",
             "--precision", "fp32"]  # fmt: skip
    interrupted, uninterrupted = tmp_path / "cut", tmp_path / "whole"

    def run(out: Path, variant: str, steps: int) -> None:
        given = [*small, "--out", str(out), "--variant", variant, "--steps", str(steps)]
        assert bench.main(given) == 0

    for variant in ("fp32", "8bit", "muon"):
        run(uninterrupted, variant, 6)
    run(interrupted, "muon", 2)
    assert len(losses(interrupted, "muon")) == 2
    run(interrupted, "muon", 6)
    assert losses(interrupted, "muon") == losses(uninterrupted, "muon")
    assert losses(uninterrupted, "fp32") != losses(uninterrupted, "8bit")
    assert bench.main(["--out", str(uninterrupted), "--plot-only"]) == 0
    summary = json.loads((uninterrupted / "quality.json").read_text())
    assert summary["steps"] == 6
    assert set(summary["variants"]) == {"fp32", "8bit", "muon"}
    assert summary["variants"]["fp32"]["difference_from_fp32"] == 0
    assert 0 < summary["variants"]["8bit"]["mean_absolute_difference_per_step"] < 0.1
    drawing = ElementTree.parse(uninterrupted / "quality.svg").getroot()
    assert {"fp32", "8bit"} <= {text.text for text in drawing.iter() if text.text}
    other = [*small, "--out", str(uninterrupted), "--variant", "fp32", "--seed", "1"]
    assert bench.main(other) == 2  # the checkpoint is of another seed


def test_plot_only_without_runs_fails(bench: ModuleType, tmp_path: Path) -> None:
    assert bench.main(["--out", str(tmp_path), "--plot-only"]) == 1


def test_bench_rules_table_relative_to_adamw(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    given = ["--context", "16", "--rounds", "2", "--only", "Muon", "torch.optim.Adafactor"]
    assert loaded("bench_rules").main(given) == 0
    _, _, *rows = (line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines())
    assert [(name, nbytes) for name, nbytes, _ in rows] == [
        ("AdamW", "12"), ("Muon", "8.35"), ("torch.optim.Adafactor", "12")
    ]  # fmt: skip
    assert rows[0][2].startswith("1.00")
    assert float(rows[1][2].split()[0]) > 0

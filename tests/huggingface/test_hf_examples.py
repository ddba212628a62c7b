"""The examples with Hugging Face models, each in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import transformers as hf

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True, text=True, check=False, timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step +\d+  loss ([\d.]+)$", output, re.M)]


def test_finetune_hf_learns_generates_and_saves(tmp_path: Path) -> None:
    output = run("finetune_hf.py", "--steps", "6", "--batch", "4", "--context", "64",
                 "--save", str(tmp_path / "saved"), "--nvme-path", str(tmp_path))  # fmt: skip
    found = losses(output)
    assert len(found) == 6
    assert found[-1] < found[0] - 0.3
    assert "generated [" in output
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert sum(p.numel() for p in model.parameters()) > 5e5
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]


def test_lora_saves_what_plain_peft_loads(tmp_path: Path) -> None:
    output = run("lora.py", "--steps", "6", "--batch", "4", "--context", "64",
                 "--save", str(tmp_path / "saved"))  # fmt: skip
    assert losses(output)[-1] < losses(output)[0]
    ours, theirs = re.findall(r"([\d.]+) here, ([\d.]+) in plain peft", output)[0]
    assert float(ours) == pytest.approx(float(theirs), abs=1e-3)
    names = {entry.name for entry in (tmp_path / "saved").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= names


def test_trainer_refuses_to_resume_from_a_directory_that_is_temporary() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "trainer.py"), "--resume"],
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 2
    assert "--resume needs --out DIR" in done.stderr.splitlines()[-1]

"""Tests of the examples with Hugging Face models, run as scripts in this process.

Importing transformers takes longer than their training.
"""

from __future__ import annotations

import functools
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers as hf

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

import corpus
import finetune_hf

from infinity.train.texts import ByteTokenizer

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
library = functools.cache(corpus.standard_library)
Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs a script with arguments and returns its stdout."""
    monkeypatch.setattr(corpus, "standard_library", library)

    def script(name: str, *arguments: str) -> str:
        path = str(EXAMPLES / name)
        monkeypatch.setattr(sys, "argv", [path, *arguments])
        capsys.readouterr()
        runpy.run_path(path, run_name="__main__")
        return capsys.readouterr().out

    return script


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step +\d+  loss ([\d.]+)$", output, re.M)]


def test_finetune_hf_learns_generates_and_saves(tmp_path: Path, run: Run) -> None:
    output = run("finetune_hf.py", "--steps", "6", "--batch", "4", "--context", "64",
                 "--save", str(tmp_path / "saved"), "--nvme-path", str(tmp_path))  # fmt: skip
    found = losses(output)
    assert len(found) == 6
    assert found[-1] < found[0] - 0.3
    assert "generated [" in output
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert sum(p.numel() for p in model.parameters()) > 5e5
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]


def test_finetune_hf_batches_of_tokenized_text(tmp_path: Path) -> None:
    """All full batches are used; a text without one raises instead of being read forever."""
    ByteTokenizer().save_pretrained(tmp_path)
    text = SimpleNamespace(train=torch.arange(97, 105, dtype=torch.uint8))
    drawn = finetune_hf.batches(str(tmp_path), text, 2, 2)
    assert [next(drawn)[0, 0].item() for _ in range(3)] == [97, 101, 97]
    with pytest.raises(SystemExit, match="a batch has 10 tokens, the text 8"):
        next(finetune_hf.batches(str(tmp_path), text, 2, 5))


def test_lora_saves_what_plain_peft_loads(tmp_path: Path, run: Run) -> None:
    output = run("lora.py", "--steps", "6", "--batch", "4", "--context", "64",
                 "--save", str(tmp_path / "saved"))  # fmt: skip
    assert losses(output)[-1] < losses(output)[0]
    offloaded, plain = re.findall(r"([\d.]+) here, ([\d.]+) in plain peft", output)[0]
    assert float(offloaded) == pytest.approx(float(plain), abs=1e-3)
    names = {entry.name for entry in (tmp_path / "saved").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= names


def test_trainer_trains_saves_loads_and_resumes(tmp_path: Path, run: Run) -> None:
    def loss_of(output: str) -> str:
        found = re.search(r"held-out loss (\S+) nats", output)
        assert found, output
        return found[1]

    through = run("trainer.py", "--steps", "4", "--out", str(tmp_path / "out"))
    assert 3.0 < float(loss_of(through)) < 5.5  # ln(256) is 5.545
    assert "def __init__(self" in through
    assert "disk" in through
    left = {p.name for p in (tmp_path / "out").iterdir()}
    assert left == {"checkpoint-2", "checkpoint-4", "final"}
    (tmp_path / "out" / "checkpoint-4" / "trainer_state.json").unlink()
    again = run("trainer.py", "--steps", "4", "--out", str(tmp_path / "out"), "--resume")
    assert loss_of(again) == loss_of(through)


def test_trainer_resume_without_out_raises(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run("trainer.py", "--resume")
    assert ended.value.code == 2
    assert "--resume needs --out DIR" in capsys.readouterr().err.splitlines()[-1]

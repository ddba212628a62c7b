"""Tests of TRL trainers derived from InfinityTrainer against TRL's own: same data, fp32.

TRL and its dependencies are not in the development extra; `make test-doors` installs them.
Tolerance: as against `transformers.Trainer`, see `test_trainer.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from support.hf_runs import assert_same_bits, masters
from support.small import ON_DISK

pytest.importorskip("trl", reason="TRL is not installed: make test-doors")
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

import trl
import trl_trainers as example

from infinity.errors import ConfigError
from infinity.integrations.huggingface.build import load_model

pytestmark = pytest.mark.filterwarnings("ignore")
TOLERANCE = 2e-6


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return example.write_model(tmp_path / "model")


def trainer_for(
    kind: str, source: Path, out: Path, *, offload: bool, lora: bool = False, **changed: Any
) -> Any:
    head = "SequenceClassification" if kind == "reward" else "CausalLM"
    more = {"num_labels": 1} if kind == "reward" else {}
    torch.manual_seed(5)  # for a new head
    model = getattr(hf, f"LlamaFor{head}").from_pretrained(source, dtype=torch.float32, **more)
    settings = {"max_steps": 3, "adam_epsilon": 1e-5, "bf16": False, "use_cpu": True, **changed}
    given = example.given_to(kind, model, source, out, **settings)
    if lora:
        given["peft_config"] = example.adapters(kind)
    if offload:
        disk = {"nvme_path": str(source.parent), "placement": ON_DISK}
        return example.KINDS[kind][0](**given, infinity_config=disk)
    return getattr(trl, example.KINDS[kind][0].__name__)(**given)


def history(trainer: Any) -> list[tuple[float, float]]:
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [(step["loss"], float(step["grad_norm"])) for step in steps]


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("kind", list(example.KINDS))
def test_run_matches_trl(tmp_path: Path, source: Path, kind: str, lora: bool) -> None:
    stock = trainer_for(kind, source, tmp_path, offload=False, lora=lora)
    stock.train()
    offloaded = trainer_for(
        kind, source, tmp_path, offload=True, lora=lora, gradient_checkpointing=lora
    )
    offloaded.train()
    assert len(history(stock)) == 3
    for found, expected in zip(history(offloaded), history(stock), strict=True):
        assert found == pytest.approx(expected, rel=1e-5, abs=TOLERANCE)
    reference_engines = offloaded.accelerator.auxiliary_engines
    assert len(reference_engines) == (kind in ("dpo", "kto", "grpo") and not lora)
    for engine in reference_engines:
        assert engine.module is offloaded.ref_model
        assert engine.counters()["disk_read"] > 0
        assert not any(p.requires_grad for p in offloaded.ref_model.parameters())
    offloaded.close()
    assert all(engine._closed for engine in reference_engines)


@pytest.mark.parametrize("kind", ["dpo", "grpo"])
def test_resumed_run_bitwise_equal(tmp_path: Path, source: Path, kind: str) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    through = trainer_for(kind, source, tmp_path / "out", offload=True, **saving)
    through.train()
    expected = masters(through)
    through.close()
    again = trainer_for(kind, source, tmp_path / "out", offload=True, **saving)
    again.train(str(tmp_path / "out" / "checkpoint-2"))
    assert_same_bits(masters(again), expected)
    again.close()


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_precomputed_reference_log_probs_match_trl(tmp_path: Path, source: Path, kind: str) -> None:
    changed = {"precompute_ref_log_probs": True}
    stock = trainer_for(kind, source, tmp_path / "theirs", offload=False, **changed)
    stock.train()
    offloaded = trainer_for(kind, source, tmp_path / "ours", offload=True, **changed)
    assert offloaded.engine is not None
    offloaded.train()
    for found, expected in zip(history(offloaded), history(stock), strict=True):
        assert found == pytest.approx(expected, rel=1e-5, abs=TOLERANCE)
    offloaded.close()


def test_lazy_models_as_positional_arguments(tmp_path: Path, source: Path) -> None:
    given = example.given_to(
        "dpo", load_model(source), source, tmp_path, max_steps=1, bf16=False, use_cpu=True
    )
    model, args = given.pop("model"), given.pop("args")
    disk = {"nvme_path": str(tmp_path), "placement": ON_DISK}
    with example.DPOTrainer(
        model, load_model(source), args, **given, infinity_config=disk
    ) as trainer:
        trainer.train()
        assert history(trainer)[0][0] == pytest.approx(0.693147, abs=1e-5)  # ln 2: equal models


def test_sync_ref_model_raises(tmp_path: Path, source: Path) -> None:
    with pytest.raises(ConfigError, match="sync_ref_model"):
        trainer_for("dpo", source, tmp_path, offload=True, sync_ref_model=True)


@pytest.mark.parametrize("arguments", [["sft", "--lora"], ["dpo"], ["kto"], ["grpo"], ["reward"]])
def test_example_trains(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["trl_trainers.py", *arguments, "--steps", "4"])
    example.main()
    output = capsys.readouterr().out
    losses = [float(loss) for loss in output.split("losses ")[1].split()]
    assert len(losses) == 4
    assert losses[-1] < losses[0] or arguments == ["grpo"]
    assert ("for inference" in output) == (arguments[0] in ("dpo", "kto", "grpo"))

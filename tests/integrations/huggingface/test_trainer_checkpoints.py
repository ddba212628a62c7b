"""Tests of InfinityTrainer's checkpoints: bitwise resume, loading by transformers and peft."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from support.families import FAMILIES
from support.hf_runs import (
    FP32,
    Texts,
    assert_close_history,
    assert_same_bits,
    history,
    llama,
    masters,
    trainer_for,
)

from infinity.errors import ConfigError, InfinityWarning
from infinity.integrations.huggingface.build import load_model
from infinity.integrations.huggingface.trainer import InfinityTrainer
from infinity.integrations.huggingface.trainer_checkpoints import newest_complete_checkpoint

WHOLE = {"max_steps": 8, "save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": "cosine"}
# Resuming a finished run takes one more step, in Trainer too: this makes it change nothing.
STILL = {"learning_rate": 0.0}


def on_disk(path: Path) -> dict[str, Any]:
    path.mkdir(exist_ok=True)
    placement = {"weights": "disk", "optimizer_state": "disk", "gradients": "disk"}
    return {**FP32, "nvme_path": str(path), "placement": placement}


@pytest.mark.parametrize("step", [3, 5, 6])  # within an epoch, at its end, within the next
def test_resumed_run_bitwise_equal_to_uninterrupted(tmp_path: Path, step: int) -> None:
    out = tmp_path / "out"
    with trainer_for(InfinityTrainer, out, **WHOLE) as through:
        through.train()
        expected, logged = masters(through), history(through)
    for number in range(step + 1, 9):
        shutil.rmtree(out / f"checkpoint-{number}")
    options = {"infinity_config": on_disk(tmp_path / "disk")}  # another placement, same numbers
    with trainer_for(InfinityTrainer, out, None, options, **WHOLE) as resumed:
        torch.rand(7)
        resumed.train(resume_from_checkpoint=True)
        assert history(resumed)[:-1] == logged[:-1]  # the last has the mean of this call's losses
        assert resumed.engine.global_steps == 8
        assert_same_bits(masters(resumed), expected)


def test_resume_repeats_sampler_order(tmp_path: Path) -> None:
    """The sampler draws from torch's global generator, whose state is restored on resume."""
    few = {**WHOLE, "accelerator_config": {"use_seedable_sampler": False}}
    with trainer_for(InfinityTrainer, tmp_path, **few) as through:
        through.train()
        expected, logged = masters(through), history(through)
    for step in (3, 6):
        folder = str(tmp_path / f"checkpoint-{step}")
        with trainer_for(InfinityTrainer, tmp_path / "again", **few) as resumed:
            torch.rand(7)
            resumed.train(resume_from_checkpoint=folder)
            assert history(resumed)[:-1] == logged[:-1]
            assert_same_bits(masters(resumed), expected)


@pytest.mark.parametrize("step", [2, 4, 5, 6])  # 4: one batch of the epoch is left
def test_resume_repeats_random_masks(tmp_path: Path, step: int) -> None:
    class Noisy(Texts):
        def __getitem__(self, index: int) -> Any:
            item = super().__getitem__(index)
            item["input_ids"] = item["input_ids"].clone()
            item["input_ids"][random.randrange(4)] = int(np.random.randint(1, 9))
            return item

    def masked(items: Any) -> Any:
        batch = hf.default_data_collator(items)
        batch["input_ids"][torch.rand(batch["input_ids"].shape) < 0.3] = 0
        return batch

    options = {"train_dataset": Noisy(26), "data_collator": masked}
    with trainer_for(InfinityTrainer, tmp_path, None, options, **WHOLE) as through:
        through.train()
        expected = masters(through)
    with trainer_for(InfinityTrainer, tmp_path / "b", None, options, **WHOLE) as resumed:
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert_same_bits(masters(resumed), expected)


def test_checkpoint_contents(tmp_path: Path) -> None:
    few = {**WHOLE, "max_steps": 3, "save_total_limit": 2}
    with trainer_for(InfinityTrainer, tmp_path, **few) as trainer:
        trainer.train()
        assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-3"]
        folder = tmp_path / "checkpoint-3"
        assert sorted(p.name for p in folder.iterdir()) == [
            "config.json", "engine", "generation_config.json", "model.safetensors",
            "trainer_state.json", "training_args.bin",
        ]  # fmt: skip
        assert json.loads((folder / "trainer_state.json").read_text())["global_step"] == 3
        loaded = hf.AutoModelForCausalLM.from_pretrained(folder)
        assert_same_bits(dict(loaded.state_dict()), dict(trainer.engine.state_dict()))
        # Nothing is pickled except the arguments, which transformers does not load.
        assert not [p for p in folder.rglob("*") if p.suffix in (".pt", ".pth")]


def test_incomplete_checkpoint_is_skipped(tmp_path: Path) -> None:
    with trainer_for(InfinityTrainer, tmp_path, **{**WHOLE, "max_steps": 3}) as first:
        first.train()
        expected = masters(first)
    (tmp_path / "checkpoint-3" / "trainer_state.json").unlink()
    (tmp_path / "checkpoint-2" / "engine" / "manifest.json").unlink()
    with trainer_for(InfinityTrainer, tmp_path, **{**WHOLE, "max_steps": 3}) as second:
        second.train(resume_from_checkpoint=True)
        assert second._initial_global_step == 1
        assert_same_bits(masters(second), expected)


@pytest.mark.parametrize("missing", ["engine", "engine/manifest.json", "trainer_state.json"])
def test_incomplete_first_checkpoint_raises(tmp_path: Path, missing: str) -> None:
    few = {**WHOLE, "max_steps": 2, "save_steps": 2}
    with trainer_for(InfinityTrainer, tmp_path, **few) as first:
        first.train()
        expected = masters(first)
    folder = tmp_path / "checkpoint-2"
    if missing == "engine":  # as after a crash: the file written last is missing too
        shutil.rmtree(folder / "engine")
        (folder / "trainer_state.json").unlink()
    else:
        (folder / missing).unlink()
    with trainer_for(InfinityTrainer, tmp_path, **few) as second:
        with pytest.raises(ConfigError, match=r"checkpoint-2 has no .*\n.*rm -r") as caught:
            second.train(resume_from_checkpoint=True)
        assert missing in str(caught.value)
        if missing == "trainer_state.json":
            with pytest.raises(ConfigError, match="written last"):
                second.train(resume_from_checkpoint=str(folder))
        second.train()
        assert_same_bits(masters(second), expected)
        assert newest_complete_checkpoint(str(tmp_path)) == str(folder)


def test_weights_only_checkpoint_not_used_for_auto_resume(tmp_path: Path) -> None:
    assert newest_complete_checkpoint(str(tmp_path)) is None
    options = {**WHOLE, "max_steps": 2, "save_only_model": True}
    with trainer_for(InfinityTrainer, tmp_path, **options) as first:
        first.train()
    weights = str(tmp_path / "checkpoint-2")
    with pytest.raises(ConfigError, match="contains only weights") as caught:
        newest_complete_checkpoint(str(tmp_path))
    assert f"resume_from_checkpoint={weights!r}" in str(caught.value)
    shutil.rmtree(tmp_path / "checkpoint-1")
    with trainer_for(InfinityTrainer, tmp_path, **{**WHOLE, "max_steps": 1}) as other:
        other.train()
    with trainer_for(InfinityTrainer, tmp_path, **{**WHOLE, "max_steps": 3}) as second:
        with pytest.warns(InfinityWarning, match=r"1 newer ones, up to checkpoint-2, contain only"):
            second.train(resume_from_checkpoint=True)
        assert second._initial_global_step == 1


def test_weights_only_checkpoint_resumed_with_warning(tmp_path: Path) -> None:
    options = {**WHOLE, "max_steps": 2, "save_only_model": True}
    with trainer_for(InfinityTrainer, tmp_path, **options) as first:
        first.train()
        expected = masters(first)
    assert not (tmp_path / "checkpoint-2" / "engine").exists()
    with trainer_for(InfinityTrainer, tmp_path, **{**options, **STILL}) as second:
        with pytest.warns(InfinityWarning, match="optimizer state starts anew"):
            second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert_same_bits(masters(second), expected)


@pytest.mark.parametrize("kind", ["experts that are fused", "adapters"])
def test_best_weights_loaded_from_weights_only_checkpoint(kind: str, tmp_path: Path) -> None:
    """Loaded by transformers' rules for renamed, fused and partial weights."""
    best = {
        "save_only_model": True,
        "load_best_model_at_end": True,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,
    }
    model = FAMILIES["mixtral"].build() if kind == "experts that are fused" else llama()
    if kind == "adapters":
        torch.manual_seed(0)
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"],
                                                           init_lora_weights=False))  # fmt: skip
    few = {**WHOLE, **best, "max_steps": 3}
    with trainer_for(InfinityTrainer, tmp_path, model, **few) as trainer:
        trainer.train()
        evaluated = [entry["eval_loss"] for entry in history(trainer) if "eval_loss" in entry]
        assert trainer.state.best_global_step == 1 + evaluated.index(max(evaluated))
        assert max(evaluated) > min(evaluated)
        assert trainer.evaluate()["eval_loss"] == pytest.approx(max(evaluated), rel=1e-6)


def test_checkpoint_weights_exchanged_with_trainer(tmp_path: Path) -> None:
    few = {**WHOLE, "max_steps": 2}
    with trainer_for(InfinityTrainer, tmp_path / "ours", **few) as offloaded:
        offloaded.train()
        expected = offloaded.evaluate()["eval_loss"]
    stock = trainer_for(hf.Trainer, tmp_path / "theirs", **{**few, **STILL})
    stock.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-2"))
    assert abs(stock.evaluate()["eval_loss"] - expected) < 1e-5
    with trainer_for(InfinityTrainer, tmp_path / "again", **{**few, **STILL}) as again:
        with pytest.warns(InfinityWarning, match="another Trainer"):
            again.train(resume_from_checkpoint=str(tmp_path / "theirs" / "checkpoint-3"))
        assert abs(again.evaluate()["eval_loss"] - expected) < 1e-5


def test_tied_weights_saved_once_and_loaded_tied(tmp_path: Path) -> None:
    with trainer_for(InfinityTrainer, tmp_path, llama(tied=True), max_steps=1) as trainer:
        trainer.train()
        trainer.save_model(str(tmp_path / "saved"))
        assert "lm_head.weight" not in load_file(tmp_path / "saved" / "model.safetensors")
        loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        assert_same_bits(dict(loaded.state_dict()), dict(trainer.engine.state_dict()))


def test_lazily_loaded_model_saves_and_trains_equally(tmp_path: Path) -> None:
    llama(dropout=0.0).save_pretrained(tmp_path / "source")
    unread = load_model(tmp_path / "source", FP32)
    unread.train()
    runs = []
    for model in (unread, llama(dropout=0.0)):
        with trainer_for(InfinityTrainer, tmp_path, model, max_steps=2) as trainer:
            trainer.save_model(str(tmp_path / "before"))
            saved = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "before").state_dict()
            assert_same_bits(dict(saved), dict(llama().state_dict()))
            trainer.train()
            runs.append(masters(trainer))
    assert_same_bits(*runs)


def test_save_model_before_training(tmp_path: Path) -> None:
    with trainer_for(InfinityTrainer, tmp_path) as trainer:
        trainer.save_model(str(tmp_path / "saved"))
        assert trainer.engine is None
        loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
        assert_same_bits(dict(loaded.state_dict()), dict(llama().state_dict()))


def test_best_model_restores_fp32_masters(tmp_path: Path) -> None:
    saved = {}

    class Keep(hf.TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            saved[state.global_step] = masters(trainer)

    options = {"infinity_config": {"precision": "bf16"}, "callbacks": [Keep()]}
    trainer = trainer_for(
        InfinityTrainer, tmp_path, None, options, max_steps=4, learning_rate=0.1,
        eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
        load_best_model_at_end=True, gradient_accumulation_steps=1,
    )  # fmt: skip
    with trainer:
        trainer.train()
        best = trainer.state.best_global_step
        assert best < 4
        assert_same_bits(masters(trainer), saved[best])
        bits = saved[best]["model.norm.weight"]
        assert not torch.equal(bits, bits.bfloat16().float())


def test_resume_from_missing_folder_raises(tmp_path: Path) -> None:
    with (
        trainer_for(InfinityTrainer, tmp_path) as trainer,
        pytest.raises(ConfigError, match="is no directory"),
    ):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-9"))


# --- adapters ----------------------------------------------------------------------------------


def adapted() -> Any:
    config = peft.LoraConfig(
        r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    model = llama()
    torch.manual_seed(1)
    return peft.get_peft_model(model, config)


def test_adapters_trained_saved_and_resumed(tmp_path: Path) -> None:
    stock = trainer_for(hf.Trainer, tmp_path / "theirs", adapted(), **WHOLE)
    stock.train()
    with trainer_for(InfinityTrainer, tmp_path / "ours", adapted(), **WHOLE) as offloaded:
        offloaded.train()
        assert_close_history(offloaded, stock, 2e-6)
        expected, loss = masters(offloaded), offloaded.evaluate()["eval_loss"]
        offloaded.save_model(str(tmp_path / "saved"))
    names = {p.name for p in (tmp_path / "saved").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= names
    assert not any(name.startswith("model") for name in names)
    assert len(load_file(tmp_path / "saved" / "adapter_model.safetensors")) == 8
    loaded = peft.PeftModel.from_pretrained(llama(), tmp_path / "saved")
    again = trainer_for(hf.Trainer, tmp_path / "eval", loaded).evaluate()
    assert abs(again["eval_loss"] - loss) < 1e-6
    base = {n: v for n, v in expected.items() if "lora" not in n}
    assert_same_bits(base, {n: v for n, v in adapted().state_dict().items() if "lora" not in n})
    checkpoint = tmp_path / "ours" / "checkpoint-3"
    with trainer_for(InfinityTrainer, tmp_path / "resumed", adapted(), **WHOLE) as resumed:
        resumed.train(resume_from_checkpoint=str(checkpoint))
        assert_same_bits(masters(resumed), expected)


def test_label_smoothing_with_adapters_matches_trainer(tmp_path: Path) -> None:
    changed = {"label_smoothing_factor": 0.1, "max_steps": 2}
    stock = trainer_for(hf.Trainer, tmp_path / "theirs", adapted(), **changed)
    stock.train()
    with trainer_for(InfinityTrainer, tmp_path / "ours", adapted(), **changed) as offloaded:
        offloaded.train()
        assert_close_history(offloaded, stock, 2e-6)


def test_resume_over_iterable_dataset(tmp_path: Path) -> None:
    class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return iter(Texts(26)[i] for i in range(26))

    options = {"train_dataset": Stream()}
    arguments = {**WHOLE, "max_steps": 6, "gradient_accumulation_steps": 2}
    with trainer_for(InfinityTrainer, tmp_path, None, options, **arguments) as through:
        through.train()
        expected = masters(through)
    with trainer_for(InfinityTrainer, tmp_path / "b", None, options, **arguments) as resumed:
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
        assert_same_bits(masters(resumed), expected)

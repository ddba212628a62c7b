"""Script with the stock Trainer and a DeepSpeed configuration: train, save, resume."""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
# Optimizer and scheduler sections whose "auto" values transformers fills in.
SECTIONS = {
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
}  # fmt: skip


class Tokens(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows = torch.randint(0, 64, (count, 16), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def pretrained(folder: Path) -> Path:
    torch.manual_seed(0)
    path = folder / "pretrained"
    if not path.exists():
        LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(path)
    return path


def trainer_of(config: str | None, folder: Path, **more: Any) -> Trainer:
    args = TrainingArguments(
        output_dir=str(folder), deepspeed=config, per_device_train_batch_size=2,
        gradient_accumulation_steps=2, max_steps=6, learning_rate=1e-2, warmup_steps=2,
        logging_steps=1, save_steps=3, eval_steps=3, eval_strategy="steps", report_to=[],
        seed=3, disable_tqdm=True, **more,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(pretrained(folder.parent))
    return Trainer(model=model, args=args, train_dataset=Tokens(40, 1), eval_dataset=Tokens(8, 2))


def digest(path: Path) -> str:
    return hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()


def numbers(trainer: Trainer) -> list[Any]:
    keys = ("loss", "grad_norm", "learning_rate", "eval_loss")
    history = [{key: row[key] for key in keys if key in row} for row in trainer.state.log_history]
    return [row for row in history if row]


def main(config: str, folder: Path) -> dict[str, Any]:
    uninterrupted = trainer_of(config, folder / "whole", load_best_model_at_end=True)
    uninterrupted.train()
    evaluated = uninterrupted.evaluate()["eval_loss"]
    assert evaluated == min(
        r["eval_loss"] for r in uninterrupted.state.log_history if "eval_loss" in r
    )
    uninterrupted.save_model(str(folder / "saved"))
    uninterrupted.model_wrapped.destroy()
    resumed = trainer_of(config, folder / "whole", load_best_model_at_end=True)
    resumed.train(resume_from_checkpoint=str(folder / "whole" / "checkpoint-3"))
    resumed.save_model(str(folder / "resumed"))
    resumed.model_wrapped.destroy()
    assert digest(folder / "saved") == digest(folder / "resumed")
    logged = numbers(uninterrupted)
    assert [row for row in numbers(resumed) if row in logged], logged
    given = json.loads(Path(config).read_text()) | SECTIONS
    sections = folder / "sections.json"
    sections.write_text(json.dumps(given))
    if given["zero_optimization"]["stage"] == 3:  # required by transformers for inference
        evaluator = trainer_of(str(sections), folder / "alone")
        found = evaluator.evaluate()["eval_loss"]
        rows = Tokens(8, 2).rows
        plain = AutoModelForCausalLM.from_pretrained(pretrained(folder))
        assert abs(found - float(plain(input_ids=rows, labels=rows).loss)) < 1e-5
        evaluator.accelerator.deepspeed_engine_wrapped.engine.destroy()
    weights_only = trainer_of(str(sections), folder / "only", save_only_model=True)
    weights_only.train()
    weights_only.model_wrapped.destroy()
    names = {path.name for path in (folder / "only" / "checkpoint-6").iterdir()}
    assert "model.safetensors" in names
    assert not any(name.startswith("global_step") for name in names), names
    loaded = AutoModelForCausalLM.from_pretrained(folder / "only" / "checkpoint-6")
    assert loaded.config.hidden_size == SHAPE["hidden_size"]
    logged += numbers(weights_only)
    return {"numbers": logged, "weights": digest(folder / "saved")}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--deepspeed")
    arguments = parser.parse_args()
    print(json.dumps(main(arguments.deepspeed, arguments.folder)))

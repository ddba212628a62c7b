"""Script with the stock Trainer: evaluate before training, train twice, find the batch size."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from hf_trainer import Tokens, numbers, pretrained
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from infinity.storage.reservations import PROCESS

LARGEST = 2  # samples per batch that "fit" in memory


def trainer_of(config: str | None, folder: Path, **more: Any) -> Trainer:
    args = TrainingArguments(
        output_dir=str(folder), deepspeed=config, per_device_train_batch_size=2, max_steps=2,
        learning_rate=1e-2, logging_steps=1, save_strategy="no", report_to=[], seed=3,
        disable_tqdm=True, **more,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(pretrained(folder))
    return Trainer(model=model, args=args, train_dataset=Tokens(40, 1), eval_dataset=Tokens(8, 2))


def train_twice(config: str | None, folder: Path, *, first: bool) -> list[Any]:
    """Return the losses of two rounds of `train()` and `evaluate()`; evaluate before if `first`."""
    trainer, found = trainer_of(config, folder), list[Any]()
    if first:
        assert abs(trainer.evaluate()["eval_loss"] - 4.16) < 0.01
    for _ in range(2):
        trainer.train()
        trainer.evaluate()
        found += numbers(trainer)
        trainer.optimizer = None  # as with DeepSpeed: optimizer state is not carried over
    return found


def out_of_memory(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
    if module.training and len(kwargs["input_ids"]) > LARGEST:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def train_with_smaller_batches(config: str | None, folder: Path) -> list[Any]:
    """Return the losses of a run whose initial batch size was too large."""
    trainer = trainer_of(config, folder, auto_find_batch_size=True)
    trainer.args.per_device_train_batch_size = trainer._train_batch_size = LARGEST + 1
    trainer.model.register_forward_pre_hook(out_of_memory, with_kwargs=True)
    trainer.train()
    assert trainer._train_batch_size == LARGEST
    trainer.evaluate()
    return numbers(trainer)


def main(config: str, folder: Path) -> dict[str, Any]:
    zero = json.loads(Path(config).read_text())["zero_optimization"]
    found = {}
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)  # set by an earlier Trainer
    for path in (None, config):
        found[path] = [train_twice(path, folder, first=zero["stage"] == 3)]
        AcceleratorState._reset_state(True)
        if zero["stage"] < 3:  # required by transformers
            found[path].append(train_with_smaller_batches(path, folder))
            AcceleratorState._reset_state(True)
    gc.collect()
    assert not PROCESS._entries
    if "offload_param" in zero:
        assert not list(Path(zero["offload_param"]["nvme_path"]).iterdir())
    for plain_rows, deepspeed_rows in zip(*found.values(), strict=True):
        assert len(plain_rows) == len(deepspeed_rows) >= 3
        for plain, row in zip(plain_rows, deepspeed_rows, strict=True):
            for key in plain:
                assert abs(plain[key] - row[key]) <= 1e-5 * abs(plain[key]), (plain, row)
    return {"twice": found[config][0]}

"""Tiny models and data to train with both `Trainer` and `InfinityTrainer`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.utils.data import Dataset

from infinity.engine import Engine
from infinity.integrations.huggingface.trainer import InfinityTrainer

VOCABULARY = 48
LENGTH = 10
FP32 = {"precision": "fp32"}
# Keys whose values differ between runs and machines.
_TIMES = ("runtime", "per_second", "preparation_time", "step_s", "stall_s", "per_s", "_gib")


class Texts(Dataset[dict[str, Tensor]]):
    """Random tokens; labels end at different positions, so that numbers of items differ."""

    def __init__(self, count: int, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(1, VOCABULARY, (count, LENGTH), generator=generator)
        self.ends = torch.randint(4, LENGTH + 1, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        labels = self.tokens[index].clone()
        labels[self.ends[index] :] = -100
        return {"input_ids": self.tokens[index], "labels": labels}


def llama(*, tied: bool = False, dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32,
            attention_dropout=dropout, tie_word_embeddings=tied, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=1,
            eos_token_id=2,
        )
    )  # fmt: skip


def arguments(out: Path, **changed: Any) -> Any:
    """Return training arguments; `changed` overrides them.

    26 samples in batches of 2 give 13 batches per epoch; with windows of 3 the last window of an
    epoch has one batch. Adam's epsilon is larger than usual: with the default a gradient of nearly
    0 makes a step of any size, and since processors round differently, one weight in 256 would
    differ.
    """
    defaults: dict[str, Any] = {
        "output_dir": str(out), "per_device_train_batch_size": 2, "max_steps": 7,
        "logging_steps": 1, "learning_rate": 1e-2, "weight_decay": 0.1, "adam_epsilon": 1e-5,
        "gradient_accumulation_steps": 3, "seed": 3, "report_to": "none",
        "use_cpu": not torch.cuda.is_available(),
        "disable_tqdm": True, "save_strategy": "no",
    }  # fmt: skip
    kind = changed.pop("arguments", hf.TrainingArguments)
    return kind(**{**defaults, **changed})


def trainer_for(
    kind: Any, out: Path, model: Any = None, options: Any = None, **changed: Any
) -> Any:
    """Return a trainer of class `kind` with `options`; `changed` overrides TrainingArguments."""
    keywords: dict[str, Any] = {"train_dataset": Texts(26), "eval_dataset": Texts(7, seed=2)}
    if issubclass(kind, InfinityTrainer):
        keywords["infinity_config"] = FP32
    keywords.update(options or {})
    if "model_init" not in keywords:
        keywords["model"] = llama() if model is None else model
    return kind(args=arguments(out, **changed), **keywords)


def history(trainer: Any) -> list[dict[str, float]]:
    """Return the log history without times."""
    return [
        {k: v for k, v in entry.items() if not any(word in k for word in _TIMES)}
        for entry in trainer.state.log_history
    ]


def assert_close_history(one: Any, other: Any, tolerance: float) -> None:
    """Assert equal keys in equal order, and values within a relative tolerance."""
    first, second = history(one), history(other)
    assert [list(entry) for entry in first] == [list(entry) for entry in second]
    for values, others in zip(first, second, strict=True):
        for key, value in values.items():
            assert abs(value - others[key]) <= tolerance * max(1.0, abs(others[key])), (key, values)


def masters(trainer: InfinityTrainer) -> dict[str, Tensor]:
    assert trainer.engine is not None
    return dict(Engine.state_dict(trainer.engine, master=True))


def assert_same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name

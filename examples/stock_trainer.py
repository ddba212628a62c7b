"""Train with the stock `transformers.Trainer`, without and with `infinity run`.

    python examples/stock_trainer.py
    infinity run examples/stock_trainer.py --deepspeed examples/configs/ds_infinity.json

The second keeps weights, gradients and optimizer state on disk, in a subdirectory of the working
directory that is removed at the end. A small Llama learns the text of Python's library, one byte a
token; meant for a GPU and a model of your own (`--model_name_or_path`), runs on any CPU in seconds.
All options of `TrainingArguments` are accepted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from corpus import standard_library
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

CONTEXT = 64


class Pieces(Dataset[dict[str, Tensor]]):
    """Consecutive slices of `CONTEXT` bytes of a text."""

    def __init__(self, text: Tensor, count: int) -> None:
        self.rows = text[: count * CONTEXT].view(count, CONTEXT).long()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


@dataclass
class ModelArguments:
    """Choice of the model."""

    model_name_or_path: str | None = None


def build(given: ModelArguments) -> PreTrainedModel:
    """Return the requested model, or a Llama of 0.2M parameters."""
    if given.model_name_or_path is not None:
        return AutoModelForCausalLM.from_pretrained(given.model_name_or_path)
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=CONTEXT,
        )
    )  # fmt: skip


def main() -> None:
    """Train, evaluate, and print losses."""
    parser = HfArgumentParser((TrainingArguments, ModelArguments))  # type: ignore[arg-type]
    parser.set_defaults(
        output_dir="stock_trainer", max_steps=20, per_device_train_batch_size=4, learning_rate=3e-3,
        logging_steps=5, save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    arguments, given = parser.parse_args_into_dataclasses()
    text = standard_library()
    trainer = Trainer(
        model=build(given), args=arguments, train_dataset=Pieces(text.train, 200),
        eval_dataset=Pieces(text.held_out, 16),
    )  # fmt: skip
    trainer.train()
    print(f"held-out loss {trainer.evaluate()['eval_loss']:.4f}")
    for row in trainer.state.log_history:
        if "loss" in row:
            print(f"step {row['step']:3}  loss {row['loss']:.4f}")


if __name__ == "__main__":
    main()

"""Train a small Llama with `InfinityTrainer`: a Trainer script with two imports changed.

Meant for one GPU with less memory than the model needs, and a fast drive: there, take a model of
billions of parameters, bf16=True, and a directory on that drive for `nvme_path`. Runs on any CPU in
about a minute, with the state on disk as a demonstration.

    python examples/trainer.py [--out DIR [--resume]] [--steps 40] [--ds-config ds_config.json]

One byte is one token. At the end the saved directory is loaded with `from_pretrained`, and the
model completes the start of a function. `--resume` with the same `--out` continues an interrupted
run bit for bit; without `--out` checkpoints are temporary, and `--resume` is refused.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from corpus import standard_library
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from infinity import InfinityTrainer as Trainer  # from transformers import Trainer
from infinity import Init, TrainingArguments  # from transformers import TrainingArguments

CONTEXT = 128


class Pieces(Dataset[dict[str, Tensor]]):
    """Evenly spread slices of `CONTEXT` bytes of a text."""

    def __init__(self, text: Tensor, count: int) -> None:
        last = len(text) - CONTEXT
        starts = [last * index // count for index in range(count)]
        self.rows = torch.stack([text[start : start + CONTEXT] for start in starts]).long()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def build() -> LlamaForCausalLM:
    """Return a model of 0.9M parameters; `Init` defers their allocation to the engine."""
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=384, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4 * CONTEXT,
        tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    with Init():
        return LlamaForCausalLM(config)


def main() -> None:
    """Train, evaluate, save, and load what was saved."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="where checkpoints go; default: a temporary one")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    parser.add_argument("--ds-config", help="a DeepSpeed configuration, used as it is")
    given = parser.parse_args()
    if given.resume and given.out is None:
        parser.error("--resume needs --out DIR, the directory of the run that was interrupted")
    with tempfile.TemporaryDirectory() as scratch:
        run(given, given.out or Path(scratch) / "run", Path(scratch))


def run(given: argparse.Namespace, out: Path, scratch: Path) -> None:
    """Run an ordinary Trainer script; only `infinity_config` is special."""
    arguments = TrainingArguments(
        output_dir=str(out), max_steps=given.steps, per_device_train_batch_size=4,
        gradient_accumulation_steps=2, learning_rate=3e-3, lr_scheduler_type="cosine",
        warmup_steps=5, weight_decay=0.1, max_grad_norm=1.0, logging_steps=10,
        eval_strategy="steps", eval_steps=max(given.steps // 2, 1), save_strategy="steps",
        save_steps=max(given.steps // 2, 1), save_total_limit=2, load_best_model_at_end=True,
        bf16=torch.cuda.is_available(), report_to="none", disable_tqdm=True, seed=1,
        dataloader_pin_memory=torch.cuda.is_available(),
    )  # fmt: skip
    text = standard_library()
    disk = {
        "nvme_path": str(scratch),
        "placement": {"weights": "disk", "optimizer_state": "disk", "gradients": "disk"},
    }
    with Trainer(
        model=build(),
        args=arguments,
        train_dataset=Pieces(text.train, 2048),
        eval_dataset=Pieces(text.held_out, 16),
        infinity_config=given.ds_config or disk,
    ) as trainer:
        trainer.train(resume_from_checkpoint=given.resume or None)
        print(trainer.engine.plan.describe())
        loss = trainer.evaluate()["eval_loss"]
        trainer.save_model(str(out / "final"))
    model = AutoModelForCausalLM.from_pretrained(out / "final")
    prompt = torch.tensor([list(b"def __init__(self")])
    written = model.generate(prompt, max_new_tokens=40, do_sample=True, top_k=8)[0].tolist()
    print(f"held-out loss {loss:.4f} nats a byte")
    print(bytes(written).decode("utf-8", "replace"))


if __name__ == "__main__":
    main()

"""Fine-tune a Hugging Face model larger than GPU memory and RAM, and save it for transformers.

    python examples/finetune_hf.py --model /path/to/Llama-3.1-8B --nvme-path /fast/drive

Meant for one GPU of 24 GB or more and a fast drive: 8 billion parameters take 97 GB there with
AdamW, 70 billion 840 GB. Without `--model` it writes a small model of bytes with random weights
and trains that on the source of Python's standard library: any CPU, a minute.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import corpus
import torch
from _small_model import write_small_model
from torch import Tensor

import infinity


def batches(model: str | None, text: Any, size: int, context: int) -> Iterator[Tensor]:
    """Yield batches of token ids: bytes, or by the model's tokenizer."""
    if model is None:
        for tokens, _ in corpus.batches(text.train, seed=0, micro_batch=size, context=context):
            yield tokens
        return
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    ids = tokenizer(bytes(text.train[: 1 << 20].tolist()).decode(errors="ignore"))["input_ids"]
    length = size * context
    starts = range(0, len(ids) - length + 1, length)
    if not starts:
        raise SystemExit(f"a batch has {length} tokens, the text {len(ids)}: a smaller --batch")
    while True:
        for start in starts:
            yield torch.tensor(ids[start : start + length]).view(size, context)


def read_arguments(doc: str | None, saved: str, lr: float, small_lr: float) -> argparse.Namespace:
    """Parse the command line; `saved` is for `--save`'s help, `small_lr` for the small model."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--model", help="a directory or Hub id; default: a small model of bytes")
    parser.add_argument("--nvme-path", default=None, help="a directory on your fastest drive")
    parser.add_argument("--save", default=None, help=f"where {saved}")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument(
        "--lr", type=float, help=f"default: {lr:g}, of the small model {small_lr:g}"
    )
    arguments = parser.parse_args()
    if arguments.lr is None:
        arguments.lr = lr if arguments.model else small_lr
    return arguments


def main() -> None:
    """Parse, train, save."""
    arguments = read_arguments(__doc__, "the fine-tuned model goes", lr=1e-5, small_lr=2e-3)

    on_gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        drive = Path(arguments.nvme_path or folder)
        source = arguments.model or write_small_model(Path(folder) / "small")
        config = {
            "nvme_path": str(drive),
            "placement": {"optimizer_state": "disk"} if arguments.model else {"weights": "disk"},
            "precision": "bf16" if on_gpu else "fp32",
            "optimizer": {"type": "AdamW", "lr": arguments.lr},
            "scheduler": {"type": "LinearLR", "params": {"total_iters": arguments.steps // 4}},
            "seed": 0,
        }
        engine, *_ = infinity.from_pretrained(source, config)
        with engine:
            engine.module.gradient_checkpointing_enable()
            engine.train()
            token_batches = batches(
                arguments.model, corpus.standard_library(), arguments.batch, arguments.context
            )
            for step in range(arguments.steps):
                tokens = next(token_batches).to(engine.device)
                loss = engine.train_batch({"input_ids": tokens, "labels": tokens})
                print(f"step {step + 1:3d}  loss {loss.item():.4f}", flush=True)

            engine.eval()
            prompt = next(token_batches)[:1, :16].to(engine.device)
            made = engine.module.generate(prompt, max_new_tokens=32, do_sample=False)
            print("generated", made[0, 16:].tolist())
            target = Path(arguments.save or Path(folder) / "fine-tuned")
            files = infinity.save_pretrained(engine, target)
            print(f"saved {', '.join(file.name for file in files)} in {target}")


if __name__ == "__main__":
    main()

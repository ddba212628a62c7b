"""Train LoRA adapters with unmodified peft while the base model is on disk.

    python examples/lora.py --model /path/to/Llama-3.1-70B --nvme-path /fast/drive

Meant for one GPU of 16 GB or more: the frozen base takes 2 bytes per parameter on any tier (141 GB
of drive for 70 billion), and only adapters have optimizer state. Without `--model` it adapts a
small model of bytes with random weights: any CPU, a minute.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import corpus
import peft
import torch
import transformers
from _small_model import write_small_model
from finetune_hf import batches, read_arguments

import infinity


def adapted(model: Any) -> Any:
    """Return the model with adapters on its attention; the base is frozen."""
    config = peft.LoraConfig(
        r=8,
        lora_alpha=16,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(model, config)


def main() -> None:
    """Parse, train, save."""
    arguments = read_arguments(__doc__, "the adapters go", lr=1e-4, small_lr=1e-2)

    on_gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        source = arguments.model or write_small_model(Path(folder) / "small")
        config = {
            "nvme_path": arguments.nvme_path or folder,
            "placement": {"weights": "disk"},  # adapters too; or leave it out: the plan decides
            "precision": "bf16" if on_gpu else "fp32",
            "optimizer": {"type": "AdamW", "lr": arguments.lr},
            "seed": 0,
        }
        engine, *_ = infinity.from_pretrained(source, config, prepare=adapted)
        target = Path(arguments.save or Path(folder) / "adapters")
        with engine:
            engine.module.print_trainable_parameters()
            engine.train()
            token_batches = batches(
                arguments.model, corpus.standard_library(), arguments.batch, arguments.context
            )
            for step in range(arguments.steps):
                tokens = next(token_batches).to(engine.device)
                loss = engine(input_ids=tokens, labels=tokens).loss
                engine.backward(loss)
                engine.step()
                print(f"step {step + 1:3d}  loss {loss.item():.4f}", flush=True)
            engine.eval()
            infinity.save_pretrained(engine, target)  # or engine.module.save_pretrained(target)
            with torch.no_grad():
                found = engine(input_ids=tokens, labels=tokens).loss.item()

        if arguments.model is None:  # loaded without infinity
            plain = transformers.AutoModelForCausalLM.from_pretrained(source)
            plain = peft.PeftModel.from_pretrained(plain, target).eval()
            with torch.no_grad():
                expected = plain(input_ids=tokens.cpu(), labels=tokens.cpu()).loss.item()
            print(f"loss with the saved adapters: {found:.4f} here, {expected:.4f} in plain peft")


if __name__ == "__main__":
    main()

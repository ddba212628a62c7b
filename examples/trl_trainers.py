"""Train with TRL: SFT, DPO, KTO, GRPO and reward trainers over `InfinityTrainer`.

Meant for one GPU with less memory than the models need, and a fast drive: there, give the directory
of a model (`--model`). The trained model, its optimizer state and a reference model are on disk,
within one budget. Runs on any CPU in seconds, with a small random model that learns to count.

    pip install trl
    python examples/trl_trainers.py [sft|dpo|kto|grpo|reward] [--lora] [--steps 8] [--model DIR]
"""

from __future__ import annotations

import argparse
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers

from infinity import InfinityTrainer
from infinity.huggingface.models import load_model

NUMBERS = 24


class SFTTrainer(InfinityTrainer, trl.SFTTrainer):
    """`trl.SFTTrainer` over an engine."""


class DPOTrainer(InfinityTrainer, trl.DPOTrainer):
    """`trl.DPOTrainer` over an engine; a second engine offloads the reference."""


class KTOTrainer(InfinityTrainer, trl.KTOTrainer):
    """`trl.KTOTrainer` over an engine; a second engine offloads the reference."""


class GRPOTrainer(InfinityTrainer, trl.GRPOTrainer):
    """`trl.GRPOTrainer` over an engine, also for generation."""


class RewardTrainer(InfinityTrainer, trl.RewardTrainer):
    """`trl.RewardTrainer` over an engine."""


def counting(start: int, step: int, length: int) -> str:
    """Return numbers from `start` as words."""
    return " ".join(f"n{(start + step * i) % NUMBERS}" for i in range(length))


def ascending(completions: list[str], **_: Any) -> list[float]:
    """Return rewards for GRPO: the number of words that are followed by the next number."""
    rewards = []
    for text in completions:
        found = [int(word[1:]) for word in text.split() if word[1:].isdigit()]
        rewards.append(float(sum(b == a + 1 for a, b in pairwise(found))))
    return rewards


def rows(kind: str, count: int = 16) -> Dataset:
    """Return texts that count up, and others that do not, in the format of the trainer."""
    found: list[dict[str, Any]] = []
    for n in range(count):
        prompt, up, down = counting(n, 1, 3) + " ", counting(n + 3, 1, 4), counting(n, -2, 4)
        found.append({
            "sft": {"text": prompt + up},
            "dpo": {"prompt": prompt, "chosen": up, "rejected": down},
            "kto": {"prompt": prompt, "completion": up if n % 2 else down, "label": bool(n % 2)},
            "grpo": {"prompt": prompt},
            "reward": {"chosen": prompt + up, "rejected": prompt + down},
        }[kind])  # fmt: skip
    return Dataset.from_list(found)


def write_model(directory: Path) -> Path:
    """Save a small random Llama and a word-level tokenizer; return the directory."""
    words = ["<pad>", "<end>", "<unknown>", *(f"n{n}" for n in range(NUMBERS))]
    vocabulary = {word: index for index, word in enumerate(words)}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<end>", unk_token="<unknown>"
    )
    config = transformers.LlamaConfig(
        vocab_size=len(words), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0,
        bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "sft": (SFTTrainer, trl.SFTConfig, {"packing": True, "max_length": 32}),
    "dpo": (DPOTrainer, trl.DPOConfig, {}),
    "kto": (KTOTrainer, trl.KTOConfig, {}),
    "grpo": (
        GRPOTrainer, trl.GRPOConfig,
        {"num_generations": 4, "max_completion_length": 8, "beta": 0.05},
    ),
    "reward": (RewardTrainer, trl.RewardConfig, {}),
}  # fmt: skip


def given_to(kind: str, model: Any, source: Path, out: Path, **changed: Any) -> dict[str, Any]:
    """Return the arguments of a trainer of this kind; `changed` overrides its configuration."""
    _, configuration, more = KINDS[kind]
    settings = {
        "output_dir": str(out), "max_steps": 8, "per_device_train_batch_size": 4,
        "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no", "report_to": "none",
        "disable_tqdm": True, "seed": 1, "bf16": torch.cuda.is_available(), **more, **changed,
    }  # fmt: skip
    given = {
        "model": model,
        "args": configuration(**settings),
        "train_dataset": rows(kind),
        "processing_class": transformers.AutoTokenizer.from_pretrained(source),
    }
    if kind == "grpo":
        given["reward_funcs"] = ascending
    return given


def adapters(kind: str) -> LoraConfig:
    """Return a LoRA configuration for the attention projections."""
    task = "SEQ_CLS" if kind == "reward" else "CAUSAL_LM"
    return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type=task)


def main() -> None:
    """Train one kind; print the plan and the losses."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", nargs="?", choices=[*KINDS], default="dpo")
    parser.add_argument("--lora", action="store_true", help="train adapters, the base stays")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--model", type=Path, help="a directory with a model and its tokenizer")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        source = arguments.model or write_model(Path(scratch) / "model")
        disk = {"nvme_path": scratch, "placement": {"weights": "disk", "optimizer_state": "disk"}}
        model_options: dict[str, Any] = {}
        if arguments.kind == "reward":
            head = transformers.AutoModelForSequenceClassification
            facts = transformers.AutoConfig.from_pretrained(source, num_labels=1)
            model_options = {"model_class": head, "model_config": facts}
        given = given_to(
            arguments.kind,
            load_model(source, disk, **model_options),  # weights are read by the engine
            source,
            Path(scratch) / "out",
            max_steps=arguments.steps,
        )
        if arguments.kind in ("dpo", "kto") and not arguments.lora:
            given["ref_model"] = load_model(source, disk)
        if arguments.lora:
            given["peft_config"] = adapters(arguments.kind)
        with KINDS[arguments.kind][0](**given, infinity_config=disk) as trainer:
            trainer.train()
            print(trainer.engine.plan.describe())
            for engine in trainer.accelerator.auxiliary_engines:
                print("beside it, for inference:")
                print(engine.plan.describe())
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        print("losses", " ".join(f"{loss:.4f}" for loss in losses))


if __name__ == "__main__":
    main()

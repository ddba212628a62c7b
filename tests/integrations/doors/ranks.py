"""Script with the stock Trainer and accelerate on any number of ranks: 8 micro-batches a step."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import AcceleratorState
from hf_trainer import SHAPE, Tokens, digest, numbers
from torch import nn
from torch.utils.data import DataLoader, Sampler, SequentialSampler, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

RANKS = int(os.environ["WORLD_SIZE"])


class InOrder(Trainer):
    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Sampler[int]:
        return SequentialSampler(Tokens(64, 1))


def train(config: dict[str, Any], folder: Path, resume: Path | None = None) -> dict[str, Any]:
    torch.manual_seed(0)
    args = TrainingArguments(
        output_dir=str(folder), deepspeed=config, per_device_train_batch_size=2, max_steps=4,
        gradient_accumulation_steps=8 // RANKS, learning_rate=1e-2,
        lr_scheduler_type="linear", logging_steps=1, save_steps=2, eval_steps=2,
        eval_strategy="steps", report_to=[], seed=3, disable_tqdm=True,
    )  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    trainer = InOrder(
        model=model, args=args, train_dataset=Tokens(64, 1), eval_dataset=Tokens(8, 2)
    )
    trainer.train(resume_from_checkpoint=resume and str(resume))
    trainer.save_model(str(folder / "saved"))
    trainer.model_wrapped.destroy()
    dist.barrier()
    return {"numbers": numbers(trainer), "weights": digest(folder / "saved")}


def accelerated(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    AcceleratorState._reset_state(reset_partial_state=False)
    steps = 8 // RANKS
    config = {**config, "gradient_accumulation_steps": steps, "train_batch_size": 16}
    accelerator = Accelerator(
        gradient_accumulation_steps=steps, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config)
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = TensorDataset(torch.rand(48, 24), torch.randint(0, 4, (48,)))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=2))

    def epoch() -> list[float]:
        means, losses, samples = [], [], 0
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses += accelerator.gather(loss.detach().view(1)).tolist()
            samples += len(accelerator.gather_for_metrics(labels))
            if accelerator.sync_gradients:
                means.append(losses)
                losses = []
        assert samples == len(data)
        return [sum(window) for window in means]

    first = epoch()
    accelerator.save_state(str(folder / "state"))
    second = epoch()
    accelerator.load_state(str(folder / "state"))
    assert epoch() == second
    weights = accelerator.get_state_dict(model)
    total = sum(float(value.double().abs().sum()) for value in weights.values())
    model.destroy()
    return {"losses": first + second, "weights": total}


def main(config: str, folder: Path) -> dict[str, Any]:
    given = json.loads(Path(config).read_text())
    uninterrupted = train(given, folder / "whole")
    resumed = train(given, folder / "resumed", folder / "whole" / "checkpoint-2")
    assert resumed["weights"] == uninterrupted["weights"]
    return {"Trainer": uninterrupted, "accelerate": accelerated(given, folder)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--deepspeed")
    arguments = parser.parse_args()
    if RANKS > 1:  # appended by `infinity run --local-rank`
        assert arguments.local_rank == int(os.environ["LOCAL_RANK"])
    results = main(arguments.deepspeed, arguments.folder)
    if dist.get_rank() == 0:
        (arguments.folder / "told.json").write_text(json.dumps(results))

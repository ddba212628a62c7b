"""Entry point of one rank that trains with `InfinityTrainer`, alone or under torchrun."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from support.hf_runs import Texts, history, llama, masters, trainer_for

from infinity.integrations.huggingface.settings import TrainingArguments
from infinity.integrations.huggingface.trainer import InfinityTrainer


def exact(prediction: Any) -> dict[str, float]:
    hits = (prediction.predictions.argmax(-1) == prediction.label_ids).mean()
    return {"hits": float(hits), "samples": float(len(prediction.predictions))}


def main(jobs: list[dict[str, Any]]) -> None:
    """Run jobs, each with TrainingArguments, an output path, and optionally `resume`."""
    for job in jobs:
        options: dict[str, Any] = {"train_dataset": Texts(24), "eval_dataset": Texts(8, seed=2)}
        options["compute_metrics"] = exact
        with trainer_for(
            InfinityTrainer, Path(job["out"]), llama(dropout=0.0), options,
            arguments=TrainingArguments, **job["arguments"],
        ) as trainer:  # fmt: skip
            trainer.train(job.get("resume"))
            predicted = trainer.predict(Texts(7, seed=5))
            trainer.save_model(f"{job['out']}/model")
            results = {
                "history": history(trainer),
                "masters": {name: value.clone() for name, value in masters(trainer).items()},
                "predicted": torch.from_numpy(predicted.predictions),
                "ranks": trainer.engine.ranks.count if trainer.engine is not None else 0,
            }
            torch.save(results, f"{job['out']}-{trainer.args.process_index}")

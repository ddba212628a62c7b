"""Script with TRL's stock trainers, with or without DeepSpeed: SFT, DPO, KTO, GRPO, Reward."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
import trl

from infinity.errors import ConfigError

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
import trl_trainers as example


def train(kind: str, config: dict[str, Any] | None, folder: Path) -> list[list[float]]:
    source = example.write_model(folder / "model")
    head = "SequenceClassification" if kind == "reward" else "CausalLM"
    more = {"num_labels": 1} if kind == "reward" else {}
    settings = {} if config is None else {"deepspeed": config}
    settings |= {"max_steps": 3, "adam_epsilon": 1e-5, "bf16": False, "use_cpu": True}
    torch.manual_seed(5)
    given = example.given_to(kind, None, source, folder / kind, **settings)  # before the model
    loader = getattr(transformers, f"LlamaFor{head}")
    given["model"] = loader.from_pretrained(source, dtype=torch.float32, **more)
    trainer = getattr(trl, example.KINDS[kind][0].__name__)(**given)
    trainer.train()
    if config is not None:
        assert type(trainer.model_wrapped).__name__ == "DeepSpeedEngine"
        trainer.model_wrapped.destroy()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [[step["loss"], float(step["grad_norm"])] for step in steps]


def main(config: str | None, folder: Path) -> dict[str, Any]:
    given = None if config is None else json.loads(Path(config).read_text())
    if given is not None and given["zero_optimization"]["stage"] == 3:
        message = ""
        try:  # at stage 3 TRL gathers the head's weights around a loss
            train("dpo", given, folder)
        except ConfigError as error:
            message = str(error)
        assert '"stage": 2' in message
        given["zero_optimization"]["stage"] = 2
    return {kind: train(kind, given, folder) for kind in example.KINDS}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--deepspeed")
    arguments = parser.parse_args()
    print("TOLD" + json.dumps(main(arguments.deepspeed, arguments.folder)))

"""Script with the calls of HelloDeepSpeed: masked LM, training loop, resume."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

VOCABULARY, WIDTH, LENGTH = 96, 32, 12


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, src_tokens: Tensor, tgt_tokens: Tensor) -> Tensor:
        scores = self.head(self.encoder(self.embedding(src_tokens)))
        return nn.functional.cross_entropy(scores.flatten(0, 1), tgt_tokens.flatten())


def batches(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(count):
        tokens = torch.randint(1, VOCABULARY, (4, LENGTH), generator=generator)
        masked = torch.rand(tokens.shape, generator=generator) < 0.15
        made.append({"src_tokens": tokens.masked_fill(masked, 0), "tgt_tokens": tokens})
    return made


def train(config: dict[str, Any], exp_dir: Path, load_dir: Path | None, steps: int) -> list[float]:
    torch.manual_seed(0)
    model = Model()
    model, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    start_step = 1
    if load_dir is not None:
        _, client_state = model.load_checkpoint(load_dir=load_dir)
        start_step = client_state["checkpoint_step"] + 1
    model.train()
    losses = []
    for step, batch in enumerate(batches(steps), start=1):
        if step < start_step:
            continue
        loss = model(**{key: value.to(model.device) for key, value in batch.items()})
        model.backward(loss)
        model.step()
        losses.append(loss.item())
        if step % 2 == 0:
            model.save_checkpoint(save_dir=exp_dir, client_state={"checkpoint_step": step})
    model.destroy()
    return losses


def main(config: str, folder: Path) -> dict[str, Any]:
    given = json.loads(Path(config).read_text())
    uninterrupted = train(given, folder / "hello", None, 6)
    train(given, folder / "first", None, 4)
    resumed = train(given, folder / "first", folder / "first", 6)
    assert resumed == uninterrupted[4:], (resumed, uninterrupted)
    return {"losses": uninterrupted}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path)
    deepspeed.add_config_arguments(parser)
    arguments = parser.parse_args()
    print(json.dumps(main(arguments.deepspeed_config, arguments.folder)))

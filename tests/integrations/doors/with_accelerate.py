"""Script with accelerate's DeepSpeed example: prepare, accumulate, clip, save and load state."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import AcceleratorState
from accelerate.utils import DummyOptim, DummyScheduler, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        self.head = nn.Linear(24, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


def train(config: dict[str, Any] | None, folder: Path) -> dict[str, Any]:
    AcceleratorState._reset_state(reset_partial_state=False)
    plugin = (
        None if config is None else DeepSpeedPlugin(hf_ds_config=json.loads(json.dumps(config)))
    )
    accelerator = Accelerator(
        gradient_accumulation_steps=2,
        deepspeed_plugin=plugin,
        mixed_precision="bf16" if (config or {}).get("bf16") else None,
    )
    set_seed(4)
    model = Model()
    data = TensorDataset(torch.rand(48, 24), torch.randint(0, 4, (48,)))
    loader = DataLoader(data, batch_size=4, shuffle=True)
    in_config = "optimizer" in accelerator.state.deepspeed_plugin.deepspeed_config
    if in_config:
        optimizer: Any = DummyOptim(model.parameters(), lr=1e-2)
        scheduler: Any = DummyScheduler(optimizer, total_num_steps=12, warmup_num_steps=2)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses, norms = [], []
    for epoch in range(2):
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs.to(model.device)).float(), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
        if epoch == 0:
            accelerator.save_state(str(folder / "state"))
    after = {n: v.clone() for n, v in accelerator.get_state_dict(model).items()}
    unwrapped = accelerator.unwrap_model(model)
    assert isinstance(unwrapped, Model)
    assert unwrapped.state_dict().keys() == after.keys()
    accelerator.load_state(str(folder / "state"))
    before = accelerator.get_state_dict(model)
    assert any(not torch.equal(before[name], after[name]) for name in after)
    rates = scheduler.get_last_lr()
    assert model.get_lr() == rates
    model.destroy()
    total = sum(float(value.double().abs().sum()) for value in after.values())
    return {"losses": losses, "norms": norms, "rates": rates, "weights": total}


def main(config: str | None, folder: Path) -> dict[str, Any]:
    if config is None:  # configured by `accelerate launch`
        return train(None, folder)
    given = json.loads(Path(config).read_text())
    given |= {"gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 4}
    given.pop("train_batch_size", None)
    bare = {name: value for name, value in given.items() if name not in ("optimizer", "scheduler")}
    given["scheduler"] = {
        "type": "WarmupDecayLR",
        "params": {
            "total_num_steps": "auto", "warmup_min_lr": "auto", "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
        },
    }  # fmt: skip
    given["optimizer"] = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
    return {
        "in code": train(bare, folder / "code"), "in config": train(given, folder / "config")
    }  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--config")
    arguments = parser.parse_args()
    print(json.dumps(main(arguments.config, arguments.folder)))

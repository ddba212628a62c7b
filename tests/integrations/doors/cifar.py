"""Script with the calls of DeepSpeed's CIFAR tutorial, on random images: loader, fp16, test."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import Tensor, nn
from torch.utils.data import TensorDataset


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = F.relu(self.fc2(F.relu(self.fc1(x.view(-1, 400)))))
        return self.fc3(x)


def create_moe_param_groups(model: nn.Module) -> Any:
    return split_params_into_different_moe_groups_for_optimizer(
        {"params": list(model.parameters()), "name": "parameters"}
    )


def main(config: str, folder: Path, args: Any = None) -> dict[str, Any]:
    deepspeed.init_distributed()
    local_rank = int(os.environ["LOCAL_RANK"])
    get_accelerator().set_device(local_rank)
    if torch.distributed.get_rank() != 0:
        torch.distributed.barrier()
    torch.manual_seed(0)
    images = TensorDataset(torch.rand(64, 3, 32, 32), torch.randint(0, 10, (64,)))
    if torch.distributed.get_rank() == 0:
        torch.distributed.barrier()
    logged: list[tuple[dict[str, float], int]] = []
    sys.modules["wandb"] = SimpleNamespace(
        init=lambda **options: None, finish=lambda: None,
        log=lambda data, step: logged.append((data, step)),
    )  # fmt: skip
    net = Net()
    parameters = filter(lambda p: p.requires_grad, net.parameters())
    ds_config = json.loads(Path(config).read_text()) | {
        "steps_per_print": 2000,
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000},
        },
        "prescale_gradients": False,
        "bf16": {"enabled": False},
        "fp16": {
            "enabled": True, "fp16_master_weights_and_grads": False, "loss_scale": 0,
            "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1,
            "initial_scale_power": 15,
        },
        "wall_clock_breakdown": False,
        "wandb": {"enabled": True, "project": "cifar"},
    }  # fmt: skip
    model_engine, _, trainloader, _ = deepspeed.initialize(
        args=args, model=net, model_parameters=parameters, training_data=images, config=ds_config
    )
    local_device = get_accelerator().device_name(model_engine.local_rank)
    target_dtype = torch.half if model_engine.fp16_enabled() else None
    criterion = nn.CrossEntropyLoss()
    losses = []
    for _ in range(2):
        for inputs, labels in trainloader:
            inputs, labels = inputs.to(local_device), labels.to(local_device)
            if target_dtype is not None:
                inputs = inputs.to(target_dtype)
            loss = criterion(model_engine(inputs), labels)
            model_engine.backward(loss)
            model_engine.step()
            losses.append(loss.item())
    model_engine.eval()
    with torch.no_grad():
        outputs = model_engine(images.tensors[0].to(local_device).to(target_dtype))
    correct = int((outputs.argmax(1) == images.tensors[1].to(local_device)).sum())
    data, samples = next(one for one in reversed(logged) if "Train/Samples/train_loss" in one[0])
    assert (samples, data["Train/Samples/train_loss"]) == (2 * len(images), losses[-1]), logged
    model_engine.destroy()
    del sys.modules["wandb"]
    return {"losses": losses, "correct": correct}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path)
    deepspeed.add_config_arguments(parser)
    arguments = parser.parse_args()
    print(json.dumps(main(arguments.deepspeed_config, arguments.folder)))

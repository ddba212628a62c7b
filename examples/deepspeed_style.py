"""Train with the DeepSpeed API: three loops of its tutorials, with only the import changed.

Meant for one GPU, with or without a drive for state; runs on any CPU in seconds:

    python examples/deepspeed_style.py              # no offload
    python examples/deepspeed_style.py stage1       # optimizer in RAM, pinned
    python examples/deepspeed_style.py stage3       # parameters and optimizer off the GPU

With `--deepspeed_config FILE` it takes your own ds_config.json instead.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from infinity import deepspeed

CONFIGS: dict[str, dict[str, Any]] = {
    "none": {},
    "stage1": {
        "zero_optimization": {
            "stage": 1,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
        }
    },
    "stage3": {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
            "stage3_prefetch_bucket_size": 5e7,
        }
    },
}
for _config in CONFIGS.values():
    _config |= {
        "train_micro_batch_size_per_gpu": 16,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_num_steps": 4, "warmup_max_lr": 1e-2, "warmup_type": "linear"},
        },
    }


class Mlp(nn.Module):
    """Three layers; the loss is computed outside."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.second = nn.Linear(64, 64)
        self.third = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (batch, 4) of features (batch, 32)."""
        return self.third(torch.relu(self.second(torch.relu(self.first(x)))))


def make_data(num_samples: int = 1024) -> Dataset[Any]:
    """Return points, labelled by the largest of their first four coordinates."""
    x = torch.randn(num_samples, 32, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x[:, :4].argmax(dim=1))


def train(args: Any, config: dict[str, Any] | None) -> tuple[list[float], dict[str, Tensor]]:
    """Train for one epoch; return the losses and the trained weights."""
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = Mlp()
    model_engine, optimizer, trainloader, _ = deepspeed.initialize(
        args=args,
        model=model,
        model_parameters=model.parameters(),
        training_data=make_data(),
        config=config,
    )
    criterion = nn.CrossEntropyLoss()
    losses = []
    for inputs, labels in trainloader:
        inputs = inputs.to(model_engine.device)
        labels = labels.to(model_engine.device)
        loss = criterion(model_engine(inputs), labels)
        model_engine.backward(loss)
        model_engine.step()
        losses.append(loss.item())
        if model_engine.local_rank == 0 and len(losses) % 16 == 0:
            print(
                f"step {model_engine.global_steps:3d}  loss {losses[-1]:.4f}  "
                f"lr {optimizer.param_groups[0]['lr']:.4f}"
            )
    weights = model_engine.module_state_dict()
    model_engine.destroy()
    return losses, weights


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("loop", nargs="?", default="none", choices=list(CONFIGS))
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    train(args, None if args.deepspeed_config else CONFIGS[args.loop])


if __name__ == "__main__":
    main()

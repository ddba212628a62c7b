"""Script with the calls of DeepSpeed's BERT pre-training tutorial: masked LM and NSP in fp16."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset
from transformers import BertConfig, BertForPreTraining

VOCABULARY, LENGTH, MASK, PEAK, STEPS = 64, 16, 3, 1e-2, 6
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": LENGTH,
}  # fmt: skip


class Pretraining(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bert = BertForPreTraining(BertConfig(**SHAPE))

    def forward(self, batch: tuple[Tensor, ...], log: bool = True) -> Tensor:
        tokens, token_types, labels, follows = batch
        given = {"labels": labels, "next_sentence_label": follows, "token_type_ids": token_types}
        return self.bert(input_ids=tokens, **given).loss


def pairs(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(4, 12, (count, LENGTH), generator=generator)
    masked = torch.rand(tokens.shape, generator=generator) < 0.15
    token_types = (torch.arange(LENGTH) >= LENGTH // 2).long().expand(count, -1).contiguous()
    follows = torch.randint(0, 2, (count,), generator=generator)
    return TensorDataset(
        tokens.masked_fill(masked, MASK), token_types, tokens.masked_fill(~masked, -100), follows
    )


def groups(network: nn.Module) -> list[dict[str, Any]]:
    named = list(network.named_parameters())
    bare = ("bias", "LayerNorm.bias", "LayerNorm.weight")
    return [
        {"params": [p for n, p in named if not n.endswith(bare)], "weight_decay": 0.01},
        {"params": [p for n, p in named if n.endswith(bare)], "weight_decay": 0.0},
    ]


def rate_at(step: int) -> float:
    return PEAK * min(1.0, (step + 1) / 2) * (1 - step / STEPS)


def loader_of(data: TensorDataset, size: int) -> Any:
    many = dist.get_world_size() > 1
    sampler = DistributedSampler(data) if many else RandomSampler(data)
    return DataLoader(data, batch_size=size, sampler=sampler, drop_last=True)


def evaluate(network: Any, size: int) -> float:
    network.eval()
    total, count = torch.zeros((), device=network.device), 0
    with torch.no_grad():
        for batch in DataLoader(pairs(8, 2), batch_size=size):
            total += network(tuple(t.to(network.device) for t in batch), log=False).mean().float()
            count += 1
    dist.reduce(total, 0)
    network.train()
    return total.item() / count / dist.get_world_size()


def train(args: argparse.Namespace, saved: Path, load_id: str | None) -> list[float]:
    deepspeed.init_distributed(dist_backend="nccl")
    torch.manual_seed(42)
    network = Pretraining()
    network, optimizer, _, _ = deepspeed.initialize(
        args=args, model=network, model_parameters=groups(network), dist_init_required=False
    )
    assert network.fp16_enabled()
    state = {"epoch": -1, "last_global_step": 0, "last_global_data_samples": 0}
    if load_id is not None:
        _, state = network.load_checkpoint(saved, load_id)
    step, samples = state["last_global_step"], state["last_global_data_samples"]
    losses = []
    for epoch in range(state["epoch"] + 1, 2):
        torch.manual_seed(epoch)
        dist.barrier()
        size = network.train_micro_batch_size_per_gpu()
        for batch in loader_of(pairs(24, 1), size):
            loss = network(tuple(t.to(network.device) for t in batch))
            losses.append(loss.item())
            network.backward(loss)
            samples += size * dist.get_world_size()
            if network.is_gradient_accumulation_boundary():
                for group in optimizer.param_groups:
                    group["lr"] = rate_at(step)
                step += 1
            network.step()
        losses.append(evaluate(network, size))
        state = {"epoch": epoch, "last_global_step": step, "last_global_data_samples": samples}
        assert network.save_checkpoint(saved, f"epoch{epoch}_step{step}", state)
    assert (network.global_steps, network.global_samples) == (step, samples)
    network.destroy()
    return losses


def main(config: str, folder: Path) -> dict[str, Any]:
    given = json.loads(Path(config).read_text()) | {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0, "prescale_gradients": False, "wall_clock_breakdown": False,
        "steps_per_print": 1000, "fp16": {"enabled": True, "loss_scale": 0},
    }  # fmt: skip
    given.pop("train_batch_size", None)
    written = folder / "bert.json"
    written.write_text(json.dumps(given))
    args = argparse.Namespace(deepspeed=True, deepspeed_config=str(written), local_rank=0)
    uninterrupted = train(args, folder / "saved", None)
    resumed = train(args, folder / "saved", "epoch0_step3")
    assert resumed == uninterrupted[len(uninterrupted) // 2 :], (resumed, uninterrupted)
    assert uninterrupted[-1] < uninterrupted[len(uninterrupted) // 2 - 1], uninterrupted
    return {"losses": uninterrupted}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path)
    deepspeed.add_config_arguments(parser)
    arguments = parser.parse_args()
    print(json.dumps(main(arguments.deepspeed_config, arguments.folder)))

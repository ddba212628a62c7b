"""On a real GPU: same bits wherever the state rests. Skips, saying so, where there is none."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import infinity

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
TIERS = ("device", "host", "disk")
VOCAB, DIM = 97, 128


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 4 * DIM)
        self.down = nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


def train(path: Path, homes: tuple[str, ...], precision: str) -> tuple[list[float], list[Tensor]]:
    torch.manual_seed(0)
    config = {
        "nvme_path": str(path),
        "precision": precision,
        "homes": dict(zip(("weights", "moments", "gradients"), homes, strict=True)),
        "gradient_accumulation_steps": 2,
        "chunk_size": 16384,
    }
    engine, *_ = infinity.initialize(Model(), config, device="cuda")
    generator = torch.Generator().manual_seed(1)
    losses = []
    with engine:
        for _ in range(20):
            tokens = torch.randint(0, VOCAB, (4, 32), generator=generator).cuda()
            loss = engine(tokens)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses, list(engine.state_dict(master=True).values())


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_every_placement_gives_the_same_bits(tmp_path: Path, precision: str) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    losses, masters = train(tmp_path, ("device", "device", "device"), precision)
    assert losses[-1] < losses[0]
    for homes in itertools.product(TIERS, TIERS, TIERS):
        other_losses, other_masters = train(tmp_path, homes, precision)
        assert other_losses == losses, homes
        assert all(torch.equal(a, b) for a, b in zip(masters, other_masters, strict=True)), homes

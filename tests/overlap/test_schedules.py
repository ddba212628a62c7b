"""Thousands of seeded schedules: copies on the fake accelerator end in a random order and at
random times; every loss must still equal the one of the simplest placement, bit for bit.

A missing wait shows as NaN (copies poison their targets until they end, freed slots are
poisoned) or as other bits. Every step is a schedule of its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.fake_accelerator import FakeAccelerator
from torch import Tensor, nn

import infinity

VOCAB, DIM, STEPS = 31, 16, 250


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.norm = nn.LayerNorm(DIM)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embed.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def losses_of(
    path: Path, homes: tuple[str, str, str], device: FakeAccelerator | None, num_steps: int
) -> list[float]:
    torch.manual_seed(0)
    config = {
        "nvme_path": str(path),
        "homes": dict(zip(("weights", "moments", "gradients"), homes, strict=True)),
        "chunk_size": 2048,
        "gradient_accumulation_steps": 2,
        "look_ahead": 1,
        "optimizer": {"lr": 3e-3},
    }
    engine, *_ = infinity.initialize(
        Model(), config, device=device or "cpu", poison=lambda slot: slot.fill_(255)
    )
    generator = torch.Generator().manual_seed(1)
    losses = []
    with engine:
        for _ in range(num_steps):
            for _ in range(2):
                loss = engine(torch.randint(0, VOCAB, (2, 8), generator=generator))
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def simplest(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    path = tmp_path_factory.mktemp("simplest")
    return losses_of(path, ("device", "device", "device"), None, STEPS)


@pytest.mark.parametrize(
    "homes",
    [
        ("disk", "disk", "host"),
        ("host", "host", "host"),
        ("disk", "disk", "disk"),
        ("device", "host", "device"),
        ("host", "device", "disk"),
    ],
    ids="-".join,
)
def test_every_schedule_gives_the_same_bits(
    tmp_path: Path, simplest: list[float], homes: tuple[str, str, str]
) -> None:
    fake = FakeAccelerator(seed=sum(map(ord, "".join(homes))), max_delay_s=0.001, workers=3)
    losses = losses_of(tmp_path, homes, fake, STEPS)
    wrong = [i for i, (a, b) in enumerate(zip(losses, simplest, strict=True)) if a != b]
    assert not wrong, f"first difference in micro-batch {wrong[0]}"
    assert fake.num_copies > STEPS
    assert fake.violations == []

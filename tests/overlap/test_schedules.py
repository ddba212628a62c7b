"""Tests of many seeded schedules of copies.

Copies on the fake accelerator end in random order and at random times. Every loss must equal the
loss of the simplest placement, bit for bit.

A missing wait shows as NaN (copies poison their targets until they end, freed slots are
poisoned) or as other bits. Every step has a different schedule.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from support import fault_injection
from support.fake_accelerator import FakeAccelerator
from support.small import VOCABULARY, small_model

STEPS, MANY_STEPS = 30, 250
PLACEMENTS = [
    ("disk", "disk", "host"),
    ("host", "host", "host"),
    ("disk", "disk", "disk"),
    ("device", "host", "device"),
    ("host", "device", "disk"),
]


def train_losses(
    path: Path, placement: tuple[str, str, str], device: FakeAccelerator | None, num_steps: int
) -> list[float]:
    config = {
        "nvme_path": str(path),
        "placement": dict(zip(("weights", "optimizer_state", "gradients"), placement, strict=True)),
        "chunk_size": 2048,
        "gradient_accumulation_steps": 2,
        "prefetch_units": 1,
        "optimizer": {"lr": 3e-3},
    }
    engine, *_ = fault_injection.initialize(
        small_model(num_blocks=5), config, device=device or "cpu"
    )
    generator = torch.Generator().manual_seed(1)
    losses = []
    with engine:
        for _ in range(num_steps):
            for _ in range(2):
                loss = engine(torch.randint(0, VOCABULARY, (2, 9), generator=generator))
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
    return losses


@cache
def reference_losses(num_steps: int) -> list[float]:
    with TemporaryDirectory() as path:
        return train_losses(Path(path), ("device", "device", "device"), None, num_steps)


@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
def test_random_schedules_give_same_losses(tmp_path: Path, placement: tuple[str, str, str]) -> None:
    assert_same_losses(tmp_path, placement, STEPS)


@pytest.mark.big
@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
def test_many_random_schedules_give_same_losses(
    tmp_path: Path, placement: tuple[str, str, str]
) -> None:
    assert_same_losses(tmp_path, placement, MANY_STEPS)


def assert_same_losses(path: Path, placement: tuple[str, str, str], num_steps: int) -> None:
    seed = sum(map(ord, "".join(placement)))
    fake = FakeAccelerator(seed=seed, max_delay_s=0.005, workers=3, on_demand=True)
    losses = train_losses(path, placement, fake, num_steps)
    differing = [
        i
        for i, (a, b) in enumerate(zip(losses, reference_losses(num_steps), strict=True))
        if a != b
    ]
    assert not differing, f"first difference in micro-batch {differing[0]}"
    assert fake.num_copies > num_steps
    assert fake.violations == []

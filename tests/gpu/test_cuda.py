"""Tests on a real GPU that every placement of the state gives identical results."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from support.internals import components
from support.small import VOCABULARY, small_model
from torch import Tensor

import infinity

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
TIERS = ("device", "host", "disk")


def train(
    path: Path, placement: tuple[str, ...], precision: str
) -> tuple[list[float], list[Tensor]]:
    model = small_model(num_blocks=6, width=128)
    config = {
        "nvme_path": str(path),
        "precision": precision,
        "placement": dict(zip(("weights", "optimizer_state", "gradients"), placement, strict=True)),
        "gradient_accumulation_steps": 2,
        "chunk_size": 16384,
    }
    engine, *_ = infinity.initialize(model, config, device="cuda")
    generator = torch.Generator().manual_seed(1)
    losses = []
    with engine:
        for _ in range(20):
            tokens = torch.randint(0, VOCABULARY, (4, 32), generator=generator).cuda()
            loss = engine(tokens)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        assert not components(engine).device.warnings
        return losses, list(engine.state_dict(master=True).values())


@pytest.mark.parametrize("gradients", TIERS)
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_results_are_identical_for_every_placement(
    tmp_path: Path, precision: str, gradients: str
) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    losses, masters = train(tmp_path, ("device", "device", "device"), precision)
    assert losses[-1] < losses[0]
    for placement in itertools.product(TIERS, TIERS, (gradients,)):
        other_losses, other_masters = train(tmp_path, placement, precision)
        assert other_losses == losses, placement
        assert all(torch.equal(a, b) for a, b in zip(masters, other_masters, strict=True)), (
            placement
        )

"""Tests of the backward of a graph older than the last step whose gradients need no weights.

Its gradients must not overwrite those that the optimizer pass is reading.
"""

from __future__ import annotations

from pathlib import Path

import torch
from support import fault_injection
from torch import Tensor, nn

NUMEL = 1 << 14


class Shift(nn.Module):
    """Adds a vector, whose gradient needs no saved tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(NUMEL))

    def forward(self, x: Tensor) -> Tensor:
        return (x * (x + self.bias)).mean()


def masters_after_old_backward(path: Path, tier: str, slow_bytes_per_s: int) -> Tensor:
    config = {
        "nvme_path": str(path),
        "precision": "fp32",
        "placement": {"weights": tier, "optimizer_state": tier, "gradients": "host"},
        "chunk_size": 4096,
        "gradient_clipping": 0.0,
        "io": {"slow_bytes_per_s": slow_bytes_per_s},
    }
    engine, *_ = fault_injection.initialize(Shift(), config, poison=None)
    generator = torch.Generator().manual_seed(0)
    with engine:
        first, second = (engine(torch.randn(NUMEL, generator=generator)) for _ in range(2))
        engine.backward(first)
        engine.step()  # starts a slow optimizer pass
        engine.backward(second)
        engine.step()
        return engine.state_dict(master=True)["bias"]


def test_backward_of_old_graph_waits_for_optimizer_pass(tmp_path: Path) -> None:
    expected = masters_after_old_backward(tmp_path, "device", 0)
    slow = masters_after_old_backward(tmp_path, "disk", 2_000_000)
    assert torch.equal(slow, expected)

"""Tests of the estimated activation peak against live bytes counted in plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from support.activation_peak import CASES, MIB, build, counted, estimated
from support.live_bytes import LiveBytes

# The remaining cases cover all pairs of shape, format and recomputation.
LONG = ("gpt, 1024 tokens", "gated, grouped queries", "gpt, 1024 tokens, bf16",
        "32,000 words, recomputed, bf16", "gated, grouped queries, bf16")  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.big if name in LONG else ())
        for name in CASES
        if "4096" not in name
    ],
)
def test_activation_estimate_close_to_measured_peak(name: str) -> None:
    model = build(name)
    found, measured = estimated(name, model).total, counted(name, model)
    assert 0.92 * measured < found < 1.10 * measured, (
        f"estimated {found / MIB:.0f} MiB, counted {measured / MIB:.0f} MiB"
    )


def test_live_bytes_counts_storages_not_views() -> None:
    x, weight = torch.randn(100, 100), torch.randn(100, 100, requires_grad=True)
    with LiveBytes([x, weight]) as live:
        y = x @ weight
        assert live.now == y.nbytes
        z = y.sin()  # backward needs y
        del y
        assert (live.now, live.peak) == (2 * z.nbytes, 2 * z.nbytes)
        assert live.now == 2 * z.view(-1)[:10].untyped_storage().nbytes(), "a view adds no bytes"
        z.sum().backward()
        del z
        assert live.now == weight.nbytes, "its gradient"
    assert live.peak >= 3 * weight.nbytes

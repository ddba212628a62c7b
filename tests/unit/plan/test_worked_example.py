"""Test of `infinity plan 70b` against the worked example in docs/bytes.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infinity.cli.plan import SearchOptions, report_of

GIB = 1 << 30
PAGE = Path(__file__).parents[3] / "docs" / "bytes.md"


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """Report of `infinity plan 70b --device 24GiB --host 64GiB --disk 2TiB --tokens 32768`."""
    sizes = {"device": 24 * GIB, "host": 64 * GIB, "disk": 2048 * GIB}
    return report_of(SearchOptions("70b", tokens=32768, **sizes), 600 * 10**12)


def test_plan_70b_matches_documented_numbers(report: dict[str, Any]) -> None:
    placement, count = report["plan"]["placement"], report["model"]["parameters"]
    assert (report["work"]["micro_batches"], report["work"]["recompute"]) == (1, "all")
    assert report["work"]["slices"] > 1
    at_rest = {kind: sum(tier["bytes"] for tier in placement[kind].values()) for kind in placement}
    for kind, each in (("weights", 2), ("moments and residual", 10), ("gradients", 4)):
        assert at_rest[kind] == pytest.approx(each * count, rel=1e-4)  # padding
    weights = placement["weights"]["disk"]["bytes"]
    on_device = placement["weights"]["device"]["bytes"]
    moving = at_rest["weights"] - on_device
    record = weights + placement["moments and residual"]["disk"]["bytes"]
    gradients = placement["gradients"]["disk"]["bytes"]
    inputs = 80 * 32768 * 8192 * 2
    (slots,) = report["plan"]["slots"]
    outside = at_rest["weights"] - 80 * slots["bytes"]  # in RAM; moved once per step
    blocks = (slots["count"] - 1) * slots["bytes"]
    retained = blocks + outside
    moved = {direction: found["bytes"] for direction, found in report["moved"].items()}
    assert moved["disk_write"] == pytest.approx(record + gradients + inputs, rel=1e-3)
    read = record + gradients + inputs + weights - blocks
    assert moved["disk_read"] == pytest.approx(read, rel=1e-3)
    assert moved["to_device"] == pytest.approx(2 * moving - retained + inputs + on_device, rel=1e-3)
    assert moved["from_device"] == pytest.approx(4 * count + inputs + on_device, rel=5e-3)
    rates = report["machine"]["rates"]
    seconds = (
        2 * (record + inputs) / rates["disk_mixed"] + (gradients - inputs) / rates["disk_read"]
    )
    assert report["step"]["phases"][0]["seconds"] == pytest.approx(seconds, rel=0.02)
    assert report["step"]["tokens_per_s"] > 45
    assert (moved["disk_read"] + moved["disk_write"]) / count < 40
    text = PAGE.read_text(encoding="utf-8")
    for nbytes in (weights, on_device, placement["weights"]["host"]["bytes"]):
        assert f"{nbytes / GIB:.2f}" in text
    for direction in ("disk_write", "disk_read", "to_device", "from_device"):
        assert f"{moved[direction] / 1024 / GIB:.2f} TiB" in text

"""The numbers of `infinity plan 70b`, by hand from the byte table, as ARCHITECTURE does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infinity.cli.plan import Wishes, report_of

GIB = 1 << 30
PAGE = Path(__file__).parent.parent / "docs" / "ARCHITECTURE.md"


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """`infinity plan 70b --device 24GiB --host 64GiB --disk 2TiB --tokens 32768`."""
    sizes = {"device": 24 * GIB, "host": 64 * GIB, "disk": 2048 * GIB}
    return report_of(Wishes("70b", tokens=32768, **sizes), 600 * 10**12)


def test_the_byte_table_gives_the_numbers_of_the_page(report: dict[str, Any]) -> None:
    placement, count = report["plan"]["placement"], report["model"]["parameters"]
    micro_batches = report["work"]["micro_batches"]
    assert micro_batches == 16
    at_rest = {kind: sum(tier["bytes"] for tier in placement[kind].values()) for kind in placement}
    for kind, each in (("weights", 2), ("moments and residual", 10), ("gradients", 4)):
        assert at_rest[kind] == pytest.approx(each * count, rel=1e-4)  # padding
    weights = placement["weights"]["disk"]["bytes"]
    on_device = placement["weights"]["device"]["bytes"]
    record = weights + placement["moments and residual"]["disk"]["bytes"]
    gradients = placement["gradients"]["disk"]["bytes"] * micro_batches
    (slots,) = report["plan"]["slots"]
    kept, turns = slots["count"] * slots["bytes"], 2 * micro_batches - 1
    read = record + gradients + turns * (weights - kept)
    moved = {direction: found["bytes"] for direction, found in report["moved"].items()}
    assert moved["disk_write"] == record + gradients
    assert moved["disk_read"] == pytest.approx(read, rel=1e-3)
    to_device = (turns + 1) * weights - turns * kept + on_device
    assert moved["to_device"] == pytest.approx(to_device, rel=1e-3)
    assert moved["from_device"] == pytest.approx(2 * count * micro_batches + on_device, rel=1e-3)
    rates = report["machine"]["rates"]
    seconds = 2 * record / rates["disk_mixed"]
    seconds += placement["gradients"]["disk"]["bytes"] / rates["disk_read"]
    assert report["step"]["phases"][0]["seconds"] == pytest.approx(seconds)
    text = PAGE.read_text(encoding="utf-8")
    for nbytes in (weights, on_device, placement["gradients"]["host"]["bytes"]):
        assert f"{nbytes / GIB:.2f}" in text
    for direction in ("disk_write", "disk_read", "to_device", "from_device"):
        assert f"{moved[direction] / 1024 / GIB:.2f} TiB" in text

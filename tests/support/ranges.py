"""Patches of the planner's choice of expert ranges, for small models."""

from __future__ import annotations

import pytest

from infinity.model import partition
from infinity.plan import batch_schedule


def force_largest_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the rule select single experts, and the planner accept every candidate range.

    The largest range is tried last, hence chosen.
    """
    monkeypatch.setattr(partition, "EXPERTS_BYTES", (1, 1))
    monkeypatch.setattr(partition, "RANGE_BYTES", (0, 1 << 30))
    monkeypatch.setattr(batch_schedule, "RANGE_GAIN", -1e9)


def force_rule_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the planner reject every candidate range, so that the rule decides."""
    monkeypatch.setattr(batch_schedule, "RANGE_GAIN", 1.0)

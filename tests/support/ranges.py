"""Plans of small models that choose other ranges of experts than the rule."""

from __future__ import annotations

import pytest

from infinity.model import partition
from infinity.plan import batch_schedule


def choose_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the rule an expert travels alone; whatever is tried is chosen, the largest range last."""
    monkeypatch.setattr(partition, "EXPERTS_BYTES", (1, 1))
    monkeypatch.setattr(partition, "RANGE_BYTES", (0, 1 << 30))
    monkeypatch.setattr(batch_schedule, "RANGE_GAIN", -1e9)


def choose_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is tried that would be chosen."""
    monkeypatch.setattr(batch_schedule, "RANGE_GAIN", 1.0)

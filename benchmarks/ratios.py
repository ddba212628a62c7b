"""Ratios of contenders that ran side by side, and how far to trust them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# Ours may be this much slower than the reference and still count as at the limit of the disk.
TARGET = 0.97
CONFIDENCE = 0.9


@dataclass(frozen=True)
class Ratio:
    """Ours divided by the reference, round by round; without a unit."""

    median: float
    low: float
    high: float
    coverage: float
    """The chance that `low` to `high` holds the true median; below 0.9 there were few rounds."""
    values: tuple[float, ...]

    @property
    def holds(self) -> bool:
        """Whether the interval contains the target or lies above it."""
        return self.high >= TARGET


def ratio_of(ours: Sequence[float], reference: Sequence[float]) -> Ratio:
    """Return the ratio of rates measured in the same rounds; both in the same unit and order."""
    assert len(ours) == len(reference) > 0
    values = tuple(a / b for a, b in zip(ours, reference, strict=True))
    low, high, coverage = median_interval(values)
    return Ratio(statistics.median(values), low, high, coverage, values)


def median_interval(
    values: Sequence[float], confidence: float = CONFIDENCE
) -> tuple[float, float, float]:
    """Return (low, high, coverage): the narrowest pair of order statistics around the median.

    The k-th smallest and k-th largest of n values hold the true median unless fewer than k of
    them fell on one side of it, so the coverage is 1 - 2 P(Binomial(n, 1/2) < k), whatever the
    distribution. With fewer than 5 values the whole range covers less than 0.9.
    """
    ordered, n = sorted(values), len(values)
    best, best_coverage, outside = 1, 1 - 2 / 2**n, 0.0
    for k in range(1, (n + 1) // 2 + 1):
        outside += math.comb(n, k - 1) / 2**n
        coverage = 1 - 2 * outside
        if coverage < confidence:
            break
        best, best_coverage = k, coverage
    return ordered[best - 1], ordered[n - best], max(0.0, best_coverage)


def geometric_mean(values: Sequence[float]) -> float:
    """Return the mean that treats twice as fast and half as fast alike."""
    return math.exp(statistics.fmean(math.log(value) for value in values))

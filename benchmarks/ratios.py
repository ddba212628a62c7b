"""Ratios of contenders that ran interleaved, with confidence intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# Smallest ratio of infinity to the reference that counts as reaching the limit of the disk.
TARGET = 0.97
CONFIDENCE = 0.9


@dataclass(frozen=True)
class Ratio:
    """Ratio of infinity's rates to those of the reference, per round; dimensionless."""

    median: float
    low: float
    high: float
    coverage: float
    """Probability that the true median is in `low` to `high`; below 0.9 if there are few rounds."""
    values: tuple[float, ...]

    @property
    def holds(self) -> bool:
        """True if the interval contains the target or lies above it."""
        return self.high >= TARGET


def ratio_of(ours: Sequence[float], reference: Sequence[float]) -> Ratio:
    """Return the ratio of rates measured in the same rounds, in the same unit and order."""
    assert len(ours) == len(reference) > 0
    values = tuple(a / b for a, b in zip(ours, reference, strict=True))
    low, high, coverage = median_interval(values)
    return Ratio(statistics.median(values), low, high, coverage, values)


def median_interval(
    values: Sequence[float], confidence: float = CONFIDENCE
) -> tuple[float, float, float]:
    """Return (low, high, coverage): the narrowest pair of order statistics around the median.

    The k-th smallest and k-th largest of n values enclose the true median unless fewer than k
    values are on one side of it. The coverage is thus 1 - 2 P(Binomial(n, 1/2) < k) for every
    distribution. With fewer than 5 values even the full range covers less than 0.9.
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
    """Return the geometric mean: a factor of 2 and one of 1/2 cancel."""
    return math.exp(statistics.fmean(math.log(value) for value in values))

"""Tests of the covering array of all axes on two, three and four ranks."""

from __future__ import annotations

import itertools

import pytest
from parity.test_axes import AXES, GROUPS, RANK_COUNTS, check, pairwise, possible


@pytest.mark.parametrize("ranks", RANK_COUNTS)
def test_pairwise_rows_cover_all_axis_pairs(ranks: int) -> None:
    rows = pairwise(ranks=ranks)
    assert all(possible(row) and row["ranks"] == ranks for row in rows)
    values = [(axis, value) for axis in AXES if axis != "ranks" for value in AXES[axis]]
    pairs = (dict(pair) for pair in itertools.combinations(values, 2) if pair[0][0] != pair[1][0])
    missing = [
        pair
        for pair in pairs
        if possible(pair | {"ranks": ranks}) and not any(pair.items() <= r.items() for r in rows)
    ]
    assert missing == []


@pytest.mark.big
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("group", range(GROUPS))
@pytest.mark.parametrize("ranks", RANK_COUNTS)
def test_axis_pairs_match_plain_torch(ranks: int, group: int) -> None:
    rows = pairwise(ranks=ranks)[group::GROUPS]
    problems = {str(row): found for i, row in enumerate(rows) if (found := check(row, i))}
    assert problems == {}

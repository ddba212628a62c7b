"""The array of all axes on two, three and four ranks: what `make test` has of it, and more."""

from __future__ import annotations

import pytest
from parity.test_axes import GROUPS, MANY, check, pairwise, possible


@pytest.mark.big
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("group", range(GROUPS))
@pytest.mark.parametrize("ranks", MANY)
def test_pairs_of_axes(ranks: int, group: int) -> None:
    rows = [row | {"ranks": ranks} for row in pairwise(seed=1)[group::GROUPS]]
    problems = {str(row): found for i, row in enumerate(rows)
                if possible(row) and (found := check(row, i))}  # fmt: skip
    assert problems == {}

"""Many bad ends, one for each seed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable


def many(seeds: Iterable[int], bad_end: Callable[[int], str]) -> Counter[str]:
    """Count what `bad_end` returns; all failures are raised at the end, with the first five."""
    seen: Counter[str] = Counter()
    wrong: list[str] = []
    for seed in seeds:
        try:
            seen[bad_end(seed)] += 1
        except AssertionError as error:
            wrong.append(str(error))
    assert not wrong, f"{len(wrong)} of {seen.total() + len(wrong)}:\n" + "\n".join(wrong[:5])
    return seen

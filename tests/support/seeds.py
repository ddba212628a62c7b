"""Repetition of a randomized test over many seeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable


def many(seeds: Iterable[int], bad_end: Callable[[int], str]) -> Counter[str]:
    """Call `bad_end` with each seed and count its results.

    Raises one AssertionError at the end, with the first five failures.
    """
    seen: Counter[str] = Counter()
    wrong: list[str] = []
    for seed in seeds:
        try:
            seen[bad_end(seed)] += 1
        except AssertionError as error:
            wrong.append(str(error))
    assert not wrong, f"{len(wrong)} of {seen.total() + len(wrong)}:\n" + "\n".join(wrong[:5])
    return seen

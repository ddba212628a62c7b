"""Repetition of a randomized test over many seeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable


def many(seeds: Iterable[int], bad_end: Callable[[int], str]) -> Counter[str]:
    """Call `bad_end` with each seed and count its results.

    Raises one AssertionError at the end, with the first five failures.
    """
    counts: Counter[str] = Counter()
    failures: list[str] = []
    for seed in seeds:
        try:
            counts[bad_end(seed)] += 1
        except AssertionError as error:
            failures.append(str(error))
    assert not failures, f"{len(failures)} of {counts.total() + len(failures)}:\n" + "\n".join(
        failures[:5]
    )
    return counts

"""Sets of times as sorted, disjoint intervals: union, overlap, difference, length."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import TypeAlias

Interval: TypeAlias = tuple[float, float]
Times: TypeAlias = list[Interval]  # sorted, disjoint, none empty


def union(intervals: Iterable[Interval]) -> Times:
    """All times in at least one interval."""
    result: Times = []
    for begin, end in sorted(i for i in intervals if i[1] > i[0]):
        if result and begin <= result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((begin, end))
    return result


def overlap(one: Times, other: Times) -> Times:
    """All times in both."""
    result: Times = []
    i = j = 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if begin < end:
            result.append((begin, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return result


def clip(times: Times, window: Interval) -> Times:
    """All times inside a window; fast where the window is small."""
    begin, end = window
    first = max(bisect_right(times, begin, key=lambda i: i[0]) - 1, 0)
    last = bisect_left(times, end, key=lambda i: i[0])
    cut = ((max(b, begin), min(e, end)) for b, e in times[first:last])
    return [interval for interval in cut if interval[0] < interval[1]]


def without(one: Times, other: Times) -> Times:
    """All times in the first, but not in the second."""
    result: Times = []
    j = 0
    for begin, end in one:
        while j < len(other) and other[j][1] <= begin:
            j += 1
        k = j
        while k < len(other) and other[k][0] < end:
            if other[k][0] > begin:
                result.append((begin, other[k][0]))
            begin = max(begin, other[k][1])
            k += 1
        if begin < end:
            result.append((begin, end))
    return result


def length(times: Times) -> float:
    """Seconds in all."""
    return sum(end - begin for begin, end in times)

"""Tests of striping over several drives: each page mapped once, and sizes in proportion."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from infinity.storage.striping import Stripes, fair_shares
from infinity.types import PAGE

MIB = 1 << 20
PLENTY = 1 << 50
RECORD = 12 * MIB
CUTS = (2 * MIB, 4 * MIB, 8 * MIB)  # weight 2, residual 2, moments 4 and 4 MiB


def page_map(stripes: Stripes, ranges: list[tuple[int, int]]) -> dict[int, tuple[int, int]]:
    """Map each logical page to (path, page of its file), looking up one page at a time."""
    pages = {}
    for start, nbytes in ranges:
        for position in range(start, start + nbytes, PAGE):
            (piece,) = stripes.pieces(position, PAGE)
            assert piece.nbytes == PAGE
            assert piece.offset % PAGE == 0
            pages[position // PAGE] = (piece.path_index, piece.offset // PAGE)
    return pages


EXTENTS = st.lists(
    st.tuples(st.integers(1, 40 * PAGE), st.lists(st.integers(0, 30), max_size=3)),
    min_size=1,
    max_size=20,
)


@hypothesis_settings(max_examples=200, deadline=None)
@given(
    extents=EXTENTS,
    weights=st.lists(st.floats(0.1, 10), min_size=1, max_size=4),
    stripe_pages=st.integers(1, 8),
    tightness=st.lists(st.floats(0, 1), min_size=4, max_size=4),
)
def test_every_page_mapped_exactly_once(
    extents: list[tuple[int, list[int]]],
    weights: list[float],
    stripe_pages: int,
    tightness: list[float],
) -> None:
    stripes = Stripes(len(weights), stripe_pages * PAGE)
    ranges = []
    for nbytes, cuts in extents:
        start = stripes.add(nbytes, [c * PAGE for c in cuts if c * PAGE < nbytes])
        ranges.append((start, stripes.total - start))
    # Free space from too little to plenty; the last path makes up the difference.
    free = [int(t * stripes.total) for t in tightness[: len(weights)]]
    free[-1] += max(0, stripes.total - sum(r // PAGE * PAGE for r in free)) + PAGE
    used = stripes.distribute(weights, free)
    pages = page_map(stripes, ranges)
    assert len(pages) == stripes.total // PAGE
    assert len(set(pages.values())) == len(pages)
    for path, size in enumerate(used):
        assert size <= free[path]
        assert {page for p, page in pages.values() if p == path} == set(range(size // PAGE))
    for start, nbytes in ranges:  # lookups of ranges agree with lookups of pages
        position = start
        for piece in stripes.pieces(start, nbytes):
            for page in range(piece.nbytes // PAGE):
                assert pages[position // PAGE] == (piece.path_index, piece.offset // PAGE + page)
                position += PAGE
        assert position == start + nbytes


def relative_time(stripes: Stripes, ranges: list[tuple[int, int]], weights: list[float]) -> float:
    """Return the time of the slowest drive relative to a perfect split; 1.0 is best."""
    moved = [0] * len(weights)
    for start, nbytes in ranges:
        for piece in stripes.pieces(start, nbytes):
            moved[piece.path_index] += piece.nbytes
    ideal = sum(moved) / sum(weights)
    return max(m / w for m, w in zip(moved, weights, strict=True)) / ideal


@pytest.mark.parametrize("weights", [[1.0, 1.0], [2.0, 1.0], [3.0, 2.0], [1.9, 0.87], [5.0, 2, 1]])
def test_drives_finish_in_equal_time(weights: list[float]) -> None:
    stripes = Stripes(len(weights), MIB)
    records = [stripes.add(RECORD, CUTS) for _ in range(96)]
    used = stripes.distribute(weights, [PLENTY] * len(weights))
    for size, weight in zip(used, weights, strict=True):
        assert size == pytest.approx(sum(used) * weight / sum(weights), rel=0.02)
    for first in range(0, 96, 8):
        subset = records[first : first + 8]
        full = [(start, RECORD) for start in subset]
        fetched = [(start, CUTS[0]) for start in subset]  # a fetch reads only the weights
        assert relative_time(stripes, full, weights) < 1.05
        assert relative_time(stripes, fetched, weights) < 1.25


def test_small_drive_spread_over_all_records() -> None:
    """If a path has less space than its share, every record uses some of it."""
    stripes = Stripes(2, MIB)
    records = [stripes.add(RECORD, CUTS) for _ in range(40)]
    used = stripes.distribute([1.0, 1.0], [80 * MIB, PLENTY])
    assert used == [80 * MIB, 400 * MIB]
    for start in records:
        on_small = sum(p.nbytes for p in stripes.pieces(start, RECORD) if p.path_index == 0)
        assert MIB <= on_small <= 3 * MIB


def test_single_path_is_contiguous() -> None:
    stripes = Stripes(1, MIB)
    starts = [stripes.add(n) for n in (5000, 4096, 3 * MIB)]
    assert starts == [0, 8192, 12288]
    assert stripes.distribute([1.0], [stripes.total]) == [12288 + 3 * MIB]
    assert [(p.path_index, p.offset, p.nbytes) for p in stripes.pieces(4096, 2 * MIB)] == [
        (0, 4096, 2 * MIB)
    ]


def test_distribute_without_promises() -> None:
    for num_paths in (1, 2):
        assert (
            Stripes(num_paths, MIB).distribute([1.0] * num_paths, [0] * num_paths)
            == [0] * num_paths
        )


@pytest.mark.parametrize(
    ("total", "weights", "free", "expected"),
    [
        (300, [2, 1], [1000, 1000], [200, 100]),
        (300, [2, 1], [50, 1000], [50, 250]),
        (300, [1, 1, 1], [20, 1000, 1000], [20, 140, 140]),
        (300, [1, 1, 1], [20, 130, 1000], [20, 130, 150]),
        (300, [1, 1], [150, 150], [150, 150]),
        (300, [1, 3], [0, 300], [0, 300]),
        (0, [1, 3], [5, 5], [0, 0]),
    ],
)
def test_fair_shares(
    total: int, weights: list[float], free: list[int], expected: list[float]
) -> None:
    assert fair_shares(total, weights, free) == pytest.approx(expected)

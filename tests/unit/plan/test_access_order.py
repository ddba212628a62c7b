"""Tests of `AccessOrder`: learning the order of units and handling mispredictions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from infinity.plan.access_order import NEVER, AccessOrder

sequences = st.lists(st.integers(0, 5), min_size=1, max_size=20)


def run(order: AccessOrder, units: list[int]) -> None:
    order.begin()
    for unit in units:
        order.advance(unit)
    order.end()


def collapsed(units: list[int]) -> list[int]:
    return [u for i, u in enumerate(units) if i == 0 or units[i - 1] != u]


@given(sequences, sequences)
def test_cycle_learned_after_one_run(guess: list[int], units: list[int]) -> None:
    order = AccessOrder(guess)
    run(order, units)
    assert order.sequence == collapsed(units)
    before = order.mispredictions
    run(order, units)
    assert order.mispredictions == before


@given(sequences, sequences)
def test_any_sequence_is_accepted(guess: list[int], units: list[int]) -> None:
    order = AccessOrder(guess)
    order.begin()
    for unit in units:
        order.advance(unit)
        for count in (0, 1, 3):
            ahead = order.upcoming(count, wraps=True)
            assert len(ahead) == len(set(ahead)) <= count
        assert order.distance(unit, wraps=False) > 0


def test_empty_cycle_keeps_sequence() -> None:
    order = AccessOrder([0, 1])
    run(order, [])
    assert order.sequence == [0, 1]


def test_repeated_uses_of_one_unit_count_once() -> None:
    order = AccessOrder([0, 1])
    run(order, [0, 0, 1, 1, 1])
    assert order.sequence == [0, 1]
    assert order.mispredictions == 0


def test_misprediction_counted_without_error() -> None:
    order = AccessOrder([0, 1, 2])
    order.begin()
    order.advance(0)
    order.advance(2)  # 1 was skipped
    assert (order.mispredictions, order.position) == (1, 2)
    order.advance(0)  # already passed
    assert (order.mispredictions, order.position) == (2, 2)
    order.advance(9)  # unknown unit
    assert (order.mispredictions, order.position) == (3, 2)


def test_upcoming_is_nearest_first_and_distinct() -> None:
    order = AccessOrder([0, 1, 2, 1, 0])
    order.begin()
    assert order.upcoming(9, wraps=False) == [0, 1, 2]
    order.advance(0)
    order.advance(1)
    assert order.upcoming(2, wraps=False) == [2, 0]
    order.advance(2)
    assert order.upcoming(9, wraps=False) == [1, 0]
    assert order.upcoming(1, wraps=False) == [1]
    order.advance(1)
    order.advance(0)
    assert order.upcoming(9, wraps=False) == []
    assert order.upcoming(9, wraps=True) == [1, 2]


def test_distance_counts_uses() -> None:
    order = AccessOrder([0, 1, 2, 1, 0])
    order.begin()
    order.advance(0)
    assert [order.distance(u, wraps=False) for u in (0, 1, 2, 7)] == [4, 1, 2, NEVER]
    for unit in (1, 2, 1, 0):
        order.advance(unit)
    assert order.distance(2, wraps=False) == NEVER
    assert order.distance(0, wraps=True) == 1
    assert order.distance(2, wraps=True) == 3


def test_first_uses_keep_order_of_first_appearance() -> None:
    assert AccessOrder([2, 0, 2, 1, 0]).first_uses() == [2, 0, 1]

"""The tape: learnt from what was done, tolerant of what was not expected."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from infinity.plan.access_order import NEVER, Tape, guess_cycle

sequences = st.lists(st.integers(0, 5), min_size=1, max_size=20)


def run(tape: Tape, units: list[int]) -> None:
    tape.begin()
    for unit in units:
        tape.advance(unit)
    tape.end()


def collapsed(units: list[int]) -> list[int]:
    return [u for i, u in enumerate(units) if i == 0 or units[i - 1] != u]


def test_the_guess_is_forward_and_back() -> None:
    assert guess_cycle(3, backward=True) == [0, 1, 2, 2, 1, 0]
    assert guess_cycle(3, backward=False) == [0, 1, 2]
    assert Tape(guess_cycle(3, backward=True)).sequence == [0, 1, 2, 1, 0]


@given(sequences, sequences)
def test_a_cycle_is_learnt_after_one_run(guess: list[int], units: list[int]) -> None:
    tape = Tape(guess)
    run(tape, units)
    assert tape.sequence == collapsed(units)
    before = tape.surprises
    run(tape, units)
    assert tape.surprises == before


@given(sequences, sequences)
def test_no_order_is_an_error(guess: list[int], units: list[int]) -> None:
    tape = Tape(guess)
    tape.begin()
    for unit in units:
        tape.advance(unit)
        for count in (0, 1, 3):
            ahead = tape.upcoming(count, wraps=True)
            assert len(ahead) == len(set(ahead)) <= count
        assert tape.distance(unit, wraps=False) > 0


def test_a_cycle_without_uses_teaches_nothing() -> None:
    tape = Tape([0, 1])
    run(tape, [])
    assert tape.sequence == [0, 1]


def test_repeated_uses_of_one_unit_count_once() -> None:
    tape = Tape([0, 1])
    run(tape, [0, 0, 1, 1, 1])
    assert tape.sequence == [0, 1]
    assert tape.surprises == 0


def test_a_surprise_is_counted_and_the_run_goes_on() -> None:
    tape = Tape([0, 1, 2])
    tape.begin()
    tape.advance(0)
    tape.advance(2)  # 1 was skipped
    assert (tape.surprises, tape.position) == (1, 2)
    tape.advance(0)  # behind us
    assert (tape.surprises, tape.position) == (2, 2)
    tape.advance(9)  # never heard of
    assert (tape.surprises, tape.position) == (3, 2)


def test_what_is_upcoming_is_nearest_first_and_distinct() -> None:
    tape = Tape([0, 1, 2, 1, 0])
    tape.begin()
    assert tape.upcoming(9, wraps=False) == [0, 1, 2]
    tape.advance(0)
    tape.advance(1)
    assert tape.upcoming(2, wraps=False) == [2, 0]
    tape.advance(2)
    assert tape.upcoming(9, wraps=False) == [1, 0]
    assert tape.upcoming(1, wraps=False) == [1]
    tape.advance(1)
    tape.advance(0)
    assert tape.upcoming(9, wraps=False) == []
    assert tape.upcoming(9, wraps=True) == [1, 2]


def test_distance_is_in_uses() -> None:
    tape = Tape([0, 1, 2, 1, 0])
    tape.begin()
    tape.advance(0)
    assert [tape.distance(u, wraps=False) for u in (0, 1, 2, 7)] == [4, 1, 2, NEVER]
    for unit in (1, 2, 1, 0):
        tape.advance(unit)
    assert tape.distance(2, wraps=False) == NEVER
    assert tape.distance(0, wraps=True) == 1
    assert tape.distance(2, wraps=True) == 3


def test_first_uses_are_the_order_of_a_sweep() -> None:
    assert Tape([2, 0, 2, 1, 0]).first_uses() == [2, 0, 1]

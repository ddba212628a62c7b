"""Groups of guests: as captured at a `step()`, and what in them was edited since.

[Note: whose entry]
A guest may write to its group (a count, a learning rate of its own). What it writes is kept with
each parameter, never in the user's group: updates run behind the user's back. It holds until the
user, or a scheduler, changes the entry: until the group's value differs from the one the guest saw
when it wrote. To write the value that is there already is no edit.
"""

from __future__ import annotations

import copy
import numbers
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

Form = tuple[int, frozenset[str]]  # of a parameter's state: its dimensions, the names in the state

_ABSENT = object()


class Captured(dict[str, Any]):
    """A copy of a group without its parameters.

    `forms` is shared by all captures of a group: the state of each parameter that has stepped.
    """

    def __init__(self, values: Mapping[str, Any], forms: dict[int, Form] | None = None) -> None:
        super().__init__(values)
        self.forms: dict[int, Form] = {} if forms is None else forms


class Written(NamedTuple):
    """What a guest wrote to an entry, and what the user's group held then."""

    value: Any
    seen: Any


def written_data(entry: Written) -> dict[str, Any]:
    """The entry as data that can be saved; `seen` is left out where the group had no such entry."""
    data = {"value": entry.value}
    return data if entry.seen is _ABSENT else {**data, "seen": entry.seen}


def written_from(data: Mapping[str, Any]) -> Written:
    """The entry that `written_data` gave."""
    return Written(data["value"], data.get("seen", _ABSENT))


def still_written(
    captured: Mapping[str, Any], written: Mapping[str, Written]
) -> dict[str, Written]:
    """The entries that nobody has edited since the guest wrote them."""
    return {k: w for k, w in written.items() if same(captured.get(k, _ABSENT), w.seen)}


def newly_written(
    captured: Mapping[str, Any], given: Mapping[str, Any], group: Mapping[str, Any]
) -> dict[str, Written]:
    """The entries that a step has changed in the group it was given."""
    return {
        k: Written(v, captured.get(k, _ABSENT))
        for k, v in group.items()
        if k != "params" and not same(v, given.get(k, _ABSENT))
    }


def outline(value: Any) -> Any:
    """What of an entry may decide which state is kept: of a number its sign, not its size."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, numbers.Real):
        number: Any = value
        return (number > 0) - (number < 0)
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), bool(value.any())
    if isinstance(value, Mapping):
        return tuple((key, outline(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(outline, value))
    return type(value)


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
    """The entries whose outline differs -> what they are and were, in words."""
    words = {}
    for key in {**old, **new}:
        before, now = old.get(key, _ABSENT), new.get(key, _ABSENT)
        if key not in old or key not in new or outline(before) != outline(now):
            words[key] = f"group[{key!r}] {_told(now)}, which was {_told(before)}"
    return words


def _told(value: Any) -> str:
    return "absent" if value is _ABSENT else repr(value)


def copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copies that may be changed in place; the usual kinds without the price of `deepcopy`."""
    return {key: _copy(value) for key, value in values.items()}


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple):
        return tuple(map(_copy, value)) if type(value) is tuple else copy.deepcopy(value)
    return copy.deepcopy(value)


def same(one: Any, other: Any) -> bool:
    """Whether two entries are equal; NaN and objects are the same only as one object."""
    if one is other:
        return True
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
            return False
        return one.dtype is other.dtype and torch.equal(one, other)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)

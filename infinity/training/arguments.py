"""Arguments and results as tensors, and the shape that they stood in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor stood."""

    index: int


def take_apart(value: Any, tensors: list[Tensor]) -> Any:
    """The same with a place for every tensor, which are appended to `tensors`.

    Looks into plain tuples, lists and dicts; parameters, and objects of other classes, stay.
    """
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        tensors.append(value)
        return _Place(len(tensors) - 1)
    if type(value) in (tuple, list):
        return type(value)(take_apart(item, tensors) for item in value)
    if type(value) is dict:
        return {key: take_apart(item, tensors) for key, item in value.items()}
    return value


def put_together(shape: Any, tensors: Sequence[Tensor]) -> Any:
    """What was taken apart, with these tensors."""
    if isinstance(shape, _Place):
        return tensors[shape.index]
    if type(shape) in (tuple, list):
        return type(shape)(put_together(item, tensors) for item in shape)
    if type(shape) is dict:
        return {key: put_together(item, tensors) for key, item in shape.items()}
    return shape

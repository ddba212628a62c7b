"""Arguments and results as tensors, and the shape that they stood in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from infinity.errors import TrainingError


@dataclass(frozen=True, slots=True)
class _TensorPosition:
    """Where a tensor stood."""

    index: int


def take_apart(value: Any, tensors: list[Tensor]) -> Any:
    """The same with a place for every tensor, which are appended to `tensors`.

    Looks into plain tuples, lists and dicts; parameters, and objects of other classes, stay.
    """
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        tensors.append(value)
        return _TensorPosition(len(tensors) - 1)
    if type(value) in (tuple, list):
        return type(value)(take_apart(item, tensors) for item in value)
    if type(value) is dict:
        return {key: take_apart(item, tensors) for key, item in value.items()}
    return value


def put_together(shape: Any, tensors: Sequence[Tensor]) -> Any:
    """Return the value of a shape, with these tensors."""
    if isinstance(shape, _TensorPosition):
        return tensors[shape.index]
    if type(shape) in (tuple, list):
        return type(shape)(put_together(item, tensors) for item in shape)
    if type(shape) is dict:
        return {key: put_together(item, tensors) for key, item in shape.items()}
    return shape


def leaves(shape: Any) -> Iterator[Any]:
    """What `take_apart` left as it is, outside of its lists and dicts."""
    if type(shape) in (tuple, list, dict):
        for item in shape.values() if type(shape) is dict else shape:
            yield from leaves(item)
    elif not isinstance(shape, _TensorPosition):
        yield shape


def is_as_given(value: Any, shape: Any, tensors: Sequence[Tensor]) -> bool:
    """Return True if no list or dict of the value was changed since it was put together."""
    if isinstance(shape, _TensorPosition):
        return value is tensors[shape.index]
    if type(shape) is dict:
        same = value.keys() == shape.keys()
        return same and all(is_as_given(value[key], shape[key], tensors) for key in shape)
    if type(shape) in (tuple, list):
        each = zip(value, shape, strict=False)
        return len(value) == len(shape) and all(is_as_given(v, s, tensors) for v, s in each)
    return value is shape


def _run_once(
    function: Callable[..., Any], name: str, shape: Any, tensors: Sequence[Tensor]
) -> Any:
    """Call it with copies of the lists and dicts that it was given.

    Raises `TrainingError` if it changes them: the caller would not see it.
    """
    args, kwargs = put_together(shape, tensors)
    result = function(*args, **kwargs)
    if not is_as_given((args, kwargs), shape, tensors):
        raise TrainingError(
            f"block {name!r} changes a list or dict that it was given",
            because="a block that is recomputed, or runs in slices, would do it several times",
            remedy="return the added values, or leave out activations.checkpoint and "
            "activations.slices",
        )
    return result

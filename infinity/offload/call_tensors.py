"""Flattening of arguments and results into their tensors and a structure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from infinity.errors import TrainingError


@dataclass(frozen=True, slots=True)
class _TensorPosition:
    """Placeholder in a structure: the tensor's index in the flat list."""

    index: int


def take_apart(value: Any, tensors: list[Tensor]) -> Any:
    """Append the tensors in a value to `tensors`; return its structure, with indices for them.

    Descends into plain tuples, lists and dicts. Parameters and objects of other classes stay in the
    structure.
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
    """Rebuild a value from its structure and tensors."""
    if isinstance(shape, _TensorPosition):
        return tensors[shape.index]
    if type(shape) in (tuple, list):
        return type(shape)(put_together(item, tensors) for item in shape)
    if type(shape) is dict:
        return {key: put_together(item, tensors) for key, item in shape.items()}
    return shape


def leaves(shape: Any) -> Iterator[Any]:
    """Yield the objects in a structure that are neither tensors nor containers."""
    if type(shape) in (tuple, list, dict):
        for item in shape.values() if type(shape) is dict else shape:
            yield from leaves(item)
    elif not isinstance(shape, _TensorPosition):
        yield shape


def is_as_given(value: Any, shape: Any, tensors: Sequence[Tensor]) -> bool:
    """Return True if no container in the value was changed since `put_together` built it."""
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
    """Call the function with copies of the containers in its arguments.

    Raises `TrainingError` if it changes them, since the caller would not see the change.
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

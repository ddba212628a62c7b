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


def flatten_tensors(value: Any, tensors: list[Tensor]) -> Any:
    """Append the tensors in a value to `tensors`; return its structure, with indices for them.

    Descends into plain tuples, lists and dicts. Parameters and objects of other classes stay in the
    structure.
    """
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        tensors.append(value)
        return _TensorPosition(len(tensors) - 1)
    if type(value) in (tuple, list):
        return type(value)(flatten_tensors(item, tensors) for item in value)
    if type(value) is dict:
        return {key: flatten_tensors(item, tensors) for key, item in value.items()}
    return value


def unflatten_tensors(structure: Any, tensors: Sequence[Tensor]) -> Any:
    """Rebuild a value from its structure and tensors."""
    if isinstance(structure, _TensorPosition):
        return tensors[structure.index]
    if type(structure) in (tuple, list):
        return type(structure)(unflatten_tensors(item, tensors) for item in structure)
    if type(structure) is dict:
        return {key: unflatten_tensors(item, tensors) for key, item in structure.items()}
    return structure


def leaves(structure: Any) -> Iterator[Any]:
    """Yield the objects in a structure that are neither tensors nor containers."""
    if type(structure) in (tuple, list, dict):
        for item in structure.values() if type(structure) is dict else structure:
            yield from leaves(item)
    elif not isinstance(structure, _TensorPosition):
        yield structure


def is_unchanged(value: Any, structure: Any, tensors: Sequence[Tensor]) -> bool:
    """Return True if no container in the value was changed since `unflatten_tensors` built it."""
    if isinstance(structure, _TensorPosition):
        return value is tensors[structure.index]
    if type(structure) is dict:
        same_keys = value.keys() == structure.keys()
        return same_keys and all(
            is_unchanged(value[key], structure[key], tensors) for key in structure
        )
    if type(structure) in (tuple, list):
        pairs = zip(value, structure, strict=False)
        return len(value) == len(structure) and all(is_unchanged(v, s, tensors) for v, s in pairs)
    return value is structure


def call_checked(
    function: Callable[..., Any], name: str, structure: Any, tensors: Sequence[Tensor]
) -> Any:
    """Call the function with copies of the containers in its arguments.

    Raises `TrainingError` if it changes them, since the caller would not see the change, or if it
    changes a tensor, as far as torch tracks this, since a recomputation would start from it.
    """
    args, kwargs = unflatten_tensors(structure, tensors)
    versions = _versions(tensors)
    result = function(*args, **kwargs)
    if versions != _versions(tensors):
        raise TrainingError(
            f"block {name!r} changes its input in place",
            because="a block that is recomputed, or runs in slices, reads its input again",
            remedy="use operations that are not in place (x = x + y), or leave out "
            "activations.checkpoint and activations.slices",
        )
    if not is_unchanged((args, kwargs), structure, tensors):
        raise TrainingError(
            f"block {name!r} changes a list or dict that it was given",
            because="a block that is recomputed, or runs in slices, would do it several times",
            remedy="return the added values, or leave out activations.checkpoint and "
            "activations.slices",
        )
    return result


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]

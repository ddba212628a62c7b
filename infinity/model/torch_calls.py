"""Properties of a torch operation as a `DispatchMode` receives it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from infinity.model.torch_private import tree_leaves, tree_map


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested dicts, tuples and lists."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def nbytes_of(tensor: Tensor) -> int:
    """Return the bytes of the elements; for a meta tensor, of a real one."""
    return tensor.numel() * tensor.element_size()


def mutated_arguments(call: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that an operation writes to, in the order of its schema."""
    tensors: list[Tensor] = []
    for index, argument in enumerate(call._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            tensors.extend(tensors_in(value))
    return tensors


def returns_only_views(call: Any) -> bool:
    """Return True if all results are views of arguments and no element is written."""
    returns = call._schema.returns
    aliases = bool(returns) and all(
        r.alias_info is not None and not r.alias_info.is_write for r in returns
    )
    return aliases or torch.Tag.inplace_view in call.tags


def results_on_meta(call: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the results as meta tensors; `NotImplemented` if their shapes depend on values."""
    try:
        args, kwargs = tree_map(_on_meta, (args, kwargs))
        device = {"device": torch.device("meta")} if kwargs.get("device") is not None else {}
        return call(*args, **kwargs | device)
    except (NotImplementedError, RuntimeError):
        return NotImplemented


def _on_meta(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")


def indices_on_cpu(index: Any) -> Any:
    """Return an index of a tensor with its lists and arrays as CPU tensors.

    torch would convert them on the device of the tensor: on meta, without values.
    """
    if isinstance(index, tuple) or (isinstance(index, list) and not _is_numbers(index)):
        return type(index)(map(_index_on_cpu, index))  # of a list with others, an index per element
    return _index_on_cpu(index)


def _index_on_cpu(index: Any) -> Any:
    if not isinstance(index, list | tuple | range | np.ndarray):
        return index
    tensor = torch.as_tensor(index, device="cpu")
    return tensor if tensor.dtype in (torch.bool, torch.uint8) else tensor.long()


def _is_numbers(items: list[Any]) -> bool:
    return all(isinstance(item, int | np.integer | np.bool_) for item in items)


def generator_state(call: Any, args: Any, kwargs: Any) -> Tensor | None:
    """Return the state of the generator of a random operation, None for other operations."""
    if torch.Tag.nondeterministic_seeded not in call.tags:
        return None
    generators = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Generator)]
    return generators[0].get_state() if generators else torch.get_rng_state()

"""Questions about one operation of torch, as a `DispatchMode` sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


def leaves(value: Any) -> Iterator[Any]:
    """Everything in nested dicts, tuples and lists that is none of these."""
    if isinstance(value, dict):
        for item in value.values():
            yield from leaves(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def map_leaves(change: Callable[[Any], Any], value: Any) -> Any:
    """`value` with every leaf changed."""
    if isinstance(value, dict):
        return {name: map_leaves(change, item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(map_leaves(change, item) for item in value)
    return change(value)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors among the leaves."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]


def nbytes_of(tensor: Tensor) -> int:
    """Bytes of the elements; on meta, of those it would have."""
    return tensor.numel() * tensor.element_size()


def mutated_arguments(call: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments an operation writes to, in the order of its schema."""
    found: list[Tensor] = []
    for index, argument in enumerate(call._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            found.extend(tensors_in(value))
    return found


def only_makes_views(call: Any) -> bool:
    """Whether the results are windows on arguments, and nothing is written."""
    returns = call._schema.returns
    aliases = bool(returns) and all(
        r.alias_info is not None and not r.alias_info.is_write for r in returns
    )
    return aliases or torch.Tag.inplace_view in call.tags


def results_on_meta(call: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The results on meta, to see how large they would be; empty if the operation cannot tell."""
    to_meta = map_leaves(lambda x: x.to("meta") if isinstance(x, Tensor) else x, (args, kwargs))
    moved = dict(to_meta[1])
    if "device" in moved:
        moved["device"] = torch.device("meta")
    try:
        return call(*to_meta[0], **moved)
    except (NotImplementedError, RuntimeError):
        return ()


def generator_state(call: Any, args: Any, kwargs: Any) -> Tensor | None:
    """The state of the generator an operation draws from, None for one that draws nothing."""
    if torch.Tag.nondeterministic_seeded not in call.tags:
        return None
    own = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Generator)]
    return own[0].get_state() if own else torch.get_rng_state()

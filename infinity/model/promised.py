"""Tensors whose values are read when they are asked for, and what is made of them.

transformers renames, stacks, splits and ties what it loads, and undoes it when it saves, by rules
of its own for every family. It is handed promises in place of tensors: they have shape, dtype and
device of the real thing and no memory, and an operation on them gives another promise. So its
rules are followed to the letter, and one tensor at a time is in memory. A model may hold promises
until `initialize` takes it over: code that asks (adapters do) finds its parameters on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from infinity.errors import ConfigError
from infinity.model.operations import map_leaves, mutated_arguments, only_makes_views, tensors_in
from infinity.model.torch_private import is_cast, tensor_without_memory

Read = Callable[[], Tensor]
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


class Promised(Tensor):
    """A CPU tensor without memory; `value` makes it, each time anew.

    Casts between floating types change `dtype`, not what `value` returns: an fp32 file gives fp32
    masters whatever the model computes in.
    """

    _read: Read
    is_window = True  # others see a change of it: a tensor of a file, or a view

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], dtype: torch.dtype, read: Read) -> Promised:
        """`read` returns values of this shape, on the CPU."""
        made: Promised = tensor_without_memory(cls, shape, dtype)
        made._read = read
        return made

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, read: Read) -> None:
        super().__init__()

    def value(self) -> Tensor:
        """The values, in memory of their own; of any floating dtype where this one is floating."""
        return self._read()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Promised({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_function__(
        cls, call: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        inherited: Any = super().__torch_function__
        result = inherited(call, types, args, kwargs or {})
        if call == _SET_DATA and isinstance(args[0], Promised):
            given = args[1]
            args[0]._read = given._read if isinstance(given, Promised) else given.detach
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, call: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        mutated = mutated_arguments(call, args, kwargs)
        if mutated and not any(isinstance(tensor, Promised) for tensor in mutated):
            call(*map_leaves(_real, args), **map_leaves(_real, kwargs))
            return mutated[0]  # a copy into memory
        if mutated:
            return _changed(mutated[0], call, args, kwargs)
        try:
            found = call(*map_leaves(_on_meta, args), **_with_device_meta(kwargs))
        except (NotImplementedError, RuntimeError):  # it depends on values, or cannot be
            return call(*map_leaves(_real, args), **map_leaves(_real, kwargs))
        args, kwargs = map_leaves(_as_of_now, args), map_leaves(_as_of_now, kwargs)
        several = isinstance(found, tuple | list)
        results = list(found) if several else [found]
        if not tensors_in(results):
            return found
        for index, meta in enumerate(results):
            if isinstance(meta, Tensor):
                make = partial(_carried_out, call, args, kwargs, index if several else None)
                if _only_casts(call, args[0], meta):
                    make = args[0].read
                made = Promised(tuple(meta.shape), meta.dtype, make)
                made.is_window = only_makes_views(call)
                results[index] = made
        return results if several else results[0]


def keep_promises(model: nn.Module) -> Iterator[tuple[nn.Module, dict[str, Read]]]:
    """Put meta tensors in place of promises; yields modules with how to read their parameters.

    Parameters stay the same objects. Raises `ConfigError` for one that is tied to something by
    more than a Python reference.
    """
    reads: dict[int, Read] = {}
    for path, module in model.named_modules():
        found = {}
        for name, parameter in module._parameters.items():
            if isinstance(parameter, Promised):
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                meta = nn.Parameter(empty, parameter.requires_grad)
                reads[id(parameter)] = parameter._read
                _swap(f"{path}.{name}", parameter, meta)
            if parameter is not None and id(parameter) in reads:
                found[name] = reads[id(parameter)]
        if found:
            yield module, found


def _swap(name: str, parameter: Tensor, meta: nn.Parameter) -> None:
    try:
        torch.utils.swap_tensors(parameter, meta)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise ConfigError(
            f"parameter {name!r} has no memory yet and cannot get values",
            because=str(error).partition(chr(10))[0],
            remedy="register hooks after initialize(), and keep no views of parameters or weak "
            "references to them",
        ) from error


def _changed(tensor: Tensor, call: Any, args: Any, kwargs: Any) -> Tensor:
    """In-place operations: on temporaries, such as a normed weight that is initialised for nothing.

    One on a weight would have to change what others see of it.
    """
    if not isinstance(tensor, Promised) or tensor.is_window:
        raise ConfigError(
            f"{call} changes a weight in place before the engine has it",
            remedy="change it after initialize(), inside `with engine.materialized(...)`",
        )
    args, kwargs = map_leaves(_as_of_now, args), map_leaves(_as_of_now, kwargs)
    tensor._read = partial(_carried_out, call, args, kwargs, None)
    return tensor


def _only_casts(call: Any, source: Any, result: Tensor) -> bool:
    floats = isinstance(source, _AsOfNow) and source.dtype.is_floating_point
    return is_cast(call) and floats and result.is_floating_point()


def _carried_out(call: Any, args: Any, kwargs: Any, index: int | None) -> Tensor:
    """The operation on real values; contiguous, so that nothing larger than the result is kept."""
    result = call(*map_leaves(_real, args), **map_leaves(_real, kwargs))
    chosen: Tensor = result if index is None else result[index]
    if chosen.untyped_storage().nbytes() > chosen.nbytes:
        return chosen.clone(memory_format=torch.contiguous_format)
    return chosen


def _on_meta(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")


def _with_device_meta(kwargs: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = map_leaves(_on_meta, kwargs)
    if found.get("device") is not None:
        found["device"] = torch.device("meta")
    return found


@dataclass(frozen=True)
class _AsOfNow:
    """A promise as an argument: what it stands for now, whatever is assigned to it later."""

    read: Read
    dtype: torch.dtype


def _as_of_now(leaf: Any) -> Any:
    return _AsOfNow(leaf._read, leaf.dtype) if isinstance(leaf, Promised) else leaf


def _real(leaf: Any) -> Any:
    if isinstance(leaf, _AsOfNow):
        return leaf.read()
    return leaf.value() if isinstance(leaf, Promised) else leaf

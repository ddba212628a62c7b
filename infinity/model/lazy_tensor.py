"""Tensors whose values are read on demand, and results of operations on them.

transformers renames, stacks, splits and ties what it loads, and undoes it when it saves, by
rules of its own for every family. It is handed promises in place of tensors: they have shape,
dtype and device of the real thing and no memory, and an operation on them gives another promise.
So its rules are followed to the letter, and one tensor at a time is in memory. A model may hold
promises until `initialize` takes it over: code that asks (adapters do) finds its parameters on
the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from infinity.errors import ConfigError
from infinity.model.parameters import swap_parameters
from infinity.model.torch_calls import (
    mutated_arguments,
    only_makes_views,
    results_on_meta,
    tensors_in,
)
from infinity.model.torch_private import is_cast, tensor_without_memory, tree_map
from infinity.types import FrozenFormat

Read = Callable[[], Tensor]


@runtime_checkable
class ChunkedRead(Protocol):
    """A `Read` some of whose elements can be read alone."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values."""

    def __call__(self) -> Tensor:
        """All elements."""

    def pieces(self, first: int, count: int) -> list[Read] | None:
        """What gives `count` elements from `first`, flat, one piece after the other; None where
        they come with all others only. Nothing is read yet.
        """


@runtime_checkable
class PackedRead(Protocol):
    """A `Read` of elements of one quantised matrix."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and columns of the matrix."""

    def __call__(self) -> Tensor:
        """The values."""

    def packed(self, form: FrozenFormat) -> Tensor | None:
        """Return the bytes of the whole matrix if they are in this format, and all are meant."""


def pieces_of(read: Read, shape: Sequence[int], first: int, count: int) -> list[Read] | None:
    """`ChunkedRead.pieces`, of any `Read` that is to give a tensor of this shape."""
    if isinstance(read, ChunkedRead) and tuple(read.shape) == tuple(shape):
        return read.pieces(first, count)
    return None


_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


class LazyTensor(Tensor):
    """A CPU tensor without memory; `value` makes it, each time anew.

    Casts between floating types change `dtype`, not what `value` returns: an fp32 file gives fp32
    masters whatever the model computes in.
    """

    _read: Read
    is_window = True  # others see a change of it: a tensor of a file, or a view

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], dtype: torch.dtype, read: Read) -> LazyTensor:
        """`read` returns values of this shape, on the CPU."""
        made: LazyTensor = tensor_without_memory(cls, shape, dtype)
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
        if call == _SET_DATA and isinstance(args[0], LazyTensor):
            given = args[1]
            args[0]._read = given._read if isinstance(given, LazyTensor) else given.detach
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, call: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        mutated = mutated_arguments(call, args, kwargs)
        if mutated and not any(isinstance(tensor, LazyTensor) for tensor in mutated):
            call(*tree_map(_made, args), **tree_map(_made, kwargs))
            return mutated[0]  # a copy into memory
        if mutated:
            return _changed(mutated[0], call, args, kwargs)
        found = results_on_meta(call, args, kwargs)
        if found is NotImplemented:
            return call(*tree_map(_made, args), **tree_map(_made, kwargs))
        args, kwargs = tree_map(_as_of_now, args), tree_map(_as_of_now, kwargs)
        several = isinstance(found, tuple | list)
        results = list(found) if several else [found]
        if not tensors_in(results):
            return found
        for index, meta in enumerate(results):
            if isinstance(meta, Tensor):
                shape, number = tuple(meta.shape), index if several else None
                make: Read = _Result(shape, call, args, kwargs, number)
                if _only_casts(call, args[0], meta):
                    make = args[0].read
                made = LazyTensor(shape, meta.dtype, make)
                made.is_window = only_makes_views(call)
                results[index] = made
        return results if several else results[0]


def resolve_lazy_tensors(model: nn.Module) -> Iterator[tuple[nn.Module, dict[str, Read]]]:
    """Put meta tensors in place of promises; yields modules with how to read their parameters.

    Parameters stay the same objects. Raises `ConfigError` for one that is tied to something by
    more than a Python reference.
    """
    reads: dict[int, Read] = {}
    for path, module in model.named_modules():
        found = {}
        for name, parameter in module._parameters.items():
            if isinstance(parameter, LazyTensor):
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                meta = nn.Parameter(empty, parameter.requires_grad)
                reads[id(parameter)] = parameter._read
                swap_parameters(f"{path}.{name}", "has no memory yet", parameter, meta)
            if parameter is not None and id(parameter) in reads:
                found[name] = reads[id(parameter)]
        if found:
            yield module, found


def _changed(tensor: Tensor, call: Any, args: Any, kwargs: Any) -> Tensor:
    """In-place operations: on temporaries, such as a normed weight that is initialised for nothing.

    One on a weight would have to change what others see of it.
    """
    if not isinstance(tensor, LazyTensor) or tensor.is_window:
        raise ConfigError(
            f"{call} changes a weight in place before the engine has it",
            remedy="change it after initialize(), inside `with engine.materialized(...)`",
        )
    args, kwargs = tree_map(_as_of_now, args), tree_map(_as_of_now, kwargs)
    tensor._read = _Result(tuple(tensor.shape), call, args, kwargs, None)
    return tensor


def _only_casts(call: Any, source: Any, result: Tensor) -> bool:
    floats = isinstance(source, _AsOfNow) and source.dtype.is_floating_point
    return is_cast(call) and floats and result.is_floating_point()


@dataclass(frozen=True, slots=True)
class _Result:
    """The result of an operation on lazy tensors, carried out on demand."""

    shape: tuple[int, ...]
    call: Any
    args: Any
    kwargs: Any
    index: int | None  # among several results

    def __call__(self) -> Tensor:
        """On real values; contiguous, so that nothing larger than the result is kept."""
        result = self.call(*tree_map(_made, self.args), **tree_map(_made, self.kwargs))
        chosen: Tensor = result if self.index is None else result[self.index]
        if chosen.untyped_storage().nbytes() > chosen.nbytes:
            return chosen.clone(memory_format=torch.contiguous_format)
        return chosen

    def pieces(self, first: int, count: int) -> list[Read] | None:
        """See `ChunkedRead`: of what only lays tensors side by side, as experts that are fused."""
        if self.call in _SAME_ORDER:
            return _pieces(self.args[0], first, count)
        if self.call not in _JOINS:
            return None
        tensors = self.args[0]
        dim = self.args[1] if len(self.args) > 1 else self.kwargs.get("dim", 0)
        dim %= len(self.shape)
        # The result is runs of one block of each tensor: all along its dimensions from `dim`.
        blocks = [math.prod(t.shape[dim:]) for t in tensors]
        if sum(blocks) < _LEAST_BLOCK * len(blocks) and not _is_packed(tensors[0]):
            return None
        found: list[Read] = []
        end, run = first + count, first // sum(blocks)
        start = run * sum(blocks)  # of a block in the result
        while start < end:
            for tensor, block in zip(tensors, blocks, strict=True):
                begin, stop = max(first - start, 0), min(end - start, block)
                if begin < stop:
                    pieces = _pieces(tensor, run * block + begin, stop - begin)
                    if pieces is None:
                        return None
                    found += pieces
                start += block
            run += 1
        return found


_SAME_ORDER = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)
_JOINS = (torch.ops.aten.cat.default, torch.ops.aten.stack.default)
_LEAST_BLOCK = 4096  # elements: of less a read costs more than it spares


@dataclass(frozen=True)
class _AsOfNow:
    """A lazy tensor as an argument: its current value, whatever is assigned to it later."""

    read: Read
    shape: tuple[int, ...]
    dtype: torch.dtype


def _as_of_now(leaf: Any) -> Any:
    if not isinstance(leaf, LazyTensor):
        return leaf
    return _AsOfNow(leaf._read, tuple(leaf.shape), leaf.dtype)


def _pieces(leaf: Any, first: int, count: int) -> list[Read] | None:
    lazy = isinstance(leaf, _AsOfNow)
    return pieces_of(leaf.read, leaf.shape, first, count) if lazy else None


def _is_packed(leaf: Any) -> bool:
    return any(isinstance(read, PackedRead) for read in _pieces(leaf, 0, 1) or ())


def _made(leaf: Any) -> Any:
    if isinstance(leaf, _AsOfNow):
        return leaf.read()
    return leaf.value() if isinstance(leaf, LazyTensor) else leaf

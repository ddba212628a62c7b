"""Lazy tensors: values are read on demand, and operations on them return lazy tensors.

transformers renames, stacks, splits and ties the weights that it loads, and reverts this when it
saves, by rules specific to each model family. It is given lazy tensors instead of real ones: they
have the same shape, dtype and device and no memory, and an operation on them returns another lazy
tensor. So its rules apply unchanged, with one tensor in memory at a time. A model may hold lazy
tensors until `initialize`: code that inspects it before (adapters do) finds parameters on the CPU.
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
    results_on_meta,
    returns_only_views,
    tensors_in,
)
from infinity.model.torch_private import is_cast, tensor_without_memory, tree_map
from infinity.types import FrozenFormat

Read = Callable[[], Tensor]


@runtime_checkable
class ChunkedRead(Protocol):
    """A `Read` that can also read a range of its elements."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values."""

    def __call__(self) -> Tensor:
        """Return all elements."""

    def pieces(self, first: int, count: int) -> list[Read] | None:
        """Return reads that yield `count` flat elements from `first`, one slice after the other.

        None if only the full tensor can be read. Nothing is read yet.
        """


@runtime_checkable
class PackedRead(Protocol):
    """A `Read` of elements of one quantized matrix."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and columns of the matrix."""

    def __call__(self) -> Tensor:
        """Return the values."""

    def packed(self, form: FrozenFormat) -> Tensor | None:
        """Return the bytes of the matrix if it has this format and is read in full, else None."""


def range_reads_of(read: Read, shape: Sequence[int], first: int, count: int) -> list[Read] | None:
    """Return `ChunkedRead.pieces` of a read of a tensor of this shape; None for other reads."""
    if isinstance(read, ChunkedRead) and tuple(read.shape) == tuple(shape):
        return read.pieces(first, count)
    return None


_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


class LazyTensor(Tensor):
    """A CPU tensor without memory; each call of `read` reads or computes the values anew.

    Casts between floating dtypes change `dtype`, not the result of `read`: an fp32 file gives fp32
    masters even if the model computes in bf16.
    """

    read: Read  # returns the values in new memory; in any floating dtype if this dtype is floating
    has_aliases = True  # other tensors would see an edit: it is read from a file, or a view

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], dtype: torch.dtype, read: Read) -> LazyTensor:
        """Create a lazy tensor; `read` returns values of this shape, on the CPU."""
        tensor: LazyTensor = tensor_without_memory(cls, shape, dtype)
        tensor.read = read
        return tensor

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, read: Read) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_function__(
        cls, call: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        default_function: Any = super().__torch_function__
        result = default_function(call, types, args, kwargs or {})
        if call == _SET_DATA and isinstance(args[0], LazyTensor):
            source = args[1]
            args[0].read = source.read if isinstance(source, LazyTensor) else source.detach
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, call: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        mutated = mutated_arguments(call, args, kwargs)
        if mutated and not any(isinstance(tensor, LazyTensor) for tensor in mutated):
            call(*tree_map(_to_real, args), **tree_map(_to_real, kwargs))
            return mutated[0]  # a copy into a real tensor
        if mutated:  # a temporary, as in the initialization of a weight norm's result
            target = mutated[0]
            if not isinstance(target, LazyTensor) or target.has_aliases:
                raise ConfigError(  # views and other reads of a weight would not see the change
                    f"{call} changes a weight in place before the engine has it",
                    remedy="change it after initialize(), inside `with engine.materialized(...)`",
                )
            args, kwargs = tree_map(_take_snapshot, args), tree_map(_take_snapshot, kwargs)
            target.read = _Result(tuple(target.shape), call, args, kwargs, None)
            return target
        meta_results = results_on_meta(call, args, kwargs)
        if meta_results is NotImplemented:
            return call(*tree_map(_to_real, args), **tree_map(_to_real, kwargs))
        args, kwargs = tree_map(_take_snapshot, args), tree_map(_take_snapshot, kwargs)
        is_sequence = isinstance(meta_results, tuple | list)
        results = list(meta_results) if is_sequence else [meta_results]
        if not tensors_in(results):
            return meta_results
        casts = is_cast(call) and isinstance(args[0], _Snapshot)
        casts = casts and args[0].dtype.is_floating_point
        for index, meta in enumerate(results):
            if isinstance(meta, Tensor):
                shape = tuple(meta.shape)
                result_index = index if is_sequence else None
                result_read: Read = _Result(shape, call, args, kwargs, result_index)
                if casts and meta.is_floating_point():
                    result_read = args[0].read
                lazy = LazyTensor(shape, meta.dtype, result_read)
                lazy.has_aliases = returns_only_views(call)
                results[index] = lazy
        return results if is_sequence else results[0]


def resolve_lazy_tensors(model: nn.Module) -> Iterator[tuple[nn.Module, dict[str, Read]]]:
    """Replace lazy parameters by meta tensors; yield modules with the reads of their parameters.

    Parameters stay the same Python objects. Raises `ConfigError` as `swap_parameters` does.
    """
    reads: dict[int, Read] = {}
    for path, module in model.named_modules():
        module_reads = {}
        for name, parameter in module._parameters.items():
            if isinstance(parameter, LazyTensor):
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                meta = nn.Parameter(empty, parameter.requires_grad)
                reads[id(parameter)] = parameter.read
                swap_parameters(f"{path}.{name}", "has no memory yet", parameter, meta)
            if parameter is not None and id(parameter) in reads:
                module_reads[name] = reads[id(parameter)]
        if module_reads:
            yield module, module_reads


@dataclass(frozen=True, slots=True)
class _Result:
    """Result of an operation on lazy tensors, which is run on demand."""

    shape: tuple[int, ...]
    call: Any
    args: Any
    kwargs: Any
    index: int | None  # among several results

    def __call__(self) -> Tensor:
        """Run the operation on real values; copy a result that is a view of a larger storage."""
        result = self.call(*tree_map(_to_real, self.args), **tree_map(_to_real, self.kwargs))
        chosen: Tensor = result if self.index is None else result[self.index]
        if chosen.untyped_storage().nbytes() > chosen.nbytes:
            return chosen.clone(memory_format=torch.contiguous_format)
        return chosen

    def pieces(self, first: int, count: int) -> list[Read] | None:
        """See `ChunkedRead`; only for aliases and concatenations, as of fused experts."""
        if self.call in _SAME_ORDER:
            return _snapshot_pieces(self.args[0], first, count)
        if self.call not in _CONCATENATIONS:
            return None
        tensors = self.args[0]
        dim = self.args[1] if len(self.args) > 1 else self.kwargs.get("dim", 0)
        dim %= len(self.shape)
        # The result repeats one block of each tensor; a block spans the dimensions from `dim` on.
        blocks = [math.prod(t.shape[dim:]) for t in tensors]
        if sum(blocks) < 4096 * len(blocks):  # separate reads would cost more than they save
            first_reads = _snapshot_pieces(tensors[0], 0, 1) or ()
            if not any(isinstance(read, PackedRead) for read in first_reads):
                return None
        reads: list[Read] = []
        end = first + count
        repetition = first // sum(blocks)
        start = repetition * sum(blocks)  # offset of a block in the result
        while start < end:
            for tensor, block in zip(tensors, blocks, strict=True):
                begin, block_end = max(first - start, 0), min(end - start, block)
                if begin < block_end:
                    block_reads = _snapshot_pieces(
                        tensor, repetition * block + begin, block_end - begin
                    )
                    if block_reads is None:
                        return None
                    reads += block_reads
                start += block
            repetition += 1
        return reads


_SAME_ORDER = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)
_CONCATENATIONS = (torch.ops.aten.cat.default, torch.ops.aten.stack.default)


@dataclass(frozen=True)
class _Snapshot:
    """A lazy tensor as an argument: its value at the time of the call, not of later assignments."""

    read: Read
    shape: tuple[int, ...]
    dtype: torch.dtype


def _take_snapshot(leaf: Any) -> Any:
    if not isinstance(leaf, LazyTensor):
        return leaf
    return _Snapshot(leaf.read, tuple(leaf.shape), leaf.dtype)


def _snapshot_pieces(leaf: Any, first: int, count: int) -> list[Read] | None:
    is_lazy = isinstance(leaf, _Snapshot)
    return range_reads_of(leaf.read, leaf.shape, first, count) if is_lazy else None


def _to_real(leaf: Any) -> Any:
    return leaf.read() if isinstance(leaf, _Snapshot | LazyTensor) else leaf

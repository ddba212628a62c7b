"""Launches of the CUDA kernels: the tables that csrc/adam/segments.cuh reads, as ctypes.

Segments of one variant share launches, independent of their groups, up to the capacity of a table,
which is limited by the size of kernel parameters. No function touches a device, so that all but the
launch itself is tested without one.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from infinity.optim.cpu import Piece
from infinity.types import MomentFormat

THREADS = 256
FOLD_THREADS = 1024
TILE = 4096  # elements that one block of threads updates
SQUARE_TILE = 65536  # elements whose squares one block of threads sums
_PER_THREAD = 4
_NUM_SCALARS = 10

TYPES = {torch.float32: "Fp32", torch.bfloat16: "Bf16", torch.float16: "Fp16"}
LAYOUTS = {
    torch.float32: "Fp32Weight",
    torch.bfloat16: "SplitWeight",
    torch.float16: "Fp16Weight",
}
FORMATS = {
    MomentFormat.FP32: "Fp32Moment",
    MomentFormat.BF16: "Bf16Moment",
    MomentFormat.BF16_STOCHASTIC: "Bf16Stochastic",
    MomentFormat.INT8: "Int8Moment",
}

Variant = tuple[tuple[str, str], ...]  # macros of fused_adam.cu
SQUARES: Variant = ()  # the kernels of square sums


class Launch(NamedTuple):
    """Launch of one kernel of a variant on `blocks` x `threads` threads; arguments by value."""

    variant: Variant
    kernel: str
    blocks: int
    threads: int
    arguments: tuple[ctypes.Structure, ...]


class _KernelSegment(ctypes.Structure):
    _fields_ = [
        ("weight", ctypes.c_uint64),
        ("master_state", ctypes.c_uint64),
        ("moment1", ctypes.c_uint64),
        ("moment2", ctypes.c_uint64),
        ("scales1", ctypes.c_uint64),
        ("scales2", ctypes.c_uint64),
        ("gradient", ctypes.c_uint64),
        ("n", ctypes.c_uint64),
        ("first", ctypes.c_uint64),
        ("key", ctypes.c_uint64),
        ("first_tile", ctypes.c_uint32),
        ("scalars", ctypes.c_uint16),
        ("wide", ctypes.c_uint16),
    ]


class _SumSegment(ctypes.Structure):
    _fields_ = [
        ("source", ctypes.c_uint64),
        ("sum", ctypes.c_uint64),
        ("n", ctypes.c_uint64),
        ("first_tile", ctypes.c_uint32),
        ("num_tiles", ctypes.c_uint32),
    ]


class _SumTable(ctypes.Structure):
    num_slots = 127
    _fields_ = [
        ("num_segments", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
        ("partials", ctypes.c_uint64),
        ("segments", _SumSegment * num_slots),
    ]


def _update_table(rows: int, slots: int) -> type[Any]:
    class UpdateTable(ctypes.Structure):
        num_rows, num_slots = rows, slots
        _fields_ = [
            ("num_segments", ctypes.c_uint32),
            ("unused", ctypes.c_uint32),
            ("scalars", (ctypes.c_float * _NUM_SCALARS) * rows),
            ("segments", _KernelSegment * slots),
        ]

    return UpdateTable


_SmallUpdate, _LargeUpdate = _update_table(14, 40), _update_table(70, 340)


def variant_of(piece: Piece) -> Variant:
    """Return the macros that specialize the kernel for a piece."""
    moments = piece.moments
    return (
        ("INFINITY_RULE", piece.rule_params.kernel),
        ("INFINITY_LAYOUT", LAYOUTS[piece.weight.dtype]),
        ("INFINITY_GRADIENT", TYPES[piece.gradient.dtype]),
        ("INFINITY_MOMENTS", FORMATS[moments[0].format] if moments else "Fp32Moment"),
    )


def update_launches(pieces: Sequence[Piece]) -> Iterator[Launch]:
    """Yield the fewest possible launches: one per variant, unless a table overflows."""
    by_variant: dict[Variant, list[Piece]] = {}
    for piece in pieces:
        if piece.weight.numel():
            by_variant.setdefault(variant_of(piece), []).append(piece)
    for variant, members in by_variant.items():
        yield from _launches_of(variant, members)


def _launches_of(variant: Variant, pieces: list[Piece]) -> Iterator[Launch]:
    rows: dict[bytes, int] = {}  # keys are bytes, since +0 and -0 differ
    batch: list[tuple[Piece, int]] = []
    for piece in pieces:
        numbers = piece.rule_params.scalars(piece.step, piece.grad_scale)
        scalars = struct.pack(f"{len(numbers)}f", *numbers)
        full = len(rows) == _LargeUpdate.num_rows and scalars not in rows
        if full or len(batch) == _LargeUpdate.num_slots:
            yield _launch(variant, batch, rows)
            rows, batch = {}, []
        batch.append((piece, rows.setdefault(scalars, len(rows))))
    yield _launch(variant, batch, rows)


def _launch(variant: Variant, batch: list[tuple[Piece, int]], rows: dict[bytes, int]) -> Launch:
    small = len(batch) <= _SmallUpdate.num_slots and len(rows) <= _SmallUpdate.num_rows
    table = _SmallUpdate() if small else _LargeUpdate()
    table.num_segments = len(batch)
    for scalars, row in rows.items():
        ctypes.memmove(table.scalars[row], scalars, len(scalars))
    tiles = 0
    for slot, (piece, row) in enumerate(batch):
        _fill(table.segments[slot], piece)
        table.segments[slot].scalars = row
        table.segments[slot].first_tile = tiles
        tiles += -(-piece.weight.numel() // TILE)
    name = "update_small" if small else "update_large"
    return Launch(variant, name, tiles, THREADS, (table,))


def _fill(segment: _KernelSegment, piece: Piece) -> None:
    tensors = {
        "weight": piece.weight,
        "master_state": piece.master_state,
        "gradient": piece.gradient,
    }
    for number, moment in enumerate(piece.moments, 1):
        tensors[f"moment{number}"] = moment.values
        if moment.scales is not None:
            setattr(segment, f"scales{number}", moment.scales.data_ptr())
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    for name, tensor in present.items():
        setattr(segment, name, tensor.data_ptr())
    segment.n = piece.weight.numel()
    segment.first = piece.first
    segment.key = piece.key
    segment.wide = all(  # addresses allow loads of four elements as one vector
        tensor.data_ptr() % (_PER_THREAD * tensor.element_size()) == 0
        for tensor in present.values()
    )


def num_square_tiles(tensors: Sequence[torch.Tensor]) -> int:
    """Return the number of partial sums (fp64) that `square_launches` needs."""
    return sum(-(-tensor.numel() // SQUARE_TILE) for tensor in tensors)


def square_launches(
    tensors: Sequence[torch.Tensor], sums: torch.Tensor, partials: torch.Tensor
) -> Iterator[Launch]:
    """Yield launches that write the sum of squares of each tensor to the fp64 `sums`.

    `partials` is fp64 scratch memory of `num_square_tiles(tensors)` elements.
    """
    by_dtype: dict[torch.dtype, list[tuple[torch.Tensor, int]]] = {}
    for index, tensor in enumerate(tensors):
        by_dtype.setdefault(tensor.dtype, []).append((tensor, index))
    used = 0
    for dtype, members in by_dtype.items():
        for start in range(0, len(members), _SumTable.num_slots):
            batch = members[start : start + _SumTable.num_slots]
            table = _SumTable(num_segments=len(batch))
            table.partials = partials.data_ptr() + used * partials.element_size()
            tiles = 0
            for slot, (tensor, index) in enumerate(batch):
                segment = table.segments[slot]
                segment.source = tensor.data_ptr()
                segment.sum = sums.data_ptr() + index * sums.element_size()
                segment.n = tensor.numel()
                segment.first_tile = tiles
                segment.num_tiles = num_square_tiles([tensor])
                tiles += segment.num_tiles
            used += tiles
            if tiles:
                yield Launch(SQUARES, f"square_tiles_{TYPES[dtype]}", tiles, THREADS, (table,))
            yield Launch(SQUARES, "fold_partials", len(batch), FOLD_THREADS, (table,))

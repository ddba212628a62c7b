"""Streams of a plan's state: their tensors, and the offsets of these in chunks.

Saving, loading and reading a durable run all use the layout that `pieces` defines.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

import torch

from infinity.checkpoint.manifest import FROZEN, MODEL, TensorSpec
from infinity.optim.moments import COMPUTE_DTYPES, KIND_DTYPES, VALUE_DTYPES
from infinity.plan.layout import Segment, UnitLayout
from infinity.plan.plan import Plan
from infinity.types import MOMENT_BLOCK, Kind, MomentFormat

_SCALE_BYTES = torch.float32.itemsize


class StreamRange(NamedTuple):
    """Byte range of a tensor, from its byte `first`, stored at `start` in a section of a chunk."""

    stream: str
    name: str
    first: int
    start: int
    nbytes: int

    @property
    def byte_range(self) -> slice:
        """Slice of the section of the chunk."""
        return slice(self.start, self.start + self.nbytes)


def state_streams(plan: Plan) -> dict[str, list[TensorSpec]]:
    """Return the tensors of each stream, of all stored state, in the order of units."""
    streams: dict[str, list[TensorSpec]] = {MODEL: [], FROZEN: []}
    for layout in plan.units:
        for segment in filter(lambda s: s.begins, layout.segments):
            name, shape = segment.name, segment.full_shape
            spec = TensorSpec(name, shape, getattr(torch, segment.dtype))
            streams[MODEL if segment.trained else FROZEN].append(spec.quantized(segment.form))
            for kind in filter(segment.keeps, plan.precision.kinds[1:]):
                dtype = _dtype_of(plan, kind)
                streams.setdefault(kind.value, []).append(TensorSpec(name, shape, dtype))
                if form := _scaled_format(plan, kind):
                    scales = TensorSpec(name, (form.num_scales(prod(shape)),), torch.float32)
                    streams.setdefault(f"{kind.value}_scales", []).append(scales)
    return {stream: tensors for stream, tensors in streams.items() if tensors}


def pieces(plan: Plan, layout: UnitLayout, chunk: int, kind: Kind) -> Iterator[StreamRange]:
    """Yield the ranges of tensors, and of scales, in a chunk's section of a state kind."""
    start, count = layout.chunk(chunk, plan.chunk_elements)
    size = _dtype_of(plan, kind).itemsize
    form = _scaled_format(plan, kind)
    stream = MODEL if kind is Kind.WEIGHT else kind.value
    for segment in layout.trained_segments:
        first, last = segment.within(start, count)
        if first >= last or not segment.keeps(kind):
            continue
        element = start + first - segment.offset + segment.first_element
        yield StreamRange(stream, segment.name, element * size, first * size, (last - first) * size)
        if form:
            assert first % MOMENT_BLOCK == element % MOMENT_BLOCK == 0, segment
            yield StreamRange(
                f"{kind.value}_scales",
                segment.name,
                element // MOMENT_BLOCK * _SCALE_BYTES,
                count * size + first // MOMENT_BLOCK * _SCALE_BYTES,
                form.num_scales(last - first) * _SCALE_BYTES,
            )


def frozen_ranges(layout: UnitLayout, rank: int | None = None) -> Iterator[StreamRange]:
    """Yield the ranges of tensors in a unit's frozen bytes; with `rank`, in that rank's shard."""
    start, nbytes = 0, layout.frozen_bytes
    if rank is not None:
        nbytes //= layout.shards
        start = rank * nbytes
    for segment in (s for s in layout.segments if not s.trained):
        first = max(segment.offset, start)
        last = min(segment.offset + segment.nbytes, start + nbytes)
        if first < last:
            byte = frozen_segment_offset(segment) + first - segment.offset
            yield StreamRange(FROZEN, segment.name, byte, first - start, last - first)


def frozen_segment_offset(segment: Segment) -> int:
    """Return the offset of a frozen segment in the bytes of the model's parameter.

    Nonzero only for rows of a stack: in every format all its experts have equal sizes in bytes.
    """
    return segment.first_element * segment.nbytes // max(segment.numel, 1)


def _dtype_of(plan: Plan, kind: Kind) -> torch.dtype:
    if kind is Kind.WEIGHT:
        return COMPUTE_DTYPES[plan.precision.name]
    if kind in KIND_DTYPES:
        return KIND_DTYPES[kind]
    return VALUE_DTYPES[plan.precision.format_of(kind)]


def _scaled_format(plan: Plan, kind: Kind) -> MomentFormat | None:
    """Return the format of a moment that has scales, else None."""
    if kind not in plan.precision.moment_kinds:
        return None
    form = plan.precision.format_of(kind)
    return form if form.num_scales(1) else None

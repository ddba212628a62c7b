"""The streams of a plan's state: which tensors there are, and where their bytes lie in chunks.

Saving, loading and reading a durable run all follow from `pieces`.
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
    """Some bytes of a tensor: from `first` of it on, which lie at `start` of a chunk's part."""

    stream: str
    name: str
    first: int
    start: int
    nbytes: int

    @property
    def byte_range(self) -> slice:
        """Where they lie."""
        return slice(self.start, self.start + self.nbytes)


def state_streams(plan: Plan) -> dict[str, list[TensorSpec]]:
    """Stream -> its tensors, of everything at rest; in the order of units."""
    streams: dict[str, list[TensorSpec]] = {MODEL: [], FROZEN: []}
    for layout in plan.units:
        for segment in filter(lambda s: s.begins, layout.segments):
            name, shape = segment.name, segment.full_shape
            spec = TensorSpec(name, shape, getattr(torch, segment.dtype))
            streams[MODEL if segment.trained else FROZEN].append(spec.quantised(segment.form))
            for kind in filter(segment.keeps, plan.precision.kinds[1:]):
                kept = _dtype_of(plan, kind)
                streams.setdefault(kind.value, []).append(TensorSpec(name, shape, kept))
                if form := _scaled(plan, kind):
                    scales = TensorSpec(name, (form.num_scales(prod(shape)),), torch.float32)
                    streams.setdefault(_scales_of(kind), []).append(scales)
    return {stream: tensors for stream, tensors in streams.items() if tensors}


def pieces(plan: Plan, layout: UnitLayout, chunk: int, kind: Kind) -> Iterator[StreamRange]:
    """Return the ranges of tensors, and of scales, in a chunk's part of a state kind."""
    start, count = layout.chunk(chunk, plan.chunk_elements)
    size, form = _dtype_of(plan, kind).itemsize, _scaled(plan, kind)
    stream = MODEL if kind is Kind.WEIGHT else kind.value
    for segment in layout.trained_segments:
        first, last = segment.within(start, count)
        if first >= last or not segment.keeps(kind):
            continue
        element = start + first - segment.offset + segment.first_element
        yield StreamRange(stream, segment.name, element * size, first * size, (last - first) * size)
        if form:
            assert first % MOMENT_BLOCK == element % MOMENT_BLOCK == 0, segment
            block, blocks = first // MOMENT_BLOCK, form.num_scales(last - first)
            yield StreamRange(
                _scales_of(kind),
                segment.name,
                element // MOMENT_BLOCK * _SCALE_BYTES,
                count * size + block * _SCALE_BYTES,
                blocks * _SCALE_BYTES,
            )


def frozen_pieces(layout: UnitLayout, rank: int | None = None) -> Iterator[StreamRange]:
    """Return the ranges of tensors in the frozen bytes of a unit; with `rank`, of that rank."""
    start, nbytes = 0, layout.frozen_bytes
    if rank is not None:
        nbytes //= layout.shards
        start = rank * nbytes
    for segment in (s for s in layout.segments if not s.trained):
        first = max(segment.offset, start)
        last = min(segment.offset + segment.nbytes, start + nbytes)
        if first < last:
            byte = first_frozen_byte(segment) + first - segment.offset
            yield StreamRange(FROZEN, segment.name, byte, first - start, last - first)


def first_frozen_byte(segment: Segment) -> int:
    """Return where a frozen segment begins in the bytes of the model's parameter.

    Not 0 for rows of a stack, of which each expert has the same number of bytes in every format.
    """
    return segment.first_element * segment.nbytes // max(segment.numel, 1)


def _dtype_of(plan: Plan, kind: Kind) -> torch.dtype:
    if kind is Kind.WEIGHT:
        return COMPUTE_DTYPES[plan.precision.name]
    if kind in KIND_DTYPES:
        return KIND_DTYPES[kind]
    return VALUE_DTYPES[plan.precision.format_of(kind)]


def _scaled(plan: Plan, kind: Kind) -> MomentFormat | None:
    """The format of a moment that has scales."""
    if kind not in plan.precision.moment_kinds:
        return None
    form = plan.precision.format_of(kind)
    return form if form.num_scales(1) else None


def _scales_of(kind: Kind) -> str:
    return f"{kind.value}_scales"

"""Tests of the flat layout of a unit: alignment, disjoint segments, chunks and records."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from infinity.plan.layout import (
    BF16,
    ELEMENT_ALIGN,
    FP16,
    FP32,
    MOMENTS,
    RECORD_ORDER,
    SEGMENT_ALIGN_BYTES,
    ParameterFacts,
    Precision,
    Record,
    UnitLayout,
    lay_out,
)
from infinity.types import MOMENT_BLOCK, PAGE, Kind, MomentFormat, round_up

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int8": 1, "bool": 1}
moments = st.lists(st.sampled_from(MomentFormat), max_size=len(MOMENTS)).map(tuple)
precisions = st.builds(
    lambda p, m: replace(p, moments=m), st.sampled_from([BF16, FP16, FP32]), moments
)
shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
frozen_dtypes = st.sampled_from(sorted(ITEMSIZES))


@st.composite
def facts(draw: st.DrawFn, precision: Precision) -> list[ParameterFacts]:
    found = []
    for index in range(draw(st.integers(0, 8))):
        shape, trained = draw(shapes), draw(st.booleans())
        compute = "bfloat16" if precision.weight == 2 else "float32"
        dtype = compute if trained else draw(frozen_dtypes)
        found.append(
            ParameterFacts(
                name=f"p{index}",
                parameter=index,
                shape=shape,
                dtype=dtype,
                numel=math.prod(shape),
                itemsize=ITEMSIZES[dtype],
                trained=trained,
                group=0 if trained else -1,
            )
        )
    return found


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Precision, list[ParameterFacts], UnitLayout]:
    precision = draw(precisions)
    given_facts = draw(facts(precision))
    return precision, given_facts, lay_out(3, "unit", given_facts, precision)


def byte_ranges(layout: UnitLayout) -> list[tuple[int, int]]:
    """Return the byte range of every segment in the slot of the unit."""
    ranges = []
    for segment in layout.segments:
        if segment.trained:
            start = segment.offset * layout.weight_itemsize
        else:
            start = layout.trained_bytes + segment.offset
        ranges.append((start, start + segment.nbytes))
    return ranges


@given(layouts())
def test_every_parameter_has_segment_of_its_size(
    case: tuple[Precision, list[ParameterFacts], UnitLayout],
) -> None:
    _, given_facts, layout = case
    assert sorted(s.parameter for s in layout.segments) == [f.parameter for f in given_facts]
    for segment in layout.segments:
        fact = given_facts[segment.parameter]
        assert segment.numel == fact.numel
        assert segment.nbytes == fact.numel * fact.itemsize
        assert (segment.shape, segment.dtype) == (fact.shape, fact.dtype)
        assert (segment.trained, segment.group) == (fact.trained, fact.group)


@given(layouts())
def test_segments_aligned_disjoint_and_within_slot(
    case: tuple[Precision, list[ParameterFacts], UnitLayout],
) -> None:
    *_, layout = case
    ranges = sorted(r for r in byte_ranges(layout) if r[0] < r[1])
    for start, _ in byte_ranges(layout):
        assert start % SEGMENT_ALIGN_BYTES == 0
    for segment in layout.trained_segments:  # no moment block spans two parameters
        assert segment.offset % MOMENT_BLOCK == 0
    for (_, end), (start, _) in zip(ranges[:-1], ranges[1:], strict=True):  # noqa: RUF007
        assert end <= start
    assert all(end <= layout.slot_bytes for _, end in ranges)
    for segment, (_, end) in zip(layout.segments, byte_ranges(layout), strict=True):
        if segment.trained:
            assert end <= layout.trained_bytes


@given(layouts())
def test_layout_padding_is_bounded(
    case: tuple[Precision, list[ParameterFacts], UnitLayout],
) -> None:
    _, given_facts, layout = case
    assert layout.numel % ELEMENT_ALIGN == 0
    assert layout.trained_bytes % PAGE == layout.frozen_bytes % PAGE == 0
    trained = [f for f in given_facts if f.trained]
    slack = len(trained) * SEGMENT_ALIGN_BYTES + ELEMENT_ALIGN
    assert layout.numel <= sum(f.numel for f in trained) + slack
    if not trained:
        assert layout.numel == 0


@given(layouts(), st.integers(1, 8))
def test_chunks_cover_trained_range_once(
    case: tuple[Precision, list[ParameterFacts], UnitLayout], blocks: int
) -> None:
    *_, layout = case
    chunk_elements = blocks * ELEMENT_ALIGN
    end = 0
    for index in range(layout.num_chunks(chunk_elements)):
        start, count = layout.chunk(index, chunk_elements)
        assert start == end
        assert 0 < count <= chunk_elements
        assert count % ELEMENT_ALIGN == 0
        end = start + count
    assert end == layout.numel


@given(precisions, st.sets(st.sampled_from(RECORD_ORDER), min_size=1), st.integers(1, 70))
def test_record_contiguous_and_page_aligned(
    precision: Precision, kinds: set[Kind], blocks: int
) -> None:
    chosen = tuple(k for k in precision.kinds if k in kinds)
    record = Record(chosen, precision)
    count = blocks * ELEMENT_ALIGN
    end = 0
    for kind in chosen:
        assert record.offset(kind, count) == end
        assert end % PAGE == 0
        end += precision.nbytes(kind, count)
    assert record.nbytes(count) == end


@given(precisions, st.integers(1, 70))
def test_kind_bytes_hold_values_and_scales_within_a_page(precision: Precision, blocks: int) -> None:
    count = blocks * ELEMENT_ALIGN
    assert precision.nbytes(Kind.WEIGHT, count) == count * precision.weight
    if precision.master_kind is not None:
        assert precision.nbytes(precision.master_kind, count) == count * precision.master_state
    sizes = {"fp32": 4 * count, "bf16": 2 * count, "bf16_stochastic": 2 * count}
    for kind in precision.moment_kinds:
        needed = sizes.get(precision.format_of(kind).value, count + 4 * (count // MOMENT_BLOCK))
        assert needed <= precision.nbytes(kind, count) < needed + PAGE


def test_precision_kinds_and_bytes_per_parameter() -> None:
    assert BF16.kinds == (Kind.WEIGHT, Kind.RESIDUAL, Kind.MOMENT1, Kind.MOMENT2)
    assert FP32.kinds == (Kind.WEIGHT, Kind.MOMENT1, Kind.MOMENT2)
    assert FP16.kinds == (Kind.WEIGHT, Kind.MASTER, Kind.MOMENT1, Kind.MOMENT2)
    assert BF16.bytes_per_parameter == FP32.bytes_per_parameter == 12
    assert FP16.bytes_per_parameter == 14
    assert replace(BF16, moments=()).kinds == (Kind.WEIGHT, Kind.RESIDUAL)
    three = replace(FP32, moments=(MomentFormat.INT8,) * 3)
    assert three.kinds == (Kind.WEIGHT, Kind.MOMENT1, Kind.MOMENT2, Kind.MOMENT3)
    assert three.bytes_per_parameter == 4 + 3 * (1 + 4 / MOMENT_BLOCK)


@given(st.integers(0, 10**15), st.integers(1, 10**6))
def test_round_up(value: int, multiple: int) -> None:
    rounded = round_up(value, multiple)
    assert rounded % multiple == 0
    assert 0 <= rounded - value < multiple

"""What `plan.json` says of the bytes of a durable run: which of them are whose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from infinity.formats import MOMENT_BLOCK, MomentFormat
from infinity.memory.disk import Extent
from infinity.memory.state import UnitState
from infinity.plan.layout import PRECISIONS, Kind, Segment, UnitLayout
from infinity.plan.plan import Plan, RuleFacts

SCALES = "_scales"
SCALE_BYTES = 4


def committed_extents(unit: UnitState) -> Iterator[tuple[Extent, int | None]]:
    """(extent, chunk) of a unit's committed state; no chunk for its frozen bytes."""
    if unit.whole:
        yield from ((e, i) for i, e in enumerate(unit.whole[unit.turn.current]))
    if unit.frozen_sides:
        yield unit.frozen_sides[unit.frozen_turn.current], None


def holders(plan: Plan, unit: UnitState, chunk: int | None, low: int, high: int) -> Iterator[str]:
    """What bytes `low` to `high` of a chunk's record, or of the frozen bytes, belong to."""
    layout = unit.layout
    if chunk is None:
        for segment in (s for s in layout.segments if not s.trained):
            if segment.offset < high and segment.offset + segment.nbytes > low:
                yield f"weight of {segment.name!r}"
        return
    first, count = layout.chunk(chunk, plan.chunk_elements)
    for kind in plan.whole_record.kinds:
        start = plan.whole_record.offset(kind, count)
        values = count * itemsize(plan, kind)
        areas = [(kind.value, start, values, itemsize(plan, kind), 1)]
        if kind in plan.precision.moment_kinds:
            scales = plan.precision.format_of(kind).num_scales(count) * SCALE_BYTES
            areas.append((kind.value + SCALES, start + values, scales, SCALE_BYTES, MOMENT_BLOCK))
        for what, begin, nbytes, item, elements in areas:
            a, b = max(low, begin) - begin, min(high, begin + nbytes) - begin
            if a >= b:
                continue
            for segment in layout.trained_segments:
                one, other = segment.within(first, count)
                one, other = max(one, a // item * elements), min(other, -(-b // item) * elements)
                if one < other:
                    yield f"{what} of {segment.name!r}"


def plan_of(facts: Mapping[str, Any], homes: Sequence[Any]) -> Plan:
    """As much of a run's plan as its `plan.json` holds: enough to find every byte."""
    moments = tuple(MomentFormat(name) for name in facts["moments"])
    precision = replace(PRECISIONS[facts["precision"]], moments=moments)
    units = []
    for index, unit in enumerate(facts["units"]):
        segments = tuple(
            Segment(**{**segment, "shape": tuple(segment["shape"])}, parameter=-1, group=-1)
            for segment in unit["segments"]
        )
        layout = UnitLayout(
            index, unit["name"], segments, unit["numel"], unit["frozen_bytes"], precision.weight
        )
        units.append(layout)
    return Plan(
        precision=precision,
        units=tuple(units),
        homes=tuple(homes),
        slot_classes=(),
        chunk_elements=facts["chunk_elements"],
        num_stages=0,
        look_ahead=0,
        micro_batches=1,
        gradient_itemsize=facts["gradient_itemsize"],
        unified=True,
        verify=False,
        memory={},
        budget={},
        rule=RuleFacts(name=facts["rule"], moments=moments),
        durable=True,
    )


def itemsize(plan: Plan, kind: Kind) -> int:
    """Bytes of an element of a state kind, scales not counted."""
    if kind is Kind.WEIGHT:
        return plan.precision.weight
    if kind is plan.precision.rest_kind:
        return plan.precision.rest
    return plan.precision.format_of(kind).itemsize

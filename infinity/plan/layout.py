"""The flat layout of a unit: which element of which parameter lies where.

A unit has two ranges. The *trained* range holds every parameter that has optimizer state, in the
compute dtype, and is what gradients, masters and moments are laid out along, element by
element. The *frozen* range behind it is opaque bytes of any dtype, without state. Matrices in it
may be quantised (`FrozenFormat`): that is how they rest and travel. In a slot there is a third
range, in which they stand dequantised while their unit is resident.

The trained range is cut into chunks of a fixed number of elements. On disk a chunk is one
contiguous record of those kinds that rest on disk, in the order of `RECORD_ORDER`; in RAM each
kind is one flat range per unit, in the same chunk-wise form: the parts of its chunks one after
the other. A part of a moment is its values, then the scales of its blocks where the format has
them, then padding. Every part starts and ends on a 4096-byte boundary: lengths are padded to
`ELEMENT_ALIGN` elements, and parts of narrower formats to whole pages.

Several ranks share a unit: each range is as many equal shards, one behind the other, and a rank
keeps its shard of both. What a rank keeps is a layout of its own (`UnitLayout.of_shard`), which is
what is cut into chunks. Parameters and shards then start where blocks of the norm's tree do. For an
update rule that needs whole parameters these are dealt to shards whole, which are padded to the
longest. Where a rule needs only some parameters whole, and keeps one moment of these (Muon), they
come behind the others of their unit or shard, which is one chunk: the second moment is of its
beginning.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from infinity.common.sizes import format_count
from infinity.types import MOMENT_BLOCK, PAGE, FrozenFormat, Kind, MomentFormat, round_up

ELEMENT_ALIGN = 2048  # elements: 4096 bytes of the narrowest kind (2 bytes)
SQUARE_BLOCK = 4096  # elements of a parameter that share a leaf of the norm's tree; as in csrc/adam
MUCH_PADDING = 1.1  # times what a unit holds: a plan says so
SEGMENT_ALIGN_BYTES = 512  # start of every tensor in a slot; enough for any device


# Adam has two, `torch.optim.AdamW(amsgrad=True)` three; the rest is for optimizers of others.
MOMENTS = (Kind.MOMENT1, Kind.MOMENT2, Kind.MOMENT3, Kind.MOMENT4, Kind.MOMENT5, Kind.MOMENT6)
RECORD_ORDER = (Kind.WEIGHT, Kind.RESIDUAL, Kind.MASTER, *MOMENTS)
# What may stand beside the weight, by torch's names of its dtype.
REST_DTYPES = {Kind.RESIDUAL: "int16", Kind.MASTER: "float32"}


@dataclass(frozen=True, slots=True)
class Precision:
    """How one compute precision rests: item sizes (bytes), and the format of each moment.

    `dtype` is torch's name of what weights are. `master_state` is what stands beside a weight for
    its fp32 master: 0 where weights are fp32, else the size of a `master_kind`. `moments` has none
    to six formats.
    """

    name: str
    dtype: str
    weight: int
    master_state: int
    master_kind: Kind | None = None
    moments: tuple[MomentFormat, ...] = (MomentFormat.FP32, MomentFormat.FP32)
    paired: int | None = None  # so many elements, the first, have all moments, the rest but one

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The state kinds this precision stores, in record order."""
        extra = (self.master_kind,) if self.master_kind is not None else ()
        return (Kind.WEIGHT, *extra, *self.moment_kinds)

    @property
    def moment_kinds(self) -> tuple[Kind, ...]:
        """The kinds of the moments."""
        return MOMENTS[: len(self.moments)]

    @property
    def is_flat(self) -> bool:
        """Whether chunks hold values alone: several in a row are as one long chunk."""
        return self.paired is None and not any(form.num_scales(1) for form in self.moments)

    def format_of(self, kind: Kind) -> MomentFormat:
        """The format of a moment."""
        return self.moments[MOMENTS.index(kind)]

    def nbytes(self, kind: Kind, num_elements: int) -> int:
        """Bytes of one kind's part of a chunk of `num_elements`, padded to pages.

        `num_elements` is a multiple of `ELEMENT_ALIGN`. Not for gradients: see `Plan`.
        """
        if kind is Kind.WEIGHT:
            return num_elements * self.weight
        if kind is self.master_kind:
            return num_elements * self.master_state
        return round_up(self.format_of(kind).nbytes(self.num_kept(kind, num_elements)), PAGE)

    def num_kept(self, kind: Kind, num_elements: int) -> int:
        """Of how many of a chunk's elements, the first ones, a moment is kept."""
        if self.paired is None or kind is Kind.MOMENT1:
            return num_elements
        return min(self.paired, num_elements)

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes at rest of one trained parameter, padding not counted."""
        moments = sum(f.nbytes(MOMENT_BLOCK) for f in self.moments) / MOMENT_BLOCK
        return self.weight + self.master_state + moments


BF16 = Precision("bf16", "bfloat16", weight=2, master_state=2, master_kind=Kind.RESIDUAL)
FP16 = Precision("fp16", "float16", weight=2, master_state=4, master_kind=Kind.MASTER)
FP32 = Precision("fp32", "float32", weight=4, master_state=0)
PRECISIONS = {precision.name: precision for precision in (BF16, FP16, FP32)}


@dataclass(frozen=True, slots=True)
class StackRows:
    """Rows of a parameter that is a stack of experts along its first dimension.

    `origin` is the parameter's index, `first` the first row and `total` the number of rows of all.
    """

    origin: int
    first: int
    total: int


@dataclass(frozen=True, slots=True)
class Segment:
    """One parameter's place in its unit.

    `offset` counts elements of the trained range when `trained`, else bytes of the frozen range.
    `dtype` is the torch dtype's name, for instance "bfloat16"; `group` the optimizer group. `form`
    is the `FrozenFormat` in which it rests, of which `nbytes` are then, or "" for `dtype`.
    `needs_full` says that the update rule needs it unsharded and uncut, and keeps one moment of it.
    `stack` is there for a stack of experts: all of it, or rows, which have an index of their own
    and the stack's name.
    """

    name: str
    parameter: int
    shape: tuple[int, ...]
    dtype: str
    numel: int
    nbytes: int
    offset: int
    trained: bool
    group: int
    form: str = ""
    needs_full: bool = False
    stack: StackRows | None = None

    @property
    def origin(self) -> int:
        """The index of the model's parameter that this is, or is rows of."""
        return self.parameter if self.stack is None else self.stack.origin

    @property
    def is_rows(self) -> bool:
        """Whether the parameter is cut: this is one of several ranges, or may be."""
        return self.stack is not None and self.stack.origin != self.parameter

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The shape of the model's parameter."""
        return self.shape if self.stack is None else (self.stack.total, *self.shape[1:])

    @property
    def first_element(self) -> int:
        """Elements of the model's parameter that come before."""
        return 0 if self.stack is None else self.stack.first * (self.numel // self.shape[0])

    @property
    def begins(self) -> bool:
        """Whether it is a parameter of the model, or the first rows of one."""
        return self.first_element == 0

    @property
    def ends_stack(self) -> bool:
        """Whether the last rows of a stack are among these."""
        return self.stack is not None and self.stack.first + self.shape[0] == self.stack.total

    @property
    def num_sums(self) -> int:
        """Square sums that are taken of it for the norm: of a stack one an expert."""
        return 1 if self.stack is None else self.shape[0]

    def keeps(self, kind: Kind) -> bool:
        """Whether there is state of this kind of it."""
        return self.trained and not (self.needs_full and kind in MOMENTS[1:])

    def within(self, start: int, count: int) -> tuple[int, int]:
        """(first, end) of the elements that lie in a chunk, counted from the chunk's start.

        Of a trained segment; `first >= end` where none do. In a shard's layout a segment that
        begins in a shard before it has a negative offset.
        """
        return max(self.offset - start, 0), min(self.offset + self.numel - start, count)


@dataclass(frozen=True)
class UnitLayout:
    """Parameters that travel together, and the size of their ranges."""

    index: int
    name: str
    segments: tuple[Segment, ...]
    numel: int  # trained elements, padded to ELEMENT_ALIGN
    frozen_bytes: int  # padded to PAGE
    weight_itemsize: int
    is_block: bool = False  # its modules compute by themselves: what can be recomputed, or sliced
    shards: int = 1  # ranks that share it; a shard's own layout has 1
    paired: int | None = (
        None  # of a shard, see `Precision`; None where no parameter is `needs_full`
    )
    # Outside blocks, for the order of uses: see `plan/usual_cycle.py`.
    at_end: bool = False  # what it holds comes behind the blocks too: a norm, or a head
    looked_up: bool = False  # what it holds before them is embeddings, which no backward uses

    @property
    def trained_bytes(self) -> int:
        """Bytes of the trained range in the compute dtype."""
        return self.numel * self.weight_itemsize

    @cached_property
    def stored_bytes(self) -> int:
        """Bytes of this unit's weights at rest, frozen ones included."""
        return self.trained_bytes + self.frozen_bytes

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes a slot needs to hold this unit's weights: as they rest, and dequantised."""
        return self.stored_bytes + self.dequantised_bytes

    @cached_property
    def dequantised(self) -> dict[int, int]:
        """Parameters that rest quantised -> where their values stand in a slot, in bytes."""
        found, offset = dict[int, int](), self.stored_bytes
        for segment in (s for s in self.segments if s.form):
            found[segment.parameter] = offset
            offset += round_up(segment.numel * self.weight_itemsize, SEGMENT_ALIGN_BYTES)
        return found

    @cached_property
    def largest_quantised(self) -> int:
        """Elements of the largest of them."""
        return max((s.numel for s in self.segments if s.form), default=0)

    @cached_property
    def dequantised_bytes(self) -> int:
        """Bytes of those in a slot."""
        sizes = (s.numel * self.weight_itemsize for s in self.segments if s.form)
        return round_up(sum(round_up(size, SEGMENT_ALIGN_BYTES) for size in sizes), PAGE)

    @cached_property
    def is_range(self) -> bool:
        """Whether this is a range of a layer's experts."""
        return any(segment.is_rows for segment in self.segments)

    @property
    def stacks_path(self) -> str:
        """Path of the module whose experts this is a range of: the name without "[3:6]"."""
        return self.name.rpartition("[")[0]

    @property
    def shard_numel(self) -> int:
        """Trained elements that one rank keeps, with padding."""
        return self.numel // self.shards

    @property
    def shard_bytes(self) -> int:
        """Bytes of weights that one rank keeps, frozen ones included."""
        return self.stored_bytes // self.shards

    def of_shard(self, rank: int) -> UnitLayout:
        """Return the layout of one rank's shard of the trained segments."""
        return self if self.shards == 1 else self._by_rank[rank]

    @cached_property
    def _by_rank(self) -> tuple[UnitLayout, ...]:
        return tuple(map(self._shard, range(self.shards)))

    @cached_property
    def reported_squares(self) -> dict[int, tuple[int, ...]]:
        """Parameter -> number of square sums that each rank reports for the norm.

        Those of all its blocks there; of a parameter that lies in one shard only their sum, of a
        stack their sum for each expert.
        """
        blocks = {s.parameter: [0] * self.shards for s in self.trained_segments}
        sums = {s.parameter: s.num_sums for s in self.trained_segments}
        for rank in range(self.shards):
            shard = self.of_shard(rank)
            for segment in shard.trained_segments:
                first, end = segment.within(0, shard.numel)
                blocks[segment.parameter][rank] = -(-(end - first) // SQUARE_BLOCK)
        return {
            p: tuple(counts if sum(map(bool, counts)) > 1 else (min(n, sums[p]) for n in counts))
            for p, counts in blocks.items()
        }

    @cached_property
    def num_reported_squares(self) -> tuple[int, ...]:
        """The same of all parameters together, by rank."""
        return tuple(map(sum, zip(*self.reported_squares.values(), strict=True)))

    def _shard(self, rank: int) -> UnitLayout:
        start, count = rank * self.shard_numel, self.shard_numel
        segments = tuple(
            replace(segment, offset=segment.offset - start)
            for segment in self.trained_segments
            if segment.offset < start + count and segment.offset + segment.numel > start
        )
        frozen = self.frozen_bytes // self.shards
        return replace(self, segments=segments, numel=count, frozen_bytes=frozen, shards=1)

    @cached_property
    def num_trained(self) -> int:
        """Trained elements, padding not counted."""
        ends = (segment.within(0, self.numel) for segment in self.trained_segments)
        return sum(end - first for first, end in ends)

    @cached_property
    def trained_segments(self) -> tuple[Segment, ...]:
        """The segments that have optimizer state, in the order of their offsets."""
        return tuple(s for s in self.segments if s.trained)

    def num_chunks(self, chunk_elements: int) -> int:
        """How many chunks a shard of the trained range is cut into."""
        return -(-self.shard_numel // chunk_elements)

    def chunk(self, index: int, chunk_elements: int) -> tuple[int, int]:
        """(first element of a shard, number of elements) of one chunk; the last may be shorter."""
        start = index * chunk_elements
        return start, min(chunk_elements, self.shard_numel - start)

    def chunks(self, chunk_elements: int) -> Iterator[tuple[int, int]]:
        """(first element, number of elements) of every chunk, in order."""
        for index in range(self.num_chunks(chunk_elements)):
            yield self.chunk(index, chunk_elements)


def largest_trained_of(layouts: Iterable[UnitLayout]) -> int:
    """Elements of the largest trained parameter."""
    return max((s.numel for layout in layouts for s in layout.trained_segments), default=0)


@dataclass(frozen=True, slots=True)
class ParameterFacts:
    """Facts of one parameter for the layout."""

    name: str
    parameter: int
    shape: tuple[int, ...]
    dtype: str
    numel: int
    itemsize: int
    trained: bool
    group: int
    form: str = ""  # of a frozen one that rests quantised: a `FrozenFormat`
    needs_full: bool = False  # as in `Segment`
    stack: StackRows | None = None  # as in `Segment`

    def rows(self, parameter: int, first: int, count: int) -> ParameterFacts:
        """Rows of a stack, as a parameter of another index."""
        assert self.stack is not None
        return replace(
            self,
            parameter=parameter,
            shape=(count, *self.shape[1:]),
            numel=self.numel // self.shape[0] * count,
            stack=replace(self.stack, first=first),
        )


def lay_out(
    index: int,
    name: str,
    parameters: list[ParameterFacts],
    precision: Precision,
    *,
    is_block: bool = False,
    ranks: int = 1,
    needs_full: bool = False,
) -> UnitLayout:
    """Place parameters one after the other, each aligned; trained ones first.

    Of several `ranks`, with `needs_full` no trained parameter lies in two shards, nor where one is.
    """
    segments: list[Segment] = []
    element = 0
    align = max(SEGMENT_ALIGN_BYTES // precision.weight, MOMENT_BLOCK)  # no scale is shared
    align = align if ranks == 1 else SQUARE_BLOCK  # nor is a block of the norm
    runs = [sorted((p for p in parameters if p.trained), key=lambda p: p.needs_full)]
    any_full = any(p.needs_full for p in runs[0])
    needs_full = needs_full or any_full
    if needs_full and ranks > 1:
        runs = _dealt(runs[0], ranks, index)
    longest = max(sum(round_up(p.numel, align) for p in run) for run in runs)
    paired = max(sum(round_up(p.numel, align) for p in run if not p.needs_full) for run in runs)
    for number, run in enumerate(runs):
        element = number * longest
        for fact in run:
            nbytes = fact.numel * precision.weight
            segments.append(
                Segment(fact.name, fact.parameter, fact.shape, fact.dtype, fact.numel, nbytes,
                        element, True, fact.group, needs_full=fact.needs_full, stack=fact.stack)
            )  # fmt: skip
            element = round_up(element + fact.numel, align)
    element = len(runs) * longest
    offset = 0
    for fact in (p for p in parameters if not p.trained):
        nbytes = fact.numel * fact.itemsize
        if fact.form:
            nbytes = FrozenFormat(fact.form).nbytes(fact.shape)
        segments.append(
            Segment(fact.name, fact.parameter, fact.shape, fact.dtype, fact.numel, nbytes,
                    offset, False, fact.group, fact.form, stack=fact.stack)
        )  # fmt: skip
        offset = round_up(offset + nbytes, SEGMENT_ALIGN_BYTES)
    return UnitLayout(
        index=index,
        name=name,
        segments=tuple(segments),
        numel=round_up(element, ELEMENT_ALIGN if ranks == 1 else ranks * SQUARE_BLOCK),
        frozen_bytes=round_up(offset, ranks * PAGE),
        weight_itemsize=precision.weight,
        is_block=is_block,
        shards=ranks,
        paired=round_up(max(paired, 1), ELEMENT_ALIGN) if any_full else None,
    )


def lay_out_again(
    units: Iterable[UnitLayout],
    precision: Precision,
    ranks: int,
    *,
    needs_full: bool,
    cast: bool = False,
) -> tuple[UnitLayout, ...]:
    """Lay out units for a number of ranks; parameters are `cast` to the precision or unchanged."""
    found = []
    for unit in units:
        facts = [
            ParameterFacts(s.name, s.parameter, s.shape, s.dtype, s.numel,
                           s.nbytes // max(s.numel, 1), s.trained, s.group, s.form, s.needs_full,
                           s.stack)
            for s in unit.segments
        ]  # fmt: skip
        if cast:
            facts = [
                replace(fact, dtype=precision.dtype, itemsize=precision.weight) for fact in facts
            ]
        again = lay_out(
            unit.index, unit.name, facts, precision,
            is_block=unit.is_block, ranks=ranks, needs_full=needs_full,
        )  # fmt: skip
        found.append(replace(again, at_end=unit.at_end, looked_up=unit.looked_up))
    return tuple(found)


def _dealt(facts: list[ParameterFacts], ranks: int, turn: int) -> list[list[ParameterFacts]]:
    """Assign parameters to ranks: the largest first, each to the emptiest rank, in order.

    Who begins changes from unit to unit (`turn`), so that it is not one rank that always has most.
    """
    found: list[list[int]] = [[] for _ in range(ranks)]
    sizes = [0] * ranks
    for index in sorted(range(len(facts)), key=lambda i: -facts[i].numel):
        least = sizes.index(min(sizes))
        found[least].append(index)
        sizes[least] += round_up(facts[index].numel, SQUARE_BLOCK)
    return [[facts[i] for i in sorted(found[(r - turn) % ranks])] for r in range(ranks)]


def dealt_notes(units: Iterable[UnitLayout], rule: str) -> tuple[str, ...]:
    """Return notes of a plan about padding of units with whole parameters."""
    sizes = [(u.numel / u.num_trained, u) for u in units if u.shards > 1 and u.num_trained]
    total = sum(u.numel for _, u in sizes) / max(sum(u.num_trained for _, u in sizes), 1)
    if total < MUCH_PADDING:
        return ()
    most, unit = max(sizes, key=lambda each: each[1].numel - each[1].num_trained)
    return (
        f"{rule} needs whole parameters, which are dealt to {unit.shards} ranks: shards are as "
        f"long as the longest, {total:.2f} times what they hold; most in unit {unit.name!r}, "
        f"{most:.2f} times; larger units are padded less",
    )


def split_notes(units: Iterable[UnitLayout], rule: str) -> tuple[str, ...]:
    """Return notes of a plan about a rule for some parameters, and AdamW for the others."""
    trained = [segment for unit in units for segment in unit.trained_segments]
    matrices = [s for s in trained if s.needs_full]
    if not matrices:
        return ()
    others = [s for s in trained if not s.needs_full]
    large = [s.name for s in others if len(s.shape) > 1]
    named = f", of them {', '.join(large[:4])}{', ...' if large[4:] else ''}" if large else ""
    count = sum(math.prod(s.shape[:-2]) for s in matrices)  # more than one in a stack
    return (
        f"{rule} steps {count} matrices of {format_count(sum(s.numel for s in matrices))} "
        f"elements, AdamW the {len(others)} other parameters "
        f"({format_count(sum(s.numel for s in others))}){named}",
    )


@dataclass(frozen=True, slots=True)
class Record:
    """The contiguous on-disk form of one chunk: which kinds, at which byte offsets inside it."""

    kinds: tuple[Kind, ...]
    precision: Precision

    def nbytes(self, num_elements: int) -> int:
        """Bytes of the record of a chunk of `num_elements`."""
        return sum(self.precision.nbytes(k, num_elements) for k in self.kinds)

    def offset(self, kind: Kind, num_elements: int) -> int:
        """Where `kind` starts inside the record of a chunk of `num_elements`, in bytes."""
        before = self.kinds[: self.kinds.index(kind)]
        return sum(self.precision.nbytes(k, num_elements) for k in before)

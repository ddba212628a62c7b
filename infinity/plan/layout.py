"""The flat layout of a unit: offsets of its parameters, chunks and shards.

A unit has two ranges. The *trained* range holds every parameter with optimizer state, in the
compute dtype; gradients, masters and moments have the same layout, element by element. The *frozen*
range after it is opaque bytes of any dtype, without state. Matrices in it may be quantized
(`FrozenFormat`); they are stored and copied in that format. A slot has a third range for their
dequantized values while the unit is resident.

The trained range is cut into chunks of a fixed number of elements. On disk a chunk is one
contiguous record of the kinds on the disk tier, in the order of `RECORD_ORDER`. In RAM each kind is
one flat range per unit, cut into the same chunks: the concatenation of their sections. A section of
a moment holds the values, then the scales of their blocks if the format has scales, then padding.
Every section starts and ends on a 4096-byte boundary: lengths are padded to `ELEMENT_ALIGN`
elements, and sections of narrower formats to full pages.

Several ranks shard a unit: each range consists of one equal shard per rank, in order of ranks, and
a rank stores its shard of both ranges. The shard has its own layout (`UnitLayout.of_shard`), which
is the one that is cut into chunks. Parameters and shards then start at block boundaries of the
norm's tree. If an update rule needs unsharded parameters, each parameter is assigned to one shard,
and shards are padded to the longest. If a rule needs only some parameters unsharded, and has one
moment of these (Muon), they are placed after the others of their unit or shard, which is a single
chunk; the second moment covers only the beginning of that chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from infinity.common.sizes import format_count
from infinity.types import MOMENT_BLOCK, PAGE, FrozenFormat, Kind, MomentFormat, round_up

ELEMENT_ALIGN = 2048  # elements: 4096 bytes of the narrowest kind (2 bytes)
SQUARE_BLOCK = 4096  # elements of a parameter per leaf of the norm's tree; equal in csrc/adam
PADDING_NOTE_RATIO = 1.1  # padded size / size of the contents from which a plan has a note
SEGMENT_ALIGN_BYTES = 512  # alignment of every tensor in a slot; enough for any device


# Adam has two, `torch.optim.AdamW(amsgrad=True)` three; the others are for third-party optimizers.
MOMENTS = (Kind.MOMENT1, Kind.MOMENT2, Kind.MOMENT3, Kind.MOMENT4, Kind.MOMENT5, Kind.MOMENT6)
RECORD_ORDER = (Kind.WEIGHT, Kind.RESIDUAL, Kind.MASTER, *MOMENTS)
# Kinds that complete a weight to its fp32 master -> torch's name of the dtype.
STATE_DTYPES = {Kind.RESIDUAL: "int16", Kind.MASTER: "float32"}


@dataclass(frozen=True, slots=True)
class Precision:
    """Storage of one compute precision: item sizes in bytes, and the format of each moment.

    `dtype` is torch's name of the dtype of weights. `master_state` is the item size of
    `master_kind`, from which a weight's fp32 master is restored; 0 if weights are fp32. `moments`
    has zero to six formats.
    """

    name: str
    dtype: str
    weight: int
    master_state: int
    master_kind: Kind | None = None
    moments: tuple[MomentFormat, ...] = (MomentFormat.FP32, MomentFormat.FP32)
    paired: int | None = None  # number of leading elements with all moments; later ones have one

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The state kinds this precision stores, in record order."""
        extra = (self.master_kind,) if self.master_kind is not None else ()
        return (Kind.WEIGHT, *extra, *self.moment_kinds)

    @property
    def moment_kinds(self) -> tuple[Kind, ...]:
        """State kinds of the moments."""
        return MOMENTS[: len(self.moments)]

    @property
    def is_flat(self) -> bool:
        """Whether chunks hold values only, so that consecutive chunks form one long chunk."""
        return self.paired is None and not any(form.num_scales(1) for form in self.moments)

    def format_of(self, kind: Kind) -> MomentFormat:
        """Return the format of a moment."""
        return self.moments[MOMENTS.index(kind)]

    def nbytes(self, kind: Kind, num_elements: int) -> int:
        """Return the bytes of one kind in a chunk of `num_elements`, padded to pages.

        `num_elements` is a multiple of `ELEMENT_ALIGN`. Not for gradients: see
        `Plan.gradient_bytes`.
        """
        if kind is Kind.WEIGHT:
            return num_elements * self.weight
        if kind is self.master_kind:
            return num_elements * self.master_state
        return round_up(self.format_of(kind).nbytes(self.num_with_moment(kind, num_elements)), PAGE)

    def num_with_moment(self, kind: Kind, num_elements: int) -> int:
        """Return the number of leading elements of a chunk that have this moment."""
        if self.paired is None or kind is Kind.MOMENT1:
            return num_elements
        return min(self.paired, num_elements)

    @property
    def bytes_per_parameter(self) -> float:
        """Stored bytes of one trained element, without padding."""
        moments = sum(f.nbytes(MOMENT_BLOCK) for f in self.moments) / MOMENT_BLOCK
        return self.weight + self.master_state + moments


BF16 = Precision("bf16", "bfloat16", weight=2, master_state=2, master_kind=Kind.RESIDUAL)
FP16 = Precision("fp16", "float16", weight=2, master_state=4, master_kind=Kind.MASTER)
FP32 = Precision("fp32", "float32", weight=4, master_state=0)
PRECISIONS = {precision.name: precision for precision in (BF16, FP16, FP32)}


@dataclass(frozen=True, slots=True)
class StackRows:
    """Rows of a parameter that is a stack of experts along its first dimension.

    `origin` is the index of the parameter, `first` the first of these rows, `total` the number of
    rows of the full stack.
    """

    origin: int
    first: int
    total: int


@dataclass(frozen=True, slots=True)
class Segment:
    """One parameter, or rows of a stack of experts, in its unit.

    `offset` counts elements of the trained range if `trained`, else bytes of the frozen range.
    `dtype` is torch's name, for instance "bfloat16"; `group` is the optimizer group. `form` is the
    `FrozenFormat` in which a frozen matrix is stored, "" for `dtype`; `nbytes` is its size in that
    format. `needs_full` is True if the update rule needs the parameter unsharded and in one chunk,
    and has one moment of it. `stack` is set for a stack of experts: all its rows, or a range of
    rows, which has its own index and the stack's name.
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
        """Index of the model's parameter; for rows of a stack that of the stack."""
        return self.parameter if self.stack is None else self.stack.origin

    @property
    def is_rows(self) -> bool:
        """Whether this is a range of rows of a stack that was cut."""
        return self.stack is not None and self.stack.origin != self.parameter

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Shape of the model's parameter."""
        return self.shape if self.stack is None else (self.stack.total, *self.shape[1:])

    @property
    def first_element(self) -> int:
        """Index of the first element in the model's parameter; 0 except for rows of a stack."""
        return 0 if self.stack is None else self.stack.first * (self.numel // self.shape[0])

    @property
    def begins(self) -> bool:
        """Whether this is a complete parameter of the model, or the first rows of one."""
        return self.first_element == 0

    @property
    def ends_stack(self) -> bool:
        """Whether this includes the last rows of a stack."""
        return self.stack is not None and self.stack.first + self.shape[0] == self.stack.total

    @property
    def num_sums(self) -> int:
        """Number of square sums for the norm: one per expert of a stack, else 1."""
        return 1 if self.stack is None else self.shape[0]

    def keeps(self, kind: Kind) -> bool:
        """Return True if the parameter has state of this kind."""
        return self.trained and not (self.needs_full and kind in MOMENTS[1:])

    def within(self, start: int, count: int) -> tuple[int, int]:
        """Return (first, end) of a trained segment's elements in a chunk of `count` from `start`.

        Both are relative to the chunk; `first >= end` if the segment is not in it. In a shard's
        layout a segment that begins in an earlier shard has a negative offset.
        """
        return max(self.offset - start, 0), min(self.offset + self.numel - start, count)


@dataclass(frozen=True)
class UnitLayout:
    """Parameters that are moved together, and the sizes of their ranges."""

    index: int
    name: str
    segments: tuple[Segment, ...]
    numel: int  # trained elements, padded to ELEMENT_ALIGN
    frozen_bytes: int  # padded to PAGE
    weight_itemsize: int
    is_block: bool = False  # a block that can be recomputed, or run in slices
    shards: int = 1  # number of ranks that shard it; 1 in the layout of a shard
    paired: int | None = None  # `Precision.paired` of a shard; None if no parameter is `needs_full`
    # Units outside blocks only, for the access order: see `plan/access_order.py`.
    at_end: bool = False  # also used after the blocks: holds a norm, or a head
    looked_up: bool = False  # before the blocks only embeddings, which backward does not use

    @property
    def trained_bytes(self) -> int:
        """Bytes of the trained range in the compute dtype."""
        return self.numel * self.weight_itemsize

    @cached_property
    def stored_bytes(self) -> int:
        """Stored bytes of this unit's weights, frozen ones included."""
        return self.trained_bytes + self.frozen_bytes

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes of this unit in a slot: the stored weights, and the dequantized values."""
        return self.stored_bytes + self.dequantized_bytes

    @cached_property
    def dequantized(self) -> dict[int, int]:
        """Quantized parameter -> byte offset of its dequantized values in a slot."""
        offsets, offset = dict[int, int](), self.stored_bytes
        for segment in (s for s in self.segments if s.form):
            offsets[segment.parameter] = offset
            offset += round_up(segment.numel * self.weight_itemsize, SEGMENT_ALIGN_BYTES)
        return offsets

    @cached_property
    def largest_quantized(self) -> int:
        """Number of elements of the largest quantized parameter."""
        return max((s.numel for s in self.segments if s.form), default=0)

    @cached_property
    def dequantized_bytes(self) -> int:
        """Bytes of the dequantized values in a slot."""
        sizes = (s.numel * self.weight_itemsize for s in self.segments if s.form)
        return round_up(sum(round_up(size, SEGMENT_ALIGN_BYTES) for size in sizes), PAGE)

    @cached_property
    def is_range(self) -> bool:
        """Whether this is a range of a layer's experts."""
        return any(segment.is_rows for segment in self.segments)

    @property
    def stacks_path(self) -> str:
        """Path of the module of experts of which this is a range: the name without "[3:6]"."""
        return self.name.rpartition("[")[0]

    @property
    def shard_numel(self) -> int:
        """Trained elements of one rank's shard, with padding."""
        return self.numel // self.shards

    @property
    def shard_bytes(self) -> int:
        """Bytes of weights in one rank's shard, frozen ones included."""
        return self.stored_bytes // self.shards

    def of_shard(self, rank: int) -> UnitLayout:
        """Return the layout of one rank's shard, with trained segments only; self if unsharded."""
        return self if self.shards == 1 else self._shard_layouts[rank]

    @cached_property
    def _shard_layouts(self) -> tuple[UnitLayout, ...]:
        count, frozen = self.shard_numel, self.frozen_bytes // self.shards
        layouts = []
        for start in (rank * count for rank in range(self.shards)):
            segments = tuple(
                replace(segment, offset=segment.offset - start)
                for segment in self.trained_segments
                if segment.offset < start + count and segment.offset + segment.numel > start
            )
            layouts.append(
                replace(self, segments=segments, numel=count, frozen_bytes=frozen, shards=1)
            )
        return tuple(layouts)

    @cached_property
    def reported_squares(self) -> dict[int, tuple[int, ...]]:
        """Parameter -> number of square sums reported for the norm, by rank.

        One per block of `SQUARE_BLOCK` elements in the rank's shard. A parameter within a single
        shard needs only one sum, a stack one per expert.
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
        """Number of reported square sums of all parameters, by rank."""
        return tuple(map(sum, zip(*self.reported_squares.values(), strict=True)))

    @cached_property
    def num_trained(self) -> int:
        """Trained elements, without padding."""
        ends = (segment.within(0, self.numel) for segment in self.trained_segments)
        return sum(end - first for first, end in ends)

    @cached_property
    def trained_segments(self) -> tuple[Segment, ...]:
        """Segments with optimizer state, in order of offsets."""
        return tuple(s for s in self.segments if s.trained)

    def num_chunks(self, chunk_elements: int) -> int:
        """Return the number of chunks of a shard's trained range."""
        return -(-self.shard_numel // chunk_elements)

    def chunk(self, index: int, chunk_elements: int) -> tuple[int, int]:
        """Return (first element in the shard, number of elements) of a chunk.

        The last chunk may be shorter than `chunk_elements`.
        """
        start = index * chunk_elements
        return start, min(chunk_elements, self.shard_numel - start)

    def chunks(self, chunk_elements: int) -> Iterator[tuple[int, int]]:
        """Yield (first element, number of elements) of every chunk, in order."""
        for index in range(self.num_chunks(chunk_elements)):
            yield self.chunk(index, chunk_elements)


def largest_trained_of(layouts: Iterable[UnitLayout]) -> int:
    """Return the number of elements of the largest trained parameter."""
    return max((s.numel for layout in layouts for s in layout.trained_segments), default=0)


@dataclass(frozen=True, slots=True)
class ParameterFacts:
    """Facts about one parameter from which a layout is made."""

    name: str
    parameter: int
    shape: tuple[int, ...]
    dtype: str
    numel: int
    itemsize: int
    trained: bool
    group: int
    form: str = ""  # `FrozenFormat` of a frozen parameter that is stored quantized
    needs_full: bool = False  # as in `Segment`
    stack: StackRows | None = None  # as in `Segment`

    def rows(self, parameter: int, first: int, count: int) -> ParameterFacts:
        """Return the facts of `count` rows of a stack, as a parameter with another index."""
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
    """Return the layout of a unit: aligned parameters in order, trained ones first.

    With several `ranks`, no trained parameter spans two shards if `needs_full` is True, as argument
    or for any parameter.
    """
    segments: list[Segment] = []
    element = 0
    # Parameters share no block of moments and its scale, and with several ranks no norm block.
    align = max(SEGMENT_ALIGN_BYTES // precision.weight, MOMENT_BLOCK)
    align = align if ranks == 1 else SQUARE_BLOCK
    runs = [sorted((p for p in parameters if p.trained), key=lambda p: p.needs_full)]
    any_full = any(p.needs_full for p in runs[0])
    needs_full = needs_full or any_full
    if needs_full and ranks > 1:
        runs = _distributed(runs[0], ranks, index)
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


def relayout(
    units: Iterable[UnitLayout],
    precision: Precision,
    ranks: int,
    *,
    needs_full: bool,
    cast: bool = False,
) -> tuple[UnitLayout, ...]:
    """Return the units' layouts for another number of ranks.

    With `cast` parameters get the dtype of `precision`, else they are unchanged.
    """
    layouts = []
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
        layout = lay_out(
            unit.index, unit.name, facts, precision,
            is_block=unit.is_block, ranks=ranks, needs_full=needs_full,
        )  # fmt: skip
        layouts.append(replace(layout, at_end=unit.at_end, looked_up=unit.looked_up))
    return tuple(layouts)


def _distributed(facts: list[ParameterFacts], ranks: int, shift: int) -> list[list[ParameterFacts]]:
    """Assign full parameters to ranks: largest first, each to the rank with the fewest elements.

    The result is rotated by `shift`, which differs from unit to unit, so that one rank does not
    always get the most elements.
    """
    by_rank: list[list[int]] = [[] for _ in range(ranks)]
    sizes = [0] * ranks
    for index in sorted(range(len(facts)), key=lambda i: -facts[i].numel):
        emptiest = sizes.index(min(sizes))
        by_rank[emptiest].append(index)
        sizes[emptiest] += round_up(facts[index].numel, SQUARE_BLOCK)
    return [[facts[i] for i in sorted(by_rank[(r - shift) % ranks])] for r in range(ranks)]


def padding_notes(units: Iterable[UnitLayout], rule: str) -> tuple[str, ...]:
    """Return a plan's notes on the padding of shards under a rule that needs full parameters."""
    sharded = [u for u in units if u.shards > 1 and u.num_trained]
    total = sum(u.numel for u in sharded) / max(sum(u.num_trained for u in sharded), 1)
    if total < PADDING_NOTE_RATIO:
        return ()
    unit = max(sharded, key=lambda u: u.numel - u.num_trained)
    return (
        f"{rule} needs full parameters, which are distributed over {unit.shards} ranks: shards are "
        f"padded to the longest, to {total:.2f} times their elements; most in unit {unit.name!r}, "
        f"{unit.numel / unit.num_trained:.2f} times; larger units are padded less",
    )


def matrix_notes(units: Iterable[UnitLayout], rule: str) -> tuple[str, ...]:
    """Return a plan's notes on a rule for matrices with AdamW for the other parameters."""
    trained = [segment for unit in units for segment in unit.trained_segments]
    matrices = [s for s in trained if s.needs_full]
    if not matrices:
        return ()
    others = [s for s in trained if not s.needs_full]
    large = [s.name for s in others if len(s.shape) > 1]
    clause = f", of them {', '.join(large[:4])}{', ...' if large[4:] else ''}" if large else ""
    count = sum(math.prod(s.shape[:-2]) for s in matrices)  # more than one in a stack
    return (
        f"{rule} steps {count} matrices of {format_count(sum(s.numel for s in matrices))} "
        f"elements, AdamW the {len(others)} other parameters "
        f"({format_count(sum(s.numel for s in others))}){clause}",
    )


@dataclass(frozen=True, slots=True)
class Record:
    """The contiguous on-disk form of one chunk: its kinds and their byte offsets."""

    kinds: tuple[Kind, ...]
    precision: Precision

    def nbytes(self, num_elements: int) -> int:
        """Return the bytes of the record of a chunk of `num_elements`."""
        return sum(self.precision.nbytes(k, num_elements) for k in self.kinds)

    def offset(self, kind: Kind, num_elements: int) -> int:
        """Return the byte offset of `kind` in the record of a chunk of `num_elements`."""
        before = self.kinds[: self.kinds.index(kind)]
        return sum(self.precision.nbytes(k, num_elements) for k in before)

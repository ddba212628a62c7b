"""How much autograd holds for one micro-batch, estimated from the layout alone.

[Note: activations]
*Saved.* A matrix of (out, in) keeps its input for its own gradient, and the next operation keeps
its output: tokens * (in + out) values. A GPT block of width h has 4h * h of query, key and value,
2h of the projection, and twice 5h of the perceptron: 16h values, 32h bytes a token in bf16, where
Korthikanti et al. (2022, arXiv 2205.05198) count 34h, dropout masks included. Attention scores
are left out, since SDPA recomputes them. Norms too: what they keep is made up for by inputs that
several matrices share and by outputs that only a residual sum takes. Two things are not:
a *gated perceptron* also keeps what leaves its activation function (its inner side belongs to three
matrices: gate, up, down), and an *RMS norm*, a weight without a bias, computes in fp32 and keeps
its input in that, and a norm inside heads its output as well. A block that is recomputed keeps
its input, and one such block at a time keeps everything, of one slice of the batch where it runs in
slices; but what goes to experts in ranges, and comes back, of all slices, which pass them together
(`offload/shared_ranges.py`), with gradients: four rows of the block's width an expert of a token.
The first blocks are recomputed and the last ones keep: what is kept last goes first, and is
gone when the first recomputed block runs again.

*Adapted stacks.* peft adds the product of an adapter to a frozen stack of experts in each forward:
the sums, as large as the stacks, are kept as what a block saves is, and the gradient of one is
carried. No token counts there.

*Logits* of a head exist three times in fp32 at the turn: as probabilities, which cross entropy
keeps, and as two gradients, of the probabilities and of the logits. (bf16 ones are upcast before.)
Where they are sliced, those of one chunk of tokens do, and the gradient of the head's weight, if
that is trained, is there already: a chunk's, and the sum in fp32 where there are several.

*Flow.* What backward carries: the gradient of the residual sum, and those of the widest product
inside a block, of one slice, two of them where it is gated, while all that the block saved is still
there.

*Gradients* of one unit exist once more, in the compute dtype, before they are taken to where they
rest; of a block in slices in fp32, where slices are summed, and the largest once more in the
compute dtype. All are there when the block's saved tensors and the flow have gone, so of gradients
and flow the larger counts. Neither meets the logits: the turn is over when the first weight has its
gradient. Not counted: on a device of its own memory those of one unit more are leaving, or of two
where links are slower than the backward (the bound of `offload/gradients.py`).

All of it is compared with storages that live, counted: tests/unit/offload/test_activation_peak.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from infinity.config.schema import Recompute
from infinity.plan.layout import Segment, UnitLayout

_ATTENTION = ("attn", "attention", "qkv", "q_proj", "query")
CHUNK_TOKENS = 1024  # as `losses.CHUNK_TOKENS`, which needs torch
LOGIT_BYTES = 3 * 4
_SUM_BYTES = 4  # what gradients of chunks are added in
_PASSED = 4  # rows that are sent to experts and come from them, and the gradients of both
_NORM_BYTES = 4  # what an RMS norm computes in


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes of one micro-batch that no plan reserves, by what they are."""

    saved: int
    """What units keep for backward that are not recomputed."""
    again: int
    """What one recomputed block keeps, of one slice; 0 where none is recomputed."""
    boundaries: int
    """The inputs of recomputed blocks."""
    logits: int
    """Of the head, in fp32 three times; in chunks, what one of them and the sums take."""
    flow: int
    """Gradients of activations, as backward carries them through the widest block."""
    gradients: int
    """Of the largest unit, as autograd makes them, or in fp32 where slices are summed."""

    @property
    def total(self) -> int:
        """The most that is there at once: at the turn, or in the backward of a block."""
        carried = max(self.flow, self.gradients)
        turn = self.saved + max(self.logits, carried)
        return self.boundaries + max(turn, self.again + carried)


@dataclass(frozen=True, slots=True)
class _BlockShape:
    """Bytes that a token keeps and carries in one block; `gradients` of its units."""

    is_block: bool
    saved: float
    width: int
    carried: float
    gradients: int
    summed: int  # gradients in fp32, as slices are summed
    stacks: tuple[int, ...]  # bytes of those that adapters are added to
    ranges: float  # what goes to and comes from experts in ranges, with gradients


class ActivationModel:
    """What autograd holds of a model, as a function of how a batch passes it.

    `lookups`, `heads` and `shares` are parameters by index, see `model.targets.Target`.
    """

    def __init__(
        self,
        units: Sequence[UnitLayout],
        *,
        lookups: Collection[int] = (),
        heads: Collection[int] = (),
        shares: Mapping[int, float] | None = None,
    ) -> None:
        self.units = units
        self.widths = block_widths(units)
        self._itemsize = max((u.weight_itemsize for u in units), default=0)
        self._heads: list[Segment] = []
        self._blocks = [self._shape(b, lookups, heads, shares or {}) for b in blocks_of(units)]

    def _shape(
        self,
        block: Sequence[UnitLayout],
        lookups: Collection[int],
        heads: Collection[int],
        shares: Mapping[int, float],
    ) -> _BlockShape:
        itemsize = self._itemsize
        segments = [s for unit in block for s in unit.segments if s.origin not in lookups]
        matrices = [s for s in segments if len(s.shape) > 1]
        width = _width(matrices)
        saved = carried = 0.0
        for matrix in matrices:
            values = sum(_sides(matrix))
            if matrix.origin in heads:
                self._heads.append(matrix)
                values = matrix.shape[1]
            saved += passes(matrix, shares) * values * itemsize
        modules: dict[str, list[Segment]] = {}
        for segment in segments:
            if segment.stack is not None and segment.stack.first:
                continue  # its module has been seen
            if len(segment.shape) < 2 or segment.origin not in heads:
                modules.setdefault(_parent(segment), []).append(segment)
        ranges = 0.0
        for module in modules.values():
            if any(s.is_rows for s in module):
                sent = max(passes(s, shares, s.full_shape) for s in module)
                ranges += _PASSED * sent * width * itemsize
            share = max(passes(s, shares, s.full_shape) for s in module)
            gate, widest = _gate_and_widest(module, width)
            saved += share * gate * itemsize + _of_norms(module, itemsize)
            carried = max(carried, share * (2 * gate or widest) * itemsize)
        return _BlockShape(
            is_block=block[0].is_block,
            saved=saved,
            width=width * itemsize,
            carried=carried,
            gradients=max(unit.trained_bytes for unit in block),
            summed=max(_summed_bytes(unit) for unit in block),
            stacks=tuple(numel * itemsize for numel in _adapted_stacks(matrices)),
            ranges=ranges,
        )

    def of(
        self,
        tokens: int,
        *,
        recompute: Recompute = 0,
        slices: int = 1,
        logits_at_once: int | None = None,
    ) -> Activations:
        """What `tokens` of one micro-batch make autograd hold.

        The first `recompute` blocks run again in backward ("all": whatever there is), blocks in so
        many `slices`; logits of `logits_at_once` tokens exist at a time, None: of all.
        """
        part = -(-tokens // slices)
        saved = again = boundaries = gradients = flow = 0
        num_again = len(self._blocks) if recompute == "all" else recompute
        for block in self._blocks:
            is_again = recompute == "all" or (block.is_block and num_again > 0)
            num_again -= block.is_block
            if is_again:
                passed = int(block.ranges * tokens) if slices > 1 else 0
                again = max(again, int(block.saved * part) + sum(block.stacks) + passed)
                boundaries += tokens * block.width
            else:
                saved += int(block.saved * tokens) + sum(block.stacks)
            sliced = slices > 1 and block.is_block
            inner = int((part if sliced else tokens) * block.carried)
            inner += max(block.stacks, default=0)
            flow = max(flow, tokens * block.width + inner)
            gradients = max(gradients, block.summed if sliced else block.gradients)
        logits = sum(
            _of_logits(head, logits_at_once, tokens, self._itemsize) for head in self._heads
        )
        return Activations(saved, again, boundaries, logits, flow, gradients)


def _of_logits(head: Segment, at_once: int | None, tokens: int, itemsize: int) -> int:
    """Bytes that logits take: of all tokens as torch makes them, or in chunks as `losses.py`."""
    size, width = head.shape
    if at_once is None:
        return tokens * size * LOGIT_BYTES
    made = min(tokens, at_once) * size * LOGIT_BYTES
    if not head.trained:
        return made
    summed = _SUM_BYTES if tokens > at_once else 0
    return made + size * width * (itemsize + summed)


def _summed_bytes(unit: UnitLayout) -> int:
    """Bytes of a unit's gradients where slices are summed: the sums, and one as it is made."""
    return unit.num_trained * 4 + max((s.nbytes for s in unit.trained_segments), default=0)


def passes(
    segment: Segment, shares: Mapping[int, float], shape: Sequence[int] | None = None
) -> float:
    """Return how many matrices of a parameter a token is multiplied with.

    Fewer than one of an expert, by the share of the tokens that it sees; of a stack of experts, the
    number of its experts that a token is sent to. `shape` stands for that of the segment.
    """
    share = shares.get(segment.origin)
    return 1.0 if share is None else share * math.prod((shape or segment.shape)[:-2])


def _adapted_stacks(matrices: Sequence[Segment]) -> list[int]:
    """Elements of frozen stacks that peft adapts: a layer of it for each is around their module."""
    modules: dict[str, list[int]] = {}
    for matrix in matrices:
        if len(matrix.shape) == 3 and not matrix.trained:
            modules.setdefault(matrix.name.rpartition(".")[0], []).append(matrix.numel)
    return [
        numel
        for name, stacks in modules.items()
        for numel in sorted(stacks, reverse=True)[: name.split(".").count("base_layer")]
    ]


def _parent(segment: Segment) -> str:
    """The module that holds the module of a parameter: "blocks.0.mlp" of "...mlp.up.weight"."""
    return segment.name.rpartition(".")[0].rpartition(".")[0]


def _gate_and_widest(segments: Sequence[Segment], width: int) -> tuple[int, int]:
    """The inner side of a gated perceptron, 0 where there is none; and the widest side of all.

    It belongs to three matrices, or to one with its double beside it (gate and up in one).
    """
    sides: Counter[int] = Counter()
    for segment in segments:
        if len(segment.shape) > 1:
            sides.update(side for side in _sides(segment) if side != width)
    gates = [
        side
        for side, count in sides.items()
        if count == 3 or (count == 1 and sides.get(2 * side) == 1)
    ]
    return max(gates, default=0), max(sides, default=width)


def _of_norms(segments: Sequence[Segment], itemsize: int) -> int:
    """Bytes a token that RMS norms keep beyond what matrices were counted for.

    One whose weight is shorter than what a matrix beside it makes works on each head of that.
    """
    names = {segment.name for segment in segments}
    matrices = [s for s in segments if len(s.shape) > 1]
    norms = [
        s
        for s in segments
        if len(s.shape) == 1
        and s.name.endswith(".weight")
        and s.name.removesuffix("weight") + "bias" not in names
    ]
    nbytes = 0
    for index, norm in enumerate(norms):
        made = matrices[index].shape[0] if index < len(matrices) else 0
        if made > norm.shape[0] and made % norm.shape[0] == 0:
            nbytes += made * (_NORM_BYTES + itemsize)
        else:
            nbytes += norm.shape[0] * max(_NORM_BYTES - itemsize, 0)
    return nbytes


def recomputed(units: Sequence[UnitLayout], recompute: Recompute) -> list[UnitLayout]:
    """Return the units of the first `count` blocks with their experts; all of them for "all"."""
    if not recompute:
        return []
    blocks = [b for b in blocks_of(units) if b[0].is_block]
    if recompute == "all":
        return [unit for block in blocks for unit in block] or list(units)
    return [unit for block in blocks[:recompute] for unit in block]


def sharing(
    units: Sequence[UnitLayout], stacks: Collection[str]
) -> tuple[list[UnitLayout], list[UnitLayout]]:
    """Return block units and ranges of the blocks whose slices pass these stacks together."""
    block_units: list[UnitLayout] = []
    ranges: list[UnitLayout] = []
    for block in blocks_of(units) if stacks else ():
        if any(u.is_range and u.stacks_path in stacks for u in block):
            ranges += (u for u in block if u.is_range)
            block_units += (u for u in block if not u.is_range)
    return block_units, ranges


def num_blocks(units: Sequence[UnitLayout]) -> int:
    """Blocks that repeat."""
    return sum(block[0].is_block for block in blocks_of(units))


def block_widths(units: Sequence[UnitLayout]) -> list[int]:
    """Values a token brings to each block, in order; experts belong to their block."""
    block_names = {block[0].name for block in blocks_of(units) if block[0].is_block}
    widths = (
        _width([s for s in unit.segments if len(s.shape) > 1])
        for unit in units
        if unit.name in block_names
    )
    return [width for width in widths if width]


def attending_width(units: Sequence[UnitLayout]) -> int:
    """Values that a token brings to attention, all blocks together: those whose names say so."""
    found = 0
    for block in blocks_of(units):
        segments = [s for unit in block for s in unit.segments if len(s.shape) > 1]
        names = (segment.name.lower() for segment in segments)
        if any(word in name for name in names for word in _ATTENTION):
            found += _width(segments)
    return found


def _sides(segment: Segment) -> tuple[int, int]:
    """Inputs and outputs of a matrix; of a stack of them, or a convolution, the two largest."""
    *_, second, first = sorted(segment.shape)
    return first, second


def blocks_of(units: Sequence[UnitLayout]) -> list[list[UnitLayout]]:
    """The units by block, the block's own first: experts are units inside one."""
    names = {unit.name for unit in units}
    found: dict[str, list[UnitLayout]] = {}
    for unit in sorted(units, key=lambda u: u.name.count(".")):
        parts = unit.name.split(".")
        above = (".".join(parts[:depth]) for depth in range(1, len(parts)))
        found.setdefault(next((n for n in above if n in names), unit.name), []).append(unit)
    return list(found.values())


def _width(matrices: Sequence[Segment]) -> int:
    """Of a block: the side most of its matrices have, the smaller one of equals; 0 of none."""
    sides = Counter(side for matrix in matrices for side in _sides(matrix))
    return min(sides, key=lambda side: (-sides[side], side), default=0)

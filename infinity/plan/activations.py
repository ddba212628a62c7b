"""Estimate of the memory that autograd holds for one micro-batch, from the layout alone.

[Note: activations]
*Saved.* Each matrix (out, in) is counted with the input that it saves for its gradient and the
output that the next operation saves: tokens * (in + out) values. A GPT block of width h has 4h for
query, key and value, 2h for the projection, and twice 5h for the MLP: 16h values, 32h bytes per
token in bf16, where Korthikanti et al. (2022, arXiv 2205.05198) count 34h including dropout masks.
Attention scores are not counted, since SDPA recomputes them. Neither are norms: inputs that several
matrices share are counted more than once, and so are outputs that only a residual sum consumes,
which makes up for them. Two cases are counted in addition: a *gated MLP* also saves the output of
its activation function (its inner dimension belongs to three matrices: gate, up, down), and an
*RMS norm*, a weight without a bias, computes in fp32 and saves its input in fp32, and a norm inside
heads its output as well. A recomputed block saves only its input. While such a block runs again, it
holds all that it saves, for one slice of the batch if it runs in slices; but rows sent to ranges of
experts and received from them are held for all slices, which pass the ranges together
(`offload/shared_ranges.py`), with their gradients: four rows of the block's width for each expert
of a token. The first blocks are recomputed and the last ones save everything: tensors saved last
are freed first, so they are freed before the first recomputed block runs again.

*Adapted stacks.* peft adds the product of an adapter to a frozen stack of experts in each forward.
The sums are as large as the stacks and are saved like a block's other tensors; backward carries the
gradient of one of them. Their size does not depend on the number of tokens.

*Logits* of a head exist three times in fp32 at the turn from forward to backward: as probabilities,
which cross entropy saves, and as two gradients, of the probabilities and of the logits. (bf16
logits are upcast before.) With chunked logits only those of one chunk of tokens exist, and the
gradient of the head's weight, if it is trained, already exists as well: a chunk's, and the sum in
fp32 if there are several chunks.

*Flow.* Gradients that backward carries while all that the block saved still exists: that of the
residual sum, and that of the widest product inside a block, for one slice; two of them if the
MLP is gated.

*Gradients* of one unit's parameters exist in the compute dtype before they are copied to their
tier; those of a block in slices in fp32, where slices are summed, and the largest also in the
compute dtype. All of them exist only when the block's saved tensors and the flow have been freed,
so the larger of gradients and flow counts. Neither coincides with the logits, which are freed by
the time the first weight has its gradient. Not counted: on a device with its own memory, gradients
of one more unit that are being copied out, or of two more where links are slower than the backward
(the bound of `offload/gradients.py`).

tests/unit/offload/test_activation_peak.py compares all of this with the storages that exist.
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
_SUM_BYTES = 4  # of an element in the sum of gradients of chunks
_EXPERT_ROWS = 4  # rows sent to experts and received from them, and the gradients of both
_NORM_BYTES = 4  # RMS norms compute in fp32


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes of activations of one micro-batch, by purpose; no plan reserves them."""

    saved: int
    """Tensors saved for backward by units that are not recomputed."""
    again: int
    """Tensors that one recomputed block saves, of one slice; 0 if none is recomputed."""
    boundaries: int
    """Inputs of recomputed blocks."""
    logits: int
    """Logits in fp32, three times; if chunked, those of one chunk and the weight's gradient."""
    flow: int
    """Gradients of activations that backward carries through the widest block."""
    gradients: int
    """Parameter gradients of the largest unit, as autograd makes them; fp32 sums if in slices."""

    @property
    def total(self) -> int:
        """Peak bytes: at the turn from forward to backward, or in the backward of a block."""
        carried = max(self.flow, self.gradients)
        turn = self.saved + max(self.logits, carried)
        return self.boundaries + max(turn, self.again + carried)


@dataclass(frozen=True, slots=True)
class _BlockMemory:
    """Memory of one block: bytes per token, but `stacks` and both `gradients` in bytes."""

    is_block: bool
    saved: float
    width: int
    carried: float
    gradients: int
    summed_gradients: int  # when slices are summed: in fp32, and the largest in the compute dtype
    stacks: tuple[int, ...]  # frozen stacks that adapters are added to
    expert_rows: float  # rows sent to and received from ranges of experts, with gradients


class ActivationModel:
    """Memory held by autograd for a model, as a function of the batch schedule.

    `lookups`, `heads` and `shares` refer to parameters by index, see `model.targets.Target`.
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
        self._blocks = [self._memory_of(b, lookups, heads, shares or {}) for b in blocks_of(units)]

    def _memory_of(
        self,
        block: Sequence[UnitLayout],
        lookups: Collection[int],
        heads: Collection[int],
        shares: Mapping[int, float],
    ) -> _BlockMemory:
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
                continue  # counted with the first rows of the stack
            if len(segment.shape) < 2 or segment.origin not in heads:
                # Two levels up: "blocks.0.mlp" for "blocks.0.mlp.up.weight".
                path = segment.name.rpartition(".")[0].rpartition(".")[0]
                modules.setdefault(path, []).append(segment)
        expert_rows = 0.0
        for module in modules.values():
            num_passes = max(passes(s, shares, s.full_shape) for s in module)
            if any(s.is_rows for s in module):
                expert_rows += _EXPERT_ROWS * num_passes * width * itemsize
            gate, widest = _gate_and_widest(module, width)
            saved += num_passes * gate * itemsize + _norm_bytes(module, itemsize)
            carried = max(carried, num_passes * (2 * gate or widest) * itemsize)
        return _BlockMemory(
            is_block=block[0].is_block,
            saved=saved,
            width=width * itemsize,
            carried=carried,
            gradients=max(unit.trained_bytes for unit in block),
            summed_gradients=max(
                4 * unit.num_trained + max((s.nbytes for s in unit.trained_segments), default=0)
                for unit in block
            ),
            stacks=tuple(numel * itemsize for numel in _adapted_stacks(matrices)),
            expert_rows=expert_rows,
        )

    def of(
        self,
        tokens: int,
        *,
        recompute: Recompute = 0,
        slices: int = 1,
        logits_at_once: int | None = None,
    ) -> Activations:
        """Return the memory that autograd holds for a micro-batch of `tokens`.

        The first `recompute` blocks run again in backward ("all": units outside blocks as well).
        Blocks run in `slices`. Logits of `logits_at_once` tokens exist at a time (None: all).
        """
        slice_tokens = -(-tokens // slices)
        saved = again = boundaries = gradients = flow = 0
        remaining = len(self._blocks) if recompute == "all" else recompute
        for block in self._blocks:
            is_recomputed = recompute == "all" or (block.is_block and remaining > 0)
            remaining -= block.is_block
            if is_recomputed:
                row_bytes = int(block.expert_rows * tokens) if slices > 1 else 0
                again = max(again, int(block.saved * slice_tokens) + sum(block.stacks) + row_bytes)
                boundaries += tokens * block.width
            else:
                saved += int(block.saved * tokens) + sum(block.stacks)
            sliced = slices > 1 and block.is_block
            inner = int((slice_tokens if sliced else tokens) * block.carried)
            inner += max(block.stacks, default=0)
            flow = max(flow, tokens * block.width + inner)
            gradients = max(gradients, block.summed_gradients if sliced else block.gradients)
        at_once = tokens if logits_at_once is None else min(tokens, logits_at_once)
        logits = 0
        for head in self._heads:
            logits += at_once * head.shape[0] * LOGIT_BYTES
            if logits_at_once is not None and head.trained:  # in chunks, as in `losses.py`
                sum_itemsize = _SUM_BYTES if tokens > at_once else 0
                logits += head.numel * (self._itemsize + sum_itemsize)
        return Activations(saved, again, boundaries, logits, flow, gradients)


def passes(
    segment: Segment, shares: Mapping[int, float], shape: Sequence[int] | None = None
) -> float:
    """Return the number of matrices of a parameter that a token is multiplied by, on average.

    For an expert this is the share of tokens routed to it; for a stack of experts, the number of
    its experts that a token is routed to. `shape` replaces the segment's shape.
    """
    share = shares.get(segment.origin)
    return 1.0 if share is None else share * math.prod((shape or segment.shape)[:-2])


def _adapted_stacks(matrices: Sequence[Segment]) -> list[int]:
    """Return the elements of the frozen stacks of experts that peft adapts.

    peft wraps the module of the stacks once for each adapted one, which adds `base_layer` to its
    name. Names show how many stacks are adapted, not which: the largest are assumed.
    """
    modules: dict[str, list[int]] = {}
    for matrix in matrices:
        if len(matrix.shape) == 3 and not matrix.trained:
            modules.setdefault(matrix.name.rpartition(".")[0], []).append(matrix.numel)
    return [
        numel
        for name, sizes in modules.items()
        for numel in sorted(sizes, reverse=True)[: name.split(".").count("base_layer")]
    ]


def _gate_and_widest(segments: Sequence[Segment], width: int) -> tuple[int, int]:
    """Return the inner dimension of a gated MLP, or 0 if there is none, and the widest dimension.

    The inner dimension occurs in three matrices, or once together with its double (gate and up
    fused). Dimensions equal to `width` are left out.
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


def _norm_bytes(segments: Sequence[Segment], itemsize: int) -> int:
    """Return bytes per token that RMS norms save beyond those counted for matrices.

    A norm whose weight is shorter than the output of the matrix at the same position is applied to
    each head.
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
        num_outputs = matrices[index].shape[0] if index < len(matrices) else 0
        if num_outputs > norm.shape[0] and num_outputs % norm.shape[0] == 0:
            nbytes += num_outputs * (_NORM_BYTES + itemsize)
        else:
            nbytes += norm.shape[0] * max(_NORM_BYTES - itemsize, 0)
    return nbytes


def recomputed(units: Sequence[UnitLayout], recompute: Recompute) -> list[UnitLayout]:
    """Return the units of the first `recompute` blocks with their experts, or of all for "all"."""
    if not recompute:
        return []
    blocks = [b for b in blocks_of(units) if b[0].is_block]
    if recompute == "all":
        return [unit for block in blocks for unit in block] or list(units)
    return [unit for block in blocks[:recompute] for unit in block]


def sharing(
    units: Sequence[UnitLayout], stacks: Collection[str]
) -> tuple[list[UnitLayout], list[UnitLayout]]:
    """Return block units and ranges of experts of the blocks whose slices share these stacks."""
    block_units: list[UnitLayout] = []
    ranges: list[UnitLayout] = []
    for block in blocks_of(units) if stacks else ():
        if any(u.is_range and u.stacks_path in stacks for u in block):
            ranges += (u for u in block if u.is_range)
            block_units += (u for u in block if not u.is_range)
    return block_units, ranges


def num_blocks(units: Sequence[UnitLayout]) -> int:
    """Return the number of repeated blocks."""
    return sum(block[0].is_block for block in blocks_of(units))


def block_widths(units: Sequence[UnitLayout]) -> list[int]:
    """Return the width of each repeated block in order: input values per token."""
    block_names = {block[0].name for block in blocks_of(units) if block[0].is_block}
    widths = (
        _width([s for s in unit.segments if len(s.shape) > 1])
        for unit in units
        if unit.name in block_names
    )
    return [width for width in widths if width]


def attention_width(units: Sequence[UnitLayout]) -> int:
    """Return the summed width of all blocks with attention, which is recognized by names."""
    width = 0
    for block in blocks_of(units):
        segments = [s for unit in block for s in unit.segments if len(s.shape) > 1]
        names = (segment.name.lower() for segment in segments)
        if any(word in name for name in names for word in _ATTENTION):
            width += _width(segments)
    return width


def _sides(segment: Segment) -> tuple[int, int]:
    """Return the two largest dimensions of a matrix, a stack of matrices or a convolution."""
    *_, second, first = sorted(segment.shape)
    return first, second


def blocks_of(units: Sequence[UnitLayout]) -> list[list[UnitLayout]]:
    """Group units by block, the block's own unit first; experts are units inside a block."""
    names = {unit.name for unit in units}
    blocks: dict[str, list[UnitLayout]] = {}
    for unit in sorted(units, key=lambda u: u.name.count(".")):
        path = unit.name.split(".")
        ancestors = (".".join(path[:depth]) for depth in range(1, len(path)))
        blocks.setdefault(next((n for n in ancestors if n in names), unit.name), []).append(unit)
    return list(blocks.values())


def _width(matrices: Sequence[Segment]) -> int:
    """Return the most frequent dimension of a block's matrices, or the smallest of these, or 0."""
    sides = Counter(side for matrix in matrices for side in _sides(matrix))
    return min(sides, key=lambda side: (-sides[side], side), default=0)

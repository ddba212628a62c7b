"""How much autograd holds for one micro-batch, estimated from the layout alone.

[Note: activations]
A matrix of (out, in) keeps its input for its own gradient, and the next operation keeps its
output: tokens * (in + out) values. A GPT block of width h has 4h * h of query, key and value,
2h of the projection, and twice 5h of the perceptron: 16h values, 32h bytes a token in bf16, where
Korthikanti et al. (2022, arXiv 2205.05198) count 34h, dropout masks included. Attention scores
are left out, since SDPA recomputes them, and so are norms: what they keep is made up for by
inputs that several matrices share. Gated perceptrons keep one product more than is counted.
With recomputation each block keeps its input, and one block at a time keeps everything.

The logits of a head exist twice in fp32 at the turn: as they are, and as probabilities. The
gradients of one unit exist once more, in the compute dtype, before they are taken home.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from infinity.plan.layout import Segment, UnitLayout

LOGIT_BYTES = 2 * 4


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes of one micro-batch that no plan reserves, by what they are."""

    saved: int
    """What units keep for backward; with recomputation, of one block at a time."""
    boundaries: int
    """With recomputation the input of each block, else 0."""
    logits: int
    """Of the head, in fp32 twice."""
    gradients: int
    """Of the largest unit, as autograd makes them."""

    @property
    def total(self) -> int:
        """Of all of them, as if they met: at most a little more than what does."""
        return self.saved + self.boundaries + self.logits + self.gradients


def estimate_activations(
    units: Sequence[UnitLayout],
    tokens: int,
    *,
    lookups: Collection[int] = (),
    heads: Collection[int] = (),
    shares: Mapping[int, float] | None = None,
    recompute: bool = False,
) -> Activations:
    """What `tokens` of one micro-batch make autograd hold.

    `lookups`, `heads` and `shares` are parameters by index, see `model.target.Target`.
    """
    shares = shares or {}
    logits = 0
    saved: dict[str, int] = {}
    width: dict[str, Counter[int]] = {}
    blocks = _blocks(units)
    for unit in units:
        block = blocks[unit.name]
        for segment in unit.segments:
            if len(segment.shape) < 2 or segment.parameter in lookups:
                continue
            values = sum(_sides(segment))
            if segment.parameter in heads:
                logits += tokens * segment.shape[0] * LOGIT_BYTES
                values = segment.shape[1]
            share = shares.get(segment.parameter, 1.0)
            nbytes = int(tokens * share * values * unit.weight_itemsize)
            saved[block] = saved.get(block, 0) + nbytes
            width.setdefault(block, Counter()).update(_sides(segment))
    itemsize = max((u.weight_itemsize for u in units), default=0)
    boundaries = sum(tokens * _commonest(width[block]) * itemsize for block in saved)
    return Activations(
        saved=max(saved.values(), default=0) if recompute else sum(saved.values()),
        boundaries=boundaries if recompute else 0,
        logits=logits,
        gradients=max((u.trained_bytes for u in units), default=0),
    )


def _sides(segment: Segment) -> tuple[int, int]:
    """Inputs and outputs of a matrix; of a stack of them, or a convolution, the two largest."""
    *_, second, first = sorted(segment.shape)
    return first, second


def _blocks(units: Sequence[UnitLayout]) -> dict[str, str]:
    """The block that each unit belongs to: experts are units inside one."""
    names = {unit.name for unit in units}
    found = {}
    for name in names:
        parts = name.split(".")
        above = (".".join(parts[:depth]) for depth in range(1, len(parts)))
        found[name] = next((n for n in above if n in names), name)
    return found


def _commonest(sides: Counter[int]) -> int:
    """The width of a block: the side most of its matrices have, the smaller one of equals."""
    return min(sides, key=lambda side: (-sides[side], side))

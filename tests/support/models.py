"""Tiny models of several kinds, with batches, for the parity tests.

Every model returns its loss as models of its kind do (a tensor, a tuple, a dict); use `loss_of`.
`Checkpointing` selects where `torch.utils.checkpoint` is used: around a block or on the
feed-forward function inside it. `num_block_calls` and `num_inner_calls` count forwards of both,
including recomputation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from support.slices import in_slices
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from infinity.model.stacks import StackRange, compute_ranges

VOCAB = 32
WIDTH = 16
LENGTH = 8
HEADS = 2


@dataclass(frozen=True)
class Checkpointing:
    """Use of activation checkpointing in a model.

    Attributes:
        mode: none, reentrant or non_reentrant.
        place: block (around a block) or inside (its feed-forward function).
        slices: Number of slices of the batch that a block runs sequentially, each checkpointed
            separately; gradients of slices are added in fp32.
    """

    mode: str = "none"
    place: str = "block"
    slices: int = 1

    def __str__(self) -> str:
        return self.mode if self.mode == "none" else f"{self.mode}-{self.place}"

    def call(self, place: str, function: Callable[..., Tensor], *args: Tensor) -> Tensor:
        """Return `function(*args)`, checkpointed if `place` is selected."""
        if place == "block" and self.slices > 1:
            single = replace(self, slices=1)
            slices = zip(*(tensor.chunk(self.slices) for tensor in args), strict=True)
            if not torch.is_grad_enabled():
                return torch.cat([function(*batch_slice) for batch_slice in slices])
            assert isinstance(function, nn.Module)
            wrap = partial(partial, single.call, place)
            return torch.cat(in_slices(function, slices, wrap))
        if self.mode == "none" or place != self.place or not torch.is_grad_enabled():
            return function(*args)
        result: Tensor = checkpoint(function, *args, use_reentrant=self.mode == "reentrant")
        return result


CHECKPOINTINGS = (
    Checkpointing(),
    Checkpointing("reentrant", "block"),
    Checkpointing("non_reentrant", "block"),
    Checkpointing("reentrant", "inside"),
    Checkpointing("non_reentrant", "inside"),
)


class Block(nn.Module):
    """Attention and a feed-forward part; cross attention where `memory` is given."""

    def __init__(self, checkpointing: Checkpointing, *, cross: bool = False) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        if cross:
            self.norm_cross = nn.LayerNorm(WIDTH)
            self.query = nn.Linear(WIDTH, WIDTH)
            self.key_value = nn.Linear(WIDTH, 2 * WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.num_block_calls = 0
        self.num_inner_calls = 0

    def run(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        """Run this block, checkpointed if `Checkpointing` selects blocks."""
        extra = () if memory is None else (memory,)
        return self.checkpointing.call("block", self, x, *extra)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        self.num_block_calls += 1
        query, key, value = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.proj(attend(query, key, value))
        if memory is not None:
            key, value = self.key_value(memory).chunk(2, dim=-1)
            x = x + attend(self.query(self.norm_cross(x)), key, value)
        return x + self.checkpointing.call("inside", self.feed_forward, x)

    def feed_forward(self, x: Tensor) -> Tensor:
        self.num_inner_calls += 1
        return self.down(F.gelu(self.up(self.norm2(x))))


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute non-causal softmax attention with `HEADS` heads."""
    query, key, value = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (query, key, value))
    scores = query @ key.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5
    return (scores.softmax(dim=-1) @ value).transpose(1, 2).flatten(-2)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Gpt(nn.Module):
    """Embedding, blocks, and a head tied to the embedding. Returns the loss."""

    def __init__(
        self, checkpointing: Checkpointing = CHECKPOINTINGS[0], num_blocks: int = 4
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(checkpointing) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block.run(x)
        return cross_entropy(self.head(self.norm(x))[:, :-1], ids[:, 1:])


class EncoderDecoder(nn.Module):
    """Two lists of blocks; every decoder block attends to the encoder. Returns a dict."""

    def __init__(self, checkpointing: Checkpointing = CHECKPOINTINGS[0]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.encoder = nn.ModuleList(Block(checkpointing) for _ in range(2))
        self.decoder = nn.ModuleList(Block(checkpointing, cross=True) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, *, source: Tensor, target: Tensor) -> dict[str, Any]:
        memory = self.embed(source)
        for block in self.encoder:
            memory = block.run(memory)
        x = self.embed(target)
        for block in self.decoder:
            x = block.run(x, memory)
        logits = self.head(x)
        return {"loss": cross_entropy(logits, target.flip(1)), "logits": [logits]}


class Reused(nn.Module):
    """One block is called three times, between and after others. Returns the loss."""

    def __init__(self, checkpointing: Checkpointing = CHECKPOINTINGS[0]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(checkpointing) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for index in (0, 1, 0, 2, 0):
            x = self.blocks[index].run(x)
        return cross_entropy(self.head(x), ids.flip(1))


class FrozenLinear(nn.Module):
    """A frozen 8-bit weight, its fp32 scale, and a trained low-rank correction."""

    def __init__(self) -> None:
        super().__init__()
        codes = torch.randint(-127, 128, (WIDTH, WIDTH), dtype=torch.int8)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.mask = nn.Parameter(
            torch.randint(0, 2, (WIDTH,), dtype=torch.uint8), requires_grad=False
        )
        self.scale = nn.Parameter(torch.full((WIDTH, 1), 0.01), requires_grad=False)
        self.down = nn.Parameter(torch.randn(4, WIDTH) * 0.1)
        self.up = nn.Parameter(torch.randn(WIDTH, 4) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        base = F.linear(x, self.codes.to(x.dtype) * self.scale.to(x.dtype))
        return base * self.mask.to(x.dtype) + F.linear(F.linear(x, self.down), self.up)


class FrozenBlock(Block):
    """A block with an 8-bit frozen part, and frozen matrices."""

    def __init__(self, checkpointing: Checkpointing) -> None:
        super().__init__(checkpointing)
        self.proj.requires_grad_(False)
        self.quantized = FrozenLinear()

    def feed_forward(self, x: Tensor) -> Tensor:
        return super().feed_forward(x) + self.quantized(x)


class Frozen(nn.Module):
    """Blocks with frozen 8-bit weights, entirely frozen fp32 blocks and a frozen bf16 head.

    Returns `(loss, logits)`.
    """

    def __init__(self, checkpointing: Checkpointing = CHECKPOINTINGS[0]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(FrozenBlock(checkpointing) for _ in range(2))
        self.frozen = nn.ModuleList(Block(checkpointing) for _ in range(2))
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(WIDTH, VOCAB).to(torch.bfloat16).requires_grad_(False)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(ids)
        x = self.frozen[0].run(self.blocks[0].run(x))
        x = self.frozen[1].run(self.blocks[1].run(x))
        logits = F.linear(x, self.head.weight.to(x.dtype), self.head.bias.to(x.dtype))
        return cross_entropy(logits, ids.flip(1)), logits


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class RoutedBlock(Block):
    """Block whose feed-forward part is a choice of experts, weighted by a learned gate."""

    NUM_EXPERTS = 4

    def __init__(self, checkpointing: Checkpointing) -> None:
        super().__init__(checkpointing)
        self.gate = nn.Linear(WIDTH, self.NUM_EXPERTS)
        self.experts = nn.ModuleList(Expert() for _ in range(self.NUM_EXPERTS))
        self.choice: Tensor = torch.zeros(0, dtype=torch.long)

    def feed_forward(self, x: Tensor) -> Tensor:
        self.num_inner_calls += 1
        normed = self.norm2(x)
        weights = self.gate(normed).softmax(dim=-1)
        out = torch.zeros_like(x)
        for index in sorted(set(self.choice.flatten().tolist())):
            chosen = (self.choice == index).unsqueeze(-1).to(x.dtype)
            out = out + chosen * weights[..., index : index + 1] * self.experts[index](normed)
        return out


class Stacks(nn.Module):
    """Experts in stacked parameters, of which an engine may load ranges."""

    NUM_EXPERTS = 7
    INNER = 256  # an expert's matrices have 4096 elements: complete blocks of the norm's tree
    infinity_stacks = ("up", "down")

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(self.NUM_EXPERTS, self.INNER, WIDTH) / 8)
        self.down = nn.Parameter(torch.randn(self.NUM_EXPERTS, WIDTH, self.INNER) / 4)

    def forward(self, x: Tensor, expert: Tensor) -> Tensor:
        expert, order = torch.sort(expert, stable=True)
        counts = torch.bincount(expert, minlength=self.NUM_EXPERTS).tolist()
        output = compute_ranges(self, self.compute, counts, x[order])
        return torch.zeros_like(x).index_copy(0, order, output)

    def compute(self, stack_range: StackRange, rows: Tensor) -> Tensor:
        expert_rows = rows.split(stack_range.counts)
        matrices = zip(
            expert_rows, stack_range["up"].unbind(), stack_range["down"].unbind(), strict=True
        )
        return torch.cat([F.linear(F.gelu(F.linear(x, up)), down) for x, up, down in matrices])


class StackedBlock(Block):
    """Block that routes each token to one of its stacked experts.

    The first tokens of a sample use each expert once; the gate routes the others.
    """

    def __init__(self, checkpointing: Checkpointing) -> None:
        super().__init__(checkpointing)
        del self.up, self.down  # replaced by experts
        self.gate = nn.Linear(WIDTH, Stacks.NUM_EXPERTS)
        self.experts = Stacks()

    def feed_forward(self, x: Tensor) -> Tensor:
        self.num_inner_calls += 1
        flat = self.norm2(x).flatten(0, -2)
        shares = self.gate(flat).softmax(dim=-1)
        expert = shares.argmax(dim=-1).view(-1, x.shape[-2])
        expert[:, : Stacks.NUM_EXPERTS] = torch.arange(Stacks.NUM_EXPERTS)
        weight = shares.gather(-1, expert.view(-1, 1))
        return (weight * self.experts(flat, expert.flatten())).view_as(x)


class Stacked(nn.Module):
    """Mixture of stacked experts. Returns the loss."""

    def __init__(self, checkpointing: Checkpointing = CHECKPOINTINGS[0]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(StackedBlock(checkpointing) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block.run(x)
        return cross_entropy(self.head(x), ids.flip(1))


class Routed(nn.Module):
    """Mixture of experts; a batch uses only the experts of its tokens. Returns a tuple."""

    def __init__(self, checkpointing: Checkpointing = CHECKPOINTINGS[0]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(RoutedBlock(checkpointing) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        x = self.embed(ids)
        for index, block in enumerate(self.blocks):
            block.choice = (ids + index) % RoutedBlock.NUM_EXPERTS
            x = block.run(x)
        logits = self.head(x)
        return cross_entropy(logits, ids.flip(1)), {"logits": logits}


class Buffered(nn.Module):
    """A persistent buffer that depends on the data, and a non-persistent one. Returns a dict."""

    shift: Tensor
    seen: Tensor
    num_calls: Tensor

    def __init__(self, checkpointing: Checkpointing = CHECKPOINTINGS[0]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(checkpointing) for _ in range(3))
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.register_buffer("shift", torch.linspace(-1, 1, WIDTH), persistent=False)
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        ids = batch["ids"]
        x = self.embed(ids) + self.shift.to(self.embed.weight.dtype)
        for block in self.blocks:
            x = block.run(x)
        with torch.no_grad():
            self.seen.mul_(0.9).add_(x.float().mean(dim=(0, 1)), alpha=0.1)
        x = x.flatten(0, 1)
        x = x + self.norm(x.float()).to(x.dtype) + self.seen.to(x.dtype)
        return {"loss": F.cross_entropy(self.head(x).float(), ids.flip(1).flatten())}


@dataclass(frozen=True)
class Batch:
    """Arguments of one call of a model."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None

    def call(self, model: Callable[..., Any]) -> Tensor:
        """Return the loss of this batch."""
        return loss_of(model(*self.args, **(self.kwargs or {})))


def loss_of(output: Any) -> Tensor:
    """Return the loss in a model's output."""
    if isinstance(output, dict):
        output = output["loss"]
    if isinstance(output, tuple):
        output = output[0]
    assert isinstance(output, Tensor)
    return output


def _ids(index: int, *, size: int = 2, among: Tensor | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + index)
    ids = torch.randint(0, VOCAB, (size, LENGTH), generator=generator)
    return ids if among is None else among[ids % len(among)]


def _plain_batch(index: int) -> Batch:
    return Batch((_ids(index),))


def _pair_batch(index: int) -> Batch:
    return Batch((), {"source": _ids(index), "target": _ids(index + 500)})


def _routed_batch(index: int) -> Batch:
    """Return tokens that select one, two, three or all experts, by turns."""
    tokens = torch.arange(VOCAB)
    expert = tokens % RoutedBlock.NUM_EXPERTS
    first = index % RoutedBlock.NUM_EXPERTS
    allowed = (expert - first) % RoutedBlock.NUM_EXPERTS <= (index // 3) % 4
    return Batch((_ids(index, among=tokens[allowed]),))


def _dict_batch(index: int) -> Batch:
    return Batch(({"ids": _ids(index), "unused": ["text", None]},))


def decay_matrices_only(model: nn.Module) -> list[dict[str, Any]]:
    """Return groups with weight decay on matrices and a different learning rate of vectors."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0, "lr": 2e-2},
    ]


@dataclass(frozen=True)
class Case:
    """Kind of model with its batches and parameter groups.

    `regular`: every step uses the same units in the same order, so that moved bytes can be forecast
    exactly.
    """

    name: str
    kind: Callable[[Checkpointing], nn.Module]
    batch: Callable[[int], Batch]
    groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None
    regular: bool = True

    def build(
        self, checkpointing: Checkpointing = CHECKPOINTINGS[0], *, seed: int = 0
    ) -> nn.Module:
        """Return a model that is bit-equal for equal seeds."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return self.kind(checkpointing)

    def batches(self, count: int) -> list[Batch]:
        """Return the first `count` batches."""
        return [self.batch(i) for i in range(count)]


CASES = {
    case.name: case
    for case in (
        Case("gpt", Gpt, _plain_batch, decay_matrices_only),
        Case("encoder_decoder", EncoderDecoder, _pair_batch),
        Case("reused", Reused, _plain_batch),
        Case("frozen", Frozen, _plain_batch),
        Case("routed", Routed, _routed_batch, regular=False),
        Case("stacked", Stacked, _plain_batch),
        Case("buffered", Buffered, _dict_batch, decay_matrices_only),
    )
}


def block_calls(model: nn.Module) -> tuple[int, int]:
    """Return the numbers of forward calls of blocks and of their feed-forward functions."""
    blocks = [m for m in model.modules() if isinstance(m, Block)]
    return sum(b.num_block_calls for b in blocks), sum(b.num_inner_calls for b in blocks)

"""A model of the Llama shape: RMSNorm, rotary positions, grouped-query attention by SDPA, SwiGLU.

It is independent of `infinity`. `forward(tokens, targets)` returns the mean cross entropy, computed
in fp32 one slice of the sequence at a time, so that the logits of a large vocabulary are never
materialized at once, unless the engine slices them (`whole_logits`). Written for timing: the sizes
are those of well-known models, the weights are random.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

_LOGITS = 1 << 28  # bytes of one slice of logits in fp32
_INIT_BOUND = 0.02 * 3**0.5  # uniform with a standard deviation of 0.02: cheap to draw


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of one model."""

    vocab_size: int
    context: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    width: int
    inner: int
    rope_base: float = 500_000.0
    checkpointing: bool = False  # recompute each block in backward
    whole_logits: bool = False  # of all tokens at once, for an engine that slices them

    @property
    def head_size(self) -> int:
        """Elements of one head."""
        return self.width // self.num_heads


# vocab, context, layers, heads, kv heads, width, inner: Llama 3.2 1B's body with an untied head,
# Llama 3 8B, and Qwen 3 14B's shape. "llama-tiny" is for tests.
PRESETS = {
    "llama-tiny": LlamaConfig(256, 64, 3, 4, 2, 64, 160),
    "llama-1.5b": LlamaConfig(128_256, 8192, 16, 32, 8, 2048, 8192),
    "llama-8b": LlamaConfig(128_256, 8192, 32, 32, 8, 4096, 14_336),
    "llama-14b": LlamaConfig(151_936, 8192, 40, 40, 8, 5120, 17_408),
}


class Block(nn.Module):
    """Attention and a gated perceptron, each added to its normalized input."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, head = config.width, config.head_size
        self.config = config
        self.attention_norm = nn.RMSNorm(width, eps=1e-5)
        self.query = nn.Linear(width, config.num_heads * head, bias=False)
        self.key = nn.Linear(width, config.num_kv_heads * head, bias=False)
        self.value = nn.Linear(width, config.num_kv_heads * head, bias=False)
        self.attention_out = nn.Linear(config.num_heads * head, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width, eps=1e-5)
        self.gate = nn.Linear(width, config.inner, bias=False)
        self.up = nn.Linear(width, config.inner, bias=False)
        self.down = nn.Linear(config.inner, width, bias=False)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """Return `x` (batch, time, width) after this block; `turn` is (cos, sin) by position."""
        batch, time, _ = x.shape
        normed = self.attention_norm(x)
        query, key, value = (
            projection(normed).view(batch, time, -1, self.config.head_size).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        query, key = _rotate(query, turn), _rotate(key, turn)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, time, -1))
        normed = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class UniformInit(nn.Module):
    """Base class of models with uniformly drawn matrices and vectors of ones."""

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Initialize every parameter from `seed`."""
        torch.manual_seed(seed)
        for parameter in self.parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.uniform_(-_INIT_BOUND, _INIT_BOUND)


class Llama(UniformInit):
    """The complete model; `forward` returns the loss."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy (nats) of `targets` (batch, time) given `tokens`."""
        config, time = self.config, tokens.shape[1]
        if time > config.context:
            raise ValueError(f"{time} tokens, but the model has {config.context} positions")
        x = self.tokens(tokens)
        turn = _turns(config, time, x)
        for block in self.blocks:
            if config.checkpointing and self.training:
                x = cast(Tensor, checkpoint(block, x, turn, use_reentrant=False))
            else:
                x = block(x, turn)
        return self._loss(self.norm(x).flatten(0, 1), targets.flatten())

    def _loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        if self.config.whole_logits:
            return F.cross_entropy(self.head(hidden).float(), targets)
        rows = max(_LOGITS // (4 * self.config.vocab_size), 1)
        total = hidden.new_zeros((), dtype=torch.float32)
        for hidden_slice, target_slice in zip(hidden.split(rows), targets.split(rows), strict=True):
            total = total + cast(
                Tensor, checkpoint(self._loss_sum, hidden_slice, target_slice, use_reentrant=False)
            )
        return total / targets.numel()

    def _loss_sum(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(hidden).float(), targets, reduction="sum")


def _turns(config: LlamaConfig, time: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin of every position's angles, (time, head size), in `like`'s dtype."""
    half = torch.arange(0, config.head_size, 2, device=like.device, dtype=torch.float32)
    frequency = config.rope_base ** (-half / config.head_size)
    angle = torch.outer(torch.arange(time, device=like.device, dtype=torch.float32), frequency)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def _rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = turn
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin

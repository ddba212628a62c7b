"""A small GPT: pre-norm blocks, causal attention by SDPA, GELU, learned positions.

It is an ordinary `nn.Module`, independent of `infinity`: `forward(tokens, targets)` returns the
mean cross entropy, computed in fp32 for any dtype of the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class GPTConfig:
    """The shape of one GPT."""

    vocab_size: int
    context: int
    num_layers: int
    num_heads: int
    width: int
    tied: bool = False  # the head uses the embedding's weight
    checkpointing: bool = False  # recompute each block in backward


# The byte-level models have a vocabulary of 256. "gpt-124m" has the body of the GPT-2 of that name
# with 32,000 tokens and an untied head: 135M parameters, the size at which peers were measured.
PRESETS = {
    "gpt-tiny": GPTConfig(vocab_size=256, context=64, num_layers=4, num_heads=4, width=128),
    "gpt-100m": GPTConfig(vocab_size=256, context=256, num_layers=16, num_heads=12, width=768),
    "gpt-124m": GPTConfig(vocab_size=32000, context=1024, num_layers=12, num_heads=12, width=768),
    "gpt-350m": GPTConfig(vocab_size=32000, context=1024, num_layers=24, num_heads=16, width=1024),
    "gpt-1.3b": GPTConfig(vocab_size=32000, context=2048, num_layers=24, num_heads=16, width=2048),
}


class Block(nn.Module):
    """Attention and a two-layer perceptron, each added to its normalized input."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.num_heads = config.num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` (batch, time, width) after this block."""
        batch, time, width = x.shape
        heads = self.query_key_value(self.attention_norm(x))
        heads = heads.view(batch, time, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


class GPT(nn.Module):
    """The complete model; `forward` returns the loss."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.tokens.weight

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Initialize every parameter from `seed` as in GPT-2: the same model in every process."""
        generator = torch.Generator().manual_seed(seed)
        small = 0.02 / (2 * self.config.num_layers) ** 0.5
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1.0)
            else:
                residual = name.endswith(("attention_out.weight", "mlp_out.weight"))
                parameter.normal_(0.0, small if residual else 0.02, generator=generator)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy (nats) of `targets` (batch, time) given `tokens`."""
        time = tokens.shape[1]
        if time > self.config.context:
            raise ValueError(f"{time} tokens, but the model has {self.config.context} positions")
        x = self.tokens(tokens) + self.positions(torch.arange(time, device=tokens.device))
        for block in self.blocks:
            if self.config.checkpointing and self.training:
                x = cast(Tensor, checkpoint(block, x, use_reentrant=False))
            else:
                x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

"""A mixture of experts: transformers' Qwen3-MoE from a configuration, its weights random.

A layer's experts are two parameters of three dimensions, `(experts, 2 * inner, width)` and
`(experts, width, inner)`, as in every mixture of transformers 5. `forward(tokens, targets)` returns
the mean cross entropy. It is independent of `infinity`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from llama import UniformInit
from torch import Tensor


@dataclass(frozen=True)
class MixtureConfig:
    """The shape of one model."""

    vocab_size: int
    context: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    width: int
    inner: int  # of one expert
    num_experts: int
    experts_per_token: int
    checkpointing: bool = False  # recompute each block in backward


# "moe-1b" has 1.04 billion parameters, of which a token uses 0.15. "moe-tiny" is for tests.
PRESETS = {
    "moe-tiny": MixtureConfig(256, 64, 2, 4, 2, 64, 64, 8, 2),
    "moe-1b": MixtureConfig(32_000, 2048, 10, 16, 4, 1024, 480, 64, 4),
}


class Mixture(UniformInit):
    """The complete model; `forward` returns the loss."""

    def __init__(self, config: MixtureConfig) -> None:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM  # the import takes seconds

        super().__init__()
        self.config = config
        shape = Qwen3MoeConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.width,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.width // config.num_heads,
            moe_intermediate_size=config.inner,
            num_experts=config.num_experts,
            num_experts_per_tok=config.experts_per_token,
            max_position_embeddings=config.context,
            tie_word_embeddings=False,
            use_cache=False,
        )
        self.model = Qwen3MoeForCausalLM(shape)
        with torch.device("cpu"):  # not parameters: on meta their values would be missing
            rotary = self.model.model.rotary_emb
            self.model.model.rotary_emb = type(rotary)(shape)
        if config.checkpointing:
            self.model.gradient_checkpointing_enable()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy (nats) of `targets` (batch, time) given `tokens`."""
        logits = self.model(input_ids=tokens).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def num_unused(config: MixtureConfig) -> int:
    """Return the number of parameters that a token does not use: those of the other experts."""
    idle = config.num_experts - config.experts_per_token
    return config.num_layers * idle * 3 * config.width * config.inner

"""The models that the examples and benchmarks can be asked for, by name."""

from __future__ import annotations

import gpt
import llama
import torch
from torch import nn

Shape = gpt.GPTConfig | llama.LlamaConfig
NAMES = (*gpt.PRESETS, *llama.PRESETS)


def shape_of(name: str, context: int | None = None, checkpointing: bool = False) -> Shape:
    """The preset `name`, with another context length if one is given."""
    family = gpt if name in gpt.PRESETS else llama
    return family.shape_of(name, context, checkpointing)


def build(shape: Shape, dtype: torch.dtype, seed: int) -> nn.Module:
    """The model in `dtype`, its weights drawn from `seed`."""
    if isinstance(shape, gpt.GPTConfig):
        return gpt.build_gpt(shape, dtype, seed)
    return llama.build_llama(shape, dtype, seed)


def count_parameters(shape: Shape) -> int:
    """The number of parameters, a tied one counted once, without building them."""
    kind = gpt.GPT if isinstance(shape, gpt.GPTConfig) else llama.Llama
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in kind(shape).parameters())

"""The models that the examples and benchmarks can be asked for, by name."""

from __future__ import annotations

from dataclasses import replace

import gpt
import llama
import mixture
import torch
from torch import nn

Shape = gpt.GPTConfig | llama.LlamaConfig | mixture.MixtureConfig
PRESETS: dict[str, Shape] = {**gpt.PRESETS, **llama.PRESETS, **mixture.PRESETS}


def shape_of(name: str, context: int | None = None, checkpointing: bool = False) -> Shape:
    """The preset `name`, with another context length if one is given."""
    preset = PRESETS[name]
    return replace(preset, context=context or preset.context, checkpointing=checkpointing)


def empty(shape: Shape, dtype: torch.dtype) -> gpt.GPT | llama.Llama | mixture.Mixture:
    """The model, its weights not drawn yet; in `dtype` from the start, so that no larger copy ever
    exists.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        match shape:
            case gpt.GPTConfig():
                return gpt.GPT(shape)
            case llama.LlamaConfig():
                return llama.Llama(shape)
            case _:
                return mixture.Mixture(shape)
    finally:
        torch.set_default_dtype(before)


def outline(shape: Shape, dtype: torch.dtype) -> nn.Module:
    """The model without values: all of it is meta."""
    with torch.device("meta"):
        return empty(shape, dtype)


def build(shape: Shape, dtype: torch.dtype, seed: int) -> nn.Module:
    """The model, its weights drawn from `seed`."""
    model = empty(shape, dtype)
    model.init_weights(seed)
    return model


def count_parameters(shape: Shape) -> int:
    """The number of parameters, a tied one counted once, without building them."""
    return sum(parameter.numel() for parameter in outline(shape, torch.float32).parameters())


def count_active(shape: Shape) -> int:
    """The number of parameters that a token uses: of a mixture, those of its experts alone."""
    unused = mixture.num_unused(shape) if isinstance(shape, mixture.MixtureConfig) else 0
    return count_parameters(shape) - unused

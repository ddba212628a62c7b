"""Models of the examples and benchmarks, by name."""

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
    """Return the preset `name`, with another context length if one is given."""
    preset = PRESETS[name]
    return replace(preset, context=context or preset.context, checkpointing=checkpointing)


def empty(shape: Shape, dtype: torch.dtype) -> gpt.GPT | llama.Llama | mixture.Mixture:
    """Return the uninitialized model, built in `dtype` so that no larger copy exists."""
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
    """Return the model on the meta device."""
    with torch.device("meta"):
        return empty(shape, dtype)


def build(shape: Shape, dtype: torch.dtype, seed: int) -> nn.Module:
    """Return the model with weights initialized from `seed`."""
    model = empty(shape, dtype)
    model.init_weights(seed)
    return model


def count_parameters(shape: Shape) -> int:
    """Return the number of parameters, without allocating them; tied ones are counted once."""
    return sum(parameter.numel() for parameter in outline(shape, torch.float32).parameters())


def count_active(shape: Shape) -> int:
    """Return the number of parameters that a token uses: in a mixture those of its experts."""
    unused = mixture.num_unused(shape) if isinstance(shape, mixture.MixtureConfig) else 0
    return count_parameters(shape) - unused

"""Models of the step benchmark, with the same initial values for every contender.

Drawing 14 billion random values takes minutes on a CPU, so a few million are drawn once and
repeated. Their number is prime, so that no two rows of a matrix are equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import llama
import presets
import torch
from _plain import DTYPES
from torch import Tensor, nn

_NUM_VALUES = 4_194_301
_BOUND = 0.02 * 3**0.5  # uniform with a standard deviation of 0.02


def shape_of(job: dict[str, Any]) -> presets.Shape:
    """Return the shape of the model; it recomputes blocks and slices logits if not the engine."""
    recomputes = job["checkpointing"] and not job["by_engine"]
    shape = presets.shape_of(job["model"], job["context"], recomputes)
    if job.get("layers"):
        shape = replace(shape, num_layers=job["layers"])
    if job.get("logits_by_engine") and isinstance(shape, llama.LlamaConfig):
        return replace(shape, whole_logits=True)
    return shape


def outline(job: dict[str, Any]) -> nn.Module:
    """Return the model without values."""
    return presets.outline(shape_of(job), DTYPES[job["precision"]])


def values_of(model: nn.Module) -> dict[str, Callable[[], Tensor]]:
    """Return functions that make the values of each parameter on the CPU, by name."""
    return {
        name: lambda name=name, like=parameter: _values(name, like)  # type: ignore[misc]
        for name, parameter in model.named_parameters()
    }


def filled(model: nn.Module, device: torch.device) -> nn.Module:
    """Materialize the parameters of an outline in place on a device; tied ones stay tied."""
    parameters: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in parameters:
                    parameters[id(parameter)] = nn.Parameter(_values(name, parameter).to(device))
                module._parameters[name] = parameters[id(parameter)]
    return model


def _values(name: str, like: Tensor) -> Tensor:
    if like.dim() == 1:
        return torch.full(like.shape, float(not name.endswith("bias")), dtype=like.dtype)
    drawn = _drawn(like.dtype)
    times = -(-like.numel() // drawn.numel())
    return drawn.repeat(times)[: like.numel()].view(like.shape)


@cache
def _drawn(dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.empty(_NUM_VALUES).uniform_(-_BOUND, _BOUND, generator=generator).to(dtype)

"""What a call of the engine may be given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from infinity.errors import TrainingError


def check_inputs(arguments: Any, device: torch.device) -> None:
    """Raise `TrainingError` for a tensor, however deep, that is not on the device."""
    for tensor in _tensors(arguments):
        if tensor.device != device:
            raise TrainingError(
                f"an input tensor is on {tensor.device}, the engine computes on {device}",
                remedy=f"move the batch: tensor.to({str(device)!r}) (engine.device)",
            )


def check_frozen(
    names: Sequence[str], parameters: Sequence[nn.Parameter], trained: Sequence[bool]
) -> None:
    """Raise `TrainingError` for a parameter that requires a gradient and has no state for it."""
    for index, parameter in enumerate(parameters):
        if parameter.requires_grad and not trained[index]:
            raise TrainingError(
                f"parameter {names[index]!r} requires a gradient, but was frozen when the engine "
                "was made and has no optimizer state",
                remedy="pass it to initialize(model_parameters=...), which gives state to "
                "parameters that are frozen for now, or keep it frozen",
            )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)

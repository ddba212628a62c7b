"""Inputs of a forward: moved to the engine's device, cast, and checked."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from infinity.errors import TrainingError, first_lines, listed
from infinity.model.buffers import find_buffers
from infinity.model.partition import Partition
from infinity.model.torch_private import without_torch_function

_OTHER_DTYPE = re.compile(r"\b(dtype|scalar type|Input type)\b")  # in torch's error messages


class Inputs:
    """Preparation of the arguments of a forward for a device and a compute dtype.

    With `casts` floating-point tensors are cast to the dtype, unless that is fp32.
    """

    def __init__(
        self,
        module: nn.Module,
        partition: Partition,
        device: torch.device,
        dtype: torch.dtype,
        *,
        casts: bool,
    ) -> None:
        self._module, self._partition = module, partition
        self._device, self._dtype = device, dtype
        self._casts = casts and dtype is not torch.float32
        self._warned = False
        pairs = list(zip(partition.names, partition.parameters, strict=True))
        self._required_grad = {name for name, p in pairs if p.requires_grad}
        trained = partition.trained
        self._untrained = [pair for pair, used in zip(pairs, trained, strict=True) if not used]

    def prepare(self, arguments: Any) -> Any:
        """Return nested `arguments` with tensors moved to the device, and cast with `casts`.

        As in FSDP2. CPU tensors without dimensions and the batch sizes of a `PackedSequence` stay
        in RAM.

        Raises:
            TrainingError: A tensor is on meta, or a parameter requires a gradient that has no
                optimizer state.
        """
        with without_torch_function():
            name = next((n for n, parameter in self._untrained if parameter.requires_grad), None)
        if name is not None:
            raise TrainingError(
                f"parameter {name!r} requires a gradient, but has no optimizer state",
                because="no group of the optimizer contains it"
                if name in self._required_grad
                else "it was frozen when the engine was made",
                remedy="pass it to the optimizer or to initialize(model_parameters=...), which "
                "gives state to parameters that are frozen for now; or freeze it: "
                "requires_grad_(False)",
            )
        cast_tensors = self._tensors_of_other_dtype(arguments) if self._casts else []
        if cast_tensors and not self._warned:
            self._warned = True
            logging.getLogger("infinity").info(
                "cast_inputs: %s of an input become %s, here and in later calls",
                listed(sorted({str(t.dtype) for t in cast_tensors})), self._dtype,
            )  # fmt: skip
        return _map_tensors(arguments, self._prepare)

    def _prepare(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "meta" != self._device.type:
            raise TrainingError(
                f"an input tensor is on meta, the engine computes on {self._device}",
                because="a tensor on meta has no values",
                remedy="make the batch in RAM or on the device",
            )
        if tensor.dim() or tensor.device.type != "cpu":
            tensor = tensor.to(self._device)
        return tensor.to(self._dtype) if self._casts and tensor.is_floating_point() else tensor

    def annotate_error(self, error: Exception, arguments: Any) -> None:
        """Raise `TrainingError` if an input of another dtype may have caused `error`.

        Otherwise add a note to `error` that names buffers of another dtype.
        """
        if not isinstance(error, RuntimeError) or not _OTHER_DTYPE.search(str(error)):
            return
        cast_hint = (
            "; or write cast_inputs: true, which does so with all floating inputs (in a DeepSpeed "
            'configuration: "infinity": {"cast_inputs": true})'
        )
        for tensor in self._tensors_of_other_dtype(arguments):
            raise TrainingError(
                f"an input of shape {tuple(tensor.shape)} is {tensor.dtype}, the engine computes "
                f"in {self._dtype}",
                because=first_lines(error),
                remedy=f"cast it: tensor.to({self._dtype})"
                + (cast_hint if self._dtype is not torch.float32 else ""),
            ) from error
        floating = [b for b in find_buffers(self._module) if b.value.is_floating_point()]
        buffer_names = [b.names[0] for b in floating if b.value.dtype is not self._dtype]
        if buffer_names:
            error.add_note(
                f"the engine computes in {self._dtype}, buffers keep their dtype: if "
                f"{listed(list(map(repr, buffer_names)))} meets weights, cast it there: "
                "b.to(x.dtype)"
            )

    def _tensors_of_other_dtype(self, arguments: Any) -> list[Tensor]:
        tensors = []

        def collect(tensor: Tensor) -> Tensor:
            if tensor.is_floating_point() and tensor.dtype is not self._dtype:
                tensors.append(tensor)
            return tensor

        _map_tensors(arguments, collect)
        return tensors


def _map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return `value` with its tensors changed; a container without changes is not copied."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        pairs = ((key, item, _map_tensors(item, change)) for key, item in value.items())
        changed = {key: new for key, old, new in pairs if new is not old}
        if changed:
            value = copy.copy(value) if isinstance(value, MutableMapping) else dict(value)
            value.update(changed)
    elif isinstance(value, list | tuple):
        items = [_map_tensors(item, change) for item in value]
        if isinstance(value, PackedSequence):
            items[1] = value.batch_sizes  # torch requires them in RAM
        if any(a is not b for a, b in zip(items, value, strict=True)):
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value

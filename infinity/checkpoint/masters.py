"""fp32 masters of a checkpoint, whole: joined from bf16 weights and residuals, or as they are.

Those of fp16 weights are a stream of their own, of fp32 weights the model itself. What exports
weights asks a `WeightSource`: a checkpoint is one, the directory of a durable run another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from infinity.checkpoint.layout import BUFFERS, FROZEN, MASTER, MODEL, RESIDUAL
from infinity.checkpoint.manifest import BufferRecord, ParameterRecord
from infinity.checkpoint.plain import DTYPES
from infinity.checkpoint.reader import CheckpointReader, empty
from infinity.model.weight_files import Outgoing

_PIECE = 1 << 20  # elements
_NAN = 0x7FC00000  # the one NaN that masters hold
_INFINITY = 0x7F800000
# Parameters of these dtypes are converted on request; others are codes of a quantised model.
_CONVERTED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def join(weight: Tensor, residual: Tensor) -> Tensor:
    """The fp32 masters that bf16 weights and int16 residuals stand for; new memory."""
    bits = weight.view(torch.int16).to(torch.int32) << 16
    return bits.add_(residual).view(torch.float32)  # int32 wraps: modulo 2**32


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 masters as bf16 weights and int16 residuals, losslessly but for the bits of a NaN."""
    bits = master.contiguous().view(torch.int32)
    bits = torch.where((bits & 0x7FFFFFFF) > _INFINITY, _NAN, bits)
    residual = bits.to(torch.int16)  # the lower half, signed
    weight = ((bits - residual) >> 16).to(torch.int16)
    return weight.view(torch.bfloat16), residual


class WeightSource(Protocol):
    """Weights and buffers by name; values are read when they are asked for, whole."""

    @property
    def parameters(self) -> Sequence[ParameterRecord]:
        """All parameters, tied ones once."""

    @property
    def buffers(self) -> Sequence[BufferRecord]:
        """All buffers."""

    def weight(self, name: str) -> Tensor:
        """What a parameter computes with."""

    def has_master(self, name: str) -> bool:
        """Whether there is more of a parameter than its weight."""

    def master(self, name: str) -> Tensor:
        """A trained parameter's fp32 master."""

    def buffer(self, name: str) -> Tensor:
        """A buffer's value."""


class CheckpointWeights:
    """A checkpoint as a `WeightSource`; raises as `CheckpointReader.read` does."""

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader
        self._residuals, self._masters = set(reader.names(RESIDUAL)), set(reader.names(MASTER))
        self._frozen = set(reader.names(FROZEN))
        self.parameters = reader.manifest.parameters
        self.buffers = reader.manifest.buffers

    def weight(self, name: str) -> Tensor:
        """What a parameter computes with."""
        return self._reader.read(FROZEN if name in self._frozen else MODEL, name)

    def has_master(self, name: str) -> bool:
        """Whether there is a residual or a master."""
        return name in self._residuals or name in self._masters

    def master(self, name: str) -> Tensor:
        """A trained parameter's fp32 master, or a frozen one's value, in its shape."""
        if name in self._masters:
            return self._reader.read(MASTER, name)
        if name not in self._residuals:
            return self.weight(name)
        facts = self._reader.facts(MODEL, name)
        master = empty(name, facts.numel, torch.float32)
        weight = torch.empty(min(_PIECE, facts.numel), dtype=torch.bfloat16)
        residual = torch.empty_like(weight, dtype=torch.int16)
        for first in range(0, facts.numel, _PIECE):
            count = min(_PIECE, facts.numel - first)
            for stream, part in ((MODEL, weight), (RESIDUAL, residual)):
                self._reader.read_into(stream, name, 2 * first, part[:count].view(torch.uint8))
            master[first : first + count] = join(weight[:count], residual[:count])
        return master.view(facts.shape)

    def buffer(self, name: str) -> Tensor:
        """A buffer's value."""
        return self._reader.read(BUFFERS, name)


def outgoing(source: WeightSource, dtype: torch.dtype | None) -> Sequence[Outgoing]:
    """The tensors of the model's state dict, tied ones once; one is in memory at a time.

    Parameters are converted to `dtype`, fp32 being the exact masters; None keeps what they
    compute in. Other dtypes are rounded once, from the masters. Buffers stay as they are.
    """
    tensors = []
    for parameter in source.parameters:
        kept = DTYPES[parameter.dtype]
        stored = dtype if dtype is not None and kept in _CONVERTED else kept
        read: Callable[[], Tensor] = partial(source.weight, parameter.name)
        if stored is not kept and source.has_master(parameter.name):
            read = partial(source.master, parameter.name)
        tensors.append(Outgoing(parameter.name, parameter.shape, stored, read))
    for buffer in source.buffers:
        if buffer.persistent:
            read = partial(source.buffer, buffer.name)
            tensors.append(Outgoing(buffer.name, buffer.shape, DTYPES[buffer.dtype], read))
    return tensors

"""fp32 masters of a checkpoint, whole: joined from bf16 weights and residuals, or as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from infinity.checkpoint.layout import BUFFERS, FROZEN, MODEL, RESIDUAL
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


def outgoing(reader: CheckpointReader, dtype: torch.dtype | None) -> Sequence[Outgoing]:
    """The tensors of the model's state dict, tied ones once; one is in memory at a time.

    Parameters are converted to `dtype`, fp32 being the exact masters; None keeps what they
    compute in. Other dtypes are rounded once, from the masters. Buffers stay as they are.
    """
    tensors = []
    residuals = set(reader.names(RESIDUAL))
    for parameter in reader.manifest.parameters:
        stream = MODEL if parameter.trained else FROZEN
        kept = DTYPES[parameter.dtype]
        stored = dtype if dtype is not None and kept in _CONVERTED else kept
        read: Callable[[], Tensor] = partial(reader.read, stream, parameter.name)
        if stored is not kept and parameter.name in residuals:
            read = partial(read_master, reader, parameter.name)
        tensors.append(Outgoing(parameter.name, parameter.shape, stored, read))
    for buffer in reader.manifest.buffers:
        if buffer.persistent:
            read = partial(reader.read, BUFFERS, buffer.name)
            tensors.append(Outgoing(buffer.name, buffer.shape, DTYPES[buffer.dtype], read))
    return tensors


def read_master(reader: CheckpointReader, name: str) -> Tensor:
    """A trained parameter's fp32 master, or a frozen one's value, in its shape."""
    if name not in reader.names(RESIDUAL):
        return reader.read(FROZEN if name in reader.names(FROZEN) else MODEL, name)
    facts = reader.facts(MODEL, name)
    master = empty(name, facts.numel, torch.float32)
    weight = torch.empty(min(_PIECE, facts.numel), dtype=torch.bfloat16)
    residual = torch.empty_like(weight, dtype=torch.int16)
    for first in range(0, facts.numel, _PIECE):
        count = min(_PIECE, facts.numel - first)
        reader.read_into(MODEL, name, 2 * first, weight[:count].view(torch.uint8))
        reader.read_into(RESIDUAL, name, 2 * first, residual[:count].view(torch.uint8))
        master[first : first + count] = join(weight[:count], residual[:count])
    return master.view(facts.shape)

"""The fp32 weights of a DeepSpeed ZeRO checkpoint, tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from infinity.checkpoint.deepspeed_files import read_zero
from infinity.checkpoint.deepspeed_import import buffer_names, frozen_of, module_of, trained_of
from infinity.model.weight_files import Outgoing


def deepspeed_weights(
    source: Path, tag: str | None = None, *, frozen: bool = True
) -> tuple[list[Outgoing], Mapping[str, str]]:
    """Masters, frozen parameters (floats in fp32) and buffers; and other names of tied ones.

    Reads what `import_deepspeed` does, and raises what it raises.
    """
    files = read_zero(source, tag)
    module = module_of(files)
    trained = trained_of(files, module)
    shared: Mapping[str, str] = files.models[0].get("shared_params") or {}
    parts = {name: (one.shape, one.master) for name, one in trained.items()}
    if frozen:
        parts |= frozen_of(files, module, trained, shared)
    tensors = [
        _outgoing(name, shape, pieces, torch.float32 if pieces[0].is_floating_point() else None)
        for name, (shape, pieces) in parts.items()
    ]
    for name in buffer_names(files):
        if name in module:
            tensors.append(_outgoing(name, tuple(module[name].shape), [module[name]], None))
    return tensors, {alias: name for alias, name in shared.items() if name in parts}


def _outgoing(
    name: str, shape: tuple[int, ...], pieces: Sequence[Tensor], dtype: torch.dtype | None
) -> Outgoing:
    stored = dtype or pieces[0].dtype

    def read() -> Tensor:
        return torch.cat([piece.reshape(-1) for piece in pieces]).to(stored).view(shape)

    return Outgoing(name, shape, stored, read)

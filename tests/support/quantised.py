"""Matrices quantised slowly: the formulas as they stand in the papers, block by block."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from infinity.formats import FrozenFormat
from infinity.model.quantised import NF4_LEVELS, quantise


def rounded(value: Tensor, form: str) -> Tensor:
    """What a matrix computes with after it rested in a format of `FrozenFormat`."""
    if form == "int8":
        return torch.stack([_row(row) for row in value.float()]).to(value.dtype)
    flat, levels = value.float().reshape(-1), torch.tensor(NF4_LEVELS)
    blocks = flat.split(64)
    scales = torch.stack([block.abs().max() for block in blocks])
    codes = [_nearest(block, levels) for block in blocks]
    if form == "nf4_double":
        mean = scales.mean()
        levels8 = dynamic()
        parts = (scales - mean).split(256)
        found = [levels8[_nearest(part, levels8)] * part.abs().max() for part in parts]
        scales = torch.cat(found) + mean
    values = [levels[code] * scale for code, scale in zip(codes, scales, strict=True)]
    return torch.cat(values).view(value.shape).to(value.dtype)


def _row(row: Tensor) -> Tensor:
    largest = row.abs().max()
    if not largest:
        return row
    return torch.round(row * (127.0 / largest)) * largest * torch.tensor(1 / 127)


def _nearest(block: Tensor, levels: Tensor) -> Tensor:
    largest = block.abs().max()
    scaled = block * (1 / largest) if largest else block
    return (scaled[:, None].double() - levels.double()).abs().argmin(1)


def dynamic() -> Tensor:
    """Signed 8-bit levels: a sign, zeros that count the power of ten, a one, a linear fraction."""
    found = [0.0, 1.0]
    for code in range(1, 128):
        fraction_bits = code.bit_length() - 1
        fraction, parts = code - (1 << fraction_bits), 1 << fraction_bits
        middle = 0.1 + 0.9 * (fraction + 0.5) / parts
        found += [sign * middle * 10.0 ** (fraction_bits - 6) for sign in (1, -1)]
    return torch.tensor(sorted(found))


def round_frozen(model: nn.Module, form: str, dtype: torch.dtype) -> None:
    """Frozen linear layers, but for heads and adapters, get the values of what rested so."""
    for name, module in model.named_modules():
        kept = name.endswith("head") or "lora_" in name
        if isinstance(module, nn.Linear) and not kept and not module.weight.requires_grad:
            module.weight.data = rounded(module.weight.data.to(dtype), form).float()


def packed(value: Tensor, form: FrozenFormat) -> Tensor:
    """What rests of a matrix."""
    found = torch.zeros(form.nbytes(value.shape), dtype=torch.uint8)
    quantise(value, form, found)
    return found


def as_bitsandbytes(
    name: str, one: Tensor, form: FrozenFormat, shape: Sequence[int]
) -> dict[str, Tensor]:
    """The tensors that bitsandbytes saves of a matrix."""
    codes, absmax, *rest = (part.clone() for part in one.split(list(form.parts(shape))))
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "shape": list(shape)}
    found = {name: codes.view(-1, 1), f"{name}.quant_map": torch.tensor(NF4_LEVELS)}
    if rest:
        state |= {"nested_blocksize": 256, "nested_offset": rest[1].view(torch.float32).item()}
        found[f"{name}.nested_absmax"] = rest[0].view(torch.float32)
        found[f"{name}.nested_quant_map"] = dynamic()
    else:
        absmax = absmax.view(torch.float32)
    found[f"{name}.absmax"] = absmax
    data = list(json.dumps(state).encode())
    found[f"{name}.quant_state.bitsandbytes__nf4"] = torch.tensor(data, dtype=torch.uint8)
    return found

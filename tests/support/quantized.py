"""Reference quantization of matrices, by the formulas of the papers, block by block."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from infinity.model.quantized import NF4_LEVELS, quantize
from infinity.types import FrozenFormat


def rounded(value: Tensor, form: str) -> Tensor:
    """Return a matrix or stack, quantized to a format of `FrozenFormat` and dequantized."""
    if value.dim() == 3:
        return torch.stack([rounded(matrix, form) for matrix in value])
    if form == "mxfp4":
        blocks = value.T.float().reshape(-1, 32)
        return torch.stack([_mxfp4(b) for b in blocks]).view(value.T.shape).T.to(value.dtype)
    if form == "int8":
        return torch.stack([_row(row) for row in value.float()]).to(value.dtype)
    if form == "fp8":
        bands = [
            [_fp8(square) for square in band.split(128, 1)] for band in value.float().split(128)
        ]
        return torch.cat([torch.cat(squares, 1) for squares in bands]).to(value.dtype)
    flat, levels = value.float().reshape(-1), torch.tensor(NF4_LEVELS)
    blocks = flat.split(64)
    scales = torch.stack([block.abs().max() for block in blocks])
    codes = [_nearest(block, levels) for block in blocks]
    if form == "nf4_double":
        mean = scales.mean()
        levels8 = dynamic()
        chunks = (scales - mean).split(256)
        double_scales = [levels8[_nearest(chunk, levels8)] * chunk.abs().max() for chunk in chunks]
        scales = torch.cat(double_scales) + mean
    values = [levels[code] * scale for code, scale in zip(codes, scales, strict=True)]
    return torch.cat(values).view(value.shape).to(value.dtype)


def _row(row: Tensor) -> Tensor:
    largest = row.abs().max()
    if not largest:
        return row
    return torch.round(row * (127.0 / largest)) * largest * torch.tensor(1 / 127)


def _mxfp4(block: Tensor) -> Tensor:
    """Round to the nearest FP4 value (0 to 6, ties to even) times a power of two.

    The scale is the least power of two with which 6 reaches the largest magnitude.
    """
    scale = 2.0**-127
    while 6 * scale < block.abs().max():
        scale *= 2
    step = torch.where(block.abs() / scale < 2, 0.5, torch.where(block.abs() / scale < 4, 1.0, 2.0))
    return torch.round(block / scale / step) * step * scale


def _fp8(square: Tensor) -> Tensor:
    scale = square.abs().max() / 448
    return (square / scale).to(torch.float8_e4m3fn).float() * scale if scale else square


def _nearest(block: Tensor, levels: Tensor) -> Tensor:
    largest = block.abs().max()
    scaled = block * (1 / largest) if largest else block
    return (scaled[:, None].double() - levels.double()).abs().argmin(1)


def dynamic() -> Tensor:
    """Return the levels of bitsandbytes' signed dynamic 8-bit map.

    A code has a sign, zeros that count the power of ten, a one, and a linear fraction.
    """
    levels = [0.0, 1.0]
    for code in range(1, 128):
        fraction_bits = code.bit_length() - 1
        fraction, steps = code - (1 << fraction_bits), 1 << fraction_bits
        middle = 0.1 + 0.9 * (fraction + 0.5) / steps
        levels += [sign * middle * 10.0 ** (fraction_bits - 6) for sign in (1, -1)]
    return torch.tensor(sorted(levels))


def round_frozen(model: nn.Module, form: str, dtype: torch.dtype) -> None:
    """Quantize and dequantize frozen matrices and stacks in place, but for heads and adapters."""
    for name, module in model.named_modules():
        unquantized = name.endswith("head") or "lora_" in name
        if isinstance(module, nn.Linear) and not unquantized and not module.weight.requires_grad:
            module.weight.data = rounded(module.weight.data.to(dtype), form).float()
    for stack in (p for p in model.parameters() if p.dim() == 3 and not p.requires_grad):
        stack.data = rounded(stack.data.to(dtype), form).float()


def packed(value: Tensor, form: FrozenFormat) -> Tensor:
    """Return the quantized bytes of a matrix."""
    data = torch.zeros(form.nbytes(value.shape), dtype=torch.uint8)
    quantize(value, form, data)
    return data


def as_bitsandbytes(
    name: str, data: Tensor, form: FrozenFormat, shape: Sequence[int]
) -> dict[str, Tensor]:
    """Return the tensors that bitsandbytes saves for a quantized matrix."""
    codes, absmax, *nested = (section.clone() for section in data.split(list(form.parts(shape))))
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "shape": list(shape)}
    tensors = {name: codes.view(-1, 1), f"{name}.quant_map": torch.tensor(NF4_LEVELS)}
    if nested:
        state |= {"nested_blocksize": 256, "nested_offset": nested[1].view(torch.float32).item()}
        tensors[f"{name}.nested_absmax"] = nested[0].view(torch.float32)
        tensors[f"{name}.nested_quant_map"] = dynamic()
    else:
        absmax = absmax.view(torch.float32)
    tensors[f"{name}.absmax"] = absmax
    encoded = list(json.dumps(state).encode())
    tensors[f"{name}.quant_state.bitsandbytes__nf4"] = torch.tensor(encoded, dtype=torch.uint8)
    return tensors

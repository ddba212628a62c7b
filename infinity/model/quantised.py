"""Quantization of frozen matrices to the formats of `FrozenFormat`, and dequantization.

Elementwise fp32 torch operations, rounded once: results have equal bits on every device, and equal
those of bitsandbytes (nf4, int8) and transformers (mxfp4, fp8). A matrix is processed in chunks, so
that temporaries are small (`FrozenFormat.work_bytes`). `_CODECS` has the two functions of each
format, which take one matrix; a stack is processed matrix by matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from infinity.types import (
    DOUBLE_BLOCK,
    FP8_BLOCK,
    MXFP4_BLOCK,
    NF4_BLOCK,
    QUANTISED_PIECE,
    FrozenFormat,
)

_TINY = 1e-38  # lower limit of scales, for blocks of zeros
_127TH = 7.874015718698502e-3  # the constant of bitsandbytes

# Quantiles of a normal distribution, each half scaled to 1 (QLoRA, appendix E).
NF4_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes; the highest bit is the sign
_E4M3_MAX = 448.0


def dynamic_levels() -> Tensor:
    """Return the 256 levels of signed 8-bit codes, sorted, fp32.

    Dynamic tree quantization (Dettmers, "8-Bit Approximations for Parallelism in Deep Learning",
    2016): 2**k levels per sign for the k-th power of ten, the means of equal intervals.
    """
    levels = [0.0, 1.0]
    for power in range(7):
        ends = torch.linspace(0.1, 1, 2**power + 1, dtype=torch.float32, device="cpu")
        means = (10 ** (power - 6) * ((ends[:-1] + ends[1:]) / 2)).tolist()
        levels += means + [-mean for mean in means]
    return _fp32(sorted(levels))


def quantise(
    value: Tensor, form: FrozenFormat, packed: Tensor, dtype: torch.dtype | None = None
) -> None:
    """Quantize a matrix, or a stack of matrices, into `packed`.

    Args:
        value: Floats, on the CPU.
        form: Format to store.
        packed: uint8, on the CPU, of `form.nbytes(value.shape)` bytes.
        dtype: Round the values to this dtype first; by default they are used unchanged.
    """
    encode = _CODECS[form].encode
    for matrix, record in _matrices(value, packed):
        encode(matrix, _parts(record, form, matrix.shape), dtype or value.dtype)


def quantise_exactly(value: Tensor, form: FrozenFormat, dtype: torch.dtype, packed: Tensor) -> None:
    """Quantize values rounded to the compute dtype `dtype`.

    Matrices of fp32 values that the format represents exactly, such as those of a quantized file,
    are not rounded first.
    """
    for matrix, record in _matrices(value, packed):
        quantise(matrix, form, record, None if _holds(matrix, form) else dtype)


def _holds(value: Tensor, form: FrozenFormat) -> bool:
    """Return True if the format represents these fp32 values exactly.

    Tested in ranges of `NF4_BLOCK` rows, which consist of full blocks.
    """
    if value.dtype is not torch.float32 or form not in (FrozenFormat.NF4, FrozenFormat.INT8):
        return False
    for rows in torch.split(value, NF4_BLOCK):
        packed = torch.zeros(form.nbytes(rows.shape), dtype=torch.uint8, device="cpu")
        quantise(rows, form, packed)
        found = torch.empty_like(rows)
        dequantise(packed, form, found)
        if not torch.equal(found, rows):
            return False
    return True


def from_parts(form: FrozenFormat, shape: Sequence[int], parts: Sequence[Tensor]) -> Tensor:
    """Return the packed bytes of a matrix or a stack whose parts are separate tensors.

    Args:
        form: Format of the parts.
        shape: Shape of the matrix or stack.
        parts: The parts of `FrozenFormat.parts`, each for all matrices in order.

    Raises:
        ValueError: A part has a wrong size.
    """
    packed = torch.zeros(form.nbytes(shape), dtype=torch.uint8, device="cpu")
    records = packed.view(prod(shape[:-2]), -1)
    for byte_range, part in zip(form.byte_ranges(shape[-2:]), parts, strict=True):
        data = part.contiguous().view(-1).view(torch.uint8)
        if data.numel() != records[:, byte_range].numel():
            sizes = [len(records) * size for size in form.parts(shape[-2:])]
            raise ValueError(f"parts of {[p.nbytes for p in parts]} bytes, not {sizes}")
        records[:, byte_range] = data.view(len(records), -1)
    return packed


def join_rows(form: FrozenFormat, columns: int, pieces: Sequence[tuple[int, Tensor]]) -> Tensor:
    """Concatenate packed matrices along their rows.

    Args:
        form: Format of all matrices.
        columns: Number of columns of all matrices.
        pieces: Number of rows and packed bytes of each matrix.

    Raises:
        ValueError: A block with one scale would have rows of two matrices.
    """
    if len(pieces) == 1:
        return pieces[0][1]
    if form is not FrozenFormat.FP8 or any(rows % FP8_BLOCK for rows, _ in pieces[:-1]):
        raise ValueError(f"matrices of {[rows for rows, _ in pieces]} rows share blocks")
    each = [_parts(packed, form, (rows, columns)) for rows, packed in pieces]
    shape = (sum(rows for rows, _ in pieces), columns)
    return from_parts(form, shape, [torch.cat(parts) for parts in zip(*each, strict=True)])


def dequantise(packed: Tensor, form: FrozenFormat, value: Tensor) -> None:
    """Dequantize `packed` into a matrix or a stack of floats.

    Args:
        packed: uint8, as filled by `quantise`.
        form: Format of `packed`.
        value: Contiguous, on the same device.
    """
    decode = _CODECS[form].decode
    for matrix, record in _matrices(value, packed):
        decode(_parts(record, form, matrix.shape), matrix)


def _matrices(value: Tensor, packed: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each matrix with its packed bytes."""
    if value.dim() == 2:
        yield value, packed
    else:
        yield from zip(value, packed.view(len(value), -1), strict=True)


def _parts(packed: Tensor, form: FrozenFormat, shape: Sequence[int]) -> list[Tensor]:
    """Return views of the codes of one matrix, and of its scales."""
    return [packed[byte_range] for byte_range in form.byte_ranges(shape)]


def _encode_nf4(value: Tensor, parts: list[Tensor], dtype: torch.dtype, *, double: bool) -> None:
    codes, *scales = parts
    flat = value.reshape(-1)
    largest = torch.cat([_largest(part.to(dtype), NF4_BLOCK) for part, _ in _pieces(flat, codes)])
    bounds = _bounds(_fp32(NF4_LEVELS))
    for number, (part, out) in enumerate(_pieces(flat, codes)):
        first = number * (QUANTISED_PIECE // NF4_BLOCK)
        level = _nearest(part.to(dtype).float(), largest[first:], NF4_BLOCK, bounds)
        if level.numel() % 2:
            level = torch.cat([level, level.new_full((1,), len(bounds) // 2)])
        out.copy_((level[::2] << 4) | level[1::2])
    if not double:
        scales[0].view(torch.float32).copy_(largest)
        return
    mean = largest.mean()
    largest -= mean
    of_blocks = _largest(largest, DOUBLE_BLOCK)
    scales[0].copy_(_nearest(largest, of_blocks, DOUBLE_BLOCK, _bounds(dynamic_levels())))
    scales[1].view(torch.float32).copy_(of_blocks)
    scales[2].view(torch.float32).copy_(mean)


def _decode_nf4(parts: list[Tensor], value: Tensor, *, double: bool) -> None:
    codes, *scales = parts
    there = _on(value.device)
    blocks, first = QUANTISED_PIECE // NF4_BLOCK, 0
    for out, part in _pieces(value.view(-1), codes):
        if double:
            largest = there.dynamic.index_select(0, scales[0][first : first + blocks].int())
            _scale(largest, scales[1].view(torch.float32)[first // DOUBLE_BLOCK :], DOUBLE_BLOCK)
            largest += scales[2].view(torch.float32)
        else:
            largest = scales[0].view(torch.float32)[first : first + blocks]
        found = there.nf4.index_select(0, part.int()).view(-1)[: out.numel()]
        _scale(found, largest, NF4_BLOCK)
        out.copy_(found)
        first += blocks


def _encode_int8(value: Tensor, parts: list[Tensor], dtype: torch.dtype) -> None:
    codes, scales = parts[0].view(torch.int8).view(value.shape), parts[1].view(torch.float32)
    for rows in _runs(*value.shape):
        part = value[rows].to(dtype).float()
        largest = part.abs().amax(1)
        scales[rows].copy_(largest)
        codes[rows].copy_(torch.round(part * (127.0 / largest.clamp(min=_TINY))[:, None]))


def _decode_int8(parts: list[Tensor], value: Tensor) -> None:
    codes, scales = parts[0].view(torch.int8).view(value.shape), parts[1].view(torch.float32)
    for rows in _runs(*value.shape):
        part = codes[rows].float()
        part.mul_(scales[rows, None]).mul_(_127TH)
        value[rows].copy_(part)


def _encode_mxfp4(value: Tensor, parts: list[Tensor], dtype: torch.dtype) -> None:
    """Scale each block by the least power of two with 6 * scale >= its largest magnitude."""
    columns, num_rows = value.shape  # the format stores it transposed
    codes, scales = parts[0].view(num_rows, -1), parts[1].view(num_rows, -1)
    # Ties between two levels go to the one whose last bit is 0.
    bounds = _bounds(_fp32(_E2M1))
    bounds[1::2] = torch.nextafter(bounds[1::2], _fp32([0.0]))
    for rows in _runs(num_rows, columns):
        blocks = value[:, rows].to(dtype).float().T.contiguous().view(-1, MXFP4_BLOCK)
        mantissa, exponent = torch.frexp(blocks.abs().amax(1) / _E2M1[-1])
        exponent = (exponent - (mantissa == 0.5).int()).clamp_(-127, 127)
        scaled = blocks * _on(value.device).powers[127 - exponent, None]
        code = torch.bucketize(scaled.abs(), bounds, out_int32=True).to(torch.uint8)
        code |= torch.signbit(scaled).to(torch.uint8) << 3
        codes[rows] = (code[:, ::2] | (code[:, 1::2] << 4)).view(-1, columns // 2)
        scales[rows] = (exponent + 127).to(torch.uint8).view(-1, columns // MXFP4_BLOCK)


def _decode_mxfp4(parts: list[Tensor], value: Tensor) -> None:
    columns, num_rows = value.shape
    codes, scales = parts[0].view(num_rows, -1), parts[1].view(num_rows, -1)
    there = _on(value.device)
    for rows in _runs(num_rows, columns):
        found = there.e2m1.index_select(0, codes[rows].reshape(-1).int()).view(-1, MXFP4_BLOCK)
        found.mul_(there.powers.index_select(0, scales[rows].reshape(-1).int())[:, None])
        value[:, rows].copy_(found.view(-1, columns).T)


def _encode_fp8(value: Tensor, parts: list[Tensor], dtype: torch.dtype) -> None:
    codes, scales = _fp8_parts(parts, value.shape)
    for band, first in enumerate(range(0, len(value), FP8_BLOCK)):
        rows = slice(first, first + FP8_BLOCK)
        part = value[rows].to(dtype).float()
        blocks = pad(part, (0, -part.shape[1] % FP8_BLOCK)).view(len(part), -1, FP8_BLOCK)
        scale = blocks.abs().amax((0, 2)) / _E4M3_MAX
        scales[band] = torch.where(scale > 0, scale, 1.0)
        part = (blocks / scales[band, :, None]).flatten(1)[:, : part.shape[1]]
        codes[rows] = part.clamp_(-_E4M3_MAX, _E4M3_MAX).to(codes.dtype)


def _decode_fp8(parts: list[Tensor], value: Tensor) -> None:
    codes, scales = _fp8_parts(parts, value.shape)
    num_full = value.shape[1] // FP8_BLOCK
    for rows in _runs(*value.shape):
        part = codes[rows].float()
        first = torch.arange(rows.start, rows.start + len(part), device=value.device)
        by = scales.index_select(0, first // FP8_BLOCK)
        part[:, : num_full * FP8_BLOCK].view(len(part), -1, FP8_BLOCK).mul_(by[:, :num_full, None])
        part[:, num_full * FP8_BLOCK :].mul_(by[:, num_full:])
        value[rows].copy_(part)


def _fp8_parts(parts: list[Tensor], shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    codes, scales = parts[0].view(torch.float8_e4m3fn), parts[1].view(torch.float32)
    return codes.view(tuple(shape)), scales.view(-(-shape[0] // FP8_BLOCK), -1)


class _Codec(NamedTuple):
    """Functions of a format; `encode` first rounds the matrix to a dtype."""

    encode: Callable[[Tensor, list[Tensor], torch.dtype], None]
    decode: Callable[[list[Tensor], Tensor], None]


_CODECS = {
    FrozenFormat.NF4: _Codec(
        partial(_encode_nf4, double=False), partial(_decode_nf4, double=False)
    ),
    FrozenFormat.NF4_DOUBLE: _Codec(
        partial(_encode_nf4, double=True), partial(_decode_nf4, double=True)
    ),
    FrozenFormat.INT8: _Codec(_encode_int8, _decode_int8),
    FrozenFormat.MXFP4: _Codec(_encode_mxfp4, _decode_mxfp4),
    FrozenFormat.FP8: _Codec(_encode_fp8, _decode_fp8),
}


def _runs(rows: int, columns: int) -> Iterator[slice]:
    """Return the ranges of rows that are processed at a time."""
    step = max(QUANTISED_PIECE // max(columns, 1), 1)
    return (slice(first, first + step) for first in range(0, rows, step))


def _pieces(flat: Tensor, codes: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Return chunks of elements with the bytes of their 4-bit codes, two in a byte."""
    return zip(
        torch.split(flat, QUANTISED_PIECE), torch.split(codes, QUANTISED_PIECE // 2), strict=True
    )


def _largest(flat: Tensor, block: int) -> Tensor:
    """Return the largest magnitude of every block, fp32; the last block may be shorter."""
    end = flat.numel() // block * block
    found = [flat[:end].view(-1, block).abs().amax(1).float()]
    if end < flat.numel():  # bitsandbytes stores the clamped divisor of this block
        found.append(flat[end:].abs().amax().float().clamp(min=_TINY).view(1))
    return torch.cat(found)


def _nearest(flat: Tensor, largest: Tensor, block: int, bounds: Tensor) -> Tensor:
    """Scale each block to [-1, 1]; return the uint8 indices of the nearest levels."""
    end = flat.numel() // block * block
    by = largest.clamp(min=_TINY)
    scaled = torch.empty_like(flat)
    scaled[:end] = (flat[:end].view(-1, block) * (1.0 / by[: end // block, None])).view(-1)
    if end < flat.numel():
        scaled[end:] = flat[end:] / by[end // block]
    return torch.bucketize(scaled.clamp_(-1, 1), bounds, out_int32=True).to(torch.uint8)


def _fp32(levels: Sequence[float]) -> Tensor:
    """Return a tensor on the CPU, independent of the default dtype and device."""
    return torch.tensor(levels, dtype=torch.float32, device="cpu")


def _bounds(levels: Tensor) -> Tensor:
    return (levels[:-1] + levels[1:]) / 2


def _scale(flat: Tensor, by: Tensor, block: int) -> None:
    """Multiply the elements of every block by its scale, in place."""
    blocks, remainder = divmod(flat.numel(), block)
    flat[: blocks * block].view(-1, block).mul_(by[:blocks, None])
    if remainder:
        flat[blocks * block :].mul_(by[blocks])


class _Constants(NamedTuple):
    """Lookup tables on a device, fp32."""

    nf4: Tensor  # the two levels of every byte of codes, the higher bits first
    e2m1: Tensor  # the two levels of every byte of codes, the lower bits first
    dynamic: Tensor  # level of every 8-bit code
    powers: Tensor  # value of every e8m0 scale


@lru_cache(maxsize=16)
def _on(device: torch.device) -> _Constants:
    nf4, e2m1 = _fp32(NF4_LEVELS), _fp32([*_E2M1, *(-level for level in _E2M1)])
    powers = _fp32([2.0 ** (scale - 127) for scale in range(256)])
    tables = (
        torch.cartesian_prod(nf4, nf4),
        torch.cartesian_prod(e2m1, e2m1).flip(1).contiguous(),
        dynamic_levels(),
        powers,
    )
    return _Constants(*(table.to(device) for table in tables))

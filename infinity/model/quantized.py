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
    QUANTIZED_CHUNK,
    FrozenFormat,
)

_TINY = 1e-38  # lower limit of scales, for blocks of zeros

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
        edges = torch.linspace(0.1, 1, 2**power + 1, dtype=torch.float32, device="cpu")
        means = (10 ** (power - 6) * ((edges[:-1] + edges[1:]) / 2)).tolist()
        levels += means + [-mean for mean in means]
    return _fp32(sorted(levels))


def quantize(
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
    for matrix, packed_matrix in _matrices(value, packed):
        encode(matrix, _parts(packed_matrix, form, matrix.shape), dtype or value.dtype)


def quantize_exactly(value: Tensor, form: FrozenFormat, dtype: torch.dtype, packed: Tensor) -> None:
    """Quantize values rounded to the compute dtype `dtype`.

    Matrices of fp32 values that the format represents exactly, such as those of a quantized file,
    are not rounded first.
    """
    for matrix, packed_matrix in _matrices(value, packed):
        quantize(matrix, form, packed_matrix, None if _is_exact(matrix, form) else dtype)


def _is_exact(value: Tensor, form: FrozenFormat) -> bool:
    """Return True if the format represents these fp32 values exactly.

    Tested in ranges of `NF4_BLOCK` rows, which consist of full blocks.
    """
    if value.dtype is not torch.float32 or form not in (FrozenFormat.NF4, FrozenFormat.INT8):
        return False
    for rows in torch.split(value, NF4_BLOCK):
        packed = torch.zeros(form.nbytes(rows.shape), dtype=torch.uint8, device="cpu")
        quantize(rows, form, packed)
        decoded = torch.empty_like(rows)
        dequantize(packed, form, decoded)
        if not torch.equal(decoded, rows):
            return False
    return True


def pack_parts(form: FrozenFormat, shape: Sequence[int], parts: Sequence[Tensor]) -> Tensor:
    """Return the packed bytes of a matrix or a stack whose parts are separate tensors.

    Args:
        form: Format of the parts.
        shape: Shape of the matrix or stack.
        parts: The parts of `FrozenFormat.parts`, each for all matrices in order.

    Raises:
        ValueError: A part has a wrong size.
    """
    packed = torch.zeros(form.nbytes(shape), dtype=torch.uint8, device="cpu")
    packed_matrices = packed.view(prod(shape[:-2]), -1)
    for byte_range, part in zip(form.byte_ranges(shape[-2:]), parts, strict=True):
        data = part.contiguous().view(-1).view(torch.uint8)
        if data.numel() != packed_matrices[:, byte_range].numel():
            sizes = [len(packed_matrices) * size for size in form.parts(shape[-2:])]
            raise ValueError(f"parts of {[p.nbytes for p in parts]} bytes, not {sizes}")
        packed_matrices[:, byte_range] = data.view(len(packed_matrices), -1)
    return packed


def join_rows(form: FrozenFormat, columns: int, matrices: Sequence[tuple[int, Tensor]]) -> Tensor:
    """Concatenate packed matrices along their rows.

    Args:
        form: Format of all matrices.
        columns: Number of columns of all matrices.
        matrices: Number of rows and packed bytes of each matrix.

    Raises:
        ValueError: A block with one scale would have rows of two matrices.
    """
    if len(matrices) == 1:
        return matrices[0][1]
    if form is not FrozenFormat.FP8 or any(rows % FP8_BLOCK for rows, _ in matrices[:-1]):
        raise ValueError(f"matrices of {[rows for rows, _ in matrices]} rows share blocks")
    unpacked = [_parts(packed, form, (rows, columns)) for rows, packed in matrices]
    shape = (sum(rows for rows, _ in matrices), columns)
    return pack_parts(form, shape, [torch.cat(parts) for parts in zip(*unpacked, strict=True)])


def dequantize(packed: Tensor, form: FrozenFormat, value: Tensor) -> None:
    """Dequantize `packed` into a matrix or a stack of floats.

    Args:
        packed: uint8, as filled by `quantize`.
        form: Format of `packed`.
        value: Contiguous, on the same device.
    """
    decode = _CODECS[form].decode
    for matrix, packed_matrix in _matrices(value, packed):
        decode(_parts(packed_matrix, form, matrix.shape), matrix)


def _matrices(value: Tensor, packed: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
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
    maxima = torch.cat(
        [_block_maxima(chunk.to(dtype), NF4_BLOCK) for chunk, _ in _chunks(flat, codes)]
    )
    boundaries = _boundaries(_fp32(NF4_LEVELS))
    for number, (chunk, chunk_codes) in enumerate(_chunks(flat, codes)):
        first = number * (QUANTIZED_CHUNK // NF4_BLOCK)
        code = _nearest_codes(chunk.to(dtype).float(), maxima[first:], NF4_BLOCK, boundaries)
        if code.numel() % 2:
            code = torch.cat([code, code.new_full((1,), len(boundaries) // 2)])
        chunk_codes.copy_((code[::2] << 4) | code[1::2])
    if not double:
        scales[0].view(torch.float32).copy_(maxima)
        return
    mean = maxima.mean()
    maxima -= mean
    scales_of_scales = _block_maxima(maxima, DOUBLE_BLOCK)
    scales[0].copy_(
        _nearest_codes(maxima, scales_of_scales, DOUBLE_BLOCK, _boundaries(dynamic_levels()))
    )
    scales[1].view(torch.float32).copy_(scales_of_scales)
    scales[2].view(torch.float32).copy_(mean)


def _decode_nf4(parts: list[Tensor], value: Tensor, *, double: bool) -> None:
    codes, *scales = parts
    tables = _constants_on(value.device)
    per_chunk = QUANTIZED_CHUNK // NF4_BLOCK
    first_block = 0
    for out, chunk_codes in _chunks(value.view(-1), codes):
        if double:
            maxima = tables.dynamic.index_select(
                0, scales[0][first_block : first_block + per_chunk].int()
            )
            _scale(
                maxima, scales[1].view(torch.float32)[first_block // DOUBLE_BLOCK :], DOUBLE_BLOCK
            )
            maxima += scales[2].view(torch.float32)
        else:
            maxima = scales[0].view(torch.float32)[first_block : first_block + per_chunk]
        values = tables.nf4.index_select(0, chunk_codes.int()).view(-1)[: out.numel()]
        _scale(values, maxima, NF4_BLOCK)
        out.copy_(values)
        first_block += per_chunk


def _encode_int8(value: Tensor, parts: list[Tensor], dtype: torch.dtype) -> None:
    codes, scales = parts[0].view(torch.int8).view(value.shape), parts[1].view(torch.float32)
    for rows in _row_ranges(*value.shape):
        chunk = value[rows].to(dtype).float()
        largest = chunk.abs().amax(1)
        scales[rows].copy_(largest)
        codes[rows].copy_(torch.round(chunk * (127.0 / largest.clamp(min=_TINY))[:, None]))


def _decode_int8(parts: list[Tensor], value: Tensor) -> None:
    codes, scales = parts[0].view(torch.int8).view(value.shape), parts[1].view(torch.float32)
    for rows in _row_ranges(*value.shape):
        chunk = codes[rows].float()
        chunk.mul_(scales[rows, None]).mul_(7.874015718698502e-3)  # 1 / 127, as in bitsandbytes
        value[rows].copy_(chunk)


def _encode_mxfp4(value: Tensor, parts: list[Tensor], dtype: torch.dtype) -> None:
    """Scale each block by the least power of two with 6 * scale >= its largest magnitude."""
    columns, num_rows = value.shape  # the format stores it transposed
    codes, scales = parts[0].view(num_rows, -1), parts[1].view(num_rows, -1)
    # Ties between two levels go to the one whose last bit is 0.
    boundaries = _boundaries(_fp32(_E2M1))
    boundaries[1::2] = torch.nextafter(boundaries[1::2], _fp32([0.0]))
    for rows in _row_ranges(num_rows, columns):
        blocks = value[:, rows].to(dtype).float().T.contiguous().view(-1, MXFP4_BLOCK)
        mantissa, exponent = torch.frexp(blocks.abs().amax(1) / _E2M1[-1])
        exponent = (exponent - (mantissa == 0.5).int()).clamp_(-127, 127)
        scaled = blocks * _constants_on(value.device).powers[127 - exponent, None]
        code = torch.bucketize(scaled.abs(), boundaries, out_int32=True).to(torch.uint8)
        code |= torch.signbit(scaled).to(torch.uint8) << 3
        codes[rows] = (code[:, ::2] | (code[:, 1::2] << 4)).view(-1, columns // 2)
        scales[rows] = (exponent + 127).to(torch.uint8).view(-1, columns // MXFP4_BLOCK)


def _decode_mxfp4(parts: list[Tensor], value: Tensor) -> None:
    columns, num_rows = value.shape
    codes, scales = parts[0].view(num_rows, -1), parts[1].view(num_rows, -1)
    tables = _constants_on(value.device)
    for rows in _row_ranges(num_rows, columns):
        values = tables.e2m1.index_select(0, codes[rows].reshape(-1).int()).view(-1, MXFP4_BLOCK)
        values.mul_(tables.powers.index_select(0, scales[rows].reshape(-1).int())[:, None])
        value[:, rows].copy_(values.view(-1, columns).T)


def _encode_fp8(value: Tensor, parts: list[Tensor], dtype: torch.dtype) -> None:
    codes, scales = _fp8_parts(parts, value.shape)
    for band, first in enumerate(range(0, len(value), FP8_BLOCK)):
        rows = slice(first, first + FP8_BLOCK)
        chunk = value[rows].to(dtype).float()
        blocks = pad(chunk, (0, -chunk.shape[1] % FP8_BLOCK)).view(len(chunk), -1, FP8_BLOCK)
        scale = blocks.abs().amax((0, 2)) / _E4M3_MAX
        scales[band] = torch.where(scale > 0, scale, 1.0)
        chunk = (blocks / scales[band, :, None]).flatten(1)[:, : chunk.shape[1]]
        codes[rows] = chunk.clamp_(-_E4M3_MAX, _E4M3_MAX).to(codes.dtype)


def _decode_fp8(parts: list[Tensor], value: Tensor) -> None:
    codes, scales = _fp8_parts(parts, value.shape)
    num_full = value.shape[1] // FP8_BLOCK
    for rows in _row_ranges(*value.shape):
        chunk = codes[rows].float()
        row_indices = torch.arange(rows.start, rows.start + len(chunk), device=value.device)
        row_scales = scales.index_select(0, row_indices // FP8_BLOCK)
        chunk[:, : num_full * FP8_BLOCK].view(len(chunk), -1, FP8_BLOCK).mul_(
            row_scales[:, :num_full, None]
        )
        chunk[:, num_full * FP8_BLOCK :].mul_(row_scales[:, num_full:])
        value[rows].copy_(chunk)


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


def _row_ranges(rows: int, columns: int) -> Iterator[slice]:
    """Return the ranges of rows that are processed at a time."""
    step = max(QUANTIZED_CHUNK // max(columns, 1), 1)
    return (slice(first, first + step) for first in range(0, rows, step))


def _chunks(flat: Tensor, codes: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Return chunks of elements with the bytes of their 4-bit codes, two in a byte."""
    return zip(
        torch.split(flat, QUANTIZED_CHUNK), torch.split(codes, QUANTIZED_CHUNK // 2), strict=True
    )


def _block_maxima(flat: Tensor, block: int) -> Tensor:
    """Return the largest magnitude of every block, fp32; the last block may be shorter."""
    end = flat.numel() // block * block
    maxima = [flat[:end].view(-1, block).abs().amax(1).float()]
    if end < flat.numel():  # bitsandbytes stores the clamped divisor of this block
        maxima.append(flat[end:].abs().amax().float().clamp(min=_TINY).view(1))
    return torch.cat(maxima)


def _nearest_codes(flat: Tensor, maxima: Tensor, block: int, boundaries: Tensor) -> Tensor:
    """Scale each block to [-1, 1]; return the uint8 indices of the nearest levels."""
    end = flat.numel() // block * block
    divisors = maxima.clamp(min=_TINY)
    scaled = torch.empty_like(flat)
    scaled[:end] = (flat[:end].view(-1, block) * (1.0 / divisors[: end // block, None])).view(-1)
    if end < flat.numel():
        scaled[end:] = flat[end:] / divisors[end // block]
    return torch.bucketize(scaled.clamp_(-1, 1), boundaries, out_int32=True).to(torch.uint8)


def _fp32(levels: Sequence[float]) -> Tensor:
    """Return a tensor on the CPU, independent of the default dtype and device."""
    return torch.tensor(levels, dtype=torch.float32, device="cpu")


def _boundaries(levels: Tensor) -> Tensor:
    return (levels[:-1] + levels[1:]) / 2


def _scale(flat: Tensor, scales: Tensor, block: int) -> None:
    """Multiply the elements of every block by its scale, in place."""
    blocks, remainder = divmod(flat.numel(), block)
    flat[: blocks * block].view(-1, block).mul_(scales[:blocks, None])
    if remainder:
        flat[blocks * block :].mul_(scales[blocks])


class _Constants(NamedTuple):
    """Lookup tables on a device, fp32."""

    nf4: Tensor  # the two levels of every byte of codes, the higher bits first
    e2m1: Tensor  # the two levels of every byte of codes, the lower bits first
    dynamic: Tensor  # level of every 8-bit code
    powers: Tensor  # value of every e8m0 scale


@lru_cache(maxsize=16)
def _constants_on(device: torch.device) -> _Constants:
    nf4, e2m1 = _fp32(NF4_LEVELS), _fp32([*_E2M1, *(-level for level in _E2M1)])
    powers = _fp32([2.0 ** (scale - 127) for scale in range(256)])
    tables = (
        torch.cartesian_prod(nf4, nf4),
        torch.cartesian_prod(e2m1, e2m1).flip(1).contiguous(),
        dynamic_levels(),
        powers,
    )
    return _Constants(*(table.to(device) for table in tables))

"""Frozen matrices in the formats of `FrozenFormat`: from values to bytes at rest, and back.

Plain torch, element by element in fp32 and rounded once: the same bits on every device, and those
that bitsandbytes makes of the same values. Both ways work through a matrix in pieces, so that what
they need beside it is small (`FrozenFormat.work_bytes`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from infinity.formats import DOUBLE_BLOCK, NF4_BLOCK, QUANTISED_PIECE, FrozenFormat

_TINY = 1e-38  # for the scale of what is all zeros
_127TH = 7.874015718698502e-3  # as bitsandbytes has it

# Quantiles of a normal distribution, each half scaled to 1 (QLoRA, appendix E).
NF4_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def dynamic_levels() -> Tensor:
    """256 levels of signed 8-bit codes, fp32: for every power of ten the means of equal parts.

    Of Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", 2016: the more of the
    first bits are zeros, the smaller is the power, and the fewer are left to part it.
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
    """Fill `packed` (uint8, on the CPU) with what rests of a matrix (floats, in its shape), of
    which the values in `dtype` count.
    """
    dtype = dtype or value.dtype
    codes, *scales = _parts(packed, form, value.shape)
    if form is FrozenFormat.INT8:
        _quantise_rows(value, codes.view(torch.int8).view(value.shape), scales[0], dtype)
        return
    flat = value.reshape(-1)
    largest = torch.cat([_largest(part.to(dtype), NF4_BLOCK) for part, _ in _pieces(flat, codes)])
    bounds = _bounds(_fp32(NF4_LEVELS))
    for number, (part, out) in enumerate(_pieces(flat, codes)):
        first = number * (QUANTISED_PIECE // NF4_BLOCK)
        level = _nearest(part.to(dtype).float(), largest[first:], NF4_BLOCK, bounds)
        if level.numel() % 2:
            level = torch.cat([level, level.new_full((1,), len(bounds) // 2)])
        out.copy_((level[::2] << 4) | level[1::2])
    if form is FrozenFormat.NF4:
        scales[0].view(torch.float32).copy_(largest)
        return
    mean = largest.mean()
    largest -= mean
    of_blocks = _largest(largest, DOUBLE_BLOCK)
    scales[0].copy_(_nearest(largest, of_blocks, DOUBLE_BLOCK, _bounds(dynamic_levels())))
    scales[1].view(torch.float32).copy_(of_blocks)
    scales[2].view(torch.float32).copy_(mean)


def quantise_exactly(value: Tensor, form: FrozenFormat, dtype: torch.dtype, packed: Tensor) -> None:
    """`quantise`, of the values in the dtype that they compute in; but of fp32 ones that the format
    holds to the bit, as those of a file that is quantised already, as they are.
    """
    quantise(value, form, packed, None if _holds(value, form) else dtype)


def _holds(value: Tensor, form: FrozenFormat) -> bool:
    """Whether nothing is lost of fp32 values; looked at in runs of rows, which are whole blocks."""
    if value.dtype is not torch.float32 or form is FrozenFormat.NF4_DOUBLE:
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
    """The fp32 values of a matrix whose parts (`FrozenFormat.parts`) came one by one.

    Raises `ValueError` if they are not as long as they must be.
    """
    sizes = form.parts(shape)
    packed = torch.zeros(form.nbytes(shape), dtype=torch.uint8, device="cpu")
    value = torch.empty(tuple(shape), dtype=torch.float32, device="cpu")
    for part, given in zip(_parts(packed, form, value.shape), parts, strict=True):
        data = given.contiguous().view(-1).view(torch.uint8)
        if data.numel() != part.numel():
            raise ValueError(f"parts of {[p.nbytes for p in parts]} bytes, not {list(sizes)}")
        part.copy_(data)
    dequantise(packed, form, value)
    return value


def dequantise(packed: Tensor, form: FrozenFormat, value: Tensor) -> None:
    """Fill `value` (a matrix of floats) with what `packed` (uint8, on its device) stands for."""
    codes, *scales = _parts(packed, form, value.shape)
    if form is FrozenFormat.INT8:
        rows = scales[0].view(torch.float32)
        step = max(QUANTISED_PIECE // max(value.shape[1], 1), 1)
        for first in range(0, value.shape[0], step):
            part = codes.view(torch.int8).view(value.shape)[first : first + step].float()
            part.mul_(rows[first : first + step, None]).mul_(_127TH)
            value[first : first + step].copy_(part)
        return
    pairs, levels = _on(packed.device)
    blocks, first = QUANTISED_PIECE // NF4_BLOCK, 0
    for out, part in _pieces(value.view(-1), codes):
        if form is FrozenFormat.NF4:
            largest = scales[0].view(torch.float32)[first : first + blocks]
        else:
            largest = levels.index_select(0, scales[0][first : first + blocks].int())
            _scale(largest, scales[1].view(torch.float32)[first // DOUBLE_BLOCK :], DOUBLE_BLOCK)
            largest += scales[2].view(torch.float32)
        found = pairs.index_select(0, part.int()).view(-1)[: out.numel()]
        _scale(found, largest, NF4_BLOCK)
        out.copy_(found)
        first += blocks


def _quantise_rows(value: Tensor, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
    step = max(QUANTISED_PIECE // max(value.shape[1], 1), 1)
    for first in range(0, value.shape[0], step):
        part = value[first : first + step].to(dtype).float()
        largest = part.abs().amax(1)
        scales.view(torch.float32)[first : first + step].copy_(largest)
        rounded = torch.round(part * (127.0 / largest.clamp(min=_TINY))[:, None])
        codes[first : first + step].copy_(rounded)


def _parts(packed: Tensor, form: FrozenFormat, shape: torch.Size) -> list[Tensor]:
    """The codes, and what scales them."""
    return [packed[place] for place in form.places(shape)]


def _pieces(flat: Tensor, codes: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Elements, and the bytes of their codes, two in each."""
    return zip(
        torch.split(flat, QUANTISED_PIECE), torch.split(codes, QUANTISED_PIECE // 2), strict=True
    )


def _largest(flat: Tensor, block: int) -> Tensor:
    """The largest magnitude of every block, fp32; the last may be shorter."""
    whole = flat.numel() // block * block
    found = [flat[:whole].view(-1, block).abs().amax(1).float()]
    if whole < flat.numel():  # here bitsandbytes keeps what it divides by
        found.append(flat[whole:].abs().amax().float().clamp(min=_TINY).view(1))
    return torch.cat(found)


def _nearest(flat: Tensor, largest: Tensor, block: int, bounds: Tensor) -> Tensor:
    """uint8 numbers of the levels that are nearest to fp32 elements, of their block's largest."""
    whole = flat.numel() // block * block
    by = largest.clamp(min=_TINY)
    scaled = torch.empty_like(flat)
    scaled[:whole] = (flat[:whole].view(-1, block) * (1.0 / by[: whole // block, None])).view(-1)
    if whole < flat.numel():
        scaled[whole:] = flat[whole:] / by[whole // block]
    return torch.bucketize(scaled.clamp_(-1, 1), bounds, out_int32=True).to(torch.uint8)


def _fp32(levels: Sequence[float]) -> Tensor:
    """On the CPU, whatever torch's default dtype and device are."""
    return torch.tensor(levels, dtype=torch.float32, device="cpu")


def _bounds(levels: Tensor) -> Tensor:
    return (levels[:-1] + levels[1:]) / 2


def _scale(flat: Tensor, by: Tensor, block: int) -> None:
    """Multiply the elements of every block by its scale, in place."""
    blocks, rest = divmod(flat.numel(), block)
    flat[: blocks * block].view(-1, block).mul_(by[:blocks, None])
    if rest:
        flat[blocks * block :].mul_(by[blocks])


@lru_cache(maxsize=16)
def _on(device: torch.device) -> tuple[Tensor, Tensor]:
    """Constants there: the two levels of every byte of nf4 codes, and those of 8-bit codes."""
    levels = _fp32(NF4_LEVELS)
    pairs = torch.cartesian_prod(levels, levels)
    return pairs.to(device), dynamic_levels().to(device)

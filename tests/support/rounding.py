"""NumPy reference of the storage formats; csrc/adam/update.inl implements the same, bit for bit.

Split masters: `hi = (bits + 0x8000) >> 16` is the bf16 weight, `residual = bits - (hi << 16)` a
signed 16-bit integer, mod 2^32. Any NaN that arithmetic produces is stored as 0x7fc00000, since
payloads depend on the machine.

8 bits: a code is a small float relative to the largest magnitude of its block of MOMENT_BLOCK
elements, made of the upper bits of an fp32 number, eight steps per octave. Signed codes have a sign
bit and 127 magnitudes (16 octaves; smaller values become 0, code 0) and round to nearest. Unsigned
codes have 256 magnitudes (32 octaves), but no zero, since the update divides by their root, and
round stochastically in an update. Zeroed bytes have scale 0 and represent 0. A block with a value
that is not finite has scale NaN and codes 0, and decodes to NaN entirely.

Random bits are a hash of (key, index in the parameter), so results do not depend on how a parameter
is split.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from infinity.types import MOMENT_BLOCK

Fp32Array = npt.NDArray[np.float32]
U32Array = npt.NDArray[np.uint32]

NAN = np.uint32(0x7FC00000)
_INFINITY = np.uint32(0x7F800000)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_LEAST_NORMAL = np.uint32(0x00800000)
_SHIFT = 20  # of fp32 bits to a code: three bits of the mantissa stay
_LEAST = {True: (0x3F800000 >> _SHIFT) - 127, False: (0x3F800000 >> _SHIFT) - 255}  # by `signed`


def floats(tensor: torch.Tensor) -> Fp32Array:
    """Return the fp32 values: a view of an fp32 tensor, a widened copy of any other."""
    if tensor.dtype in (torch.bfloat16, torch.int16):
        high = tensor.view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
        return (high << np.uint32(16)).view(np.float32)
    if tensor.dtype == torch.float16:
        with np.errstate(all="ignore"):
            return tensor.numpy().astype(np.float32)
    values: Fp32Array = tensor.numpy()
    return values


def canonical(values: Fp32Array) -> Fp32Array:
    """Return the values with every NaN as 0x7fc00000."""
    return np.where(np.isnan(values), NAN, values.view(np.uint32)).view(np.float32)


def to_bf16(values: Fp32Array, random: U32Array | None = None) -> npt.NDArray[np.int16]:
    """Return bf16 bits: nearest, ties to even; or stochastic with 16 `random` bits each."""
    bits = values.view(np.uint32)
    added = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    rounded = (bits + (added if random is None else random)) >> np.uint32(16)
    return (
        np.where(np.isnan(values), NAN >> np.uint32(16), rounded).astype(np.uint16).view(np.int16)
    )


def to_fp16(values: Fp32Array) -> npt.NDArray[np.float16]:
    """Return fp16: nearest, ties to even; infinity from 65520 on; a NaN becomes 0x7e00."""
    with np.errstate(all="ignore"):
        bits = values.astype(np.float16).view(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7E00), bits).view(np.float16)


def split_master(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the fp32 master as (bf16 weight, int16 residual)."""
    bits = canonical(floats(master)).view(np.uint32)
    high = ((bits + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16)
    residual = bits.astype(np.uint16)  # bits - (high << 16), mod 2^16
    return (
        torch.from_numpy(high.view(np.int16)).view(torch.bfloat16),
        torch.from_numpy(residual.view(np.int16)),
    )


def join_master(weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """Return the fp32 master that was split into `weight` and `residual`."""
    high = weight.view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
    rest = residual.numpy().astype(np.int32).view(np.uint32)
    bits = (high << np.uint32(16)) + rest
    return torch.from_numpy(canonical(bits.view(np.float32)))


def random_bits(key: int, first: int, num_elements: int) -> U32Array:
    """Return 32 random bits for each element [first, first + num_elements) of a parameter.

    The higher a bit, the better it is mixed.
    """
    index = np.arange(first, first + num_elements, dtype=np.uint64)
    with np.errstate(over="ignore"):
        mixed = np.uint64(key) + np.uint64(0x9E3779B97F4A7C15) * (
            (index >> np.uint64(32)) + np.uint64(1)
        )
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed = mixed ^ (mixed >> np.uint64(31))
        low = (index.astype(np.uint32) ^ mixed.astype(np.uint32)) * np.uint32(0x7FEB352D)
        low = (low ^ (low >> np.uint32(15))) + (mixed >> np.uint64(32)).astype(np.uint32)
        bits: U32Array = low * np.uint32(0x846CA68B)
    return bits


def random_for_bf16(bits: U32Array, moment: int) -> U32Array:
    """Return 16 of the `random_bits` for the first (0) or the second moment (1)."""
    high = bits >> np.uint32(16)
    return high if moment else (bits ^ high) & np.uint32(0xFFFF)


def encode_8bit(
    values: Fp32Array, *, signed: bool, random: U32Array | None = None
) -> tuple[npt.NDArray[np.uint8], Fp32Array]:
    """Return (codes, scales) of `values`.

    Unsigned values, which may be neither negative nor -0, are rounded stochastically if `random`
    has 32 bits for each.
    """
    blocks = _blocks(values)
    largest = (blocks.view(np.uint32) & _MAGNITUDE).max(axis=1)
    scale = np.where(largest == 0, np.uint32(0), np.maximum(largest, _LEAST_NORMAL))
    scale = np.where(largest >= _INFINITY, NAN, scale).view(np.float32)
    with np.errstate(all="ignore"):
        inverse = np.where(scale > 0, np.float32(1) / scale, np.float32(0))
        finite = np.where(np.isnan(scale)[:, None], np.float32(0), blocks)
        bits = (finite * inverse[:, None]).view(np.uint32).astype(np.int64)
    if signed:
        sign = (bits >> 24) & 0x80
        codes = np.maximum(
            (((bits & 0x7FFFFFFF) + (1 << (_SHIFT - 1))) >> _SHIFT) - _LEAST[True], 0
        )
        return (codes | sign).astype(np.uint8).reshape(-1)[: values.size], scale
    rounding = 1 << (_SHIFT - 1) if random is None else _padded(random).astype(np.int64) >> 12
    codes = np.clip(((bits + rounding) >> _SHIFT) - _LEAST[False], 0, 255)
    return codes.astype(np.uint8).reshape(-1)[: values.size], scale


def decode_8bit(codes: npt.NDArray[np.uint8], scales: Fp32Array, *, signed: bool) -> Fp32Array:
    """Return the fp32 values of 8-bit codes."""
    wide = codes.astype(np.uint32)
    magnitude = wide & np.uint32(0x7F) if signed else wide
    bits = (magnitude + np.uint32(_LEAST[signed])) << np.uint32(_SHIFT)
    if signed:
        bits = np.where(magnitude == 0, np.uint32(0), bits)
        bits = bits | ((wide & np.uint32(0x80)) << np.uint32(24))
    with np.errstate(all="ignore"):
        values: Fp32Array = bits.view(np.float32) * np.repeat(scales, MOMENT_BLOCK)[: codes.size]
    return values


def _padded(values: npt.NDArray[np.uint32]) -> U32Array:
    """Return rows of MOMENT_BLOCK elements, the last one padded with zeros."""
    padded = np.zeros(-(-values.size // MOMENT_BLOCK) * MOMENT_BLOCK, dtype=np.uint32)
    padded[: values.size] = values
    return padded.reshape(-1, MOMENT_BLOCK)


def _blocks(values: Fp32Array) -> Fp32Array:
    return _padded(values.view(np.uint32)).view(np.float32)

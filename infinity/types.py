"""Types shared by all layers: tiers, kinds of state, number formats.

Frozen weights may be stored quantized (`FrozenFormat`), and are dequantized to compute.

A `MomentFormat` is the storage format of optimizer moments, in memory and on disk. Lossy formats
are opt-in. Block formats store one fp32 scale per `MOMENT_BLOCK` elements of a parameter, counted
from its first element, so that results depend neither on the units nor on the chunk size.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, StrEnum
from math import prod

PAGE = 4096


class Tier(StrEnum):
    """Storage tier, the fastest first."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"

    __hash__ = str.__hash__  # faster than Enum.__hash__, which is in Python

    def is_below(self, other: Tier) -> bool:
        """Return True if this tier is slower than `other`."""
        return TIERS.index(self) > TIERS.index(other)


TIERS = tuple(Tier)  # iteration over an enum is slow
OFF_DEVICE = (Tier.HOST, Tier.DISK)


class Kind(Enum):
    """Purpose of bytes of a unit."""

    WEIGHT = "weight"
    RESIDUAL = "residual"  # int16 difference between the fp32 master and its bf16 weight
    MASTER = "master"  # fp32 master of an fp16 weight
    MOMENT1 = "moment1"
    MOMENT2 = "moment2"
    MOMENT3 = "moment3"
    MOMENT4 = "moment4"
    MOMENT5 = "moment5"
    MOMENT6 = "moment6"
    GRADIENT = "gradient"

    __hash__ = object.__hash__


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


# Elements that share a scale. Parameters in a unit start at multiples of it.
MOMENT_BLOCK = 128


class MomentFormat(Enum):
    """Storage format of moments; arithmetic is always fp32."""

    FP32 = "fp32"
    BF16 = "bf16"  # rounded to nearest even: lossy, small updates vanish
    BF16_STOCHASTIC = "bf16_stochastic"  # stochastic rounding, reproducible: lossy
    # One byte per element, one scale per block, stochastic rounding of second moments: lossy.
    INT8 = "8bit"

    __hash__ = object.__hash__  # faster than Enum.__hash__, which is in Python

    @property
    def itemsize(self) -> int:
        """Bytes per element, without scales."""
        return {MomentFormat.FP32: 4, MomentFormat.INT8: 1}.get(self, 2)

    @property
    def is_exact(self) -> bool:
        """True if values are stored without rounding."""
        return self is MomentFormat.FP32

    def num_scales(self, num_elements: int) -> int:
        """Return the number of fp32 scales of `num_elements` values."""
        return -(-num_elements // MOMENT_BLOCK) if self is MomentFormat.INT8 else 0

    def nbytes(self, num_elements: int) -> int:
        """Return the bytes of `num_elements` values and their scales, without padding."""
        return num_elements * self.itemsize + 4 * self.num_scales(num_elements)


NF4_BLOCK = 64  # elements that share a scale
DOUBLE_BLOCK = 256  # scales that share a scale, if scales are quantized too
MXFP4_BLOCK = 32
FP8_BLOCK = 128  # rows and columns of a square that shares a scale
QUANTIZED_CHUNK = 1 << 22  # elements that are processed at a time; full blocks


class FrozenFormat(StrEnum):
    """Storage format of frozen matrices; all formats are lossy.

    A stack of matrices (experts) is stored matrix by matrix: matrices share no blocks, and the
    bytes of `stack[a:b]` are a range of those of the stack.

    Sources: nf4 is of Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", 2023,
    sections 2 and 3; mxfp4 of the OCP Microscaling Formats Specification, 1.0.
    """

    NF4 = "nf4"  # 4-bit elements: nearest of 16 levels; fp32 scale per block
    NF4_DOUBLE = "nf4_double"  # nf4 with 8-bit scales of blocks
    INT8 = "int8"  # 8-bit elements, fp32 scale per row
    MXFP4 = "mxfp4"  # e2m1 elements, e8m0 scales; only of stacks, whose matrices are transposed
    FP8 = "fp8"  # e4m3 elements, fp32 scale per square of 128 rows and columns

    def fits(self, shape: Sequence[int]) -> bool:
        """Return True for a shape that can be stored in this format."""
        if self is FrozenFormat.MXFP4:
            return len(shape) == 3 and shape[1] % MXFP4_BLOCK == 0
        return len(shape) in (2, 3)

    def parts(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the sizes in bytes of the codes of one matrix, and of its scales, in order.

        Scales belong to blocks, rows or squares. nf4_double has three parts of scales: their 8-bit
        codes, the fp32 scales of those, and the fp32 mean that is added.
        """
        rows, columns = shape
        numel = rows * columns
        if self is FrozenFormat.INT8:
            return numel, 4 * rows
        if self is FrozenFormat.MXFP4:
            return numel // 2, numel // MXFP4_BLOCK
        if self is FrozenFormat.FP8:
            return numel, 4 * -(-rows // FP8_BLOCK) * -(-columns // FP8_BLOCK)
        blocks = -(-numel // NF4_BLOCK)
        if self is FrozenFormat.NF4:
            return -(-numel // 2), 4 * blocks
        return -(-numel // 2), blocks, 4 * -(-blocks // DOUBLE_BLOCK), 4

    def byte_ranges(self, shape: Sequence[int]) -> list[slice]:
        """Return the byte range of each part of one matrix; ranges start at multiples of 4."""
        ranges = []
        end = 0
        for part in self.parts(shape):
            start = -(-end // 4) * 4
            end = start + part
            ranges.append(slice(start, end))
        return ranges

    def nbytes(self, shape: Sequence[int]) -> int:
        """Return the stored bytes of a matrix or stack, each matrix padded to a multiple of 4."""
        end: int = self.byte_ranges(shape[-2:])[-1].stop
        return prod(shape[:-2]) * (-(-end // 4) * 4)

    @staticmethod
    def work_bytes(numel: int) -> int:
        """Return the bytes of temporaries on the device to dequantize a matrix."""
        return 7 * min(numel, QUANTIZED_CHUNK)


# Formats of published models: the bytes of a file are stored unchanged.
NATIVE = (FrozenFormat.MXFP4, FrozenFormat.FP8)


def can_store(form: str, shape: Sequence[int], *, trained: bool) -> bool:
    """Return True if a parameter may be stored in the `FrozenFormat` of this name."""
    return not trained and form in {*FrozenFormat} and FrozenFormat(form).fits(shape)

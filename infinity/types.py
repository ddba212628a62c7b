"""Types shared by all layers: tiers, kinds of state, number formats, pages.

Frozen weights may be stored quantized, in bitsandbytes' formats, and are dequantized to compute.

A moment format says how one fp32 moment per parameter rests in memory and on disk. Lossy formats
are opt-in. Block formats keep one fp32 scale per `MOMENT_BLOCK` elements of a parameter, counted
from its first element, so that neither the unit cut nor the chunk size shows in the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, StrEnum
from math import prod

PAGE = 4096


class Tier(StrEnum):
    """Where bytes rest; the fastest first."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"

    __hash__ = str.__hash__  # plans are hashed by the thousand, and Enum's own is in Python

    def is_below(self, other: Tier) -> bool:
        """Whether it is slower than `other`."""
        return TIERS.index(self) > TIERS.index(other)


TIERS = tuple(Tier)  # an enum is walked in Python
OFF_DEVICE = (Tier.HOST, Tier.DISK)


class Kind(Enum):
    """The purpose of bytes of a unit."""

    WEIGHT = "weight"
    RESIDUAL = "residual"  # what a bf16 weight lacks to its fp32 master
    MASTER = "master"  # the fp32 master itself, beside an fp16 weight
    MOMENT1 = "moment1"
    MOMENT2 = "moment2"
    MOMENT3 = "moment3"
    MOMENT4 = "moment4"
    MOMENT5 = "moment5"
    MOMENT6 = "moment6"
    GRADIENT = "gradient"

    __hash__ = object.__hash__


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


# Elements that share a scale. Parameters start at multiples of it inside a unit.
MOMENT_BLOCK = 128
_SCALE_BYTES = 4


class MomentFormat(Enum):
    """How moments are stored; arithmetic is fp32 in all of them."""

    FP32 = "fp32"
    BF16 = "bf16"  # rounded to nearest even: lossy, and deaf to changes smaller than a step
    BF16_STOCHASTIC = "bf16_stochastic"  # rounded up or down at random, reproducibly: lossy
    INT8 = "8bit"  # one byte per element and one scale per block, second moments at random: lossy

    __hash__ = object.__hash__  # as of `Tier`: plans ask by the thousand

    @property
    def itemsize(self) -> int:
        """Bytes per element, scales not counted."""
        return {MomentFormat.FP32: 4, MomentFormat.INT8: 1}.get(self, 2)

    @property
    def is_exact(self) -> bool:
        """Whether nothing is rounded away."""
        return self is MomentFormat.FP32

    def num_scales(self, num_elements: int) -> int:
        """fp32 scales that go with `num_elements` values."""
        return -(-num_elements // MOMENT_BLOCK) if self is MomentFormat.INT8 else 0

    def nbytes(self, num_elements: int) -> int:
        """Bytes of `num_elements` values followed by their scales, without padding."""
        values = num_elements * self.itemsize
        return values + self.num_scales(num_elements) * _SCALE_BYTES


NF4_BLOCK = 64  # elements that share a scale
DOUBLE_BLOCK = 256  # scales that share a scale, where these are quantised too
MXFP4_BLOCK = 32
FP8_BLOCK = 128  # rows and columns of the squares that share a scale
QUANTISED_PIECE = 1 << 22  # elements that are quantised, or dequantised, at a time; whole blocks


class FrozenFormat(StrEnum):
    """Number format of frozen matrices at rest; all of them are lossy.

    A stack of matrices (experts) is stored matrix by matrix: no block is shared, and the bytes of
    `stack[a:b]` are a range of those of the stack.

    nf4 is of Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", 2023, sections 2, 3;
    mxfp4 of the OCP Microscaling Formats Specification, 1.0.
    """

    NF4 = "nf4"  # 4 bits an element: the nearest of 16 levels, of its block's largest magnitude
    NF4_DOUBLE = "nf4_double"  # and the scales of blocks are 8-bit themselves
    INT8 = "int8"  # 127ths of the row's largest magnitude
    MXFP4 = "mxfp4"  # e2m1 elements, e8m0 scales; of stacks whose matrices are stored transposed
    FP8 = "fp8"  # e4m3 elements, an fp32 scale for each square of 128 rows and columns

    def fits(self, shape: Sequence[int]) -> bool:
        """Return True for a shape that can be stored in this format."""
        if self is FrozenFormat.MXFP4:
            return len(shape) == 3 and shape[1] % MXFP4_BLOCK == 0
        return len(shape) in (2, 3)

    def parts(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the bytes of the codes of one matrix, and of all that scales them, in order.

        Scales of blocks, rows or squares; of nf4_double their codes, the fp32 scales of those, and
        the fp32 mean that is added.
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
        """Where the parts of one matrix rest among its bytes: each from a multiple of 4 on."""
        found, end = [], 0
        for part in self.parts(shape):
            start = -(-end // 4) * 4
            end = start + part
            found.append(slice(start, end))
        return found

    def nbytes(self, shape: Sequence[int]) -> int:
        """Return the bytes at rest of a matrix or a stack; of each matrix a multiple of 4."""
        end: int = self.byte_ranges(shape[-2:])[-1].stop
        return prod(shape[:-2]) * (-(-end // 4) * 4)

    @staticmethod
    def work_bytes(numel: int) -> int:
        """Bytes that the device needs for a moment to dequantise a matrix: indices, fp32 values."""
        return 7 * min(numel, QUANTISED_PIECE)


# Formats that models are published in: their bytes in a file are kept.
NATIVE = (FrozenFormat.MXFP4, FrozenFormat.FP8)


def can_store(form: str, shape: Sequence[int], *, trained: bool) -> bool:
    """Return True if a parameter may be stored in the `FrozenFormat` of this name."""
    return not trained and form in {*FrozenFormat} and FrozenFormat(form).fits(shape)

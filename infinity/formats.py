"""How state is stored: names of number formats and their sizes; shared by plans and kernels.

Frozen weights may rest quantised, in bitsandbytes' formats, and are dequantised where they compute.

A moment format says how one fp32 moment per parameter rests in memory and on disk. Lossy formats
are opt-in. Block formats keep one fp32 scale per `MOMENT_BLOCK` elements of a parameter, counted
from its first element, so that neither the unit cut nor the chunk size shows in the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, StrEnum
from math import prod

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
QUANTISED_PIECE = 1 << 22  # elements that are quantised, or dequantised, at a time; whole blocks


class FrozenFormat(StrEnum):
    """How a frozen matrix rests; all of them are lossy. The values are those of bitsandbytes.

    nf4 is of Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", 2023, sections 2, 3.
    """

    NF4 = "nf4"  # 4 bits an element: the nearest of 16 levels, of its block's largest magnitude
    NF4_DOUBLE = "nf4_double"  # and the scales of blocks are 8-bit themselves
    INT8 = "int8"  # 127ths of the row's largest magnitude

    def parts(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Bytes of the codes of a matrix, and of each thing by which they are scaled, in order.

        fp32 scales of blocks or rows; of nf4_double their codes, the fp32 scales of those, and the
        fp32 mean that is added.
        """
        numel = prod(shape)
        if self is FrozenFormat.INT8:
            return numel, 4 * shape[0]
        blocks = -(-numel // NF4_BLOCK)
        if self is FrozenFormat.NF4:
            return -(-numel // 2), 4 * blocks
        return -(-numel // 2), blocks, 4 * -(-blocks // DOUBLE_BLOCK), 4

    def places(self, shape: Sequence[int]) -> list[slice]:
        """Where a matrix's parts rest among its bytes: each from a multiple of 4 on."""
        found, end = [], 0
        for part in self.parts(shape):
            start = -(-end // 4) * 4
            end = start + part
            found.append(slice(start, end))
        return found

    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes at rest of a matrix, a multiple of 4."""
        end: int = self.places(shape)[-1].stop
        return -(-end // 4) * 4

    @staticmethod
    def work_bytes(numel: int) -> int:
        """Bytes that the device needs for a moment to dequantise a matrix: indices, fp32 values."""
        return 7 * min(numel, QUANTISED_PIECE)

"""How state is stored: names of number formats and their sizes; shared by plans and kernels.

A moment format says how one fp32 moment per parameter rests in memory and on disk. Lossy formats
are opt-in. Block formats keep one fp32 scale per `MOMENT_BLOCK` elements of a parameter, counted
from its first element, so that neither the unit cut nor the chunk size shows in the numbers.
"""

from __future__ import annotations

from enum import Enum

# Elements that share a scale. Parameters start at multiples of it inside a unit.
MOMENT_BLOCK = 128
_SCALE_BYTES = 4


class MomentFormat(Enum):
    """How moments are stored; arithmetic is fp32 in all of them."""

    FP32 = "fp32"
    BF16 = "bf16"  # rounded to nearest even: lossy, and deaf to changes smaller than a step
    BF16_STOCHASTIC = "bf16_stochastic"  # rounded up or down at random, reproducibly: lossy
    INT8 = "8bit"  # one byte per element and one scale per block, second moments at random: lossy

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

"""`Moment`: the stored bytes of one moment of a range of elements, and how they are cut."""

from __future__ import annotations

from typing import NamedTuple

import torch

from infinity.errors import ConfigError
from infinity.formats import MOMENT_BLOCK, MomentFormat

VALUE_DTYPES = {
    MomentFormat.FP32: torch.float32,
    MomentFormat.BF16: torch.bfloat16,
    MomentFormat.BF16_STOCHASTIC: torch.bfloat16,
    MomentFormat.INT8: torch.uint8,
}


class Moment(NamedTuple):
    """One moment of n elements: `values` 1-D, and `scales` (fp32, one per block) for INT8 only."""

    values: torch.Tensor
    scales: torch.Tensor | None = None
    format: MomentFormat = MomentFormat.FP32

    @staticmethod
    def zeros(
        num_elements: int, format: MomentFormat, device: torch.device | str = "cpu"
    ) -> Moment:
        """Return a fresh moment; zeroed bytes mean 0 in every format."""
        values = torch.zeros(num_elements, dtype=VALUE_DTYPES[format], device=device)
        if format is not MomentFormat.INT8:
            return Moment(values, None, format)
        scales = torch.zeros(format.num_scales(num_elements), device=device)
        return Moment(values, scales, format)

    def part(self, first: int, end: int) -> Moment:
        """Return the elements [first, end) as views; INT8 parts begin at whole blocks."""
        if self.scales is None:
            return self._replace(values=self.values[first:end])
        if first % MOMENT_BLOCK:
            raise ConfigError(
                f"an 8-bit moment is cut at element {first}",
                because=f"{MOMENT_BLOCK} elements share a scale",
                remedy=f"a multiple of {MOMENT_BLOCK}",
            )
        scales = self.scales[first // MOMENT_BLOCK : -(-end // MOMENT_BLOCK)]
        return self._replace(values=self.values[first:end], scales=scales)

    def clone(self) -> Moment:
        """Return a copy with memory of its own."""
        scales = None if self.scales is None else self.scales.clone()
        return Moment(self.values.clone(), scales, self.format)

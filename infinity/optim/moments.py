"""Storage dtypes of weights, masters and moments; `Moment`; and views of a chunk's bytes as these.

Maps names to torch dtypes: `plan/layout.py` defines the names of precisions and `types.py` those of
moment formats, both without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from infinity.errors import ConfigError
from infinity.plan.layout import PRECISIONS, STATE_DTYPES, Precision
from infinity.types import MOMENT_BLOCK, Kind, MomentFormat

# Weight dtype by name of the precision.
COMPUTE_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, precision.dtype) for name, precision in PRECISIONS.items()
}
# Dtype of residuals and masters, by kind; and by weight dtype, None for fp32 weights.
KIND_DTYPES: dict[Kind, torch.dtype] = {
    kind: getattr(torch, name) for kind, name in STATE_DTYPES.items()
}
MASTER_STATE_DTYPES: dict[torch.dtype, torch.dtype | None] = {
    COMPUTE_DTYPES[p.name]: None if p.master_kind is None else KIND_DTYPES[p.master_kind]
    for p in PRECISIONS.values()
}
VALUE_DTYPES = {
    MomentFormat.FP32: torch.float32,
    MomentFormat.BF16: torch.bfloat16,
    MomentFormat.BF16_STOCHASTIC: torch.bfloat16,
    MomentFormat.INT8: torch.uint8,
}


class Moment(NamedTuple):
    """One moment of n elements: `values` 1-D, and `scales` (fp32, one per block) for INT8 only."""

    values: Tensor
    scales: Tensor | None = None
    format: MomentFormat = MomentFormat.FP32

    @staticmethod
    def zeros(
        num_elements: int, format: MomentFormat, device: torch.device | str = "cpu"
    ) -> Moment:
        """Return a fresh moment; zeroed bytes mean 0 in every format."""
        values = torch.zeros(num_elements, dtype=VALUE_DTYPES[format], device=device)
        if format is not MomentFormat.INT8:
            return Moment(values, None, format)
        scales = torch.zeros(format.num_scales(num_elements), dtype=torch.float32, device=device)
        return Moment(values, scales, format)

    def part(self, first: int, end: int) -> Moment:
        """Return views of the elements [first, end); INT8 slices begin at a block boundary."""
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
        """Return a copy that shares no memory."""
        scales = None if self.scales is None else self.scales.clone()
        return Moment(self.values.clone(), scales, self.format)


def master_views(
    views: Mapping[Kind, Tensor], precision: Precision
) -> tuple[Tensor, Tensor | None]:
    """Return the weights, and the residuals or masters or None, as views of a chunk (uint8)."""
    weight = views[Kind.WEIGHT].view(COMPUTE_DTYPES[precision.name])
    kind = precision.master_kind
    return weight, None if kind is None else views[kind].view(KIND_DTYPES[kind])


def moment_view(part: Tensor, num_elements: int, kind: MomentFormat) -> Moment:
    """Return the moment stored in `part` (uint8: values, scales, padding), as views."""
    nbytes = num_elements * kind.itemsize
    values = part[:nbytes].view(VALUE_DTYPES[kind])
    if not kind.num_scales(num_elements):
        return Moment(values, None, kind)
    scales = part[nbytes : kind.nbytes(num_elements)].view(torch.float32)
    return Moment(values, scales, kind)

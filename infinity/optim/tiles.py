"""Tiles: parts of parameters with all their state beside them in host memory, and who updates them.

The sweep cuts what it holds into tiles, and an `Updater` does one step on each: `built_in.py` with
the kernels, `guest.py` with any optimizer of torch's. Neither knows units, tiers or files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from infinity.formats import MomentFormat
from infinity.optim.cpu import CpuKernels
from infinity.optim.moments import VALUE_DTYPES, Moment
from infinity.plan.layout import REST_DTYPES, Kind, Precision


@dataclass(frozen=True, slots=True)
class Tile:
    """The elements `first` to `first + weight.numel()` of one flat parameter, and their update.

    `weight` is fp32 with `rest` None, bf16 with an int16 residual, or fp16 with the fp32 master;
    `gradient` is fp32, or of the weight's dtype. All are 1-D views of host memory, and are updated
    in place. `parameter` is the parameter's index, `shape` its own whole shape. `hyper` is what
    `OffloadedOptimizer.hypers` captured, and `step` counts this update from 1. Tiles of one
    parameter and step come in order.
    """

    parameter: int
    shape: tuple[int, ...]
    first: int
    weight: Tensor
    rest: Tensor | None
    moments: tuple[Moment, ...]
    gradient: Tensor
    hyper: Any
    step: int


class Updater(Protocol):
    """Does one step of an update rule on tiles."""

    def update(self, tiles: Sequence[Tile], grad_scale: float) -> None:
        """Update tiles in place; gradients are multiplied by the scale first."""

    def begin(self, hypers: Mapping[int, Any], steps: Mapping[int, int]) -> None:
        """A step of these parameters is committed: their tiles will come."""

    def kept(self) -> dict[int, dict[str, Any]]:
        """What is kept of each parameter beside its moments, as data that can be saved."""

    def keep(self, saved: Mapping[int, Mapping[str, Any]]) -> None:
        """Go on with what `kept` gave."""

    def state_of(
        self,
        parameter: int,
        hyper: Any,
        moments: Sequence[Moment],
        shape: tuple[int, ...],
        step: int,
    ) -> dict[str, Any]:
        """What is kept of a whole parameter, by torch's names, as fresh tensors."""


class Rule(Protocol):
    """An update rule as the engine sees it: what it keeps, and who does it.

    `moments` has a format for each moment that `reserve` found necessary. A `whole` rule needs
    whole parameters as tiles.
    """

    name: str
    moments: tuple[MomentFormat, ...]
    whole: bool
    notes: tuple[str, ...]

    def capture(self, group: Mapping[str, Any]) -> Any:
        """What a group says now; raises `ConfigError` if that cannot be."""

    def reserve(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Set `moments` for these groups; later ones may not need more."""

    def tile_elements(self, largest: int) -> int:
        """Elements of the largest tile that is copied, by the size of the largest parameter."""

    def initial(self, captured: Any) -> tuple[float, ...]:
        """What fresh moments are filled with; empty for zeros."""

    def updater(
        self, kernels: CpuKernels, names: Sequence[str], largest: int, seed: int
    ) -> Updater:
        """What does the steps. `names` are those of the parameters by index."""


def master_in(views: Mapping[Kind, Tensor], precision: Precision) -> tuple[Tensor, Tensor | None]:
    """The weights, and what stands beside them, in a chunk's parts (uint8), as views."""
    weight = views[Kind.WEIGHT].view(getattr(torch, precision.dtype))
    rest = precision.rest_kind
    if rest is None:
        return weight, None
    return weight, views[rest].view(getattr(torch, REST_DTYPES[rest]))


def moment_in(part: Tensor, num_elements: int, kind: MomentFormat) -> Moment:
    """The moment that a chunk's part (uint8: values, scales, padding) holds, as views of it."""
    nbytes = num_elements * kind.itemsize
    values = part[:nbytes].view(VALUE_DTYPES[kind])
    if not kind.num_scales(num_elements):
        return Moment(values, None, kind)
    scales = part[nbytes : kind.nbytes(num_elements)].view(torch.float32)
    return Moment(values, scales, kind)

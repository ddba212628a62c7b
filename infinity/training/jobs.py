"""What one sweep is to do, and its parts as the optimizer sees them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from infinity.memory.device import Event
from infinity.memory.homeward import Copy
from infinity.optim.tiles import Tile, master_in, moment_in
from infinity.plan.layout import Kind, UnitLayout
from infinity.plan.plan import Plan


@dataclass(frozen=True)
class SweepJob:
    """Everything one sweep depends on; captured at `step()`.

    `hypers` and `steps` are by parameter index and name exactly the parameters to update;
    `steps` counts this update, from 1. `computed` is the end of the compute that made the
    gradients, and read the weights that are about to change. `landing` has the gradients' copies
    that are still on their way to RAM, by unit; the sweep takes them out as it waits for them.
    """

    units: tuple[int, ...]
    hypers: Mapping[int, Any]
    steps: Mapping[int, int]
    grad_scale: float
    computed: Event
    landing: dict[int, list[Copy]] = field(default_factory=dict)
    document: bytes | None = None  # of a durable run: what a commit of this step holds besides


def tiles_of(
    job: SweepJob,
    plan: Plan,
    layout: UnitLayout,
    chunk: int,
    views: Mapping[Kind, Tensor],
    gradient_dtype: torch.dtype,
) -> list[Tile]:
    """The parts of parameters that lie in a chunk and have an update.

    `views` (uint8) hold every state kind of exactly this chunk, and its gradient.
    """
    precision = plan.precision
    start, count = layout.chunk(chunk, plan.chunk_elements)
    weights, rests = master_in(views, precision)
    gradients = views[Kind.GRADIENT].view(gradient_dtype)
    moments = [
        moment_in(views[kind], count, precision.format_of(kind)) for kind in precision.moment_kinds
    ]
    tiles = []
    for segment in layout.trained_segments:
        first, last = segment.within(start, count)
        if first >= last or segment.parameter not in job.hypers:
            continue
        tiles.append(
            Tile(
                parameter=segment.parameter,
                shape=segment.shape,
                first=start + first - segment.offset,
                weight=weights[first:last],
                rest=None if rests is None else rests[first:last],
                moments=tuple(moment.part(first, last) for moment in moments),
                gradient=gradients[first:last],
                hyper=job.hypers[segment.parameter],
                step=job.steps[segment.parameter],
            )
        )
    return tiles

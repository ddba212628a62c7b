"""Inputs of an optimizer pass, and the tiles of a chunk that it updates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from infinity.offload.gradient_copies import Copy
from infinity.optim.moments import master_views, moment_view
from infinity.optim.update import Tile
from infinity.plan.layout import UnitLayout
from infinity.plan.plan import Plan
from infinity.storage.device import Event
from infinity.types import Kind


@dataclass(frozen=True)
class UpdateJob:
    """Everything that an optimizer pass depends on; captured at `step()`.

    `params_by_index` and `steps` have exactly the parameters to update, by index; `steps` counts
    this update, from 1. `computed` is the end of the compute that produced the gradients and read
    the weights that will change. `copies` has the copies of gradients to RAM in flight, by unit;
    the optimizer pass removes them as it waits for them.
    """

    units: tuple[int, ...]
    params_by_index: Mapping[int, Any]
    steps: Mapping[int, int]
    grad_scale: float
    computed: Event
    copies: dict[int, list[Copy]] = field(default_factory=dict)
    document: Mapping[str, Any] | None = None  # in the commit of a durable run


def tiles_of(
    job: UpdateJob,
    plan: Plan,
    layout: UnitLayout,
    chunks: range,
    views: Mapping[Kind, Tensor],
    gradient_dtype: torch.dtype,
) -> list[Tile]:
    """Return the tiles of chunks: ranges of the parameters that the job updates.

    `views` (uint8) have every state kind, and the gradient, of exactly these `chunks`: one, or
    several if they hold nothing but values (`Precision.is_flat`).
    """
    precision = plan.precision_of(layout)
    start, _ = layout.chunk(chunks.start, plan.chunk_elements)
    count = sum(layout.chunk(chunks.stop - 1, plan.chunk_elements)) - start
    weights, residuals = master_views(views, precision)
    gradients = views[Kind.GRADIENT].view(gradient_dtype)
    moments = {
        kind: moment_view(
            views[kind], precision.num_with_moment(kind, count), precision.format_of(kind)
        )
        for kind in precision.moment_kinds
    }
    tiles = []
    for segment in layout.trained_segments:
        first, last = segment.within(start, count)
        if first >= last or segment.parameter not in job.params_by_index:
            continue
        tiles.append(
            Tile(
                parameter=segment.parameter,
                shape=segment.shape,
                first=start + first - segment.offset + segment.first_element,
                weight=weights[first:last],
                master_state=None if residuals is None else residuals[first:last],
                moments=tuple(m.part(first, last) for k, m in moments.items() if segment.keeps(k)),
                gradient=gradients[first:last],
                rule_params=job.params_by_index[segment.parameter],
                step=job.steps[segment.parameter],
            )
        )
    return tiles

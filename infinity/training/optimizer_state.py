"""What the optimizer keeps of a parameter, read from and written to any home."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from infinity.errors import ConfigError
from infinity.memory.state import StateStore
from infinity.optim.built_in import KernelUpdater
from infinity.optim.cpu import CpuKernels
from infinity.optim.moments import Moment
from infinity.optim.tiles import Updater, moment_in
from infinity.plan.layout import Kind, Segment, UnitLayout


def read_state(
    store: StateStore, updater: Updater, parameter: int, hyper: Any, steps: Sequence[int]
) -> dict[str, Any]:
    """The state of one parameter, by torch's names; moments as fresh fp32 tensors of its shape.

    No update may be owed. `steps` counts updates by parameter index. Raises `ConfigError` if the
    parameter has no state.
    """
    for layout in store.plan.units:
        for segment in layout.segments:
            if segment.parameter == parameter and segment.trained:
                kinds = store.plan.precision.moment_kinds
                moments = [_moment(store, layout, segment, kind) for kind in kinds]
                shape, step = segment.shape, steps[parameter]
                return updater.state_of(parameter, hyper, moments, shape, step)
    raise ConfigError("this parameter is frozen and has no optimizer state")


def _moment(store: StateStore, layout: UnitLayout, segment: Segment, kind: Kind) -> Moment:
    """A copy of the whole moment of one parameter, its chunks put together."""
    plan, number_format = store.plan, store.plan.precision.format_of(kind)
    flat = store.read(layout.index, kind)
    values, scales = [], []
    for index, (start, count) in enumerate(layout.chunks(plan.chunk_elements)):
        first, last = segment.within(start, count)
        if first < last:
            chunk = moment_in(flat[plan.part(layout, kind, index)], count, number_format)
            part = chunk.part(first, last)
            values.append(part.values)
            scales += [] if part.scales is None else [part.scales]
    if not values:
        return Moment.zeros(0, number_format)
    return Moment(torch.cat(values), torch.cat(scales) if scales else None, number_format)


def write_state(
    store: StateStore,
    updater: Updater,
    kernels: CpuKernels,
    place: tuple[UnitLayout, Segment],
    hyper: Any,
    name: str,
    value: Tensor,
) -> None:
    """Replace one moment of a parameter, by torch's name; `value` has its shape.

    No update may be owed. Raises `ConfigError` for a name that is no moment there.
    """
    layout, segment = place
    names = updater.moment_names(segment.parameter, hyper) if _is_ours(updater) else ()
    if name not in names:
        raise ConfigError(
            f"{segment.name!r} has no optimizer state {name!r} that can be written",
            because="optimizers of torch's keep their state to themselves"
            if not _is_ours(updater)
            else None,
            remedy=f"one of {', '.join(names)}" if names else None,
        )
    index = names.index(name)
    kind, plan = store.plan.precision.moment_kinds[index], store.plan
    number_format, signed = plan.precision.format_of(kind), not hyper.unsigned[index]
    flat = store.read(layout.index, kind)
    values = value.detach().to("cpu", torch.float32).contiguous().view(-1)
    done = 0
    for chunk, (start, count) in enumerate(layout.chunks(plan.chunk_elements)):
        first, last = segment.within(start, count)
        if first < last:
            part = flat[plan.part(layout, kind, chunk)]
            moment = moment_in(part, count, number_format).part(first, last)
            kernels.encode(values[done : done + last - first], moment, signed=signed)
            done += last - first
    store.write(layout.index, kind, flat)


def _is_ours(updater: Updater) -> TypeGuard[KernelUpdater]:
    return isinstance(updater, KernelUpdater)

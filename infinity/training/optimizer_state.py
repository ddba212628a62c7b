"""Optimizer state of a parameter, read from and written to any tier."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from infinity.checkpoint.plain import decode, encode
from infinity.errors import ConfigError
from infinity.offload.state import StateStore
from infinity.optim.cpu import CpuKernels
from infinity.optim.moments import Moment, moment_view
from infinity.optim.update import KernelUpdater, Updater
from infinity.plan.layout import Segment, UnitLayout
from infinity.plan.plan import Plan
from infinity.types import Kind


def read_state(
    store: StateStore, updater: Updater, parameter: int, rule_params: Any, steps: Sequence[int]
) -> dict[str, Any]:
    """Return the state of one parameter by torch's names, moments as new fp32 tensors of its shape.

    Collective; no update may be pending. `steps` counts updates by parameter index. Raises
    `ConfigError` if the parameter has no state.
    """
    states: list[dict[str, Any]] = []
    for layout in store.plan.units:
        for segment in layout.segments:
            if parameter in (segment.parameter, segment.origin) and segment.trained:
                kinds = filter(segment.keeps, store.plan.precision.moment_kinds)
                moments = [_moment(store, layout, segment, kind) for kind in kinds]
                index, shape = segment.parameter, segment.shape
                share_non_moment_state(store, updater, {index})
                states.append(updater.state_of(index, rule_params, moments, shape, steps[index]))
    if len(states) > 1:  # a split stack: one state for each range of rows
        return {
            name: torch.cat([state[name] for state in states])
            if isinstance(value, Tensor) and value.dim()
            else value
            for name, value in states[0].items()
        }
    if states:
        return states[0]
    raise ConfigError("this parameter is frozen and has no optimizer state")


def share_non_moment_state(
    store: StateStore, updater: Updater, parameters: Collection[int]
) -> None:
    """Share the non-moment state of these parameters between ranks.

    A rank has that of the parameters of which it updates a shard; the rank with the last shard
    provides the value.
    """
    ranks, plan = store.ranks, store.plan
    if ranks.count == 1 or isinstance(updater, KernelUpdater):  # it has that of all parameters
        return
    doing = "reports the state of the optimizer"
    local = {s.parameter for u in plan.local_units for s in u.trained_segments}.intersection(
        parameters
    )
    states = updater.extra_state()
    with ranks.propagate_errors(doing):
        encoded = encode({i: states[i] for i in local & states.keys()}, "the optimizer's state")
    ranks.synchronize(doing)
    for rank_states in ranks.all_gather_object(encoded):  # in the order of shards
        states |= decode(rank_states)
    updater.load_extra_state(states)


def _moment(store: StateStore, layout: UnitLayout, segment: Segment, kind: Kind) -> Moment:
    """Return a copy of the full moment of one parameter, concatenated from its chunks."""
    number_format = store.plan.precision.format_of(kind)
    values, scales = [], []
    for moment in _moment_slices(store.plan, layout, segment, kind, store.read(layout.index, kind)):
        values.append(moment.values)
        scales += [] if moment.scales is None else [moment.scales]
    if not values:
        return Moment.zeros(0, number_format)
    return Moment(torch.cat(values), torch.cat(scales) if scales else None, number_format)


def _moment_slices(
    plan: Plan, layout: UnitLayout, segment: Segment, kind: Kind, flat: Tensor
) -> Iterator[Moment]:
    """Yield a parameter's slice of a moment in each chunk; `flat` is from `StateStore.read`."""
    for rank, shard_bytes in enumerate(flat.view(layout.shards, -1)):
        shard = layout.of_shard(rank)
        for shard_segment in (s for s in shard.segments if s.parameter == segment.parameter):
            for index, (start, count) in enumerate(shard.chunks(plan.chunk_elements)):
                first, last = shard_segment.within(start, count)
                if first < last:
                    state_bytes = shard_bytes[plan.part(shard, kind, index)]
                    num_elements = plan.precision_of(shard).num_with_moment(kind, count)
                    moment = moment_view(state_bytes, num_elements, plan.precision.format_of(kind))
                    yield moment.part(first, last)


def write_state(
    store: StateStore,
    updater: Updater,
    kernels: CpuKernels,
    location: tuple[UnitLayout, Segment],
    rule_params: Any,
    name: str,
    value: Tensor,
) -> None:
    """Replace one moment of a parameter, by torch's name; `value` has the parameter's shape.

    No update may be pending. Raises `ConfigError` if the parameter has no such moment.
    """
    layout, segment = location
    names: tuple[str, ...] = ()
    if isinstance(updater, KernelUpdater):
        names = updater.moment_names(segment.parameter, rule_params)
    if name not in names:
        raise ConfigError(
            f"{segment.name!r} has no optimizer state {name!r} that can be written",
            because=None
            if isinstance(updater, KernelUpdater)
            else "the state of adapted torch optimizers is not accessible",
            remedy=f"one of {', '.join(names)}" if names else None,
        )
    index = names.index(name)
    kind, plan = store.plan.precision.moment_kinds[index], store.plan
    signed, flat = not rule_params.nonnegative[index], store.read(layout.index, kind)
    values = value.detach().to("cpu", torch.float32).contiguous().view(-1)
    done = 0
    for moment in _moment_slices(plan, layout, segment, kind, flat):
        count = moment.values.numel()
        kernels.encode(values[done : done + count], moment, signed=signed)
        done += count
    store.ranks.synchronize_write(f"{name} of {segment.name!r}", flat)
    store.write(layout.index, kind, flat)

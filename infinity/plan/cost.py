"""Predicted duration of a step: forecast bytes, machine rates, and which resources overlap.

[Note: schedule]
A step is a sequence of phases: forward and backward of each micro-batch. Within a phase all
resources work concurrently and the slowest one determines its duration; phases do not overlap. The
optimizer pass of the previous step runs during the first forward. On a CPU device update and
compute share the cores, so their times add up; on other devices the update runs concurrently. On a
CPU device disk traffic takes compute time as well: for system calls and interrupts, and on a
virtual machine for copies by the hypervisor, which run on the same cores (0.27 s of a core per GB
were measured on one). The optimizer pass updates one unit after the other, so updates by the CPU
and updates streamed through the device wait for one another.

In the first forward two parts cannot overlap the pass. Compute cannot begin before the first unit
has been updated. When the last unit has been updated, its compute is still to be done, and head and
loss of all tokens. So the phase is predicted to last at least as long as the first unit's share of
the pass followed by all compute, and as the pass followed by the compute after it.

[Note: ranks]
With several ranks all times are those of one rank: it gets its share of the node's disk and CPU,
and has a link to its GPU of its own. Data from other ranks passes the link, another resource that
works concurrently; the rates include the contention of all links in use at the same time. Between
nodes, a ring of all-gathers transfers all data into a node once, and an all-to-all transfers what
the node's ranks receive from ranks of other nodes: `Rates.of_rank` derives the rate of a rank from
the rate into a node.

[Note: compute]
A token costs 2 FLOP per matrix element forward and 4 backward (2 more where blocks are recomputed;
2 less for frozen elements, where only inputs have gradients); lookup tables cost none. With few
tokens memory is the limit instead: each weight is read once per pass. In backward a gradient is
written by autograd, read, added to the sum or stored at its tier, and squared. The operations
between products (norms, activation functions, residual sums, copies of heads) pass over memory as
well: counted for a GPT block of width h, 27 * h values per token forward, where the inputs and
outputs of its matrices are 16 * h values; so 27/16 passes over these forward, twice as many
backward, and one more over the outputs (9/16) for biases. They have a rate of their own, measured
on such a block (that of memory if it was not measured). Causal attention in a block of width h
costs 2 * context * h FLOP per token forward and 5 * context * h backward, which recomputes it; its
rate is that of a fused kernel at contexts of about a thousand tokens. The part of its cost that
does not depend on the context belongs to the operations between products. Cross entropy converts
each logit to fp32 and reads and writes it several times: one rate, half of the time forward.
Quantized weights are dequantized once per pass: codes are read and converted to indices, fp32
values, scaled values and weights.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import cached_property

from infinity.config.schema import Recompute
from infinity.plan.activations import attention_width, passes, recomputed, sharing
from infinity.plan.forecast import PhaseBytes, distinct_phases, forecast_phases, pass_disk_bytes
from infinity.plan.layout import Segment, UnitLayout
from infinity.plan.plan import (
    BETWEEN_HOSTS,
    LINKS,
    Plan,
    UpdatePlace,
    streamed_bytes,
    streamed_calls,
    update_place,
)
from infinity.plan.rates import PASSES_BACKWARD, PASSES_FORWARD, Rates
from infinity.types import Tier

# Host time of one copy or kernel on a device: Python that competes with other threads, CUDA calls,
# recording of and waiting for events. 170 us were measured with an H100, including the recording of
# a trace.
CALL_S = 120e-6
MAX_CPU_SHARE, _TINY = 0.9, 1e-12  # largest CPU share of a streamed unit: some of it is streamed
USUAL_CONTEXT = 2048  # tokens per sample, if not given
HOST_FLOPS = 0.5e12  # bf16 FLOP per second of a host with a separate device: assumed, not measured
DEQUANTIZE_BYTES = 22  # per element: 2 + 2 for indices, 4 + 8 + 4 for fp32, 2 for weights
SPLIT_UPDATE_BYTES = 26  # per parameter: 12 of state read and written, 2 of gradient read


@dataclass(frozen=True, slots=True)
class StepWork:
    """Work of one step: `tokens` of a micro-batch, recomputation and slices.

    The first `recompute` blocks run again in backward; blocks run in `slices`. `context` is the
    number of tokens per sample, `lookups` are indices of parameters that are only indexed into
    (embeddings), `heads` of those that make logits; `shares` is the fraction of tokens that a
    parameter sees, if not all (experts).
    """

    tokens: int
    recompute: Recompute = 0
    slices: int = 1
    context: int = USUAL_CONTEXT
    lookups: frozenset[int] = frozenset()
    heads: frozenset[int] = frozenset()
    shares: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PhaseCost:
    """Duration of one phase in seconds: of each resource alone, and of the phase.

    `lead` is the time at its beginning when compute waits for the update of the first unit.
    """

    name: str
    resources: dict[str, float]
    seconds: float
    lead: float

    @property
    def binds(self) -> str:
        """The slowest resource, which determines the duration."""
        return max(self.resources, key=lambda resource: self.resources[resource])


@dataclass(frozen=True, slots=True)
class StepCost:
    """Cost of one steady step: its phases in order."""

    phases: tuple[PhaseCost, ...]

    @property
    def seconds(self) -> float:
        """Duration of the step in seconds."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def resources(self) -> dict[str, float]:
        """Seconds that each resource is busy in a step."""
        busy: dict[str, float] = {}
        repeats = Counter(id(phase.resources) for phase in self.phases)
        for resources in {id(phase.resources): phase.resources for phase in self.phases}.values():
            for name, seconds in resources.items():
                busy[name] = busy.get(name, 0.0) + repeats[id(resources)] * seconds
        return busy

    @property
    def bound_s(self) -> dict[str, float]:
        """Seconds of the phases that each resource binds, the longest first."""
        bound: dict[str, float] = {}
        for phase in self.phases:
            bound[phase.binds] = bound.get(phase.binds, 0.0) + phase.seconds
        return dict(sorted(bound.items(), key=lambda item: -item[1]))

    @property
    def binds(self) -> str:
        """The resource that determines most of the step's time."""
        return next(iter(self.bound_s), "compute")


def computing(resources: Mapping[str, float]) -> str:
    """Return the name of the resource that computes, alone or with the update on the same cores."""
    return "compute" if "compute" in resources else "compute and update"


def step_cost(plan: Plan, rates: Rates, work: StepWork | None = None) -> StepCost:
    """Return the cost of a steady step; without `work` only data movement costs time."""
    pricing = _Pricing(plan, rates, work)
    return StepCost(tuple(pricing.of(phase) for phase in forecast_phases(plan)))


def movement_cost(
    plan: Plan, rates: Rates
) -> tuple[tuple[float, float], tuple[float, float] | None]:
    """Return the movement cost of a steady step, and of each additional micro-batch.

    Each is a pair: duration in seconds, compute not counted, and the busy seconds of all resources
    together. The second pair is None if additional micro-batches are not uniform.
    """
    pricing = _Pricing(plan, rates, None)
    phases, added_phases = distinct_phases(plan)
    added = None if added_phases is None else pricing.movement((phase, 1) for phase in added_phases)
    return pricing.movement(phases), added


class _Pricing:
    """Cost of phases of one plan; equal phases are priced once."""

    def __init__(self, plan: Plan, rates: Rates, work: StepWork | None) -> None:
        self.plan = plan
        self.rates = rates
        self.work = work
        self.trained = plan.num_trained
        self._elements = _NONE
        self._repeated = _NONE, _NONE  # recomputed in a forward, and in a backward
        self._cached: dict[tuple[int, bool, bool, bool], tuple[dict[str, float], float]] = {}
        if work is None:
            return
        self._elements = _count_elements(plan.units, work)
        # Blocks whose slices share ranges of experts run several times
        # (`offload/shared_ranges.py`): two additional passes of the ranges in backward; of their
        # other units one in forward, three in backward.
        block_units, ranges = sharing(plan.units, plan.shared_stacks)
        shared_units = {unit.index for unit in (*block_units, *ranges)}
        others = [u for u in recomputed(plan.units, work.recompute) if u.index not in shared_units]
        blocks = _count_elements(block_units, work)
        in_ranges = _count_elements(ranges, work)
        summands = [_count_elements(others, work), blocks, blocks, blocks, in_ranges, in_ranges]
        in_backward = _Elements(*map(sum, zip(*map(astuple, summands), strict=True)))
        self._repeated = blocks, in_backward

    @cached_property
    def _updated_units(self) -> list[UnitLayout]:
        """Units that are updated, in the order of the optimizer pass."""
        return [unit for unit in self.plan.units if unit.numel]

    def of(self, phase: PhaseBytes) -> PhaseCost:
        name = f"{'backward' if phase.backward else 'forward'} {phase.micro_batch + 1}"
        resources, seconds = self._cached_cost(phase)
        return PhaseCost(name, resources, seconds, self._lead(phase, resources))

    def _cached_cost(self, phase: PhaseBytes) -> tuple[dict[str, float], float]:
        is_last = phase.micro_batch + 1 == self.plan.micro_batches
        key = (id(phase.moved), phase.backward, bool(phase.micro_batch), is_last)
        if key not in self._cached:
            resources = self._resources(phase)
            self._cached[key] = resources, self._seconds(phase, resources)
        return self._cached[key]

    def movement(self, phases: Iterable[tuple[PhaseBytes, int]]) -> tuple[float, float]:
        """Return the seconds of counted phases, and the busy seconds of all their resources."""
        seconds = busy = 0.0
        for phase, count in phases:
            resources, phase_seconds = self._cached_cost(phase)
            seconds += count * phase_seconds
            busy += count * sum(resources.values())
        return seconds, busy

    def _seconds(self, phase: PhaseBytes, resources: dict[str, float]) -> float:
        """Return the duration of a phase, with the two parts that cannot overlap the pass."""
        slowest = max(resources.values())
        if not phase.has_update or self.work is None or not self._updated_units:
            return slowest
        plan, last = self.plan, self._updated_units[-1]
        compute = computing(resources)
        # Heads in other units (tied or frozen) are computed last as well.
        heads = [s for unit in plan.units if unit is not last for s in unit.segments
                 if s.origin in self.work.heads]  # fmt: skip
        tail_s = self._compute_s(phase, _count_elements([last], self.work, heads), _NONE)
        others_s = max(s for name, s in resources.items() if name != compute)
        return max(slowest, resources[compute] + self._lead(phase, resources), others_s + tail_s)

    def _lead(self, phase: PhaseBytes, resources: dict[str, float]) -> float:
        """Return the seconds of the first unit's update, for which compute waits."""
        if not phase.has_update or not self._updated_units:
            return 0.0
        plan, first = self.plan, self._updated_units[0]
        disk_bytes = [sum(pass_disk_bytes(plan, g.layout, g.placement)) for g in plan.unit_groups]
        total = sum(n * len(g.units) for n, g in zip(disk_bytes, plan.unit_groups, strict=True))
        first_bytes = sum(pass_disk_bytes(plan, first, plan.placements[first.index]))
        disk_share = first_bytes / (total or 1)
        share = first.num_trained / max(self.trained, 1)
        compute = computing(resources)
        return max(
            seconds * (disk_share if name == "disk" else share)
            for name, seconds in resources.items()
            if name != compute
        )

    def _resources(self, phase: PhaseBytes) -> dict[str, float]:
        plan, rates, moved = self.plan, self.rates, phase.moved
        resources = {"disk": rates.disk_s(moved["disk_read"], moved["disk_write"])}
        if not plan.unified:
            inward_s, outward_s = rates.copies_s(moved["to_device"], moved["from_device"])
            resources |= {"to_device": inward_s, "from_device": outward_s}
        if plan.ranks > 1:
            links = ((moved[name], getattr(rates, name)) for name in (*LINKS, BETWEEN_HOSTS))
            resources["link"] = sum(nbytes / rate for nbytes, rate in links if rate)
        repeated = self._repeated[phase.backward]
        compute = self._compute_s(phase, self._elements, repeated)
        update = concurrent = on_device = 0.0
        if phase.has_update:
            update, concurrent, on_device = update_s(plan, rates)
        if plan.unified:  # the same cores
            disk_cpu_s = _seconds_at(moved["disk_read"] + moved["disk_write"], rates.disk_per_cpu_s)
            resources["compute and update" if update else "compute"] = compute + update + disk_cpu_s
        else:
            resources["compute"] = compute + on_device
            resources["sums"] = sum_gradients_s(plan, rates, phase)
            resources["calls"] = issue_calls_s(plan) if phase.has_update else 0.0
            resources["update, CPU share"] = concurrent
            # The thread that issues copies waits for units that only the CPU updates.
            resources["update"] = update and update + max(stream_s(plan, rates), concurrent)
        return resources

    def _compute_s(self, phase: PhaseBytes, elements: _Elements, repeated: _Elements) -> float:
        """Return seconds of one forward or backward: products, and operations between them."""
        plan, work, rates = self.plan, self.work, self.rates
        if work is None:
            return 0.0
        # fp16 is not measured: it is as fast as bf16 on GPUs, and on CPUs that emulate both.
        name = "bf16" if plan.precision.name == "fp16" else plan.precision.name
        memory = _host_memory_rate(rates) if plan.unified else None
        products = 2 * (elements.matrices + repeated.matrices)
        products += 2 * elements.trained if phase.backward else 0
        seconds = _seconds_at(products * work.tokens, rates.compute.get(name))
        read = work.slices * (elements.total + repeated.total)
        seconds = max(seconds, _seconds_at(plan.precision.weight * read, memory))
        values = elements.io_values * (PASSES_BACKWARD if phase.backward else PASSES_FORWARD)
        values = work.tokens * (values + repeated.io_values * PASSES_FORWARD)
        seconds += _seconds_at(values * plan.precision.weight, rates.between.get(name) or memory)
        attended = (5 if phase.backward else 2) * elements.attended + 2 * repeated.attended
        attended *= work.tokens * work.context
        seconds += _seconds_at(attended, rates.attention.get(name))
        seconds += _seconds_at(work.tokens * elements.logits / 2, rates.logits)
        seconds += _seconds_at(DEQUANTIZE_BYTES * elements.quantized, memory)
        if phase.backward:
            seconds += _seconds_at(self._gradient_bytes(phase), memory)
        return seconds

    def _gradient_bytes(self, phase: PhaseBytes) -> int:
        """Return bytes that gradients move in memory in a backward: made, accumulated, squared."""
        plan = self.plan
        accesses = 2 if phase.micro_batch else 1  # later ones read the sum and write it
        accesses += phase.micro_batch + 1 == plan.micro_batches  # for the square sums
        return self.trained * (2 * plan.precision.weight + accesses * plan.gradient_itemsize)


@dataclass(frozen=True, slots=True)
class _Elements:
    """Numbers of elements that determine the cost of compute.

    `matrices` are elements that a token is multiplied by, `trained` those of them with gradients,
    `quantized` those stored quantized, `total` those that are read once per pass. `io_values` are
    values per token that go in and out of matrices, `attended` are values per token that attend to
    other tokens, `logits` the logits per token.
    """

    matrices: float = 0.0
    trained: float = 0.0
    quantized: int = 0
    total: int = 0
    io_values: float = 0.0
    attended: int = 0
    logits: int = 0


_NONE = _Elements()


def _count_elements(
    units: Sequence[UnitLayout], work: StepWork, extra: Iterable[Segment] = ()
) -> _Elements:
    """Count elements of `units` and of `extra` parameters; `io_values` do not include logits."""
    matrices, trained, quantized, total, io_values, logits = 0.0, 0.0, 0, 0, 0.0, 0
    for segment in (*(segment for unit in units for segment in unit.segments), *extra):
        if segment.origin in work.lookups:
            continue
        total += segment.numel
        quantized += segment.numel if segment.form else 0
        if len(segment.shape) > 1:
            share = work.shares.get(segment.origin, 1.0)
            matrices += segment.numel * share
            trained += segment.numel * share if segment.trained else 0.0
            io_values += sum(sorted(segment.shape)[-2:]) * passes(segment, work.shares)
        if segment.origin in work.heads:
            logits += segment.shape[0]
            io_values -= segment.shape[0]
    attended = attention_width(units)
    return _Elements(matrices, trained, quantized, total, io_values, attended, logits)


def _seconds_at(amount: float, rate: float | None) -> float:
    """Return seconds, or 0 if the rate is unknown."""
    return amount / rate if rate else 0.0


def active_parameters(units: Sequence[UnitLayout], work: StepWork) -> int:
    """Return the number of parameters used per token; experts count by their share of tokens."""
    shares = work.shares
    return round(sum(s.numel * shares.get(s.origin, 1.0) for u in units for s in u.segments))


def flop_per_token(units: Sequence[UnitLayout], work: StepWork) -> float:
    """Return FLOP per token: 6 per matrix element, 4 per frozen one. See [Note: compute]."""
    elements = _count_elements(units, work)
    return 4 * elements.matrices + 2 * elements.trained


def update_s(plan: Plan, rates: Rates) -> tuple[float, float, float]:
    """Return seconds of one step's update on three resources.

    The host alone, the host while other chunks of the same units are streamed, and the device.
    """
    host = concurrent = device = 0.0
    host_flops = device_flops = 0  # of the update rule's matrix products, in bf16
    for group in plan.unit_groups:
        trained = sum(map(plan.facts.num_trained.__getitem__, group.units)) // plan.ranks
        location, layout = update_place(plan, group.units[0]), group.layout
        if plan.rule.matrix_steps:
            flops = matrix_flops(layout, plan.rule.matrix_steps) * len(group.units) // plan.ranks
            if location is UpdatePlace.CPU:
                host_flops += flops
            else:
                device_flops += flops
        if not rates.device_update or location is UpdatePlace.CPU:
            host += trained
            continue
        by_device = 1.0
        if location is UpdatePlace.STREAMED:
            chunks = max(layout.num_chunks(plan.chunk_elements), 1)
            by_device = plan.streamed_chunks(layout, group.placement) / chunks
        device += by_device * trained
        concurrent += (1 - by_device) * trained
    host_rate = math.inf  # that of the slowest format
    for name in [moment.value for moment in plan.precision.moments] or ["fp32"]:
        rate = rates.update.get("bf16" if name.startswith("bf16") else name)
        host_rate = min(host_rate, rate or rates.update.get("fp32") or 0.0)
    device_flop_rate = rates.compute.get("bf16") or math.inf
    host_flop_rate = device_flop_rate if plan.unified else HOST_FLOPS
    return (
        _seconds_at(host, host_rate) + host_flops / host_flop_rate,
        _seconds_at(concurrent, host_rate),
        _seconds_at(device, rates.device_update) + device_flops / device_flop_rate,
    )


def matrix_flops(layout: UnitLayout, steps: int) -> int:
    """Return FLOP to orthogonalize the matrices of a unit; each matrix of a stack separately.

    A Newton-Schulz step on m x n, m <= n, multiplies the matrix by its transpose, the m x m product
    by itself, and the result by the matrix: 4 m^2 n + 2 m^3.
    """
    flops = 0
    for *stacked, rows, columns in (s.shape for s in layout.trained_segments if s.needs_full):
        m, n = sorted((rows, columns))
        flops += math.prod(stacked) * (4 * m * m * n + 2 * m**3)
    return steps * flops


def stream_s(plan: Plan, rates: Rates) -> float:
    """Return seconds of a step's streamed updates: copies in both directions, or host calls."""
    inward = outward = 0
    for group in plan.unit_groups:
        if group.placement in plan.streamed:
            to_device, from_device = streamed_bytes(plan, group.layout, group.placement)
            inward += len(group.units) * to_device
            outward += len(group.units) * from_device
    return max(*rates.copies_s(inward, outward), issue_calls_s(plan))


def balanced_cpu_share(plan: Plan, rates: Rates) -> float:
    """Return the CPU's share of streamed units that keeps CPU and links busy equally long.

    Both times depend on the share linearly, those of links also on other transfers in the same
    forward. Rounded down to whole percents, at most `MAX_CPU_SHARE`.
    """
    differences = []  # seconds that links take longer than the CPU's updates
    for variant in (plan, plan.changed(cpu_share=0.5)):
        moved = next(phase.moved for phase in forecast_phases(variant) if phase.has_update)
        links = max(rates.copies_s(moved["to_device"], moved["from_device"]))
        differences.append(links - update_s(variant, rates)[1])
    at_zero, at_half = differences
    return (
        max(0, int(100 * min(0.5 * at_zero / max(at_zero - at_half, _TINY), MAX_CPU_SHARE))) / 100
    )


def sum_gradients_s(plan: Plan, rates: Rates, phase: PhaseBytes) -> float:
    """Return seconds that a host thread needs to add a backward's gradients to sums off the device.

    Bound by memory: a gradient is read, and a sum read and written. In the first micro-batch
    gradients are only converted; without conversion they are copied directly to their tier.
    """
    rate = _host_memory_rate(rates)
    if not phase.backward or not rate:
        return 0.0
    itemsize = plan.gradient_itemsize
    # Sums of slices are copied in fp32.
    copied_itemsize = 4 if plan.saved.slices > 1 else plan.precision.weight
    if phase.micro_batch == 0 and copied_itemsize == itemsize:
        return 0.0
    elements = sum(
        group.layout.shard_numel * len(group.units)
        for group in plan.unit_groups
        if group.placement.gradient is not Tier.DEVICE
    )
    return elements * (copied_itemsize + itemsize * (2 if phase.micro_batch else 1)) / rate


def issue_calls_s(plan: Plan) -> float:
    """Return host seconds to issue the copies and kernels of a step's streamed updates."""
    streamed = (group for group in plan.unit_groups if group.placement in plan.streamed)
    return CALL_S * sum(
        len(group.units) * streamed_calls(plan, group.layout, group.placement) for group in streamed
    )


def _host_memory_rate(rates: Rates) -> float | None:
    """Return bytes per second of host memory, derived from the rate of updates."""
    rate = rates.update.get("fp32")
    return SPLIT_UPDATE_BYTES * rate if rate else None


def disk_days(written_per_step: int, step_s: float, rated_bytes: float) -> float:
    """Return days of continuous training until a drive's rated endurance is used up."""
    if not written_per_step or not step_s:
        return float("inf")
    return rated_bytes / written_per_step * step_s / 86400

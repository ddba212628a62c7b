"""How long a step takes: bytes from the forecast, rates of the machine, and what overlaps what.

[Note: schedule]
A step is a row of phases: forward and backward of each micro-batch. Inside a phase the resources
work at the same time, and the slowest one decides; between phases nothing overlaps. The optimizer
pass of the step before runs behind the first forward. On a CPU device the update takes turns with
compute, since both want the same cores; elsewhere it runs beside it. There disk traffic takes time
from compute too: for system calls and interrupts, and on a virtual machine for the copies of the
hypervisor, which run on the same cores (0.27 s of a core per GB were measured on one). The
optimizer pass does one unit after the other: what the CPU updates waits for what streams through
the device, and the other way round.

Two ends stick out of that phase. Compute cannot begin before the first unit has been updated, and
when the last one has been, what that unit computes is still to be done, and head and loss of all
tokens. So a forward behind which the pass runs is thought to last as long as compute and the first
unit's share of the pass, or as the pass and what is computed after it.

[Note: ranks]
Of several ranks all times are of one: disk and CPU give it its part of what the node has, links to
its GPU are its own. What it receives from the others passes the link, another resource that works
beside the rest; what every link carries at the same time is in the rates. Between nodes a ring of
all-gathers brings everything into a node once, and an all-to-all brings what its ranks get from
others' ranks: so much of the rate into a node is a rank's.

[Note: compute]
A token costs 2 FLOP a matrix element forward and 4 backward (2 more where blocks are recomputed; 2
less where it is frozen, for inputs alone have gradients); lookup tables cost none. Few tokens are
bound by memory instead: each
weight is read once per pass. In backward a gradient is written by autograd, read, and added to or
stored where it rests, and squared. What stands between the products (norms, activation functions,
residual sums, copies of heads) passes over memory too: counted for a GPT block of width h, 27 * h
values a token forward, where its matrices take and give 16 * h; so 27/16 passes over these, twice
as many backward, and one more for biases. They have a rate of their own, measured on such a block
(memory's, where it was not). Attention multiplies tokens with tokens: causal, in a block of width
h, 2 * context * h FLOP a token forward and 5 backward, for which it computes them again; its rate
is that of a fused kernel on contexts of a thousand. What it takes however short the context is
belongs to what stands between. Cross entropy makes fp32 of each logit, and reads and writes it some
times: one rate, half of it forward. What rests quantised is dequantised once in every pass: codes
are read, and become indices, fp32 values, scaled ones, weights.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import cached_property

from infinity.config.schema import Recompute
from infinity.plan.activations import attending_width, passes, recomputed, sharing
from infinity.plan.forecast import PhaseBytes, counted_phases, disk_of_pass, forecast_phases
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

# Not measured of their own: fp16 is as fast as bf16 on GPUs, and where a CPU emulates both.
_MULTIPLIED_AS = {"fp16": "bf16"}
# Of one copy, or one kernel, on a device: Python beside other threads' Python, CUDA's calls, events
# recorded and waited for. 170 us beside an H100 while a trace is recorded, which takes part of it.
CALL_S = 120e-6
MOST_BESIDE, _TINY = 0.9, 1e-12  # of a streamed unit: something is streamed
USUAL_CONTEXT = 2048  # tokens of a sample, where nobody said it
HOST_FLOPS = 0.5e12  # bf16 products a second of a host beside a device: a guess, not measured
DEQUANTISE_BYTES = 22  # an element: 2 + 2 of indices, 4 + 8 + 4 of fp32, 2 of weights
SPLIT_UPDATE_BYTES = 26  # a parameter: 12 of state read and written, 2 of gradient read


@dataclass(frozen=True, slots=True)
class StepWork:
    """Work of a user's step: tokens of one micro-batch, and recomputation.

    The first `recompute` blocks run again in backward, and blocks in so many `slices`. `context`
    are the tokens of one sample, `lookups` indices of parameters that are only indexed into
    (embeddings), `heads` of those that make logits; `shares` the part of the tokens that a
    parameter sees, where not all (experts).
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
    """Seconds that each resource would need for one phase alone, and the phase as a whole.

    `lead` are seconds at its beginning in which nothing can be computed: the first unit is updated.
    """

    name: str
    resources: dict[str, float]
    seconds: float
    lead: float

    @property
    def binds(self) -> str:
        """The resource that decides."""
        return max(self.resources, key=lambda resource: self.resources[resource])


@dataclass(frozen=True, slots=True)
class StepCost:
    """One steady step: its phases in order."""

    phases: tuple[PhaseCost, ...]

    @property
    def seconds(self) -> float:
        """Of a whole step."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def resources(self) -> dict[str, float]:
        """Seconds each resource is busy in a step."""
        busy: dict[str, float] = {}
        repeats = Counter(id(phase.resources) for phase in self.phases)
        for resources in {id(phase.resources): phase.resources for phase in self.phases}.values():
            for name, seconds in resources.items():
                busy[name] = busy.get(name, 0.0) + repeats[id(resources)] * seconds
        return busy

    @property
    def binds(self) -> str:
        """The resource that decides most of the step's time."""
        shares: dict[str, float] = {}
        for phase in self.phases:
            shares[phase.binds] = shares.get(phase.binds, 0.0) + phase.seconds
        return max(shares, key=lambda resource: shares[resource], default="compute")


def computing(resources: Mapping[str, float]) -> str:
    """Which resource of a phase computes: alone, or with the update on the same cores."""
    return "compute" if "compute" in resources else "compute and update"


def step_cost(
    plan: Plan, rates: Rates, work: StepWork | None = None, cycle: list[int] | None = None
) -> StepCost:
    """The cost of a steady step; without `work` compute costs nothing, which leaves movement."""
    pricing = _Pricing(plan, rates, work, cycle)
    return StepCost(tuple(pricing.of(phase) for phase in forecast_phases(plan, cycle)))


def movement_cost(
    plan: Plan, rates: Rates
) -> tuple[tuple[float, float], tuple[float, float] | None]:
    """Seconds of a steady step where compute costs nothing, and those of all resources together.

    The same of each micro-batch more; None where that is not known.
    """
    pricing = _Pricing(plan, rates, None, None)
    phases, more = counted_phases(plan)
    added = None if more is None else pricing.movement((phase, 1) for phase in more)
    return pricing.movement(phases), added


class _Pricing:
    """Seconds of phases of one plan; equal phases are priced once."""

    def __init__(
        self, plan: Plan, rates: Rates, work: StepWork | None, cycle: list[int] | None
    ) -> None:
        self.plan = plan
        self.rates = rates
        self.work = work
        self.trained = plan.num_trained
        self._elements = _NONE
        self._again = _NONE, _NONE  # what a forward, and a backward, computes once more
        if work is not None:
            self._elements = _elements(plan.units, work)
            self._again = _again(plan, work)
        self._cycle = cycle
        self._known: dict[tuple[int, bool, bool, bool], tuple[dict[str, float], float]] = {}

    @cached_property
    def _updated(self) -> list[int]:
        """Units that are updated, in order."""
        units = self.plan.units
        return [u for u in dict.fromkeys(self._cycle or range(len(units))) if units[u].numel]

    def of(self, phase: PhaseBytes) -> PhaseCost:
        """One phase."""
        name = f"{'backward' if phase.backward else 'forward'} {phase.micro_batch + 1}"
        resources, seconds = self._priced(phase)
        return PhaseCost(name, resources, seconds, self._lead(phase, resources))

    def _priced(self, phase: PhaseBytes) -> tuple[dict[str, float], float]:
        last = phase.micro_batch + 1 == self.plan.micro_batches
        key = (id(phase.moved), phase.backward, bool(phase.micro_batch), last)
        if key not in self._known:
            resources = self._resources(phase)
            self._known[key] = resources, self._seconds(phase, resources)
        return self._known[key]

    def movement(self, phases: Iterable[tuple[PhaseBytes, int]]) -> tuple[float, float]:
        """Seconds of phases by their counts, and those of their resources together."""
        seconds = busy = 0.0
        for phase, count in phases:
            resources, one = self._priced(phase)
            seconds += count * one
            busy += count * sum(resources.values())
        return seconds, busy

    def _seconds(self, phase: PhaseBytes, resources: dict[str, float]) -> float:
        """Of a phase, with the two ends that stick out of it."""
        slowest = max(resources.values())
        if not phase.has_update or self.work is None or not self._updated:
            return slowest
        plan, last = self.plan, self.plan.units[self._updated[-1]]
        named = computing(resources)
        # Heads that are elsewhere, tied or frozen, are computed last all the same.
        heads = [s for unit in plan.units if unit is not last for s in unit.segments
                 if s.origin in self.work.heads]  # fmt: skip
        tail = self._compute_s(phase, _elements([last], self.work, heads), _NONE)
        others = max(s for name, s in resources.items() if name != named)
        return max(slowest, resources[named] + self._lead(phase, resources), others + tail)

    def _lead(self, phase: PhaseBytes, resources: dict[str, float]) -> float:
        """Seconds of the first unit's update, before which nothing is computed."""
        if not phase.has_update or not self._updated:
            return 0.0
        plan, first = self.plan, self.plan.units[self._updated[0]]
        on_disk = [sum(disk_of_pass(plan, a.layout, a.placement)) for a in plan.unit_groups]
        total = sum(n * len(a.units) for n, a in zip(on_disk, plan.unit_groups, strict=True))
        disk = sum(disk_of_pass(plan, first, plan.placements[first.index])) / (total or 1)
        share = first.num_trained / max(self.trained, 1)
        named = computing(resources)
        return max(
            seconds * (disk if name == "disk" else share)
            for name, seconds in resources.items()
            if name != named
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
        again = self._again[phase.backward]
        compute = self._compute_s(phase, self._elements, again)
        update = beside = on_device = 0.0
        if phase.has_update:
            update, beside, on_device = update_s(plan, rates)
        if plan.unified:  # the same cores
            moving = _over(moved["disk_read"] + moved["disk_write"], rates.disk_per_cpu_s)
            resources["compute and update" if update else "compute"] = compute + update + moving
        else:
            resources["compute"] = compute + on_device
            resources["sums"] = sums_s(plan, rates, phase)
            resources["calls"] = calls_s(plan) if phase.has_update else 0.0
            resources["update, CPU share"] = beside
            # What the CPU updates alone, the thread that asks for copies waits for.
            resources["update"] = update and update + max(stream_s(plan, rates), beside)
        return resources

    def _compute_s(self, phase: PhaseBytes, once: _Elements, again: _Elements) -> float:
        """Seconds of the products of one forward or backward, and of all that stands between."""
        plan, work, rates = self.plan, self.work, self.rates
        if work is None:
            return 0.0
        name = _MULTIPLIED_AS.get(plan.precision.name, plan.precision.name)
        memory = _memory_rate(plan, rates)
        products = 2 * (once.matrices + again.matrices)
        products += 2 * once.trained if phase.backward else 0
        seconds = _over(products * work.tokens, rates.compute.get(name))
        read = work.slices * (once.all + again.all)
        seconds = max(seconds, _over(plan.precision.weight * read, memory))
        values = once.sides * (PASSES_BACKWARD if phase.backward else PASSES_FORWARD)
        values = work.tokens * (values + again.sides * PASSES_FORWARD)
        seconds += _over(values * plan.precision.weight, rates.between.get(name) or memory)
        attended = (5 if phase.backward else 2) * once.attended + 2 * again.attended
        attended *= work.tokens * work.context
        seconds += _over(attended, rates.attention.get(name))
        seconds += _over(work.tokens * once.logits / 2, rates.logits)
        seconds += _over(DEQUANTISE_BYTES * once.quantised, memory)
        if phase.backward:
            seconds += _over(self._gradient_bytes(phase), memory)
        return seconds

    def _gradient_bytes(self, phase: PhaseBytes) -> int:
        """Bytes of gradients that memory moves in one backward: made, taken away, squared."""
        plan = self.plan
        touched = 2 if phase.micro_batch else 1  # a sum is read and written
        last = phase.micro_batch + 1 == plan.micro_batches
        item = plan.gradient_itemsize
        return self.trained * (2 * plan.precision.weight + touched * item + (item if last else 0))


@dataclass(frozen=True, slots=True)
class _Elements:
    """Elements of matrices that a token is multiplied with, of all that is read; values in and out.

    `sides` are what one token brings to the matrices, and what they make of it; `trained` those of
    matrices whose gradients are wanted, `quantised` those that do not rest as they compute.
    `attended` are values of a token that attend to others, `logits` what a token has of these.
    """

    matrices: float = 0.0
    trained: float = 0.0
    quantised: int = 0
    all: int = 0
    sides: float = 0.0
    attended: int = 0
    logits: int = 0


_NONE = _Elements()


def _elements(
    units: Sequence[UnitLayout], work: StepWork, more: Iterable[Segment] = ()
) -> _Elements:
    """Of these units, and of `more` parameters. Logits are no sides: they have their rate."""
    matrices, trained, quantised, all_elements, sides, logits = 0.0, 0.0, 0, 0, 0.0, 0
    for segment in (*(segment for unit in units for segment in unit.segments), *more):
        if segment.origin in work.lookups:
            continue
        all_elements += segment.numel
        quantised += segment.numel if segment.form else 0
        if len(segment.shape) > 1:
            share = work.shares.get(segment.origin, 1.0)
            matrices += segment.numel * share
            trained += segment.numel * share if segment.trained else 0.0
            sides += sum(sorted(segment.shape)[-2:]) * passes(segment, work.shares)
        if segment.origin in work.heads:
            logits += segment.shape[0]
            sides -= segment.shape[0]
    attended = attending_width(units)
    return _Elements(matrices, trained, quantised, all_elements, sides, attended, logits)


def _again(plan: Plan, work: StepWork) -> tuple[_Elements, _Elements]:
    """Return the elements that a forward computes twice, and a backward before its products.

    Slices that pass ranges of experts together compute their blocks several times, see
    `offload/shared_ranges.py`: ranges twice in backward, all else twice in forward and three times
    in backward.
    """
    block_units, ranges = sharing(plan.units, plan.shared_stacks)
    several = {unit.index for unit in (*block_units, *ranges)}
    others = [u for u in recomputed(plan.units, work.recompute) if u.index not in several]
    once = _elements(block_units, work)
    parts = [_elements(others, work), once, once, once, *[_elements(ranges, work)] * 2]
    return once, _Elements(*map(sum, zip(*map(astuple, parts), strict=True)))


def _over(amount: float, rate: float | None) -> float:
    """Seconds; nothing where no rate is known."""
    return amount / rate if rate else 0.0


def active_parameters(units: Sequence[UnitLayout], work: StepWork) -> int:
    """Parameters that one token uses: of experts the share of all that it is sent to."""
    shares = work.shares
    return round(sum(s.numel * shares.get(s.origin, 1.0) for u in units for s in u.segments))


def flop_per_token(units: Sequence[UnitLayout], work: StepWork) -> float:
    """Return FLOP of the model for a token: 6 a matrix element, 4 a frozen one.

    See [Note: compute].
    """
    found = _elements(units, work)
    return 4 * found.matrices + 2 * found.trained


def update_s(plan: Plan, rates: Rates) -> tuple[float, float, float]:
    """Return seconds of one step's update: on the host; on the host while others stream; and on the
    device.
    """
    host = beside = device = 0.0
    for group in plan.unit_groups:
        trained = sum(map(plan.facts.num_trained.__getitem__, group.units)) // plan.ranks
        location, layout = update_place(plan, group.units[0]), group.layout
        if not rates.device_update or location is UpdatePlace.CPU:
            host += trained
            continue
        by_device = 1.0
        if location is UpdatePlace.STREAMED:
            chunks = max(layout.num_chunks(plan.chunk_elements), 1)
            by_device = plan.streamed_chunks(layout, group.placement) / chunks
        device += by_device * trained
        beside += (1 - by_device) * trained
    host_products, device_products = _matrix_s(plan, rates)
    slowest = [_update_rate(rates, name) for name in _formats(plan)]
    host_rate = min(slowest, default=0.0)
    device_s = device / rates.device_update if rates.device_update else 0.0
    host_s = host / host_rate if host_rate else 0.0
    beside_s = beside / host_rate if host_rate else 0.0
    return host_s + host_products, beside_s, device_s + device_products


def matrix_flops(layout: UnitLayout, steps: int) -> int:
    """Floating-point operations that make the matrices of a unit orthogonal.

    Each step of Newton-Schulz multiplies m x n by its transpose, the product, m x m, by itself, and
    that by the matrix, with m <= n: 4 m^2 n + 2 m^3. Of a stack each matrix is by itself.
    """
    flops = 0
    for *stacked, rows, columns in (s.shape for s in layout.trained_segments if s.needs_full):
        m, n = sorted((rows, columns))
        flops += math.prod(stacked) * (4 * m * m * n + 2 * m**3)
    return steps * flops


def _matrix_s(plan: Plan, rates: Rates) -> tuple[float, float]:
    """Seconds of a step's matrix products of the update rule, in bf16: host, and device."""
    on = dict.fromkeys((True, False), 0)
    for group in plan.unit_groups if plan.rule.matrix_steps else ():
        by_host = update_place(plan, group.units[0]) is UpdatePlace.CPU
        flops = matrix_flops(group.layout, plan.rule.matrix_steps)
        on[by_host] += flops * len(group.units) // plan.ranks
    device = rates.compute.get("bf16") or math.inf
    return on[True] / (device if plan.unified else HOST_FLOPS), on[False] / device


def stream_s(plan: Plan, rates: Rates) -> float:
    """Return seconds of streamed updates of a step: links in both directions, and host calls."""
    inward = outward = 0
    for group in plan.unit_groups:
        if group.placement in plan.streamed:
            coming, going = streamed_bytes(plan, group.layout, group.placement)
            inward, outward = inward + len(group.units) * coming, outward + len(group.units) * going
    return max(*rates.copies_s(inward, outward), calls_s(plan))


def share_beside(plan: Plan, rates: Rates) -> float:
    """The share of streamed units with which the CPU is busy as long as the links, in percent.

    Both hang on it linearly; links have other things to carry behind the same forward, too.
    """
    longer = []  # what links take longer than the CPU's updates
    for one in (plan, plan.changed(cpu_share=0.5)):
        moved = next(phase.moved for phase in forecast_phases(one) if phase.has_update)
        links = max(rates.copies_s(moved["to_device"], moved["from_device"]))
        longer.append(links - update_s(one, rates)[1])
    alone, half = longer
    return max(0, int(100 * min(0.5 * alone / max(alone - half, _TINY), MOST_BESIDE))) / 100


def sums_s(plan: Plan, rates: Rates, phase: PhaseBytes) -> float:
    """Seconds in which a thread of the host adds a backward's gradients to sums off the device.

    Memory decides: a gradient is read, and a sum read and written. The first of a window only
    changes its type, and goes straight to its place where it need not.
    """
    rate = _host_memory_rate(rates)
    if not phase.backward or not rate:
        return 0.0
    itemsize, item = plan.gradient_itemsize, plan.precision.weight
    item = 4 if plan.saved.slices > 1 else item  # sums of slices leave in fp32
    if phase.micro_batch == 0 and item == itemsize:
        return 0.0
    elements = sum(
        group.layout.shard_numel * len(group.units)
        for group in plan.unit_groups
        if group.placement.gradient is not Tier.DEVICE
    )
    return elements * (item + itemsize * (2 if phase.micro_batch else 1)) / rate


def calls_s(plan: Plan) -> float:
    """Seconds that a step's streamed updates take the thread that asks the device for them."""
    streamed = (group for group in plan.unit_groups if group.placement in plan.streamed)
    return CALL_S * sum(
        len(group.units) * streamed_calls(plan, group.layout, group.placement) for group in streamed
    )


def _formats(plan: Plan) -> list[str]:
    return [moment.value for moment in plan.precision.moments] or ["fp32"]


def _update_rate(rates: Rates, name: str) -> float:
    known = "bf16" if name.startswith("bf16") else name
    return rates.update.get(known) or rates.update.get("fp32") or 0.0


def _memory_rate(plan: Plan, rates: Rates) -> float | None:
    """Bytes per second of the compute device's memory, where that is the host's."""
    return _host_memory_rate(rates) if plan.unified else None


def _host_memory_rate(rates: Rates) -> float | None:
    """Bytes per second of the host's memory, as the update finds it."""
    rate = rates.update.get("fp32")
    return SPLIT_UPDATE_BYTES * rate if rate else None


def disk_days(written_per_step: int, step_s: float, rated_bytes: float) -> float:
    """Days of training without a pause until a drive's rated endurance is written."""
    if not written_per_step or not step_s:
        return float("inf")
    return rated_bytes / written_per_step * step_s / 86400

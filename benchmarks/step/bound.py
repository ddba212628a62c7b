"""Two lower bounds of the step time (docs/ARCHITECTURE.md), from a plan and measured rates.

Bytes per resource, the time of the update and the overlaps come from `infinity.plan.cost`. This
module adds the measured compute time of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from infinity.config.schema import IoConfig
from infinity.plan.cost import computing, step_cost
from infinity.plan.layout import MOMENTS, STATE_DTYPES
from infinity.plan.plan import Plan
from infinity.plan.rates import DISK_PER_CPU_S, Rates
from infinity.profiling.trace_shares import Shares, length, union, without
from infinity.storage.disk_rates import measure_disk

MEASURE_S = 2.0
# Kinds that only an update copies: masters (beyond the weights) and moments.
_STATE = {kind.value for kind in (*STATE_DTYPES, *MOMENTS)}


@dataclass(frozen=True)
class Phases:
    """Seconds of forward and backward per micro-batch, and of the update per step, no overlap."""

    forward_s: float
    backward_s: float
    update_s: float


@dataclass(frozen=True)
class Bounds:
    """Shortest step time with the engine's order of work, and with any order.

    `resources` are the busy seconds per step of each resource; `binds` is the resource that
    determines most of `schedule_s`.
    """

    schedule_s: float
    ideal_s: float
    binds: str
    resources: dict[str, float]


def bounds_of(plan: Plan, rates: Rates, forward_s: float, backward_s: float) -> Bounds:
    """Return the bounds of a steady step with the given compute time per micro-batch.

    `schedule_s` includes the wait of the forward for the update of the first unit, `ideal_s` not.
    """
    schedule_s, resources, binding_s = 0.0, dict[str, float](), dict[str, float]()
    for phase in step_cost(plan, rates).phases:
        busy_s = dict(phase.resources)
        compute = computing(busy_s)
        busy_s[compute] += backward_s if phase.name.startswith("backward") else forward_s
        slowest = max(busy_s, key=lambda r: busy_s[r] + (phase.lead if r == compute else 0.0))
        seconds = busy_s[slowest] + (phase.lead if slowest == compute else 0.0)
        schedule_s += seconds
        binding_s[slowest] = binding_s.get(slowest, 0.0) + seconds
        for resource, seconds in busy_s.items():
            resource = "compute" if resource == compute else resource
            resources[resource] = resources.get(resource, 0.0) + seconds
    binds = max(binding_s, key=lambda resource: binding_s[resource])
    return Bounds(schedule_s, max(resources.values()), binds, resources)


def rates_for(
    disk: dict[str, float], plan: Plan, measured: dict[str, float] | None, phases: Phases | None
) -> Rates | None:
    """Return rates for a bound: those of the disk, and of the machine if `measured`.

    Otherwise the update rate is computed from `phases`. None if neither is known.
    """
    if measured is not None:
        return Rates.of(measured | disk)
    if phases is None:
        return None
    return Rates.of(disk | {"update.fp32": plan.num_trained / max(phases.update_s, 1e-9)})


def compute_in(shares: Shares, num_micro_batches: int) -> tuple[float, float]:
    """Return mean seconds of compute per forward and per backward of a traced micro-batch.

    Recomputation counts as backward. Waits are excluded only if compute is timed on the device.
    """
    compute = shares.timeline.of("compute")
    kinds = {
        kind: union((s.begin, s.end) for s in compute if s.what == kind)
        for kind in ("forward", "backward")
    }
    forward = without(kinds["forward"], kinds["backward"])
    return length(forward) / num_micro_batches, length(kinds["backward"]) / num_micro_batches


def links_in_pass(shares: Shares) -> float | None:
    """Return bytes per second in both directions together while optimizer passes stream state.

    In each traced step this is the interval from the begin of the first copy of state to the end of
    the last. All copies count by the fraction of their time in it. None if no state is copied.
    """
    copies = [s for s in shares.timeline.of("to_device", "from_device") if s.seconds > 0]
    nbytes = seconds = 0.0
    for step in shares.steps:
        state = [s for s in copies if s.what in _STATE and step.begin <= s.begin < step.end]
        if not state:
            continue
        begin, end = min(s.begin for s in state), max(s.end for s in state)
        seconds += end - begin
        inside = ((s, min(s.end, end) - max(s.begin, begin)) for s in copies)
        nbytes += sum(s.nbytes * within / s.seconds for s, within in inside if within > 0)
    return nbytes / seconds if seconds else None


def measure_disk_rates(folder: Path, *, unified: bool) -> dict[str, float]:
    """Measure the disk tier in `folder`.

    Args:
        folder: A folder on the drive to measure.
        unified: Compute runs on the CPU. Also measure the CPU time of disk traffic.

    Returns:
        The disk rates of `Rates` in bytes per second, without other load.
    """
    rates = measure_disk([folder], IoConfig(), MEASURE_S)
    if unified:
        busy = measure_disk([folder], IoConfig(), MEASURE_S, busy=True)
        rates[DISK_PER_CPU_S] = busy[DISK_PER_CPU_S]
    return rates

"""How fast a step could be: two bounds (docs/ARCHITECTURE.md), from a plan and measured rates.

Bytes of each resource, the update's time and what overlaps what come from `infinity.plan.cost`;
what is added here is how long the products of a micro-batch take, as measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from infinity.config.schema import IoConfig
from infinity.plan.cost import computing, step_cost
from infinity.plan.layout import MOMENTS, REST_DTYPES
from infinity.plan.plan import Plan
from infinity.plan.rates import DISK_PER_CPU_S, Rates
from infinity.profiling.trace_shares import Shares, length, union, without
from infinity.storage.disk_rates import measure_disk

MEASURE_S = 2.0
# Kinds that only an update copies: what is beside the weight for its master, and moments.
_STATE = {kind.value for kind in (*REST_DTYPES, *MOMENTS)}


@dataclass(frozen=True)
class Phases:
    """Seconds of one micro-batch's forward and backward, and of one step's update, alone."""

    forward_s: float
    backward_s: float
    update_s: float


@dataclass(frozen=True)
class Bounds:
    """The shortest step that keeps today's order of work, and that any order could have.

    `resources` are seconds that each resource is busy in a step; `binds` names the one that decides
    most.
    """

    schedule_s: float
    ideal_s: float
    binds: str
    resources: dict[str, float]


def bounds_of(plan: Plan, rates: Rates, forward_s: float, backward_s: float) -> Bounds:
    """The bounds of a steady step whose micro-batches compute for so long.

    The schedule has the first unit updated before a forward computes; `ideal_s` does not wait.
    """
    schedule_s, resources, decided = 0.0, dict[str, float](), dict[str, float]()
    for phase in step_cost(plan, rates).phases:
        now = dict(phase.resources)
        compute = computing(now)
        now[compute] += backward_s if phase.name.startswith("backward") else forward_s
        slowest = max(now, key=lambda r: now[r] + (phase.lead if r == compute else 0.0))
        seconds = now[slowest] + (phase.lead if slowest == compute else 0.0)
        schedule_s += seconds
        decided[slowest] = decided.get(slowest, 0.0) + seconds
        for resource, seconds in now.items():
            resource = "compute" if resource == compute else resource
            resources[resource] = resources.get(resource, 0.0) + seconds
    binds = max(decided, key=lambda resource: decided[resource])
    return Bounds(schedule_s, max(resources.values()), binds, resources)


def rates_for(
    disk: dict[str, float], plan: Plan, measured: dict[str, float] | None, phases: Phases | None
) -> Rates | None:
    """Rates to bound with: the disk's, and the machine's if they were `measured` on their own.

    Else the update's is what the engine's own phases say. None where neither is known.
    """
    if measured is not None:
        return Rates.of(measured | disk)
    if phases is None:
        return None
    return Rates.of(disk | {"update.fp32": plan.num_trained / max(phases.update_s, 1e-9)})


def compute_in(shares: Shares, num_micro_batches: int) -> tuple[float, float]:
    """Seconds of compute in one forward and one backward, over so many traced micro-batches.

    A recomputation belongs to its backward. Only where compute has a clock of its own are waits
    left out of it.
    """
    compute = shares.timeline.of("compute")
    kinds = {
        kind: union((s.begin, s.end) for s in compute if s.what == kind)
        for kind in ("forward", "backward")
    }
    forward = without(kinds["forward"], kinds["backward"])
    return length(forward) / num_micro_batches, length(kinds["backward"]) / num_micro_batches


def links_in_pass(shares: Shares) -> float | None:
    """Bytes a second, both directions together, while optimizer passes stream state.

    In each traced step that is from the first copy of state to the last one's end, and all copies
    count that go on meanwhile, for as long as they do. None where no state is copied.
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
        folder: On the drive to measure.
        unified: The processors compute. Measure what disk traffic costs them, too.

    Returns:
        The rates of `Rates` that are the disk's, bytes per second; alone, without other load.
    """
    found = measure_disk([folder], IoConfig(), MEASURE_S)
    if unified:
        busy = measure_disk([folder], IoConfig(), MEASURE_S, busy=True)
        found[DISK_PER_CPU_S] = busy[DISK_PER_CPU_S]
    return found

"""How fast a step could be: lane rates of the disk, and the two bounds of DESIGN, section 1."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from infinity.bench.disk_rates import measure_disk
from infinity.config import IoConfig

MEASURE_S = 2.0


@dataclass(frozen=True)
class Rates:
    """Bytes per second of the disk; `mixed` counts both directions, moved 1:1."""

    read: float
    write: float
    mixed: float


@dataclass(frozen=True)
class Phases:
    """Seconds of one micro-batch's forward and backward, and of one step's update, alone."""

    forward_s: float
    backward_s: float
    update_s: float


@dataclass(frozen=True)
class Traffic:
    """Disk bytes of one step with weights and state on disk and gradients in RAM.

    The sweep writes as much as it reads. What else is read are weights: once for the last
    backward (the first forward gets them from the sweep), twice for every other micro-batch.
    """

    sweep_bytes: int  # both directions
    weight_pass_bytes: float  # one forward or backward

    @staticmethod
    def of(predicted: dict[str, int], num_micro_batches: int) -> Traffic:
        """Divide a plan's predicted bytes."""
        written, read = predicted["disk_write"], predicted["disk_read"]
        return Traffic(2 * written, (read - written) / (2 * num_micro_batches - 1))


def schedule_bound_s(
    phases: Phases, rates: Rates, traffic: Traffic, num_micro_batches: int, unified: bool
) -> float:
    """Return the shortest step that keeps today's order of work."""
    weights_s = traffic.weight_pass_bytes / rates.read
    sweep_s = traffic.sweep_bytes / rates.mixed
    middle_s = max(phases.forward_s + phases.backward_s, 2 * weights_s)
    if unified:
        first_s = max(phases.forward_s + phases.update_s, sweep_s)
    else:
        first_s = max(phases.forward_s, phases.update_s, sweep_s)
    return (num_micro_batches - 1) * middle_s + max(phases.backward_s, weights_s) + first_s


def ideal_bound_s(
    phases: Phases, rates: Rates, traffic: Traffic, num_micro_batches: int, unified: bool
) -> float:
    """Return the shortest step that any order of the same work could have."""
    compute_s = num_micro_batches * (phases.forward_s + phases.backward_s)
    num_passes = 2 * num_micro_batches - 1
    disk_s = traffic.sweep_bytes / rates.mixed + num_passes * traffic.weight_pass_bytes / rates.read
    if unified:
        return max(compute_s + phases.update_s, disk_s)
    return max(compute_s, phases.update_s, disk_s)


def measure_rates(folder: Path) -> Rates:
    """Read, write and mix chunk records in `folder` through the engine's own disk tier."""
    found = measure_disk([folder], IoConfig(), MEASURE_S)
    return Rates(found["disk_read"], found["disk_write"], found["disk_mixed"])

"""Interleaved rounds: contenders alternate, so that slow phases of the machine affect all."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from infinity.swap_benchmark.contenders import (
    Contender,
    EngineContender,
    IoSettings,
    Sample,
    UnavailableError,
)
from infinity.swap_benchmark.load import MODES, Load, Mode, Testbed, make_load

Item = TypeVar("Item")
Samples = dict[Mode, dict[str, list[Sample]]]
DEFAULTS = {name: IoSettings(name) for name in ("io_uring", "threads")}
_salts = itertools.count(1)
# Assumed rate of a drive for its first sample, in bytes per second.
_FIRST_RATE = 10**9
_PROBE_S = 0.25
_NUM_PROBES = 2  # the first probe also wakes up the drive


def rotated(items: Sequence[Item], by: int) -> list[Item]:
    """Return the items rotated left by `by`."""
    by %= max(1, len(items))
    return [*items[by:], *items[:by]]


def salted(load: Load) -> Load:
    """Return the same load with another salt."""
    return dataclasses.replace(load, salt=next(_salts))


def take_turns(
    contenders: Mapping[Mode, Sequence[Contender]],
    loads: Mapping[Mode, Load],
    num_rounds: int,
    *,
    left_out: dict[str, str],
    on_sample: Callable[[], None] = lambda: None,
) -> Samples:
    """Run each contender of each mode once per round, in an order that rotates.

    Args:
        contenders: Contenders by mode.
        loads: Load by mode.
        num_rounds: Number of rounds.
        left_out: Output: reason by name of each contender that raised `UnavailableError`.
        on_sample: Called after each sample.

    Returns:
        Samples by mode and contender, one per round, without contenders left out.

    Raises:
        InfinityError: A request failed, or wrong bytes were read or written.
    """
    samples: Samples = {
        mode: {c.name: [] for c in mode_contenders} for mode, mode_contenders in contenders.items()
    }
    for number in range(num_rounds):
        for mode, mode_contenders in contenders.items():
            present = [c for c in mode_contenders if c.name in samples[mode]]
            for contender in rotated(present, number):
                try:
                    sample = contender.run(salted(loads[mode]))
                except UnavailableError as error:
                    left_out[contender.name] = " ".join(str(error).split())
                    del samples[mode][contender.name]
                else:
                    samples[mode][contender.name].append(sample)
                on_sample()
    return samples


def median_rate(samples: Sequence[Sample]) -> float:
    """Return the median rate in bytes per second."""
    return statistics.median(sample.rate for sample in samples)


def median_cpu(samples: Sequence[Sample]) -> float:
    """Return the median of processor seconds per GiB."""
    return statistics.median(sample.cpu_s_per_gib for sample in samples)


def usable_backends(answers: Sequence[Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """Return the back ends that work on every path, best first.

    Args:
        answers: `Drive.backends` of each path.

    Raises:
        UnavailableError: No back end works on all paths.
    """
    usable = [name for name in DEFAULTS if all(answer[name]["ok"] for answer in answers)]
    if not usable:
        raise UnavailableError("no I/O back end works on all paths")
    return usable


def measure_drives_alone(
    testbed: Testbed, settings: IoSettings, target_s: float
) -> list[dict[Mode, float]]:
    """Return the rate of each drive alone by mode, from samples of at most `target_s` seconds."""
    contender = EngineContender(testbed, settings)
    try:
        rates: list[dict[Mode, float]] = []
        for index in range(testbed.num_files):
            alone = [_FIRST_RATE * (number == index) for number in range(testbed.num_files)]
            drive_rates: dict[Mode, float] = {}
            for mode in MODES:
                load = _load(testbed, mode, alone, min(_PROBE_S, target_s))
                for _ in range(_NUM_PROBES):
                    sample = contender.run(salted(load))
                drive_rates[mode] = sample.rate
            rates.append(drive_rates)
        return rates
    finally:
        contender.close()


def make_loads(
    testbed: Testbed, rates: Sequence[Mapping[Mode, float]], target_s: float
) -> dict[Mode, Load]:
    """Return a load of about `target_s` seconds by mode, for drives with these rates."""
    return {mode: _load(testbed, mode, [r[mode] for r in rates], target_s) for mode in MODES}


def _load(testbed: Testbed, mode: Mode, rates: Sequence[float], target_s: float) -> Load:
    return make_load(
        mode,
        rates=rates,
        target_s=target_s,
        chunk_bytes=testbed.chunk_bytes,
        region_bytes=testbed.region_bytes,
    )

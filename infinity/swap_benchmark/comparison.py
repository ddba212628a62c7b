"""Comparison of infinity's I/O engine with plain O_DIRECT threads, in interleaved rounds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

from infinity.plan.load import ProcessorTimes, describe_other_load
from infinity.swap_benchmark.contenders import (
    Contender,
    EngineContender,
    IoSettings,
    PlainThreads,
    Sample,
)
from infinity.swap_benchmark.load import MODES, Mode, Testbed
from infinity.swap_benchmark.rounds import make_loads, measure_drives_alone, median_rate, take_turns

CHUNK_BYTES = 16 * 2**20
# Candidates for plain threads: block size in bytes, number of threads. The fastest one per mode
# is compared.
PLAIN = ((2**20, 4), (2**20, 8), (4 * 2**20, 4))
TRIAL_S = 0.1
SAMPLE_S = 0.3


@dataclass(frozen=True)
class Pairs:
    """Samples of one mode: the engine's and those of plain threads, one each per round."""

    ours: tuple[Sample, ...]
    plain: tuple[Sample, ...]
    tried: dict[str, float]
    """Bytes per second of all plain settings in their trial, fastest (the compared one) first."""

    @property
    def ratios(self) -> list[float]:
        """Rate of the engine divided by that of plain threads, per round."""
        return [a.rate / b.rate for a, b in zip(self.ours, self.plain, strict=True)]

    @property
    def ratio(self) -> float:
        """Median of `ratios`."""
        return statistics.median(self.ratios)


@dataclass(frozen=True)
class Comparison:
    """Result of `compare`."""

    settings: IoSettings
    modes: dict[Mode, Pairs]
    load: str
    """Text about other programs using processors in the paired rounds; "" if negligible."""

    def rates(self) -> dict[Mode, float]:
        """Return the engine's median bytes per second by mode; mixed counts both directions."""
        return {mode: median_rate(pairs.ours) for mode, pairs in self.modes.items()}


def compare(
    testbed: Testbed,
    settings: IoSettings,
    num_rounds: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Comparison:
    """Measure the engine and plain threads on the same files, and verify the bytes they move.

    Args:
        testbed: Prepared test files.
        settings: Settings of the engine.
        num_rounds: Number of paired rounds.
        progress: Called with the number of samples taken and to take.

    Raises:
        InfinityError: A request failed, or wrong bytes were read or written.
    """
    done, total = 0, len(MODES) * (len(PLAIN) + 2 * num_rounds)

    def on_sample() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    progress(done, total)
    rates = measure_drives_alone(testbed, settings, SAMPLE_S)
    trials, loads = make_loads(testbed, rates, TRIAL_S), make_loads(testbed, rates, SAMPLE_S)
    with ExitStack() as stack:
        plain_threads = [
            stack.enter_context(closing(PlainThreads(testbed, block, count)))
            for block, count in PLAIN
        ]
        engine = stack.enter_context(closing(EngineContender(testbed, settings)))
        candidates = dict.fromkeys(MODES, plain_threads)
        trial_samples = take_turns(candidates, trials, 1, left_out={}, on_sample=on_sample)
        trial_rates = {mode: _fastest_first(samples) for mode, samples in trial_samples.items()}
        fastest = {
            m: next(c for c in plain_threads if c.name == next(iter(trial_rates[m]))) for m in MODES
        }
        before = ProcessorTimes.now()
        pairs: dict[Mode, list[Contender]] = {mode: [engine, fastest[mode]] for mode in MODES}
        paired = take_turns(pairs, loads, num_rounds, left_out={}, on_sample=on_sample)
        load = describe_other_load(before, ProcessorTimes.now())
    modes = {
        mode: Pairs(
            tuple(samples[engine.name]), tuple(samples[fastest[mode].name]), trial_rates[mode]
        )
        for mode, samples in paired.items()
    }
    return Comparison(settings, modes, load)


def _fastest_first(samples: Mapping[str, Sequence[Sample]]) -> dict[str, float]:
    rates = {name: median_rate(each) for name, each in samples.items()}
    return dict(sorted(rates.items(), key=lambda item: -item[1]))

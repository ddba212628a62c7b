"""Rounds of the swap benchmark: tune infinity's settings, then choose the reference.

Calibration rounds select, separately for each mode, the fastest of fio, plain O_DIRECT threads and
DeepSpeed's handle. Only this reference is then compared with infinity, in new rounds, so that
lucky samples of the calibration do not count.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from infinity.swap_benchmark.contenders import (
    Contender,
    EngineContender,
    IoSettings,
    PlainThreads,
    Sample,
    UnavailableError,
)
from infinity.swap_benchmark.load import Load, Mode, Testbed
from infinity.swap_benchmark.rounds import DEFAULTS, Samples, median_rate, take_turns
from swap.contenders import AiofilesLoop, BufferedFiles, DeepSpeedHandle, Fio


def relative(samples: Mapping[str, Sequence[Sample]]) -> dict[str, float]:
    """Return the median over rounds of each contender's speed divided by the mean of the round.

    All contenders must have taken part in the same rounds.
    """
    names = list(samples)
    rounds = list(zip(*(samples[name] for name in names), strict=True))
    means = [statistics.fmean(sample.rate for sample in turn) for turn in rounds]
    return {
        name: statistics.median(
            sample.rate / mean for sample, mean in zip(samples[name], means, strict=True)
        )
        for name in names
    }


def best_first(samples: Mapping[str, Sequence[Sample]]) -> list[str]:
    """Return names from the fastest to the slowest."""
    speeds = relative(samples)
    return sorted(speeds, key=lambda name: -speeds[name])


_KIB, _MIB = 2**10, 2**20
GRID = {
    "io_uring": [
        IoSettings("io_uring", block_size=block, queue_depth=depth)
        for block in (512 * _KIB, _MIB, 2 * _MIB, 4 * _MIB)
        for depth in (4, 8, 16, 32)
    ],
    "threads": [
        IoSettings("threads", block_size=block, queue_depth=2 * count, num_threads=count)
        for block in (512 * _KIB, _MIB, 4 * _MIB)
        for count in (2, 4, 8, 16)
    ],
}
_NUM_TUNING_FINALISTS = 2  # finalists per mode
_NUM_REFERENCE_FINALISTS = 5
_NUM_FINAL_ROUNDS = 3
# Keep the default settings for smaller gains, which are noise on virtual disks.
WORTH_LEAVING = 1.03


@dataclass(frozen=True)
class Tuned:
    """Chosen settings per usable back end, and all settings that were tried."""

    settings: dict[str, IoSettings]
    tried: list[dict[str, Any]]
    """Per entry: the settings, bytes per second in each mode, and `score` of finalists (else None):
    speed relative to the fastest of the back end, in the worst mode."""


def tune(testbed: Testbed, backends: Sequence[str], loads: Mapping[Mode, Load]) -> Tuned:
    """Try the grid once in each mode, then the default and the best few of each in all modes.

    Raises `UnavailableError` if a back end of `backends` does not start.
    """
    field = {
        name: EngineContender(testbed, settings)
        for backend in backends
        for settings in GRID[backend]
        for name in [settings.name]
    }
    try:
        contenders = {mode: list(field.values()) for mode in loads}
        first = take_turns(contenders, loads, 1, left_out={})
        chosen: dict[str, IoSettings] = {}
        scores: dict[str, float] = {}
        for backend in backends:
            default = DEFAULTS[backend].name
            names = [default]
            for samples in first.values():
                backend_samples = {
                    n: s for n, s in samples.items() if field[n].settings.backend == backend
                }
                names += best_first(backend_samples)[:_NUM_TUNING_FINALISTS]
            finalists = [field[name] for name in dict.fromkeys(names)]
            finalists_by_mode = dict.fromkeys(loads, finalists)
            again = take_turns(finalists_by_mode, loads, _NUM_FINAL_ROUNDS, left_out={})
            backend_scores = worst_scores(again)
            chosen[backend] = field[choose(backend_scores, default)].settings
            scores |= backend_scores
    finally:
        for contender in field.values():
            contender.close()
    tried = [
        vars(contender.settings)
        | {f"{mode}_bytes_per_s": median_rate(samples[name]) for mode, samples in first.items()}
        | {"score": scores.get(name)}
        for name, contender in field.items()
    ]
    return Tuned(chosen, tried)


def worst_scores(samples: Samples) -> dict[str, float]:
    """Return each contender's speed relative to the fastest, in its worst mode; at most 1.

    So settings that are good in all modes beat those that are slow in one.
    """
    by_mode = [relative(mode_samples) for mode_samples in samples.values()]
    return {
        name: min(speeds[name] / max(speeds.values()) for speeds in by_mode) for name in by_mode[0]
    }


def choose(scores: Mapping[str, float], default: str) -> str:
    """Return the name with the best score, or the default if the gain is small."""
    best = max(scores, key=lambda name: scores[name])
    return best if scores[best] > WORTH_LEAVING * scores[default] else default


REFERENCE_FAMILIES = ("fio", "plain", "deepspeed")
COMPARABLE = (*REFERENCE_FAMILIES, "buffered", "aiofiles")
# Shown in addition to the reference, never used as one: see `PlainThreads`. Only modes with reads.
CACHED = "cached"
# (block, depth), (block, jobs or threads), (block, depth, threads).
_ASYNC = (
    (512 * _KIB, 16),
    *((block, depth) for block in (_MIB, 4 * _MIB) for depth in (4, 8, 16, 32)),
)
_JOBS = ((_MIB, 4), (_MIB, 8), (_MIB, 16), (4 * _MIB, 4))
_THREADS = tuple((block, count) for block in (_MIB, 4 * _MIB) for count in (2, 4, 8, 16))
_CACHED = ((_MIB // 2, 4), (_MIB, 2), (_MIB, 4))
_HANDLES = ((_MIB, 8, 1), (_MIB, 8, 2), (_MIB, 16, 1), (4 * _MIB, 16, 1))

Maker = Callable[[], Contender]


@dataclass(frozen=True)
class Calibration:
    """Results of the calibration: rates in bytes per second, fastest names first."""

    rates: dict[Mode, dict[str, float]]
    num_samples: int

    def best(self, mode: Mode, families: Mapping[str, str], *among: str) -> str:
        """Return the fastest name in a mode of the families `among`; default: reference families.

        `families` maps names to families. Raises `UnavailableError` if there is none.
        """
        for name in self.rates[mode]:
            if families[name] in (among or REFERENCE_FAMILIES):
                return name
        raise UnavailableError(f"no {' or '.join(among) or 'reference'} took part in {mode}")


class Field:
    """The contenders other than infinity; created once and closed together."""

    def __init__(self) -> None:
        self.contenders: dict[str, Contender] = {}
        self.left_out: dict[str, str] = {}

    @property
    def families(self) -> dict[str, str]:
        return {name: contender.family for name, contender in self.contenders.items()}

    def add(self, label: str, make: Maker) -> None:
        """Add a contender; if it is unavailable, store the reason under `label`."""
        try:
            contender = make()
        except UnavailableError as error:
            self.left_out[label] = " ".join(str(error).split())
        else:
            self.contenders[contender.name] = contender

    def of(self, families: Sequence[str]) -> list[Contender]:
        return [c for c in self.contenders.values() if c.family in families]

    def close(self) -> None:
        for contender in self.contenders.values():
            contender.close()


def gather(testbed: Testbed, compare: Sequence[str], ours: Sequence[IoSettings]) -> Field:
    """Return all reference candidates and the other contenders named in `compare`.

    The best settings of infinity, `ours`, are also tried with the candidates.
    """
    field = Field()
    for label, make in _candidates(testbed, ours):
        field.add(label, make)
    if "buffered" in compare:
        field.add("buffered", lambda: BufferedFiles(testbed))
    if "aiofiles" in compare:
        field.add("aiofiles", lambda: AiofilesLoop(testbed))
    return field


def _candidates(testbed: Testbed, ours: Sequence[IoSettings]) -> Iterator[tuple[str, Maker]]:
    chunk = testbed.chunk_bytes
    depths = dict.fromkeys([*_ASYNC, *((s.block_size, s.queue_depth) for s in ours)])
    threads = dict.fromkeys([*_THREADS, *((s.block_size, s.num_threads) for s in ours)])
    for engine in ("io_uring", "libaio"):
        for block, depth in depths:
            if block <= chunk:
                yield "fio", partial(Fio, testbed, engine, block, depth)
    for block, jobs in _JOBS:
        if block * jobs <= chunk:  # the jobs divide a span of full chunks
            yield "fio", partial(Fio, testbed, "psync", block, jobs)
    for block, count in threads:
        if block <= chunk:
            yield "plain", partial(PlainThreads, testbed, block, count)
    for block, count in _CACHED:
        if block <= chunk:
            yield "cached", partial(PlainThreads, testbed, block, count, cached=True)
    for block, depth, count in _HANDLES:
        if block <= chunk:
            yield "deepspeed", partial(DeepSpeedHandle, testbed, block, depth, count)


def calibrate(field: Field, loads: Mapping[Mode, Load]) -> Calibration:
    """Run every candidate once in each mode, then the best few of each mode again.

    Candidates that fail are added to `field.left_out`. Raises `UnavailableError` if all fail.
    """
    candidates = dict.fromkeys(loads, field.of((*REFERENCE_FAMILIES, CACHED)))
    first = take_turns(candidates, loads, 1, left_out=field.left_out)
    finalists: dict[Mode, list[Contender]] = {}
    for mode, samples in first.items():
        ranked = [field.contenders[name] for name in best_first(samples)]
        others = [contender for contender in ranked if contender.family != CACHED]
        cached = [contender for contender in ranked if contender.family == CACHED]
        finalists[mode] = others[:_NUM_REFERENCE_FINALISTS] + cached[:1]
    again = take_turns(finalists, loads, _NUM_FINAL_ROUNDS, left_out=field.left_out)
    rates = {mode: _ranked(first[mode], again[mode]) for mode in loads}
    for ranked in rates.values():
        for name in field.left_out:
            ranked.pop(name, None)
    return Calibration(rates, _count(first) + _count(again))


def _ranked(
    first: Mapping[str, Sequence[Sample]], again: Mapping[str, Sequence[Sample]]
) -> dict[str, float]:
    """Return finalists by their second rounds, then the others by their first."""
    ranked = {name: median_rate(again[name]) for name in best_first(again)}
    for name in best_first(first):
        ranked.setdefault(name, median_rate(first[name]))
    return ranked


def _count(samples: Samples) -> int:
    return sum(len(taken) for by_name in samples.values() for taken in by_name.values())


def compared(
    field: Field, calibration: Calibration, mode: Mode, compare: Sequence[str]
) -> list[Contender]:
    """Return the best contender in a mode of each family in `compare`, and of `CACHED` if read."""
    chosen = []
    for family in [*compare, *([CACHED] if mode != "write" else [])]:
        if family in (*REFERENCE_FAMILIES, CACHED):
            with suppress(UnavailableError):
                chosen.append(field.contenders[calibration.best(mode, field.families, family)])
        else:
            chosen += field.of([family])
    return chosen

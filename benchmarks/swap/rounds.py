"""Rounds of the swap benchmark: settings for ours, then the strongest of the other contenders.

Calibration rounds pick, for each mode
apart, the fastest of fio, plain O_DIRECT threads and the peer's handle; only that one is then
paired with ours, in rounds of their own, so that luck in the calibration does not count.
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
    """Return each contender's median speed against the mean of its round; 1 is average.

    All must have taken part in the same rounds.
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
    """Names from the fastest to the slowest."""
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
_NUM_OF_OURS = 2  # of each mode, that are looked at again
_NUM_OF_OTHERS = 5
_NUM_FINAL_ROUNDS = 3
# A virtual disk's mood is worth more than this; less is no reason to leave the default.
WORTH_LEAVING = 1.03


@dataclass(frozen=True)
class Tuned:
    """The settings chosen for each back end that works, and everything that was tried."""

    settings: dict[str, IoSettings]
    tried: list[dict[str, Any]]
    """Per settings: the settings, bytes per second in each mode, and `score` if it came to the
    second look: its speed against the fastest of its back end, in the mode where it does worst."""


def tune(testbed: Testbed, backends: Sequence[str], loads: Mapping[Mode, Load]) -> Tuned:
    """Try the grid once in each mode, then the best few of each, and the default, in all modes.

    Raises `UnavailableError` when a back end of `backends` does not start.
    """
    field = {
        name: EngineContender(testbed, settings)
        for backend in backends
        for settings in GRID[backend]
        for name in [settings.name]
    }
    try:
        everyone = {mode: list(field.values()) for mode in loads}
        first = take_turns(everyone, loads, 1, left_out={})
        chosen: dict[str, IoSettings] = {}
        scores: dict[str, float] = {}
        for backend in backends:
            default = DEFAULTS[backend].name
            names = [default]
            for found in first.values():
                mine = {n: s for n, s in found.items() if field[n].settings.backend == backend}
                names += best_first(mine)[:_NUM_OF_OURS]
            finalists = [field[name] for name in dict.fromkeys(names)]
            everywhere = dict.fromkeys(loads, finalists)
            again = take_turns(everywhere, loads, _NUM_FINAL_ROUNDS, left_out={})
            mine_scores = worst_scores(again)
            chosen[backend] = field[choose(mine_scores, default)].settings
            scores |= mine_scores
    finally:
        for contender in field.values():
            contender.close()
    tried = [
        vars(contender.settings)
        | {f"{mode}_bytes_per_s": median_rate(found[name]) for mode, found in first.items()}
        | {"score": scores.get(name)}
        for name, contender in field.items()
    ]
    return Tuned(chosen, tried)


def worst_scores(samples: Samples) -> dict[str, float]:
    """Each contender's speed against the fastest's, in the mode where that is least; at most 1.

    One that is good on the whole and reads slowly loses to one that does everything well.
    """
    by_mode = [relative(found) for found in samples.values()]
    return {
        name: min(speeds[name] / max(speeds.values()) for speeds in by_mode) for name in by_mode[0]
    }


def choose(scores: Mapping[str, float], default: str) -> str:
    """Return the one with the best score, or the default where that is hardly better."""
    best = max(scores, key=lambda name: scores[name])
    return best if scores[best] > WORTH_LEAVING * scores[default] else default


REFERENCE_FAMILIES = ("fio", "plain", "deepspeed")
COMPARABLE = (*REFERENCE_FAMILIES, "buffered", "aiofiles")
# Beside the reference and never one, see `PlainThreads`. Takes part wherever something is read.
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
    """What was found: rates in bytes per second, fastest names first."""

    rates: dict[Mode, dict[str, float]]
    num_samples: int

    def best(self, mode: Mode, families: Mapping[str, str], *among: str) -> str:
        """Return the fastest name in a mode, of the families `among`, or of those of references.

        `families` tells each name's. Raises `UnavailableError` if there is none.
        """
        for name in self.rates[mode]:
            if families[name] in (among or REFERENCE_FAMILIES):
                return name
        raise UnavailableError(f"no {' or '.join(among) or 'reference'} took part in {mode}")


class Field:
    """The contenders of a benchmark that are not ours; made once, closed together."""

    def __init__(self) -> None:
        self.contenders: dict[str, Contender] = {}
        self.left_out: dict[str, str] = {}

    @property
    def families(self) -> dict[str, str]:
        return {name: contender.family for name, contender in self.contenders.items()}

    def add(self, label: str, make: Maker) -> None:
        """Add one; if it cannot take part, note under `label` why."""
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
    """Return every reference candidate, and what `compare` asks for beside them.

    The settings found best for `ours` are tried with the others' engines too.
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
        if block * jobs <= chunk:  # jobs divide a span of whole chunks among them
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

    A candidate that fails goes to `field.left_out`. Raises `UnavailableError` if none is left.
    """
    everyone = dict.fromkeys(loads, field.of((*REFERENCE_FAMILIES, CACHED)))
    first = take_turns(everyone, loads, 1, left_out=field.left_out)
    finalists: dict[Mode, list[Contender]] = {}
    for mode, found in first.items():
        ranked = [field.contenders[name] for name in best_first(found)]
        others = [contender for contender in ranked if contender.family != CACHED]
        cached = [contender for contender in ranked if contender.family == CACHED]
        finalists[mode] = others[:_NUM_OF_OTHERS] + cached[:1]
    again = take_turns(finalists, loads, _NUM_FINAL_ROUNDS, left_out=field.left_out)
    rates = {mode: _ranked(first[mode], again[mode]) for mode in loads}
    for ranked in rates.values():
        for name in field.left_out:
            ranked.pop(name, None)
    return Calibration(rates, _count(first) + _count(again))


def _ranked(
    first: Mapping[str, Sequence[Sample]], again: Mapping[str, Sequence[Sample]]
) -> dict[str, float]:
    """Finalists by their second look, then the others by their only one."""
    ranked = {name: median_rate(again[name]) for name in best_first(again)}
    for name in best_first(first):
        ranked.setdefault(name, median_rate(first[name]))
    return ranked


def _count(samples: Samples) -> int:
    return sum(len(found) for by_name in samples.values() for found in by_name.values())


def compared(
    field: Field, calibration: Calibration, mode: Mode, compare: Sequence[str]
) -> list[Contender]:
    """Return who `compare` names in a mode, the best of each family; and who reads cached."""
    chosen = []
    for family in [*compare, *([CACHED] if mode != "write" else [])]:
        if family in (*REFERENCE_FAMILIES, CACHED):
            with suppress(UnavailableError):
                chosen.append(field.contenders[calibration.best(mode, field.families, family)])
        else:
            chosen += field.of([family])
    return chosen

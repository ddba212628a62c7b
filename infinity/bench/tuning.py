"""Which block size, depth and thread count suit a drive: a brief sweep, then a second look."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infinity.bench.contender import UnavailableError
from infinity.bench.load import Load, Mode
from infinity.bench.ours import EngineContender, IoSettings
from infinity.bench.ratios import geometric_mean
from infinity.bench.rounds import Samples, median_rate, relative, take_turns
from infinity.bench.testbed import Testbed

_KIB, _MIB = 2**10, 2**20
DEFAULTS = {
    "io_uring": IoSettings("io_uring"),
    "threads": IoSettings("threads"),
}
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
_NUM_FINALISTS = 3
_NUM_FINAL_ROUNDS = 3
# A virtual disk's mood is worth more than this; less is no reason to leave the default.
WORTH_LEAVING = 1.03


@dataclass(frozen=True)
class Tuned:
    """The settings chosen for each back end that works, and everything that was tried."""

    settings: dict[str, IoSettings]
    tried: list[dict[str, Any]]
    """Per settings: the settings, `mixed_bytes_per_s`, and `score` if it came to the second look
    (speed over all modes against the default's)."""


def tune(
    testbed: Testbed,
    backends: Sequence[str],
    loads: Mapping[Mode, Load],
    *,
    on_sample: Callable[[], None] = lambda: None,
) -> Tuned:
    """Try the grid once with the mixed load, then the best few and the default in all modes.

    Raises `UnavailableError` when a back end of `backends` does not start.
    """
    field = {
        name: EngineContender(testbed, settings)
        for backend in backends
        for settings in _with_default(backend)
        for name in [settings.name]
    }
    try:
        first = take_turns(
            {"mixed": list(field.values())}, loads, 1, left_out={}, on_sample=on_sample
        )["mixed"]
        chosen: dict[str, IoSettings] = {}
        scores: dict[str, float] = {}
        for backend in backends:
            mine = {n: s for n, s in first.items() if field[n].settings.backend == backend}
            speeds = relative(mine)
            default = DEFAULTS[backend].name
            names = sorted(speeds, key=lambda name: -speeds[name])[:_NUM_FINALISTS]
            finalists = [field[name] for name in dict.fromkeys([default, *names])]
            again = take_turns(
                dict.fromkeys(loads, finalists),
                loads,
                _NUM_FINAL_ROUNDS,
                left_out={},
                on_sample=on_sample,
            )
            mine_scores = scores_against(again, default)
            chosen[backend] = field[choose(mine_scores, default)].settings
            scores |= mine_scores
    finally:
        for contender in field.values():
            contender.close()
    tried = [
        {
            **field[name].settings.as_dict(),
            "mixed_bytes_per_s": median_rate(samples),
            "score": scores.get(name),
        }
        for name, samples in first.items()
    ]
    return Tuned(chosen, tried)


def num_samples(backends: Sequence[str], num_modes: int) -> int:
    """How many samples `tune` takes at most, for a progress bar."""
    grid = sum(len(_with_default(backend)) for backend in backends)
    return grid + len(backends) * (_NUM_FINALISTS + 1) * _NUM_FINAL_ROUNDS * num_modes


def scores_against(samples: Samples, default: str) -> dict[str, float]:
    """Return each contender's speed over all modes; the default has 1."""
    by_mode = [relative(found) for found in samples.values()]
    return {
        name: geometric_mean([speeds[name] / speeds[default] for speeds in by_mode])
        for name in by_mode[0]
    }


def choose(scores: Mapping[str, float], default: str) -> str:
    """Return the fastest, or the default where the fastest is hardly faster."""
    best = max(scores, key=lambda name: scores[name])
    return best if scores[best] > WORTH_LEAVING else default


def _with_default(backend: str) -> list[IoSettings]:
    grid = GRID[backend]
    return list(dict.fromkeys([DEFAULTS[backend], *grid]))


def usable_backends(answers: Sequence[Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """Return the back ends that work on every path, best first.

    `answers` are `Drive.backends`. Raises `UnavailableError` when none works everywhere.
    """
    usable = [name for name in DEFAULTS if all(answer[name]["ok"] for answer in answers)]
    if not usable:
        raise UnavailableError("no I/O back end works on all paths")
    return usable

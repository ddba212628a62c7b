"""Contenders take turns: what slows the machine for a while slows all of them alike."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from infinity.bench.contender import Contender, Sample, UnavailableError
from infinity.bench.load import Load, Mode

Item = TypeVar("Item")
Samples = dict[Mode, dict[str, list[Sample]]]
_salts = itertools.count(1)


def rotated(items: Sequence[Item], by: int) -> list[Item]:
    """Return the items, beginning with another one each time."""
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
    """Run every contender of a mode once per round, in an order that rotates.

    Returns {mode: {contender: samples, one per round}}. Who cannot go on is moved to `left_out`
    with the reason and has no samples in that mode.
    """
    samples: Samples = {mode: {c.name: [] for c in who} for mode, who in contenders.items()}
    for number in range(num_rounds):
        for mode, who in contenders.items():
            present = [c for c in who if c.name in samples[mode]]
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
    """Bytes per second."""
    return statistics.median(sample.rate for sample in samples)


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


def best_first(samples: Mapping[str, Sequence[Sample]]) -> Iterator[str]:
    """Yield names from the fastest to the slowest."""
    speeds = relative(samples)
    yield from sorted(speeds, key=lambda name: -speeds[name])

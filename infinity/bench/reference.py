"""The strongest of the others, chosen before ours is compared with it (issue 3, rule 1).

Calibration rounds pick, for each mode apart, the fastest of fio, plain O_DIRECT threads and the
peer's handle. Only that one is then paired with ours, in rounds of their own, so that luck in the
calibration does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from infinity.bench.contender import Contender, Sample, UnavailableError
from infinity.bench.fio import Fio
from infinity.bench.load import Load, Mode
from infinity.bench.ours import IoSettings
from infinity.bench.peer import DeepSpeedHandle
from infinity.bench.plain import AiofilesLoop, BufferedFiles, PlainThreads
from infinity.bench.rounds import Samples, best_first, median_rate, take_turns
from infinity.bench.testbed import Testbed

_KIB, _MIB = 2**10, 2**20
REFERENCE_FAMILIES = ("fio", "plain", "deepspeed")
COMPARABLE = (*REFERENCE_FAMILIES, "buffered", "aiofiles")
_NUM_FINALISTS = 5
_NUM_FINAL_ROUNDS = 3
# (block, depth), (block, jobs or threads), (block, depth, threads).
_ASYNC = (
    (512 * _KIB, 16),
    *((block, depth) for block in (_MIB, 4 * _MIB) for depth in (4, 8, 16, 32)),
)
_JOBS = ((_MIB, 4), (_MIB, 8), (_MIB, 16), (4 * _MIB, 4))
_THREADS = tuple((block, count) for block in (_MIB, 4 * _MIB) for count in (2, 4, 8, 16))
_HANDLES = ((_MIB, 8, 1), (_MIB, 8, 2), (_MIB, 16, 1), (4 * _MIB, 16, 1))

Maker = Callable[[], Contender]


@dataclass(frozen=True)
class Calibration:
    """What was found: rates in bytes per second, fastest names first."""

    rates: dict[Mode, dict[str, float]]
    num_samples: int

    def best(self, mode: Mode, families: Mapping[str, str], family: str | None = None) -> str:
        """Return the fastest name in a mode, among one family if given.

        `families` tells each name's. Raises `UnavailableError` if there is none.
        """
        for name in self.rates[mode]:
            if family is None or families[name] == family:
                return name
        raise UnavailableError(f"no {family or 'contender'} took part in {mode}")


class Field:
    """The contenders of a benchmark that are not ours; made once, closed together."""

    def __init__(self) -> None:
        self.contenders: dict[str, Contender] = {}
        self.left_out: dict[str, str] = {}

    @property
    def families(self) -> dict[str, str]:
        """The family of each name."""
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
        """Return the contenders of these families."""
        return [c for c in self.contenders.values() if c.family in families]

    def close(self) -> None:
        """Close all."""
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
    for block, depth, count in _HANDLES:
        if block <= chunk:
            yield "deepspeed", partial(DeepSpeedHandle, testbed, block, depth, count)


def calibrate(
    field: Field, loads: Mapping[Mode, Load], *, on_sample: Callable[[], None] = lambda: None
) -> Calibration:
    """Run every candidate once in each mode, then the best few of each mode again.

    A candidate that fails goes to `field.left_out`. Raises `UnavailableError` if none is left.
    """
    everyone = field.of(REFERENCE_FAMILIES)
    first = take_turns(
        dict.fromkeys(loads, everyone),
        loads,
        1,
        left_out=field.left_out,
        on_sample=on_sample,
    )
    finalists: dict[Mode, list[Contender]] = {
        mode: [field.contenders[name] for name in list(best_first(found))[:_NUM_FINALISTS]]
        for mode, found in first.items()
    }
    again = take_turns(
        finalists, loads, _NUM_FINAL_ROUNDS, left_out=field.left_out, on_sample=on_sample
    )
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


def num_samples(field: Field, num_modes: int) -> int:
    """How many samples `calibrate` takes at most, for a progress bar."""
    num_candidates = len(field.of(REFERENCE_FAMILIES))
    num_finalists = min(_NUM_FINALISTS, num_candidates)
    return num_modes * (num_candidates + num_finalists * _NUM_FINAL_ROUNDS)


def compared(
    field: Field, calibration: Calibration, mode: Mode, compare: Sequence[str]
) -> list[Contender]:
    """Return who `compare` names in a mode: the best of each family."""
    chosen = []
    for family in compare:
        if family in REFERENCE_FAMILIES:
            with suppress(UnavailableError):
                chosen.append(field.contenders[calibration.best(mode, field.families, family)])
        else:
            chosen += field.of([family])
    return chosen

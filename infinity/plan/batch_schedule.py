"""Search for the fastest batch schedule that fits, together with placement.

[Note: batch schedule]
The tokens of a step are computed in micro-batches, one after the other. Each block may compute a
micro-batch in slices, for which its weights are fetched once. Every additional micro-batch fetches
all weights twice more and moves the gradient sums once more in both directions; slices avoid that,
but the inputs of blocks for all slices exist at once. The first blocks may be recomputed in
backward (what they save is needed longest), as few as necessary, and their inputs may be offloaded
to RAM or disk. Each schedule is planned and priced with a placement of its own, since activations
and resident weights compete for the same memory.

Not all combinations are tried. Of the tiers for inputs, the fastest with enough capacity is used
(and RAM instead of the device, for the fastest schedule of each number of micro-batches, since that
leaves device memory to weights); of the numbers of slices, the smallest that fits (and the largest,
which leaves memory to placement); and more micro-batches only until they are slower. Experts of a
layer may form other ranges (`model.partition.other_ranges`): these are tried with the number of
micro-batches that was found before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, get_args

from infinity.config.schema import ActivationsConfig, Config, Offload, Recompute, checkpoint_of
from infinity.errors import DoesNotFitError
from infinity.plan.activations import block_widths, num_blocks
from infinity.plan.budget import budgeted_bytes
from infinity.plan.inputs import MARGIN, PlanEstimate, PlanInput, price

LEAST_TOKENS = {True: 64, False: 512}  # of a slice, on a CPU and on a GPU; fewer underuse it
PER_DOUBLING = 0.005  # of a step's time: overhead of twice the slices, to break ties
MOST_MICRO_BATCHES, MOST_SLICES = 1024, 256
# The search ends after MOST_SLOWER counts in a row that take WORSE times the fastest.
WORSE, MOST_SLOWER = 1.1, 2
MOST_REFINED = 3  # pairs (micro-batches, slices)
RANGE_GAIN = 0.02  # of a step's time: smaller gains do not justify other ranges of experts
# Configuration keys that a schedule sets.
KEYS = ("gradient_accumulation_steps", "activations", "experts_per_unit")
_OFFLOADS: tuple[Offload, ...] = get_args(Offload)  # fastest first


@dataclass(frozen=True, slots=True)
class BatchSchedule:
    """Division of a step into `micro_batches` of `tokens` each. See [Note: batch schedule].

    `recompute` is the number of blocks, the first ones, that are recomputed ("all" also if the
    model recomputes them); `sliced_logits` refers to head and loss, `experts` is the number of
    experts per unit (None: derived from the configuration). In requested options None leaves the
    choice to the plan.
    """

    micro_batches: int | None = None
    tokens: int | None = None
    slices: int | None = None
    recompute: Recompute | None = None
    offload: Offload | None = None
    sliced_logits: bool = False
    experts: int | None = None

    @staticmethod
    def of(case: PlanInput) -> BatchSchedule:
        """Return the schedule of a case."""
        settings, experts = case.config.activations, case.config.experts_per_unit
        return BatchSchedule(
            case.micro_batches,
            case.work.tokens,
            settings.slices,
            case.work.recompute,
            settings.offload,
            settings.logits == "chunked",
            None if experts == "auto" else experts,
        )

    @staticmethod
    def named_by(
        settings: ActivationsConfig, micro_batches: int | None = None, slices: int | None = None
    ) -> BatchSchedule:
        """Return the options that a configuration sets explicitly.

        `micro_batches` and `slices` are those of a resumed run, which must keep them for equal
        results; None for a new run.
        """
        named = settings.model_fields_set
        return BatchSchedule(
            micro_batches=micro_batches,
            slices=slices or (settings.slices if "slices" in named else None),
            recompute=settings.recompute if "checkpoint" in named else None,
            offload=settings.offload if "offload" in named else None,
        )

    def line(self, blocks: int) -> str:
        """Describe the schedule for a model with a number of blocks."""
        many = (
            f"{self.micro_batches} micro-batches" if self.micro_batches != 1 else "one micro-batch"
        )
        clauses = [f"{many} of {self.tokens:,} tokens"]
        if (self.slices or 1) > 1:
            clauses[0] += f" in {self.slices} slices"
        if self.recompute:
            some = self.recompute != "all" and self.recompute < blocks
            which = f"{self.recompute} of {blocks} blocks" if some else "blocks"
            clauses.append(f"{which} recomputed in backward")
        if self.offload == "host":
            clauses.append("their inputs wait in RAM")
        elif self.offload == "disk":
            clauses.append("their inputs wait in RAM and on disk")
        if self.sliced_logits:
            clauses.append("logits in slices")
        if self.experts is not None:
            clauses.append(f"{self.experts} experts at a time")
        return ", ".join(clauses)

    @property
    def settings(self) -> dict[str, Any]:
        """Return the schedule as configuration keys."""
        return {
            "gradient_accumulation_steps": self.micro_batches,
            "activations": {
                "tokens": self.tokens,
                "slices": self.slices,
                "checkpoint": checkpoint_of(self.recompute or 0),
                "offload": self.offload,
            },
        } | ({} if self.experts is None else {"experts_per_unit": self.experts})


@dataclass(frozen=True, slots=True)
class ScheduleResult:
    """Fastest schedule that fits, and the next fastest; `best` is None if none fits."""

    wish: BatchSchedule
    best: PlanEstimate | None
    runner_up: PlanEstimate | None
    smallest: PlanInput
    """Case with the least activations, to report the missing bytes if none fits."""
    samples: int | None
    """Samples per step and rank, as passed to `choose_schedule`."""

    @property
    def case(self) -> PlanInput:
        """The fastest case, or the smallest if none fits."""
        return self.smallest if self.best is None else self.best.case

    def applied_to(self, config: Config) -> Config:
        """Return `config` with the chosen schedule, for `initialize`."""
        found = self.case.config
        return config.model_copy(update={name: getattr(found, name) for name in KEYS})


def choose_schedule(
    case: PlanInput,
    wish: BatchSchedule,
    samples: int | None = None,
    others: Iterable[PlanInput] = (),
) -> ScheduleResult:
    """Return the fastest schedule of a step that fits.

    `case` has all tokens of a step in one micro-batch; `samples` is the number of samples in a
    step, or None if unknown: then slices may be as small as `LEAST_TOKENS`. Options in `wish` that
    are not None are fixed. `others` are the same case in other units. On a device that is the host,
    activations need `MARGIN` times the estimate, unless nothing fits then; a device with its own
    memory has a reserve anyway.
    """
    chosen = _chosen(case, wish, samples)
    for other in others:
        best, near = chosen.best, wish
        if best is not None:  # a full search is slow
            near = replace(wish, micro_batches=best.case.micro_batches)
        found = _chosen(other, near, samples)
        if found.best is None:
            continue
        if best is None or _seconds(found.best) < (1 - RANGE_GAIN) * _seconds(best):
            runner_up = found.runner_up if best is None else best
            chosen = replace(found, wish=wish, runner_up=runner_up)
    return chosen


def _chosen(case: PlanInput, wish: BatchSchedule, samples: int | None) -> ScheduleResult:
    margin = MARGIN if case.machine.unified else 1.0
    chosen = _ScheduleSearch(case, wish, samples, margin).run()
    return chosen if chosen.best else _ScheduleSearch(case, wish, samples, 1.0).run()


class _ScheduleSearch:
    def __init__(
        self, case: PlanInput, wish: BatchSchedule, samples: int | None, margin: float
    ) -> None:
        self.case = case
        self.margin = margin
        unified = case.machine.unified
        if (wish.offload == "host" and unified) or (wish.offload and wish.recompute == 0):
            wish = replace(wish, offload="none")  # nothing to offload
        self.wish = wish
        self.tokens = case.work.tokens
        self.pieces = samples or max(self.tokens // LEAST_TOKENS[unified], 1)
        self.samples = samples
        self.blocks = num_blocks(case.units)
        self.has_inputs = bool(block_widths(case.units))  # of blocks, which can be offloaded
        self._rooms: dict[tuple[bool, str, int], int | None] = {}
        self._known: dict[BatchSchedule, PlanEstimate | None] = {}
        self.found: list[PlanEstimate] = []

    def run(self) -> ScheduleResult:
        fastest, slower = float("inf"), 0
        for count in self._counts():
            tried = [p for p in map(self._priced, self._candidates(count)) if p is not None]
            if not tried:
                continue
            self.found += tried
            best = min(tried, key=_seconds)
            seconds = _seconds(best)
            if seconds > WORSE * fastest and self._may_refine(best):
                seconds = _seconds(self._halve(best))  # recomputing fewer blocks may be faster
            slower = slower + 1 if seconds > WORSE * fastest else 0
            fastest = min(seconds, fastest)
            if slower == MOST_SLOWER:
                break
        self._refine()
        ranked = sorted(self.found, key=_seconds)
        first = ranked[0] if ranked else None
        others = (p for p in ranked if first is not None and _way(p) != _way(first))
        return ScheduleResult(self.wish, first, next(others, None), self._smallest(), self.samples)

    def _counts(self) -> Iterator[int]:
        """Yield the numbers of micro-batches to try, ascending."""
        if self.wish.micro_batches is not None:
            yield self.wish.micro_batches
            return
        yield from self._parts(self.pieces, MOST_MICRO_BATCHES)

    def _parts(self, pieces: int, most: int) -> list[int]:
        """Return the numbers of equal parts: divisors if samples are known, else powers of 2."""
        if self.samples is not None:
            return [n for n in range(1, min(pieces, most) + 1) if pieces % n == 0]
        return [1 << n for n in range(min(pieces, most).bit_length())]

    def _slices(self, count: int) -> list[int]:
        if self.wish.slices is not None:
            return [self.wish.slices]
        if not self.blocks:
            return [1]
        return self._parts(max(self.pieces // count, 1), MOST_SLICES)

    def _candidates(self, count: int) -> list[PlanInput]:
        """Return the schedules of a number of micro-batches that are worth planning."""
        found: list[PlanInput] = []
        for offload in _OFFLOADS if self.wish.offload is None else (self.wish.offload,):
            if not self._may_wait(offload):
                continue
            for again in ("none", "few", "all"):
                fewest = self._fewest(count, offload, again)
                found += [case for case in fewest if case not in found]
            if any(case.work.recompute == "all" for case in found):
                break  # slower tiers take longer
        return found

    def _may_wait(self, offload: str) -> bool:
        if offload == "none":
            return True
        if self.wish.recompute == 0 or not self.has_inputs:
            return False
        if offload == "host":
            return not self.case.machine.unified
        return bool(self.case.config.nvme_path)

    def _fewest(self, count: int, offload: Offload, again: str) -> Iterator[PlanInput]:
        """Yield cases: the fewest slices that fit, and the most if all blocks are recomputed."""
        most: PlanInput | None = None
        options = self._slices(count)
        for slices in options:
            case = self._with_recompute(count, slices, offload, again)
            if case is not None:
                yield case
                if again == "all" and slices != options[-1]:
                    most = self._with_recompute(count, options[-1], offload, again)
                break
        if most is not None:
            yield most

    def _with_recompute(
        self, count: int, slices: int, offload: Offload, again: str
    ) -> PlanInput | None:
        """Return the case with no, just enough or all blocks recomputed, or None if too large."""
        wish = self.wish.recompute
        if again == "few":  # with offloaded inputs all blocks first: see `_refine`
            if wish is not None or not self.blocks or offload != "none":
                return None
            low, high = 1, self.blocks - 1  # 0 and all are separate candidates
            if low > high or not self._has_room(self._of(count, slices, offload, high)):
                return None
            while low < high:
                middle = (low + high) // 2
                if self._has_room(self._of(count, slices, offload, middle)):
                    high = middle
                else:
                    low = middle + 1
            return self._of(count, slices, offload, high)
        blocks: Recompute = 0 if again == "none" else "all"
        if wish is not None:
            if (again == "all" and wish == 0) or (again == "none" and wish != 0):
                return None
            blocks = wish
        if offload != "none" and not blocks:
            return None
        case = self._of(count, slices, offload, blocks)
        return case if self._has_room(case) else None

    def _of(self, count: int, slices: int, offload: Offload, blocks: Recompute) -> PlanInput:
        tokens = -(-self.tokens // count)
        return self.case.with_schedule(count, tokens, slices, blocks, offload)

    def _has_room(self, case: PlanInput) -> bool:
        room = self._room(case)
        needed = self.margin * case.activations().total
        if room is None:
            return needed <= case.compute_bytes and self._priced(case) is not None
        return needed <= room

    def _room(self, case: PlanInput) -> int | None:
        """Return the bytes left to activations if all state is on the lowest allowed tiers.

        If no such plan fits, 0 with a disk. Without one None: some state has to share the memory
        with activations, and their size decides how much.
        """
        summed = case.micro_batches > 1 or case.config.activations.slices > 1
        away = case.micro_batches if case.config.activations.offload != "none" else 0
        key = (summed, case.config.activations.offload, away)
        if key not in self._rooms:
            used = (budgeted_bytes(plan)[case.compute_tier] for plan in case.lowest_plans())
            lowest = next(used, case.compute_bytes if case.config.nvme_path else None)
            self._rooms[key] = None if lowest is None else case.compute_bytes - lowest
        return self._rooms[key]

    def _priced(self, case: PlanInput) -> PlanEstimate | None:
        way = BatchSchedule.of(case)
        if way not in self._known:
            self._known[way] = None
            with suppress(DoesNotFitError):
                found = price(case)
                if self.margin * found.activations.total <= found.room:
                    self._known[way] = found
        return self._known[way]

    def _refine(self) -> None:
        """Try other numbers of recomputed blocks, and inputs in RAM, for the best schedules."""
        best: dict[tuple[int, int], PlanEstimate] = {}
        roomy: dict[int, PlanEstimate] = {}
        for priced in sorted(self.found, key=_seconds):
            best.setdefault((priced.case.micro_batches, priced.case.work.slices), priced)
            roomy.setdefault(priced.case.micro_batches, priced)
        for priced in filter(self._may_refine, list(best.values())[:MOST_REFINED]):
            self._halve(priced)
        for priced in filter(self._may_refine, roomy.values()):
            self._with_inputs_in_ram(priced)

    def _with_inputs_in_ram(self, best: PlanEstimate) -> None:
        """Try inputs of blocks in RAM, which leaves device memory to weights."""
        work, offload = best.case.work, best.case.config.activations.offload
        if offload == "none" and self.wish.offload is None and self._may_wait("host"):
            case = self._of(best.case.micro_batches, work.slices, "host", "all")
            priced = self._priced(case) if self._has_room(case) else None
            self.found += [priced] if priced is not None else []

    def _may_refine(self, priced: PlanEstimate) -> bool:
        return self.wish.recompute is None and bool(self.blocks and priced.case.work.recompute)

    def _halve(self, best: PlanEstimate) -> PlanEstimate:
        """Bisect between the best number of recomputed blocks and its tried neighbors."""
        now = BatchSchedule.of(best.case)
        low, high = 0, self.blocks
        at = self.blocks if now.recompute == "all" else now.recompute or 0
        for _ in range(3):
            for middle in sorted({(low + at) // 2, (at + high) // 2} - {at, 0, self.blocks}):
                case = self._of(
                    best.case.micro_batches, now.slices or 1, now.offload or "none", middle
                )
                priced = self._priced(case) if self._has_room(case) else None
                if priced is not None:
                    self.found.append(priced)
                if priced is not None and _seconds(priced) < _seconds(best):
                    low, high = (low, at) if middle < at else (at, high)
                    best, at = priced, middle
                    break
                low, high = (middle, high) if middle < at else (low, middle)
        return best

    def _smallest(self) -> PlanInput:
        """Return the case with the least activations that the options allow."""
        wish = self.wish
        counts = [wish.micro_batches] if wish.micro_batches else list(self._counts())
        blocks = "all" if wish.recompute is None else wish.recompute
        offload = wish.offload or ("disk" if self._may_wait("disk") and blocks else "none")
        options = (
            self._of(count, self._slices(count)[-1], tier, blocks)
            for count in {counts[0], counts[-1]}
            for tier in (offload, "none")
        )
        return min(options, key=lambda case: case.activations().total)


def _way(priced: PlanEstimate) -> tuple[Any, ...]:
    """Return the key by which schedules count as different; slices are not part of it."""
    found = BatchSchedule.of(priced.case)
    return found.micro_batches, found.recompute, found.offload, found.experts


def _seconds(priced: PlanEstimate) -> float:
    """Return the seconds of a step, slightly more with more slices to break ties."""
    return priced.cost.seconds * (1 + PER_DOUBLING * math.log2(priced.case.work.slices))

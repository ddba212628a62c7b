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
layer may form other ranges (`model.partition.range_size_variants`): these are tried with the number
of micro-batches that was found before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, get_args

from infinity.config.schema import ActivationsConfig, Config, Offload, Recompute, checkpoint_setting
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
    def explicit_in(
        settings: ActivationsConfig, micro_batches: int | None = None, slices: int | None = None
    ) -> BatchSchedule:
        """Return the options that a configuration sets explicitly.

        `micro_batches` and `slices` are those of a resumed run, which must keep them for equal
        results; None for a new run.
        """
        explicit = settings.model_fields_set
        return BatchSchedule(
            micro_batches=micro_batches,
            slices=slices or (settings.slices if "slices" in explicit else None),
            recompute=settings.recompute if "checkpoint" in explicit else None,
            offload=settings.offload if "offload" in explicit else None,
        )

    def line(self, blocks: int) -> str:
        """Describe the schedule for a model with a number of blocks."""
        batches = (
            f"{self.micro_batches} micro-batches" if self.micro_batches != 1 else "one micro-batch"
        )
        clauses = [f"{batches} of {self.tokens:,} tokens"]
        if (self.slices or 1) > 1:
            clauses[0] += f" in {self.slices} slices"
        if self.recompute:
            is_partial = self.recompute != "all" and self.recompute < blocks
            recomputed = f"{self.recompute} of {blocks} blocks" if is_partial else "blocks"
            clauses.append(f"{recomputed} recomputed in backward")
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
                "checkpoint": checkpoint_setting(self.recompute or 0),
                "offload": self.offload,
            },
        } | ({} if self.experts is None else {"experts_per_unit": self.experts})


@dataclass(frozen=True, slots=True)
class ScheduleResult:
    """Fastest schedule that fits, and the next fastest; `best` is None if none fits."""

    requested: BatchSchedule
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
        chosen = self.case.config
        return config.model_copy(update={name: getattr(chosen, name) for name in KEYS})


def choose_schedule(
    case: PlanInput,
    requested: BatchSchedule,
    samples: int | None,
    others: Iterable[PlanInput] = (),
) -> ScheduleResult:
    """Return the fastest schedule of a step that fits.

    `case` has all tokens of a step in one micro-batch; `samples` is the number of samples in a
    step, or None if unknown: then slices may be as small as `LEAST_TOKENS`. Options in `requested`
    that are not None are fixed. `others` are the same case in other units. On a device that is the
    host, activations need `MARGIN` times the estimate, unless nothing fits then; a device with its
    own memory has a reserve anyway.
    """
    chosen = _search(case, requested, samples)
    for other_case in others:
        best, fixed = chosen.best, requested
        if best is not None:  # a full search is slow
            fixed = replace(requested, micro_batches=best.case.micro_batches)
        result = _search(other_case, fixed, samples)
        if result.best is None:
            continue
        if best is None or _seconds(result.best) < (1 - RANGE_GAIN) * _seconds(best):
            runner_up = result.runner_up if best is None else best
            chosen = replace(result, requested=requested, runner_up=runner_up)
    return chosen


def _search(case: PlanInput, options: BatchSchedule, samples: int | None) -> ScheduleResult:
    margin = MARGIN if case.machine.unified else 1.0
    result = _ScheduleSearch(case, options, samples, margin).run()
    return result if result.best else _ScheduleSearch(case, options, samples, 1.0).run()


class _ScheduleSearch:
    def __init__(
        self, case: PlanInput, options: BatchSchedule, samples: int | None, margin: float
    ) -> None:
        self.case = case
        self.margin = margin
        unified = case.machine.unified
        if (options.offload == "host" and unified) or (options.offload and options.recompute == 0):
            options = replace(options, offload="none")  # nothing to offload
        self.options = options
        self.tokens = case.work.tokens
        self.max_parts = samples or max(self.tokens // LEAST_TOKENS[unified], 1)
        self.samples = samples
        self.blocks = num_blocks(case.units)
        self.has_inputs = bool(block_widths(case.units))  # of blocks, which can be offloaded
        self._available: dict[tuple[bool, str, int], int | None] = {}
        self._cached: dict[BatchSchedule, PlanEstimate | None] = {}
        self.estimates: list[PlanEstimate] = []

    def run(self) -> ScheduleResult:
        fastest, slower = float("inf"), 0
        for count in self._micro_batch_counts():
            estimates = [e for e in map(self._estimate, self._candidates(count)) if e is not None]
            if not estimates:
                continue
            self.estimates += estimates
            best = min(estimates, key=_seconds)
            seconds = _seconds(best)
            if seconds > WORSE * fastest and self._can_refine(best):
                # Recomputing fewer blocks may be faster.
                seconds = _seconds(self._bisect_recompute(best))
            slower = slower + 1 if seconds > WORSE * fastest else 0
            fastest = min(seconds, fastest)
            if slower == MOST_SLOWER:
                break
        self._refine()
        ranked = sorted(self.estimates, key=_seconds)
        first = ranked[0] if ranked else None
        others = (e for e in ranked if first is not None and _key(e) != _key(first))
        runner_up = next(others, None)
        return ScheduleResult(self.options, first, runner_up, self._smallest(), self.samples)

    def _micro_batch_counts(self) -> list[int]:
        if self.options.micro_batches is not None:
            return [self.options.micro_batches]
        return self._part_counts(self.max_parts, MOST_MICRO_BATCHES)

    def _part_counts(self, max_parts: int, limit: int) -> list[int]:
        """Return the numbers of equal parts: divisors if samples are known, else powers of 2."""
        if self.samples is not None:
            return [n for n in range(1, min(max_parts, limit) + 1) if max_parts % n == 0]
        return [1 << n for n in range(min(max_parts, limit).bit_length())]

    def _slice_counts(self, count: int) -> list[int]:
        if self.options.slices is not None:
            return [self.options.slices]
        if not self.blocks:
            return [1]
        return self._part_counts(max(self.max_parts // count, 1), MOST_SLICES)

    def _candidates(self, count: int) -> list[PlanInput]:
        """Return the schedules of a number of micro-batches that are worth planning."""
        candidates: list[PlanInput] = []
        for offload in _OFFLOADS if self.options.offload is None else (self.options.offload,):
            if not self._can_offload(offload):
                continue
            for amount in ("none", "few", "all"):
                cases = self._with_slices(count, offload, amount)
                candidates += [case for case in cases if case not in candidates]
            if any(case.work.recompute == "all" for case in candidates):
                break  # slower tiers take longer
        return candidates

    def _can_offload(self, offload: str) -> bool:
        if offload == "none":
            return True
        if self.options.recompute == 0 or not self.has_inputs:
            return False
        if offload == "host":
            return not self.case.machine.unified
        return bool(self.case.config.nvme_path)

    def _with_slices(self, count: int, offload: Offload, amount: str) -> Iterator[PlanInput]:
        """Yield cases: the fewest slices that fit, and the most if all blocks are recomputed."""
        most_slices: PlanInput | None = None
        counts = self._slice_counts(count)
        for slices in counts:
            case = self._with_recompute(count, slices, offload, amount)
            if case is not None:
                yield case
                if amount == "all" and slices != counts[-1]:
                    most_slices = self._with_recompute(count, counts[-1], offload, amount)
                break
        if most_slices is not None:
            yield most_slices

    def _with_recompute(
        self, count: int, slices: int, offload: Offload, amount: str
    ) -> PlanInput | None:
        """Return the case with no, just enough or all blocks recomputed, or None if too large."""
        requested = self.options.recompute
        if amount == "few":  # with offloaded inputs all blocks first: see `_refine`
            if requested is not None or not self.blocks or offload != "none":
                return None
            low, high = 1, self.blocks - 1  # 0 and all are separate candidates
            if low > high or not self._activations_fit(self._case(count, slices, offload, high)):
                return None
            while low < high:
                middle = (low + high) // 2
                if self._activations_fit(self._case(count, slices, offload, middle)):
                    high = middle
                else:
                    low = middle + 1
            return self._case(count, slices, offload, high)
        blocks: Recompute = 0 if amount == "none" else "all"
        if requested is not None:
            if (amount == "all" and requested == 0) or (amount == "none" and requested != 0):
                return None
            blocks = requested
        if offload != "none" and not blocks:
            return None
        case = self._case(count, slices, offload, blocks)
        return case if self._activations_fit(case) else None

    def _case(self, count: int, slices: int, offload: Offload, blocks: Recompute) -> PlanInput:
        tokens = -(-self.tokens // count)
        return self.case.with_schedule(count, tokens, slices, blocks, offload)

    def _activations_fit(self, case: PlanInput) -> bool:
        settings = case.config.activations
        summed = case.micro_batches > 1 or settings.slices > 1
        offloaded = case.micro_batches if settings.offload != "none" else 0
        key = (summed, settings.offload, offloaded)
        if key not in self._available:
            # Bytes left to activations if all state is on the lowest allowed tiers. If no such plan
            # fits, 0 with a disk. Without one None: some state has to share the memory with
            # activations, and their size decides how much.
            used = (budgeted_bytes(plan)[case.compute_tier] for plan in case.lowest_tier_plans())
            lowest = next(used, case.compute_bytes if case.config.nvme_path else None)
            self._available[key] = None if lowest is None else case.compute_bytes - lowest
        available = self._available[key]
        needed = self.margin * case.activations().total
        if available is None:
            return needed <= case.compute_bytes and self._estimate(case) is not None
        return needed <= available

    def _estimate(self, case: PlanInput) -> PlanEstimate | None:
        schedule = BatchSchedule.of(case)
        if schedule not in self._cached:
            self._cached[schedule] = None
            with suppress(DoesNotFitError):
                estimate = price(case)
                if self.margin * estimate.activations.total <= estimate.activation_headroom:
                    self._cached[schedule] = estimate
        return self._cached[schedule]

    def _refine(self) -> None:
        """Try other numbers of recomputed blocks, and inputs in RAM, for the best schedules."""
        by_slices: dict[tuple[int, int], PlanEstimate] = {}
        by_count: dict[int, PlanEstimate] = {}
        for estimate in sorted(self.estimates, key=_seconds):
            by_slices.setdefault((estimate.case.micro_batches, estimate.case.work.slices), estimate)
            by_count.setdefault(estimate.case.micro_batches, estimate)
        for estimate in filter(self._can_refine, list(by_slices.values())[:MOST_REFINED]):
            self._bisect_recompute(estimate)
        if self.options.offload is not None or not self._can_offload("host"):
            return
        for best in filter(self._can_refine, by_count.values()):
            if best.case.config.activations.offload == "none":
                # Inputs of blocks in RAM leave device memory to weights.
                case = self._case(best.case.micro_batches, best.case.work.slices, "host", "all")
                in_ram = self._estimate(case) if self._activations_fit(case) else None
                self.estimates += [in_ram] if in_ram is not None else []

    def _can_refine(self, estimate: PlanEstimate) -> bool:
        return self.options.recompute is None and bool(self.blocks and estimate.case.work.recompute)

    def _bisect_recompute(self, best: PlanEstimate) -> PlanEstimate:
        """Bisect between the best number of recomputed blocks and its tried neighbors."""
        schedule = BatchSchedule.of(best.case)
        slices, offload = schedule.slices or 1, schedule.offload or "none"
        low, high = 0, self.blocks
        blocks = self.blocks if schedule.recompute == "all" else schedule.recompute or 0
        for _ in range(3):
            middles = {(low + blocks) // 2, (blocks + high) // 2} - {blocks, 0, self.blocks}
            for middle in sorted(middles):
                case = self._case(best.case.micro_batches, slices, offload, middle)
                estimate = self._estimate(case) if self._activations_fit(case) else None
                if estimate is not None:
                    self.estimates.append(estimate)
                if estimate is not None and _seconds(estimate) < _seconds(best):
                    low, high = (low, blocks) if middle < blocks else (blocks, high)
                    best, blocks = estimate, middle
                    break
                low, high = (middle, high) if middle < blocks else (low, middle)
        return best

    def _smallest(self) -> PlanInput:
        """Return the case with the least activations that the options allow."""
        options = self.options
        counts = self._micro_batch_counts()
        blocks = "all" if options.recompute is None else options.recompute
        offload = options.offload or ("disk" if self._can_offload("disk") and blocks else "none")
        cases = (
            self._case(count, self._slice_counts(count)[-1], tier, blocks)
            for count in {counts[0], counts[-1]}
            for tier in (offload, "none")
        )
        return min(cases, key=lambda case: case.activations().total)


def _key(estimate: PlanEstimate) -> tuple[Any, ...]:
    """Return the key by which schedules count as different; slices are not part of it."""
    schedule = BatchSchedule.of(estimate.case)
    return schedule.micro_batches, schedule.recompute, schedule.offload, schedule.experts


def _seconds(estimate: PlanEstimate) -> float:
    """Return the seconds of a step, slightly more with more slices to break ties."""
    return estimate.cost.seconds * (1 + PER_DOUBLING * math.log2(estimate.case.work.slices))

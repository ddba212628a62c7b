"""Suggestions that make a run fit, or make it faster, found by planning changed inputs.

None is a rule of thumb: every suggestion is a changed `PlanInput` that was planned and priced like
the original, and fits. Free and exact changes come first, then lossy formats, then hardware by
cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from infinity.common.sizes import format_size
from infinity.config.schema import BudgetConfig, PlacementConfig
from infinity.errors import DoesNotFitError
from infinity.plan.batch_schedule import (
    MOST_MICRO_BATCHES,
    BatchSchedule,
    ScheduleResult,
    choose_schedule,
)
from infinity.plan.budget import AUTO_SHARE
from infinity.plan.inputs import PlanEstimate, PlanInput, price
from infinity.plan.layout import UnitLayout
from infinity.plan.machine import HOST_BUDGET_SHARE
from infinity.plan.plan import Plan
from infinity.types import MomentFormat, Tier

PLACEHOLDER_DISK = (Path("/a/fast/drive"),)  # placeholder for a suggested disk without a path
TIERS = (Tier.DISK, Tier.HOST, Tier.DEVICE)


@dataclass(frozen=True)
class Change:
    """Difference between two cases; `infinity.cli.remedies` maps it to options and config keys.

    `what` is a description, `name` one of that module's `NAMES`, and `value` the new value: bytes,
    tokens, the name of a format.
    """

    what: str
    name: str
    value: Any = None


@dataclass(frozen=True)
class Suggestion:
    """Changes and the resulting estimate.

    `changes_batch`: the tokens of a step differ, and so does the training.
    """

    changes: tuple[Change, ...]
    priced: PlanEstimate
    lossy: bool = False
    changes_batch: bool = False

    @property
    def what(self) -> str:
        """Human-readable description."""
        return ", ".join(change.what for change in self.changes)


def suggestion_of(case: PlanInput, priced: PlanEstimate) -> Suggestion:
    """Return the difference between `case` and the case of `priced`, of the same model."""
    after = priced.case
    return Suggestion(
        changes=tuple(_differences(case, after)),
        priced=priced,
        lossy=after.config.optimizer.moments != case.config.optimizer.moments,
        changes_batch=not _is_same(after.tokens_per_step / case.tokens_per_step),
    )


def _is_same(ratio: float) -> bool:
    return abs(ratio - 1) < 0.01  # micro-batches are rounded up


def _differences(case: PlanInput, after: PlanInput) -> Iterator[Change]:
    old, new = case.config, after.config
    if new.placement != old.placement:
        names = [n for n, choice in new.placement if choice != getattr(old.placement, n)]
        yield Change("placement chosen by the plan", "placement", names)
    if new.chunk_size != old.chunk_size:
        yield Change("smaller chunks", "chunk_size", new.chunk_size)
    if new.precision != old.precision:
        what = f"{new.precision}, which this machine multiplies faster"
        yield Change(what, "precision", new.precision)
    elif after.units != case.units and after.machine.ranks == case.machine.ranks:
        yield Change("blocks cut into their parts (units=[...] of initialize)", "finer_units")
    for tier in TIERS:
        budget = getattr(new.budget, tier)
        if budget == getattr(old.budget, tier):
            continue
        what = f"less of the {tier} for state, more for activations"
        if budget is None:
            what = f"no budget for the {tier} but the machine's"
        elif budget > _node_limit(case, tier):
            what = f"a budget of {format_size(budget)} of the {tier}"
        yield Change(what, f"budget.{tier.value}", budget)
    yield from _step_differences(case, after)
    moments = new.optimizer.moments
    if moments != old.optimizer.moments:
        yield Change(f"moments in {moments}, which is lossy", "moments", moments)
    if after.machine.gpus != case.machine.gpus:
        what = "one more GPU" if not case.machine.unified else "one more process"
        where = " on each node" if case.machine.nodes > 1 else ""
        yield Change(f"{what}{where}, as fast, with the same RAM", "gpus", after.machine.gpus)
    elif after.machine.rates != case.machine.rates:
        drives = max(len(old.nvme_path), 1)
        what = "a second drive" if drives == 1 else f"one more drive than {drives}"
        yield Change(
            f"{what}, as large and as fast", "drives", (drives + 1, after.machine.disk_bytes)
        )
        return
    for tier in TIERS:
        old_size, new_size = size_of(case, tier) or 0, size_of(after, tier) or 0
        if old_size != new_size:
            name = {Tier.HOST: "RAM", Tier.DISK: "disk", Tier.DEVICE: "device memory"}[tier]
            what = f"{format_size(new_size)} of {name} instead of {format_size(old_size)}"
            what += " (or one more path)" if tier is Tier.DISK and old_size else ""
            yield Change(what, tier.value, new_size)


def _step_differences(case: PlanInput, after: PlanInput) -> Iterator[Change]:
    old, new = BatchSchedule.of(case), BatchSchedule.of(after)
    if (old.tokens, old.micro_batches) != (new.tokens, new.micro_batches):
        ratio = after.tokens_per_step / case.tokens_per_step
        batch = "the same batch" if _is_same(ratio) else f"{ratio:g} times the batch"
        what = (
            f"{new.micro_batches} micro-batches" if after.micro_batches > 1 else "one micro-batch"
        )
        what = f"{what} of {new.tokens:,} tokens ({batch})"
        yield Change(what, "batch", (after.tokens_per_step, new.micro_batches, new.tokens))
    if old.slices != new.slices:
        yield Change(f"blocks in {new.slices} slices", "slices", new.slices)
    if old.recompute != new.recompute:
        counted = f"{new.recompute} blocks recomputed" if new.recompute else "no block recomputed"
        what = "blocks recomputed in backward" if new.recompute == "all" else counted
        yield Change(what, "recompute", new.recompute)
    old_limit, new_limit = case.config.activations.tokens, after.config.activations.tokens
    if old == new and old_limit is None and new_limit is not None:
        what = "the expected size of activations as their room"
        yield Change(what, "activations.tokens", new.tokens)
    if old.offload != new.offload:
        where = {"none": "on the device", "host": "in RAM", "disk": "in RAM and on disk"}
        yield Change(f"their inputs wait {where[new.offload or 'none']}", "offload", new.offload)


def size_of(case: PlanInput, tier: Tier) -> int | None:
    """Return bytes of a tier of the machine; None for a device that is the host."""
    size: int | None = getattr(case.machine, f"{tier}_bytes")
    return size


def sized(case: PlanInput, tier: Tier, nbytes: int) -> PlanInput:
    """Return the case with `nbytes` of a tier, and no configured budget for that tier."""
    sizes: dict[str, Any] = {f"{tier}_bytes": nbytes}
    changed = case.with_machine(**sizes).with_budget(tier, None)
    if tier is Tier.DISK and nbytes and not case.config.nvme_path:
        changed = changed.with_config(nvme_path=PLACEHOLDER_DISK)
    return changed


def _node_limit(case: PlanInput, tier: Tier) -> int:
    """Return the budget of a tier as configurations give it: per device, else per node."""
    limit: int = getattr(case.limits, tier) or 0
    return limit if tier is Tier.DEVICE else limit * case.machine.gpus


def round_size(nbytes: int) -> int:
    """Round up to a size that is easy to read: a multiple of 1 GiB, 64 MiB or 1 MiB."""
    step = _size_step(nbytes)
    return -(-nbytes // step) * step


def round_size_down(nbytes: int) -> int:
    """Round down to a size that is easy to read, like `round_size`."""
    return nbytes // _size_step(nbytes) * _size_step(nbytes)


def _size_step(nbytes: int) -> int:
    return _GIB if nbytes >= 16 * _GIB else _GIB // 16 if nbytes >= _GIB else 1 << 20


MIN_CHANGE = 1.05  # smallest proposed change of a limit: estimates are no more accurate
MIN_GAIN = 1.03  # of tokens per second: predictions are no more accurate
SMALL_CHUNK = 1 << 17  # elements
MOST_EXACT = 3  # suggestions without loss or larger hardware
_ATTEMPTS = 4
_GIB = 1 << 30
# Largest proposed sizes of one machine, in bytes.
_LARGEST = {Tier.DISK: 512 << 40, Tier.HOST: 8 << 40, Tier.DEVICE: 288 * _GIB}
# Approximate cost of a byte, relative to disk; it only decides the order of suggestions.
_COST = {Tier.DISK: 1.0, Tier.HOST: 40.0, Tier.DEVICE: 400.0}


# --- to make it fit ------------------------------------------------------------------------------


def suggestions_to_fit(
    case: PlanInput, finer: Sequence[UnitLayout] = (), chosen: ScheduleResult | None = None
) -> list[Suggestion]:
    """Return the cheapest changes that make a case fit; empty if none was found.

    At most `MOST_EXACT` exact ones, all smaller formats of moments that suffice, and larger
    hardware if these are fewer together. `finer` are the layouts of smaller units of the same
    model, if it can be cut further; `chosen` is the search that gave the case its batch schedule,
    if there was one.
    """
    # Planning searches for placement, which is slow: filter by `_fits` first.
    exact = filter(_fits, _exact_changes(case, tuple(finer)))
    chosen = _search_schedules(case, chosen)
    fitting = _suggestions_for(case, [*exact, *_faster_schedule(case, chosen)])
    suggestions = _fastest_first(fitting)[:MOST_EXACT]
    formats = (case.with_moments(name) for name in _smaller_formats(case))
    suggestions += _fastest_first(_suggestions_for(case, filter(_fits, formats)))
    smallest, host_bytes = chosen.smallest, size_of(case, Tier.HOST)
    for start in [case] if smallest == case else [case, smallest]:
        if len(suggestions) < MOST_EXACT:
            larger = [
                suggestion
                for tier in TIERS
                for suggestion in _larger_tier(case, _smallest_tier(start, tier), tier)
            ]
            if not any(size_of(s.priced.case, Tier.HOST) == host_bytes for s in larger):
                larger += _larger_tier(case, _all_tiers_larger(start), Tier.HOST)
            for suggestion in sorted(larger, key=lambda s: _cost(s.priced.case)):
                is_new = suggestion.changes not in [s.changes for s in suggestions]
                if len(suggestions) < MOST_EXACT and is_new:
                    suggestions.append(suggestion)
        if suggestions:
            break
    return suggestions


def _cost(case: PlanInput) -> float:
    return sum(cost * (size_of(case, tier) or 0) for tier, cost in _COST.items())


def _suggestions_for(case: PlanInput, changed: Iterable[PlanInput]) -> list[Suggestion]:
    """Return a suggestion for every changed case that fits."""
    suggestions = []
    for changed_case in changed:
        try:
            priced = price(changed_case)
        except DoesNotFitError:
            continue
        if not priced.missing:
            suggestions.append(suggestion_of(case, priced))
    return suggestions


def _fastest_first(suggestions: Iterable[Suggestion]) -> list[Suggestion]:
    return sorted(suggestions, key=lambda s: -s.priced.tokens_per_s)


def _exact_changes(case: PlanInput, finer: tuple[UnitLayout, ...]) -> Iterator[PlanInput]:
    """Yield changes that cost only time: placement, chunks, units, budgets."""
    if case.config.placement != PlacementConfig():
        yield case.with_config(placement=PlacementConfig())
    if case.config.chunk_size == "auto" or case.config.chunk_size > SMALL_CHUNK:
        yield case.with_config(chunk_size=SMALL_CHUNK)
    if finer:
        yield replace(case, units=finer)
    without_budgets = case.with_config(budget=BudgetConfig())
    for tier in TIERS:
        budget, largest = getattr(case.config.budget, tier), _node_limit(without_budgets, tier)
        if budget is None or budget >= largest:
            continue
        fitting = _first_fit(partial(case.with_budget, tier), budget, largest)
        if fitting is not None:
            # Not the smallest that fits: the memory of the process itself varies between starts.
            proposed = round_size(int(MIN_CHANGE * getattr(fitting.config.budget, tier)))
            yield case.with_budget(tier, min(proposed, largest))
    if case.config.budget != BudgetConfig():
        yield without_budgets
    free_bytes = case.compute_bytes - case.activations().total
    if case.machine.unified:
        free_bytes *= case.machine.gpus
    budget = int(free_bytes / AUTO_SHARE)  # automatic placement fills this share of the budget
    budget = round_size_down(min(budget, int(_node_limit(case, case.compute_tier) / MIN_CHANGE)))
    if budget > 0:
        yield case.with_budget(case.compute_tier, budget)


def _search_schedules(case: PlanInput, chosen: ScheduleResult | None) -> ScheduleResult:
    """Search all schedules of the same tokens per step; return `chosen` if it did that already."""
    if chosen is not None and chosen.requested == BatchSchedule():
        return chosen
    tokens = case.work.tokens * case.micro_batches
    samples = chosen.samples if chosen is not None else None
    return choose_schedule(case.with_step(tokens, 1), BatchSchedule(), samples)


def _faster_schedule(case: PlanInput, chosen: ScheduleResult) -> Iterator[PlanInput]:
    """Yield the case with the fastest schedule that fits, if it differs."""
    if chosen.best is not None and chosen.best.case != case:
        yield chosen.best.case


def _smaller_formats(case: PlanInput) -> Iterator[str]:
    """Yield formats of moments smaller than the current one, if the rule supports them."""
    current = max((f.itemsize for f in case.rule.moments), default=0)
    for moments in (MomentFormat.INT8, MomentFormat.BF16):
        has_kernels = not (case.rule.tile_elements or case.rule.matrix_steps)
        if moments.itemsize < current and has_kernels:
            yield moments.value


def _larger_tier(case: PlanInput, changed: PlanInput | None, tier: Tier) -> list[Suggestion]:
    """Return the suggestion of a larger tier; empty if `changed` is None or does not fit.

    A search for placement may need more than `_fits` estimates, or less, where state can be moved
    to another tier: so slightly larger sizes are tried first, then smaller ones.
    """
    suggestions: list[Suggestion] = []
    for _ in range(_ATTEMPTS):
        if changed is None or suggestions:
            break
        suggestions = _suggestions_for(case, [changed])
        if not suggestions:
            changed = sized(changed, tier, round_size(int(1.06 * (size_of(changed, tier) or 0))))
    old_size = low = size_of(case, tier) or 0
    for _ in range(_ATTEMPTS if suggestions else 0):
        best = suggestions[0].priced.case
        high = size_of(best, tier) or 0
        middle = round_size((low + high) // 2)
        if middle >= high or high <= 1.02 * low or middle < MIN_CHANGE * old_size:
            break
        smaller = _suggestions_for(case, [sized(best, tier, middle)])
        suggestions, low = smaller or suggestions, low if smaller else middle
    return suggestions


def _all_tiers_larger(case: PlanInput) -> PlanInput | None:
    """Enlarge all tiers, then reduce each as far as possible, the most expensive first."""
    tiers = [tier for tier in reversed(TIERS) if size_of(case, tier) is not None]
    large = case
    for tier in tiers:
        large = sized(large, tier, _LARGEST[tier])
    if not _fits(large):
        return None
    for tier in tiers:
        large = _smallest_tier(sized(large, tier, size_of(case, tier) or 0), tier) or large
    return large


def _smallest_tier(case: PlanInput, tier: Tier) -> PlanInput | None:
    """Return the case with the smallest size of a tier that fits, to 2 %, or None.

    Also None if the case would fit without its configured budget: see `_exact_changes`.
    """
    size = size_of(case, tier)
    if size is None:
        return None
    now = getattr(case.config.budget, tier)
    if now is not None and _fits(case.with_budget(tier, None)):
        return None
    return _first_fit(lambda nbytes: sized(case, tier, nbytes), size, _LARGEST[tier])


def _first_fit(with_size: Callable[[int], PlanInput], low: int, largest: int) -> PlanInput | None:
    """Return the case of size `low` if it fits, else of the smallest size that does, to 2 %.

    Sizes above `low` are at least `MIN_CHANGE * low`. None if even `largest` does not fit.
    Fitting is monotonic in the size of a tier, so bisection finds it.
    """
    least = round_size(int(MIN_CHANGE * low))
    if _fits(with_size(low)):
        return with_size(low)
    if least > largest:
        return None
    high = min(max(least, 1 << 28), largest)
    while not _fits(with_size(high)):
        if high >= largest:
            return None
        low, high = high, min(2 * high, largest)
    while high > low * 1.02:
        middle = max(round_size((low + high) // 2), least)
        if middle >= high:
            break
        if _fits(with_size(middle)):
            high = middle
        else:
            low = middle
    return with_size(high)


def _fits(case: PlanInput) -> bool:
    """Return True if some plan fits with activations, without a search for the best placement."""
    free_bytes = case.compute_bytes - case.activations().total
    if free_bytes < 0:
        return False
    return any(_placement_bytes(case, plan) <= free_bytes for plan in case.lowest_tier_plans())


def _placement_bytes(case: PlanInput, plan: Plan) -> int:
    """Return the bytes that placement may take of the memory that activations need as well."""
    used = plan.tier_bytes
    taken = used[Tier.HOST] + used[Tier.DEVICE] if plan.unified else used[Tier.DEVICE]
    if "auto" not in case.config.placement.model_dump().values():
        return taken
    # Automatic placement may fill this share, if there is enough state to raise.
    share = int(AUTO_SHARE * (getattr(case.limits, case.compute_tier) or 0))
    stored = sum(
        parts.get(purpose, 0)
        for parts in plan.memory.values()
        for purpose in ("weights", "state", "gradients")
    )
    return max(taken, min(share, taken + stored))


# --- to make it faster ---------------------------------------------------------------------------


def faster(priced: PlanEstimate, chosen: ScheduleResult | None = None) -> list[Suggestion]:
    """Return changes that gain predicted tokens per second, the fastest first.

    `chosen` is the search that gave the case its batch schedule, if there was one.
    """
    case = priced.case
    changed = list(_faster_schedule(case, _search_schedules(case, chosen)))
    compute = case.machine.rates.compute
    slow = compute.get("fp32", 0) > compute.get("bf16", 0)  # no bf16 instructions
    trained = all(s.trained for unit in case.units for s in unit.segments)
    if case.config.precision == "bf16" and slow and trained:
        changed.append(case.with_precision("fp32"))
    changed += (case.with_moments(name) for name in _smaller_formats(case))
    changed += _more_hardware(priced)
    changed.append(case.with_step(4 * case.work.tokens, case.micro_batches))
    if 4 * case.micro_batches <= MOST_MICRO_BATCHES:
        changed.append(case.with_step(case.work.tokens, 4 * case.micro_batches))
    fitting = [c for c in changed if c.activations().total <= c.compute_bytes]
    return filter_gains(_suggestions_for(case, fitting), priced.tokens_per_s)


def filter_gains(suggestions: Iterable[Suggestion], now: float) -> list[Suggestion]:
    """Return suggestions that gain `MIN_GAIN` over `now` tokens per second, the fastest first."""
    return _fastest_first(s for s in suggestions if s.priced.tokens_per_s >= MIN_GAIN * now > 0)


def _more_hardware(priced: PlanEstimate) -> Iterator[PlanInput]:
    """Yield the case with one more GPU (of several), one more drive, or more RAM.

    RAM: a quarter more, and enough to hold gradients, weights and state that are on disk.
    """
    case = priced.case
    if case.machine.ranks > 1:
        yield case.with_gpus(case.machine.gpus + 1)
    if not any(priced.plan.memory[Tier.DISK].values()):
        return
    drives = max(len(case.config.nvme_path), 1)
    disk_bytes = case.machine.disk_bytes * (drives + 1) // drives
    machine = case.machine.with_scaled_disk_rates((drives + 1) / drives)
    yield replace(case, machine=replace(machine, disk_bytes=disk_bytes))
    disk, used = priced.plan.memory[Tier.DISK], priced.plan.tier_bytes
    local = case.machine.gpus
    host_bytes = local * (used[Tier.HOST] + (used[Tier.DEVICE] if priced.plan.unified else 0))
    share = HOST_BUDGET_SHARE * (AUTO_SHARE if priced.plan.unified else 1.0)
    sizes = {round_size(int(1.25 * case.machine.host_bytes))}
    for purpose in ("gradients", "weights", "state"):
        copies = priced.plan.nodes if purpose == "weights" and priced.plan.shared else 1
        host_bytes += local * copies * disk[purpose]
        sizes.add(round_size(int(1.01 * host_bytes / share)))  # some buffers grow with it
    proposed = None
    for nbytes in sorted(sizes, reverse=True):  # of nearly equal sizes, only the larger
        if proposed is not None and MIN_CHANGE * nbytes > proposed:
            continue
        if MIN_CHANGE * case.machine.host_bytes <= nbytes <= _LARGEST[Tier.HOST]:
            proposed = nbytes
            yield sized(case, Tier.HOST, nbytes)

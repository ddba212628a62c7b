"""One way to change a case: what differs, in words and as what to type, and what comes of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinity.plan.case import Case, Priced
from infinity.sizes import format_size

SOME_DISK = (Path("/a/fast/drive"),)  # where a case has a disk that has no path yet
TIERS = ("disk", "host", "device")
_GIB = 1 << 30


@dataclass(frozen=True)
class Way:
    """A change, in words and as what to type, and what comes of it.

    `changes_batch`: the tokens of a step are not the same, so neither is the training.
    """

    what: str
    how: str
    priced: Priced
    lossy: bool
    changes_batch: bool
    speed_up: float = 1.0


def way_of(case: Case, priced: Priced) -> Way:
    """The difference between two cases, in words and as what to type."""
    after = priced.case
    pairs = [*_layout_words(case, after), *_step_words(case, after)]
    form = after.config.optimizer.moments
    lossy = form != case.config.optimizer.moments
    if lossy:
        pairs.append((f"moments in {form}, which is lossy", f"--moments {form}"))
    if after.machine.rates != case.machine.rates:
        pairs.append(("a second drive, as large and as fast", "nvme_path with one more directory"))
    else:
        for tier in TIERS:
            now, then = size_of(case, tier) or 0, size_of(after, tier) or 0
            if now != then:
                name = {"host": "RAM", "disk": "disk", "device": "device memory"}[tier]
                what = f"{format_size(then)} of {name} instead of {format_size(now)}"
                what += " (or one more path)" if tier == "disk" and now else ""
                pairs.append((what, f"--{tier} {size_text(then)}"))
    return Way(
        what=", ".join(what for what, _ in pairs),
        how=_joined([how for _, how in pairs]),
        priced=priced,
        lossy=lossy,
        changes_batch=not _same(_batch(after) / _batch(case)),
    )


def _joined(hows: list[str]) -> str:
    """Options follow one another as on a command line."""
    return (" " if all(how.startswith("--") for how in hows) else ", ").join(hows)


def _same(ratio: float) -> bool:
    return abs(ratio - 1) < 0.01  # what rounding micro-batches up makes of it


def _layout_words(case: Case, after: Case) -> Iterator[tuple[str, str]]:
    if after.config.homes != case.config.homes:
        yield "homes chosen by the plan", "homes: auto for all"
    if after.config.chunk_size != case.config.chunk_size:
        yield "smaller chunks", f"chunk_size: {after.config.chunk_size}"
    if after.config.precision != case.config.precision:
        name = after.config.precision
        yield f"{name}, which this machine multiplies faster", f"--precision {name}"
    elif after.units != case.units:
        yield "blocks cut into their parts", "initialize(units=[...]) with the parts of each block"
    for tier in TIERS:
        before, budget = getattr(case.config.budget, tier), getattr(after.config.budget, tier)
        if budget == before:
            continue
        if budget is None:
            yield f"no budget for the {tier} but the machine's", f"budget.{tier} left out"
        elif budget > getattr(case.limits, tier):
            what = f"a budget of {format_size(budget)} of the {tier}"
            yield what, f"budget.{tier}: {size_text(budget)}"
        else:
            what = f"less of the {tier} for what rests there, more for activations"
            yield what, f"budget.{tier}: {size_text(budget)}"


def _step_words(case: Case, after: Case) -> Iterator[tuple[str, str]]:
    tokens, count = after.work.tokens, after.micro_batches
    if (case.work.tokens, case.micro_batches) != (tokens, count):
        what = f"{count} micro-batches" if count > 1 else "one micro-batch"
        ratio = _batch(after) / _batch(case)
        batch = "the same batch" if _same(ratio) else f"{ratio:g} times the batch"
        how = f"--tokens {tokens * count} --micro-batches {count}"
        yield f"{what} of {tokens:,} tokens ({batch})", how
    if case.work.recompute != after.work.recompute:
        again = after.work.recompute
        what = "blocks recomputed in backward" if again else "blocks not recomputed"
        yield what, "--recompute" if again else "--no-recompute"


def _batch(case: Case) -> int:
    return case.work.tokens * case.micro_batches


def size_of(case: Case, tier: str) -> int | None:
    """Bytes of a tier of the machine; None for a device that is the host."""
    size: int | None = getattr(case.machine, f"{tier}_bytes")
    return size


def sized(case: Case, tier: str, nbytes: int) -> Case:
    """With so much of a tier, and no budget in the configuration that hides it."""
    sizes: dict[str, Any] = {f"{tier}_bytes": nbytes}
    changed = case.with_machine(**sizes).with_budget(tier, None)
    if tier == "disk" and nbytes and not case.config.nvme_path:
        changed = changed.with_config(nvme_path=SOME_DISK)
    return changed


def round_size(nbytes: int) -> int:
    """A size that people would say, not below."""
    step = _step(nbytes)
    return -(-nbytes // step) * step


def round_down(nbytes: int) -> int:
    """The same, not above."""
    return nbytes // _step(nbytes) * _step(nbytes)


def _step(nbytes: int) -> int:
    return _GIB if nbytes >= 16 * _GIB else _GIB // 16 if nbytes >= _GIB else 1 << 20


def size_text(nbytes: int) -> str:
    """As an option takes it, exactly: "64GiB", "1536MiB"."""
    for unit, name in ((_GIB, "GiB"), (1 << 20, "MiB")):
        if nbytes and nbytes % unit == 0:
            return f"{nbytes // unit}{name}"
    return str(nbytes)

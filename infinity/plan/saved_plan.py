"""Tiers of the saved inputs of recomputed blocks, and the bytes that they move.

[Note: tier of a saved tensor]
In forward order the first tensors are stored on disk, the next ones in the pinned pool, and the
last ones, which do not fit, stay on the device. Backward needs them in reverse order, so tensors on
disk are needed last. Every tensor passes through the pool; if the disk is used, a part of the pool
stays free for tensors in transit. The run and the forecast apply the same rule, with the sizes of
the previous micro-batch (before the first one, with the sizes that the plan expects).
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from infinity.common.sizes import format_size
from infinity.config.schema import ActivationsConfig, Recompute
from infinity.errors import ConfigError
from infinity.plan.layout import UnitLayout
from infinity.types import PAGE, Tier, round_up

TRANSIT = 3  # times the largest tensor is in transit: one written to disk, two read back


@dataclass(frozen=True, slots=True)
class SavedPlan:
    """Settings of a plan for saved tensors; sizes are bytes.

    The first `recompute` blocks run again in backward. `offload` is the lowest tier in use, None if
    nothing is moved. `sizes` are those of the block inputs that a micro-batch is expected to save,
    in order; empty if unknown.
    """

    recompute: Recompute = 0
    slices: int = 1
    offload: Tier | None = None
    host_bytes: int = 0
    disk_bytes: int = 0
    min_bytes: int = 0
    sizes: tuple[int, ...] = ()

    @property
    def line(self) -> str:
        """Describe the settings; empty for the defaults."""
        clauses = []
        if self.recompute:
            subject = (
                "blocks are"
                if self.recompute == "all"
                else f"the first {self.recompute} blocks are"
            )
            clauses.append(f"{subject} recomputed in backward")
        if self.slices > 1:
            clauses.append(f"blocks run a batch in {self.slices} slices")
        if self.offload is not None:
            tiers = f"{format_size(self.host_bytes)} of RAM"
            if self.offload is Tier.DISK:
                tiers += f", then {format_size(self.disk_bytes)} of disk"
            clauses.append(f"their inputs wait in {tiers}")
        if self.sizes:
            clauses.append(f"{format_size(sum(self.sizes))} of inputs are expected a micro-batch")
        return "; ".join(clauses)


NO_SAVED_PLAN = SavedPlan()


def plan_saved(
    settings: ActivationsConfig,
    units: Sequence[UnitLayout],
    *,
    unified: bool,
    widths: list[int],
) -> tuple[SavedPlan, tuple[str, ...]]:
    """Return the settings of saved tensors, and notes of the plan.

    `widths` are those of the inputs of blocks. A unified device moves nothing to RAM, which is its
    memory; it can use the disk. Raises `ConfigError` if the pools' sizes are neither configured nor
    derivable from a number of tokens.
    """
    notes: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    if settings.tokens is not None:
        sizes = _expected_sizes(settings, units, widths)
    offload = None if settings.offload == "none" else Tier(settings.offload)
    if offload is Tier.HOST and unified:
        offload = None
        notes = ("activations.offload: host moves nothing: the device's memory is the host's",)
    if offload is None:
        return SavedPlan(settings.recompute, settings.slices, sizes=sizes), notes
    if not sizes and None in (settings.host, settings.disk if offload is Tier.DISK else 0):
        raise ConfigError(
            f"activations.offload is {settings.offload}, and how much room it needs is not known",
            because="the model has no blocks that repeat" if settings.tokens else None,
            remedy="set activations.tokens to the tokens of a micro-batch"
            if not settings.tokens
            else "give activations.host, and for the disk activations.disk, in bytes",
        )
    padded = [round_up(size, PAGE) for size in sizes]
    transit = TRANSIT * max(padded, default=0)
    host, disk = settings.host, settings.disk
    if host is None:
        host = sum(padded) if offload is Tier.HOST else min(transit, sum(padded))
    if offload is Tier.HOST:
        disk = 0
    elif disk is None:
        disk = sum(padded)
    saved = SavedPlan(
        settings.recompute,
        settings.slices,
        offload,
        round_up(host, PAGE),
        round_up(disk or 0, PAGE),
        settings.min_bytes,
        sizes,
    )
    return saved, notes


def _expected_sizes(
    settings: ActivationsConfig, units: Sequence[UnitLayout], widths: list[int]
) -> tuple[int, ...]:
    """Return the bytes of the inputs of recomputed blocks, slice by slice.

    If none is configured, of all blocks: the model is then expected to recompute them itself.
    """
    assert settings.tokens is not None
    itemsize = max((u.weight_itemsize for u in units), default=0)
    slice_tokens = -(-settings.tokens // settings.slices)
    if settings.recompute != "all" and settings.recompute:
        widths = widths[: settings.recompute]
    sizes = [slice_tokens * width * itemsize for width in widths]
    return tuple(size for size in sizes for _ in range(settings.slices))


@lru_cache(maxsize=64)
def tiers_of(sizes: tuple[int, ...], saved: SavedPlan) -> tuple[Tier, ...]:
    """Return the tier of each of a micro-batch's saved tensors.

    See [Note: tier of a saved tensor].
    """
    tiers = [Tier.DEVICE] * len(sizes)
    if saved.offload is None:
        return tuple(tiers)
    movable = [
        i
        for i, size in enumerate(sizes)
        if saved.min_bytes <= size and round_up(size, PAGE) <= saved.host_bytes
    ]
    padded = [round_up(sizes[i], PAGE) for i in movable]
    pool_bytes, disk_bytes = saved.host_bytes, saved.disk_bytes
    if sum(padded) > pool_bytes and saved.offload is Tier.DISK:
        pool_bytes = max(pool_bytes - TRANSIT * max(padded), 0)
    sums = [0]
    for size in padded:
        sums.append(sums[-1] + size)
    for end in range(len(movable), 0, -1):
        on_disk = next(i for i in range(end + 1) if sums[end] - sums[i] <= pool_bytes)
        if sums[on_disk] <= disk_bytes:
            for position in range(end):
                tiers[movable[position]] = Tier.DISK if position < on_disk else Tier.HOST
            break
    return tuple(tiers)


@lru_cache(maxsize=64)
def saved_moves(
    sizes: tuple[int, ...], saved: SavedPlan, *, unified: bool
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes per direction that saved tensors move in a forward, and in a backward."""
    forward: Counter[str] = Counter()
    backward: Counter[str] = Counter()
    for size, tier in zip(sizes, tiers_of(sizes, saved), strict=True):
        if tier is Tier.DEVICE:
            continue
        if not unified:
            forward["from_device"] += size
            backward["to_device"] += size
        if tier is Tier.DISK:
            forward["disk_write"] += round_up(size, PAGE)
            backward["disk_read"] += round_up(size, PAGE)
    return dict(forward), dict(backward)


def off_device_bytes(saved: SavedPlan) -> int:
    """Return the expected bytes that are off the device while blocks compute."""
    tiers = tiers_of(saved.sizes, saved)
    moved = [n for n, tier in zip(saved.sizes, tiers, strict=True) if tier is not Tier.DEVICE]
    return max(sum(moved) - TRANSIT * max(moved, default=0), 0)


class Ranges:
    """First-fit allocator of ranges in a pool of `nbytes`; sizes are rounded up to pages."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._free: list[tuple[int, int]] = [(0, nbytes)] if nbytes else []

    def take(self, nbytes: int) -> int | None:
        """Allocate a range and return its start; None if no free range is large enough."""
        nbytes = round_up(nbytes, PAGE)
        for index, (start, size) in enumerate(self._free):
            if size >= nbytes:
                remaining = [(start + nbytes, size - nbytes)] if size > nbytes else []
                self._free[index : index + 1] = remaining
                return start
        return None

    def give(self, start: int, nbytes: int) -> None:
        """Free a range that `take` returned."""
        insort(self._free, (start, round_up(nbytes, PAGE)))
        merged: list[tuple[int, int]] = []
        for begin, size in self._free:
            if merged and sum(merged[-1]) == begin:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((begin, size))
        self._free = merged

    @property
    def free_bytes(self) -> int:
        """Bytes of all free ranges."""
        return sum(size for _, size in self._free)

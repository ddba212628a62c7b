"""Where inputs of recomputed blocks wait for backward: sizes, the rule, and the bytes it moves.

[Note: where a saved tensor waits]
In forward order: the first ones on disk, the next in the pinned pool, and what finds no room,
last, stays on the device. Backward needs them the other way round, so what comes from disk is
needed last. Every tensor passes through the pool, so that where the disk is used some of the pool
is kept free for those on their way. The rule is asked with the sizes of the micro-batch before
(of the first one: those that the plan expects), by the run and by the forecast.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from infinity.config_activations import ActivationsConfig
from infinity.errors import ConfigError
from infinity.plan.activations import block_widths
from infinity.plan.layout import PAGE, Tier, UnitLayout, round_up
from infinity.sizes import format_size

TRANSIT = 3  # of the largest: one that leaves, two that come back


@dataclass(frozen=True, slots=True)
class SavedPlan:
    """What a plan says of saved tensors; sizes are bytes.

    `offload` is the lowest tier that is used, None where nothing moves. `sizes` are those of the
    block inputs that a micro-batch is expected to save, in order; empty where that is unknown.
    """

    checkpoint: bool = False
    slices: int = 1
    offload: Tier | None = None
    host_bytes: int = 0
    disk_bytes: int = 0
    min_bytes: int = 0
    sizes: tuple[int, ...] = ()

    @property
    def line(self) -> str:
        """In words; empty where nothing is out of the ordinary."""
        words = ["blocks are recomputed in backward"] if self.checkpoint else []
        if self.slices > 1:
            words.append(f"blocks run a batch in {self.slices} slices")
        if self.offload is not None:
            place = f"{format_size(self.host_bytes)} of RAM"
            if self.offload is Tier.DISK:
                place += f", then {format_size(self.disk_bytes)} of disk"
            words.append(f"their inputs wait in {place}")
        if self.sizes:
            words.append(f"{format_size(sum(self.sizes))} of inputs are expected a micro-batch")
        return "; ".join(words)


NOTHING_SAVED = SavedPlan()


def plan_saved(
    settings: ActivationsConfig, units: Sequence[UnitLayout], *, unified: bool
) -> tuple[SavedPlan, tuple[str, ...]]:
    """From the configuration, and notes for the user; raises `ConfigError` if tokens tell nothing.

    On a device that is the host RAM is no other place to wait in: there only the disk is.
    """
    notes: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    if settings.tokens is not None:
        sizes = _expected_sizes(settings, units)
    offload = {"none": None, "host": Tier.HOST, "disk": Tier.DISK}[settings.offload]
    if offload is Tier.HOST and unified:
        offload = None
        notes = ("activations.offload: host moves nothing: the device's memory is the host's",)
    if offload is None:
        saved = SavedPlan(settings.checkpoint == "units", settings.slices, sizes=sizes)
        return saved, notes
    if not sizes and None in (settings.host, settings.disk if offload is Tier.DISK else 0):
        raise ConfigError(
            f"activations.offload is {settings.offload}, and how much room it needs is not known",
            because="the model has no blocks that repeat" if settings.tokens else None,
            remedy="set activations.tokens to the tokens of a micro-batch"
            if not settings.tokens
            else "give activations.host, and for the disk activations.disk, in bytes",
        )
    rounded = [round_up(size, PAGE) for size in sizes]
    transit = TRANSIT * max(rounded, default=0)
    host, disk = settings.host, settings.disk
    if host is None:
        host = sum(rounded) if offload is Tier.HOST else min(transit, sum(rounded))
    if offload is Tier.HOST:
        disk = 0
    elif disk is None:
        disk = sum(rounded)
    saved = SavedPlan(
        settings.checkpoint == "units",
        settings.slices,
        offload,
        round_up(host, PAGE),
        round_up(disk or 0, PAGE),
        settings.min_bytes,
        sizes,
    )
    return saved, notes


def _expected_sizes(settings: ActivationsConfig, units: Sequence[UnitLayout]) -> tuple[int, ...]:
    """Bytes of the inputs of all blocks, slice by slice."""
    assert settings.tokens is not None
    itemsize = max((u.weight_itemsize for u in units), default=0)
    part = -(-settings.tokens // settings.slices)
    sizes = [part * width * itemsize for width in block_widths(units)]
    return tuple(size for size in sizes for _ in range(settings.slices))


@lru_cache(maxsize=64)
def homes_of(sizes: tuple[int, ...], saved: SavedPlan) -> tuple[Tier, ...]:
    """Where each of a micro-batch's saved tensors waits. See [Note: where a saved tensor waits]."""
    homes = [Tier.DEVICE] * len(sizes)
    if saved.offload is None:
        return tuple(homes)
    movable = [
        i
        for i, size in enumerate(sizes)
        if saved.min_bytes <= size and round_up(size, PAGE) <= saved.host_bytes
    ]
    rounded = [round_up(sizes[i], PAGE) for i in movable]
    room, disk = saved.host_bytes, saved.disk_bytes
    if sum(rounded) > room and saved.offload is Tier.DISK:
        room = max(room - TRANSIT * max(rounded), 0)
    before = [0]
    for size in rounded:
        before.append(before[-1] + size)
    for end in range(len(movable), 0, -1):
        first = next(i for i in range(end + 1) if before[end] - before[i] <= room)
        if before[first] <= disk:
            for position in range(end):
                homes[movable[position]] = Tier.DISK if position < first else Tier.HOST
            break
    return tuple(homes)


def saved_moves(
    sizes: tuple[int, ...], saved: SavedPlan, *, unified: bool
) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes per lane that saved tensors move in a forward, and in a backward."""
    forward: Counter[str] = Counter()
    backward: Counter[str] = Counter()
    for size, home in zip(sizes, homes_of(sizes, saved), strict=True):
        if home is Tier.DEVICE:
            continue
        if not unified:
            forward["from_device"] += size
            backward["to_device"] += size
        if home is Tier.DISK:
            forward["disk_write"] += round_up(size, PAGE)
            backward["disk_read"] += round_up(size, PAGE)
    return dict(forward), dict(backward)


def away_bytes(saved: SavedPlan) -> int:
    """Bytes of the expected sizes that are not on the device while others compute."""
    homes = homes_of(saved.sizes, saved)
    moved = [n for n, home in zip(saved.sizes, homes, strict=True) if home is not Tier.DEVICE]
    return max(sum(moved) - TRANSIT * max(moved, default=0), 0)


class Ranges:
    """Which ranges of a pool are free: the first that fits is taken, in whole pages."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._free: list[tuple[int, int]] = [(0, nbytes)] if nbytes else []

    def take(self, nbytes: int) -> int | None:
        """The start of a range that is free no more; None where none is large enough."""
        nbytes = round_up(nbytes, PAGE)
        for index, (start, size) in enumerate(self._free):
            if size >= nbytes:
                rest = [(start + nbytes, size - nbytes)] if size > nbytes else []
                self._free[index : index + 1] = rest
                return start
        return None

    def give(self, start: int, nbytes: int) -> None:
        """A range that was taken is free again."""
        insort(self._free, (start, round_up(nbytes, PAGE)))
        joined: list[tuple[int, int]] = []
        for begin, size in self._free:
            if joined and sum(joined[-1]) == begin:
                joined[-1] = (joined[-1][0], joined[-1][1] + size)
            else:
                joined.append((begin, size))
        self._free = joined

    @property
    def free_bytes(self) -> int:
        """Bytes of all free ranges."""
        return sum(size for _, size in self._free)

"""Forecast of the bytes that a steady step moves per direction, by simulating its slots.

The simulation follows the rules of `access_order`. Runs count the bytes that they move, and tests
require both to be equal. The sequence of moves depends on few fields of a plan, its `_Course`, and
is cached, because a search for placement needs the same course many times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from typing import Any

from infinity.plan import access_order
from infinity.plan.access_order import AccessOrder, usual_cycle
from infinity.plan.layout import UnitLayout
from infinity.plan.plan import (
    DIRECTIONS,
    Plan,
    SlotClass,
    UnitPlacement,
    UpdatePlace,
    publishes,
    streamed_bytes,
    update_place,
)
from infinity.plan.saved_plan import saved_moves
from infinity.types import Tier

FEW = 5  # micro-batches after which further ones usually repeat the previous one


@dataclass(frozen=True, slots=True)
class PhaseBytes:
    """Bytes moved during the forward or backward of one micro-batch, by direction.

    The optimizer pass of the previous step runs during the first forward and is counted there.
    """

    micro_batch: int
    backward: bool
    moved: dict[str, int]

    @property
    def has_update(self) -> bool:
        """True if the optimizer pass runs during this phase."""
        return self.micro_batch == 0 and not self.backward


def forecast_bytes(
    plan: Plan,
    cycle: list[int] | None = None,
    saved: tuple[int, ...] | None = None,
    summed: Collection[int] | None = None,
) -> dict[str, int]:
    """Return bytes per direction of a steady step; durable commits are averaged over steps.

    `cycle` is a learned access order, by default the usual one. `saved` are observed sizes of the
    tensors that a micro-batch saves, by default the expected ones. `summed` are units observed to
    run in slices, whose gradients are copied in fp32; by default all blocks and ranges of experts
    if the plan has slices.
    """
    phases = forecast_phases(plan, cycle, saved, summed)
    return {direction: sum(phase.moved[direction] for phase in phases) for direction in DIRECTIONS}


def forecast_phases(
    plan: Plan,
    cycle: list[int] | None = None,
    saved: tuple[int, ...] | None = None,
    summed: Collection[int] | None = None,
) -> list[PhaseBytes]:
    """Return the forecast by phase: forward and backward of every micro-batch, in order."""
    course = _course_of(plan, tuple(cycle) if cycle else usual_cycle(plan))
    sizes = plan.saved.sizes if saved is None else saved
    return _ByteCounter(plan, course.cycle, sizes, summed).of(_step_moves(course))


def distinct_phases(plan: Plan) -> tuple[list[tuple[PhaseBytes, int]], list[PhaseBytes] | None]:
    """Return the distinct phases of the usual cycle with their counts; see `_simulate`.

    Also the phases of each additional micro-batch, or None if these are not uniform. Phases of the
    last micro-batch are counted separately, since a pass over gradients follows them.
    """
    cache, cycle = plan.facts.known, usual_cycle(plan)
    key = (  # determines the course
        plan.units_on_device, plan.unsharded, plan.prefetch_units, plan.micro_batches, plan.ranks,
        cycle,
    )  # fmt: skip
    if key not in cache:
        cache[key] = _count_moves(_course_of(plan, cycle))
    counted, added = cache[key]
    converter = _ByteCounter(plan, cycle, plan.saved.sizes)
    phases = [(converter.of_phase(moves), count) for moves, count in counted]
    return phases, None if added is None else [phases[index][0] for index in added]


def _count_moves(
    course: _Course,
) -> tuple[list[tuple[_PhaseMoves, int]], list[int] | None]:
    """Return distinct moves of a steady step with counts, and indices of an added micro-batch's."""
    counts: dict[tuple[object, ...], list[Any]] = {}

    def key_of(moves: _PhaseMoves) -> tuple[object, ...]:
        last = moves.micro_batch + 1 == course.micro_batches
        return *moves.lists, moves.backward, moves.micro_batch > 0, last

    _, added_moves = _simulate(_shortened(course))
    if added_moves is None and course.micro_batches > FEW:
        _, added_moves = _simulate(course)
    for moves in _step_moves(course):
        counts.setdefault(key_of(moves), [moves, 0])[1] += 1
    keys = list(counts)
    indices = None if added_moves is None else [keys.index(key_of(moves)) for moves in added_moves]
    return [(moves, count) for moves, count in counts.values()], indices


def _course_of(plan: Plan, cycle: tuple[int, ...]) -> _Course:
    # Equal units are checked once.
    groups = (group.units for group in plan.unit_groups if publishes(plan, group.units[0]))
    published = set(chain.from_iterable(groups))
    return _Course(
        cycle=cycle,
        slot_classes=plan.slot_classes,
        trained=plan.facts.trained,
        publishes=tuple(map(published.__contains__, range(len(plan.units)))),
        prefetch_units=plan.prefetch_units,
        micro_batches=plan.micro_batches,
    )


@dataclass(frozen=True, slots=True)
class _Course:
    """Fields of a plan that determine the sequence of moves, independent of their sizes."""

    cycle: tuple[int, ...]
    slot_classes: tuple[SlotClass, ...]
    trained: tuple[bool, ...]
    publishes: tuple[bool, ...]
    prefetch_units: int
    micro_batches: int


@dataclass(slots=True)
class _PhaseMoves:
    """Units fetched, and units updated (with a flag: published), during one phase."""

    micro_batch: int
    backward: bool
    fetched: list[int] = field(default_factory=list)
    updated: list[tuple[int, bool]] = field(default_factory=list)
    repeats: bool = False  # the same phase of the previous micro-batch, and shares its lists

    @property
    def lists(self) -> tuple[int, int]:
        """Key of the moves."""
        return id(self.fetched), id(self.updated)


def _shortened(course: _Course) -> _Course:
    return replace(course, micro_batches=min(course.micro_batches, FEW))


def _step_moves(course: _Course) -> tuple[_PhaseMoves, ...]:
    few, added = _simulate(_shortened(course))
    if course.micro_batches <= FEW:
        return few
    if added is None:
        return _simulate(course)[0]
    last = course.micro_batches - 1
    repeated = (replace(m, micro_batch=count) for count in range(FEW - 1, last) for m in added)
    return (*few[:-2], *repeated, *(replace(moves, micro_batch=last) for moves in few[-2:]))


@lru_cache(maxsize=256)
def _simulate(
    course: _Course,
) -> tuple[tuple[_PhaseMoves, ...], tuple[_PhaseMoves, ...] | None]:
    """Return the moves of a steady step, and those of each additional micro-batch.

    The latter are None if the last but one micro-batch does not repeat the previous one.
    """
    run, count = _SimulatedRun(course), 2 * course.micro_batches
    run.step()
    run.step()
    first_step, second_step = run.phases[:count], run.phases[count : 2 * count]
    is_uniform = count > 4 and first_step[-4].repeats and second_step[-4].repeats
    return tuple(second_step), tuple(second_step[-4:-2]) if is_uniform else None


def pass_disk_bytes(plan: Plan, layout: UnitLayout, placement: UnitPlacement) -> tuple[int, int]:
    """Return bytes that the optimizer pass reads from disk for a unit, and bytes that it writes."""
    state = plan.state_bytes(layout, placement, (Tier.DISK,))
    gradient = plan.gradient_bytes(layout) if placement.gradient is Tier.DISK else 0
    return state + gradient, state


class _ByteCounter:
    """Conversion of moves to bytes, for the placement of one plan.

    `cycle` is the access order. `saved` are sizes of tensors that each forward offloads and its
    backward fetches. `summed` are units whose gradients are copied in fp32; None: all blocks and
    ranges of experts if the plan has slices.
    """

    def __init__(
        self,
        plan: Plan,
        cycle: tuple[int, ...],
        saved: tuple[int, ...],
        summed: Collection[int] | None = None,
    ) -> None:
        self.plan = plan
        if summed is None:
            summed = plan.facts.sliced if plan.saved.slices > 1 else ()
        self._saved = saved_moves(saved, plan.saved, unified=plan.unified)
        self._group_of_unit = [0] * len(plan.units)
        self._fetched_from_disk = [0] * len(plan.units)  # bytes of one fetch
        self._fetched_to_device = [0] * len(plan.units)
        for number, group in enumerate(plan.unit_groups):
            size, tier = group.layout.shard_bytes, group.placement.weight
            for unit in group.units:
                self._group_of_unit[unit] = number
                self._fetched_from_disk[unit] = size if tier is Tier.DISK else 0
                self._fetched_to_device[unit] = 0 if plan.unified or tier is Tier.DEVICE else size
        self._gradients = self._gradient_bytes(cycle, frozenset(summed))

    def of(self, phases: Sequence[_PhaseMoves]) -> list[PhaseBytes]:
        """Return the bytes of every phase; repeated phases share one dict."""
        phase_bytes: list[PhaseBytes] = []
        by_key: dict[tuple[int, int, bool], dict[str, int]] = {}
        for moves in phases:
            # The first backward has no sums to add to.
            is_first = moves.backward and not moves.micro_batch
            key = (*moves.lists, is_first)
            if key not in by_key:
                by_key[key] = self.of_phase(moves).moved
            phase_bytes.append(PhaseBytes(moves.micro_batch, moves.backward, by_key[key]))
        return phase_bytes

    def of_phase(self, moves: _PhaseMoves) -> PhaseBytes:
        """Return the bytes of one phase."""
        plan = self.plan
        moved = dict.fromkeys(DIRECTIONS, 0)
        if moves.fetched:
            moved["disk_read"] += sum(map(self._fetched_from_disk.__getitem__, moves.fetched))
            moved["to_device"] += sum(map(self._fetched_to_device.__getitem__, moves.fetched))
        _add(self._saved[moves.backward], moved)
        if not moves.backward and not moves.micro_batch:
            moved["disk_write"] += plan.commit_bytes // plan.durable_every
        if moves.updated:
            group = self._group_of_unit
            updates = Counter((group[unit], publish) for unit, publish in moves.updated)
            for update, count in updates.items():
                _add(self._update_bytes(*update), moved, count)
            if not plan.unified and not (plan.device_kernels and plan.ranks == 1):
                # The host reads gradients for the norm from the device, without padding.
                on_device = (
                    u for u, _ in moves.updated if plan.placements[u].gradient is Tier.DEVICE
                )
                read = sum(plan.local_units[u].num_trained for u in on_device)
                moved["from_device"] += plan.gradient_itemsize * read
        if moves.backward:
            _add(self._gradients[moves.micro_batch > 0], moved)
        if plan.ranks > 1:
            moved["all_gather"], copied = self._gathered_bytes(moves)
            if not plan.unified:
                moved["to_device"] += copied
        if plan.shared:
            # After each update a node receives new weights in shared RAM once from other nodes: a
            # rank receives the shards of the ranks with the same local rank.
            units = (plan.local_units[u] for u, _ in moves.updated if plan.is_shared(u))
            moved["between_hosts"] = (plan.nodes - 1) * sum(unit.trained_bytes for unit in units)
        return PhaseBytes(moves.micro_batch, moves.backward, moved)

    def _gathered_bytes(self, moves: _PhaseMoves) -> tuple[int, int]:
        """Return bytes received from other ranks by links, and bytes copied from shared RAM.

        Shards of units fetched or published, and at the end of a step square sums for the norm.
        """
        num_others = self.plan.ranks - 1
        gathered = [*moves.fetched, *(unit for unit, publish in moves.updated if publish)]
        counts = Counter(map(self._group_of_unit.__getitem__, gathered))
        nbytes = copied = 0
        for index, count in counts.items():
            group = self.plan.unit_groups[index]
            received = num_others * count * group.layout.shard_bytes
            if self.plan.is_shared(group.units[0]):
                copied += received
            else:
                nbytes += received
        if moves.backward and moves.micro_batch + 1 == self.plan.micro_batches:
            nbytes += 8 * num_others * self.plan.facts.num_reported_squares
        return nbytes, copied

    def _update_bytes(self, group: int, publish: bool) -> dict[str, int]:
        """Return the bytes of the update of one unit of a group."""
        plan, unit_group = self.plan, self.plan.unit_groups[group]
        layout, placement = unit_group.layout, unit_group.placement
        kind, streamed = plan.facts.kinds[layout.index], placement in plan.streamed
        key = (kind, placement, publish, streamed, plan.chunks_at_once, plan.cpu_share, plan.basis)
        cached: dict[str, int] | None = plan.facts.known.get(key)
        if cached is not None:
            return cached
        read, written = pass_disk_bytes(plan, layout, placement)
        moved = {"disk_read": read, "disk_write": written, "to_device": 0, "from_device": 0}
        plan.facts.known[key] = moved
        if update_place(plan, layout.index) is UpdatePlace.DEVICE:
            return moved
        moved["to_device"], returned = streamed_bytes(plan, layout, placement)
        moved["from_device"] += returned
        if plan.unified:
            return moved
        num_streamed = plan.streamed_chunks(layout, placement)
        # Gradients of the chunks that the CPU updates.
        gradient = plan.gradient_bytes(layout)
        gradient -= plan.gradient_bytes(layout, chunks=num_streamed)
        if publish and placement.weight is not Tier.DEVICE:  # streamed weights are in the slot
            moved["to_device"] += gradient // plan.gradient_itemsize * plan.precision.weight
        state = plan.state_bytes(layout, placement, (Tier.DEVICE,))
        state -= plan.state_bytes(layout, placement, (Tier.DEVICE,), chunks=num_streamed)
        moved["to_device"] += state
        moved["from_device"] += state + (gradient if placement.gradient is Tier.DEVICE else 0)
        return moved

    def _gradient_bytes(
        self, cycle: tuple[int, ...], summed: frozenset[int]
    ) -> tuple[dict[str, int], dict[str, int]]:
        """Return bytes of all gradients in the first backward of a step, and in each other one."""
        plan, on_disk, from_device = self.plan, 0, 0
        sizes, exchanged = self._gradient_sizes(cycle, summed)
        for (stored, copied), placement in zip(sizes, plan.placements, strict=True):
            if placement.gradient is Tier.DISK:
                on_disk += stored
            if placement.gradient is not Tier.DEVICE:
                from_device += copied
        first = {"disk_write": on_disk, "from_device": from_device, "all_to_all": exchanged}
        return first, {"disk_read": on_disk, **first}

    def _gradient_sizes(
        self, cycle: tuple[int, ...], summed: frozenset[int]
    ) -> tuple[list[tuple[int, int]], int]:
        """Return bytes of each unit's gradient, stored and copied from the device.

        Also the bytes exchanged between ranks, of all units together. Units that the cycle does not
        use count 0. Independent of placement.
        """
        plan = self.plan
        key = (cycle, summed, plan.rank, plan.ranks, plan.gradient_itemsize, plan.unified)
        cached: tuple[list[tuple[int, int]], int] | None = plan.facts.known.get(key)
        if cached is not None:
            return cached
        sizes, exchanged = [(0, 0)] * len(plan.units), 0
        for unit in set(cycle):
            layout, trained = plan.units[unit], plan.local_units[unit].num_trained
            itemsize = 4 if unit in summed else layout.weight_itemsize
            exchanged += (plan.ranks - 1) * layout.shard_numel * itemsize
            # The local shard of every rank's gradient; fp32 where slices are summed.
            copied = 0 if plan.unified else plan.ranks * trained * itemsize
            sizes[unit] = plan.gradient_bytes(layout) if trained else 0, copied
        plan.facts.known[key] = sizes, exchanged
        return sizes, exchanged


def _add(moved: dict[str, int], total: dict[str, int], times: int = 1) -> None:
    for direction, nbytes in moved.items():
        total[direction] += times * nbytes


class _SimulatedRun:
    """Simulated run without data: slots are sets of unit indices, moves are entries in lists."""

    def __init__(self, course: _Course) -> None:
        self.course = course
        self.order = AccessOrder(course.cycle)
        self.phases: list[_PhaseMoves] = []
        self.resident: list[set[int]] = [set() for _ in course.slot_classes]
        self.pending: list[int] = []
        self.current = -1
        self._classes = {u: i for i, c in enumerate(course.slot_classes) for u in c.members}

    def begin_phase(self, micro_batch: int, *, backward: bool) -> None:
        """Start a new phase, to which further moves are added."""
        self.phases.append(_PhaseMoves(micro_batch, backward))

    def step(self) -> None:
        first_uses = map(self.order.sequence.index, self.order.first_uses())
        backward_start = max(first_uses, default=-1) + 1  # after the last of them
        previous: object = None
        for micro_batch in range(self.course.micro_batches):
            self.wraps = micro_batch + 1 < self.course.micro_batches
            state = ([set(slots) for slots in self.resident], list(self.pending))
            if micro_batch > 1 and self.wraps and state == previous:  # the same moves again
                for phase in self.phases[-2:]:
                    self.phases.append(replace(phase, micro_batch=micro_batch, repeats=True))
                continue
            previous = state
            self.order.begin()
            if micro_batch or not self.phases:  # the first began with the optimizer pass, below
                self.begin_phase(micro_batch, backward=False)
            for position, unit in enumerate(self.order.sequence):
                if position == backward_start:
                    self.begin_phase(micro_batch, backward=True)
                self._use(unit)
            if not self.phases[-1].backward:  # a single unit is used once for both
                self.begin_phase(micro_batch, backward=True)
            self.order.end()
        self.begin_phase(0, backward=False)  # of the next step, with the optimizer pass
        trained = [u for u in self.order.first_uses() if self.course.trained[u]]
        for slots in self.resident:
            slots.difference_update(trained)
        while self.pending:  # units not used in the cycle: updated and written back
            self.phases[-1].updated.append((self.pending.pop(0), False))
        self.pending = trained
        self._run_pass()

    def _use(self, unit: int) -> None:
        self.current = unit
        self.order.advance(unit)
        slot_class = self.class_of(unit)
        if slot_class is not None and not self.holds_slot(unit):
            self._free_slot(slot_class)
            self._run_pass()
            if not self.holds_slot(unit):  # the pass may have filled the slot with a later unit
                self._free_slot(slot_class)
                self.fetch(unit)
        access_order.prefetch(self, self.order, self.course.prefetch_units, wraps=self.wraps)
        self._run_pass()

    def _free_slot(self, slot_class: int) -> None:
        if not self.num_free(slot_class):
            access_order.make_slot_free(
                self, slot_class, lambda u: self.order.distance(u, wraps=self.wraps)
            )

    def _run_pass(self) -> None:
        while self.pending:
            unit = self.pending[0]
            slot_class = self.class_of(unit) if self.publishes(unit) else None
            if slot_class is not None and not self.num_free(slot_class):
                return
            self.pending.pop(0)
            self.phases[-1].updated.append((unit, self.publishes(unit)))
            if slot_class is not None:
                self.resident[slot_class].add(unit)

    # SlotView
    def class_of(self, unit: int) -> int | None:
        return self._classes.get(unit)

    def holds_slot(self, unit: int) -> bool:
        slot_class = self._classes.get(unit)
        return slot_class is not None and unit in self.resident[slot_class]

    def is_pending(self, unit: int) -> bool:
        return unit in self.pending

    def publishes(self, unit: int) -> bool:
        return self.course.publishes[unit]

    def num_free(self, slot_class: int) -> int:
        return self.course.slot_classes[slot_class].count - len(self.resident[slot_class])

    def evictable(self, slot_class: int) -> Collection[int]:
        return self.resident[slot_class] - {self.current}

    def try_evict(self, unit: int) -> bool:
        for slots in self.resident:
            slots.discard(unit)
        return True

    def fetch(self, unit: int) -> None:
        slot_class = self.class_of(unit)
        assert slot_class is not None
        assert self.num_free(slot_class) > 0
        self.resident[slot_class].add(unit)
        self.phases[-1].fetched.append(unit)

"""The plan: pure data, computed from units, budgets and machine facts before any allocation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from infinity.common.sizes import format_count, format_size
from infinity.plan.activations import block_widths, blocks_of
from infinity.plan.layout import Precision, Record, UnitLayout
from infinity.plan.saved_plan import NO_SAVED_PLAN, SavedPlan, saved_moves
from infinity.types import OFF_DEVICE, PAGE, Kind, MomentFormat, Tier, round_up

LINKS = ("all_gather", "all_to_all")  # between ranks: bytes received by one rank
BETWEEN_HOSTS = "between_hosts"  # bytes received by one rank, from RAM of other nodes to its RAM
DIRECTIONS = ("disk_read", "disk_write", "to_device", "from_device", *LINKS, BETWEEN_HOSTS)
RAM = "RAM"  # name of the one memory of a unified machine: the device's and the host's
_MASTERS = {"bf16": "bf16 + 16-bit residual", "fp16": "fp16 weight + fp32", "fp32": "fp32"}


@dataclass(frozen=True, slots=True)
class RuleFacts:
    """Facts about the update rule that a plan depends on.

    `moments` holds the format of each moment of a parameter. `needs_full` is True if the rule needs
    unsharded parameters: a chunk is then a full unit. `tile_elements` is the size of the tiles that
    a torch optimizer is run on, 0 for infinity's kernels.
    """

    name: str = "AdamW"
    moments: tuple[MomentFormat, ...] = (MomentFormat.FP32, MomentFormat.FP32)
    needs_full: bool = False
    tile_elements: int = 0
    matrix_steps: int = 0  # see `infinity.optim.rules.matrix_steps`
    notes: tuple[str, ...] = ()


class UnitPlacement(NamedTuple):
    """Tiers of one unit's bytes. `state` means moments, and residual or master.

    A tuple because the placement search hashes many of them.
    """

    weight: Tier
    state: Tier
    gradient: Tier

    def of(self, kind: Kind) -> Tier:
        """Return the tier of a kind."""
        if kind is Kind.WEIGHT:
            return self.weight
        return self.gradient if kind is Kind.GRADIENT else self.state

    def of_field(self, field: str) -> Tier:
        """Return the tier of a field: "weight", "state" or "gradient"."""
        tier: Tier = getattr(self, field)
        return tier


class UpdatePlace(Enum):
    """Processor that runs a unit's update."""

    DEVICE = "on the device"
    """The unit is stored on the device: nothing is copied."""
    STREAMED = "streamed through the device"
    """Chunk by chunk: copy state in, run the device's kernel, copy state out."""
    CPU = "by the CPU"
    """In place if the unit is stored in RAM, else in a RAM buffer."""


@dataclass(frozen=True, slots=True)
class SlotClass:
    """Slots of one size, shared by units that need at least half of it."""

    slot_bytes: int
    count: int
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class UnitGroup:
    """Units of equal size and placement; `layout` is that of the first one."""

    layout: UnitLayout
    placement: UnitPlacement
    units: tuple[int, ...]


class UnitFacts:
    """Values derived from the units alone, and cached results for their plans, by key.

    Shared by plans made with `Plan.changed` and by cases with the same units: a search tries
    thousands of placements, most of them again under other budgets.
    """

    def __init__(self, units: tuple[UnitLayout, ...]) -> None:
        self.units = units
        ids: dict[Any, int] = {}
        sizes = (
            (u.numel, u.frozen_bytes, u.dequantized_bytes, u.paired, u.is_range) for u in units
        )
        self.kinds = [ids.setdefault(key, len(ids)) for key in sizes]
        self.has_experts = any(len(block) > 1 for block in blocks_of(units))
        self.trained = tuple(bool(unit.numel) for unit in units)
        self.largest_quantized = max((u.largest_quantized for u in units), default=0)
        self.dequantized = frozenset(u.index for u in units if u.dequantized_bytes)
        # Units whose gradients are summed over slices, if blocks run a batch in slices.
        self.sliced = tuple(unit.index for unit in units if unit.is_block or unit.is_range)
        self.largest_shard = max((unit.shard_numel for unit in units), default=0)
        self.largest_trained = max((unit.trained_bytes for unit in units), default=0)
        self.shard_bytes = [unit.shard_bytes for unit in units]
        self.num_trained = [unit.num_trained for unit in units]
        self.known: dict[Any, Any] = {}
        self._costs: list[tuple[Any, dict[Any, Any]]] = []

    def costs(self, rates: Any) -> dict[Any, Any]:
        """Return the cost cache for these rates: (micro-batches, *`Plan.searched`) -> cost."""
        for cached_rates, costs in self._costs:
            if cached_rates is rates or cached_rates == rates:
                return costs
        self._costs.append((rates, {}))
        return self._costs[-1][1]

    @cached_property
    def widths(self) -> list[int]:
        """Width of each block's input, in values per token."""
        return block_widths(self.units)

    @cached_property
    def num_reported_squares(self) -> int:
        """Largest number of square sums that one rank reports to another for the norm."""
        counts = (unit.num_reported_squares for unit in self.units if unit.numel)
        return max(map(sum, zip(*counts, strict=True)), default=0)


# Fields that determine a plan's costs and are constant in a placement search.
_BASIS = (
    "precision", "chunk_elements", "num_staging_buffers", "gradient_itemsize", "unified", "verify",
    "rule", "device_kernels", "durable", "durable_every", "rank", "ranks", "nodes", "may_share",
)  # fmt: skip
# Cached properties of a plan -> the fields from which they are computed.
_DEPENDS_ON = {
    "facts": frozenset(["units"]),
    "basis": frozenset(["units", "saved", "model_recomputes", *_BASIS]),
    "local_units": frozenset(["units", "rank"]),
    "unit_groups": frozenset(["units", "placements"]),
    "units_on_device": frozenset(["placements"]),
    "shared_bytes": frozenset(["units", "placements", "nodes", "shared", "unified"]),
    "tier_bytes": frozenset(["memory"]),
}


@lru_cache(maxsize=64)
def _dependents(changes: tuple[str, ...]) -> list[str]:
    return [name for name, fields in _DEPENDS_ON.items() if not fields.isdisjoint(changes)]


@dataclass(frozen=True)
class Plan:
    """Placement, slots and chunk size, with the memory they need and the bytes they move.

    Sizes are in bytes, `chunk_elements` in elements, `gradient_itemsize` in bytes per gradient
    element (2 if a step is one micro-batch in bf16 or fp16, 4 if gradients are summed).
    """

    precision: Precision
    units: tuple[UnitLayout, ...]
    placements: tuple[UnitPlacement, ...]
    slot_classes: tuple[SlotClass, ...]
    chunk_elements: int
    num_staging_buffers: int
    prefetch_units: int
    micro_batches: int
    gradient_itemsize: int
    unified: bool
    verify: bool  # checksums of the bytes on disk are stored on the host
    memory: dict[Tier, dict[str, int]]  # purpose -> bytes
    budget: dict[Tier, int | None]
    predicted_bytes: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    rule: RuleFacts = RuleFacts()
    device_kernels: bool = False  # a device with separate memory runs infinity's optimizer kernels
    streamed: frozenset[UnitPlacement] = frozenset()  # placements of units updated by streaming
    chunks_at_once: int = 1  # chunks per batch of a unit that is updated where it is stored
    cpu_share: float = 0.0  # share of a streamed unit's chunks that the CPU updates concurrently
    rates_origin: str = ""  # origin of the rates used to choose automatic placement
    durable: bool = False  # every unit has two extents; steps are committed
    durable_every: int = 1  # steps from one commit to the next
    resumed: str = ""  # the durable directory that this run continues
    saved: SavedPlan = NO_SAVED_PLAN  # tensors that autograd saves for backward, and their tiers
    model_recomputes: bool = False  # the model's gradient checkpointing recomputes all blocks
    rank: int = 0  # rank that this plan is for
    ranks: int = 1  # number of ranks that shard every unit; bytes and memory are those of one rank
    unsharded: frozenset[int] = frozenset()  # several ranks: units with a permanent slot
    nodes: int = 1  # number of nodes that the ranks run on
    may_share: bool = False  # all ranks of a node can map the same RAM
    shared: bool = False  # weights in RAM are stored in RAM that ranks share: see `is_shared`

    def changed(self, **changes: Any) -> Plan:
        """Return a copy with `changes`, like `dataclasses.replace`, and cached properties retained.

        Cached properties that depend on a changed field are dropped. Cheap enough for searches,
        which make thousands of plans.
        """
        copy = object.__new__(Plan)
        attributes = copy.__dict__
        attributes.update(self.__dict__)
        for name in _dependents(tuple(changes)):
            attributes.pop(name, None)
        attributes.update(changes)
        return copy

    @cached_property
    def facts(self) -> UnitFacts:
        """Values derived from the units alone."""
        return UnitFacts(self.units)

    @cached_property
    def basis(self) -> int:
        """Id of the settings that a search does not change.

        Equal for plans of the same `facts` that differ only in the other items of `searched`.
        """
        saved = self.saved
        moves = saved_moves(saved.sizes, saved, unified=self.unified)
        offload = saved.offload, saved.host_bytes, saved.disk_bytes, saved.slices > 1
        # Slices that share ranges of experts, and recomputation, use units more than once.
        reuse: tuple[Any, ...] = ()
        if self.facts.has_experts:
            reuse = saved.slices > 1, saved.recompute, self.model_recomputes
        moved = (tuple(sorted(by_direction.items())) for by_direction in moves)
        key = (*(getattr(self, name) for name in _BASIS), *offload, *reuse, *moved)
        basis: int = self.facts.known.setdefault(key, len(self.facts.known))
        return basis

    @property
    def searched(self) -> tuple[Any, ...]:
        """Cache key of the plan's memory; with the number of micro-batches, of its movement."""
        return (
            self.basis, self.placements, self.streamed, self.cpu_share, self.chunks_at_once,
            self.unsharded, self.shared, self.prefetch_units,
        )  # fmt: skip

    @cached_property
    def units_on_device(self) -> frozenset[int]:
        """Units whose weights are stored on the device."""
        device = Tier.DEVICE
        return frozenset([i for i, p in enumerate(self.placements) if p.weight is device])

    @cached_property
    def local_units(self) -> tuple[UnitLayout, ...]:
        """Layouts of this rank's shards; those of the full units for a single rank."""
        return tuple(unit.of_shard(self.rank) for unit in self.units)

    def is_shared(self, unit: int) -> bool:
        """Return True if ranks copy the unit's full weights from RAM shared within a node."""
        tier = self.placements[unit].weight
        return self.shared and (tier is Tier.HOST or (self.unified and tier is Tier.DEVICE))

    @cached_property
    def shared_bytes(self) -> int:
        """Bytes of shared RAM for which this rank accounts.

        Its shards, and those of its peer on every other node. Every rank of the node accounts for
        the same number of bytes, and maps all of them.
        """
        units = (u for u in self.units if self.is_shared(u.index))
        return self.nodes * sum(round_up(unit.shard_bytes, PAGE) for unit in units)

    @property
    def shared_stacks(self) -> frozenset[str]:
        """Paths of modules whose ranges of experts are shared by slices.

        Those with more ranges than slots, if blocks run in slices.
        """
        key = ("shared", self.saved.slices > 1, self.slot_classes)
        if key not in self.facts.known:
            paths: set[str] = set()
            for slot_class in self.slot_classes if self.saved.slices > 1 else ():
                ranges = (self.units[u] for u in slot_class.members if self.units[u].is_range)
                counts = Counter(unit.stacks_path for unit in ranges)
                num_slots = slot_class.count
                paths |= {path for path, count in counts.items() if count > num_slots}
            self.facts.known[key] = frozenset(paths)
        stacks: frozenset[str] = self.facts.known[key]
        return stacks

    def computes_where_stored(self, unit: int) -> bool:
        """Return True if modules compute with the unit's weights where they are stored.

        That is on the device. False for several ranks, which store shards, and for quantized
        weights: both are copied to a slot.
        """
        on_device = self.placements[unit].weight is Tier.DEVICE and self.ranks == 1
        return on_device and unit not in self.facts.dequantized

    @property
    def zero_stage(self) -> int:
        """ZeRO stage in DeepSpeed's numbering; 0 for one rank.

        2 if all weights stay unsharded in slots from one update to the next, 3 if some are evicted.
        """
        if self.ranks == 1:
            return 0
        return 3 if self.num_moving else 2

    @property
    def num_moving(self) -> int:
        """Number of units that share slots; several ranks gather them again after an eviction."""
        return sum(len(c.members) for c in self.slot_classes if c.count < len(c.members))

    @cached_property
    def tier_bytes(self) -> dict[Tier, int]:
        """Tier -> bytes, summed over purposes."""
        return {tier: sum(by_purpose.values()) for tier, by_purpose in self.memory.items()}

    @property
    def num_trained(self) -> int:
        """Number of elements with optimizer state, without padding."""
        return sum(self.facts.num_trained)

    @cached_property
    def unit_groups(self) -> tuple[UnitGroup, ...]:
        """Groups of equal units, ordered by their first unit."""
        unit_indices: dict[tuple[int, UnitPlacement], list[int]] = {}
        for unit, key in enumerate(zip(self.facts.kinds, self.placements, strict=True)):
            unit_indices.setdefault(key, []).append(unit)
        return tuple(
            UnitGroup(self.units[units[0]], placement, tuple(units))
            for (_, placement), units in unit_indices.items()
        )

    def record(self, unit: UnitLayout) -> Record:
        """Return the form of the unit's on-disk records: its kinds on the disk tier."""
        placement = self.placements[unit.index]
        kinds = tuple(k for k in self.precision.kinds if placement.of(k) is Tier.DISK)
        return Record(kinds, self.precision_of(unit))

    def full_record(self, unit: UnitLayout) -> Record:
        """Return a record of all state kinds, the form of every chunk on disk in a durable run."""
        return Record(self.precision.kinds, self.precision_of(unit))

    def precision_of(self, unit: UnitLayout) -> Precision:
        """Return the precision in which the chunks of a unit, or of its shard, are stored."""
        return self.precision if unit.paired is None else _paired(self.precision, unit.paired)

    @property
    def bytes_per_parameter(self) -> float:
        """Mean stored bytes of one trained element, without padding.

        Parameters of which the rule keeps one moment need fewer.
        """
        num_full = sum(s.numel for u in self.units for s in u.trained_segments if s.needs_full)
        all_moments = self.precision.bytes_per_parameter
        first = replace(self.precision, moments=self.precision.moments[:1]).bytes_per_parameter
        return all_moments - (all_moments - first) * num_full / max(self.num_trained, 1)

    @property
    def commit_bytes(self) -> int:
        """Bytes that a commit writes in addition to the update: state that is not on disk."""
        if not self.durable:
            return 0
        off_disk = (Tier.DEVICE, Tier.HOST)
        return sum(
            self.state_bytes(group.layout, group.placement, off_disk) * len(group.units)
            for group in self.unit_groups
        )

    def range_bytes(self, layout: UnitLayout, kind: Kind) -> int:
        """Return the bytes of one state kind of a shard's trained range, summed over its chunks."""
        num_full, tail = divmod(layout.shard_numel, self.chunk_elements)
        nbytes = self.precision_of(layout).nbytes
        return num_full * nbytes(kind, self.chunk_elements) + nbytes(kind, tail)

    def state_bytes(
        self,
        layout: UnitLayout,
        placement: UnitPlacement,
        tiers: Collection[Tier],
        *,
        chunks: int | None = None,
    ) -> int:
        """Return the bytes of a shard's state kinds that are stored on one of `tiers`.

        With `chunks` those of its first chunks only.
        """
        weight, state = self.weight_and_state(layout, chunks=chunks)
        return (weight if placement.weight in tiers else 0) + (
            state if placement.state in tiers else 0
        )

    def weight_and_state(self, layout: UnitLayout, *, chunks: int | None = None) -> tuple[int, int]:
        """Return the bytes of a shard's trained weights, and of its other state kinds.

        With `chunks` those of its first chunks only.
        """
        numel = self._elements_of(layout, chunks)
        key = (numel, layout.paired, self.basis)
        sizes: tuple[int, int] | None = self.facts.known.get(key)
        if sizes is None:
            num_full, tail = divmod(numel, self.chunk_elements)
            precision = self.precision_of(layout)
            nbytes = Record(precision.kinds[1:], precision).nbytes
            state_bytes = num_full * nbytes(self.chunk_elements) + nbytes(tail)
            sizes = numel * precision.weight, state_bytes
            self.facts.known[key] = sizes
        return sizes

    def gradient_bytes(self, layout: UnitLayout, *, chunks: int | None = None) -> int:
        """Return the bytes of a shard's stored gradient, or of its first `chunks`."""
        return self._elements_of(layout, chunks) * self.gradient_itemsize

    def _elements_of(self, layout: UnitLayout, chunks: int | None) -> int:
        numel = layout.shard_numel
        return numel if chunks is None else min(numel, chunks * self.chunk_elements)

    def part(self, layout: UnitLayout, kind: Kind, chunk: int, chunks: int = 1) -> slice:
        """Return the byte slice of a shard's range for one kind of `chunks` chunks from `chunk`."""
        last = chunk + chunks - 1
        _, last_elements = layout.chunk(last, self.chunk_elements)
        if kind is Kind.GRADIENT:
            chunk_bytes = self.chunk_elements * self.gradient_itemsize
            last_bytes = last_elements * self.gradient_itemsize
        else:
            nbytes = self.precision_of(layout).nbytes
            chunk_bytes = nbytes(kind, self.chunk_elements)
            last_bytes = nbytes(kind, last_elements)
        return slice(chunk * chunk_bytes, last * chunk_bytes + last_bytes)

    def chunks_per_batch(self, placement: UnitPlacement, *, by_device: bool = True) -> int:
        """Return the number of chunks that are streamed, or updated by the CPU, in one batch.

        More than one only if all tiers are addressable: on disk each chunk is a record. Chunks that
        the CPU updates concurrently with streamed ones pass through RAM buffers if they are
        stored on the device.
        """
        by_device = by_device or placement in self.streamed
        return self.chunks_at_once if self.is_addressable(placement, by_device=by_device) else 1

    def is_addressable(self, placement: UnitPlacement, *, by_device: bool) -> bool:
        """Return True if a unit with this placement is updated without RAM staging buffers.

        With `by_device` the device updates, and copies from RAM itself.
        """
        tiers = {placement.weight, placement.state, placement.gradient}
        if by_device or self.unified:
            return Tier.DISK not in tiers
        return tiers == {Tier.HOST}

    def streamed_chunks(self, layout: UnitLayout, placement: UnitPlacement) -> int:
        """Return the number of streamed chunks; they are the first ones of the unit.

        0 if the CPU updates all chunks, else at least 1: a streamed unit uses its slot.
        """
        if placement not in self.streamed:
            return 0
        count = layout.num_chunks(self.chunk_elements)
        share = self.cpu_share if self.is_addressable(placement, by_device=True) else 0.0
        return max(count - round(share * count), min(count, 1))

    def chunk_batches(
        self, layout: UnitLayout, placement: UnitPlacement
    ) -> Iterator[tuple[range, bool]]:
        """Yield the batches of an optimizer pass: (chunks, True if they are streamed).

        Batches of the CPU are interleaved evenly with streamed ones.
        """
        count = layout.num_chunks(self.chunk_elements)
        num_streamed = self.streamed_chunks(layout, placement)
        step = self.chunks_per_batch(placement, by_device=True)
        cpu_step = self.chunks_per_batch(placement, by_device=False)
        streamed, by_cpu = 0, num_streamed  # next chunk to stream, and next one for the CPU
        while streamed < num_streamed or by_cpu < count:
            if streamed < num_streamed:
                end = min(streamed + step, num_streamed)
                yield range(streamed, end), True
                streamed = end
            while by_cpu < count and (
                streamed == num_streamed
                or (by_cpu - num_streamed) * num_streamed < (count - num_streamed) * streamed
            ):
                end = min(by_cpu + cpu_step, count)
                yield range(by_cpu, end), False
                by_cpu = end

    def class_of(self, unit: int) -> int | None:
        """Return the index of the unit's slot class; None if it uses no slot."""
        for index, slot_class in enumerate(self.slot_classes):
            if unit in slot_class.members:
                return index
        return None

    def describe(self) -> str:
        """Return a multi-line report: placement, memory against budgets, bytes per step."""
        master = _MASTERS[self.precision.name]
        master_kind = self.precision.master_kind or Kind.RESIDUAL
        lines = [
            f"{format_count(self.num_trained)} trained parameters in {len(self.units)} units, "
            f"master {master}, {self.micro_batches} micro-batch(es) per step",
            *self._ranks_lines(),
            f"  {self.rule.name}: {self._moments_line()}; "
            f"{self.bytes_per_parameter:.5g} bytes of state per parameter",
        ]
        for label, kind in (
            ("weights", Kind.WEIGHT),
            (f"moments and {master_kind.value}", Kind.MOMENT1),
            ("gradients", Kind.GRADIENT),
        ):
            lines.append(f"  {label:<21} {self._placement_line(kind)}")
        if self.frozen_line:
            lines.append(f"  {'frozen weights':<21} {self.frozen_line}")
        if not self.unified:
            lines.append(f"  {'updates':<21} {self.updates_line}")
        for tier, by_purpose in self.memory_by_name().items():
            budget = self.budget.get(Tier.HOST if tier == RAM else Tier(tier))
            total = sum(by_purpose.values())
            of_budget = f" of {format_size(budget)}" if budget is not None else ""
            purposes = ", ".join(f"{k} {format_size(v)}" for k, v in by_purpose.items() if v)
            if total:
                lines.append(f"  {tier:<7} {format_size(total):>10}{of_budget}: {purposes}")
        slots = ", ".join(f"{c.count} x {format_size(c.slot_bytes)}" for c in self.slot_classes)
        location = f"in {RAM}" if self.unified else "on the device"
        lines.append(
            f"  slots   {slots or f'none (weights are {location})'}; prefetch "
            f"{self.prefetch_units}; chunks of {format_count(self.chunk_elements)} elements"
        )
        directions = ", ".join(
            f"{direction.replace('_', ' ')} {format_size(self.predicted_bytes.get(direction, 0))}"
            for direction in DIRECTIONS
            if self.predicted_bytes.get(direction, 0)
        )
        lines.append(f"  predicted per step: {directions or 'nothing moves between tiers'}")
        if self.rates_origin:
            rates = self.rates_origin
            rates = rates if "rates" in rates else f"rates {rates}"
            lines.append(f"  placement left to the plan was chosen by {rates}")
        if self.saved.line:
            lines.append(f"  activations: {self.saved.line}")
        if self.durable:
            lines.append(f"  durable: {self._durable_line()}")
        lines.extend(f"  note: {note}" for note in self.notes)
        return "\n".join(lines)

    def _ranks_lines(self) -> list[str]:
        """Describe the sharding: the other lines are about one rank."""
        if self.ranks == 1:
            return []
        lines = [
            f"  rank {self.rank} of {self.ranks}: each stores 1/{self.ranks} of weights, state and "
            f"gradients of every unit, and gathers full units in slots (ZeRO-{self.zero_stage})"
        ]
        moving = self.num_moving
        if moving < len(self.units):
            of_units = f" of {len(self.units) - moving} units" if moving else ""
            lines.append(
                f"  weights{of_units} stay gathered in slots: one all-gather after each update"
            )
        if num_shared := sum(map(self.is_shared, range(len(self.units)))):
            of_units = f" of {num_shared} units" if num_shared < len(self.units) else ""
            of_nodes = f" of each of {self.nodes} nodes" if self.nodes > 1 else ""
            lines.append(
                f"  weights{of_units} are stored in shared RAM{of_nodes}, and full units are "
                "copied from there"
            )
        return lines

    @property
    def frozen_line(self) -> str:
        """Describe the number of frozen parameters and their formats; "" if there are none."""
        counts = Counter[str]()
        for segment in (s for unit in self.units for s in unit.segments if not s.trained):
            form = f"stored and moved as {segment.form} (lossy)" if segment.form else "unquantized"
            counts[form] += segment.numel
        return ", ".join(f"{format_count(count)} {form}" for form, count in counts.items())

    @property
    def updates_line(self) -> str:
        """Describe where updates run, with counts of units if they differ."""
        counts = Counter[str]()
        for group in self.unit_groups:
            if group.layout.numel:
                counts[update_place(self, group.units[0]).value] += len(group.units)
        reason = why_only_cpu(self) if len(counts) == 1 else ""
        clause = ""
        if reason:
            clause = f": {reason}"
        elif self.cpu_share:
            clause = f", {self.cpu_share:.0%} of these by the CPU at the same time"
        return (_counted(counts) or "nothing is trained") + clause

    def _moments_line(self) -> str:
        formats = dict.fromkeys(self.precision.moments)
        if not formats:
            return "no moments"
        names = [f.value if f.is_exact else f"{f.value} (lossy)" for f in formats]
        count = len(self.precision.moments)
        moments = f"{count} moment{'s' if count > 1 else ''} in {' and '.join(names)}"
        paired = any(unit.paired is not None for unit in self.units)
        return f"{moments}, of matrices 1" if paired else moments

    def _durable_line(self) -> str:
        interval, extra_bytes = self.durable_every, self.commit_bytes
        frequency = "every step is committed"
        if interval > 1:
            frequency = f"1 step in {interval} is committed, at most {interval} are lost"
        cost = "without more bytes"
        if extra_bytes:
            cost = f"a commit writes {format_size(extra_bytes)} more"
        return f"{frequency}; {cost}; all state is on disk twice"

    def memory_by_name(self) -> dict[str, dict[str, int]]:
        """Return tier name -> purpose -> bytes; a unified device's memory is merged with RAM."""
        if not self.unified:
            return {tier.value: by_purpose for tier, by_purpose in self.memory.items()}
        device, host = self.memory[Tier.DEVICE], self.memory[Tier.HOST]
        purposes = dict.fromkeys([*host, *device])
        ram = {p: host.get(p, 0) + device.get(p, 0) for p in purposes}
        return {RAM: ram, "disk": self.memory[Tier.DISK]}

    def line(self, engine: str, model: str, device: object) -> str:
        """Return the `repr` of an engine: model, device, precision, rule and placement."""
        kinds = {"weights": Kind.WEIGHT, "moments": Kind.MOMENT1, "gradients": Kind.GRADIENT}
        stored = ", ".join(f"{n} in {self._placement_line(kind)}" for n, kind in kinds.items())
        count = format_count(self.num_trained)
        if not self.num_trained:
            weights = f"weights in {self._placement_line(Kind.WEIGHT)}"
            return (
                f"{engine}({model} on {device}: nothing trained, {self.precision.name}; {weights})"
            )
        trained = f"{count} trained parameters in {self.precision.name} by {self.rule.name}"
        return f"{engine}({model} on {device}: {trained}; {stored})"

    def _placement_line(self, kind: Kind) -> str:
        tiers = (placement.of(kind) for placement in self.placements)
        names = (RAM if self.unified and tier is not Tier.DISK else tier.value for tier in tiers)
        return _counted(Counter(names))


def _counted(counts: Counter[str]) -> str:
    """Join texts, each with its number of units if there are several."""
    clauses = [f"{text} ({n} unit{'s' if n > 1 else ''})" for text, n in counts.items()]
    return ", ".join(clauses) if len(counts) > 1 else "".join(counts)


@lru_cache(maxsize=256)
def _paired(precision: Precision, paired: int) -> Precision:
    return replace(precision, paired=paired)


def update_place(plan: Plan, unit: int) -> UpdatePlace:
    """Return where a unit's optimizer runs."""
    # A hot path of the searches: identity, not `==`, of enum members.
    placement, device = plan.placements[unit], Tier.DEVICE
    on_device = (
        placement.weight is device and placement.state is device and placement.gradient is device
    )
    if on_device and not why_only_cpu(plan):
        return UpdatePlace.DEVICE
    streamed = plan.streamed and placement in plan.streamed
    return UpdatePlace.STREAMED if streamed else UpdatePlace.CPU


def why_only_cpu(plan: Plan) -> str:
    """Return the reason why no unit can be updated by the device; "" if units can."""
    if plan.unified:
        return "the device is the CPU"
    if plan.rule.tile_elements:
        return f"{plan.rule.name} is not one of our kernels"
    return "" if plan.device_kernels else "the device has no kernels"


def streamed_calls(plan: Plan, layout: UnitLayout, placement: UnitPlacement) -> int:
    """Return the number of copies and kernels of a unit's streamed update."""
    batches = -(-plan.streamed_chunks(layout, placement) // plan.chunks_per_batch(placement))
    kinds = [k for k in plan.precision.kinds if placement.of(k) is not Tier.DEVICE]
    return batches * (2 * len(kinds) + (placement.gradient is not Tier.DEVICE) + 1)


def streamed_bytes(plan: Plan, layout: UnitLayout, placement: UnitPlacement) -> tuple[int, int]:
    """Return the bytes that a unit's streamed update copies to the device, and back.

    Kinds stored on the device are not copied. New weights are copied back like all state; the
    forward finds them in the unit's slot, in which they were updated.
    """
    chunks = plan.streamed_chunks(layout, placement)
    state = plan.state_bytes(layout, placement, OFF_DEVICE, chunks=chunks)
    gradient = plan.gradient_bytes(layout, chunks=chunks)
    return state + (0 if placement.gradient is Tier.DEVICE else gradient), state


def publishes(plan: Plan, unit: int) -> bool:
    """Return True if an optimizer pass publishes the unit's new weights on the device.

    False for units with frozen bytes off the device: the optimizer pass has the trained range only,
    so they are written back and fetched in full. Also False for units that are stored on the device
    and copied to a slot.
    """
    if plan.placements[unit].weight is Tier.DEVICE:
        return plan.computes_where_stored(unit)
    return not plan.units[unit].frozen_bytes

"""Placement made real: where each unit's weight, residual and moments rest, on every tier.

The store reserves everything once, from the plan. Reading and writing a whole kind of a unit
works for any placement; the optimizer pass and the prefetcher use the finer parts directly.

[Note: copies]
In a durable run every unit has two extents per chunk, copies A and B, each with room for all kinds.
The *committed* copy holds the last committed step and is never written; the *active* one is
where the kinds that rest on disk are read. An optimizer pass, or an edit, writes the other copy
than the committed one, out of place if that is not active yet, and in place after. The unit then
moves to that copy; the next commit (see `durability.py`) adds what rests in RAM, and makes it the
committed one. Frozen bytes are the same once more. Otherwise there is one copy, which is always
active.

[Note: shards at rest]
Of several ranks each keeps a shard of every unit (`Plan.local_units`), and full units are in slots
alone: a fetch fills this rank's parts of a slot, `gather` the rest, beside compute. `read` and
`write` give and take full kinds, `read_shard` and `write_shard` the shard's.

[Note: shared RAM]
Where ranks share the RAM that weights rest in (`Plan.shared`), each keeps its shards there as it
would in its own, and `gather` copies the others'. What orders them are meetings that there are
anyway. Copies come after that of the unit's use: by then every rank has its shard in a slot, so its
update is over. Updates come after that of the norm, which knows all gradients: by then every copy
that somebody computed with is over; what is left are copies of weights about to change, which are
dropped. An edit meets once more, when each rank's copies are over.

Of several nodes each has such RAM, with the shards of all: those of other nodes are brought there
(`bring`) once all ranks have written theirs, and `is_here` on all before any copies them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from infinity.common.malloc import free_pages
from infinity.distributed.context import SINGLE_PROCESS, DistContext
from infinity.distributed.shared_memory import SharedWeights
from infinity.model.torch_private import storage_use_count
from infinity.offload.transfers import Transfers
from infinity.plan.layout import Record, UnitLayout
from infinity.plan.plan import Plan
from infinity.storage.device import HAPPENED, Event, after_all
from infinity.storage.disk import Extent
from infinity.storage.staging import host_buffer
from infinity.storage.store import MemoryRange, Range, Store, together
from infinity.types import PAGE, Kind, Tier, round_up


class ExtentAllocator(Protocol):
    """What extents are promised by: a disk, before it is allocated."""

    def extent(self, nbytes: int, owner: str = "", cuts: Sequence[int] = ()) -> Extent:
        """See `Disk.extent`."""


@dataclass
class ExtentCopies:
    """Which of a unit's copies is active, and which is committed; see [Note: copies]."""

    num_copies: int = 1
    active: int = 0
    committed: int = 0
    dirty: bool = False  # the state is not what is committed, on some tier

    @property
    def next(self) -> int:
        """The copy that is written."""
        return (self.committed + 1) % self.num_copies

    def advance(self) -> None:
        """The copy that is written is complete."""
        self.active, self.dirty = self.next, True

    def commit(self) -> None:
        """Make the active copies the committed ones."""
        self.committed, self.dirty = self.active, False


@dataclass
class UnitState:
    """Where one unit's state rests; `layout` is that of what this rank keeps of it.

    `memory` holds the flat ranges of kinds that rest in memory; that of the weights includes the
    frozen bytes. `copies` hold one extent per chunk, a `record` of the kinds that rest on disk, or
    in a durable run of all; none where that is none. `writes` are under way to any of them.
    """

    layout: UnitLayout
    record: Record
    memory: dict[Kind, Range] = field(default_factory=dict)
    copies: list[list[Extent]] = field(default_factory=list)
    copy: ExtentCopies = field(default_factory=ExtentCopies)
    frozen_copies: list[Extent] = field(default_factory=list)
    frozen_copy: ExtentCopies = field(default_factory=ExtentCopies)
    writes: list[Event] = field(default_factory=list)

    @property
    def kinds(self) -> list[Kind]:
        """All state kinds, those that rest on disk first: in a buffer as in their record."""
        kinds = self.record.precision.kinds
        return sorted(kinds, key=self.memory.__contains__)

    def in_ram(self, kind: Kind) -> Tensor | None:
        """The bytes (uint8) of a kind where they rest, if the CPU reaches them there."""
        location = self.memory.get(kind)
        return None if location is None else location.reached(by_device=False)

    def on_device(self, kind: Kind) -> bool:
        """Whether a kind rests in memory that only the device's kernels reach."""
        return kind in self.memory and self.in_ram(kind) is None


class Staged(NamedTuple):
    """A chunk on its way.

    `views` (uint8) by kind, on the device for kinds in `on_device`; what to wait for; and how many
    bytes of the buffer are in use.
    """

    views: dict[Kind, Tensor]
    waits: list[Event]
    used: int = 0
    on_device: frozenset[Kind] = frozenset()


class StateStore:
    """All units' state at rest, gradients excepted."""

    def __init__(
        self, plan: Plan, transfers: Transfers, ranks: DistContext = SINGLE_PROCESS
    ) -> None:
        self.plan = plan
        self.transfers = transfers
        self.ranks = ranks
        self.units = [UnitState(shard, plan.record(shard)) for shard in plan.local_units]
        self.edited = False  # since somebody last set it to False
        self.frozen_edition = 0  # counts what may have changed frozen bytes at rest
        self.shared: SharedWeights | None = None
        self._copies: Event = HAPPENED  # from there
        try:
            self._share()
            for tier, store in transfers.stores.items():
                if tier is not Tier.DISK:
                    self._reserve(tier, store)
            if transfers.disk is not None:
                for unit in self.units:
                    promise_extents(plan, unit, transfers.disk)
        except BaseException:
            self.forget()
            raise

    def _reserve(self, tier: Tier, store: Store) -> None:
        """Flat ranges for what rests in memory. (On disk the kinds of a chunk share a record.)"""
        wanted = [
            (unit, kind, self.shard_bytes(unit.layout, kind))
            for unit in self.units
            for kind in self.plan.precision.kinds
            if self.plan.placements[unit.layout.index].of(kind) is tier and kind not in unit.memory
        ]
        for weights in (True, False):  # apart: they may outlive the rest, see `keep_weights`
            now = [each for each in wanted if each[2] and (each[1] is Kind.WEIGHT) is weights]
            owners = [f"unit {unit.layout.name!r}, {kind.value}" for unit, kind, _ in now]
            ranges = store.reserve([nbytes for _, _, nbytes in now], owners) if now else []
            for (unit, kind, _), location in zip(now, ranges, strict=True):
                unit.memory[kind] = location

    def _share(self) -> None:
        """Weights in RAM that all ranks map; see [Note: shared RAM]."""
        shared = (unit for unit in self.plan.local_units if self.plan.is_shared(unit.index))
        layouts = {unit.index: unit for unit in shared if unit.shard_bytes}
        if not layouts:
            return
        self.shared = SharedWeights(layouts, self.ranks, self.transfers.device.pin)
        for index in layouts:
            shard = self.shared.shards[index][self.ranks.rank]
            self.units[index].memory[Kind.WEIGHT] = MemoryRange(Tier.HOST, shard)

    def shard_bytes(self, layout: UnitLayout, kind: Kind) -> int:
        """Bytes of a shard's flat range of a kind; with the weights come the frozen bytes."""
        if kind is Kind.WEIGHT:
            return layout.shard_bytes
        return self.plan.range_bytes(layout, kind)

    def keep_weights(self) -> dict[Tier, int]:
        """Drop all ranges but those of weights; returns the bytes of these by tier."""
        kept = dict.fromkeys(Tier, 0)
        for unit in self.units:
            weight = unit.memory.get(Kind.WEIGHT)
            unit.memory = {} if weight is None else {Kind.WEIGHT: weight}
            kept[Tier.DISK if weight is None else weight.tier] += unit.layout.shard_bytes
        return kept

    def freed_by_taking(self, unit: int) -> int:
        """Return the bytes of RAM that `take_weights` gives back to the system."""
        weight = self.units[unit].in_ram(Kind.WEIGHT)
        if weight is None or (self.shared is not None and unit in self.shared):
            return 0
        return weight.nbytes if storage_use_count(weight) == 1 else 0  # else a tensor lies there

    def take_weights(self, unit: int) -> Tensor:
        """`read` the weights, and give the system the RAM that they rested in. Once for each."""
        found = self.read(unit, Kind.WEIGHT)
        weight = self.units[unit].in_ram(Kind.WEIGHT)
        if weight is not None and self.freed_by_taking(unit):
            free_pages(weight.data_ptr(), round_up(weight.nbytes, PAGE))
        return found

    def forget(self) -> None:
        """Drop the reserved ranges."""
        for unit in self.units:
            unit.memory.clear()
            unit.writes.clear()  # a ticket may keep a staging buffer
        if self.shared is not None:
            self.shared.close()

    # --- where bytes lie -------------------------------------------------------------------------

    def chunk(
        self, unit: int, kind: Kind, chunk: int, *, chunks: int = 1, written: bool = False
    ) -> Range:
        """Where a chunk's part of a kind is read, or with `written` where it is written.

        In memory that may be of several `chunks`, from this one on.
        """
        state = self.units[unit]
        if kind in state.memory:
            part = self.plan.part(state.layout, kind, chunk, chunks)
            return state.memory[kind].part(part.start, part.stop - part.start)
        assert chunks == 1
        return self.on_disk(unit, kind, chunk, state.copy.next if written else state.copy.active)

    def on_disk(self, unit: int, kind: Kind, chunk: int, copy: int) -> Extent:
        """The place of a chunk's part of a kind on a copy, which has room for it."""
        state = self.units[unit]
        _, count = state.layout.chunk(chunk, self.plan.chunk_elements)
        start = state.record.offset(kind, count)
        nbytes = state.record.precision.nbytes(kind, count)
        return state.copies[copy][chunk].part(start, nbytes)

    def shard_in(self, unit: int, full: Tensor, rank: int | None = None) -> tuple[Tensor, ...]:
        """What this or another rank keeps, of a unit's whole weights as they rest (uint8; more may
        be behind them): all, or of the trained range and of the frozen bytes each a part, which may
        be empty.
        """
        if self.ranks.count == 1:
            return (full[: self.plan.units[unit].stored_bytes],)
        layout = self.plan.units[unit]
        rank = self.ranks.rank if rank is None else rank
        parts = full[: layout.trained_bytes], full[layout.trained_bytes : layout.stored_bytes]
        return tuple(part.view(self.ranks.count, -1)[rank] for part in parts)

    def cut(self, unit: int, shard: Tensor) -> tuple[Tensor, ...]:
        """A shard's flat weights (uint8), in the parts of `shard_in`."""
        if self.ranks.count == 1:
            return (shard,)
        trained = self.units[unit].layout.trained_bytes
        return shard[:trained], shard[trained:]

    def is_here(self, unit: int) -> bool:
        """Whether `gather` needs no `bring` before it: shared RAM has what other nodes keep."""
        return self.shared is None or self.shared.is_here(unit)

    def bring(self, unit: int) -> None:
        """Start to bring other nodes' shards; all ranks together, when they have their own."""
        assert self.shared is not None
        self.transfers.count("between_hosts", self.shared.bring(unit))

    def settle_brought(self, unit: int) -> None:
        """Wait for what `bring` started."""
        assert self.shared is not None
        self.shared.settle(unit)

    def settle_copies(self) -> None:
        """Wait for copies from shared RAM, before other ranks may write there."""
        self._copies.wait()

    def stale(self, unit: int) -> None:
        """An optimizer pass replaces the unit's weights on all ranks."""
        if self.shared is not None:
            self.shared.written(unit)

    def gather(self, unit: int, full: Tensor, after: Event) -> Event:
        """Start to fill a unit's whole weights (uint8), of which this rank's are there `after`."""
        if self.shared is not None and unit in self.shared:
            return self._copy_shared(self.shared.shards[unit], unit, full, after)
        trained, count = self.plan.units[unit].trained_bytes, self.ranks.count
        full = full[: self.plan.units[unit].stored_bytes]
        parts = [part for part in (full[:trained], full[trained:]) if part.numel()]
        starts = [(partial(self.ranks.all_gather, part, overlap=True), part) for part in parts]
        beside = self.transfers.run_on_comm_stream
        return together(
            [beside("all_gather", start, part.numel() // count * (count - 1), after)
             for start, part in starts]
        )  # fmt: skip

    def _copy_shared(
        self, shards: Sequence[Tensor], unit: int, full: Tensor, after: Event
    ) -> Event:
        found = []
        for rank, shard in enumerate(shards):
            parts = self.shard_in(unit, full, rank), self.cut(unit, shard)
            for part, source in zip(*parts, strict=True):
                if rank != self.ranks.rank and part.numel():
                    found.append(self.transfers.copy_h2d(part, source, after, (unit, "weight")))
        self._copies = after_all(self._copies, *found)
        return together(found)

    def ranges(
        self,
        unit: int,
        kind: Kind,
        buffer: Tensor,
        frozen: Tensor | None = None,
        *,
        written: bool = False,
    ) -> list[tuple[Range, Tensor]]:
        """Pairs of a range and its part of `buffer`: a shard's kind, frozen bytes behind weights.

        Of a kind on disk they may be in a buffer of their own: `frozen`.
        """
        state = self.units[unit]
        if kind in state.memory:
            return [(state.memory[kind], buffer)]
        layout, found = state.layout, list[tuple[Range, Tensor]]()
        for index in range(layout.num_chunks(self.plan.chunk_elements)):
            location = self.chunk(unit, kind, index, written=written)
            found.append((location, buffer[self.plan.part(layout, kind, index)]))
        if kind is Kind.WEIGHT and layout.frozen_bytes:
            copies = state.frozen_copy
            extent = state.frozen_copies[copies.next if written else copies.active]
            if frozen is None:
                frozen = buffer[layout.trained_bytes : layout.stored_bytes]
            found.append((extent, frozen))
        return found

    def settle_writes(self, unit: int) -> None:
        """Wait until writes of a unit are complete, so that it may be read."""
        writes = self.units[unit].writes
        waited = tuple(writes)  # a commit waits on another thread
        for write in waited:
            write.wait()
        for write in waited:
            with contextlib.suppress(ValueError):
                writes.remove(write)

    # --- moving them -----------------------------------------------------------------------------

    def stage(
        self,
        unit: int,
        chunk: int,
        buffer: Tensor,
        *,
        chunks: int = 1,
        by_device: bool = False,
        after: Event = HAPPENED,
    ) -> Staged:
        """Start bringing all kinds of a chunk where the host can reach them.

        Args:
            unit: Index of the unit.
            chunk: Index of its first chunk.
            buffer: Room (uint8) in RAM for kinds that do not rest there.
            chunks: Number of chunks; more than one only where all rests in memory.
            by_device: Leave what rests on the device there: its views are the device's.
            after: End of the compute that used the device's kinds: copies of them wait for it.
        """
        state, views, on_device = self.units[unit], dict[Kind, Tensor](), set[Kind]()
        pieces: list[tuple[Range, Tensor]] = []
        waits, used = list[Event](), 0
        for kind in state.kinds:
            location = self.chunk(unit, kind, chunk, chunks=chunks)
            view = location.reached(by_device=by_device)
            if view is None:
                view = buffer[used : used + location.nbytes]
                used += location.nbytes
                there = location.reached(by_device=True)
                if there is None:
                    pieces.append((location, view))
                else:  # not after all compute: the forward that runs meanwhile changes none of it
                    label = (unit, "state")
                    waits.append(self.transfers.copy_d2h_unordered(view, there, after, label))
            elif state.on_device(kind):
                on_device.add(kind)
            views[kind] = view
        if pieces:
            waits.append(self.transfers.read(pieces, label=(unit, "state")))
        return Staged(views, waits, used, frozenset(on_device))

    def send(
        self, unit: int, chunk: int, views: Mapping[Kind, Tensor], *, chunks: int = 1
    ) -> Event:
        """Start to write the updated kinds (uint8, in RAM) of `chunks` to where they rest."""
        pieces = [
            (self.chunk(unit, kind, chunk, chunks=chunks, written=True), view)
            for kind, view in views.items()
        ]
        event = self.transfers.write(pieces, label=(unit, "state"))
        self.units[unit].writes.append(event)
        return event

    def read(self, unit: int, kind: Kind) -> Tensor:
        """A fresh uint8 copy of one whole kind: shard by shard, frozen bytes behind weights."""
        shard, count = self.read_shard(unit, kind), self.ranks.count
        if count == 1:
            return shard
        self.ranks.synchronize(f"reads {kind.value} of unit {self.plan.units[unit].name!r}")
        if kind is not Kind.WEIGHT:
            return self.ranks.gather(shard).view(-1)
        return torch.cat([self.ranks.gather(part).view(-1) for part in self.cut(unit, shard)])

    def write(self, unit: int, kind: Kind, value: Tensor) -> None:
        """Replace one whole kind, as `read` gives it: of several ranks each its shard."""
        if kind is Kind.WEIGHT:
            parts = self.shard_in(unit, value)
            value = parts[0] if len(parts) == 1 else torch.cat(parts)
        else:
            value = value.view(self.ranks.count, -1)[self.ranks.rank]
        self.write_shard(unit, kind, value)

    def read_shard(self, unit: int, kind: Kind) -> Tensor:
        """A fresh uint8 copy of one kind's flat range (weights with their frozen bytes)."""
        state = self.units[unit]
        buffer = host_buffer(self.shard_bytes(state.layout, kind))
        if state.in_ram(kind) is None:
            self.settle_writes(unit)
        self.transfers.read(self.ranges(unit, kind, buffer), label=(unit, kind.value)).wait()
        return buffer

    def write_shard(self, unit: int, kind: Kind, value: Tensor) -> None:
        """Replace one kind's flat range; `value` is uint8 of exactly that size."""
        state = self.units[unit]
        nbytes = self.shard_bytes(state.layout, kind)
        assert value.dtype is torch.uint8
        assert value.numel() == nbytes
        self.edited = True
        if kind is Kind.WEIGHT and self.shared is not None and unit in self.shared:
            self.settle_copies()
            self.ranks.synchronize(f"writes weight of unit {self.plan.units[unit].name!r}")
            self.shared.written(unit, frozen=True)
        if kind is Kind.WEIGHT and state.layout.frozen_bytes:
            self.frozen_edition += 1
        self._move_over(unit, kind)
        if state.in_ram(kind) is None:
            self.settle_writes(unit)
        source = value
        if kind not in state.memory and nbytes and value.data_ptr() % PAGE:
            source = host_buffer(nbytes)  # O_DIRECT wants aligned memory
            source.copy_(value)
        pieces = self.ranges(unit, kind, source, written=True)
        self.transfers.write(pieces, label=(unit, kind.value)).wait()
        state.copy.advance()
        if kind is Kind.WEIGHT:
            state.frozen_copy.advance()

    def _move_over(self, unit: int, kind: Kind) -> None:
        """Before an edit of a kind: what else rests on disk goes to the copy that is written."""
        state = self.units[unit]
        if state.copy.active == state.copy.next:
            return
        self.settle_writes(unit)
        for other in state.kinds:
            if other is not kind and other not in state.memory:
                for chunk in range(state.layout.num_chunks(self.plan.chunk_elements)):
                    old = self.chunk(unit, other, chunk)
                    new = self.chunk(unit, other, chunk, written=True)
                    buffer, label = host_buffer(old.nbytes), (unit, other.value)
                    self.transfers.read([(old, buffer)], label=label).wait()
                    self.transfers.write([(new, buffer)], label=label).wait()


def promise_extents(plan: Plan, unit: UnitState, disk: ExtentAllocator) -> None:
    """Promise a unit's extents: of each copy its records, then its frozen bytes."""
    layout = unit.layout
    record = unit.record = plan.full_record(layout) if plan.durable else plan.record(layout)
    on_disk = plan.durable or plan.placements[layout.index].weight is Tier.DISK
    unit.copy, unit.frozen_copy = ExtentCopies(1 + plan.durable), ExtentCopies(1 + plan.durable)
    for _ in range(1 + plan.durable):
        if record.kinds:
            records = []
            for index, (_, count) in enumerate(layout.chunks(plan.chunk_elements)):
                cuts = [record.offset(kind, count) for kind in record.kinds]
                owner = f"unit {layout.name!r}, chunk {index}"
                records.append(disk.extent(record.nbytes(count), owner, cuts))
            unit.copies.append(records)
        if on_disk and layout.frozen_bytes:
            owner = f"unit {layout.name!r}, frozen parameters"
            unit.frozen_copies.append(disk.extent(layout.frozen_bytes, owner))

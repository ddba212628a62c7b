"""Storage of each unit's weights, residual and moments on the tiers that the plan assigns.

The store reserves everything once, from the plan. `read` and `write` handle a full kind of a unit
for any placement; the optimizer pass and the prefetcher use ranges and chunks directly.

[Note: copies]
In a durable run every unit has two extents per chunk, copies A and B, each large enough for all
kinds. The *committed* copy holds the last committed step and is never written; kinds on disk are
read from the *active* copy. An optimizer pass or an edit writes the copy that is not committed: out
of place if that copy is not active yet, in place afterwards. That copy then becomes active; the
next commit (see `durability.py`) adds the kinds stored in RAM, and makes it the committed copy.
Frozen bytes have copies of their own, handled in the same way. In other runs there is one copy,
which is always active.

[Note: stored shards]
With several ranks, each stores a shard of every unit (`Plan.local_units`), and full units exist in
slots only: a fetch fills this rank's shard of a slot, `gather` fills the others while compute runs.
`read` and `write` handle full kinds, `read_shard` and `write_shard` those of the local shard.

[Note: shared RAM]
If the ranks of a node share the RAM in which weights are stored (`Plan.shared`), each stores its
shards there as it would in private RAM, and `gather` copies the shards of the others. Accesses are
ordered by synchronizations that exist for other reasons. Copies come after that of the unit's use:
by then every rank has its shard in a slot, so its update is complete. Updates come after that of
the norm, which depends on all gradients: by then every copy that compute has used is complete; the
remaining copies are of weights that are about to change, and are discarded. An edit adds one
synchronization, after each rank's copies have completed.

With several nodes, each has such RAM for the shards of all ranks. Those of other nodes are fetched
(`fetch_stale`) once all ranks have written theirs; ranks copy them once `is_up_to_date` is true on
all ranks.
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
from infinity.storage.device import HAPPENED, Event, after_all, merge_events
from infinity.storage.disk import Extent
from infinity.storage.staging import host_buffer
from infinity.storage.store import MemoryRange, Range, Store
from infinity.types import PAGE, Kind, Tier, round_up


class ExtentAllocator(Protocol):
    """Source of extents, such as a `Disk` before it is allocated."""

    def extent(self, nbytes: int, owner: str = "", cuts: Sequence[int] = ()) -> Extent:
        """See `Disk.extent`."""


@dataclass
class ExtentCopies:
    """Indices of the active and the committed copy of a unit; see [Note: copies]."""

    num_copies: int = 1
    active: int = 0
    committed: int = 0
    dirty: bool = False  # on some tier the state differs from the committed one

    @property
    def next(self) -> int:
        """Index of the copy to write."""
        return (self.committed + 1) % self.num_copies

    def advance(self) -> None:
        """Make the copy that was written the active one."""
        self.active, self.dirty = self.next, True

    def commit(self) -> None:
        """Make the active copy the committed one."""
        self.committed, self.dirty = self.active, False


@dataclass
class UnitState:
    """Storage of one unit's state on this rank; `layout` is that of the local shard.

    `memory` holds the flat ranges of kinds stored in memory; that of the weights includes the
    frozen bytes. Each of `copies` has one extent per chunk, a `record` of the kinds on disk, in a
    durable run of all kinds; there are no copies without such kinds. `writes` are in flight to
    memory or disk.
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
        """All state kinds; those on disk first, so that buffers are in the order of the record."""
        kinds = self.record.precision.kinds
        return sorted(kinds, key=self.memory.__contains__)

    def in_ram(self, kind: Kind) -> Tensor | None:
        """Return the stored bytes (uint8) of a kind if the CPU can access them, else None."""
        location = self.memory.get(kind)
        return None if location is None else location.addressable_view(by_device=False)

    def on_device(self, kind: Kind) -> bool:
        """Return True if a kind is stored in memory that only kernels of the device can access."""
        return kind in self.memory and self.in_ram(kind) is None


class Staged(NamedTuple):
    """Chunk that is being staged.

    `views` (uint8) by kind, on the device for kinds in `on_device`; `waits`, the events to wait
    for; and `used`, the bytes of the buffer in use.
    """

    views: dict[Kind, Tensor]
    waits: list[Event]
    used: int = 0
    on_device: frozenset[Kind] = frozenset()


class StateStore:
    """Stored state of all units, without gradients."""

    def __init__(
        self, plan: Plan, transfers: Transfers, ranks: DistContext = SINGLE_PROCESS
    ) -> None:
        self.plan = plan
        self.transfers = transfers
        self.ranks = ranks
        self.units = [UnitState(shard, plan.record(shard)) for shard in plan.local_units]
        self.edited = False  # set by edits, reset by `durability.py`
        self.frozen_version = 0  # number of writes of stored frozen bytes
        self.shared: SharedWeights | None = None
        self._shared_copies: Event = HAPPENED  # end of the copies from shared RAM
        layouts = {
            u.index: u for u in plan.local_units if plan.is_shared(u.index) and u.shard_bytes
        }
        try:
            if layouts:  # weights in RAM that the ranks of a node map, see [Note: shared RAM]
                self.shared = SharedWeights(layouts, ranks, transfers.device.pin)
                for index in layouts:
                    shard = self.shared.shards[index][ranks.rank]
                    self.units[index].memory[Kind.WEIGHT] = MemoryRange(Tier.HOST, shard)
            for tier, store in transfers.stores.items():
                if tier is not Tier.DISK:
                    self._reserve(tier, store)
            if transfers.disk is not None:
                for unit in self.units:
                    request_extents(plan, unit, transfers.disk)
        except BaseException:
            self.free()
            raise

    def _reserve(self, tier: Tier, store: Store) -> None:
        """Reserve a flat range for each kind in memory. (On disk, kinds share a chunk's record.)"""
        wanted = [
            (unit, kind, self.shard_bytes(unit.layout, kind))
            for unit in self.units
            for kind in self.plan.precision.kinds
            if self.plan.placements[unit.layout.index].of(kind) is tier and kind not in unit.memory
        ]
        for is_weight in (True, False):  # weights may outlive the others, see `keep_weights`
            group = [each for each in wanted if each[2] and (each[1] is Kind.WEIGHT) is is_weight]
            owners = [f"unit {unit.layout.name!r}, {kind.value}" for unit, kind, _ in group]
            ranges = store.reserve([nbytes for _, _, nbytes in group], owners) if group else []
            for (unit, kind, _), location in zip(group, ranges, strict=True):
                unit.memory[kind] = location

    def shard_bytes(self, layout: UnitLayout, kind: Kind) -> int:
        """Return the bytes of a shard's flat range of a kind; weights include the frozen bytes."""
        if kind is Kind.WEIGHT:
            return layout.shard_bytes
        return self.plan.range_bytes(layout, kind)

    def keep_weights(self) -> dict[Tier, int]:
        """Drop all ranges but those of weights; return the bytes of weights by tier."""
        nbytes_by_tier = dict.fromkeys(Tier, 0)
        for unit in self.units:
            weight = unit.memory.get(Kind.WEIGHT)
            unit.memory = {} if weight is None else {Kind.WEIGHT: weight}
            nbytes_by_tier[Tier.DISK if weight is None else weight.tier] += unit.layout.shard_bytes
        return nbytes_by_tier

    def reclaimable_bytes(self, unit: int) -> int:
        """Return the bytes of RAM that `read_and_free_weights` returns to the system."""
        weight = self.units[unit].in_ram(Kind.WEIGHT)
        if weight is None or (self.shared is not None and unit in self.shared):
            return 0
        return weight.nbytes if storage_use_count(weight) == 1 else 0  # else a tensor uses it

    def read_and_free_weights(self, unit: int) -> Tensor:
        """Return the weights as `read` does, and free the RAM that stored them; once per unit."""
        values = self.read(unit, Kind.WEIGHT)
        weight = self.units[unit].in_ram(Kind.WEIGHT)
        if weight is not None and self.reclaimable_bytes(unit):
            free_pages(weight.data_ptr(), round_up(weight.nbytes, PAGE))
        return values

    def free(self) -> None:
        """Drop the reserved ranges."""
        for unit in self.units:
            unit.memory.clear()
            unit.writes.clear()  # a ticket may hold a staging buffer
        if self.shared is not None:
            self.shared.close()

    # --- ranges of stored bytes ------------------------------------------------------------------

    def chunk(
        self, unit: int, kind: Kind, chunk: int, *, chunks: int = 1, written: bool = False
    ) -> Range:
        """Return the range in which a chunk of a kind is read or, with `written`, written.

        In memory the range may cover several `chunks`, from this one on.
        """
        state = self.units[unit]
        if kind in state.memory:
            span = self.plan.part(state.layout, kind, chunk, chunks)
            return state.memory[kind].part(span.start, span.stop - span.start)
        assert chunks == 1
        return self.on_disk(unit, kind, chunk, state.copy.next if written else state.copy.active)

    def on_disk(self, unit: int, kind: Kind, chunk: int, copy: int) -> Extent:
        """Return the range of a kind in a chunk's extent; the kind must be in the record."""
        state = self.units[unit]
        _, count = state.layout.chunk(chunk, self.plan.chunk_elements)
        start = state.record.offset(kind, count)
        nbytes = state.record.precision.nbytes(kind, count)
        return state.copies[copy][chunk].part(start, nbytes)

    def shard_views(self, unit: int, full: Tensor, rank: int | None = None) -> tuple[Tensor, ...]:
        """Return the shard of a rank, by default this one, in a unit's full weights (uint8).

        `full` holds the weights as they are stored, and may be longer. The shard is one view, or
        with several ranks two: of the trained range and of the frozen bytes; either may be empty.
        """
        if self.ranks.count == 1:
            return (full[: self.plan.units[unit].stored_bytes],)
        layout = self.plan.units[unit]
        rank = self.ranks.rank if rank is None else rank
        parts = full[: layout.trained_bytes], full[layout.trained_bytes : layout.stored_bytes]
        return tuple(part.view(self.ranks.count, -1)[rank] for part in parts)

    def cut(self, unit: int, shard: Tensor) -> tuple[Tensor, ...]:
        """Split a shard's flat weights (uint8) as `shard_views` does."""
        if self.ranks.count == 1:
            return (shard,)
        trained = self.units[unit].layout.trained_bytes
        return shard[:trained], shard[trained:]

    def is_up_to_date(self, unit: int) -> bool:
        """Return True if shared RAM has the current shards of other nodes, so `gather` can run."""
        return self.shared is None or self.shared.is_up_to_date(unit)

    def fetch_stale(self, unit: int) -> None:
        """Start to fetch shards of other nodes; all ranks call it, after writing their own."""
        assert self.shared is not None
        self.transfers.count("between_hosts", self.shared.fetch_stale(unit))

    def wait_remote_shards(self, unit: int) -> None:
        """Wait for the transfers that `fetch_stale` started."""
        assert self.shared is not None
        self.shared.settle(unit)

    def wait_shared_copies(self) -> None:
        """Wait for copies from shared RAM, before other ranks may write there."""
        self._shared_copies.wait()

    def stale(self, unit: int) -> None:
        """Mark shards of other nodes as stale: an optimizer pass replaces the unit's weights."""
        if self.shared is not None:
            self.shared.written(unit)

    def gather(self, unit: int, full: Tensor, after: Event) -> Event:
        """Start to fill a unit's full weights (uint8); this rank's shard is complete at `after`."""
        if self.shared is not None and unit in self.shared:
            return self._copy_shared(self.shared.shards[unit], unit, full, after)
        trained, count = self.plan.units[unit].trained_bytes, self.ranks.count
        full = full[: self.plan.units[unit].stored_bytes]
        gathers = []
        for part in (full[:trained], full[trained:]):
            if part.numel():
                start = partial(self.ranks.all_gather, part, overlap=True)
                received = part.numel() // count * (count - 1)
                gathers.append(
                    self.transfers.run_on_comm_stream("all_gather", start, received, after)
                )
        return merge_events(gathers)

    def _copy_shared(
        self, shards: Sequence[Tensor], unit: int, full: Tensor, after: Event
    ) -> Event:
        copies = []
        for rank, shard in enumerate(shards):
            parts = self.shard_views(unit, full, rank), self.cut(unit, shard)
            for target, source in zip(*parts, strict=True):
                if rank != self.ranks.rank and target.numel():
                    copies.append(self.transfers.copy_h2d(target, source, after, (unit, "weight")))
        self._shared_copies = after_all(self._shared_copies, *copies)
        return merge_events(copies)

    def ranges(
        self,
        unit: int,
        kind: Kind,
        buffer: Tensor,
        frozen: Tensor | None = None,
        *,
        written: bool = False,
    ) -> list[tuple[Range, Tensor]]:
        """Return pairs (range, slice of `buffer`) for a kind of a shard, weights with frozen bytes.

        For weights on disk the frozen bytes may have a separate buffer, `frozen`.
        """
        state = self.units[unit]
        if kind in state.memory:
            return [(state.memory[kind], buffer)]
        layout = state.layout
        pairs: list[tuple[Range, Tensor]] = []
        for index in range(layout.num_chunks(self.plan.chunk_elements)):
            location = self.chunk(unit, kind, index, written=written)
            pairs.append((location, buffer[self.plan.part(layout, kind, index)]))
        if kind is Kind.WEIGHT and layout.frozen_bytes:
            copies = state.frozen_copy
            extent = state.frozen_copies[copies.next if written else copies.active]
            if frozen is None:
                frozen = buffer[layout.trained_bytes : layout.stored_bytes]
            pairs.append((extent, frozen))
        return pairs

    def wait_writes(self, unit: int) -> None:
        """Wait until writes of a unit are complete, so that it may be read."""
        writes = self.units[unit].writes
        pending = tuple(writes)  # a commit may wait concurrently, on another thread
        for write in pending:
            write.wait()
        for write in pending:
            with contextlib.suppress(ValueError):
                writes.remove(write)

    # --- transfers -------------------------------------------------------------------------------

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
        """Start to copy all kinds of a chunk to memory that the host can access.

        Args:
            unit: Index of the unit.
            chunk: Index of its first chunk.
            buffer: Host buffer (uint8) for kinds that are not stored in RAM.
            chunks: Number of chunks; more than one only if all kinds are stored in memory.
            by_device: Do not copy kinds stored on the device: their views are device tensors.
            after: End of the compute that used kinds on the device; copies of them wait for it.
        """
        state = self.units[unit]
        views: dict[Kind, Tensor] = {}
        on_device: set[Kind] = set()
        pieces: list[tuple[Range, Tensor]] = []
        waits: list[Event] = []
        used = 0
        for kind in state.kinds:
            location = self.chunk(unit, kind, chunk, chunks=chunks)
            view = location.addressable_view(by_device=by_device)
            if view is None:
                view = buffer[used : used + location.nbytes]
                used += location.nbytes
                device_view = location.addressable_view(by_device=True)
                if device_view is None:
                    pieces.append((location, view))
                else:  # unordered: the forward that runs at the same time does not change these
                    label = (unit, "state")
                    waits.append(self.transfers.copy_d2h_unordered(view, device_view, after, label))
            elif state.on_device(kind):
                on_device.add(kind)
            views[kind] = view
        if pieces:
            waits.append(self.transfers.read(pieces, label=(unit, "state")))
        return Staged(views, waits, used, frozenset(on_device))

    def send(
        self, unit: int, chunk: int, views: Mapping[Kind, Tensor], *, chunks: int = 1
    ) -> Event:
        """Start to write the updated kinds (uint8, in RAM) of `chunks` to their tiers."""
        pieces = [
            (self.chunk(unit, kind, chunk, chunks=chunks, written=True), view)
            for kind, view in views.items()
        ]
        event = self.transfers.write(pieces, label=(unit, "state"))
        self.units[unit].writes.append(event)
        return event

    def read(self, unit: int, kind: Kind) -> Tensor:
        """Return a new uint8 copy of one full kind; with weights, the frozen bytes follow."""
        shard, count = self.read_shard(unit, kind), self.ranks.count
        if count == 1:
            return shard
        self.ranks.synchronize(f"reads {kind.value} of unit {self.plan.units[unit].name!r}")
        if kind is not Kind.WEIGHT:
            return self.ranks.gather(shard).view(-1)
        return torch.cat([self.ranks.gather(part).view(-1) for part in self.cut(unit, shard)])

    def write(self, unit: int, kind: Kind, value: Tensor) -> None:
        """Replace one full kind, in the form that `read` returns; each rank writes its shard."""
        if kind is Kind.WEIGHT:
            parts = self.shard_views(unit, value)
            value = parts[0] if len(parts) == 1 else torch.cat(parts)
        else:
            value = value.view(self.ranks.count, -1)[self.ranks.rank]
        self.write_shard(unit, kind, value)

    def read_shard(self, unit: int, kind: Kind) -> Tensor:
        """Return a new uint8 copy of one kind of the local shard; weights include frozen bytes."""
        state = self.units[unit]
        buffer = host_buffer(self.shard_bytes(state.layout, kind))
        if state.in_ram(kind) is None:
            self.wait_writes(unit)
        self.transfers.read(self.ranges(unit, kind, buffer), label=(unit, kind.value)).wait()
        return buffer

    def write_shard(self, unit: int, kind: Kind, value: Tensor) -> None:
        """Replace one kind of the local shard; `value` is uint8 of exactly its size."""
        state = self.units[unit]
        nbytes = self.shard_bytes(state.layout, kind)
        assert value.dtype is torch.uint8
        assert value.numel() == nbytes
        self.edited = True
        if kind is Kind.WEIGHT and self.shared is not None and unit in self.shared:
            self.wait_shared_copies()
            self.ranks.synchronize(f"writes weight of unit {self.plan.units[unit].name!r}")
            self.shared.written(unit, frozen=True)
        if kind is Kind.WEIGHT and state.layout.frozen_bytes:
            self.frozen_version += 1
        self._copy_other_kinds(unit, kind)
        if state.in_ram(kind) is None:
            self.wait_writes(unit)
        source = value
        if kind not in state.memory and nbytes and value.data_ptr() % PAGE:
            source = host_buffer(nbytes)  # O_DIRECT requires aligned memory
            source.copy_(value)
        pieces = self.ranges(unit, kind, source, written=True)
        self.transfers.write(pieces, label=(unit, kind.value)).wait()
        state.copy.advance()
        if kind is Kind.WEIGHT:
            state.frozen_copy.advance()

    def _copy_other_kinds(self, unit: int, kind: Kind) -> None:
        """Before an edit of a kind, copy the other kinds on disk to the copy to write."""
        state = self.units[unit]
        if state.copy.active == state.copy.next:
            return
        self.wait_writes(unit)
        for other in state.kinds:
            if other is not kind and other not in state.memory:
                for chunk in range(state.layout.num_chunks(self.plan.chunk_elements)):
                    old = self.chunk(unit, other, chunk)
                    new = self.chunk(unit, other, chunk, written=True)
                    buffer, label = host_buffer(old.nbytes), (unit, other.value)
                    self.transfers.read([(old, buffer)], label=label).wait()
                    self.transfers.write([(new, buffer)], label=label).wait()


def request_extents(plan: Plan, unit: UnitState, disk: ExtentAllocator) -> None:
    """Request a unit's extents: for each copy its records, then its frozen bytes."""
    layout = unit.layout
    record = unit.record = plan.full_record(layout) if plan.durable else plan.record(layout)
    frozen_on_disk = plan.durable or plan.placements[layout.index].weight is Tier.DISK
    unit.copy, unit.frozen_copy = ExtentCopies(1 + plan.durable), ExtentCopies(1 + plan.durable)
    for _ in range(1 + plan.durable):
        if record.kinds:
            records = []
            for index, (_, count) in enumerate(layout.chunks(plan.chunk_elements)):
                cuts = [record.offset(kind, count) for kind in record.kinds]
                owner = f"unit {layout.name!r}, chunk {index}"
                records.append(disk.extent(record.nbytes(count), owner, cuts))
            unit.copies.append(records)
        if frozen_on_disk and layout.frozen_bytes:
            owner = f"unit {layout.name!r}, frozen parameters"
            unit.frozen_copies.append(disk.extent(layout.frozen_bytes, owner))

"""Homes made real: where each unit's weight, residual and moments rest, on every tier.

The store reserves everything once, from the plan. Reading and writing a whole kind of a unit
works for any home; the sweep and the mover use the finer parts directly.

[Note: sides]
In a durable run every unit has two extents per chunk, its sides, each with room for all kinds.
The *committed* side holds the last committed step and is never written; the *current* one is
where the kinds that rest on disk are read. A sweep, or an edit, writes the other side than the
committed one, out of place if that is not current yet, and in place after. The unit then moves to
that side; the next commit (see `durability.py`) adds what rests in RAM, and makes it the committed
one. Frozen bytes are the same once more. Otherwise there is one side, which is always current.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from infinity.offload.transfers import Lanes
from infinity.plan.layout import PAGE, Kind, Record, Tier, UnitLayout, round_up
from infinity.plan.plan import Plan
from infinity.storage.device import DeviceArena, Event, HostArena, arena_for
from infinity.storage.disk import Extent, Ticket


class Promising(Protocol):
    """What extents are promised by: a disk, before it is allocated."""

    def extent(self, nbytes: int, owner: str = "", cuts: Sequence[int] = ()) -> Extent:
        """See `Disk.extent`."""


@dataclass
class Turn:
    """Which of a unit's sides is current, and which is committed; see [Note: sides]."""

    num_sides: int = 1
    current: int = 0
    committed: int = 0
    dirty: bool = False  # the state is not what is committed, on some tier

    @property
    def next(self) -> int:
        """The side that is written."""
        return (self.committed + 1) % self.num_sides

    def advance(self) -> None:
        """The side that is written is complete."""
        self.current, self.dirty = self.next, True

    def commit(self) -> None:
        """What is current is committed."""
        self.committed, self.dirty = self.current, False


@dataclass
class UnitState:
    """Where one unit's state rests.

    `ram` holds kinds in host-reachable memory (host homes, and device homes where device memory
    is host memory), `on_device` those in separate device memory; all as flat uint8 ranges. The
    weight range includes the frozen bytes. `sides` hold one record per chunk of the kinds that
    rest on disk, none where none does; `whole` (durable) those of all kinds, which are around them.
    """

    layout: UnitLayout
    record: Record
    ram: dict[Kind, Tensor] = field(default_factory=dict)
    on_device: dict[Kind, Tensor] = field(default_factory=dict)
    sides: list[list[Extent]] = field(default_factory=list)
    whole: list[list[Extent]] = field(default_factory=list)
    turn: Turn = field(default_factory=Turn)
    frozen_sides: list[Extent] = field(default_factory=list)
    frozen_turn: Turn = field(default_factory=Turn)
    frozen_rests: bool = False  # on disk, rather than behind the weights in memory
    writes: list[Ticket | Event] = field(default_factory=list)

    @property
    def extents(self) -> list[Extent]:
        """Where the kinds that rest on disk are read: one record per chunk."""
        return self.sides[self.turn.current] if self.sides else []

    @property
    def next_extents(self) -> list[Extent]:
        """Where they are written; `extents` unless the run is durable."""
        return self.sides[self.turn.next] if self.sides else []

    @property
    def frozen(self) -> Extent | None:
        """Where the frozen bytes are read, if they rest on disk."""
        return self.frozen_sides[self.frozen_turn.current] if self.frozen_rests else None


class Staged(NamedTuple):
    """A chunk on its way: views (uint8) by kind, what to wait for, bytes of the buffer in use."""

    views: dict[Kind, Tensor]
    waits: list[Ticket | Event]
    used: int = 0


class StateStore:
    """All units' homes except gradients."""

    def __init__(self, plan: Plan, lanes: Lanes) -> None:
        self.plan = plan
        self.lanes = lanes
        self.units = [UnitState(u, plan.record(u)) for u in plan.units]
        self.edited = False  # since somebody last set it to False
        self.frozen_edition = 0  # counts what may have changed frozen bytes at home
        self._arenas: list[HostArena | DeviceArena] = []
        self._reserve_ram()
        self._reserve_device()
        self._promise_extents()

    def home_bytes(self, layout: UnitLayout, kind: Kind) -> int:
        """Bytes of a unit's flat range of a kind; with the weights come the frozen bytes."""
        if kind is Kind.WEIGHT:
            return layout.slot_bytes
        return self.plan.range_bytes(layout, kind)

    def _homed(self, *tiers: Tier) -> list[tuple[UnitState, Kind, int]]:
        found = []
        for unit in self.units:
            homes = self.plan.homes[unit.layout.index]
            for kind in self.plan.precision.kinds:
                nbytes = self.home_bytes(unit.layout, kind)
                if homes.of(kind) in tiers and nbytes:
                    found.append((unit, kind, nbytes))
        return found

    def _reserve_ram(self) -> None:
        """Host homes, and on a unified device the device homes other than weights."""
        wanted = self._homed(Tier.HOST, *((Tier.DEVICE,) if self.plan.unified else ()))
        arena = arena_for([nbytes for _, _, nbytes in wanted])
        if wanted:
            self.lanes.device.pin(arena)
        self._arenas.append(arena)
        for unit, kind, nbytes in wanted:
            unit.ram[kind] = arena.carve(nbytes)

    def _reserve_device(self) -> None:
        if self.plan.unified:
            return
        wanted = self._homed(Tier.DEVICE)
        arena = self.lanes.device.reserve(sum(round_up(n, PAGE) for _, _, n in wanted))
        self._arenas.append(arena)
        offset = 0
        for unit, kind, nbytes in wanted:
            unit.on_device[kind] = arena.view(offset, nbytes)
            offset += round_up(nbytes, PAGE)

    def _promise_extents(self) -> None:
        if self.lanes.disk is not None:
            for unit in self.units:
                promise_extents(self.plan, unit, self.lanes.disk)

    def forget(self) -> None:
        """Drop the reserved ranges."""
        for unit in self.units:
            unit.ram.clear()
            unit.on_device.clear()
        self._arenas.clear()

    def parts(
        self, unit: int, kind: Kind, buffer: Tensor, extents: Sequence[Extent] | None = None
    ) -> list[tuple[Extent, Tensor]]:
        """(extent, buffer part) pairs that together are the trained range of a disk-homed kind.

        `extents` are those of the current side if left out.
        """
        state = self.units[unit]
        pieces = []
        for index, extent in enumerate(state.extents if extents is None else extents):
            _, count = state.layout.chunk(index, self.plan.chunk_elements)
            nbytes = self.plan.precision.nbytes(kind, count)
            part = extent.part(state.record.offset(kind, count), nbytes)
            pieces.append((part, buffer[self.plan.part(state.layout, kind, index)]))
        return pieces

    def weight_parts(self, unit: int, buffer: Tensor) -> list[tuple[Extent, Tensor]]:
        """Like `parts` for a whole slot: the weights, and the frozen bytes behind them."""
        return self.parts(unit, Kind.WEIGHT, buffer) + self.frozen_parts(unit, buffer)

    def frozen_parts(self, unit: int, buffer: Tensor) -> list[tuple[Extent, Tensor]]:
        """The frozen bytes of a slot, if the unit has any on disk."""
        state = self.units[unit]
        if state.frozen is None:
            return []
        start = state.layout.trained_bytes
        return [(state.frozen, buffer[start : start + state.layout.frozen_bytes])]

    def settle_writes(self, unit: int) -> None:
        """Wait until what was sent to the unit's homes is there and may be read back."""
        writes = self.units[unit].writes
        waited = tuple(writes)  # a commit waits on another thread
        for write in waited:
            write.wait()
        for write in waited:
            with contextlib.suppress(ValueError):
                writes.remove(write)

    def stage(
        self, unit: int, chunk: int, buffer: Tensor, *, leave_on_device: bool = False
    ) -> Staged:
        """Start bringing all kinds of a chunk where the host can reach them.

        What rests in RAM is there already; the rest comes into `buffer` (uint8). With
        `leave_on_device` what rests on the device stays there: its views are the device's.
        """
        plan, state = self.plan, self.units[unit]
        _, count = state.layout.chunk(chunk, plan.chunk_elements)
        used = state.record.nbytes(count)
        staged = Staged({}, [])
        if used:
            piece = state.extents[chunk], buffer[:used]
            staged.waits.append(self.lanes.read([piece], label=(unit, "state")))
        for kind in plan.precision.kinds:
            nbytes, part = plan.precision.nbytes(kind, count), plan.part(state.layout, kind, chunk)
            if kind in state.record.kinds:
                offset = state.record.offset(kind, count)
                staged.views[kind] = buffer[offset : offset + nbytes]
            elif kind in state.ram:
                staged.views[kind] = state.ram[kind][part]
            elif leave_on_device:
                staged.views[kind] = state.on_device[kind][part]
            else:
                view = staged.views[kind] = buffer[used : used + nbytes]
                used += nbytes
                source, label = state.on_device[kind][part], (unit, kind.value)
                staged.waits.append(self.lanes.copy_out(view, source, label=label))
        return staged._replace(used=used)

    def read(self, unit: int, kind: Kind) -> Tensor:
        """A fresh uint8 copy of one kind's flat range (weights with their frozen bytes)."""
        state = self.units[unit]
        target = HostArena(self.home_bytes(state.layout, kind))
        buffer = target.view(0, self.home_bytes(state.layout, kind))
        if kind in state.ram:
            buffer.copy_(state.ram[kind])
        elif kind in state.on_device:
            self.settle_writes(unit)
            self.lanes.copy_out(buffer, state.on_device[kind], label=(unit, kind.value)).wait()
        elif buffer.numel():
            self.settle_writes(unit)
            weight = kind is Kind.WEIGHT
            pieces = self.weight_parts(unit, buffer) if weight else self.parts(unit, kind, buffer)
            self.lanes.read(pieces, label=(unit, kind.value)).wait()
        return buffer

    def write(self, unit: int, kind: Kind, value: Tensor) -> None:
        """Replace one kind's flat range; `value` is uint8 of exactly that size."""
        state = self.units[unit]
        nbytes = self.home_bytes(state.layout, kind)
        assert value.dtype is torch.uint8
        assert value.numel() == nbytes
        self.edited = True
        if kind is Kind.WEIGHT and state.layout.frozen_bytes:
            self.frozen_edition += 1
        self._move_over(unit, kind)
        if kind in state.ram:
            state.ram[kind].copy_(value)
        elif kind in state.on_device:
            self.settle_writes(unit)
            self.lanes.copy_in(state.on_device[kind], value, label=(unit, kind.value)).wait()
        elif nbytes:
            self.settle_writes(unit)
            source = value
            if value.data_ptr() % PAGE:  # O_DIRECT wants aligned memory
                source = HostArena(nbytes).view(0, nbytes)
                source.copy_(value)
            pieces = self.parts(unit, kind, source, state.next_extents)
            if kind is Kind.WEIGHT and state.frozen_rests:
                extent = state.frozen_sides[state.frozen_turn.next]
                pieces.append((extent, source[state.layout.trained_bytes :]))
            self.lanes.write(pieces, label=(unit, kind.value)).wait()
        state.turn.advance()
        if kind is Kind.WEIGHT:
            state.frozen_turn.advance()

    def _move_over(self, unit: int, kind: Kind) -> None:
        """Before an edit of a kind: what else rests on disk goes to the side that is written."""
        state = self.units[unit]
        if state.turn.current == state.turn.next:
            return
        self.settle_writes(unit)
        chunks = state.layout.chunks(self.plan.chunk_elements)
        for (_, count), old, new in zip(chunks, state.extents, state.next_extents, strict=False):
            for other in state.record.kinds:
                if other is not kind:
                    nbytes = self.plan.precision.nbytes(other, count)
                    start = state.record.offset(other, count)
                    buffer = HostArena(nbytes).view(0, nbytes)
                    label = unit, other.value
                    self.lanes.read([(old.part(start, nbytes), buffer)], label=label).wait()
                    self.lanes.write([(new.part(start, nbytes), buffer)], label=label).wait()


def promise_extents(plan: Plan, unit: UnitState, disk: Promising) -> None:
    """Promise a unit's extents: of each side its records, then its frozen bytes."""
    layout = unit.layout
    on_disk = plan.homes[layout.index].weight is Tier.DISK
    unit.frozen_rests = on_disk and bool(layout.frozen_bytes)
    unit.turn, unit.frozen_turn = Turn(1 + plan.durable), Turn(1 + plan.durable)
    for _ in range(1 + plan.durable):
        _promise_side(plan, unit, disk)
        if unit.frozen_rests or (plan.durable and layout.frozen_bytes):
            owner = f"unit {layout.name!r}, frozen parameters"
            unit.frozen_sides.append(disk.extent(layout.frozen_bytes, owner))


def _promise_side(plan: Plan, unit: UnitState, disk: Promising) -> None:
    """One more record for each chunk of a unit."""
    layout = unit.layout
    record = plan.whole_record if plan.durable else unit.record
    if not record.kinds:
        return
    extents, whole = [], []
    for index, (_, count) in enumerate(layout.chunks(plan.chunk_elements)):
        owner = f"unit {layout.name!r}, chunk {index}"
        cuts = [record.offset(kind, count) for kind in record.kinds]
        extent = disk.extent(record.nbytes(count), owner, cuts)
        whole.append(extent)
        if unit.record.kinds:  # they lie side by side: the weights, or the rest, or all
            start = record.offset(unit.record.kinds[0], count)
            extents.append(extent.part(start, unit.record.nbytes(count)))
    if unit.record.kinds:
        unit.sides.append(extents)
    if plan.durable:
        unit.whole.append(whole)

"""Homes made real: where each unit's weight, residual and moments rest, on every tier.

The store reserves everything once, from the plan. Reading and writing a whole kind of a unit
works for any home; the sweep and the mover use the finer parts directly.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from infinity.memory.device import DeviceArena, Event
from infinity.memory.disk import Extent, Ticket
from infinity.memory.host import HostArena, arena_for
from infinity.memory.lanes import Lanes
from infinity.plan.layout import PAGE, Kind, Record, Tier, UnitLayout, round_up
from infinity.plan.plan import Plan


@dataclass
class UnitState:
    """Where one unit's state rests.

    `ram` holds kinds in host-reachable memory (host homes, and device homes where device memory
    is host memory), `on_device` those in separate device memory; all as flat uint8 ranges. The
    weight range includes the frozen bytes. `extents` is one record per chunk.
    """

    layout: UnitLayout
    record: Record
    ram: dict[Kind, Tensor] = field(default_factory=dict)
    on_device: dict[Kind, Tensor] = field(default_factory=dict)
    extents: list[Extent] = field(default_factory=list)
    frozen: Extent | None = None
    writes: list[Ticket | Event] = field(default_factory=list)


class StateStore:
    """All units' homes except gradients."""

    def __init__(self, plan: Plan, lanes: Lanes) -> None:
        self.plan = plan
        self.lanes = lanes
        self.units = [UnitState(u, plan.record(u)) for u in plan.units]
        self._arenas: list[HostArena | DeviceArena] = []
        self._reserve_ram()
        self._reserve_device()
        self._promise_extents()

    def _range_bytes(self, layout: UnitLayout, kind: Kind) -> int:
        if kind is Kind.WEIGHT:
            return layout.slot_bytes
        return self.plan.range_bytes(layout, kind)

    def _homed(self, *tiers: Tier) -> list[tuple[UnitState, Kind, int]]:
        found = []
        for unit in self.units:
            homes = self.plan.homes[unit.layout.index]
            for kind in self.plan.precision.kinds:
                nbytes = self._range_bytes(unit.layout, kind)
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
        disk = self.lanes.disk
        if disk is None:
            return
        for unit in self.units:
            layout = unit.layout
            if unit.record.kinds:
                for index in range(layout.num_chunks(self.plan.chunk_elements)):
                    _, count = layout.chunk(index, self.plan.chunk_elements)
                    owner = f"unit {layout.name!r}, chunk {index}"
                    cuts = [unit.record.offset(kind, count) for kind in unit.record.kinds]
                    unit.extents.append(disk.extent(unit.record.nbytes(count), owner, cuts))
            if self.plan.homes[layout.index].weight is Tier.DISK and layout.frozen_bytes:
                owner = f"unit {layout.name!r}, frozen parameters"
                unit.frozen = disk.extent(layout.frozen_bytes, owner)

    def forget(self) -> None:
        """Drop the reserved ranges."""
        for unit in self.units:
            unit.ram.clear()
            unit.on_device.clear()
        self._arenas.clear()

    def parts(self, unit: int, kind: Kind, buffer: Tensor) -> list[tuple[Extent, Tensor]]:
        """(extent, buffer part) pairs that together are the trained range of a disk-homed kind."""
        state = self.units[unit]
        pieces = []
        for index, extent in enumerate(state.extents):
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
        while writes:
            writes[0].wait()
            writes.pop(0)

    def read(self, unit: int, kind: Kind) -> Tensor:
        """A fresh uint8 copy of one kind's flat range (weights with their frozen bytes)."""
        state = self.units[unit]
        target = HostArena(self._range_bytes(state.layout, kind))
        buffer = target.view(0, self._range_bytes(state.layout, kind))
        if kind in state.ram:
            buffer.copy_(state.ram[kind])
        elif kind in state.on_device:
            self.settle_writes(unit)
            self.lanes.copy_out(buffer, state.on_device[kind]).wait()
        elif buffer.numel():
            self.settle_writes(unit)
            weight = kind is Kind.WEIGHT
            pieces = self.weight_parts(unit, buffer) if weight else self.parts(unit, kind, buffer)
            self.lanes.read(pieces).wait()
        return buffer

    def write(self, unit: int, kind: Kind, value: Tensor) -> None:
        """Replace one kind's flat range; `value` is uint8 of exactly that size."""
        state = self.units[unit]
        nbytes = self._range_bytes(state.layout, kind)
        assert value.dtype is torch.uint8
        assert value.numel() == nbytes
        if kind in state.ram:
            state.ram[kind].copy_(value)
        elif kind in state.on_device:
            self.settle_writes(unit)
            self.lanes.copy_in(state.on_device[kind], value).wait()
        elif nbytes:
            self.settle_writes(unit)
            source = value
            if value.data_ptr() % PAGE:  # O_DIRECT wants aligned memory
                source = HostArena(nbytes).view(0, nbytes)
                source.copy_(value)
            weight = kind is Kind.WEIGHT
            pieces = self.weight_parts(unit, source) if weight else self.parts(unit, kind, source)
            self.lanes.write(pieces).wait()

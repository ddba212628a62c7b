"""Ledger of slots and of the residency of units. Every transition is asserted.

[Note: states of a unit's weights]
OFFLOADED stored in its tier only; no slot.
FETCHING  a slot is assigned and bytes are in flight; only the training thread is involved.
RESIDENT  the slot holds the current weights; parameters may or may not be bound to it. Weights that
          are moved quantized are dequantized at the first use of the unit in the slot.
PENDING   the unit waits for its update by an optimizer pass; a stale copy in a slot was evicted.
          Only the optimizer thread ends this state: RESIDENT if it published, else OFFLOADED.

A slot is free when no unit owns it and only the ledger refers to its storage: tensors saved by
autograd, aliases in user code and running backward nodes hold references, so the use count of the
storage is the only pin. The references of the ledger itself are cached from one residency to the
next: views by dtype, and views of parameters by layout, which units of equal layout share.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from infinity.errors import MachineError, ResidencyError
from infinity.model.quantized import dequantize
from infinity.model.torch_private import storage_use_count
from infinity.plan.plan import Plan
from infinity.storage.device import HAPPENED, Device, DeviceArena, Event, after_all
from infinity.types import FrozenFormat


class Residency(Enum):
    """States of a unit; see [Note: states of a unit's weights]."""

    OFFLOADED = "offloaded"
    FETCHING = "fetching"
    RESIDENT = "resident"
    PENDING = "pending"


_ALLOWED = {
    (Residency.OFFLOADED, Residency.FETCHING),
    (Residency.FETCHING, Residency.RESIDENT),
    (Residency.FETCHING, Residency.OFFLOADED),  # abandoned
    (Residency.RESIDENT, Residency.OFFLOADED),
    (Residency.RESIDENT, Residency.PENDING),
    (Residency.OFFLOADED, Residency.PENDING),
    (Residency.PENDING, Residency.RESIDENT),
    (Residency.PENDING, Residency.OFFLOADED),
}


@dataclass(eq=False)
class Slot:
    """A range of device memory; `slot_class` is None for a unit stored on the device."""

    slot_class: int | None
    arena: DeviceArena | None
    offset: int
    memory: Tensor  # uint8, the full range, with a separate storage
    owner: int | None = None
    typed: dict[torch.dtype, Tensor] = field(default_factory=dict)  # see `flat`
    views: dict[int, list[Tensor]] = field(default_factory=dict)  # by layout of a unit
    has_stale_references: bool = (
        False  # references outlived the eviction: compute may still read it
    )
    free_after: Event = HAPPENED

    def is_free(self) -> bool:
        """Return True if the slot can be assigned to a unit."""
        return self.owner is None and not self.num_aliases()

    def flat(self, dtype: torch.dtype) -> Tensor:
        """Return the memory viewed as `dtype`; the unit's parameters are views of this."""
        view = self.typed.get(dtype)
        if view is None:
            view = self.typed[dtype] = self.memory.view(dtype)
        return view

    def alias(self) -> Tensor:
        """Return the memory with another storage, so that it does not count as a reference."""
        assert self.arena is not None
        return self.arena.view(self.offset, self.memory.numel())

    def num_aliases(self) -> int:
        """Return the number of references to the memory beyond those of the ledger."""
        num_cached = 1 + len(self.typed) + sum(map(len, self.views.values()))
        return storage_use_count(self.memory) - num_cached


@dataclass(eq=False)
class UnitEntry:
    """Residency and slot of one unit."""

    residency: Residency = Residency.OFFLOADED
    slot: Slot | None = None
    bound: bool = False
    views: list[Tensor] = field(default_factory=list)  # set at the first bind
    checksums: list[int] | None = None  # of bound parameters that user code may edit
    gathered: bool = False  # the slot holds the shards of all ranks
    gathering: Event | None = None  # end of the gather in flight
    dequantized: bool = False  # the slot holds dequantized values of quantized weights
    updates: int = 0  # optimizer passes and edits that replaced the weights
    edits: int = 0  # edits among these
    forward_depth: int = 0  # forward calls of the unit's modules that have not returned
    ready: Event = HAPPENED  # end of the copy that filled the slot
    ticket: Event | None = None  # read in flight, into the slot or `staging`
    staging: Tensor | None = None  # host buffer of that read; None if the device is unified

    @property
    def num_aliases(self) -> int:
        """Return the number of references to the weights beyond those of ledger and parameters."""
        assert self.slot is not None
        return self.slot.num_aliases() - len(self.views) * self.bound


@dataclass
class SlotLedger:
    """Slots and entries; `changed` guards both, and is notified at every transition."""

    plan: Plan
    device: Device
    entries: list[UnitEntry] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)
    changed: threading.Condition = field(init=False)
    current: int = -1  # the unit in use, which is not evicted

    def __post_init__(self) -> None:
        self.changed = threading.Condition(self.lock)
        self.entries = [UnitEntry() for _ in self.plan.units]
        total = sum(c.slot_bytes * c.count for c in self.plan.slot_classes)
        arena = self.device.reserve(total)
        offset = 0
        for index, slot_class in enumerate(self.plan.slot_classes):
            for _ in range(slot_class.count):
                memory = arena.view(offset, slot_class.slot_bytes)
                self.slots.append(Slot(index, arena, offset, memory))
                offset += slot_class.slot_bytes
        self.class_of = [self.plan.class_of(u.index) for u in self.plan.units]

    def free(self) -> None:
        """Free all slots, after the gathers into them have ended."""
        self.slots.clear()
        for entry in self.entries:
            _end_gather(entry)
            entry.slot = None
            entry.views = []

    def free_slots(self, slot_class: int) -> list[Slot]:
        """Return the free slots of one class."""
        return [s for s in self.slots if s.slot_class == slot_class and s.is_free()]

    def free_slot(self, unit: int) -> Slot | None:
        """Return a free slot of the unit's class, else of a wider one, else None."""
        slot_class = self.class_of[unit]
        assert slot_class is not None
        free = (slot for wider in range(slot_class, -1, -1) for slot in self.free_slots(wider))
        return next(free, None)

    def is_filled_by_optimizer(self, slot_class: int) -> bool:
        """Return True if an optimizer pass is filling a slot that the unit could use."""
        return any(
            slot.slot_class is not None
            and slot.slot_class <= slot_class
            and slot.owner is not None
            and self.entries[slot.owner].residency is Residency.PENDING
            for slot in self.slots
        )

    def name_of(self, unit: int) -> str:
        return self.plan.units[unit].name

    def is_pending(self, unit: int) -> bool:
        """Return True if the unit waits for its update by the optimizer pass."""
        return self.entries[unit].residency is Residency.PENDING

    def version(self, unit: int, *, trained: bool) -> int:
        """Return a number that changes with each edit and, if `trained`, with each update."""
        entry = self.entries[unit]
        return entry.updates + self.is_pending(unit) if trained else entry.edits

    def record_edit(self, unit: int) -> None:
        """Count an edit of the unit's stored weights: graphs made before are stale."""
        self.entries[unit].updates += 1
        self.entries[unit].edits += 1

    def add_permanent(self, unit: int, weights: Tensor) -> None:
        """Add a slot over `weights` for a unit stored on the device; it is never evicted."""
        slot = Slot(None, None, 0, weights, owner=unit)
        self.slots.append(slot)
        entry = self.entries[unit]
        entry.slot, entry.residency, entry.gathered = slot, Residency.RESIDENT, True
        entry.dequantized = True

    def dequantize(self, unit: int) -> None:
        """Dequantize the unit's quantized weights into the last range of its slot, once."""
        entry, layout = self.entries[unit], self.plan.units[unit]
        if entry.dequantized:
            return
        assert entry.slot is not None
        memory = entry.slot.alias()
        dtype = getattr(torch, self.plan.precision.dtype)
        for segment in (s for s in layout.segments if s.form):
            start = layout.trained_bytes + segment.offset
            packed = memory[start : start + segment.nbytes]
            start = layout.dequantized[segment.parameter]
            values = memory[start : start + segment.numel * dtype.itemsize].view(dtype)
            dequantize(packed, FrozenFormat(segment.form), values.view(segment.shape))
        entry.dequantized = True

    def move(self, unit: int, residency: Residency) -> UnitEntry:
        """Make a transition; the caller holds `changed`."""
        entry = self.entries[unit]
        assert (entry.residency, residency) in _ALLOWED, (unit, entry.residency, residency)
        entry.residency = residency
        self.changed.notify_all()
        return entry

    def assign(self, unit: int, slot: Slot) -> None:
        """Assign a free slot to the unit."""
        entry = self.entries[unit]
        assert entry.slot is None
        assert slot.is_free()
        if slot.has_stale_references:  # the last references may have queued compute that reads it
            slot.free_after = after_all(slot.free_after, self.device.compute_event())
            slot.has_stale_references = False
        assert self.plan.units[unit].slot_bytes <= slot.memory.numel()
        slot.owner = unit
        entry.slot, entry.gathered, entry.gathering = slot, self.plan.ranks == 1, None
        entry.dequantized = not self.plan.units[unit].dequantized_bytes

    def evict(self, unit: int) -> None:
        """End the residency of an unbound unit; the slot is free once nothing refers to it.

        A unit that is stored on the device keeps its slot and stays resident. The caller holds
        `changed`.
        """
        entry = self.entries[unit]
        slot = entry.slot
        assert slot is not None
        assert not entry.bound
        _end_gather(entry)
        slot.free_after = after_all(entry.ready, self.device.compute_event())
        entry.views = []
        if slot.slot_class is not None:
            entry.slot = slot.owner = None
            slot.has_stale_references = not slot.is_free()
            self.move(unit, Residency.OFFLOADED)

    def no_slot_error(self, unit: int, slot_class: int) -> ResidencyError:
        """Return the error for a unit without a slot; it lists the units in slots of the class."""
        lines = []
        for index, slot in enumerate(s for s in self.slots if s.slot_class == slot_class):
            if slot.owner is None:
                lines.append(
                    f"slot {index}: stale weights that {slot.num_aliases()} tensors still refer to"
                )
                continue
            entry = self.entries[slot.owner]
            name = self.name_of(slot.owner)
            state = (
                "inside its forward"
                if entry.forward_depth
                else f"referenced, {entry.residency.value}"
            )
            lines.append(f"slot {index}: {name!r} ({state})")
        return ResidencyError(
            f"no slot is free for unit {self.name_of(unit)!r}: {'; '.join(lines)}",
            because="tensors share memory with weights in slots, forwards are deeply nested, or "
            "one operation uses weights of more units than there are slots",
            remedy="drop graphs and aliases you do not need, or raise prefetch_units (more slots)",
        )


def _end_gather(entry: UnitEntry) -> None:
    """Wait for a gather whose result is no longer needed."""
    gathering, entry.gathering = entry.gathering, None
    if gathering is not None:
        with contextlib.suppress(MachineError):  # the next synchronization reports lost ranks
            gathering.wait()

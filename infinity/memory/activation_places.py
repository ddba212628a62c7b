"""Where saved tensors wait: records, spans of the pool, parts of the extent on disk."""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor

from infinity.errors import TransferError
from infinity.memory.device import HAPPENED, Event, after_all
from infinity.memory.disk import Extent, Ticket
from infinity.memory.host import HostArena
from infinity.memory.lanes import Lanes
from infinity.model.torch_private import TensorIdentity
from infinity.plan.layout import PAGE, Tier, round_up
from infinity.plan.saved import Ranges, SavedPlan
from infinity.trace.recorder import NO_UNIT

LABEL = (NO_UNIT, "activation")


class Away:
    """What autograd holds in the place of a saved tensor; `tensor` only where it stayed."""

    __slots__ = ("__weakref__", "number", "tensor")

    def __init__(self, number: int) -> None:
        self.number = number
        self.tensor: Tensor | None = None


@dataclass(eq=False, slots=True)
class Record:
    """One saved tensor: what it is, where it waits, and what is under way."""

    away: weakref.ref[Away]
    order: int  # of saving; backward comes the other way round
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size
    version: int
    identity: TensorIdentity
    uses: int = 1
    home: Tier = Tier.DEVICE
    span: int | None = None  # in the pool
    extent: int | None = None  # on disk
    buffer: Tensor | None = None  # where the pool has no room for what comes back
    source: Tensor | None = None  # the tensor itself, until it has been copied out
    left: Event | None = None  # the end of that copy; None: it has not begun
    writing: Ticket | None = None
    written: bool = False
    reading: Ticket | None = None
    fetched: Tensor | None = None
    ready: Event = HAPPENED
    modified: bool = False  # while it was copied out
    given: bool = False  # back to backward, once at least

    def end_requests(self) -> None:
        """Wait for what the disk was asked for, whatever comes of it."""
        for ticket in (self.writing, self.reading):
            if ticket is not None:
                with contextlib.suppress(TransferError):
                    ticket.wait()
                if not ticket.done():  # stuck: the span is the kernel's for good
                    self.span = None


@dataclass(slots=True)
class SavedCounts:
    """Block inputs that were saved since the start: how many, and bytes by where they waited."""

    num_saved: int = 0
    bytes_in: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))


class ActivationPlaces:
    """Records of saved tensors, and what they hold; `ActivationStore` adds movement.

    `sizes` are those of the last micro-batch whose graph is gone, in the order of saving.
    """

    def __init__(self, plan: SavedPlan, lanes: Lanes) -> None:
        assert plan.offload is not None
        self.plan = plan
        self.lanes = lanes
        self.counts = SavedCounts()
        self.sizes = plan.sizes
        self._arena: HostArena | None = HostArena(plan.host_bytes)
        lanes.device.pin(self._arena)
        self._extent = None
        if plan.disk_bytes:
            assert lanes.disk is not None
            self._extent = lanes.disk.extent(plan.disk_bytes, "activations")
        self._pool = Ranges(plan.host_bytes)
        self._disk = Ranges(plan.disk_bytes)
        self._records: dict[int, Record] = {}
        self._known: dict[TensorIdentity, weakref.ref[Away]] = {}
        self._retired: list[tuple[Event, int | None, int, object]] = []  # see `_bury`
        self._going: list[Record] = []
        self._coming: list[Record] = []
        self._seen: list[int] = []
        self._next = 0

    def write_once(self) -> None:
        """Write the extent, before training: a first write of reserved space is a slow one."""
        if self._extent is None or self._arena is None:
            return
        for start in range(0, self._extent.nbytes, self._arena.nbytes):
            nbytes = min(self._arena.nbytes, self._extent.nbytes - start)
            piece = self._extent.part(start, nbytes), self._arena.view(0, nbytes)
            self.lanes.write([piece], label=LABEL).wait()

    @property
    def learnt(self) -> tuple[int, ...]:
        """`sizes`, now."""
        self._drain()
        return self.sizes

    @property
    def held(self) -> dict[Tier, int]:
        """Bytes of the saved tensors that graphs hold now, by where they wait."""
        self._drain()
        held = dict.fromkeys(Tier, 0)
        for record in self._records.values():
            held[record.home] += record.nbytes
        return held

    def _drain(self) -> None:
        """Take back the places of tensors that no graph holds any more."""
        for number in [n for n, r in self._records.items() if r.away() is None]:
            self._bury(self._records[number])
            del self._records[number]
        if self._seen and not self._records:
            self.sizes, self._seen = tuple(self._seen), []

    def _bury(self, record: Record) -> None:
        record.end_requests()
        for records in (self._going, self._coming):
            if record in records:
                records.remove(record)
        self._retire(record)
        if record.extent is not None:
            self._disk.give(record.extent, record.nbytes)
            record.extent = None
        self._known.pop(record.identity, None)

    def _retire(self, record: Record) -> None:
        """The record's span is free, and its tensors may go, once nothing copies them."""
        event = after_all(record.left or HAPPENED, record.ready)
        held = (record.buffer, record.source, record.fetched)
        self._retired.append((event, record.span, record.nbytes, held))
        record.span = record.buffer = None
        self._reap()

    def _reap(self) -> None:
        for entry in list(self._retired):
            event, span, nbytes, _ = entry
            if event.done():
                self._retired.remove(entry)
                if span is not None:
                    self._pool.give(span, nbytes)

    def _buffer(self, record: Record) -> Tensor:
        """The whole pages that a record has in the pool, or beside it."""
        if record.buffer is not None:
            return record.buffer
        assert self._arena is not None
        assert record.span is not None
        return self._arena.view(record.span, round_up(record.nbytes, PAGE))

    def _part(self, record: Record) -> Extent:
        assert self._extent is not None
        assert record.extent is not None
        return self._extent.part(record.extent, round_up(record.nbytes, PAGE))

    def close(self) -> None:
        """Wait for what is under way, and drop everything; graphs that are left are of no use."""
        for record in self._records.values():
            record.end_requests()
        if not self.lanes.device.unified:
            self.lanes.device.synchronize()
        self._records.clear()
        self._known.clear()
        self._retired.clear()
        self._going.clear()
        self._coming.clear()

    def forget(self) -> None:
        """Drop the pool; nothing pins it any more."""
        self._arena = None

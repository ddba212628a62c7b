"""Fake accelerator with a happens-before checker, which detects what a GPU would not order.

On a GPU compute runs long after its launch, concurrently with copies; only events order them. On
the fake accelerator compute runs synchronously, so a missing wait is noticed only if a copy is
late. Therefore this device tracks the order that a GPU guarantees: every torch operation on device
memory is a point on the current stream (`stream` enters a side stream of the user), every copy and
every update has its own stream, and an event has a set of predecessors. Two accesses to one range,
one of which writes, must be ordered by events, or by the host having observed the end of the first;
otherwise they are a violation, whatever the bytes were. Device memory outside the reserved arenas
(gradients, activations) is tracked for copies only: compute may not write a range that is being
copied, and a copy into such a range must be ordered after all compute, which may have used the same
bytes before.

    with ordered_device() as device: ...train with device...
    assert device.violations == []

`host_waits` counts the blocking waits of the training thread, by kind: on a GPU these keep it from
launching more work.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from support.fake_accelerator import (
    FakeAccelerator,
    FakeEvent,
    Range,
    bytes_of,
    written_by,
)
from support.ranks import AsyncCollective
from torch import Tensor
from torch.utils._pytree import tree_leaves

from infinity.model.torch_private import DispatchMode, storage_address
from infinity.optim.cpu import Piece
from infinity.storage.device import HAPPENED, Event, SquareSums


@dataclass(eq=False)
class Past:
    """Predecessors of a point: copies, and operations of each stream up to a number."""

    compute: dict[str, int] = field(default_factory=dict)
    copies: set[OrderedEvent] = field(default_factory=set)

    def join(self, *others: Past) -> Past:
        for other in others:
            for stream, number in other.compute.items():
                self.compute[stream] = max(self.compute.get(stream, 0), number)
            self.copies |= other.copies
        return self

    def covers(self, other: Past) -> bool:
        latest = other.compute.items()
        return other.copies <= self.copies and all(self.has(s, number) for s, number in latest)

    def has(self, stream: str, number: int) -> bool:
        return number <= self.compute.get(stream, 0)


class OrderedEvent:
    """End of a copy, an update or a collective, or of the compute so far if `inner` is None."""

    def __init__(
        self, device: OrderedAccelerator, past: Past, inner: FakeEvent | AsyncCollective | None
    ) -> None:
        self._device = device
        self.past = past
        self._inner = inner
        self.seen = False  # observed by the host, whose later operations are ordered after it
        if inner is not None:
            past.copies = {*past.copies, self}

    def done(self) -> bool:
        """Return whether it has ended; compute has not until the host waits, as a GPU is late."""
        if self._inner is None:
            return self.seen or self._device.has_seen(self.past)
        with self._device.not_compute():
            ended = self._inner.done()
        if ended:
            self._see()
        return ended

    def wait(self) -> None:
        if not self.done():
            self._device.count_wait("compute" if self._inner is None else "copy")
        self.end()
        self._see()

    def end(self) -> None:
        """Wait as a stream does: the host does not observe the end."""
        if self._inner is not None:
            with self._device.not_compute():
                self._inner.wait()

    def begin(self) -> None:
        if isinstance(self._inner, FakeEvent):
            self._inner.begin()

    def _see(self) -> None:
        self.seen = True
        self._device.host_saw(self.past)


@dataclass(eq=False)
class _Access:
    """Access to a range by an operation of a compute stream, or by a copy."""

    first: int
    end: int
    write: bool
    compute: tuple[str, int] = ("", 0)
    copy: OrderedEvent | None = None
    what: str = ""


class OrderedAccelerator(FakeAccelerator):
    """Accelerator that checks ordering; see the module's docstring.

    Only the thread that made it computes.
    """

    def __init__(self, seed: int = 0, **options: Any) -> None:
        super().__init__(seed, **options)
        self.host_waits: Counter[str] = Counter()
        self._thread = threading.get_ident()
        self._lock = threading.RLock()
        self._silent = threading.local()
        self._number = 0  # of the last compute operation
        self._streams: defaultdict[str, Past] = defaultdict(Past)  # position of each stream
        self._current = self._seen = "main"  # the thread's stream, and the last the engine knows
        self._host = Past()  # work whose end the host has observed
        self._accesses: list[_Access] = []
        self._unreserved: list[_Access] = []  # of copies, to device memory that was not reserved

    # --- tracking of accesses ------------------------------------------------------------------

    def count_wait(self, kind: str) -> None:
        """Count a blocking wait if the caller is the training thread."""
        if threading.get_ident() == self._thread:
            self.host_waits[kind] += 1

    def host_saw(self, past: Past) -> None:
        """Order all later operations of the host after `past`."""
        with self._lock:
            self._host.join(past)

    def has_seen(self, past: Past) -> bool:
        """Return whether the host has observed the end of all of `past`."""
        with self._lock:
            return self._host.covers(past)

    @contextmanager
    def stream(self, name: str) -> Iterator[None]:
        """Compute on a side stream of the user, which only the engine orders with others."""
        before, self._current = self._current, name
        try:
            yield
        finally:
            self._current = before

    def _chain(self) -> Past:
        """Return the position of the compute chain; see [Note: one chain of compute].

        The current stream joins the last known one first.
        """
        if not getattr(self._silent, "follows", False) and self._current != self._seen:
            self._streams[self._current].join(self._streams[self._seen])
            self._seen = self._current
        return self._streams[self._seen]

    def computes(self, name: str, touched: Iterable[tuple[int, int, bool]]) -> None:
        """Record a compute operation that touches memory ranges (first, end, writes)."""
        if getattr(self._silent, "on", False):
            return
        with self._lock:
            spans = [span for span in touched if not _within(span[0], self.pinned)]
            if not spans:
                return
            self._number += 1
            stream = self._current
            past = self._streams[stream].join(self._host)
            past.compute[stream] = self._number
            self._unreserved = [
                a for a in self._unreserved if a.copy is not None and not a.copy.seen
            ]
            for first, end, write in spans:
                if not _within(first, self.reserved):
                    self._check(first, end, write, past, f"compute {name}", self._unreserved)
                    continue
                self._check(first, end, write, past, f"compute {name}", self._accesses)
                self._note(_Access(first, end, write, compute=(stream, self._number), what=name))

    @contextmanager
    def not_compute(self) -> Iterator[None]:
        """Do not record operations inside: the fake's own, such as poisoning targets."""
        self._silent.on = True
        try:
            yield
        finally:
            self._silent.on = False

    def _check(
        self, first: int, end: int, write: bool, past: Past, accessor: str, accesses: list[_Access]
    ) -> None:
        for other in accesses:
            if other.first >= end or first >= other.end or not (write or other.write):
                continue
            if other.copy is not None:
                ordered = other.copy in past.copies
            else:
                ordered = past.has(*other.compute)
            if not ordered:
                self.violations.append(f"{accessor} is not ordered after {other.what}")

    def _note(self, access: _Access) -> None:
        """Record an access; drop accesses that a write covers and copies seen by the host."""
        self._accesses = [a for a in self._accesses if a.copy is None or not a.copy.seen]
        if access.write:
            self._accesses = [
                a for a in self._accesses if not (access.first <= a.first and a.end <= access.end)
            ]
        else:  # of repeated reads by compute keep the last
            self._accesses = [
                a
                for a in self._accesses
                if a.write or a.copy is not None or (a.first, a.end) != (access.first, access.end)
            ]
        self._accesses.append(access)

    def _past_of(self, event: Event) -> Past:
        past = Past()
        events: Sequence[Event] = getattr(event, "events", (event,))
        for single in events:
            if isinstance(single, OrderedEvent):
                past.join(single.past)
        with self._lock:
            past.join(self._host)
        return past

    # --- interface of Device -------------------------------------------------------------------

    def attach_worker_thread(self) -> None:
        self._silent.follows = True

    def sync_compute_stream(self) -> None:
        with self._lock:
            self._chain()

    def compute_event(self) -> Event:
        with self._lock:
            return OrderedEvent(self, Past().join(self._chain()), None)

    def compute_wait(self, event: Event) -> None:
        with self._lock:
            self._chain().join(self._past_of(event))
        for single in getattr(event, "events", (event,)):
            if isinstance(single, OrderedEvent):
                single.end()  # compute is synchronous here, so it must wait; a GPU's host does not

    def copy_h2d(self, target: Tensor, source: Tensor, after: Event = HAPPENED) -> Event:
        return self._ordered_copy("copy in", target, source, after, self._past_of(after))

    def copy_d2h(self, target: Tensor, source: Tensor, after: Event = HAPPENED) -> Event:
        past = self._past_of(after)
        with self._lock:  # also after all compute so far
            past.join(self._chain())
        return self._ordered_copy("copy out", target, source, after, past)

    def copy_d2h_unordered(self, target: Tensor, source: Tensor, after: Event = HAPPENED) -> Event:
        past = self._past_of(after)  # not after compute
        return self._ordered_copy("copy back", target, source, after, past)

    def _ordered_copy(
        self, name: str, target: Tensor, source: Tensor, after: Event, past: Past
    ) -> Event:
        with self._lock:
            event = OrderedEvent(self, past, None)
            for tensor, write in ((target, True), (source, False)):
                first = tensor.data_ptr()
                span = first, first + tensor.numel()
                if not tensor.numel():
                    continue
                if _within(first, [*self.reserved, *self.pinned]):
                    self._check(*span, write, past, name, self._accesses)
                    self._note(_Access(*span, write, copy=event, what=name))
                elif write == (name == "copy in"):
                    self._check(*span, write, past, name, self._unreserved)
                    if write and not all(
                        past.covers(Past(p.compute)) for p in self._streams.values()
                    ):
                        self.violations.append(f"{name} is not ordered after compute before it")
                    self._unreserved.append(_Access(*span, write, copy=event, what=name))
        with self.not_compute():
            inner = super()._copy(name, target, source, _InnerEvent(after))
        assert isinstance(inner, FakeEvent)
        event._inner = inner
        past.copies = {*past.copies, event}
        return event

    def update(self, pieces: Sequence[Piece], after: Event = HAPPENED) -> Event:
        past = self._past_of(after)
        with self._lock:
            event = OrderedEvent(self, past, None)
            for piece in pieces:
                written = {t.data_ptr() for t in written_by(piece)}
                stored = [t for moment in piece.moments for t in (moment.values, moment.scales)]
                for tensor in (piece.weight, piece.master_state, piece.gradient, *stored):
                    if tensor is None or not tensor.numel():
                        continue
                    first = tensor.data_ptr()
                    span = first, first + bytes_of(tensor).numel()
                    self._check(*span, first in written, past, "update", self._accesses)
                    self._note(_Access(*span, first in written, copy=event, what="update"))
        with self.not_compute():
            inner = super().update(pieces, _InnerEvent(after))
        assert isinstance(inner, FakeEvent)
        event._inner = inner
        past.copies = {*past.copies, event}
        return event

    def run_on_comm_stream(self, start: Callable[[], Event], after: Event = HAPPENED) -> Event:
        _InnerEvent(after).wait()
        with self.not_compute():
            work = start()
        assert isinstance(work, AsyncCollective)
        past = self._past_of(after)
        with self._lock:
            event = OrderedEvent(self, past, work)
            for tensor, write in work.touched:
                span = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
                self._check(*span, write, past, work.what, self._accesses)
                self._note(_Access(*span, write, copy=event, what=work.what))
        return event

    def begin_square_sums(self, tensors: Sequence[Tensor]) -> SquareSums:
        self.sync_compute_stream()
        self.computes("square sums", [(*span_of(t), False) for t in tensors])
        return OrderedSums(super().begin_square_sums(tensors), self.compute_event())

    def synchronize(self) -> None:
        self.count_wait("synchronize")
        super().synchronize()
        with self._lock:
            self._host.join(*(Past(past.compute) for past in self._streams.values()))
            self._accesses.clear()
            self._unreserved.clear()


class OrderedSums:
    """Square sums that the host must wait for."""

    def __init__(self, inner: SquareSums, event: Event) -> None:
        self._inner = inner
        self._event = event

    def result(self) -> list[float]:
        if not self._event.done():
            self._event.wait()
        return self._inner.result()


class _InnerEvent:
    """Predecessor of a copy of the base class: waits for copies; compute has already ended."""

    def __init__(self, after: Event) -> None:
        events: Sequence[Event] = getattr(after, "events", (after,))
        self._events = [p._inner if isinstance(p, OrderedEvent) else p for p in events]
        self.events = [event for event in self._events if event is not None]

    def done(self) -> bool:
        return all(event.done() for event in self.events)

    def wait(self) -> None:
        for event in self.events:
            event.wait()


def span_of(tensor: Tensor) -> tuple[int, int]:
    """Return the memory range of a tensor's storage; of a parameter it is its unit's slot."""
    first = storage_address(tensor)  # 0 for sliced logits, which have no storage
    return first, first + tensor.untyped_storage().nbytes() if first else first


class _RecordingMode(DispatchMode):
    """Dispatch mode that records every operation on device memory."""

    def __init__(self, device: OrderedAccelerator) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if _moves_data(func):
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            written = [
                t
                for i in _written_positions(func)
                for t in tree_leaves(args[i : i + 1])
                if isinstance(t, Tensor)
            ]
            self._device.computes(
                str(func),
                [
                    (*span_of(t), any(t is w for w in written))
                    for t in tensors
                    if t.layout is torch.strided and not t.is_meta
                ],
            )
        return result


def _within(address: int, ranges: Iterable[Range]) -> bool:
    return any(r.first <= address < r.end and r.mapping() is not None for r in ranges)


@cache
def _moves_data(func: Any) -> bool:
    """Return whether an operation reads or writes elements; views and queries do not."""
    if func.is_view or func.namespace != "aten":
        return func.namespace != "aten"
    return func._schema.name not in _QUERIES


_QUERIES = {"aten::detach", "aten::set_", "aten::empty_like", "aten::new_empty", "aten::sym_size"}


@cache
def _written_positions(func: Any) -> list[int]:
    """Return the positions of arguments that an operation writes."""
    infos = enumerate(argument.alias_info for argument in func._schema.arguments)
    return [position for position, info in infos if info is not None and info.is_write]


@contextmanager
def ordered_device(seed: int = 0, **options: Any) -> Iterator[OrderedAccelerator]:
    """Yield a device that records all compute of this thread."""
    device = OrderedAccelerator(seed, on_demand=True, **options)
    with watched(device):
        yield device


def watched(device: OrderedAccelerator) -> _RecordingMode:
    """Return a context in which a device records the compute of this thread."""
    return _RecordingMode(device)

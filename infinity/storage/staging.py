"""Staging buffers: equal pieces of memory in which bytes stay for a while on their way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from infinity.storage.device import Device, DeviceArena, Event
from infinity.storage.host_arena import HostArena
from infinity.storage.store import together
from infinity.types import PAGE, round_up


def host_buffer(nbytes: int) -> Tensor:
    """Page-aligned RAM (uint8, zeroed) that lives as long as the tensor."""
    return HostArena(nbytes).view(0, nbytes)


class BufferPool:
    """`count` buffers (uint8) of `nbytes`; one is free when the events it came back with are over.

    In RAM, pinned for `device` if one is given, or with `on_device` in its own memory. Used by one
    thread at a time.
    """

    def __init__(
        self, count: int, nbytes: int, device: Device | None = None, *, on_device: bool = False
    ) -> None:
        self.count = count
        self._free: deque[tuple[Tensor, Event | None]] = deque()  # given back longest ago first
        if not count:
            return
        step = round_up(nbytes, PAGE)
        arena: DeviceArena
        if on_device:
            assert device is not None
            arena = device.reserve(count * step)
        else:
            arena = HostArena(count * step)
            if device is not None and step:
                device.pin(arena)
        self._free.extend((arena.view(n * step, nbytes), None) for n in range(count))

    def take(
        self,
        make_one_free: Callable[[], None] | None = None,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Tensor:
        """Return a free buffer; raises the error that its last use ended with.

        Waits inside `waiting()` for those that were given back; while none is, `make_one_free`
        must bring about that one will be.
        """
        while not self._free:
            assert make_one_free is not None, "every buffer is taken"
            make_one_free()
        # The last one that is free, which caches may still hold; else the one that will be first.
        newest = reversed(range(len(self._free)))
        index = next((n for n in newest if (e := self._free[n][1]) is None or e.done()), 0)
        buffer, event = self._free[index]
        if event is not None:
            with nullcontext() if event.done() else waiting():
                event.wait()  # at once where it is over, unless that was an error
        del self._free[index]
        return buffer

    def give_back(self, buffer: Tensor, *events: Event) -> None:
        """The buffer, whole, is free once all events have happened."""
        self._free.append((buffer, together(events) if events else None))

    def settle(self) -> None:
        """Wait until nothing uses those that were given back; raises what their use ended with."""
        for _, event in self._free:
            if event is not None:
                event.wait()

    def forget(self) -> None:
        """Drop the buffers."""
        self._free.clear()

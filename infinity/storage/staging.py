"""Pools of equally sized staging buffers for transfers between tiers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from infinity.storage.device import Device, DeviceArena, Event, merge_events
from infinity.storage.host_arena import HostArena
from infinity.types import PAGE, round_up


def host_buffer(nbytes: int) -> Tensor:
    """Return page-aligned, zeroed RAM (uint8), freed with the tensor."""
    return HostArena(nbytes).view(0, nbytes)


class BufferPool:
    """Pool of `count` uint8 buffers of `nbytes`, each reused after the events of its last use.

    The buffers are in RAM, pinned for `device` if given, or in device memory if `on_device`. Used
    by one thread at a time.
    """

    def __init__(
        self, count: int, nbytes: int, device: Device | None = None, *, on_device: bool = False
    ) -> None:
        self.count = count
        self._free: deque[tuple[Tensor, Event | None]] = deque()  # in the order of `give_back`
        if not count:
            return
        stride = round_up(nbytes, PAGE)
        arena: DeviceArena
        if on_device:
            assert device is not None
            arena = device.reserve(count * stride)
        else:
            arena = HostArena(count * stride)
            if device is not None and stride:
                device.pin(arena)
        self._free.extend((arena.view(n * stride, nbytes), None) for n in range(count))

    def take(
        self,
        make_one_free: Callable[[], None] | None = None,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Tensor:
        """Return a free buffer; raises the error of its last use.

        If the events of all returned buffers are pending, blocks inside `waiting()`. While every
        buffer is taken, calls `make_one_free`, which must lead to a `give_back`.
        """
        while not self._free:
            assert make_one_free is not None, "every buffer is taken"
            make_one_free()
        # Prefer the newest free buffer, which may still be in cache; else wait for the oldest.
        for index in reversed(range(len(self._free))):
            buffer, event = self._free[index]
            if event is None or event.done():
                break
        if event is not None:
            with nullcontext() if event.done() else waiting():
                event.wait()  # returns immediately if done; raises if it failed
        del self._free[index]
        return buffer

    def give_back(self, buffer: Tensor, *events: Event) -> None:
        """Return a buffer, not a slice of it, to the pool; it is free after all `events`."""
        self._free.append((buffer, merge_events(events) if events else None))

    def settle(self) -> None:
        """Block until the events of all returned buffers have happened; raises their errors."""
        for _, event in self._free:
            if event is not None:
                event.wait()

    def free(self) -> None:
        self._free.clear()

"""Deferral of SIGINT: Ctrl-C waits for the end of the running engine call; a second one does not.

[Note: Ctrl-C]
While a call runs on the main thread, SIGINT is noted; when the call is over, whoever handled it
before hears of it (`KeyboardInterrupt`, unless that was changed). A second one ends the call
where it is: then the engine has failed, for its state may be half-way from one step to the next.
Nothing else knows of interrupts. Left alone are other threads, SIGINT that is ignored or the
system's, and handlers with a true attribute `defers`, which themselves wait at the first signal.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from threading import get_ident, main_thread
from types import FrameType
from typing import Any, Protocol

_Handler = Callable[[int, FrameType | None], object]


class Lasting(Protocol):
    """A call that may end without `leave`."""

    @property
    def is_over(self) -> bool:
        """Return True if it has ended."""


class SigintDeferral:
    """Handler of SIGINT from the outermost `begin` on the main thread to its `end`."""

    def __init__(self) -> None:
        self._calls: list[tuple[Lasting, Callable[[], None]]] = []
        self._before: _Handler = signal.default_int_handler
        self._count = 0  # of signals since the outermost call began

    def begin(self, call: Lasting, fail: Callable[[], None]) -> None:
        """Begin a call; `fail` is called if it ends in the middle, and must not wait."""
        if get_ident() != main_thread().ident:
            return
        self._calls = [one for one in self._calls if not one[0].is_over]
        self._count = self._count if self._calls else 0
        self._calls.append((call, fail))
        before: Any = signal.getsignal(signal.SIGINT)
        if callable(before) and before is not self and not getattr(before, "defers", False):
            self._before = before
            signal.signal(signal.SIGINT, self)

    def end(self, call: Lasting) -> None:
        """End a call; after the outermost one, call the handler of a deferred SIGINT."""
        left = [one for one in self._calls if one[0] is not call and not one[0].is_over]
        if left or get_ident() != main_thread().ident:
            self._calls = left
            return
        now: Any = signal.getsignal(signal.SIGINT)
        if now is self:
            signal.signal(signal.SIGINT, self._before)
        count, self._count, self._calls = self._count, 0, left
        if count == 1:
            self._before(signal.SIGINT, sys._getframe())

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        under_way = [fail for call, fail in self._calls if not call.is_over]
        self._count += bool(under_way)
        if under_way and self._count == 1:
            return
        for fail in under_way:
            fail()
        self._before(signum, frame)
        if under_way:
            raise KeyboardInterrupt


DEFERRAL = SigintDeferral()  # signals are the process's

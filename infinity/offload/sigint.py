"""Deferral of SIGINT to the end of the running engine call; a second Ctrl-C interrupts it.

[Note: Ctrl-C]
While a call runs on the main thread, a first SIGINT is only counted; when the call ends, the
previous handler is called (by default it raises `KeyboardInterrupt`). A second SIGINT interrupts
the call: the engine has then failed, since its state may be between two steps. No other module
handles interrupts. SIGINT is not deferred in calls on other threads, if it is ignored or handled by
the system, or if the handler has a true attribute `defers` and so defers the first signal itself.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from threading import get_ident, main_thread
from types import FrameType
from typing import Any, Protocol

_Handler = Callable[[int, FrameType | None], object]


class InterruptibleCall(Protocol):
    """A call that may end without `SigintDeferral.end`."""

    @property
    def is_over(self) -> bool:
        """Return True if the call has ended."""


class SigintDeferral:
    """Handler of SIGINT from the outermost `begin` on the main thread to its `end`."""

    def __init__(self) -> None:
        self._calls: list[tuple[InterruptibleCall, Callable[[], None]]] = []
        self._previous_handler: _Handler = signal.default_int_handler
        self._count = 0  # signals since the outermost call began

    def begin(self, call: InterruptibleCall, fail: Callable[[], None]) -> None:
        """Begin a call; `fail` is called if a second SIGINT interrupts it, and must not block."""
        if get_ident() != main_thread().ident:
            return
        self._calls = [entry for entry in self._calls if not entry[0].is_over]
        self._count = self._count if self._calls else 0
        self._calls.append((call, fail))
        previous: Any = signal.getsignal(signal.SIGINT)
        if callable(previous) and previous is not self and not getattr(previous, "defers", False):
            self._previous_handler = previous
            signal.signal(signal.SIGINT, self)

    def end(self, call: InterruptibleCall) -> None:
        """End a call; after the outermost one, call the handler of a deferred SIGINT."""
        remaining = [
            entry for entry in self._calls if entry[0] is not call and not entry[0].is_over
        ]
        if remaining or get_ident() != main_thread().ident:
            self._calls = remaining
            return
        handler: Any = signal.getsignal(signal.SIGINT)
        if handler is self:
            signal.signal(signal.SIGINT, self._previous_handler)
        count = self._count
        self._count = 0
        self._calls = remaining
        if count == 1:
            self._previous_handler(signal.SIGINT, sys._getframe())

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        callbacks = [fail for call, fail in self._calls if not call.is_over]
        self._count += bool(callbacks)
        if callbacks and self._count == 1:
            return
        for fail in callbacks:
            fail()
        self._previous_handler(signum, frame)
        if callbacks:
            raise KeyboardInterrupt


DEFERRAL = SigintDeferral()  # one per process, as signal handlers are

"""Peak memory of this process, and signal handlers that end it cleanly."""

from __future__ import annotations

import os
import signal
from enum import Enum
from pathlib import Path
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(BaseException):
    """SIGINT or SIGTERM arrived; not an `Exception`, so nothing on the way up swallows it."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.exit_code = 128 + signum
        self._name = "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name

    def __str__(self) -> str:
        return f"stopped by {self._name}; nothing is left on disk"


class Phase(Enum):
    """Phase of the run; its value describes the effect of a signal."""

    STARTING = "end the process at once: nothing exists yet"
    RUNNING = "raise `Stopped`"
    CLOSING = "be noted, and raise afterwards: cleaning up must not be interrupted"
    ENDED = "be ignored, also by an interpreter that is shutting down"


class Signals:
    """Handlers of SIGINT and SIGTERM; signals after the first one are ignored.

    While starting, a signal exits at once: an exception during the import of torch or numpy is
    swallowed or turned into another one, and there is nothing to clean up.
    """

    def __init__(self) -> None:
        self._phase = Phase.STARTING
        self._received: int | None = None

    def install(self) -> None:
        """Install both handlers for the rest of the process."""
        for signum in _SIGNALS:
            signal.signal(signum, self._on_signal)

    def enter(self, phase: Phase) -> None:
        """Change the phase; a signal received while closing is raised on return to RUNNING."""
        was_closing = self._phase is Phase.CLOSING
        self._phase = phase
        if phase is Phase.ENDED:
            # Python restores default handlers before the process has ended.
            for signum in _SIGNALS:
                signal.signal(signum, signal.SIG_IGN)
        if was_closing and phase is Phase.RUNNING:
            self.check()

    def check(self) -> None:
        """Raise `Stopped` if a signal came while Python could not raise it, as in a destructor."""
        if self._received is not None:
            raise Stopped(self._received)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._received is not None:
            return
        self._received = signum
        if self._phase is Phase.STARTING:
            stopped = Stopped(signum)
            os.write(2, f"{stopped}\n".encode())
            os._exit(stopped.exit_code)
        if self._phase is Phase.RUNNING:
            raise Stopped(signum)


def peak_rss_bytes() -> int | None:
    """Return the peak resident size of this process, or None without /proc."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None

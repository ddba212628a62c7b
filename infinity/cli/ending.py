"""How a command ends: errors as text with an exit code, signals after cleaning up."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import typer

from infinity.errors import InfinityError


class Stopped(KeyboardInterrupt):
    """SIGINT or SIGTERM arrived; what is open closes on the way up."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.exit_code = 128 + signum
        self.text = f"stopped by {signal.Signals(signum).name}; nothing is left on disk"


@contextmanager
def command() -> Iterator[None]:
    """Wrap the body of a command: our errors and signals become a message and `typer.Exit`.

    The first SIGINT or SIGTERM raises `Stopped`; later ones are ignored, because cleaning up must
    not be interrupted.
    """
    received: list[int] = []

    def on_signal(signum: int, frame: FrameType | None) -> None:
        if not received:
            received.append(signum)
            raise Stopped(signum)

    before = {}
    if threading.current_thread() is threading.main_thread():
        for signum in (signal.SIGINT, signal.SIGTERM):
            before[signum] = signal.signal(signum, on_signal)
    try:
        yield
    except InfinityError as error:
        say(f"error: {error}")
        raise typer.Exit(error.exit_code) from None
    except Stopped as stopped:
        say(stopped.text)
        raise typer.Exit(stopped.exit_code) from None
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def say(text: str) -> None:
    """Print plain text on stderr."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def stdout_is_ours() -> Iterator[None]:
    """Send what libraries write to descriptor 1 to stderr, so that stdout carries our output only.

    A peer's package and its compiler talk on stdout; `--json` promises one object there.
    """
    sys.stdout.flush()
    saved = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)

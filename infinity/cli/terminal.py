"""Output of commands: progress on stderr, tables on stdout, plain lines without a terminal.

Terminals get colors, unless NO_COLOR is set (see rich).
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Self, TypeAlias

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column, Table
from rich.text import Text

from infinity.common.sizes import format_size
from infinity.errors import (
    ConfigError,
    InfinityError,
    InfinityWarning,
    MachineError,
    first_lines,
)

AsJson: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout, and nothing else.")
]
Drives: TypeAlias = Annotated[
    list[Path] | None,
    typer.Option("--path", metavar="DIR", help="A directory on a drive; may be repeated."),
]


class Stopped(KeyboardInterrupt):
    """Raised on SIGINT, SIGTERM or SIGHUP; files are closed while it propagates."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.exit_code = 128 + signum
        self.text = f"stopped by {signal.Signals(signum).name}"


@contextmanager
def command() -> Iterator[None]:
    """Wrap the body of a command: errors and signals become a message and `typer.Exit`.

    System errors such as a full disk or a name that is too long are converted as well.
    The first SIGINT, SIGTERM or SIGHUP raises `Stopped`; later ones are ignored, because cleanup
    must not be interrupted. Each warning is printed once, as a line on stderr.
    """
    received: list[int] = []

    def on_signal(signum: int, frame: FrameType | None) -> None:
        if not received:
            received.append(signum)
            raise Stopped(signum)

    with handling(on_signal), show_warnings_with(say), hub_retries_as_warning():
        try:
            yield
        except (InfinityError, OSError, RuntimeError, UnicodeError, MemoryError) as error:
            failure = as_infinity_error(error)
            if failure is None:
                raise
            say(f"error: {failure}")
            raise typer.Exit(failure.exit_code) from None
        except Stopped as stopped:
            if os.environ.get("RANK", "0") == "0":  # only the first rank reports it
                say(stopped.text)
            raise typer.Exit(stopped.exit_code) from None


@contextmanager
def show_warnings_with(show: Callable[[str], None]) -> Iterator[None]:
    """Pass warnings to `show` as "warning: ..."; each text once."""
    shown: set[str] = set()

    def show_once(message: Warning | str, *more: Any, **details: Any) -> None:
        text = str(message)
        if text not in shown:
            shown.add(text)
            show(f"warning: {text}")

    with warnings.catch_warnings():
        warnings.showwarning = show_once
        yield


@contextmanager
def hub_retries_as_warning() -> Iterator[None]:
    """Replace log messages of the Hugging Face Hub's client about retries with one warning."""

    def keep(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if "thrown while requesting" not in text and "[Retry" not in text:
            return True
        warnings.warn(
            "the Hugging Face Hub does not answer, and is asked again; with HF_HUB_OFFLINE=1 only "
            "its cache is used",
            InfinityWarning,
        )
        return False

    log = logging.getLogger("huggingface_hub.utils._http")
    log.addFilter(keep)
    try:
        yield
    finally:
        log.removeFilter(keep)


BARS = ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS", "TQDM_DISABLE")


def progress_bar_environment() -> dict[str, str]:
    """Return environment variables that turn off the progress bars of other libraries.

    They are read when those are imported; transformers reads that of the Hub. Empty if stderr is a
    terminal; variables that are set already are left out.
    """
    return {} if sys.stderr.isatty() else {k: "1" for k in BARS if k not in os.environ}


@contextmanager
def handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Install a handler for SIGINT, SIGTERM and, unless it is ignored, SIGHUP.

    Does nothing outside the main thread.
    """
    is_main = threading.current_thread() is threading.main_thread()
    signums = [signal.SIGINT, signal.SIGTERM] if is_main else []
    if is_main and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signums.append(signal.SIGHUP)
    previous = {signum: signal.signal(signum, handler) for signum in signums}
    try:
        yield
    finally:
        for signum, old in previous.items():
            signal.signal(signum, old)


def as_infinity_error(error: Exception) -> InfinityError | None:
    """Return an `InfinityError` for a cause in arguments, files or the machine; None for a bug."""
    text = first_lines(error)
    if isinstance(error, InfinityError):
        return error
    if isinstance(error, BrokenPipeError):
        return None  # the reader of stdout has closed it: typer ends quietly
    if isinstance(error, OSError):
        file_name = f"{os.fsdecode(error.filename)[:200]!r}: " if error.filename else ""
        return MachineError(
            f"{file_name}{error.strerror or text}",
            because=f"the system refuses ({errno.errorcode.get(error.errno or 0, 'no number')})",
        )
    if isinstance(error, MemoryError):
        return MachineError(f"there is not enough RAM: {text}", remedy="see `infinity doctor`")
    if isinstance(error, RecursionError):
        return ConfigError("something in the arguments, or in a file, is nested too deeply")
    if isinstance(error, UnicodeError):
        return ConfigError(f"a name or a text is not UTF-8: {text}")
    if "home directory" in text:  # of `Path.expanduser`
        return ConfigError("a path begins with ~ and the name of an unknown user")
    return None


def say(text: str) -> None:
    """Print text on stderr, with "error:" and "warning:" in color; wrap it on a terminal."""
    _print(_LogConsole(stderr=True, highlight=False, markup=False, soft_wrap=True), text)


_COLORS = {"error": "red", "warning": "yellow"}
_REMEDY_PREFIX = "  try: "


def _print(console: Console, text: str) -> None:
    """Print lines, wrapped at spaces on a terminal; commands stay on one line."""
    lines = []
    for line in text.splitlines() or [""]:
        one_line = not console.is_terminal or line.startswith(_REMEDY_PREFIX)
        lines += [line] if one_line else _wrapped_line(console, line)
    kind, colon, message = "\n".join(lines).partition(": ")
    console.print(Text.assemble((f"{kind}{colon}", _COLORS.get(kind, "")), message))


def _wrapped_line(console: Console, line: str) -> list[str]:
    """Wrap a line to the width of a console, and indent its continuation by two more columns."""
    text = line.lstrip(" ")
    indent = " " * (len(line) - len(text))
    return _wrapped(console, text, indent, f"{indent}  ")


def _wrapped(console: Console, text: str, first: str, following: str) -> list[str]:
    """Wrap text at spaces to the width of a terminal, after the indents of its lines."""
    lines = textwrap.wrap(
        text,
        max(console.width, 2 * _LABEL_WIDTH) if console.is_terminal else _UNWRAPPED,
        initial_indent=first,
        subsequent_indent=following,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines or [""]


@contextmanager
def library_stdout_to_stderr() -> Iterator[None]:
    """Redirect file descriptor 1 to stderr, so that stdout carries the output of the command only.

    Other packages and their compilers write to stdout; `--json` promises one object on it.
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


PLAIN_INTERVAL_S = 5.0
_BAR_WIDTH = 16  # columns of a bar
_LABEL_WIDTH = 12  # columns of a label, with the space after it
_UNWRAPPED = 1 << 20  # columns without a terminal: lines for other programs are not wrapped
_TABLE_WIDTH = 140  # columns of a table if no width is known, so that no number is cut off


class _LogConsole(Console):
    """Console that ignores a broken pipe."""

    def on_broken_pipe(self) -> None:
        """Print nothing from now on, instead of exiting."""
        self.quiet = True


class ProgressLine:
    """Progress of long work on stderr: a bar on a terminal, else a plain line every few seconds.

    A context manager. `quiet` prints nothing. A `transient` bar is cleared at its end, and drawn by
    `show` only, without a thread that would disturb a measurement.
    """

    def __init__(self, *, quiet: bool = False, transient: bool = False) -> None:
        self._console = _LogConsole(
            stderr=True, highlight=False, markup=False, soft_wrap=True, quiet=quiet
        )
        self._transient = transient
        self._progress: Progress | None = None
        self._last_shown_s = 0.0
        self._line_kind = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.pause()

    @property
    def columns(self) -> int:
        """Columns available for text next to the bar."""
        return self._console.width - _BAR_WIDTH - 1 if self._console.is_terminal else _UNWRAPPED

    def progress(self, done_bytes: int, total_bytes: int, what: str) -> None:
        """Show bytes done; a `what` that differs before its first ":" begins another line."""
        kind, finished = what.partition(":")[0], done_bytes >= total_bytes
        if kind != self._line_kind:
            self.pause()
            self._line_kind = kind
        text = f"{what}: {format_size(done_bytes)} of {format_size(total_bytes)}"
        self.show(text, done_bytes, total_bytes, edge=finished)
        if finished:
            self.pause()

    def note(self, text: str) -> None:
        """Print a line of text."""
        with suppress(OSError):  # a log that cannot be written must not end a run
            _print(self._console, text)

    def pause(self) -> None:
        """Stop the bar, so that something else can be printed."""
        if self._progress is not None:
            progress, self._progress = self._progress, None
            with suppress(OSError):
                progress.stop()

    def show(self, text: str, done: int, total: int, *, edge: bool) -> None:
        """Update the bar; without a terminal, print if `edge`, else every few seconds."""
        if not self._console.is_terminal:
            if edge or time.monotonic() - self._last_shown_s > PLAIN_INTERVAL_S:
                self._last_shown_s = time.monotonic()
                self.note(text)
            return
        with suppress(OSError):
            self._update_bar(text, done, total)

    def _update_bar(self, text: str, done: int, total: int) -> None:
        if self._progress is None:
            line = Column(no_wrap=True, overflow="ellipsis", ratio=1)
            label = TextColumn("{task.description}", markup=False, table_column=line)
            bar = BarColumn(bar_width=_BAR_WIDTH, table_column=Column(width=_BAR_WIDTH))
            self._progress = Progress(
                bar,
                label,
                console=self._console,
                expand=True,
                transient=self._transient,
                auto_refresh=not self._transient,
            )
            self._progress.start()
            self._progress.add_task(text, total=total)
        task = self._progress.task_ids[0]
        self._progress.update(
            task, description=text, completed=done, total=total, refresh=self._transient
        )


class Page:
    """Output of a command on stdout."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, markup=False, soft_wrap=True)
        width = None if self._console.is_terminal else _TABLE_WIDTH
        self._tables = Console(highlight=False, markup=False, width=width)

    def say(self, text: str = "") -> None:
        """Print plain text; wrap lines at spaces if stdout is a terminal."""
        for line in text.splitlines() or [""]:
            self._console.print("\n".join(_wrapped_line(self._console, line)))

    def entry(self, label: str, text: str) -> None:
        """Print a label and, in the column after it, a text wrapped within that column."""
        lines = _wrapped(self._console, text, f"{label} ".ljust(_LABEL_WIDTH), " " * _LABEL_WIDTH)
        self._console.print("\n".join(lines))

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table; the first column names the row, the others are numbers."""
        table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
        table.padding, table.show_header = (0, 1, 0, 0), any(columns)
        for index, column in enumerate(columns):
            cells = [column, *(row[index] for row in rows)]
            longest = max((len(word) for cell in cells for word in cell.split()), default=1)
            table.add_column(
                column,
                justify="left" if index == 0 else "right",
                overflow="fold",
                min_width=longest,
            )
        for row in rows:
            table.add_row(*row)
        self._tables.print(table)

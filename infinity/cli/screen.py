"""Progress on stderr, tables on stdout; plain lines where there is no terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

_WIDE = 140  # columns where no width is known: never cut a number off


class ProgressLine:
    """Follows long work: one line that moves on a terminal, one plain line per phase elsewhere.

    A context manager.
    """

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._task: TaskID | None = None
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )

    def begin(self, title: str, total: int) -> None:
        """A phase of `total` parts starts."""
        if not self._console.is_terminal:
            self._console.print(f"{title} ...")
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(title, total=total)

    def advance(self, done: int | None = None) -> None:
        """One part is through, or `done` of them are."""
        if self._task is not None:
            if done is None:
                self._progress.advance(self._task)
            else:
                self._progress.update(self._task, completed=done)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._progress.stop()


class Page:
    """What a command shows on stdout."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, markup=False, soft_wrap=True)
        wide = None if self._console.is_terminal else _WIDE
        self._tables = Console(highlight=False, markup=False, width=wide)

    def say(self, text: str = "") -> None:
        """Print plain text."""
        self._console.print(text)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table; the first column names the row, the others are numbers."""
        table = Table(title=title, title_justify="left", title_style="bold")
        for index, column in enumerate(columns):
            table.add_column(column, justify="left" if index == 0 else "right")
        for row in rows:
            table.add_row(*row)
        self._tables.print(table)

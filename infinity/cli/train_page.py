"""What `infinity train` shows: a line that moves on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from infinity.cli.terminal import Page
from infinity.sizes import format_count, format_duration, format_size

if TYPE_CHECKING:
    from infinity.runs.metrics import Result
    from infinity.runs.preparation import Prepared

PLAIN_INTERVAL_S = 5.0
_STALLS = {"disk_read": "read", "slot": "slots", "gradient": "gradients"}


class TrainPage:
    """Follows one run on stderr; implements `infinity.runs.metrics.Watcher`.

    `begun` says that steps are being made, `signum` is the signal that asked to stop, or 0.
    """

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        self._progress: Progress | None = None
        self._shown_at_s = 0.0
        self._work = ""
        self.begun = False
        self.signum = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.pause()

    # --- before training -------------------------------------------------------------------------

    def progress(self, done_bytes: int, total_bytes: int, what: str) -> None:
        """How far something long is; with `what` of another kind another line begins."""
        kind, finished = what.partition(":")[0], done_bytes >= total_bytes
        if kind != self._work:
            self.pause()
            self._work = kind
        text = f"{what}: {format_size(done_bytes)} of {format_size(total_bytes)}"
        self._show(text, done_bytes, total_bytes, edge=finished)
        if finished:
            self.pause()

    def question(self, prepared: Prepared) -> None:
        """What is going to be done, with the numbers."""
        tokens, windows = prepared.train.corpus.num_tokens, len(prepared.train)
        self.note(
            f"{prepared.facts.name}: {format_count(tokens)} tokens, {windows:,} windows of "
            f"{prepared.length:,} to train on"
            + (f", {len(prepared.evaluate):,} held out" if prepared.evaluate is not None else "")
            + f"; {prepared.steps:,} steps of {prepared.tokens_per_step:,} tokens, "
            f"{prepared.steps * prepared.windows_per_step / windows:.3g} epochs"
        )

    # --- a watcher -------------------------------------------------------------------------------

    def begin(self, done: int, num_steps: int) -> None:
        """Training begins."""
        self.pause()
        self.begun = True

    def told(self, record: Mapping[str, Any]) -> None:
        """One step, or a held-out loss."""
        step = record["step"]
        if record["event"] == "step":
            num_steps = record["num_steps"]
            self._show(format_step(record), step, num_steps, edge=step in (1, num_steps))
        elif record["event"] == "evaluation":
            self.note(f"step {step}: held-out loss {record['loss']:.4f}")

    def note(self, text: str) -> None:
        """A line of its own."""
        with suppress(OSError):  # a log that cannot be written must not end a run
            self._console.print(text)

    @property
    def stopping(self) -> bool:
        """Whether a signal has asked for it."""
        return bool(self.signum)

    def ask_to_stop(self, signum: int) -> None:
        """From a signal handler."""
        self.signum = signum
        name = signal.Signals(signum).name
        self.note(f"{name}: finishing this step, then saving; once more stops at once")

    # --- after training --------------------------------------------------------------------------

    def closing(self, result: Result, directory: Path) -> None:
        """What came of it."""
        self.pause()
        if result.stopped:
            return
        rows = [["steps", f"{result.steps:,}"], ["tokens", f"{result.tokens:,}"]]
        if result.loss is not None:
            rows.append(["loss of the last step", f"{result.loss:.4f}"])
        if result.evaluation is not None:
            before = result.evaluation_before
            told = "" if before is None else f" ({before:.4f} at the beginning)"
            rows.append(["held-out loss", f"{result.evaluation:.4f}{told}"])
        if result.failed_saves:
            rows.append(["saves that failed", f"{result.failed_saves:,}"])
            rows.append(["last checkpoint", str(result.checkpoint)])
        if result.model is not None:
            rows.append(["model", str(result.model)])
        Page().table(f"{directory}: done", ["", ""], rows)

    def pause(self) -> None:
        """Leave the moving line as it is, so that something else can be printed."""
        if self._progress is not None:
            progress, self._progress = self._progress, None
            progress.stop()

    def _show(self, text: str, done: int, total: int, *, edge: bool) -> None:
        """Move the line; where there is no terminal, tell at the edges and every few seconds."""
        if not self._console.is_terminal:
            if edge or time.monotonic() - self._shown_at_s > PLAIN_INTERVAL_S:
                self._shown_at_s = time.monotonic()
                self.note(text)
            return
        if self._progress is None:
            columns = BarColumn(bar_width=20), TextColumn("{task.description}", markup=False)
            self._progress = Progress(*columns, console=self._console)
            self._progress.start()
            self._progress.add_task(text, total=total)
        task = self._progress.task_ids[0]
        self._progress.update(task, description=text, completed=done, total=total)


def format_step(record: Mapping[str, Any]) -> str:
    """The line of a step."""
    num_steps = record["num_steps"]
    skipped = "  skipped: gradients are not finite" if record["skipped"] else ""
    return (
        f"step {record['step']:>{len(str(num_steps))}}/{num_steps}  loss {record['loss']:.4f}  "
        f"lr {record['lr']:.2e}  {record['tokens_per_s']:,.0f} tokens/s  "
        f"{format_stalls(record['stall_s'], record['step_s'])}  "
        f"left {format_duration(record['left_s'])}{skipped}"
    )


def format_stalls(stall_s: Mapping[str, float], step_s: float) -> str:
    """The share of a step that was spent waiting, by cause, largest first."""
    shares = {name: seconds / step_s for name, seconds in stall_s.items() if step_s > 0}
    shown = sorted(((s, name) for name, s in shares.items() if s >= 0.005), reverse=True)
    parts = [f"{_STALLS.get(name, name)} {share:.0%}" for share, name in shown]
    return "stall " + (", ".join(parts) or "none")

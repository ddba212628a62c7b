"""What the examples show: progress, a live line per step, a closing table. Knows no training.

On a terminal the live line is redrawn in place; elsewhere it is a plain line, for the first and
the last step and at most one every few seconds between them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from infinity.sizes import format_duration, format_size

PLAIN_INTERVAL_S = 4.0
_STALL_NAMES = {"disk_read": "read", "slot": "slots", "gradient": "gradients"}


@dataclass(frozen=True)
class StepLine:
    """The facts of one step that a reader wants to see while waiting."""

    step: int
    num_steps: int
    loss: float  # bits per byte
    tokens_per_s: float
    wall_s: float
    stall_s: Mapping[str, float]  # per direction
    eta_s: float
    skipped: bool = False


def format_stalls(stall_s: Mapping[str, float], wall_s: float) -> str:
    """Return the share of a step that was spent waiting, by direction, largest first."""
    shares = {name: seconds / wall_s for name, seconds in stall_s.items() if wall_s > 0}
    shown = sorted(
        ((share, name) for name, share in shares.items() if share >= 0.005), reverse=True
    )
    parts = [f"{_STALL_NAMES.get(name, name)} {share:.0%}" for share, name in shown]
    return "stall " + (", ".join(parts) if parts else "none")


def format_step(line: StepLine) -> str:
    """Return the live line."""
    width = len(str(line.num_steps))
    skipped = "  skipped: gradient not finite" if line.skipped else ""
    return (
        f"step {line.step:>{width}}/{line.num_steps}  left {format_duration(line.eta_s)}{skipped}"
        f"  {line.loss:6.3f} bits/byte  {line.tokens_per_s:7.1f} tokens/s"
        f"  {format_stalls(line.stall_s, line.wall_s)}"
    )


class Screen:
    """Owns the terminal: stdout, or stderr where stdout is kept for one JSON object."""

    def __init__(self, json_only: bool = False) -> None:
        self._console = Console(
            stderr=json_only, highlight=False, soft_wrap=True, file=None, markup=False
        )
        self._live: Live | None = None
        self._shown_at_s = 0.0
        self._started_at_s = 0.0

    def say(self, text: str = "") -> None:
        """Print plain text."""
        self.end_live()
        self._console.print(text)

    def progress(self, done_bytes: int, total_bytes: int, what: str) -> None:
        """Show how far a long first write is; the engine calls this."""
        now = time.monotonic()
        if not self._started_at_s:
            self._started_at_s = now
        finished = done_bytes >= total_bytes
        if self._console.is_terminal or finished or now - self._shown_at_s > PLAIN_INTERVAL_S:
            share = done_bytes / total_bytes if total_bytes else 1.0
            took = f" in {format_duration(now - self._started_at_s)}" if finished else ""
            text = f"{what}: {format_size(done_bytes)} of {format_size(total_bytes)}"
            self._show(f"{text} ({share:.0%}){took}")
        if finished:
            self.end_live()
            self._started_at_s = 0.0

    def step(self, line: StepLine) -> None:
        """Show one step."""
        is_edge = line.step in (1, line.num_steps)
        due = time.monotonic() - self._shown_at_s > PLAIN_INTERVAL_S
        if self._console.is_terminal or is_edge or due:
            self._show(format_step(line))
        if line.step == line.num_steps:
            self.end_live()

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table; the first column names the row."""
        self.end_live()
        table = Table(title=title, title_justify="left", title_style="bold")
        for index, column in enumerate(columns):
            table.add_column(column, justify="left" if index == 0 else "right")
        for row in rows:
            table.add_row(*row)
        self._console.print()
        if self._console.is_terminal:
            self._console.print(table)
        else:
            # No width is known: never cut a number off.
            wide = Console(file=self._console.file, width=140, highlight=False, markup=False)
            wide.print(table)

    def end_live(self) -> None:
        """Leave the live line as it is and go on below it; safe to call at any time."""
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()

    def _show(self, text: str) -> None:
        self._shown_at_s = time.monotonic()
        if not self._console.is_terminal:
            self._console.print(text)
            return
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)


def fail(message: str) -> None:
    """Tell an error on stderr, as one block of plain text."""
    print(message, file=sys.stderr, flush=True)


def closing_rows(result: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows (what, measured, against, verdict) of the example's closing table."""
    held_out = result["held_out_bits_per_byte"]
    rows = [
        [
            "held-out bits per byte",
            f"{held_out['last']:.3f}",
            f"{held_out['first']:.3f} before training",
            "fell" if held_out["last"] < held_out["first"] else "did not fall",
        ]
    ]
    peak, budget = result["peak_rss_bytes"], result["budget_host_bytes"]
    if peak is not None:
        against = f"budget {format_size(budget)}" if budget else "no budget"
        verdict = "" if not budget else ("within" if peak <= budget else "ABOVE")
        rows.append(["peak RSS of this process", format_size(peak), against, verdict])
        state = result["state_bytes"]
        rows.append(["  the state it trained", format_size(state), "12 bytes a parameter", ""])
    for direction, name in (
        ("disk_read", "bytes read per step"),
        ("disk_write", "bytes written per step"),
    ):
        moved, predicted = (
            result["moved_bytes"].get(direction),
            result["predicted_bytes"][direction],
        )
        if moved is not None:
            verdict = "exact" if moved == predicted else f"{_percent(moved, predicted)}"
            against = f"predicted {format_size(predicted)}"
            rows.append([name, format_size(moved), against, verdict])
    plain = result.get("plain_torch")
    if result["step_s"] is not None:
        rows.append(["time per step", format_duration(result["step_s"]), "", ""])
    if plain:
        against = f"plain PyTorch in RAM {format_duration(plain['step_s'])}"
        turns = f"  beside plain PyTorch, middle of {plain['turns']} turns"
        ours, ratio = format_duration(plain["our_step_s"]), f"{plain['ratio']:.2f} x"
        rows.append([turns, ours, against, ratio])
        peak_text = format_size(plain["peak_rss_bytes"]) if plain["peak_rss_bytes"] else "unknown"
        rows.append(["  plain PyTorch's peak RSS", peak_text, "", ""])
        difference = f"{plain['largest_loss_difference']:.4f}"
        against = f"bits per byte, over {plain['num_steps']} steps"
        rows.append(["largest difference of loss to it", difference, against, ""])
    return rows


def _percent(moved: int, predicted: int) -> str:
    return f"{moved / predicted - 1:+.1%}" if predicted else "not predicted"

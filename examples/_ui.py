"""Output of the demo: a line per step and pages of results, independent of training."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinity.cli.terminal import Page, ProgressLine
from infinity.common.sizes import format_duration, format_size

INTERVAL_S = 2.0
_STALL_NAMES = {"disk_read": "read", "slot": "slots", "gradient": "gradients"}


@dataclass(frozen=True)
class StepLine:
    """Facts of one step."""

    step: int
    num_steps: int
    loss: float  # bits per byte
    tokens_per_s: float
    wall_s: float
    stall_s: Mapping[str, float]  # per direction
    eta_s: float
    skipped: bool = False


def format_stall(stall_s: Mapping[str, float], wall_s: float) -> str:
    """Return the longest of a step's waits and its share of the step."""
    name = max(stall_s, key=lambda name: stall_s[name], default="")
    share = stall_s[name] / wall_s if name and wall_s > 0 else 0.0
    return f"stall {_STALL_NAMES.get(name, name)} {share:.0%}" if share >= 0.005 else "stall none"


def format_step(line: StepLine) -> str:
    """Return the line of one step; fits 80 columns."""
    width = len(str(line.num_steps))
    last = format_stall(line.stall_s, line.wall_s)
    return (
        f"step {line.step:>{width}}/{line.num_steps}  {line.loss:.3f} bits/byte"
        f"  {line.tokens_per_s:4.0f} tokens/s  left {format_duration(line.eta_s)}"
        f"  {'skipped: gradient not finite' if line.skipped else last}"
    )


class Screen(Page):
    """The demo's output: text on stdout, progress of long writes on stderr."""

    def __init__(self) -> None:
        super().__init__()
        self._line = ProgressLine()
        self._shown_at_s = 0.0

    def progress(self, done_bytes: int, total_bytes: int, what: str) -> None:
        """Show the progress of the first write; called by the engine."""
        self._line.progress(done_bytes, total_bytes, what)

    def end_progress(self) -> None:
        """Leave the progress line; safe to call at any time."""
        self._line.pause()

    def step(self, line: StepLine) -> None:
        """Show one step: the first, the last, and at most one every `INTERVAL_S` between them."""
        now = time.monotonic()
        if line.step in (1, line.num_steps) or now - self._shown_at_s > INTERVAL_S:
            self._shown_at_s = now
            self.say(format_step(line))

    def page(self, title: str, entries: Mapping[str, str]) -> None:
        """Print a title and below it one labelled text per entry."""
        self.say(f"\n{title}")
        for label, text in entries.items():
            self.entry(f"  {label}", text)


def answer(result: Mapping[str, Any]) -> dict[str, str]:
    """Return the results of training as labels and texts."""
    number = result["num_parameters"]
    losses, held_out = result["loss_bits_per_byte"], result["held_out_bits_per_byte"]
    peak, budget = result["peak_rss_bytes"], result["budget_host_bytes"]
    entries = {}
    if peak is not None:
        limit = "no budget"
        if budget:
            limit = f"budget {format_size(budget)}: {'kept' if peak <= budget else 'EXCEEDED'}"
        entries["peak RAM"] = f"{format_size(peak)}, measured, all of this process ({limit})"
    needs = result["plain_bytes_per_parameter"]
    entries["plain"] = (
        f"PyTorch needs {format_size(needs * number)} of RAM for the same model, and activations"
        f" (derived: {needs} bytes a parameter)"
    )
    entries["on disk"] = f"{format_size(sum(result['disk_parts'].values()))}: " + ", ".join(
        f"{name} {format_size(size)}" for name, size in result["disk_parts"].items()
    )
    entries["loss"] = (
        f"{losses[0]:.3f} -> {losses[-1]:.3f} bits/byte in {len(losses)} steps; on held-out text"
        f" {held_out['first']:.3f} -> {held_out['last']:.3f}"
    )
    step_s = result["step_s"]
    entries["step"] = (
        f"{format_duration(step_s)} (median), {result['tokens_per_step'] / step_s:.0f} tokens/s"
    )
    moved = [
        f"{name} {format_size(result['moved_bytes'][direction])}"
        f" ({_against(result['moved_bytes'][direction], result['predicted_bytes'][direction])})"
        for direction, name in (("disk_read", "read"), ("disk_write", "written"))
        if direction in result["moved_bytes"]
    ]
    if moved:
        entries["disk"] = f"{', '.join(moved)} a step"
    return entries


def comparison(plain: Mapping[str, Any]) -> dict[str, str]:
    """Return the comparison with plain PyTorch as labels and texts."""
    entries = {
        "step": f"{format_duration(plain['our_step_s'])}, plain PyTorch"
        f" {format_duration(plain['step_s'])}: {plain['ratio']:.2f} x (median of"
        f" {plain['turns']} turns)"
    }
    ours, other = plain["our_peak_rss_bytes"], plain["peak_rss_bytes"]
    if ours and other:
        entries["peak RAM"] = (
            f"{format_size(ours)}, plain PyTorch {format_size(other)}: {ours / other:.2f} x"
            " (both measured)"
        )
    difference = plain["largest_loss_difference"]
    found = f"differ by {difference:.1e} bits/byte at most" if difference else "equal, bit for bit"
    entries["losses"] = f"of the first {plain['num_steps']} steps: {found}"
    return entries


def seconds(stages: Mapping[str, float], setup: tuple[str, ...]) -> str:
    """Return the durations of a run's stages, with the set-up stages summed and itemized."""
    each = ", ".join(f"{name} {format_duration(stages[name])}" for name in setup)
    others = [f"{n} {format_duration(s)}" for n, s in stages.items() if n not in setup]
    total = f"set-up {format_duration(sum(stages[name] for name in setup))} ({each})"
    return f"{', '.join([total, *others])}; together {format_duration(sum(stages.values()))}"


def next_steps() -> str:
    """Return suggestions of next commands."""
    programs = os.path.relpath(Path(sys.executable).parent)
    python, infinity = (os.path.join(programs, name) for name in ("python", "infinity"))
    return f"""
What next
  A larger model: whether it fits, how fast it trains, what is slowest
    {infinity} plan 8b --device 24GiB --host 64GiB --disk 1TiB
  Your own loop: initialize, engine.backward and engine.step (README.md, Quickstart)
    {python} examples/quickstart.py
  No code: one file says what to train
    {python} -m pip install 'torch-infinity[hf]'
    {infinity} init && {infinity} train train.yaml"""


def _against(moved: int, predicted: int) -> str:
    if moved == predicted:
        return "as planned"
    return f"{moved / predicted - 1:+.1%} of the plan" if predicted else "not planned"

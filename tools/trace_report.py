#!/usr/bin/env python3
"""Say what binds in a trace (`trace: path.json`), as `infinity trace`; with --chart, draw it too.

python tools/trace_report.py trace.json [--chart out.svg] [--step N] [--json]

The chart needs matplotlib (pip install matplotlib), which says by its ending what it writes: svg,
png, pdf. ui.perfetto.dev shows the same file with every name and number, and needs nothing.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any

from infinity.cli.main import main
from infinity.trace.reader import Shares, Timeline, read_timeline, verdict
from infinity.trace.recorder import TRACKS

HIDDEN = ("step", "micro_batch")  # lines, not tracks


def draw(timeline: Timeline, path: str, step: int | None) -> None:
    """One row a track, one bar a slice, a line where a step begins; of one step if asked for."""
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    shares = Shares(timeline)
    shown = next((s for s in shares.steps if s.name == f"step {step}"), shares.whole)
    tracks = [track for track in TRACKS if track not in HIDDEN and timeline.of(track)]
    figure, axes = pyplot.subplots(figsize=(16, 1.5 + 0.4 * len(tracks)), layout="constrained")
    for row, track in enumerate(tracks):
        spans = [(s.begin, s.seconds) for s in timeline.of(track)]
        colour = "black" if track == "stall" else f"C{row}"
        axes.broken_barh(spans, (row - 0.4, 0.8), color=colour, linewidth=0, rasterized=True)
    for one in shares.steps:
        axes.axvline(one.begin, color="grey", linewidth=0.5)
    axes.set_yticks(range(len(tracks)), [TRACKS[track] for track in tracks])
    axes.set(xlabel="seconds", title=verdict(shown) if shown else timeline.path)
    axes.invert_yaxis()
    if shown is not None:
        axes.set_xlim(shown.begin, shown.end)
    figure.savefig(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--chart")
    chart, rest = parser.parse_known_args()
    if chart.chart:
        parser.add_argument("file")
        parser.add_argument("--step", type=int)
        given, _ = parser.parse_known_args()
        try:
            draw(read_timeline(given.file), given.chart, given.step)
        except ImportError as error:
            sys.exit(f"error: no chart without matplotlib: {error}\n  try: pip install matplotlib")
    main(["trace", *rest])

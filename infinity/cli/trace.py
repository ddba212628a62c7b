"""`infinity trace`: analysis of a trace file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from infinity.cli.terminal import AsJson, command


def trace(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="The file that `trace:` of a configuration names."),
    ],
    stalls: Annotated[int, typer.Option("--stalls", help="How many stalls to list.", min=0)] = 10,
    as_json: AsJson = False,
) -> None:
    """Analyze a trace of a training run: busy resources, waits, and the bottleneck.

    Open the same file in ui.perfetto.dev to see and zoom into its tracks.
    """
    with command():
        from infinity.profiling.trace_reader import read_timeline
        from infinity.profiling.trace_shares import Shares, report_data, report_lines

        data = report_data(Shares(read_timeline(file)), stalls)
        print(json.dumps(data) if as_json else "\n".join(report_lines(data)), flush=True)

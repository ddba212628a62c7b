"""`infinity trace`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infinity.cli.terminal import AsJson, command
from infinity.errors import InfinityError

if TYPE_CHECKING:
    from infinity.profiling.trace_reader import Shares, StepShares


def trace(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="The file that `trace:` of a configuration names."),
    ],
    step: Annotated[
        int | None, typer.Option("--step", help="This step only, by its number in the run.")
    ] = None,
    stalls: Annotated[int, typer.Option("--stalls", help="How many stalls to list.", min=0)] = 10,
    page: Annotated[
        Path | None,
        typer.Option("--page", metavar="FILE", help="Write an HTML page, too."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Analyze a trace of a training run: busy resources, waits, and the bottleneck.

    For example: infinity trace run.json --step 3 --page step3.html; ui.perfetto.dev shows the
    tracks of that file, too. A page needs the extra `report`.
    """
    with command():
        from infinity.profiling.trace_reader import Shares, read_timeline, report_data, report_lines

        shares = Shares(read_timeline(file))
        only = None if step is None else _find(shares, step)
        if page is not None:
            from infinity.train.report.trace import trace_page

            trace_page(shares, only).write(page)
        data = report_data(shares, stalls, only)
        print(json.dumps(data) if as_json else "\n".join(report_lines(data)), flush=True)


def _find(shares: Shares, number: int) -> StepShares:
    found = next((s for s in shares.steps if s.name == f"step {number}"), None)
    if found is None:
        names = f"{shares.steps[0].name} to {shares.steps[-1].name}" if shares.steps else "none"
        raise InfinityError(f"step {number} is not in the trace; it has {names}")
    return found

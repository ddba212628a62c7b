"""`infinity report`: HTML page of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from infinity.cli.terminal import command


def report(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="The run_dir of a run of `infinity train`.")
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Default: report.html in the run's directory."),
    ] = None,
) -> None:
    """Write an HTML page about a run of `infinity train`: its course and how to make it faster.

    The page is one file that fetches nothing. The run may be active, finished or failed. Needs the
    extra `report` (pip install 'torch-infinity[report]').
    """
    with command():
        from infinity.train.report.run import write_run_page

        print(write_run_page(run_dir, out), flush=True)

"""`infinity report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from infinity.cli.terminal import command


def report(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="What run_dir: of `infinity train` named.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE", help="Instead of report.html in the run's directory."
        ),
    ] = None,
) -> None:
    """Write a page to look at: how a run of `infinity train` went, and what would make it faster.

    One file that fetches nothing, also of a run that goes on or has failed. Needs the extra
    `report` (pip install 'torch-infinity[report]').
    """
    with command():
        from infinity.train.report.run import write_run_page

        print(write_run_page(run_dir, out), flush=True)

"""The `infinity` command: `doctor` looks at a machine, `plan` at a run, `bench` measures.

`init` writes a configuration, `train` trains with one, `trace` says what a run waited for,
`checkpoint` looks after saved state.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Annotated

import typer

from infinity import __version__
from infinity.cli.bench import bench
from infinity.cli.checkpoint import checkpoint
from infinity.cli.doctor import doctor
from infinity.cli.ending import say
from infinity.cli.init import init
from infinity.cli.plan import plan
from infinity.cli.trace import trace
from infinity.cli.train import train

app = typer.Typer(
    name="infinity",
    help="Train models larger than the GPU, and larger than RAM, on one machine.",
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(doctor)
app.command()(plan)
app.command()(init)
app.command()(train)
app.command()(trace)
app.command()(bench)
app.add_typer(checkpoint)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"infinity {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", is_eager=True, callback=_show_version),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def main(arguments: list[str] | None = None, name: str = "infinity") -> None:
    """Run the command line and exit; `arguments` default to the process's own."""
    with suppress(AttributeError):  # names of files need not be text: said like on stderr
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        app(arguments, prog_name=name)
    except KeyboardInterrupt:
        # Between commands: nothing is open yet, or nothing is any more.
        say("stopped")
        sys.exit(130)

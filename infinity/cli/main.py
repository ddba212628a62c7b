"""Entry point of the `infinity` command; a verb's module is imported when the verb is used."""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from infinity._version import __version__
from infinity.errors import did_you_mean

VERBS = {  # the module infinity.cli.VERB defines VERB, a function or a Typer of several commands
    "doctor": "Check this machine: its hardware, and whether a run could start.",
    "plan": "Predict whether a run fits, its memory and its speed.",
    "init": "Write a configuration for `infinity train`, with comments.",
    "train": "Train a causal language model of transformers, new or pretrained.",
    "run": "Run an unchanged script that was written for DeepSpeed, on one or more GPUs.",
    "generate": "Continue a prompt with a model that was trained, from a run or a directory.",
    "report": "Write an HTML page of a run of `infinity train`.",
    "trace": "Analyze a trace: busy resources, waits, and the bottleneck.",
    "bench": "Measure drives, and the rates that plans use.",
    "checkpoint": "Inspect, verify, export and prune checkpoints.",
}


class Verbs(TyperGroup):
    """Command group of `VERBS`, which imports the module of a verb on use."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the verbs in the order of `VERBS`."""
        return list(VERBS)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Load the verb's command; fail with similar names for an unknown verb."""
        if args and args[0] not in VERBS:
            hint = did_you_mean(args[0], VERBS) or f"there are {', '.join(VERBS)}"
            ctx.fail(f"No such command {args[0]!r}; {hint}".rstrip())
        name, command, remaining = super().resolve_command(ctx, args)
        return name, command and load(str(name)), remaining

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a stub with name and help, for completion without an import; None if unknown."""
        help = VERBS.get(cmd_name)
        return help and TyperCommand(cmd_name, help=help)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands from `VERBS`, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


def load(verb: str) -> Any:
    """Import a verb's module and return its command."""
    module = import_module(f"infinity.cli.{verb}")
    target = getattr(module, verb)
    if isinstance(target, typer.Typer):
        return typer.main.get_group(target)
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command(verb, context_settings=getattr(module, "SETTINGS", None))(target)
    return typer.main.get_command(single)


app = typer.Typer(
    cls=Verbs,
    name="infinity",
    help="Train models larger than the GPU, and larger than RAM, on one machine.",
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
    """Run the command line and exit; `arguments` default to `sys.argv[1:]`."""
    with suppress(AttributeError):  # file names need not be UTF-8; stderr escapes them, too
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        app(arguments, prog_name=name)
    except KeyboardInterrupt:
        # Outside `command()`, so nothing is open.
        print("stopped", file=sys.stderr)
        sys.exit(130)

"""`infinity bench disk`, which is also `tools/bench_swap.py`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from infinity.cli.ending import command, stdout_is_ours

bench = typer.Typer(
    name="bench",
    help="Measure this machine.",
    invoke_without_command=True,
    rich_markup_mode=None,
)


@bench.callback()
def _bench(context: typer.Context) -> None:
    # Keeps `disk` a command of its own while it is the only one.
    if context.invoked_subcommand is None:
        print(context.get_help())


@bench.command()
def disk(
    path: Annotated[
        list[Path],
        typer.Option("--path", metavar="DIR", help="On the drive to measure; may be repeated."),
    ],
    gib: Annotated[
        float, typer.Option("--gib", help="Size of the test file in each path, in GiB.", min=0.001)
    ] = 4.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on stdout, and nothing else there.")
    ] = False,
    compare: Annotated[
        str,
        typer.Option(
            "--compare",
            metavar="NAMES",
            help="More contenders, with commas: fio, plain, deepspeed, buffered, aiofiles; or all.",
        ),
    ] = "",
    rounds: Annotated[
        int, typer.Option("--rounds", help="Rounds in which the contenders take turns.", min=1)
    ] = 11,
    sample_s: Annotated[
        float, typer.Option("--sample-s", help="About how long one sample takes.", min=0.01, max=60)
    ] = 1.0,
    chunk: Annotated[
        str, typer.Option("--chunk", metavar="SIZE", help="What a sweep moves at once.")
    ] = "16MiB",
    faults: Annotated[
        int | None,
        typer.Option(
            "--faults",
            metavar="SEED",
            help="Measure nothing; see that injected faults never become wrong bytes.",
            min=0,
        ),
    ] = None,
) -> None:
    """Measure how fast training state streams to and from drives, and recommend settings.

    Probes each path, tries block sizes, depths and back ends, picks the strongest of fio, plain
    O_DIRECT threads and the peer's handle as the reference, and then measures ours beside it in
    interleaved rounds. Takes about five minutes; leaves no file behind.
    """
    with command():
        paths = [part.expanduser() for part in path]
        if faults is not None:
            _faults(paths, faults, as_json)
            return
        from infinity.bench.disk import Options, measure_disk
        from infinity.bench.reference import COMPARABLE
        from infinity.cli.bench_page import show_disk
        from infinity.cli.screen import ProgressLine
        from infinity.sizes import parse_size

        names = [name.strip() for name in compare.split(",") if name.strip()]
        options = Options(
            paths=tuple(paths),
            file_bytes=int(gib * 2**30),
            chunk_bytes=parse_size(chunk),
            num_rounds=rounds,
            sample_s=sample_s,
            compare=COMPARABLE if names == ["all"] else tuple(dict.fromkeys(names)),
        )
        with stdout_is_ours(), ProgressLine() as watcher:
            report = measure_disk(options, watcher, [sys.executable, *sys.orig_argv[1:]])
        if as_json:
            print(json.dumps(report), flush=True)
        else:
            show_disk(report)


def _faults(paths: list[Path], seed: int, as_json: bool) -> None:
    from infinity.bench.faults import check_faults
    from infinity.cli.bench_page import show_faults
    from infinity.cli.screen import ProgressLine

    with ProgressLine() as watcher:
        report = check_faults(paths, seed, watcher)
    if as_json:
        print(json.dumps(report), flush=True)
    else:
        show_faults(report)
    if not report["ok"]:
        raise typer.Exit(1)

"""Measure the bandwidth of drives for training state, and how close infinity comes to it.

    python tools/bench_swap.py --path DIR [--path DIR2] [--gib 4] [--json] [--compare all]
    python tools/bench_swap.py --path DIR --faults 7

The first command measures; the second injects faults and checks that none leads to wrong bytes.
`infinity bench DIR` is a shorter benchmark with the same base.
See docs/benchmarks for results and their commands.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from infinity.cli.doctor import machine_facts
from infinity.cli.terminal import ProgressLine, command, library_stdout_to_stderr
from infinity.common.sizes import parse_size
from infinity.errors import ConfigError
from infinity.storage.drives import probe_path, shared_drives
from infinity.swap_benchmark.contenders import Contender, EngineContender
from infinity.swap_benchmark.load import MODES, Mode, Testbed, region_bytes_of
from infinity.swap_benchmark.rounds import (
    DEFAULTS,
    make_loads,
    measure_drives_alone,
    take_turns,
    usable_backends,
)
from swap.faults import check_faults
from swap.report import Findings, assemble, show_disk, show_faults
from swap.rounds import COMPARABLE, calibrate, compared, gather, tune


@dataclass(frozen=True)
class Options:
    """Options of the benchmark. Sizes in bytes."""

    paths: tuple[Path, ...]
    file_bytes: int = 4 * 2**30
    """Per path; half of it is read, the other half written."""
    chunk_bytes: int = 16 * 2**20
    """Transfer size of an optimizer pass; 8 to 64 MiB are usual."""
    num_rounds: int = 11
    sample_s: float = 1.0
    """Duration of a sample in the paired rounds; samples of calibration take a third."""
    compare: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise `ConfigError` for invalid options."""
        unknown = [name for name in self.compare if name not in COMPARABLE]
        if unknown:
            remedy = f"--compare {','.join(COMPARABLE)}"
            raise ConfigError(f"--compare does not know {', '.join(unknown)}", remedy=remedy)
        if not self.paths:
            raise ConfigError("no path was given", remedy="--path DIR on the drive to measure")
        if self.num_rounds < 1 or not 0 < self.sample_s <= 60:
            raise ConfigError("--rounds is at least 1 and --sample-s between 0 and 60 seconds")
        if self.chunk_bytes < 2**20 or self.chunk_bytes % 2**20:
            raise ConfigError(f"a chunk is whole MiB, not {self.chunk_bytes} bytes")

    def as_dict(self) -> dict[str, Any]:
        return {
            "paths": [str(path) for path in self.paths],
            "file_bytes": self.file_bytes,
            "chunk_bytes": self.chunk_bytes,
            "rounds": self.num_rounds,
            "sample_s": self.sample_s,
            "compare": list(self.compare),
        }


def measure_disk(options: Options, line: ProgressLine, command: Sequence[str]) -> dict[str, Any]:
    """Run the full benchmark and return its JSON-serializable report; see `assemble`.

    Raises `ConfigError` for invalid options, `MachineError`, `DoesNotFitError` or `TransferError`
    for failures of the machine. Test files are always removed.
    """
    options.check()
    region_bytes = region_bytes_of(options.file_bytes, options.chunk_bytes)
    drives = [probe_path(path) for path in options.paths]
    before = machine_facts()
    with Testbed(options.paths, region_bytes, options.chunk_bytes) as testbed:
        testbed.prepare(lambda done, total: line.progress(done, total, "writing test files"))
        backends = usable_backends([drive.backends for drive in drives])
        findings = _Measurement(options, testbed, line).run(backends)
    notes = shared_drives(options.paths) if len(drives) > 1 else []
    return assemble(
        findings,
        drives=[drive.as_dict() for drive in drives],
        notes=notes + [note for drive in drives for note in drive.notes],
        machine=before | {"load_average_after": os.getloadavg()[0]},
        command=list(command),
        options=options.as_dict(),
    )


class _Measurement:
    def __init__(self, options: Options, testbed: Testbed, line: ProgressLine) -> None:
        self._options = options
        self._testbed = testbed
        self._line = line

    def run(self, backends: Sequence[str]) -> Findings:
        self._line.note("a first look ...")
        target_s = self._options.sample_s
        rates = measure_drives_alone(self._testbed, DEFAULTS[backends[0]], target_s)
        brief = make_loads(self._testbed, rates, target_s / 3)
        self._line.note("trying settings ...")
        tuned = tune(self._testbed, backends, brief)
        field = gather(self._testbed, self._options.compare, list(tuned.settings.values()))
        ours: list[EngineContender] = []
        try:
            self._line.note("choosing the reference ...")
            calibration = calibrate(field, brief)
            names = {mode: calibration.best(mode, field.families) for mode in MODES}
            for backend in backends:
                ours.append(EngineContender(self._testbed, tuned.settings[backend]))
            contenders: dict[Mode, list[Contender]] = {}
            for mode in MODES:
                others = compared(field, calibration, mode, self._options.compare)
                everyone = [*ours, field.contenders[names[mode]], *others]
                contenders[mode] = list(
                    {contender.name: contender for contender in everyone}.values()
                )
            loads = make_loads(self._testbed, rates, target_s)
            total = self._options.num_rounds * sum(map(len, contenders.values()))
            self._line.note(f"measuring, {total} samples ...")
            paired = take_turns(
                contenders, loads, self._options.num_rounds, left_out=field.left_out
            )
        finally:
            for contender in ours:
                contender.close()
            field.close()
        return Findings(
            drive_rates=rates,
            tuned=tuned,
            calibration=calibration,
            reference_names=names,
            ours={contender.family: contender.name for contender in ours},
            families=field.families,
            paired=paired,
            left_out=field.left_out,
            sample_bytes={mode: load.total_bytes for mode, load in loads.items()},
        )


app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def main(
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
        str, typer.Option("--chunk", metavar="SIZE", help="What an optimizer pass moves at once.")
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

    Probes each path, tries block sizes, depths and back ends, picks the fastest of fio, plain
    O_DIRECT threads and DeepSpeed's handle as the reference, and then compares infinity with it in
    interleaved rounds. Takes about five minutes; leaves no file behind.
    """
    with command():
        paths = [part.expanduser() for part in path]
        if faults is not None:
            _faults(paths, faults, as_json)
            return
        names = [name.strip() for name in compare.split(",") if name.strip()]
        options = Options(
            paths=tuple(paths),
            file_bytes=int(gib * 2**30),
            chunk_bytes=parse_size(chunk),
            num_rounds=rounds,
            sample_s=sample_s,
            compare=COMPARABLE if names == ["all"] else tuple(dict.fromkeys(names)),
        )
        with library_stdout_to_stderr(), ProgressLine() as line:
            report = measure_disk(options, line, [sys.executable, *sys.orig_argv[1:]])
        if as_json:
            print(json.dumps(report), flush=True)
        else:
            show_disk(report)


def _faults(paths: list[Path], seed: int, as_json: bool) -> None:
    report = check_faults(paths, seed)
    if as_json:
        print(json.dumps(report), flush=True)
    else:
        show_faults(report)
    if not report["ok"]:
        raise typer.Exit(1)

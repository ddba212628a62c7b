"""`infinity bench`: drive benchmark, and calibration of the rates that plans and runs use."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from infinity.cli import doctor
from infinity.cli.terminal import (
    AsJson,
    Drives,
    Page,
    ProgressLine,
    command,
    library_stdout_to_stderr,
)
from infinity.common.sizes import format_duration, format_rate, format_size
from infinity.storage.drives import Drive, probe_path
from infinity.swap_benchmark.comparison import CHUNK_BYTES, Comparison, Pairs, compare
from infinity.swap_benchmark.contenders import Sample
from infinity.swap_benchmark.load import Testbed, region_bytes_of
from infinity.swap_benchmark.rounds import DEFAULTS, median_cpu, median_rate, usable_backends

_8B = 8.03e9  # parameters of Llama 3.1 8B
# Verdicts by minimum mixed rate (concurrent reads and writes), in bytes per second.
_VERDICTS = (
    (5e9, "fast for this"),
    (2e9, "fair for this, PCIe 4 drives reach 5 to 7 GB/s"),
    (0.0, "slow for this, PCIe 4 drives reach 5 to 7 GB/s"),
)


@dataclass(frozen=True)
class _SwapResult:
    """Result of the drive benchmark; `notes` lists properties that cost speed."""

    drives: list[Drive]
    comparison: Comparison
    notes: list[str]
    gib: float

    @property
    def verdict(self) -> str:
        return verdict(self.comparison.rates(), self.drives)

    def as_dict(self) -> dict[str, Any]:
        comparison = self.comparison
        return {
            "verdict": self.verdict,
            "step_8b_s": step_seconds(comparison.rates()["mixed"]),
            "modes": {mode: _pairs_dict(pairs) for mode, pairs in comparison.modes.items()},
            "settings": vars(comparison.settings),
            "notes": self.notes,
            "other_programs": comparison.load,
            "file_gib": self.gib,
            "drives": [drive.as_dict() for drive in self.drives],
            "machine": doctor.machine_facts(),
        }


def bench(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(metavar="PATH", help="Directories on the drives to measure, together."),
    ] = None,
    path: Drives = None,
    gib: Annotated[
        float, typer.Option("--gib", help="Size of the test file in each PATH, in GiB.", min=0.001)
    ] = 2.0,
    rounds: Annotated[
        int, typer.Option("--rounds", help="Rounds of paired samples; more are steadier.", min=1)
    ] = 5,
    verbose: Annotated[
        bool,
        typer.Option("-v", "--verbose", help="Also ranges, settings, drives and all rates."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Measure whether drives are fast enough for training. Without PATH, only this machine.

    Reads and writes a test file in each PATH with the defaults of `io`, in rounds that alternate
    with plain O_DIRECT threads, checks the bytes and removes the file; takes half a minute.

    Also measures and caches the rates of disk, copies, optimizer updates and matrix products, which
    `infinity plan` and runs with these paths and the defaults of `io` use. For more contenders and
    a search for better settings see tools/bench_swap.py in the source repository.
    """
    with command():
        directories = [part.expanduser() for part in [*(paths or []), *(path or [])]]
        quiet = not sys.stderr.isatty()
        with library_stdout_to_stderr(), ProgressLine(quiet=quiet, transient=True) as line:
            swap = _measure(directories, gib, rounds, line) if directories else None
            line.show("measuring the rates for plans", 0, 1, edge=True)
            machine = doctor.describe(directories, True)
        rates = machine.as_dict()["rates"]
        if as_json:
            measured = {} if swap is None else swap.as_dict()
            print(
                json.dumps(measured | {"rates": rates, "origin": machine.rates_origin}), flush=True
            )
            return
        page = Page()
        if swap is not None:
            _show(page, swap, verbose)
        if swap is None or verbose:
            page.say("\n".join(doctor.rate_lines(rates, machine.rates_origin)))
        else:
            page.say(f"rates for plans: {machine.rates_origin}; all numbers: -v")


def _measure(paths: Sequence[Path], gib: float, num_rounds: int, line: ProgressLine) -> _SwapResult:
    """Compare infinity's I/O engine with plain threads on test files, and remove the files."""
    region_bytes = region_bytes_of(int(gib * 2**30), CHUNK_BYTES)
    drives = [probe_path(path) for path in paths]
    (backend, *_) = usable_backends([drive.backends for drive in drives])
    with Testbed(paths, region_bytes, CHUNK_BYTES) as testbed:
        testbed.prepare(lambda done, total: line.progress(done, total, "writing test files"))

        def progress(done: int, total: int) -> None:
            line.show(f"measuring: sample {done} of {total}", done, total, edge=False)

        comparison = compare(testbed, DEFAULTS[backend], num_rounds, progress)
        line.pause()
    notes = doctor.drive_notes(paths, [drive.as_dict() for drive in drives])
    if comparison.load:
        notes.append(
            f"{comparison.load} while this was measured: the drive may be faster, and the ratio "
            "higher; end them and measure again"
        )
    return _SwapResult(drives, comparison, notes, gib)


def step_seconds(mixed: float) -> float:
    """Return the seconds that reading and writing the AdamW state of an 8B model once takes.

    Args:
        mixed: Bytes per second of concurrent reads and writes, sum of both directions.
    """
    return 2 * doctor.STATE_BYTES * _8B / mixed


def verdict(rates: Mapping[Any, float], drives: Sequence[Drive]) -> str:
    """Return one sentence: rates, a rating, and the resulting time of an optimizer step.

    Args:
        rates: Bytes per second by mode (read, write and mixed), of all drives together.
        drives: Properties of the drives.
    """
    if any(drive.in_ram for drive in drives):
        rating = "RAM and no drive, see below"
    elif not all(drive.direct for drive in drives):
        rating = "through the page cache, the drive may be slower, see below"
    else:
        rating = next(text for min_rate, text in _VERDICTS if rates["mixed"] >= min_rate)
    prefix = f"{len(drives)} paths together: " if len(drives) > 1 else ""
    rates_text = ", ".join(
        f"{format_rate(rates[mode])} {mode}" for mode in ("read", "write", "mixed")
    )
    return (
        f"{prefix}{rates_text}: {rating}; an AdamW step of an 8B model with its state on disk "
        f"takes at least {format_duration(step_seconds(rates['mixed']))}"
    )


def _show(page: Page, swap: _SwapResult, verbose: bool) -> None:
    comparison = swap.comparison
    page.say(swap.verdict)
    plain = "plain O_DIRECT" if all(drive.direct for drive in swap.drives) else "plain buffered"
    rows = []
    for mode, pairs in comparison.modes.items():
        ratio = f"{pairs.ratio:.2f}"
        if verbose:
            ratio += f" ({min(pairs.ratios):.2f}-{max(pairs.ratios):.2f})"
        rows.append([mode, _cell(pairs.ours, verbose), _cell(pairs.plain, verbose), ratio])
    unit = ", GB/s" if verbose else ""
    page.table("", ["", f"infinity{unit}", f"{plain}{unit}", "ratio"], rows)
    for note in swap.notes:
        page.say(f"note: {note}")
    if verbose:
        _show_details(page, swap)


def _show_details(page: Page, swap: _SwapResult) -> None:
    comparison = swap.comparison
    num_rounds = len(comparison.modes["read"].ours)
    page.entry(
        "rounds",
        f"{num_rounds}, medians (range); the order of the two rotates; mixed counts both "
        f"directions; {swap.gib:g} GiB of test file in each path",
    )
    page.entry("infinity", f"{comparison.settings.name}, the defaults of `io`")
    for mode, pairs in comparison.modes.items():
        tried = ", ".join(f"{name} {format_rate(rate)}" for name, rate in pairs.tried.items())
        page.entry(f"plain {mode}", f"the first of these, tried once: {tried}")
    cpu = [
        f"{mode} {median_cpu(pairs.ours):.2f} and {median_cpu(pairs.plain):.2f}"
        for mode, pairs in comparison.modes.items()
    ]
    page.entry("CPU s/GiB", f"infinity and plain: {', '.join(cpu)}")
    for drive in swap.drives:
        access = "O_DIRECT" if drive.direct else f"buffered, {drive.direct_reason}"
        device = " ".join(part for part in (drive.device, drive.model) if part)
        page.entry(
            "path",
            f"{drive.path}: {drive.file_system} on {device}, {access}, "
            f"{format_size(drive.free_bytes)} of {format_size(drive.total_bytes)} free",
        )


def _cell(samples: Sequence[Sample], verbose: bool) -> str:
    if not verbose:
        return format_rate(median_rate(samples))
    rates = [sample.rate / 1e9 for sample in samples]
    return f"{median_rate(samples) / 1e9:.3g} ({min(rates):.3g}-{max(rates):.3g})"


def _pairs_dict(pairs: Pairs) -> dict[str, Any]:
    engine, plain = (
        {
            "bytes_per_s": median_rate(samples),
            "cpu_s_per_gib": median_cpu(samples),
            "samples": [vars(sample) for sample in samples],
        }
        for samples in (pairs.ours, pairs.plain)
    )
    return {
        "infinity": engine,
        "plain": plain | {"name": next(iter(pairs.tried))},
        "ratio": pairs.ratio,
        "ratios": pairs.ratios,
        "tried": pairs.tried,
    }

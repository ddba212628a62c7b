"""Tests of the `infinity bench` command: verdict, rows, wrong data and cleanup."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from infinity.cli import doctor
from infinity.cli.bench import step_seconds, verdict
from infinity.cli.main import app
from infinity.plan.load import ProcessorTimes
from infinity.profiling import calibration, processor_rates
from infinity.storage.device import CpuDevice
from infinity.storage.drives import Drive, probe_path
from infinity.swap_benchmark import comparison
from infinity.swap_benchmark.comparison import Pairs
from infinity.swap_benchmark.contenders import EngineContender, PlainThreads, Sample
from infinity.swap_benchmark.load import MODES, Load

SMALL = ("--gib", "0.0625", "--rounds", "2")


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten samples to milliseconds; ignore the load of other programs."""
    monkeypatch.setattr(comparison, "SAMPLE_S", 0.01)
    monkeypatch.setattr(comparison, "TRIAL_S", 0.01)
    monkeypatch.setattr(comparison.ProcessorTimes, "now", lambda: None)


@pytest.fixture
def quick_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infinity.storage.disk_rates.SPAN_BYTES", 16 << 20)
    for name in ("_LEAST_CHUNKS", "_MOST_CHUNKS"):
        monkeypatch.setattr(processor_rates, name, 1)
    monkeypatch.setattr(processor_rates, "_MATRIX_SIZES", (64,))
    monkeypatch.setattr(processor_rates, "_WIDTH", {True: 64, False: 64})
    monkeypatch.setattr(processor_rates, "_NUM_LOGITS", 512)


@pytest.fixture
def cached_or_nominal_rates(quick_rates: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure rates of processors only, never of disks."""
    describe = doctor.describe
    monkeypatch.setattr(doctor, "describe", lambda paths, refresh: describe([], refresh=False))


@pytest.fixture
def drive(tmp_path: Path) -> Path:
    path = tmp_path / "drive"
    path.mkdir()
    return path


def some_drive(path: Path, **changes: Any) -> Drive:
    good = {"file_system": "ext4", "direct": True, "notes": [], "free_bytes": 50}
    return replace(probe_path(path), **(good | {"total_bytes": 100} | changes))


def test_verdict_follows_from_rates(drive: Path) -> None:
    """A model of 8.03e9 parameters reads and writes 12 bytes of state each per step."""

    def verdict_of(read: float, write: float, mixed: float, *drives: Drive) -> str:
        return verdict({"read": read, "write": write, "mixed": mixed}, drives)

    good = some_drive(drive)
    assert step_seconds(24 * 8.03e9) == pytest.approx(1.0)
    assert verdict_of(1.4e9, 0.6e9, 1.0e9, good) == (
        "1.40 GB/s read, 600.00 MB/s write, 1.00 GB/s mixed: slow for this, PCIe 4 drives reach 5 "
        "to 7 GB/s; an AdamW step of an 8B model with its state on disk takes at least 3 min 13 s"
    )
    assert verdict_of(3e9, 3e9, 3e9, good).endswith("takes at least 1 min 04 s")
    assert " mixed: fair for this, " in verdict_of(3e9, 3e9, 3e9, good)
    assert " mixed: fast for this; " in verdict_of(7e9, 5e9, 6e9, good)
    both = verdict_of(9e9, 9e9, 9e9, good, some_drive(drive, file_system="tmpfs"))
    assert both.startswith("2 paths together: 9.00 GB/s read")
    assert "fast" not in both
    assert "RAM and no drive" in both
    assert "through the page cache" in verdict_of(9e9, 9e9, 9e9, some_drive(drive, direct=False))


def test_notes_name_full_drive_and_missing_backend(drive: Path) -> None:
    backends = {"io_uring": {"ok": False, "reason": "seccomp"}, "threads": {"ok": True}}
    full = some_drive(drive, free_bytes=9, backends=backends).as_dict()
    assert doctor.drive_notes([drive], [full]) == [
        f"{drive}: io_uring does not work: seccomp",
        f"{drive} is 91% full (9 B of 100 B are free): flash drives write slower when nearly full; "
        "free space there",
    ]


def test_ratio_is_the_median_of_paired_rounds() -> None:
    def samples(*rates: int) -> tuple[Sample, ...]:
        return tuple(Sample(1.0, rate, 0.0) for rate in rates)

    pairs = Pairs(samples(1, 2, 4), samples(1, 1, 8), {"plain": 1.0})
    assert pairs.ratios == [1.0, 2.0, 0.5]
    assert pairs.ratio == 1.0, "the ratio of medians would be 2"


@pytest.mark.usefixtures("brief", "quick_rates")
def test_bench_prints_verdict_and_rows_and_keeps_rates(drive: Path) -> None:
    code, out, error = run("bench", str(drive), *SMALL)
    assert code == 0, error
    assert re.match(r"[\d.]+ .B/s read, [\d.]+ .B/s write, [\d.]+ .B/s mixed: ", out)
    rows = re.findall(r"^ (\w+) +([\d.]+ .B/s) +([\d.]+ .B/s) +[\d.]+ *$", out, re.MULTILINE)
    assert [row[0] for row in rows] == list(MODES)
    for mode, rate, _ in rows:
        assert f"{rate} {mode}" in out.splitlines()[0], "the verdict is of our rates"
    assert "rates for plans: measured 2" in out
    for detail in ("io_uring", "threads", "compute", "CPU"):
        assert detail not in out
    assert error == "", "no progress where stderr is no terminal"
    assert calibration.cached_or_nominal_rates([drive], CpuDevice()).nominal == ()
    assert list(drive.iterdir()) == []
    alone = json.loads(run("bench", "--json")[1])
    assert set(alone) == {"rates", "origin"}
    assert "disk_read" not in alone["rates"]


@pytest.mark.usefixtures("brief", "cached_or_nominal_rates")
def test_bench_without_paths_prints_the_rates_of_this_machine() -> None:
    code, out, _ = run("bench")
    assert (code, out.splitlines()[0][:18]) == (0, "rates      measure")
    assert "update: fp32" in out


@pytest.mark.usefixtures("brief", "cached_or_nominal_rates")
def test_bench_verbose_adds_ranges_settings_and_rates(drive: Path) -> None:
    code, out, error = run("bench", str(drive), *SMALL, "-v")
    assert code == 0, error
    assert len(re.findall(r"[\d.]+ \([\d.]+-[\d.]+\) *$", out, re.MULTILINE)) == 3
    for text in ("the defaults of `io`", "plain 1.00 MiB x 8 threads", "CPU s/GiB", "compute: bf1"):
        assert text in out
    assert str(drive) in out


@pytest.mark.usefixtures("brief", "cached_or_nominal_rates")
def test_bench_json_holds_all_numbers(drive: Path) -> None:
    second = drive.parent / "second"
    second.mkdir()
    report = json.loads(run("bench", str(drive), "--path", str(second), *SMALL, "--json")[1])
    assert set(report) == {
        *("verdict", "step_8b_s", "modes", "settings", "notes", "other_programs", "file_gib"),
        *("drives", "machine", "rates", "origin"),
    }
    assert [drive["path"] for drive in report["drives"]] == [str(drive), str(second)]
    assert any("share one drive" in note for note in report["notes"])
    assert report["verdict"].startswith("2 paths together: ")
    assert set(report["modes"]) == set(MODES)
    for found in report["modes"].values():
        assert len(found["ratios"]) == len(found["infinity"]["samples"]) == 2
        assert len(found["tried"]) == len(comparison.PLAIN)
        assert found["plain"]["name"] == max(found["tried"], key=found["tried"].get)
    mixed = report["modes"]["mixed"]["infinity"]["bytes_per_s"]
    assert report["step_8b_s"] == pytest.approx(step_seconds(mixed))
    assert [*drive.iterdir(), *second.iterdir()] == []


def transfer_nothing(*arguments: Any) -> None:
    """Transfer nothing, but take time, so that the measured rate is finite."""
    time.sleep(0.01)


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize(
    ("contender", "method"), [(EngineContender, "_move_all"), (PlainThreads, "_move_blocks")]
)
def test_bench_refuses_wrong_bytes(
    drive: Path, monkeypatch: pytest.MonkeyPatch, contender: type, method: str
) -> None:
    monkeypatch.setattr(contender, method, transfer_nothing)
    code, out, error = run("bench", str(drive), *SMALL)
    assert (code, out) == (1, "")
    assert "transferred wrong bytes" in error
    assert "do not train on this drive" in error
    assert list(drive.iterdir()) == []


@pytest.mark.usefixtures("brief", "cached_or_nominal_rates")
def test_bench_names_the_load_of_other_programs(
    drive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([ProcessorTimes(0, 0, 0, 2), ProcessorTimes(9, 3, 1, 2)])
    monkeypatch.setattr(comparison.ProcessorTimes, "now", lambda: next(times, None))
    code, out, _ = run("bench", str(drive), *SMALL)
    assert code == 0
    assert "note: other programs used 1.3 of 2 processors while this was measured" in out


@pytest.mark.usefixtures("brief")
def test_bench_interrupted_leaves_no_file(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Path] = []

    def interrupt(contender: PlainThreads, load: Load) -> Sample:
        seen.extend(contender._testbed.file_paths)
        assert seen[0].exists()
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("SIGINT was ignored")

    monkeypatch.setattr(PlainThreads, "run", interrupt)
    code, out, error = run("bench", str(drive), *SMALL)
    assert (code, out, error) == (130, "", "stopped by SIGINT\n")
    assert seen
    assert list(drive.iterdir()) == []

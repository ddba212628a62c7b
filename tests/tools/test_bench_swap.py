"""Tests of the swap benchmark: statistics, contenders over real files, detection of wrong bytes."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import statistics
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.forked import Program
from support.waiting import wait_until
from torch import Tensor
from typer.testing import CliRunner

from infinity.cli.doctor import STATE_BYTES
from infinity.config.schema import load_config
from infinity.errors import ConfigError, DoesNotFitError, InfinityError, MachineError
from infinity.swap_benchmark import load as swap_load
from infinity.swap_benchmark.contenders import (
    Contender,
    EngineContender,
    IoSettings,
    PlainThreads,
    Sample,
    UnavailableError,
)
from infinity.swap_benchmark.load import MODES, Load, Mode, Span, Testbed, make_load
from infinity.swap_benchmark.rounds import DEFAULTS, rotated, take_turns, usable_backends

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from ratios import Ratio, geometric_mean, median_interval, ratio_of
from swap import faults
from swap import main as bench_swap
from swap.contenders import AiofilesLoop, BufferedFiles, DeepSpeedHandle, Fio, parse_jobs
from swap.main import Options
from swap.report import (
    FETCH_BYTES,
    recommended_yaml,
    show_disk,
    show_faults,
    training_terms,
)
from swap.rounds import Field, calibrate, choose, compared, gather, relative, worst_scores

MIB = 2**20
ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools/bench_swap.py"


# Statistics.


@pytest.mark.parametrize(
    ("count", "rank", "coverage"),
    [
        (1, 1, 0.0),
        (3, 1, 0.75),
        (4, 1, 0.875),
        (5, 1, 0.9375),
        (8, 2, 1 - 2 * 9 / 256),
        (10, 2, 1 - 2 * 11 / 1024),
        (11, 3, 1 - 2 * (1 + 11 + 55) / 2048),
    ],
)
def test_median_interval_known_values(count: int, rank: int, coverage: float) -> None:
    values = [float(v) for v in range(1, count + 1)]
    low, high, covered = median_interval(values[::-1])
    assert (low, high) == (values[rank - 1], values[count - rank])
    assert covered == pytest.approx(coverage)


@pytest.mark.parametrize("count", range(1, 12))
def test_median_interval_matches_enumeration(count: int) -> None:
    """Each value is below the true median with probability 1/2: enumerate all outcomes."""
    low, high, covered = median_interval([float(v) for v in range(count)])
    first, last = int(low), int(high)
    holding = sum(first < sum(below) <= last for below in itertools.product((0, 1), repeat=count))
    assert covered == pytest.approx(holding / 2**count)
    if count > 4:
        assert covered >= 0.9
        inner = sum(
            first + 1 < sum(below) <= last - 1 for below in itertools.product((0, 1), repeat=count)
        )
        assert inner / 2**count < 0.9, "a narrower interval would do"


def test_ratio_taken_within_rounds() -> None:
    ratio = ratio_of([1.0, 2.0, 4.0], [1.0, 1.0, 8.0])
    assert ratio.values == (1.0, 2.0, 0.5)
    assert ratio.median == 1.0  # the ratio of medians would be 2
    assert (ratio.low, ratio.high, ratio.coverage) == (0.5, 2.0, 0.75)


def test_ratio_holds_bounds() -> None:
    assert Ratio(0.9, 0.8, 0.97, 0.9, ()).holds
    assert Ratio(1.1, 1.0, 1.2, 0.9, ()).holds
    assert not Ratio(0.96, 0.95, 0.969, 0.9, ()).holds


def test_geometric_mean_and_relative() -> None:
    assert geometric_mean([4.0, 0.25]) == pytest.approx(1.0)
    rounds = {"a": [sample(10), sample(30)], "b": [sample(30), sample(90)]}
    assert relative(rounds) == pytest.approx({"a": 0.5, "b": 1.5})


def test_worst_scores_by_slowest_mode() -> None:
    speeds = {"a": (40.0, 10.0), "b": (36.0, 11.0)}
    modes = {
        mode: {name: [sample(rates[index])] for name, rates in speeds.items()}
        for index, mode in enumerate(("read", "write"))
    }
    assert worst_scores(modes) == pytest.approx({"a": 10 / 11, "b": 0.9})
    modes["write"]["a"] = [sample(9.0)]
    assert worst_scores(modes) == pytest.approx({"a": 9 / 11, "b": 0.9})


def test_choose_keeps_default_unless_clearly_slower() -> None:
    assert choose({"default": 1.0, "other": 1.02}, "default") == "default"
    assert choose({"default": 0.9, "other": 0.95}, "default") == "other"
    assert choose({"default": 1.0, "other": 1.2, "third": 1.1}, "default") == "other"


def test_training_terms_known_values() -> None:
    terms = training_terms(2.4e9, 2e9, 1_000_000_000)
    assert terms["update_parameters_per_s"] == pytest.approx(1e8)
    assert (terms["read_bytes"], terms["written_bytes"]) == (14 * 10**9, 12 * 10**9)
    assert terms["step_s"] == pytest.approx(10 + 1)
    assert terms["steps_per_100_tbw"] == pytest.approx(100e12 / 12e9)


def test_training_terms_match_documentation() -> None:
    text = (ROOT / "docs/bytes.md").read_text(encoding="utf-8")
    row = re.search(r"\| all on disk, gradient in RAM \|[^|]+\| ([^|]+) \| ([^|]+) \|", text)
    assert row is not None
    read, written = row[1], row[2]
    assert read == f"{STATE_BYTES} + {FETCH_BYTES} + 4(M\u22121)"
    assert written == str(STATE_BYTES)


def test_invalid_options_raise(tmp_path: Path) -> None:
    for options, message in (
        (Options(()), "no path"),
        (Options((tmp_path,), compare=("fio", "dd")), "dd"),
        (Options((tmp_path,), chunk_bytes=MIB + 1), "whole MiB"),
        (Options((tmp_path,), num_rounds=0), "--rounds"),
    ):
        with pytest.raises(ConfigError) as caught:
            options.check()
        assert message in caught.value.what
    Options((tmp_path,)).check()


# Loads and rounds.


def test_load_covers_spans_once_per_pass() -> None:
    load = make_load(
        "mixed", rates=[8e9, 2e9], target_s=0.01, chunk_bytes=2 * MIB, region_bytes=16 * MIB
    )
    assert load.num_files == 2
    assert load.reads[0] == Span(0, 16 * MIB, 2), "40 MB each way: 20 chunks, so 2 passes of 8"
    assert load.writes[1] == Span(16 * MIB, 10 * MIB, 1), "10 MB each way: 5 chunks"
    assert load.total_bytes == 2 * (32 + 10) * MIB
    for index in range(2):
        for is_write, span in ((False, load.reads[index]), (True, load.writes[index])):
            assert span is not None
            moved = [p.offset for p in load.pieces(index) if p.is_write == is_write]
            once = list(range(span.offset, span.offset + span.nbytes, 2 * MIB))
            assert moved == once * span.num_passes
    directions = [piece.is_write for piece in load.pieces(0)]
    assert directions == [False, True] * (len(directions) // 2), "a read and a write take turns"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("block", [MIB // 2, MIB, 3 * MIB])
def test_load_blocks_cover_pieces(mode: Mode, block: int) -> None:
    load = make_load(mode, rates=[1e9], target_s=0.02, chunk_bytes=4 * MIB, region_bytes=16 * MIB)
    covered: dict[tuple[bool, int], int] = {}
    for piece, start, nbytes in load.blocks(0, block):
        assert covered.get((piece.is_write, piece.offset), 0) == start, "in order, no gaps"
        covered[piece.is_write, piece.offset] = start + nbytes
    expected = {(p.is_write, p.offset): 4 * MIB for p in load.pieces(0)}
    assert covered == expected


class Fake:
    family = "plain"

    def __init__(self, name: str, log: list[str], fails_in: str = "") -> None:
        self.name, self._log, self._fails_in = name, log, fails_in

    def run(self, load: Load) -> Sample:
        if load.mode == self._fails_in:
            raise UnavailableError("out of order")
        self._log.append(f"{load.mode}:{self.name}")
        return sample(1)

    def close(self) -> None:
        pass


def sample(rate: float) -> Sample:
    return Sample(1.0, int(rate), 0.0)


def small_load(mode: Mode) -> Load:
    return make_load(mode, rates=[1.0], target_s=1.0, chunk_bytes=MIB, region_bytes=MIB)


def test_take_turns_rotates_first_contender() -> None:
    log: list[str] = []
    contenders: list[Contender] = [Fake(name, log) for name in "abc"]
    loads = {mode: small_load(mode) for mode in MODES}
    samples = take_turns(dict.fromkeys(MODES, contenders), loads, 3, left_out={})
    assert [len(found) for by_name in samples.values() for found in by_name.values()] == [3] * 9
    reads = [entry[-1] for entry in log if entry.startswith("read")]
    assert reads == list("abcbcacab")
    assert rotated([], 5) == []


def test_take_turns_leaves_out_failed_contender() -> None:
    log: list[str] = []
    contenders: list[Contender] = [Fake("a", log), Fake("b", log, fails_in="write")]
    left_out: dict[str, str] = {}
    loads = {mode: small_load(mode) for mode in MODES}
    samples = take_turns(dict.fromkeys(MODES, contenders), loads, 2, left_out=left_out)
    assert left_out == {"b": "out of order"}
    assert set(samples["write"]) == {"a"}
    assert set(samples["read"]) == {"a", "b"}
    assert len(samples["write"]["a"]) == 2


def test_samples_write_different_data() -> None:
    salts: list[int] = []

    class Recorder(Fake):
        def run(self, load: Load) -> Sample:
            salts.append(load.salt)
            return sample(1)

    take_turns({"write": [Recorder("a", [])]}, {"write": small_load("write")}, 4, left_out={})
    assert len(set(salts)) == 4


# Contenders over real files.


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Testbed]:
    paths = [tmp_path / "one", tmp_path / "two"]
    for path in paths:
        path.mkdir()
    with Testbed(paths, 4 * MIB, MIB) as found:
        yield found.prepare()
    assert [list(path.iterdir()) for path in paths] == [[], []]


MAKERS: dict[str, Callable[[Testbed], Contender]] = {
    "io_uring": lambda bed: EngineContender(bed, IoSettings("io_uring", MIB // 4, 4)),
    "threads": lambda bed: EngineContender(bed, IoSettings("threads", MIB // 4, 4, 2)),
    "plain": lambda bed: PlainThreads(bed, MIB // 4, 3),
    "cached": lambda bed: PlainThreads(bed, MIB // 4, 3, cached=True),
    "buffered": BufferedFiles,
    "aiofiles": AiofilesLoop,
    "fio psync": lambda bed: Fio(bed, "psync", MIB // 4, 2),
    "fio libaio": lambda bed: Fio(bed, "libaio", MIB // 4, 4),
    "deepspeed": lambda bed: DeepSpeedHandle(bed, MIB // 4, 4, 1),
}


def test_plain_threads_buffer_bytes_equal_engine(bed: Testbed) -> None:
    sizes = {}
    for cached in (False, True):
        contender = PlainThreads(bed, MIB // 4, 2, cached=cached)
        sizes[contender.family] = contender._buffers.nbytes
        contender.close()
    assert sizes == {"plain": bed._rings.nbytes, "cached": 2 * bed.num_files * MIB // 4}


def make(bed: Testbed, name: str, monkeypatch: pytest.MonkeyPatch) -> Contender:
    if name.startswith("fio") and shutil.which("fio") is None:
        pytest.skip("fio is not installed")
    if name == "deepspeed":
        install_fake_peer(monkeypatch)
    try:
        return MAKERS[name](bed)
    except UnavailableError as error:
        pytest.skip(str(error))


def loads_for(bed: Testbed, mode: Mode) -> Load:
    rates = [2e9, 1e9]  # 4 MiB and 2 MiB: the load of a drive is proportional to its rate
    return make_load(
        mode, rates=rates, target_s=0.002, chunk_bytes=bed.chunk_bytes, region_bytes=4 * MIB
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MAKERS)
def test_contender_moves_load(
    bed: Testbed, name: str, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    contender = make(bed, name, monkeypatch)
    load = Load(**{**vars(loads_for(bed, mode)), "salt": 3})
    before = [path.read_bytes() for path in bed.file_paths]
    try:
        found = contender.run(load)
    finally:
        contender.close()
        contender.close()
    assert found.nbytes == load.total_bytes > 0
    assert found.duration_s > 0
    assert found.cpu_s >= 0
    for index, path in enumerate(bed.file_paths):
        after = path.read_bytes()
        written = {p.offset: p for p in load.pieces(index) if p.is_write}
        assert bool(written) == (mode != "read")
        for offset in range(0, 8 * MIB, MIB):
            chunk = after[offset : offset + MIB]
            if offset not in written:
                assert chunk == before[index][offset : offset + MIB], "not its to write"
            elif name.startswith("fio"):
                assert chunk != before[index][offset : offset + MIB], "nothing was written"
            else:
                assert chunk in [bed.pattern(k, 3).tobytes() for k in range(5)]
                if name != "deepspeed":
                    assert chunk == bed.pattern(offset // MIB, 3).tobytes()


@pytest.mark.parametrize("name", [n for n in MAKERS if not n.startswith("fio")])
def test_wrong_bytes_raise(bed: Testbed, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    contender = make(bed, name, monkeypatch)
    load = loads_for(bed, "read")
    for path in bed.file_paths:
        with path.open("r+b") as file:
            file.write(os.urandom(4 * MIB))
    try:
        with pytest.raises(InfinityError, match="wrong bytes"):
            contender.run(load)
    finally:
        contender.close()


def test_missing_read_detected(bed: Testbed) -> None:
    contender = EngineContender(bed, IoSettings("threads", MIB))
    load = loads_for(bed, "read")
    contender.run(load)
    contender._move_all = lambda load: None  # type: ignore[method-assign]
    with pytest.raises(InfinityError, match="a read transferred wrong bytes"):
        contender.run(load)
    contender.close()


def test_missing_write_detected(bed: Testbed) -> None:
    load = Load(**{**vars(loads_for(bed, "write")), "salt": 1})
    contender = EngineContender(bed, IoSettings("threads", MIB))
    contender.run(load)
    bed.check_written(load)
    with pytest.raises(InfinityError, match="a write transferred wrong bytes"):
        bed.check_written(Load(**{**vars(load), "salt": 2}))
    contender.close()


class FakeHandle:
    """A fake of DeepSpeed's AIO handle: transfers are complete only after `wait`."""

    def __init__(self, block: int, depth: int, single: bool, overlap: bool, threads: int) -> None:
        self._pending: deque[tuple[bool, Tensor, str, int]] = deque()

    def new_cpu_locked_tensor(self, count: int, example: Tensor) -> Tensor:
        return torch.empty(count, dtype=example.dtype)

    def free_cpu_locked_tensor(self, tensor: Tensor) -> bool:
        return True

    def async_pread(self, buffer: Tensor, filename: str, file_offset: int = 0) -> int:
        self._pending.append((False, buffer, filename, file_offset))
        return 0

    def async_pwrite(self, buffer: Tensor, filename: str, file_offset: int = 0) -> int:
        self._pending.append((True, buffer, filename, file_offset))
        return 0

    def wait(self) -> int:
        assert self._pending, "the real one aborts the process"
        count = len(self._pending)
        while self._pending:
            is_write, buffer, filename, offset = self._pending.popleft()
            with open(filename, "r+b") as file:
                file.seek(offset)
                if is_write:
                    file.write(buffer.numpy().tobytes())
                else:
                    data = bytearray(file.read(buffer.numel()))
                    buffer.copy_(torch.frombuffer(data, dtype=torch.uint8))
        return count


def install_fake_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Builder:
        def load(self) -> types.SimpleNamespace:
            return types.SimpleNamespace(aio_handle=FakeHandle)

    package, ops = types.ModuleType("deepspeed"), types.ModuleType("deepspeed.ops")
    builders = types.ModuleType("deepspeed.ops.op_builder")
    builders.AsyncIOBuilder = Builder  # type: ignore[attr-defined]
    package.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    for module in (package, ops, builders):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def test_unavailable_peer_left_out(bed: Testbed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setenv("PATH", "/nonexistent")
    field = gather(bed, ("aiofiles",), [IoSettings("threads", MIB // 2)])
    try:
        assert "not importable" in field.left_out["deepspeed"]
        assert "not installed" in field.left_out["fio"]
        assert {c.family for c in field.contenders.values()} == {"plain", "cached", "aiofiles"}
        assert "plain 512.00 KiB x 4 threads" in field.contenders, "our settings are tried too"
    finally:
        field.close()


def test_fio_output_parsed() -> None:
    assert parse_jobs('note: both\n{"jobs": [{"jobname": "r"}]}') == [{"jobname": "r"}]
    for text in ("", "fio: unknown engine", "{", '{"jobs": 1}'):
        with pytest.raises(UnavailableError):
            parse_jobs(text)


def test_calibrate_picks_fastest_per_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    class Timed(Fake):
        def __init__(self, name: str, rates: dict[str, float], family: str) -> None:
            super().__init__(name, [])
            self.family, self._rates = family, rates

        def run(self, load: Load) -> Sample:
            return sample(self._rates[load.mode])

    field = Field()
    field.add("x", lambda: Timed("f", {"read": 10, "write": 40, "mixed": 10}, "fio"))
    field.add("x", lambda: Timed("p", {"read": 20, "write": 20, "mixed": 30}, "plain"))
    field.add("x", lambda: Timed("c", {"read": 90, "write": 90, "mixed": 90}, "cached"))
    field.add("x", lambda: Timed("b", {"read": 99, "write": 99, "mixed": 99}, "buffered"))
    loads = {mode: small_load(mode) for mode in MODES}
    found = calibrate(field, loads)
    best = {mode: found.best(mode, field.families) for mode in MODES}
    assert best == {"read": "p", "write": "f", "mixed": "p"}
    assert found.best("read", field.families, "fio") == "f"
    assert found.rates["write"] == {"c": 90, "f": 40, "p": 20}
    contenders = compared(field, found, "read", ("fio", "buffered", "deepspeed"))
    assert [contender.name for contender in contenders] == ["f", "b", "c"]


def test_usable_backends_work_on_every_drive() -> None:
    def answers(*ok: bool) -> dict[str, dict[str, Any]]:
        return {n: {"ok": o, "reason": "no"} for n, o in zip(DEFAULTS, ok, strict=True)}

    assert usable_backends([answers(True, True)]) == ["io_uring", "threads"]
    assert usable_backends([answers(True, True), answers(False, True)]) == ["threads"]
    with pytest.raises(UnavailableError):
        usable_backends([answers(False, True), answers(True, False)])


# Refusals and cleaning up.


def test_insufficient_disk_space_error_has_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    monkeypatch.setattr(swap_load, "disk_free_bytes", lambda path: 12 * MIB)
    with Testbed(paths, 4 * MIB, MIB) as bed, pytest.raises(DoesNotFitError) as caught:
        bed.prepare()
    # Both lie on one file system: 16 MiB are needed there, not 8.
    assert "16.00 MiB of test files are needed, 12.00 MiB are free" in caught.value.what
    assert "4.00 MiB are missing" in caught.value.what
    assert [list(path.iterdir()) for path in paths] == [[], []]


def test_testbed_files_removed_after_failure(tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Testbed([tmp_path], 4 * MIB, MIB) as bed:
        bed.prepare(interrupt)
    assert list(tmp_path.iterdir()) == []


# Injected faults.

SILENT_KINDS = ("short", "delay", "reorder")


def trial(tmp_path: Path, kind: str, seed: int = 5) -> faults.Outcome:
    return faults._Trial(str(tmp_path / "f.bin"), "threads", kind, seed).run()


@pytest.mark.parametrize("kind", SILENT_KINDS)
def test_harmless_faults_pass(tmp_path: Path, kind: str) -> None:
    outcome = trial(tmp_path, kind)
    assert outcome.ok
    assert outcome.right == outcome.requests == 64


@pytest.mark.parametrize(
    ("kind", "name"), [("eio", "EIO"), ("enospc", "ENOSPC"), ("stuck", "ETIMEDOUT")]
)
def test_injected_failure_raises_its_error(
    tmp_path: Path, kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "_STUCK_AFTER_S", 0.02)
    outcome = trial(tmp_path, kind)
    assert outcome.ok, outcome.notes
    assert set(outcome.raised) == {name}
    assert outcome.right + outcome.raised[name] == outcome.requests == 64
    assert outcome.right > 0 or kind == "stuck"  # a slow disk looks the same


def test_flipped_bits_caught_by_checksum(tmp_path: Path) -> None:
    outcome = trial(tmp_path, "flip")
    assert outcome.ok
    assert outcome.caught > 0
    assert outcome.caught + outcome.right == outcome.requests


def test_flipped_bits_silent_without_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "checksums", lambda memory: b"blind")
    outcome = trial(tmp_path, "flip")
    assert outcome.silent > 0
    assert not outcome.ok


def test_unexpected_fault_fails_trial(tmp_path: Path) -> None:
    """The engine injects flips or errors that the trial does not expect."""
    subject = faults._Trial(str(tmp_path / "f.bin"), "threads", "flip", 5)
    subject._may_flip = False
    outcome = subject.run()
    assert outcome.silent > 0
    assert not outcome.ok
    subject = faults._Trial(str(tmp_path / "g.bin"), "threads", "eio", 5)
    subject._errors = frozenset()
    outcome = subject.run()
    assert outcome.wrong_error > 0
    assert not outcome.ok


# The complete tool. Without fio it is fast: only plain threads compete.


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("bench")
    arguments = ["--path", str(path), "--gib", "0.0625", "--rounds", "2", "--sample-s", "0.02"]
    arguments += ["--chunk", "1MiB", "--json", "--compare", "fio,plain,buffered,aiofiles"]
    with Program(TOOL, *arguments, PATH="/nonexistent") as program:
        code, out, error = program.end()
    assert code == 0, error
    assert list(path.iterdir()) == []
    result: dict[str, Any] = json.loads(out)  # one object, and nothing else
    return result


def test_report_keys(report: dict[str, Any]) -> None:
    for key in ("best", "reference"):
        for mode in MODES:
            assert report[key][f"{mode}_gib_s"] > 0
    assert set(report["best"]["config"]) == set(vars(IoSettings()))
    assert report["reference"]["name"]
    assert set(report["reference"]["names"]) == set(MODES)
    for key in ("ratio", "threads_ratio"):
        for mode in MODES:
            low, high = report[f"{key}_interval"][mode]
            assert low <= report[key][mode] <= high
            assert report[f"{key}_coverage"][mode] == 0.5, "two rounds"
    for name in ("threads", "reference", report["ratio_backend"]):
        assert all(report["cpu_s_per_gib"][name][mode] >= 0 for mode in MODES)
    for key in ("machine", "kernel", "file_system", "date", "command", "samples", "drives"):
        assert report[key], key
    assert "fio is not installed" in report["left_out"]["fio"]


def test_report_numbers_follow_from_samples(report: dict[str, Any]) -> None:
    engines = {e["family"]: name for name, e in report["contenders"].items() if e["ours"]}
    for mode in MODES:
        samples = report["samples"][mode]
        rates = {n: [s["nbytes"] / s["duration_s"] for s in found] for n, found in samples.items()}
        assert all(len(found) == 2 for found in rates.values())
        against = report["reference"]["names"][mode]
        for key, backend in (("ratio", report["ratio_backend"]), ("threads_ratio", "threads")):
            values = [a / b for a, b in zip(rates[engines[backend]], rates[against], strict=True)]
            assert report[key][mode] == pytest.approx(statistics.median(values))
        assert report["reference"][f"{mode}_gib_s"] == pytest.approx(
            statistics.median(rates[against]) / 2**30
        )
        moved = {s["nbytes"] for found in samples.values() for s in found}
        assert moved == {report["sample_bytes"][mode]}, "everybody moves the same bytes"
        families = {report["contenders"][name]["family"] for name in samples}
        assert families >= {"threads", "plain", "buffered", "aiofiles"}
        assert report["contenders"][against]["family"] == "plain"
    assert set(report["cached"]) == {"read", "mixed"}


# The command line.


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(bench_swap.app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        ([], 2, "--path"),
        (["--path", "{absent}"], 4, "mkdir -p {absent}"),
        (["--path", "{file}"], 4, "is not a directory"),
        (["--path", "{dir}", "--gib", "1e9"], 3, "are missing"),
        (["--path", "{dir}", "--gib", "x"], 2, "--gib"),
        (["--path", "{dir}", "--compare", "dd"], 2, "does not know dd"),
        (["--path", "{dir}", "--chunk", "5 apples"], 2, "apples"),
        (["--path", "{dir}", "--gib", "0.001"], 2, "are too small for a chunk"),
        (["--path", "{dir}", "--path", "{dir}"], 2, "twice"),
        (["--path", "{absent}", "--faults", "1"], 4, "does not exist"),
    ],
)
def test_invalid_arguments_explained(
    tmp_path: Path, arguments: list[str], code: int, part: str
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "dir").mkdir()
    places = {name: str(tmp_path / name) for name in ("file", "dir", "absent")}
    found, out, error = run(*(argument.format(**places) for argument in arguments))
    assert (found, out) == (code, "")
    assert part.format(**places) in " ".join(error.split())
    assert list((tmp_path / "dir").iterdir()) == []


def children_named(name: str, parent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue
        fields = text.rpartition(")")[2].split()
        if f"({name})" in text and int(fields[1]) == parent:
            found.append(int(stat.parent.name))
    return found


@pytest.mark.parametrize(
    ("phase", "signum"),
    [
        ("choosing the reference", signal.SIGINT),
        ("measuring", signal.SIGTERM),
    ],
)
def test_signal_stops_and_removes_files(tmp_path: Path, phase: str, signum: signal.Signals) -> None:
    arguments = ["--path", str(tmp_path), "--gib", "0.0625", "--rounds", "4000"]
    arguments += ["--sample-s", "0.01", "--chunk", "1MiB", "--json"]
    with_fio = shutil.which("fio") is not None and phase == "choosing the reference"
    with Program(TOOL, *arguments, **({} if with_fio else {"PATH": "/nonexistent"})) as program:
        pid = program.process.pid
        assert pid is not None
        assert wait_until(lambda: phase in program.err.read_text())
        fios: list[int] = []
        if with_fio:
            assert wait_until(lambda: fios.extend(children_named("fio", pid)) or fios)
        program.signal(signum)
        program.signal(signum)  # a second signal must not leave files behind
        code, out, error = program.end()
    assert code == 128 + signum, error
    assert out == ""
    assert f"stopped by {signum.name}" in error
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []
    if with_fio:
        assert not any(Path(f"/proc/{pid}").exists() for pid in fios)


def test_printed_page_has_report_values(
    report: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (drive,) = report["drives"]
    refused = {"io_uring": {"ok": False, "reason": "seccomp"}}
    drive = drive | {"direct": False, "direct_reason": "O_DIRECT failed", "backends": refused}
    show_disk(report | {"drives": [drive], "notes": ["it is slow"]})
    out = capsys.readouterr().out
    found = report["contenders"][report["reference"]["names"]["read"]]["read"]
    low, high = report["ratio_interval"]["mixed"]
    for text in (
        f"{found['median_gib_s']:.2f} ({found['min_gib_s']:.2f}-{found['max_gib_s']:.2f}) *",
        "BUFFERED: O_DIRECT failed",
        "io_uring does not work here: seccomp",
        "left out: fio: fio is not installed",
        "note: it is slow",
        f"{report['ratio']['mixed']:.3f}, 50% interval {low:.3f} to {high:.3f}: ",
        "aiofiles loop",
        "A 7.0B step",
        "reads 91.27 GiB, writes 78.23 GiB, and takes >= ",
        "84 GB a step: 100 TB of its rated writes last for 1190 steps",
    ):
        assert text in out, text


def test_recommended_yaml_is_valid_config(tmp_path: Path) -> None:
    best = {"backend": "io_uring", "block_size": 2**20, "queue_depth": 16, "num_threads": 4}
    threads = best | {"backend": "threads", "num_threads": 8}
    given = {"configs": {"threads": threads}, "best": {"config": best}}
    path = tmp_path / "run.yaml"
    path.write_text(recommended_yaml(given | {"drives": [{"path": "/mnt/a"}]}))
    config = load_config(path)
    assert [str(place) for place in config.nvme_path] == ["/mnt/a"]
    assert config.io.backend == "auto", "io_uring where it works, threads where it does not"
    assert (config.io.block_size, config.io.queue_depth) == (2**20, 16)
    assert config.io.num_threads == 8, "for the fall-back"
    given["best"]["config"] = threads | {"block_size": 512 * 2**10}
    drives = [{"path": "/mnt/a"}, {"path": "/mnt/b c"}]
    path.write_text(recommended_yaml(given | {"drives": drives}))
    config = load_config(path)
    assert (config.io.backend, config.io.block_size) == ("threads", 512 * 2**10)
    assert [str(place) for place in config.nvme_path] == ["/mnt/a", "/mnt/b c"]


def test_faults_command_reports_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swap.faults.usable_backends", lambda answers: ["threads"])
    monkeypatch.setattr("swap.faults._STUCK_AFTER_S", 0.1)  # the trial waits for it
    monkeypatch.setattr("swap.faults._NUM_CHUNKS", 16)
    code, out, _ = run("--path", str(tmp_path), "--faults", "3", "--json")
    report = json.loads(out)
    assert (code, report["ok"]) == (0, True)
    kinds = {entry["kind"]: entry for entry in report["kinds"]}
    assert set(kinds) == {*faults.RIGHT_ERRORS, "all together"}
    assert kinds["flip"]["caught"] > 0
    assert kinds["eio"]["raised"]["EIO"] > 0
    assert list(tmp_path.iterdir()) == []
    show_faults(report)


def test_faults_command_fails_on_silent_wrong_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swap.faults.usable_backends", lambda answers: ["threads"])
    monkeypatch.setattr("swap.faults.RIGHT_ERRORS", {"flip": frozenset()})
    monkeypatch.setattr("swap.faults._ALL_KINDS", "flip")
    monkeypatch.setattr("swap.faults.checksums", lambda memory: b"blind")
    code, out, _ = run("--path", str(tmp_path), "--faults", "3")
    assert code == 1
    assert "WRONG" in out
    assert list(tmp_path.iterdir()) == []


def test_compare_all_selects_every_contender(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def measure(options: Any, watcher: Any, command: Any) -> Any:
        seen.append(options)
        raise MachineError("enough")

    monkeypatch.setattr("swap.main.measure_disk", measure)
    brief = ["--path", str(tmp_path), "--gib", "0.0625", "--sample-s", "0.01", "--chunk", "1MiB"]
    run(*brief, "--compare", "all")
    run(*brief, "--compare", "fio, aiofiles,fio")
    assert seen[0].compare == ("fio", "plain", "deepspeed", "buffered", "aiofiles")
    assert seen[1].compare == ("fio", "aiofiles")
    assert (seen[1].file_bytes, seen[1].chunk_bytes) == (2**26, 2**20)
    assert (seen[1].num_rounds, seen[1].sample_s) == (11, 0.01)

"""Tests of measured rates and of their cache."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_accelerator import FakeAccelerator
from support.fault_injection import faulty_io
from support.forked import HANG_S
from unit.plan.test_machine import GIB, computer

from infinity.config.schema import IoConfig
from infinity.errors import DoesNotFitError, InfinityWarning, MachineError, TransferError
from infinity.plan.load import ProcessorTimes, describe_other_load
from infinity.plan.machine import Machine, read_machine
from infinity.plan.rates import (
    COMPUTE,
    COPIES,
    DEVICE_UPDATE,
    DISK,
    DISK_PER_CPU_S,
    NOMINAL_CPU,
    UPDATE,
    Rates,
)
from infinity.profiling import calibration, processor_rates, rate_cache
from infinity.profiling.calibration import KnownRates, cached_rates
from infinity.storage import disk_rates
from infinity.storage.device import CpuDevice, Device
from infinity.storage.disk import Disk

BRIEF_S = 0.2


@pytest.fixture(autouse=True)
def _short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten measurements; the measured rates need not be accurate."""
    monkeypatch.setattr(disk_rates, "SPAN_BYTES", 32 << 20)
    monkeypatch.setattr(processor_rates, "_LEAST_CHUNKS", 1)
    monkeypatch.setattr(processor_rates, "_MOST_CHUNKS", 1)
    monkeypatch.setattr(processor_rates, "_MATRIX_SIZES", (64, 128))


def check_rates(found: Rates, names: Sequence[str]) -> None:
    numbers = found.numbers()
    assert set(numbers) == set(names)
    assert all(math.isfinite(rate) and rate > 0 for rate in numbers.values()), numbers


# Measuring


@pytest.fixture
def drive(tmp_path: Path) -> Path:
    (tmp_path / "drive").mkdir()
    return tmp_path / "drive"


def test_measure_rates_unified_memory(drive: Path, folder: Path) -> None:
    before = torch.random.get_rng_state()
    found = cached([drive], num_threads=1, seconds=BRIEF_S).rates
    check_rates(found, [*DISK, DISK_PER_CPU_S, *UPDATE, *COMPUTE])
    assert (found.to_device, found.from_device, found.device_update) == (None, None, None)
    assert list(drive.iterdir()) == []
    assert torch.equal(torch.random.get_rng_state(), before), "the user's numbers stay as they are"


@pytest.mark.parametrize("kernels", [False, True])
def test_measure_rates_with_device(
    drive: Path, folder: Path, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host updates are measured while copies run."""
    device, copied = FakeAccelerator(kernels=kernels), threading.Event()
    copy_rate, host_updates = processor_rates._copy_rate, processor_rates._host_updates

    def copies(*arguments: Any) -> float:
        rate = copy_rate(*arguments)
        copied.set()
        return rate

    def updates(*arguments: Any) -> dict[str, float]:
        copied.clear()
        assert copied.wait(HANG_S)
        return host_updates(*arguments)

    monkeypatch.setattr(processor_rates, "_copy_rate", copies)
    monkeypatch.setattr(processor_rates, "_host_updates", updates)
    try:
        io = IoConfig(backend="threads")
        found = cached([drive], device=device, io=io, num_threads=2, seconds=BRIEF_S).rates
        device.synchronize()
    finally:
        device.close()
    update_names = [DEVICE_UPDATE] if kernels else []
    check_rates(found, [*DISK, *UPDATE, *COMPUTE, *COPIES, *update_names])
    assert device.violations == []


def test_measure_disk_two_paths_together(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    io = IoConfig(weights=(1.0, 1.0))  # same drive: without weights only the first path is used
    seen: list[tuple[Path, ...]] = []

    class Spy(Disk):
        def close(self) -> None:
            assert all(self.used)
            seen.append(self.paths)
            super().close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_rates, "Disk", Spy)
        found = disk_rates.measure_disk(paths, io, BRIEF_S)
    assert seen == [tuple(paths)]
    assert set(found) == set(DISK)
    assert [list(path.iterdir()) for path in paths] == [[], []]


def test_no_path_uses_nominal_disk_rates(folder: Path) -> None:
    found = cached([], num_threads=1, seconds=0.05).rates
    assert [getattr(found, name) for name in DISK] == [getattr(NOMINAL_CPU, n) for n in DISK]


def test_measure_slow_disk_moves_few_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []

    class Spy(Disk):
        def close(self) -> None:
            counters = self.counters()
            moved.append(counters["read_bytes"] + counters["write_bytes"])
            super().close()

    monkeypatch.setattr(disk_rates, "Disk", Spy)
    with faulty_io(slow_bytes_per_s=20 << 20):
        found = disk_rates.measure_disk([tmp_path], IoConfig(), BRIEF_S)
    assert moved[0] < 60 << 20, "less than the range alone, were it fast"
    assert all(rate < 40 << 20 for rate in found.values())


@pytest.mark.parametrize(("products", "lost_s"), [(100, 1.0), (200, 0.02), (300, 0.02)])
def test_disk_rates_under_load_count_lost_products(
    products: int, lost_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In two seconds 200 products are possible, while 5 GB are transferred."""

    @contextmanager
    def repeating(work: Callable[[], object]) -> Iterator[Callable[[], int]]:
        yield iter([7, 7 + products]).__next__

    class FakeDisk:
        _counters = iter([{"read_bytes": 1, "write_bytes": 2},
                          {"read_bytes": 3 * 10**9 + 1, "write_bytes": 2 * 10**9 + 2}])  # fmt: skip

        def counters(self) -> dict[str, int]:
            return next(self._counters)

    class FakeTier:
        def rates(self) -> dict[str, float]:
            return {"disk_read": 1.0}

    monkeypatch.setattr(disk_rates, "repeating", repeating)
    monkeypatch.setattr(disk_rates, "calls_per_s", lambda *_: 100.0)
    monkeypatch.setattr(disk_rates.time, "perf_counter", iter([10.0, 12.0]).__next__)
    found = disk_rates._rates_under_load(FakeDisk(), FakeTier(), 1.0)  # type: ignore[arg-type]
    monkeypatch.undo()
    assert found == {"disk_read": 1.0, DISK_PER_CPU_S: pytest.approx(5e9 / lost_s)}


def test_measure_disk_writes_incompressible_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distinct_shares: list[float] = []

    class Spy(Disk):
        def close(self) -> None:
            data = Path(self._files[0].path).read_bytes()[: 1 << 20]
            blocks = [data[i : i + 8] for i in range(0, len(data), 8)]
            distinct_shares.append(len(set(blocks)) / len(blocks))
            super().close()

    monkeypatch.setattr(disk_rates, "Disk", Spy)
    disk_rates.measure_disk([tmp_path], IoConfig(), 0.05)
    assert distinct_shares[0] > 0.99


@pytest.mark.parametrize("kinds", ["eio", "enospc"])
def test_measure_disk_error_removes_files(tmp_path: Path, kinds: str) -> None:
    error = pytest.raises(TransferError, match="the measurement of the disk's speed")
    with error, faulty_io(faults=f"seed=1,kinds={kinds},rate=0.5"):
        disk_rates.measure_disk([tmp_path], IoConfig(), BRIEF_S)
    assert list(tmp_path.iterdir()) == []


def test_measure_disk_interrupt_removes_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: object) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr("infinity.storage.disk_rates._TierBenchmark._rate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        disk_rates.measure_disk([tmp_path], IoConfig(), BRIEF_S)
    assert list(tmp_path.iterdir()) == []


def test_measure_disk_missing_path_or_space_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MachineError, match="mkdir -p"):
        disk_rates.measure_disk([tmp_path / "none"], IoConfig(), BRIEF_S)
    monkeypatch.setattr("infinity.storage.run_dir.Scratch.free_bytes", lambda self: 4096)
    with pytest.raises(DoesNotFitError, match="missing"):
        disk_rates.measure_disk([tmp_path], IoConfig(), BRIEF_S)
    assert list(tmp_path.iterdir()) == []


def test_num_chunks_exceeds_cpu_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = read_machine()

    def chunks(cache_bytes: int, available_bytes: int) -> int:
        fields = vars(machine) | {
            "cache_bytes": cache_bytes,
            "host_available_bytes": available_bytes,
        }
        monkeypatch.setattr(processor_rates, "read_machine", lambda: Machine(**fields))
        return processor_rates._num_chunks()

    monkeypatch.setattr(processor_rates, "_LEAST_CHUNKS", 8)
    monkeypatch.setattr(processor_rates, "_MOST_CHUNKS", 64)
    assert chunks(0, 32 * GIB) == 8
    assert chunks(96 << 20, 32 * GIB) == 24
    assert chunks(8 * GIB, 32 * GIB) == 64
    assert chunks(8 * GIB, GIB) == 9, "an eighth of what is available"
    assert chunks(0, 0) == 1


# The cache


class Measurements:
    """Counts measurements, in place of measuring."""

    def __init__(self) -> None:
        self.processors = 0
        self.disks: list[list[Path]] = []

    def measure_processors(self, device: Device, threads: int, seconds: float) -> dict[str, float]:
        self.processors += 1
        names = [*UPDATE, *COMPUTE, *(() if device.unified else COPIES)]
        return dict.fromkeys(names, float(self.processors))

    def measure_disk(
        self, paths: Sequence[Path], io: IoConfig, s: float, *, busy: bool
    ) -> dict[str, float]:
        self.disks.append(list(paths))
        names = [*DISK, *((DISK_PER_CPU_S,) if busy else ())]
        return dict.fromkeys(names, float(len(self.disks)))

    @property
    def counts(self) -> tuple[int, int]:
        return self.processors, len(self.disks)


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> Measurements:
    measurements = Measurements()
    monkeypatch.setattr(calibration, "measure_processors", measurements.measure_processors)
    monkeypatch.setattr(calibration, "measure_disk", measurements.measure_disk)
    return measurements


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "infinity" / "rates"


def cached(paths: Sequence[Path] = (), **options: Any) -> KnownRates:
    return cached_rates(paths, options.pop("device", CpuDevice()), **options)


def test_rates_are_measured_once(tmp_path: Path, folder: Path, measurements: Measurements) -> None:
    first = cached([tmp_path])
    assert measurements.counts == (1, 1)
    assert cached([tmp_path]) == first
    assert cached([tmp_path], io=IoConfig(timeout_s=3.0)) == first
    assert measurements.counts == (1, 1)
    assert len(first.measured) == len("2026-11-21")
    assert len(list(folder.iterdir())) == 2
    assert folder.stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.iterdir())


def test_rates_measured_under_load_are_not_cached(
    folder: Path, measurements: Measurements, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other programs use 1.2 of 2 processors in the first measurement, and none later."""
    busy = ProcessorTimes(10.0, 5.0, 1.0, 2), ProcessorTimes(13.8, 5.2, 2.4, 2)
    quiet = ProcessorTimes(20.0, 6.0, 3.0, 2), ProcessorTimes(23.1, 6.9, 6.0, 2)
    times = iter([*busy, *quiet])
    monkeypatch.setattr(ProcessorTimes, "now", lambda: next(times))
    with pytest.warns(InfinityWarning, match=r"used 1\.2 of 2 processors while rates were"):
        first = cached()
    assert not folder.exists()
    second = cached()
    assert measurements.counts == (2, 0)
    assert cached() == second != first
    assert measurements.counts == (2, 0)


@pytest.mark.parametrize(
    ("user_s", "idle_s", "own_s", "word"),
    [
        (4.0, 0.0, 4.0, ""),
        (4.0, 0.0, 3.5, ""),
        (4.0, 0.0, 2.0, "2.0 of 4"),
        (20.0, 40.0, 4.0, ""),  # large machine with idle processors
        (0.05, 0.0, 0.0, ""),  # too short to tell
    ],
)
def test_load_between_reports_busy_other_programs(
    user_s: float, idle_s: float, own_s: float, word: str
) -> None:
    before = ProcessorTimes(1, 2, 0.5, 4)
    after = ProcessorTimes(1 + user_s, 2 + idle_s, 0.5 + own_s, 4)
    assert word in describe_other_load(before, after)
    assert bool(word) == bool(describe_other_load(before, after))
    assert describe_other_load(None, after) == ""


def test_own_cpu_time_is_not_counted_as_load() -> None:
    before = ProcessorTimes.now()
    assert before is not None
    while os.times().user < before.process + 0.2:
        pass
    after = ProcessorTimes.now()
    assert after is not None
    assert after.user - before.user >= after.process - before.process - 0.05


def test_refresh_measures_again_and_caches(
    tmp_path: Path, folder: Path, measurements: Measurements
) -> None:
    cached([tmp_path])
    fresh = cached([tmp_path], refresh=True)
    assert measurements.counts == (2, 2)
    assert fresh.rates.disk_read == 2.0
    assert cached([tmp_path]) == fresh
    assert len(list(folder.iterdir())) == 2


def test_other_paths_or_settings_are_measured_separately(
    tmp_path: Path, folder: Path, measurements: Measurements
) -> None:
    cached([tmp_path])
    cached([tmp_path, tmp_path])
    assert measurements.counts == (1, 2), "two paths are not one"
    cached([tmp_path], io=IoConfig(queue_depth=16))
    assert measurements.counts == (1, 3)
    cached([tmp_path], num_threads=77)
    assert measurements.counts == (2, 3), "the disk does not care"
    device = FakeAccelerator()
    try:
        assert cached([tmp_path], device=device).rates.to_device == 3.0
    finally:
        device.close()
    assert measurements.counts == (3, 4), "beside processors that have nothing to compute"
    cached([])
    assert measurements.counts == (3, 4)


def test_other_machine_or_mount_is_measured_again(
    tmp_path: Path, folder: Path, measurements: Measurements
) -> None:
    def mounts(source: str, kind: str = "ext4") -> dict[str, str]:
        return {"proc/self/mountinfo": f"22 1 0:5 / / rw - {kind} {source} rw\n"}

    root = computer(tmp_path / "root", mounts("/dev/a") | {"proc/cpuinfo": "model name : A\n"})
    cached([tmp_path], root=root)
    cached([tmp_path], root=computer(root, mounts("/dev/a")))
    assert measurements.counts == (1, 1)
    cached([tmp_path], root=computer(root, mounts("/dev/b")))
    cached([tmp_path], root=computer(root, mounts("/dev/b", "xfs")))
    assert measurements.counts == (1, 3)
    cached([tmp_path], root=computer(root, {"proc/cpuinfo": "model name : B\n"}))
    assert measurements.counts == (2, 4)
    meminfo = f"MemTotal: {64 * GIB // 1024} kB\n"
    cached([tmp_path], root=computer(root, {"proc/meminfo": meminfo}))
    assert measurements.counts == (3, 5)
    slightly_more = f"MemTotal: {64 * GIB // 1024 + 7} kB\n"  # as after a new kernel
    cached([tmp_path], root=computer(root, {"proc/meminfo": slightly_more}))
    assert measurements.counts == (3, 5)


def damaged(text: str) -> list[str]:
    """Return damaged variants of a cache entry."""
    entry = json.loads(text)
    entries: list[Any] = [entry | {"of": {}}, entry | {"measured": "yesterday"}, [], 3, None]
    entries += [
        entry | {"rates": value} for value in ({}, [], None, {"x": 1.0}, {"update.fp32": 1})
    ]
    for name, rate in (
        ("update.fp32", 0), ("update.fp32", -1.0), ("update.fp32", None), ("update.fp32", "nan"),
        ("update.fp32", "x"), ("color", 1.0), ("compute.bf16", float("inf")),
    ):  # fmt: skip
        entries.append(entry | {"rates": entry["rates"] | {name: rate}})
    return ["", "{", text[: len(text) // 2], "[" * 100_000, *map(json.dumps, entries)]


def test_damaged_cache_entry_is_measured_again(folder: Path, measurements: Measurements) -> None:
    cached()
    (entry,) = folder.iterdir()
    for count, text in enumerate(damaged(entry.read_text()), 2):
        entry.write_text(text)
        assert cached().rates.update["fp32"] == count, text[:200]
    entry.write_bytes(b"\xff\xfe\x00")
    count = measurements.processors
    cached()
    cached()
    assert measurements.processors == count + 1
    entry.unlink()
    entry.mkdir()
    cached()
    assert measurements.processors == count + 2
    assert list(folder.iterdir()) == [entry], "no half-written file either"


def test_unusable_cache_directory_is_ignored(
    tmp_path: Path, measurements: Measurements, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        cached()
    assert measurements.counts == (2, 0)


def test_measured_date_is_the_oldest(
    tmp_path: Path, folder: Path, measurements: Measurements
) -> None:
    cached([tmp_path])
    for path in folder.iterdir():
        entry = json.loads(path.read_text())
        if "disks" in entry["of"]:
            path.write_text(json.dumps(entry | {"measured": "2001-02-03"}))
    assert cached([tmp_path]).measured == "2001-02-03"
    assert cached([]).measured != "2001-02-03"


def test_missing_path_is_refused(tmp_path: Path, folder: Path, measurements: Measurements) -> None:
    with pytest.raises(MachineError, match="mkdir -p"):
        cached([tmp_path / "none"])


def test_default_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    assert rate_cache.default_folder() == Path("/home/someone/.cache/infinity/rates")


def test_measured_rates_round_trip_through_cache(
    drive: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProcessorTimes, "now", lambda: None)  # other tests may be running
    found = cached([drive], seconds=BRIEF_S)
    check_rates(found.rates, [*DISK, DISK_PER_CPU_S, *UPDATE, *COMPUTE])
    assert cached([drive], seconds=BRIEF_S) == found, "JSON gives the very numbers back"
    assert os.listdir(drive) == []

"""Tests of cached rates in `initialize`, which never measures rates itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.small import settings, small_model
from unit.profiling.test_rates import Measurements, cached, folder, measurements  # noqa: F401  (fixtures)

import infinity
from infinity.plan.plan import Plan
from infinity.plan.rates import nominal
from infinity.profiling.calibration import cached_or_nominal_rates
from infinity.storage.device import CpuDevice

AUTO = {"weights": "auto", "optimizer_state": "auto", "gradients": "auto"}


def plan_of(path: Path, placement: dict[str, str] = AUTO) -> Plan:
    config = settings(path, placement, cpu={"num_threads": 0})
    with infinity.initialize(small_model(), config)[0] as engine:
        return engine.plan


def test_initialize_without_cache_uses_nominal_rates(
    tmp_path: Path,
    folder: Path,  # noqa: F811
    measurements: Measurements,  # noqa: F811
) -> None:
    found = cached_or_nominal_rates([tmp_path], CpuDevice())
    assert found.rates == nominal(unified=True)
    assert set(found.nominal) == set(found.rates.numbers())
    assert found.measured is None
    assert "nominal rates of a common machine" in plan_of(tmp_path).describe()
    assert measurements.counts == (0, 0)
    assert not folder.exists()


def test_initialize_uses_and_reports_cached_rates(
    tmp_path: Path,
    folder: Path,  # noqa: F811
    measurements: Measurements,  # noqa: F811
) -> None:
    measured = cached([tmp_path])
    counts = measurements.counts
    found = cached_or_nominal_rates([tmp_path], CpuDevice())
    assert (found.rates, found.measured, found.nominal) == (measured.rates, measured.measured, ())
    assert f"chosen by rates measured {measured.measured}" in plan_of(tmp_path).describe()
    assert measurements.counts == counts


def test_kept_rates_names_unmeasured_disk_as_nominal(
    folder: Path,  # noqa: F811
    measurements: Measurements,  # noqa: F811
) -> None:
    cached()
    other_path = Path("/dev/shm")
    if not other_path.is_dir():
        pytest.skip("no second file system")
    found = cached_or_nominal_rates([other_path], CpuDevice())
    assert found.nominal == ("disk_read", "disk_write", "disk_mixed")
    assert "nominal, not measured: disk_read" in found.origin
    assert (
        cached_or_nominal_rates([], CpuDevice()).nominal == ()
    )  # no path: disk rates are not needed


def test_explicit_placement_does_not_mention_rates(tmp_path: Path) -> None:
    placement = {"weights": "disk", "optimizer_state": "disk", "gradients": "disk"}
    assert "chosen by" not in plan_of(tmp_path, placement).describe()

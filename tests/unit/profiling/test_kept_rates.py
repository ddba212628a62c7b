"""`initialize` weighs resources by rates that were measured before; it measures nothing itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.small import settings, small_model
from unit.profiling.test_rates import Measurements, cached, folder, measurements  # noqa: F401  (fixtures)

import infinity
from infinity.plan.plan import Plan
from infinity.plan.rates import nominal
from infinity.profiling.calibration import kept_rates
from infinity.storage.device import CpuDevice

AUTO = {"weights": "auto", "optimizer_state": "auto", "gradients": "auto"}


def plan_of(path: Path, placement: dict[str, str] = AUTO) -> Plan:
    given = settings(path, placement, cpu={"num_threads": 0})
    with infinity.initialize(small_model(), given)[0] as engine:
        return engine.plan


def test_nothing_kept_is_nominal_and_nothing_is_measured(
    tmp_path: Path,
    folder: Path,  # noqa: F811
    measurements: Measurements,  # noqa: F811
) -> None:
    found = kept_rates([tmp_path], CpuDevice())
    assert found.rates == nominal(unified=True)
    assert set(found.nominal) == set(found.rates.numbers())
    assert found.measured is None
    assert "nominal rates of a common machine" in plan_of(tmp_path).describe()
    assert measurements.counts == (0, 0)
    assert not folder.exists()


def test_what_was_measured_is_used_and_told(
    tmp_path: Path,
    folder: Path,  # noqa: F811
    measurements: Measurements,  # noqa: F811
) -> None:
    made = cached([tmp_path])
    counts = measurements.counts
    found = kept_rates([tmp_path], CpuDevice())
    assert (found.rates, found.measured, found.nominal) == (made.rates, made.measured, ())
    assert f"chosen by rates measured {made.measured}" in plan_of(tmp_path).describe()
    assert measurements.counts == counts


def test_a_part_that_was_not_measured_is_named(
    folder: Path,  # noqa: F811
    measurements: Measurements,  # noqa: F811
) -> None:
    cached()
    elsewhere = Path("/dev/shm")
    if not elsewhere.is_dir():
        pytest.skip("no second file system")
    found = kept_rates([elsewhere], CpuDevice())
    assert found.nominal == ("disk_read", "disk_write", "disk_mixed")
    assert "nominal, not measured: disk_read" in found.origin
    assert kept_rates([], CpuDevice()).nominal == ()  # without a disk its rates are of no use


def test_placement_that_was_named_says_nothing_of_rates(tmp_path: Path) -> None:
    placement = {"weights": "disk", "optimizer_state": "disk", "gradients": "disk"}
    assert "chosen by" not in plan_of(tmp_path, placement).describe()

"""Tests of machine files: parsing, error messages and round trips."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
from unit.plan.test_machine import GIB, computer

from infinity.errors import ConfigError, MachineError
from infinity.plan.plan_machine import PlanMachine, read_machine_file
from infinity.plan.rates import COMPUTE, NOMINAL, NOMINAL_CPU, Rates, completed, nominal

FULL: dict[str, Any] = {
    "format": 1,
    "name": "a rig",
    "measured": "2026-10-01",
    "host_ram": "64GiB",
    "device_memory": "24 GiB",
    "disk_free": 10**12,
    "num_cpus": 16,
    "rates": {
        "disk_read": "3.0 GB/s",
        "disk_write": 2_500_000_000,
        "disk_mixed": 3.5e9,
        "to_device": 25e9,
        "from_device": 24e9,
        "device_update": 3e10,
        "update": {"fp32": 1e9, "bf16": 1.2e9, "8bit": 1.4e9},
        "compute": {"bf16": 1e14, "fp32": 3e13},
        "between": {"bf16": "400 GB/s", "fp32": 4e11},
        "attention": {"bf16": 5e13, "fp32": 1e13},
        "logits": 1e10,
    },
}
CPU_ONLY: dict[str, Any] = {
    "format": 1, "name": "a box", "host_ram": "8GiB", "num_cpus": 2, "unified": True,
}  # fmt: skip


def write_machine_file(folder: Path, facts: dict[str, Any] | str) -> Path:
    path = folder / "rig.json"
    path.write_text(facts if isinstance(facts, str) else json.dumps(facts))
    return path


def full_with(name: str, value: object) -> dict[str, Any]:
    """Return FULL with the value at the dotted `name` replaced, or removed if None."""
    facts: dict[str, Any] = json.loads(json.dumps(FULL))
    *sections, key = name.split(".")
    target = facts
    for section in sections:
        target = target[section]
    if value is None:
        del target[key]
    else:
        target[key] = value
    return facts


def test_full_machine_file(tmp_path: Path) -> None:
    machine = read_machine_file(write_machine_file(tmp_path, FULL))
    assert machine == PlanMachine(
        name="a rig",
        host_bytes=64 * GIB,
        device_bytes=24 * GIB,
        disk_bytes=10**12,
        num_cpus=16,
        rates=Rates(
            disk_read=3e9,
            disk_write=2.5e9,
            disk_mixed=3.5e9,
            to_device=25e9,
            from_device=24e9,
            device_update=3e10,
            update={"fp32": 1e9, "bf16": 1.2e9, "8bit": 1.4e9},
            compute={"bf16": 1e14, "fp32": 3e13},
            between={"bf16": 4e11, "fp32": 4e11},
            attention={"bf16": 5e13, "fp32": 1e13},
            logits=1e10,
        ),
        nominal=(),
        measured="2026-10-01",
    )
    assert machine.rates_origin == "measured 2026-10-01"
    assert machine.host_budget_bytes == int(0.8 * 64 * GIB)


def test_missing_rates_are_nominal_and_listed(tmp_path: Path) -> None:
    facts = full_with("rates", {"disk_read": 1e9, "update": {"8bit": 5e8}, "device_update": None})
    machine = read_machine_file(write_machine_file(tmp_path, facts))
    assert machine.rates.disk_read == 1e9
    assert machine.rates.update == {"fp32": 0.9e9, "bf16": 1.3e9, "8bit": 5e8}
    assert machine.rates.disk_write == NOMINAL.disk_write
    assert machine.rates.device_update is None, "null: the device has no kernels"
    assert set(machine.nominal) == {
        "disk_write", "disk_mixed", "to_device", "from_device",
        "update.fp32", "update.bf16", *COMPUTE,
    }  # fmt: skip
    assert machine.rates_origin.startswith("measured 2026-10-01; nominal, not measured: disk_write")


def test_minimal_machine_file_is_nominal(tmp_path: Path) -> None:
    machine = read_machine_file(write_machine_file(tmp_path, CPU_ONLY))
    assert machine.rates == NOMINAL_CPU
    assert (machine.device_bytes, machine.disk_bytes, machine.measured) == (None, 0, None)
    assert "nominal" in machine.rates_origin
    assert "nothing was measured" in machine.rates_origin


def test_rates_origin_without_date_is_given(tmp_path: Path) -> None:
    machine = read_machine_file(write_machine_file(tmp_path, full_with("measured", None)))
    assert machine.rates_origin == "given"


@pytest.mark.parametrize(
    ("name", "value", "parts"),
    [
        ("host_memory", 1, ["host_memory: unknown key", "did you mean", "host_ram"]),
        (
            "rates.disk_reads",
            1,
            ["rates.disk_reads: unknown key", "did you mean 'rates.disk_read'"],
        ),
        ("rates.update.bf15", 1, ["rates.update", "'bf15'", "did you mean 'bf16'"]),
        ("host_ram", "64 apples", ["host_ram", "apples"]),
        ("host_ram", -1, ["host_ram", "-1"]),
        ("host_ram", 0, ["host_ram", "greater than 0"]),
        ("host_ram", None, ["host_ram: must be given"]),
        ("name", None, ["name: must be given"]),
        ("name", "", ["name"]),
        ("device_memory", None, ["device_memory: must be given, unless unified"]),
        ("unified", True, ["device_memory", "where unified is true", "to_device"]),
        ("unified", "yes", ["unified", "'yes'"]),
        ("num_cpus", 0, ["num_cpus"]),
        ("num_cpus", 2.5, ["num_cpus"]),
        ("format", 2, ["format", "2"]),
        ("format", None, ["format: must be given"]),
        ("measured", "yesterday", ["measured", "a day like", "'yesterday'"]),
        ("rates", 3, ["rates"]),
        ("rates.disk_read", 0, ["rates.disk_read", "greater than 0"]),
        ("rates.disk_read", True, ["rates.disk_read"]),
        ("rates.disk_read", "fast", ["rates.disk_read", '"3.0 GB/s"', "'fast'"]),
        ("rates.disk_read", "3 parsecs/s", ["rates.disk_read", "parsecs"]),
        ("rates.compute.bf16", float("inf"), ["rates.compute.bf16", "finite"]),
        ("rates.update", [1], ["rates.update"]),
    ],
)
def test_invalid_key_reported_by_name(
    tmp_path: Path, name: str, value: object, parts: list[str]
) -> None:
    path = write_machine_file(tmp_path, full_with(name, value))
    with pytest.raises(ConfigError) as caught:
        read_machine_file(path)
    for part in [str(path), *parts]:
        assert part in str(caught.value)


def test_all_mistakes_reported_at_once(tmp_path: Path) -> None:
    facts = full_with("host_ram", "x") | {"num_cpus": 0, "color": "red"}
    with pytest.raises(ConfigError, match="3 mistakes"):
        read_machine_file(write_machine_file(tmp_path, facts))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[]", "a list"),
        ('{"name": "a", "name": "b"}', "given twice"),
    ],
)
def test_invalid_json_rejected(tmp_path: Path, text: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        read_machine_file(write_machine_file(tmp_path, text))
    with pytest.raises(ConfigError, match=r"none\.json does not exist"):
        read_machine_file(tmp_path / "none.json")


@pytest.mark.parametrize("facts", [FULL, CPU_ONLY, full_with("rates", {"device_update": None})])
def test_machine_file_round_trip(tmp_path: Path, facts: dict[str, Any]) -> None:
    machine = read_machine_file(write_machine_file(tmp_path, facts))
    again = read_machine_file(write_machine_file(tmp_path, machine.as_text()))
    assert again == machine


def test_nominal_rates_are_not_written(tmp_path: Path) -> None:
    machine = read_machine_file(
        write_machine_file(tmp_path, full_with("rates", {"disk_read": 1e9}))
    )
    assert machine.as_dict()["rates"] == {"disk_read": 10**9}


def test_here_reads_machine_from_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    space = os.statvfs(tmp_path)  # other processes may write to the disk
    monkeypatch.setattr(os, "statvfs", {tmp_path: space}.__getitem__)
    rates, _ = completed({}, unified=True)
    measured = dataclasses.replace(rates, disk_read=1.23456e9)
    machine = PlanMachine.this_machine(
        [tmp_path, tmp_path], None, measured,
        measured="2026-11-21", root=computer(tmp_path, {}),
    )  # fmt: skip
    assert machine.host_bytes == 31 * GIB, "30 available, 1 held already"
    assert machine.num_cpus == 8
    assert machine.disk_bytes == space.f_bavail * space.f_frsize, "one disk, once"
    assert (machine.unified, machine.device_bytes) == (True, None)
    assert (machine.rates, machine.nominal) == (measured, ())
    assert machine.rates_origin == "measured 2026-11-21"
    again = read_machine_file(write_machine_file(tmp_path, machine.as_text()))
    assert again.rates.disk_read == 1.235e9, "four digits"
    assert dataclasses.replace(again, rates=measured) == machine


def test_here_with_device_and_without_disk_path(tmp_path: Path) -> None:
    root = computer(tmp_path, {})
    rates = dataclasses.replace(NOMINAL, device_update=None)
    machine = PlanMachine.this_machine([], 7 * GIB, rates, measured="2026-11-21", root=root)
    assert (machine.device_bytes, machine.disk_bytes) == (7 * GIB, 0)
    assert machine.nominal == ("disk_read", "disk_write", "disk_mixed")
    assert machine.rates.device_update is None
    again = read_machine_file(write_machine_file(tmp_path, machine.as_text()))
    assert again == machine


def test_here_without_measurement_is_nominal(tmp_path: Path) -> None:
    machine = PlanMachine.this_machine([], 7 * GIB, root=computer(tmp_path, {}))
    assert machine.rates == NOMINAL
    assert "nothing was measured" in machine.rates_origin
    with pytest.raises(MachineError, match="mkdir -p"):
        PlanMachine.this_machine([tmp_path / "none"], 7 * GIB)


def test_rates_numbers_round_trip() -> None:
    for unified in (False, True):
        rates = nominal(unified)
        assert Rates.of(rates.numbers()) == rates
    assert "to_device" not in NOMINAL_CPU.numbers()
    assert NOMINAL.numbers()["update.8bit"] == NOMINAL.update["8bit"]


def test_rates_disk_s() -> None:
    rates = Rates(disk_read=2e9, disk_write=1e9, disk_mixed=1.5e9)
    assert rates.disk_s(2 * 10**9, 0) == pytest.approx(1.0)
    assert rates.disk_s(0, 10**9) == pytest.approx(1.0)
    assert rates.disk_s(3 * 10**9, 10**9) == pytest.approx(2 / 1.5 + 1.0)

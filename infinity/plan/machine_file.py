"""A machine to plan for: this one, or one that is described in a file and need not be here.

The file is a JSON object: `format` 1, `name`, `measured` (a date), `host_ram`, `device_memory`,
`disk_free`, `num_cpus`, `unified`, `rates`. Sizes are bytes or text such as "64GiB", rates numbers
or text such as "3.0 GB/s". `infinity doctor --machine-file` writes one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from infinity.config_problems import explain
from infinity.config_source import read_config_file
from infinity.config_values import Size
from infinity.errors import ConfigError
from infinity.plan.machine import HOST_BUDGET_SHARE, mount_of, read_machine
from infinity.plan.rates import COPIES, DEVICE_UPDATE, DISK, Rates, completed, rates_origin
from infinity.sizes import parse_size

FORMAT = 1
_WHERE_NOT_UNIFIED = (*COPIES, DEVICE_UPDATE)


class _Device(Protocol):
    """What is asked of a `memory.device.Device`, which is above this room."""

    unified: bool

    def memory_bytes(self) -> int | None: ...


class HostOnly:
    """The device of a machine without a GPU, for who does not need torch."""

    unified = True

    def memory_bytes(self) -> int | None:
        """None: its memory is the host's."""
        return None


@dataclass(frozen=True)
class PlanMachine:
    """What a plan must know of a machine. Sizes are in bytes.

    `nominal` names the rates (as `Rates.numbers` does) that nobody measured: they are those of a
    common machine, see `plan.rates.NOMINAL`, and whoever shows times must say so
    (`rates_origin`). `measured` is the day of the others.
    """

    name: str
    host_bytes: int
    """RAM that a run could come to hold, were it to take everything."""
    device_bytes: int | None
    """Memory of the compute device that a run could take; None where that is the host's."""
    disk_bytes: int
    """Space on all paths together; 0 without a path."""
    unified: bool
    num_cpus: int
    rates: Rates
    nominal: tuple[str, ...] = ()
    measured: str | None = None

    @classmethod
    def here(
        cls,
        paths: Iterable[Path],
        device: _Device,
        rates: Rates | None = None,
        *,
        name: str = "this machine",
        measured: str | None = None,
        root: Path = Path("/"),
    ) -> PlanMachine:
        """This machine as it is now, with `rates` that were measured on `measured`, or nominal.

        Paths on one file system count once. Raises `MachineError` for a path that is not there.
        """
        drives = {mount_of(path, root).device: path for path in paths}
        machine = read_machine(drives.values(), root)
        numbers = rates.numbers() if rates else {}
        if not drives:
            numbers = {key: rate for key, rate in numbers.items() if key not in DISK}
        without = {DEVICE_UPDATE} if rates and rates.device_update is None else set()
        complete, nominal = completed(numbers, unified=device.unified, without=without)
        reachable_bytes = machine.host_available_bytes + machine.own_rss_bytes
        return cls(
            name=name,
            host_bytes=min(machine.host_ram_bytes, reachable_bytes),
            device_bytes=None if device.unified else device.memory_bytes(),
            disk_bytes=sum(free_bytes for _, free_bytes in machine.disk_free_bytes),
            unified=device.unified,
            num_cpus=machine.num_cpus,
            rates=complete,
            nominal=nominal,
            measured=measured if rates else None,
        )

    @property
    def host_budget_bytes(self) -> int:
        """The host budget of a run that names none, as `plan.machine` derives it."""
        return int(HOST_BUDGET_SHARE * self.host_bytes)

    @property
    def rates_origin(self) -> str:
        """Where the rates come from, for people: "measured 2026-11-21", what is nominal."""
        return rates_origin(self.rates, self.nominal, self.measured)

    def as_dict(self) -> dict[str, Any]:
        """What the file of this machine holds, JSON-able; nominal rates are left out."""
        numbers = {
            name: _rounded(rate)
            for name, rate in self.rates.numbers().items()
            if name not in self.nominal
        }
        rates: dict[str, Any] = {}
        for name, rate in numbers.items():
            section, _, key = name.rpartition(".")
            (rates.setdefault(section, {}) if section else rates)[key] = rate
        if not self.unified and self.rates.device_update is None:
            rates[DEVICE_UPDATE] = None
        facts = {
            "format": FORMAT,
            "name": self.name,
            "measured": self.measured,
            "host_ram": self.host_bytes,
            "device_memory": self.device_bytes,
            "disk_free": self.disk_bytes,
            "num_cpus": self.num_cpus,
            "unified": self.unified,
            "rates": rates,
        }
        return {name: fact for name, fact in facts.items() if fact is not None}

    def as_text(self) -> str:
        """The file itself."""
        return json.dumps(self.as_dict(), indent=2) + "\n"


def read_machine_file(path: str | os.PathLike[str]) -> PlanMachine:
    """Return the machine that a JSON (or YAML) file describes.

    Rates that are left out are nominal; `"device_update": null` is a device without our kernels.
    Raises one `ConfigError` that lists everything that is wrong, each with its dotted name.
    """
    file = Path(path).expanduser()
    raw = read_config_file(file)
    try:
        found = _File.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(explain(_File, str(file), raw, error)) from None
    given = found.rates.model_dump(exclude_none=True)
    numbers: dict[str, float] = {name: given[name] for name in given if _is_number(given[name])}
    for section in ("update", "compute"):
        numbers |= {f"{section}.{key}": rate for key, rate in given.get(section, {}).items()}
    named = found.rates.model_fields_set
    without = {DEVICE_UPDATE} if DEVICE_UPDATE in named and DEVICE_UPDATE not in numbers else set()
    rates, nominal = completed(numbers, unified=found.unified, without=without)
    return PlanMachine(
        name=found.name,
        host_bytes=found.host_ram,
        device_bytes=found.device_memory,
        disk_bytes=found.disk_free,
        unified=found.unified,
        num_cpus=found.num_cpus,
        rates=rates,
        nominal=nominal,
        measured=found.measured,
    )


def _is_number(value: object) -> bool:
    return isinstance(value, float)


def _rounded(rate: float) -> int:
    """Four digits are more than a measurement is worth, and can be read."""
    return int(float(f"{rate:.4g}")) or 1


def _rate(value: Any) -> Any:
    if not isinstance(value, str):
        return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
    try:
        return float(parse_size(value.strip().removesuffix("/s")))
    except ConfigError as error:
        raise ValueError(
            f'should be a rate like 3e9 or "3.0 GB/s", got {value!r} ({error.because})'
            if error.because
            else f'should be a rate like 3e9 or "3.0 GB/s", got {value!r}'
        ) from None


_Rate: TypeAlias = Annotated[float, BeforeValidator(_rate), Field(gt=0, allow_inf_nan=False)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=False)


class _Rates(_Section):
    disk_read: _Rate | None = None
    disk_write: _Rate | None = None
    disk_mixed: _Rate | None = None
    to_device: _Rate | None = None
    from_device: _Rate | None = None
    device_update: _Rate | None = None
    update: dict[Literal["fp32", "bf16", "8bit"], _Rate] = Field(default_factory=dict)
    compute: dict[Literal["bf16", "fp32"], _Rate] = Field(default_factory=dict)


class _File(_Section):
    # In this order: a check may look at what stands above it.
    format: Literal[1]
    name: str = Field(min_length=1)
    measured: str | None = None
    unified: bool = False
    host_ram: Annotated[Size, Field(gt=0)]
    device_memory: Annotated[Size, Field(gt=0)] | None = Field(default=None, validate_default=True)
    disk_free: Size = 0
    num_cpus: int = Field(ge=1)
    rates: _Rates = _Rates()

    @field_validator("measured")
    @classmethod
    def _is_a_day(cls, value: str | None) -> str | None:
        try:
            return None if value is None else date.fromisoformat(value).isoformat()
        except ValueError:
            raise ValueError(f"should be a day like 2026-11-21, got {value!r}") from None

    @field_validator("device_memory")
    @classmethod
    def _a_device_has_memory(cls, value: int | None, info: ValidationInfo) -> int | None:
        unified = info.data.get("unified")
        if unified is True and value is not None:
            raise ValueError("where unified is true it is the host's; leave it out")
        if unified is False and value is None:
            raise ValueError("must be given, unless unified is true")
        return value

    @field_validator("rates")
    @classmethod
    def _no_copies_where_unified(cls, rates: _Rates, info: ValidationInfo) -> _Rates:
        given = [name for name in _WHERE_NOT_UNIFIED if getattr(rates, name) is not None]
        if info.data.get("unified") is True and given:
            raise ValueError(f"{', '.join(given)}: not where unified is true; leave them out")
        return rates

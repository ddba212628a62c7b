"""A machine to plan for: this one, or one described in a file.

The file is a JSON object: `format` 1, `name`, `measured` (a date), `host_ram`, `device_memory`,
`disk_free`, `num_cpus`, `unified`, `gpus`, `nodes`, `rates`. Sizes are bytes or text such as
"64GiB", rates numbers or text such as "3.0 GB/s". `infinity doctor --machine-file` writes one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, ValidationError, ValidationInfo, field_validator

from infinity.common.sizes import parse_size
from infinity.config.explain import explain
from infinity.config.fields import Section, Size
from infinity.config.source import read_config_file
from infinity.errors import ConfigError
from infinity.plan.machine import HOST_BUDGET_SHARE, mount_of, read_machine
from infinity.plan.rates import (
    COPIES,
    DEVICE_UPDATE,
    DISK,
    Rates,
    completed,
    flat,
    nested,
    rates_origin,
    with_links,
)

FORMAT = 1


@dataclass(frozen=True)
class PlanMachine:
    """Facts about a machine for the plan. Sizes are in bytes.

    `nominal` names the rates (as `Rates.numbers` does) that were not measured: those of a common
    machine, see `plan.rates.NOMINAL`. Reports of times must mention them (`rates_origin`).
    `measured` is the day of the other rates.
    """

    name: str
    host_bytes: int
    """RAM that a run can reach at most."""
    device_bytes: int | None
    """Memory of the compute device that a run can reach; None if it shares the host's."""
    disk_bytes: int
    """Free space of all paths together; 0 without a path."""
    num_cpus: int
    rates: Rates
    nominal: tuple[str, ...] = ()
    measured: str | None = None
    gpus: int = 1
    """Ranks per node: one per GPU, or processes without a GPU. Sizes except the device's, and rates
    of disk and CPU, are totals of a node."""
    nodes: int = 1
    """Number of such machines that train together."""

    @classmethod
    def this_machine(
        cls,
        paths: Iterable[Path],
        device_bytes: int | None,
        rates: Rates | None = None,
        *,
        name: str = "this machine",
        measured: str | None = None,
        root: Path = Path("/"),
    ) -> PlanMachine:
        """Return this machine as it is now.

        `rates` were measured on the day `measured`; without them all are nominal. `device_bytes` is
        as in `Device.memory_bytes`. Paths on one file system count once. Raises `MachineError` for
        a path that does not exist.
        """
        unified = device_bytes is None
        drives = {mount_of(path, root).device: path for path in paths}
        machine = read_machine(drives.values(), root)
        numbers = rates.numbers() if rates else {}
        if not drives:
            numbers = {key: rate for key, rate in numbers.items() if key not in DISK}
        without = {DEVICE_UPDATE} if rates and rates.device_update is None else set()
        complete, nominal = completed(numbers, unified=unified, without=without)
        reachable_bytes = machine.host_available_bytes + machine.process_rss_bytes
        return cls(
            name=name,
            host_bytes=min(machine.host_ram_bytes, reachable_bytes),
            device_bytes=device_bytes,
            disk_bytes=sum(free_bytes for _, free_bytes in machine.disk_free_bytes),
            num_cpus=machine.num_cpus,
            rates=complete,
            nominal=nominal,
            measured=measured if rates else None,
        )

    @property
    def unified(self) -> bool:
        """Whether the compute device shares the host's memory."""
        return self.device_bytes is None

    @property
    def host_budget_bytes(self) -> int:
        """Host budget in bytes of a run that configures none, as `plan.machine` derives it."""
        return int(HOST_BUDGET_SHARE * self.host_bytes)

    @property
    def ranks(self) -> int:
        """Number of ranks on all nodes."""
        return self.gpus * self.nodes

    @property
    def rank_rates(self) -> Rates:
        """Rates of one rank."""
        return self.rates.of_rank(self.gpus, self.nodes, unified=self.unified)

    def with_ranks(self, gpus: int, nodes: int) -> PlanMachine:
        """Return the machine with `gpus` ranks on each of `nodes`.

        Links with known rates keep them, other links get nominal ones.
        """
        across = nodes == self.nodes and self.rates.all_gather is not None
        rates, nominal_links = with_links(
            self.rates, gpus, nodes, unified=self.unified, across=across
        )
        nominal = (*self.nominal, *nominal_links)
        return replace(self, gpus=gpus, nodes=nodes, rates=rates, nominal=nominal)

    def with_scaled_disk_rates(self, factor: float) -> PlanMachine:
        """Return the machine with disk rates multiplied by `factor`, and the same disk space."""
        disk_rates = {name: getattr(self.rates, name) * factor for name in DISK}
        return replace(self, rates=replace(self.rates, **disk_rates))

    @property
    def rates_origin(self) -> str:
        """Description of the origin of rates: "measured 2026-11-21", and those that are nominal."""
        return rates_origin(self.rates, self.nominal, self.measured)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON object of a machine file; nominal rates are omitted."""
        numbers = self.rates.numbers().items()
        # Four significant digits exceed the measurement's accuracy; a rate must be positive.
        rates = nested({name: int(float(f"{rate:.4g}")) or 1 for name, rate in numbers
                        if name not in self.nominal})  # fmt: skip
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
            "gpus": self.gpus if self.ranks > 1 else None,
            "nodes": self.nodes if self.nodes > 1 else None,
            "rates": rates,
        }
        return {name: value for name, value in facts.items() if value is not None}

    def as_text(self) -> str:
        """Return the text of a machine file."""
        return json.dumps(self.as_dict(), indent=2) + "\n"


def read_machine_file(path: str | os.PathLike[str]) -> PlanMachine:
    """Return the machine that a JSON (or YAML) file describes.

    Missing rates are nominal; `"device_update": null` is a device without infinity's kernels.
    Raises one `ConfigError` that lists all invalid entries by dotted name.
    """
    file_path = Path(path).expanduser()
    raw = read_config_file(file_path)
    try:
        parsed = _File.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(explain(_File, str(file_path), error)) from None
    numbers = flat(parsed.rates.model_dump())
    given = parsed.rates.model_fields_set
    without = {DEVICE_UPDATE} if DEVICE_UPDATE in given and DEVICE_UPDATE not in numbers else set()
    rates, nominal = completed(numbers, unified=parsed.unified, without=without)
    return PlanMachine(
        name=parsed.name,
        host_bytes=parsed.host_ram,
        device_bytes=parsed.device_memory,
        disk_bytes=parsed.disk_free,
        num_cpus=parsed.num_cpus,
        rates=rates,
        nominal=nominal,
        measured=parsed.measured,
        nodes=parsed.nodes,
    ).with_ranks(parsed.gpus, parsed.nodes)


def _parse_rate(value: Any) -> Any:
    if not isinstance(value, str):
        return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
    try:
        return float(parse_size(value.strip().removesuffix("/s")))
    except ConfigError as error:
        reason = f" ({error.because})" if error.because else ""
        message = f'should be a rate like 3e9 or "3.0 GB/s", got {value!r}{reason}'
        raise ValueError(message) from None


_Rate: TypeAlias = Annotated[float, BeforeValidator(_parse_rate), Field(gt=0, allow_inf_nan=False)]


class _Rates(Section):
    disk_read: _Rate | None = None
    disk_write: _Rate | None = None
    disk_mixed: _Rate | None = None
    disk_per_cpu_s: _Rate | None = None
    to_device: _Rate | None = None
    from_device: _Rate | None = None
    copies_mixed: _Rate | None = None
    device_update: _Rate | None = None
    all_gather: _Rate | None = None
    all_to_all: _Rate | None = None
    between_nodes: _Rate | None = None
    between_hosts: _Rate | None = None
    update: dict[Literal["fp32", "bf16", "8bit"], _Rate] = Field(default_factory=dict)
    compute: dict[Literal["bf16", "fp32"], _Rate] = Field(default_factory=dict)
    between: dict[Literal["bf16", "fp32"], _Rate] = Field(default_factory=dict)
    attention: dict[Literal["bf16", "fp32"], _Rate] = Field(default_factory=dict)
    logits: _Rate | None = None


class _File(Section):
    # The order matters: a validator may use fields declared before its field.
    format: Literal[1]
    name: str = Field(min_length=1)
    measured: str | None = None
    unified: bool = False
    host_ram: Annotated[Size, Field(gt=0)]
    device_memory: Annotated[Size, Field(gt=0)] | None = Field(default=None, validate_default=True)
    disk_free: Size = 0
    num_cpus: int = Field(ge=1)
    gpus: int = Field(default=1, ge=1)
    nodes: int = Field(default=1, ge=1)
    rates: _Rates = _Rates()

    @field_validator("measured")
    @classmethod
    def _check_measured(cls, value: str | None) -> str | None:
        try:
            return None if value is None else date.fromisoformat(value).isoformat()
        except ValueError:
            raise ValueError(f"should be a day like 2026-11-21, got {value!r}") from None

    @field_validator("device_memory")
    @classmethod
    def _check_device_memory(cls, value: int | None, info: ValidationInfo) -> int | None:
        unified = info.data.get("unified")
        if unified is True and value is not None:
            raise ValueError("where unified is true it is the host's; leave it out")
        if unified is False and value is None:
            raise ValueError("must be given, unless unified is true")
        return value

    @field_validator("rates")
    @classmethod
    def _check_rates(cls, rates: _Rates, info: ValidationInfo) -> _Rates:
        given = [name for name in (*COPIES, DEVICE_UPDATE) if getattr(rates, name) is not None]
        if info.data.get("unified") is True and given:
            raise ValueError(f"{', '.join(given)}: not where unified is true; leave them out")
        return rates

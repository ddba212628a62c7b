"""Rates of a machine's resources, from which a plan's times are computed.

Pure data. `profiling.calibration` measures them once per machine and path; `plan.cost` uses them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from infinity.plan.plan import BETWEEN_HOSTS, LINKS

UPDATE_FORMATS = ("fp32", "bf16", "8bit")
PRECISIONS = ("bf16", "fp32")
DISK = ("disk_read", "disk_write", "disk_mixed")
DISK_PER_CPU_S = "disk_per_cpu_s"
COPIES = ("to_device", "from_device", "copies_mixed")
UPDATE = tuple(f"update.{name}" for name in UPDATE_FORMATS)
_KINDS = ("compute", "between", "attention")
COMPUTE = (*(f"{kind}.{name}" for kind in _KINDS for name in PRECISIONS), "logits")
DEVICE_UPDATE = "device_update"
BETWEEN_NODES = "between_nodes"


@dataclass(frozen=True)
class Rates:
    """Rates in bytes per second, unless noted; disk rates are the total of all paths.

    Attributes:
        disk_read: Reads alone.
        disk_write: Writes alone.
        disk_mixed: Reads and writes together, in the ratio 1:1.
        update: Parameters per second of the host's optimizer kernels with all threads, while copies
            run in both directions; by format of the moments ("fp32", "bf16", "8bit").
        compute: FLOP per second of large matrix products on the device, in the mix of training (one
            product in forward, two in backward); by precision ("bf16", "fp32").
        between: Memory traffic of the operations between matrix products; by precision.
        attention: FLOP per second of attention; by precision.
        logits: Logits per second of cross entropy, forward and backward.
        to_device: Copies from host to device; None if they share one memory.
        from_device: Copies from device to host; None if they share one memory.
        copies_mixed: Both directions at once, in total; None if neither slows the other.
        device_update: Parameters per second of the device's optimizer kernels; None without such.
        all_gather: Bytes that one rank receives while all ranks do; None for one rank.
        all_to_all: As `all_gather`.
        between_nodes: Bytes that one node receives from others, for all its ranks.
        between_hosts: Bytes that one rank receives in RAM from its peers, the ranks of the same
            local number on other nodes.
        disk_per_cpu_s: Bytes of disk traffic that cost one second of compute on all processors;
            None if unknown.

    See [Note: compute] in `plan/cost.py` for `between`, `attention` and `logits`.
    """

    disk_read: float
    disk_write: float
    disk_mixed: float
    update: Mapping[str, float] = field(default_factory=dict)
    compute: Mapping[str, float] = field(default_factory=dict)
    between: Mapping[str, float] = field(default_factory=dict)
    attention: Mapping[str, float] = field(default_factory=dict)
    logits: float | None = None
    to_device: float | None = None
    from_device: float | None = None
    copies_mixed: float | None = None
    device_update: float | None = None
    all_gather: float | None = None
    all_to_all: float | None = None
    between_nodes: float | None = None
    between_hosts: float | None = None
    disk_per_cpu_s: float | None = None

    def disk_s(self, read_bytes: int, written_bytes: int) -> float:
        """Return the seconds of concurrent reads and writes.

        Equal amounts move at the mixed rate, the remainder at the rate of its direction.
        """
        both = min(read_bytes, written_bytes)
        return (
            2 * both / self.disk_mixed
            + (read_bytes - both) / self.disk_read
            + (written_bytes - both) / self.disk_write
        )

    def copies_s(self, inward_bytes: int, outward_bytes: int) -> tuple[float, float]:
        """Return the seconds of concurrent copies (to the device, from it), as in `disk_s`."""
        pairs = (inward_bytes, self.to_device), (outward_bytes, self.from_device)
        both, both_s = 0, 0.0
        if self.copies_mixed is not None:
            both = min(inward_bytes, outward_bytes)
            both_s = 2 * both / self.copies_mixed
        inward_s, outward_s = (
            both_s + (nbytes - both) / rate if rate else 0.0 for nbytes, rate in pairs
        )
        return inward_s, outward_s

    def of_rank(self, local: int, nodes: int, *, unified: bool) -> Rates:
        """Return the rates of one rank, with `local` ranks on each of `nodes`."""
        disk = {name: getattr(self, name) / local for name in DISK}
        if self.disk_per_cpu_s is not None:
            disk[DISK_PER_CPU_S] = self.disk_per_cpu_s / local
        update = {name: rate / local for name, rate in self.update.items()}
        rates = replace(self, update=update, **disk)
        if unified:
            compute = {
                name: rate / local for name, rate in self.numbers().items() if name in COMPUTE
            }
            rates = replace(rates, **nested(compute))
        if nodes == 1 or self.between_nodes is None or self.all_gather is None:
            return rates
        num_others = local * nodes - 1
        shared = self.between_nodes * num_others / (local * local * (nodes - 1))
        return replace(
            rates,
            all_gather=min(self.all_gather, self.between_nodes),
            all_to_all=min(self.all_to_all or math.inf, shared),
            between_hosts=min(self.between_hosts or math.inf, self.between_nodes / local),
        )

    def numbers(self) -> dict[str, float]:
        """Return all known rates by dotted name, such as "disk_read" or "update.fp32"."""
        return flat(vars(self))

    @staticmethod
    def of(numbers: Mapping[str, float]) -> Rates:
        """Return the `Rates` of such `numbers`, which must include the three of the disk."""
        return Rates(**nested(numbers))


def flat(rates: Mapping[str, Any]) -> dict[str, float]:
    """Return nested rates by dotted name; those that are None are omitted."""
    numbers: dict[str, float] = {}
    for name, rate in rates.items():
        if isinstance(rate, Mapping):
            numbers |= {f"{name}.{key}": value for key, value in rate.items()}
        elif rate is not None:
            numbers[name] = rate
    return numbers


def nested(numbers: Mapping[str, float]) -> dict[str, Any]:
    """Return rates by dotted name as nested mappings; the inverse of `flat`."""
    rates: dict[str, Any] = {}
    for name, rate in numbers.items():
        section, _, key = name.rpartition(".")
        (rates.setdefault(section, {}) if section else rates)[key] = rate
    return rates


# Rates assumed without a measurement: a desktop of the years 2020 to 2024, estimated low.
# Disk: one NVMe drive. Data sheets give 3.5 (PCIe 3) to 7 GB/s (PCIe 4) until the cache is full;
#   a step moves more than any cache holds. Both directions together gain little over one.
# Copies: PCIe 4 x16 carries 31.5 GB/s less framing, pinned copies reach 24 to 26 on an idle
#   machine, and a step copies in both directions at once while the host updates.
# Update: bound by memory. Dual-channel DDR4-3200 peaks at 51 GB/s; half of it, since copies and
#   disk use it too, over the bytes a parameter moves: 26 with fp32 moments, 18 with bf16, 14 with
#   8 bits (2 Zen 3 cores alone at 40 GB/s were measured at 1.5, 1.9 and 1.3e9:
#   docs/benchmarks/adam_2-core-epyc_2026-11-21.md).
# Compute: large products on a GPU of 16 to 24 GB (RTX 3090 70, 4080 95, 4090 150 TFLOP/s in bf16);
#   fp32 without tensor cores. Attention: half of that. Between: 70 % of 936 GB/s (RTX 3090);
#   logits: 32 bytes each.
# Device update: 26 bytes a parameter at 70 % of 936 GB/s (RTX 3090).
NOMINAL = Rates(
    disk_read=3.0e9,
    disk_write=2.5e9,
    disk_mixed=3.5e9,
    update={"fp32": 0.9e9, "bf16": 1.3e9, "8bit": 1.6e9},
    compute={"bf16": 100e12, "fp32": 30e12},
    between={"bf16": 650e9, "fp32": 650e9},
    attention={"bf16": 50e12, "fp32": 10e12},
    logits=20e9,
    to_device=22e9,
    from_device=22e9,
    device_update=25e9,
)
# The same desktop without a GPU: 8 cores with AVX2 peak at about 1 TFLOP/s in fp32; bf16 is
# emulated, and no faster. Operations between products: three times the rate measured on two cores
# of a Xeon with AVX-512 (docs/benchmarks/step_2-core-xeon_2026-11-25.md), bounded by memory.
NOMINAL_CPU = Rates(
    disk_read=NOMINAL.disk_read,
    disk_write=NOMINAL.disk_write,
    disk_mixed=NOMINAL.disk_mixed,
    update=NOMINAL.update,
    compute={"bf16": 0.5e12, "fp32": 0.6e12},
    between={"bf16": 20e9, "fp32": 40e9},
    attention={"bf16": 0.3e12, "fp32": 0.5e12},
    logits=0.6e9,
)


def nominal(unified: bool) -> Rates:
    """Return the rates assumed without a measurement; `unified` is a machine without a GPU."""
    return NOMINAL_CPU if unified else NOMINAL


def completed(
    numbers: Mapping[str, float], *, unified: bool, without: Iterable[str] = ()
) -> tuple[Rates, tuple[str, ...]]:
    """Return `numbers` completed with nominal rates, and the names of these.

    `numbers` are as in `Rates.numbers`. Rates named in `without` are not completed: the machine has
    no such resource.
    """
    defaults = nominal(unified).numbers()
    for name in without:
        defaults.pop(name, None)
    missing = tuple(name for name in defaults if name not in numbers)
    return Rates.of(defaults | dict(numbers)), missing


def rates_origin(rates: Rates, nominal: Collection[str], measured: str | None) -> str:
    """Describe the origin of rates, such as "measured 2026-11-21", and list the nominal ones."""
    if len(nominal) == len(rates.numbers()):
        return "nominal rates of a common machine: nothing was measured"
    origin = f"measured {measured}" if measured else "given"
    if nominal:
        origin += f"; nominal, not measured: {', '.join(nominal)}"
    return origin


# Rates of links that were not measured, by `unified`. Between GPUs without NVLink bytes go through
# RAM: down one PCIe 4 link and up another, which also carry copies from RAM; half the rate of a
# copy alone. Between processes: gloo over the loopback interface, where ranks compete for the cores
# that compute (2 ranks on 2 busy cores of an EPYC: 0.1 to 0.3e9 gathered, 0.3 to 0.9e9 exchanged).
# Between nodes: one port of 100 Gbit/s, less framing. Between their hosts: gloo over TCP, a guess.
_NOMINAL_LINKS = {False: 11e9, True: 0.3e9}
_NOMINAL_BETWEEN_NODES = 11e9
_NOMINAL_BETWEEN_HOSTS = {False: 1e9, True: 0.3e9}


def with_links(
    rates: Rates, local: int, nodes: int = 1, *, unified: bool, across: bool = False
) -> tuple[Rates, tuple[str, ...]]:
    """Return the rates completed with those of links between ranks, and the names of nominal ones.

    There are `local` ranks on each node. With `across` the links between these nodes were measured,
    so that `between_nodes` is not completed.
    """
    defaults: dict[str, float] = {}
    if local * nodes > 1:
        defaults |= dict.fromkeys(LINKS, _NOMINAL_LINKS[unified])
    if nodes > 1 and not across:
        defaults[BETWEEN_NODES] = _NOMINAL_BETWEEN_NODES
    if nodes > 1:
        defaults[BETWEEN_HOSTS] = _NOMINAL_BETWEEN_HOSTS[unified]
    known = rates.numbers()
    missing = tuple(name for name in defaults if name not in known)
    return Rates.of(defaults | known), missing


# Passes over memory of the operations between products: see [Note: compute] in `plan/cost.py`.
PASSES_FORWARD, PASSES_BACKWARD = 27 / 16, 2 * 27 / 16 + 9 / 16

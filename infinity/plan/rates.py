"""How fast the lanes of a machine are: the numbers a plan's times are computed from.

Pure data. `calibration` measures them, once for each machine and path; `plan.cost` uses them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

UPDATE_FORMATS = ("fp32", "bf16", "8bit")
PRECISIONS = ("bf16", "fp32")
DISK = ("disk_read", "disk_write", "disk_mixed")
COPIES = ("to_device", "from_device")
UPDATE = tuple(f"update.{name}" for name in UPDATE_FORMATS)
COMPUTE = tuple(f"compute.{name}" for name in PRECISIONS)
DEVICE_UPDATE = "device_update"


@dataclass(frozen=True)
class Rates:
    """Bytes per second, unless said otherwise, of all paths of a run together.

    `disk_mixed` counts both directions, moved 1:1. `to_device` and `from_device` are of copies
    between host and device, None where they are one memory. `update` is parameters per second of
    the host's optimizer kernels with all threads, by format of the moments ("fp32", "bf16",
    "8bit"); `compute` FLOP per second of large matrix products on the device, as training mixes
    them (forward, and both of backward), by precision ("bf16", "fp32").
    """

    disk_read: float
    disk_write: float
    disk_mixed: float
    update: Mapping[str, float] = field(default_factory=dict)
    compute: Mapping[str, float] = field(default_factory=dict)
    to_device: float | None = None
    from_device: float | None = None
    device_update: float | None = None  # parameters per second, where the device has kernels

    def disk_s(self, read_bytes: int, written_bytes: int) -> float:
        """Seconds for so many bytes in both directions at once.

        What both directions have in common moves at the mixed rate, the rest alone.
        """
        both = min(read_bytes, written_bytes)
        return (
            2 * both / self.disk_mixed
            + (read_bytes - both) / self.disk_read
            + (written_bytes - both) / self.disk_write
        )

    def numbers(self) -> dict[str, float]:
        """Every rate that there is by dotted name, such as "disk_read" or "update.fp32"."""
        flat: dict[str, float | None] = {name: getattr(self, name) for name in DISK}
        flat |= {f"update.{name}": rate for name, rate in self.update.items()}
        flat |= {f"compute.{name}": rate for name, rate in self.compute.items()}
        flat |= {name: getattr(self, name) for name in (*COPIES, DEVICE_UPDATE)}
        return {name: rate for name, rate in flat.items() if rate is not None}

    @staticmethod
    def of(numbers: Mapping[str, float]) -> Rates:
        """The inverse of `numbers`; the disk's three must be there."""

        def below(section: str) -> dict[str, float]:
            prefix = f"{section}."
            return {
                name.removeprefix(prefix): rate
                for name, rate in numbers.items()
                if name.startswith(prefix)
            }

        alone = {name: rate for name, rate in numbers.items() if "." not in name}
        return Rates(**alone, update=below("update"), compute=below("compute"))


# Where nothing was measured: a desktop of the years 2020 to 2024, told low rather than high.
# Disk: one NVMe drive. Data sheets promise 3.5 (PCIe 3) to 7 GB/s (PCIe 4) while a cache lasts;
#   a step moves more than any cache holds. Both directions together gain little over one.
# Copies: PCIe 4 x16 carries 31.5 GB/s less framing, pinned copies see 24 to 26 when nothing else
#   moves, and a step moves both ways at once while the host updates.
# Update: bound by memory. Dual-channel DDR4-3200 peaks at 51 GB/s; half of it, since copies and
#   disk use it too, over the bytes a parameter moves: 26 with fp32 moments, 18 with bf16, 14 with
#   8 bits (2 Zen 3 cores alone at 40 GB/s were measured at 1.5, 1.9 and 1.3e9:
#   docs/benchmarks/adam_2-core-epyc_2026-11-21.md).
# Compute: large products on a GPU of 16 to 24 GB (RTX 3090 70, 4080 95, 4090 150 TFLOP/s in bf16);
#   fp32 without tensor cores.
# Device update: 26 bytes a parameter at 70 % of 936 GB/s (RTX 3090).
NOMINAL = Rates(
    disk_read=3.0e9,
    disk_write=2.5e9,
    disk_mixed=3.5e9,
    update={"fp32": 0.9e9, "bf16": 1.3e9, "8bit": 1.6e9},
    compute={"bf16": 100e12, "fp32": 30e12},
    to_device=22e9,
    from_device=22e9,
    device_update=25e9,
)
# The same desktop without a GPU: 8 cores with AVX2 peak at about 1 TFLOP/s in fp32; bf16 is
# emulated there, and no faster.
NOMINAL_CPU = Rates(
    disk_read=NOMINAL.disk_read,
    disk_write=NOMINAL.disk_write,
    disk_mixed=NOMINAL.disk_mixed,
    update=NOMINAL.update,
    compute={"bf16": 0.5e12, "fp32": 0.6e12},
)


def nominal(unified: bool) -> Rates:
    """The rates to plan with where nothing was measured; `unified` is a machine without a GPU."""
    return NOMINAL_CPU if unified else NOMINAL


def completed(
    numbers: Mapping[str, float], *, unified: bool, without: Iterable[str] = ()
) -> tuple[Rates, tuple[str, ...]]:
    """Rates from `numbers` (see `Rates.numbers`), and the names of those that had to be nominal.

    `without` names rates that are missing because the machine has no such thing.
    """
    wanted = nominal(unified).numbers()
    for name in without:
        wanted.pop(name, None)
    missing = tuple(name for name in wanted if name not in numbers)
    return Rates.of(wanted | dict(numbers)), missing


def rates_origin(rates: Rates, nominal: Collection[str], measured: str | None) -> str:
    """Where rates come from, for people: "measured 2026-11-21", and what is nominal."""
    if len(nominal) == len(rates.numbers()):
        return "nominal rates of a common machine: nothing was measured"
    origin = f"measured {measured}" if measured else "given"
    if nominal:
        origin += f"; nominal, not measured: {', '.join(nominal)}"
    return origin

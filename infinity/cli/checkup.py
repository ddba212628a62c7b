"""What `infinity doctor` finds out: facts about this machine, and what keeps a run from starting.

Collects everything it can; a part that fails is a problem in the list, not the end.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from infinity import __version__
from infinity.errors import DoesNotFitError, InfinityError, MachineError
from infinity.plan.machine import Machine, cpu_model, default_host_budget_bytes, read_machine
from infinity.plan.machine_file import PlanMachine
from infinity.sizes import format_size

# torch alone, imported and used once, takes 0.3 GiB; a model needs some room beside it.
LEAST_HOST_BYTES = 2**29
STATE_BYTES = 12  # per parameter, AdamW in bf16


def examine(paths: Sequence[Path], root: Path = Path("/")) -> dict[str, Any]:
    """Return the facts, JSON-able; sizes in bytes.

    `problems` is a list of `{what, because, remedy, exit_code}`; empty when a run could start.
    `root` replaces "/" as the place of /proc and /sys.
    """
    problems: list[dict[str, Any]] = []
    facts: dict[str, Any] = {"infinity": __version__, "machine": {}, "memory": {}}
    try:
        facts["machine"] = machine_facts()
        machine = read_machine(root=root)
        facts["memory"] = _memory(machine, root)
        _check_memory(machine)
    except InfinityError as error:
        problems.append(_problem(error))
    facts["torch"] = _part(_torch, problems)
    facts["kernels"] = _part(_kernels, problems)
    facts["io"] = _part(_io, problems)
    facts["drives"] = [_part(lambda path=path: _drive(path), problems) for path in paths]
    facts["places"] = [] if paths else _places()
    facts["notes"] = _notes(paths, facts)
    facts["problems"] = problems
    facts["ok"] = not problems
    return facts


def machine_facts() -> dict[str, Any]:
    """Processor, kernel, Python, memory and load, JSON-able; sizes in bytes."""
    machine = read_machine()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "system": platform.system(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "processor": cpu_model(),
        "num_cpus": machine.num_cpus,
        "host_ram_bytes": machine.host_ram_bytes,
        "load_average": os.getloadavg()[0],
    }


def describe(paths: Sequence[Path], refresh: bool = False) -> PlanMachine:
    """Return this machine for a plan: its rates are measured, or were and are kept.

    Raises `InfinityError` where it cannot be measured.
    """
    # Here, so that a machine without a working torch can still be examined.
    from infinity.calibration import cached_rates, device_name
    from infinity.memory.device import find_device

    with closing(find_device(None)) as device:
        found = cached_rates(paths, device, refresh=refresh)
        return PlanMachine.here(
            paths,
            device,
            found.rates,
            name=f"{cpu_model()}, device {device_name(device)}",
            measured=found.measured,
        )


def _part(look: Any, problems: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return what `look` finds, or note why it fails and return None."""
    try:
        found: dict[str, Any] = look()
    except InfinityError as error:
        problems.append(_problem(error))
        return None
    return found


def _problem(error: InfinityError) -> dict[str, Any]:
    return {
        "what": error.what,
        "because": error.because,
        "remedy": error.remedy,
        "exit_code": error.exit_code,
    }


def _memory(machine: Machine, root: Path) -> dict[str, Any]:
    physical_bytes = _meminfo(root, "MemTotal")
    in_cgroup = machine.host_ram_bytes < physical_bytes
    return {
        "physical_bytes": physical_bytes,
        "usable_bytes": machine.host_ram_bytes,
        "bounded_by": f"memory cgroup {_cgroup(root)}" if in_cgroup else "the machine's RAM",
        "available_bytes": machine.host_available_bytes,
        "budget_bytes": default_host_budget_bytes(machine),
        "memlock_bytes": machine.memlock_bytes,
        "transparent_huge_pages": machine.thp_mode,
        "huge_pages": _meminfo(root, "HugePages_Total", unit=1),
        "numa_nodes": [asdict(node) for node in machine.numa_nodes],
    }


def _check_memory(machine: Machine) -> None:
    budget_bytes = default_host_budget_bytes(machine)
    if budget_bytes < LEAST_HOST_BYTES:
        raise DoesNotFitError(
            f"{format_size(budget_bytes)} of RAM can be planned with, "
            f"{format_size(LEAST_HOST_BYTES)} is the least that starts",
            because=f"{format_size(machine.host_available_bytes)} are available",
            remedy="end other programs, or raise the memory limit of the container",
        )


def _meminfo(root: Path, name: str, unit: int = 1024) -> int:
    text = (root / "proc/meminfo").read_text(encoding="utf-8")
    match = re.search(rf"^{name}:\s+([0-9]+)", text, re.MULTILINE)
    return int(match[1]) * unit if match else 0


def _cgroup(root: Path) -> str:
    """Return the path of our memory cgroup; the limit is its own or that of one above it."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "memory" in controllers.split(","):
                return path
    return "(unknown)"


def _torch() -> dict[str, Any]:
    try:
        import torch
    except Exception as error:  # a broken installation fails in many ways
        raise MachineError(
            "torch cannot be imported", because=str(error), remedy="pip install 'torch>=2.10'"
        ) from error
    accelerators: list[str] = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            size = format_size(properties.total_memory)
            capability = f"{properties.major}.{properties.minor}"
            accelerators.append(f"{properties.name}, {size}, capability {capability}")
        reason = ""
    elif torch.version.cuda is None:
        reason = f"this torch ({torch.__version__}) is built without CUDA"
    else:
        reason = f"torch is built for CUDA {torch.version.cuda}, but finds no device or no driver"
    return {
        "version": torch.__version__,
        "num_threads": torch.get_num_threads(),
        "accelerators": accelerators,
        "no_accelerator_because": reason,
    }


def _kernels() -> dict[str, Any]:
    try:
        from infinity import _adam, _aio

        isas = _adam.isas()
        with_best = _adam.Pool(1)
        chosen = with_best.isa
        with_best.close()
        return {"isas": isas, "chosen": chosen, "crc32c": _aio.crc32c_kind}
    except ImportError as error:
        raise MachineError(
            "the native modules cannot be loaded", because=str(error), remedy="make setup"
        ) from error


def _io() -> dict[str, Any]:
    from infinity.memory.file_systems import chosen_backend

    try:
        backend, reason = chosen_backend()
    except OSError as error:
        raise MachineError("no I/O back end starts", because=str(error)) from error
    return {"backend": backend, "reason": reason}


def _drive(path: Path) -> dict[str, Any]:
    from infinity.memory.file_systems import look_at

    drive = look_at(path)
    return drive.as_dict() | {"parameters": drive.free_bytes // STATE_BYTES}


def _places() -> list[dict[str, Any]]:
    """Return the mounted file systems on block devices, largest room first; nothing is written."""
    places: dict[str, dict[str, Any]] = {}
    for partition in psutil.disk_partitions(all=False):
        with suppress(OSError):
            free_bytes = psutil.disk_usage(partition.mountpoint).free
            # Containers mount one device in many places; the first is enough.
            places.setdefault(
                partition.device,
                {
                    "path": partition.mountpoint,
                    "device": partition.device,
                    "file_system": partition.fstype,
                    "free_bytes": free_bytes,
                },
            )
    return sorted(places.values(), key=lambda place: -int(place["free_bytes"]))


def _notes(paths: Sequence[Path], facts: dict[str, Any]) -> list[str]:
    """Return what does not stop a run but costs it something."""
    from infinity.memory.file_systems import shared_drives

    notes = []
    for drive in facts["drives"]:
        if drive is None:
            continue
        notes += drive["notes"]
        for name, answer in drive["backends"].items():
            if not answer["ok"]:
                notes.append(f"{drive['path']}: {name} does not work: {answer['reason']}")
    if len(paths) > 1:
        notes += shared_drives(paths)
    if facts["memory"].get("transparent_huge_pages") == "never":
        notes.append(
            "transparent huge pages are off: requests to the drives are cut into 4 KiB pieces;"
            " echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        )
    return notes

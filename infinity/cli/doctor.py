"""`infinity doctor`: check whether a run could start on this machine; plain text or JSON."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from infinity._version import __version__
from infinity.cli.terminal import AsJson, Drives, command, library_stdout_to_stderr
from infinity.common.files import atomic_write
from infinity.common.sizes import format_count, format_rate, format_size
from infinity.errors import ConfigError, DoesNotFitError, InfinityError, MachineError
from infinity.plan.machine import (
    Machine,
    cgroup_path,
    cpu_model,
    default_host_budget_bytes,
    mounts,
    read_machine,
    read_meminfo,
)
from infinity.plan.plan import BETWEEN_HOSTS, LINKS
from infinity.plan.plan_machine import PlanMachine
from infinity.plan.rates import BETWEEN_NODES, COPIES, DISK, Rates

# Importing torch and using it once takes 0.3 GiB; a model needs some RAM on top.
LEAST_HOST_BYTES = 2**29
STATE_BYTES = 12  # per parameter, AdamW in bf16
NEARLY_FULL = 0.1  # share of a drive that is free
T = TypeVar("T")


def collect_facts(paths: Sequence[Path], root: Path = Path("/")) -> dict[str, Any]:
    """Return facts about this machine and reasons why a run cannot start, JSON-able.

    Sizes are in bytes. A check that fails adds an entry `{what, because, remedy, exit_code}` to
    `problems`, and the others still run; the list is empty if a run could start. /proc and /sys are
    read below `root`.
    """
    problems: list[dict[str, Any]] = []

    def check(probe: Callable[[], T]) -> T | None:
        """Run one check; return its result, or None after adding a problem."""
        try:
            return probe()
        except InfinityError as error:
            names = ("what", "because", "remedy", "exit_code")
            problems.append({name: getattr(error, name) for name in names})
            return None

    facts: dict[str, Any] = {"infinity": __version__, "machine": check(machine_facts) or {}}
    machine = check(lambda: read_machine(root=root)) if facts["machine"] else None
    facts["memory"] = {} if machine is None else _memory(machine, root)
    if machine is not None:
        check(lambda: _check_memory(machine))
    facts["torch"] = check(_torch)
    facts["kernels"] = check(lambda: _kernels(root))
    facts["io"] = check(_io)
    facts["drives"] = [check(partial(_drive, path)) for path in paths]
    facts["places"] = [] if paths else _file_systems()
    facts["notes"] = drive_notes(paths, [drive for drive in facts["drives"] if drive])
    if facts["memory"].get("transparent_huge_pages") == "never":
        facts["notes"].append(
            "transparent huge pages are off: requests to the drives are cut into 4 KiB pieces;"
            " echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        )
    facts["problems"] = problems
    facts["ok"] = not problems
    return facts


def machine_facts() -> dict[str, Any]:
    """Return processor, kernel, Python, memory and load, JSON-able; sizes in bytes."""
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


def measured_links(refresh: bool) -> dict[str, Any] | None:
    """Return rates between the ranks that a launcher started; None for a single process.

    Collective: all ranks measure together, and each node caches the result. Keys: `rank` (of this
    process), `gpus` (ranks per node), `nodes`, `rates`, `measured` (the date).
    """
    from infinity.distributed.environment import num_launched
    from infinity.distributed.launch import find_ranks

    if num_launched() == 1:
        return None
    from infinity._initialize import device_for
    from infinity.profiling.link_rates import cached_links
    from infinity.storage.devices import resolve_device

    with closing(find_ranks()) as ranks:
        opened = resolve_device(device_for(None, ranks))
        with closing(opened) as device, ranks.collective_section("measures links"):
            ranks.check(device.torch_device)
            rates, date = cached_links(ranks, device, refresh=refresh)
        result = {"rank": ranks.rank, "gpus": ranks.local_count, "nodes": ranks.num_nodes}
        return result | {"rates": rates, "measured": date}


def describe(
    paths: Sequence[Path], refresh: bool, links: dict[str, Any] | None = None
) -> PlanMachine:
    """Return this machine for a plan, with cached rates or rates measured now.

    `links` adds the rates between ranks, see `measured_links`. Raises `InfinityError` if the
    machine cannot be measured.
    """
    # Imported locally so that a machine without a working torch can still be examined.
    from infinity.profiling.calibration import cached_rates
    from infinity.profiling.rate_cache import device_name
    from infinity.storage.devices import resolve_device

    with closing(resolve_device(None)) as device:
        known = cached_rates(paths, device, refresh=refresh)
        links = links or {"rates": {}, "gpus": 1, "nodes": 1}
        machine = PlanMachine.this_machine(
            paths,
            device.memory_bytes(),
            Rates.of(known.rates.numbers() | links["rates"]),
            name=f"{cpu_model()}, device {device_name(device)}",
            measured=known.measured,
        )
        return replace(machine, gpus=links["gpus"], nodes=links["nodes"])


def _memory(machine: Machine, root: Path) -> dict[str, Any]:
    sizes = read_meminfo(root)
    physical_bytes = sizes.get("MemTotal", 0)
    cgroup = cgroup_path(root, "memory") or cgroup_path(root, "") or "(unknown)"
    in_cgroup = machine.host_ram_bytes < physical_bytes
    return {
        "physical_bytes": physical_bytes,
        "usable_bytes": machine.host_ram_bytes,
        "bounded_by": f"memory cgroup {cgroup}" if in_cgroup else "the machine's RAM",
        "available_bytes": machine.host_available_bytes,
        "budget_bytes": default_host_budget_bytes(machine),
        "memlock_bytes": machine.memlock_bytes,
        "transparent_huge_pages": machine.thp_mode,
        "huge_pages": sizes.get("HugePages_Total", 0),
    }


def _check_memory(machine: Machine) -> None:
    budget_bytes = default_host_budget_bytes(machine)
    if budget_bytes < LEAST_HOST_BYTES:
        raise DoesNotFitError(
            f"a run could use {format_size(budget_bytes)} of RAM, and needs at least "
            f"{format_size(LEAST_HOST_BYTES)} to start",
            because=f"{format_size(machine.host_available_bytes)} are available",
            remedy="end other programs, or raise the memory limit of the container",
        )


def _torch() -> dict[str, Any]:
    try:
        import torch
    except Exception as error:  # a broken installation fails in many ways
        raise MachineError(
            "torch cannot be imported", because=str(error), remedy="pip install 'torch>=2.10'"
        ) from error
    gpus, reason = [], ""
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        gpus = [torch.cuda.get_device_properties(index) for index in range(count)]
    elif torch.version.cuda is None:
        reason = f"this torch ({torch.__version__}) is built without CUDA"
    else:
        reason = f"torch is built for CUDA {torch.version.cuda}, but finds no device or no driver"
    return {
        "version": torch.__version__,
        "num_threads": torch.get_num_threads(),
        "accelerators": [
            f"{gpu.name}, {format_size(gpu.total_memory)}, capability {gpu.major}.{gpu.minor}"
            for gpu in gpus
        ],
        "no_accelerator_because": reason,
    }


def _kernels(root: Path) -> dict[str, Any]:
    try:
        import infinity._adam as _adam
        import infinity._aio as _aio

        with closing(_adam.Pool(1, root=str(root))) as pool:
            kernels = {"isas": _adam.isas(), "chosen": pool.isa, "cpus_by_node": pool.nodes}
        return kernels | {"crc32c": _aio.crc32c_kind}
    except ImportError as error:
        raise MachineError(
            "the native modules cannot be loaded", because=str(error), remedy="make setup"
        ) from error


def _io() -> dict[str, Any]:
    from infinity.storage.drives import chosen_backend

    try:
        backend, reason = chosen_backend()
    except OSError as error:
        raise MachineError("no I/O back end starts", because=str(error)) from error
    return {"backend": backend, "reason": reason}


def _drive(path: Path) -> dict[str, Any]:
    from infinity.storage.drives import probe_path

    drive = probe_path(path)
    return drive.as_dict() | {"parameters": drive.free_bytes // STATE_BYTES}


def _file_systems() -> list[dict[str, Any]]:
    """Return the mounted file systems on block devices, by free bytes; nothing is written."""
    file_systems: dict[str, dict[str, Any]] = {}
    for _, mount_point, (kind, device, _) in mounts(Path("/")):
        # Containers mount one device at many paths, single files among them.
        if device.startswith("/dev/") and device not in file_systems and os.path.isdir(mount_point):
            with suppress(OSError):
                free_bytes = shutil.disk_usage(mount_point).free
                entry = {"path": mount_point, "device": device, "file_system": kind}
                file_systems[device] = entry | {"free_bytes": free_bytes}
    return sorted(file_systems.values(), key=lambda item: -int(item["free_bytes"]))


def drive_notes(paths: Sequence[Path], drives: Sequence[dict[str, Any]]) -> list[str]:
    """Return messages about properties of drives that cost speed, with remedies.

    Args:
        paths: Paths of the drives.
        drives: `Drive.as_dict` of each path.
    """
    from infinity.storage.drives import shared_drives

    notes = []
    for drive in drives:
        notes += drive["notes"]
        for name, status in drive["backends"].items():
            if not status["ok"]:
                notes.append(f"{drive['path']}: {name} does not work: {status['reason']}")
        free, total = drive["free_bytes"], drive["total_bytes"]
        if free < NEARLY_FULL * total:
            notes.append(
                f"{drive['path']} is {1 - free / total:.0%} full ({format_size(free)} of "
                f"{format_size(total)} are free): flash drives write slower when nearly full; "
                "free space there"
            )
    return notes + (shared_drives(paths) if len(paths) > 1 else [])


def doctor(
    path: Drives = None,
    machine_file: Annotated[
        Path | None,
        typer.Option(
            metavar="OUT.json",
            help="Write the facts and rates that a plan needs; rates are measured once.",
        ),
    ] = None,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Measure the stored rates again.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check this machine: its hardware, and whether a run could start.

    Under torchrun the links between its ranks are measured once, and stored for runs with the same
    number of ranks: `torchrun --standalone --nproc-per-node 2 --no-python infinity doctor`.

    Exits with 0 if a run could start, else with the code of the first problem: 3 something does
    not fit, 4 the machine refuses. A machine file is only written if there is no problem.
    """
    with command():
        paths = [part.expanduser() for part in path or []]
        with library_stdout_to_stderr():
            links = measured_links(refresh)
            if links is not None and links.pop("rank"):
                return  # the first rank says it
            if refresh and machine_file is None and links is None:
                remedy = "add --machine-file OUT.json"
                raise ConfigError("--refresh measures nothing", remedy=remedy)
            facts = collect_facts(paths)
            if links is not None:
                facts["links"] = links
            if machine_file is not None and facts["ok"]:
                machine = describe(paths, refresh, links)
                _write(machine_file.expanduser(), machine.as_text())
                facts["machine_file"] = machine.as_dict()
                facts["rates"] = machine.rates_origin
        print(json.dumps(facts) if as_json else text_of(facts), flush=True)
        if facts["problems"]:
            raise typer.Exit(int(facts["problems"][0]["exit_code"]))


def _write(path: Path, text: str) -> None:
    try:
        with atomic_write(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise MachineError(
            f"{path}: the machine file cannot be written", because=error.strerror
        ) from error


def text_of(facts: dict[str, Any]) -> str:
    """Return the facts of `collect_facts` as plain text, one per line."""
    lines = [f"infinity   {facts['infinity']}"]
    lines += _machine_lines(facts)
    lines += [line for drive in facts["drives"] if drive for line in _drive_lines(drive)]
    if facts["places"]:
        lines.append("")
        lines.append("file systems on drives (try one with --path DIR):")
        lines += [
            f"  {entry['path']}: {entry['file_system']} on {entry['device']}, "
            f"{format_size(entry['free_bytes'])} free"
            for entry in facts["places"]
        ]
    lines += ["", *(f"note: {note}" for note in facts["notes"])] if facts["notes"] else []
    lines.append("")
    for problem in facts["problems"]:
        lines.append(f"PROBLEM: {problem['what']}")
        lines += [f"  because: {problem['because']}"] if problem["because"] else []
        lines += [f"  try: {problem['remedy']}"] if problem["remedy"] else []
    if (links := facts.get("links")) is not None:
        lines.append(
            f"links      {links['gpus']} ranks on each of {links['nodes']} node(s), measured"
        )
        lines += [f"           {links['measured']}: {link_text(links['rates'])}", ""]
    if "machine_file" in facts:
        lines += [*rate_lines(facts["machine_file"]["rates"], facts["rates"]), ""]
    if facts["ok"]:
        lines.append("a run could start here")
    return "\n".join(lines)


def _machine_lines(facts: dict[str, Any]) -> list[str]:
    lines = []
    if machine := facts["machine"]:
        lines += [
            f"system     {machine['system']} {machine['kernel']}, Python {machine['python']}, "
            f"{machine['date']}",
            f"processor  {machine['processor']}, {machine['num_cpus']} CPUs for this process, "
            f"load {machine['load_average']:.1f}",
        ]
    if kernels := facts["kernels"]:
        lines.append(
            f"kernels    {kernels['chosen']} (of {', '.join(kernels['isas'])}), "
            f"CRC32C by {kernels['crc32c']}"
        )
        sizes = [str(len(cpus)) for cpus in kernels["cpus_by_node"]]
        lines.append(f"NUMA       {'+'.join(sizes) + ' CPUs' if len(sizes) > 1 else 'no'}")
    if torch := facts["torch"]:
        lines.append(f"torch      {torch['version']}, {torch['num_threads']} threads")
        lines += [f"device     {name}" for name in torch["accelerators"]]
        if torch["no_accelerator_because"]:
            lines.append(f"device     none: {torch['no_accelerator_because']}")
    if memory := facts["memory"]:
        memlock = memory["memlock_bytes"]
        lines += [
            f"RAM        {format_size(memory['usable_bytes'])} usable, bounded by "
            f"{memory['bounded_by']}; {format_size(memory['physical_bytes'])} in the machine",
            f"           {format_size(memory['available_bytes'])} available now, a run would plan "
            f"with {format_size(memory['budget_bytes'])}",
            f"memlock    {'unlimited' if memlock is None else format_size(memlock)}",
            f"huge pages transparent: {memory['transparent_huge_pages']}, reserved: "
            f"{memory['huge_pages']}",
        ]
    if io := facts["io"]:
        lines.append(f"I/O        {io['reason']}")
    return lines


def rate_lines(rates: dict[str, Any], origin: str) -> list[str]:
    """Return lines with all rates of a machine and their origin."""
    lines = [f"rates      {origin}"]
    busy = "" if "to_device" in rates else "; with busy processors"
    for title, names, suffix in (("disk", DISK, busy), ("copies", COPIES, "")):
        labels = {n: n.removeprefix("disk_").replace("_", " ") for n in names if n in rates}
        texts = ", ".join(f"{label} {format_rate(rates[n])}" for n, label in labels.items())
        lines += [f"           {title}: {texts}{suffix}"] if labels else []
    if LINKS[0] in rates:
        lines.append(f"           links: {link_text(rates)}")
    updates = dict(rates["update"])
    if rates.get("device_update"):
        updates["on the device"] = rates["device_update"]
    texts = ", ".join(f"{name} {format_count(rate)}" for name, rate in updates.items())
    lines.append(f"           update: {texts} parameters/s")
    for kind in ("compute", "attention"):
        texts = ", ".join(f"{name} {rate / 1e12:.3g}" for name, rate in rates[kind].items())
        lines.append(f"           {kind}: {texts} TFLOP/s")
    texts = ", ".join(f"{name} {format_rate(rate)}" for name, rate in rates["between"].items())
    lines.append(f"           between products: {texts}; logits {format_count(rates['logits'])}/s")
    return lines


def link_text(rates: dict[str, Any]) -> str:
    """Return the rates between ranks as text."""
    texts = ", ".join(f"{name.replace('_', '-')} {format_rate(rates[name])}" for name in LINKS)
    between = rates.get(BETWEEN_NODES)
    suffix = f"; {format_rate(between)} by each node from others" if between else ""
    hosts = rates.get(BETWEEN_HOSTS)
    suffix += f", {format_rate(hosts)} by each rank from RAM to RAM" if hosts else ""
    return f"{texts}, received by each rank{suffix}"


def _drive_lines(drive: dict[str, Any]) -> list[str]:
    device = " ".join(part for part in (drive["device"], drive["model"]) if part)
    if drive["direct"]:
        direct = (
            f"direct, memory aligned to {drive['memory_alignment']} B, offsets to "
            f"{drive['offset_alignment']} B"
        )
    else:
        direct = f"buffered: {drive['direct_reason']}"
    lines = [
        "",
        f"path       {drive['path']}",
        f"           {drive['file_system']} on device {device}; {direct}",
        f"           {format_size(drive['free_bytes'])} free of "
        f"{format_size(drive['total_bytes'])}: space for the state of "
        f"{format_count(drive['parameters'])} parameters (AdamW, bf16)",
        f"           how fast it is: infinity bench {drive['path']}",
    ]
    lines += [
        f"           {name}: {'works' if status['ok'] else 'does not work: ' + status['reason']}"
        for name, status in drive["backends"].items()
    ]
    return lines

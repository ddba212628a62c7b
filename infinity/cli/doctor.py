"""`infinity doctor`: could a run start here? Plain text to paste into a report, or JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from infinity.cli.ending import command, stdout_is_ours
from infinity.errors import ConfigError, MachineError
from infinity.sizes import format_count, format_rate, format_size
from infinity.stable import atomic_write


def doctor(
    path: Annotated[
        list[Path] | None,
        typer.Option("--path", metavar="DIR", help="An nvme_path to try; may be repeated."),
    ] = None,
    machine_file: Annotated[
        Path | None,
        typer.Option(
            metavar="OUT.json",
            help="Write what a plan must know of this machine; its speeds are measured once.",
        ),
    ] = None,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Measure again what was measured before.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Say what this machine offers, and whether a run could start.

    Exits with 0 if it could, else with the code of the first problem: 3 something does not fit,
    4 the machine refuses. No machine file is written then.
    """
    with command():
        from infinity.cli.checkup import describe, examine

        if refresh and machine_file is None:
            raise ConfigError("--refresh measures nothing", remedy="add --machine-file OUT.json")
        paths = [part.expanduser() for part in path or []]
        with stdout_is_ours():
            facts = examine(paths)
            if machine_file is not None and facts["ok"]:
                machine = describe(paths, refresh)
                _write(machine_file.expanduser(), machine.as_text())
                facts["machine_file"] = machine.as_dict()
                facts["rates"] = machine.rates_origin
        print(json.dumps(facts) if as_json else text_of(facts), flush=True)
        if facts["problems"]:
            raise typer.Exit(int(facts["problems"][0]["exit_code"]))


def _write(path: Path, text: str) -> None:
    """Replace the file as a whole: an old one is lost only for a complete new one."""
    try:
        with atomic_write(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise MachineError(
            f"{path}: the machine file cannot be written", because=error.strerror
        ) from error


def text_of(facts: dict[str, Any]) -> str:
    """Return the facts as plain text, one per line."""
    lines = [f"infinity   {facts['infinity']}"]
    lines += _machine_lines(facts)
    lines += [line for drive in facts["drives"] if drive for line in _drive_lines(drive)]
    if facts["places"]:
        lines.append("")
        lines.append("file systems on drives (try one with --path DIR):")
        lines += [
            f"  {place['path']}: {place['file_system']} on {place['device']}, "
            f"{format_size(place['free_bytes'])} free"
            for place in facts["places"]
        ]
    lines += ["", *(f"note: {note}" for note in facts["notes"])] if facts["notes"] else []
    lines.append("")
    for problem in facts["problems"]:
        lines.append(f"PROBLEM: {problem['what']}")
        lines += [f"  because: {problem['because']}"] if problem["because"] else []
        lines += [f"  try: {problem['remedy']}"] if problem["remedy"] else []
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
            "NUMA       "
            + (", ".join(f"{n['name']}: CPUs {n['cpus']}" for n in memory["numa_nodes"]) or "no"),
        ]
    if io := facts["io"]:
        lines.append(f"I/O        {io['reason']}")
    return lines


def rate_lines(rates: dict[str, Any], origin: str) -> list[str]:
    """Return how fast the lanes are, and where the numbers come from."""
    lines = [f"rates      {origin}"]
    for title, names in (
        ("disk", ("disk_read", "disk_write", "disk_mixed")),
        ("copies", ("to_device", "from_device")),
    ):
        known = [name for name in names if name in rates]
        each = ", ".join(f"{_words(name)} {format_rate(rates[name])}" for name in known)
        lines += [f"           {title}: {each}"] if known else []
    updates = dict(rates["update"])
    if rates.get("device_update"):
        updates["on the device"] = rates["device_update"]
    each = ", ".join(f"{name} {format_count(rate)}" for name, rate in updates.items())
    lines.append(f"           update: {each} parameters/s")
    each = ", ".join(f"{name} {rate / 1e12:.3g}" for name, rate in rates["compute"].items())
    lines.append(f"           compute: {each} TFLOP/s")
    return lines


def _words(name: str) -> str:
    return name.removeprefix("disk_").replace("_", " ")


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
        f"{format_size(drive['total_bytes'])}: room for the state of "
        f"{format_count(drive['parameters'])} parameters (AdamW, bf16)",
    ]
    lines += [
        f"           {name}: {'works' if answer['ok'] else 'does not work: ' + answer['reason']}"
        for name, answer in drive["backends"].items()
    ]
    return lines

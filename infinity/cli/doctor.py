"""`infinity doctor`: could a run start here? Plain text to paste into a report, or JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from infinity.cli.ending import command, stdout_is_ours
from infinity.sizes import format_count, format_size


def doctor(
    path: Annotated[
        list[Path] | None,
        typer.Option("--path", metavar="DIR", help="An nvme_path to try; may be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Say what this machine offers, and whether a run could start.

    Exits with 0 if it could, else with the code of the first problem: 3 something does not fit,
    4 the machine refuses.
    """
    with command():
        from infinity.cli.checkup import examine

        with stdout_is_ours():
            facts = examine([part.expanduser() for part in path or []])
        print(json.dumps(facts) if as_json else text_of(facts), flush=True)
        if facts["problems"]:
            raise typer.Exit(int(facts["problems"][0]["exit_code"]))


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

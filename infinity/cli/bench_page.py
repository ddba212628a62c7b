"""The report of the swap benchmark as people read it."""

from __future__ import annotations

from typing import Any

from infinity.bench.load import MODES
from infinity.cli.screen import Page
from infinity.sizes import format_count, format_duration, format_size


def show_disk(report: dict[str, Any]) -> None:
    """Print tables, the recommended `io:` block, and what it means for training."""
    page = Page()
    machine = report["machine"]
    page.say(
        f"{machine['processor']}, {machine['num_cpus']} CPUs, Linux {machine['kernel']}, "
        f"{machine['date']}, load {machine['load_average']:.1f} before and "
        f"{machine['load_average_after']:.1f} after"
    )
    for drive in report["drives"]:
        _say_drive(page, drive)
    for note in report["notes"]:
        page.say(f"note: {note}")
    page.say()
    _table(page, report)
    _say_ratios(page, report)
    for name, reason in report["left_out"].items():
        page.say(f"left out: {name}: {reason}")
    page.say()
    page.say(f"recommended, for your configuration:\n\n{recommended_yaml(report)}")
    _say_training(page, report)


def _say_drive(page: Page, drive: dict[str, Any]) -> None:
    if drive["direct"]:
        how = f"direct, aligned to {drive['offset_alignment']} B"
    else:
        how = f"BUFFERED: {drive['direct_reason']}; rates include the page cache"
    device = " ".join(part for part in (drive["device"], drive["model"]) if part)
    page.say(
        f"{drive['path']}: {drive['file_system']} on {device}, {how}, "
        f"{format_size(drive['free_bytes'])} free"
    )
    for name, answer in drive["backends"].items():
        if not answer["ok"]:
            page.say(f"  {name} does not work here: {answer['reason']}")


def _table(page: Page, report: dict[str, Any]) -> None:
    rows = []
    for name, entry in report["contenders"].items():
        cells = []
        for mode in MODES:
            found = entry.get(mode)
            if found is None:
                cells.append("")
                continue
            star = " *" if found["is_reference"] else ""
            spread = f"{found['min_gib_s']:.2f}-{found['max_gib_s']:.2f}"
            cells.append(f"{found['median_gib_s']:.2f} ({spread}){star}")
        cpu = [
            f"{entry[mode]['cpu_s_per_gib']:.3f}"
            if mode in entry and entry[mode]["cpu_s_per_gib"] is not None
            else "-"
            for mode in MODES
        ]
        rows.append([name, *cells, " / ".join(cpu)])
    page.table(
        f"GiB/s, median (range) of {report['rounds']} interleaved round(s); mixed counts both ways",
        ["contender (* reference)", *MODES, "CPU s/GiB r / w / m"],
        rows,
    )


def _say_ratios(page: Page, report: dict[str, Any]) -> None:
    names = report["reference"]["names"]
    keys = [("ratio", report["ratio_backend"])]
    if "threads_ratio" in report and report["ratio_backend"] != "threads":
        keys.append(("threads_ratio", "threads"))
    for key, backend in keys:
        for mode in MODES:
            low, high = report[f"{key}_interval"][mode]
            coverage = report[f"{key}_coverage"][mode]
            verdict = "holds" if report["holds"][backend][mode] else "BELOW"
            page.say(
                f"{mode:5}  {backend} / {names[mode]}: {report[key][mode]:.3f}, "
                f"{coverage:.0%} interval {low:.3f} to {high:.3f}: {verdict} "
                f"(target {report['target']})"
            )


def recommended_yaml(report: dict[str, Any]) -> str:
    """Return the lines to paste into a configuration."""
    best = report["best"]["config"]
    threads = report["configs"].get("threads", best)
    paths = [drive["path"] for drive in report["drives"]]
    value = paths[0] if len(paths) == 1 else f"[{', '.join(paths)}]"
    # "auto" is io_uring where it works; a container that forbids it then still trains.
    backend = "auto" if best["backend"] == "io_uring" else best["backend"]
    return "\n".join(
        [
            f"nvme_path: {value}",
            "io:",
            f"  backend: {backend}",
            f"  block_size: {_mib_text(best['block_size'])}",
            f"  queue_depth: {best['queue_depth']}",
            f"  num_threads: {threads['num_threads']}",
        ]
    )


def _mib_text(num_bytes: int) -> str:
    return f"{num_bytes // 2**20}MiB" if num_bytes % 2**20 == 0 else f"{num_bytes // 2**10}KiB"


def _say_training(page: Page, report: dict[str, Any]) -> None:
    terms = report["training"]
    count = format_count(terms["num_parameters"])
    page.say()
    page.say(
        f"bf16 AdamW state streams at {terms['sweep_parameters_per_s'] / 1e9:.3f} Gparam/s "
        "(read, updated and written back).\n"
        f"A {count} step with its state on disk, gradients in RAM and one micro-batch reads "
        f"{format_size(terms['read_bytes'])}, writes {format_size(terms['written_bytes'])}, and "
        f"takes >= {format_duration(terms['step_s'])} on this disk.\n"
        f"It wears the drive by {terms['written_bytes'] / 1e9:.0f} GB a step: 100 TB of its "
        f"rated writes last for {terms['steps_per_100_tbw']:.0f} steps."
    )


def show_faults(report: dict[str, Any]) -> None:
    """Print what happened under each kind of fault."""
    page = Page()
    rows = [
        [
            f"{entry['kind']} ({entry['backend']})",
            str(entry["requests"]),
            str(entry["right"]),
            ", ".join(f"{name} {count}" for name, count in entry["raised"].items()) or "-",
            str(entry["caught"]),
            str(entry["silent"]),
            str(entry["wrong_error"]),
        ]
        for entry in report["kinds"]
    ]
    page.table(
        f"injected faults, seed {report['seed']}, {report['path']}",
        ["kind", "requests", "right", "raised", "caught by CRC32C", "SILENT", "wrong error"],
        rows,
    )
    page.say("every request was right or said so" if report["ok"] else "WRONG: see above")

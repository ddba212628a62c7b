"""Report of the swap benchmark, as JSON-serializable data and as a page."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ratios import CONFIDENCE, TARGET, Ratio, geometric_mean, ratio_of

from infinity.cli.doctor import STATE_BYTES
from infinity.cli.terminal import Page
from infinity.common.sizes import format_count, format_duration, format_size
from infinity.swap_benchmark.load import MODES, Mode
from infinity.swap_benchmark.rounds import Samples, median_cpu, median_rate
from swap.rounds import CACHED, Calibration, Tuned, choose

# bf16 AdamW with one micro-batch; bytes per parameter and step.
PASS_BYTES = 2 * STATE_BYTES  # read and written once
FETCH_BYTES = 2  # weights are read again for backward
EXAMPLE_PARAMETERS = 7_000_000_000


def training_terms(
    mixed_bytes_per_s: float, read_bytes_per_s: float, num_parameters: int = EXAMPLE_PARAMETERS
) -> dict[str, float]:
    """Return times and bytes of a step with state on disk, gradients in RAM and one micro-batch.

    `mixed_bytes_per_s` counts both directions, 1:1. `step_s` is a lower bound: reads and writes of
    the optimizer pass, then the fetch for backward.
    """
    written = STATE_BYTES * num_parameters
    step_s = PASS_BYTES / mixed_bytes_per_s + FETCH_BYTES / read_bytes_per_s
    return {
        "update_parameters_per_s": mixed_bytes_per_s / PASS_BYTES,
        "num_parameters": num_parameters,
        "read_bytes": (STATE_BYTES + FETCH_BYTES) * num_parameters,
        "written_bytes": written,
        "step_s": num_parameters * step_s,
        "steps_per_100_tbw": 100 * 10**12 / written,  # of the rated endurance of a drive
    }


@dataclass(frozen=True)
class Findings:
    """All measurements; rates in bytes per second."""

    drive_rates: list[dict[Mode, float]]
    tuned: Tuned
    calibration: Calibration
    reference_names: dict[Mode, str]
    ours: dict[str, str]  # contender of infinity by back end
    families: dict[str, str]
    paired: Samples
    left_out: dict[str, str]
    sample_bytes: dict[Mode, int]


_GIB = 2**30
UNITS = (
    "rates in GiB/s (2**30 bytes), mixed counts both directions; durations in s; ratios are ours"
    " divided by the reference, the median over rounds; intervals are order statistics of it"
)


def assemble(
    findings: Findings,
    *,
    drives: list[dict[str, Any]],
    notes: list[str],
    machine: dict[str, Any],
    command: list[str],
    options: dict[str, Any],
) -> dict[str, Any]:
    """Return the report.

    `ratio` is that of io_uring if usable, else of threads (see `ratio_backend`); `threads_ratio` is
    always that of threads. `best` is the back end of `ratio`, unless the other one is clearly
    faster over all modes.
    """
    ratio_backend = "io_uring" if "io_uring" in findings.ours else "threads"
    speeds = {backend: _overall(findings, name) for backend, name in findings.ours.items()}
    best = choose(speeds, ratio_backend)
    ratios = {backend: _ratios(findings, name) for backend, name in findings.ours.items()}
    rates = _rates(findings, dict.fromkeys(MODES, findings.ours[best]))
    return {
        "best": {**_gib(rates), "config": vars(findings.tuned.settings[best])},
        "reference": {
            **_gib(_rates(findings, findings.reference_names)),
            "name": _one_name(findings.reference_names),
            "names": dict(findings.reference_names),
        },
        "ratio_backend": ratio_backend,
        **_ratio_keys("ratio", ratios[ratio_backend]),
        **(_ratio_keys("threads_ratio", ratios["threads"]) if "threads" in ratios else {}),
        "cached": _cached(findings, findings.ours[ratio_backend]),
        "target": TARGET,
        "holds": {
            backend: {mode: ratio.holds for mode, ratio in by_mode.items()}
            for backend, by_mode in ratios.items()
        },
        "interval": f"{CONFIDENCE:.0%} of the median, by order statistics",
        "rounds": options["rounds"],
        "cpu_s_per_gib": _cpu(findings),
        "configs": {name: vars(s) for name, s in findings.tuned.settings.items()},
        "training": training_terms(rates["mixed"], rates["read"]),
        "contenders": _contenders(findings),
        "left_out": findings.left_out,
        "notes": notes,
        "drives": [
            drive | {f"alone_{mode}_gib_s": rates_of[mode] / _GIB for mode in MODES}
            for drive, rates_of in zip(drives, findings.drive_rates, strict=True)
        ],
        "file_system": [drive["file_system"] for drive in drives],
        "machine": machine,
        "kernel": machine["kernel"],
        "date": machine["date"],
        "command": command,
        "options": options,
        "sample_bytes": dict(findings.sample_bytes),
        "units": UNITS,
        "tuning": findings.tuned.tried,
        "calibration": {
            "num_samples": findings.calibration.num_samples,
            "gib_s": {
                mode: {name: rate / _GIB for name, rate in rates.items()}
                for mode, rates in findings.calibration.rates.items()
            },
        },
        "samples": {
            mode: {
                name: [{"gib_s": s.rate / _GIB, **vars(s)} for s in samples]
                for name, samples in by_name.items()
            }
            for mode, by_name in findings.paired.items()
        },
    }


def _overall(findings: Findings, name: str) -> float:
    return geometric_mean([median_rate(findings.paired[mode][name]) for mode in MODES])


def _rates(findings: Findings, names: Mapping[Mode, str]) -> dict[Mode, float]:
    return {mode: median_rate(findings.paired[mode][names[mode]]) for mode in MODES}


def _gib(rates: Mapping[Mode, float]) -> dict[str, float]:
    return {f"{mode}_gib_s": rate / _GIB for mode, rate in rates.items()}


def _one_name(names: Mapping[Mode, str]) -> str:
    distinct = list(dict.fromkeys(names.values()))
    if len(distinct) == 1:
        return distinct[0]
    return "; ".join(f"{mode}: {name}" for mode, name in names.items())


def _ratios(findings: Findings, name: str) -> dict[Mode, Ratio]:
    def speeds(mode: Mode, of: str) -> list[float]:
        return [sample.rate for sample in findings.paired[mode][of]]

    return {m: ratio_of(speeds(m, name), speeds(m, findings.reference_names[m])) for m in MODES}


def _cached(findings: Findings, name: str) -> dict[Mode, dict[str, Any]]:
    """Return per mode with reads the contender that reads into the CPU cache, and its ratio."""
    table: dict[Mode, dict[str, Any]] = {}
    for mode, by_name in findings.paired.items():
        for other in by_name:
            if findings.families.get(other) == CACHED:
                rates = [
                    [sample.rate for sample in by_name[contender]] for contender in (name, other)
                ]
                table[mode] = {"name": other, "ratio": ratio_of(*rates).median}
    return table


def _ratio_keys(key: str, ratios: Mapping[Mode, Ratio]) -> dict[str, Any]:
    return {
        key: {mode: ratio.median for mode, ratio in ratios.items()},
        f"{key}_interval": {mode: [ratio.low, ratio.high] for mode, ratio in ratios.items()},
        f"{key}_coverage": {mode: ratio.coverage for mode, ratio in ratios.items()},
        f"{key}_values": {mode: list(ratio.values) for mode, ratio in ratios.items()},
    }


def _cpu(findings: Findings) -> dict[str, dict[Mode, float]]:
    names: dict[str, Mapping[Mode, str]] = {
        backend: dict.fromkeys(MODES, name) for backend, name in findings.ours.items()
    }
    names["reference"] = findings.reference_names
    return {
        who: {mode: median_cpu(findings.paired[mode][of[mode]]) for mode in MODES}
        for who, of in names.items()
    }


def _contenders(findings: Findings) -> dict[str, Any]:
    """Return family, median, range and processor time per contender and mode."""
    table: dict[str, Any] = {}
    ours = {name: backend for backend, name in findings.ours.items()}
    for mode, by_name in findings.paired.items():
        for name, samples in by_name.items():
            family = ours.get(name) or findings.families[name]
            entry = table.setdefault(name, {"family": family, "ours": name in ours})
            rates = [sample.rate / _GIB for sample in samples]
            entry[mode] = {
                "median_gib_s": statistics.median(rates),
                "min_gib_s": min(rates),
                "max_gib_s": max(rates),
                "cpu_s_per_gib": median_cpu(samples),
                "num_samples": len(samples),
                "median_duration_s": statistics.median(s.duration_s for s in samples),
                "is_reference": name == findings.reference_names[mode],
            }
    return table


def show_disk(report: dict[str, Any]) -> None:
    """Print tables, the recommended `io:` section, and the effect on training."""
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
            result = entry.get(mode)
            if result is None:
                cells.append("")
                continue
            star = " *" if result["is_reference"] else ""
            spread = f"{result['min_gib_s']:.2f}-{result['max_gib_s']:.2f}"
            cells.append(f"{result['median_gib_s']:.2f} ({spread}){star}")
        cpu = [f"{entry[m]['cpu_s_per_gib']:.3f}" if m in entry else "-" for m in MODES]
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
    for mode, cached in report["cached"].items():
        page.say(
            f"{mode:5}  {report['ratio_backend']} / {cached['name']}: {cached['ratio']:.3f}; they "
            "read into the same few MiB again and again, which stay in the processor's cache"
        )


def recommended_yaml(report: dict[str, Any]) -> str:
    """Return the lines to paste into a configuration."""
    best = report["best"]["config"]
    threads = report["configs"].get("threads", best)
    paths = [drive["path"] for drive in report["drives"]]
    value = paths[0] if len(paths) == 1 else f"[{', '.join(paths)}]"
    # "auto" falls back to threads, e.g. in a container that forbids io_uring.
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
        f"bf16 AdamW state streams at {terms['update_parameters_per_s'] / 1e9:.3f} Gparam/s "
        "(read, updated and written back).\n"
        f"A {count} step with its state on disk, gradients in RAM and one micro-batch reads "
        f"{format_size(terms['read_bytes'])}, writes {format_size(terms['written_bytes'])}, and "
        f"takes >= {format_duration(terms['step_s'])} on this disk.\n"
        f"It wears the drive by {terms['written_bytes'] / 1e9:.0f} GB a step: 100 TB of its "
        f"rated writes last for {terms['steps_per_100_tbw']:.0f} steps."
    )


def show_faults(report: dict[str, Any]) -> None:
    """Print the results of each kind of fault."""
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

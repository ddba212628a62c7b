"""From samples to the report: medians, ratios with intervals, and what they mean for training."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from infinity.bench.contender import Sample
from infinity.bench.load import MODES, Mode
from infinity.bench.ratios import CONFIDENCE, TARGET, Ratio, geometric_mean, ratio_of
from infinity.bench.rounds import median_rate
from infinity.bench.training_terms import training_terms
from infinity.bench.tuning import choose

if TYPE_CHECKING:
    from infinity.bench.disk import Findings

_GIB = 2**30
UNITS = (
    "rates in GiB/s (2**30 bytes), mixed counts both directions; durations in s; ratios are ours"
    " divided by the reference, the median over rounds; intervals are order statistics of it"
)


def assemble(
    found: Findings,
    *,
    drives: list[dict[str, Any]],
    notes: list[str],
    machine: dict[str, Any],
    command: list[str],
    options: dict[str, Any],
) -> dict[str, Any]:
    """Put the report together.

    `ratio` belongs to io_uring where it works, else to threads (`ratio_backend` says which), and
    `threads_ratio` always to threads. `best` is the same back end as `ratio`, unless the other one
    is clearly faster over all modes.
    """
    main = "io_uring" if "io_uring" in found.ours else "threads"
    speeds = {backend: _overall(found, name) for backend, name in found.ours.items()}
    best = choose({backend: speed / speeds[main] for backend, speed in speeds.items()}, main)
    ratios = {backend: _ratios(found, name) for backend, name in found.ours.items()}
    rates = _rates(found, dict.fromkeys(MODES, found.ours[best]))
    report: dict[str, Any] = {
        "best": {**_gib(rates), "config": found.tuned.settings[best].as_dict()},
        "reference": {
            **_gib(_rates(found, found.reference_names)),
            "name": _one_name(found.reference_names),
            "names": dict(found.reference_names),
        },
        "ratio_backend": main,
        **_ratio_keys("ratio", ratios[main]),
        **(_ratio_keys("threads_ratio", ratios["threads"]) if "threads" in ratios else {}),
        "target": TARGET,
        "holds": {
            backend: {mode: ratio.holds for mode, ratio in by_mode.items()}
            for backend, by_mode in ratios.items()
        },
        "interval": f"{CONFIDENCE:.0%} of the median, by order statistics",
        "rounds": options["rounds"],
        "cpu_s_per_gib": _cpu(found),
        "configs": {name: s.as_dict() for name, s in found.tuned.settings.items()},
        "training": training_terms(rates["mixed"], rates["read"]).as_dict(),
        "contenders": _contenders(found),
        "left_out": found.left_out,
        "notes": notes,
        "drives": [
            drive | {f"alone_{mode}_gib_s": rates_of[mode] / _GIB for mode in MODES}
            for drive, rates_of in zip(drives, found.drive_rates, strict=True)
        ],
        "file_system": [drive["file_system"] for drive in drives],
        "machine": machine,
        "kernel": machine["kernel"],
        "date": machine["date"],
        "command": command,
        "options": options,
        "sample_bytes": dict(found.sample_bytes),
        "units": UNITS,
        "tuning": found.tuned.tried,
        "calibration": {
            "num_samples": found.calibration.num_samples,
            "gib_s": {m: _over_gib(r) for m, r in found.calibration.rates.items()},
        },
        "samples": {
            mode: {name: [_as_dict(s) for s in samples] for name, samples in by_name.items()}
            for mode, by_name in found.paired.items()
        },
    }
    return report


def _overall(found: Findings, name: str) -> float:
    return geometric_mean([median_rate(found.paired[mode][name]) for mode in MODES])


def _rates(found: Findings, names: Mapping[Mode, str]) -> dict[Mode, float]:
    return {mode: median_rate(found.paired[mode][names[mode]]) for mode in MODES}


def _gib(rates: Mapping[Mode, float]) -> dict[str, float]:
    return {f"{mode}_gib_s": rate / _GIB for mode, rate in rates.items()}


def _over_gib(rates: Mapping[str, float]) -> dict[str, float]:
    return {name: rate / _GIB for name, rate in rates.items()}


def _one_name(names: Mapping[Mode, str]) -> str:
    distinct = list(dict.fromkeys(names.values()))
    if len(distinct) == 1:
        return distinct[0]
    return "; ".join(f"{mode}: {name}" for mode, name in names.items())


def _ratios(found: Findings, name: str) -> dict[Mode, Ratio]:
    def speeds(mode: Mode, of: str) -> list[float]:
        return [sample.rate for sample in found.paired[mode][of]]

    return {m: ratio_of(speeds(m, name), speeds(m, found.reference_names[m])) for m in MODES}


def _ratio_keys(key: str, ratios: Mapping[Mode, Ratio]) -> dict[str, Any]:
    return {
        key: {mode: ratio.median for mode, ratio in ratios.items()},
        f"{key}_interval": {mode: [ratio.low, ratio.high] for mode, ratio in ratios.items()},
        f"{key}_coverage": {mode: ratio.coverage for mode, ratio in ratios.items()},
        f"{key}_values": {mode: list(ratio.values) for mode, ratio in ratios.items()},
    }


def _cpu(found: Findings) -> dict[str, dict[Mode, float | None]]:
    names: dict[str, Mapping[Mode, str]] = {
        backend: dict.fromkeys(MODES, name) for backend, name in found.ours.items()
    }
    names["reference"] = found.reference_names
    return {
        who: {mode: median_cpu(found.paired[mode][of[mode]]) for mode in MODES}
        for who, of in names.items()
    }


def median_cpu(samples: Sequence[Sample]) -> float | None:
    """Return processor seconds per GiB; None where they are not known."""
    known = [cpu for sample in samples if (cpu := sample.cpu_s_per_gib) is not None]
    return statistics.median(known) if known else None


def _contenders(found: Findings) -> dict[str, Any]:
    """Per contender and mode: family, median and spread, processor time."""
    table: dict[str, Any] = {}
    ours = {name: backend for backend, name in found.ours.items()}
    for mode, by_name in found.paired.items():
        for name, samples in by_name.items():
            family = ours.get(name) or found.families[name]
            entry = table.setdefault(name, {"family": family, "ours": name in ours})
            rates = [sample.rate / _GIB for sample in samples]
            entry[mode] = {
                "median_gib_s": statistics.median(rates),
                "min_gib_s": min(rates),
                "max_gib_s": max(rates),
                "cpu_s_per_gib": median_cpu(samples),
                "num_samples": len(samples),
                "median_duration_s": statistics.median(s.duration_s for s in samples),
                "is_reference": name == found.reference_names[mode],
            }
    return table


def _as_dict(sample: Sample) -> dict[str, float | int | None]:
    return {
        "gib_s": sample.rate / _GIB,
        "duration_s": sample.duration_s,
        "nbytes": sample.nbytes,
        "cpu_s": sample.cpu_s,
    }

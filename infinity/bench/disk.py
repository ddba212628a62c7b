"""The swap benchmark: how fast training state can stream to and from some paths, and how well
our engine uses them. Measures and returns facts; `infinity/cli/bench.py` shows them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinity.bench import reference, tuning
from infinity.bench.contender import Contender, Sample
from infinity.bench.drive import look_at
from infinity.bench.load import MODES, Load, Mode, make_load
from infinity.bench.machine_facts import machine_facts
from infinity.bench.ours import EngineContender, IoSettings
from infinity.bench.report import assemble
from infinity.bench.rounds import Samples, salted, take_turns
from infinity.bench.testbed import Testbed
from infinity.bench.watcher import Watcher
from infinity.errors import ConfigError
from infinity.memory.file_systems import shared_drives

# A guess for the very first sample, in bytes per second; only its length depends on it.
_FIRST_RATE = 10**9
_PROBE_S = 0.25
_NUM_PROBES = 2  # the first one also wakes the drive


@dataclass(frozen=True)
class Options:
    """What to measure. Sizes in bytes."""

    paths: tuple[Path, ...]
    file_bytes: int = 4 * 2**30
    """Per path; half of it is read, the other half written."""
    chunk_bytes: int = 16 * 2**20
    """What a sweep moves at once; 8 to 64 MiB are usual."""
    num_rounds: int = 11
    sample_s: float = 1.0
    """How long one sample of the paired rounds should take; the brief ones take a third."""
    compare: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise `ConfigError` for what cannot be measured."""
        unknown = [name for name in self.compare if name not in reference.COMPARABLE]
        if unknown:
            remedy = f"--compare {','.join(reference.COMPARABLE)}"
            raise ConfigError(f"--compare does not know {', '.join(unknown)}", remedy=remedy)
        if not self.paths:
            raise ConfigError("no path was given", remedy="--path DIR on the drive to measure")
        if len(set(self.paths)) < len(self.paths):
            raise ConfigError("the same path is given twice")
        if self.num_rounds < 1 or not 0 < self.sample_s <= 60:
            raise ConfigError("--rounds is at least 1 and --sample-s between 0 and 60 seconds")
        if self.chunk_bytes < 2**20 or self.chunk_bytes % 2**20:
            raise ConfigError(f"a chunk is whole MiB, not {self.chunk_bytes} bytes")
        if self.region_bytes < self.chunk_bytes:
            least = 2 * self.chunk_bytes / 2**30
            raise ConfigError(
                f"{self.file_bytes} bytes per path hold no chunk to read and one to write",
                remedy=f"--gib {least:g} or more, or a smaller --chunk",
            )

    @property
    def region_bytes(self) -> int:
        """Bytes of each half of a file: whole chunks."""
        return self.file_bytes // 2 // self.chunk_bytes * self.chunk_bytes


def measure_disk(options: Options, watcher: Watcher, command: Sequence[str]) -> dict[str, Any]:
    """Run the whole benchmark and return its report, JSON-able; see `report.assemble`.

    Raises `ConfigError` for impossible options, `MachineError`, `DoesNotFitError` or
    `TransferError` for what the machine refuses. Leaves no file behind on any way out.
    """
    options.check()
    drives = [look_at(path) for path in options.paths]
    before = machine_facts()
    with Testbed(options.paths, options.region_bytes, options.chunk_bytes) as testbed:
        watcher.begin("writing test files", 2 * options.region_bytes * testbed.num_files)
        testbed.prepare(lambda done, total: watcher.advance(done))
        backends = tuning.usable_backends([drive.backends for drive in drives])
        found = _Measurement(options, testbed, watcher).run(backends)
    notes = shared_drives(options.paths) if len(drives) > 1 else []
    return assemble(
        found,
        drives=[drive.as_dict() for drive in drives],
        notes=notes + [note for drive in drives for note in drive.notes],
        machine=before | {"load_average_after": os.getloadavg()[0]},
        command=list(command),
        options=_as_dict(options),
    )


@dataclass(frozen=True)
class Findings:
    """Everything that was measured; rates in bytes per second."""

    drive_rates: list[dict[Mode, float]]
    tuned: tuning.Tuned
    calibration: reference.Calibration
    reference_names: dict[Mode, str]
    ours: dict[str, str]
    """The name of our contender for each back end."""
    families: dict[str, str]
    paired: Samples
    left_out: dict[str, str]
    sample_bytes: dict[Mode, int]


class _Measurement:
    def __init__(self, options: Options, testbed: Testbed, watcher: Watcher) -> None:
        self._options = options
        self._testbed = testbed
        self._watcher = watcher

    def run(self, backends: Sequence[str]) -> Findings:
        rates = self._drive_rates(tuning.DEFAULTS[backends[0]])
        brief = self._loads(rates, self._options.sample_s / 3)
        self._watcher.begin("trying settings", tuning.num_samples(backends, len(brief)))
        tuned = tuning.tune(self._testbed, backends, brief, on_sample=self._watcher.advance)
        field = reference.gather(
            self._testbed, self._options.compare, list(tuned.settings.values())
        )
        ours: list[EngineContender] = []
        try:
            total = reference.num_samples(field, len(brief))
            self._watcher.begin("choosing the reference", total)
            calibration = reference.calibrate(field, brief, on_sample=self._watcher.advance)
            names = {mode: calibration.best(mode, field.families) for mode in MODES}
            for backend in backends:
                ours.append(EngineContender(self._testbed, tuned.settings[backend]))
            who: dict[Mode, list[Contender]] = {}
            for mode in MODES:
                others = reference.compared(field, calibration, mode, self._options.compare)
                everyone = [*ours, field.contenders[names[mode]], *others]
                who[mode] = list({contender.name: contender for contender in everyone}.values())
            loads = self._loads(rates, self._options.sample_s)
            total = self._options.num_rounds * sum(map(len, who.values()))
            self._watcher.begin("measuring", total)
            paired = take_turns(
                who,
                loads,
                self._options.num_rounds,
                left_out=field.left_out,
                on_sample=self._watcher.advance,
            )
        finally:
            for contender in ours:
                contender.close()
            field.close()
        return Findings(
            drive_rates=rates,
            tuned=tuned,
            calibration=calibration,
            reference_names=names,
            ours={contender.family: contender.name for contender in ours},
            families=field.families,
            paired=paired,
            left_out=field.left_out,
            sample_bytes={mode: load.total_bytes for mode, load in loads.items()},
        )

    def _drive_rates(self, settings: IoSettings) -> list[dict[Mode, float]]:
        """Measure every drive alone in every mode, briefly."""
        num_files = self._testbed.num_files
        self._watcher.begin("a first look", num_files * len(MODES) * _NUM_PROBES)
        contender = EngineContender(self._testbed, settings)
        target_s = min(_PROBE_S, self._options.sample_s)
        try:
            rates: list[dict[Mode, float]] = []
            for index in range(num_files):
                alone = [_FIRST_RATE * (number == index) for number in range(num_files)]
                of_drive: dict[Mode, float] = {}
                for mode in MODES:
                    load = self._load(mode, alone, target_s)
                    for _ in range(_NUM_PROBES):
                        sample: Sample = contender.run(salted(load))
                        self._watcher.advance()
                    of_drive[mode] = sample.rate
                rates.append(of_drive)
            return rates
        finally:
            contender.close()

    def _loads(self, rates: Sequence[Mapping[Mode, float]], target_s: float) -> dict[Mode, Load]:
        return {mode: self._load(mode, [r[mode] for r in rates], target_s) for mode in MODES}

    def _load(self, mode: Mode, rates: Sequence[float], target_s: float) -> Load:
        return make_load(
            mode,
            rates=rates,
            target_s=target_s,
            chunk_bytes=self._options.chunk_bytes,
            region_bytes=self._options.region_bytes,
        )


def _as_dict(options: Options) -> dict[str, Any]:
    return {
        "paths": [str(path) for path in options.paths],
        "file_bytes": options.file_bytes,
        "chunk_bytes": options.chunk_bytes,
        "rounds": options.num_rounds,
        "sample_s": options.sample_s,
        "compare": list(options.compare),
    }

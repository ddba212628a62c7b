"""Durable directories: what their `plan.json` says, which there are, and which fits a model.

`plan.json` is written once, before the first commit: what the model is (names, shapes, dtypes,
precision, rule, moments), where every kind rests, and how bytes are dealt over the paths. It is
all that is needed to find any parameter in the state files again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinity.crc32c import crc32c
from infinity.errors import CheckpointError, ConfigError, InfinityError, MachineError
from infinity.memory.commits import CommitRecord, last_commit
from infinity.memory.scratch import RECORD_NAME, durable_records, is_live
from infinity.memory.stripes import Placement
from infinity.plan.layout import Segment, Tier, UnitLayout
from infinity.plan.plan import Plan, RuleFacts, UnitHomes
from infinity.plan.planner import Stored
from infinity.stable import write_new

PLAN_NAME = "plan.json"
_FORMAT = "torch-infinity-durable"
_VERSION = 1
MAX_TOLD = 5  # differences between a stored run and this one


@dataclass(frozen=True)
class StoredRun:
    """A durable run that is over: its first directory, its facts, and its last commit."""

    directory: Path
    facts: Mapping[str, Any]
    placement: Placement
    record: CommitRecord

    @property
    def stored(self) -> Stored:
        """What a plan takes over."""
        homes = tuple(
            UnitHomes(*(Tier(name) for name in unit["homes"])) for unit in self.facts["homes"]
        )
        return Stored(
            str(self.directory), self.record.step, homes, int(self.facts["chunk_elements"])
        )

    def __str__(self) -> str:
        return f"{self.directory} (update {self.record.step}, {self.record.when})"


# --- plan.json -----------------------------------------------------------------------------------


def model_facts(
    units: Sequence[UnitLayout], precision: str, rule: RuleFacts, gradient_itemsize: int
) -> dict[str, Any]:
    """What must be equal for a run to be continued, JSON-able."""
    return {
        "precision": precision,
        "rule": rule.name,
        "moments": [form.value for form in rule.moments],
        "gradient_itemsize": gradient_itemsize,
        "units": [
            {
                "name": unit.name,
                "numel": unit.numel,
                "frozen_bytes": unit.frozen_bytes,
                "segments": [_segment_facts(segment) for segment in unit.segments],
            }
            for unit in units
        ],
    }


def _segment_facts(segment: Segment) -> dict[str, Any]:
    names = ("name", "dtype", "numel", "nbytes", "offset", "trained")
    return {"shape": list(segment.shape), **{name: getattr(segment, name) for name in names}}


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Why a run cannot go on from a stored one, in words; empty when it can."""
    found = []
    for key, what in (("precision", "precision"), ("rule", "optimizer"), ("moments", "moments")):
        if there[key] != here[key]:
            found.append(f"{what} {there[key]!r} there, {here[key]!r} here")
    names = [
        {s["name"]: s for u in facts["units"] for s in u["segments"]} for facts in (there, here)
    ]
    for name in sorted(names[0].keys() ^ names[1].keys()):
        where = "there, but not in the model" if name in names[0] else "in the model, but not there"
        found.append(f"{name!r} is {where}")
    for name in (n for n in names[0] if n in names[1]):
        for key in ("shape", "dtype", "trained"):
            old, new = names[0][name][key], names[1][name][key]
            if old != new:
                found.append(f"{key} of {name!r} is {old} there, {new} here")
    if not found and there["units"] != here["units"]:
        found.append("the model was cut into other units")
    if not found and there["gradient_itemsize"] != here["gradient_itemsize"]:
        found.append("gradients were of another dtype (gradient_accumulation_steps 1, or more)")
    more = [f"and {len(found) - MAX_TOLD} more"] if len(found) > MAX_TOLD else []
    return found[:MAX_TOLD] + more


def plan_text(run: str, facts: Mapping[str, Any], plan: Plan, placement: Placement) -> str:
    """The text of `plan.json`."""
    content = {
        "format": _FORMAT,
        "version": _VERSION,
        "run": run,
        **facts,
        "chunk_elements": plan.chunk_elements,
        "homes": [{"homes": [h.weight.value, h.state.value, h.gradient.value]} for h in plan.homes],
        "directories": [str(directory) for directory in placement.directories],
        "stripe_bytes": placement.stripe_bytes,
        "speeds": placement.speeds,
        "room": placement.room,
        "used": placement.used,
    }
    content["checksum"] = _checksum(content)
    return json.dumps(content, indent=1)


def write_plan(path: Path, text: str) -> None:
    """Write and sync it; raises `MachineError`."""
    try:
        write_new(path, text.encode())
    except OSError as error:
        raise MachineError(
            f"{path} could not be written: {error.strerror} (errno {error.errno})",
            remedy="look at the drive and the space on it",
        ) from error


def _checksum(content: Mapping[str, Any]) -> int:
    rest = {key: value for key, value in content.items() if key != "checksum"}
    return crc32c(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode())


# --- finding runs --------------------------------------------------------------------------------


def read_run(directory: Path, roots: Iterable[Path] = ()) -> StoredRun:
    """Read a durable directory, any of a run's; directories that were moved are sought in `roots`.

    Raises `CheckpointError` if it is none, is damaged, or one of the run's is missing.
    """
    record = _run_record(directory)
    if record.get("index", 0):
        first = Path(str(record.get("primary")))
        there = _pieces(record.get("run"), [*roots, first.parent])
        if 0 not in there:
            raise CheckpointError(
                f"{directory} holds a part of a durable run; its first directory, {first}, is "
                "missing",
                remedy="mount that drive",
            )
        directory = there[0]
    facts = _read_plan(directory)
    commit = last_commit(directory)
    if commit.run != facts["run"] or len(commit.sides) != len(facts["units"]):
        raise CheckpointError(f"the commit record in {directory} is of another run")
    members = _members(directory, facts, roots)
    placement = Placement(
        directories=members,
        stripe_bytes=int(facts["stripe_bytes"]),
        speeds=tuple(facts["speeds"]),
        room=tuple(facts["room"]),
        used=tuple(facts["used"]),
    )
    return StoredRun(directory, facts, placement, commit)


def _run_record(directory: Path) -> dict[str, Any]:
    record = None
    try:
        record = json.loads((directory / RECORD_NAME).read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{directory} is not a durable run: {RECORD_NAME} cannot be read ({error})",
            remedy="give the directory infinity-run-... below an nvme_path",
        ) from error
    if not isinstance(record, dict) or record.get("durable") is not True:
        raise CheckpointError(f"{directory} is not a durable run, according to its {RECORD_NAME}")
    return record


def _read_plan(directory: Path) -> dict[str, Any]:
    try:
        facts = json.loads((directory / PLAN_NAME).read_bytes())
        sound = facts["format"] == _FORMAT and facts["checksum"] == _checksum(facts)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{directory / PLAN_NAME} cannot be read: {error!r}") from error
    if not sound:
        raise CheckpointError(f"{directory / PLAN_NAME} is damaged: its checksum does not fit")
    if facts["version"] != _VERSION:
        raise CheckpointError(
            f"{directory / PLAN_NAME} has version {facts['version']}, this is {_VERSION}"
        )
    return dict(facts)


def _members(directory: Path, facts: Mapping[str, Any], roots: Iterable[Path]) -> tuple[Path, ...]:
    """The directories of a run, one for each of its paths."""
    named = [Path(name) for name in facts["directories"]]
    # What the user names comes first: it may be a copy.
    places = [*roots, directory.parent, *(path.parent for path in named)]
    found = {**_pieces(facts["run"], places), 0: directory}
    missing = [str(path) for index, path in enumerate(named) if index not in found]
    if missing:
        raise CheckpointError(
            f"the durable run in {directory} spreads over {len(named)} paths; missing: "
            f"{', '.join(missing)}",
            remedy="mount that drive, or name the path where it is now in nvme_path",
        )
    return tuple(found[index] for index in range(len(named)))


def _pieces(run: object, places: Iterable[Path]) -> dict[int, Path]:
    """The directories of a run by their index, those of earlier places first."""
    found: dict[int, Path] = {}
    for place in dict.fromkeys(places):
        for path, record in durable_records(place).items() if place.is_dir() else ():
            if record.get("run") == run:
                found.setdefault(int(record.get("index", -1)), path)
    return found


def find_run(
    roots: Sequence[Path], resume: str | Path, here: Mapping[str, Any]
) -> StoredRun | None:
    """The durable run to go on from; None for a new one.

    `resume` is "never", "auto", or a directory; `here` are `model_facts` of this run. Raises
    `ConfigError` where several fit or the given one does not, and what `read_run` raises.
    """
    if resume == "never":
        return None
    if resume != "auto":
        directory = Path(resume).expanduser().absolute()
        run = read_run(directory, roots)
        wrong = differences(run.facts, here)
        if wrong:
            raise ConfigError(
                f"the durable run in {directory} does not fit this model: {'; '.join(wrong)}",
                remedy="resume: never starts a new run; the old one stays",
            )
        return run
    fitting, _ = survey(roots, here)
    if len(fitting) > 1:
        raise ConfigError(
            f"{len(fitting)} durable runs fit the model: {', '.join(map(str, fitting))}",
            because="resume is auto",
            remedy=f"resume: {fitting[-1].directory}, or remove those that are not needed",
        )
    return fitting[0] if fitting else None


def survey(
    roots: Iterable[Path], here: Mapping[str, Any]
) -> tuple[list[StoredRun], list[tuple[Path, str]]]:
    """Durable runs below `roots` that are over: those that fit, and why the others do not."""
    fitting: list[StoredRun] = []
    others: list[tuple[Path, str]] = []
    roots = list(roots)
    for root in roots:
        for directory, record in durable_records(root).items():
            if is_live(directory):
                continue
            if record.get("index", 0):
                first = Path(str(record.get("primary")))
                if 0 not in _pieces(record.get("run"), [*roots, first.parent]):
                    why = f"it is a part of one whose first directory, {first}, is missing"
                    others.append((directory, why))
                continue
            try:
                run = read_run(directory, roots)
            except InfinityError as error:
                others.append((directory, error.what))
                continue
            wrong = differences(run.facts, here)
            if wrong:
                others.append((directory, "; ".join(wrong)))
            else:
                fitting.append(run)
    return fitting, others


def remarks(roots: Sequence[Path], resume: str | Path, here: Mapping[str, Any]) -> list[str]:
    """What a new run should say of durable ones that it leaves alone."""
    fitting, others = survey(roots, here)
    found = [f"a durable run in {path} is left alone: {why}" for path, why in others]
    if resume == "never" and len(fitting) == 1:
        found.append(
            f"a durable run of this model is in {fitting[0]}; resume: auto (with durable: "
            "true) would go on from there"
        )
    elif resume == "never" and fitting:
        found.append(
            f"durable runs of this model are in {', '.join(map(str, fitting))}; resume: DIRECTORY "
            "would go on from one of them"
        )
    return found

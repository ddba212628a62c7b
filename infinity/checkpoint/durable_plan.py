"""`plan.json` of a durable run, which describes the model and the layout of its state.

It is written once, before the first commit: the model (names, shapes, dtypes, precision, rule,
moments), the tier of every kind, and the striping over the paths. It suffices to find any parameter
in the state files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from infinity._version import __version__
from infinity.checkpoint.schemas import check_plan
from infinity.common.checksummed_json import read_sealed, write_sealed
from infinity.common.crc32c import crc32c
from infinity.common.files import refused
from infinity.errors import CheckpointError
from infinity.plan.layout import PRECISIONS, Segment, StackRows, UnitLayout
from infinity.plan.plan import Plan, RuleFacts, UnitPlacement
from infinity.storage.striping import Striping
from infinity.types import PAGE, MomentFormat, Tier

PLAN_NAME = "plan.json"
MAX_DIFFERENCES = 5  # in one message
_FORMAT = "torch-infinity-durable"
_VERSION = 4
_STATE_FORMAT = "torch-infinity-state"


def model_facts(
    units: Sequence[UnitLayout], precision: str, rule: RuleFacts, gradient_itemsize: int
) -> dict[str, Any]:
    """Return the facts, JSON-able, that must be equal for a run to be resumed."""
    return {
        "ranks": units[0].shards if units else 1,
        "precision": precision,
        "rule": rule.name,
        "moments": [form.value for form in rule.moments],
        "gradient_itemsize": gradient_itemsize,
        "units": [
            {
                "name": unit.name,
                "numel": unit.numel,
                "frozen_bytes": unit.frozen_bytes,
                **({} if unit.paired is None else {"paired": unit.paired}),
                "segments": [_segment_facts(segment) for segment in unit.segments],
            }
            for unit in units
        ],
    }


def _segment_facts(segment: Segment) -> dict[str, Any]:
    names = ("name", "dtype", "numel", "nbytes", "offset", "trained")
    optional = {"form": segment.form, "whole": segment.needs_full}
    given = {key: value for key, value in optional.items() if value}
    if segment.is_rows and segment.stack is not None:
        given["rows"] = [segment.stack.first, segment.stack.total]
    return {"shape": list(segment.shape), **{n: getattr(segment, n) for n in names}, **given}


def differences(stored: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Describe why the current run cannot resume from a stored one; empty if it can."""
    messages = []
    if (ranks := stored.get("ranks", 1)) != current["ranks"]:
        count = "one rank" if ranks == 1 else f"{ranks} ranks"
        return [
            f"it is of {count}, this run has {current['ranks']}: start that number, or use resume: "
            "never and engine.load_checkpoint of that directory, which supports any number"
        ]
    for key, what in (("precision", "precision"), ("rule", "optimizer"), ("moments", "moments")):
        if stored[key] != current[key]:
            messages.append(
                f"{what} is {stored[key]!r} in the stored run, {current[key]!r} in this one"
            )
    segments = [
        {s["name"]: s for u in facts["units"] for s in u["segments"]} for facts in (stored, current)
    ]
    for name in sorted(segments[0].keys() ^ segments[1].keys()):
        where = ("stored run", "model") if name in segments[0] else ("model", "stored run")
        messages.append(f"{name!r} is in the {where[0]}, but not in the {where[1]}")
    for name in (n for n in segments[0] if n in segments[1]):
        for key in ("shape", "dtype", "trained", "form"):
            # Only "form" may be missing.
            old, new = (
                _full_shape(by_name[name]) if key == "shape" else by_name[name].get(key, "as_is")
                for by_name in segments
            )
            if old != new:
                messages.append(f"{key} of {name!r} is {old} in the stored run, {new} in this one")
    if not messages and _without_names(stored["units"]) != _without_names(current["units"]):
        messages.append("the model was partitioned into other units (units, experts_per_unit)")
    if not messages and stored["gradient_itemsize"] != current["gradient_itemsize"]:
        messages.append("gradients had another dtype (gradient_accumulation_steps 1, or more)")
    excess = len(messages) - MAX_DIFFERENCES
    more = [f"and {excess} more"] if excess > 0 else []
    return messages[:MAX_DIFFERENCES] + more


def _segment_of(facts: Mapping[str, Any]) -> Segment:
    """Invert `_segment_facts`, without indices of parameter and group."""
    rows = facts.get("rows")
    fields = {key: value for key, value in facts.items() if key not in ("rows", "whole")}
    stack = StackRows(-2, *rows) if rows else None
    fields["shape"] = tuple(facts["shape"])
    needs_full = facts.get("whole", False)
    return Segment(**fields, needs_full=needs_full, parameter=-1, group=-1, stack=stack)


def _full_shape(facts: Mapping[str, Any]) -> list[int]:
    """Return the full shape of the parameter that a segment is, or holds rows of."""
    rows = facts.get("rows")
    return [rows[1], *facts["shape"][1:]] if rows else list(facts["shape"])


def _without_names(units: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the facts that determine offsets: unit names do not, and differ between versions."""
    return [{key: value for key, value in unit.items() if key != "name"} for unit in units]


def plan_checksum(facts: Mapping[str, Any]) -> str:
    """Return the checksum of the members of a `plan.json`, which commit records hold."""
    return f"{crc32c(json.dumps(facts, sort_keys=True).encode()):08x}"


def write_plan(
    path: Path, run: str, facts: Mapping[str, Any], plan: Plan, striping: Striping
) -> str:
    """Write and sync `plan.json`; return its checksum. Raises `MachineError`."""
    content = {
        "engine_version": __version__,
        "run": run,
        **facts,
        "chunk_elements": plan.chunk_elements,
        "placement": [
            {"placement": [h.weight.value, h.state.value, h.gradient.value]}
            for h in plan.placements
        ],
        "directories": [str(directory) for directory in striping.directories],
        "stripe_bytes": striping.stripe_bytes,
        "speeds": striping.speeds,
        "room": striping.capacities,
        "used": striping.used,
    }
    try:
        write_sealed(path, _FORMAT, _VERSION, content, 0o600)
    except OSError as error:
        raise refused(f"{path} could not be written", error) from error
    return plan_checksum(content)


def plan_of(facts: Mapping[str, Any]) -> Plan:
    """Return the part of a run's plan that `plan.json` holds: enough to find every byte."""
    moments = tuple(MomentFormat(name) for name in facts["moments"])
    precision = replace(PRECISIONS[facts["precision"]], moments=moments)
    units = []
    for index, unit in enumerate(facts["units"]):
        segments = tuple(_segment_of(segment) for segment in unit["segments"])
        layout = UnitLayout(
            index, unit["name"], segments, unit["numel"], unit["frozen_bytes"], precision.weight,
            shards=facts.get("ranks", 1), paired=unit.get("paired"),
        )  # fmt: skip
        units.append(layout)
    return Plan(
        precision=precision,
        units=tuple(units),
        placements=tuple(
            UnitPlacement(*map(Tier, unit["placement"])) for unit in facts["placement"]
        ),
        slot_classes=(),
        chunk_elements=facts["chunk_elements"],
        num_staging_buffers=0,
        prefetch_units=0,
        micro_batches=1,
        gradient_itemsize=facts["gradient_itemsize"],
        unified=True,
        verify=False,
        memory={},
        budget={},
        rule=RuleFacts(name=facts["rule"], moments=moments),
        durable=True,
        rank=facts.get("rank", 0),
        ranks=facts.get("ranks", 1),
    )


def read_plan(directory: Path) -> dict[str, Any]:
    """Read and validate the `plan.json` of a directory. Raises `CheckpointError`."""
    path = directory / PLAN_NAME
    with run_file_errors(path):
        facts = read_sealed(path, _FORMAT, _VERSION)
    check_plan(facts, str(path))
    return facts


@contextmanager
def run_file_errors(path: Path, remedy: str | None = None) -> Iterator[None]:
    """Raise `CheckpointError` if the block fails to read `path`, a file of a durable run."""
    try:
        yield
    except OSError as error:
        what = f"{path.parent} is not a durable run that can be read: {path.name}: {error.strerror}"
        raise CheckpointError(what, remedy=remedy) from error
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error


def parameter_shapes(facts: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return the full shapes of a model's parameters, by name."""
    return {s["name"]: _full_shape(s) for unit in facts["units"] for s in unit["segments"]}


def state_tag(run: str, index: int) -> bytes:
    """Return the last page of a state file: the id of its run, and its index in the run."""
    text = json.dumps({"format": _STATE_FORMAT, "run": run, "index": index})
    return text.encode().ljust(PAGE, b"\0")

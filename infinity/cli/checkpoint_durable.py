"""`infinity checkpoint` for the directory of a durable run: its committed state, without a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from infinity import __version__
from infinity.checkpoint.layout import LATEST_NAME, MANIFEST_NAME
from infinity.checkpoint.root import tags
from infinity.cli.checkpoint_page import counted, read_all
from infinity.cli.screen import Page
from infinity.errors import ConfigError
from infinity.memory.durable_reader import SCALES, DurableReader
from infinity.memory.scratch import RECORD_NAME, durable_records
from infinity.sizes import format_count, format_size
from infinity.training.durable_state import DurableWeights


def durable_in(directory: Path, tag: str | None) -> Path | None:
    """The directory of the durable run that is meant; None where a checkpoint is.

    It is given, or the only one in an nvme_path that holds no checkpoints. Raises `ConfigError`
    for several.
    """
    directory = directory.expanduser().absolute()
    if tag is not None or not directory.is_dir() or (directory / MANIFEST_NAME).exists():
        return None
    if (directory / RECORD_NAME).exists():
        return directory
    if (directory / LATEST_NAME).exists() or tags(directory):
        return None
    runs = durable_runs(directory)
    if len(runs) > 1:
        raise ConfigError(
            f"{directory} holds {len(runs)} durable runs: {', '.join(run.name for run in runs)}",
            remedy=f"name one of them: {runs[-1]}",
        )
    return runs[0] if runs else None


def durable_runs(root: Path) -> list[Path]:
    """The durable runs of an nvme_path, one directory of each; the oldest first."""
    found: dict[object, Path] = {}
    for path, record in durable_records(root).items():
        found.setdefault(record.get("run", path), path)
    return list(found.values())


@contextmanager
def open_durable(directory: Path) -> Iterator[DurableWeights]:
    """Its weights and buffers by name; raises what `DurableReader` does."""
    with DurableReader(directory, [directory.parent]) as reader:
        yield DurableWeights(reader)


def verify_durable(directory: Path) -> bool:
    """Print what is wrong with a durable run; whether it is sound as far as can be known."""

    def opened() -> DurableReader:
        reader = DurableReader(directory, [directory.parent])
        try:
            DurableWeights(reader)  # the document can be understood
        except BaseException:
            reader.close()
            raise
        return reader

    def said(reader: DurableReader, total: int) -> str:
        if reader.verified:
            return f"sound, {format_size(total)}"
        return (
            f"plan and commit record are sound; of the state, {format_size(total)}, "
            "no checksums were kept (io.verify was off), so nothing can be said"
        )

    return read_all(directory, opened, lambda reader: reader.state_bytes, said)


def inspect_durable(directory: Path, *, as_json: bool) -> None:
    """Print what the last commit of a durable run holds."""
    with DurableReader(directory, [directory.parent]) as reader:
        report = _report(reader)
    if as_json:
        print(json.dumps(report), flush=True)
    else:
        _show(report)


def _report(reader: DurableReader) -> dict[str, Any]:
    """What is known without reading the state, JSON-able; sizes in bytes."""
    weights, record, plan = DurableWeights(reader), reader.record, reader.plan
    trained = [p for p in weights.parameters if p.trained]
    frozen = [p for p in weights.parameters if not p.trained]
    streams: dict[str, dict[str, int]] = {}
    for kind in reader.kinds:
        if trained:
            sizes = [reader.nbytes(p.name, kind) for p in trained]
            streams[kind] = {"tensors": len(trained), "nbytes": sum(sizes)}
    if frozen:
        sizes = [reader.nbytes(p.name, "weight") for p in frozen]
        streams["frozen"] = {"tensors": len(frozen), "nbytes": sum(sizes)}
    if weights.buffers:
        nbytes = sum(weights.buffer(b.name).nbytes for b in weights.buffers)
        streams["buffers"] = {"tensors": len(weights.buffers), "nbytes": nbytes}
    window = weights.document.window
    progress = weights.document.run.get("progress", {})
    return {
        "infinity": __version__,
        "kind": "durable run",
        "path": str(reader.directory),
        "directories": [str(path) for path in reader.directories],
        "run": record.run,
        "commit": record.sequence,
        "committed": record.when,
        "updates": reader.step,  # a skipped step changes nothing: it is committed with the next
        "global_steps": reader.step + progress.get("skipped_steps", 0),
        "micro_step": progress.get("micro_step", 0),
        "gradients_in": None if window is None else str(Path(window.root) / window.tag),
        "precision": plan.precision.name,
        "rule": reader.plan_facts["rule"],
        "moments": [form.value for form in plan.precision.moments],
        "parameters": counted([p.shape for p in weights.parameters]),
        "trained": counted([p.shape for p in trained]),
        "buffers": counted([b.shape for b in weights.buffers]),
        "document": bool(reader.document),
        "checksums": reader.verified,
        "units": len(plan.units),
        "sides": list(record.sides),
        "frozen_sides": list(record.frozen_sides),
        "homes": _homes(reader),
        "streams": streams,
        "nbytes": sum(row["nbytes"] for row in streams.values()),
    }


def _homes(reader: DurableReader) -> dict[str, dict[str, int]]:
    """Kind -> where it rests while the run is alive -> of how many units."""
    found: dict[str, dict[str, int]] = {}
    for homes in reader.plan.homes:
        for kind, tier in (
            ("weights", homes.weight), ("moments", homes.state), ("gradients", homes.gradient)
        ):  # fmt: skip
            tiers = found.setdefault(kind, {})
            tiers[tier.value] = tiers.get(tier.value, 0) + 1
    return found


def _show(report: dict[str, Any]) -> None:
    page = Page()
    page.say(f"{report['path']}, a durable run")
    if len(report["directories"]) > 1:
        page.say(f"with {', '.join(report['directories'][1:])}")
    moments = ", ".join(report["moments"]) or "none"
    window = f", micro-batch {report['micro_step']}" if report["micro_step"] else ""
    page.say(
        f"step {report['global_steps']}{window}, {report['precision']}, {report['rule']}, "
        f"moments: {moments}"
    )
    page.say(f"commit {report['commit']}, {report['committed']}")
    trained, total, buffers = report["trained"], report["parameters"], report["buffers"]
    page.say(
        f"{format_count(total['elements'])} parameters in {total['tensors']} tensors, of which "
        f"{trained['tensors']} are trained; {buffers['tensors']} buffer(s)"
    )
    if not report["document"]:
        page.say("the initial state: no step was committed, and buffers are not in it")
    if report["gradients_in"]:
        page.say(f"within an accumulation window, whose gradients are in {report['gradients_in']}")
    second = sum(report["sides"])
    page.say(
        f"{report['units']} units, {report['units'] - second} on their first side and {second} on "
        "their second"
    )
    for kind, tiers in report["homes"].items():
        page.say(f"{kind}: {', '.join(f'{n} on {tier}' for tier, n in tiers.items())}")
    kept = "kept (io.verify)" if report["checksums"] else "not kept (io.verify was off)"
    page.say(f"checksums of the state: {kept}")
    page.say()
    rows = [
        (name.replace(SCALES, ", scales"), str(row["tensors"]), format_size(row["nbytes"]))
        for name, row in report["streams"].items()
    ]
    rows.append(("all", "", format_size(report["nbytes"])))
    page.table("Streams", ("stream", "tensors", "size"), rows)

"""`infinity checkpoint`: inspect, verify, export and prune checkpoints, import DeepSpeed's."""

from __future__ import annotations

import json
import os
from collections import Counter
from contextlib import closing
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from typing import Annotated, Any

import typer

from infinity._version import __version__
from infinity.checkpoint import directory as checkpoints
from infinity.checkpoint.directory import find_tag, tags
from infinity.checkpoint.durable_reader import DurableReader
from infinity.checkpoint.manifest import INDEX, MANIFEST_NAME
from infinity.checkpoint.reader import StateReader
from infinity.cli.saved_state import (
    Directory,
    ModelSource,
    StateOpener,
    Tag,
    checkpoint_root,
    find_all_states,
    find_state,
)
from infinity.cli.terminal import Page, ProgressLine, command, say
from infinity.common.sizes import format_count, format_size, parse_size
from infinity.errors import CheckpointError, ConfigError, listed
from infinity.integrations.deepspeed.import_checkpoint import import_deepspeed as import_zero
from infinity.model.safetensors_file import SafetensorsFile
from infinity.model.weight_directory import holds_weights
from infinity.model.weight_files import write_shards
from infinity.optim.moments import COMPUTE_DTYPES
from infinity.storage.run_dir import RECORD_NAME

# --- the report of `inspect` ----------------------------------------------------------------------


def _report(reader: StateReader) -> dict[str, Any]:
    """Return the report of `inspect`, without reading tensors, JSON-able; sizes in bytes."""
    manifest = reader.manifest
    report: dict[str, Any] = {
        "infinity": __version__,
        "kind": "checkpoint",
        "path": str(reader.directory),
        "engine_version": manifest.engine_version,
        "global_steps": manifest.global_steps,
        "precision": manifest.precision,
        "rule": manifest.rule,
        "moments": list(manifest.moments),
        "parameters": _tensor_counts([p.shape for p in manifest.parameters]),
        "trained": _tensor_counts([p.shape for p in manifest.parameters if p.trained]),
        "tied": sum(len(p.aliases) for p in manifest.parameters),
        "buffers": _tensor_counts([b.shape for b in manifest.buffers]),
        "client_state": manifest.client_state,
    }
    report |= (
        _durable_fields(reader) if isinstance(reader, DurableReader) else _checkpoint_fields(reader)
    )
    report["nbytes"] = sum(row["nbytes"] for row in report["streams"].values())
    return report


def _tensor_counts(shapes: list[tuple[int, ...]]) -> dict[str, int]:
    return {"tensors": len(shapes), "elements": sum(map(prod, shapes))}


def _checkpoint_fields(reader: StateReader) -> dict[str, Any]:
    """Return the fields of the report that only a checkpoint has; sizes are file sizes."""
    root = reader.directory.parent
    streams: dict[str, dict[str, int]] = {}
    for record in reader.manifest.files:
        tensors = len(reader.names(record.stream))
        row = streams.setdefault(record.stream, {"files": 0, "nbytes": 0, "tensors": tensors})
        row["files"] += 1
        row["nbytes"] += record.nbytes
    written_s = os.stat(reader.directory / MANIFEST_NAME).st_mtime
    return {
        "tag": reader.directory.name,
        "latest": find_tag(root, None),
        "tags": tags(root),
        "written": datetime.fromtimestamp(written_s, UTC).isoformat(timespec="seconds"),
        "streams": streams,
    }


def _durable_fields(reader: DurableReader) -> dict[str, Any]:
    """Return the fields of the report that only the commit of a durable run has."""
    record, document = reader.record, reader.document
    streams = {}
    for stream in reader.streams:
        specs = [reader.facts(stream, name) for name in reader.names(stream)]
        streams[stream] = {"tensors": len(specs), "nbytes": sum(spec.nbytes for spec in specs)}
    units = reader.plan.placements
    return {
        "kind": "durable run",
        "directories": [str(path) for path in reader.directories],
        "run": record.run,
        "commit": record.sequence,
        "written": record.when,
        "updates": record.step,
        "micro_step": document.run.get("progress", {}).get("micro_step", 0),
        "gradients_in": document.window and str(Path(document.window.root) / document.window.tag),
        "document": bool(record.document),
        "checksums": reader.verified,
        # By kind and by tier while the run is active: number of units.
        "placement": {
            "weights": Counter(unit.weight.value for unit in units),
            "moments": Counter(unit.state.value for unit in units),
            "gradients": Counter(unit.gradient.value for unit in units),
        },
        "streams": streams,
    }


def _show(report: dict[str, Any]) -> None:
    page = Page()
    durable = report["kind"] == "durable run"
    if durable:
        page.say(f"{report['path']}, a durable run")
        if len(report["directories"]) > 1:
            page.say(f"with {', '.join(report['directories'][1:])}")
        page.say(
            f"commit {report['commit']}, {report['written']}, by infinity "
            f"{report['engine_version']}"
        )
    else:
        is_latest = ", the latest" if report["tag"] == report["latest"] else ""
        page.say(f"{report['path']}{is_latest}")
        page.say(f"written {report['written']} by infinity {report['engine_version']}")
    window = f", micro-batch {report['micro_step']}" if report.get("micro_step") else ""
    page.say(
        f"step {report['global_steps']}{window}, {report['precision']}, {report['rule']}, "
        f"moments: {', '.join(report['moments']) or 'none'}"
    )
    trained, total, buffers = report["trained"], report["parameters"], report["buffers"]
    page.say(
        f"{format_count(total['elements'])} parameters in {total['tensors']} tensors, of which "
        f"{trained['tensors']} are trained; {report['tied']} more tied name(s); "
        f"{buffers['tensors']} buffer(s)"
    )
    state = report["client_state"]
    if isinstance(state, dict) and state:
        page.say(f"client state: {', '.join(state)}")
    if durable:
        _show_commit(page, report)
    page.say()
    rows = [
        (
            name,
            "" if name == INDEX else str(row["tensors"]),
            str(row.get("files", "")),
            format_size(row["nbytes"]),
        )
        for name, row in report["streams"].items()
    ]
    rows.append(("all", "", "", format_size(report["nbytes"])))
    page.table("Streams", ("stream", "tensors", "files", "size"), rows)
    others = [tag for tag in report.get("tags", ()) if tag != report["tag"]]
    if others:
        page.say()
        page.say(f"other checkpoints: {listed(others, limit=20)}")


def _show_commit(page: Page, report: dict[str, Any]) -> None:
    if not report["document"]:
        page.say("the initial state: no step was committed, and buffers are not in it")
    if report["gradients_in"]:
        page.say(f"within an accumulation window, whose gradients are in {report['gradients_in']}")
    for kind, tiers in report["placement"].items():
        page.say(f"{kind}: {', '.join(f'{n} on {tier}' for tier, n in tiers.items())}")
    checksums = "stored (io.verify)" if report["checksums"] else "not stored (io.verify was off)"
    page.say(f"checksums of the state: {checksums}")


# --- the commands --------------------------------------------------------------------------------


checkpoint = typer.Typer(
    name="checkpoint",
    help="Look at checkpoints, verify, export and prune them, import those of DeepSpeed.",
    invoke_without_command=True,
    rich_markup_mode=None,
)

_Out = Annotated[Path, typer.Argument(metavar="OUT", help="A directory to write to.")]


@checkpoint.callback()
def _checkpoint(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@checkpoint.command()
def inspect(
    directory: Directory,
    tag: Tag = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """List the contents of a checkpoint or a durable run, without reading tensors.

    For example: infinity checkpoint inspect runs/a --tag global_step100

    Exits with 0, or with 5 if it is damaged as far as can be seen without reading tensors.
    """
    with command(), find_state(directory, tag)[1]() as reader:
        report = _report(reader)
        if as_json:
            print(json.dumps(report), flush=True)
        else:
            _show(report)


@checkpoint.command()
def verify(
    directory: Directory,
    tag: Tag = None,
    every: Annotated[
        bool, typer.Option("--all", help="All checkpoints and durable runs in DIR.")
    ] = False,
) -> None:
    """Read every byte and compare it with its checksum.

    For example: infinity checkpoint verify runs/a --all

    Prints every damaged block with its file and the tensors in it. Exits with 0 if all is sound,
    with 5 if anything is damaged. A durable run has checksums of its state if `io.verify` was on.
    """
    with command():
        if every:
            if tag is not None:
                raise ConfigError(
                    "--tag and --all exclude each other", remedy="leave one of them out"
                )
            states = find_all_states(directory)
        else:
            states = [find_state(directory, tag)]
        are_sound = [_is_sound(location, opener) for location, opener in states]
        if not all(are_sound):
            raise typer.Exit(CheckpointError.exit_code)


def _is_sound(path: Path, opener: StateOpener) -> bool:
    """Verify all checksums, print damages, and return True if none was found."""
    problems: list[str] = []
    verdict = ""
    try:
        with opener() as reader, ProgressLine() as line:
            done = 0

            def on_read(nbytes: int) -> None:
                nonlocal done
                done += nbytes
                line.progress(done, reader.nbytes, f"reading {path}")

            problems += reader.verify(on_read)
            verdict = f"sound, {format_size(reader.nbytes)}"
            if not reader.verified:
                verdict = (
                    f"plan and commit record are sound; of the state, {format_size(reader.nbytes)},"
                    " no checksums were stored (io.verify was off): it cannot be verified"
                )
    except CheckpointError as error:
        problems.append(error.what)
    for problem in problems:
        print(problem)
    print(f"{path}: {f'damaged, {len(problems)} problem(s)' if problems else verdict}", flush=True)
    return not problems


@checkpoint.command()
def export(
    directory: Directory,
    out: _Out,
    tag: Tag = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="NAME",
            help="bf16, fp16 or fp32 (the exact masters). Default: as in training.",
        ),
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Add adapters to the weights of their base.")
    ] = False,
    model: ModelSource = None,
    max_shard: Annotated[
        str,
        typer.Option("--max-shard", metavar="SIZE", help="Largest file, but for larger tensors."),
    ] = "5GiB",
    force: Annotated[bool, typer.Option("--force", help="Replace existing weights.")] = False,
) -> None:
    """Write a model that Hugging Face loads: weights, config, tokenizer and chat template.

    For example: infinity checkpoint export runs/a weights --dtype fp32

    For a run with adapters, writes the adapters as peft saves them; with --merge, the full model.
    --model none writes weights only, under the names of training.
    Holds one tensor at a time in memory and checks every byte. Exits with 0, 2 if OUT holds
    weights already, 5 if the checkpoint is damaged.
    """
    with command():
        if dtype is not None and dtype not in COMPUTE_DTYPES:
            raise ConfigError(f"--dtype is {dtype!r}", remedy="--dtype bf16, fp16 or fp32")
        export_dtype = None if dtype is None else COMPUTE_DTYPES[dtype]
        state, opener = find_state(directory, tag)
        out = _checked_export_directory(out, force)
        source = _model_source(directory, state, model, merge)
        with opener() as reader:
            if source is None:
                files = write_shards(out, reader.outgoing(export_dtype), parse_size(max_shard))
            else:
                from infinity.train.saved_model import describe, export_model

                saved = describe(source)
                files = export_model(
                    saved,
                    reader,
                    out,
                    dtype=export_dtype,
                    max_shard_bytes=parse_size(max_shard),
                    merge=merge,
                )
                if saved.tokenizer is None:
                    say("note: no tokenizer was found, so none is written (--model DIR names one)")
        weights = [path for path in files if path.suffix == ".safetensors"]
        count, nbytes = 0, 0
        for path in weights:
            with closing(SafetensorsFile(path)) as file:
                count += len(file.facts)
                nbytes += path.stat().st_size
        print(f"{count} tensors, {format_size(nbytes)}, in {len(weights)} file(s) in {out}")


def _model_source(directory: Path, state: Path, model: str | None, merge: bool) -> str | None:
    """Return the source to pass to `describe`; None to write weights only."""
    if model is not None and model != "none":
        return model
    description = None
    if model is None:
        from infinity.train.saved_model import find_description

        description = find_description(directory, state)
    if description is None and merge:
        raise ConfigError(
            "--merge needs to know which adapters were trained over which model",
            remedy="--model RUN_DIR names the directory of the run",
        )
    if description is None and model is None:
        say(
            "note: only weights are written, as their model is unknown; "
            "--model DIR names its config.json"
        )
    return None if description is None else str(description)


@checkpoint.command()
def prune(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Holds the checkpoints.")],
    keep: Annotated[
        int, typer.Option("--keep", metavar="N", help="Number of checkpoints to keep.", min=1)
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what would be removed.")
    ] = False,
) -> None:
    """Remove all but the last N checkpoints.

    For example: infinity checkpoint prune runs/a --keep 3 --dry-run

    Never removes the checkpoint that `latest` names, nor a directory that holds other files.
    """
    with command():
        root = checkpoint_root(directory.expanduser())
        removed = checkpoints.prune(root, keep, dry_run=dry_run)
        for entry in removed:
            print(f"{'would remove' if dry_run else 'removed'} {root / entry.tag}, ", end="")
            print(format_size(entry.nbytes))
        total = format_size(sum(entry.nbytes for entry in removed))
        print(f"{len(removed)} checkpoint(s), {total}", flush=True)


@checkpoint.command("import-deepspeed")
def import_deepspeed(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DS_DIR", help="The directory given to DeepSpeed's save_checkpoint."
        ),
    ],
    out: _Out,
    tag: Tag = None,
) -> None:
    """Convert a checkpoint of DeepSpeed ZeRO 1, 2 or 3.

    For example: infinity checkpoint import-deepspeed ds_runs/a runs/a

    Converts weights, fp32 masters, Adam's moments, frozen parameters and buffers; settings,
    schedules and random states are not converted. No code in the files is run. Exits with 0,
    or with 5 for files that are damaged or not understood.
    """
    with command():
        source, root = directory.expanduser().absolute(), out.expanduser().absolute()
        imported = import_zero(source, root, __version__, tag)
        moments = "with Adam's moments" if imported.moments else "without optimizer state"
        print(
            f"{imported.path}: {imported.parameters} parameters of step {imported.global_steps} "
            f"{moments}, from ZeRO {imported.stage} of {imported.ranks} rank(s)",
            flush=True,
        )


def _checked_export_directory(out: Path, force: bool) -> Path:
    """Return the resolved export directory; raise `ConfigError` if it must not be written.

    With `force` weights are replaced, but never a checkpoint or the directory of a run.
    """
    out = out.expanduser().absolute()
    if not out.parent.is_dir():
        raise ConfigError(f"{out.parent} is not a directory", remedy=f"mkdir -p {out.parent}")
    if (out / MANIFEST_NAME).exists():
        raise ConfigError(
            f"{out} is a checkpoint; the weights would replace its files",
            remedy="export to another directory",
        )
    if (out / RECORD_NAME).exists():
        raise ConfigError(
            f"{out} is the directory of a run, which holds nothing else",
            remedy="export to another directory",
        )
    if not force and holds_weights(out):
        raise ConfigError(
            f"{out} holds weights already", remedy="another directory, or --force replaces them"
        )
    return out

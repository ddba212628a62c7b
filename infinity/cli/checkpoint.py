"""`infinity checkpoint`: look at saved state, check it, export it, remove old, import others'."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infinity._version import __version__
from infinity.checkpoint.directory import find_tag, tags
from infinity.checkpoint.durable_reader import SCALES, DurableReader
from infinity.checkpoint.manifest import INDEX, LATEST_NAME, MANIFEST_NAME
from infinity.checkpoint.reader import CheckpointReader
from infinity.cli.terminal import Page, ProgressLine, command
from infinity.errors import CheckpointError, ConfigError, listed
from infinity.sizes import format_count, format_size
from infinity.storage.run_dir import RECORD_NAME, durable_records
from infinity.training.run_state import DurableWeights

if TYPE_CHECKING:
    import torch

    from infinity.checkpoint.reader import WeightSource


# What `infinity checkpoint inspect` shows.


_MAX_TAGS = 20


def report_of(root: Path, tag: str, reader: CheckpointReader) -> dict[str, Any]:
    """What is known without reading tensors, JSON-able; sizes in bytes."""
    manifest = reader.manifest
    streams: dict[str, dict[str, Any]] = {}
    for record in manifest.files:
        row = streams.setdefault(
            record.stream,
            {"files": 0, "nbytes": 0, "tensors": len(reader.names(record.stream))},
        )
        row["files"] += 1
        row["nbytes"] += record.nbytes
    written_s = os.stat(reader.directory / MANIFEST_NAME).st_mtime
    return {
        "infinity": __version__,
        "path": str(reader.directory),
        "tag": tag,
        "latest": find_tag(root, None),
        "tags": tags(root),
        "written": datetime.fromtimestamp(written_s, UTC).isoformat(timespec="seconds"),
        "engine_version": manifest.engine_version,
        "global_steps": manifest.global_steps,
        "precision": manifest.precision,
        "rule": manifest.rule,
        "moments": list(manifest.moments),
        "parameters": counted([p.shape for p in manifest.parameters]),
        "trained": counted([p.shape for p in manifest.parameters if p.trained]),
        "tied": sum(len(p.aliases) for p in manifest.parameters),
        "buffers": counted([b.shape for b in manifest.buffers]),
        "client_state": manifest.client_state,
        "streams": streams,
        "nbytes": sum(row["nbytes"] for row in streams.values()),
    }


def counted(shapes: list[tuple[int, ...]]) -> dict[str, int]:
    """How many tensors, and elements in them."""
    return {"tensors": len(shapes), "elements": sum(map(prod, shapes))}


def read_all(
    place: Path,
    opened: Callable[[], Any],
    total_of: Callable[[Any], int],
    said: Callable[[Any, int], str],
) -> bool:
    """Read every byte of what `opened` gives, and print what is wrong; whether it is sound.

    The reader is a context manager with `verify(seen)`. `said(reader, bytes)` is printed of what
    is sound.
    """
    problems: list[str] = []
    told = ""
    try:
        with opened() as reader, ProgressLine() as line:
            total = total_of(reader)
            line.begin(f"reading {place}", total)
            done = 0

            def seen(nbytes: int) -> None:
                nonlocal done
                done += nbytes
                line.advance(done)

            problems += reader.verify(seen)
            told = said(reader, total)
    except CheckpointError as error:
        problems.append(error.what)
    for problem in problems:
        print(problem)
    print(f"{place}: {f'damaged, {len(problems)} problem(s)' if problems else told}", flush=True)
    return not problems


def show_checkpoint(report: dict[str, Any]) -> None:
    """Print it."""
    page = Page()
    is_latest = ", the latest" if report["tag"] == report["latest"] else ""
    page.say(f"{report['path']}{is_latest}")
    page.say(f"written {report['written']} by infinity {report['engine_version']}")
    moments = ", ".join(report["moments"]) or "none"
    page.say(
        f"step {report['global_steps']}, {report['precision']}, {report['rule']}, "
        f"moments: {moments}"
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
    page.say()
    rows = [
        (
            name,
            "" if name == INDEX else str(row["tensors"]),
            str(row["files"]),
            format_size(row["nbytes"]),
        )
        for name, row in report["streams"].items()
    ]
    rows.append(("all", "", "", format_size(report["nbytes"])))
    page.table("Streams", ("stream", "tensors", "files", "size"), rows)
    others = [tag for tag in report["tags"] if tag != report["tag"]]
    if others:
        page.say()
        page.say(f"beside it: {listed(others, limit=_MAX_TAGS)}")


# `infinity checkpoint` for the directory of a durable run: its committed state, without a run.


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


checkpoint = typer.Typer(
    name="checkpoint",
    help="Look at checkpoints, verify, export and prune them, import those of DeepSpeed.",
    invoke_without_command=True,
    rich_markup_mode=None,
)

_Dir = Annotated[
    Path,
    typer.Argument(
        metavar="DIR",
        help="What was given to save_checkpoint, or a checkpoint in it; or the directory of a "
        "durable run, or an nvme_path that holds one.",
    ),
]
_Out = Annotated[Path, typer.Argument(metavar="OUT", help="A directory to write to.")]
_Tag = Annotated[
    str | None,
    typer.Option("--tag", metavar="TAG", help="Which checkpoint. Default: what `latest` names."),
]
_MaxShard = Annotated[
    str, typer.Option("--max-shard", metavar="SIZE", help="Largest file, but for larger tensors.")
]


@checkpoint.callback()
def _checkpoint(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@checkpoint.command()
def inspect(
    directory: _Dir,
    tag: _Tag = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Say what a checkpoint, or a durable run, holds, without reading tensors.

    For example: infinity checkpoint inspect runs/a --tag global_step100

    Exits with 0, or with 5 if it is damaged as far as can be seen without reading tensors.
    """
    with command():
        from infinity.checkpoint.reader import CheckpointReader

        pass
        pass

        if (run := durable_in(directory, tag)) is not None:
            inspect_durable(run, as_json=as_json)
            return
        root, found = _find(directory, tag)
        with CheckpointReader(root, found) as reader:
            report = report_of(root, found, reader)
        if as_json:
            print(json.dumps(report), flush=True)
        else:
            show_checkpoint(report)


@checkpoint.command()
def verify(
    directory: _Dir,
    tag: _Tag = None,
    every: Annotated[
        bool, typer.Option("--all", help="All checkpoints and durable runs in DIR.")
    ] = False,
) -> None:
    """Read every byte and hold it to its checksum.

    For example: infinity checkpoint verify runs/a --all

    Every damaged block is told, with its file and the tensors in it. Exits with 0 if all is sound,
    with 5 if anything is damaged. A durable run has checksums of its state if `io.verify` was on.
    """
    with command():
        from infinity.checkpoint.directory import tags

        pass

        if every:
            if tag is not None:
                raise ConfigError(
                    "--tag names one checkpoint, --all means all", remedy="one of both"
                )
            root = directory.expanduser()
            found, runs = tags(root), durable_runs(root)
            if not found and not runs:
                raise CheckpointError(f"{root} holds no checkpoint and no durable run")
        elif (run := durable_in(directory, tag)) is not None:
            root, found, runs = directory, [], [run]
        else:
            root, one = _find(directory, tag)
            found, runs = [one], []
        damaged = [one for one in found if not _verify(root, one)]
        damaged += [run.name for run in runs if not verify_durable(run)]
        if damaged:
            raise typer.Exit(CheckpointError.exit_code)


def _verify(root: Path, tag: str) -> bool:
    """Print what is wrong with a checkpoint; whether it is sound."""
    from infinity.checkpoint.reader import CheckpointReader

    pass
    from infinity.sizes import format_size

    return read_all(
        root / tag,
        lambda: CheckpointReader(root, tag),
        lambda reader: sum(record.nbytes for record in reader.manifest.files),
        lambda reader, total: f"sound, {format_size(total)}",
    )


@checkpoint.command()
def export(
    directory: _Dir,
    out: _Out,
    tag: _Tag = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="NAME",
            help="bf16, fp16 or fp32 (the exact masters). Default: as in training.",
        ),
    ] = None,
    max_shard: _MaxShard = "5GiB",
) -> None:
    """Write the weights as safetensors that Hugging Face loads.

    For example: infinity checkpoint export runs/a weights --dtype fp32

    One tensor at a time is in memory, every byte is checked. Tied weights are written once, under
    their first name; persistent buffers are included. Exits with 0, 5 if the checkpoint is damaged.
    """
    with command():
        from infinity.checkpoint.reader import CheckpointReader, CheckpointWeights
        from infinity.optim.moments import COMPUTE_DTYPES

        if dtype is not None and dtype not in COMPUTE_DTYPES:
            raise ConfigError(f"--dtype is {dtype!r}", remedy="--dtype bf16, fp16 or fp32")
        wanted = None if dtype is None else COMPUTE_DTYPES[dtype]
        if (run := durable_in(directory, tag)) is not None:
            with open_durable(run) as durable:
                _export(durable, wanted, _not_a_checkpoint(out), max_shard)
            return
        root, found = _find(directory, tag)
        with CheckpointReader(root, found) as reader:
            _export(CheckpointWeights(reader), wanted, _not_a_checkpoint(out), max_shard)


def _export(source: WeightSource, dtype: torch.dtype | None, out: Path, max_shard: str) -> None:
    from infinity.checkpoint.reader import outgoing
    from infinity.model.weight_files import write_shards
    from infinity.sizes import format_size, parse_size

    tensors = outgoing(source, dtype)
    files = write_shards(out, tensors, parse_size(max_shard))
    size = format_size(sum(tensor.nbytes for tensor in tensors))
    print(f"{len(tensors)} tensors, {size}, in {len(files)} file(s) in {out}", flush=True)


@checkpoint.command()
def prune(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Holds the checkpoints.")],
    keep: Annotated[int, typer.Option("--keep", metavar="N", help="So many stay.", min=1)],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be removed.")
    ] = False,
) -> None:
    """Remove all but the last N checkpoints.

    For example: infinity checkpoint prune runs/a --keep 3 --dry-run

    What `latest` names is never removed, nor a directory that holds anything but a checkpoint.
    """
    with command():
        from infinity.checkpoint import directory as checkpoints
        from infinity.sizes import format_size

        root = directory.expanduser()
        removed = checkpoints.prune(root, keep, dry_run=dry_run)
        for one in removed:
            print(f"{'would remove' if dry_run else 'removed'} {root / one.tag}, ", end="")
            print(format_size(one.nbytes))
        total = format_size(sum(one.nbytes for one in removed))
        print(f"{len(removed)} checkpoint(s), {total}", flush=True)


@checkpoint.command("import-deepspeed")
def import_deepspeed(
    directory: Annotated[
        Path, typer.Argument(metavar="DS_DIR", help="What DeepSpeed's save_checkpoint was given.")
    ],
    out: _Out,
    tag: _Tag = None,
) -> None:
    """Make a checkpoint of ours from one of DeepSpeed ZeRO 1, 2 or 3.

    For example: infinity checkpoint import-deepspeed ds_runs/a runs/a

    Weights, fp32 masters, Adam's moments, frozen parameters and buffers are taken over; settings,
    schedules and random states are not. No code in the files is run; what is not understood is
    refused. Exits with 0, or with 5 for what is damaged or not understood.
    """
    with command():
        from infinity._version import __version__
        from infinity.deepspeed.import_checkpoint import import_deepspeed

        source, root = directory.expanduser().absolute(), out.expanduser().absolute()
        done = import_deepspeed(source, root, __version__, tag)
        moments = "with Adam's moments" if done.moments else "without optimizer state"
        print(
            f"{done.path}: {done.parameters} parameters of step {done.global_steps} {moments}, "
            f"from ZeRO {done.stage} of {done.ranks} rank(s)",
            flush=True,
        )


def _find(directory: Path, tag: str | None) -> tuple[Path, str]:
    """Root and tag that are meant."""
    from infinity.checkpoint.directory import find_tag, tags
    from infinity.checkpoint.manifest import MANIFEST_NAME

    directory = directory.expanduser().absolute()
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory")
    if (directory / MANIFEST_NAME).exists():
        if tag is not None and tag != directory.name:
            raise ConfigError(
                f"{directory} is a checkpoint already",
                remedy=f"give {directory.parent} or no --tag",
            )
        return directory.parent, directory.name
    found = find_tag(directory, tag)
    if found is None:
        there = tags(directory)
        raise CheckpointError(
            f"{directory} has no file `latest`; {_listed(there)}",
            remedy=f"--tag {there[0]}" if there else "give the directory of save_checkpoint",
        )
    if tag is not None and not (directory / found).is_dir():
        raise CheckpointError(f"there is no checkpoint {found!r}; {_listed(tags(directory))}")
    return directory, found


def _listed(tags: Sequence[str]) -> str:
    there = "there are no checkpoints in it, and it holds no durable run"
    return f"there are {listed(tags, limit=5)}" if tags else there


def _not_a_checkpoint(out: Path) -> Path:
    """Weights are written over weights; what a checkpoint or a run holds must not be."""
    from infinity.checkpoint.manifest import MANIFEST_NAME
    from infinity.storage.run_dir import RECORD_NAME

    out = out.expanduser().absolute()
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
    return out

"""`infinity checkpoint`: look at saved state, check it, export it, remove old, import others'."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infinity.cli.ending import command
from infinity.errors import CheckpointError, ConfigError, listed

if TYPE_CHECKING:
    import torch

    from infinity.checkpoint.masters import WeightSource

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
        from infinity.cli.checkpoint_durable import durable_in, inspect_durable
        from infinity.cli.checkpoint_page import report_of, show_checkpoint

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
        from infinity.checkpoint.root import tags
        from infinity.cli.checkpoint_durable import durable_in, durable_runs, verify_durable

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
    from infinity.cli.checkpoint_page import read_all
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
        import torch

        from infinity.checkpoint.masters import CheckpointWeights
        from infinity.checkpoint.reader import CheckpointReader
        from infinity.cli.checkpoint_durable import durable_in, open_durable

        dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
        if dtype is not None and dtype not in dtypes:
            raise ConfigError(f"--dtype is {dtype!r}", remedy="--dtype bf16, fp16 or fp32")
        wanted = None if dtype is None else dtypes[dtype]
        if (run := durable_in(directory, tag)) is not None:
            with open_durable(run) as durable:
                _export(durable, wanted, _not_a_checkpoint(out), max_shard)
            return
        root, found = _find(directory, tag)
        with CheckpointReader(root, found) as reader:
            _export(CheckpointWeights(reader), wanted, _not_a_checkpoint(out), max_shard)


def _export(source: WeightSource, dtype: torch.dtype | None, out: Path, max_shard: str) -> None:
    from infinity.checkpoint.masters import outgoing
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
        from infinity.checkpoint import root as checkpoints
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
        from infinity import __version__
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
    from infinity.checkpoint.layout import MANIFEST_NAME
    from infinity.checkpoint.root import find_tag, tags

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
    from infinity.checkpoint.layout import MANIFEST_NAME
    from infinity.memory.scratch import RECORD_NAME

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

"""Lookup of saved state for a command: a checkpoint, a durable run, or the directory of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from infinity.checkpoint.directory import find_tag, tags
from infinity.checkpoint.durable_reader import DurableReader
from infinity.checkpoint.manifest import LATEST_NAME, MANIFEST_NAME
from infinity.checkpoint.reader import CheckpointReader, StateReader
from infinity.errors import CheckpointError, ConfigError, listed
from infinity.storage.run_dir import RECORD_NAME, directories_by_rank, durable_records
from infinity.train.directory import CHECKPOINTS, run_record, state_directories

StateOpener = Callable[[], StateReader]

Directory = Annotated[
    Path,
    typer.Argument(
        metavar="DIR",
        help="The directory given to save_checkpoint, or a checkpoint in it; a run_dir; or the "
        "directory of a durable run, or an nvme_path that holds one.",
    ),
]
Tag = Annotated[
    str | None,
    typer.Option("--tag", metavar="TAG", help="Which checkpoint. Default: what `latest` names."),
]


ModelSource = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="WHERE",
        help="A run_dir, or a directory or Hub id with the config.json and tokenizer of the model. "
        "Default: the run of the checkpoint, or a config.json in its directory.",
    ),
]


def find_state(directory: Path, tag: str | None) -> tuple[Path, StateOpener]:
    """Return the directory of a checkpoint or durable run, and a function that opens it.

    Args:
        directory: Argument of the command; see `Directory`.
        tag: Name of a checkpoint; None for the one that `latest` names, or a durable run.

    Raises:
        ConfigError: The directory does not exist, or holds several durable runs.
        CheckpointError: It holds no state, or not that of `tag`.
    """
    directory = checkpoint_root(directory.expanduser().absolute())
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory")
    if (directory / MANIFEST_NAME).exists():
        if tag is not None and tag != directory.name:
            raise ConfigError(
                f"{directory} is a checkpoint already",
                remedy=f"give {directory.parent} or no --tag",
            )
        return directory, partial(CheckpointReader, directory.parent, directory.name)
    if tag is None and (run := _durable_run_of(directory)) is not None:
        return run, partial(DurableReader, run, [run.parent])
    name = find_tag(directory, tag)
    if name is None:
        available = tags(directory)
        raise CheckpointError(
            f"{directory} has no file `latest`; {_listed(available)}",
            remedy=f"--tag {available[0]}"
            if available
            else "give a run_dir, or the directory of save_checkpoint",
        )
    if tag is not None and not (directory / name).is_dir():
        raise CheckpointError(f"there is no checkpoint {name!r}; {_listed(tags(directory))}")
    return directory / name, partial(CheckpointReader, directory, name)


def find_all_states(directory: Path) -> list[tuple[Path, StateOpener]]:
    """Return all checkpoints and durable runs of a directory, each as `find_state` returns it.

    Raises:
        CheckpointError: There are none.
    """
    root = checkpoint_root(directory.expanduser().absolute())
    states: list[tuple[Path, StateOpener]] = [
        (root / tag, partial(CheckpointReader, root, tag)) for tag in tags(root)
    ]
    states += [(run, partial(DurableReader, run, [root])) for run in durable_runs(root)]
    if not states:
        raise CheckpointError(f"{root} holds no checkpoint and no durable run")
    return states


def checkpoint_root(directory: Path) -> Path:
    """Return the directory of checkpoints below that of a run; `directory` if it is not one."""
    below = directory / CHECKPOINTS
    return below if below.is_dir() and not tags(directory) else directory


def _durable_run_of(directory: Path) -> Path | None:
    record = run_record(directory)
    if record is not None:
        roots = state_directories(record, directory)
        runs = durable_runs(roots[0]) if roots and roots[0].is_dir() else []
        if runs:
            return runs[0]
        reason = f"its state is not in {roots[0]}" if roots else "checkpoints/ does not exist"
        raise CheckpointError(f"the run in {directory} has no checkpoint yet", because=reason)
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
    """Return one directory for each durable run of an nvme_path, the oldest first.

    Runs of `infinity train` have a directory each below it. For a run of several ranks it is a
    directory of the first rank.
    """
    by_run: dict[object, Path] = {}
    directories = (path for path in root.iterdir() if path.is_dir()) if root.is_dir() else ()
    roots = sorted({*directories} - {*directories_by_rank(root).values()})
    rank_roots = [list(directories_by_rank(directory).values())[:1] for directory in (root, *roots)]
    for directory in dict.fromkeys((root, *roots, *chain(*rank_roots))):
        for path, record in durable_records(directory).items():
            by_run.setdefault(record.get("run", path), path)
    return list(by_run.values())


def _listed(tags: Sequence[str]) -> str:
    none = "there are no checkpoints in it, and it holds no durable run"
    return f"there are {listed(tags, limit=5)}" if tags else none

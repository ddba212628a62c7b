"""Lookup and validation of `checkpoint-N` folders of a Trainer with an engine.

`checkpoint-N/engine` is the checkpoint of the engine, which includes the schedule and the random
generators. It replaces optimizer.pt, scheduler.pt and rng_state.pth, and is loaded without
unpickling. The other files are written by `Trainer`.
"""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path

from infinity.checkpoint.manifest import MANIFEST_NAME
from infinity.errors import ConfigError, InfinityWarning

TAG = "engine"
STATE = "trainer_state.json"
_FOLDER = re.compile(r"checkpoint-(\d+)")


def has_engine(folder: str | os.PathLike[str]) -> bool:
    """Return True if the folder contains a complete checkpoint of an engine."""
    return (Path(folder) / TAG / MANIFEST_NAME).is_file()


def newest_complete_checkpoint(directory: str) -> str | None:
    """Return the newest complete `checkpoint-N` of an engine; None if there is no `checkpoint-N`.

    A crash during saving leaves a folder without its last file; such folders are skipped. Warns if
    newer folders contain weights only. Raises `ConfigError` if no folder is complete.
    """
    by_number = {
        int(match[1]): path
        for path in Path(directory).glob("checkpoint-*")
        if path.is_dir() and (match := _FOLDER.fullmatch(path.name))
    }
    folders = [by_number[number] for number in sorted(by_number, reverse=True)]
    weights_only = [p for p in folders if (p / STATE).is_file() and not (p / TAG).exists()]
    complete = next((p for p in folders if has_engine(p) and (p / STATE).is_file()), None)
    if complete is not None:
        newer = [p for p in weights_only if folders.index(p) < folders.index(complete)]
        if newer:
            warnings.warn(
                f"resuming from {complete}; {len(newer)} newer ones, up to {newer[0].name}, "
                "contain only weights (saved with save_only_model, or by another Trainer). To load "
                f"these, with new optimizer state: resume_from_checkpoint={str(newer[0])!r}",
                InfinityWarning,
                stacklevel=3,
            )
        return str(complete)
    if weights_only:
        weights = weights_only[0]
        raise ConfigError(
            f"resume_from_checkpoint=True: no complete checkpoint of an engine in {weights.parent}",
            because=f"{weights.name} contains only weights: saved with save_only_model, or by "
            "another Trainer",
            remedy=f"resume_from_checkpoint={str(weights)!r} loads its weights, with new optimizer "
            "state; or train() without it starts anew",
        )
    if folders:
        newest = folders[0]
        missing = STATE if has_engine(newest) else f"{TAG}/{MANIFEST_NAME}"
        raise ConfigError(
            f"resume_from_checkpoint=True: no complete checkpoint in {newest.parent}",
            because=f"{newest.name} has no {missing}: saving was interrupted",
            remedy=f"rm -r {newest}, and train() without resume_from_checkpoint: it starts anew",
        )
    return None


def check_resumable(folder: str) -> None:
    """Raise `ConfigError` if the folder is not a complete `checkpoint-N`."""
    if not Path(folder).is_dir():
        raise ConfigError(
            f"resume_from_checkpoint={folder!r} is no directory",
            remedy="the path of a checkpoint-N, or True for the newest in output_dir",
        )
    if not (Path(folder) / STATE).is_file():
        raise ConfigError(
            f"resume_from_checkpoint={folder!r} has no {STATE}",
            because="it is written last: a crash interrupted saving, or this is no checkpoint-N",
            remedy="True for the newest complete one in output_dir, or train() to start anew",
        )

"""What a Trainer's `checkpoint-N` holds of an engine, and how it comes back.

`checkpoint-N/engine` is the engine's checkpoint, with the schedule and the random generators in it:
it stands for optimizer.pt, scheduler.pt and rng_state.pth, and nothing of it is unpickled. The
other files are as `Trainer` writes them.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

from infinity.checkpoint.layout import MANIFEST_NAME
from infinity.engine import Engine
from infinity.errors import CheckpointError, ConfigError, InfinityWarning
from infinity.huggingface.trainer_data import DataNotes
from infinity.training.rng import capture_rng

TAG = "engine"
STATE = "trainer_state.json"
_FOLDER = re.compile(r"checkpoint-(\d+)")


class LoopState:
    """What the Trainer, not the engine, keeps of a run: the schedule, the random generators.

    Registered with the engine, so that it is in every checkpoint; `scheduler` is set when it is
    made.
    """

    def __init__(self, notes: DataNotes) -> None:
        self.scheduler: Any = None
        self.notes = notes

    def state_dict(self) -> dict[str, Any]:
        """The states now, as plain data."""
        scheduler = None if self.scheduler is None else self.scheduler.state_dict()
        return {"scheduler": scheduler, "rng": capture_rng(), "data": self.notes.last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them back: the schedule now, the generators when the data is where it was."""
        self.notes.resume(state["data"], state["rng"])
        if self.scheduler is not None and state["scheduler"] is not None:
            self.scheduler.load_state_dict(state["scheduler"])


def has_engine(folder: str | os.PathLike[str]) -> bool:
    """Whether the folder holds a checkpoint of an engine, complete."""
    return (Path(folder) / TAG / MANIFEST_NAME).is_file()


def save_engine(engine: Engine, folder: str) -> None:
    """Write `folder/engine`; returns when it is on stable storage.

    One that is there is of a run that went on from before this step, and goes: as Trainer does.
    """
    shutil.rmtree(Path(folder) / TAG, ignore_errors=True)
    engine.save_checkpoint(folder, TAG, save_latest=False, wait=True)


def load_engine(engine: Engine, folder: str) -> None:
    """Go on from `folder/engine`: same bits as without the break."""
    path, _ = engine.load_checkpoint(folder, TAG)
    if path is None:
        raise CheckpointError(f"there is no checkpoint of an engine in {folder}")


def newest_whole(directory: str) -> str | None:
    """The newest `checkpoint-N` of an engine that is complete; None where there is no folder.

    A crash while one is saved leaves a folder without its last file: such are passed over. Warns
    where newer ones hold weights only. Raises `ConfigError` where none of them is complete.
    """
    root = Path(directory)
    numbers = {int(m[1]): p for p in _folders(root) if (m := _FOLDER.fullmatch(p.name))}
    newer: list[Path] = []
    for number in sorted(numbers, reverse=True):
        folder = numbers[number]
        if has_engine(folder) and (folder / STATE).is_file():
            _warn_of_newer(folder, [path for path in newer if _weights_only(path)])
            return str(folder)
        newer.append(folder)
    if newer:
        raise _nothing_whole(newer)
    return None


def refuse_foreign(folder: str) -> None:
    """Raise for a folder from which nothing can be resumed."""
    if not Path(folder).is_dir():
        raise ConfigError(
            f"resume_from_checkpoint={folder!r} is no directory",
            remedy="the path of a checkpoint-N, or True for the newest in output_dir",
        )
    if not (Path(folder) / STATE).is_file():
        raise ConfigError(
            f"resume_from_checkpoint={folder!r} has no {STATE}",
            because="that is written last: a crash cut the saving short, or it is no checkpoint-N",
            remedy="True for the newest complete one in output_dir, or train() to start anew",
        )


def _folders(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []


def _weights_only(folder: Path) -> bool:
    return (folder / STATE).is_file() and not (folder / TAG).exists()


def _warn_of_newer(taken: Path, newer: list[Path]) -> None:
    if newer:
        warnings.warn(
            f"going on from {taken}; {len(newer)} newer ones, to {newer[0].name}, hold weights "
            "only (saved with save_only_model, or by another Trainer). To take these, with a new "
            f"optimizer: resume_from_checkpoint={str(newer[0])!r}",
            InfinityWarning,
            stacklevel=4,
        )


def _nothing_whole(folders: list[Path]) -> ConfigError:
    """For folders, newest first, of which none can be resumed as it was."""
    weights = next((folder for folder in folders if _weights_only(folder)), None)
    if weights is not None:
        return ConfigError(
            f"resume_from_checkpoint=True: no complete checkpoint of an engine in {weights.parent}",
            because=f"{weights.name} holds weights only: saved with save_only_model, or by another "
            "Trainer",
            remedy=f"resume_from_checkpoint={str(weights)!r} takes its weights, with a new "
            "optimizer; or train() without it starts anew",
        )
    newest = folders[0]
    missing = STATE if has_engine(newest) else f"{TAG}/{MANIFEST_NAME}"
    return ConfigError(
        f"resume_from_checkpoint=True: no complete checkpoint in {newest.parent}",
        because=f"{newest.name} has no {missing}: its saving was cut short",
        remedy=f"rm -r {newest}, and train() without resume_from_checkpoint: it starts anew",
    )

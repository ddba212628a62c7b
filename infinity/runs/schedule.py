"""The part of a learning rate schedule that comes from the number of steps of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infinity.checkpoint.layout import MANIFEST_NAME
from infinity.checkpoint.plain import decode
from infinity.checkpoint.reader import CheckpointReader
from infinity.config import Config
from infinity.errors import ConfigError

AUTO = "auto"  # in scheduler.params: the number of steps of the run


def with_schedule(engine: Config, steps: int) -> Config:
    """`auto` among the arguments of a schedule is the number of steps."""
    schedule = engine.scheduler
    if schedule is None or AUTO not in schedule.params.values():
        return engine
    params = {name: steps if v == AUTO else v for name, v in schedule.params.items()}
    return engine.model_copy(update={"scheduler": schedule.model_copy(update={"params": params})})


def check_schedule(engine: Config, steps: int, saved: Any, where: str) -> None:
    """Refuse to go on with a schedule that was made for another number of steps.

    `engine` is the configuration as it was given, `saved` the arguments of the schedule in
    `where`, by name. A schedule that has begun keeps its end, so steps beyond it would all be
    made at its last rate, which may be 0. Raises `ConfigError`.
    """
    if engine.scheduler is None or not isinstance(saved, Mapping):
        return
    for name, value in engine.scheduler.params.items():
        before = saved.get(name)
        if value != AUTO or not isinstance(before, int) or before == steps:
            continue
        key = f"engine.scheduler.params.{name}"
        raise ConfigError(
            f"the learning rate schedule of {where} is for {before} steps, and this run has "
            f"{steps}",
            because=f"{key}: auto is the number of steps, and a schedule that has begun keeps "
            "its end",
            remedy=f"keep training.steps={before}; or {key}={before}, so that the steps after "
            "it are made at the schedule's last rate; to train on later, give a new run the "
            "number of all its steps there",
        )


def check_schedule_of_checkpoint(engine: Config, steps: int, checkpoint: Path) -> None:
    """`check_schedule` for a checkpoint; one that is not ours has no schedule.

    Raises `ConfigError`, and `CheckpointError` for one that is damaged.
    """
    if engine.scheduler is None or not (checkpoint / MANIFEST_NAME).is_file():
        return
    with CheckpointReader(checkpoint.parent, checkpoint.name) as reader:
        run = decode(reader.manifest.run)
    if isinstance(run, dict):
        check_schedule(engine, steps, run.get("scheduler"), str(checkpoint))

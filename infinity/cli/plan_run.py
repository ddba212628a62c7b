"""`infinity plan` of a configuration for `infinity train`: it names the model and the work."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from infinity.errors import ConfigError

if TYPE_CHECKING:
    from infinity.config.schema import Config
    from infinity.model.shapes import Target
    from infinity.runs.settings import RunConfig


def find_run_config(text: str) -> RunConfig | None:
    """The configuration of a run in the file that `text` names; None if that is something else.

    Raises `ConfigError` if it is one with mistakes in it.
    """
    path = Path(text).expanduser()
    if path.suffix.lower() not in (".yaml", ".yml", ".json") or not path.is_file():
        return None
    from infinity.config.source import read_config_file
    from infinity.runs.settings import is_run_config, load_run_config

    try:
        raw = read_config_file(path)
    except ConfigError:
        return None  # whoever reads it as something else says what is wrong
    return load_run_config(path) if is_run_config(raw) else None


def engine_of(run: RunConfig) -> Config:
    """What the engine will be told."""
    from infinity.runs.settings import micro_batches

    training, length = run.training, run.data.sequence_length
    if training.tokens_per_step is None or length == "auto":
        return run.engine
    count = micro_batches(training.tokens_per_step, training.micro_batch, length)
    return run.engine.model_copy(update={"gradient_accumulation_steps": count})


def tokens_of(run: RunConfig) -> int:
    """Of a step, all micro-batches together; windows as long as the model sees where not said."""
    from infinity.runs.settings import DEFAULT_LENGTH

    training, length = run.training, run.data.sequence_length
    tokens = training.micro_batch * (DEFAULT_LENGTH if length == "auto" else length)
    return training.tokens_per_step or tokens * run.engine.gradient_accumulation_steps


def model_of(run: RunConfig) -> Target:
    """The model that the configuration names, on meta.

    Raises `ConfigError` where it is not on this machine.
    """
    path = run.model.path
    if path is not None and not Path(path).expanduser().is_dir():
        raise ConfigError(
            f"model.path is {path}, which is no directory here",
            remedy="--model 7b, 13b or 70b plans for one like it; or --model with a config.json",
        )
    from infinity.runs.model import target_on_meta

    return target_on_meta(run)
